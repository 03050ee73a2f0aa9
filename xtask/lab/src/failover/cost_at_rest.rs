//! What agents cost while nothing happens, without failover and with it: processor time, and no write.

use std::{
    collections::BTreeMap,
    fs,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use kilo_common::{
    map_table::{MAPS, Writer, name},
    maps::LAYOUT_VERSION,
};
use nix::{
    errno::Errno,
    sched::{CpuSet, sched_setaffinity},
    unistd::Pid,
};

use super::{FIT, breaking, state};
use crate::{Lab, counters, deployed_state, faults::nodes, matrix, options::LabOptions, wait};

/// Agents are at rest once they have written nothing for so long; what a start costs is not counted.
const QUIET: Duration = Duration::from_secs(30);
/// How long that may take after a boot: meanwhile the VPN peer comes back, and is new to everybody.
const AT_REST: Duration = Duration::from_secs(180);
/// Name of failover's threads.
const THREAD: &str = "failover";
/// Metric of an agent's writes to its host in reconciles.
const WRITES: &str = "kilo_writes_total";
/// How much more an agent may take with failover than without, in percent of a core.
const WANTED: f64 = 0.3;
/// How much the figures of two agents that do the same differ over [`SHORTEST`]: without failover they take
/// 0.09 to 0.12 %.
const MARGIN: f64 = 0.03;
/// Shortest measurement, for which [`MARGIN`] holds.
const SHORTEST: Duration = Duration::from_secs(60);
/// Stand-bys of each location, as the command line gives them.
const STAND_BYS: u8 = 1;
/// The processor on which all agents run.
const AGENTS: usize = 0;
/// Mask of the processors that receive.
const RECEIVES: u32 = 0b10;

/// CPU time of an agent, and of its failover threads.
#[derive(Clone, Copy, Default)]
struct Spent {
    whole: Duration,
    failover: Duration,
}

/// Reads the schedstat of each thread; threads that end meanwhile are left out.
fn spent(pid: u32) -> Result<Spent> {
    let mut spent = Spent::default();
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let task = task?.path();
        let Ok(figures) = fs::read_to_string(task.join("schedstat")) else { continue };
        let time = figures.split_whitespace().next().context("schedstat")?.parse()?;
        let time = Duration::from_nanos(time);
        spent.whole += time;
        if fs::read_to_string(task.join("comm")).is_ok_and(|name| name.trim() == THREAD) {
            spent.failover += time;
        }
    }
    Ok(spent)
}

/// CPU time and writes of every agent so far.
fn all(lab: &Lab) -> Result<Vec<(Spent, u64)>> {
    let one = |name: &String| {
        let pid = lab.agents.pid(name).with_context(|| format!("no agent runs on {name}"))?;
        let metrics = counters::scrape(&lab.network.node(name)?.netns)?;
        let writes = metrics.get(WRITES).copied().with_context(|| format!("{name} has no {WRITES}"))?;
        Ok((spent(pid)?, writes))
    };
    nodes::names(lab).iter().map(one).collect()
}

/// What the failover thread of each agent takes of one core, in percent, over this time.
pub(super) fn failover(lab: &Lab, time: Duration) -> Result<Vec<(String, f64)>> {
    let (before, began) = (all(lab)?, Instant::now());
    wait::time_passes(time, "what agents cost is counted");
    let after = all(lab)?;
    let seconds = began.elapsed().as_secs_f64();
    let part = |before: &Spent, after: &Spent| {
        100.0 * after.failover.saturating_sub(before.failover).as_secs_f64() / seconds
    };
    let pairs = nodes::names(lab).into_iter().zip(before.iter().zip(&after));
    Ok(pairs.map(|(name, ((before, _), (after, _)))| (name, part(before, after))).collect())
}

/// Emulates hosts with their own processors, where what others do with a packet is not charged to the agent
/// that sent it: all agents run on one processor, and what has crossed a link is received on another one.
fn receive_on_another_processor(lab: &Lab) -> Result<()> {
    ensure!(std::thread::available_parallelism()?.get() > 1, "what others receive needs a second processor");
    // A sysfs shows the interfaces of the namespace that mounted it.
    let receive = format!(
        "mount -t sysfs sys /mnt; for queue in /mnt/class/net/*/queues/rx-0/rps_cpus; do echo {RECEIVES:x} > $queue; done"
    );
    for netns in lab.network.namespaces() {
        netns.sh(&format!("unshare --mount sh -euc '{receive}'"))?;
    }
    let mut agents = CpuSet::new();
    agents.set(AGENTS)?;
    for name in nodes::names(lab) {
        let pid = lab.agents.pid(&name).with_context(|| format!("no agent runs on {name}"))?;
        for task in fs::read_dir(format!("/proc/{pid}/task"))? {
            let id = task?.file_name().to_string_lossy().parse()?;
            match sched_setaffinity(Pid::from_raw(id), &agents) {
                // The thread may have ended.
                Ok(()) | Err(Errno::ESRCH) => {}
                Err(error) => return Err(error).context("cannot choose the agents' processor"),
            }
        }
    }
    Ok(())
}

/// Present content of what agents write besides the host's routes and rules: their WireGuard device, the maps
/// that they fill and no packet changes, and what they publish, except for heartbeats. The failover thread
/// writes the first two outside of reconciles.
fn written(lab: &Lab) -> Result<BTreeMap<String, String>> {
    const WIREGUARD: &str = "for what in listen-port peers allowed-ips endpoints persistent-keepalive preshared-keys; do \
                             wg show kilo0 $what; done";
    // `direct_v4` says nothing that `prefix_v4` does not.
    let planned = MAPS.iter().filter(|map| map.writer == Writer::Plan && map.name != name::DIRECT_V4);
    let planned: Vec<_> = planned.map(|map| map.name).collect();
    let maps = format!(
        "for map in {}; do bpftool map dump pinned /sys/fs/bpf/kilo/v{LAYOUT_VERSION}/$map; done",
        planned.join(" ")
    );
    let mut written = BTreeMap::new();
    for node in &lab.network.nodes {
        let name = node.name();
        written.insert(format!("the WireGuard device of {name}"), node.netns.sh(WIREGUARD)?);
        written.insert(format!("the maps of {name}"), node.netns.sh(&maps)?);
        let path = lab.agents.cluster().join(format!("{name}{}", breaking::PUBLISHED));
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let is_heartbeat = |line: &&str| ["/last-seen", "/heartbeat"].iter().any(|part| line.contains(part));
        let lines: Vec<_> = text.lines().filter(|line| !is_heartbeat(line)).collect();
        written.insert(format!("what {name} has published"), lines.join("\n"));
    }
    Ok(written)
}

/// Waits until every node has the role that Kilo's rule gives it, and no agent has anything left to write.
fn at_rest(lab: &Lab, is_on: bool) -> Result<()> {
    if is_on {
        // Of nodes that boot at once a stand-by may lead first, and gives leadership back after a minute.
        state::in_place(lab, &[], STAND_BYS, FIT)?;
    }
    // What the VPN peer sends first goes where its leaders were before they booted.
    matrix::settle(&lab.network, AT_REST)?;
    wait::settled("what agents have written to their hosts", AT_REST, QUIET, || {
        Ok(all(lab)?.into_iter().map(|(_, writes)| writes).collect::<Vec<_>>())
    })
    .map(drop)
}

/// Prints and returns each agent's CPU time while nothing happens, in percent of a core, and what was written
/// meanwhile.
fn of_mode(lab: &mut Lab, mode: &str, time: Duration) -> Result<(Vec<f64>, Vec<String>)> {
    lab.agents.set_flag("--failover", mode);
    // Of nodes that boot at once a stand-by may lead first.
    lab.caused(&[deployed_state::CHANGE]);
    breaking::reboot_all(lab)?;
    receive_on_another_processor(lab)?;
    at_rest(lab, mode != "off")?;
    let (there, changes) = (written(lab)?, state::changes(lab));
    let (before, began) = (all(lab)?, Instant::now());
    wait::time_passes(time, "what agents cost is counted");
    let after = all(lab)?;
    let part = |time: Duration| 100.0 * time.as_secs_f64() / began.elapsed().as_secs_f64();
    let (mut costs, mut wrote) = (Vec::new(), Vec::new());
    for (name, (before, after)) in nodes::names(lab).iter().zip(before.iter().zip(&after)) {
        let (whole, writes) = (part(after.0.whole.saturating_sub(before.0.whole)), after.1 - before.1);
        println!(
            "{mode:10}{name:6}{:>10}{whole:>10.3} %{:>8.3} %  {writes}",
            state::role(lab, name),
            part(after.0.failover.saturating_sub(before.0.failover)),
        );
        costs.push(whole);
        wrote.extend((writes > 0).then(|| format!("{mode}: {name} wrote to its host, {writes} times")));
    }
    let now = written(lab)?;
    let differs = |(what, text): &(&String, &String)| now.get(*what) != Some(*text);
    wrote.extend(there.iter().filter(differs).map(|(what, _)| format!("{mode}: {what} is not what it was")));
    let switches = state::changes(lab).saturating_sub(changes);
    wrote.extend((switches > 0).then(|| format!("{mode}: the leader changed {switches} times")));
    Ok((costs, wrote))
}

/// Pure: agents that take more with failover than they may, and by how much more than without.
fn too_much(names: &[String], without: &[f64], with: &[f64]) -> Vec<String> {
    let more =
        names.iter().zip(without.iter().zip(with)).map(|(name, (without, with))| (name, with - without));
    let beyond = more.filter(|(_, more)| *more > WANTED + MARGIN);
    beyond
        .map(|(name, more)| {
            format!(
                "{name}: {more:.3} % of a core more with failover, and {WANTED} % are wanted (± {MARGIN} %)"
            )
        })
        .collect()
}

/// Measures agents without and with failover, and prints both for each node.
///
/// # Errors
/// When failover costs more than it may, anything was written although nothing happened, or agents are not well.
pub fn measure(args: &LabOptions, time: Duration) -> Result<()> {
    ensure!(
        time >= SHORTEST,
        "--rest measures {} s at least, or figures differ by chance",
        SHORTEST.as_secs()
    );
    let mut lab = Lab::up(args, None)?;
    println!("{:10}{:6}{:>10}{:>12}{:>10}  of one core; writes", "failover", "node", "role", "agent", THREAD);
    let (without, wrote) = of_mode(&mut lab, "off", time)?;
    let (with, wrote_too) = of_mode(&mut lab, "auto", time)?;
    let names = nodes::names(&lab);
    for (name, (without, with)) in names.iter().zip(without.iter().zip(&with)) {
        println!("{name}: {:+.3} % of a core with failover", with - without);
    }
    let mut problems = [wrote, wrote_too, too_much(&names, &without, &with)].concat();
    problems.extend(deployed_state::as_deployed(&mut lab).err().map(|error| format!("{error:#}")));
    ensure!(
        problems.is_empty(),
        "agents are not at rest as they should be:\n    {}",
        problems.join("\n    ")
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_takes_more_than_is_wanted_and_chance_may_add_is_named() {
        let names = ["a1", "a2", "a3"].map(str::to_owned);
        let found = too_much(&names, &[0.1, 0.1, 0.5], &[0.42, 0.44, 0.51]);
        assert_eq!(found, ["a2: 0.340 % of a core more with failover, and 0.3 % are wanted (± 0.03 %)"]);
    }
}

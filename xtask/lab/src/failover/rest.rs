//! What agents cost while nothing happens, without failover and with it.

use std::{
    fs,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use nix::{
    errno::Errno,
    sched::{CpuSet, sched_setaffinity},
    unistd::Pid,
};

use super::{breaking, state};
use crate::{Lab, counters, faults::nodes, wait};

/// How long an agent may take to begin, and to be at rest.
const BEGINS: Duration = Duration::from_secs(30);
/// Threads of failover have this name.
const THREAD: &str = "failover";
/// What an agent writes to the host: the VPN peer may come back meanwhile, and is somebody new.
const WRITES: &str = "kilo_writes_total";
/// The processor of all agents.
const AGENTS: usize = 0;
/// Mask of the processors that receive.
const RECEIVES: u32 = 0b10;

/// CPU time of an agent, and of the threads of it that failover has.
#[derive(Clone, Copy, Default)]
struct Spent {
    whole: Duration,
    failover: Duration,
}

/// Reads what the scheduler says of each thread; one that ends meanwhile is left out.
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
        let writes = counters::scrape(&lab.network.node(name)?.netns)?.get(WRITES).copied().unwrap_or(0);
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

/// Hosts have processors of their own: what others do with a packet is not charged to the agent that sent it. All
/// agents run on one processor, and what has crossed a link is received on another one.
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
                // Or it has ended.
                Ok(()) | Err(Errno::ESRCH) => {}
                Err(error) => return Err(error).context("cannot choose the agents' processor"),
            }
        }
    }
    Ok(())
}

/// Prints both for each node.
pub fn measure(lab: &mut Lab, time: Duration) -> Result<()> {
    println!("{:10}{:6}{:>10}{:>12}{:>10}  of one core; writes", "failover", "node", "role", "agent", THREAD);
    for mode in ["off", "auto"] {
        lab.agents.set_flag("--failover", mode);
        breaking::reboot_all(lab)?;
        receive_on_another_processor(lab)?;
        wait::time_passes(BEGINS, "what a start costs is not counted");
        let (before, began) = (all(lab)?, Instant::now());
        wait::time_passes(time, "what agents cost is counted");
        let after = all(lab)?;
        let part = |time: Duration| 100.0 * time.as_secs_f64() / began.elapsed().as_secs_f64();
        for (name, (before, after)) in nodes::names(lab).iter().zip(before.iter().zip(&after)) {
            println!(
                "{mode:10}{name:6}{:>10}{:>10.3} %{:>8.3} %  {}",
                state::role(lab, name),
                part(after.0.whole.saturating_sub(before.0.whole)),
                part(after.0.failover.saturating_sub(before.0.failover)),
                after.1 - before.1
            );
        }
    }
    Ok(())
}

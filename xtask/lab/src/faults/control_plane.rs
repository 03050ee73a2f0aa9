//! The data path without its control plane: agents that are upgraded, dead or have wrong clocks, a cluster
//! that is away, and dead nodes.

use std::{
    fs,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::Signal;

use super::{
    nodes::{leads, metric, names, off_by, stop_and_start},
    soak::reachability,
};
use crate::{
    Lab, agents, counters,
    deployed_state::{LEADS, NO_NODE},
    wait::{self, until},
};

/// How long the cluster is away, in seconds.
static AWAY: AtomicU64 = AtomicU64::new(10);
/// How long agents are dead and a node reboots, in seconds.
static DEAD: AtomicU64 = AtomicU64::new(10);

/// Sets both lengths.
pub fn set_length(time: Duration) {
    AWAY.store(time.as_secs(), Ordering::Relaxed);
    DEAD.store(time.as_secs(), Ordering::Relaxed);
}

fn length(of: &AtomicU64) -> Duration {
    Duration::from_secs(of.load(Ordering::Relaxed))
}

/// Maps of layout 2 that have another shape today, as `bpftool map create` makes them.
const LAYOUT_2: &str = "
    node_v4 type hash key 4 value 8 entries 1024
    node_v6 type hash key 16 value 8 entries 1024
    nat_v4 type lru_hash key 16 value 16 entries 131072
    masq_src type lpm_trie key 8 value 4 entries 4096 flags 1
    masq_dst type lpm_trie key 8 value 4 entries 4096 flags 1";

/// What an agent of layout 2 leaves: its maps, used by the programs on the hooks.
const AS_LAYOUT_2: &str = "
    cd /sys/fs/bpf/kilo
    test -e v2 || mv v[0-9]* v2
    while read -r name rest; do
        test -n \"$name\" || continue
        rm -f v2/$name
        bpftool map create /sys/fs/bpf/kilo/v2/$name $rest name $name
    done";

pub(crate) fn upgrade(lab: &mut Lab) -> Result<String> {
    let all = names(lab);
    for name in &all {
        lab.agents.stop(name, Signal::SIGTERM)?;
    }
    for node in &lab.network.nodes {
        node.netns.sh(&format!("{AS_LAYOUT_2} <<'MAPS'{LAYOUT_2}\nMAPS"))?;
    }
    wait::fault_lasts(Duration::from_secs(1));
    for name in &all {
        let node = lab.network.node(name)?.clone();
        lab.agents.start(&node)?;
    }
    lab.agents.wait_until_ready(&lab.network, Duration::from_secs(60))?;
    until("the maps of layout 2 are gone", Duration::from_secs(20), || {
        let there = lab.network.nodes.iter().map(|node| node.netns.sh("ls /sys/fs/bpf/kilo"));
        Ok(!there.collect::<Result<Vec<_>>>()?.iter().any(|text| text.lines().any(|line| line == "v2")))
    })?;
    Ok(format!("{} agents found v2, left only their own", all.len()))
}

/// Renames the cluster's directory while `run` runs.
fn while_away<T>(lab: &mut Lab, run: impl FnOnce(&mut Lab) -> Result<T>) -> Result<T> {
    let cluster = lab.agents.cluster();
    let away = cluster.with_file_name("cluster-away");
    // Each agent writes its own file there.
    lab.caused(&["--backend-dir", ".kilo.yaml: No such file"]);
    fs::rename(&cluster, &away).context("the cluster goes away")?;
    let result = run(lab);
    fs::rename(&away, &cluster).context("the cluster comes back")?;
    result
}

pub(super) fn cluster_away(lab: &mut Lab) -> Result<String> {
    let leaders =
        |lab: &Lab| -> Result<Vec<bool>> { names(lab).iter().map(|name| leads(lab, name)).collect() };
    let before = leaders(lab)?;
    let time = length(&AWAY);
    while_away(lab, |lab| {
        wait::fault_lasts(time);
        ensure!(leaders(lab)? == before, "somebody else leads");
        lab.agents.all_run()
    })?;
    lab.agents.wait_until_ready(&lab.network, Duration::from_secs(60))?;
    ensure!(leaders(lab)? == before, "somebody else leads since it is back");
    Ok(format!("away for {} s, the same nodes lead", time.as_secs()))
}

pub(super) fn clock_is_wrong(lab: &mut Lab) -> Result<String> {
    let node = lab.network.node("a1")?.clone();
    let mut seen = Vec::new();
    for clock in [3_600_i64, -3_600] {
        lab.agents.stop("a1", Signal::SIGTERM)?;
        lab.agents.start_at(&node, &format!("{clock:+}"))?;
        agents::wait_healthy(&node.netns, Duration::from_secs(30))?;
        lab.agents.wait_until_ready(&lab.network, Duration::from_secs(60))?;
        let what = format!("with its clock at {clock} s a1 leads");
        wait::stays(&what, Duration::from_secs(3), || Ok(leads(lab, "a1")? && !leads(lab, "a2")?))?;
        let off = off_by(lab, "a1")?;
        ensure!((off - clock).abs() < 60, "its clock is off by {off} s instead of {clock:+} s");
        seen.push(off);
    }
    stop_and_start(lab, &["a1".to_owned()], Signal::SIGTERM, Duration::ZERO)?;
    Ok(format!("its clock was off by {:+} s and then by {:+} s; a1 leads all the time", seen[0], seen[1]))
}

/// Removes the leader's Node object, and restores it.
pub(super) fn leader_returns(lab: &mut Lab) -> Result<String> {
    lab.caused(&[NO_NODE, LEADS]);
    let file = lab.agents.cluster().join("node-a1.yaml");
    let aside = lab.agents.cluster().with_file_name("node-a1.yaml");
    let changes = |lab: &Lab| -> Result<u64> {
        let status = counters::status(&lab.network.node("a3")?.netns)?;
        let locations = status["locations"].as_array().context("no locations in /status")?;
        let here = locations.iter().find(|location| location["name"] == "location:site-a");
        let here = here.context("no location of a1 in /status")?;
        here["changes"].as_u64().with_context(|| format!("no changes of the leader in /status: {here}"))
    };
    let before = changes(lab)?;
    lab.removes("a1");
    fs::rename(&file, &aside)?;
    let gone = until("a2 leads", Duration::from_secs(20), || leads(lab, "a2"));
    wait::fault_lasts(Duration::from_secs(8));
    fs::rename(&aside, &file)?;
    gone?;
    let took =
        until("a1 leads again", Duration::from_secs(20), || Ok(leads(lab, "a1")? && !leads(lab, "a2")?))?;
    lab.agents.wait_until_ready(&lab.network, Duration::from_secs(60))?;
    wait::time_passes(Duration::from_secs(5), "changes of the leader are counted");
    let changed = changes(lab)? - before;
    ensure!(changed <= 2, "the leader changed {changed} times: it flaps");
    Ok(format!("a1 led again after {} ms, {changed} changes of the leader in all", took.as_millis()))
}

/// Cuts the power: no process, no link. The objects stay.
pub(super) fn location_dies(lab: &mut Lab) -> Result<String> {
    let dead = ["b1", "b2"];
    for name in dead {
        lab.agents.stop(name, Signal::SIGKILL)?;
        lab.network
            .node(name)?
            .netns
            .sh("for d in eth0 eth1; do ip link set $d down 2>/dev/null || true; done")?;
    }
    let gone = until("the location is declared dead", Duration::from_secs(150), || {
        Ok(metric(lab, "a2", "kilo_nodes")? == 3)
    });
    wait::fault_lasts(Duration::from_secs(1));
    lab.nothing_in_clear().context("since it is gone")?;
    let status = lab.agents.kgctl(&["status"]);
    for name in dead {
        let node = lab.network.node(name)?.clone();
        node.netns.sh("for d in eth0 eth1; do ip link set $d up 2>/dev/null || true; done")?;
        let gateway = if node.public.is_some() { "192.0.2.1".to_owned() } else { node.gateway.to_string() };
        node.netns.sh(&format!("ip route replace default via {gateway}"))?;
        lab.agents.start(&node)?;
    }
    let took = gone?;
    lab.agents.wait_until_ready(&lab.network, Duration::from_secs(60))?;
    let said = status?
        .lines()
        .filter(|line| line.contains("b1") || line.contains("b2"))
        .collect::<Vec<_>>()
        .join("; ");
    Ok(format!("declared dead after {} s; kgctl status: {said}", took.as_secs()))
}

/// A node that boots has no pods yet; nobody would steer what they and the node itself send.
pub(crate) const NO_PODS: &str = "nft 'table inet no-pods { chain pods { type filter hook prerouting priority -300; \
                       iifname kube-bridge drop; }; chain own { type filter hook output priority -300; \
                       udp dport 7007 drop; }; }'";

/// Lets pods start, as the kubelet does once the agent has published the CNI configuration.
pub(crate) const PODS_AGAIN: &str = "nft delete table inet no-pods";

/// Leaves a node as after a reboot, except for its links: nothing of ours is in the kernel.
pub(crate) const REBOOT: &str = "
    rm -rf /sys/fs/bpf/kilo
    for d in eth0 kilo0; do tc qdisc del dev $d clsact 2>/dev/null || true; done
    ip link delete kilo0 2>/dev/null || true
    ip -o link | grep -o 'kilo-[a-z0-9]*' | sort -u | while read -r d; do ip link delete $d 2>/dev/null || true; done
    for f in -4 -6; do
        ip $f rule flush protocol 107 2>/dev/null || true
        ip $f route flush table all proto 107 2>/dev/null || true
    done";

pub(super) fn on_their_own(lab: &mut Lab) -> Result<String> {
    let all = names(lab);
    let time = length(&DEAD);
    let said = while_away(lab, |lab| {
        for name in &all {
            lab.agents.stop(name, Signal::SIGKILL)?;
        }
        let rebooted = lab.network.node("a3")?.clone();
        rebooted.netns.sh(NO_PODS)?;
        rebooted.netns.sh(REBOOT)?;
        let left =
            rebooted.netns.sh("ip route show proto 107; (ls /sys/fs/bpf; ip -o link) | grep kilo || true")?;
        ensure!(left.is_empty(), "a3 still has:\n{left}");
        // It has no last good topology: files are there at every start.
        lab.agents.start(&rebooted)?;
        let others = |missing: &&String| !missing.contains("a3");
        let (mut rounds, mut asked, began) = (0, 0, Instant::now());
        while began.elapsed() < time {
            let mut round = reachability::round(&lab.network);
            if round.missing.iter().any(|missing| others(&missing)) {
                // A loss caused by a busy machine hardly repeats.
                round = reachability::round(&lab.network);
            }
            let missing: Vec<_> = round.missing.iter().filter(|missing| others(missing)).collect();
            ensure!(missing.is_empty(), "new flows fail after {} s: {missing:?}", began.elapsed().as_secs());
            rounds += 1;
            asked += round.asked - round.missing.len();
            wait::pace(Duration::from_secs(1).saturating_sub(round.began.elapsed()));
        }
        ensure!(lab.agents.all_run().is_err(), "the agent of a3 runs without a cluster");
        Ok(format!("for {} s; {rounds} looks, {asked} new flows answered", time.as_secs()))
    });
    if lab.agents.all_run().is_err() {
        lab.agents.forget("a3");
    }
    for name in &all {
        if lab.agents.pid(name).is_none() {
            let node = lab.network.node(name)?.clone();
            lab.agents.start(&node)?;
        }
    }
    lab.agents.wait_until_ready(&lab.network, Duration::from_secs(60))?;
    lab.network.node("a3")?.netns.sh(PODS_AGAIN)?;
    said
}

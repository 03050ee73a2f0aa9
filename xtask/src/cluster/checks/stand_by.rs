//! A leader whose machine loses power, or is drained, under a Deployment with Services.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use super::{
    agents::metric,
    both,
    change::{Expected, Why},
    flows::{Flows, Measured},
    never_in_clear,
};
use crate::{
    cluster::{Cluster, deploy, node::Node, until},
    lab::wait,
};

/// Longest accepted time without a reply after a power cut.
const ACCEPTED: Duration = Duration::from_secs(1);
/// Datagrams that a flow may lose in a planned change: two are 10 ms.
const PLANNED: u64 = 2;

/// This metric is 1 on the node that carries its location's packets.
const LEADS: &str = "kilo_failover_role{role=\"leader\"}";

/// The first location's leader, which also runs the API server, loses power: the node beside it keeps
/// talking to the other location. Metrics, status, log and Event report the change.
pub fn leader_dies(cluster: &Cluster) -> Result<String> {
    with_failover(cluster, |leader, stand_by| never_in_clear(|| power_is_cut(cluster, leader, stand_by)))
}

fn power_is_cut(cluster: &Cluster, leader: &Node, stand_by: &Node) -> Result<String> {
    let change = Expected::new(cluster, leader, stand_by, Why::Lost)?;
    let flows = flows(cluster, leader, stand_by)?;
    let mut shown = Ok(String::new());
    let measured = cut_power(cluster, leader, flows, || {
        leads(stand_by)?;
        // Failing to show it must not keep its cost from being measured.
        shown = change.await_shown();
        Ok(())
    })?;
    deploy::wait_rolled_out(cluster, "kilo", 180)?;
    let figures = lasted(&measured, ACCEPTED)?;
    Ok(format!("{figures}; {}; {}", shown?, change.await_reported()?))
}

/// The same node is drained, as before maintenance. Metrics, status, log and Event report the change.
pub fn leader_is_drained(cluster: &Cluster) -> Result<String> {
    with_failover(cluster, |leader, stand_by| {
        let change = Expected::new(cluster, leader, stand_by, Why::Cordoned)?;
        let flows = flows(cluster, leader, stand_by)?;
        let drain = ["drain", leader.name(), "--ignore-daemonsets", "--force", "--timeout=60s"];
        let drained = cluster.kubectl(&drain).and_then(|_| leads(stand_by));
        wait::time_passes(Duration::from_secs(2), "what follows the change is counted, too");
        let measured = flows.measure();
        let figures = measured.and_then(|measured| measured.all(|_, figures| figures.lost <= PLANNED));
        // The node leads again a minute after it is uncordoned.
        let seen = drained.and_then(|()| Ok((change.await_shown()?, change.await_reported()?)));
        let rollout = ["rollout", "status", "deployment/echo", "--timeout=60s"];
        let uncordoned =
            cluster.kubectl(&["uncordon", leader.name()]).and_then(|_| cluster.kubectl(&rollout));
        let figures = both(figures, uncordoned.map(drop))?;
        let (shown, reported) = seen?;
        Ok(format!("{figures}; {shown}; {reported}"))
    })
}

/// Runs `code` with the first location's leader and the node beside it, while agents have failover.
fn with_failover(cluster: &Cluster, code: impl FnOnce(&Node, &Node) -> Result<String>) -> Result<String> {
    let leader = cluster.first();
    let is_beside = |node: &&Node| node.site.letter == leader.site.letter && node.name() != leader.name();
    let stand_by = cluster.nodes.iter().find(is_beside).context("no other node there")?;
    deploy::add_argument(cluster, "--failover=auto")?;
    // The node that led without failover continues, and gives leadership back after a minute.
    let leads_again = becomes(leader, LEADS, 150);
    let result = leads_again
        .and_then(|()| await_fit(stand_by))
        .and_then(|()| await_idle())
        .and_then(|()| code(leader, stand_by));
    let put_back = deploy::apply_file(cluster, deploy::manifest_name())
        .and_then(|()| deploy::wait_rolled_out(cluster, "kilo", 180));
    both(result, put_back)
}

/// Waits, for at most a minute, until the work of a rollout is over: all nodes share this machine's
/// processors, and packets wait in a WireGuard process that gets none. A planned change loses those.
fn await_idle() -> Result<()> {
    /// Idle and total ticks of the processors since boot (`man 5 proc_stat`).
    fn ticks() -> Result<(u64, u64)> {
        let stat = std::fs::read_to_string("/proc/stat")?;
        let first = stat.lines().next().context("/proc/stat is empty")?;
        let ticks: Vec<u64> = first.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        Ok((
            *ticks.get(3).context("/proc/stat does not say how long the processors were idle")?,
            ticks.iter().sum(),
        ))
    }
    let mut before = ticks()?;
    let mut seconds = 0;
    for _ in 0..60 {
        wait::time_passes(Duration::from_secs(1), "how busy the processors are is measured");
        let now = ticks()?;
        let is_idle = (now.0 - before.0) * 5 >= (now.1 - before.1) * 4;
        before = now;
        seconds = if is_idle { seconds + 1 } else { 0 };
        if seconds == 3 {
            break;
        }
    }
    Ok(())
}

/// Flows from the node beside the leader: to pods, and to a Service of the pod in the other location.
fn flows(cluster: &Cluster, leader: &Node, stand_by: &Node) -> Result<Flows> {
    let mut flows = Flows::between(cluster, stand_by, Some(leader.name()), cluster.remote())?;
    let service = deploy::service_of(cluster, cluster.remote())?;
    flows.also(cluster, stand_by, service, &format!("{} to a Service", stand_by.name()))?;
    Ok(flows)
}

/// Waits until this node is fit to lead its location.
pub fn await_fit(node: &Node) -> Result<()> {
    becomes(node, "kilo_stand_by_fit", 90)
}

/// Waits until this node is a stand-by.
pub fn stands_by(node: &Node) -> Result<()> {
    becomes(node, "kilo_failover_role{role=\"stand-by\"}", 90)
}

/// Waits until this node leads its location.
pub fn leads(node: &Node) -> Result<()> {
    becomes(node, LEADS, 20)
}

fn becomes(node: &Node, name: &str, seconds: u64) -> Result<()> {
    until(&format!("{name} of {} is 1", node.name()), Duration::from_secs(seconds), || {
        (metric(node, name).ok()? == 1).then_some(())
    })
}

/// Cuts a node's power, waits for `happens` and 5 s more, and boots it.
pub fn cut_power(
    cluster: &Cluster,
    node: &Node,
    flows: Flows,
    happens: impl FnOnce() -> Result<()>,
) -> Result<Measured> {
    node.cut()?;
    let happened = happens();
    wait::fault_lasts(Duration::from_secs(5));
    let measured = flows.measure();
    node.start()?;
    let ready = ["wait", "--for=condition=Ready", "nodes", "--all", "--timeout=60s"];
    until("all nodes are ready again", Duration::from_secs(180), || cluster.kubectl(&ready).ok().map(drop))?;
    let measured = measured?;
    happened.with_context(|| measured.to_string())?;
    if measured.lost() == 0 {
        bail!("nothing was lost: the flows did not pass {}", node.name());
    }
    Ok(measured)
}

/// All figures as text; fails when replies were missing for longer, or when a flow that does not pass the
/// leader lost something.
pub fn lasted(measured: &Measured, accepted: Duration) -> Result<String> {
    measured
        .all(|name, figures| figures.gap <= accepted && (!name.ends_with(" to outside") || figures.lost == 0))
}

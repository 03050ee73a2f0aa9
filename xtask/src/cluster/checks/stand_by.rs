//! A leader's machine without power, under a Deployment with Services.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use super::{agents::metric, updates::Flows};
use crate::{
    cluster::{Cluster, deploy, node::Node, until},
    lab::{faults::traffic::Figures, wait},
};

/// Longest time without an answer that is accepted, and what is promised for nearly all.
const ACCEPTED: Duration = Duration::from_secs(1);
/// What makes agents fail over, as a JSON patch of the DaemonSet.
const AUTO: &str =
    r#"[{"op":"add","path":"/spec/template/spec/containers/0/args/-","value":"--failover=auto"}]"#;

/// The first node of the first location, which leads it, loses power: the node beside it goes on
/// talking to the other location. The API server is on that machine, too.
pub fn leader_dies(cluster: &Cluster) -> Result<String> {
    cluster.kubectl(&["-n", "kube-system", "patch", "ds/kilo", "--type=json", "-p", AUTO])?;
    deploy::roll(cluster, "kilo", 180)?;
    let result = leads_after_power_off(cluster);
    deploy::apply_file(cluster, deploy::platform())?;
    deploy::roll(cluster, "kilo", 180)?;
    result
}

fn leads_after_power_off(cluster: &Cluster) -> Result<String> {
    let leader = cluster.first();
    let stand_by =
        cluster.nodes.iter().find(|node| is_beside(node, leader)).context("no other node there")?;
    is_fit(stand_by)?;
    let (measured, took_over) = cut_power(cluster, leader, stand_by, || {
        let took_over = leads(stand_by);
        wait::fault_lasts(Duration::from_secs(5));
        took_over
    })?;
    deploy::roll(cluster, "kilo", 180)?;
    took_over?;
    judge(measured, ACCEPTED)
}

/// Waits until a stand-by could lead.
pub fn is_fit(stand_by: &Node) -> Result<()> {
    until("the stand-by could lead", Duration::from_secs(90), || {
        (metric(stand_by, "kilo_stand_by_fit").ok()? == 1).then_some(())
    })
}

/// Waits until a stand-by leads.
pub fn leads(stand_by: &Node) -> Result<()> {
    until("the stand-by leads", Duration::from_secs(20), || {
        (metric(stand_by, "kilo_failover_role{role=\"leader\"}").ok()? == 1).then_some(())
    })
}

/// What flows lost, by their name, and the packets in clear.
type Measured = (Vec<(String, Figures)>, u64);

/// Takes a leader's power while a node talks, waits for what is to happen, and gives it back; what the flows lost, and
/// how the wait ended.
pub fn cut_power(
    cluster: &Cluster,
    leader: &Node,
    talks: &Node,
    awaited: impl FnOnce() -> Result<()>,
) -> Result<(Measured, Result<()>)> {
    let flows = Flows::between(cluster, talks, Some(leader.name()), cluster.remote())?;
    leader.cut()?;
    let happened = awaited();
    let measured = flows.measure();
    leader.start()?;
    let answers =
        || cluster.kubectl(&["wait", "--for=condition=Ready", "nodes", "--all", "--timeout=60s"]).ok();
    until("all nodes are ready again", Duration::from_secs(180), || answers().map(drop))?;
    Ok((measured?, happened))
}

/// Fails when a flow was without an answer for longer than is accepted.
pub fn judge((measured, clear): Measured, accepted: Duration) -> Result<String> {
    let (mut said, mut bad, mut lost) = (Vec::new(), Vec::new(), 0);
    for (name, figures) in measured {
        let text =
            format!("{name}: {} of {} lost, {} ms", figures.lost, figures.sent, figures.gap.as_millis());
        let broken = figures.broken.is_some();
        // What does not pass the leader must not notice.
        let is_elsewhere = name.ends_with("to outside") && figures.lost > 0;
        if broken || is_elsewhere || figures.gap > accepted {
            bad.push(format!("{text} {}", figures.broken.unwrap_or_default()));
        }
        lost += figures.lost;
        said.push(text);
    }
    if clear > 0 {
        bad.push(format!("{clear} packets with a pod's address were on the router"));
    }
    if lost == 0 {
        bad.push("nothing was lost: the flows did not pass the leader".to_owned());
    }
    if bad.is_empty() { Ok(said.join("; ")) } else { bail!("{}", bad.join("\n    ")) }
}

fn is_beside(node: &Node, leader: &Node) -> bool {
    node.site.letter == leader.site.letter && node.name() != leader.name()
}

//! A leader's machine without power, under a Deployment with Services.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use super::{agents::metric, updates::Flows};
use crate::{
    cluster::{Cluster, deploy, node::Node, until},
    lab::wait,
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
    let result = cut_power(cluster);
    deploy::apply_file(cluster, deploy::platform())?;
    deploy::roll(cluster, "kilo", 180)?;
    result
}

fn cut_power(cluster: &Cluster) -> Result<String> {
    let leader = cluster.first();
    let stand_by =
        cluster.nodes.iter().find(|node| is_beside(node, leader)).context("no other node there")?;
    until("the stand-by could lead", Duration::from_secs(90), || {
        (metric(stand_by, "kilo_stand_by_fit").ok()? == 1).then_some(())
    })?;
    let flows = Flows::between(cluster, stand_by, Some(leader.name()), cluster.remote())?;
    leader.cut()?;
    let took_over = until("the stand-by leads", Duration::from_secs(20), || {
        (metric(stand_by, "kilo_failover_role{role=\"leader\"}").ok()? == 1).then_some(())
    });
    wait::fault_lasts(Duration::from_secs(5));
    let measured = flows.measure();
    leader.start()?;
    let answers =
        || cluster.kubectl(&["wait", "--for=condition=Ready", "nodes", "--all", "--timeout=60s"]).ok();
    until("all nodes are ready again", Duration::from_secs(180), || answers().map(drop))?;
    deploy::roll(cluster, "kilo", 180)?;
    took_over?;
    let (measured, clear) = measured?;
    let (mut said, mut bad, mut lost) = (Vec::new(), Vec::new(), 0);
    for (name, figures) in measured {
        let text =
            format!("{name}: {} of {} lost, {} ms", figures.lost, figures.sent, figures.gap.as_millis());
        let broken = figures.broken.is_some();
        // What does not pass the leader must not notice.
        let is_elsewhere = name.ends_with("to outside") && figures.lost > 0;
        if broken || is_elsewhere || figures.gap > ACCEPTED {
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

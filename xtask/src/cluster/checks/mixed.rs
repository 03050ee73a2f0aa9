//! Leaders lose power while some nodes still run Kilo in Go: a migration half-way.

use std::time::Duration;

use anyhow::{Context as _, Result};

use super::{
    Skipped, both,
    flows::{Flows, Measured},
    migration, nodes, stand_by,
};
use crate::{
    cluster::{
        Cluster,
        deploy::{self, Pod},
        network,
        node::Node,
        original::Original,
        until,
    },
    image,
    lab::{
        probe::{self, Protocol},
        wait,
    },
};

/// Longest accepted time without a reply where a node other than the leader runs Kilo, which learns of the
/// change through the API server.
const ACCEPTED: Duration = Duration::from_secs(5);
/// The same where the leader runs Kilo: as long as Kilo's nodes wait before they give one up, and notice
/// that they have.
const AS_KILO: Duration = Duration::from_secs(90);
/// Each node keeps its program until its pod is deleted; the next pod has ours, with failover.
const OURS: &str = r#"[
    {"op":"replace","path":"/spec/updateStrategy","value":{"type":"OnDelete"}},
    {"op":"replace","path":"/spec/template/spec/containers/0/image","value":"IMAGE"},
    {"op":"replace","path":"/spec/template/spec/initContainers/0/image","value":"IMAGE"},
    {"op":"add","path":"/spec/template/spec/containers/0/args/-","value":"--failover=auto"}]"#;
/// Annotation that names the leader of a location.
const LEADER: &str = "kilo.squat.ai/leader";
/// Annotation for the interval in which a node sends keepalives through its tunnels, in seconds.
const KEEPALIVE: &str = "kilo.squat.ai/persistent-keepalive";

/// Waits until a node can take over.
type Ready = fn(&Node) -> Result<()>;

/// In the first location the second node leads, so that the API server stays up. It loses power while it
/// runs Kilo, while the other location does, and, where there is a third node, while only that one does.
pub fn leader_dies(cluster: &Cluster) -> Result<String> {
    let Some(original) = Original::find()? else {
        return Err(Skipped("neither Kilo's program nor its source is here ($KILO_GO_SOURCE)").into());
    };
    let _tunnels = migration::install(cluster, &original)?;
    reached(cluster).context("Kilo itself")?;
    let (stays, leader) = (cluster.first(), cluster.node("a2")?);
    // Kilo requires it of nodes behind NAT.
    cluster.kubectl(&["annotate", "nodes", "--all", &format!("{KEEPALIVE}=5")])?;
    cluster.kubectl(&["annotate", "node", leader.name(), &format!("{LEADER}=true")])?;
    let result = one_after_the_other(cluster, stays, leader);
    // Kilo's DaemonSet is removed whatever fails; the first failure is reported.
    let annotations = [(leader.name(), LEADER), ("--all", KEEPALIVE)];
    let taken =
        annotations.map(|(node, name)| cluster.kubectl(&["annotate", "node", node, &format!("{name}-")]));
    let removed = migration::remove(cluster);
    let taken = taken.into_iter().collect::<Result<Vec<_>>>().map(drop);
    both(both(result, taken), removed)
}

fn one_after_the_other(cluster: &Cluster, stays: &Node, leader: &Node) -> Result<String> {
    let patch = OURS.replace("IMAGE", image::IMAGE.trim_start_matches("docker.io/"));
    cluster.kubectl(&["-n", "kube-system", "patch", "ds/kilo", "--type=json", "-p", &patch])?;
    let mut said = Vec::new();
    let mut part = |name: &str, ours: &Node, from: &Node, is_ready: Option<Ready>| -> Result<()> {
        become_ours(cluster, ours)?;
        let text = cut(cluster, leader, stays, from, is_ready);
        let text = format!("{name}: {}", text.with_context(|| name.to_owned())?);
        println!("    {text}");
        said.push(text);
        Ok(())
    };
    part("the leader is Kilo", stays, stays, None)?;
    // A node whose tunnels end where nobody answers signals is not fit.
    part("the other location is Kilo", leader, stays, Some(stand_by::stands_by))?;
    match cluster.node("a3") {
        Ok(member) => part("a member is Kilo", cluster.node("b1")?, member, Some(stand_by::await_fit))?,
        Err(_) => println!("    a member that is Kilo needs a third node of the location (--nodes 5)"),
    }
    Ok(said.join("\n    "))
}

/// Deletes Kilo's pod on a node, and waits until pods reach each other through ours.
fn become_ours(cluster: &Cluster, node: &Node) -> Result<()> {
    let on = format!("spec.nodeName={}", node.name());
    let label = ["-l", "app.kubernetes.io/name=kilo", "--field-selector", &on];
    cluster.kubectl(&[&["-n", "kube-system", "delete", "pod"], &label[..]].concat())?;
    reached(cluster)
}

/// Waits until every agent is ready and pods reach each other. Nodes' own addresses prove nothing: Kilo
/// does not respond at those of the other location when their leader is behind NAT.
fn reached(cluster: &Cluster) -> Result<()> {
    let ready =
        ["wait", "--for=condition=Ready", "pod", "-l", "app.kubernetes.io/name=kilo", "--timeout=60s"];
    until("every agent is ready", Duration::from_secs(120), || {
        cluster.kubectl(&[&["-n", "kube-system"], &ready[..]].concat()).ok()
    })?;
    until("every pod reaches every other", Duration::from_secs(120), || {
        let pods = deploy::start_test_servers(cluster).ok()?;
        (pods.len() == cluster.nodes.len()).then_some(())?;
        pods.iter().all(|pod| reaches(pod, &pods)).then_some(())
    })
}

fn reaches(pod: &Pod, pods: &[Pod]) -> bool {
    let others: Vec<_> = pods.iter().filter(|of| of.name != pod.name).map(|of| of.address).collect();
    let probe =
        move || others.into_iter().all(|of| probe::probe(Protocol::Udp, of, Duration::from_secs(2)).is_ok());
    matches!(pod.netns.spawn(probe).join(), Ok(Ok(true)))
}

/// Cuts the leader's power while a pod of a node talks. `is_ready` waits until the remaining node can take
/// over; without it nobody takes over, and Kilo's nodes give the leader up.
fn cut(
    cluster: &Cluster,
    leader: &Node,
    stays: &Node,
    from: &Node,
    is_ready: Option<Ready>,
) -> Result<String> {
    is_ready.map_or(Ok(()), |is_ready| is_ready(stays))?;
    let flows = Flows::between(cluster, from, Some(leader.name()), cluster.remote())?;
    // While Kilo boots, its own pods send in cleartext. As a leader it forwards in cleartext what this node
    // steers to it, for the milliseconds between the end of its WireGuard process and that of its
    // namespace.
    network::count_from(&nodes::pod_cidrs(cluster, stays)?, Some(stays.name()))?;
    let measured = stand_by::cut_power(cluster, leader, flows, || {
        if is_ready.is_some() {
            return stand_by::leads(stays);
        }
        wait::fault_lasts(AS_KILO);
        Ok(())
    });
    let clear = network::counted()?;
    let measured = Measured { clear, ..measured? };
    reached(cluster).context("after the leader is back")?;
    stand_by::lasted(&measured, if is_ready.is_some() { ACCEPTED } else { AS_KILO })
}

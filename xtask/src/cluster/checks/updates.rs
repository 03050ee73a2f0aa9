//! What happens to a node's programs while pods talk: nothing may be lost.

use std::time::Duration;

use anyhow::{Result, bail, ensure};

use crate::{
    cluster::{
        Cluster, deploy,
        images::OTHER_TAG,
        network::{self, OUTSIDE},
        node::Node,
        until,
    },
    image::IMAGE,
    lab::{
        faults::traffic::{Figures, Traffic},
        netns::Netns,
        probe, wait,
    },
};

/// Between two datagrams of a flow.
const TICK: Duration = Duration::from_millis(5);
/// Kubelets look after each pod within this time.
const SYNCED: Duration = Duration::from_secs(5);

/// Flows of a test pod of the first node: to the other location, to a node beside it, and outside.
pub struct Flows {
    flows: Vec<(String, Traffic)>,
    clear: u64,
}

impl Flows {
    /// Starts them from the first node; none to that other node.
    pub fn start(cluster: &Cluster, but: Option<&str>) -> Result<Self> {
        let outside = if but.is_some() { cluster.first() } else { cluster.remote() };
        Self::between(cluster, cluster.first(), but, outside)
    }

    /// Starts them from a node; none to that other node, and to the outside from a third.
    pub fn between(cluster: &Cluster, from: &Node, but: Option<&str>, outside: &Node) -> Result<Self> {
        let pods = deploy::serving(cluster)?;
        let _ = probe::serve(&network::outside(), OUTSIDE.into());
        let from = deploy::pod_on(&pods, from)?;
        let mut flows = Vec::new();
        let mut start = |netns: &Netns, target, name: String| {
            flows.push((name, Traffic::start_every(netns, target, TICK)));
        };
        for pod in pods.iter().filter(|pod| pod.name != from.name && Some(pod.node.as_str()) != but) {
            for address in pod.addresses() {
                let family = if address.is_ipv6() { " by IPv6" } else { "" };
                start(&from.netns, address, format!("{} to {}{family}", from.node, pod.node));
            }
        }
        let outside = deploy::pod_on(&pods, outside)?;
        start(&outside.netns, OUTSIDE.into(), format!("{} to outside", outside.node));
        for (_, traffic) in &flows {
            traffic.settle(Duration::from_secs(20))?;
        }
        Ok(Self { flows, clear: network::clear_packets()? })
    }

    /// Ends them; what each lost, by its name, and the packets in clear.
    pub fn measure(self) -> Result<(Vec<(String, Figures)>, u64)> {
        let mut measured = Vec::new();
        for (name, traffic) in self.flows {
            measured.push((name, traffic.finish()?));
        }
        Ok((measured, network::clear_packets()? - self.clear))
    }

    /// Ends them; an error when something was lost.
    pub fn finish(self) -> Result<String> {
        let (mut said, mut bad) = (Vec::new(), Vec::new());
        let (measured, clear) = self.measure()?;
        for (name, figures) in measured {
            let text = format!(
                "{name}: {} of {} lost, TCP stood {} ms",
                figures.lost,
                figures.sent,
                figures.stall.as_millis()
            );
            if figures.lost > 0 || figures.broken.is_some() {
                bad.push(format!(
                    "{text}, gap {} ms {}",
                    figures.gap.as_millis(),
                    figures.broken.unwrap_or_default()
                ));
            }
            said.push(text);
        }
        if clear > 0 {
            bad.push(format!("{clear} packets with a pod's address were on the router"));
        }
        if bad.is_empty() { Ok(said.join("; ")) } else { bail!("{}", bad.join("\n    ")) }
    }
}

/// Lets pods talk while something is done.
fn while_talking(cluster: &Cluster, code: impl FnOnce() -> Result<()>) -> Result<String> {
    let flows = Flows::start(cluster, None)?;
    let result = code();
    let lost = flows.finish();
    result.and(lost)
}

pub fn rollout_restart(cluster: &Cluster) -> Result<String> {
    while_talking(cluster, || {
        cluster.kubectl(&["-n", "kube-system", "rollout", "restart", "ds/kilo"])?;
        deploy::roll(cluster, "kilo", 180)
    })
}

pub fn delete_pods(cluster: &Cluster) -> Result<String> {
    while_talking(cluster, || {
        cluster.kubectl(&["-n", "kube-system", "delete", "pod", "-l", "app.kubernetes.io/name=kilo"])?;
        deploy::roll(cluster, "kilo", 120)
    })
}

pub fn set_image(cluster: &Cluster) -> Result<String> {
    while_talking(cluster, || {
        for image in [OTHER_TAG, IMAGE] {
            let container = format!("kilo={}", image.trim_start_matches("docker.io/"));
            cluster.kubectl(&["-n", "kube-system", "set", "image", "ds/kilo", &container])?;
            deploy::roll(cluster, "kilo", 180)?;
        }
        Ok(())
    })
}

pub fn kubelet(cluster: &Cluster) -> Result<String> {
    while_talking(cluster, || restart(cluster, "kubelet"))
}

pub fn containerd(cluster: &Cluster) -> Result<String> {
    while_talking(cluster, || restart(cluster, "containerd"))
}

/// Kills a program of every node and waits until kubelets have looked after their pods again.
fn restart(cluster: &Cluster, program: &str) -> Result<()> {
    cluster.each(&cluster.nodes, |node| node.kill(program))?;
    for node in &cluster.nodes {
        until("containerd answers", Duration::from_secs(30), || node.sh("ctr version").ok())?;
    }
    let before = renewed(cluster)?;
    ensure!(before.len() == cluster.nodes.len(), "not every node has a Lease: {before:?}");
    // A node stays Ready for 40 s without a kubelet; one that works renews its Lease each 10 s.
    until("every kubelet has renewed its node's Lease", Duration::from_secs(60), || {
        let now = renewed(cluster).ok()?;
        before.iter().all(|lease| !now.contains(lease)).then_some(())
    })?;
    wait::time_passes(SYNCED, "kubelets look after their pods");
    cluster.kubectl(&["wait", "--for=condition=Ready", "nodes", "--all", "--timeout=120s"])?;
    deploy::roll(cluster, "kilo", 120)
}

/// The Lease of each node, and when it was renewed.
fn renewed(cluster: &Cluster) -> Result<Vec<String>> {
    let path = "jsonpath={range .items[*]}{.metadata.name} {.spec.renewTime}{\"\\n\"}{end}";
    let leases = cluster.kubectl(&["-n", "kube-node-lease", "get", "leases", "-o", path])?;
    Ok(leases.lines().map(ToOwned::to_owned).collect())
}

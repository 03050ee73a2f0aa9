//! Nodes that boot, are drained, and join again.

use std::{
    fs,
    net::IpAddr,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use ipnet::IpNet;

use super::{both, everybody, flows::Flows, never_in_clear, removal, settled};
use crate::{
    cluster::{Cluster, deploy, images, kubeadm, network, node::Node, until},
    lab::probe::{self, Protocol},
};

/// The CNI configuration: a symbolic link, whose target does not survive a reboot.
const CONFIGURATION: &str = "/etc/cni/net.d/10-kilo.conflist";

/// After a power cut and a boot: no packet of a pod is in cleartext at any time.
pub fn boot(cluster: &Cluster) -> Result<String> {
    boots(cluster, 1)
}

/// Like [`boot`], twenty times.
pub fn many_boots(cluster: &Cluster) -> Result<String> {
    boots(cluster, 20)
}

fn boots(cluster: &Cluster, count: u32) -> Result<String> {
    let talking = Talkers::start(cluster)?;
    let mut slowest = Duration::ZERO;
    for number in 1..=count {
        // All other nodes in turn, so that a leader and a member are among them; the control plane stays up.
        let node = &cluster.nodes[1..][number as usize % (cluster.nodes.len() - 1)];
        let before = network::clear_packets()?;
        network::count_from(&pod_cidrs(cluster, node)?, None)?;
        let took = power_cycle(cluster, node).with_context(|| format!("boot {number} of {}", node.name()));
        let clear = network::counted()?;
        let others = network::clear_packets()? - before;
        // The router counts packets to and from any node, the cable counters those from this node alone.
        let which = || format!("boot {number}, of {}", node.name());
        network::none_in_clear(others).with_context(which)?;
        network::none_in_clear(clear).with_context(which)?;
        let took = took?;
        slowest = slowest.max(took);
    }
    talking.end()?;
    Ok(format!(
        "{count} boots, pods talked again after {:.1} s at most; 0 packets of pods in cleartext",
        slowest.as_secs_f32()
    ))
}

/// The node's prefixes with spaces between them.
pub fn pod_cidrs(cluster: &Cluster, node: &Node) -> Result<String> {
    cluster.kubectl(&["get", "node", node.name(), "-o", "jsonpath={.spec.podCIDRs[*]}"])
}

/// Shows that [`boot`] detects cleartext packets: with a configuration that is a regular file, pods start
/// before the mesh.
pub fn boot_with_a_file(cluster: &Cluster) -> Result<String> {
    let talking = Talkers::start(cluster)?;
    let node = cluster.remote();
    let mut seen = 0;
    // Chance decides which comes first.
    let cidrs = pod_cidrs(cluster, node)?;
    for _ in 0..4 {
        node.sh(&format!("cp -L {CONFIGURATION} /tmp/c && cp --remove-destination /tmp/c {CONFIGURATION}"))?;
        network::count_from(&cidrs, None)?;
        power_cycle(cluster, node)?;
        seen = network::counted()?;
        if seen > 0 {
            break;
        }
    }
    talking.end()?;
    if seen == 0 {
        bail!("no packet in cleartext was seen although the configuration outlived the boot");
    }
    Ok(format!("{seen} packets in cleartext"))
}

/// Cuts the power, boots, and waits until a pod of the node reaches others; returns how long that took.
fn power_cycle(cluster: &Cluster, node: &Node) -> Result<Duration> {
    let before = network_condition(cluster, node.name())?;
    node.cut()?;
    let started = Instant::now();
    node.start()?;
    let others = deploy::pods(cluster, "app=echo")?;
    let other = deploy::pod_on(&others, cluster.first())?.address;
    until("a pod of the node that booted reaches another", Duration::from_secs(120), || {
        let pods = deploy::pods(cluster, "app=talker").ok()?;
        let pod = deploy::pod_on(&pods, node).ok()?.clone();
        let answer = pod.netns.spawn(move || probe::probe(Protocol::Icmp, other, Duration::from_secs(1)));
        answer.join().ok()?.ok()?.ok()
    })?;
    let took = started.elapsed();
    let ready =
        |node: &str| cluster.kubectl(&["wait", "--for=condition=Ready", "node", node, "--timeout=60s"]);
    ready(node.name())?;
    deploy::wait_rolled_out(cluster, "kilo", 60)?;
    // The condition became true when the agent started, and false again: its time differs from the one
    // before.
    let condition = || network_condition(cluster, node.name());
    let is_up = |text: &String| text.starts_with("False KiloIsUp") && *text != before;
    until("the condition NetworkUnavailable is false again", Duration::from_secs(20), || {
        condition().ok().filter(is_up).map(drop)
    })
    .with_context(|| format!("{:?} after {before}", condition()))?;
    Ok(took)
}

/// Status, reason and time of the condition NetworkUnavailable of a node.
fn network_condition(cluster: &Cluster, node: &str) -> Result<String> {
    let path = "jsonpath={range .status.conditions[?(@.type==\"NetworkUnavailable\")]}\
                {.status} {.reason} {.lastTransitionTime}{end}";
    cluster.kubectl(&["get", "node", node, "-o", path])
}

/// Pods on every node that send from the moment they start: to each test pod and to the outside host, in
/// all families; until dropped.
struct Talkers<'a>(&'a Cluster);

impl<'a> Talkers<'a> {
    fn start(cluster: &'a Cluster) -> Result<Self> {
        let pods = deploy::pods(cluster, "app=echo")?;
        let families = if cluster.release.has_two_families() { 2 } else { 1 };
        let outside: [IpAddr; 2] = [network::OUTSIDE.into(), network::OUTSIDE_V6.into()];
        let all = pods.iter().flat_map(deploy::Pod::addresses).chain(outside.into_iter().take(families));
        let addresses: Vec<_> = all.map(|address| address.to_string()).collect();
        let objects = TALKERS.replace("IMAGE", images::TEST).replace("ADDRESSES", &addresses.join(" "));
        let talkers = Self(cluster);
        cluster.apply(&objects)?;
        cluster.kubectl(&["rollout", "status", "ds/talker", "--timeout=60s"])?;
        Ok(talkers)
    }

    fn end(self) -> Result<()> {
        let cluster = self.0;
        self.delete()?;
        cluster.kubectl(&["rollout", "status", "deployment/echo", "--timeout=120s"]).map(drop)
    }

    fn delete(&self) -> Result<()> {
        self.0.kubectl(&["delete", "ds", "talker", "--wait=false", "--ignore-not-found"]).map(drop)
    }
}

impl Drop for Talkers<'_> {
    fn drop(&mut self) {
        // A check that fails leaves none either; one that passes has deleted them.
        let _ = self.delete();
    }
}

const TALKERS: &str = "
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: talker}
spec:
  selector: {matchLabels: {app: talker}}
  template:
    metadata: {labels: {app: talker}}
    spec:
      terminationGracePeriodSeconds: 0
      tolerations: [{operator: Exists}]
      containers:
        - name: talker
          image: IMAGE
          command: [sh, -c, 'while :; do for a in ADDRESSES; do timeout 1 busybox ping -c 1 $a > /dev/null & done; sleep 0.1; wait; done']
";

/// Drains, cordons and uncordons a node; flows between the others lose nothing.
pub fn drain(cluster: &Cluster) -> Result<String> {
    let node = cluster.remote().name();
    let flows = Flows::start(cluster, Some(node))?;
    cluster.kubectl(&["cordon", node])?;
    let drained = cluster.kubectl(&["drain", node, "--ignore-daemonsets", "--force", "--timeout=60s"]);
    let lost = both(flows.finish(), drained.map(drop));
    let back = cluster
        .kubectl(&["uncordon", node])
        .and_then(|_| cluster.kubectl(&["rollout", "status", "deployment/echo", "--timeout=60s"]))
        .and_then(|_| everybody(cluster).map(drop));
    both(lost, back)
}

/// Deletes a node that keeps running: Kubernetes ends its pods and the agent in any order, and none sends
/// in cleartext. Then its kubelet registers it again.
pub fn deleted_while_it_runs(cluster: &Cluster) -> Result<String> {
    let node = cluster.remote();
    let talking = Talkers::start(cluster)?;
    let before = network::clear_packets()?;
    let cidrs = pod_cidrs(cluster, node)?;
    network::count_from(&cidrs, None)?;
    let shown = deleted_and_registered(cluster, node, &cidrs);
    let talked = talking.end();
    let clear = network::counted()
        .and_then(|counted| network::none_in_clear(counted + network::clear_packets()? - before));
    // Documented in docs/install.md: without a reboot, some pods may have addresses of the former pod CIDR.
    let renewed = removal::renew_pods(cluster);
    both(both(shown, both(talked, renewed)), clear)
}

/// Deletes the node, and waits until its kubelet has registered it again and its next agent is ready.
fn deleted_and_registered(cluster: &Cluster, node: &Node, cidrs: &str) -> Result<String> {
    let name = node.name();
    let former: Vec<IpNet> = cidrs.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
    let pods = deploy::pods(cluster, "app=echo")?;
    let other = deploy::pod_on(&pods, cluster.first())?.address;
    let pod = deploy::pod_on(&pods, node)?.clone();
    cluster.kubectl(&["delete", "node", name])?;
    // Sends until its namespace ends with it.
    let sends = std::thread::spawn(move || {
        let asks =
            || pod.netns.spawn(move || probe::probe(Protocol::Icmp, other, Duration::from_millis(100)));
        while asks().join().is_ok_and(|asked| asked.is_ok()) {}
    });
    let started = Instant::now();
    until("the agent has ended", Duration::from_secs(180), || node.sh("pidof kg").is_err().then_some(()))?;
    let took = started.elapsed();
    until("every pod has ended", Duration::from_secs(120), || sends.is_finished().then_some(()))?;
    node.kill("kubelet")?;
    annotated_and_ready(cluster, node)?;
    // The next agent must learn the addresses of pods that started before it.
    let agent =
        ["-n", "kube-system", "delete", "pod", "-l", "app.kubernetes.io/name=kilo", "--field-selector"];
    cluster.kubectl(&[&agent[..], &[&*format!("spec.nodeName={name}")]].concat())?;
    deploy::wait_rolled_out(cluster, "kilo", 60)?;
    let with_former = deploy::pods(cluster, "app in (talker, echo)")?
        .iter()
        .filter(|pod| former.iter().any(|cidr| pod.addresses().any(|address| cidr.contains(&address))))
        .count();
    Ok(format!(
        "the agent ended {:.0} s after the deletion; {with_former} pods started before the next one; 0 packets in cleartext",
        took.as_secs_f32()
    ))
}

/// Waits until a node that has registered is part of its location and ready.
fn annotated_and_ready(cluster: &Cluster, node: &Node) -> Result<()> {
    let location = format!("kilo.squat.ai/location={}", node.site.location());
    until("the node is registered", Duration::from_secs(30), || {
        cluster.kubectl(&["annotate", "--overwrite", "node", node.name(), &location]).ok()
    })?;
    cluster.kubectl(&["wait", "--for=condition=Ready", "node", node.name(), "--timeout=120s"])?;
    deploy::wait_rolled_out(cluster, "kilo", 120)?;
    cluster.kubectl(&["rollout", "status", "deployment/echo", "--timeout=120s"]).map(drop)
}

/// Deletes a node and joins the same machine again, which gets another pod CIDR.
pub fn join_again(cluster: &Cluster) -> Result<String> {
    never_in_clear(|| deleted_and_joined(cluster))
}

fn deleted_and_joined(cluster: &Cluster) -> Result<String> {
    let node = cluster.remote();
    let name = node.name();
    let cidr = || cluster.kubectl(&["get", "node", name, "-o", "jsonpath={.spec.podCIDR}"]);
    let before = cidr()?;
    let flows = Flows::start(cluster, Some(name))?;
    cluster.kubectl(&["delete", "node", name])?;
    // The machine is removed and set up anew; what Kilo and its plugins keep stays on the disk.
    node.cut()?;
    for file in
        ["kubelet/config.yaml", "upper/etc/kubernetes/kubelet.conf", "upper/etc/kubernetes/pki/ca.crt"]
    {
        let path = node.disk().join(file);
        fs::remove_file(&path).with_context(|| path.display().to_string())?;
    }
    node.start()?;
    let socket = || node.path("/run/containerd/containerd.sock").ok().filter(|path| path.exists()).map(drop);
    until("containerd is up", Duration::from_secs(30), socket)?;
    kubeadm::join(node, cluster.first())?;
    annotated_and_ready(cluster, node)?;
    let lost = flows.finish()?;
    until("the pod CIDR is there", Duration::from_secs(20), || cidr().ok().filter(|cidr| !cidr.is_empty()))?;
    let after = cidr()?;
    if after == before {
        bail!("the node has the pod CIDR {after} again, so nothing was shown");
    }
    settled(cluster)?;
    Ok(format!("{before} became {after}; {lost}"))
}

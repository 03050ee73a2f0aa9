//! Removes Kilo from a cluster, as in docs/install.md.

use std::{fs, time::Duration};

use anyhow::{Context as _, Result, bail, ensure};
use kilo_core::objects::annotations;
use serde_json::Value;

use super::both;
use crate::{
    cluster::{Cluster, deploy, network, node::Node, until},
    command::output,
    image,
};

/// The steps of docs/install.md, on nodes with every piece of our state; then Kilo comes back.
pub fn manifest(cluster: &Cluster) -> Result<String> {
    and_back(cluster, || {
        let refused = refuses_beside_an_agent(cluster)?;
        let said = remove(cluster)?;
        nothing_is_left(cluster)?;
        Ok(format!("{refused}; {said}"))
    })
}

/// The same with `kgctl uninstall`; then Kilo comes back.
pub fn kgctl(cluster: &Cluster) -> Result<String> {
    and_back(cluster, || by_kgctl(cluster))
}

/// Removes Kilo and installs it again; no packet of a pod may be in cleartext until then.
fn and_back(cluster: &Cluster, remove: impl FnOnce() -> Result<String>) -> Result<String> {
    let before = network::clear_packets()?;
    let said = remove();
    let clear = network::clear_packets().and_then(|now| network::none_in_clear(now - before));
    if said.is_err() {
        // It may have left this, which would remove Kilo again.
        let _ = forget(cluster);
    }
    both(both(said, clear), put_back(cluster))
}

/// While agents run, the manifest's pods fail and say why.
fn refuses_beside_an_agent(cluster: &Cluster) -> Result<String> {
    deploy::apply_file(cluster, "uninstall.yaml")?;
    let refused = until("a pod of kilo-uninstall says that it refuses", Duration::from_secs(30), || {
        let log = logs(cluster).ok()?;
        log.lines().find(|line| line.contains("nothing was removed")).map(ToOwned::to_owned)
    })?;
    forget(cluster)?;
    super::everybody(cluster).context("although nothing was to be removed")?;
    Ok(refused)
}

fn delete_daemon_sets(cluster: &Cluster) -> Result<()> {
    for name in ["kilo", "kilo-wireguard"] {
        let delete = ["-n", "kube-system", "delete", "daemonset", name];
        cluster.kubectl(&[&delete[..], &["--ignore-not-found", "--cascade=foreground"]].concat())?;
    }
    Ok(())
}

/// Deletes what runs Kilo, and removes it from one node by hand and from the others by the manifest;
/// returns each node's output.
fn remove(cluster: &Cluster) -> Result<String> {
    delete_daemon_sets(cluster)?;
    let by_hand = by_hand(cluster.remote())?;
    deploy::apply_file(cluster, "uninstall.yaml")?;
    deploy::wait_rolled_out(cluster, "kilo-uninstall", 120)
        .with_context(|| logs(cluster).unwrap_or_default())?;
    let log = logs(cluster)?;
    forget(cluster)?;
    let said = every_node_said(cluster, &format!("{log}\n{by_hand}"))?;
    Ok(format!(
        "{said}, {} of them by hand",
        by_hand.lines().filter(|line| line.starts_with("removed:")).count()
    ))
}

/// Runs the command of docs/install.md on a node itself, with the kubelet's identity.
fn by_hand(node: &Node) -> Result<String> {
    install("kg", node, KG)?;
    let identity = ["--kubeconfig", "/etc/kubernetes/kubelet.conf", "--hostname", node.name()];
    let said = output(node.command(KG)?.arg("uninstall").args(identity).arg("--remove-cni"))
        .with_context(|| format!("kg uninstall on {}", node.name()))?;
    let wanted = format!("removed: annotations of node {}", node.name());
    ensure!(said.contains(&wanted), "it does not say {wanted:?}:\n{said}");
    nothing_is_left_on(node).context("after kg uninstall by hand")?;
    Ok(said)
}

fn every_node_said(cluster: &Cluster, log: &str) -> Result<String> {
    for node in &cluster.nodes {
        if !log.contains(&format!("removed: annotations of node {}", node.name())) {
            bail!("{} does not say what it removed:\n{log}", node.name());
        }
    }
    Ok(format!("{} lines of what was removed", log.lines().filter(|line| line.contains("removed:")).count()))
}

/// Path at which [`install_kgctl`] installs it.
pub const KGCTL: &str = "/opt/kgctl";
/// Path of the agent's program for a run by hand.
const KG: &str = "/opt/kg";

/// Installs `kgctl` on the first node, for its administrator.
pub fn install_kgctl(cluster: &Cluster) -> Result<()> {
    install("kgctl", cluster.first(), KGCTL)
}

/// Copies a program that was built here to a node.
fn install(program: &str, node: &Node, place: &str) -> Result<()> {
    let (program, place) = (std::env::current_exe()?.with_file_name(program), node.path(place)?);
    // An earlier run may have left another build there.
    let _ = fs::remove_file(&place);
    fs::copy(&program, &place).with_context(|| program.display().to_string())?;
    Ok(())
}

/// Removes Kilo by `kgctl uninstall`, which refuses while agents run.
pub fn by_kgctl(cluster: &Cluster) -> Result<String> {
    install_kgctl(cluster)?;
    let image = format!("--image={}", image::IMAGE.trim_start_matches("docker.io/"));
    let run = || output(cluster.first().command(KGCTL)?.args(["uninstall", &image]));
    match run() {
        Ok(said) => bail!("it does not refuse beside the agents:\n{said}"),
        Err(error) if format!("{error:#}").contains("nothing was removed: DaemonSet kilo") => {}
        Err(error) => return Err(error),
    }
    delete_daemon_sets(cluster)?;
    let said = every_node_said(cluster, &run()?)?;
    let left = cluster.kubectl(&["get", "ds,sa,clusterrole,clusterrolebinding", "-A", "-o", "name"])?;
    if left.contains("kilo-uninstall") {
        bail!("it leaves objects behind:\n{left}");
    }
    nothing_is_left(cluster)?;
    Ok(said)
}

/// Checks that nothing of ours is left on any node, and in any Node object.
fn nothing_is_left(cluster: &Cluster) -> Result<()> {
    cluster.nodes.iter().try_for_each(nothing_is_left_on)?;
    let nodes = cluster.get(&["nodes"])?;
    let nodes = nodes["items"].as_array().context("no list of nodes")?;
    let left: Vec<_> = nodes.iter().flat_map(left_in).collect();
    ensure!(left.is_empty(), "left in Node objects: {}", left.join(", "));
    Ok(())
}

/// What agents have written into a Node object: annotations, and the condition NetworkUnavailable.
fn left_in(node: &Value) -> Vec<String> {
    let name = node["metadata"]["name"].as_str().unwrap_or_default();
    let written = annotations::retracted();
    let annotated = node["metadata"]["annotations"].as_object().into_iter().flatten();
    let annotated = annotated.filter(|(key, _)| written.contains_key(*key));
    let conditions = node["status"]["conditions"].as_array().into_iter().flatten();
    let ours = conditions.filter_map(|condition| condition["reason"].as_str());
    let ours = ours.filter(|reason| ["KiloIsUp", "KiloIsStarting"].contains(reason));
    let annotated = annotated.map(|(key, _)| format!("{key} of {name}"));
    annotated.chain(ours.map(|reason| format!("the condition {reason} of {name}"))).collect()
}

fn nothing_is_left_on(node: &Node) -> Result<()> {
    let left = node.sh(LEFT)?;
    ensure!(left.trim().is_empty(), "left on {}:\n{left}", node.name());
    Ok(())
}

fn logs(cluster: &Cluster) -> Result<String> {
    cluster.kubectl(&[
        "-n",
        "kube-system",
        "logs",
        "--selector",
        "app.kubernetes.io/name=kilo-uninstall",
        "--container",
        "uninstall",
        "--prefix",
        "--tail=-1",
    ])
}

fn forget(cluster: &Cluster) -> Result<()> {
    cluster.kubectl(&["delete", "-f", "/opt/manifests/uninstall.yaml", "--cascade=foreground"]).map(drop)
}

/// Installs Kilo again, and re-creates the test pods, whose bridge was removed.
pub fn put_back(cluster: &Cluster) -> Result<()> {
    deploy::apply(cluster)?;
    renew_pods(cluster)?;
    deploy::ensure_families(cluster)
}

/// Re-creates the test pods, and waits until everybody reaches everybody.
pub fn renew_pods(cluster: &Cluster) -> Result<()> {
    new_pods(cluster)?;
    super::settled(cluster)
}

/// Re-creates the test pods.
pub fn new_pods(cluster: &Cluster) -> Result<()> {
    cluster.kubectl(&["delete", "pods", "-l", "app=echo", "--grace-period=0"])?;
    cluster.kubectl(&["rollout", "status", "deployment/echo", "--timeout=120s"])?;
    deploy::start_test_servers(cluster).map(drop)
}

/// Prints whatever of ours a host still has.
const LEFT: &str = r"
ip -o link show | grep -E ' (kilo0|kilo-ipip|kilo-vxlan|kube-bridge)[:@]' || true
for family in -4 -6; do ip $family route show table all proto 107 || true; done
ip rule show | grep 1107 || true
ip neigh show proto 107 || true
nft list tables | grep kilo || true
iptables-save | grep KILO || true
find /sys/fs/bpf/kilo 2> /dev/null || true
find /etc/cni/net.d /run/kilo -name '10-kilo*' 2> /dev/null || true
for device in $(ls /sys/class/net); do
  tc filter show dev $device ingress; tc filter show dev $device egress
done 2> /dev/null | grep -i kilo || true
";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_agents_wrote_is_found_in_a_node_and_what_others_wrote_is_not() {
        let node = |annotations: &[&str], reason: &str| {
            let annotations: serde_json::Map<_, _> =
                annotations.iter().map(|name| ((*name).to_owned(), "x".into())).collect();
            left_in(&serde_json::json!({
                "metadata": { "name": "a1", "annotations": annotations },
                "status": { "conditions": [{ "type": "NetworkUnavailable", "reason": reason }] },
            }))
        };
        assert!(node(&["kilo.squat.ai/location", "example.com/key"], "CalicoIsUp").is_empty());
        assert_eq!(node(&["kilo.squat.ai/leading"], "CalicoIsUp"), ["kilo.squat.ai/leading of a1"]);
        for reason in ["KiloIsUp", "KiloIsStarting"] {
            assert_eq!(node(&[], reason), [format!("the condition {reason} of a1")]);
        }
    }
}

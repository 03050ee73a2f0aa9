//! Removes Kilo from a cluster, as in docs/install.md.

use std::{fs, time::Duration};

use anyhow::{Context as _, Result, bail, ensure};

use crate::{
    cluster::{Cluster, deploy, network, node::Node, until},
    command::output,
    image,
};

/// The steps of docs/install.md, on nodes with every piece of our state; then Kilo comes back.
pub fn manifest(cluster: &Cluster) -> Result<String> {
    let before = network::clear_packets()?;
    let refused = refuses_beside_an_agent(cluster)?;
    let said = remove(cluster)?;
    nothing_is_left(cluster)?;
    let clear = network::clear_packets()? - before;
    put_back(cluster)?;
    network::none_in_clear(clear)?;
    Ok(format!("{refused}; {said}"))
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

/// The same with `kgctl uninstall`, which refuses while agents run.
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

/// Checks that nothing of ours is left on any node.
fn nothing_is_left(cluster: &Cluster) -> Result<()> {
    cluster.nodes.iter().try_for_each(nothing_is_left_on)?;
    let annotated = cluster.kubectl(&["get", "nodes", "-o", "jsonpath={.items[*].metadata.annotations}"])?;
    if annotated.contains("kilo.squat.ai/key") {
        bail!("annotations are left: {annotated}");
    }
    Ok(())
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

//! A cluster without kube-proxy, which is Cilium's usual set-up, as in docs/install.md.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use super::{both, never_in_clear, settled, succeeds};
use crate::cluster::{Cluster, deploy, kubeadm, matrix, until};

const LIMIT: Duration = Duration::from_secs(60);
/// Address at which pods find the API server: the first of the Services.
const KUBERNETES: &str = "10.96.0.1";

/// Agents start where something else provides the Service `kubernetes`, and where nothing does but a flag
/// names the server. Without either, the log says what to do.
pub fn agents_start(cluster: &Cluster) -> Result<String> {
    let shown = without_kube_proxy(cluster);
    let back = put_back(cluster);
    both(shown, back.context("kube-proxy comes back"))
}

fn without_kube_proxy(cluster: &Cluster) -> Result<String> {
    for object in ["daemonset/kube-proxy", "configmap/kube-proxy"] {
        cluster.kubectl(&["-n", "kube-system", "delete", object, "--cascade=foreground"])?;
    }
    for node in &cluster.nodes {
        node.sh("kube-proxy --cleanup 2> /dev/null || true")?;
    }
    let said = says_what_to_do(cluster)?;
    let server = format!("{}:6443", kubeadm::endpoint(cluster.first()));
    for node in &cluster.nodes {
        node.sh(&format!(
            "nft add table ip stand-in
            nft add chain ip stand-in output '{{ type nat hook output priority -100; }}'
            nft add rule ip stand-in output ip daddr {KUBERNETES} tcp dport 443 dnat to {server}"
        ))?;
    }
    let by_service = restarted(cluster, "where something else provides the Service")?;
    take_stand_in(cluster)?;
    let flag = serde_json::json!([{
        "op": "add",
        "path": "/spec/template/spec/containers/0/args/-",
        "value": format!("--master=https://{server}"),
    }]);
    cluster.kubectl(&["-n", "kube-system", "patch", "ds", "kilo", "--type=json", "-p", &flag.to_string()])?;
    let by_flag = restarted(cluster, "with --master")?;
    Ok(format!("{said}\n    {by_service}\n    {by_flag}"))
}

/// The agent's log line when no API server can be found.
fn says_what_to_do(cluster: &Cluster) -> Result<String> {
    cluster.kubectl(&[
        "-n",
        "kube-system",
        "delete",
        "pods",
        "-l",
        "app.kubernetes.io/name=kilo",
        "--wait=false",
    ])?;
    let node = cluster.remote();
    let asks = format!("timeout 2 bash -c 'echo > /dev/tcp/{KUBERNETES}/443'");
    if node.command("bash")?.args(["-c", &asks]).status()?.success() {
        bail!("something still provides the Service, so nothing would be shown");
    }
    let script = "cat $(ls -t /var/log/pods/kube-system_kilo-*/kilo/*.log | head -n 1)";
    let words = "--master=https://";
    until(&format!("an agent says {words:?}"), LIMIT, || {
        let log = node.sh(script).ok()?;
        log.lines().rev().find(|line| line.contains(words)).map(ToOwned::to_owned)
    })
}

/// Restarts every agent; returns how long it took until all were ready and pods and nodes reached each
/// other.
fn restarted(cluster: &Cluster, how: &str) -> Result<String> {
    let started = Instant::now();
    cluster.kubectl(&["-n", "kube-system", "rollout", "restart", "ds/kilo"])?;
    deploy::wait_rolled_out(cluster, "kilo", 120).with_context(|| how.to_owned())?;
    let took = started.elapsed();
    let reached = never_in_clear(|| succeeds("pods and nodes reach each other", || pods_and_nodes(cluster)));
    let probes = reached.with_context(|| how.to_owned())?;
    Ok(format!("{how}: rolled out after {:.1} s, {probes} probes passed", took.as_secs_f32()))
}

/// Runs the matrix without the paths that need kube-proxy.
fn pods_and_nodes(cluster: &Cluster) -> Result<usize> {
    let matrix = matrix::run(cluster)?.without(&["ClusterIP", "NodePort"]);
    let failures = matrix.failures();
    if !failures.is_empty() {
        bail!("{} of {} probes failed:\n    {}", failures.len(), matrix.total(), failures.join("\n    "));
    }
    Ok(matrix.total())
}

fn take_stand_in(cluster: &Cluster) -> Result<()> {
    let delete = "nft delete table ip stand-in 2> /dev/null || true";
    cluster.nodes.iter().try_for_each(|node| node.sh(delete).map(drop))
}

fn put_back(cluster: &Cluster) -> Result<()> {
    take_stand_in(cluster)?;
    kubeadm::add_kube_proxy(cluster.first())?;
    deploy::wait_rolled_out(cluster, "kube-proxy", 120)?;
    deploy::apply(cluster)?;
    cluster.kubectl(&["-n", "kube-system", "rollout", "restart", "ds/kilo"])?;
    deploy::wait_rolled_out(cluster, "kilo", 120)?;
    deploy::test_pods(cluster)?;
    settled(cluster)
}

//! Restarts and updates of a node's programs while pods talk: nothing may be lost.

use std::time::Duration;

use anyhow::{Result, ensure};

use super::{both, flows::Flows};
use crate::{
    cluster::{Cluster, deploy, images::OTHER_TAG, until},
    image::IMAGE,
    lab::wait,
};

/// Kubelets sync each pod within this time.
const SYNCED: Duration = Duration::from_secs(5);

/// Runs `code` while pods talk.
fn while_talking(cluster: &Cluster, code: impl FnOnce() -> Result<()>) -> Result<String> {
    let flows = Flows::start(cluster, None)?;
    let result = code();
    both(flows.finish(), result)
}

pub fn rollout_restart(cluster: &Cluster) -> Result<String> {
    while_talking(cluster, || {
        cluster.kubectl(&["-n", "kube-system", "rollout", "restart", "ds/kilo"])?;
        deploy::wait_rolled_out(cluster, "kilo", 180)
    })
}

pub fn delete_pods(cluster: &Cluster) -> Result<String> {
    while_talking(cluster, || {
        cluster.kubectl(&["-n", "kube-system", "delete", "pod", "-l", "app.kubernetes.io/name=kilo"])?;
        deploy::wait_rolled_out(cluster, "kilo", 120)
    })
}

pub fn set_image(cluster: &Cluster) -> Result<String> {
    while_talking(cluster, || {
        for image in [OTHER_TAG, IMAGE] {
            // Includes init containers.
            let containers = format!("*={}", image.trim_start_matches("docker.io/"));
            cluster.kubectl(&["-n", "kube-system", "set", "image", "ds/kilo", &containers])?;
            deploy::wait_rolled_out(cluster, "kilo", 180)?;
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

/// Kills a program on every node, and waits until kubelets have synced their pods again.
fn restart(cluster: &Cluster, program: &str) -> Result<()> {
    cluster.each(&cluster.nodes, |node| node.kill(program))?;
    for node in &cluster.nodes {
        until("containerd answers", Duration::from_secs(30), || node.sh("ctr version").ok())?;
    }
    let before = renewed(cluster)?;
    ensure!(before.len() == cluster.nodes.len(), "not every node has a Lease: {before:?}");
    // A node stays Ready for 40 s without a kubelet; a working one renews its Lease every 10 s.
    until("every kubelet has renewed its node's Lease", Duration::from_secs(60), || {
        let now = renewed(cluster).ok()?;
        before.iter().all(|lease| !now.contains(lease)).then_some(())
    })?;
    wait::time_passes(SYNCED, "kubelets look after their pods");
    cluster.kubectl(&["wait", "--for=condition=Ready", "nodes", "--all", "--timeout=120s"])?;
    deploy::wait_rolled_out(cluster, "kilo", 120)
}

/// The Lease of each node, and when it was renewed.
fn renewed(cluster: &Cluster) -> Result<Vec<String>> {
    let path = "jsonpath={range .items[*]}{.metadata.name} {.spec.renewTime}{\"\\n\"}{end}";
    let leases = cluster.kubectl(&["-n", "kube-node-lease", "get", "leases", "-o", path])?;
    Ok(leases.lines().map(ToOwned::to_owned).collect())
}

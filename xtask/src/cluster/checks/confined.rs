//! System calls that Kilo's containers may make: each container has the seccomp profile that its manifest
//! names, and agents also run under the runtime's default profile.

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::{agents, both, flows::Flows, settled};
use crate::cluster::{Cluster, deploy, node::Node};

/// Gives the agents the runtime's default profile, as documented in docs/install.md.
const DEFAULT: &str = r#"[{"op":"replace","path":"/spec/template/spec/containers/0/securityContext/seccompProfile",
    "value":{"type":"RuntimeDefault"}}]"#;

/// Every container of the agents has a seccomp filter or none, as its object says.
pub fn as_named(cluster: &Cluster) -> Result<String> {
    in_namespace(cluster, "kube-system", cluster.nodes.len())
}

/// The same for Kilo's containers in any namespace, of which there are at least so many.
pub fn in_namespace(cluster: &Cluster, namespace: &str, least: usize) -> Result<String> {
    let label = "app.kubernetes.io/part-of=kilo";
    let list =
        cluster.get(&["pods", "-n", namespace, "-l", label, "--field-selector=status.phase=Running"])?;
    let pods = list["items"].as_array().context("no list of pods")?;
    let mut said = Vec::new();
    for pod in pods.iter().filter(|pod| pod.pointer("/metadata/deletionTimestamp").is_none()) {
        let name = pod["metadata"]["name"].as_str().context("the pod has no name")?;
        said.extend(of_pod(cluster, pod).with_context(|| name.to_owned())?);
    }
    ensure!(said.len() >= least, "only {} containers in {namespace}: {said:?}", said.len());
    said.sort();
    said.dedup();
    Ok(format!("{} pods: {}", pods.len(), said.join(", ")))
}

/// What was found for each container of a pod.
fn of_pod(cluster: &Cluster, pod: &Value) -> Result<Vec<String>> {
    let node = cluster.node(pod["spec"]["nodeName"].as_str().context("it has no node")?)?;
    let mut said = Vec::new();
    for (containers, statuses) in
        [("initContainers", "initContainerStatuses"), ("containers", "containerStatuses")]
    {
        for container in pod["spec"][containers].as_array().into_iter().flatten() {
            let name = container["name"].as_str().context("a container has no name")?;
            let own = &container["securityContext"]["seccompProfile"]["type"];
            let profile =
                own.as_str().or_else(|| pod["spec"]["securityContext"]["seccompProfile"]["type"].as_str());
            let profile = profile.context("no manifest names its seccomp profile")?;
            let status = pod["status"][statuses].as_array().into_iter().flatten();
            let id = status
                .filter(|status| status["name"] == name)
                .find_map(|status| status["containerID"].as_str());
            let id = id.context("it has not been started")?.trim_start_matches("containerd://");
            let is_filtered = if containers == "containers" {
                added_filters(node, id)? > 0
            } else {
                was_filtered(node, id)?
            };
            ensure!(
                is_filtered == (profile != "Unconfined"),
                "{name} with {profile}: a seccomp filter of its own is {is_filtered}"
            );
            said.push(format!("{name} {profile}"));
        }
    }
    Ok(said)
}

/// Whether a container that has ended, and has no process left to inspect, was created with a seccomp
/// filter.
fn was_filtered(node: &Node, container: &str) -> Result<bool> {
    let text = node.sh(&format!("ctr --namespace k8s.io containers info {container}"))?;
    let made: Value = serde_json::from_str(&text)?;
    ensure!(made["Spec"]["process"].is_object(), "containerd does not say how {container} was made: {text}");
    Ok(made["Spec"]["linux"]["seccomp"].is_object())
}

/// Number of seccomp filters that a container's process has in addition to its node's: this machine may
/// itself be in a container.
fn added_filters(node: &Node, container: &str) -> Result<u32> {
    let status = node.container_status(container)?;
    ensure!(status.starts_with("Name:\tkg\n"), "its process is not kg: {status}");
    let (own, nodes) = (filters(&status)?, filters(&node.sh("cat /proc/1/status")?)?);
    own.checked_sub(nodes).with_context(|| format!("{own} filters, and its node has {nodes}"))
}

/// Number of seccomp filters, from the text of /proc/PID/status.
fn filters(status: &str) -> Result<u32> {
    let line = status.lines().find_map(|line| line.strip_prefix("Seccomp_filters:"));
    Ok(line.context("this kernel counts no seccomp filters")?.trim().parse()?)
}

/// Agents under the runtime's default profile start without a warning and without packet loss.
pub fn by_default(cluster: &Cluster) -> Result<String> {
    let shown = with_default(cluster);
    let put_back = deploy::apply_file(cluster, deploy::manifest_name())
        .and_then(|()| deploy::wait_rolled_out(cluster, "kilo", 180));
    both(shown, put_back)
}

fn with_default(cluster: &Cluster) -> Result<String> {
    let flows = Flows::start(cluster, None)?;
    let patched = cluster.kubectl(&["-n", "kube-system", "patch", "ds/kilo", "--type=json", "-p", DEFAULT]);
    let rolled = patched.and_then(|_| deploy::wait_rolled_out(cluster, "kilo", 180));
    let lost = both(flows.finish(), rolled)?;
    settled(cluster)?;
    let named = as_named(cluster)?;
    ensure!(named.contains("kilo RuntimeDefault"), "no agent has the default profile: {named}");
    Ok(format!("{named}; {}; {lost}", agents::attached(cluster)?))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn filters_are_counted() {
        let status = |name: &str| std::fs::read_to_string(name).unwrap();
        filters(&status("/proc/self/status")).unwrap();
        assert_eq!(filters("Name:\tkg\nSeccomp:\t2\nSeccomp_filters:\t1\n").unwrap(), 1);
        assert!(filters("Name:\tkg\nSeccomp:\t2\n").is_err());
    }
}

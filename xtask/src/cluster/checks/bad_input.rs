//! Faults of a cluster or a node, and their remedies, are reported where people look: in the last line of
//! the pod's log, in `kgctl status`, and in the termination message.

use std::{fs, time::Duration};

use anyhow::{Context as _, Result};

use super::{Skipped, both, removal, settled};
use crate::{
    cluster::{Cluster, deploy, node::Node, until},
    command::output,
};

const LIMIT: Duration = Duration::from_secs(60);

/// Runs the cases of every kernel on the last node, one after the other.
pub fn everything(cluster: &Cluster) -> Result<String> {
    run(
        cluster,
        &[
            ("no ClusterRole", no_role),
            ("an image of another architecture", other_architecture),
            ("another CNI's file in front", other_cni),
            ("no pod CIDR", no_pod_cidr),
        ],
    )
}

/// Deploys the manifest for kernels with WireGuard; on such a kernel there is nothing to see.
pub fn no_wireguard(cluster: &Cluster) -> Result<String> {
    if deploy::has_wireguard() {
        return Err(Skipped("this kernel has WireGuard").into());
    }
    run(cluster, &[("a kernel without WireGuard", without_wireguard)])
}

fn run(cluster: &Cluster, cases: &[(&str, Case)]) -> Result<String> {
    let node = cluster.remote();
    let mut said = Vec::new();
    for (name, case) in cases {
        let result = case(cluster, node).with_context(|| (*name).to_owned());
        let settled = settle(cluster).with_context(|| format!("after {name}"));
        let text = both(result, settled)?;
        said.push(format!("{name}: {text}"));
    }
    // Later checks read the logs of new pods.
    cluster.kubectl(&["-n", "kube-system", "rollout", "restart", "ds/kilo"])?;
    deploy::wait_rolled_out(cluster, "kilo", 120)?;
    Ok(said.join("\n    "))
}

/// Restores the manifests and waits until everybody reaches everybody.
fn settle(cluster: &Cluster) -> Result<()> {
    deploy::apply(cluster)?;
    settled(cluster)
}

type Case = fn(&Cluster, &Node) -> Result<String>;

/// Kilo's pod on that node.
fn pod(cluster: &Cluster, node: &Node) -> Result<serde_json::Value> {
    let on = format!("spec.nodeName={}", node.name());
    let label = "app.kubernetes.io/name=kilo";
    let list = cluster.get(&["pods", "-n", "kube-system", "-l", label, "--field-selector", &on])?;
    let pods = list["items"].as_array().into_iter().flatten();
    let mut alive = pods.filter(|pod| pod.pointer("/metadata/deletionTimestamp").is_none());
    alive.next().cloned().context("no pod of Kilo")
}

fn restart(cluster: &Cluster, node: &Node) -> Result<()> {
    // While another manifest rolls out, the node briefly has no pod.
    let pod = until("the node has a pod of Kilo", LIMIT, || pod(cluster, node).ok())?;
    let name = pod.pointer("/metadata/name").and_then(|name| name.as_str()).context("no name")?;
    cluster.kubectl(&["-n", "kube-system", "delete", "pod", name, "--ignore-not-found"]).map(drop)
}

/// Waits for a termination message with these words.
fn message(cluster: &Cluster, node: &Node, words: &str) -> Result<String> {
    let mut last = String::new();
    let found = until(&format!("a termination message with {words:?}"), LIMIT, || {
        let pod = pod(cluster, node).ok()?;
        last = pod.pointer("/status/containerStatuses/0").map(ToString::to_string).unwrap_or_default();
        terminated(&pod, words)
    });
    found.with_context(|| last)
}

/// Termination message of the container's last run, if it contains these words.
fn terminated(pod: &serde_json::Value, words: &str) -> Option<String> {
    ["state", "lastState"]
        .iter()
        .filter_map(|state| {
            let ended = pod.pointer(&format!("/status/containerStatuses/0/{state}/terminated"))?;
            ended["message"].as_str().map(ToOwned::to_owned)
        })
        .find(|message| message.contains(words))
}

/// Waits until the last line of the log contains these words.
fn last_line(cluster: &Cluster, node: &Node, words: &str) -> Result<String> {
    let mut last = String::new();
    let found = until(&format!("a last line with {words:?}"), LIMIT, || {
        let pod = pod(cluster, node).ok()?;
        let name = pod.pointer("/metadata/name")?.as_str()?.to_owned();
        for more in [&[][..], &["--previous"]] {
            let logs = ["-n", "kube-system", "logs", &name, "-c", "kilo", "--tail=1"];
            last = match cluster.kubectl(&[&logs[..], more].concat()) {
                Ok(line) if line.contains(words) => return Some(line.trim().to_owned()),
                Ok(line) => line,
                Err(error) => format!("{error:#}"),
            };
        }
        None
    });
    found.with_context(|| last)
}

/// Waits until `kgctl status` prints these words.
fn status(cluster: &Cluster, words: &str, arguments: &[&str]) -> Result<()> {
    removal::install_kgctl(cluster)?;
    let mut last = String::new();
    let found = until(&format!("a status with {words:?}"), LIMIT * 2, || {
        let mut command = cluster.first().command(removal::KGCTL).ok()?;
        last = match output(command.arg("status").args(arguments)) {
            Ok(said) => said,
            Err(error) => format!("{error:#}"),
        };
        last.contains(words).then_some(())
    });
    found.with_context(|| last)
}

/// The part of a message worth showing: its last line.
fn end(text: &str) -> String {
    text.trim().lines().last().unwrap_or_default().chars().take(300).collect()
}

fn no_role(cluster: &Cluster, node: &Node) -> Result<String> {
    cluster.kubectl(&["delete", "clusterrolebinding", "kilo"])?;
    restart(cluster, node)?;
    let words = "apply the ClusterRole and ClusterRoleBinding of manifests/";
    let said = message(cluster, node, words)?;
    last_line(cluster, node, words)?;
    status(cluster, words, &[])?;
    Ok(end(&said))
}

/// Runs on the API server's node, because without the mesh the logs of another location are out of reach.
fn without_wireguard(cluster: &Cluster, _: &Node) -> Result<String> {
    let node = cluster.first();
    // The other manifest's device would do.
    cluster.kubectl(&["-n", "kube-system", "delete", "ds", "kilo-wireguard", "--cascade=foreground"])?;
    deploy::apply_file(cluster, "kilo-kubeadm.yaml")?;
    restart(cluster, node)?;
    let words = "modprobe wireguard";
    let said = message(cluster, node, words)?;
    last_line(cluster, node, words)?;
    status(cluster, words, &[])?;
    Ok(end(&said))
}

/// Installs a program whose header names a machine that nobody emulates. The runtime writes message and
/// log, which can only name the error; the remedy is in `kgctl status` and docs/troubleshooting.md.
fn other_architecture(cluster: &Cluster, _: &Node) -> Result<String> {
    let mut program = fs::read(std::env::current_exe()?.with_file_name("kgctl"))?;
    // e_machine of the ELF header selects the emulator, and `cargo xtask dist` registers one for arm64.
    program[18..20].fill(0xff);
    for node in &cluster.nodes {
        fs::write(node.path("/opt/kg-other")?, &program)?;
        node.sh("chmod 755 /opt/kg-other")?;
    }
    let patch = r#"{"spec":{"template":{"spec":{"containers":[{"name":"kilo","command":["/other"],
        "volumeMounts":[{"name":"other","mountPath":"/other"}]}],
        "volumes":[{"name":"other","hostPath":{"path":"/opt/kg-other","type":"File"}}]}}}}"#;
    cluster.kubectl(&["-n", "kube-system", "patch", "ds", "kilo", "--type=strategic", "-p", patch])?;
    let said = said_of_other_architecture(cluster);
    cluster.kubectl(&["-n", "kube-system", "rollout", "undo", "ds/kilo"])?;
    Ok(end(&said?))
}

fn said_of_other_architecture(cluster: &Cluster) -> Result<String> {
    let words = "exec format error";
    // The rollout replaces one node's pod first; the others wait for it.
    let (node, said) = until(words, LIMIT, || {
        let said = |node| Some((node, terminated(&pod(cluster, node).ok()?, words)?));
        cluster.nodes.iter().find_map(said)
    })?;
    last_line(cluster, node, words)?;
    status(cluster, "name one that is built for both (docs/troubleshooting.md)", &[])?;
    Ok(said)
}

fn other_cni(cluster: &Cluster, node: &Node) -> Result<String> {
    let file = "/etc/cni/net.d/05-other.conflist";
    node.write(file, r#"{"cniVersion":"0.4.0","name":"other","plugins":[{"type":"bridge"}]}"#)?;
    restart(cluster, node)?;
    let words = format!("CNI configuration {file} comes before");
    let said = last_line(cluster, node, &words);
    let shown = status(cluster, &words, &[node.name()]);
    let ended = ended(cluster, node, &words);
    node.sh(&format!("rm {file}"))?;
    let said = said?;
    shown?;
    ended?;
    Ok(end(&said))
}

/// Ends an agent that keeps running despite a fault: its termination message names the fault.
fn ended(cluster: &Cluster, node: &Node, words: &str) -> Result<()> {
    node.sh("pkill -TERM -x kg")?;
    message(cluster, node, words).map(drop)
}

/// Without the controller manager nobody assigns pod CIDRs.
fn no_pod_cidr(cluster: &Cluster, node: &Node) -> Result<String> {
    let (manifest, aside) = ("/etc/kubernetes/manifests/kube-controller-manager.yaml", "/opt/aside.yaml");
    let first = cluster.first();
    first.sh(&format!("mv {manifest} {aside}"))?;
    let gone = || first.sh("pidof kube-controller-manager").is_err().then_some(());
    until("the controller manager has ended", LIMIT, gone)?;
    let said = (|| {
        cluster.kubectl(&["delete", "node", node.name()])?;
        node.kill("kubelet")?;
        until("the node is registered", LIMIT, || {
            let location = format!("kilo.squat.ai/location={}", node.site.location());
            cluster.kubectl(&["annotate", "--overwrite", "node", node.name(), &location]).ok()
        })?;
        status(cluster, "no pod CIDR: kube-controller-manager needs --allocate-node-cidrs", &[])?;
        ended(cluster, node, "--allocate-node-cidrs")?;
        // The next container's log may exist and still be empty.
        let newest = "tail -n 1 $(ls -t $(find /var/log/pods/kube-system_kilo-*/kilo -name '*.log' -size +0) | head -n 1)";
        until("the last line of the log says what to do", LIMIT, || {
            node.sh(newest).ok().filter(|line| line.contains("--allocate-node-cidrs"))
        })
    })();
    first.sh(&format!("mv {aside} {manifest}"))?;
    let said = said?;
    // The node may get a different pod CIDR from the one that its pods' addresses are in.
    deploy::apply(cluster)?;
    removal::renew_pods(cluster)?;
    Ok(end(&said))
}

//! What is shipped besides the agent, against the real API server.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use super::{Skipped, agents, both, confined, settled};
use crate::cluster::{Cluster, deploy, until};

/// Deploys the webhook by its manifest, with the certificate that it generates: it rejects invalid Peers
/// and accepts valid ones, in containers with the seccomp profile that the manifest names.
pub fn webhook(cluster: &Cluster) -> Result<String> {
    deploy::apply_file(cluster, "peer-validation.yaml")?;
    let deployment = "deployment/peer-validation-server";
    cluster.kubectl(&["-n", "kilo", "rollout", "status", deployment, "--timeout=120s"])?;
    let named = confined::in_namespace(cluster, "kilo", 1);
    let valid = peer("192.0.2.1");
    until("a valid peer is accepted", Duration::from_secs(30), || cluster.apply(&valid).ok())?;
    let refused = cluster.apply(&peer("nonsense"));
    cluster.kubectl(&["delete", "peer", "laptop"])?;
    cluster.kubectl(&["delete", "validatingwebhookconfiguration", "peers.kilo.squat.ai"])?;
    cluster.kubectl(&["delete", "namespace", "kilo", "--wait=false"])?;
    let named = named?;
    match refused {
        Err(error) if format!("{error:#}").contains("peers.kilo.squat.ai") => {
            Ok(format!("{error:#}\n    {named}"))
        }
        Err(error) => bail!("the peer was not refused by the webhook: {error:#}"),
        Ok(()) => bail!("a peer whose endpoint is not a valid address was accepted"),
    }
}

/// With the policy of manifests/own-node.yaml, agents write their own Node with tokens from the kubelet;
/// the same account without a node may write none.
pub fn own_node(cluster: &Cluster) -> Result<String> {
    if !cluster.release.is_current {
        return Err(Skipped("Kubernetes before 1.30 has no ValidatingAdmissionPolicy").into());
    }
    deploy::apply_file(cluster, "own-node.yaml")?;
    let shown = with_the_policy(cluster);
    both(shown, cluster.kubectl(&["delete", "-f", "/opt/manifests/own-node.yaml"]).map(drop))
}

fn with_the_policy(cluster: &Cluster) -> Result<String> {
    let node = cluster.remote().name();
    let label =
        format!("apiVersion: v1\nkind: Node\nmetadata: {{name: {node}, labels: {{kilo-test: 'true'}}}}\n");
    // The account may not read a Node first, as other kubectl commands do.
    let apply = ["apply", "--server-side", "--dry-run=server", "--validate=false", "-f", "-"];
    let account = "--as=system:serviceaccount:kube-system:kilo";
    let mut said = String::new();
    let refused = until("the policy is in force", Duration::from_secs(30), || {
        let refused = cluster.feed(&[&apply[..], &[account]].concat(), &label).err()?;
        said = format!("{refused:#}");
        said.contains("kilo-own-node").then_some(())
    });
    refused.with_context(|| said.clone())?;
    let before = last_seen(cluster)?;
    cluster.kubectl(&["-n", "kube-system", "rollout", "restart", "ds/kilo"])?;
    deploy::wait_rolled_out(cluster, "kilo", 180)?;
    until("every agent has written its node", Duration::from_secs(60), || {
        let now = last_seen(cluster).ok()?;
        before.iter().all(|node| !now.contains(node)).then_some(())
    })?;
    settled(cluster)?;
    Ok(format!("{said}\n    {}", agents::attached(cluster)?))
}

/// The heartbeat of each node.
fn last_seen(cluster: &Cluster) -> Result<Vec<String>> {
    let path =
        r"jsonpath={range .items[*]}{.metadata.name} {.metadata.annotations.kilo\.squat\.ai/last-seen};{end}";
    let text = cluster.kubectl(&["get", "nodes", "-o", path])?;
    Ok(text.split_terminator(';').map(ToOwned::to_owned).collect())
}

/// The schema accepts any text as an address; the webhook does not.
fn peer(host: &str) -> String {
    format!(
        "apiVersion: kilo.squat.ai/v1alpha1\nkind: Peer\nmetadata: {{name: laptop}}\n\
         spec: {{allowedIPs: [10.5.0.1/32], publicKey: GY5aT1N9dTR/nJnT1N2f4ClZWVj0jOAld0r8ysWLyjg=, \
         endpoint: {{dnsOrIP: {{ip: {host}}}, port: 51820}}}}\n"
    )
}

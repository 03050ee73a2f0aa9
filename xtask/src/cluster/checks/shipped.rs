//! What is shipped besides the agent, as the real API server sees it.

use std::time::Duration;

use anyhow::{Result, bail};

use super::agents;
use crate::cluster::{Cluster, deploy, until};

/// What checks cause that remove everything, or make nodes anew: who starts first leads for a moment.
const CAUSED: &[&str] = &["this node leads its location with the private endpoint"];

/// No agent is refused anything, none has a warning to report, and none lost a program.
pub fn logs(cluster: &Cluster) -> Result<String> {
    no_warning_but(cluster, &[])
}

/// The same after all other checks.
pub fn logs_in_the_end(cluster: &Cluster) -> Result<String> {
    no_warning_but(cluster, CAUSED)
}

fn no_warning_but(cluster: &Cluster, caused: &[&str]) -> Result<String> {
    let mut lines = 0;
    for pod in deploy::pods(cluster, "app.kubernetes.io/name=kilo")? {
        let log = cluster.kubectl(&["-n", "kube-system", "logs", &pod.name, "-c", "kilo"])?;
        lines += log.lines().count();
        let bad = |line: &&str| {
            ["\"WARN\"", "\"ERROR\"", "forbidden"].iter().any(|word| line.contains(word))
                // What the cluster's other checks cause: its API server is away or slow.
                && !line.contains("API server")
                && !line.contains("watch interrupted")
                && !caused.iter().any(|text| line.contains(text))
        };
        let bad: Vec<_> = log.lines().filter(bad).collect();
        if !bad.is_empty() {
            bail!("{} on {}:\n    {}", pod.name, pod.node, bad.join("\n    "));
        }
    }
    Ok(format!("{lines} lines; {}", agents::attached(cluster)?))
}

/// The webhook by its manifest, with the certificate that it makes itself: it refuses what is
/// wrong, and lets the rest pass.
pub fn webhook(cluster: &Cluster) -> Result<String> {
    deploy::apply_file(cluster, "peer-validation.yaml")?;
    let deployment = "deployment/peer-validation-server";
    cluster.kubectl(&["-n", "kilo", "rollout", "status", deployment, "--timeout=120s"])?;
    let valid = peer("192.0.2.1");
    until("a valid peer is accepted", Duration::from_secs(30), || cluster.apply(&valid).ok())?;
    let refused = cluster.apply(&peer("nonsense"));
    cluster.kubectl(&["delete", "peer", "laptop"])?;
    cluster.kubectl(&["delete", "validatingwebhookconfiguration", "peers.kilo.squat.ai"])?;
    cluster.kubectl(&["delete", "namespace", "kilo", "--wait=false"])?;
    match refused {
        Err(error) if format!("{error:#}").contains("peers.kilo.squat.ai") => Ok(format!("{error:#}")),
        Err(error) => bail!("the peer was refused by somebody else: {error:#}"),
        Ok(()) => bail!("a peer whose endpoint is not a valid address was accepted"),
    }
}

/// The schema takes any text for an address; the webhook does not.
fn peer(host: &str) -> String {
    format!(
        "apiVersion: kilo.squat.ai/v1alpha1\nkind: Peer\nmetadata: {{name: laptop}}\n\
         spec: {{allowedIPs: [10.5.0.1/32], publicKey: GY5aT1N9dTR/nJnT1N2f4ClZWVj0jOAld0r8ysWLyjg=, \
         endpoint: {{dnsOrIP: {{ip: {host}}}, port: 51820}}}}\n"
    )
}

//! `kgctl` from an administrator's machine: it reaches each node through the API server, collects a report,
//! and runs a test.

use std::{
    collections::BTreeSet,
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};

use super::removal::{KGCTL, install_kgctl};
use crate::{
    cluster::{
        Cluster, deploy,
        network::{self, OUTSIDE, OUTSIDE_V6},
        until,
    },
    command::output,
};

/// A pre-shared key and a token in an annotation, neither of which may be in a report.
const CANARY: &str = "Q0FOQVJZQ0FOQVJZQ0FOQVJZQ0FOQVJZQ0FOQVJZQ0E=";
const CANARY_TOKEN: &str = "abcdef.canarycanarycana";
const PEER: &str = "kgctl-canary";
/// Name of the outside host as a VPN peer.
const VPN_PEER: &str = "kgctl-vpn";

/// Runs kgctl on the first node with the administrator's kubeconfig; returns its standard output.
pub fn kgctl(cluster: &Cluster, arguments: &[&str]) -> Result<String> {
    install_kgctl(cluster)?;
    output(cluster.first().command(KGCTL)?.args(arguments))
}

/// Shows the versions of all agents, and for a node by name what it would do with a packet and what it
/// drops.
pub fn into_nodes(cluster: &Cluster) -> Result<String> {
    let shown = kgctl(cluster, &["version"])?;
    println!("$ kgctl version\n{shown}");
    for node in &cluster.nodes {
        let row = shown.lines().find(|line| line.starts_with(&format!("{} ", node.name())));
        let version = row.and_then(|row| row.split_whitespace().nth(1));
        ensure!(version == Some(env!("CARGO_PKG_VERSION")), "{}: {shown}", node.name());
    }
    let pods = deploy::start_test_servers(cluster)?;
    let (near, far) = (deploy::pod_on(&pods, cluster.first())?, deploy::pod_on(&pods, cluster.remote())?);
    let (src, dst) = (format!("--src={}", near.address), format!("--dst={}", far.address));
    let traced = kgctl(cluster, &["trace", &near.node, &src, &dst])?;
    println!("$ kgctl trace {} {src} {dst}\n{traced}", near.node);
    ensure!(traced.contains("a pod of this node") && traced.contains("\n=> "), "{traced}");
    let json = kgctl(cluster, &["trace", &near.node, &src, &dst, "-o", "json"])?;
    ensure!(serde_json::from_str::<serde_json::Value>(&json).is_ok(), "{json}");

    // A multicast address in the mesh: dropped on entry.
    let remote = cluster.remote().name();
    let listening = cluster
        .first()
        .command(KGCTL)?
        .args(["monitor", remote, "--reason=not_unicast", "--count=1"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut listening = Some(listening);
    let shown = until("a drop is shown", Duration::from_secs(30), || {
        let _ = cluster.remote().sh("ping -c 1 -W 1 -I kilo0 224.0.0.9 || true");
        let ended = listening.as_mut()?.try_wait().ok()??;
        let output = listening.take()?.wait_with_output().ok()?;
        Some((
            ended.success(),
            String::from_utf8_lossy(&output.stdout).into_owned(),
            String::from_utf8_lossy(&output.stderr).into_owned(),
        ))
    })?;
    println!("$ kgctl monitor {remote} --reason=not_unicast --count=1\n{}{}", shown.1, shown.2);
    ensure!(shown.0 && shown.1.contains("not_unicast") && shown.2.contains("drops shown"), "{shown:?}");

    // When interrupted, it ends its remote end, which prints the last words.
    let script = format!(
        "{KGCTL} monitor {remote} > /tmp/monitor.log 2>&1 & monitor=$!
         for _ in $(seq 600); do
             grep -q 'listening to drops' /tmp/monitor.log && break
             kill -0 $monitor; sleep 0.1
         done
         kill -INT $monitor; wait $monitor || true; cat /tmp/monitor.log"
    );
    let said = cluster.first().sh(&script)?;
    ensure!(said.contains("listening to drops"), "it has begun: {said:?}");
    // An older API server closes both directions at once.
    let has_last_words = !cluster.release.is_current || said.contains("drops shown");
    ensure!(has_last_words, "the other end has last words: {said:?}");
    until("the other end has ended", Duration::from_secs(30), || {
        let left = cluster.remote().sh("pgrep -f '[k]gctl monitor' || true").ok()?;
        left.trim().is_empty().then_some(())
    })?;
    Ok(format!("{} agents of {}", cluster.nodes.len(), env!("CARGO_PKG_VERSION")))
}

/// The archive covers every node and contains no key or token.
pub fn sysdump(cluster: &Cluster) -> Result<String> {
    cluster.apply(&format!(
        "apiVersion: kilo.squat.ai/v1alpha1\nkind: Peer\nmetadata: {{name: {PEER}, annotations: {{note: 'token {CANARY_TOKEN}'}}}}\n\
         spec: {{allowedIPs: [10.5.77.1/32], publicKey: GY5aT1N9dTR/nJnT1N2f4ClZWVj0jOAld0r8ysWLyjg=, presharedKey: {CANARY}}}\n"
    ))?;
    let made = kgctl(cluster, &["sysdump", "--output=/tmp/dump.tar.gz"]);
    cluster.kubectl(&["delete", "peer", PEER])?;
    let said = made?;
    println!("$ kgctl sysdump --output=/tmp/dump.tar.gz\n{said}");
    ensure!(said.contains("nothing is missing"), "{said}");
    let first = cluster.first();
    let listed = first.sh("cd /tmp && rm -rf dump && mkdir dump && tar -xzf dump.tar.gz -C dump --strip-components=1 && cd dump && find -type f | sort")?;
    println!("{listed}");
    for node in &cluster.nodes {
        let files = [
            "status.json",
            "metrics.txt",
            "tables.txt",
            "routes.txt",
            "rules.txt",
            "nft.txt",
            "log-kilo.txt",
        ];
        for file in files {
            ensure!(
                listed.contains(&format!("./nodes/{}/{file}", node.name())),
                "{file} of {} is missing",
                node.name()
            );
        }
        let tables = first.sh(&format!("cat /tmp/dump/nodes/{}/tables.txt", node.name()))?;
        ensure!(tables.contains("[prefix]") && tables.lines().count() > 20, "{tables}");
    }
    ensure!(first.sh("cat /tmp/dump/peers.yaml")?.contains(PEER), "the peer is in it");
    // The nodes' own keys, the canaries, and service account tokens.
    let mut secrets = BTreeSet::from([CANARY.to_owned(), CANARY_TOKEN.to_owned(), "eyJhbGciOi".to_owned()]);
    for node in &cluster.nodes {
        secrets.insert(node.sh("cat /var/lib/kilo/key")?.trim().to_owned());
    }
    for secret in &secrets {
        let found = first.sh(&format!("grep -rlF -- '{secret}' /tmp/dump || true"))?;
        ensure!(found.trim().is_empty(), "a secret is in {found}");
    }
    first.sh("rm -rf /tmp/dump /tmp/dump.tar.gz")?;
    Ok(said.trim().to_owned())
}

/// The test passes, fails when a path is cut, and leaves nothing behind.
pub fn connectivity(cluster: &Cluster) -> Result<String> {
    let peer = VpnPeer::connect(cluster)?;
    // It does not matter whether anything listens there.
    let outside = [format!("--outside={OUTSIDE}:8080"), format!("--outside=[{OUTSIDE_V6}]:8080")];
    let families = if cluster.release.has_two_families() { 2 } else { 1 };
    let arguments = outside.iter().take(families).map(String::as_str);
    let shown = kgctl(cluster, &std::iter::once("connectivity-test").chain(arguments).collect::<Vec<_>>());
    drop(peer);
    let shown = shown?;
    println!("$ kgctl connectivity-test {}\n{shown}", outside.join(" "));
    ensure!(shown.contains("All ") && shown.contains("ok       cleartext between locations"), "{shown}");
    for column in ["outside", &format!("peer/{VPN_PEER}")] {
        ensure!(
            shown.lines().next().is_some_and(|head| head.contains(column)),
            "{column} was tried: {shown}"
        );
    }
    nothing_is_left(cluster)?;

    // Pods of the first node no longer reach the far one.
    let far = cluster.remote();
    let address = deploy::pod_on(&deploy::start_test_servers(cluster)?, far)?.address.to_string();
    let prefix = cluster.kubectl(&["get", "node", far.name(), "-o", "jsonpath={.spec.podCIDR}"])?;
    let rule = format!("FORWARD -d {} -p udp --dport 8080 -j DROP", prefix.trim());
    far.sh(&format!("iptables -I {rule}"))?;
    let red = kgctl(cluster, &["connectivity-test", cluster.first().name(), far.name()]);
    far.sh(&format!("iptables -D {rule}"))?;
    let Err(red) = red else { bail!("it is green although {address}'s node drops") };
    let red = format!("{red:#}");
    println!("{red}");
    ensure!(red.contains("FAIL") && red.contains("probes failed"), "{red}");
    nothing_is_left(cluster)?;
    Ok(shown.lines().last().unwrap_or_default().to_owned())
}

/// An interrupted connectivity test removes what it created; a killed one leaves that to the next.
pub fn ended(cluster: &Cluster) -> Result<String> {
    let far = cluster.remote();
    let said = end_by(cluster, "INT")?;
    ensure!(said.contains("interrupted"), "{said}");
    nothing_is_left(cluster)?;
    // The next test cleans up after a killed one.
    end_by(cluster, "KILL")?;
    let again = kgctl(cluster, &["connectivity-test", far.name()]).context("after one that was killed")?;
    ensure!(again.contains("All "), "{again}");
    nothing_is_left(cluster)?;
    Ok(String::new())
}

/// The outside host as a VPN peer until dropped.
struct VpnPeer(Child);

impl VpnPeer {
    /// Waits until the leaders of both locations have completed a handshake with it.
    fn connect(cluster: &Cluster) -> Result<Self> {
        let (outside, first) = (network::outside(), cluster.first());
        outside.ip(&format!("route replace 192.0.2.0/24 via {}\n", network::ROUTER))?;
        let program = std::env::current_exe()?.with_file_name("kgctl");
        let mut command = outside.command(program);
        command
            .args([
                "connect",
                VPN_PEER,
                "--allowed-ip=10.5.78.1/32",
                "--interface=kgctl-vpn",
                "--wireguard=userspace",
            ])
            .arg(format!("--private-key={}", first.path("/tmp/kgctl-vpn.key")?.display()))
            .arg(format!("--kubeconfig={}", first.path("/etc/kubernetes/admin.conf")?.display()));
        let peer = Self(command.spawn()?);
        for leader in cluster.nodes.iter().filter(|node| node.site.public.is_some()) {
            until(
                &format!("{} has a handshake with the VPN peer", leader.name()),
                Duration::from_secs(60),
                || {
                    let shown = kgctl(cluster, &["status", leader.name()]).ok()?;
                    let tunnel = shown.lines().find(|line| line.starts_with(&format!("peer:{VPN_PEER} ")))?;
                    (!tunnel.contains(" never ")).then_some(())
                },
            )?;
        }
        Ok(peer)
    }
}

impl Drop for VpnPeer {
    fn drop(&mut self) {
        // SIGTERM makes it remove its Peer and its interface.
        let _ = Command::new("kill").arg(self.0.id().to_string()).status();
        let _ = self.0.wait();
    }
}

/// Ends a connectivity test with this signal as soon as its namespace exists; returns its output.
fn end_by(cluster: &Cluster, signal: &str) -> Result<String> {
    install_kgctl(cluster)?;
    let script = format!(
        "{KGCTL} connectivity-test > /tmp/connectivity.log 2>&1 & test=$!
         until kubectl get namespaces -o name | grep -q connectivity; do kill -0 $test; sleep 0.1; done
         kill -{signal} $test; wait $test || true; cat /tmp/connectivity.log"
    );
    cluster.first().sh(&script)
}

fn nothing_is_left(cluster: &Cluster) -> Result<()> {
    let left = cluster.kubectl(&["get", "namespaces", "-o", "name"])?;
    ensure!(!left.contains("connectivity"), "{left}");
    Ok(())
}

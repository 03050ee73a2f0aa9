//! A leader whose WireGuard is another project's program, Debian's
//! wireguard-go: the agent only configures it, over the standard socket.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::Signal;

use super::{
    Lab, agents,
    counters::{self, action},
    matrix,
    network::Node,
    probe, vpn,
};

const LIMIT: Duration = Duration::from_secs(60);
/// Process id of wireguard-go, in the node's own /run.
const PID: &str = "/run/wireguard-go.pid";

/// The node that runs it; all others use the kernel's WireGuard or ours.
const NODE: &str = "b1";

/// Its agent takes the device that is there, whatever program made it.
const ADOPT: &[&str] = &["--create-interface=false", "--wireguard=auto"];

/// Replaces the device by one of wireguard-go, and restores it.
pub fn run(lab: &mut Lab) -> Result<String> {
    let node = lab.network.node(NODE)?.clone();
    let key = public_key(&node)?;
    replace_device(lab, &node)?;
    let result = configured_and_used(lab, &node, &key);
    if lab.agents.pid(NODE).is_some() {
        lab.agents.stop(NODE, Signal::SIGTERM)?;
    }
    node.netns.sh("ip link delete kilo0")?;
    lab.agents.start(&node)?;
    agents::wait_healthy(&node.netns, LIMIT)?;
    matrix::settle(&lab.network, LIMIT)?;
    result
}

fn public_key(node: &Node) -> Result<String> {
    Ok(node.netns.sh("wg pubkey < /var/lib/kilo/key")?.trim().to_owned())
}

/// Removes the current device, then starts wireguard-go and an agent that expects a device.
fn replace_device(lab: &mut Lab, node: &Node) -> Result<()> {
    lab.agents.stop(NODE, Signal::SIGTERM)?;
    node.netns.sh(&format!(
        "ip link delete kilo0
         for i in $(seq 100); do test -e /run/wireguard/kilo0.sock || break; sleep 0.1; done
         WG_PROCESS_FOREGROUND=1 setsid wireguard-go kilo0 </dev/null >/run/wireguard-go.log 2>&1 & echo $! > {PID}
         for i in $(seq 100); do wg show kilo0 >/dev/null 2>&1 && exit; sleep 0.1; done; cat /run/wireguard-go.log; exit 1"
    ))?;
    lab.agents.start_with(node, ADOPT)?;
    agents::wait_healthy(&node.netns, LIMIT)
}

fn configured_and_used(lab: &mut Lab, node: &Node, key: &str) -> Result<String> {
    lab.agents.wait_until_ready(&lab.network, LIMIT)?;
    matrix::settle(&lab.network, LIMIT)?;
    let shown = node.netns.sh("wg show kilo0 public-key")?;
    ensure!(shown.trim() == key, "the device has the key {shown}, the node {key}");
    let wanted = by_key(&lab.agents.kgctl(&["showconf", "node", NODE])?);
    let shown = node.netns.sh("wg show kilo0 allowed-ips")?;
    let configured: BTreeMap<String, BTreeSet<String>> = shown
        .lines()
        .filter_map(|line| line.split_once('\t'))
        .map(|(key, list)| (key.to_owned(), list.split(' ').map(ToOwned::to_owned).collect()))
        .collect();
    ensure!(configured == wanted, "wireguard-go has {configured:?}, kgctl showconf says {wanted:?}");
    let before = encrypted(node)?;
    let matrix = matrix::run(&lab.network)?;
    matrix.all_passed()?;
    let packets = encrypted(node)? - before;
    ensure!(packets > 0, "{NODE} encrypts nothing");
    // A change of one peer, live.
    vpn::preshared_key(lab)?;
    let who = node.netns.sh(&format!("cat /proc/$(cat {PID})/comm"))?;
    ensure!(who.trim() == "wireguard-go", "the device is of {who}");
    // It outlives the agent, and the next one takes it over.
    lab.agents.stop(NODE, Signal::SIGKILL)?;
    let (a2, b2) = (lab.network.node("a2")?, lab.network.node("b2")?);
    probe::until_seen_as(&a2.pod, b2.pod_ip(), a2.pod_ip(), LIMIT).context("while no agent runs")?;
    lab.agents.start_with(node, ADOPT)?;
    agents::wait_healthy(&node.netns, LIMIT)?;
    let (a2, b2) = (lab.network.node("a2")?, lab.network.node("b2")?);
    probe::until_seen_as(&b2.pod, a2.pod_ip(), b2.pod_ip(), LIMIT)?;
    Ok(format!("({} probes, {packets} packets encrypted)", matrix.total()))
}

fn encrypted(node: &Node) -> Result<u64> {
    Ok(action(&counters::scrape(&node.netns)?, "encrypt"))
}

/// Allowed IPs of each peer in a configuration of `wg setconf`.
fn by_key(conf: &str) -> BTreeMap<String, BTreeSet<String>> {
    let value = |section: &str, name: &str| {
        section.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(" = ").map(ToOwned::to_owned))
    };
    let peers = conf.split("[Peer]").skip(1);
    let of = |section| {
        let allowed = value(section, "AllowedIPs").unwrap_or_default();
        Some((value(section, "PublicKey")?, allowed.split(", ").map(ToOwned::to_owned).collect()))
    };
    peers.filter_map(of).collect()
}

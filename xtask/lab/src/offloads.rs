//! Offloads: whether the kernel or a device segments, merges or completes checksums, the bytes that
//! arrive are those that were sent.

use std::{net::IpAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};

use super::{
    Lab, bulk,
    counters::{self, action},
    netns::Netns,
    network::Network,
};

/// Bytes of a transfer, each way.
const BYTES: usize = 512 * 1024;
/// More than any segment carries here.
const SEGMENT: usize = 1420;

/// Whether pods' and nodes' devices have their offloads on, and a name for that.
struct Setting {
    name: &'static str,
    pods: bool,
    nodes: bool,
}

const SETTINGS: [Setting; 4] = [
    Setting { name: "all on", pods: true, nodes: true },
    Setting { name: "pods off", pods: false, nodes: true },
    Setting { name: "nodes off", pods: true, nodes: false },
    Setting { name: "all off", pods: false, nodes: false },
];

/// From pod to pod: through both leaders, between leaders, inside a location.
const PATHS: [(&str, &str); 3] = [("a2", "b2"), ("a1", "b1"), ("a2", "a3")];

/// Sends known bytes through every path with every setting.
pub fn run(lab: &mut Lab) -> Result<String> {
    let network = &lab.network;
    let result = with_each_setting(network);
    // Restore them: a veth device merges nothing unless asked to.
    let restored = each_link(network, |_| "tx on sg on tso on gso on gro off".to_owned());
    let (steered, longest) = result?;
    restored?;
    let [on, .., off] = steered.as_slice() else { return Ok(String::new()) };
    let segments = (BYTES / SEGMENT) as u64;
    ensure!(*off >= segments, "without offloads {off} packets carried what takes {segments} segments");
    ensure!(on < off, "with offloads it took {on} packets, without {off}: nothing was merged");
    Ok(format!(
        "({} transfers of {} KB; {on} packets with, {off} without offloads; longest stall {} ms)",
        SETTINGS.len() * PATHS.len() * 2,
        BYTES / 1024,
        longest.as_millis()
    ))
}

/// Runs all transfers with each setting. Returns how many packets a2 steered for the first one with each, and
/// the longest time without a byte.
fn with_each_setting(network: &Network) -> Result<(Vec<u64>, Duration)> {
    let (mut steered, mut longest) = (Vec::new(), Duration::ZERO);
    for setting in &SETTINGS {
        switch(network, setting).with_context(|| setting.name.to_owned())?;
        let (packets, stall) = transfers(network).with_context(|| format!("offloads: {}", setting.name))?;
        steered.push(packets);
        longest = longest.max(stall);
    }
    Ok((steered, longest))
}

/// Runs one transfer per path and family. Returns how many packets a2 steered for the first, and the longest
/// time without a byte.
fn transfers(network: &Network) -> Result<(u64, Duration)> {
    let (mut first, mut longest) = (None, Duration::ZERO);
    for (from, to) in PATHS {
        let (from, to) = (network.node(from)?, network.node(to)?);
        for target in [IpAddr::V4(to.pod_ip()), IpAddr::V6(to.pod_ip6())] {
            let steered = || anyhow::Ok(action(&counters::scrape(&from.netns)?, "steer"));
            let before = steered()?;
            longest = longest.max(bulk::run(&from.pod, target, BYTES)?);
            first = first.or(Some(steered()? - before));
        }
    }
    Ok((first.context("no path")?, longest))
}

fn switch(network: &Network, setting: &Setting) -> Result<()> {
    each_link(network, |pod| {
        let state = if if pod { setting.pods } else { setting.nodes } { "on" } else { "off" };
        ["tx", "sg", "tso", "gso", "gro"].map(|feature| format!("{feature} {state} ")).concat()
    })
}

/// Applies features to the Ethernet links of pods (`true`), nodes and the router.
fn each_link(network: &Network, features: impl Fn(bool) -> String) -> Result<()> {
    let set = |netns: &Netns, pod| {
        netns.sh(&format!(
            "for d in $(ip -o link show type veth | cut -d: -f2 | cut -d@ -f1); do ethtool -K $d {}; done",
            features(pod)
        ))
    };
    for node in &network.nodes {
        set(&node.pod, true)?;
        set(&node.netns, false)?;
    }
    set(&network.router, false).map(drop)
}

//! Tunnels that pods make. Their packets bear an outer header already, so the kernel refuses to write another
//! in place: a device does it.

use std::net::{IpAddr, Ipv4Addr};

use anyhow::{Context as _, Result, ensure};

use super::{Lab, bulk, counters::drops, counters::scrape, network::Node, probe};

/// Bytes of a transfer, each way.
const BYTES: usize = 512 * 1024;
/// Addresses inside tunnels of that kind: servers stay on them.
const fn ends(kind: u8) -> [Ipv4Addr; 2] {
    [Ipv4Addr::new(10, 99, kind, 1), Ipv4Addr::new(10, 99, kind, 2)]
}

/// Kinds of tunnels: name, and arguments of `ip link add`.
const KINDS: [(&str, &str); 3] = [("vxlan", "vxlan id 7 dstport 4789"), ("gre", "gretap"), ("ipip", "ipip")];

/// What iproute2 prints when the kernel does not have a kind of device.
const UNKNOWN: [&str; 3] = ["Unknown device type", "Operation not supported", "Not supported"];

/// Joins a pod with one of the other location, then with one of its own, by each kind.
pub fn run(lab: &mut Lab) -> Result<String> {
    let (mut figures, mut tried) = (Vec::new(), 0);
    for ((name, arguments), kind) in KINDS.into_iter().zip(0..) {
        for to in ["b2", "a3"] {
            let (from, to) = (lab.network.node("a2")?, lab.network.node(to)?);
            if !join(from, to, arguments, ends(kind))? {
                figures.push(format!("{name} not in this kernel"));
                break;
            }
            tried += 1;
            let result = carry(lab, from, to, ends(kind)[1]);
            for node in [from, to] {
                node.pod.ip("link delete tunnel\n")?;
            }
            let (sent, answered) = result.with_context(|| format!("{name} to {}", to.pod.name))?;
            figures.push(format!("{name} {sent}+{answered}"));
        }
    }
    ensure!(tried > 0, "no tunnel was tried: {}", figures.join(", "));
    Ok(format!("({}; packets the devices sent)", figures.join(", ")))
}

/// Makes both ends of a tunnel, or none; `false` when the kernel has no such tunnels.
fn join(from: &Node, to: &Node, arguments: &str, ends: [Ipv4Addr; 2]) -> Result<bool> {
    for (node, other, address) in [(from, to, ends[0]), (to, from, ends[1])] {
        let link =
            format!("link add tunnel type {arguments} local {} remote {}\n", node.pod_ip(), other.pod_ip());
        let made = node.pod.ip(&link);
        let is_unknown = made.as_ref().is_err_and(says_unknown);
        let address = format!("address add {address}/24 dev tunnel\nlink set tunnel mtu 1300 up\n");
        let Err(error) = made.and_then(|()| node.pod.ip(&address)) else { continue };
        for node in [from, to] {
            // The next kind needs the name; the far end may not be there.
            let _ = node.pod.ip("link delete tunnel\n");
        }
        return if is_unknown { Ok(false) } else { Err(error) };
    }
    Ok(true)
}

/// Whether `ip link add` failed because the kernel does not have that kind of device.
fn says_unknown(error: &anyhow::Error) -> bool {
    let said = error.to_string();
    UNKNOWN.iter().any(|text| said.contains(text))
}

/// Transfers bytes through the tunnel; returns how many packets the fallback devices of both nodes sent.
fn carry(lab: &Lab, from: &Node, to: &Node, end: Ipv4Addr) -> Result<(u64, u64)> {
    probe::serve(&to.pod, IpAddr::V4(end))?;
    let nodes = [from, to];
    let read = || nodes.iter().map(|node| by_device(node)).collect::<Result<Vec<_>>>();
    let before = read()?;
    bulk::run(&from.pod, IpAddr::V4(end), BYTES)?;
    let after = read()?;
    let [sent, answered] = [after[0] - before[0], after[1] - before[1]];
    // Without our outer header the pod's own is no obstacle.
    let is_native = lab.agents.has_flag("--encapsulate=crosssubnet") && from.location != to.location;
    ensure!(
        is_native == (sent == 0) && is_native == (answered == 0),
        "the devices sent {sent} and {answered} packets"
    );
    for node in nodes {
        let dropped = drops(&scrape(&node.netns)?);
        ensure!(!dropped.contains_key("encapsulation"), "{} dropped {dropped:?}", node.name());
    }
    Ok((sent, answered))
}

/// Packets sent by `kilo-ipip` and `kilo-vxlan` of a node.
fn by_device(node: &Node) -> Result<u64> {
    let text = node.netns.sh(
        "for d in kilo-ipip kilo-vxlan; do cat /sys/class/net/$d/statistics/tx_packets 2>/dev/null || true; done",
    )?;
    Ok(text.lines().filter_map(|line| line.trim().parse::<u64>().ok()).sum())
}

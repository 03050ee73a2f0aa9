//! A cloud that drops IP protocol 4 between nodes, with a CNI whose overlay is VXLAN on Linux' old port.

use std::{net::IpAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::Signal;
use socket2::{Domain, Protocol, Socket, Type};

use super::{
    Lab,
    checks::no_drops,
    counters, matrix,
    network::{Network, Node},
};

/// Drops and counts IPIP between nodes of a LAN (a bridge) and between LANs; IPIP inside VXLAN is only
/// counted.
pub fn forbid_ipip(network: &Network) -> Result<()> {
    // Behind UDP, VXLAN and Ethernet headers of 30 bytes: the protocol of the packet inside.
    let rules = |family: &str| {
        format!(
            "table {family} cloud {{\n counter ipip {{ }}\n counter ipip-in-overlay {{ }}\n chain forward {{\n \
             type filter hook forward priority -10; policy accept;\n \
             meta protocol ip ip protocol {{ 4, 41 }} counter name ipip drop\n \
             meta protocol ip udp dport 8472 @th,312,8 4 counter name ipip-in-overlay\n }}\n}}\n"
        )
    };
    network.router.sh(&format!("nft -f - <<'RULES'\n{}{}RULES", rules("bridge"), rules("inet")))?;
    Ok(())
}

/// Packets that the cloud counted under that name: on LANs, and between them.
fn counted(network: &Network, name: &str) -> Result<[u64; 2]> {
    Ok([
        counters::nft(&network.router, &format!("bridge cloud {name}"))?,
        counters::nft(&network.router, &format!("inet cloud {name}"))?,
    ])
}

/// Sends one packet of protocol 4.
fn send_ipip(from: &Node, to: IpAddr) -> Result<()> {
    let sent = from.netns.spawn(move || -> Result<usize> {
        let socket = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::from(4)))?;
        Ok(socket.send_to(&[0x45; 20], &std::net::SocketAddr::from((to, 0)).into())?)
    });
    sent.join().map_err(|_| anyhow::anyhow!("sender"))??.context("an IPIP packet")?;
    Ok(())
}

/// No IPIP has passed so far, and the rule drops it when some does.
pub fn nothing_dropped(lab: &mut Lab) -> Result<String> {
    let network = &lab.network;
    let before = counted(network, "ipip")?;
    ensure!(before == [0, 0], "the cloud dropped {before:?} IPIP packets");
    // The rule works: one packet on the LAN, one between LANs.
    let leader = network.node("a1")?.private;
    send_ipip(network.node("a2")?, leader)?;
    send_ipip(network.node("a3")?, leader)?;
    let after = counted(network, "ipip")?;
    ensure!(after == [1, 1], "of one packet each way the cloud dropped {after:?}");
    Ok(String::new())
}

/// Leaders keep their flags; members restart with `--tunnel=ipip`.
pub fn ipip_in_overlay(lab: &mut Lab) -> Result<String> {
    let dropped = counted(&lab.network, "ipip")?;
    ensure!(counted(&lab.network, "ipip-in-overlay")? == [0, 0], "there was IPIP before");
    let members: Vec<_> = lab.network.nodes.iter().filter(|node| node.public.is_none()).cloned().collect();
    for node in &members {
        lab.agents.stop(node.name(), Signal::SIGTERM)?;
        lab.agents.start_with(node, &["--tunnel=ipip"])?;
    }
    lab.agents.wait_until_ready(&lab.network, Duration::from_secs(60))?;
    matrix::settle(&lab.network, Duration::from_secs(60))?;
    let matrix = matrix::run(&lab.network)?;
    matrix.all_passed()?;
    let wrapped = counted(&lab.network, "ipip-in-overlay")?;
    ensure!(wrapped[0] > 100 && wrapped[1] > 100, "IPIP in the overlay's packets: {wrapped:?}");
    ensure!(counted(&lab.network, "ipip")? == dropped, "IPIP was sent in cleartext");
    no_drops(lab)?;
    Ok(format!("({} probes; {} packets)", matrix.total(), wrapped[0] + wrapped[1]))
}

//! Settings of real hosts, and packets that nobody should send.

use std::{
    net::{IpAddr, Ipv4Addr},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use socket2::{Domain, Protocol, Socket, Type};

use super::number;
use crate::{
    Lab, counters, forward_policy,
    netns::Netns,
    network::Node,
    services,
    wait::{self, until},
};

/// Packets of each kind of abuse.
const ABUSES: u64 = 50;

/// An IPv4 header without options and a UDP datagram inside.
fn inner(source: Ipv4Addr, target: Ipv4Addr) -> Vec<u8> {
    let mut packet = vec![0x45, 0, 0, 36, 0, 1, 0x40, 0, 64, 17, 0, 0];
    packet.extend(source.octets());
    packet.extend(target.octets());
    let sum: u32 = packet.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum();
    let checksum = !((sum & 0xffff) + (sum >> 16)) as u16;
    packet[10..12].copy_from_slice(&checksum.to_be_bytes());
    packet.extend([0x30, 0x39, 0x1b, 0x5f, 0, 16, 0, 0]);
    packet.extend(*b"unwanted");
    packet
}

/// Protocol numbers of raw sockets: the kernel writes an IPv4 header before the packet, or the packet has its own.
const IPIP: i32 = 4;
const BARE: i32 = 255;

fn private_v4(node: &Node) -> Result<Ipv4Addr> {
    let IpAddr::V4(address) = node.private else { bail!("needs an IPv4 underlay") };
    Ok(address)
}

/// Sends IPIP packets from a host; returns how many the node dropped for `reason`.
fn abuse(from: &Netns, node: &Node, packet: Vec<u8>, reason: &str) -> Result<u64> {
    send(from, (IPIP, private_v4(node)?), packet, node, reason)
}

/// Sends packets from a host to an address; returns how many the node dropped for `reason`.
fn send(
    from: &Netns,
    (protocol, target): (i32, Ipv4Addr),
    packet: Vec<u8>,
    node: &Node,
    reason: &str,
) -> Result<u64> {
    let dropped =
        || anyhow::Ok(counters::drops(&counters::scrape(&node.netns)?).get(reason).copied().unwrap_or(0));
    let before = dropped()?;
    let sent = from.spawn(move || -> Result<()> {
        let socket = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::from(protocol)))?;
        for _ in 0..ABUSES {
            socket.send_to(&packet, &std::net::SocketAddr::from((target, 0)).into())?;
        }
        Ok(())
    });
    sent.join().map_err(|_| anyhow::anyhow!("sending thread"))???;
    until(&format!("{reason} is counted"), Duration::from_secs(5), || Ok(dropped()? - before >= ABUSES))?;
    Ok(dropped()? - before)
}

/// Runs `send`, and fails when any of its packets reaches the pod.
fn none_arrives(node: &Node, send: impl FnOnce() -> Result<u64>) -> Result<u64> {
    node.pod.sh(
        "nft -f - <<'RULES'\ntable inet watch {\n counter unwanted { }\n chain input { type filter hook input priority 0; \
         udp sport 12345 counter name unwanted; }\n}\nRULES",
    )?;
    let dropped = send();
    let arrived = number(&node.pod, "nft list counter inet watch unwanted | awk '/packets/ {print $2}'");
    node.pod.sh("nft delete table inet watch")?;
    ensure!(arrived? == 0, "the pod received them");
    dropped
}

pub(super) fn no_node(lab: &mut Lab) -> Result<String> {
    let (node, other) = (lab.network.node("a1")?, lab.network.node("a2")?);
    let packet = inner(other.pod_ip(), node.pod_ip());
    let dropped = none_arrives(node, || abuse(&lab.network.router, node, packet, "unknown_sender"))?;
    Ok(format!("{ABUSES} packets, {dropped} dropped as unknown_sender"))
}

pub(super) fn foreign_source(lab: &mut Lab) -> Result<String> {
    let (node, other) = (lab.network.node("a1")?, lab.network.node("a3")?);
    let victim = lab.network.node("a2")?.pod_ip();
    let packet = inner(victim, node.pod_ip());
    let dropped = none_arrives(node, || abuse(&other.netns, node, packet, "foreign_source"))?;
    Ok(format!("{ABUSES} packets, {dropped} dropped as foreign_source"))
}

/// With the leader's `rp_filter` loose (2), as systemd sets it, its kernel accepts any source that an interface
/// leads to. The packets are for its own pod, and for other nodes' through it.
pub(super) fn in_clear(lab: &mut Lab) -> Result<String> {
    let leader = lab.network.node("a1")?;
    let private = private_v4(leader)?;
    set_rp_filter(leader, 2)?;
    let through_leader = |(source, target): (&str, &str)| {
        let (source, target) = (lab.network.node(source)?, lab.network.node(target)?);
        let pod = target.pod_ip();
        let packet = inner(source.pod_ip(), pod);
        lab.network.router.sh(&format!("ip route add {pod}/32 via {private}"))?;
        let sent = none_arrives(target, || {
            send(&lab.network.router, (BARE, pod), packet, leader, "arrived_in_clear")
        });
        lab.network.router.sh(&format!("ip route delete {pod}/32"))?;
        sent
    };
    let dropped =
        [("a2", "a1"), ("b1", "a2"), ("a3", "b2")].into_iter().map(through_leader).sum::<Result<u64>>();
    set_rp_filter(leader, 1)?;
    let dropped = dropped?;
    Ok(format!("{} packets, {dropped} dropped as arrived_in_clear", 3 * ABUSES))
}

fn set_rp_filter(node: &Node, value: u8) -> Result<()> {
    node.netns
        .sh(&format!("for d in /proc/sys/net/ipv4/conf/*/rp_filter; do echo {value} > $d; done"))
        .map(drop)
}

pub(super) fn rp_filter(lab: &mut Lab) -> Result<String> {
    for value in [0, 2, 1] {
        for node in &lab.network.nodes {
            set_rp_filter(node, value)?;
        }
        wait::fault_lasts(Duration::from_secs(1));
    }
    Ok("a second each".to_owned())
}

pub(super) fn forward_drop(lab: &mut Lab) -> Result<String> {
    let said = forward_policy::run(lab)?;
    Ok(format!("no pod reached without the flag, all with it {said}"))
}

pub(super) fn dnat(lab: &mut Lab) -> Result<String> {
    services::run(lab)
}

pub(super) fn second_masquerade(lab: &mut Lab) -> Result<String> {
    let node = lab.network.node("a2")?;
    node.netns.sh(
        "nft -f - <<'RULES'\ntable ip second {\n counter hits { }\n chain postrouting { type nat hook postrouting priority 100; \
         ip saddr 10.42.0.0/16 oifname \"eth0\" counter name hits masquerade; }\n}\nRULES",
    )?;
    let target = crate::network::OUTSIDE.into();
    let asked = (0..20)
        .map(|_| {
            let probe = node.pod.spawn(move || {
                super::super::probe::probe(super::super::probe::Protocol::Tcp, target, Duration::from_secs(4))
            });
            probe.join().map_err(|_| anyhow::anyhow!("probe thread"))??.context("a new connection")
        })
        .collect::<Result<Vec<_>>>();
    let hits = number(&node.netns, "nft list counter ip second hits | awk '/packets/ {print $2}'");
    node.netns.sh("nft delete table ip second")?;
    asked?;
    let hits = hits?;
    ensure!(hits >= 20, "the rule translated {hits} connections");
    Ok(format!("{hits} new connections translated by that rule, all answered"))
}

/// The agent sees /proc/sys read-only: it reports what the operator has to do.
pub(super) fn ip_forward(lab: &mut Lab) -> Result<String> {
    let node = lab.network.node("a2")?.clone();
    lab.caused(&["IPv4 forwarding is off"]);
    node.netns.sh("echo 0 > /proc/sys/net/ipv4/ip_forward")?;
    let reported = until("the agent reports it", Duration::from_secs(20), || {
        Ok(std::fs::read_to_string(lab.agents.log("a2"))?.contains("sysctl net.ipv4.ip_forward=1"))
    });
    node.netns.sh("sysctl -q net.ipv4.ip_forward=1")?;
    Ok(format!("reported after {} ms, then turned on by the operator", reported?.as_millis()))
}

//! Expected effect of a program on one packet's bytes: from headers read in plain Rust,
//! [`super::decisions`], and outer headers of `kilo_common::encap`.

mod headers;
mod uplink_egress;

use std::net::IpAddr;

use kilo_common::{
    checksum,
    counters::Action,
    drop_reasons::DropReason,
    encap::{
        Inner, VXLAN_INNER, ipip_frame, ipip_frame_v6, segments_room, vxlan_ethernet, vxlan_frame,
        vxlan_frame_v6,
    },
    maps::{
        CONFIG_GATEWAY, CONFIG_NATIVE, CONFIG_OFFERED, CONFIG_SEVERAL_V4, CONFIG_SEVERAL_V6, HOP_ACTING,
        HOP_LOCAL, HOP_NONE, HOP_REMOTE, PREFIX_ENDPOINT, PREFIX_NEVER_CLEAR, PREFIX_ROUTE, PREFIX_SOURCE,
        PREFIX_VIA_WIREGUARD, PrefixValue,
    },
    packet::{ETHERNET_LEN, ETHERTYPE_IPV4, ETHERTYPE_IPV6, next_ttl, protocol},
};
use kilo_core::{
    plan::{Hop, Tables, model::Verdict},
    prefixes::longest,
    settings::Tunnel,
};

use super::{
    IFINDEX,
    decisions::Decisions,
    flows::{Flows, Remembered, Translation},
    packet::{PASS, PASS_AT_ONCE, REDIRECT, SHOT},
    signals,
};

pub use headers::Ip;
use headers::{destination_port, family, to_vxlan, vxlan};
use uplink_egress::uplink_egress;

/// Input of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Input {
    /// The packet; on the WireGuard device it has no Ethernet header.
    pub frame: Vec<u8>,
    /// Payload bytes per segment of a GSO packet; 0 for others.
    pub gso: u32,
    /// The interface it is on.
    pub ifindex: u32,
    /// The ingress interface; 0 when the host made the packet.
    pub brought_by: u32,
    /// `skb->priority`, in which programs pass on what survives the stack.
    pub priority: u32,
}

/// Marks in `skb->priority`: of `lan_ingress` for `tunnel_ingress`, and of the tunnel devices' sender for
/// `uplink_egress`.
pub const CHECKED: u32 = 0x6b67_0000;
pub const BY_DEVICE: u32 = 0x6b68_0000;
const OWN_PRIORITY: u32 = 0xf;

/// Expected bytes after the program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Bytes {
    /// Irrelevant, because the packet is dropped.
    Any,
    /// Unchanged.
    Same,
    /// Exactly these.
    Exactly(Vec<u8>),
    /// This frame, then `hidden` bytes, then these. `BPF_PROG_TEST_RUN` reads the first bytes of a packet
    /// without link-layer header as an Ethernet header, and the kernel makes room after it.
    Sent {
        frame: Vec<u8>,
        hidden: usize,
        rest: Vec<u8>,
        /// The kernel computes the flow's hash: any UDP source port and identification is right.
        hashed: bool,
    },
    /// Unchanged except for one translated end.
    Translated(Translation),
}

/// Expected outcome of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    pub verdict: i32,
    pub counted: Vec<&'static str>,
    pub bytes: Bytes,
    /// Largest packet that the hop carries, when the packet is sent to a node; otherwise 0.
    pub mtu: u32,
    /// Expected priority, where it is relevant.
    pub priority: Option<u32>,
    /// State to keep for later packets.
    pub remembered: Option<Remembered>,
}

/// Kinds of flow state: a flow opened from outside is stored; its reply is not translated; an end of the
/// host's own flow is translated, or kept.
pub const FROM_OUTSIDE: &str = "from_outside";
pub const ANSWER_STAYS: &str = "answer_stays";
pub const OF_HOST: &str = "of_host";

pub fn drops(reason: DropReason) -> Wanted {
    Wanted {
        verdict: SHOT,
        counted: vec![reason.label()],
        bytes: Bytes::Any,
        mtu: 0,
        priority: None,
        remembered: None,
    }
}

fn passes(action: Option<Action>) -> Wanted {
    let counted = action.iter().map(|action| action.label()).collect();
    Wanted { verdict: PASS, counted, bytes: Bytes::Same, mtu: 0, priority: None, remembered: None }
}

fn redirects(action: Action, bytes: Bytes) -> Wanted {
    Wanted {
        verdict: REDIRECT,
        counted: vec![action.label()],
        bytes,
        mtu: 0,
        priority: None,
        remembered: None,
    }
}

/// Length of the link-layer header of a program's packets.
pub fn link_header_len(program: &str) -> usize {
    if program.starts_with("kilo_") || program.starts_with("l3_") { 0 } else { ETHERNET_LEN }
}

/// Link-layer address of an interface; zero for loopback.
pub const fn mac(ifindex: u32) -> [u8; 6] {
    match ifindex {
        IFINDEX => [0; 6],
        other => [2, 0, 0, 0, 0, other as u8],
    }
}

/// The expected outcome of one program.
pub fn expected_outcome(program: &str, tables: &Tables, flows: &Flows, input: &Input) -> Wanted {
    match program {
        "lan_ingress" => lan_ingress(tables, flows, input, ETHERNET_LEN),
        "l3_ingress" => lan_ingress(tables, flows, input, 0),
        "kilo_egress" => kilo_egress(tables, flows, input).unwrap_or_else(drops),
        "kilo_ingress" => kilo_ingress(tables, flows, input).unwrap_or_else(drops),
        "uplink_egress" => uplink_egress(tables, flows, input, ETHERNET_LEN),
        "l3_egress" => uplink_egress(tables, flows, input, 0),
        // No program has checked the packet. A checked one is malformed, because without a tunnel device
        // there is no sender.
        "tunnel_ingress" if input.priority & !OWN_PRIORITY != CHECKED => drops(DropReason::Unchecked),
        "tunnel_ingress" => drops(DropReason::Malformed),
        other => panic!("no program {other}"),
    }
}

/// `link` is the length of the link-layer header, here and below.
fn lan_ingress(tables: &Tables, flows: &Flows, input: &Input, link: usize) -> Wanted {
    let frame = &input.frame[..];
    if link != 0 && frame[..6] != mac(input.ifindex) {
        return passes(None);
    }
    let Some(v6) = family(frame) else { return passes(None) };
    let Ok(outer) = Ip::read(frame, link, v6) else { return passes(None) };
    if signals::is_control(outer.src) {
        return drops(DropReason::ForgedSignal);
    }
    if tables.is_private(outer.dst) {
        if let Some(wanted) = signals::on_lan(tables, input, link, &outer) {
            return wanted;
        }
        let behind = Ip::shortest(v6);
        let inner = match outer.protocol {
            protocol::IPIP => Some((behind, false)),
            protocol::IPV6 => Some((behind, true)),
            protocol::UDP if input.gso == 0 => {
                vxlan(frame, link, &outer).map(|v6| (behind + VXLAN_INNER, v6))
            }
            _ => None,
        };
        // A GSO packet or a fragment goes to the device, and to no other program.
        if inner.is_none()
            && let Some(wanted) = by_vxlan_device(tables, input, link, &outer)
        {
            return wanted;
        }
        if let Some((overhead, v6)) = inner {
            return steered(tables, input, link, &outer, overhead, v6).unwrap_or_else(drops);
        }
    }
    if outer.protocol == protocol::UDP && source_is_via_wireguard(tables, frame, link, &outer) {
        return drops(DropReason::InsideTunnel);
    }
    if let (Some(translation), remembered) = flows.answer(tables, input, link, &outer, true) {
        return Wanted { remembered, bytes: Bytes::Translated(translation), ..passes(translation.action) };
    }
    let sized = outer.sized(input, link);
    if Decisions(tables).arrived_in_clear(sized.packet) {
        return drops(DropReason::ArrivedInClear);
    }
    match Decisions(tables).native(&sized) {
        None => Wanted { remembered: flows.arrived(tables, input, link, &outer), ..passes(None) },
        Some(_) if Decisions(tables).arrives_native(outer.src, input.ifindex).is_err() => {
            drops(DropReason::WrongInterface)
        }
        Some(action) => {
            let mut bytes = frame.to_vec();
            if leaves_host(action) {
                lower_ttl(&mut bytes, link, v6);
                bytes = [room(tables, input), bytes].concat();
            }
            redirects(action, Bytes::Exactly(bytes))
        }
    }
}

fn by_vxlan_device(tables: &Tables, input: &Input, link: usize, outer: &Ip) -> Option<Wanted> {
    let is_for_it = tables.config.vxlan_ifindex != 0 && to_vxlan(input, link, outer);
    is_for_it.then(|| match Decisions(tables).arrives(outer.src, input.ifindex) {
        Ok(()) => Wanted { verdict: PASS_AT_ONCE, priority: Some(CHECKED), ..passes(None) },
        Err(reason) => drops(reason),
    })
}

/// The outcome of a packet that follows one which the VXLAN device decapsulates; `None` where order does not
/// matter.
pub fn left_to_device(program: &str, tables: &Tables, input: &Input) -> Option<Wanted> {
    let link = link_header_len(program);
    let outer = Ip::read(&input.frame, link, family(&input.frame)?).ok()?;
    let arrives = matches!(program, "lan_ingress" | "l3_ingress") && tables.is_private(outer.dst);
    arrives.then(|| by_vxlan_device(tables, input, link, &outer)).flatten()
}

/// Whether a packet leaves this host again, through the WireGuard device's program.
const fn leaves_host(action: Action) -> bool {
    matches!(action, Action::Transit | Action::PassOn)
}

/// Room made for WireGuard in front of a GSO packet.
fn room(tables: &Tables, input: &Input) -> Vec<u8> {
    let long = input.frame.len() > tables.config.kilo_mtu as usize;
    let bytes = if long && input.gso != 0 { segments_room(input.gso, false) } else { 0 };
    vec![0; bytes as usize]
}

fn source_is_via_wireguard(tables: &Tables, frame: &[u8], link: usize, outer: &Ip) -> bool {
    let owner = longest(&tables.prefix, outer.src);
    tables.config.flags & CONFIG_GATEWAY != 0
        && !outer.fragment
        && destination_port(frame, link, outer) == Some(tables.config.wireguard_port)
        && owner.is_some_and(|value| value.flags & PREFIX_VIA_WIREGUARD != 0)
}

/// Whether this is the location's WireGuard address.
fn is_wireguard(tables: &Tables, address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.octets() == tables.config.wireguard_v4,
        IpAddr::V6(address) => address.octets() == tables.config.wireguard_v6,
    }
}

/// Whether this node's WireGuard sends to an address that is reached through it.
fn destination_is_via_wireguard(tables: &Tables, frame: &[u8], ip: &Ip) -> bool {
    let owner = longest(&tables.prefix, ip.dst);
    let port = frame.get(ip.header_len..).and_then(|udp| udp.first_chunk::<2>());
    tables.config.flags & CONFIG_GATEWAY != 0
        && ip.protocol == protocol::UDP
        && !ip.fragment
        && ip.header_len == Ip::shortest(ip.v6)
        && (tables.is_private(ip.src) || is_wireguard(tables, ip.src))
        && port.is_some_and(|port| u16::from_be_bytes(*port) == tables.config.wireguard_port)
        && owner
            .is_some_and(|value| value.flags & PREFIX_VIA_WIREGUARD != 0 && value.flags & PREFIX_ROUTE != 0)
}

fn steered(
    tables: &Tables,
    input: &Input,
    link: usize,
    outer: &Ip,
    overhead: usize,
    v6: bool,
) -> Result<Wanted, DropReason> {
    let frame = &input.frame[..];
    Decisions(tables).arrives(outer.src, input.ifindex)?;
    let sender = &tables.node[&outer.src];
    if outer.fragment {
        return Err(DropReason::OuterFragment);
    }
    if outer.header_len != Ip::shortest(outer.v6) {
        return Err(DropReason::Malformed);
    }
    let offset = link + overhead;
    let inner = Ip::read(frame, offset, v6)?;
    let (action, _) = Decisions(tables).steered(outer.src, &inner.sized(input, offset))?;
    let mut bytes = [&frame[..offset], &marked(&frame[offset..], outer.tos, inner.tos, v6)?].concat();
    refused(input)?;
    if leaves_host(action) {
        lower_ttl(&mut bytes, offset, v6);
    }
    // The kernel removes bytes after what it reads as the Ethernet header (see `Bytes::Sent`), and a header
    // of what it reads as the packet must be left.
    if bytes.len() < ETHERNET_LEN + overhead + Ip::shortest(v6) {
        return Err(DropReason::Encapsulation);
    }
    bytes.drain(ETHERNET_LEN..ETHERNET_LEN + overhead);
    if leaves_host(action) {
        return Ok(redirects(action, Bytes::Exactly(bytes)));
    }
    let pods = |src: IpAddr| matches!(src, IpAddr::V4(src) if sender.may_send_from(src.octets()));
    // Packets of the sending host itself stay on the interface that leads there.
    let verdict = if inner.src == outer.src && !pods(inner.src) { PASS } else { REDIRECT };
    Ok(Wanted { verdict, ..redirects(action, Bytes::Exactly(bytes)) })
}

/// The inner packet with the congestion mark of the outer header, by the table of RFC 6040, section 4.2.
fn marked(packet: &[u8], outer: u8, inner: u8, v6: bool) -> Result<Vec<u8>, DropReason> {
    let mut packet = packet.to_vec();
    let ecn = match (outer & 3, inner & 3) {
        (3, 0) => return Err(DropReason::Congestion),
        (3, _) => 3,
        (1, 2) => 1,
        _ => return Ok(packet),
    };
    let tos = inner & 0xfc | ecn;
    if tos == inner {
        return Ok(packet);
    }
    if v6 {
        packet[1] = packet[1] & 0xcf | ecn << 4;
        return Ok(packet);
    }
    let old = u16::from_be_bytes([packet[0], packet[1]]);
    packet[1] = tos;
    let new = u16::from_be_bytes([packet[0], packet[1]]);
    let sum = checksum::update(u16::from_be_bytes([packet[10], packet[11]]), old, new);
    packet[10..12].copy_from_slice(&sum.to_be_bytes());
    Ok(packet)
}

fn lower_ttl(frame: &mut [u8], offset: usize, v6: bool) {
    if v6 {
        frame[offset + 7] -= 1;
        return;
    }
    let checksum = u16::from_be_bytes([frame[offset + 10], frame[offset + 11]]);
    let (ttl, checksum) = next_ttl(frame[offset + 8], checksum).unwrap();
    frame[offset + 8] = ttl;
    frame[offset + 10..offset + 12].copy_from_slice(&checksum.to_be_bytes());
}

/// The kernel does not know the kind of the tests' GSO packets, and neither adds nor removes their outer
/// headers.
const fn refused(input: &Input) -> Result<(), DropReason> {
    if input.gso == 0 { Ok(()) } else { Err(DropReason::Encapsulation) }
}

fn kilo_egress(tables: &Tables, flows: &Flows, input: &Input) -> Result<Wanted, DropReason> {
    let frame = &input.frame[..];
    let leads = tables.config.flags & CONFIG_GATEWAY != 0;
    let Some(v6) = family(frame) else {
        return if leads { Ok(passes(Some(Action::Pass))) } else { Err(DropReason::NoPrefix) };
    };
    let ip = Ip::read(frame, 0, v6)?;
    let verdict = Decisions(tables).leaving(&ip.sized(input, 0));
    if verdict == Err(DropReason::NotUnicast) {
        return Err(DropReason::NotUnicast);
    }
    let owner = longest(&tables.prefix, ip.src);
    let offers = tables.config.flags & CONFIG_OFFERED != 0;
    let is_anothers = |value: PrefixValue| {
        let closed = value.flags & (PREFIX_NEVER_CLEAR | PREFIX_ENDPOINT) != 0 && !offers;
        value.flags & PREFIX_SOURCE != 0
            && match value.hop {
                HOP_NONE | HOP_LOCAL => false,
                HOP_REMOTE | HOP_ACTING => closed,
                _ => tables.config.flags & CONFIG_NATIVE == 0,
            }
    };
    if leads && is_of_pod(tables, input) && owner.is_some_and(is_anothers) {
        return Err(DropReason::ForeignSource);
    }
    let (translation, remembered) = flows.leaving(tables, input, None, &ip)?;
    let refused = translation.is_none() && destination_is_via_wireguard(tables, frame, &ip);
    let verdict = if refused { Err(DropReason::InsideTunnel) } else { verdict };
    // A packet that is dropped afterwards still counts as translated.
    let wanted = sent(tables, input, &ip, verdict).unwrap_or_else(drops);
    Ok(Wanted { remembered, ..translation.map_or(wanted.clone(), |translation| wanted.with(translation)) })
}

impl Wanted {
    /// Its counters, and how flow state decided.
    pub fn kind(&self) -> String {
        let mut kind = self.counted.clone();
        match (self.remembered, &self.bytes) {
            (Some(Remembered::FromOutside(_)), _) => kind.push(FROM_OUTSIDE),
            (Some(Remembered::Known), Bytes::Same) => kind.push(ANSWER_STAYS),
            (_, Bytes::Translated(Translation { action: None, .. })) => kind.push(OF_HOST),
            _ => {}
        }
        kind.join("+")
    }

    /// The outcome for a packet that is translated first.
    fn with(mut self, translation: Translation) -> Self {
        self.counted.extend(translation.action.map(Action::label));
        self.counted.sort_unstable();
        self.bytes = match self.bytes {
            Bytes::Same => Bytes::Translated(translation),
            // Every following byte depends on the port that it got.
            _ => Bytes::Any,
        };
        self
    }
}

fn kilo_ingress(tables: &Tables, flows: &Flows, input: &Input) -> Result<Wanted, DropReason> {
    let frame = &input.frame[..];
    let Some(v6) = family(frame) else { return Ok(passes(Some(Action::Pass))) };
    let ip = Ip::read(frame, 0, v6)?;
    if let Some(wanted) = signals::in_tunnel(tables, input, &ip) {
        return Ok(wanted);
    }
    let (mut answer, mut remembered) = flows.answer(tables, input, 0, &ip, false);
    let translated = Ip { dst: answer.map_or(ip.dst, |translation| translation.addr), ..ip };
    let verdict = Ok(Decisions(tables).decrypted(&translated.sized(input, 0)));
    let several = if v6 { CONFIG_SEVERAL_V6 } else { CONFIG_SEVERAL_V4 } | CONFIG_OFFERED;
    if answer.is_none() && tables.config.flags & several != 0 && matches!(verdict, Ok((Action::Decrypt, _))) {
        (answer, remembered) = flows.answer(tables, input, 0, &ip, true);
        remembered = remembered.or_else(|| flows.arrived(tables, input, 0, &ip));
    }
    let mut input = input.clone();
    if let Ok((Action::Forward, _)) = verdict {
        lower_ttl(&mut input.frame, 0, v6);
    }
    let wanted = sent(tables, &input, &translated, verdict).unwrap_or_else(drops);
    Ok(Wanted { remembered, ..answer.map_or(wanted.clone(), |translation| wanted.with(translation)) })
}

fn sent(tables: &Tables, input: &Input, ip: &Ip, verdict: Verdict) -> Result<Wanted, DropReason> {
    match verdict? {
        (action, Some(Hop::Node { tunnel, mtu, local, remote, .. })) => {
            let native = tunnel == Tunnel::None && remote.is_ipv6() == ip.v6;
            let bytes = if input.gso != 0 && !native {
                by_device(tables, &input.frame, ip, tunnel, remote)?
            } else {
                on_the_way(&input.frame, ip, tunnel, local, remote)
            };
            Ok(Wanted { mtu, ..redirects(action, bytes) })
        }
        (action, _) => Ok(passes(Some(action))),
    }
}

/// A packet whose outer header a device writes.
fn by_device(
    tables: &Tables,
    packet: &[u8],
    ip: &Ip,
    tunnel: Tunnel,
    remote: IpAddr,
) -> Result<Bytes, DropReason> {
    let ipip = tunnel != Tunnel::Vxlan && remote.is_ipv4() && !ip.v6 && tables.config.ipip_ifindex != 0;
    match (ipip, tables.config.vxlan_ifindex) {
        (true, _) => Ok(Bytes::Exactly(packet.to_vec())),
        (false, 0) => Err(DropReason::Encapsulation),
        (false, _) => Ok(Bytes::Exactly([&vxlan_ethernet(ip.v6), packet].concat())),
    }
}

/// A packet with its outer header.
fn on_the_way(packet: &[u8], ip: &Ip, tunnel: Tunnel, local: IpAddr, remote: IpAddr) -> Bytes {
    let inner = Inner { len: u32::try_from(packet.len()).unwrap(), tos: ip.tos, v6: ip.v6, hash: 0 };
    let frame = match (tunnel, local, remote) {
        (Tunnel::None, _, _) if remote.is_ipv6() == ip.v6 => {
            let mut frame = vec![0; 12];
            frame.extend((if ip.v6 { ETHERTYPE_IPV6 } else { ETHERTYPE_IPV4 }).to_be_bytes());
            frame.extend(packet);
            return Bytes::Exactly(frame);
        }
        (Tunnel::None | Tunnel::Ipip, IpAddr::V4(local), IpAddr::V4(remote)) => {
            built(|frame| ipip_frame(frame, &local.octets(), &remote.octets(), &inner))
        }
        (Tunnel::None | Tunnel::Ipip, IpAddr::V6(local), IpAddr::V6(remote)) => {
            built(|frame| ipip_frame_v6(frame, &local.octets(), &remote.octets(), &inner))
        }
        (Tunnel::Vxlan, IpAddr::V4(local), IpAddr::V4(remote)) => {
            built(|frame| vxlan_frame(frame, &local.octets(), &remote.octets(), &inner))
        }
        (Tunnel::Vxlan, IpAddr::V6(local), IpAddr::V6(remote)) => {
            built(|frame| vxlan_frame_v6(frame, &local.octets(), &remote.octets(), &inner))
        }
        _ => panic!("a hop of two families"),
    };
    Bytes::Sent { frame, hidden: 14, rest: packet[14..].to_vec(), hashed: tunnel == Tunnel::Vxlan }
}

fn built<const N: usize>(build: impl Fn(&mut [u8; N])) -> Vec<u8> {
    let mut frame = [0; N];
    build(&mut frame);
    frame.to_vec()
}

/// True for packets that come from an interface of a pod.
fn is_of_pod(tables: &Tables, input: &Input) -> bool {
    let config = &tables.config;
    let ours = [0, config.kilo_ifindex, config.vxlan_ifindex, config.ipip_ifindex];
    !ours.contains(&input.brought_by) && !tables.device.contains_key(&input.brought_by)
}

//! Expected outcome of `uplink_egress` and `l3_egress`.

use kilo_common::{
    drop_reasons::DropReason,
    icmp_too_big::{self, LEN_V4, LEN_V6, QUOTED},
    maps::{CONFIG_ONE_V4, CONFIG_ONE_V6, Config, PREFIX_NEVER_CLEAR},
    packet::{ETHERNET_LEN, protocol},
};
use kilo_core::{
    plan::{Tables, model::Packet},
    prefixes::longest,
};

use super::{
    super::{decisions::Decisions, flows::Flows, packet::REDIRECT},
    BY_DEVICE, Bytes, Input, Ip, OWN_PRIORITY, Wanted, drops,
    headers::{destination, family, to_vxlan, udp_header},
    passes,
};

pub fn uplink_egress(tables: &Tables, flows: &Flows, input: &Input, link: usize) -> Wanted {
    let frame = &input.frame[..];
    let Some(v6) = family(frame) else { return passes(None) };
    let read = Ip::read(frame, link, v6);
    if input.priority & !OWN_PRIORITY == BY_DEVICE {
        let node = read.as_ref().ok().and_then(|ip| tables.node.get(&ip.dst));
        match node.map(|node| node.interfaces.contains(&input.ifindex)) {
            Some(true) => return Wanted { priority: Some(0), ..passes(None) },
            Some(false) => return drops(DropReason::NotEncrypted),
            None => return drops(read.err().unwrap_or(DropReason::NotEncrypted)),
        }
    }
    let Ok(ip) = read else {
        if input.brought_by == 0 && bears_wireguards_ports(&tables.config, frame, link, v6) {
            return passes(None);
        }
        // Whatever the packet is, it may not go there in cleartext.
        let closed = destination(frame, link, v6).and_then(|dst| longest(&tables.prefix, dst));
        return match closed {
            Some(value) if value.flags & PREFIX_NEVER_CLEAR != 0 => drops(DropReason::NotEncrypted),
            _ => passes(None),
        };
    };
    let is_ipip = matches!(ip.protocol, protocol::IPIP | protocol::IPV6);
    let arrives = || Decisions(tables).arrives(ip.src, input.brought_by).is_ok();
    let is_encapsulated =
        if is_ipip { input.brought_by != 0 && !arrives() } else { to_vxlan(input, link, &ip) };
    if is_encapsulated && tables.node.contains_key(&ip.dst) {
        return drops(DropReason::ForgedVxlan);
    }
    let is_decrypted = input.brought_by == tables.config.kilo_ifindex;
    let of_mesh = Decisions(tables).is_of_mesh(ip.src, is_decrypted);
    match Decisions(tables).uplink_egress(Packet { src: ip.src, dst: ip.dst }, of_mesh) {
        Ok(Some(_)) | Err(DropReason::NotEncrypted | DropReason::NoHop)
            if !of_mesh && is_of_host(input, link, &ip, &tables.config) => {}
        Ok(Some(hop)) => {
            let mtu = Decisions(tables).mtu_of(&hop);
            // The decision of `kilo_egress` is then tested with another packet.
            let steered = Wanted { verdict: REDIRECT, ..passes(None) };
            // A PMTU that the host learnt would also apply to its WireGuard.
            let fits = ip.sized(input, link).fits(mtu) || !of_mesh;
            return if fits { steered } else { packet_too_big(frame, link, v6, mtu) };
        }
        Err(reason) => return drops(reason),
        Ok(None) => {}
    }
    match flows.leaving(tables, input, Some(link), &ip) {
        Err(reason) => drops(reason),
        Ok((None, remembered)) => Wanted { remembered, ..passes(None) },
        Ok((Some(translation), remembered)) => Wanted { remembered, ..passes(None).with(translation) },
    }
}

/// True for packets from WireGuard's own address and port, whatever their length fields: on a node with one
/// private address the programs check nothing else, and no pod's packet has both.
fn bears_wireguards_ports(config: &Config, frame: &[u8], link: usize, v6: bool) -> bool {
    let header = &frame[link..];
    let port = config.wireguard_port.to_be_bytes();
    let field = |range: std::ops::Range<usize>| header.get(range).unwrap_or_default();
    link > 0
        && if v6 {
            config.flags & CONFIG_ONE_V6 != 0
                && (field(6..7), field(8..24), field(40..42)) == (&[protocol::UDP], &config.private_v6, &port)
        } else {
            config.flags & CONFIG_ONE_V4 != 0
                && (field(0..1), field(9..10)) == (&[0x45], &[protocol::UDP])
                && (field(12..16), field(20..22)) == (&config.private_v4, &port)
                && matches!(field(6..8), [high, low] if (high & 0x3f, *low) == (0, 0))
                && header.len() >= 24
        }
}

/// True for packets that a host must send through its uplinks: WireGuard's, as far as their port shows, and
/// neighbour discovery. In a pod's packet the port proves nothing.
fn is_of_host(input: &Input, link: usize, ip: &Ip, config: &Config) -> bool {
    let frame = &input.frame[..];
    if let Some(udp) = udp_header(frame, link, ip) {
        return input.brought_by == 0 && udp.starts_with(&config.wireguard_port.to_be_bytes());
    }
    let behind = frame.get(link + ip.header_len..).unwrap_or_default();
    match ip.protocol {
        protocol::ICMPV6 if ip.v6 && ip.ttl == 255 => {
            behind.first().is_some_and(|kind| (133..=137).contains(kind))
        }
        _ => false,
    }
}

/// The ICMP error to the sender of a packet that the hop does not carry.
fn packet_too_big(frame: &[u8], link: usize, v6: bool, mtu: u32) -> Wanted {
    let Some(quoted) = frame.get(link..link + QUOTED) else {
        return drops(DropReason::TooBig);
    };
    let mut packet = vec![0; if v6 { LEN_V6 } else { LEN_V4 } - QUOTED];
    packet.extend(quoted);
    if link == 0 {
        // The room is made after what the kernel reads as the Ethernet header.
        let room = packet.len() - QUOTED;
        packet[room..room + ETHERNET_LEN].fill(0);
    }
    if v6 {
        icmp_too_big::write::v6((&mut packet[..]).try_into().unwrap(), mtu);
    } else {
        icmp_too_big::write::v4((&mut packet[..]).try_into().unwrap(), u16::try_from(mtu).unwrap());
    }
    let link: &[&[u8]] = if link == 0 { &[] } else { &[&frame[6..12], &frame[..6], &frame[12..14]] };
    let bytes = [&link.concat()[..], &packet].concat();
    let counted = vec![DropReason::TooBig.label()];
    Wanted {
        verdict: REDIRECT,
        counted,
        bytes: Bytes::Exactly(bytes),
        mtu: 0,
        priority: None,
        remembered: None,
    }
}

//! Classes of generated packets and nodes, recognised by their bytes, for counting.

use std::collections::BTreeSet;

use kilo_common::{
    maps::{CONFIG_SEVERAL_V4, CONFIG_SEVERAL_V6, HOP_FIRST_NODE, VXLAN_PORT},
    packet::{ETHERTYPE_IPV4, ETHERTYPE_IPV6, protocol},
};
use kilo_core::plan::{Hop, Tables};

use super::{
    IFINDEX,
    oracle::{Input, link_header_len},
    random::CONTAINER,
};

/// Every class; each must occur.
pub const CLASSES: [&str; 23] = [
    "VLAN tag in the frame",
    "two VLAN tags in the frame",
    "another uplink",
    "brought by WireGuard",
    "brought by a container",
    "several IPv4 addresses",
    "several IPv6 addresses",
    "link-local destination",
    "unique local destination",
    "global IPv6 destination",
    "link without header",
    "two nodes with one address",
    "IPv4 options",
    "one extension header",
    "several extension headers",
    "fragment",
    "tunnel in a tunnel",
    "GSO packet of TCP",
    "GSO packet of UDP",
    "GSO packet in a tunnel",
    "outer header congested",
    "outer header ECT(1), inner ECT(0)",
    "inner header congested",
];

/// An IP header, and the payload after it and its extension headers.
struct Header<'a> {
    tos: u8,
    protocol: u8,
    extensions: usize,
    has_options: bool,
    is_fragment: bool,
    dst: &'a [u8],
    payload: &'a [u8],
}

fn header(packet: &[u8]) -> Option<Header<'_>> {
    let first = *packet.first()?;
    if first >> 4 == 4 {
        let length = usize::from(first & 15) * 4;
        let fragment = u16::from_be_bytes([*packet.get(6)?, *packet.get(7)?]);
        return Some(Header {
            tos: packet[1],
            protocol: *packet.get(9)?,
            extensions: 0,
            has_options: length > 20,
            is_fragment: fragment & 0x3fff != 0,
            dst: packet.get(16..20)?,
            payload: packet.get(length..)?,
        });
    }
    let (mut next, mut at, mut extensions, mut is_fragment) = (*packet.get(6)?, 40, 0, false);
    while matches!(next, 0 | 43 | 44 | 60) {
        let extension = packet.get(at..at + 2)?;
        is_fragment |= next == protocol::FRAGMENT;
        at += if next == protocol::FRAGMENT { 8 } else { 8 * (usize::from(extension[1]) + 1) };
        next = extension[0];
        extensions += 1;
    }
    Some(Header {
        tos: (first << 4) | (*packet.get(1)? >> 4),
        protocol: next,
        extensions,
        has_options: false,
        is_fragment,
        dst: packet.get(24..40)?,
        payload: packet.get(at..)?,
    })
}

impl<'a> Header<'a> {
    /// The packet inside a tunnel's packet.
    fn inner(&self) -> Option<Header<'a>> {
        match self.protocol {
            protocol::IPIP | protocol::IPV6 => header(self.payload),
            protocol::UDP if self.payload.get(2..4)? == VXLAN_PORT.to_be_bytes() => {
                header(self.payload.get(30..)?)
            }
            _ => None,
        }
    }
}

/// The classes of a packet for this program.
pub fn classes(program: &str, tables: &Tables, input: &Input) -> BTreeSet<&'static str> {
    let mut found = BTreeSet::new();
    let mut is = |class, holds: bool| {
        if holds {
            found.insert(class);
        }
    };
    let link = link_header_len(program);
    let nodes = tables.hop.iter().filter(|(id, _)| **id >= HOP_FIRST_NODE);
    let addresses = nodes.filter_map(|(_, hop)| match hop {
        Hop::Node { remote, .. } => Some(remote),
        _ => None,
    });
    let addresses: Vec<_> = addresses.collect();
    let distinct: BTreeSet<_> = addresses.iter().collect();
    is("two nodes with one address", distinct.len() < addresses.len());
    is("another uplink", input.ifindex != IFINDEX);
    is("brought by WireGuard", input.brought_by == tables.config.kilo_ifindex);
    is("brought by a container", input.brought_by == CONTAINER);
    is("several IPv4 addresses", tables.config.flags & CONFIG_SEVERAL_V4 != 0);
    is("several IPv6 addresses", tables.config.flags & CONFIG_SEVERAL_V6 != 0);
    is("link without header", program.starts_with("l3_"));
    let ethertype =
        |at: usize| input.frame.get(at..at + 2).map(|pair| u16::from_be_bytes([pair[0], pair[1]]));
    if link != 0 && matches!(ethertype(12), Some(0x8100 | 0x88a8)) {
        is("VLAN tag in the frame", true);
        is("two VLAN tags in the frame", ethertype(16) == Some(0x8100));
    }
    if link != 0 && !matches!(ethertype(12), Some(ETHERTYPE_IPV4 | ETHERTYPE_IPV6)) {
        return found;
    }
    let Some(outer) = header(&input.frame[link..]) else { return found };
    match outer.dst {
        [169, 254, _, _] | [0xfe, 0x80, ..] => is("link-local destination", true),
        [0xfd, ..] => is("unique local destination", true),
        [first, ..] if outer.dst.len() == 16 => is("global IPv6 destination", first >> 5 == 1),
        _ => {}
    }
    is("IPv4 options", outer.has_options);
    is("one extension header", outer.extensions == 1);
    is("several extension headers", outer.extensions > 1);
    is("fragment", outer.is_fragment);
    is("GSO packet of TCP", input.gso != 0 && outer.protocol == protocol::TCP);
    is("GSO packet of UDP", input.gso != 0 && outer.protocol == protocol::UDP);
    if let Some(inner) = outer.inner() {
        is("tunnel in a tunnel", inner.inner().is_some());
        is("GSO packet in a tunnel", input.gso != 0);
        is("outer header congested", outer.tos & 3 == 3);
        is("outer header ECT(1), inner ECT(0)", (outer.tos & 3, inner.tos & 3) == (1, 2));
        is("inner header congested", inner.tos & 3 == 3);
    }
    found
}

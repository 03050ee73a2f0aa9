//! What identifies a flow, in both directions, and what changes in a packet when its address and port do.

use core::mem::offset_of;

use network_types::{tcp::TcpHdr, udp::UdpHdr};

use crate::{
    checksum,
    maps::{NAT_EGRESS, NAT_INGRESS, NatKey},
    packet::protocol,
};

/// An IPv4 address as keys of both families hold it (RFC 4291, section 2.5.5.2).
#[inline(always)]
pub const fn mapped(addr: [u8; 4]) -> [u8; 16] {
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, addr[0], addr[1], addr[2], addr[3]]
}

/// True for ICMP types that carry the start of another packet: unreachable,
/// time exceeded, parameter problem (RFC 792); below 128 (RFC 4443, section 2.1).
#[inline(always)]
pub const fn is_error(v6: bool, protocol: u8, icmp_type: u8) -> bool {
    match protocol {
        protocol::ICMP if !v6 => matches!(icmp_type, 3 | 11 | 12),
        protocol::ICMPV6 if v6 => icmp_type < 128,
        _ => false,
    }
}

/// True for ICMP and ICMPv6, whose echoes are distinguished by an identifier.
#[inline(always)]
pub const fn is_icmp(protocol: u8) -> bool {
    matches!(protocol, protocol::ICMP | protocol::ICMPV6)
}

/// Where a protocol keeps what identifies a flow, relative to its own header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Offset of the source port (ICMP: of the identifier).
    pub src_port: usize,
    /// Offset of the destination port (ICMP: of the identifier).
    pub dst_port: usize,
    /// Offset of the checksum; `None` where it neither covers addresses nor
    /// can be updated.
    pub checksum: Option<usize>,
    /// Whether the checksum covers the addresses (pseudo-header).
    pub pseudo_header: bool,
    /// Whether another port can be chosen.
    pub port_changes: bool,
}

/// Layout of the protocols that are masqueraded; `None` for all others.
#[inline(always)]
pub const fn layout(protocol: u8) -> Option<Layout> {
    let ports = Layout {
        src_port: offset_of!(TcpHdr, source),
        dst_port: offset_of!(TcpHdr, dest),
        checksum: Some(offset_of!(TcpHdr, check)),
        pseudo_header: true,
        port_changes: true,
    };
    let echo = Layout { src_port: 4, dst_port: 4, checksum: Some(2), ..ports };
    match protocol {
        protocol::TCP => Some(ports),
        protocol::UDP => Some(Layout { checksum: Some(offset_of!(UdpHdr, check)), ..ports }),
        // Its CRC covers the ports, but not the addresses.
        protocol::SCTP => Some(Layout { checksum: None, pseudo_header: false, port_changes: false, ..ports }),
        protocol::ICMP => Some(Layout { pseudo_header: false, ..echo }),
        protocol::ICMPV6 => Some(echo),
        _ => None,
    }
}

/// Source and destination port from the first 8 bytes of a transport header.
/// `None` for what cannot be translated: other protocols, ICMP other than echo
/// request (egress) or reply (ingress).
#[inline(always)]
pub const fn ports(v6: bool, protocol: u8, start: &[u8; 8], direction: u8) -> Option<([u8; 2], [u8; 2])> {
    let echo = match (v6, direction) {
        (false, NAT_EGRESS) => 8,
        (false, _) => 0,
        (true, NAT_EGRESS) => 128,
        (true, _) => 129,
    };
    match protocol {
        protocol::TCP | protocol::UDP | protocol::SCTP => Some(([start[0], start[1]], [start[2], start[3]])),
        protocol::ICMP if v6 => None,
        protocol::ICMPV6 if !v6 => None,
        protocol::ICMP | protocol::ICMPV6 if start[0] == echo => {
            Some(([start[4], start[5]], [start[4], start[5]]))
        }
        _ => None,
    }
}

/// An address in halves: byte by byte it would fill a program's stack.
#[inline(always)]
fn halves(addr: &[u8; 16]) -> [u64; 2] {
    // SAFETY: sixteen bytes, read whatever their alignment.
    unsafe { addr.as_ptr().cast::<[u64; 2]>().read_unaligned() }
}

/// Copies an address without a call: a program has no memory functions worth calling.
#[inline(always)]
fn copy(to: &mut [u8; 16], from: &[u8; 16]) {
    // SAFETY: sixteen bytes, written whatever their alignment.
    unsafe { to.as_mut_ptr().cast::<[u64; 2]>().write_unaligned(halves(from)) };
}

impl NatKey {
    /// Writes the key of the other direction, once this one's packet has
    /// become `addr` and `port`. In place: two keys fill a program's stack.
    #[inline(always)]
    pub fn write_partner(&self, addr: &[u8; 16], port: [u8; 2], partner: &mut Self) {
        let echo = is_icmp(self.protocol);
        partner.protocol = self.protocol;
        partner.pad = [0; 2];
        if self.direction == NAT_EGRESS {
            partner.direction = NAT_INGRESS;
            copy(&mut partner.src, &self.dst);
            copy(&mut partner.dst, addr);
            partner.src_port = if echo { port } else { self.dst_port };
            partner.dst_port = port;
        } else {
            partner.direction = NAT_EGRESS;
            copy(&mut partner.src, addr);
            copy(&mut partner.dst, &self.src);
            partner.src_port = port;
            partner.dst_port = if echo { port } else { self.src_port };
        }
    }

    /// As [`Self::write_partner`], but returns the key.
    ///
    /// ```
    /// use kilo_common::{maps::{NAT_EGRESS, NatKey}, nat::flow::mapped};
    ///
    /// let (pod, site, node) = ([10, 42, 1, 2], [198, 51, 100, 7], [192, 0, 2, 1]);
    /// let (src, dst, ports) = (mapped(pod), mapped(site), ([0x9c, 0x40], [0, 53]));
    /// let key = NatKey {
    ///     src, dst, src_port: ports.0, dst_port: ports.1, protocol: 17, direction: NAT_EGRESS, pad: [0; 2],
    /// };
    /// let reply = key.partner(&mapped(node), [0xea, 0x60]);
    /// assert_eq!((reply.src, reply.dst), (key.dst, mapped(node)));
    /// assert_eq!((reply.src_port, reply.dst_port), ([0, 53], [0xea, 0x60]));
    /// ```
    pub fn partner(&self, addr: &[u8; 16], port: [u8; 2]) -> Self {
        let mut partner = Self::default();
        self.write_partner(addr, port, &mut partner);
        partner
    }

    /// Where the search for a port starts: the same for each packet of the
    /// flow, so that a lost entry is found again.
    #[inline(always)]
    pub fn search_start(&self) -> u32 {
        let ports =
            u32::from_ne_bytes([self.src_port[0], self.src_port[1], self.dst_port[0], self.dst_port[1]]);
        let mut hash = u64::from(ports) ^ u64::from(self.protocol) << 32;
        let ([a, b], [c, d]) = (halves(&self.src), halves(&self.dst));
        // Multiplicative hashing: the golden ratio's fraction in 64 bits.
        for half in [a, b, c, d] {
            hash = (hash ^ half).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
        }
        (hash ^ (hash >> 32)) as u32
    }
}

/// What rewriting the packet inside an ICMP error adds to the error's own
/// checksum, as a partial sum of the kernel (see [`checksum::difference`]).
/// `addr` and `port` are what the changed address and port add. `sealed`: the
/// inner transport checksum is in the quoted part, and was updated.
///
/// An inner IPv4 header adds nothing: its own checksum makes up for its address.
#[inline(always)]
pub const fn error_difference(v6: bool, layout: &Layout, sealed: bool, addr: u32, port: u32) -> u32 {
    let mut sum = port;
    if v6 {
        sum = checksum::add(sum, addr);
    }
    if sealed {
        // The updated checksum makes up for the port, and for the address in its pseudo header.
        sum = checksum::add(sum, !port);
        if layout.pseudo_header {
            sum = checksum::add(sum, !addr);
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const POD: [u8; 4] = [10, 42, 1, 2];
    const OUTSIDE: [u8; 4] = [198, 51, 100, 2];

    #[test]
    fn other_protocols_and_other_icmp_have_no_flow() {
        assert_eq!(ports(false, 47, &[0; 8], NAT_EGRESS), None);
        assert_eq!(ports(false, protocol::ICMP, &[3, 0, 0, 0, 0, 1, 0, 0], NAT_EGRESS), None);
        assert_eq!(ports(false, protocol::ICMPV6, &[128, 0, 0, 0, 0, 1, 0, 0], NAT_EGRESS), None);
        assert_eq!(ports(true, protocol::ICMP, &[8, 0, 0, 0, 0, 1, 0, 0], NAT_EGRESS), None);
        assert!(ports(true, protocol::ICMPV6, &[128, 0, 0, 0, 0, 1, 0, 0], NAT_EGRESS).is_some());
        assert!(ports(true, protocol::ICMPV6, &[128, 0, 0, 0, 0, 1, 0, 0], NAT_INGRESS).is_none());
        assert!(!is_error(true, protocol::ICMP, 3) && is_error(true, protocol::ICMPV6, 2));
        assert!(is_error(false, protocol::ICMP, 3) && !is_error(false, protocol::ICMP, 8));
    }

    /// The checksum over all words, as RFC 1071 defines it.
    fn full(bytes: &[u8]) -> u16 {
        !checksum::fold(bytes.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum())
    }

    /// What the kernel makes of a checksum and a partial sum.
    fn add_to(sum: u16, difference: u32) -> u16 {
        let mut total = u64::from(u16::from_be(!sum)) + u64::from(difference);
        while total > 0xffff {
            total = (total & 0xffff) + (total >> 16);
        }
        !(total as u16).to_be()
    }

    proptest! {
        #[test]
        fn each_half_of_a_pair_names_the_other(
            start in any::<[u8; 8]>(), addr in any::<[u8; 16]>(), port in any::<[u8; 2]>(),
            protocol in prop::sample::select(vec![protocol::TCP, protocol::UDP, protocol::ICMP, protocol::SCTP]),
        ) {
            let mut start = start;
            if protocol == protocol::ICMP { start[0] = 8; }
            let (src_port, dst_port) = ports(false, protocol, &start, NAT_EGRESS).unwrap();
            let key = NatKey {
                src: mapped(POD), dst: mapped(OUTSIDE), src_port, dst_port, protocol,
                direction: NAT_EGRESS, pad: [0; 2],
            };
            let reply = key.partner(&addr, port);
            prop_assert_eq!((reply.src, reply.dst, reply.dst_port), (mapped(OUTSIDE), addr, port));
            prop_assert_eq!(reply.partner(&key.src, key.src_port), key);
            if protocol == protocol::ICMP { prop_assert_eq!(reply.src_port, reply.dst_port); }
        }

        #[test]
        fn the_checksum_of_an_icmp_error_follows_the_quoted_packet(
            v6 in any::<bool>(), old in any::<([u8; 16], [u8; 2])>(), new in any::<([u8; 16], [u8; 2])>(),
            rest in any::<[u8; 12]>(), sealed in any::<bool>(),
            protocol in prop::sample::select(vec![protocol::TCP, protocol::UDP, protocol::ICMP, protocol::ICMPV6]),
        ) {
            prop_assume!(rest != [0; 12]);
            let layout = layout(protocol).unwrap();
            // Quoted: rest, address, header checksum (IPv4), port, transport checksum.
            let quoted = |(addr, port): ([u8; 16], [u8; 2])| {
                let addr = if v6 { &addr[..] } else { &addr[12..] };
                let mut header = addr.to_vec();
                if !v6 { header.extend(full(&[&rest[..], addr].concat()).to_be_bytes()); }
                let mut transport = port.to_vec();
                if sealed {
                    let pseudo = if layout.pseudo_header { addr } else { &[] };
                    transport.extend(full(&[&rest[..], pseudo, &port].concat()).to_be_bytes());
                }
                [&rest[..], &header, &transport].concat()
            };
            let part = |addr: [u8; 16]| if v6 { addr } else { mapped(addr[12..].try_into().unwrap()) };
            let addr = checksum::difference(&part(old.0), &part(new.0));
            let port = checksum::difference(&[old.1[0], old.1[1], 0, 0], &[new.1[0], new.1[1], 0, 0]);
            let difference = error_difference(v6, &layout, sealed, addr, port);
            prop_assert_eq!(add_to(full(&quoted(old)), difference), full(&quoted(new)));
        }
    }
}

//! Masquerading: who is translated, to which port, and what changes in the
//! packet (RFC 3022, RFC 4787, RFC 5508).

use crate::{
    maps::{
        self, MASQ_EXCLUDE, MASQ_FORCE, MASQ_SRC_ALWAYS, MASQ_SRC_EXEMPT, NAT_EGRESS, NAT_INGRESS, NatKey,
    },
    packet::{Ipv4, protocol},
};

/// Candidates tried before a flow is refused.
pub const PORT_ATTEMPTS: u32 = 32;

/// ICMP types of echo (RFC 792).
pub const ICMP_ECHO: u8 = 8;
/// Reply to [`ICMP_ECHO`].
pub const ICMP_ECHO_REPLY: u8 = 0;

/// Whether a packet is source-translated, from the values its source has in
/// `masq_src` and its destination in `masq_dst`.
#[inline(always)]
pub const fn is_masqueraded(source: Option<u32>, destination: Option<u32>) -> bool {
    match destination {
        Some(MASQ_EXCLUDE) => false,
        Some(MASQ_FORCE) => !matches!(source, Some(MASQ_SRC_EXEMPT)),
        _ => matches!(source, Some(MASQ_SRC_ALWAYS)),
    }
}

/// Where a protocol keeps what identifies a flow, relative to its own header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Offset of the source port (ICMP: of the identifier).
    pub src_port: usize,
    /// Offset of the destination port (ICMP: of the identifier).
    pub dst_port: usize,
    /// Offset of the checksum.
    pub checksum: usize,
    /// The checksum covers the addresses (pseudo header).
    pub pseudo_header: bool,
}

/// Layout of the protocols that are masqueraded; `None` for all others.
#[inline(always)]
pub const fn layout(protocol: u8) -> Option<Layout> {
    match protocol {
        protocol::TCP => Some(Layout { src_port: 0, dst_port: 2, checksum: 16, pseudo_header: true }),
        protocol::UDP => Some(Layout { src_port: 0, dst_port: 2, checksum: 6, pseudo_header: true }),
        protocol::ICMP => Some(Layout { src_port: 4, dst_port: 4, checksum: 2, pseudo_header: false }),
        _ => None,
    }
}

/// What identifies the flow of a packet. For ICMP echo the identifier stands
/// in both ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    /// Source address.
    pub src: [u8; 4],
    /// Destination address.
    pub dst: [u8; 4],
    /// Source port, network byte order.
    pub src_port: [u8; 2],
    /// Destination port, network byte order.
    pub dst_port: [u8; 2],
    /// IP protocol number.
    pub protocol: u8,
}

impl Flow {
    /// Flow of a packet from the first 8 bytes behind its IPv4 header. `None`
    /// for what cannot be translated: other protocols, other ICMP types,
    /// fragments.
    #[inline(always)]
    pub const fn of(ip: &Ipv4, payload: &[u8; 8], icmp_type: u8) -> Option<Self> {
        if ip.is_fragment() {
            return None;
        }
        let (src_port, dst_port) = match ip.protocol {
            protocol::TCP | protocol::UDP => ([payload[0], payload[1]], [payload[2], payload[3]]),
            protocol::ICMP if payload[0] == icmp_type => ([payload[4], payload[5]], [payload[4], payload[5]]),
            _ => return None,
        };
        Some(Self { src: ip.src, dst: ip.dst, src_port, dst_port, protocol: ip.protocol })
    }

    /// Key of the entry that says what this packet's source becomes.
    #[inline(always)]
    pub const fn egress_key(&self) -> NatKey {
        self.key(NAT_EGRESS)
    }

    /// Key of the entry that says what this reply's destination becomes.
    #[inline(always)]
    pub const fn ingress_key(&self) -> NatKey {
        self.key(NAT_INGRESS)
    }

    #[inline(always)]
    const fn key(&self, direction: u8) -> NatKey {
        NatKey {
            src: self.src,
            dst: self.dst,
            src_port: self.src_port,
            dst_port: self.dst_port,
            protocol: self.protocol,
            direction,
            pad: [0; 2],
        }
    }

    /// The reply to this packet once its source has become `addr` and `port`.
    #[inline(always)]
    pub const fn reply(&self, addr: [u8; 4], port: [u8; 2]) -> Self {
        let dst_port = port;
        let src_port = if self.protocol == protocol::ICMP { port } else { self.dst_port };
        Self { src: self.dst, dst: addr, src_port, dst_port, protocol: self.protocol }
    }
}

/// The port to try in round `attempt`: first the flow's own, then the range
/// from `start` (random) upwards, wrapping; host byte order. Never WireGuard's.
#[inline(always)]
pub const fn candidate_port(own: u16, attempt: u32, start: u32, config: &maps::Config) -> Option<u16> {
    let port = if attempt == 0 {
        own
    } else {
        let (min, max) = (config.nat_port_min as u32, config.nat_port_max as u32);
        if max < min {
            return None;
        }
        (min + start.wrapping_add(attempt) % (max - min + 1)) as u16
    };
    if port == 0 || port == config.wireguard_port { None } else { Some(port) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ip(protocol: u8) -> Ipv4 {
        Ipv4 {
            src: [10, 42, 1, 2],
            dst: [198, 51, 100, 2],
            header_len: 20,
            total_len: 60,
            tos: 0,
            ttl: 64,
            protocol,
            fragment: 0,
        }
    }

    #[test]
    fn an_excluded_destination_is_never_masqueraded() {
        for source in [None, Some(MASQ_SRC_ALWAYS), Some(MASQ_SRC_EXEMPT)] {
            assert!(!is_masqueraded(source, Some(MASQ_EXCLUDE)));
        }
    }

    #[test]
    fn a_forced_destination_is_masqueraded_unless_the_source_is_exempt() {
        assert!(is_masqueraded(None, Some(MASQ_FORCE)));
        assert!(!is_masqueraded(Some(MASQ_SRC_EXEMPT), Some(MASQ_FORCE)));
        assert!(!is_masqueraded(None, None));
        assert!(is_masqueraded(Some(MASQ_SRC_ALWAYS), None));
    }

    #[test]
    fn fragments_and_unknown_protocols_have_no_flow() {
        let mut fragment = ip(protocol::UDP);
        fragment.fragment = 0x2000;
        assert_eq!(Flow::of(&fragment, &[0; 8], ICMP_ECHO), None);
        assert_eq!(Flow::of(&ip(47), &[0; 8], ICMP_ECHO), None);
        assert_eq!(Flow::of(&ip(protocol::ICMP), &[3, 0, 0, 0, 0, 1, 0, 0], ICMP_ECHO), None);
    }

    proptest! {
        #[test]
        fn the_reply_to_a_translated_packet_has_a_key_of_its_own(
            payload in any::<[u8; 8]>(), addr in any::<[u8; 4]>(), port in any::<[u8; 2]>(),
            protocol in prop::sample::select(vec![protocol::TCP, protocol::UDP, protocol::ICMP]),
        ) {
            let mut payload = payload;
            if protocol == protocol::ICMP { payload[0] = ICMP_ECHO; }
            let flow = Flow::of(&ip(protocol), &payload, ICMP_ECHO).unwrap();
            let reply = flow.reply(addr, port);
            // The remote end swaps addresses and ports of what it sees.
            prop_assert_eq!((reply.src, reply.dst, reply.dst_port), (flow.dst, addr, port));
            prop_assert_ne!(flow.egress_key(), reply.ingress_key());
            if protocol == protocol::ICMP { prop_assert_eq!(reply.src_port, reply.dst_port); }
        }

        #[test]
        fn every_port_of_a_small_range_is_tried(min in 1024u16..60_000, size in 1u16..16, start in any::<u32>()) {
            let config = maps::Config { nat_port_min: min, nat_port_max: min + size - 1, ..maps::Config::default() };
            let tried: std::collections::BTreeSet<_> =
                (1..PORT_ATTEMPTS).filter_map(|attempt| candidate_port(7, attempt, start, &config)).collect();
            prop_assert_eq!(tried, (min..min + size).collect());
        }
    }

    #[test]
    fn the_wireguard_port_is_never_chosen() {
        let config =
            maps::Config { nat_port_min: 5, nat_port_max: 5, wireguard_port: 5, ..maps::Config::default() };
        assert_eq!(candidate_port(5, 0, 0, &config), None);
        assert_eq!(candidate_port(9, 1, 0, &config), None);
    }
}

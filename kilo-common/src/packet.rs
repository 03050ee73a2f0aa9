//! Reading IPv4 (RFC 791) and IPv6 (RFC 8200) headers.

use network_types::{
    eth::{EthHdr, EtherType},
    ip::{Ipv4Hdr, Ipv6Hdr},
};

use crate::drop_reasons::DropReason;

/// IP protocol numbers (IANA).
pub mod protocol {
    use network_types::ip::IpProto;

    /// ICMP, RFC 792.
    pub const ICMP: u8 = IpProto::Icmp as u8;
    /// IP in IP, RFC 2003.
    pub const IPIP: u8 = IpProto::Ipv4 as u8;
    /// TCP, RFC 9293.
    pub const TCP: u8 = IpProto::Tcp as u8;
    /// UDP, RFC 768.
    pub const UDP: u8 = IpProto::Udp as u8;
    /// IPv6 in IP, RFC 4213 and RFC 2473.
    pub const IPV6: u8 = IpProto::Ipv6 as u8;
    /// SCTP, RFC 9260.
    pub const SCTP: u8 = IpProto::Sctp as u8;
    /// Hop-by-hop options of IPv6, RFC 8200.
    pub const HOP_BY_HOP: u8 = IpProto::HopOpt as u8;
    /// Routing header of IPv6, RFC 8200.
    pub const ROUTING: u8 = IpProto::Ipv6Route as u8;
    /// Destination options of IPv6, RFC 8200.
    pub const DESTINATION_OPTIONS: u8 = IpProto::Ipv6Opts as u8;
    /// Fragment header of IPv6, RFC 8200.
    pub const FRAGMENT: u8 = IpProto::Ipv6Frag as u8;
    /// ICMP for IPv6, RFC 4443.
    pub const ICMPV6: u8 = IpProto::Ipv6Icmp as u8;
}

/// EtherType of IPv4, host byte order.
pub const ETHERTYPE_IPV4: u16 = u16::from_be(EtherType::Ipv4 as u16);
/// EtherType of IPv6, host byte order.
pub const ETHERTYPE_IPV6: u16 = u16::from_be(EtherType::Ipv6 as u16);
/// Bytes of an Ethernet header.
pub const ETHERNET_LEN: usize = EthHdr::LEN;
/// Bytes of an IPv4 header without options.
pub const IPV4_LEN: usize = Ipv4Hdr::LEN;
/// Bytes of an IPv6 header without extension headers.
pub const IPV6_LEN: usize = Ipv6Hdr::LEN;

/// The fields of an IPv4 header the data path looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ipv4 {
    /// Source address.
    pub src: [u8; 4],
    /// Destination address.
    pub dst: [u8; 4],
    /// Header length in bytes with options: 20 to 60.
    pub header_len: usize,
    /// Length of the packet in bytes, header included, as the header says. For a packet too long for the
    /// field (BIG TCP, only GSO packets), the number of bytes that are there.
    pub total_len: u32,
    /// Type of service.
    pub tos: u8,
    /// Time to live.
    pub ttl: u8,
    /// Protocol of the payload.
    pub protocol: u8,
    /// Flags and fragment offset, host byte order.
    pub fragment: u16,
}

/// The fixed part of an IPv4 header as it stands in a packet, fields in network byte order. Read field by
/// field: byte by byte, a program needs three times as many instructions.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Ipv4Header {
    /// Version (upper half), and header length in words of 4 bytes.
    pub version_len: u8,
    /// Type of service.
    pub tos: u8,
    /// Length of the packet in bytes, header included.
    pub total_len: u16,
    /// Identification.
    pub id: u16,
    /// Flags and fragment offset.
    pub fragment: u16,
    /// Time to live.
    pub ttl: u8,
    /// Protocol of the payload.
    pub protocol: u8,
    /// Checksum of the header.
    pub checksum: u16,
    /// Source address.
    pub src: u32,
    /// Destination address.
    pub dst: u32,
}

/// Version 4, and a header of five words of four bytes.
const PLAIN: u8 = 0x45;
/// "More fragments" and the offset, as they lie in memory.
const FRAGMENT: u16 = 0x3fff_u16.to_be();

/// TTL and checksum (host byte order) of an IPv4 header after one hop. `None` when the
/// packet must not be forwarded (RFC 1812, 5.3.1).
#[inline(always)]
pub const fn next_ttl(ttl: u8, checksum: u16) -> Option<(u8, u16)> {
    if ttl <= 1 {
        return None;
    }
    // RFC 1624 for a word that falls by 0x100; a sum of all ones is zero.
    let sum = checksum as u32 + 0x100;
    Some((ttl - 1, (sum + (sum >= 0xffff) as u32) as u16))
}

/// Flags of TCP (RFC 9293).
pub mod tcp_flags {
    /// No more data from the sender.
    pub const FIN: u8 = 0x01;
    /// Synchronises sequence numbers: opens a connection.
    pub const SYN: u8 = 0x02;
    /// Resets the connection.
    pub const RST: u8 = 0x04;
    /// The acknowledgement number counts.
    pub const ACK: u8 = 0x10;
}

impl Ipv4Header {
    /// Whether the header has no options and the packet is not a fragment (RFC 791).
    #[inline(always)]
    pub const fn is_plain(&self) -> bool {
        self.version_len == PLAIN && self.fragment & FRAGMENT == 0
    }

    /// Lowers the TTL for one hop. `None`, with nothing changed, when the TTL is used up (1 or 0).
    #[inline(always)]
    pub const fn lower_ttl(&mut self) -> Option<()> {
        let Some((ttl, checksum)) = next_ttl(self.ttl, u16::from_be(self.checksum)) else { return None };
        self.ttl = ttl;
        self.checksum = checksum.to_be();
        Some(())
    }
}

impl Ipv4 {
    /// Reads the fixed part of a header. `available` is the number of bytes
    /// from the start of the header to the end of the packet.
    ///
    /// # Errors
    /// `Malformed` when version or header length are impossible, `Truncated`
    /// when the header or the packet is longer than what is there.
    #[inline(always)]
    pub const fn parse(bytes: &[u8; IPV4_LEN], available: usize) -> Result<Self, DropReason> {
        // SAFETY: integers only, for which all bytes are values; both have 20 bytes.
        Self::new(&unsafe { core::mem::transmute::<[u8; IPV4_LEN], Ipv4Header>(*bytes) }, available)
    }

    /// As [`Self::parse`], from a header that is read field by field.
    ///
    /// # Errors
    /// As [`Self::parse`].
    #[inline(always)]
    pub const fn new(header: &Ipv4Header, available: usize) -> Result<Self, DropReason> {
        if header.version_len >> 4 != 4 {
            return Err(DropReason::Malformed);
        }
        let header_len = (header.version_len & 0xf) as usize * 4;
        let mut total_len = u16::from_be(header.total_len) as usize;
        // No packet on a wire is that long: it is BIG TCP, whose length does not fit the field.
        if total_len == 0 && available > u16::MAX as usize {
            total_len = available;
        }
        if header_len < IPV4_LEN || total_len < header_len {
            return Err(DropReason::Malformed);
        }
        if total_len > available {
            return Err(DropReason::Truncated);
        }
        Ok(Self {
            src: header.src.to_ne_bytes(),
            dst: header.dst.to_ne_bytes(),
            header_len,
            total_len: total_len as u32,
            tos: header.tos,
            ttl: header.ttl,
            protocol: header.protocol,
            fragment: u16::from_be(header.fragment),
        })
    }

    /// True for every part of a fragmented packet (more fragments, or an offset).
    #[inline(always)]
    pub const fn is_fragment(&self) -> bool {
        self.fragment & 0x3fff != 0
    }
}

/// The fields of an IPv6 header the data path looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ipv6 {
    /// Source address.
    pub src: [u8; 16],
    /// Destination address.
    pub dst: [u8; 16],
    /// Bytes behind the fixed header, extension headers included.
    pub payload_len: u16,
    /// Traffic class: DSCP in the upper six bits, ECN in the lower two (RFC 2474, RFC 3168).
    pub traffic_class: u8,
    /// Hop limit; a packet that arrives with 1 or 0 is not forwarded.
    pub hop_limit: u8,
    /// Protocol of what follows the fixed header; may be an extension header.
    pub next_header: u8,
}

impl Ipv6 {
    /// Reads the fixed header. `available` is the number of bytes from the
    /// start of the header to the end of the packet.
    ///
    /// # Errors
    /// `Malformed` when the version is impossible, `Truncated` when the packet
    /// is longer than what is there.
    #[inline(always)]
    pub const fn parse(bytes: &[u8; IPV6_LEN], available: usize) -> Result<Self, DropReason> {
        if bytes[0] >> 4 != 6 {
            return Err(DropReason::Malformed);
        }
        let payload_len = u16::from_be_bytes([bytes[4], bytes[5]]);
        if payload_len as usize + IPV6_LEN > available {
            return Err(DropReason::Truncated);
        }
        Ok(Self {
            src: address(bytes, 8),
            dst: address(bytes, 24),
            payload_len,
            traffic_class: bytes[0] << 4 | bytes[1] >> 4,
            hop_limit: bytes[7],
            next_header: bytes[6],
        })
    }
}

#[inline(always)]
const fn address(bytes: &[u8; IPV6_LEN], at: usize) -> [u8; 16] {
    let mut address = [0; 16];
    let mut i = 0;
    while i < 16 {
        address[i] = bytes[at + i];
        i += 1;
    }
    address
}

/// True for IPv6 destinations that are never steered: unspecified, loopback,
/// link-local and multicast (RFC 6890). The address comes as its two halves,
/// each in memory order: programs have no stack for sixteen bytes one by one.
#[inline(always)]
pub const fn never_steered_v6([high, low]: [u64; 2]) -> bool {
    let [first, second, ..] = high.to_ne_bytes();
    let loopback = high == 0 && (low == 0 || low == 1u64.to_be());
    loopback || first == 0xff || (first == 0xfe && second & 0xc0 == 0x80)
}

/// The two halves of an IPv6 address, each in memory order.
pub const fn halves(addr: [u8; 16]) -> [u64; 2] {
    let [a, b, c, d, e, f, g, h, rest @ ..] = addr;
    [u64::from_ne_bytes([a, b, c, d, e, f, g, h]), u64::from_ne_bytes(rest)]
}

/// True for destinations that are never steered: 0/8, loopback, link-local,
/// multicast, reserved and limited broadcast (RFC 6890).
#[inline(always)]
pub const fn never_steered(dst: [u8; 4]) -> bool {
    matches!(dst, [0 | 127 | 224..=255, ..] | [169, 254, ..])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header() -> [u8; 20] {
        let mut bytes = [0; 20];
        bytes[0] = 0x45;
        bytes[3] = 40;
        bytes
    }

    #[test]
    fn a_packet_shorter_than_its_header_says_is_truncated() {
        assert_eq!(Ipv4::parse(&header(), 39), Err(DropReason::Truncated));
        assert!(Ipv4::parse(&header(), 40).is_ok());
    }

    #[test]
    fn an_impossible_header_is_malformed() {
        for (index, value) in [(0, 0x65), (0, 0x44), (0, 0x00), (3, 19)] {
            let mut bytes = header();
            bytes[index] = value;
            assert_eq!(Ipv4::parse(&bytes, 1500), Err(DropReason::Malformed), "{index} {value:#x}");
        }
    }

    #[test]
    fn the_length_of_a_packet_too_long_to_say_it_is_what_is_there() {
        let mut bytes = header();
        bytes[2..4].fill(0);
        assert_eq!(Ipv4::parse(&bytes, 180_000).map(|ip| ip.total_len), Ok(180_000));
        assert_eq!(Ipv4::parse(&bytes, 65_535), Err(DropReason::Malformed), "it could have said it");
        bytes[2..4].copy_from_slice(&40u16.to_be_bytes());
        assert_eq!(Ipv4::parse(&bytes, 180_000).map(|ip| ip.total_len), Ok(40), "padded");
    }

    #[test]
    fn both_the_first_and_the_last_fragment_are_fragments() {
        for (fragment, expected) in [(0x4000u16, false), (0, false), (0x2000, true), (0x0001, true)] {
            let mut bytes = header();
            bytes[6..8].copy_from_slice(&fragment.to_be_bytes());
            assert_eq!(Ipv4::parse(&bytes, 40).map(|ip| ip.is_fragment()), Ok(expected));
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_a_panic(bytes in any::<[u8; 20]>(), available in 0usize..70_000) {
            if let Ok(ip) = Ipv4::parse(&bytes, available) {
                prop_assert!(ip.header_len <= ip.total_len as usize);
                prop_assert!(ip.total_len as usize <= available);
                prop_assert!(ip.header_len <= 60);
            }
        }
    }

    #[test]
    fn an_ipv6_header_is_read_field_by_field() {
        let mut bytes = [0u8; 40];
        bytes[..8].copy_from_slice(&[0x6a, 0xb0, 0, 0, 0, 8, protocol::UDP, 63]);
        bytes[8] = 0xfd;
        bytes[39] = 9;
        let ip = Ipv6::parse(&bytes, 48).unwrap();
        assert_eq!((ip.traffic_class, ip.next_header, ip.hop_limit), (0xab, protocol::UDP, 63));
        assert_eq!((ip.src[0], ip.dst[15], ip.payload_len), (0xfd, 9, 8));
        assert_eq!(Ipv6::parse(&bytes, 47), Err(DropReason::Truncated));
        bytes[0] = 0x45;
        assert_eq!(Ipv6::parse(&bytes, 48), Err(DropReason::Malformed));
    }

    #[test]
    fn ipv6_addresses_that_do_not_leave_a_link_are_never_steered() {
        for dst in ["::", "::1", "ff02::1", "ff05::2", "fe80::1", "febf::1"] {
            assert!(never_steered_v6(halves(dst.parse::<std::net::Ipv6Addr>().unwrap().octets())), "{dst}");
        }
        for dst in ["fd00::1", "2001:db8::1", "fec0::1", "::2", "1::"] {
            assert!(!never_steered_v6(halves(dst.parse::<std::net::Ipv6Addr>().unwrap().octets())), "{dst}");
        }
    }

    #[test]
    fn addresses_that_do_not_leave_a_link_are_never_steered() {
        for dst in [[224, 0, 0, 1], [255; 4], [169, 254, 1, 1], [127, 0, 0, 1], [0; 4]] {
            assert!(never_steered(dst), "{dst:?}");
        }
        for dst in [[10, 0, 0, 255], [8, 8, 8, 8], [169, 253, 1, 1], [223, 255, 255, 255]] {
            assert!(!never_steered(dst), "{dst:?}");
        }
    }

    #[test]
    fn a_used_up_ttl_is_not_forwarded() {
        assert_eq!(next_ttl(1, 0), None);
        assert_eq!(next_ttl(0, 0), None);
    }
}

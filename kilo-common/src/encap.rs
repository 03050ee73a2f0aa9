//! The outer headers of a steered packet, as the Linux devices write them:
//! IP in IP (RFC 2003, RFC 2473; Kilo's `tunl0` understands the IPv4 form) and
//! VXLAN (RFC 7348).
//!
//! A frame is everything in front of the inner IP packet. It is written into zeroed memory, because the
//! programs' stack has no room for copies. Its link-layer addresses stay zero: the kernel fills them from the
//! neighbour. `kilo-ebpf/src/encap.rs` puts a frame in front of a packet and sends it.

use core::mem::offset_of;

use network_types::{
    ip::{Ipv4Hdr, Ipv6Hdr},
    udp::UdpHdr,
    vxlan::{VXLAN_I_FLAG_MASK, VxlanHdr},
};

use crate::{
    checksum,
    maps::{VXLAN_PORT, VXLAN_VNI},
    packet::{ETHERNET_LEN, ETHERTYPE_IPV4, ETHERTYPE_IPV6, IPV4_LEN, IPV6_LEN, protocol},
};

/// TTL of the outer header (Linux's default for tunnels).
pub const OUTER_TTL: u8 = 64;

/// Bytes of a UDP header.
pub const UDP_LEN: usize = UdpHdr::LEN;
/// Bytes of a VXLAN header.
pub const VXLAN_LEN: usize = VxlanHdr::LEN;
/// Bytes of UDP, VXLAN and inner Ethernet header.
pub const VXLAN_INNER: usize = UDP_LEN + VXLAN_LEN + ETHERNET_LEN;

/// Bytes an IPIP packet grows by over IPv4.
pub const IPIP_OVERHEAD: usize = IPV4_LEN;
/// Bytes an IPIP packet grows by over IPv6.
pub const IPIP_OVERHEAD_V6: usize = IPV6_LEN;
/// Bytes a VXLAN packet grows by over IPv4.
pub const VXLAN_OVERHEAD: usize = IPV4_LEN + VXLAN_INNER;
/// Bytes a VXLAN packet grows by over IPv6.
pub const VXLAN_OVERHEAD_V6: usize = IPV6_LEN + VXLAN_INNER;

/// Inner Ethernet source of VXLAN packets. Receivers drop frames from their own address, so it differs from
/// the device's ([`VXLAN_DEVICE_MAC`]).
pub const VXLAN_SOURCE_MAC: [u8; 6] = [0x02, 0x6b, 0x67, 0, 0, 2];
/// Address of every node's VXLAN device, and inner Ethernet destination.
pub const VXLAN_DEVICE_MAC: [u8; 6] = [0x02, 0x6b, 0x67, 0, 0, 1];

/// The inner packet, as far as its outer headers depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inner {
    /// Length of the inner packet in bytes. Where it does not fit in 16 bits the headers
    /// say 0, and the kernel writes the lengths of the segments when it cuts the packet.
    pub len: u32,
    /// Type of service or traffic class.
    pub tos: u8,
    /// True for IPv6.
    pub v6: bool,
    /// Flow hash, from which the outer UDP source port and the IPv4 identification are taken.
    pub hash: u32,
}

impl Inner {
    const fn protocol(&self) -> u8 {
        if self.v6 { protocol::IPV6 } else { protocol::IPIP }
    }
}

/// Writes the frame for IPIP over IPv4, with "don't fragment" set so that links with a smaller MTU are
/// discovered.
#[inline(always)]
pub const fn ipip_frame(
    frame: &mut [u8; ETHERNET_LEN + IPIP_OVERHEAD],
    local: &[u8; 4],
    remote: &[u8; 4],
    inner: &Inner,
) {
    let len = length(inner.len + IPIP_OVERHEAD as u32);
    put_ipv4(frame, local, remote, inner.tos, len, inner.protocol(), None);
}

/// Writes the frame for IPIP over IPv6.
#[inline(always)]
pub const fn ipip_frame_v6(
    frame: &mut [u8; ETHERNET_LEN + IPIP_OVERHEAD_V6],
    local: &[u8; 16],
    remote: &[u8; 16],
    inner: &Inner,
) {
    put_ipv6(frame, local, remote, inner.tos, length(inner.len), inner.protocol());
}

/// Writes the frame for VXLAN over IPv4, which routers may fragment.
#[inline(always)]
pub const fn vxlan_frame(
    frame: &mut [u8; ETHERNET_LEN + VXLAN_OVERHEAD],
    local: &[u8; 4],
    remote: &[u8; 4],
    inner: &Inner,
) {
    let len = length(inner.len + VXLAN_OVERHEAD as u32);
    put_ipv4(frame, local, remote, inner.tos, len, protocol::UDP, Some(inner.hash as u16));
    put_vxlan(frame, ETHERNET_LEN + IPV4_LEN, inner);
}

/// Writes the frame for VXLAN over IPv6, without a UDP checksum (RFC 6935).
#[inline(always)]
pub const fn vxlan_frame_v6(
    frame: &mut [u8; ETHERNET_LEN + VXLAN_OVERHEAD_V6],
    local: &[u8; 16],
    remote: &[u8; 16],
    inner: &Inner,
) {
    let len = length(inner.len + VXLAN_INNER as u32);
    put_ipv6(frame, local, remote, inner.tos, len, protocol::UDP);
    put_vxlan(frame, ETHERNET_LEN + IPV6_LEN, inner);
}

/// Inner Ethernet header of VXLAN packets.
#[inline(always)]
pub const fn vxlan_ethernet(v6: bool) -> [u8; ETHERNET_LEN] {
    let mut header = [0; ETHERNET_LEN];
    put_vxlan_ethernet(&mut header, 0, v6);
    header
}

/// The VXLAN header: flag "VNI is valid", our VNI.
#[inline(always)]
pub const fn vxlan_header() -> [u8; VXLAN_LEN] {
    let vni = VXLAN_VNI.to_be_bytes();
    [VXLAN_I_FLAG_MASK, 0, 0, 0, vni[1], vni[2], vni[3], 0]
}

/// Value of a 16-bit length field for so many bytes: 0 when they do not fit (BIG TCP), since each segment
/// gets its own then.
#[inline(always)]
const fn length(bytes: u32) -> u16 {
    if bytes > u16::MAX as u32 { 0 } else { bytes as u16 }
}

/// Copies `part` into `frame` at `at`.
#[inline(always)]
const fn put<const F: usize, const P: usize>(frame: &mut [u8; F], at: usize, part: &[u8; P]) {
    let mut i = 0;
    while i < P {
        frame[at + i] = part[i];
        i += 1;
    }
}

#[inline(always)]
const fn put_vxlan_ethernet<const F: usize>(frame: &mut [u8; F], at: usize, v6: bool) {
    put(frame, at, &VXLAN_DEVICE_MAC);
    put(frame, at + 6, &VXLAN_SOURCE_MAC);
    put(frame, at + 12, &(if v6 { ETHERTYPE_IPV6 } else { ETHERTYPE_IPV4 }).to_be_bytes());
}

/// Writes the UDP, VXLAN and inner Ethernet headers at `at`.
#[inline(always)]
const fn put_vxlan<const F: usize>(frame: &mut [u8; F], at: usize, inner: &Inner) {
    // The source port spreads flows over queues and paths (RFC 7348, section 5).
    let port = 0xc000 | (inner.hash ^ inner.hash >> 16) as u16 & 0x3fff;
    put(frame, at + offset_of!(UdpHdr, src), &port.to_be_bytes());
    put(frame, at + offset_of!(UdpHdr, dst), &VXLAN_PORT.to_be_bytes());
    put(frame, at + offset_of!(UdpHdr, len), &length(inner.len + VXLAN_INNER as u32).to_be_bytes());
    put(frame, at + UDP_LEN, &vxlan_header());
    put_vxlan_ethernet(frame, at + UDP_LEN + VXLAN_LEN, inner.v6);
}

/// Writes EtherType and an IPv4 header without options for a packet of `total_len` bytes. With an
/// `identification` it may be fragmented, without one it must not.
#[inline(always)]
const fn put_ipv4<const F: usize>(
    frame: &mut [u8; F],
    local: &[u8; 4],
    remote: &[u8; 4],
    tos: u8,
    total_len: u16,
    protocol: u8,
    identification: Option<u16>,
) {
    let (id, flags) = match identification {
        Some(id) => (id, 0),
        None => (0, 0x4000),
    };
    let words = [
        0x4500 | tos as u16,
        total_len,
        id,
        flags,
        (OUTER_TTL as u16) << 8 | protocol as u16,
        0,
        u16::from_be_bytes([local[0], local[1]]),
        u16::from_be_bytes([local[2], local[3]]),
        u16::from_be_bytes([remote[0], remote[1]]),
        u16::from_be_bytes([remote[2], remote[3]]),
    ];
    put(frame, ETHERNET_LEN - 2, &ETHERTYPE_IPV4.to_be_bytes());
    let (mut i, mut sum) = (0, 0);
    while i < words.len() {
        put(frame, ETHERNET_LEN + 2 * i, &words[i].to_be_bytes());
        sum += words[i] as u32;
        i += 1;
    }
    put(frame, ETHERNET_LEN + offset_of!(Ipv4Hdr, check), &(!checksum::fold(sum)).to_be_bytes());
}

/// Writes EtherType and an IPv6 header for `payload_len` bytes, with flow label zero.
#[inline(always)]
const fn put_ipv6<const F: usize>(
    frame: &mut [u8; F],
    local: &[u8; 16],
    remote: &[u8; 16],
    traffic_class: u8,
    payload_len: u16,
    next_header: u8,
) {
    put(frame, ETHERNET_LEN - 2, &ETHERTYPE_IPV6.to_be_bytes());
    frame[ETHERNET_LEN] = 0x60 | traffic_class >> 4;
    frame[ETHERNET_LEN + 1] = traffic_class << 4;
    put(frame, ETHERNET_LEN + offset_of!(Ipv6Hdr, payload_len), &payload_len.to_be_bytes());
    frame[ETHERNET_LEN + offset_of!(Ipv6Hdr, next_hdr)] = next_header;
    frame[ETHERNET_LEN + offset_of!(Ipv6Hdr, hop_limit)] = OUTER_TTL;
    put(frame, ETHERNET_LEN + offset_of!(Ipv6Hdr, src_addr), local);
    put(frame, ETHERNET_LEN + offset_of!(Ipv6Hdr, dst_addr), remote);
}

/// Length of a packet on a link: for a GSO packet, of one segment. `gso_size` is its payload per segment,
/// `headers` the bytes in front of that payload, `len` the whole packet; all without the link layer.
#[inline(always)]
pub const fn segment_len(len: u32, gso_size: u32, headers: u32) -> u32 {
    if gso_size == 0 { len } else { gso_size + headers }
}

/// Bytes a WireGuard device wants in front of an IP packet (its `needed_headroom`).
const WIREGUARD_ROOM: u32 = 128;
/// With this much headroom, the kernel's buffers for the headers of segments have 4,096 bytes ...
const WHOLE_ROOM: u32 = 1_728;
/// ... which leaves room for the data of a segment of at most this size.
const WHOLE_SEGMENT: u32 = 1_800;

/// Headroom to make in front of the Ethernet header of a GSO packet that goes to WireGuard, so that none of
/// its segments is copied for lack of it. Segments that are cut before WireGuard keep their data in the GSO
/// packet's pages. WireGuard needs it behind the headers, so the buffers must then have room for both.
#[inline(always)]
pub const fn segments_room(gso_size: u32, cut_before: bool) -> u32 {
    let room = if cut_before && gso_size <= WHOLE_SEGMENT { WHOLE_ROOM } else { WIREGUARD_ROOM };
    room - ETHERNET_LEN as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::{Ipv4, Ipv6, next_ttl};
    use proptest::prelude::*;

    fn inner(len: u32, tos: u8, v6: bool) -> Inner {
        Inner { len, tos, v6, hash: 0x1234_5678 }
    }

    #[test]
    fn what_does_not_fit_the_length_of_a_header_says_none() {
        for (len, says) in [(65_515, 65_535), (65_516, 0), (180_000, 0)] {
            let frame = built(|frame| ipip_frame(frame, &[1; 4], &[2; 4], &inner(len, 0, false)));
            assert_eq!(u16::from_be_bytes([frame[16], frame[17]]), says, "{len}");
            let available = len as usize + IPIP_OVERHEAD;
            let outer = Ipv4::parse(frame[14..34].try_into().unwrap(), available).unwrap();
            assert_eq!(outer.total_len as usize, available, "{len}: as the kernel reads it");
        }
    }

    fn built<const N: usize>(build: impl Fn(&mut [u8; N])) -> Vec<u8> {
        let mut frame = [0; N];
        build(&mut frame);
        frame.to_vec()
    }

    /// A packet as on the wire: the frame without its Ethernet header, followed by `len` zero bytes.
    fn on_the_wire(frame: &[u8], len: u16) -> Vec<u8> {
        [&frame[ETHERNET_LEN..], &vec![0; usize::from(len)][..]].concat()
    }

    #[test]
    fn a_segment_that_is_cut_early_has_room_for_its_data_behind_its_headers() {
        /// `struct skb_shared_info` at the end of each buffer, and what WireGuard adds to a packet.
        const SHARED: u32 = 320;
        const TRAILER: u32 = 31;
        // From UDP over IPv4 to TCP over IPv6 with all options.
        for headers in 28..=100 {
            // The kernel makes room in steps of 64 bytes.
            for spare in 0..64 {
                let before = segments_room(WHOLE_SEGMENT, true) + ETHERNET_LEN as u32 + spare + headers;
                let buffer = (before + SHARED).next_power_of_two();
                assert_eq!(buffer, 4096, "{headers} {spare}");
                assert!(before + WHOLE_SEGMENT + TRAILER + SHARED <= buffer, "{headers} {spare}");
            }
        }
        for room in [segments_room(WHOLE_SEGMENT + 1, true), segments_room(1360, false)] {
            assert_eq!(room + ETHERNET_LEN as u32, WIREGUARD_ROOM, "nothing is gained by more");
        }
    }

    proptest! {
        #[test]
        fn the_outer_ipv4_header_is_a_valid_one(
            local in any::<[u8; 4]>(), remote in any::<[u8; 4]>(), tos in any::<u8>(), len in 20u16..65_000,
            v6 in any::<bool>(),
        ) {
            for (frame, protocol, dont_fragment) in [
                (built(|frame| ipip_frame(frame, &local, &remote, &inner(len.into(), tos, v6))), if v6 { 41 } else { 4 }, true),
                (built(|frame| vxlan_frame(frame, &local, &remote, &inner(len.into(), tos, v6))), 17, false),
            ] {
                prop_assert_eq!(&frame[12..14], [8, 0]);
                let packet = on_the_wire(&frame, len);
                let header: [u8; 20] = packet[..20].try_into().unwrap();
                let ip = Ipv4::parse(&header, packet.len()).unwrap();
                prop_assert_eq!((ip.src, ip.dst, ip.protocol, ip.tos), (local, remote, protocol, tos));
                prop_assert_eq!(ip.total_len as usize, packet.len());
                prop_assert_eq!(checksum::header(&header), 0);
                prop_assert!(!ip.is_fragment());
                prop_assert_eq!(ip.fragment & 0x4000 != 0, dont_fragment);
            }
        }

        #[test]
        fn the_outer_ipv6_header_is_a_valid_one(
            local in any::<[u8; 16]>(), remote in any::<[u8; 16]>(), tos in any::<u8>(), len in 20u16..65_000,
            v6 in any::<bool>(),
        ) {
            for (frame, protocol) in [
                (built(|frame| ipip_frame_v6(frame, &local, &remote, &inner(len.into(), tos, v6))), if v6 { 41 } else { 4 }),
                (built(|frame| vxlan_frame_v6(frame, &local, &remote, &inner(len.into(), tos, v6))), 17),
            ] {
                prop_assert_eq!(&frame[12..14], [0x86, 0xdd]);
                let packet = on_the_wire(&frame, len);
                let header: [u8; 40] = packet[..40].try_into().unwrap();
                let ip = Ipv6::parse(&header, packet.len()).unwrap();
                prop_assert_eq!((ip.src, ip.dst, ip.next_header, ip.traffic_class), (local, remote, protocol, tos));
                prop_assert_eq!(usize::from(ip.payload_len) + 40, packet.len());
            }
        }

        #[test]
        fn flows_are_spread_over_dynamic_ports(hash in any::<u32>()) {
            let frame = built(|frame| vxlan_frame(frame, &[1; 4], &[2; 4], &Inner { hash, ..inner(100, 0, false) }));
            let port = u16::from_be_bytes([frame[34], frame[35]]);
            prop_assert!(port >= 49_152);
            prop_assert_eq!(&frame[36..38], VXLAN_PORT.to_be_bytes());
            prop_assert_eq!(u16::from_be_bytes([frame[38], frame[39]]), 100 + 30);
            prop_assert_eq!(frame[42..50].to_vec(), vxlan_header());
            prop_assert_eq!(frame[50..64].to_vec(), vxlan_ethernet(false));
        }

        #[test]
        fn the_checksum_stays_right_when_the_ttl_falls(ttl in 2u8.., protocol in any::<u8>(), src in any::<[u8; 4]>()) {
            let mut header: [u8; 20] = built(|frame| ipip_frame(frame, &src, &[1, 2, 3, 4], &inner(100, 0, false)))[14..].try_into().unwrap();
            header[8] = ttl;
            header[9] = protocol;
            header[10..12].copy_from_slice(&[0, 0]);
            let sum = checksum::header(&header);
            let (ttl, sum) = next_ttl(ttl, sum).unwrap();
            header[8] = ttl;
            header[10..12].copy_from_slice(&sum.to_be_bytes());
            prop_assert_eq!(checksum::header(&header), 0);
        }
    }

    #[test]
    fn a_gso_packet_is_as_long_as_its_segments() {
        assert_eq!(segment_len(9000, 0, 40), 9000);
        assert_eq!(segment_len(64_000, 1380, 40), 1420);
    }
}

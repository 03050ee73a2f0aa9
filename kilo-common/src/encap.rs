//! The outer header of a steered packet: IP in IP (RFC 2003), as the Linux
//! `ipip` device writes it, so that Kilo's `tunl0` understands it.

use crate::{
    checksum,
    packet::{ETHERNET_LEN, ETHERTYPE_IPV4, IPV4_LEN, protocol},
};

/// TTL of the outer header (Linux's default for tunnels).
pub const OUTER_TTL: u8 = 64;

/// Bytes an IPIP packet grows by.
pub const IPIP_OVERHEAD: usize = IPV4_LEN;

/// Ethernet and outer IPv4 header for an inner packet of `inner_len` bytes.
/// The link-layer addresses are zero: the kernel fills them from the neighbour.
#[inline(always)]
pub const fn ipip_frame(
    local: [u8; 4],
    remote: [u8; 4],
    tos: u8,
    inner_len: u16,
) -> [u8; ETHERNET_LEN + IPV4_LEN] {
    let mut frame = [0; ETHERNET_LEN + IPV4_LEN];
    let ethertype = ETHERTYPE_IPV4.to_be_bytes();
    frame[12] = ethertype[0];
    frame[13] = ethertype[1];
    let header = ipip_header(local, remote, tos, inner_len);
    let mut i = 0;
    while i < IPV4_LEN {
        frame[ETHERNET_LEN + i] = header[i];
        i += 1;
    }
    frame
}

/// The outer IPv4 header: don't fragment, protocol 4, TOS of the inner packet.
#[inline(always)]
pub const fn ipip_header(local: [u8; 4], remote: [u8; 4], tos: u8, inner_len: u16) -> [u8; IPV4_LEN] {
    let total = inner_len.wrapping_add(IPIP_OVERHEAD as u16).to_be_bytes();
    let mut header = [
        0x45,
        tos,
        total[0],
        total[1],
        0,
        0,
        0x40,
        0,
        OUTER_TTL,
        protocol::IPIP,
        0,
        0,
        local[0],
        local[1],
        local[2],
        local[3],
        remote[0],
        remote[1],
        remote[2],
        remote[3],
    ];
    let sum = checksum::header(&header).to_be_bytes();
    header[10] = sum[0];
    header[11] = sum[1];
    header
}

/// TTL and checksum bytes after one hop: (TTL, checksum). `None` when the
/// packet must not be forwarded (RFC 1812, 5.3.1).
#[inline(always)]
pub const fn next_ttl(ttl: u8, protocol: u8, checksum: u16) -> Option<(u8, u16)> {
    if ttl <= 1 {
        return None;
    }
    let old = u16::from_be_bytes([ttl, protocol]);
    let new = u16::from_be_bytes([ttl - 1, protocol]);
    Some((ttl - 1, checksum::update(checksum, old, new)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::Ipv4;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_outer_header_is_a_valid_one(
            local in any::<[u8; 4]>(), remote in any::<[u8; 4]>(), tos in any::<u8>(), len in 20u16..65_000,
        ) {
            let header = ipip_header(local, remote, tos, len);
            let ip = Ipv4::parse(&header, usize::from(len) + 20).unwrap();
            prop_assert_eq!((ip.src, ip.dst, ip.protocol, ip.tos), (local, remote, 4, tos));
            prop_assert_eq!(usize::from(ip.total_len), usize::from(len) + 20);
            prop_assert_eq!(checksum::header(&header), 0);
            prop_assert!(!ip.is_fragment());
        }

        #[test]
        fn the_checksum_stays_right_when_the_ttl_falls(ttl in 2u8.., protocol in any::<u8>(), src in any::<[u8; 4]>()) {
            let mut header = ipip_header(src, [1, 2, 3, 4], 0, 100);
            header[8] = ttl;
            header[9] = protocol;
            header[10..12].copy_from_slice(&[0, 0]);
            let sum = checksum::header(&header);
            let (ttl, sum) = next_ttl(ttl, protocol, sum).unwrap();
            header[8] = ttl;
            header[10..12].copy_from_slice(&sum.to_be_bytes());
            prop_assert_eq!(checksum::header(&header), 0);
        }
    }

    #[test]
    fn a_used_up_ttl_is_not_forwarded() {
        assert_eq!(next_ttl(1, 6, 0), None);
        assert_eq!(next_ttl(0, 6, 0), None);
    }
}

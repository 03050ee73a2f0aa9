//! Reads ICMP errors that routers send about a steered packet that they could not carry. They are only a
//! hint, since any host can send one: the agent probes the path itself.

use super::{FRAGMENTATION_NEEDED, ICMP_LEN, PACKET_TOO_BIG, UNREACHABLE};
use crate::{
    maps::VXLAN_PORT,
    packet::{IPV4_LEN, IPV6_LEN, protocol},
};

/// Bytes read behind the quoted header: the ports, if it is UDP.
const PORTS: usize = 4;
/// Bytes read of an ICMP error.
pub const ERROR_V4: usize = ICMP_LEN + IPV4_LEN + PORTS;
/// Bytes read of an ICMPv6 error.
pub const ERROR_V6: usize = ICMP_LEN + IPV6_LEN + PORTS;

/// Bit in the first of the two bytes with flags and fragment offset.
const DONT_FRAGMENT: u8 = 0x40;

/// The packet that an ICMP error quotes, as far as it shows whose it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuotedPacket<const N: usize> {
    /// Outer source.
    pub local: [u8; N],
    /// Outer destination.
    pub remote: [u8; N],
    /// Length in bytes, outer header included.
    pub size: u32,
}

/// The packet an ICMP error quotes; `None` unless it is about one that looks like
/// ours and was larger than what the router carries.
#[inline(always)]
pub fn v4(error: &[u8; ERROR_V4]) -> Option<QuotedPacket<4>> {
    const IP: usize = ICMP_LEN;
    if error[0] != UNREACHABLE || error[1] != FRAGMENTATION_NEEDED {
        return None;
    }
    // Our outer headers have no options.
    if error[IP] != 0x45 || error[IP + 6] & DONT_FRAGMENT == 0 {
        return None;
    }
    let carried = u32::from(u16::from_be_bytes([error[6], error[7]]));
    let size = u32::from(u16::from_be_bytes([error[IP + 2], error[IP + 3]]));
    let port = [error[IP + IPV4_LEN + 2], error[IP + IPV4_LEN + 3]];
    if carried >= size || !is_tunnelled(error[IP + 9], port) {
        return None;
    }
    Some(QuotedPacket { local: take(error, IP + 12), remote: take(error, IP + 16), size })
}

/// As [`v4`], for ICMPv6.
#[inline(always)]
pub fn v6(error: &[u8; ERROR_V6]) -> Option<QuotedPacket<16>> {
    const IP: usize = ICMP_LEN;
    if error[0] != PACKET_TOO_BIG || error[IP] >> 4 != 6 {
        return None;
    }
    let carried = u32::from_be_bytes([error[4], error[5], error[6], error[7]]);
    let size = u32::from(u16::from_be_bytes([error[IP + 4], error[IP + 5]])) + IPV6_LEN as u32;
    let port = [error[IP + IPV6_LEN + 2], error[IP + IPV6_LEN + 3]];
    if carried >= size || !is_tunnelled(error[IP + 6], port) {
        return None;
    }
    Some(QuotedPacket { local: take(error, IP + 8), remote: take(error, IP + 24), size })
}

/// True for the outer protocols of steered packets.
#[inline(always)]
fn is_tunnelled(outer: u8, port: [u8; 2]) -> bool {
    match outer {
        protocol::IPIP | protocol::IPV6 => true,
        protocol::UDP => port == VXLAN_PORT.to_be_bytes(),
        _ => false,
    }
}

#[inline(always)]
fn take<const L: usize, const N: usize>(bytes: &[u8; L], at: usize) -> [u8; N] {
    let mut taken = [0; N];
    let mut i = 0;
    while i < N {
        taken[i] = bytes[at + i];
        i += 1;
    }
    taken
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        encap::{IPIP_OVERHEAD, Inner, VXLAN_OVERHEAD_V6, ipip_frame, vxlan_frame_v6},
        packet::ETHERNET_LEN,
    };

    const INNER: Inner = Inner { len: 1480, tos: 0, v6: false, hash: 7 };

    fn ipip(mtu: u16) -> [u8; ERROR_V4] {
        let mut frame = [0; ETHERNET_LEN + IPIP_OVERHEAD];
        ipip_frame(&mut frame, &[10, 0, 0, 1], &[10, 0, 0, 2], &INNER);
        let mut error = [0; ERROR_V4];
        error[..2].copy_from_slice(&[3, 4]);
        error[6..8].copy_from_slice(&mtu.to_be_bytes());
        error[8..28].copy_from_slice(&frame[ETHERNET_LEN..]);
        error
    }

    fn vxlan(mtu: u32) -> [u8; ERROR_V6] {
        let mut frame = [0; ETHERNET_LEN + VXLAN_OVERHEAD_V6];
        vxlan_frame_v6(&mut frame, &[1; 16], &[2; 16], &INNER);
        let mut error = [0; ERROR_V6];
        error[0] = 2;
        error[4..8].copy_from_slice(&mtu.to_be_bytes());
        error[8..].copy_from_slice(&frame[ETHERNET_LEN..ETHERNET_LEN + 44]);
        error
    }

    #[test]
    fn packets_as_the_programs_write_them_are_known() {
        let quoted = v4(&ipip(1360)).unwrap();
        assert_eq!(quoted, QuotedPacket { local: [10, 0, 0, 1], remote: [10, 0, 0, 2], size: 1500 });
        let quoted = v6(&vxlan(1360)).unwrap();
        assert_eq!(quoted, QuotedPacket { local: [1; 16], remote: [2; 16], size: 1550 });
    }

    #[test]
    fn what_is_not_ours_or_was_not_too_big_is_nothing() {
        assert_eq!(v4(&ipip(1500)), None, "it would have passed");
        assert_eq!(v6(&vxlan(1550)), None);
        let changed = |at: usize, value: u8| {
            let mut error = ipip(1360);
            error[at] = value;
            v4(&error)
        };
        assert_eq!(changed(0, 11), None, "time exceeded");
        assert_eq!(changed(1, 3), None, "port unreachable");
        assert_eq!(changed(8, 0x46), None, "options");
        assert_eq!(changed(14, 0), None, "it may be fragmented");
        assert_eq!(changed(17, 6), None, "TCP");
        assert_eq!(changed(17, 17), None, "UDP to another port");
        let mut error = vxlan(1360);
        error[8 + 40 + 3] ^= 1;
        assert_eq!(v6(&error), None, "UDP to another port");
    }
}

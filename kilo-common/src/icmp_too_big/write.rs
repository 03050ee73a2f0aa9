//! Writes the answer to a sender whose packet the next hop cannot carry.

use super::{FRAGMENTATION_NEEDED, ICMP_LEN, PACKET_TOO_BIG, UNREACHABLE};
use crate::{
    checksum::{self, fold},
    packet::{IPV4_LEN, IPV6_LEN, protocol},
};

/// Bytes of the packet, from its IP header on, that the answer quotes: the
/// longest IPv4 header and what the kernel asks to be kept of a TCP header
/// whose checksum is left to the device.
pub const QUOTED: usize = 80;
/// Bytes of the answer to an IPv4 packet.
pub const LEN_V4: usize = IPV4_LEN + ICMP_LEN + QUOTED;
/// Bytes of the answer to an IPv6 packet.
pub const LEN_V6: usize = IPV6_LEN + ICMP_LEN + QUOTED;

/// Internetwork control (RFC 791), as the kernel's own ICMP errors.
const TOS: u8 = 0xc0;
const TTL: u8 = 64;

/// Writes the headers of the answer in front of the IPv4 packet whose first [`QUOTED`] bytes are the last of
/// `answer`. Its source is that packet's destination; `mtu` is in bytes.
#[inline(always)]
pub fn v4(answer: &mut [u8; LEN_V4], mtu: u16) {
    const QUOTE: usize = LEN_V4 - QUOTED;
    let [length, limit] = [(LEN_V4 as u16).to_be_bytes(), mtu.to_be_bytes()];
    let mut header =
        [0x45, TOS, length[0], length[1], 0, 0, 0, 0, TTL, protocol::ICMP, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    copy(&mut header, 12, answer, QUOTE + 16, 4);
    copy(&mut header, 16, answer, QUOTE + 12, 4);
    [header[10], header[11]] = checksum::header(&header).to_be_bytes();
    copy(answer, 0, &header, 0, IPV4_LEN);
    let icmp = [UNREACHABLE, FRAGMENTATION_NEEDED, 0, 0, 0, 0, limit[0], limit[1]];
    copy(answer, IPV4_LEN, &icmp, 0, ICMP_LEN);
    let sum = sum(answer, IPV4_LEN, LEN_V4);
    [answer[IPV4_LEN + 2], answer[IPV4_LEN + 3]] = (!fold(sum)).to_be_bytes();
}

/// As [`v4`], for IPv6.
#[inline(always)]
pub fn v6(answer: &mut [u8; LEN_V6], mtu: u32) {
    const QUOTE: usize = LEN_V6 - QUOTED;
    const LENGTH: u16 = (LEN_V6 - IPV6_LEN) as u16;
    let length = LENGTH.to_be_bytes();
    copy(answer, 0, &[0x60, 0, 0, 0, length[0], length[1], protocol::ICMPV6, TTL], 0, 8);
    let mut i = 0;
    while i < 16 {
        answer[8 + i] = answer[QUOTE + 24 + i];
        answer[24 + i] = answer[QUOTE + 8 + i];
        i += 1;
    }
    let limit = mtu.to_be_bytes();
    let icmp = [PACKET_TOO_BIG, 0, 0, 0, limit[0], limit[1], limit[2], limit[3]];
    copy(answer, IPV6_LEN, &icmp, 0, ICMP_LEN);
    // Behind both addresses of the pseudo-header: length and next header (RFC 8200, section 8.1).
    let sum = sum(answer, 8, LEN_V6) + u32::from(LENGTH) + u32::from(protocol::ICMPV6);
    [answer[IPV6_LEN + 2], answer[IPV6_LEN + 3]] = (!fold(sum)).to_be_bytes();
}

#[inline(always)]
fn copy(out: &mut [u8], at: usize, from: &[u8], start: usize, len: usize) {
    let mut i = 0;
    while i < len {
        out[at + i] = from[start + i];
        i += 1;
    }
}

/// Sum of the 16-bit words from `start` to `end`, an even number of bytes.
#[inline(always)]
fn sum(bytes: &[u8], start: usize, end: usize) -> u32 {
    let mut sum = 0;
    let mut i = start;
    while i < end {
        sum += u32::from(bytes[i]) << 8 | u32::from(bytes[i + 1]);
        i += 2;
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::{Ipv4, Ipv6};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_answer_goes_to_the_sender_and_its_checksums_hold(
            quoted in prop::array::uniform32(any::<u8>()), rest in any::<[u8; 48]>() , mtu in any::<u16>(),
        ) {
            let quoted: [u8; QUOTED] = [&quoted[..], &rest].concat().try_into().unwrap();
            let mut whole: [u8; LEN_V4] = [&[7; LEN_V4 - QUOTED][..], &quoted].concat().try_into().unwrap();
            v4(&mut whole, mtu);
            let ip = Ipv4::parse(whole.first_chunk().unwrap(), whole.len()).unwrap();
            prop_assert_eq!((&ip.src[..], &ip.dst[..]), (&quoted[16..20], &quoted[12..16]));
            prop_assert_eq!((ip.protocol, ip.total_len as usize), (protocol::ICMP, whole.len()));
            prop_assert_eq!(fold(sum(&whole, 0, 20)), 0xffff);
            prop_assert_eq!(fold(sum(&whole, 20, LEN_V4)), 0xffff);
            prop_assert_eq!(&whole[20..22], &[3, 4]);
            prop_assert_eq!(&whole[24..28], &[[0; 2], mtu.to_be_bytes()].concat()[..]);
            prop_assert_eq!(&whole[28..], &quoted);

            let mut whole: [u8; LEN_V6] = [&[7; LEN_V6 - QUOTED][..], &quoted].concat().try_into().unwrap();
            v6(&mut whole, mtu.into());
            let ip = Ipv6::parse(whole.first_chunk().unwrap(), whole.len()).unwrap();
            prop_assert_eq!((&ip.src[..], &ip.dst[..]), (&quoted[24..40], &quoted[8..24]));
            let pseudo = sum(&whole, 8, 40) + u32::try_from(whole.len() - 40).unwrap() + 58;
            prop_assert_eq!(fold(pseudo + sum(&whole, 40, LEN_V6)), 0xffff);
            prop_assert_eq!(&whole[40..42], &[2, 0]);
            prop_assert_eq!(&whole[44..48], &u32::from(mtu).to_be_bytes());
            prop_assert_eq!(&whole[48..], &quoted);
        }
    }
}

//! Routers that could not carry a steered packet say so to this node, the
//! sender of its outer header (RFC 1191, RFC 8201). The agent is told, and
//! lowers the MTU of the routes that lead there; the stack then tells senders.

use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use kilo_common::{
    maps::{Config, PathMtu},
    packet::{IPV4_LEN, Ipv4, protocol},
};

use crate::{
    ip::{Ip as _, V6, octets},
    maps::PATH_MTU,
};

/// ICMP type and code of "fragmentation needed" (RFC 792).
const UNREACHABLE: u8 = 3;
const FRAGMENTATION_NEEDED: u8 = 4;
/// ICMPv6 type of "packet too big" (RFC 4443).
const PACKET_TOO_BIG: u8 = 2;
/// Bytes of an ICMP header.
const ICMP_LEN: usize = 8;

/// Reads the ICMP error at `offset`; anything but one about a packet this node
/// steered is ignored.
#[inline(never)]
pub fn learn_v4(skb: *mut __sk_buff, config: &Config, offset: usize) {
    let ctx = TcContext::new(skb);
    let Ok(bytes) = ctx.load::<[u8; ICMP_LEN + IPV4_LEN]>(offset) else { return };
    if bytes[0] != UNREACHABLE || bytes[1] != FRAGMENTATION_NEEDED {
        return;
    }
    let quoted = ICMP_LEN;
    let src = [bytes[quoted + 12], bytes[quoted + 13], bytes[quoted + 14], bytes[quoted + 15]];
    let dst = [bytes[quoted + 16], bytes[quoted + 17], bytes[quoted + 18], bytes[quoted + 19]];
    let is_node = Ipv4::sender(dst).is_some();
    if src == config.private_v4 && is_tunnelled(bytes[quoted + 9]) && is_node {
        let mut remote = [0; 16];
        remote[..4].copy_from_slice(&dst);
        report(remote, false, u32::from(u16::from_be_bytes([bytes[6], bytes[7]])));
    }
}

/// As [`learn_v4`], for ICMPv6.
#[inline(never)]
pub fn learn_v6(skb: *mut __sk_buff, config: &Config, offset: usize) {
    let ctx = TcContext::new(skb);
    let Ok(error) = ctx.load::<[u32; 2]>(offset) else { return };
    if error[0].to_ne_bytes()[0] != PACKET_TOO_BIG {
        return;
    }
    let Ok(quoted) = V6::read_part(&ctx, offset + ICMP_LEN) else { return };
    let is_node = V6::sender(quoted.dst).is_some();
    if V6::is_private(config, quoted.src) && is_tunnelled(quoted.next_header) && is_node {
        report(octets(quoted.dst), true, u32::from_be(error[1]));
    }
}

/// True for the protocols steered packets have on the outside.
#[inline(always)]
fn is_tunnelled(outer: u8) -> bool {
    matches!(outer, protocol::IPIP | protocol::IPV6 | protocol::UDP)
}

#[inline(always)]
fn report(remote: [u8; 16], v6: bool, mtu: u32) {
    // A full ring loses the report; the router repeats it with the next packet.
    let _ = PATH_MTU.output(PathMtu { remote, family: if v6 { 6 } else { 4 }, mtu }, 0);
}

//! What links and paths carry: whether a packet fits, and what routers say about it.
//!
//! A router that could not carry a steered packet reports that to this node, the sender of its outer header.
//! The agent gets an event, probes the path itself, and lowers the MTU of the routes that lead there; the
//! stack then notifies senders.

use aya_ebpf::programs::TcContext;
use kilo_common::{
    encap::segment_len,
    icmp_too_big::{self, ERROR_V4, ERROR_V6},
    maps::{Config, FAMILY_V4, FAMILY_V6, PathMtu},
    packet::{ETHERNET_LEN, IPV6_LEN, Ipv4, protocol},
};

use crate::{
    ip::{Ip, V6},
    maps::PATH_MTU,
    packet,
    subprogram::{Skb, subprogram},
};

/// `gso_size` of a packet whose segments have lengths of their own: SCTP (include/linux/skbuff.h).
const GSO_BY_FRAGS: u32 = 0xffff;

subprogram! {
    /// Reads the ICMP error at `offset`, and ignores all but those about a packet that this node may have
    /// steered. The result means nothing.
    pub fn learn_v4(config: &Config, offset: usize) -> u32 = read_error_v4 as mtu_learn_v4
}
subprogram! {
    /// As [`learn_v4`], for ICMPv6 right behind an IPv6 header: at a constant offset, because the verifier
    /// must see its bounds.
    pub fn learn_v6[const LINK: usize](config: &Config) -> u32 = read_error_v6;
    by LINK => { 0 => mtu_learn_l3_v6[0], _ => mtu_learn_v6[ETHERNET_LEN] }
}

#[inline(always)]
fn read_error_v4(skb: Skb, config: &Config, offset: usize) -> u32 {
    let ctx = TcContext::new(skb);
    let Ok(error) = ctx.load::<[u8; ERROR_V4]>(offset) else { return 0 };
    let Some(quoted) = icmp_too_big::read::v4(&error) else { return 0 };
    if quoted.local == config.private_v4 && Ipv4::sender(quoted.remote).is_some() {
        let mut remote = [0; 16];
        remote[..4].copy_from_slice(&quoted.remote);
        report(&PathMtu { remote, family: FAMILY_V4, size: quoted.size });
    }
    0
}

#[inline(always)]
fn read_error_v6<const LINK: usize>(skb: Skb, config: &Config) -> u32 {
    let ctx = TcContext::new(skb);
    // In the packet, not on the stack: together with the callers' it would be too large before Linux 6.3.
    let Some(error) = packet::bytes::<ERROR_V6>(&ctx, LINK + IPV6_LEN) else { return 0 };
    // SAFETY: `bytes` checked the bounds, and nothing moves the packet meanwhile.
    let Some(quoted) = icmp_too_big::read::v6(unsafe { &*error }) else { return 0 };
    let [local, remote] = [quoted.local, quoted.remote].map(halves);
    if V6::is_private(config, local) && V6::sender(remote).is_some() {
        report(&PathMtu { remote: quoted.remote, family: FAMILY_V6, size: quoted.size });
    }
    0
}

#[inline(always)]
const fn halves(address: [u8; 16]) -> [u64; 2] {
    // SAFETY: sixteen bytes either way.
    unsafe { core::mem::transmute(address) }
}

#[inline(always)]
fn report(report: &PathMtu) {
    // A full ring loses the report; the router repeats it with the next packet.
    let _ = PATH_MTU.output(*report, 0);
}

/// True when a link with this MTU (0 = not known) carries the packet at
/// `offset`, or each of its segments.
#[inline(always)]
pub fn fits<I: Ip>(ctx: &TcContext, offset: usize, ip: &I, mtu: u32) -> bool {
    let len = ctx.len().saturating_sub(offset as u32);
    if mtu == 0 || len <= mtu {
        return true;
    }
    let gso_size = packet::gso_size(ctx);
    if gso_size == 0 {
        return false;
    }
    // The stack has compared the segments with the MTU of its route, which is the hop's.
    if gso_size == GSO_BY_FRAGS {
        return true;
    }
    let transport = offset + ip.header_len();
    let transport_len = match ip.protocol() {
        // The data offset, in words, stands in the upper half of byte 12 (RFC 9293).
        protocol::TCP => ctx.load::<u8>(transport + 12).map_or(60, |byte| u32::from(byte >> 4) * 4),
        _ => 8,
    };
    segment_len(len, gso_size, ip.header_len() as u32 + transport_len) <= mtu
}

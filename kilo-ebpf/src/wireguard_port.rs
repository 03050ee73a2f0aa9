//! Recognises packets of this host's WireGuard by their source port, which no other process has.
//!
//! A packet of the host itself to an address that WireGuard sends to, too, may fill the uplink's MTU, and
//! then WireGuard's own packet leaves in fragments. All of them must take one path: a router that tracks
//! connections waits for the last of them. Only the first has the port, so it is noted for the others.

use aya_ebpf::programs::TcContext;
use kilo_common::{
    maps::{Config, InboundValue, NAT_FRAGMENT_EGRESS, NAT_SEEN},
    packet::protocol,
};

use crate::{
    ip::{Ip, octets},
    maps::INBOUND,
    masquerade::{clock::now, scratch},
};

/// Seconds within which the other fragments follow: this host makes them all at once.
const FOLLOWS_WITHIN: u32 = 1;

/// True for a packet of WireGuard, wherever its peer is. The host itself must have made it.
#[inline(always)]
pub fn is_own<I: Ip>(ctx: &TcContext, config: &Config, ip: &I, link: usize) -> bool {
    let Some(udp) = ip.udp(ctx, link) else {
        return ip.udp_id(ctx, link).is_some_and(|id| follows(ip, id));
    };
    let own = ctx.load::<[u8; 2]>(udp).is_ok_and(|port| u16::from_be_bytes(port) == config.wireguard_port);
    if own && let Some(id) = ip.udp_id(ctx, link) {
        note(ip, id);
    }
    own
}

/// Notes a first fragment, so that the later ones stay as they are.
#[inline(always)]
fn note<I: Ip>(ip: &I, id: [u8; 4]) {
    let value = InboundValue { last_seen: now(), opener_flags: 0, answer_flags: 0, flags: NAT_SEEN, pad: 0 };
    if let Some(key) = key(ip, id) {
        let _ = INBOUND.insert(key, &value, 0);
    }
}

/// True for a later fragment whose first one was WireGuard's.
#[inline(always)]
fn follows<I: Ip>(ip: &I, id: [u8; 4]) -> bool {
    // SAFETY: the value is read at once.
    let first = key(ip, id).and_then(|key| unsafe { INBOUND.get(key) });
    first.is_some_and(|first| now().saturating_sub(first.last_seen) <= FOLLOWS_WITHIN)
}

/// The key of a datagram's fragments, in this CPU's memory because there is little stack.
#[inline(always)]
fn key<I: Ip>(ip: &I, id: [u8; 4]) -> Option<&'static kilo_common::maps::NatKey> {
    let work = scratch::this_cpu()?;
    let key = &mut work.partner;
    key.src = octets(I::mapped(ip.src()));
    key.dst = octets(I::mapped(ip.dst()));
    [key.src_port[0], key.src_port[1], key.dst_port[0], key.dst_port[1]] = id;
    key.protocol = protocol::UDP;
    key.direction = NAT_FRAGMENT_EGRESS;
    key.pad = [0; 2];
    Some(key)
}

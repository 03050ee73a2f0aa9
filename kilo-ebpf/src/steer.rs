//! The WireGuard device: what leaves through it and what comes out of it.

use aya_ebpf::programs::TcContext;
use kilo_common::{
    encap::segment_len,
    maps::{
        CONFIG_LEADER, CONFIG_OFFERED, Config, HOP_KIND_LOCAL, HOP_KIND_NODE, HOP_KIND_WIREGUARD, Hop,
        PREFIX_ROUTE,
    },
    packet::{Ipv4, protocol},
    verdict::{Action, DropReason},
};

use crate::{
    ip::{Ip, V6},
    maps::{count_action, hop},
    masquerade::{self, Known},
    packet::{self, Family},
    programs::TC_ACT_UNSPEC,
    send::send,
};

/// Egress of the WireGuard device; packets start with their IP header.
#[inline(always)]
pub fn kilo_egress(ctx: &TcContext, config: &Config) -> Result<i32, DropReason> {
    match packet::family(ctx) {
        Family::V4 => egress::<Ipv4>(ctx, config),
        Family::V6 => egress::<V6>(ctx, config),
        // WireGuard itself refuses what is not IP; elsewhere nothing may pass.
        Family::Other if config.flags & CONFIG_LEADER != 0 => pass(),
        Family::Other => Err(DropReason::NoPrefix),
    }
}

/// Ingress of the WireGuard device; packets start with their IP header.
#[inline(always)]
pub fn kilo_ingress(ctx: &TcContext, config: &Config) -> Result<i32, DropReason> {
    match packet::family(ctx) {
        Family::V4 => ingress::<Ipv4>(ctx, config),
        Family::V6 => ingress::<V6>(ctx, config),
        Family::Other => pass(),
    }
}

#[inline(always)]
fn egress<I: Ip>(ctx: &TcContext, config: &Config) -> Result<i32, DropReason> {
    let leader = config.flags & CONFIG_LEADER != 0;
    let mut ip = I::read(ctx, 0)?;
    // Sources, too: the stack's own redirects, for example, are for the link.
    if I::never_steered(ip.dst()) || I::never_steered(ip.src()) {
        return Err(DropReason::NotUnicast);
    }
    if let Some(addr) = masquerade::egress(ctx, config, 0, &ip, Known::Rare)? {
        ip.set_src(addr);
    }
    let Some(id) = route::<I>(ip.dst()) else {
        return if leader { pass() } else { Err(DropReason::NoPrefix) };
    };
    let hop = hop(id).ok_or(DropReason::NoHop)?;
    match hop.kind {
        HOP_KIND_WIREGUARD if leader => {
            count_action(Action::Encrypt);
            Ok(TC_ACT_UNSPEC)
        }
        HOP_KIND_NODE => {
            // The stack has told the sender already: its routes bear the hop's MTU.
            if !fits::<I>(ctx, 0, &ip, hop.mtu) {
                return Err(DropReason::TooBig);
            }
            let verdict = send::<I>(ctx, config, hop, ip.tos())?;
            count_action(Action::Steer);
            Ok(verdict)
        }
        // An own prefix does not belong on this device; the stack would have kept it.
        HOP_KIND_LOCAL => Err(DropReason::NoPrefix),
        _ => Err(DropReason::NoHop),
    }
}

#[inline(always)]
fn ingress<I: Ip>(ctx: &TcContext, config: &Config) -> Result<i32, DropReason> {
    let mut ip = I::read(ctx, 0)?;
    let translated = masquerade::ingress(ctx, config, 0, &ip, false)?;
    if let Some(addr) = translated {
        ip.set_dst(addr);
    }
    if config.flags & CONFIG_LEADER != 0
        && let Some(hop) = node_hop::<I>(ip.dst())
    {
        if ip.ttl() <= 1 || !fits::<I>(ctx, 0, &ip, hop.mtu) {
            // The stack tells the sender: time exceeded, or too big by the MTU of its route.
            count_action(Action::Punt);
            return Ok(TC_ACT_UNSPEC);
        }
        ip.lower_ttl(ctx, 0)?;
        let verdict = send::<I>(ctx, config, hop, ip.tos())?;
        count_action(Action::Forward);
        return Ok(verdict);
    }
    // Most nodes' packets come from the mesh alone, and to addresses an answer has here.
    if translated.is_none()
        && config.flags & (I::SEVERAL | CONFIG_OFFERED) != 0
        && masquerade::ingress(ctx, config, 0, &ip, true)?.is_none()
    {
        masquerade::arrived(ctx, config, 0, &ip);
    }
    count_action(Action::Decrypt);
    Ok(TC_ACT_UNSPEC)
}

/// The hop packets to this address are steered to.
#[inline(always)]
fn route<I: Ip>(dst: I::Addr) -> Option<u32> {
    I::prefix(dst).filter(|value| value.flags & PREFIX_ROUTE != 0).map(|value| value.hop)
}

/// The other node of this location that packets to this address are steered to.
#[inline(always)]
fn node_hop<I: Ip>(dst: I::Addr) -> Option<&'static Hop> {
    route::<I>(dst).and_then(hop).filter(|hop| hop.kind == HOP_KIND_NODE)
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
    let transport = offset + ip.header_len();
    let transport_len = match ip.protocol() {
        // The data offset, in words, stands in the upper half of byte 12 (RFC 9293).
        protocol::TCP => ctx.load::<u8>(transport + 12).map_or(60, |byte| u32::from(byte >> 4) * 4),
        _ => 8,
    };
    segment_len(len, gso_size, ip.header_len() as u32 + transport_len) <= mtu
}

#[inline(always)]
fn pass() -> Result<i32, DropReason> {
    count_action(Action::Pass);
    Ok(TC_ACT_UNSPEC)
}

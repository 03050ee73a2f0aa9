//! Ingress of the WireGuard device: what WireGuard decrypted, and what `lan_ingress` decapsulated.

use aya_ebpf::{EbpfContext as _, programs::TcContext};
use kilo_common::{
    counters::{Action, DropReason},
    maps::{CONFIG_GATEWAY, CONFIG_OFFERED, Config, HOP_KIND_NODE, Hop},
    packet::{Ipv4, protocol},
};

use crate::{
    encap::send,
    ip::{Ip, V6},
    kilo_egress::{pass, route},
    maps::{count_action, hop},
    masquerade,
    mtu::fits,
    packet::{self, Family},
    ret::{TC_ACT_UNSPEC, from_code},
    signal,
};

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
fn ingress<I: Ip>(ctx: &TcContext, config: &Config) -> Result<i32, DropReason> {
    let mut ip = I::read(ctx, 0)?;
    if ip.protocol() == protocol::UDP
        && signal::is_own::<I>(config, ip.dst())
        && signal::is_signal(ctx, 0, &ip)
    {
        return from_code(signal::from_tunnel::<I>(ctx.as_ptr().cast(), config));
    }
    let translated = masquerade::ingress(ctx, config, 0, &ip, false)?;
    if let Some(addr) = translated {
        ip.set_dst(addr);
    }
    if config.flags & CONFIG_GATEWAY != 0
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

/// The other node of this location that packets to this address are steered to.
#[inline(always)]
fn node_hop<I: Ip>(dst: I::Addr) -> Option<&'static Hop> {
    route::<I>(dst).and_then(hop).filter(|hop| hop.kind == HOP_KIND_NODE)
}

//! Egress of the WireGuard device: steer to the leader, or let WireGuard encrypt.

use aya_ebpf::{EbpfContext as _, bindings::__sk_buff, programs::TcContext};
use kilo_common::{
    counters::{Action, DropReason},
    maps::{
        CONFIG_GATEWAY, Config, HOP_ACTING, HOP_KIND_LOCAL, HOP_KIND_NODE, HOP_KIND_WIREGUARD, HOP_REMOTE,
        PREFIX_INSIDE, PREFIX_ROUTE, PrefixValue,
    },
    packet::{Ipv4, protocol},
};

use crate::{
    cb,
    encap::send,
    ip::{Ip, V6},
    lead::way,
    maps::{count_action, hop},
    masquerade::{self, Known},
    mtu::fits,
    packet::{self, Family},
    ret::{TC_ACT_UNSPEC, from_code},
    signal,
};

/// Egress of the WireGuard device; packets start with their IP header.
#[inline(always)]
pub fn kilo_egress(ctx: &TcContext, config: &Config) -> Result<i32, DropReason> {
    match packet::family(ctx) {
        Family::V4 => egress::<Ipv4>(ctx, config),
        Family::V6 => egress::<V6>(ctx, config),
        // WireGuard itself refuses what is not IP; elsewhere nothing may pass.
        Family::Other if config.flags & CONFIG_GATEWAY != 0 => pass(),
        Family::Other => Err(DropReason::NoPrefix),
    }
}

#[inline(always)]
fn egress<I: Ip>(ctx: &TcContext, config: &Config) -> Result<i32, DropReason> {
    let mut ip = I::read(ctx, 0)?;
    if cb::is_to_lan(ctx) {
        return from_code(signal::to_lan::<I>(ctx.as_ptr().cast()));
    }
    // No process and no pod speaks as a gateway: `inject` has marked what the agent sends.
    if signal::is_control::<I>(ip.src()) {
        return Err(DropReason::ForgedSignal);
    }
    // Sources, too: the stack's own redirects, for example, are for the link.
    if I::never_steered(ip.dst()) || I::never_steered(ip.src()) {
        return Err(DropReason::NotUnicast);
    }
    // The gateway that gets it translates it.
    if !cb::is_passed_on(ctx)
        && let Some(addr) = masquerade::egress(ctx, config, 0, &ip, Known::Rare)?
    {
        ip.set_src(addr);
    }
    let Some(PrefixValue { hop: id, flags }) = routed::<I>(ip.dst()) else {
        return if config.flags & CONFIG_GATEWAY != 0 { pass() } else { Err(DropReason::NoPrefix) };
    };
    if flags & PREFIX_INSIDE != 0 && is_own_wireguard::<I>(ctx.as_ptr().cast(), config) {
        return Err(DropReason::InsideTunnel);
    }
    let hop = if id == HOP_ACTING && cb::is_led(ctx) { hop(HOP_REMOTE) } else { way(id) };
    let hop = hop.ok_or(DropReason::NoHop)?;
    match hop.kind {
        HOP_KIND_WIREGUARD if config.flags & CONFIG_GATEWAY != 0 => {
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

/// The hop packets to this address are steered to.
#[inline(always)]
pub fn route<I: Ip>(dst: I::Addr) -> Option<u32> {
    routed::<I>(dst).map(|value| value.hop)
}

#[inline(always)]
fn routed<I: Ip>(dst: I::Addr) -> Option<PrefixValue> {
    I::prefix(dst).filter(|value| value.flags & PREFIX_ROUTE != 0)
}

/// True for what this gateway's own WireGuard sends. WireGuard in the kernel refuses to send by its own
/// device; a program that does would build the tunnel to one gateway through another, and lose both at once.
/// No masqueraded packet gets its port. A function of its own, with a stack of its own: with those of the
/// functions that `kilo_egress` calls there is no room for more before Linux 6.3.
#[inline(never)]
fn is_own_wireguard<I: Ip>(skb: *mut __sk_buff, config: &Config) -> bool {
    let ctx = TcContext::new(skb);
    config.flags & CONFIG_GATEWAY != 0
        && I::read(&ctx, 0).is_ok_and(|ip| {
            ip.protocol() == protocol::UDP
                && ip.header_len() == I::HEADER_LEN
                && !ip.is_fragment()
                && I::is_private(config, ip.src())
        })
        && ctx
            .load::<[u8; 2]>(I::HEADER_LEN)
            .is_ok_and(|port| u16::from_be_bytes(port) == config.wireguard_port)
}

/// Counts a packet that is nobody's, and lets it go on.
#[inline(always)]
#[expect(clippy::unnecessary_wraps, reason = "callers return it as their own result")]
pub fn pass() -> Result<i32, DropReason> {
    count_action(Action::Pass);
    Ok(TC_ACT_UNSPEC)
}

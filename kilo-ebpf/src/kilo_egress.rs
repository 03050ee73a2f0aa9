//! Egress of the WireGuard device: steer to the leader, or let WireGuard encrypt.

use aya_ebpf::{EbpfContext as _, programs::TcContext};
use kilo_common::{
    counters::Action,
    drop_reasons::DropReason,
    forwarding::{self, hop_id, is_gateway, routed, unrouted},
    maps::{Config, PREFIX_NOT_MASQUERADED, PREFIX_VIA_WIREGUARD, PrefixValue},
    packet::{Ipv4, protocol},
};

use crate::{
    cb,
    encap::send,
    ip::{Ip, V6},
    leader_word::word,
    maps::{count_action, hop},
    masquerade::{self, FlowHint},
    mtu::fits,
    packet::{self, Family},
    pod_flow,
    ret::{Act, Verdict, from_code},
    sender::is_foreign,
    signal,
    subprogram::{Skb, subprogram},
};

/// Egress of the WireGuard device; packets start with their IP header.
#[inline(always)]
pub fn kilo_egress(ctx: &TcContext, config: &Config) -> Verdict {
    match packet::family(ctx) {
        Family::V4 => egress::<Ipv4>(ctx, config),
        Family::V6 => egress::<V6>(ctx, config),
        Family::Other => unrouted(config.flags).map(next),
    }
}

#[inline(always)]
fn egress<I: Ip>(ctx: &TcContext, config: &Config) -> Verdict {
    let mut ip = I::read(ctx, 0)?;
    // Taken from every packet, so that no program behind this one finds it.
    let tag = cb::take_flow_tag(ctx);
    if cb::is_to_lan(ctx) {
        return from_code(signal::to_lan::<I>(ctx.as_ptr().cast()));
    }
    // No process and no pod may send as a gateway: packets of the agent carry a note (`cb`) from `inject`.
    if signal::is_control::<I>(ip.src()) {
        return Err(DropReason::ForgedSignal);
    }
    // Sources, too: the stack's own redirects, for example, are for the link.
    if I::never_steered(ip.dst()) || I::never_steered(ip.src()) {
        return Err(DropReason::NotUnicast);
    }
    if is_gateway(config.flags)
        && !cb::is_noted(ctx)
        && packet::brought_by(ctx) != 0
        && is_foreign::<I>(ctx.as_ptr().cast(), config) != 0
    {
        return Err(DropReason::ForeignSource);
    }
    // Without an entry no node has it: it is routed nowhere, like hop 0 without flags.
    let to = I::prefix(config, ip.dst()).unwrap_or_default();
    // A packet that is passed on is translated by the gateway that gets it.
    if to.flags & PREFIX_NOT_MASQUERADED == 0
        && !cb::is_passed_on(ctx)
        && let Some(addr) = masquerade::egress(ctx, config, 0, &ip, FlowHint::Rare)?
    {
        ip.set_src(addr);
    }
    let Some(PrefixValue { hop: id, flags }) = routed(Some(to)) else {
        return unrouted(config.flags).map(next);
    };
    if flags & PREFIX_VIA_WIREGUARD != 0 && is_own_wireguard::<I>(ctx.as_ptr().cast(), config) != 0 {
        return Err(DropReason::InsideTunnel);
    }
    let hop = hop(hop_id(id, || cb::is_led(ctx), word));
    let fits = || hop.is_some_and(|hop| fits::<I>(ctx, 0, &ip, hop.mtu));
    let action = forwarding::egress(config.flags, hop.map(|hop| hop.kind), fits)?;
    if tag != 0
        && let Some(hop) = hop
    {
        pod_flow::vouch(ctx, config, tag, hop);
    }
    match (action, hop) {
        (action @ Action::Steer, Some(hop)) => {
            let act = send::<I>(ctx, config, hop, ip.tos())?;
            count_action(action);
            Ok(act)
        }
        (action, _) => Ok(next(action)),
    }
}

subprogram! {
    /// Not zero for a packet of this gateway's own WireGuard. WireGuard in the kernel refuses to send by its
    /// own device; a program that does would build the tunnel to one gateway through another, and lose both
    /// at once. No masqueraded packet gets its port. A subprogram, because before Linux 6.3 the stacks of the
    /// functions that `kilo_egress` calls leave no room for more.
    fn is_own_wireguard[I: Ip](config: &Config) -> u32 = look_for_wireguard;
    by I::V6 => { false => own_wireguard_v4[Ipv4], true => own_wireguard_v6[V6] }
}

#[inline(always)]
fn look_for_wireguard<I: Ip>(skb: Skb, config: &Config) -> u32 {
    let ctx = TcContext::new(skb);
    let own = is_gateway(config.flags)
        && I::read(&ctx, 0).is_ok_and(|ip| {
            ip.protocol() == protocol::UDP
                && ip.header_len() == I::HEADER_LEN
                && !ip.is_fragment()
                && (I::is_private(config, ip.src()) || I::is_wireguard(config, ip.src()))
        })
        && ctx
            .load::<[u8; 2]>(I::HEADER_LEN)
            .is_ok_and(|port| u16::from_be_bytes(port) == config.wireguard_port);
    u32::from(own)
}

/// Counts a packet that goes on as it is.
#[inline(always)]
pub fn next(action: Action) -> Act {
    count_action(action);
    Act::NEXT
}

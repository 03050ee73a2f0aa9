//! Orphaned programs: after an agent left them, they stop acting at a deadline or when another agent
//! steers.

use aya_ebpf::{
    EbpfContext as _, bindings::bpf_fib_lookup, helpers::bpf_fib_lookup as look_up, programs::TcContext,
};
use kilo_common::{
    event::Hook,
    forwarding::{arrives, is_of_mesh},
    maps::{Config, HOP_LOCAL},
    packet::{ETHERNET_LEN, IPV4_LEN, Ipv4, protocol},
};

use crate::{
    cb,
    ip::Ip as _,
    maps::CONFIG,
    masquerade::clock,
    packet::{self, Family},
    subprogram::{Skb, subprogram},
    word_memory::Words,
};

/// A time in the past.
const OVER: u32 = 1;
/// `AF_INET`.
const INET: u8 = 2;

/// True when these programs are orphaned and their time is over: they let every packet pass.
#[inline(always)]
pub fn is_over(ctx: &TcContext, config: &Config, hook: Hook) -> bool {
    if config.ends == 0 {
        return false;
    }
    if clock::now() >= config.ends {
        return true;
    }
    let skb = ctx.as_ptr().cast();
    match hook {
        Hook::UplinkEgress => other_agent::<true>(skb, config) != 0,
        Hook::LanIngress => other_agent::<false>(skb, config) != 0,
        _ => false,
    }
}

subprogram! {
    /// Whether an IPIP packet shows that another agent steers, as Kilo's does through `tunl0`: from
    /// then on no program of this host acts any more.
    fn other_agent[const EGRESS: bool](config: &Config) -> u32 = look_for_other_agent;
    by EGRESS => { true => other_agent_egress[true], false => other_agent_ingress[false] }
}

#[inline(always)]
fn look_for_other_agent<const EGRESS: bool>(skb: Skb, config: &Config) -> u32 {
    let ctx = TcContext::new(skb);
    if !matches!(packet::family(&ctx), Family::V4) || packet::protocol_v4(&ctx) != protocol::IPIP {
        return 0;
    }
    let Ok(outer) = Ipv4::read(&ctx, ETHERNET_LEN) else { return 0 };
    let shows = if EGRESS {
        Ipv4::is_private(config, outer.src()) && !cb::is_sent(&ctx)
    } else {
        Ipv4::is_private(config, outer.dst())
            && arrives(Ipv4::sender(outer.src()), packet::ifindex(&ctx)).is_ok()
            && outer.header_len() == IPV4_LEN
            && Ipv4::read(&ctx, ETHERNET_LEN + IPV4_LEN).is_ok_and(|inner| is_elsewhere(&ctx, config, &inner))
    };
    if shows && let Some(config) = CONFIG.get_ptr_mut(0) {
        // SAFETY: the entry is always there, and a word is written at once.
        unsafe { (&raw mut (*config).ends).write_volatile(OVER) };
    }
    u32::from(shows)
}

/// True when the route back to the inner source, another node's pod, leads through another device than ours:
/// its packets would be received on ours, which the other agent may have taken down.
#[inline(always)]
fn is_elsewhere(ctx: &TcContext, config: &Config, inner: &Ipv4) -> bool {
    // Another node sends neither from this one's pods nor from outside the mesh.
    let owner = Ipv4::prefix(config, inner.src()).filter(|owner| owner.hop != HOP_LOCAL);
    if !is_of_mesh(owner, false) {
        return false;
    }
    let mut route = Words::<bpf_fib_lookup, 8>::new();
    let route = route.zero();
    route.family = INET;
    route.ifindex = packet::ifindex(ctx);
    route.__bindgen_anon_3.ipv4_src = u32::from_ne_bytes(inner.dst());
    route.__bindgen_anon_4.ipv4_dst = u32::from_ne_bytes(inner.src());
    let size = size_of::<bpf_fib_lookup>() as i32;
    // SAFETY: the context is valid, and the structure has the size that is named.
    let answer = unsafe { look_up(ctx.as_ptr().cast(), route, size, 0) };
    answer >= 0 && route.ifindex != config.kilo_ifindex
}

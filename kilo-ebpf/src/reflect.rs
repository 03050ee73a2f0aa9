//! Answers to a sender, made from its own packet: "too big" in ICMP and ICMPv6.

use aya_ebpf::{
    EbpfContext as _, bindings::bpf_adj_room_mode::BPF_ADJ_ROOM_MAC, helpers::bpf_skb_change_tail,
    programs::TcContext,
};
use kilo_common::{
    drop_reasons::DropReason,
    event::Hook,
    icmp_too_big::{self, QUOTED},
    packet::ETHERNET_LEN,
};

use crate::{
    packet,
    ret::{Act, dropped},
    subprogram::{Skb, subprogram},
};

subprogram! {
    pub fn too_big_v4[const LINK: usize](mtu: u32) -> i32 = answer_v4;
    by LINK => { 0 => too_big_l3_v4[0], _ => too_big_v4_ethernet[ETHERNET_LEN] }
}
subprogram! {
    pub fn too_big_v6[const LINK: usize](mtu: u32) -> i32 = answer_v6;
    by LINK => { 0 => too_big_l3_v6[0], _ => too_big_v6_ethernet[ETHERNET_LEN] }
}

#[inline(always)]
fn answer_v4<const LINK: usize>(skb: Skb, mtu: u32) -> i32 {
    answer::<_, LINK>(skb, |packet| icmp_too_big::write::v4(packet, mtu as u16))
}

#[inline(always)]
fn answer_v6<const LINK: usize>(skb: Skb, mtu: u32) -> i32 {
    answer::<_, LINK>(skb, |packet| icmp_too_big::write::v6(packet, mtu))
}

/// Notifies the sender, which knows from the stack only what this interface carries; counts the packet as
/// dropped in any case. The answer comes in by the interface that the packet was leaving by, as if the
/// destination had sent it: it passes `rp_filter`, and netfilter translates it back for translated flows.
#[inline(always)]
fn answer<const N: usize, const LINK: usize>(skb: Skb, write: impl FnOnce(&mut [u8; N])) -> i32 {
    let hook = if LINK == 0 { Hook::L3Egress } else { Hook::UplinkEgress };
    let shot = dropped(skb, DropReason::TooBig.index(), hook as u32);
    let ctx = TcContext::new(skb);
    match reflect::<N, LINK>(&ctx, write) {
        Some(()) => Act::receive(packet::ifindex(&ctx)).code(),
        None => shot,
    }
}

/// Turns the packet into the answer: truncates it, swaps its link-layer addresses, and writes the answer's
/// `N` bytes, the last of which are there already.
#[inline(always)]
fn reflect<const N: usize, const LINK: usize>(
    ctx: &TcContext,
    write: impl FnOnce(&mut [u8; N]),
) -> Option<()> {
    let kept = (LINK + QUOTED) as u32;
    // SAFETY: the context is valid.
    if ctx.len() < kept || unsafe { bpf_skb_change_tail(ctx.as_ptr().cast(), kept, 0) } != 0 {
        return None;
    }
    ctx.adjust_room((N - QUOTED) as i32, BPF_ADJ_ROOM_MAC, 0).ok()?;
    if LINK != 0 {
        let link: [[u8; 6]; 2] = ctx.load(0).ok()?;
        ctx.store(0, &[link[1], link[0]], 0).ok()?;
    }
    // SAFETY: `bytes` checks the bounds.
    write(unsafe { &mut *packet::bytes::<N>(ctx, LINK)? });
    Some(())
}

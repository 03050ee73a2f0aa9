//! What leaves by the network the node is in. Pods' packets to the private
//! address of another node of the location are steered here and not by a
//! route: a route for pods alone needs a policy rule, and with the first rule
//! the kernel leaves the fast path of every route lookup.

use aya_ebpf::{
    EbpfContext as _,
    bindings::{__sk_buff, bpf_adj_room_mode::BPF_ADJ_ROOM_MAC},
    helpers::{bpf_redirect, bpf_skb_change_tail},
    programs::TcContext,
};
use kilo_common::{
    event::Hook,
    maps::{
        CONFIG_ONE_V4, CONFIG_ONE_V6, CONFIG_PODS, Config, HOP_KIND_NODE, HOP_LOCAL, Hop, TUNNEL_NONE,
        VXLAN_PORT,
    },
    packet::{ETHERNET_LEN, IPV4_LEN, IPV6_LEN, Ipv4, Ipv4Header, protocol},
    too_big::{self, QUOTED},
    verdict::DropReason,
};

use crate::{
    ip::{Ip, V6},
    maps::hop,
    mark,
    masquerade::{
        self, Known,
        standing::{self, Standing},
    },
    packet::{self, Family},
    programs::{REDIRECT_INGRESS, TC_ACT_UNSPEC, dropped},
    steer::fits,
};

/// Egress of an uplink; packets start with an Ethernet header.
#[inline(always)]
pub fn uplink_egress(ctx: &TcContext, config: &Config) -> Result<i32, DropReason> {
    // The program of a VLAN's own device has had what bears the VLAN's tag.
    if mark::is_sent(ctx) || packet::is_tagged(ctx) {
        return Ok(TC_ACT_UNSPEC);
    }
    match packet::family(ctx) {
        Family::V4 if is_tunnels_v4(ctx, config) => Ok(TC_ACT_UNSPEC),
        Family::V6 if is_wireguards_v6(ctx, config) => Ok(TC_ACT_UNSPEC),
        Family::V4 => {
            let known = match standing::leaving(ctx, config)? {
                Standing::Done => return Ok(TC_ACT_UNSPEC),
                Standing::NoEntry => Known::New,
                Standing::Unknown => Known::Nothing,
            };
            read_and_leave::<Ipv4, ETHERNET_LEN>(ctx, config, known)
        }
        Family::V6 => read_and_leave::<V6, ETHERNET_LEN>(ctx, config, Known::Nothing),
        Family::Other => Ok(TC_ACT_UNSPEC),
    }
}

/// Egress of an uplink without link-layer header; packets start with their IP header.
#[inline(always)]
pub fn l3_egress(ctx: &TcContext, config: &Config) -> Result<i32, DropReason> {
    if mark::is_sent(ctx) {
        return Ok(TC_ACT_UNSPEC);
    }
    match packet::family(ctx) {
        Family::V4 => read_and_leave::<Ipv4, 0>(ctx, config, Known::Nothing),
        Family::V6 => read_and_leave::<V6, 0>(ctx, config, Known::Nothing),
        Family::Other => Ok(TC_ACT_UNSPEC),
    }
}

/// `LINK` is the length of the link-layer header; so below.
#[inline(always)]
fn read_and_leave<I: Ip, const LINK: usize>(
    ctx: &TcContext,
    config: &Config,
    known: Known,
) -> Result<i32, DropReason> {
    I::read(ctx, LINK).map_or(Ok(TC_ACT_UNSPEC), |ip| leave::<I, LINK>(ctx, config, &ip, known))
}

/// True for the tunnels' packets from the private address, where [`leave`] would
/// find after several tables that they are the host's own and stay as they are:
/// WireGuard's, which are most of what a leader sends, and superpackets the VXLAN
/// device has wrapped. As little of them is read as can be.
#[inline(always)]
fn is_tunnels_v4(ctx: &TcContext, config: &Config) -> bool {
    if config.flags & CONFIG_ONE_V4 == 0 || ctx.data() + ETHERNET_LEN + IPV4_LEN + 4 > ctx.data_end() {
        return false;
    }
    let start = ctx.data() + ETHERNET_LEN;
    // SAFETY: the bounds are checked, and programs may read packets at any address.
    let (ip, ports) = unsafe { (&*(start as *const Ipv4Header), &*((start + IPV4_LEN) as *const [u16; 2])) };
    ip.src == packet::word(&config.private_v4)
        && ip.protocol == protocol::UDP
        // Without options.
        && ip.version_len == 0x45
        && (ports[0] == config.wireguard_port.to_be()
            || ports[1] == VXLAN_PORT.to_be() && Ipv4::sender(ip.dst.to_ne_bytes()).is_some())
}

/// As [`is_tunnels_v4`], WireGuard's alone.
#[inline(always)]
fn is_wireguards_v6(ctx: &TcContext, config: &Config) -> bool {
    const IP: usize = ETHERNET_LEN / 2;
    const PORT: usize = IP + IPV6_LEN / 2;
    // SAFETY: the field is aligned to 4 bytes.
    let private: &[u16; 8] = unsafe { &*config.private_v6.as_ptr().cast() };
    config.flags & CONFIG_ONE_V6 != 0
        && packet::pairs::<{ PORT + 1 }>(ctx).is_some_and(|pairs| {
            let mut same = true;
            let mut i = 0;
            while i < 8 {
                same &= pairs[IP + 4 + i] == private[i];
                i += 1;
            }
            same && pairs[PORT] == config.wireguard_port.to_be()
                && u16::from_be(pairs[IP + 3]) >> 8 == u16::from(protocol::UDP)
                && u16::from_be(pairs[IP]) >> 12 == 6
        })
}

#[inline(always)]
fn leave<I: Ip, const LINK: usize>(
    ctx: &TcContext,
    config: &Config,
    ip: &I,
    known: Known,
) -> Result<i32, DropReason> {
    if let Some(hop) = hop_of_pods(config, ip) {
        if !fits::<I>(ctx, LINK, ip, hop.mtu) {
            let skb = ctx.as_ptr().cast();
            return Ok(if I::V6 { answer_v6::<LINK>(skb, hop.mtu) } else { answer_v4::<LINK>(skb, hop.mtu) });
        }
        // SAFETY: a helper without pointers. `kilo_egress` does the rest.
        return Ok(unsafe { bpf_redirect(config.kilo_ifindex, 0) } as i32);
    }
    masquerade::egress(ctx, config, LINK, ip, known)?;
    Ok(TC_ACT_UNSPEC)
}

/// The node of the location whose private address an own pod sends to, where
/// an outer header is wanted.
#[inline(always)]
fn hop_of_pods<I: Ip>(config: &Config, ip: &I) -> Option<&'static Hop> {
    if config.flags & CONFIG_PODS == 0 || I::is_private(config, ip.src()) {
        return None;
    }
    let node = I::sender(ip.dst())?;
    let is_pod = I::prefix(ip.src()).is_some_and(|owner| owner.hop == HOP_LOCAL);
    hop(node.hop).filter(|hop| is_pod && hop.kind == HOP_KIND_NODE && hop.tunnel != TUNNEL_NONE)
}

#[inline(never)]
fn answer_v4<const LINK: usize>(skb: *mut __sk_buff, mtu: u32) -> i32 {
    answer::<_, LINK>(skb, |packet| too_big::v4(packet, mtu as u16))
}

#[inline(never)]
fn answer_v6<const LINK: usize>(skb: *mut __sk_buff, mtu: u32) -> i32 {
    answer::<_, LINK>(skb, |packet| too_big::v6(packet, mtu))
}

/// Tells the sender, who heard from the stack what this interface carries;
/// counts the packet as dropped in any case. The answer comes in by the
/// interface the packet was leaving by, as if the destination had sent it: it
/// passes rp_filter, and netfilter translates it back for who was translated.
#[inline(always)]
fn answer<const N: usize, const LINK: usize>(skb: *mut __sk_buff, write: impl FnOnce(&mut [u8; N])) -> i32 {
    let hook = if LINK == 0 { Hook::L3Egress } else { Hook::UplinkEgress };
    let shot = dropped(skb, DropReason::TooBig.index(), hook as u32);
    let ctx = TcContext::new(skb);
    match turn::<N, LINK>(&ctx, write) {
        // SAFETY: a helper without pointers.
        Some(()) => (unsafe { bpf_redirect(packet::ifindex(&ctx), REDIRECT_INGRESS) }) as i32,
        None => shot,
    }
}

/// Makes the answer of the packet: cuts it, swaps its link-layer addresses,
/// and writes the answer's `N` bytes, of which the last are there already.
#[inline(always)]
fn turn<const N: usize, const LINK: usize>(ctx: &TcContext, write: impl FnOnce(&mut [u8; N])) -> Option<()> {
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

//! The WireGuard device: what leaves through it and what comes out of it.

use aya_ebpf::{
    EbpfContext as _,
    bindings::{bpf_adj_room_mode::BPF_ADJ_ROOM_MAC, bpf_redir_neigh, bpf_redir_neigh__bindgen_ty_1},
    helpers::{bpf_redirect_neigh, bpf_skb_change_head},
    programs::TcContext,
};
use kilo_common::{
    encap::{IPIP_OVERHEAD, ipip_frame},
    maps::{
        CONFIG_LEADER, Config, HOP_KIND_LOCAL, HOP_KIND_NODE, HOP_KIND_WIREGUARD, Hop, TUNNEL_IPIP,
        TUNNEL_NONE,
    },
    packet::{ETHERNET_LEN, ETHERTYPE_IPV4, Ipv4, never_steered},
    verdict::{Action, DropReason},
};

use crate::{
    maps::{count_action, hop, route},
    masquerade, packet,
    programs::TC_ACT_UNSPEC,
};

/// `bpf_skb_adjust_room` flags (include/uapi/linux/bpf.h).
const ADJ_ROOM_FIXED_GSO: u64 = 1;
const ADJ_ROOM_ENCAP_L3_IPV4: u64 = 2;
const AF_INET: u32 = 2;

/// Egress of the WireGuard device; packets start with their IP header.
#[inline(always)]
pub fn kilo_egress(ctx: &TcContext, config: &Config) -> Result<i32, DropReason> {
    let leader = config.flags & CONFIG_LEADER != 0;
    if !packet::is_ipv4(ctx) {
        // WireGuard's own check of allowed IPs decides on a leader; elsewhere nothing may pass.
        return match packet::is_ipv6_for_the_link(ctx) {
            true => Err(DropReason::NotUnicast),
            false if leader => pass(),
            false => Err(DropReason::NoPrefix),
        };
    }
    let mut ip = packet::ipv4(ctx, 0)?;
    if never_steered(ip.dst) {
        return Err(DropReason::NotUnicast);
    }
    if let Some(addr) = masquerade::egress(ctx, config, 0, &ip)? {
        ip.src = addr;
    }
    let Some(id) = route(ip.dst) else {
        return if leader { pass() } else { Err(DropReason::NoPrefix) };
    };
    let hop = hop(id).ok_or(DropReason::NoHop)?;
    match hop.kind {
        HOP_KIND_WIREGUARD if leader => {
            count_action(Action::Encrypt);
            Ok(TC_ACT_UNSPEC)
        }
        HOP_KIND_NODE => {
            let verdict = send(ctx, hop, &ip)?;
            count_action(Action::Steer);
            Ok(verdict)
        }
        // An own prefix does not belong on this device; the stack would have kept it.
        HOP_KIND_LOCAL => Err(DropReason::NoPrefix),
        _ => Err(DropReason::NoHop),
    }
}

/// Ingress of the WireGuard device; packets start with their IP header.
#[inline(always)]
pub fn kilo_ingress(ctx: &TcContext, config: &Config) -> Result<i32, DropReason> {
    if !packet::is_ipv4(ctx) {
        return pass();
    }
    let mut ip = packet::ipv4(ctx, 0)?;
    if let Some(addr) = masquerade::ingress(ctx, config, 0, &ip)? {
        ip.dst = addr;
    }
    if config.flags & CONFIG_LEADER != 0
        && let Some(id) = route(ip.dst)
        && let Some(hop) = hop(id)
        && hop.kind == HOP_KIND_NODE
    {
        packet::lower_ttl(ctx, 0)?;
        let verdict = send(ctx, hop, &ip)?;
        count_action(Action::Forward);
        return Ok(verdict);
    }
    count_action(Action::Decrypt);
    Ok(TC_ACT_UNSPEC)
}

#[inline(always)]
fn pass() -> Result<i32, DropReason> {
    count_action(Action::Pass);
    Ok(TC_ACT_UNSPEC)
}

/// Sends a packet that has no link-layer header to another node.
#[inline(always)]
fn send(ctx: &TcContext, hop: &Hop, ip: &Ipv4) -> Result<i32, DropReason> {
    if hop.mtu != 0 && ctx.len() > hop.mtu && !packet::is_gso(ctx) {
        return Err(DropReason::TooBig);
    }
    match hop.tunnel {
        TUNNEL_IPIP => send_ipip(ctx, hop, ip),
        TUNNEL_NONE => send_plain(ctx, hop),
        _ => Err(DropReason::NoHop),
    }
}

#[inline(always)]
fn send_ipip(ctx: &TcContext, hop: &Hop, ip: &Ipv4) -> Result<i32, DropReason> {
    let frame = ipip_frame(hop.local, hop.remote, ip.tos, ctx.len() as u16);
    // Without FIXED_GSO the kernel refuses UDP superpackets (QUIC senders in pods).
    ctx.adjust_room(IPIP_OVERHEAD as i32, BPF_ADJ_ROOM_MAC, ADJ_ROOM_ENCAP_L3_IPV4 | ADJ_ROOM_FIXED_GSO)
        .map_err(|_| DropReason::Encapsulation)?;
    change_head(ctx)?;
    ctx.store(0, &frame, 0).map_err(|_| DropReason::Encapsulation)?;
    // No explicit next hop: with a cold neighbour the queued packet would leave
    // malformed, through the device it came from.
    // SAFETY: no parameters are passed.
    Ok(unsafe { bpf_redirect_neigh(hop.ifindex, core::ptr::null_mut(), 0, 0) } as i32)
}

#[inline(always)]
fn send_plain(ctx: &TcContext, hop: &Hop) -> Result<i32, DropReason> {
    change_head(ctx)?;
    let mut header = [0u8; ETHERNET_LEN];
    [header[12], header[13]] = ETHERTYPE_IPV4.to_be_bytes();
    ctx.store(0, &header, 0).map_err(|_| DropReason::Encapsulation)?;
    // The inner destination is not on the link, so the next hop is named; the
    // agent keeps that neighbour resolved.
    let mut neighbour = bpf_redir_neigh {
        nh_family: AF_INET,
        __bindgen_anon_1: bpf_redir_neigh__bindgen_ty_1 { ipv6_nh: [0; 4] },
    };
    neighbour.__bindgen_anon_1.ipv4_nh = u32::from_ne_bytes(hop.remote);
    // SAFETY: the parameters are a complete bpf_redir_neigh on the stack.
    Ok(unsafe { bpf_redirect_neigh(hop.ifindex, &raw mut neighbour, size_of::<bpf_redir_neigh>() as i32, 0) }
        as i32)
}

#[inline(always)]
fn change_head(ctx: &TcContext) -> Result<(), DropReason> {
    // SAFETY: the context is valid for the whole program.
    match unsafe { bpf_skb_change_head(ctx.as_ptr().cast(), ETHERNET_LEN as u32, 0) } {
        0 => Ok(()),
        _ => Err(DropReason::Encapsulation),
    }
}

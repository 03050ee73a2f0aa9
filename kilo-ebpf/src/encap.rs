//! Sending a packet to another node of the location: the outer header, and the
//! way out of the host. The bytes of that header are in `kilo-common/src/encap.rs`.

use aya_ebpf::{
    EbpfContext as _,
    bindings::{
        BPF_F_TUNINFO_IPV6, BPF_F_ZERO_CSUM_TX, bpf_adj_room_mode::BPF_ADJ_ROOM_MAC, bpf_redir_neigh,
        bpf_redir_neigh__bindgen_ty_1, bpf_tunnel_key,
    },
    helpers::{bpf_get_hash_recalc, bpf_redirect_neigh, bpf_skb_change_head, bpf_skb_set_tunnel_key},
    programs::TcContext,
};
use kilo_common::{
    drop_reasons::DropReason,
    encap::{
        IPIP_OVERHEAD, IPIP_OVERHEAD_V6, Inner, OUTER_TTL, VXLAN_OVERHEAD, VXLAN_OVERHEAD_V6, ipip_frame,
        ipip_frame_v6, vxlan_ethernet, vxlan_frame, vxlan_frame_v6,
    },
    maps::{Config, FAMILY_V4, FAMILY_V6, Hop, TUNNEL_IPIP, TUNNEL_NONE, TUNNEL_VXLAN, VXLAN_VNI},
    packet::{ETHERNET_LEN, Ipv4},
};

use crate::{
    cb,
    gso::FIXED_GSO,
    ip::{Ip, V6},
    link, packet,
    ret::{Act, Verdict, from_code, to_code},
    subprogram::{Skb, subprogram},
    word_memory::Words,
};

/// `bpf_skb_adjust_room` flags (include/uapi/linux/bpf.h).
const ENCAP_L3_IPV4: u64 = 2;
const ENCAP_L3_IPV6: u64 = 4;
const ENCAP_L4_UDP: u64 = 16;
const ENCAP_L2_ETH: u64 = 64;
const ENCAP_L2_SHIFT: u64 = 56;
const VXLAN_FLAGS: u64 = ENCAP_L4_UDP | ENCAP_L2_ETH | (ETHERNET_LEN as u64) << ENCAP_L2_SHIFT;

const AF_INET: u32 = 2;
const AF_INET6: u32 = 10;

/// Sends a packet that has no link-layer header to another node.
#[inline(always)]
pub fn send<I: Ip>(ctx: &TcContext, config: &Config, hop: &Hop, tos: u8) -> Verdict {
    let skb = ctx.as_ptr().cast();
    match (hop.tunnel, hop.family) {
        (TUNNEL_IPIP, FAMILY_V4) => from_code(ipip::<I>(skb, config, hop, tos)),
        (TUNNEL_NONE, FAMILY_V4) if !I::V6 => from_code(native::<I>(skb, hop)),
        (TUNNEL_NONE, FAMILY_V6) if I::V6 => from_code(native::<I>(skb, hop)),
        // A packet of the other family would need a next hop of its own family; encapsulated it does not.
        (TUNNEL_NONE, FAMILY_V4) => from_code(ipip::<I>(skb, config, hop, tos)),
        (TUNNEL_NONE | TUNNEL_IPIP, FAMILY_V6) => from_code(ipip_v6::<I>(skb, config, hop, tos)),
        // A GSO packet that crosses a link whole would lose its segments'
        // outer UDP headers: the device cuts it first.
        (TUNNEL_VXLAN, FAMILY_V4 | FAMILY_V6) if packet::gso_size(ctx) != 0 => {
            from_code(by_device::<I>(skb, config, hop, tos))
        }
        (TUNNEL_VXLAN, FAMILY_V4) => from_code(vxlan::<I>(skb, config, hop, tos)),
        (TUNNEL_VXLAN, FAMILY_V6) => from_code(vxlan_v6::<I>(skb, config, hop, tos)),
        _ => Err(DropReason::NoHop),
    }
}

subprogram! {
    /// Sends in IPIP between IPv4 addresses, as nearly all packets go. A subprogram, because its stack frame
    /// would not fit in its callers' before Linux 6.3.
    fn ipip[I: Ip](config: &Config, hop: &Hop, tos: u8) -> i32 = send_ipip;
    by I::V6 => { false => encap_ipip_v4[Ipv4], true => encap_ipip_v6[V6] }
}

#[inline(always)]
fn send_ipip<I: Ip>(skb: Skb, config: &Config, hop: &Hop, tos: u8) -> i32 {
    let ctx = &TcContext::new(skb);
    let mut frame = Words::<[u8; ETHERNET_LEN + IPIP_OVERHEAD], 5>::new();
    let frame = frame.zero();
    ipip_frame(frame, v4(&hop.local), v4(&hop.remote), &inner::<I>(ctx, tos, 0));
    match push_header_room(ctx, IPIP_OVERHEAD, ENCAP_L3_IPV4) {
        Ok(()) => to_code(transmit_v4(ctx, config, hop, frame, tos)),
        Err(()) => by_device::<I>(skb, config, hop, tos),
    }
}

subprogram! {
    /// As [`ipip`], between IPv6 addresses.
    fn ipip_v6[I: Ip](config: &Config, hop: &Hop, tos: u8) -> i32 = send_ipip_v6;
    by I::V6 => { false => encap_ipip6_v4[Ipv4], true => encap_ipip6_v6[V6] }
}

#[inline(always)]
fn send_ipip_v6<I: Ip>(skb: Skb, config: &Config, hop: &Hop, tos: u8) -> i32 {
    let ctx = &TcContext::new(skb);
    let inner = inner::<I>(ctx, tos, 0);
    if push_header_room(ctx, IPIP_OVERHEAD_V6, ENCAP_L3_IPV6).is_err() {
        return by_device::<I>(skb, config, hop, tos);
    }
    let mut frame = Words::<[u8; ETHERNET_LEN + IPIP_OVERHEAD_V6], 7>::new();
    let frame = frame.zero();
    ipip_frame_v6(frame, &hop.local, &hop.remote, &inner);
    to_code(transmit(ctx, hop, frame))
}

subprogram! {
    fn vxlan[I: Ip](config: &Config, hop: &Hop, tos: u8) -> i32 = send_vxlan;
    by I::V6 => { false => encap_vxlan_v4[Ipv4], true => encap_vxlan_v6[V6] }
}

#[inline(always)]
fn send_vxlan<I: Ip>(skb: Skb, config: &Config, hop: &Hop, tos: u8) -> i32 {
    let ctx = &TcContext::new(skb);
    let inner = inner::<I>(ctx, tos, flow_hash(ctx));
    if push_header_room(ctx, VXLAN_OVERHEAD, ENCAP_L3_IPV4 | VXLAN_FLAGS).is_err() {
        return by_device::<I>(skb, config, hop, tos);
    }
    let mut frame = Words::<[u8; ETHERNET_LEN + VXLAN_OVERHEAD], 8>::new();
    let frame = frame.zero();
    vxlan_frame(frame, v4(&hop.local), v4(&hop.remote), &inner);
    to_code(transmit(ctx, hop, frame))
}

subprogram! {
    /// As [`vxlan`], between IPv6 addresses.
    fn vxlan_v6[I: Ip](config: &Config, hop: &Hop, tos: u8) -> i32 = send_vxlan_v6;
    by I::V6 => { false => encap_vxlan6_v4[Ipv4], true => encap_vxlan6_v6[V6] }
}

#[inline(always)]
fn send_vxlan_v6<I: Ip>(skb: Skb, config: &Config, hop: &Hop, tos: u8) -> i32 {
    let ctx = &TcContext::new(skb);
    let inner = inner::<I>(ctx, tos, flow_hash(ctx));
    if push_header_room(ctx, VXLAN_OVERHEAD_V6, ENCAP_L3_IPV6 | VXLAN_FLAGS).is_err() {
        return by_device::<I>(skb, config, hop, tos);
    }
    let mut frame = Words::<[u8; ETHERNET_LEN + VXLAN_OVERHEAD_V6], 11>::new();
    let frame = frame.zero();
    vxlan_frame_v6(frame, &hop.local, &hop.remote, &inner);
    to_code(transmit(ctx, hop, frame))
}

#[inline(always)]
fn inner<I: Ip>(ctx: &TcContext, tos: u8, hash: u32) -> Inner {
    Inner { len: ctx.len(), tos, v6: I::V6, hash }
}

/// The IPv4 address in the first four bytes of a hop's field.
#[inline(always)]
fn v4(addr: &[u8; 16]) -> &[u8; 4] {
    // SAFETY: four bytes of sixteen.
    unsafe { &*addr.as_ptr().cast() }
}

#[inline(always)]
fn flow_hash(ctx: &TcContext) -> u32 {
    // SAFETY: the context is valid for the whole program.
    unsafe { bpf_get_hash_recalc(ctx.as_ptr().cast()) }
}

/// Makes room for an outer header. The kernel refuses packets that already have one, of a pod's own tunnel.
#[inline(always)]
fn push_header_room(ctx: &TcContext, overhead: usize, flags: u64) -> Result<(), ()> {
    // Without FIXED_GSO the kernel refuses UDP GSO packets (QUIC senders in pods).
    ctx.adjust_room(overhead as i32, BPF_ADJ_ROOM_MAC, flags | FIXED_GSO).map_err(|_| ())
}

/// Writes the outer headers into the room made, and sends.
#[inline(always)]
fn transmit<const N: usize>(ctx: &TcContext, hop: &Hop, frame: &[u8; N]) -> Verdict {
    change_head(ctx)?;
    ctx.store(0, frame, 0).map_err(|_| DropReason::Encapsulation)?;
    cb::sent(ctx);
    // No explicit next hop: with a cold neighbour the queued packet would leave
    // malformed, through the device it came from.
    Ok(Act::neighbour(hop.ifindex))
}

/// As [`transmit`], with link-layer addresses where they are known.
#[inline(always)]
fn transmit_v4<const N: usize>(
    ctx: &TcContext,
    config: &Config,
    hop: &Hop,
    frame: &mut [u8; N],
    tos: u8,
) -> Verdict {
    let ends = [&hop.local, &hop.remote].map(|addr| packet::word(v4(addr)));
    let Some(ends) = link::addresses(ctx, config, hop.ifindex, ends, tos) else {
        return transmit(ctx, hop, frame);
    };
    // SAFETY: frames are longer than what they start with, and the stack's words are aligned.
    unsafe { link::write(ends, frame.as_mut_ptr().cast()) };
    change_head(ctx)?;
    ctx.store(0, frame, 0).map_err(|_| DropReason::Encapsulation)?;
    cb::sent(ctx);
    Ok(Act::transmit(hop.ifindex))
}

subprogram! {
    /// Sends without an outer header.
    fn native[I: Ip](hop: &Hop) -> i32 = send_native;
    by I::V6 => { false => encap_native_v4[Ipv4], true => encap_native_v6[V6] }
}

#[inline(always)]
fn send_native<I: Ip>(skb: Skb, hop: &Hop) -> i32 {
    to_code(next_hop::<I>(&TcContext::new(skb), hop))
}

#[inline(always)]
fn next_hop<I: Ip>(ctx: &TcContext, hop: &Hop) -> Verdict {
    change_head(ctx)?;
    ctx.store(0, packet::ethernet(&mut Words::new(), I::V6), 0).map_err(|_| DropReason::Encapsulation)?;
    cb::sent(ctx);
    // The inner destination is not on the link, so the next hop is named;
    // the agent keeps that neighbour resolved.
    let mut neighbour = bpf_redir_neigh {
        nh_family: if I::V6 { AF_INET6 } else { AF_INET },
        __bindgen_anon_1: bpf_redir_neigh__bindgen_ty_1 { ipv6_nh: words(&hop.remote) },
    };
    let size = size_of::<bpf_redir_neigh>() as i32;
    // SAFETY: the parameters are a complete bpf_redir_neigh on the stack.
    Ok(Act::of(unsafe { bpf_redirect_neigh(hop.ifindex, &raw mut neighbour, size, 0) } as i32))
}

/// An address as the kernel's structures hold it; IPv4 is the first word.
#[inline(always)]
fn words(addr: &[u8; 16]) -> [u32; 4] {
    let word = |at: usize| u32::from_ne_bytes([addr[at], addr[at + 1], addr[at + 2], addr[at + 3]]);
    [word(0), word(4), word(8), word(12)]
}

subprogram! {
    /// Lets a tunnel device write the outer header: IPIP where that is possible, otherwise VXLAN, which every
    /// receiver accepts as well.
    fn by_device[I: Ip](config: &Config, hop: &Hop, tos: u8) -> i32 = send_by_device;
    by I::V6 => { false => encap_by_device_v4[Ipv4], true => encap_by_device_v6[V6] }
}

#[inline(always)]
fn send_by_device<I: Ip>(skb: Skb, config: &Config, hop: &Hop, tos: u8) -> i32 {
    to_code(device::<I>(&TcContext::new(skb), config, hop, tos))
}

#[inline(always)]
fn device<I: Ip>(ctx: &TcContext, config: &Config, hop: &Hop, tos: u8) -> Verdict {
    let ipip = hop.tunnel != TUNNEL_VXLAN && hop.family == FAMILY_V4 && !I::V6 && config.ipip_ifindex != 0;
    let device = if ipip { config.ipip_ifindex } else { config.vxlan_ifindex };
    if device == 0 {
        return Err(DropReason::Encapsulation);
    }
    cb::by_device(ctx);
    if !ipip {
        change_head(ctx)?;
        ctx.store(0, &vxlan_ethernet(I::V6), 0).map_err(|_| DropReason::Encapsulation)?;
    }
    let mut key = Words::<bpf_tunnel_key, 6>::new();
    let key = key.zero();
    key.tunnel_id = if ipip { 0 } else { VXLAN_VNI };
    key.tunnel_tos = tos;
    key.tunnel_ttl = OUTER_TTL;
    let mut flags = u64::from(BPF_F_ZERO_CSUM_TX);
    if hop.family == FAMILY_V6 {
        flags |= u64::from(BPF_F_TUNINFO_IPV6);
        key.__bindgen_anon_1.remote_ipv6 = words(&hop.remote);
        key.__bindgen_anon_3.local_ipv6 = words(&hop.local);
    } else {
        // These two are in host byte order (include/uapi/linux/bpf.h).
        key.__bindgen_anon_1.remote_ipv4 = u32::from_be_bytes(*v4(&hop.remote));
        key.__bindgen_anon_3.local_ipv4 = u32::from_be_bytes(*v4(&hop.local));
    }
    // SAFETY: the context is valid, the key complete.
    let set = unsafe {
        bpf_skb_set_tunnel_key(ctx.as_ptr().cast(), key, size_of::<bpf_tunnel_key>() as u32, flags)
    };
    if set != 0 {
        return Err(DropReason::Encapsulation);
    }
    Ok(Act::transmit(device))
}

#[inline(always)]
fn change_head(ctx: &TcContext) -> Result<(), DropReason> {
    // SAFETY: the context is valid for the whole program.
    match unsafe { bpf_skb_change_head(ctx.as_ptr().cast(), ETHERNET_LEN as u32, 0) } {
        0 => Ok(()),
        _ => Err(DropReason::Encapsulation),
    }
}

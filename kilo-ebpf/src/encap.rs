//! Sending a packet to another node of the location: the outer header, and the
//! way out of the host.

use aya_ebpf::{
    EbpfContext as _,
    bindings::{
        __sk_buff, BPF_F_TUNINFO_IPV6, BPF_F_ZERO_CSUM_TX, bpf_adj_room_mode::BPF_ADJ_ROOM_MAC,
        bpf_redir_neigh, bpf_redir_neigh__bindgen_ty_1, bpf_tunnel_key,
    },
    helpers::{bpf_get_hash_recalc, bpf_redirect_neigh, bpf_skb_change_head, bpf_skb_set_tunnel_key},
    programs::TcContext,
};
use kilo_common::{
    counters::DropReason,
    encap::{
        IPIP_OVERHEAD, IPIP_OVERHEAD_V6, Inner, OUTER_TTL, VXLAN_OVERHEAD, VXLAN_OVERHEAD_V6, ipip_frame,
        ipip_frame_v6, vxlan_ethernet, vxlan_frame, vxlan_frame_v6,
    },
    maps::{Config, FAMILY_V4, FAMILY_V6, Hop, TUNNEL_IPIP, TUNNEL_NONE, TUNNEL_VXLAN, VXLAN_VNI},
    packet::{ETHERNET_LEN, ETHERTYPE_IPV4, ETHERTYPE_IPV6},
};

use crate::{
    cb,
    ip::Ip,
    link, packet,
    ret::{Act, Verdict, from_code, to_code},
};

/// `bpf_skb_adjust_room` flags (include/uapi/linux/bpf.h).
const FIXED_GSO: u64 = 1;
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
        (TUNNEL_NONE, FAMILY_V4) if !I::V6 => from_code(subprogram::<I, Plain>(skb, config, hop, tos)),
        (TUNNEL_NONE, FAMILY_V6) if I::V6 => from_code(subprogram::<I, Plain>(skb, config, hop, tos)),
        // A packet of the other family needs a next hop of its own; encapsulated it does without.
        (TUNNEL_NONE, FAMILY_V4) => from_code(ipip::<I>(skb, config, hop, tos)),
        (TUNNEL_NONE | TUNNEL_IPIP, FAMILY_V6) => from_code(subprogram::<I, IpipV6>(skb, config, hop, tos)),
        // A GSO packet that crosses a link whole would lose its segments'
        // outer UDP headers: the device cuts it first.
        (TUNNEL_VXLAN, FAMILY_V4 | FAMILY_V6) if packet::gso_size(ctx) != 0 => {
            from_code(subprogram::<I, ByDevice>(skb, config, hop, tos))
        }
        (TUNNEL_VXLAN, FAMILY_V4) => from_code(subprogram::<I, Vxlan>(skb, config, hop, tos)),
        (TUNNEL_VXLAN, FAMILY_V6) => from_code(subprogram::<I, VxlanV6>(skb, config, hop, tos)),
        _ => Err(DropReason::NoHop),
    }
}

/// So that it is written in words.
#[repr(align(8))]
struct Aligned<const N: usize>([u8; N]);

/// The way of nearly all packets. A function of its own, because with those that its callers call else there is no
/// room for its stack in theirs before Linux 6.3.
#[inline(never)]
fn ipip<I: Ip>(skb: *mut __sk_buff, config: &Config, hop: &Hop, tos: u8) -> i32 {
    let ctx = &TcContext::new(skb);
    let mut frame = Aligned([0; ETHERNET_LEN + IPIP_OVERHEAD]);
    let frame = &mut frame.0;
    ipip_frame(frame, v4(&hop.local), v4(&hop.remote), &inner::<I>(ctx, tos, 0));
    match push_header_room(ctx, IPIP_OVERHEAD, ENCAP_L3_IPV4) {
        Ok(()) => to_code(transmit_v4(ctx, config, hop, frame, tos)),
        Err(()) => subprogram::<I, ByDevice>(skb, config, hop, tos),
    }
}

/// One of the other ways to send.
trait Way {
    /// `Ok(None)`: not like this, but a device may.
    fn send<I: Ip>(ctx: &TcContext, config: &Config, hop: &Hop, tos: u8) -> Result<Option<Act>, DropReason>;
}

/// A function of its own for the verifier, with its own share of the stack.
#[inline(never)]
fn subprogram<I: Ip, W: Way>(skb: *mut __sk_buff, config: &Config, hop: &Hop, tos: u8) -> i32 {
    let ctx = TcContext::new(skb);
    match W::send::<I>(&ctx, config, hop, tos) {
        Ok(Some(act)) => act.code(),
        Ok(None) => subprogram::<I, ByDevice>(skb, config, hop, tos),
        Err(reason) => to_code(Err(reason)),
    }
}

struct IpipV6;
impl Way for IpipV6 {
    #[inline(always)]
    fn send<I: Ip>(ctx: &TcContext, _: &Config, hop: &Hop, tos: u8) -> Result<Option<Act>, DropReason> {
        let inner = inner::<I>(ctx, tos, 0);
        if push_header_room(ctx, IPIP_OVERHEAD_V6, ENCAP_L3_IPV6).is_err() {
            return Ok(None);
        }
        let mut frame = [0; ETHERNET_LEN + IPIP_OVERHEAD_V6];
        ipip_frame_v6(&mut frame, &hop.local, &hop.remote, &inner);
        transmit(ctx, hop, &frame).map(Some)
    }
}

struct Vxlan;
impl Way for Vxlan {
    #[inline(always)]
    fn send<I: Ip>(ctx: &TcContext, _: &Config, hop: &Hop, tos: u8) -> Result<Option<Act>, DropReason> {
        let inner = inner::<I>(ctx, tos, flow_hash(ctx));
        if push_header_room(ctx, VXLAN_OVERHEAD, ENCAP_L3_IPV4 | VXLAN_FLAGS).is_err() {
            return Ok(None);
        }
        let mut frame = [0; ETHERNET_LEN + VXLAN_OVERHEAD];
        vxlan_frame(&mut frame, v4(&hop.local), v4(&hop.remote), &inner);
        transmit(ctx, hop, &frame).map(Some)
    }
}

struct VxlanV6;
impl Way for VxlanV6 {
    #[inline(always)]
    fn send<I: Ip>(ctx: &TcContext, _: &Config, hop: &Hop, tos: u8) -> Result<Option<Act>, DropReason> {
        let inner = inner::<I>(ctx, tos, flow_hash(ctx));
        if push_header_room(ctx, VXLAN_OVERHEAD_V6, ENCAP_L3_IPV6 | VXLAN_FLAGS).is_err() {
            return Ok(None);
        }
        let mut frame = [0; ETHERNET_LEN + VXLAN_OVERHEAD_V6];
        vxlan_frame_v6(&mut frame, &hop.local, &hop.remote, &inner);
        transmit(ctx, hop, &frame).map(Some)
    }
}

#[inline(always)]
fn inner<I: Ip>(ctx: &TcContext, tos: u8, hash: u32) -> Inner {
    Inner { len: ctx.len(), tos, v6: I::V6, hash }
}

/// IPv4 addresses stand in the first bytes of a hop's fields.
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

/// Makes room for an outer header. Refused for packets that bear an outer
/// header of a pod's own.
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

/// As [`transmit`], with addresses of the link where they are known.
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

struct Plain;
impl Way for Plain {
    #[inline(always)]
    fn send<I: Ip>(ctx: &TcContext, _: &Config, hop: &Hop, _: u8) -> Result<Option<Act>, DropReason> {
        change_head(ctx)?;
        let mut header = [0u8; ETHERNET_LEN];
        [header[12], header[13]] = (if I::V6 { ETHERTYPE_IPV6 } else { ETHERTYPE_IPV4 }).to_be_bytes();
        ctx.store(0, &header, 0).map_err(|_| DropReason::Encapsulation)?;
        cb::sent(ctx);
        // The inner destination is not on the link, so the next hop is named;
        // the agent keeps that neighbour resolved.
        let mut neighbour = bpf_redir_neigh {
            nh_family: if I::V6 { AF_INET6 } else { AF_INET },
            __bindgen_anon_1: bpf_redir_neigh__bindgen_ty_1 { ipv6_nh: words(&hop.remote) },
        };
        let size = size_of::<bpf_redir_neigh>() as i32;
        // SAFETY: the parameters are a complete bpf_redir_neigh on the stack.
        let returned = unsafe { bpf_redirect_neigh(hop.ifindex, &raw mut neighbour, size, 0) };
        Ok(Some(Act::of(returned as i32)))
    }
}

/// An address as the kernel's structures hold it; IPv4 is the first word.
#[inline(always)]
fn words(addr: &[u8; 16]) -> [u32; 4] {
    let word = |at: usize| u32::from_ne_bytes([addr[at], addr[at + 1], addr[at + 2], addr[at + 3]]);
    [word(0), word(4), word(8), word(12)]
}

/// Lets a tunnel device write the outer header: IPIP where that is possible,
/// else VXLAN, which every receiver takes, too.
struct ByDevice;
impl Way for ByDevice {
    #[inline(always)]
    fn send<I: Ip>(ctx: &TcContext, config: &Config, hop: &Hop, tos: u8) -> Result<Option<Act>, DropReason> {
        by_device::<I>(ctx, config, hop, tos).map(Some)
    }
}

#[inline(always)]
fn by_device<I: Ip>(ctx: &TcContext, config: &Config, hop: &Hop, tos: u8) -> Verdict {
    let ipip = hop.tunnel != TUNNEL_VXLAN && hop.family == FAMILY_V4 && !I::V6 && config.ipip_ifindex != 0;
    let device = if ipip { config.ipip_ifindex } else { config.vxlan_ifindex };
    if device == 0 {
        return Err(DropReason::Encapsulation);
    }
    if !ipip {
        cb::by_device(ctx);
        change_head(ctx)?;
        ctx.store(0, &vxlan_ethernet(I::V6), 0).map_err(|_| DropReason::Encapsulation)?;
    }
    // SAFETY: plain integers, for which zero is a value.
    let mut key: bpf_tunnel_key = unsafe { core::mem::zeroed() };
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
        bpf_skb_set_tunnel_key(ctx.as_ptr().cast(), &raw mut key, size_of::<bpf_tunnel_key>() as u32, flags)
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

//! Access to packet bytes in ways that the verifier accepts.

use core::{mem::offset_of, ptr::read_volatile};

use crate::{
    subprogram::{Skb, subprogram},
    word_memory::Words,
};
use aya_ebpf::{
    EbpfContext as _,
    bindings::__sk_buff,
    helpers::{bpf_skb_change_type, bpf_skb_vlan_pop},
    programs::TcContext,
};
use kilo_common::packet::{ETHERNET_LEN, ETHERTYPE_IPV4, ETHERTYPE_IPV6, IPV4_LEN, Ipv4Header};
use network_types::{tcp::TcpHdr, udp::UdpHdr};

/// Offset of the transport header in a frame with an IPv4 packet without options.
pub const TRANSPORT: usize = ETHERNET_LEN + IPV4_LEN;
/// Bytes of such a frame up to the end of the UDP header.
pub const UDP_END: usize = TRANSPORT + UdpHdr::LEN;
/// Offset of the TCP flags in such a frame.
pub const TCP_FLAGS: usize = TRANSPORT + offset_of!(TcpHdr, _bitfield_1) + 1;
/// `skb->pkt_type` of packets addressed to this host.
const PACKET_HOST: u32 = 0;

#[inline(always)]
fn skb(ctx: &TcContext) -> *const __sk_buff {
    ctx.as_ptr().cast()
}

/// Protocol family of a packet, as the kernel sees it.
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
    /// Everything else.
    Other,
}

/// The family of a packet, by its EtherType.
#[inline(always)]
pub fn family(ctx: &TcContext) -> Family {
    const V4: u32 = ETHERTYPE_IPV4.to_be() as u32;
    const V6: u32 = ETHERTYPE_IPV6.to_be() as u32;
    // SAFETY: the context is valid for the whole program.
    match unsafe { (*skb(ctx)).protocol } {
        V4 => Family::V4,
        V6 => Family::V6,
        _ => Family::Other,
    }
}

/// True for packets whose link-layer destination is this host.
#[inline(always)]
pub fn is_for_host(ctx: &TcContext) -> bool {
    // SAFETY: the context is valid for the whole program.
    unsafe { (*skb(ctx)).pkt_type == PACKET_HOST }
}

/// True for packets that bear a VLAN tag, which the kernel keeps beside the packet.
#[inline(always)]
pub fn is_tagged(ctx: &TcContext) -> bool {
    // SAFETY: the context is valid for the whole program.
    unsafe { (*skb(ctx)).vlan_present != 0 }
}

/// True when a tagged packet belongs to a VLAN. VLAN 0 is not one: such a tag only carries a priority, and is
/// removed, because the packet would otherwise keep it on every other device.
#[inline(always)]
pub fn belongs_to_vlan(ctx: &TcContext) -> bool {
    is_of_vlan(ctx.as_ptr().cast()) != 0
}

subprogram! {
    fn is_of_vlan() -> u32 = look_at_vlan as packet_is_of_vlan
}

#[inline(always)]
fn look_at_vlan(skb: Skb) -> u32 {
    const ID: u32 = 0xfff;
    // SAFETY: callers pass the context, which is valid for the whole program.
    let belongs =
        unsafe { (*skb).vlan_tci & ID != 0 || bpf_skb_vlan_pop(skb) != 0 || (*skb).vlan_present != 0 };
    u32::from(belongs)
}

/// Index of the interface the program runs on.
#[inline(always)]
pub fn ifindex(ctx: &TcContext) -> u32 {
    // SAFETY: the context is valid for the whole program.
    unsafe { (*skb(ctx)).ifindex }
}

/// The packet's mark.
#[inline(always)]
pub fn mark(ctx: &TcContext) -> u32 {
    // SAFETY: the context is valid for the whole program.
    unsafe { (*skb(ctx)).mark }
}

/// The packet's priority.
#[inline(always)]
pub fn priority(ctx: &TcContext) -> u32 {
    // SAFETY: the context is valid for the whole program.
    unsafe { (*skb(ctx)).priority }
}

/// Makes the stack accept a packet whose link-layer address is not this interface's.
#[inline(always)]
pub fn make_for_host(ctx: &TcContext) {
    // SAFETY: the context is valid for the whole program. Where it fails, the stack drops the packet.
    unsafe { bpf_skb_change_type(ctx.as_ptr().cast(), PACKET_HOST) };
}

/// Sets the packet's priority.
#[inline(always)]
pub fn set_priority(ctx: &TcContext, priority: u32) {
    // SAFETY: the context is valid for the whole program, and the field is a program's to write.
    unsafe { (*ctx.skb.skb).priority = priority };
}

/// Index of the interface on which the packet arrived at this host; 0 for packets that the host made, as
/// encryption and tunnel devices do (`skb_scrub_packet`, net/core/skbuff.c).
#[inline(always)]
pub fn brought_by(ctx: &TcContext) -> u32 {
    // SAFETY: the context is valid for the whole program.
    unsafe { (*skb(ctx)).ingress_ifindex }
}

/// Payload bytes per segment of a packet that will be cut later; else 0.
#[inline(always)]
pub fn gso_size(ctx: &TcContext) -> u32 {
    // SAFETY: the context is valid for the whole program.
    unsafe { (*skb(ctx)).gso_size }
}

/// Pointer to `N` bytes at a constant or bounded offset, pulled into the linear part if need be.
#[inline(always)]
pub fn bytes<const N: usize>(ctx: &TcContext, offset: usize) -> Option<*mut [u8; N]> {
    if ctx.data() + offset + N > ctx.data_end() {
        ctx.pull_data((offset + N) as u32).ok()?;
        if ctx.data() + offset + N > ctx.data_end() {
            return None;
        }
    }
    Some((ctx.data() + offset) as *mut [u8; N])
}

/// Two bytes at a constant offset, as they lie in memory, if they are in the linear part. The bounds are read
/// anew, because the compiler computes with those of a caller in ways that the verifier does not follow.
#[inline(always)]
pub fn linear_word(ctx: &TcContext, offset: usize) -> Option<u16> {
    let skb = skb(ctx);
    // SAFETY: the context is valid for the whole program.
    let (data, end) = unsafe {
        (read_volatile(&raw const (*skb).data) as usize, read_volatile(&raw const (*skb).data_end) as usize)
    };
    if data + offset + 2 > end {
        return None;
    }
    // SAFETY: the bounds are checked, and programs may read packets at any address.
    Some(unsafe { *((data + offset) as *const u16) })
}

/// The first `N` pairs of bytes, each in network byte order, if they are in the linear part. Packets of a
/// link with an Ethernet header have their IP header at an even address.
#[inline(always)]
pub fn pairs<const N: usize>(ctx: &TcContext) -> Option<&[u16; N]> {
    if ctx.data() + 2 * N > ctx.data_end() {
        return None;
    }
    // SAFETY: the bounds are checked, and programs may read packets at any address.
    Some(unsafe { &*(ctx.data() as *const [u16; N]) })
}

/// Protocol of the IPv4 packet in an Ethernet frame; 0 when it is not in the linear part.
#[inline(always)]
pub fn protocol_v4(ctx: &TcContext) -> u8 {
    let start = ctx.data() + ETHERNET_LEN;
    if start + IPV4_LEN > ctx.data_end() {
        return 0;
    }
    // SAFETY: the bounds are checked, and programs may read packets at any address.
    unsafe { (*(start as *const Ipv4Header)).protocol }
}

/// Destination of the IPv4 packet in an Ethernet frame as [`word`] has it, if it is in the linear part.
#[inline(always)]
pub fn destination_v4(ctx: &TcContext) -> Option<u32> {
    let start = ctx.data() + ETHERNET_LEN;
    if start + IPV4_LEN > ctx.data_end() {
        return None;
    }
    // SAFETY: the bounds are checked, and programs may read packets at any address.
    Some(unsafe { (*(start as *const Ipv4Header)).dst })
}

/// An Ethernet header without addresses.
#[inline(always)]
pub fn ethernet(header: &mut Words<[u8; ETHERNET_LEN], 2>, v6: bool) -> &[u8; ETHERNET_LEN] {
    let header = header.zero();
    [header[12], header[13]] = (if v6 { ETHERTYPE_IPV6 } else { ETHERTYPE_IPV4 }).to_be_bytes();
    header
}

/// An IPv4 address of a map value as one word, as it lies in memory.
#[inline(always)]
pub fn word(addr: &[u8; 4]) -> u32 {
    // SAFETY: callers pass fields of map values, which are aligned to four bytes.
    unsafe { *addr.as_ptr().cast() }
}

/// The halves of an address from the words the kernel's structures hold.
#[inline(always)]
pub fn halves(words: &[u32; 4]) -> [u64; 2] {
    let [a, b, c, d] = words.map(|word| u64::from(u32::from_le(word)));
    [(a | b << 32).to_le(), (c | d << 32).to_le()]
}

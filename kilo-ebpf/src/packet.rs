//! Access to packet bytes, the way the verifier accepts it.

use aya_ebpf::{EbpfContext as _, bindings::__sk_buff, programs::TcContext};
use kilo_common::{
    encap::next_ttl,
    packet::{ETHERTYPE_IPV4, IPV4_LEN, Ipv4},
    verdict::DropReason,
};

/// `skb->pkt_type` of packets addressed to this host.
const PACKET_HOST: u32 = 0;

#[inline(always)]
fn skb(ctx: &TcContext) -> *const __sk_buff {
    ctx.as_ptr().cast()
}

/// True for IPv4 packets.
#[inline(always)]
pub fn is_ipv4(ctx: &TcContext) -> bool {
    // SAFETY: the context is valid for the whole program.
    unsafe { (*skb(ctx)).protocol == u32::from(ETHERTYPE_IPV4.to_be()) }
}

/// True for packets whose link-layer destination is this host.
#[inline(always)]
pub fn is_for_host(ctx: &TcContext) -> bool {
    // SAFETY: the context is valid for the whole program.
    unsafe { (*skb(ctx)).pkt_type == PACKET_HOST }
}

/// Index of the interface the program runs on.
#[inline(always)]
pub fn ifindex(ctx: &TcContext) -> u32 {
    // SAFETY: the context is valid for the whole program.
    unsafe { (*skb(ctx)).ifindex }
}

/// True for packets that will be cut into segments later.
#[inline(always)]
pub fn is_gso(ctx: &TcContext) -> bool {
    // SAFETY: the context is valid for the whole program.
    unsafe { (*skb(ctx)).gso_size != 0 }
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

/// Reads the IPv4 header at `offset`.
#[inline(always)]
pub fn ipv4(ctx: &TcContext, offset: usize) -> Result<Ipv4, DropReason> {
    let header = bytes::<IPV4_LEN>(ctx, offset).ok_or(DropReason::Truncated)?;
    // SAFETY: `bytes` checked the bounds.
    Ipv4::parse(unsafe { &*header }, (ctx.len() as usize).saturating_sub(offset))
}

/// True for IPv6 packets (without link-layer header) to multicast and
/// link-local addresses: neighbour discovery and the like.
#[inline(always)]
pub fn is_ipv6_for_the_link(ctx: &TcContext) -> bool {
    // Version and traffic class stand in byte 0, the destination starts at byte 24 (RFC 8200).
    let Ok(version) = ctx.load::<u8>(0) else { return false };
    let Ok(dst) = ctx.load::<[u8; 2]>(24) else { return false };
    version >> 4 == 6 && (dst[0] == 0xff || (dst[0] == 0xfe && dst[1] & 0xc0 == 0x80))
}

/// Counts this host as a hop: lowers the TTL of the IPv4 header at `offset`.
#[inline(always)]
pub fn lower_ttl(ctx: &TcContext, offset: usize) -> Result<(), DropReason> {
    let header = bytes::<IPV4_LEN>(ctx, offset).ok_or(DropReason::Truncated)?;
    // SAFETY: `bytes` checked the bounds; the kernel makes the packet writable before the program runs.
    let header = unsafe { &mut *header };
    let checksum = u16::from_be_bytes([header[10], header[11]]);
    let (ttl, checksum) = next_ttl(header[8], header[9], checksum).ok_or(DropReason::TtlExceeded)?;
    header[8] = ttl;
    [header[10], header[11]] = checksum.to_be_bytes();
    Ok(())
}

//! GSO packets on their way to WireGuard, which cuts them into segments. The kernel cuts them before
//! WireGuard when their type names a tunnel.

use aya_ebpf::{
    EbpfContext as _, bindings::bpf_adj_room_mode::BPF_ADJ_ROOM_MAC, helpers::bpf_skb_change_head,
    programs::TcContext,
};
use kilo_common::{encap::segments_room, maps::Config};

use crate::packet;

/// `bpf_skb_adjust_room` flags (include/uapi/linux/bpf.h); the last two exist in Linux 7.3, but not in 6.18.
pub const FIXED_GSO: u64 = 1;
const DECAP_IPXIP4: u64 = 1 << 11;
const DECAP_IPXIP6: u64 = 1 << 12;

/// True for a packet that is longer than what WireGuard carries, and will be cut for that.
#[inline(always)]
pub fn is(ctx: &TcContext, config: &Config) -> bool {
    // Most packets are recognised by their length, which costs less to read.
    ctx.len() > config.kilo_mtu && packet::gso_size(ctx) != 0
}

/// Who cuts a GSO packet.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    /// The device it is sent to.
    ByDevice,
    /// The kernel, before that device: its type still says that it has an outer header.
    Before,
}

/// Removes the outer IP header of `by` bytes, and the tunnel from the GSO packet's type. False, with nothing
/// done, where the kernel does not know how.
#[inline(always)]
pub fn decapsulate(ctx: &TcContext, by: usize, outer_v6: bool, flags: u64) -> bool {
    let flags = FIXED_GSO | flags | if outer_v6 { DECAP_IPXIP6 } else { DECAP_IPXIP4 };
    ctx.adjust_room(-(by as i32), BPF_ADJ_ROOM_MAC, flags).is_ok()
}

/// Makes, once for the whole packet, the headroom that each segment will need: a redirected packet, unlike a
/// routed one, does not get the headroom that the device asks for.
#[inline(always)]
pub fn make_room(ctx: &TcContext, cut: Cut) {
    let room = segments_room(packet::gso_size(ctx), cut == Cut::Before);
    // Everything in front of the IP header is removed on the way to a device without a link layer.
    // SAFETY: the context is valid for the whole program. Where it fails, segments cost more.
    unsafe { bpf_skb_change_head(ctx.as_ptr().cast(), room, 0) };
}

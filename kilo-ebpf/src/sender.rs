//! Who sent an encapsulated packet or a signal.

use core::mem::offset_of;

use aya_ebpf::programs::TcContext;
use kilo_common::{counters::DropReason, forwarding, maps::NodeValue};
use network_types::udp::UdpHdr;

use crate::{ip::Ip, packet};

/// Offset of the destination port in a UDP header.
pub const DESTINATION_PORT: usize = offset_of!(UdpHdr, dst);

/// The node that an encapsulated packet comes from, by its outer source and by the interface, because anybody
/// on another network can forge that source.
#[inline(always)]
pub fn sender_of<O: Ip>(ctx: &TcContext, outer: &O) -> Result<&'static NodeValue, DropReason> {
    forwarding::arrives(O::sender(outer.src()), packet::ifindex(ctx))
}

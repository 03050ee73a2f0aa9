//! Who sent an encapsulated packet or a signal, and in whose name containers of this host send.

use core::mem::offset_of;

use aya_ebpf::programs::TcContext;
use kilo_common::{
    drop_reasons::DropReason,
    forwarding,
    maps::{Config, NodeValue},
    packet::Ipv4,
};
use network_types::udp::UdpHdr;

use crate::{
    ip::{Ip, V6},
    maps::device,
    packet,
    subprogram::{Skb, subprogram},
};

/// Offset of the destination port in a UDP header.
pub const DESTINATION_PORT: usize = offset_of!(UdpHdr, dst);

/// The node that an encapsulated packet comes from, by its outer source and by the interface, because anybody
/// on another network can forge that source.
#[inline(always)]
pub fn sender_of<O: Ip>(ctx: &TcContext, outer: &O) -> Result<&'static NodeValue, DropReason> {
    forwarding::arrives(O::sender(outer.src()), packet::ifindex(ctx))
}

/// True for an encapsulated packet that is forwarded although its outer source is not a node that may send by the
/// interface that brought it: a container made it, which may have written another node's address, or have got
/// this host's from somebody's masquerading.
#[inline(always)]
pub fn is_forged<O: Ip>(ctx: &TcContext, outer: &O) -> bool {
    let brought_by = packet::brought_by(ctx);
    brought_by != 0 && forwarding::arrives(O::sender(outer.src()), brought_by).is_err()
}

/// True for a packet that came from a pod's bridge or veth: not made by the host, and not brought by an uplink
/// or a device of ours.
#[inline(always)]
fn is_of_pod(ctx: &TcContext, config: &Config) -> bool {
    let brought_by = packet::brought_by(ctx);
    let ours = [config.kilo_ifindex, config.vxlan_ifindex, config.ipip_ifindex];
    brought_by != 0 && !ours.contains(&brought_by) && device(brought_by).is_none()
}

subprogram! {
    /// Not zero for a packet of a pod whose source is an address of another node, location or VPN peer.
    /// On the way through a gateway nobody else would notice: far locations accept what the location has, and
    /// its own nodes what a gateway carries.
    pub fn is_foreign[I: Ip](config: &Config) -> u32 = look_for_foreign;
    by I::V6 => { false => foreign_v4[Ipv4], true => foreign_v6[V6] }
}

#[inline(always)]
fn look_for_foreign<I: Ip>(skb: Skb, config: &Config) -> u32 {
    let ctx = TcContext::new(skb);
    let foreign = is_of_pod(&ctx, config)
        && I::read(&ctx, 0)
            .is_ok_and(|ip| forwarding::is_anothers(config.flags, I::prefix(config, ip.src())));
    u32::from(foreign)
}

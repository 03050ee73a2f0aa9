//! Ingress of the uplinks: steered packets from other nodes, and replies to
//! masqueraded flows.

use aya_ebpf::{bindings::bpf_adj_room_mode::BPF_ADJ_ROOM_MAC, helpers::bpf_redirect, programs::TcContext};
use kilo_common::{
    encap::IPIP_OVERHEAD,
    maps::{
        CONFIG_LEADER, CONFIG_PLAIN, Config, HOP_KIND_NODE, HOP_LOCAL, HOP_REMOTE, NODE_LEADER, NodeValue,
        PREFIX_ROUTE, PREFIX_SOURCE, TUNNEL_NONE,
    },
    packet::{ETHERNET_LEN, IPV4_LEN, Ipv4, never_steered, protocol},
    verdict::{Action, DropReason},
};

use crate::{
    maps::{NODE_V4, count_action, hop, prefix},
    masquerade, packet,
    programs::TC_ACT_UNSPEC,
};

const REDIRECT_INGRESS: u64 = 1;
const ADJ_ROOM_FIXED_GSO: u64 = 1;

/// Where a steered packet goes on.
enum Onward {
    /// To this node's stack, as received on the WireGuard device.
    Deliver,
    /// Straight into the WireGuard device.
    Transit,
}

/// Ingress of an uplink; packets start with an Ethernet header.
#[inline(always)]
pub fn lan_ingress(ctx: &TcContext, config: &Config) -> Result<i32, DropReason> {
    if !packet::is_for_host(ctx) || !packet::is_ipv4(ctx) {
        return Ok(TC_ACT_UNSPEC);
    }
    // Rubbish that is not for the mesh is the stack's to judge.
    let Ok(outer) = packet::ipv4(ctx, ETHERNET_LEN) else { return Ok(TC_ACT_UNSPEC) };
    if outer.protocol == protocol::IPIP && outer.dst == config.private_addr {
        return steered(ctx, config, &outer);
    }
    if masquerade::ingress(ctx, config, ETHERNET_LEN, &outer)?.is_some() {
        return Ok(TC_ACT_UNSPEC);
    }
    if config.flags & CONFIG_PLAIN != 0 {
        return plain(ctx, config, &outer);
    }
    Ok(TC_ACT_UNSPEC)
}

/// An encapsulated packet addressed to this node.
#[inline(always)]
fn steered(ctx: &TcContext, config: &Config, outer: &Ipv4) -> Result<i32, DropReason> {
    // SAFETY: the value is copied at once; entries are only replaced by the agent.
    let sender = unsafe { NODE_V4.get(&outer.src) }.copied().ok_or(DropReason::UnknownSender)?;
    if outer.is_fragment() {
        return Err(DropReason::OuterFragment);
    }
    if outer.header_len != IPV4_LEN {
        return Err(DropReason::Malformed);
    }
    let inner = packet::ipv4(ctx, ETHERNET_LEN + IPIP_OVERHEAD)?;
    check_source(&sender, inner.src)?;
    let onward = onward(config, inner.dst).ok_or(DropReason::NotForUs)?;
    if matches!(onward, Onward::Transit) {
        packet::lower_ttl(ctx, ETHERNET_LEN + IPIP_OVERHEAD)?;
    }
    ctx.adjust_room(-(IPIP_OVERHEAD as i32), BPF_ADJ_ROOM_MAC, ADJ_ROOM_FIXED_GSO)
        .map_err(|_| DropReason::Encapsulation)?;
    Ok(go(config, &onward))
}

/// A packet without outer header, where nodes of the location send such.
#[inline(always)]
fn plain(ctx: &TcContext, config: &Config, ip: &Ipv4) -> Result<i32, DropReason> {
    let Some(source) = prefix(ip.src) else { return Ok(TC_ACT_UNSPEC) };
    if source.flags & PREFIX_SOURCE == 0 || source.hop == HOP_LOCAL {
        return Ok(TC_ACT_UNSPEC);
    }
    let from_plain_node =
        hop(source.hop).is_some_and(|hop| hop.kind == HOP_KIND_NODE && hop.tunnel == TUNNEL_NONE);
    if !from_plain_node || never_steered(ip.dst) || ip.dst == config.private_addr {
        return Ok(TC_ACT_UNSPEC);
    }
    let Some(onward) = onward(config, ip.dst) else { return Ok(TC_ACT_UNSPEC) };
    if matches!(onward, Onward::Transit) {
        packet::lower_ttl(ctx, ETHERNET_LEN)?;
    }
    Ok(go(config, &onward))
}

/// The inner source must belong to the node that sent the packet; a leader
/// also carries what comes from other locations.
#[inline(always)]
fn check_source(sender: &NodeValue, src: [u8; 4]) -> Result<(), DropReason> {
    let owner = prefix(src).ok_or(DropReason::ForeignSource)?;
    let carried = owner.hop == HOP_REMOTE && sender.flags & NODE_LEADER != 0;
    if owner.flags & PREFIX_SOURCE != 0 && (owner.hop == sender.hop || carried) {
        Ok(())
    } else {
        Err(DropReason::ForeignSource)
    }
}

/// A node that does not lead refuses remote destinations: two nodes that take
/// each other for the leader must not play ping-pong.
#[inline(always)]
fn onward(config: &Config, dst: [u8; 4]) -> Option<Onward> {
    let value = prefix(dst)?;
    match value.hop {
        HOP_LOCAL => Some(Onward::Deliver),
        HOP_REMOTE if config.flags & CONFIG_LEADER != 0 && value.flags & PREFIX_ROUTE != 0 => {
            Some(Onward::Transit)
        }
        _ => None,
    }
}

#[inline(always)]
fn go(config: &Config, onward: &Onward) -> i32 {
    let (action, flags) = match onward {
        Onward::Deliver => (Action::Deliver, REDIRECT_INGRESS),
        Onward::Transit => (Action::Transit, 0),
    };
    count_action(action);
    // SAFETY: a helper without pointers.
    (unsafe { bpf_redirect(config.kilo_ifindex, flags) }) as i32
}

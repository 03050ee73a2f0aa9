//! Ingress of uplinks: steered packets from other nodes, and replies to masqueraded flows.

use aya_ebpf::{EbpfContext as _, programs::TcContext};
use kilo_common::{
    drop_reasons::DropReason,
    encap::{UDP_LEN, VXLAN_INNER, VXLAN_LEN, vxlan_header},
    forwarding::{self, Disposition, is_gateway},
    maps::{
        CONFIG_ENCAPSULATED, CONFIG_NATIVE, Config, FAMILY_V6, HOP_KIND_NODE, Hop, NODE_LED, NodeValue,
        PREFIX_VIA_WIREGUARD, TUNNEL_NONE, VXLAN_PORT,
    },
    packet::{ETHERNET_LEN, ETHERTYPE_IPV4, ETHERTYPE_IPV6, Ipv4, protocol},
};

use crate::{
    cb,
    decap::{disposition_of, gso_subprogram, is_to_vxlan, receive_steered, redirect, steered_subprogram},
    fast_path::{
        established::{self, Established},
        steered as whole,
    },
    gso::{self, Cut},
    ip::{Ip, V6, halves},
    leader_word::resolve_hop,
    masquerade,
    mtu::{self, fits},
    packet::{self, Family},
    relay,
    ret::{Act, Verdict, from_code, to_code},
    sender::{DESTINATION_PORT, sender_of},
    signal,
    subprogram::{Skb, subprogram},
    vxlan_order,
};

/// Ingress of an uplink; packets start with an Ethernet header.
#[inline(always)]
pub fn lan_ingress(ctx: &TcContext, config: &Config) -> Verdict {
    if !packet::is_for_host(ctx) {
        // `tunnel_ingress` has handed it here; it bears the link-layer address of the tunnel's device.
        if cb::is_of_sender(ctx) {
            packet::make_for_host(ctx);
        }
        return Ok(Act::NEXT);
    }
    // The program of the VLAN's own device gets it next, without the tag.
    if packet::is_tagged(ctx) && packet::belongs_to_vlan(ctx) {
        return Ok(Act::NEXT);
    }
    match packet::family(ctx) {
        Family::V4 if let Some(done) = whole::take(ctx, config) => done,
        Family::V4 if let Some(done) = relay::fast_path::take::<Ipv4>(ctx, config) => done,
        Family::V6 if let Some(done) = relay::fast_path::take::<V6>(ctx, config) => done,
        Family::V4 => match packet::protocol_v4(ctx) {
            protocol::TCP | protocol::UDP => match established::arriving(ctx, config)? {
                Established::Done => Ok(Act::NEXT),
                // Without an entry it is not for a port of WireGuard or VXLAN either.
                Established::NoEntry if relay::concerns_whole(ctx, config) => {
                    from_code(relay::arrived::<Ipv4, ETHERNET_LEN>(ctx.as_ptr().cast(), config))
                }
                Established::NoEntry if has_no_bare(config) || is_to_private_v4(ctx, config) => Ok(Act::NEXT),
                Established::NoEntry => from_code(bare_v4(ctx.as_ptr().cast(), config)),
                Established::NotDue | Established::Unknown => taken::<Ipv4, ETHERNET_LEN>(ctx, config),
            },
            _ => taken::<Ipv4, ETHERNET_LEN>(ctx, config),
        },
        Family::V6 => taken::<V6, ETHERNET_LEN>(ctx, config),
        Family::Other => Ok(Act::NEXT),
    }
}

/// Ingress of an uplink without link-layer header; packets start with their IP header.
#[inline(always)]
pub fn l3_ingress(ctx: &TcContext, config: &Config) -> Verdict {
    // Without link-layer addresses every packet is for this host.
    match packet::family(ctx) {
        Family::V4 => taken::<Ipv4, 0>(ctx, config),
        Family::V6 => taken::<V6, 0>(ctx, config),
        Family::Other => Ok(Act::NEXT),
    }
}

/// Result of [`receive`]: the packet is a signal. [`taken`] calls the function for it, because the stacks of
/// functions that call each other add up.
const SIGNAL: i32 = 1000;
/// Result of [`receive`]: the packet is to be relayed, or is a message about relays.
const RELAY: i32 = 1001;
const _: () = assert!(DropReason::from_index(SIGNAL as u32).is_none());
const _: () = assert!(DropReason::from_index(RELAY as u32).is_none());

#[inline(always)]
fn taken<O: Ip, const LINK: usize>(ctx: &TcContext, config: &Config) -> Verdict {
    let skb = ctx.as_ptr().cast();
    from_code(match receive::<O, LINK>(skb, config) {
        SIGNAL => signal::from_lan::<O, LINK>(skb, config),
        RELAY => relay::arrived::<O, LINK>(skb, config),
        code => code,
    })
}

subprogram! {
    /// `LINK` is the length of the link-layer header, which not every uplink has.
    fn receive[O: Ip, const LINK: usize](config: &Config) -> i32 = receive_packet;
    by (LINK, O::V6) => {
        (0, false) => received_l3_v4[Ipv4, 0],
        (0, true) => received_l3_v6[V6, 0],
        (_, false) => received_v4[Ipv4, ETHERNET_LEN],
        (_, true) => received_v6[V6, ETHERNET_LEN],
    }
}

#[inline(always)]
fn receive_packet<O: Ip, const LINK: usize>(skb: Skb, config: &Config) -> i32 {
    let ctx = TcContext::new(skb);
    to_code(received::<O, LINK>(&ctx, config))
}

#[inline(always)]
fn received<O: Ip, const LINK: usize>(ctx: &TcContext, config: &Config) -> Verdict {
    // Malformed packets that are not for the mesh are left to the stack.
    let Ok(outer) = O::read(ctx, LINK) else { return Ok(Act::NEXT) };
    if signal::is_control::<O>(outer.src()) {
        return Err(DropReason::ForgedSignal);
    }
    if O::is_private(config, outer.dst()) {
        let skb = ctx.as_ptr().cast();
        match outer.protocol() {
            // GSO packets in VXLAN are left to the device.
            protocol::IPIP if gso::is(ctx, config) => {
                return from_code(gso_subprogram::<O, Ipv4, LINK>(skb, config));
            }
            protocol::IPV6 if gso::is(ctx, config) => {
                return from_code(gso_subprogram::<O, V6, LINK>(skb, config));
            }
            // Nearly all packets come here, so this is inline.
            protocol::IPIP if !O::V6 => {
                return receive_steered::<O, Ipv4, LINK, false>(ctx, config, &outer, O::HEADER_LEN);
            }
            protocol::IPIP => {
                return from_code(steered_subprogram::<O, Ipv4, LINK>(skb, config, O::HEADER_LEN));
            }
            protocol::IPV6 => {
                return from_code(steered_subprogram::<O, V6, LINK>(skb, config, O::HEADER_LEN));
            }
            // With native routing, a signal from another location also arrives without an outer header.
            protocol::UDP
                if signal::is_signal(ctx, LINK, &outer)
                    && (config.flags & CONFIG_NATIVE == 0 || O::sender(outer.src()).is_some()) =>
            {
                return Ok(Act::of(SIGNAL));
            }
            protocol::UDP | protocol::FRAGMENT => match vxlan::<O, LINK>(ctx, config, &outer) {
                Family::V4 => {
                    return from_code(steered_subprogram::<O, Ipv4, LINK>(
                        skb,
                        config,
                        O::HEADER_LEN + VXLAN_INNER,
                    ));
                }
                Family::V6 => {
                    return from_code(steered_subprogram::<O, V6, LINK>(
                        skb,
                        config,
                        O::HEADER_LEN + VXLAN_INNER,
                    ));
                }
                Family::Other if config.vxlan_ifindex != 0 && is_to_vxlan::<O, LINK>(ctx, &outer) => {
                    sender_of::<O>(ctx, &outer)?;
                    cb::checked(ctx);
                    if is_for_the_device(ctx, &outer) {
                        vxlan_order::given_to_device();
                    }
                    // As for packets taken here, other programs behind this one (a host firewall) must not
                    // see what the device decapsulates.
                    return Ok(Act::STACK);
                }
                Family::Other => {}
            },
            protocol::ICMP if !O::V6 => {
                mtu::learn_v4(skb, config, LINK + outer.header_len());
            }
            protocol::ICMPV6 if O::V6 => {
                mtu::learn_v6::<LINK>(skb, config);
            }
            _ => {}
        }
    }
    if outer.protocol() == protocol::UDP && source_is_via_wireguard::<O, LINK>(ctx, config, &outer) {
        return Err(DropReason::InsideTunnel);
    }
    if masquerade::ingress::<_, true>(ctx, config, LINK, &outer, true)?.is_some() {
        return Ok(Act::NEXT);
    }
    if relay::concerns::<O, LINK>(ctx, config, &outer) {
        return Ok(Act::of(RELAY));
    }
    let taken = bare::<O, LINK>(ctx, config, &outer)?;
    if taken == Act::NEXT {
        masquerade::arrived(ctx, config, LINK, &outer);
    }
    Ok(taken)
}

/// True for a packet to WireGuard from an address that is itself reached through WireGuard. WireGuard would
/// take the source for the peer's endpoint, and encrypt what it sends there again and again.
#[inline(always)]
fn source_is_via_wireguard<O: Ip, const LINK: usize>(ctx: &TcContext, config: &Config, outer: &O) -> bool {
    is_gateway(config.flags)
        && outer.header_len() == O::HEADER_LEN
        && !outer.is_fragment()
        && destination_port::<O, LINK>(ctx) == Some(config.wireguard_port)
        && O::prefix(config, outer.src()).is_some_and(|value| value.flags & PREFIX_VIA_WIREGUARD != 0)
}

/// UDP destination port behind an outer header without options, host byte order.
#[inline(always)]
fn destination_port<O: Ip, const LINK: usize>(ctx: &TcContext) -> Option<u16> {
    ctx.load::<[u8; 2]>(LINK + O::HEADER_LEN + DESTINATION_PORT).ok().map(u16::from_be_bytes)
}

/// True for VXLAN packets that only the device decapsulates: GSO packets and fragments.
#[inline(always)]
fn is_for_the_device<O: Ip>(ctx: &TcContext, outer: &O) -> bool {
    outer.protocol() != protocol::UDP || outer.is_fragment() || packet::gso_size(ctx) != 0
}

/// The family of the packet in a VXLAN packet of ours. `Other` leaves it to the stack: other ports and VNIs,
/// options, and what is for the device, with all that would overtake it.
#[inline(always)]
fn vxlan<O: Ip, const LINK: usize>(ctx: &TcContext, config: &Config, outer: &O) -> Family {
    if outer.header_len() != O::HEADER_LEN
        || is_for_the_device(ctx, outer)
        || (config.vxlan_ifindex != 0 && vxlan_order::device_may_hold_packets())
    {
        return Family::Other;
    }
    let Ok(bytes) = ctx.load::<[u8; VXLAN_INNER]>(LINK + O::HEADER_LEN) else {
        return Family::Other;
    };
    let header = vxlan_header();
    let mut ours = [bytes[2], bytes[3]] == VXLAN_PORT.to_be_bytes();
    let mut i = 0;
    while i < VXLAN_LEN {
        ours &= bytes[UDP_LEN + i] == header[i];
        i += 1;
    }
    if !ours {
        return Family::Other;
    }
    match u16::from_be_bytes([bytes[VXLAN_INNER - 2], bytes[VXLAN_INNER - 1]]) {
        ETHERTYPE_IPV4 => Family::V4,
        ETHERTYPE_IPV6 => Family::V6,
        _ => Family::Other,
    }
}

/// Receives a packet without an outer header.
#[inline(always)]
fn bare<I: Ip, const LINK: usize>(ctx: &TcContext, config: &Config, ip: &I) -> Verdict {
    let prefix = |address| I::prefix(config, address);
    // Nearly all packets are for this host; anybody may send there.
    if config.flags & CONFIG_ENCAPSULATED != 0 && !I::is_private(config, ip.dst()) {
        forwarding::arrives_in_clear(config.flags, || prefix(ip.dst()), || prefix(ip.src()))?;
    }
    native::<I, LINK>(ctx, config, ip)
}

/// The rest of [`bare`], where nodes of the location send such packets (native routing).
#[inline(always)]
fn native<I: Ip, const LINK: usize>(ctx: &TcContext, config: &Config, ip: &I) -> Verdict {
    let source = || I::prefix(config, ip.src());
    let Some(source) = forwarding::native_source(config.flags, source) else { return Ok(Act::NEXT) };
    let is_native = |node: &&Hop| node.kind == HOP_KIND_NODE && node.tunnel == TUNNEL_NONE;
    let Some(node) = resolve_hop(source.hop).filter(is_native) else { return Ok(Act::NEXT) };
    if I::never_steered(ip.dst()) {
        return Ok(Act::NEXT);
    }
    let found = disposition_of::<I>(config, sender_at(node), ip.dst());
    let arrives = || forwarding::arrives_native(node.ifindex, || sender_at(node), packet::ifindex(ctx));
    match found {
        Some(disposition)
            if disposition.leaves_host() && ip.ttl() > 1 && fits::<I>(ctx, LINK, ip, config.kilo_mtu) =>
        {
            arrives()?;
            ip.lower_ttl(ctx, LINK)?;
            match disposition {
                Disposition::PassOn => cb::pass_on(ctx),
                _ if sender_at(node).is_some_and(|sender| sender.flags & NODE_LED != 0) => cb::led(ctx),
                _ => cb::checked_source(ctx),
            }
            if gso::is(ctx, config) {
                gso::make_room(ctx, Cut::ByDevice);
            }
            Ok(redirect(config, disposition))
        }
        Some(disposition) if forwarding::is_answered_by_tunnel(source) => {
            arrives()?;
            Ok(redirect(config, disposition.inward()))
        }
        _ => Ok(Act::NEXT),
    }
}

/// The entry of a hop's node as a sender.
#[inline(always)]
fn sender_at(node: &Hop) -> Option<&'static NodeValue> {
    let remote = &node.remote;
    if node.family == FAMILY_V6 {
        V6::sender(halves(remote))
    } else {
        Ipv4::sender([remote[0], remote[1], remote[2], remote[3]])
    }
}

subprogram! {
    fn bare_v4(config: &Config) -> i32 = take_bare_v4 as received_bare_v4
}

#[inline(always)]
fn take_bare_v4(skb: Skb, config: &Config) -> i32 {
    let ctx = TcContext::new(skb);
    let bare = |ip: Ipv4| bare::<Ipv4, ETHERNET_LEN>(&ctx, config, &ip);
    to_code(Ipv4::read(&ctx, ETHERNET_LEN).map_or(Ok(Act::NEXT), bare))
}

/// True where no packet without outer header concerns us.
#[inline(always)]
const fn has_no_bare(config: &Config) -> bool {
    config.flags & (CONFIG_NATIVE | CONFIG_ENCAPSULATED) == 0
}

/// True for most packets to this host: no pod has its address.
#[inline(always)]
fn is_to_private_v4(ctx: &TcContext, config: &Config) -> bool {
    config.flags & CONFIG_NATIVE == 0 && packet::destination_v4(ctx) == Some(packet::word(&config.private_v4))
}

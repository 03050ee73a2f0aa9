//! Steered packets from other nodes, and replies to masqueraded flows: ingress
//! of the uplinks and of the tunnel devices.

use aya_ebpf::{
    EbpfContext as _,
    bindings::{__sk_buff, BPF_F_TUNINFO_IPV6, bpf_adj_room_mode::BPF_ADJ_ROOM_MAC, bpf_tunnel_key},
    helpers::{bpf_redirect, bpf_skb_get_tunnel_key},
    programs::TcContext,
};
use kilo_common::{
    ecn,
    encap::{UDP_LEN, VXLAN_INNER, VXLAN_LEN, vxlan_header},
    maps::{
        CONFIG_LEADER, CONFIG_PLAIN, Config, FAMILY_V6, HOP_KIND_NODE, HOP_LOCAL, HOP_REMOTE, Hop,
        NODE_LEADER, NodeValue, PREFIX_INSIDE, PREFIX_ROUTE, PREFIX_SOURCE, TUNNEL_NONE, VXLAN_PORT,
        VXLAN_VNI,
    },
    packet::{ETHERNET_LEN, ETHERTYPE_IPV4, ETHERTYPE_IPV6, Ipv4, protocol},
    verdict::{Action, DropReason},
};

use crate::{
    ip::{Ip, V6, halves},
    maps::{count_action, hop},
    mark,
    masquerade::{
        self,
        standing::{self, Standing},
    },
    packet::{self, Family},
    path_mtu,
    programs::{REDIRECT_INGRESS, TC_ACT_OK, TC_ACT_UNSPEC, from_code, to_code},
    steer::fits,
    superpacket::{self, Cut, FIXED_GSO},
    transit,
};

/// Offset in a UDP header.
const DESTINATION_PORT: usize = 2;
/// `bpf_skb_adjust_room` flags (include/uapi/linux/bpf.h).
const DECAP_L3_IPV4: u64 = 128;
const DECAP_L3_IPV6: u64 = 256;

/// Where a steered packet goes on.
#[derive(PartialEq, Eq)]
enum Onward {
    /// To this node's stack, as received on the WireGuard device.
    Deliver,
    /// The same, for the answer the stack gives: time exceeded, or too big.
    Punt,
    /// Straight into the WireGuard device.
    Transit,
}

/// Ingress of an uplink; packets start with an Ethernet header.
#[inline(always)]
pub fn lan_ingress(ctx: &TcContext, config: &Config) -> Result<i32, DropReason> {
    if !packet::is_for_host(ctx) {
        return Ok(TC_ACT_UNSPEC);
    }
    // The program of the VLAN's own device gets it next, without the tag.
    if packet::is_tagged(ctx) && packet::belongs_to_vlan(ctx.as_ptr().cast()) {
        return Ok(TC_ACT_UNSPEC);
    }
    match packet::family(ctx) {
        Family::V4 if let Some(done) = transit::short(ctx, config) => done,
        Family::V4 => match packet::protocol_v4(ctx) {
            protocol::TCP | protocol::UDP => match standing::arriving(ctx, config)? {
                Standing::Done => Ok(TC_ACT_UNSPEC),
                // Nor is it the tunnels'.
                Standing::NoEntry if config.flags & CONFIG_PLAIN == 0 => Ok(TC_ACT_UNSPEC),
                Standing::NoEntry => from_code(plain_v4(ctx.as_ptr().cast(), config)),
                Standing::Unknown => from_code(received_v4::<ETHERNET_LEN>(ctx.as_ptr().cast(), config)),
            },
            _ => from_code(received_v4::<ETHERNET_LEN>(ctx.as_ptr().cast(), config)),
        },
        Family::V6 => from_code(received_v6::<ETHERNET_LEN>(ctx.as_ptr().cast(), config)),
        Family::Other => Ok(TC_ACT_UNSPEC),
    }
}

/// Ingress of an uplink without link-layer header; packets start with their IP header.
#[inline(always)]
pub fn l3_ingress(ctx: &TcContext, config: &Config) -> Result<i32, DropReason> {
    // Without link-layer address every packet is for this host.
    match packet::family(ctx) {
        Family::V4 => from_code(received_v4::<0>(ctx.as_ptr().cast(), config)),
        Family::V6 => from_code(received_v6::<0>(ctx.as_ptr().cast(), config)),
        Family::Other => Ok(TC_ACT_UNSPEC),
    }
}

/// A function of its own for the verifier, with a stack of its own; so below. `LINK` is
/// the length of the link-layer header, which not every uplink has.
#[inline(never)]
fn received_v4<const LINK: usize>(skb: *mut __sk_buff, config: &Config) -> i32 {
    let ctx = TcContext::new(skb);
    to_code(received::<Ipv4, LINK>(&ctx, config))
}

#[inline(never)]
fn received_v6<const LINK: usize>(skb: *mut __sk_buff, config: &Config) -> i32 {
    let ctx = TcContext::new(skb);
    to_code(received::<V6, LINK>(&ctx, config))
}

#[inline(always)]
fn received<O: Ip, const LINK: usize>(ctx: &TcContext, config: &Config) -> Result<i32, DropReason> {
    // Rubbish that is not for the mesh is the stack's to judge.
    let Ok(outer) = O::read(ctx, LINK) else { return Ok(TC_ACT_UNSPEC) };
    if O::is_private(config, outer.dst()) {
        let skb = ctx.as_ptr().cast();
        match outer.protocol() {
            // In VXLAN they are the device's.
            protocol::IPIP if superpacket::is(ctx, config) => {
                return from_code(superpacket_apart::<O, Ipv4, LINK>(skb, config));
            }
            protocol::IPV6 if superpacket::is(ctx, config) => {
                return from_code(superpacket_apart::<O, V6, LINK>(skb, config));
            }
            // The way of nearly all packets is inline.
            protocol::IPIP if !O::V6 => {
                return steered::<O, Ipv4, LINK, false>(ctx, config, &outer, O::HEADER_LEN);
            }
            protocol::IPIP => return from_code(steered_apart::<O, Ipv4, LINK>(skb, config, O::HEADER_LEN)),
            protocol::IPV6 => return from_code(steered_apart::<O, V6, LINK>(skb, config, O::HEADER_LEN)),
            protocol::UDP | protocol::FRAGMENT => match vxlan::<O, LINK>(ctx, &outer) {
                Family::V4 => {
                    return from_code(steered_apart::<O, Ipv4, LINK>(
                        skb,
                        config,
                        O::HEADER_LEN + VXLAN_INNER,
                    ));
                }
                Family::V6 => {
                    return from_code(steered_apart::<O, V6, LINK>(skb, config, O::HEADER_LEN + VXLAN_INNER));
                }
                Family::Other if config.vxlan_ifindex != 0 && is_to_vxlan::<O>(ctx, &outer, LINK) => {
                    sender_of::<O>(ctx, &outer)?;
                    mark::checked(ctx);
                    // The programs of others behind this one (a host firewall) see as little of
                    // what the device decapsulates as of what is taken here.
                    return Ok(TC_ACT_OK);
                }
                Family::Other => {}
            },
            protocol::ICMP if !O::V6 => path_mtu::learn_v4(skb, config, LINK + outer.header_len()),
            protocol::ICMPV6 if O::V6 => path_mtu::learn_v6(skb, config, LINK + outer.header_len()),
            _ => {}
        }
    }
    if outer.protocol() == protocol::UDP && comes_from_inside::<O, LINK>(ctx, config, &outer) {
        return Err(DropReason::InsideTunnel);
    }
    if masquerade::ingress(ctx, config, LINK, &outer, true)?.is_some() {
        return Ok(TC_ACT_UNSPEC);
    }
    let taken =
        if config.flags & CONFIG_PLAIN != 0 { plain::<O, LINK>(ctx, config, &outer)? } else { TC_ACT_UNSPEC };
    if taken == TC_ACT_UNSPEC {
        masquerade::arrived(ctx, config, LINK, &outer);
    }
    Ok(taken)
}

/// True for a packet to WireGuard from an address that packets reach through
/// WireGuard. It takes the source for the peer's endpoint, and what it sends
/// there would be encrypted again, and again.
#[inline(always)]
fn comes_from_inside<O: Ip, const LINK: usize>(ctx: &TcContext, config: &Config, outer: &O) -> bool {
    config.flags & CONFIG_LEADER != 0
        && outer.header_len() == O::HEADER_LEN
        && !outer.is_fragment()
        && destination_port::<O, LINK>(ctx) == Some(config.wireguard_port)
        && O::prefix(outer.src()).is_some_and(|value| value.flags & PREFIX_INSIDE != 0)
}

/// UDP destination port behind an outer header without options, host byte order.
#[inline(always)]
fn destination_port<O: Ip, const LINK: usize>(ctx: &TcContext) -> Option<u16> {
    ctx.load::<[u8; 2]>(LINK + O::HEADER_LEN + DESTINATION_PORT).ok().map(u16::from_be_bytes)
}

/// True for a datagram to the VXLAN device's port, or its first fragment, whatever stands between
/// the IP header at `offset` and that of UDP.
#[inline(always)]
pub fn is_to_vxlan<I: Ip>(ctx: &TcContext, ip: &I, offset: usize) -> bool {
    ip.udp(ctx, offset).and_then(|udp| ctx.load::<[u8; 2]>(udp + DESTINATION_PORT).ok())
        == Some(VXLAN_PORT.to_be_bytes())
}

/// The node that an encapsulated packet comes from: by its outer source, and by the
/// interface, because anybody on another network can write that source.
#[inline(always)]
fn sender_of<O: Ip>(ctx: &TcContext, outer: &O) -> Result<&'static NodeValue, DropReason> {
    let sender = O::sender(outer.src()).ok_or(DropReason::UnknownSender)?;
    if sender.may_arrive_by(packet::ifindex(ctx)) { Ok(sender) } else { Err(DropReason::WrongInterface) }
}

/// What a VXLAN packet of ours holds; everything else is left to the stack:
/// other ports and VNIs, superpackets and fragments (for the device), options.
#[inline(always)]
fn vxlan<O: Ip, const LINK: usize>(ctx: &TcContext, outer: &O) -> Family {
    if outer.is_fragment() || outer.header_len() != O::HEADER_LEN || packet::gso_size(ctx) != 0 {
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

/// An encapsulated packet addressed to this node; `overhead` bytes stand
/// between the link-layer header and the inner packet.
#[inline(always)]
fn steered<O: Ip, I: Ip, const LINK: usize, const SUPERPACKET: bool>(
    ctx: &TcContext,
    config: &Config,
    outer: &O,
    overhead: usize,
) -> Result<i32, DropReason> {
    let sender = sender_of::<O>(ctx, outer)?;
    if outer.is_fragment() {
        return Err(DropReason::OuterFragment);
    }
    if outer.header_len() != O::HEADER_LEN {
        return Err(DropReason::Malformed);
    }
    let is_own = |inner: I::Addr| {
        // SAFETY: one family, so one type of address.
        O::V6 == I::V6 && inner == unsafe { core::mem::transmute_copy::<O::Addr, I::Addr>(&outer.src()) }
    };
    let (onward, own) = judge::<I>(ctx, config, sender, LINK + overhead, is_own)?;
    if ecn::matters(outer.tos()) {
        from_code(take_over_mark::<I>(ctx.as_ptr().cast(), LINK + overhead, u32::from(outer.tos())))?;
    }
    let cut = decapsulate::<O, I, SUPERPACKET>(ctx, overhead)?;
    if own {
        count_action(onward.action());
        return Ok(TC_ACT_UNSPEC);
    }
    if SUPERPACKET && onward == Onward::Transit {
        superpacket::make_room(ctx, cut);
    }
    Ok(go(config, &onward))
}

#[inline(never)]
fn steered_apart<O: Ip, I: Ip, const LINK: usize>(
    skb: *mut __sk_buff,
    config: &Config,
    overhead: usize,
) -> i32 {
    let ctx = TcContext::new(skb);
    let outer = O::read(&ctx, LINK);
    to_code(outer.and_then(|outer| steered::<O, I, LINK, false>(&ctx, config, &outer, overhead)))
}

#[inline(never)]
fn superpacket_apart<O: Ip, I: Ip, const LINK: usize>(skb: *mut __sk_buff, config: &Config) -> i32 {
    let ctx = TcContext::new(skb);
    let outer = O::read(&ctx, LINK);
    to_code(outer.and_then(|outer| steered::<O, I, LINK, true>(&ctx, config, &outer, O::HEADER_LEN)))
}

/// Writes what the network between the nodes said of congestion into the packet at
/// `offset`; `outer` is the outer header's type of service.
#[inline(never)]
fn take_over_mark<I: Ip>(skb: *mut __sk_buff, offset: usize, outer: u32) -> i32 {
    let ctx = TcContext::new(skb);
    to_code(I::read(&ctx, offset).and_then(|inner| match ecn::decapsulated(outer as u8, inner.tos()) {
        None => Err(DropReason::Congestion),
        Some(tos) if tos == inner.tos() => Ok(0),
        Some(tos) => inner.set_tos(&ctx, offset, tos).map(|()| 0),
    }))
}

/// Checks the inner packet at `offset`, and counts this host as a hop if the
/// packet goes on. Also answers whether the stack gets a packet of the sending
/// host itself: those it expects on the interface that leads there
/// (`rp_filter`), and answers by it.
#[inline(always)]
fn judge<I: Ip>(
    ctx: &TcContext,
    config: &Config,
    sender: &NodeValue,
    offset: usize,
    is_own: impl FnOnce(I::Addr) -> bool,
) -> Result<(Onward, bool), DropReason> {
    let inner = I::read(ctx, offset)?;
    let known = I::is_known_source(sender, inner.src());
    if !known {
        check_source::<I>(sender, inner.src())?;
    }
    let mut onward = onward::<I>(config, inner.dst()).ok_or(DropReason::NotForUs)?;
    if onward == Onward::Transit {
        if inner.ttl() <= 1 || !fits::<I>(ctx, offset, &inner, config.kilo_mtu) {
            onward = Onward::Punt;
        } else {
            inner.lower_ttl(ctx, offset)?;
            if known && !I::never_steered(inner.dst()) && !I::never_steered(inner.src()) {
                mark::transit(ctx);
            }
        }
    }
    let own = !known && onward != Onward::Transit && is_own(inner.src());
    Ok((onward, own))
}

/// Removes the outer headers; answers who cuts the packet if it is a superpacket. One of
/// the other family also changes what the kernel takes it for: by a flag, or before
/// Linux 6.3 by a translation whose room is removed, too.
#[inline(always)]
fn decapsulate<O: Ip, I: Ip, const SUPERPACKET: bool>(
    ctx: &TcContext,
    overhead: usize,
) -> Result<Cut, DropReason> {
    let shrink =
        |by: usize, flags: u64| ctx.adjust_room(-(by as i32), BPF_ADJ_ROOM_MAC, FIXED_GSO | flags).is_ok();
    let (flag, ethertype, translated) = match (O::V6, I::V6) {
        (false, true) => (DECAP_L3_IPV6, ETHERTYPE_IPV6, overhead + V6::HEADER_LEN - Ipv4::HEADER_LEN),
        (true, false) => (DECAP_L3_IPV4, ETHERTYPE_IPV4, overhead + Ipv4::HEADER_LEN - V6::HEADER_LEN),
        _ => (0, 0, 0),
    };
    if SUPERPACKET && superpacket::decapsulate(ctx, overhead, O::V6, flag) {
        return Ok(Cut::ByDevice);
    }
    let done = shrink(overhead, flag)
        || (O::V6 != I::V6 && ctx.change_proto(ethertype.to_be(), 0).is_ok() && shrink(translated, 0));
    if done { Ok(Cut::Before) } else { Err(DropReason::Encapsulation) }
}

/// Ingress of the VXLAN device: what the fast path of `lan_ingress` left to
/// the kernel, decapsulated; packets start with the inner Ethernet header.
/// And of the IPIP device, which is for sending: `lan_ingress` leaves it nothing.
#[inline(always)]
pub fn tunnel_ingress(ctx: &TcContext, config: &Config) -> Result<i32, DropReason> {
    // By an interface without `lan_ingress`, to another address, or made by a process of this host.
    if !mark::take_checked(ctx) {
        return Err(DropReason::Unchecked);
    }
    let sender = tunnel_sender(ctx)?.ok_or(DropReason::UnknownSender)?;
    let (onward, own) = match packet::family(ctx) {
        Family::V4 => judge::<Ipv4>(ctx, config, sender, ETHERNET_LEN, |src| is_of::<Ipv4>(sender, src))?,
        Family::V6 => judge::<V6>(ctx, config, sender, ETHERNET_LEN, |src| is_of::<V6>(sender, src))?,
        Family::Other => return Err(DropReason::Malformed),
    };
    match hop(sender.hop).filter(|_| own) {
        Some(hop) => {
            count_action(onward.action());
            // SAFETY: a helper without pointers.
            Ok(unsafe { bpf_redirect(hop.ifindex, REDIRECT_INGRESS) } as i32)
        }
        None => {
            if onward == Onward::Transit && superpacket::is(ctx, config) {
                superpacket::make_room(ctx, Cut::ByDevice);
            }
            Ok(go(config, &onward))
        }
    }
}

/// True for the private address of that node.
#[inline(always)]
fn is_of<I: Ip>(sender: &NodeValue, addr: I::Addr) -> bool {
    I::sender(addr).is_some_and(|node| node.hop == sender.hop)
}

/// The node a decapsulated packet came from, by its outer source.
#[inline(always)]
fn tunnel_sender(ctx: &TcContext) -> Result<Option<&'static NodeValue>, DropReason> {
    // SAFETY: plain integers, for which zero is a value.
    let mut key: bpf_tunnel_key = unsafe { core::mem::zeroed() };
    let size = size_of::<bpf_tunnel_key>() as u32;
    // SAFETY: the context is valid, the key is large enough; so below.
    let v4 = unsafe { bpf_skb_get_tunnel_key(ctx.as_ptr().cast(), &raw mut key, size, 0) } == 0;
    let v6 = !v4
        && unsafe {
            bpf_skb_get_tunnel_key(ctx.as_ptr().cast(), &raw mut key, size, u64::from(BPF_F_TUNINFO_IPV6))
        } == 0;
    if (!v4 && !v6) || key.tunnel_id != VXLAN_VNI {
        return Err(DropReason::Malformed);
    }
    // SAFETY: the kernel filled the field of this family; the whole union is initialised.
    Ok(unsafe {
        if v4 {
            Ipv4::sender(key.__bindgen_anon_1.remote_ipv4.to_be_bytes())
        } else {
            V6::sender(packet::halves(&key.__bindgen_anon_1.remote_ipv6))
        }
    })
}

/// A packet without outer header, where nodes of the location send such.
#[inline(always)]
fn plain<I: Ip, const LINK: usize>(ctx: &TcContext, config: &Config, ip: &I) -> Result<i32, DropReason> {
    let Some(source) = I::prefix(ip.src()) else { return Ok(TC_ACT_UNSPEC) };
    if source.flags & PREFIX_SOURCE == 0 || source.hop == HOP_LOCAL {
        return Ok(TC_ACT_UNSPEC);
    }
    let from_plain_node = |hop: &&Hop| hop.kind == HOP_KIND_NODE && hop.tunnel == TUNNEL_NONE;
    let Some(node) = hop(source.hop).filter(from_plain_node) else { return Ok(TC_ACT_UNSPEC) };
    if I::never_steered(ip.dst()) {
        return Ok(TC_ACT_UNSPEC);
    }
    match onward::<I>(config, ip.dst()) {
        Some(Onward::Transit) if ip.ttl() > 1 && fits::<I>(ctx, LINK, ip, config.kilo_mtu) => {
            leads_here(ctx, node)?;
            ip.lower_ttl(ctx, LINK)?;
            if superpacket::is(ctx, config) {
                superpacket::make_room(ctx, Cut::ByDevice);
            }
            Ok(go(config, &Onward::Transit))
        }
        // Answers leave by the WireGuard device, so what they answer comes from
        // there. To private addresses beside us they leave by this interface.
        Some(onward) if source.flags & PREFIX_ROUTE != 0 => {
            leads_here(ctx, node)?;
            let onward = if onward == Onward::Transit { Onward::Punt } else { onward };
            Ok(go(config, &onward))
        }
        _ => Ok(TC_ACT_UNSPEC),
    }
}

/// That node's packets may come in by this interface, or they are not its own.
#[inline(always)]
fn leads_here(ctx: &TcContext, node: &Hop) -> Result<(), DropReason> {
    let ifindex = packet::ifindex(ctx);
    if node.ifindex == ifindex {
        return Ok(());
    }
    let remote = &node.remote;
    let sender = if node.family == FAMILY_V6 {
        V6::sender(halves(remote))
    } else {
        Ipv4::sender([remote[0], remote[1], remote[2], remote[3]])
    };
    if sender.is_some_and(|sender| sender.may_arrive_by(ifindex)) {
        Ok(())
    } else {
        Err(DropReason::WrongInterface)
    }
}

#[inline(never)]
fn plain_v4(skb: *mut __sk_buff, config: &Config) -> i32 {
    let ctx = TcContext::new(skb);
    let plain = |ip: Ipv4| plain::<Ipv4, ETHERNET_LEN>(&ctx, config, &ip);
    to_code(Ipv4::read(&ctx, ETHERNET_LEN).map_or(Ok(TC_ACT_UNSPEC), plain))
}

/// The inner source must belong to the node that sent the packet; a leader
/// also carries what comes from other locations.
#[inline(always)]
fn check_source<I: Ip>(sender: &NodeValue, src: I::Addr) -> Result<(), DropReason> {
    let owner = I::prefix(src).ok_or(DropReason::ForeignSource)?;
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
fn onward<I: Ip>(config: &Config, dst: I::Addr) -> Option<Onward> {
    let value = I::prefix(dst)?;
    match value.hop {
        HOP_LOCAL => Some(Onward::Deliver),
        HOP_REMOTE if config.flags & CONFIG_LEADER != 0 && value.flags & PREFIX_ROUTE != 0 => {
            Some(Onward::Transit)
        }
        _ => None,
    }
}

impl Onward {
    const fn action(&self) -> Action {
        match self {
            Self::Deliver => Action::Deliver,
            Self::Punt => Action::Punt,
            Self::Transit => Action::Transit,
        }
    }
}

#[inline(always)]
fn go(config: &Config, onward: &Onward) -> i32 {
    count_action(onward.action());
    let flags = if *onward == Onward::Transit { 0 } else { REDIRECT_INGRESS };
    // SAFETY: a helper without pointers.
    (unsafe { bpf_redirect(config.kilo_ifindex, flags) }) as i32
}

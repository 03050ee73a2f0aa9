//! Taking the outer header off a steered packet: who sent it, whether the inner packet may come
//! from there, and where it goes on.

use aya_ebpf::{EbpfContext as _, bindings::bpf_adj_room_mode::BPF_ADJ_ROOM_MAC, programs::TcContext};
use kilo_common::{
    drop_reasons::DropReason,
    ecn,
    encap::UDP_LEN,
    forwarding::{self, Disposition},
    maps::{Config, NODE_LED, NodeValue, VXLAN_PORT},
    packet::{ETHERNET_LEN, ETHERTYPE_IPV4, ETHERTYPE_IPV6, Ipv4},
    signal::is_vxlan_or_signal,
};

use crate::{
    cb,
    gso::{self, Cut, FIXED_GSO},
    ip::{Ip, V6},
    leader_word,
    maps::count_action,
    mtu::fits,
    packet,
    ret::{Act, Verdict, from_code, to_code},
    sender::{DESTINATION_PORT, sender_of},
    signal,
    subprogram::{Skb, subprogram},
};

/// `bpf_skb_adjust_room` flags (include/uapi/linux/bpf.h).
const DECAP_L3_IPV4: u64 = 128;
const DECAP_L3_IPV6: u64 = 256;

/// True for a datagram to the VXLAN device's port, or its first fragment, that the device or a
/// node's programs could take, whatever stands between the IP header behind `LINK` bytes and that of UDP.
#[inline(always)]
pub fn is_to_vxlan<I: Ip, const LINK: usize>(ctx: &TcContext, ip: &I) -> bool {
    let Some(udp) = ip.udp(ctx, LINK) else { return false };
    // Most have no options, and need no helper.
    let near = if udp == LINK + I::HEADER_LEN {
        packet::linear_word(ctx, LINK + I::HEADER_LEN + DESTINATION_PORT)
    } else {
        None
    };
    let port = near.or_else(|| ctx.load(udp + DESTINATION_PORT).ok());
    port == Some(VXLAN_PORT.to_be()) && may_be_ours(ctx, ip, udp)
}

/// False for what comes to the port by chance: replies to a flow to which some NAT has given this source
/// port. Of a GSO packet only the first segment could be looked at, so it always counts.
#[inline(always)]
fn may_be_ours<I: Ip>(ctx: &TcContext, ip: &I, udp: usize) -> bool {
    packet::gso_size(ctx) != 0
        || match ctx.load(udp + UDP_LEN) {
            Ok(first) => is_vxlan_or_signal(&first),
            Err(_) => ip.is_fragment(),
        }
}

/// Receives an encapsulated packet addressed to this node; `overhead` bytes stand between the link-layer
/// header and the inner packet.
#[inline(always)]
pub fn receive_steered<O: Ip, I: Ip, const LINK: usize, const GSO: bool>(
    ctx: &TcContext,
    config: &Config,
    outer: &O,
    overhead: usize,
) -> Verdict {
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
    let (disposition, own) = validate::<I>(ctx, config, sender, LINK + overhead, is_own)?;
    if ecn::matters(outer.tos()) {
        from_code(take_over_ecn::<I>(ctx.as_ptr().cast(), LINK + overhead, u32::from(outer.tos())))?;
    }
    let cut = decapsulate::<O, I, GSO>(ctx, overhead)?;
    if own {
        count_action(disposition.action());
        return Ok(Act::NEXT);
    }
    if GSO && disposition.leaves_host() {
        gso::make_room(ctx, cut);
    }
    Ok(redirect(config, disposition))
}

/// [`receive_steered`] with a stack of its own. The verifier checks it anew for each caller, because it must
/// see the bounds of `overhead`.
#[inline(never)]
pub fn steered_subprogram<O: Ip, I: Ip, const LINK: usize>(
    skb: Skb,
    config: &Config,
    overhead: usize,
) -> i32 {
    let ctx = TcContext::new(skb);
    let outer = O::read(&ctx, LINK);
    to_code(outer.and_then(|outer| receive_steered::<O, I, LINK, false>(&ctx, config, &outer, overhead)))
}

subprogram! {
    /// As [`steered_subprogram`], for GSO packets.
    pub fn gso_subprogram[O: Ip, I: Ip, const LINK: usize](config: &Config) -> i32 = take_gso;
    by (LINK, O::V6, I::V6) => {
        (0, false, false) => gso_l3_v4_v4[Ipv4, Ipv4, 0],
        (0, false, true) => gso_l3_v4_v6[Ipv4, V6, 0],
        (0, true, false) => gso_l3_v6_v4[V6, Ipv4, 0],
        (0, true, true) => gso_l3_v6_v6[V6, V6, 0],
        (_, false, false) => gso_v4_v4[Ipv4, Ipv4, ETHERNET_LEN],
        (_, false, true) => gso_v4_v6[Ipv4, V6, ETHERNET_LEN],
        (_, true, false) => gso_v6_v4[V6, Ipv4, ETHERNET_LEN],
        (_, true, true) => gso_v6_v6[V6, V6, ETHERNET_LEN],
    }
}

#[inline(always)]
fn take_gso<O: Ip, I: Ip, const LINK: usize>(skb: Skb, config: &Config) -> i32 {
    let ctx = TcContext::new(skb);
    let outer = O::read(&ctx, LINK);
    to_code(outer.and_then(|outer| receive_steered::<O, I, LINK, true>(&ctx, config, &outer, O::HEADER_LEN)))
}

subprogram! {
    /// Writes the congestion marks of the network between the nodes into the packet at `offset`; `outer` is
    /// the outer header's type of service.
    fn take_over_ecn[I: Ip](offset: usize, outer: u32) -> i32 = write_ecn;
    by I::V6 => { false => decap_ecn_v4[Ipv4], true => decap_ecn_v6[V6] }
}

#[inline(always)]
fn write_ecn<I: Ip>(skb: Skb, offset: usize, outer: u32) -> i32 {
    let ctx = TcContext::new(skb);
    let tos = I::tos_at(&ctx, offset);
    to_code(tos.and_then(|inner| match ecn::decapsulated(outer as u8, inner) {
        None => Err(DropReason::Congestion),
        Some(tos) if tos == inner => Ok(Act::STACK),
        Some(tos) => I::set_tos(&ctx, offset, tos).map(|()| Act::STACK),
    }))
}

/// Checks the inner packet at `offset`, and counts this host as a hop if the
/// packet goes on. Also returns whether the packet is the sending host's own:
/// the stack expects those on the interface that leads to that host
/// (`rp_filter`) and replies through it.
#[inline(always)]
pub fn validate<I: Ip>(
    ctx: &TcContext,
    config: &Config,
    sender: &NodeValue,
    offset: usize,
    is_own: impl FnOnce(I::Addr) -> bool,
) -> Result<(Disposition, bool), DropReason> {
    let inner = I::read(ctx, offset)?;
    if signal::is_control::<I>(inner.src()) {
        return Err(DropReason::ForgedSignal);
    }
    let known = I::is_known_source(sender, inner.src());
    let found = disposition_of::<I>(config, Some(sender), inner.dst());
    if !known {
        forwarding::check_source(sender, I::prefix(config, inner.src()), found)?;
    }
    let fits = || fits::<I>(ctx, offset, &inner, config.kilo_mtu);
    let disposition = forwarding::received(found, inner.ttl(), fits)?;
    match disposition {
        Disposition::Deliver | Disposition::Punt => {}
        Disposition::PassOn => {
            inner.lower_ttl(ctx, offset)?;
            cb::pass_on(ctx);
        }
        Disposition::Transit => {
            inner.lower_ttl(ctx, offset)?;
            if known && !I::never_steered(inner.dst()) && !I::never_steered(inner.src()) {
                cb::transit(ctx);
            } else if sender.flags & NODE_LED != 0 {
                cb::led(ctx);
            } else {
                cb::checked_source(ctx);
            }
        }
    }
    let own = !known && !disposition.leaves_host() && is_own(inner.src());
    Ok((disposition, own))
}

/// Removes the outer headers; returns who cuts the packet if it is a GSO packet. For an inner packet of the
/// other family, the kernel's idea of the protocol changes, too: by a flag, or before Linux 6.3 by a
/// translation whose room is removed as well.
#[inline(always)]
fn decapsulate<O: Ip, I: Ip, const GSO: bool>(ctx: &TcContext, overhead: usize) -> Result<Cut, DropReason> {
    let shrink =
        |by: usize, flags: u64| ctx.adjust_room(-(by as i32), BPF_ADJ_ROOM_MAC, FIXED_GSO | flags).is_ok();
    let (flag, ethertype, translated) = match (O::V6, I::V6) {
        (false, true) => (DECAP_L3_IPV6, ETHERTYPE_IPV6, overhead + V6::HEADER_LEN - Ipv4::HEADER_LEN),
        (true, false) => (DECAP_L3_IPV4, ETHERTYPE_IPV4, overhead + Ipv4::HEADER_LEN - V6::HEADER_LEN),
        _ => (0, 0, 0),
    };
    if GSO && gso::decapsulate(ctx, overhead, O::V6, flag) {
        return Ok(Cut::ByDevice);
    }
    let done = shrink(overhead, flag)
        || (O::V6 != I::V6 && ctx.change_proto(ethertype.to_be(), 0).is_ok() && shrink(translated, 0));
    if done { Ok(Cut::Before) } else { Err(DropReason::Encapsulation) }
}

/// The disposition of a packet to this address; `None` when it is not for this node.
#[inline(always)]
pub fn disposition_of<I: Ip>(
    config: &Config,
    sender: Option<&NodeValue>,
    dst: I::Addr,
) -> Option<Disposition> {
    forwarding::disposition(config.flags, I::prefix(config, dst), sender, leader_word::is_mine)
}

/// Sends the packet on, and counts it.
#[inline(always)]
pub fn redirect(config: &Config, disposition: Disposition) -> Act {
    count_action(disposition.action());
    Act::redirect(config.kilo_ifindex, !disposition.leaves_host())
}

//! Egress of uplinks. Nothing of the mesh leaves there in cleartext: a packet to a prefix that WireGuard or a
//! tunnel owns is dropped unless our programs sent it, whatever the routes say. Packets to an address to
//! which the host's WireGuard sends by an uplink, and pods' packets to one to which the host itself does, are
//! steered here and not by a route: a route by source or port needs a policy rule, and with the first rule
//! the kernel leaves the fast path of every route lookup.

use core::mem::offset_of;

use aya_ebpf::{EbpfContext as _, programs::TcContext};
use kilo_common::{
    drop_reasons::DropReason,
    forwarding,
    maps::{CONFIG_OFFERED, CONFIG_ONE_V4, CONFIG_ONE_V6, Config, PREFIX_NEVER_CLEAR},
    packet::{ETHERNET_LEN, IPV4_LEN, IPV6_LEN, Ipv4, Ipv4Header, protocol},
};
use network_types::ip::{Ipv4Hdr, Ipv6Hdr};

use crate::{
    cb,
    decap::is_to_vxlan,
    fast_path::established::{self, Established},
    ip::{Ip, V6},
    leader_word::resolve_hop,
    masquerade::{self, FlowHint},
    mtu::fits,
    packet::{self, Family},
    reflect,
    ret::{Act, Verdict, from_code, to_code},
    sender,
    subprogram::{Skb, subprogram},
    wireguard_port,
};

/// Offsets of the destination in IP headers.
const DESTINATION_V4: usize = offset_of!(Ipv4Hdr, dst_addr);
const DESTINATION_V6: usize = offset_of!(Ipv6Hdr, dst_addr);

/// Egress of an uplink; packets start with an Ethernet header.
#[inline(always)]
pub fn uplink_egress(ctx: &TcContext, config: &Config) -> Verdict {
    // The program of a VLAN's own device has already seen packets with its tag.
    if cb::is_sent(ctx) || packet::is_tagged(ctx) {
        return Ok(Act::NEXT);
    }
    if cb::take_by_device(ctx) {
        return sent_by_device::<ETHERNET_LEN>(ctx);
    }
    match packet::family(ctx) {
        Family::V4 if is_wireguards_v4(ctx, config) => Ok(Act::NEXT),
        Family::V6 if is_wireguards_v6(ctx, config) => Ok(Act::NEXT),
        Family::V4 => {
            if config.flags & CONFIG_OFFERED != 0 {
                let verdict = match Ipv4::read(ctx, ETHERNET_LEN) {
                    // `transmit` first checks whether these are forged.
                    Ok(ip) if !is_forged::<_, ETHERNET_LEN>(ctx, &ip) => {
                        guard::<_, ETHERNET_LEN>(ctx, config, &ip)?
                    }
                    _ => GO_ON,
                };
                if verdict != GO_ON {
                    return Ok(verdict);
                }
            }
            let hint = match established::leaving(ctx, config)? {
                Established::Done => {
                    cb::sent(ctx);
                    return Ok(Act::NEXT);
                }
                Established::NoEntry => FlowHint::New,
                Established::NotDue => FlowHint::NotDue,
                Established::Unknown => FlowHint::Nothing,
            };
            read_and_transmit::<Ipv4, ETHERNET_LEN>(ctx, config, hint)
        }
        Family::V6 => read_and_transmit::<V6, ETHERNET_LEN>(ctx, config, FlowHint::Nothing),
        Family::Other => Ok(Act::NEXT),
    }
}

/// Egress of an uplink without link-layer header; packets start with their IP header.
#[inline(always)]
pub fn l3_egress(ctx: &TcContext, config: &Config) -> Verdict {
    if cb::is_sent(ctx) {
        return Ok(Act::NEXT);
    }
    if cb::take_by_device(ctx) {
        return sent_by_device::<0>(ctx);
    }
    match packet::family(ctx) {
        Family::V4 => read_and_transmit::<Ipv4, 0>(ctx, config, FlowHint::Nothing),
        Family::V6 => read_and_transmit::<V6, 0>(ctx, config, FlowHint::Nothing),
        Family::Other => Ok(Act::NEXT),
    }
}

/// Decides about a packet in the outer header of one of our devices: it leaves by an interface that leads to
/// its node. `LINK` is the length of the link-layer header, here and below.
#[inline(always)]
fn sent_by_device<const LINK: usize>(ctx: &TcContext) -> Verdict {
    let node = match packet::family(ctx) {
        Family::V4 => Ipv4::sender(Ipv4::read(ctx, LINK)?.dst()),
        Family::V6 => V6::sender(V6::read(ctx, LINK)?.dst()),
        Family::Other => return Ok(Act::NEXT),
    };
    // A node that has just left the location has no interface.
    let node = node.ok_or(DropReason::NotEncrypted)?;
    forwarding::leaves_by_device(node, packet::ifindex(ctx)).map(|()| Act::NEXT)
}

#[inline(always)]
fn read_and_transmit<I: Ip, const LINK: usize>(ctx: &TcContext, config: &Config, hint: FlowHint) -> Verdict {
    match I::read(ctx, LINK) {
        Ok(ip) => transmit::<I, LINK>(ctx, config, &ip, hint),
        Err(_) => {
            unreadable::<I>(config, ctx.load(LINK + if I::V6 { DESTINATION_V6 } else { DESTINATION_V4 }).ok())
        }
    }
}

/// True for WireGuard's packets from the private address, most of what a leader sends. [`transmit`] would
/// find out, after several lookups, that they are the host's own and stay as they are. As little of them as
/// possible is read.
#[inline(always)]
fn is_wireguards_v4(ctx: &TcContext, config: &Config) -> bool {
    // A pod's packet may have got that port and address by somebody's masquerading.
    if config.flags & CONFIG_ONE_V4 == 0
        || packet::brought_by(ctx) != 0
        || ctx.data() + ETHERNET_LEN + IPV4_LEN + 2 > ctx.data_end()
    {
        return false;
    }
    let start = ctx.data() + ETHERNET_LEN;
    // SAFETY: the bounds are checked, and programs may read packets at any address.
    let (ip, port) = unsafe { (&*(start as *const Ipv4Header), &*((start + IPV4_LEN) as *const u16)) };
    ip.src == packet::word(&config.private_v4)
        && ip.protocol == protocol::UDP
        // A later fragment may begin with anything.
        && ip.is_plain()
        && *port == config.wireguard_port.to_be()
}

/// As [`is_wireguards_v4`].
#[inline(always)]
fn is_wireguards_v6(ctx: &TcContext, config: &Config) -> bool {
    const IP: usize = ETHERNET_LEN / 2;
    const PORT: usize = IP + IPV6_LEN / 2;
    // SAFETY: the field is aligned to 4 bytes.
    let private: &[u16; 8] = unsafe { &*config.private_v6.as_ptr().cast() };
    config.flags & CONFIG_ONE_V6 != 0
        && packet::brought_by(ctx) == 0
        && packet::pairs::<{ PORT + 1 }>(ctx).is_some_and(|pairs| {
            let mut same = true;
            let mut i = 0;
            while i < 8 {
                same &= pairs[IP + 4 + i] == private[i];
                i += 1;
            }
            same && pairs[PORT] == config.wireguard_port.to_be()
                && u16::from_be(pairs[IP + 3]) >> 8 == u16::from(protocol::UDP)
                && u16::from_be(pairs[IP]) >> 12 == 6
        })
}

#[inline(always)]
fn transmit<I: Ip, const LINK: usize>(ctx: &TcContext, config: &Config, ip: &I, hint: FlowHint) -> Verdict {
    if is_forged::<I, LINK>(ctx, ip) {
        return Err(DropReason::ForgedVxlan);
    }
    let verdict = guard::<I, LINK>(ctx, config, ip)?;
    if verdict != GO_ON {
        return Ok(verdict);
    }
    if hint != FlowHint::NotDue && masquerade::egress(ctx, config, LINK, ip, hint)?.is_some() {
        // An uplink below this one, as below a macvlan, would take it for the host's own, which gives way to
        // the flow that has its port.
        cb::sent(ctx);
    }
    Ok(Act::NEXT)
}

/// True for what a node of the location would take for a packet that this node or another one has steered, and
/// what none of our programs sent: VXLAN of anybody, and forged IPIP. IPIP of this host is Kilo's own agent's.
#[inline(always)]
fn is_forged<I: Ip, const LINK: usize>(ctx: &TcContext, ip: &I) -> bool {
    let is_encapsulated = match ip.protocol() {
        protocol::IPIP | protocol::IPV6 => sender::is_forged(ctx, ip),
        _ => is_to_vxlan::<I, LINK>(ctx, ip),
    };
    is_encapsulated && I::sender(ip.dst()).is_some()
}

/// Result of [`guard`]: the packet may leave as it is.
const GO_ON: Act = Act::NEXT;

/// Keeps packets of the mesh from leaving in cleartext: drops them, or steers them.
#[inline(always)]
fn guard<I: Ip, const LINK: usize>(ctx: &TcContext, config: &Config, ip: &I) -> Verdict {
    match I::prefix(config, ip.dst()) {
        Some(value) if forwarding::is_guarded(value.flags) => {
            from_code(guarded::<I, LINK>(ctx.as_ptr().cast(), config, value.hop, value.flags))
        }
        _ => Ok(GO_ON),
    }
}

subprogram! {
    fn guarded[I: Ip, const LINK: usize](config: &Config, id: u32, flags: u32) -> i32 = look_at_guarded;
    by (LINK, I::V6) => {
        (0, false) => guarded_l3_v4[Ipv4, 0],
        (0, true) => guarded_l3_v6[V6, 0],
        (_, false) => guarded_v4[Ipv4, ETHERNET_LEN],
        (_, true) => guarded_v6[V6, ETHERNET_LEN],
    }
}

#[inline(always)]
fn look_at_guarded<I: Ip, const LINK: usize>(skb: Skb, config: &Config, id: u32, flags: u32) -> i32 {
    let ctx = TcContext::new(skb);
    to_code(I::read(&ctx, LINK).and_then(|ip| decide::<I, LINK>(&ctx, config, &ip, id, flags)))
}

/// Decides about a packet whose destination's prefix has one of the guarded flags.
#[inline(always)]
fn decide<I: Ip, const LINK: usize>(
    ctx: &TcContext,
    config: &Config,
    ip: &I,
    id: u32,
    flags: u32,
) -> Verdict {
    let is_decrypted = packet::brought_by(ctx) == config.kilo_ifindex;
    let of_mesh =
        !I::is_private(config, ip.src()) && forwarding::is_of_mesh(I::prefix(config, ip.src()), is_decrypted);
    let own = !of_mesh
        && (packet::brought_by(ctx) == 0 && wireguard_port::is_own(ctx, config, ip, LINK)
            || is_neighbour_discovery::<I, LINK>(ctx, ip));
    let on_link = || I::never_steered(ip.dst()) || I::never_steered(ip.src());
    if !forwarding::guard(flags, of_mesh, own, on_link)? {
        return Ok(GO_ON);
    }
    let mtu = forwarding::beside(resolve_hop(id), config.kilo_mtu)?;
    // Only for packets of the mesh: an MTU that this host's stack learned would also hold for WireGuard's own
    // packets to that address. Those that WireGuard makes of the host's large ones are fragmented instead.
    if of_mesh && !fits::<I>(ctx, LINK, ip, mtu) {
        let skb = ctx.as_ptr().cast();
        return Ok(Act::of(if I::V6 {
            reflect::too_big_v6::<LINK>(skb, mtu)
        } else {
            reflect::too_big_v4::<LINK>(skb, mtu)
        }));
    }
    // `kilo_egress` does the rest.
    Ok(Act::transmit(config.kilo_ifindex))
}

/// True for neighbour discovery on the link (RFC 4861): no router forwards it, and it is for the other hosts
/// on this link.
#[inline(always)]
fn is_neighbour_discovery<I: Ip, const LINK: usize>(ctx: &TcContext, ip: &I) -> bool {
    I::V6
        && ip.protocol() == protocol::ICMPV6
        && ip.ttl() == 255
        && ctx.load::<u8>(LINK + ip.header_len()).is_ok_and(|kind| matches!(kind, 133..=137))
}

/// Decides about a packet to this destination whose header no program can read.
#[inline(always)]
fn unreadable<I: Ip>(config: &Config, dst: Option<I::Addr>) -> Verdict {
    match dst.and_then(|dst| I::prefix(config, dst)) {
        Some(value) if value.flags & PREFIX_NEVER_CLEAR != 0 => Err(DropReason::NotEncrypted),
        _ => Ok(Act::NEXT),
    }
}

//! Source translation on the way out, and back on the way in, for both families. Layouts and decisions are in
//! `kilo_common::nat`; this module has what needs the kernel: entries, sockets, checksums of packets that may
//! be offloaded.
//!
//! The parts pass data to each other in [`scratch::this_cpu`]: a program and all the functions it calls share
//! 512 bytes of stack.

mod address;
pub mod clock;
mod inbound;
mod parse;
pub mod port;
mod rewrite;
pub mod scratch;

use aya_ebpf::{EbpfContext as _, programs::TcContext};
use kilo_common::{
    counters::Action,
    drop_reasons::DropReason,
    maps::{
        CONFIG_MASQUERADE, Config, DEVICE_BY_DESTINATION, DEVICE_MASQUERADE, Device, MASQ_EXCLUDE,
        NAT_EGRESS, NAT_FRAGMENT_EGRESS, NAT_FRAGMENT_INGRESS, NAT_INGRESS, NAT_SEEN,
    },
    nat::{
        FRAGMENT_SECONDS,
        flow::{error_difference, layout},
        is_reserved,
    },
    packet::protocol,
};

pub use self::inbound::arrived;
use self::scratch::{Found, Work, halves, put, put_value, this_cpu};
use crate::{
    ip::{Ip, octets},
    maps::{NAT, count_action, device},
    packet,
    subprogram::{Skb, subprogram},
};

/// Result of a part: the packet keeps its own addresses.
pub const NOTHING: u32 = 0;
/// Result of a part: it is done. Greater values are indexes of drop reasons.
pub const DONE: u32 = 1;

/// Flags of [`egress_subprogram`], [`ingress_subprogram`], [`port::translation`] and [`rewrite`].
const IPV6: u32 = 1;
const OWN: u32 = 2;
/// A lookup has just shown that the flow has no entry and was not opened from outside.
const NEW: u32 = 4;
/// The destination may need another address than the interface's usual one.
const CHOOSE: u32 = 8;

/// What is known of a packet that leaves before its flow's entry is looked up.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum FlowHint {
    /// Nothing.
    Nothing,
    /// Few packets here are masqueraded: look up the tables before the entry.
    Rare,
    /// There is no entry, nor was the flow opened from outside.
    New,
    /// The tables say that it is not masqueraded.
    NotDue,
}

/// Translates the source if that is due; returns the new source. In the node's own ICMP errors, only the
/// packet inside is translated.
#[inline(always)]
pub fn egress<I: Ip>(
    ctx: &TcContext,
    config: &Config,
    offset: usize,
    ip: &I,
    hint: FlowHint,
) -> Result<Option<I::Addr>, DropReason> {
    let Some(device) = translating_device(ctx, config) else { return Ok(None) };
    let mut addr = I::masq_addr(device);
    // Already has a masquerade address: the host's own packets, and what netfilter has translated.
    let mut own = ip.src() == addr;
    // On the WireGuard device there is one address.
    if !own && hint != FlowHint::Rare && address::is_own::<I>(config, ip.src()) {
        own = true;
        addr = ip.src();
    }
    if own && is_hosts_alone(ctx, config, offset, ip, 0) {
        return Ok(None);
    }
    let Some(work) = this_cpu() else { return Ok(None) };
    let (src, dst) = (octets(I::mapped(ip.src())), octets(I::mapped(ip.dst())));
    work.key.src = src;
    work.key.dst = dst;
    // No socket shows which echo identifiers the host uses: its own echoes claim theirs as those of pods do,
    // where both may go.
    if own && work.destination() == MASQ_EXCLUDE || hint == FlowHint::Rare && !own && !work.is_due() {
        return Ok(None);
    }
    work.addr = octets(I::mapped(addr));
    let new = if hint == FlowHint::New { NEW } else { 0 };
    let choose = !own && device.flags & DEVICE_BY_DESTINATION != 0;
    let flags =
        new | if I::V6 { IPV6 } else { 0 } | if own { OWN } else { 0 } | if choose { CHOOSE } else { 0 };
    match egress_subprogram(ctx.as_ptr().cast(), config, offset as u32, flags) {
        DONE if own => Ok(None),
        DONE => {
            count_action(Action::Masquerade);
            if choose && let Some(work) = this_cpu() {
                addr = I::unmapped(&work.addr);
            }
            Ok(Some(addr))
        }
        NOTHING => Ok(None),
        reason => Err(DropReason::from_index(reason).unwrap_or(DropReason::Rewrite)),
    }
}

/// Translates the destination of a reply back; returns the new destination. `anywhere`:
/// the flow may have left by another interface, with its address. `UPLINK`: it is not the WireGuard device, whose
/// program has no stack left to tell later fragments from packets with ports.
#[inline(always)]
pub fn ingress<I: Ip, const UPLINK: bool>(
    ctx: &TcContext,
    config: &Config,
    offset: usize,
    ip: &I,
    anywhere: bool,
) -> Result<Option<I::Addr>, DropReason> {
    let Some(device) = translating_device(ctx, config) else { return Ok(None) };
    let is_ours = ip.dst() == I::masq_addr(device) || anywhere && address::is_own::<I>(config, ip.dst());
    if !is_ours || is_hosts_alone(ctx, config, offset, ip, 2) && (!UPLINK || I::V6 || has_port(ctx, offset)) {
        return Ok(None);
    }
    let Some(work) = this_cpu() else { return Ok(None) };
    work.key.src = octets(I::mapped(ip.src()));
    work.key.dst = octets(I::mapped(ip.dst()));
    match ingress_subprogram(ctx.as_ptr().cast(), offset as u32, if I::V6 { IPV6 } else { 0 }) {
        DONE => {
            let Some(work) = this_cpu() else { return Ok(None) };
            let to = I::unmapped(&work.new);
            if to != ip.dst() {
                count_action(Action::Unmasquerade);
            }
            Ok(Some(to))
        }
        NOTHING => Ok(None),
        reason => Err(DropReason::from_index(reason).unwrap_or(DropReason::Rewrite)),
    }
}

/// The interface this packet is on, if packets are translated there.
#[inline(always)]
pub fn translating_device(ctx: &TcContext, config: &Config) -> Option<&'static Device> {
    if config.flags & CONFIG_MASQUERADE == 0 {
        return None;
    }
    device(packet::ifindex(ctx)).filter(|device| device.flags & DEVICE_MASQUERADE != 0)
}

/// True for the tunnels' own packets, which are most of what the host itself sends, and whose ports no flow
/// gets. `port` is the offset of the host's port in the UDP header.
#[inline(always)]
fn is_hosts_alone<I: Ip>(ctx: &TcContext, config: &Config, offset: usize, ip: &I, port: usize) -> bool {
    match ip.protocol() {
        protocol::UDP => ctx
            .load::<[u8; 2]>(offset + ip.header_len() + port)
            .is_ok_and(|port| is_reserved(protocol::UDP, u16::from_be_bytes(port), config)),
        protocol::IPIP | protocol::IPV6 => true,
        _ => false,
    }
}

/// False for a fragment of an IPv4 packet without the transport header: what is there is data.
#[inline(always)]
fn has_port(ctx: &TcContext, offset: usize) -> bool {
    const FRAGMENT: usize = 6;
    packet::linear_word(ctx, offset + FRAGMENT).is_none_or(|fragment| u16::from_be(fragment) & 0x1fff == 0)
}

subprogram! {
    /// [`egress`] of a packet whose addresses are in `this_cpu().key`; its new address is `this_cpu().addr`.
    fn egress_subprogram(config: &Config, offset: u32, flags: u32) -> u32 = translate_egress as masquerade_egress
}

#[inline(always)]
fn translate_egress(skb: Skb, config: &Config, offset: u32, flags: u32) -> u32 {
    let own = flags & OWN != 0;
    let found = parse::packet(skb, offset, flags & IPV6, u32::from(NAT_EGRESS));
    let Some(work) = this_cpu() else { return NOTHING };
    if own && (work.fragmented() || work.addr_is_missing()) {
        // A host's packet that cannot be translated need not be; a host without an address yet sends from
        // none.
        return NOTHING;
    }
    if found != Found::Flow as u32 {
        if flags & CHOOSE != 0 {
            address::choose(skb, work);
        }
        if own || !work.is_due() {
            if found != Found::Error as u32 {
                return NOTHING;
            }
            // The node's own error about an answer to a pod: the packet that it quotes belongs to a flow.
            put(&mut work.addr, &work.key.src);
        } else if found == Found::Error as u32 && work.addr_is_missing() {
            return DropReason::NatUnsupported.index();
        }
    }
    put(&mut work.old, &work.key.src);
    put(&mut work.new, &work.addr);
    let payload = work.transport;
    match found {
        _ if found == Found::Flow as u32 => {}
        _ if found == Found::Later as u32 => {
            work.fragment_key(NAT_FRAGMENT_EGRESS);
            return match fragment(work) {
                DONE => {
                    put(&mut work.addr, &work.new);
                    rewrite::packet(skb, offset, payload, flags & IPV6)
                }
                _ if inbound::is_fragment(work) => NOTHING,
                _ => DropReason::NatFragment.index(),
            };
        }
        _ if found == Found::Error as u32 => {
            put(&mut work.outer, &work.key.src);
            let answer = rewrite_quoted(skb, payload, flags & IPV6, u32::from(NAT_INGRESS));
            let Some(work) = this_cpu() else { return NOTHING };
            if halves(&work.addr) == halves(&work.outer) {
                // It keeps its own address.
                return if answer == DONE { NOTHING } else { answer };
            }
            if answer != DONE {
                return match answer {
                    NOTHING if inbound::quotes(work) => NOTHING,
                    NOTHING => DropReason::NatUnsupported.index(),
                    answer => answer,
                };
            }
            put(&mut work.old, &work.outer);
            put(&mut work.new, &work.addr);
            return rewrite::packet(skb, offset, payload, flags & IPV6 | rewrite::ERROR);
        }
        _ if found == Found::EchoReply as u32 && inbound::answers(work) => return NOTHING,
        _ => return DropReason::NatUnsupported.index(),
    }
    if own
        && work.key.protocol != protocol::ICMP
        && work.key.protocol != protocol::ICMPV6
        && !port::is_contested(work)
    {
        return NOTHING;
    }
    let answer = port::translation(skb, config, flags & (OWN | NEW | CHOOSE));
    if answer != DONE {
        return answer;
    }
    let Some(work) = this_cpu() else { return NOTHING };
    put(&mut work.new, &work.addr);
    if work.fragmented() && !remember_fragment(work, NAT_FRAGMENT_EGRESS) {
        return DropReason::NatMapFull.index();
    }
    rewrite::packet(skb, offset, payload, flags & IPV6 | rewrite::FLOW)
}

subprogram! {
    /// [`ingress`] of a packet whose addresses are in `this_cpu().key`; its new destination is then in
    /// `this_cpu().new`.
    fn ingress_subprogram(offset: u32, flags: u32) -> u32 = translate_ingress as masquerade_ingress
}

#[inline(always)]
fn translate_ingress(skb: Skb, offset: u32, flags: u32) -> u32 {
    let found = parse::packet(skb, offset, flags & IPV6, u32::from(NAT_INGRESS));
    let Some(work) = this_cpu() else { return NOTHING };
    put(&mut work.old, &work.key.dst);
    let payload = work.transport;
    match found {
        _ if found == Found::Flow as u32 => {}
        _ if found == Found::Later as u32 => {
            work.fragment_key(NAT_FRAGMENT_INGRESS);
            // Without an entry it may be the host's own.
            return match fragment(work) {
                DONE => rewrite::packet(skb, offset, payload, flags & IPV6 | rewrite::DESTINATION),
                other => other,
            };
        }
        _ if found == Found::Error as u32 => {
            put(&mut work.outer, &work.key.dst);
            let answer = rewrite_quoted(skb, payload, flags & IPV6, u32::from(NAT_EGRESS));
            let Some(work) = this_cpu() else { return NOTHING };
            if answer != DONE || halves(&work.new) == halves(&work.outer) {
                return answer;
            }
            put(&mut work.old, &work.outer);
            return rewrite::packet(
                skb,
                offset,
                payload,
                flags & IPV6 | rewrite::ERROR | rewrite::DESTINATION,
            );
        }
        _ => return NOTHING,
    }
    if !port::touch(work) {
        return NOTHING;
    }
    if work.fragmented()
        && halves(&work.new) != halves(&work.old)
        && !remember_fragment(work, NAT_FRAGMENT_INGRESS)
    {
        return DropReason::NatMapFull.index();
    }
    rewrite::packet(skb, offset, payload, flags & IPV6 | rewrite::FLOW | rewrite::DESTINATION)
}

/// Stores the new address for later fragments of this datagram.
#[inline(always)]
fn remember_fragment(work: &mut Work, direction: u8) -> bool {
    put_value(&mut work.value, &work.new, [0; 2], [0, NAT_SEEN], clock::now());
    work.fragment_key(direction);
    NAT.insert(&work.partner, &work.value, 0).is_ok()
}

/// Looks up the new address of the first fragment of this datagram, whose key is in `work.partner`, and puts
/// it into `work.new`.
#[inline(always)]
fn fragment(work: &mut Work) -> u32 {
    // SAFETY: the value is copied at once.
    let Some(value) = (unsafe { NAT.get(&work.partner) }) else { return NOTHING };
    if clock::now().saturating_sub(value.last_seen) > FRAGMENT_SECONDS {
        return NOTHING;
    }
    put(&mut work.new, &value.addr);
    DONE
}

/// Rewrites the packet inside the ICMP error at `at`: a packet that was sent (`NAT_EGRESS`) becomes what the
/// pod sent; a reply (`NAT_INGRESS`) becomes what arrived here. `NOTHING` when it belongs to no flow;
/// otherwise `this_cpu().new` is the address it got.
#[inline(always)]
fn rewrite_quoted(skb: Skb, at: u32, v6: u32, direction: u32) -> u32 {
    let inner = at + 8;
    if parse::inner(skb, inner, v6, direction) != Found::Flow as u32 {
        if let Some(work) = this_cpu() {
            // No flow has this protocol.
            work.key.protocol = 0;
        }
        return NOTHING;
    }
    change_inner(skb, at, v6, direction)
}

subprogram! {
    /// As [`rewrite_quoted`], for a packet whose key is in `this_cpu()`.
    fn change_inner(at: u32, v6: u32, direction: u32) -> u32 = change_inner_packet as masquerade_change_inner
}

#[inline(always)]
fn change_inner_packet(skb: Skb, at: u32, v6: u32, direction: u32) -> u32 {
    let flags = inner_change(v6, direction);
    let Some(work) = this_cpu() else { return NOTHING };
    if flags == NOTHING {
        return NOTHING;
    }
    let answer = rewrite::packet(skb, at + 8, work.transport, flags);
    if answer != DONE {
        return answer;
    }
    match TcContext::new(skb).l4_csum_replace(at as usize + 2, 0, u64::from(work.difference), 0) {
        Ok(()) => DONE,
        Err(_) => DropReason::Rewrite.index(),
    }
}

/// Finds what the packet inside an error, whose key is in `this_cpu()`, is to
/// become; returns the flags of [`rewrite::packet`], or `NOTHING`.
#[inline(always)]
fn inner_change(v6: u32, direction: u32) -> u32 {
    let Some(work) = this_cpu() else { return NOTHING };
    // Nothing of the inner packet has been rewritten yet: the entry is the
    // other direction's, with its ends swapped.
    let sent = direction == u32::from(NAT_EGRESS);
    put(&mut work.partner.src, &work.key.dst);
    put(&mut work.partner.dst, &work.key.src);
    work.partner.src_port = work.key.dst_port;
    work.partner.dst_port = work.key.src_port;
    work.partner.protocol = work.key.protocol;
    work.partner.direction = if sent { NAT_INGRESS } else { NAT_EGRESS };
    work.partner.pad = [0; 2];
    // SAFETY: entries are not freed while the program runs.
    let Some(value) = (unsafe { NAT.get(&work.partner) }) else { return NOTHING };
    put(&mut work.new, &value.addr);
    work.new_port = value.port;
    if sent {
        put(&mut work.old, &work.key.src);
        work.old_port = work.key.src_port;
    } else {
        put(&mut work.old, &work.key.dst);
        work.old_port = work.key.dst_port;
    }
    let Some(layout) = layout(work.key.protocol) else { return NOTHING };
    // For TCP and SCTP only the ports are quoted for certain; a UDP checksum of zero is none.
    let sealed = match work.key.protocol {
        protocol::TCP | protocol::SCTP => false,
        protocol::UDP => work.start[6] | work.start[7] != 0,
        _ => true,
    };
    work.difference =
        error_difference(v6 != 0, &layout, sealed, work.address_difference(), work.port_difference());
    let seal = if sealed { 0 } else { rewrite::UNSEALED };
    let destination = if sent { 0 } else { rewrite::DESTINATION };
    v6 | rewrite::FLOW | rewrite::INNER | seal | destination
}

//! Flows that were opened from outside: noted where they come in, so that their answers stay as they are.
//! They have a table of their own, because strangers may fill it.

use aya_ebpf::{EbpfContext as _, programs::TcContext};
use kilo_common::{
    maps::{Config, InboundValue, NAT_EGRESS, NAT_FRAGMENT_EGRESS, NAT_SEEN},
    nat::{FRAGMENT_SECONDS, inbound},
};

use super::{
    IPV6,
    clock::now,
    parse,
    scratch::{Found, Work, put, this_cpu},
    translating_device,
};
use crate::{
    ip::{Ip, octets},
    maps::INBOUND,
    subprogram::{Skb, subprogram},
};

/// Notes the flow of a packet that arrives, if answers to it would be masqueraded. The packet must be neither
/// an answer to a masqueraded one nor steered by another node.
#[inline(always)]
pub fn arrived<I: Ip>(ctx: &TcContext, config: &Config, offset: usize, ip: &I) {
    let Some(device) = translating_device(ctx, config) else { return };
    // Packets of the host itself from there are never masqueraded.
    if ip.dst() == I::masq_addr(device) {
        return;
    }
    let Some(work) = this_cpu() else { return };
    work.key.src = octets(I::mapped(ip.dst()));
    work.key.dst = octets(I::mapped(ip.src()));
    if work.is_due() {
        note(ctx.as_ptr().cast(), offset as u32, if I::V6 { IPV6 } else { 0 });
    }
}

subprogram! {
    /// The rest of [`arrived`], once the addresses of an answer are in `this_cpu().key`.
    fn note(offset: u32, flags: u32) -> u32 = note_flow as masquerade_note
}

#[inline(always)]
fn note_flow(skb: Skb, offset: u32, flags: u32) -> u32 {
    // Parsed as if it left: an echo request opens a flow, a reply does not.
    if parse::packet(skb, offset, flags & IPV6, u32::from(NAT_EGRESS)) != Found::Flow as u32 {
        return 0;
    }
    let Some(work) = this_cpu() else { return 0 };
    (work.key.src_port, work.key.dst_port) = (work.key.dst_port, work.key.src_port);
    let entry = INBOUND.get_ptr_mut(&work.key);
    // SAFETY: entries are not freed while the program runs; so below.
    let known = entry.map(|entry| unsafe { &*entry });
    let Some(next) = inbound::arrived(work.key.protocol, known, work.tcp_flags as u8, now()) else {
        return 0;
    };
    keep(work, entry, next)
}

/// Writes the entry if it is new or has changed; always 1.
#[inline(always)]
fn keep(work: &Work, entry: Option<*mut InboundValue>, next: InboundValue) -> u32 {
    match entry {
        // SAFETY: racing writes concern time and flags only.
        Some(entry) if unsafe { *entry } != next => unsafe { *entry = next },
        Some(_) => {}
        None => drop(INBOUND.insert(&work.key, &next, 0)),
    }
    1
}

/// True when the packet in `work` answers a flow from outside; notes that it was answered.
#[inline(always)]
pub fn answers(work: &mut Work) -> bool {
    let answers = is_answer(work);
    if answers && work.fragmented() {
        remember_fragment(work);
    }
    answers
}

#[inline(always)]
fn is_answer(work: &Work) -> bool {
    let Some(entry) = INBOUND.get_ptr_mut(&work.key) else { return false };
    // SAFETY: the entry is there.
    let next = inbound::answered(work.key.protocol, unsafe { &*entry }, work.tcp_flags as u8, now());
    next.is_some_and(|next| keep(work, Some(entry), next) != 0)
}

/// True when the packet that an error quotes, whose key is in `work`, opened a flow from outside.
#[inline(always)]
pub fn quotes(work: &mut Work) -> bool {
    put(&mut work.partner.src, &work.key.dst);
    put(&mut work.partner.dst, &work.key.src);
    work.partner.src_port = work.key.dst_port;
    work.partner.dst_port = work.key.src_port;
    work.partner.protocol = work.key.protocol;
    work.partner.direction = NAT_EGRESS;
    work.partner.pad = [0; 2];
    // SAFETY: only its presence is asked.
    unsafe { INBOUND.get(&work.partner) }.is_some()
}

/// Notes that later fragments of this answer stay as they are.
#[inline(always)]
fn remember_fragment(work: &mut Work) {
    work.fragment_key(NAT_FRAGMENT_EGRESS);
    let value = InboundValue { last_seen: now(), opener_flags: 0, answer_flags: 0, flags: NAT_SEEN, pad: 0 };
    let _ = INBOUND.insert(&work.partner, &value, 0);
}

/// True for a later fragment, whose key is in `work.partner`, of such an answer.
#[inline(always)]
pub fn is_fragment(work: &Work) -> bool {
    // SAFETY: the value is read at once.
    let first = unsafe { INBOUND.get(&work.partner) };
    first.is_some_and(|first| now().saturating_sub(first.last_seen) <= FRAGMENT_SECONDS)
}

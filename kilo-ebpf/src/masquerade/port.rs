//! The entries of a flow: finding its port, and locking it.

use core::ffi::c_void;

use aya_ebpf::{
    bindings::{
        BPF_NOEXIST, bpf_sock_tuple, bpf_sock_tuple__bindgen_ty_1__bindgen_ty_1,
        bpf_sock_tuple__bindgen_ty_1__bindgen_ty_2,
    },
    helpers::{bpf_loop, bpf_sk_lookup_tcp, bpf_sk_lookup_udp, bpf_sk_release},
};
use kilo_common::{
    drop_reasons::DropReason,
    maps::{Config, NAT_SEEN, NatKey, NatValue},
    nat::{
        PORT_ATTEMPTS, candidate_port,
        flow::{is_icmp, layout},
        timeout::merge_flags,
    },
    packet::protocol,
};

use super::{
    CHOOSE, DONE, NEW, NOTHING, OWN, address,
    clock::now,
    inbound,
    scratch::{Work, halves, put, put_value, this_cpu},
};
use crate::{
    maps::NAT,
    subprogram::{Skb, subprogram},
};

/// `bpf_sk_lookup_*`: the namespace of the device.
const CURRENT_NETNS: u64 = u64::MAX;
/// `-EEXIST` of a map update.
const EEXIST: i32 = -17;

/// Notes a reply in its entry, and puts the address and port that it gets into `work`; false when there is no
/// entry.
#[inline(always)]
pub fn touch(work: &mut Work) -> bool {
    let Some(entry) = NAT.get_ptr_mut(&work.key) else { return false };
    // SAFETY: the entry is there; racing writes concern time and flags only.
    let entry = unsafe { &mut *entry };
    let first = note(entry, now(), work.tcp_flags as u8);
    put(&mut work.new, &entry.addr);
    work.new_port = entry.port;
    work.old_port = work.key.dst_port;
    if first {
        restore_egress(work);
    }
    true
}

/// Notes a packet in its entry. Writes only what changes: several CPUs may share the cache line. True for the
/// first packet in a second, with which the flow's other half is looked after.
#[inline(always)]
fn note(entry: &mut NatValue, now: u32, tcp_flags: u8) -> bool {
    let flags = merge_flags(entry.tcp_flags, tcp_flags);
    let first = entry.last_seen != now;
    if first {
        entry.last_seen = now;
    }
    if entry.flags != NAT_SEEN {
        entry.flags = NAT_SEEN;
    }
    if entry.tcp_flags != flags {
        entry.tcp_flags = flags;
    }
    first
}

/// Restores the egress half of a flow whose reply was just seen.
#[inline(always)]
fn restore_egress(work: &mut Work) {
    let Work { key, partner, new, new_port, .. } = work;
    key.write_partner(new, *new_port, partner);
    // The lookup also keeps both halves equally recent.
    // SAFETY: only its presence is asked.
    if unsafe { NAT.get(&work.partner) }.is_none() {
        put_value(&mut work.value, &work.key.dst, work.key.dst_port, [0, 0], now());
        let _ = NAT.insert(&work.partner, &work.value, u64::from(BPF_NOEXIST));
    }
}

/// True when a pod's flow has the port of the host's own packet towards the same destination, or had it when
/// this flow began: the packet is then translated like a pod's.
#[inline(always)]
pub fn is_contested(work: &mut Work) -> bool {
    // SAFETY: the value is read at once.
    if unsafe { NAT.get(&work.key) }.is_some() {
        return true;
    }
    let Work { key, partner, .. } = work;
    key.write_partner(&key.src, key.src_port, partner);
    // SAFETY: as above.
    match unsafe { NAT.get(&work.partner) } {
        Some(holder) => halves(&holder.addr) != halves(&work.key.src),
        None => false,
    }
}

subprogram! {
    /// Finds the port that the source of the flow in `this_cpu().key` gets, the one it has or a new one, and
    /// puts it into `new_port` and its address into `addr`; `NOTHING` when the flow is not to be translated.
    /// `flags`: [`OWN`] for the host's own flows, which always are; [`NEW`]; [`CHOOSE`].
    pub fn translation(config: &Config, flags: u32) -> u32 = translate as masquerade_translation
}

#[inline(always)]
fn translate(skb: Skb, config: &Config, flags: u32) -> u32 {
    let Some(work) = this_cpu() else { return DropReason::NatMapFull.index() };
    let now = now();
    work.old_port = work.key.src_port;
    put_value(&mut work.back, &work.key.src, work.key.src_port, [0, 0], now);
    if flags & NEW == 0
        && let Some(entry) = NAT.get_ptr_mut(&work.key)
    {
        // SAFETY: the entry is there; racing writes concern time and flags only.
        let entry = unsafe { &mut *entry };
        let first = note(entry, now, work.tcp_flags as u8);
        work.new_port = entry.port;
        let keeps = halves(&entry.addr) == halves(&work.addr)
            || flags & CHOOSE != 0 && address::is_of(skb, &entry.addr);
        if keeps {
            put(&mut work.addr, &entry.addr);
            // A flow that is masqueraded stays so: the tables need not be asked.
            if !first {
                return DONE;
            }
            let Work { key, partner, addr, new_port, .. } = &mut *work;
            key.write_partner(addr, *new_port, partner);
            if claim(work) == Claim::Ours {
                return DONE;
            }
        }
        // The address of the device changed, or somebody took the port after an eviction.
        let _ = NAT.remove(&work.key);
    }
    if flags & OWN == 0 && !work.is_due() {
        return NOTHING;
    }
    // An echo request answers nothing.
    if flags & (OWN | NEW) == 0 && !is_icmp(work.key.protocol) && inbound::answers(work) {
        return NOTHING;
    }
    if flags & CHOOSE != 0 {
        address::choose(skb, work);
    }
    if work.addr_is_missing() {
        return DropReason::NatUnsupported.index();
    }
    put_value(&mut work.value, &work.addr, [0; 2], [work.tcp_flags as u8, NAT_SEEN], now);
    let attempts = match layout(work.key.protocol) {
        Some(layout) if layout.port_changes => PORT_ATTEMPTS,
        _ => 1,
    };
    let mut search = Search { skb, config, start: work.key.search_start(), answer: TAKEN };
    let callback = attempt as extern "C" fn(u32, *mut c_void) -> i64 as *mut c_void;
    // SAFETY: the callback gets what it expects, which lives until the loop has ended.
    unsafe { bpf_loop(attempts, callback, (&raw mut search).cast(), 0) };
    if search.answer == TAKEN { DropReason::NatExhausted.index() } else { search.answer }
}

/// What an attempt needs to know, and its result.
struct Search<'a> {
    skb: Skb,
    config: &'a Config,
    start: u32,
    answer: u32,
}

/// Tries one port; a result other than 0 ends the loop. With `bpf_loop` the verifier goes through it once,
/// not once per attempt.
extern "C" fn attempt(index: u32, search: *mut c_void) -> i64 {
    // SAFETY: what `translation` passes.
    let search = unsafe { &mut *search.cast::<Search<'_>>() };
    search.answer = take(search.skb, search.config, index, search.start);
    i64::from(search.answer != TAKEN)
}

/// Result of [`take`]: another flow or the host has this port.
const TAKEN: u32 = 0;

/// Tries one port: [`TAKEN`], [`DONE`], or the index of a drop reason.
#[inline(always)]
fn take(skb: Skb, config: &Config, attempt: u32, start: u32) -> u32 {
    let Some(work) = this_cpu() else { return DropReason::NatMapFull.index() };
    let own = u16::from_be_bytes(work.key.src_port);
    let Some(candidate) = candidate_port(work.key.protocol, own, attempt, start, config) else {
        return TAKEN;
    };
    let port = candidate.to_be_bytes();
    work.value.port = port;
    work.new_port = port;
    let Work { key, partner, addr, .. } = &mut *work;
    key.write_partner(addr, port, partner);
    if host_uses(skb, partner) {
        return TAKEN;
    }
    // A new flow's own port is nearly always free: that saves a lookup.
    let claimed = if attempt == 0 { claim_free(work) } else { claim(work) };
    match claimed {
        Claim::Ours => {}
        Claim::Taken => return TAKEN,
        Claim::Failed => return DropReason::NatMapFull.index(),
    }
    match NAT.insert(&work.key, &work.value, u64::from(BPF_NOEXIST)) {
        Ok(()) => DONE,
        // Another CPU was faster with the same flow: its port counts.
        // SAFETY: the port is copied at once.
        Err(EEXIST) => match unsafe { NAT.get(&work.key) } {
            Some(winner) => {
                work.new_port = winner.port;
                if work.new_port != port {
                    let _ = NAT.remove(&work.partner);
                }
                DONE
            }
            None => DropReason::NatMapFull.index(),
        },
        Err(_) => DropReason::NatMapFull.index(),
    }
}

#[derive(PartialEq, Eq)]
enum Claim {
    Ours,
    Taken,
    Failed,
}

/// Writes the entry for replies, `partner`; it is the lock on the port. One
/// that is there already counts as ours when it leads back to this flow.
#[inline(always)]
fn claim(work: &Work) -> Claim {
    holder(work).unwrap_or_else(|| claim_free(work))
}

/// Who holds the entry for replies; `None` if there is none.
#[inline(always)]
fn holder(work: &Work) -> Option<Claim> {
    // SAFETY: entries are not freed while the program runs.
    let present = unsafe { NAT.get(&work.partner) }?;
    let ours = halves(&present.addr) == halves(&work.back.addr) && present.port == work.back.port;
    Some(if ours { Claim::Ours } else { Claim::Taken })
}

/// As [`claim`], where an entry is not expected.
#[inline(always)]
fn claim_free(work: &Work) -> Claim {
    match NAT.insert(&work.partner, &work.back, u64::from(BPF_NOEXIST)) {
        Ok(()) => Claim::Ours,
        Err(EEXIST) => holder(work).unwrap_or(Claim::Taken),
        Err(_) => Claim::Failed,
    }
}

/// True when a socket of this host would receive this reply.
#[inline(always)]
pub fn host_uses(skb: Skb, reply: &NatKey) -> bool {
    let (sport, dport) = (u16::from_ne_bytes(reply.src_port), u16::from_ne_bytes(reply.dst_port));
    let v4 = |addr: &[u8; 16]| u32::from_ne_bytes([addr[12], addr[13], addr[14], addr[15]]);
    // Each is written whole: to zero it before, a function would be called that writes byte by byte.
    if is_v4(reply) {
        let (saddr, daddr) = (v4(&reply.src), v4(&reply.dst));
        let tuple = bpf_sock_tuple__bindgen_ty_1__bindgen_ty_1 { saddr, daddr, sport, dport };
        has_socket(skb, reply.protocol, &tuple)
    } else {
        let (saddr, daddr) = (words(&reply.src), words(&reply.dst));
        let tuple = bpf_sock_tuple__bindgen_ty_1__bindgen_ty_2 { saddr, daddr, sport, dport };
        has_socket(skb, reply.protocol, &tuple)
    }
}

/// `tuple` is one of the two that [`bpf_sock_tuple`] may hold; the kernel knows the family by its size.
#[inline(always)]
fn has_socket<T>(skb: Skb, protocol: u8, tuple: &T) -> bool {
    let tuple = (&raw const *tuple).cast_mut().cast::<bpf_sock_tuple>();
    let size = size_of::<T>() as u32;
    // SAFETY: context and tuple are valid for that size, and a socket that is found is released.
    unsafe {
        let socket = match protocol {
            protocol::TCP => bpf_sk_lookup_tcp(skb.cast(), tuple, size, CURRENT_NETNS, 0),
            protocol::UDP => bpf_sk_lookup_udp(skb.cast(), tuple, size, CURRENT_NETNS, 0),
            _ => return false,
        };
        if socket.is_null() {
            return false;
        }
        bpf_sk_release(socket.cast());
        true
    }
}

#[inline(always)]
fn is_v4(key: &NatKey) -> bool {
    let [first, second] = halves(&key.dst);
    first == 0 && u64::from_le(second) as u32 == 0xffff_0000
}

#[inline(always)]
fn words(a: &[u8; 16]) -> [u32; 4] {
    [
        u32::from_ne_bytes([a[0], a[1], a[2], a[3]]),
        u32::from_ne_bytes([a[4], a[5], a[6], a[7]]),
        u32::from_ne_bytes([a[8], a[9], a[10], a[11]]),
        u32::from_ne_bytes([a[12], a[13], a[14], a[15]]),
    ]
}

//! Fast path for most new flows: a whole IPv4 packet from a pod to an address outside, on an interface with
//! one masquerade address, whose port is free there. It writes the same entries as `masquerade::port`, which
//! takes over where anything is in the way.

use aya_ebpf::{bindings::BPF_NOEXIST, programs::TcContext};
use kilo_common::{
    forwarding::is_guarded,
    maps::{Config, NAT_EGRESS, NAT_INGRESS, NAT_SEEN, NatValue},
    nat::is_reserved,
    packet::{ETHERNET_LEN, Ipv4, Ipv4Header},
};

use super::established::{NO_ENTRY, NOT_DUE, key};
use crate::{
    ip::{Ip as _, octets},
    maps::NAT,
    masquerade::{
        DONE,
        clock::now,
        port::host_uses,
        scratch::{copy, this_cpu},
    },
    packet::TRANSPORT,
    subprogram::{Skb, subprogram},
};

subprogram! {
    /// Writes both entries of a flow that has none and was not opened from outside, so that its packets get
    /// `addr` and keep their port: `DONE`. Else [`NOT_DUE`], or [`NO_ENTRY`]: the slow path must decide. The
    /// caller has checked that the packet has ports.
    pub fn open(config: &Config, addr: u32, tcp_flags: u32) -> u32 = open_flow as masquerade_open
}

#[inline(always)]
fn open_flow(skb: Skb, config: &Config, addr: u32, tcp_flags: u32) -> u32 {
    let ctx = TcContext::new(skb);
    let start = ctx.data();
    if addr == 0 || start + TRANSPORT + size_of::<u32>() > ctx.data_end() {
        return NO_ENTRY;
    }
    // SAFETY: the bounds are checked, and programs may read packets at any address.
    let (ip, ports) =
        unsafe { (&*((start + ETHERNET_LEN) as *const Ipv4Header), *((start + TRANSPORT) as *const u32)) };
    // Packets to the mesh do not leave like this, whatever the tables of masquerading say.
    if Ipv4::prefix(config, ip.dst.to_ne_bytes()).is_some_and(|value| is_guarded(value.flags)) {
        return NO_ENTRY;
    }
    let Some(work) = this_cpu() else { return NO_ENTRY };
    work.key = key([ip.src, ip.dst], ports, ip.protocol, NAT_EGRESS);
    if !work.is_due() {
        return NOT_DUE;
    }
    work.partner = key([ip.dst, addr], ports.rotate_left(16), ip.protocol, NAT_INGRESS);
    let port = work.key.src_port;
    if is_reserved(ip.protocol, u16::from_be_bytes(port), config) || host_uses(skb, &work.partner) {
        return NO_ENTRY;
    }
    let last_seen = now();
    work.back = NatValue { addr: copy(&work.key.src), port, tcp_flags: 0, flags: 0, last_seen };
    let addr = octets(Ipv4::mapped(addr.to_ne_bytes()));
    work.value = NatValue { addr, port, tcp_flags: tcp_flags as u8, flags: NAT_SEEN, last_seen };
    // The entry for replies is the lock on the port. The slow path then finds it held by this very flow.
    let is_new = NAT.insert(&work.partner, &work.back, u64::from(BPF_NOEXIST)).is_ok()
        && NAT.insert(&work.key, &work.value, u64::from(BPF_NOEXIST)).is_ok();
    if is_new { DONE } else { NO_ENTRY }
}

//! Vouching for flows of pods: `kilo_egress` does when the stack has left a noted packet as it is.

use aya_ebpf::{EbpfContext as _, bindings::__sk_buff, programs::TcContext};
use kilo_common::{
    maps::{Config, HOP_KIND_NODE, Hop},
    packet::{IPV4_LEN, Ipv4Header},
    pod_flow::PodFlowKey,
};

use crate::{
    maps::POD_FLOW,
    masquerade::clock,
    subprogram::{Skb, subprogram},
};

/// Bytes that are read: a whole header without options, and the ports.
const READ: usize = IPV4_LEN + size_of::<u32>();

/// Vouches for the flow of a packet with this note, which is about to leave by that hop.
#[inline(always)]
pub fn vouch(ctx: &TcContext, config: &Config, note: u16, hop: &Hop) {
    // Larger packets must pass the stack, which knows how to answer them.
    let mtu = if hop.kind == HOP_KIND_NODE && hop.mtu != 0 { hop.mtu } else { config.kilo_mtu };
    vouch_up_to(ctx.as_ptr().cast(), u32::from(note), mtu);
}

subprogram! {
    /// A subprogram, because its stack would add to that of `kilo_egress`. The result means nothing.
    fn vouch_up_to(note: u32, mtu: u32) -> u32 = vouch_for as pod_flow_vouch
}

#[inline(always)]
fn vouch_for(skb: Skb, note: u32, mtu: u32) -> u32 {
    let ctx = TcContext::new(skb);
    let start = ctx.data();
    // A mark may stand for a route, or for what others do with the packet.
    if start + READ > ctx.data_end() || mark(skb) != 0 {
        return 0;
    }
    // SAFETY: the bounds are checked, and programs may read packets at any address.
    let (header, ports) = unsafe { (&*(start as *const Ipv4Header), *((start + IPV4_LEN) as *const u32)) };
    let key = PodFlowKey::of(header, ports);
    if header.version_len != 0x45 || u32::from(key.note()) != note {
        return 0;
    }
    let Some(flow) = POD_FLOW.get_ptr_mut(&key) else { return 0 };
    // SAFETY: entries are not freed while the program runs, and words are read and written at once.
    unsafe {
        if (*flow).is_one_hop_on(header.ttl) {
            (&raw mut (*flow).mtu).write_volatile(mtu);
            (&raw mut (*flow).vouched).write_volatile(clock::now());
        }
    }
    0
}

#[inline(always)]
fn mark(skb: *const __sk_buff) -> u32 {
    // SAFETY: callers pass the context, which is valid for the whole program.
    unsafe { (*skb).mark }
}

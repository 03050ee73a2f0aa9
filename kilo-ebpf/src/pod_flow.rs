//! Vouching for flows of pods: `kilo_egress` does when the stack has left a tagged packet as it is.

use aya_ebpf::{EbpfContext as _, bindings::BPF_EXIST, programs::TcContext};
use kilo_common::{
    maps::{Config, HOP_KIND_NODE, Hop},
    packet::{IPV4_LEN, Ipv4Header, protocol},
    pod_flow::{PodFlow, PodFlowKey, TCP_STATE},
};
use network_types::{tcp::TcpHdr, udp::UdpHdr};

use crate::{
    maps::POD_FLOW,
    masquerade::clock,
    packet,
    subprogram::{Skb, subprogram},
};

/// What is read of a packet's transport header.
pub struct Transport {
    /// Source and destination port.
    pub ports: u32,
    /// What [`PodFlow::tag`] takes of it: of UDP, length and checksum; of TCP, sequence and acknowledgement
    /// numbers and checksum.
    pub sample: [u32; 3],
    /// Its length in bytes.
    pub len: u32,
}

impl Transport {
    /// Of a whole packet whose IPv4 header without options is at `start`; `None` when the stack must have it.
    #[inline(always)]
    pub fn read(ctx: &TcContext, start: usize, header: &Ipv4Header) -> Option<Self> {
        let at = start + IPV4_LEN;
        // SAFETY: the bounds are checked before each use, and programs may read packets at any address.
        let word = |offset: usize| unsafe { *((at + offset) as *const u32) };
        match header.protocol {
            protocol::UDP if at + UdpHdr::LEN <= ctx.data_end() => {
                Some(Self { ports: word(0), sample: [word(4), 0, 0], len: UdpHdr::LEN as u32 })
            }
            protocol::TCP if at + TcpHdr::LEN <= ctx.data_end() => {
                let [offset, flags, ..] = word(12).to_ne_bytes();
                // In words of four bytes, in the upper half.
                let len = u32::from(offset >> 4) * 4;
                let sample = [word(4), word(8), word(16)];
                (flags & TCP_STATE == 0).then_some(Self { ports: word(0), sample, len })
            }
            _ => None,
        }
    }
}

/// Vouches for the flow of a packet with this tag, which is about to leave by that hop.
#[inline(always)]
pub fn vouch(ctx: &TcContext, config: &Config, tag: u16, hop: &Hop) {
    // Larger packets must pass the stack, which knows how to answer them.
    let is_smaller = hop.kind == HOP_KIND_NODE && hop.mtu != 0 && hop.mtu < config.kilo_mtu;
    let mtu = if is_smaller { hop.mtu } else { config.kilo_mtu };
    vouch_subprogram(ctx.as_ptr().cast(), u32::from(tag), mtu);
}

subprogram! {
    /// A subprogram, because its stack would add to that of `kilo_egress`. The result means nothing.
    fn vouch_subprogram(tag: u32, mtu: u32) -> u32 = write_vouched as pod_flow_vouch
}

#[inline(always)]
fn write_vouched(skb: Skb, tag: u32, mtu: u32) -> u32 {
    // A mark may stand for a route, or for what others do with the packet.
    let is_vouched = packet::mark(&TcContext::new(skb)) == 0 && vouched(skb, tag, mtu).is_some();
    u32::from(is_vouched)
}

#[inline(always)]
fn vouched(skb: Skb, tag: u32, mtu: u32) -> Option<()> {
    let ctx = TcContext::new(skb);
    let start = ctx.data();
    if start + IPV4_LEN > ctx.data_end() {
        return None;
    }
    // SAFETY: the bounds are checked, and programs may read packets at any address.
    let header = unsafe { &*(start as *const Ipv4Header) };
    if !header.is_plain() {
        return None;
    }
    let transport = Transport::read(&ctx, start, header)?;
    let key = PodFlowKey::of(header, transport.ports);
    // By value: the kernel gives the memory of an entry to another flow without waiting for programs.
    // SAFETY: entries are not freed while the program runs.
    let flow = unsafe { *POD_FLOW.get(&key)? };
    if u32::from(flow.tag(header, transport.sample)) != tag || !flow.is_one_hop_on(header.ttl) {
        return None;
    }
    let (vouched, priority) = (clock::now(), packet::priority(&ctx));
    POD_FLOW.insert(&key, &PodFlow { vouched, mtu, priority, ..flow }, u64::from(BPF_EXIST)).ok()
}

//! Ingress of pods' interfaces: whole IPv4 packets of TCP and UDP that `kilo_egress` has vouched for in this
//! second go straight to the WireGuard device. Of other flows towards other nodes each packet gets a tag, by
//! which `kilo_egress` recognises it. Everything else is the stack's.

use aya_ebpf::{EbpfContext as _, helpers::bpf_get_prandom_u32, programs::TcContext};
use kilo_common::{
    counters::Action,
    forwarding::routed,
    maps::{CONFIG_TCP_BYPASSES, Config, HOP_LOCAL, PREFIX_PODS_STEERED},
    packet::{ETHERNET_LEN, IPV4_LEN, Ipv4, Ipv4Header, never_steered, protocol},
    pod_flow::{PodFlow, PodFlowKey},
};

use crate::{
    cb,
    ip::Ip as _,
    maps::{POD_FLOW, count_action},
    masquerade::clock,
    packet::{self, Family, UDP_END},
    pod_flow::Transport,
    ret::{Act, Verdict},
    subprogram::{Skb, subprogram},
};

/// Ingress of a pod's interface; packets start with an Ethernet header.
#[inline(always)]
#[expect(clippy::unnecessary_wraps, reason = "as every program")]
pub fn pod_ingress(ctx: &TcContext, config: &Config) -> Verdict {
    // The kernel keeps what a pod has written there.
    cb::set_flow_tag(ctx, 0);
    Ok(bypass(ctx, config).unwrap_or(Act::NEXT))
}

/// `None`: the packet is the stack's.
#[inline(always)]
fn bypass(ctx: &TcContext, config: &Config) -> Option<Act> {
    if !matches!(packet::family(ctx), Family::V4) || packet::is_tagged(ctx) {
        return None;
    }
    let Frame { gateway, header, transport } = Frame::read(ctx)?;
    let is_left_to_the_stack = header.protocol == protocol::TCP && config.flags & CONFIG_TCP_BYPASSES == 0;
    // The stack would cut off what is behind the packet.
    let is_whole = u32::from(u16::from_be(header.total_len)) + ETHERNET_LEN as u32 == ctx.len();
    if is_left_to_the_stack || !is_whole || !is_for_another_node(config, header) {
        return None;
    }
    let key = PodFlowKey::of(header, transport.ports);
    let ifindex = packet::ifindex(ctx);
    // SAFETY: entries are not freed while the program runs.
    let known = unsafe { POD_FLOW.get(&key) };
    if let Some(flow) = known
        && flow.is_vouched(ifindex, gateway, header.ttl, clock::glance())
        && flow.fits(ctx.len() - ETHERNET_LEN as u32, packet::gso_size(ctx), IPV4_LEN as u32 + transport.len)
    {
        header.lower_ttl()?;
        packet::set_priority(ctx, flow.priority);
        // A pod with programs of its own could have left a note of ours.
        cb::forget(ctx);
        count_action(Action::Bypass);
        return Some(Act::transmit(config.kilo_ifindex));
    }
    match known.filter(|flow| flow.is_of(ifindex, gateway, header.ttl)) {
        Some(flow) => cb::set_flow_tag(ctx, flow.tag(header, transport.sample)),
        None => cb::set_flow_tag(ctx, enter(ctx.as_ptr().cast(), ifindex) as u16),
    }
    None
}

/// What is read of a frame.
struct Frame<'a> {
    /// Link-layer destination.
    gateway: [u16; 3],
    /// A header without options, of a packet that is not a fragment.
    header: &'a mut Ipv4Header,
    transport: Transport,
}

impl Frame<'_> {
    #[inline(always)]
    fn read(ctx: &TcContext) -> Option<Self> {
        let start = ctx.data();
        if start + UDP_END > ctx.data_end() {
            return None;
        }
        // SAFETY: the bounds are checked, and programs may read packets at any address; the kernel makes them
        // writable before the program runs.
        let (gateway, header) =
            unsafe { (*(start as *const [u16; 3]), &mut *((start + ETHERNET_LEN) as *mut Ipv4Header)) };
        if !header.is_plain() {
            return None;
        }
        let transport = Transport::read(ctx, start + ETHERNET_LEN, header)?;
        Some(Self { gateway, header, transport })
    }
}

/// Whether the destination is another node, or behind one.
#[inline(always)]
fn is_for_another_node(config: &Config, header: &Ipv4Header) -> bool {
    let (src, dst) = (header.src.to_ne_bytes(), header.dst.to_ne_bytes());
    !never_steered(src)
        && !never_steered(dst)
        && Ipv4::prefix(config, dst).is_some_and(|value| {
            value.hop != HOP_LOCAL
                && (routed(Some(value)).is_some() || value.flags & PREFIX_PODS_STEERED != 0)
        })
}

subprogram! {
    /// Writes a flow's entry anew, without anybody who vouches for it; returns the packet's tag, or zero.
    fn enter(ifindex: u32) -> u32 = write_entry as pod_ingress_enter
}

#[inline(always)]
fn write_entry(skb: Skb, ifindex: u32) -> u32 {
    let ctx = TcContext::new(skb);
    let Some(Frame { gateway, header, transport }) = Frame::read(&ctx) else { return 0 };
    // SAFETY: a helper without arguments.
    let secret = unsafe { bpf_get_prandom_u32() } as u16;
    let ttl = header.ttl;
    let flow = PodFlow { vouched: 0, ifindex, mtu: 0, priority: 0, gateway, secret, ttl, pad: [0; 3] };
    // A full map evicts another flow; without an entry this one stays with the stack.
    match POD_FLOW.insert(&PodFlowKey::of(header, transport.ports), &flow, 0) {
        Ok(()) => u32::from(flow.tag(header, transport.sample)),
        Err(_) => 0,
    }
}

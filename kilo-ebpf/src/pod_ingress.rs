//! Ingress of pods' interfaces: whole IPv4 packets of TCP and UDP that `kilo_egress` has vouched for in this
//! second go straight to the WireGuard device; of other flows towards other nodes, each packet is noted, so
//! that it may vouch for its flow. Everything else is the stack's.

use core::mem::offset_of;

use aya_ebpf::{EbpfContext as _, programs::TcContext};
use kilo_common::{
    counters::Action,
    forwarding::routed,
    maps::{CONFIG_TCP_BYPASSES, Config, HOP_LOCAL, PREFIX_PODS_STEERED},
    packet::{ETHERNET_LEN, IPV4_LEN, Ipv4, Ipv4Header, never_steered, protocol},
    pod_flow::{PodFlow, PodFlowKey, TCP_STATE},
};
use network_types::{tcp::TcpHdr, udp::UdpHdr};

use crate::{
    cb,
    ip::Ip as _,
    maps::{POD_FLOW, count_action},
    masquerade::clock,
    packet::{self, Family},
    ret::{Act, Verdict},
    subprogram::{Skb, subprogram},
};

/// Offset of the transport header, the end of UDP's, and the offset of TCP's flags.
const TRANSPORT: usize = ETHERNET_LEN + IPV4_LEN;
const UDP: usize = TRANSPORT + UdpHdr::LEN;
const TCP_FLAGS: usize = TRANSPORT + offset_of!(TcpHdr, _bitfield_1) + 1;
/// "More fragments" and the offset (RFC 791), as they lie in memory.
const FRAGMENT: u16 = 0x3fff_u16.to_be();

/// Ingress of a pod's interface; packets start with an Ethernet header.
#[inline(always)]
#[expect(clippy::unnecessary_wraps, reason = "as every program")]
pub fn pod_ingress(ctx: &TcContext, config: &Config) -> Verdict {
    Ok(straight_on(ctx, config).unwrap_or(Act::NEXT))
}

/// `None`: the packet is the stack's.
#[inline(always)]
fn straight_on(ctx: &TcContext, config: &Config) -> Option<Act> {
    let start = ctx.data();
    if !matches!(packet::family(ctx), Family::V4) || packet::is_tagged(ctx) || start + UDP > ctx.data_end() {
        return None;
    }
    // SAFETY: the bounds are checked, and programs may read packets at any address; the kernel makes them
    // writable before the program runs.
    let (gateway, header, ports) = unsafe {
        (
            *(start as *const [u16; 3]),
            &mut *((start + ETHERNET_LEN) as *mut Ipv4Header),
            *((start + TRANSPORT) as *const u32),
        )
    };
    let len = u32::from(u16::from_be(header.total_len)).wrapping_add(ETHERNET_LEN as u32);
    if header.version_len != 0x45 || header.fragment & FRAGMENT != 0 || len < UDP as u32 || len > ctx.len() {
        return None;
    }
    let transport_len = match header.protocol {
        protocol::UDP => UdpHdr::LEN as u32,
        protocol::TCP if config.flags & CONFIG_TCP_BYPASSES != 0 && start + TCP_FLAGS < ctx.data_end() => {
            // SAFETY: the bounds are checked, and programs may read packets at any address.
            let [offset, flags] = unsafe { *((start + TCP_FLAGS - 1) as *const [u8; 2]) };
            if flags & TCP_STATE != 0 {
                return None;
            }
            // In words of four bytes, in the upper half.
            u32::from(offset >> 4) * 4
        }
        _ => return None,
    };
    if !leads_elsewhere(config, header) {
        return None;
    }
    let key = PodFlowKey::of(header, ports);
    let ifindex = packet::ifindex(ctx);
    // SAFETY: entries are not freed while the program runs.
    let known = unsafe { POD_FLOW.get(&key) };
    if let Some(flow) = known
        && flow.is_vouched(ifindex, gateway, clock::glance())
        && flow.carries(
            ctx.len() - ETHERNET_LEN as u32,
            packet::gso_size(ctx),
            IPV4_LEN as u32 + transport_len,
        )
    {
        header.lower_ttl()?;
        // A pod with programs of its own could have left a note of ours.
        cb::forget(ctx);
        count_action(Action::HostRoute);
        return Some(Act::transmit(config.kilo_ifindex));
    }
    cb::asks(ctx, key.note());
    if !known.is_some_and(|flow| flow.is_from(ifindex, gateway) && flow.ttl == header.ttl) {
        note(ctx.as_ptr().cast(), u32::from(header.ttl));
    }
    None
}

/// Whether the destination is another node's, or behind one.
#[inline(always)]
fn leads_elsewhere(config: &Config, header: &Ipv4Header) -> bool {
    let (src, dst) = (header.src.to_ne_bytes(), header.dst.to_ne_bytes());
    !never_steered(src)
        && !never_steered(dst)
        && Ipv4::prefix(config, dst).is_some_and(|value| {
            value.hop != HOP_LOCAL
                && (routed(Some(value)).is_some() || value.flags & PREFIX_PODS_STEERED != 0)
        })
}

subprogram! {
    /// Writes a flow's entry anew, without anybody who vouches for it. The result means nothing.
    fn note(ttl: u32) -> u32 = write_note as pod_ingress_note
}

#[inline(always)]
fn write_note(skb: Skb, ttl: u32) -> u32 {
    let ctx = TcContext::new(skb);
    let start = ctx.data();
    if start + UDP > ctx.data_end() {
        return 0;
    }
    // SAFETY: the bounds are checked, and programs may read packets at any address.
    let (gateway, header, ports) = unsafe {
        (
            *(start as *const [u16; 3]),
            &*((start + ETHERNET_LEN) as *const Ipv4Header),
            *((start + TRANSPORT) as *const u32),
        )
    };
    let (ifindex, ttl) = (packet::ifindex(&ctx), ttl as u8);
    let flow = PodFlow { vouched: 0, ifindex, mtu: 0, gateway, ttl, pad: 0 };
    // A full map evicts another flow; without an entry this one stays with the stack.
    let _ = POD_FLOW.insert(&PodFlowKey::of(header, ports), &flow, 0);
    0
}

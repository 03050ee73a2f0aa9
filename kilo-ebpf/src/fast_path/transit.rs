//! Transit fast path, for what a leader carries most: whole IPv4 packets in IPv4 from
//! a prefix of another node of the location to another location. What it does is
//! what `lan_ingress` does, with fewer instructions; all others go through there.

use aya_ebpf::{bindings::bpf_adj_room_mode::BPF_ADJ_ROOM_MAC, programs::TcContext};
use kilo_common::{
    counters::{Action, DropReason},
    forwarding::{Disposition, disposition, is_gateway},
    maps::{Config, PREFIX_KNOWN_SENDER},
    packet::{ETHERNET_LEN, IPV4_LEN, Ipv4, Ipv4Header, never_steered, protocol},
};

use crate::{
    cb,
    gso::FIXED_GSO,
    ip::{Ip as _, direct},
    lead,
    maps::{count_action, hop},
    packet,
    ret::{Act, Verdict},
};

const INNER: u32 = (ETHERNET_LEN + IPV4_LEN) as u32;

/// Version 4, and no options.
const PLAIN: u8 = 0x45;
/// That, and the bit of the type of service with which an outer header can change the
/// inner one's ([`kilo_common::ecn::matters`]), as they lie in memory.
const PLAIN_WITHOUT_MARK: u16 = u16::from_ne_bytes([PLAIN, 0]);
const PLAIN_AND_MARK: u16 = u16::from_ne_bytes([0xff, 1]);

/// Ingress of an uplink; `None`: nothing is done, and `lan_ingress` must tell.
#[inline(always)]
pub fn forward(ctx: &TcContext, config: &Config) -> Option<Verdict> {
    if !is_gateway(config.flags) || ctx.data() + ETHERNET_LEN + 2 * IPV4_LEN > ctx.data_end() {
        return None;
    }
    // SAFETY: the bounds are checked, and programs may read packets at any address; the
    // kernel makes them writable before the program runs.
    let [outer, inner] = unsafe { &mut *((ctx.data() + ETHERNET_LEN) as *mut [Ipv4Header; 2]) };
    if outer.protocol != protocol::IPIP
        || version_len_and_tos(outer) & PLAIN_AND_MARK != PLAIN_WITHOUT_MARK
        || outer.dst != packet::word(&config.private_v4)
        || outer.fragment & 0x3fff_u16.to_be() != 0
        || inner.version_len != PLAIN
    {
        return None;
    }
    let len = ctx.len().wrapping_sub(INNER);
    let inner_len = u32::from(u16::from_be(inner.total_len));
    // Shorter than its own header, too.
    if u32::from(u16::from_be(outer.total_len)).wrapping_sub(IPV4_LEN as u32) > len
        || inner_len > len
        || inner_len < IPV4_LEN as u32
        || len > config.kilo_mtu
    {
        return None;
    }
    let (src, dst) = (inner.src.to_ne_bytes(), inner.dst.to_ne_bytes());
    if never_steered(src) || never_steered(dst) {
        return None;
    }
    // No entry is as much as one that leads nowhere.
    let destination = Ipv4::prefix(config, dst).unwrap_or_default();
    let goes_on = |sender| {
        disposition(config.flags, Some(destination), sender, lead::is_mine) == Some(Disposition::Transit)
    };
    // Where this gateway's own word says so, it goes to WireGuard, whichever node sends it.
    if !(goes_on(None) && is_from_its_node(ctx, config, outer, src)) {
        let sender = Ipv4::sender(outer.src.to_ne_bytes())?;
        if !sender.may_send_from(src) || !sender.may_arrive_by(packet::ifindex(ctx)) || !goes_on(Some(sender))
        {
            return None;
        }
    }
    inner.lower_ttl()?;
    cb::transit(ctx);
    if ctx.adjust_room(-(IPV4_LEN as i32), BPF_ADJ_ROOM_MAC, FIXED_GSO).is_err() {
        return Some(Err(DropReason::Encapsulation));
    }
    count_action(Action::Transit);
    Some(Ok(Act::transmit(config.kilo_ifindex)))
}

/// True for a packet from the node that its inner source belongs to, by the interface that leads there,
/// as far as that is known without a look at senders.
#[inline(always)]
fn is_from_its_node(ctx: &TcContext, config: &Config, outer: &Ipv4Header, src: [u8; 4]) -> bool {
    direct(config, src)
        .filter(|owner| owner.flags & PREFIX_KNOWN_SENDER != 0)
        .and_then(|owner| hop(owner.hop))
        .is_some_and(|hop| {
            // SAFETY: the field is aligned to 4 bytes, and has 16.
            let remote: u32 = unsafe { *hop.remote.as_ptr().cast() };
            remote == outer.src && hop.ifindex == packet::ifindex(ctx)
        })
}

/// The first two bytes, read at once.
#[inline(always)]
fn version_len_and_tos(header: &Ipv4Header) -> u16 {
    // SAFETY: programs may read packets at any address.
    unsafe { *(&raw const *header).cast() }
}

//! Transit fast path, for what a leader carries most: whole IPv4 packets in IPv4 from
//! a prefix of another node of the location to another location. What it does is
//! what `lan_ingress` does, with fewer instructions; all others go through there.

use aya_ebpf::{bindings::bpf_adj_room_mode::BPF_ADJ_ROOM_MAC, programs::TcContext};
use kilo_common::{
    counters::{Action, DropReason},
    forwarding::{Disposition, disposition, is_gateway},
    maps::Config,
    packet::{ETHERNET_LEN, IPV4_LEN, Ipv4, Ipv4Header, never_steered, protocol},
};

use crate::{
    cb,
    gso::FIXED_GSO,
    ip::Ip as _,
    lead,
    maps::count_action,
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
    let sender = Ipv4::sender(outer.src.to_ne_bytes())?;
    if !sender.may_send_from(src) || !sender.may_arrive_by(packet::ifindex(ctx)) {
        return None;
    }
    if disposition(config.flags, Ipv4::prefix(dst), Some(sender), lead::is_mine) != Some(Disposition::Transit)
    {
        return None;
    }
    inner.lower_ttl()?;
    cb::transit(ctx);
    if ctx.adjust_room(-(IPV4_LEN as i32), BPF_ADJ_ROOM_MAC, FIXED_GSO).is_err() {
        return Some(Err(DropReason::Encapsulation));
    }
    count_action(Action::Transit);
    Some(Ok(Act::transmit(config.kilo_ifindex)))
}

/// The first two bytes, read at once.
#[inline(always)]
fn version_len_and_tos(header: &Ipv4Header) -> u16 {
    // SAFETY: programs may read packets at any address.
    unsafe { *(&raw const *header).cast() }
}

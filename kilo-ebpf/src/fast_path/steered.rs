//! Fast path for most steered packets: whole IPv4 packets in IPv4 from another node of the location, for
//! another location (on a leader) or for this node's own pods. It does what `lan_ingress` does, with fewer
//! instructions; all other packets go through there.

use aya_ebpf::{bindings::bpf_adj_room_mode::BPF_ADJ_ROOM_MAC, programs::TcContext};
use kilo_common::{
    counters::Action,
    drop_reasons::DropReason,
    forwarding::{Disposition, check_source, disposition},
    maps::{
        CONFIG_OFFERED, CONFIG_SEVERAL_V4, Config, NodeValue, PREFIX_KNOWN_SENDER, PREFIX_NOT_TRANSLATED,
    },
    packet::{ETHERNET_LEN, IPV4_LEN, Ipv4, Ipv4Header, never_steered, protocol},
};

use crate::{
    cb,
    gso::FIXED_GSO,
    ip::{Ip as _, direct},
    leader_word,
    maps::{count_action, hop},
    packet,
    ret::{Act, Verdict},
    signal,
};

const INNER: u32 = (ETHERNET_LEN + IPV4_LEN) as u32;

/// Version 4, and no options.
const PLAIN: u8 = 0x45;
/// [`PLAIN`], and the bit of the type of service with which an outer header can change the inner one
/// ([`kilo_common::ecn::matters`]): wanted value and mask, as they lie in memory.
const PLAIN_WITHOUT_MARK: u16 = u16::from_ne_bytes([PLAIN, 0]);
const PLAIN_AND_MARK: u16 = u16::from_ne_bytes([0xff, 1]);

/// Ingress of an uplink; `None`: nothing is done, and `lan_ingress` must decide.
#[inline(always)]
pub fn take(ctx: &TcContext, config: &Config) -> Option<Verdict> {
    if ctx.data() + ETHERNET_LEN + 2 * IPV4_LEN > ctx.data_end() {
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
    // No entry means the same as one that leads nowhere.
    let destination = Ipv4::prefix(config, dst).unwrap_or_default();
    let goes = |sender| disposition(config.flags, Some(destination), sender, leader_word::is_mine);
    // A disposition by this node's own tables and word holds whichever node sent the packet.
    let mut found = goes(None);
    let is_going = matches!(found, Some(Disposition::Deliver | Disposition::Transit));
    if !(is_going && is_from_its_node(ctx, config, outer, src)) {
        let sender = Ipv4::sender(outer.src.to_ne_bytes())?;
        found = goes(Some(sender));
        if !sender.may_arrive_by(packet::ifindex(ctx)) || !may_send(config, sender, src, found?) {
            return None;
        }
    }
    let (action, received) = match found? {
        Disposition::Transit => {
            inner.lower_ttl()?;
            cb::transit(ctx);
            (Action::Transit, false)
        }
        // The stack expects packets of the sending node itself on the interface that leads there.
        Disposition::Deliver if inner.src == outer.src => return None,
        Disposition::Deliver => {
            if is_stacks_alone(config, destination.flags, dst) {
                cb::delivered(ctx);
            }
            (Action::Deliver, true)
        }
        _ => return None,
    };
    if ctx.adjust_room(-(IPV4_LEN as i32), BPF_ADJ_ROOM_MAC, FIXED_GSO).is_err() {
        return Some(Err(DropReason::Encapsulation));
    }
    count_action(action);
    Some(Ok(Act::redirect(config.kilo_ifindex, received)))
}

/// True when this node may send from that address.
#[inline(always)]
fn may_send(config: &Config, sender: &NodeValue, src: [u8; 4], found: Disposition) -> bool {
    sender.may_send_from(src)
        // From another of its prefixes, or a leader from another location.
        || found == Disposition::Deliver
            && check_source(sender, Ipv4::prefix(config, src), Some(found)).is_ok()
}

/// True for packets to this node's pods that `kilo_ingress` need not look at: they are neither signals nor
/// answers to masqueraded flows, and no flows from outside are noted.
#[inline(always)]
fn is_stacks_alone(config: &Config, flags: u32, dst: [u8; 4]) -> bool {
    flags & PREFIX_NOT_TRANSLATED != 0
        && config.flags & (CONFIG_SEVERAL_V4 | CONFIG_OFFERED) == 0
        && !signal::is_own::<Ipv4>(config, dst)
}

/// True for a packet from the node that its inner source belongs to, by the interface that leads there, as
/// far as `direct_v4` and `hop` show that.
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

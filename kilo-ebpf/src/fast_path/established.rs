//! Established-flow fast path: whole IPv4 packets of TCP and UDP whose entry has had a packet in this second,
//! be it that of a masqueraded flow or of one opened from outside. It writes nothing but the packet, and
//! looks up neither sockets nor prefixes. New flows go to [`opening`], all other packets take the slow path.

use core::mem::offset_of;

use aya_ebpf::{
    EbpfContext as _,
    bindings::{__sk_buff, BPF_F_MARK_MANGLED_0, BPF_F_PSEUDO_HDR},
    programs::TcContext,
};
use kilo_common::{
    checksum,
    counters::Action,
    drop_reasons::DropReason,
    maps::{
        CONFIG_MASQUERADE, CONFIG_NATIVE, CONFIG_ONE_V4, CONFIG_SEVERAL_V4, Config, DEVICE_BY_DESTINATION,
        NAT_EGRESS, NAT_INGRESS, NAT_SEEN, NatKey, NatValue, VXLAN_PORT,
    },
    nat::{
        is_reserved,
        timeout::{is_opening, merge_flags},
    },
    packet::{ETHERNET_LEN, IPV4_LEN, Ipv4, Ipv4Header, protocol},
};
use network_types::{tcp::TcpHdr, udp::UdpHdr};

use super::opening;
use crate::{
    ip::Ip as _,
    maps::{INBOUND, NAT, count_action},
    masquerade::{DONE, NOTHING, clock, scratch::halves, translating_device},
    packet::{self, TCP_FLAGS, TRANSPORT, UDP_END},
};

/// Bytes of a frame up to the end of the TCP checksum.
const TCP: usize = TCP_CHECKSUM + 2;
/// Offset of the UDP checksum.
const UDP_CHECKSUM: usize = TRANSPORT + offset_of!(UdpHdr, check);
/// Offset of the TCP checksum.
const TCP_CHECKSUM: usize = TRANSPORT + offset_of!(TcpHdr, check);
/// Result of [`translate`]: the packet's flow has no entry.
pub const NO_ENTRY: u32 = 2;
/// As [`NO_ENTRY`], and the tables say that it is not masqueraded.
pub const NOT_DUE: u32 = 3;
/// Result of [`translate`]: the packet belongs to a flow opened from outside, and stays as it is.
const STAYS: u32 = 4;
const _: () = assert!(DropReason::Rewrite.index() > STAYS);

/// What became of a packet.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Established {
    /// It is translated, or stays as it is.
    Done,
    /// It has ports, but its flow has no entry, neither as a masqueraded one nor as one from outside.
    NoEntry,
    /// As `NoEntry`, for a packet that leaves and is not masqueraded.
    NotDue,
    /// The slow path must decide.
    Unknown,
}

/// Translates an IPv4 packet that leaves by an uplink.
#[inline(always)]
pub fn leaving(ctx: &TcContext, config: &Config) -> Result<Established, DropReason> {
    established::<true>(ctx, config, Action::Masquerade)
}

/// Translates back an IPv4 packet that arrives on an uplink.
#[inline(always)]
pub fn arriving(ctx: &TcContext, config: &Config) -> Result<Established, DropReason> {
    established::<false>(ctx, config, Action::Unmasquerade)
}

#[inline(always)]
fn established<const EGRESS: bool>(
    ctx: &TcContext,
    config: &Config,
    done: Action,
) -> Result<Established, DropReason> {
    if config.flags & CONFIG_MASQUERADE == 0 {
        return Ok(Established::Unknown);
    }
    let (addr, any) = if config.flags & CONFIG_ONE_V4 != 0 {
        (packet::word(&config.private_v4), false)
    } else {
        let Some(device) = translating_device(ctx, config) else { return Ok(Established::Unknown) };
        let any =
            if EGRESS { device.flags & DEVICE_BY_DESTINATION } else { config.flags & CONFIG_SEVERAL_V4 };
        (packet::word(&device.masq_v4), any != 0)
    };
    match translate::<EGRESS>(ctx.as_ptr().cast(), config, addr, any) {
        DONE => {
            count_action(done);
            Ok(Established::Done)
        }
        STAYS => Ok(Established::Done),
        NO_ENTRY => Ok(Established::NoEntry),
        NOT_DUE => Ok(Established::NotDue),
        NOTHING => Ok(Established::Unknown),
        _ => Err(DropReason::Rewrite),
    }
}

/// `addr` is the address that masqueraded packets get; `any`: some get another one.
#[inline(always)]
#[expect(
    clippy::too_many_lines,
    reason = "the fast path: what is split off costs the verifier or the packet"
)]
fn translate<const EGRESS: bool>(skb: *mut __sk_buff, config: &Config, addr: u32, any: bool) -> u32 {
    const PORT: [usize; 2] = [TRANSPORT + offset_of!(UdpHdr, dst), TRANSPORT];
    let ctx = TcContext::new(skb);
    let start = ctx.data();
    if start + UDP_END > ctx.data_end() {
        return NOTHING;
    }
    // SAFETY: the bounds are checked, and programs may read packets at any address.
    let ip = unsafe { &*((start + ETHERNET_LEN) as *const Ipv4Header) };
    let old = if EGRESS { ip.src } else { ip.dst };
    // The host's own on the way out. On the way in: for no address of this interface, and
    // perhaps from a node that sends without an outer header.
    let usual = old == addr;
    if (if EGRESS { usual } else { !usual && config.flags & CONFIG_NATIVE != 0 }) || !ip.is_plain() {
        return NOTHING;
    }
    let total_len = u32::from(u16::from_be(ip.total_len));
    if total_len < IPV4_LEN as u32 || total_len + ETHERNET_LEN as u32 > ctx.len() {
        return NOTHING;
    }
    let protocol = ip.protocol;
    // SAFETY: the bounds are checked above, and programs may read packets at any address.
    let old_port = unsafe { *((start + PORT[usize::from(EGRESS)]) as *const u16) };
    // SAFETY: as above.
    let dst_port = unsafe { *((start + TRANSPORT + offset_of!(UdpHdr, dst)) as *const u16) };
    let is_tcp = match protocol {
        protocol::TCP if start + TCP <= ctx.data_end() => true,
        // A flow may be older than the node that it now reaches, and none may pass for this node's own VXLAN.
        protocol::UDP if EGRESS && dst_port == VXLAN_PORT.to_be() => return NOTHING,
        protocol::UDP if EGRESS || !is_reserved(protocol::UDP, u16::from_be(old_port), config) => false,
        _ => return NOTHING,
    };
    let direction = if EGRESS { NAT_EGRESS } else { NAT_INGRESS };
    // SAFETY: the bounds are checked above, and programs may read packets at any address.
    let ports = unsafe { *((start + TRANSPORT) as *const u32) };
    // SAFETY: for TCP, the bounds of its flags are checked above.
    let tcp_flags = if is_tcp { unsafe { *((start + TCP_FLAGS) as *const u8) } } else { 0 };
    let entry = if EGRESS || usual || any {
        // SAFETY: entries are not freed while the program runs; so below.
        unsafe { NAT.get(&key([ip.src, ip.dst], ports, protocol, direction)) }
    } else {
        None
    };
    let (new, new_port) = match entry {
        Some(entry) => {
            let new = (u64::from_le(halves(&entry.addr)[1]) >> 32) as u32;
            // An address that the interface no longer has, or the host's own flow.
            if if EGRESS { new != addr && !any } else { new == old } {
                return NOTHING;
            }
            let state = State::of(entry);
            let seen = state.tcp_flags();
            if !state.is_of(clock::glance()) || is_tcp && merge_flags(seen, tcp_flags) != seen {
                return NOTHING;
            }
            (new, state.port())
        }
        None if !EGRESS && usual => return NO_ENTRY,
        None => {
            let answer = from_outside::<EGRESS>(ip, ports, is_tcp, tcp_flags);
            let is_plain = !any && config.flags & CONFIG_SEVERAL_V4 == 0;
            if !EGRESS || answer != NO_ENTRY || !is_plain {
                return answer;
            }
            match opening::open(skb, config, addr, u32::from(tcp_flags)) {
                DONE => (addr, old_port),
                answer => return answer,
            }
        }
    };
    let start = ctx.data();
    if start + if is_tcp { TCP } else { UDP_END } > ctx.data_end() {
        return NOTHING;
    }
    let (checksum, mangled, sealed) = if is_tcp {
        (TCP_CHECKSUM, 0, true)
    } else {
        // A UDP checksum of zero means that there is none.
        // SAFETY: the bounds are checked above.
        let sealed = unsafe { *((start + UDP_CHECKSUM) as *const u16) } != 0;
        (UDP_CHECKSUM, u64::from(BPF_F_MARK_MANGLED_0), sealed)
    };
    let start = if sealed {
        if old_port != new_port
            && ctx.l4_csum_replace(checksum, u64::from(old_port), u64::from(new_port), mangled | 2).is_err()
        {
            return DropReason::Rewrite.index();
        }
        // The kernel knows whether the checksum is in the packet, or left to a device.
        let difference = checksum::add(!old, new);
        let flags = mangled | u64::from(BPF_F_PSEUDO_HDR);
        if ctx.l4_csum_replace(checksum, 0, u64::from(difference), flags).is_err() {
            return DropReason::Rewrite.index();
        }
        let start = ctx.data();
        if start + UDP_END > ctx.data_end() {
            return DropReason::Rewrite.index();
        }
        start
    } else {
        start
    };
    // The header's checksum cancels what the address adds to a sum over the whole packet.
    // SAFETY: the bounds are checked, before or after the helpers that may have moved the packet.
    let ip = unsafe { &mut *((start + ETHERNET_LEN) as *mut Ipv4Header) };
    ip.checksum = checksum::update_word(ip.checksum, old, new);
    *(if EGRESS { &mut ip.src } else { &mut ip.dst }) = new;
    // SAFETY: as for the header.
    unsafe { *((start + PORT[usize::from(EGRESS)]) as *mut u16) = new_port };
    DONE
}

/// What becomes of a packet that is not masqueraded: it stays as it is if its flow was opened from outside
/// and has had such a packet in this second.
#[inline(always)]
fn from_outside<const EGRESS: bool>(ip: &Ipv4Header, ports: u32, is_tcp: bool, tcp_flags: u8) -> u32 {
    // No answer opens a connection.
    if EGRESS && is_tcp && is_opening(tcp_flags) {
        return NO_ENTRY;
    }
    let (addrs, ports) =
        if EGRESS { ([ip.src, ip.dst], ports) } else { ([ip.dst, ip.src], ports.rotate_left(16)) };
    // SAFETY: entries are not freed while the program runs.
    let Some(flow) = (unsafe { INBOUND.get(&key(addrs, ports, ip.protocol, NAT_EGRESS)) }) else {
        return if EGRESS { NO_ENTRY } else { NOTHING };
    };
    let seen = if EGRESS { flow.answer_flags } else { flow.opener_flags };
    let is_known = flow.last_seen == clock::glance()
        && (!EGRESS || flow.flags == NAT_SEEN)
        && (!is_tcp || merge_flags(seen, tcp_flags) == seen);
    if is_known { STAYS } else { NOTHING }
}

/// Port, flags and time of an entry, read at once.
#[derive(Clone, Copy)]
struct State(u64);

impl State {
    #[inline(always)]
    fn of(entry: &NatValue) -> Self {
        const _: () = assert!(offset_of!(NatValue, port) == 16 && size_of::<NatValue>() == 24);
        // SAFETY: the last 8 bytes of an entry, which is aligned to as many.
        Self(u64::from_le(unsafe { *(&raw const entry.port).cast() }))
    }

    /// The port, as it lies in memory.
    #[inline(always)]
    fn port(self) -> u16 {
        (self.0 as u16).to_le()
    }

    #[inline(always)]
    const fn tcp_flags(self) -> u8 {
        (self.0 >> 16) as u8
    }

    /// True when a packet was seen, and in this second.
    #[inline(always)]
    const fn is_of(self, second: u32) -> bool {
        (self.0 >> 32) as u32 == second && (self.0 >> 24) as u8 == NAT_SEEN
    }
}

/// The key of a flow in words: field by field it would be written byte by byte.
#[inline(always)]
pub fn key(addrs: [u32; 2], ports: u32, protocol: u8, direction: u8) -> NatKey {
    let [src, dst] = addrs.map(|addr| Ipv4::mapped(addr.to_ne_bytes()));
    let rest = u64::from(u32::from_le(ports)) | u64::from(protocol) << 32 | u64::from(direction) << 40;
    // SAFETY: 40 bytes of integers in the order of the fields.
    unsafe { core::mem::transmute([src[0], src[1], dst[0], dst[1], rest.to_le()]) }
}

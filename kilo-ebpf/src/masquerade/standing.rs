//! The short way of flows that stand: whole IPv4 packets of TCP and UDP whose
//! entry has had a packet in this second. It writes nothing but the packet, and
//! knows neither sockets nor tables; all others go the long way.

use aya_ebpf::{
    EbpfContext as _,
    bindings::{__sk_buff, BPF_F_MARK_MANGLED_0, BPF_F_PSEUDO_HDR},
    programs::TcContext,
};
use kilo_common::{
    checksum,
    maps::{CONFIG_MASQUERADE, CONFIG_ONE_V4, Config, NAT_EGRESS, NAT_INGRESS, NAT_SEEN, NatKey},
    nat::{is_reserved, timeout::merge_flags},
    packet::{ETHERNET_LEN, IPV4_LEN, Ipv4, Ipv4Header, protocol},
    verdict::{Action, DropReason},
};

use super::{DONE, NOTHING, port, translating_device, work::halves};
use crate::{
    ip::Ip as _,
    maps::{NAT, count_action},
};

/// Where the transport header is.
const TRANSPORT: usize = ETHERNET_LEN + IPV4_LEN;
/// Bytes of ports, length and checksum of UDP; and of TCP up to its checksum.
const UDP: usize = TRANSPORT + 8;
const TCP: usize = TRANSPORT + 18;
/// Where TCP has its flags.
const TCP_FLAGS: usize = TRANSPORT + 13;
/// Answer of [`translate`]: the packet is of no flow that has an entry.
const NO_ENTRY: u32 = 2;

/// What became of a packet.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// It is translated.
    Done,
    /// It has ports, and its flow no entry.
    NoEntry,
    /// The long way must tell.
    Unknown,
}

/// Of an IPv4 packet that leaves by an uplink.
#[inline(always)]
pub fn leaving(ctx: &TcContext, config: &Config) -> Result<Standing, DropReason> {
    standing(ctx, config, NAT_EGRESS, Action::Masquerade)
}

/// Of an IPv4 packet that arrives at an uplink.
#[inline(always)]
pub fn arriving(ctx: &TcContext, config: &Config) -> Result<Standing, DropReason> {
    standing(ctx, config, NAT_INGRESS, Action::Unmasquerade)
}

#[inline(always)]
fn standing(ctx: &TcContext, config: &Config, direction: u8, done: Action) -> Result<Standing, DropReason> {
    if config.flags & CONFIG_MASQUERADE == 0 {
        return Ok(Standing::Unknown);
    }
    let addr = if config.flags & CONFIG_ONE_V4 != 0 {
        config.private_v4
    } else {
        let Some(device) = translating_device(ctx, config) else { return Ok(Standing::Unknown) };
        device.masq_v4
    };
    match translate(ctx.as_ptr().cast(), config, u32::from_ne_bytes(addr), u32::from(direction)) {
        DONE => {
            count_action(done);
            Ok(Standing::Done)
        }
        NO_ENTRY => Ok(Standing::NoEntry),
        NOTHING => Ok(Standing::Unknown),
        _ => Err(DropReason::Rewrite),
    }
}

/// A function of its own for the verifier; `addr` is what masqueraded packets get.
#[inline(never)]
fn translate(skb: *mut __sk_buff, config: &Config, addr: u32, direction: u32) -> u32 {
    let ctx = TcContext::new(skb);
    let egress = direction == u32::from(NAT_EGRESS);
    let start = ctx.data();
    if start + UDP > ctx.data_end() {
        return NOTHING;
    }
    // SAFETY: the bounds are checked, and programs may read packets at any address; so below.
    let ip = unsafe { &*((start + ETHERNET_LEN) as *const Ipv4Header) };
    if ip.version_len != 0x45 || ip.fragment & 0x3fff_u16.to_be() != 0 {
        return NOTHING;
    }
    if u32::from(u16::from_be(ip.total_len)) + ETHERNET_LEN as u32 > ctx.len() {
        return NOTHING;
    }
    let (src, dst, proto) = (ip.src, ip.dst, ip.protocol);
    // The host's own on the way out; not for this host on the way in.
    if (if egress { src } else { dst } == addr) == egress {
        return NOTHING;
    }
    let ports = unsafe { *((start + TRANSPORT) as *const u32) };
    let [.., dst_high, dst_low] = ports.to_ne_bytes();
    let (at, tcp_flags) = match proto {
        protocol::TCP => {
            if start + TCP > ctx.data_end() {
                return NOTHING;
            }
            (TRANSPORT + 16, unsafe { *((start + TCP_FLAGS) as *const u8) })
        }
        protocol::UDP if egress || !is_reserved(proto, u16::from_be_bytes([dst_high, dst_low]), config) => {
            (TRANSPORT + 6, 0)
        }
        _ => return NOTHING,
    };
    let key = key(src, dst, ports, proto, direction as u8);
    // SAFETY: entries are not freed while the program runs.
    let Some(entry) = (unsafe { NAT.get(&key) }) else { return NO_ENTRY };
    let [first, second] = halves(&entry.addr);
    let (old, new) = (if egress { src } else { dst }, (u64::from_le(second) >> 32) as u32);
    if entry.last_seen != port::now()
        || entry.flags != NAT_SEEN
        || merge_flags(entry.tcp_flags, tcp_flags) != entry.tcp_flags
        // Another address than the interface has now; the host's own.
        || first != 0
        || (new == addr) != egress
    {
        return NOTHING;
    }
    let (old_port, new_port) = {
        let [src_high, src_low, ..] = ports.to_ne_bytes();
        let old = if egress { [src_high, src_low] } else { [dst_high, dst_low] };
        (u16::from_ne_bytes(old), u16::from_ne_bytes(entry.port))
    };
    // A UDP checksum of zero means that there is none.
    let mangled = if proto == protocol::UDP { u64::from(BPF_F_MARK_MANGLED_0) } else { 0 };
    let difference = checksum::add(!old, new);
    if old_port != new_port
        && ctx.l4_csum_replace(at, u64::from(old_port), u64::from(new_port), mangled | 2).is_err()
    {
        return DropReason::Rewrite.index();
    }
    // The kernel knows whether the checksum is in the packet, or left to a device.
    let flags = mangled | u64::from(BPF_F_PSEUDO_HDR);
    if ctx.l4_csum_replace(at, 0, u64::from(difference), flags).is_err() {
        return DropReason::Rewrite.index();
    }
    let start = ctx.data();
    if start + TRANSPORT + 4 > ctx.data_end() {
        return DropReason::Rewrite.index();
    }
    // What the address adds to a sum over the whole packet the header's checksum takes away.
    let ip = unsafe { &mut *((start + ETHERNET_LEN) as *mut Ipv4Header) };
    ip.checksum = !checksum::fold(u32::from(!ip.checksum) + u32::from(checksum::fold(difference)));
    let ports = unsafe { &mut *((start + TRANSPORT) as *mut [u16; 2]) };
    if egress {
        ip.src = new;
        ports[0] = new_port;
    } else {
        ip.dst = new;
        ports[1] = new_port;
    }
    DONE
}

/// The key of a flow in words: field by field it would be written byte by byte.
#[inline(always)]
fn key(src: u32, dst: u32, ports: u32, protocol: u8, direction: u8) -> NatKey {
    let [src, dst] = [src, dst].map(|addr| Ipv4::mapped(addr.to_ne_bytes()));
    let rest = u64::from(u32::from_le(ports)) | u64::from(protocol) << 32 | u64::from(direction) << 40;
    // SAFETY: 40 bytes of integers in the order of the fields.
    unsafe { core::mem::transmute([src[0], src[1], dst[0], dst[1], rest.to_le()]) }
}

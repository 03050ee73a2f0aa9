//! Source translation on the way out, and back on the way in. Decisions and
//! layouts are `kilo_common::nat`; here is what needs the kernel: entries,
//! sockets, checksums of packets that may be offloaded.

use aya_ebpf::{
    EbpfContext as _,
    bindings::{
        BPF_F_MARK_MANGLED_0, BPF_F_PSEUDO_HDR, BPF_NOEXIST, bpf_sock_tuple, bpf_sock_tuple__bindgen_ty_1,
        bpf_sock_tuple__bindgen_ty_1__bindgen_ty_1,
    },
    btf_maps::lpm_trie::Key,
    helpers::{bpf_get_prandom_u32, bpf_ktime_get_ns, bpf_sk_lookup_tcp, bpf_sk_lookup_udp, bpf_sk_release},
    programs::TcContext,
};
use kilo_common::{
    maps::{CONFIG_MASQUERADE, Config, DEVICE_MASQUERADE, Device, MASQ_EXCLUDE, NatValue},
    nat::{Flow, ICMP_ECHO, ICMP_ECHO_REPLY, PORT_ATTEMPTS, candidate_port, is_masqueraded, layout},
    packet::{ETHERNET_LEN, Ipv4, protocol},
    verdict::{Action, DropReason},
};

use crate::{
    ip::Ip as _,
    maps::{MASQ_DST, MASQ_SRC, NAT_V4, count_action, device},
    packet,
    programs::TC_ACT_UNSPEC,
};

/// `bpf_sk_lookup_*`: the namespace of the device.
const CURRENT_NETNS: u64 = u64::MAX;
/// `-EEXIST` of a map update.
const EEXIST: i32 = -17;

/// Egress of an uplink; packets start with an Ethernet header.
#[inline(always)]
pub fn uplink_egress(ctx: &TcContext, config: &Config) -> Result<i32, DropReason> {
    if matches!(packet::family(ctx), packet::Family::V4)
        && let Ok(ip) = Ipv4::read(ctx, ETHERNET_LEN)
    {
        egress(ctx, config, ETHERNET_LEN, &ip)?;
    }
    Ok(TC_ACT_UNSPEC)
}

/// Translates the source if that is due; answers the new source.
#[inline(always)]
pub fn egress(
    ctx: &TcContext,
    config: &Config,
    offset: usize,
    ip: &Ipv4,
) -> Result<Option<[u8; 4]>, DropReason> {
    let Some(device) = translating_device(ctx, config) else { return Ok(None) };
    // Ours already: the host's own packets, and what netfilter has translated.
    let own = ip.src == device.masq_addr;
    if own && ip.protocol != protocol::ICMP {
        return Ok(None);
    }
    let destination = MASQ_DST.get(&Key::new(32, ip.dst)).copied();
    let source = MASQ_SRC.get(&Key::new(32, ip.src)).copied();
    // No socket tells which echo identifiers the host uses: its own echoes
    // claim theirs like those of pods, where both may go.
    let due = if own { destination != Some(MASQ_EXCLUDE) } else { is_masqueraded(source, destination) };
    if !due {
        return Ok(None);
    }
    let payload = offset + ip.header_len;
    let flow = match flow(ctx, payload, ip, ICMP_ECHO) {
        Some(flow) => flow,
        None if own => return Ok(None),
        None => return Err(DropReason::NatUnsupported),
    };
    let port = translation(ctx, config, &flow, device.masq_addr)?;
    rewrite(
        ctx,
        offset,
        payload,
        ip.protocol,
        &Change {
            addr_at: offset + 12,
            old_addr: flow.src,
            new_addr: device.masq_addr,
            old_port: flow.src_port,
            new_port: port,
            source: true,
        },
    )?;
    if own {
        return Ok(None);
    }
    count_action(Action::Masquerade);
    Ok(Some(device.masq_addr))
}

/// Translates the destination of a reply back; answers the new destination.
#[inline(always)]
pub fn ingress(
    ctx: &TcContext,
    config: &Config,
    offset: usize,
    ip: &Ipv4,
) -> Result<Option<[u8; 4]>, DropReason> {
    if translating_device(ctx, config).is_none_or(|device| ip.dst != device.masq_addr) {
        return Ok(None);
    }
    let payload = offset + ip.header_len;
    let Some(flow) = flow(ctx, payload, ip, ICMP_ECHO_REPLY) else { return Ok(None) };
    // SAFETY: the value is copied before anything else touches the map.
    let Some(entry) = NAT_V4.get_ptr_mut(&flow.ingress_key()) else { return Ok(None) };
    let value = unsafe {
        (*entry).last_seen = bpf_ktime_get_ns();
        *entry
    };
    rewrite(
        ctx,
        offset,
        payload,
        ip.protocol,
        &Change {
            addr_at: offset + 16,
            old_addr: flow.dst,
            new_addr: value.addr,
            old_port: flow.dst_port,
            new_port: value.port,
            source: false,
        },
    )?;
    if value.addr != flow.dst {
        count_action(Action::Unmasquerade);
    }
    Ok(Some(value.addr))
}

/// The interface this packet is on, if packets are translated there.
#[inline(always)]
fn translating_device(ctx: &TcContext, config: &Config) -> Option<Device> {
    if config.flags & CONFIG_MASQUERADE == 0 {
        return None;
    }
    device(packet::ifindex(ctx)).filter(|device| device.flags & DEVICE_MASQUERADE != 0)
}

#[inline(always)]
fn flow(ctx: &TcContext, payload: usize, ip: &Ipv4, icmp_type: u8) -> Option<Flow> {
    // Loaded by a helper: the offset depends on the header's options.
    let start: [u8; 8] = ctx.load(payload).ok()?;
    Flow::of(ip, &start, icmp_type)
}

/// The port this flow's source becomes: the one it has, or a new one.
#[inline(always)]
fn translation(ctx: &TcContext, config: &Config, flow: &Flow, addr: [u8; 4]) -> Result<[u8; 2], DropReason> {
    // SAFETY: a helper without arguments.
    let now = unsafe { bpf_ktime_get_ns() };
    let back = NatValue { addr: flow.src, port: flow.src_port, last_seen: now, ..NatValue::default() };
    let key = flow.egress_key();
    if let Some(entry) = NAT_V4.get_ptr_mut(&key) {
        // SAFETY: the entry is there; a racing write changes time stamps only.
        let value = unsafe {
            (*entry).last_seen = now;
            *entry
        };
        if value.addr == addr && claim(flow, addr, value.port, &back) == Claim::Ours {
            return Ok(value.port);
        }
        // The address of the device changed, or somebody took the port after an eviction.
        let _ = NAT_V4.remove(&key);
    }
    let own = u16::from_be_bytes(flow.src_port);
    // SAFETY: a helper without arguments.
    let start = unsafe { bpf_get_prandom_u32() };
    let mut attempt = 0;
    while attempt < PORT_ATTEMPTS {
        let candidate = candidate_port(own, attempt, start, config);
        attempt += 1;
        let Some(candidate) = candidate else { continue };
        let port = candidate.to_be_bytes();
        if host_uses(ctx, flow, addr, port) {
            continue;
        }
        match claim(flow, addr, port, &back) {
            Claim::Ours => {}
            Claim::Taken => continue,
            Claim::Failed => return Err(DropReason::NatMapFull),
        }
        let forward = NatValue { addr, port, last_seen: now, ..NatValue::default() };
        return match NAT_V4.insert(&key, &forward, u64::from(BPF_NOEXIST)) {
            Ok(()) => Ok(port),
            // Another CPU was faster with the same flow: its port counts.
            // SAFETY: the value is copied at once.
            Err(EEXIST) => match unsafe { NAT_V4.get(&key) }.copied() {
                Some(winner) => {
                    if winner.port != port {
                        let _ = NAT_V4.remove(&flow.reply(addr, port).ingress_key());
                    }
                    Ok(winner.port)
                }
                None => Err(DropReason::NatMapFull),
            },
            Err(_) => Err(DropReason::NatMapFull),
        };
    }
    Err(DropReason::NatExhausted)
}

#[derive(PartialEq, Eq)]
enum Claim {
    Ours,
    Taken,
    Failed,
}

/// Writes the entry for replies; it is the lock on the port. One that is there
/// already counts as ours when it leads back to this flow.
#[inline(always)]
fn claim(flow: &Flow, addr: [u8; 4], port: [u8; 2], back: &NatValue) -> Claim {
    let key = flow.reply(addr, port).ingress_key();
    // SAFETY: the value is copied at once.
    if let Some(present) = unsafe { NAT_V4.get(&key) } {
        return if present.addr == back.addr && present.port == back.port {
            Claim::Ours
        } else {
            Claim::Taken
        };
    }
    match NAT_V4.insert(&key, back, u64::from(BPF_NOEXIST)) {
        Ok(()) => Claim::Ours,
        Err(EEXIST) => Claim::Taken,
        Err(_) => Claim::Failed,
    }
}

/// True when a socket of this host would receive the replies (also the one of
/// WireGuard and of tunnels).
#[inline(always)]
fn host_uses(ctx: &TcContext, flow: &Flow, addr: [u8; 4], port: [u8; 2]) -> bool {
    let mut tuple = bpf_sock_tuple {
        __bindgen_anon_1: bpf_sock_tuple__bindgen_ty_1 {
            ipv4: bpf_sock_tuple__bindgen_ty_1__bindgen_ty_1 {
                saddr: u32::from_ne_bytes(flow.dst),
                daddr: u32::from_ne_bytes(addr),
                sport: u16::from_ne_bytes(flow.dst_port),
                dport: u16::from_ne_bytes(port),
            },
        },
    };
    let size = size_of::<bpf_sock_tuple__bindgen_ty_1__bindgen_ty_1>() as u32;
    // SAFETY: context and tuple are valid, and a socket that is found is released.
    unsafe {
        let socket = match flow.protocol {
            protocol::TCP => bpf_sk_lookup_tcp(ctx.as_ptr(), &raw mut tuple, size, CURRENT_NETNS, 0),
            protocol::UDP => bpf_sk_lookup_udp(ctx.as_ptr(), &raw mut tuple, size, CURRENT_NETNS, 0),
            _ => return false,
        };
        if socket.is_null() {
            return false;
        }
        bpf_sk_release(socket.cast());
        true
    }
}

struct Change {
    addr_at: usize,
    old_addr: [u8; 4],
    new_addr: [u8; 4],
    old_port: [u8; 2],
    new_port: [u8; 2],
    source: bool,
}

/// Rewrites address and port through the kernel's helpers, which know about
/// checksums left to the device.
#[inline(always)]
fn rewrite(
    ctx: &TcContext,
    offset: usize,
    payload: usize,
    protocol: u8,
    change: &Change,
) -> Result<(), DropReason> {
    let layout = layout(protocol).ok_or(DropReason::NatUnsupported)?;
    let failed = |_| DropReason::Rewrite;
    let (old, new) =
        (u64::from(u32::from_ne_bytes(change.old_addr)), u64::from(u32::from_ne_bytes(change.new_addr)));
    // A UDP checksum of zero means that there is none.
    let mangled = if protocol == protocol::UDP { u64::from(BPF_F_MARK_MANGLED_0) } else { 0 };
    let checksum = payload + layout.checksum;
    if change.old_port != change.new_port {
        let port = payload + if change.source { layout.src_port } else { layout.dst_port };
        let old = u64::from(u16::from_ne_bytes(change.old_port));
        let new = u64::from(u16::from_ne_bytes(change.new_port));
        ctx.l4_csum_replace(checksum, old, new, mangled | 2).map_err(failed)?;
        ctx.store(port, &change.new_port, 0).map_err(failed)?;
    }
    if layout.pseudo_header {
        ctx.l4_csum_replace(checksum, old, new, mangled | u64::from(BPF_F_PSEUDO_HDR) | 4).map_err(failed)?;
    }
    ctx.l3_csum_replace(offset + 10, old, new, 4).map_err(failed)?;
    ctx.store(change.addr_at, &change.new_addr, 0).map_err(failed)
}

//! A relay's data path (docs/design/relay.md): WireGuard's datagrams between the two ends of a pair are sent
//! on by the map `relay`, and messages about relays go to the agent through a ring once their tag has been
//! verified. No program sends an answer.

pub mod fast_path;

use aya_ebpf::{
    EbpfContext as _,
    bindings::{
        BPF_F_MARK_MANGLED_0, BPF_F_PSEUDO_HDR, BPF_FIB_LKUP_RET_FWD_DISABLED, BPF_FIB_LKUP_RET_NOT_FWDED,
        bpf_fib_lookup,
    },
    helpers::{
        bpf_csum_update, bpf_fib_lookup as look_up, bpf_ktime_get_coarse_ns, bpf_skb_change_head,
        bpf_skb_load_bytes,
    },
    programs::TcContext,
};
use kilo_common::{
    checksum::{add, difference_of_halves},
    counters::Action,
    drop_reasons::DropReason,
    encap::UDP_LEN,
    maps::{CONFIG_RELAY, Config},
    packet::{ETHERNET_LEN, Ipv4, protocol},
    relay::{self, Arrival, Fate, Heard, LENGTH, Port, Raw},
};

use crate::{
    cb,
    ip::{Ip, V6, halves, octets},
    maps::{RELAY, RELAY_HEARD, RELAY_KEY, count_action},
    packet,
    ret::{Act, Verdict, from_code, to_code},
    subprogram::{Skb, subprogram},
    word_memory::Words,
};

/// Offsets of length and checksum in a UDP header.
const UDP_LENGTH: usize = 4;
const UDP_CHECKSUM: usize = 6;

/// True for datagrams that [`arrived`] takes; all others are handled as without a relay.
#[inline(always)]
pub fn concerns<O: Ip, const LINK: usize>(ctx: &TcContext, config: &Config, outer: &O) -> bool {
    if config.flags & CONFIG_RELAY == 0
        || outer.protocol() != protocol::UDP
        || outer.header_len() != O::HEADER_LEN
    {
        return false;
    }
    // Later fragments have no ports: the stack collects them, and has no receiver for them.
    outer.udp(ctx, LINK).is_some_and(|udp| {
        udp == LINK + O::HEADER_LEN
            && destination_port::<O, LINK>(ctx).is_some_and(|port| is_ours(config, port))
            && is_for_relay::<O, LINK>(ctx.as_ptr().cast(), config) != 0
    })
}

/// As [`concerns`], for a whole IPv4 packet with ports and without options, in an Ethernet frame.
#[inline(always)]
pub fn concerns_whole(ctx: &TcContext, config: &Config) -> bool {
    config.flags & CONFIG_RELAY != 0
        && packet::protocol_v4(ctx) == protocol::UDP
        && destination_port::<Ipv4, ETHERNET_LEN>(ctx).is_some_and(relay::is_port)
        && is_for_relay::<Ipv4, ETHERNET_LEN>(ctx.as_ptr().cast(), config) != 0
}

#[inline(always)]
fn is_ours(config: &Config, port: u16) -> bool {
    port == config.wireguard_port || relay::is_port(port)
}

subprogram! {
    /// Not zero for a message or a datagram of a pair that is for this host itself: ports of pods, and of
    /// hosts behind this one, are their own.
    fn is_for_relay[O: Ip, const LINK: usize](config: &Config) -> u32 = find_relay;
    by (LINK, O::V6) => {
        (0, false) => relay_concerns_l3_v4[Ipv4, 0],
        (0, true) => relay_concerns_l3_v6[V6, 0],
        (_, false) => relay_concerns_v4[Ipv4, ETHERNET_LEN],
        (_, true) => relay_concerns_v6[V6, ETHERNET_LEN],
    }
}

#[inline(always)]
fn find_relay<O: Ip, const LINK: usize>(skb: Skb, config: &Config) -> u32 {
    let ctx = TcContext::new(skb);
    let Ok(ip) = O::read(&ctx, LINK) else { return 0 };
    let Some(arrival) = arrival::<O, LINK>(&ctx, &ip) else { return 0 };
    let (fate, is_bound_here) = if arrival.port == config.wireguard_port {
        (relay::at_wireguard(&arrival), false)
    } else {
        // SAFETY: entries are only replaced by the agent, and not freed while the program runs.
        let entry = unsafe { RELAY.get(&u32::from(arrival.port)) };
        (relay::at_port(&arrival, entry), entry.is_some_and(|entry| entry.is_at(arrival.local)))
    };
    u32::from(fate != Fate::Stack && (is_bound_here || is_own(&ctx, &ip)))
}

/// True when the destination is an address of this host, by its routes. On a host that does not forward,
/// every one counts.
#[inline(always)]
fn is_own<O: Ip>(ctx: &TcContext, ip: &O) -> bool {
    const INET: u8 = 2;
    const INET6: u8 = 10;
    let mut route = Words::<bpf_fib_lookup, 8>::new();
    let route = route.zero();
    route.ifindex = packet::ifindex(ctx);
    let (source, destination) = (octets(O::mapped(ip.src())), octets(O::mapped(ip.dst())));
    if O::V6 {
        route.family = INET6;
        route.__bindgen_anon_3.ipv6_src = words(source);
        route.__bindgen_anon_4.ipv6_dst = words(destination);
    } else {
        route.family = INET;
        route.__bindgen_anon_3.ipv4_src = words(source)[3];
        route.__bindgen_anon_4.ipv4_dst = words(destination)[3];
    }
    let size = size_of::<bpf_fib_lookup>() as i32;
    // SAFETY: the context is valid, and the structure has the size that is named.
    let answer = unsafe { look_up(ctx.as_ptr().cast(), route, size, 0) };
    answer == i64::from(BPF_FIB_LKUP_RET_NOT_FWDED) || answer == i64::from(BPF_FIB_LKUP_RET_FWD_DISABLED)
}

/// An address as words in network byte order.
#[inline(always)]
const fn words(addr: [u8; 16]) -> [u32; 4] {
    let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = addr;
    [
        u32::from_ne_bytes([a, b, c, d]),
        u32::from_ne_bytes([e, f, g, h]),
        u32::from_ne_bytes([i, j, k, l]),
        u32::from_ne_bytes([m, n, o, p]),
    ]
}

#[inline(always)]
fn destination_port<O: Ip, const LINK: usize>(ctx: &TcContext) -> Option<u16> {
    ctx.load::<[u8; 2]>(LINK + O::HEADER_LEN + 2).ok().map(u16::from_be_bytes)
}

subprogram! {
    /// Takes a datagram for which [`concerns`] is true.
    pub fn arrived[O: Ip, const LINK: usize](config: &Config) -> i32 = take_datagram;
    by (LINK, O::V6) => {
        (0, false) => relay_arrived_l3_v4[Ipv4, 0],
        (0, true) => relay_arrived_l3_v6[V6, 0],
        (_, false) => relay_arrived_v4[Ipv4, ETHERNET_LEN],
        (_, true) => relay_arrived_v6[V6, ETHERNET_LEN],
    }
}

#[inline(always)]
fn take_datagram<O: Ip, const LINK: usize>(skb: Skb, config: &Config) -> i32 {
    let ctx = TcContext::new(skb);
    to_code(O::read(&ctx, LINK).and_then(|ip| taken::<O, LINK>(&ctx, config, &ip)))
}

#[inline(always)]
fn taken<O: Ip, const LINK: usize>(ctx: &TcContext, config: &Config, ip: &O) -> Verdict {
    let Some(arrival) = arrival::<O, LINK>(ctx, ip) else { return Ok(Act::NEXT) };
    if arrival.port == config.wireguard_port {
        return match relay::at_wireguard(&arrival) {
            Fate::Hear => notify_agent::<O, LINK>(ctx, &arrival),
            _ => Ok(Act::NEXT),
        };
    }
    let entry = RELAY.get_ptr_mut(&u32::from(arrival.port));
    // SAFETY: entries are only replaced by the agent, and not freed while the program runs.
    match relay::at_port(&arrival, entry.map(|entry| unsafe { &*entry })) {
        Fate::Stack => Ok(Act::NEXT),
        Fate::Hear => notify_agent::<O, LINK>(ctx, &arrival),
        Fate::Drop(reason) => Err(reason),
        Fate::Forward => {
            let Some(entry) = entry else { return Ok(Act::NEXT) };
            forward::<O, LINK>(ctx, ip, &arrival, entry)
        }
    }
}

/// The datagram that arrives, with its first bytes; `None`: it is too short for WireGuard's or a message.
#[inline(always)]
fn arrival<O: Ip, const LINK: usize>(ctx: &TcContext, ip: &O) -> Option<Arrival> {
    let udp = LINK + O::HEADER_LEN;
    let [a, b, c, d] = ctx.load::<[u8; 4]>(udp).ok()?;
    Some(Arrival {
        source: O::mapped(ip.src()),
        local: O::mapped(ip.dst()),
        source_port: u16::from_be_bytes([a, b]),
        port: u16::from_be_bytes([c, d]),
        first: ctx.load(udp + UDP_LEN).ok()?,
        is_fragment: ip.is_fragment(),
    })
}

/// Gives the datagram the addresses and ports between the relay and the pair's other end, and sends it there.
#[inline(always)]
fn forward<O: Ip, const LINK: usize>(ctx: &TcContext, ip: &O, arrival: &Arrival, port: *mut Port) -> Verdict {
    const SOURCE_V4: usize = 12;
    const SOURCE_V6: usize = 8;
    if ip.ttl() <= 1 {
        return Ok(Act::NEXT);
    }
    let Some(state) = fast_path::state(arrival.port) else { return Ok(Act::NEXT) };
    // SAFETY: as above; that a packet is counted twice or not at all by two CPUs harms nobody.
    let entry = unsafe {
        if !fast_path::may_pass(ctx, state, &*port, &mut fast_path::Clock::new()) {
            return Err(DropReason::RelayLimit);
        }
        (*port).packets += 1;
        &*port
    };
    let udp = LINK + O::HEADER_LEN;
    let (by, to) = (halves(&entry.by), halves(&entry.to));
    let address = add(difference_of_halves(arrival.source, by), difference_of_halves(arrival.local, to));
    let old = port_bytes(arrival.source_port, arrival.port);
    let new = port_bytes(entry.by_port, entry.to_port);
    let ports = add(!u32::from_ne_bytes(old), u32::from_ne_bytes(new));
    let failed = |_| DropReason::Rewrite;
    ip.lower_ttl(ctx, LINK)?;
    // A UDP checksum of zero means that there is none.
    let mangled = u64::from(BPF_F_MARK_MANGLED_0);
    ctx.l4_csum_replace(udp + UDP_CHECKSUM, 0, u64::from(ports), mangled).map_err(failed)?;
    let pseudo = mangled | u64::from(BPF_F_PSEUDO_HDR);
    ctx.l4_csum_replace(udp + UDP_CHECKSUM, 0, u64::from(address), pseudo).map_err(failed)?;
    ctx.store(udp, &new, 0).map_err(failed)?;
    if O::V6 {
        // As in masquerading: a sum over the whole packet that the device computed.
        // SAFETY: the context is valid; without such a sum the helper refuses.
        let _ = unsafe { bpf_csum_update(ctx.skb.skb.cast(), address) };
        ctx.store(LINK + SOURCE_V6, &[by, to], 0).map_err(failed)?;
    } else {
        ctx.l3_csum_replace(LINK + 10, 0, u64::from(address), 0).map_err(failed)?;
        let ends = [O::unmapped(&entry.by), O::unmapped(&entry.to)];
        ctx.store(LINK + SOURCE_V4, &ends, 0).map_err(failed)?;
    }
    let ifindex = entry.ifindex;
    if LINK == 0 {
        framed::<O>(ctx)?;
    }
    cb::sent(ctx);
    count_action(Action::Relay);
    Ok(Act::neighbour(ifindex))
}

/// Two ports as a UDP header has them.
#[inline(always)]
const fn port_bytes(source: u16, destination: u16) -> [u8; 4] {
    let [[a, b], [c, d]] = [source.to_be_bytes(), destination.to_be_bytes()];
    [a, b, c, d]
}

/// Gives a packet without a link-layer header the one that `bpf_redirect_neigh` expects.
#[inline(always)]
pub fn framed<I: Ip>(ctx: &TcContext) -> Result<(), DropReason> {
    // SAFETY: the context is valid for the whole program.
    if unsafe { bpf_skb_change_head(ctx.as_ptr().cast(), ETHERNET_LEN as u32, 0) } != 0 {
        return Err(DropReason::Encapsulation);
    }
    ctx.store(0, packet::ethernet(&mut Words::new(), I::V6), 0).map_err(|_| DropReason::Encapsulation)
}

#[inline(always)]
fn notify_agent<O: Ip, const LINK: usize>(ctx: &TcContext, arrival: &Arrival) -> Verdict {
    let ends = [arrival.source, arrival.local];
    let ports = [arrival.source_port, arrival.port];
    from_code(heard(ctx.as_ptr().cast(), &ends, &ports, LINK + O::HEADER_LEN + UDP_LEN))
}

subprogram! {
    /// Reports the message at `start` to the agent if its tag is right; the packet ends here. `ends` and
    /// `ports` are its source and destination.
    fn heard(ends: &[[u64; 2]; 2], ports: &[u16; 2], start: usize) -> i32 = hear_message as relay_message
}

#[inline(always)]
fn hear_message(skb: Skb, ends: &[[u64; 2]; 2], ports: &[u16; 2], start: usize) -> i32 {
    to_code(hear(&TcContext::new(skb), ends, ports, start))
}

#[inline(always)]
fn hear(ctx: &TcContext, ends: &[[u64; 2]; 2], ports: &[u16; 2], start: usize) -> Verdict {
    let length: [u8; 2] = ctx.load(start - UDP_LEN + UDP_LENGTH).map_err(|_| DropReason::Malformed)?;
    if usize::from(u16::from_be_bytes(length)) != UDP_LEN + LENGTH || packet::gso_size(ctx) != 0 {
        return Err(DropReason::Malformed);
    }
    let raw: Raw = ctx.load(start).map_err(|_| DropReason::Malformed)?;
    let sender = RELAY_KEY.get_ptr_mut(&relay::sender(&raw)).ok_or(DropReason::UnknownSignal)?;
    // SAFETY: entries are only replaced by the agent, and not freed while the program runs; it does no harm
    // if two CPUs at once note only one message.
    let sender = unsafe { &mut *sender };
    relay::authentic(&raw, sender.key)?;
    // SAFETY: a helper without arguments.
    sender.hear(&raw, (unsafe { bpf_ktime_get_coarse_ns() } / 1_000_000_000) as u32)?;
    let Some(mut entry) = RELAY_HEARD.reserve_untyped::<Heard>(0) else {
        return Err(DropReason::SignalRingFull);
    };
    let record: *mut Heard = entry.as_mut_ptr();
    // SAFETY: the entry is ours until it is submitted, and the helper writes no more than there is room for.
    let copied = unsafe {
        (&raw mut (*record).source).write(octets(ends[0]));
        (&raw mut (*record).local).write(octets(ends[1]));
        (&raw mut (*record).ifindex).write(packet::ifindex(ctx));
        (&raw mut (*record).source_port).write(ports[0]);
        (&raw mut (*record).port).write(ports[1]);
        bpf_skb_load_bytes(
            ctx.as_ptr().cast(),
            start as u32,
            (&raw mut (*record).bytes).cast(),
            LENGTH as u32,
        )
    };
    if copied == 0 {
        entry.submit(0);
        count_action(Action::Hear);
        Ok(Act::END)
    } else {
        entry.discard(0);
        Err(DropReason::Malformed)
    }
}

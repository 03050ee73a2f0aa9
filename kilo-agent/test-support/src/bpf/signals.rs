//! Expected handling of signals, from the bytes and the tables alone; and random signals.

use std::net::IpAddr;

use kilo_common::{
    counters::Action,
    drop_reasons::DropReason,
    lead::{self, Term, hop_of, obeys, term_of},
    maps::{
        CONFIG_GATEWAY, CONFIG_NATIVE, HOP_ACTING, HOP_FIRST_NODE, HOP_REMOTE, SIGNAL_GATEWAY, SignalKey,
        VXLAN_PORT,
    },
    packet::protocol,
    signal::{
        self, Body, Kind, LONGEST, Shared, Signal,
        control::{CONTROL_PREFIX, sender_id},
    },
    siphash::Key,
};
use kilo_core::{
    plan::{Hop, Tables},
    prefixes::longest,
};

use super::{
    decisions::Decisions,
    oracle::{Bytes, Input, Ip, Wanted, drops},
    packet::{REDIRECT, SHOT},
    random::Random,
};

/// Whether this is a control address, which gateways use inside tunnels.
pub fn is_control(addr: IpAddr) -> bool {
    matches!(addr, IpAddr::V6(addr) if addr.octets().starts_with(&CONTROL_PREFIX))
}

/// Offset of the signal, if the packet at `link` is one, to whatever destination.
fn start(input: &Input, link: usize, ip: &Ip) -> Option<usize> {
    let shortest = if ip.v6 { 40 } else { 20 };
    let udp = link + shortest;
    let whole = ip.protocol == protocol::UDP && !ip.fragment && ip.header_len == shortest && input.gso == 0;
    let port = input.frame.get(udp + 2..udp + 4)?;
    let begins = matches!(input.frame.get(udp + 8..udp + 16)?, [0, _, _, _, b'k', b'g', b's', b'1']);
    (whole && port == VXLAN_PORT.to_be_bytes() && begins).then_some(udp + 8)
}

fn header(input: &Input, start: usize) -> Result<signal::Header, DropReason> {
    let frame = &input.frame[..];
    let length = usize::from(u16::from_be_bytes([frame[start - 4], frame[start - 3]])).wrapping_sub(8);
    let there = length <= LONGEST && start + length <= frame.len();
    let head = frame.get(start..).and_then(<[u8]>::first_chunk).filter(|_| there);
    signal::header(head.ok_or(DropReason::Malformed)?, length).map_err(|_| DropReason::Malformed)
}

fn hears() -> Wanted {
    Wanted { verdict: SHOT, counted: vec![Action::Hear.label()], ..drops(DropReason::NoHop) }
}

/// The packet with its ends swapped, and other bytes from `start` on.
fn turned(input: &Input, link: usize, ip: &Ip, start: usize, said: &[u8]) -> Wanted {
    let mut bytes = input.frame.clone();
    let (at, length) = if ip.v6 { (link + 8, 16) } else { (link + 12, 4) };
    let swap = |bytes: &mut Vec<u8>, at: usize, length: usize| {
        let pair = bytes[at..at + 2 * length].to_vec();
        bytes[at..at + length].copy_from_slice(&pair[length..]);
        bytes[at + length..at + 2 * length].copy_from_slice(&pair[..length]);
    };
    swap(&mut bytes, at, length);
    if link != 0 {
        swap(&mut bytes, 0, 6);
    }
    let old = bytes[start..start + said.len()].to_vec();
    bytes[start..start + said.len()].copy_from_slice(said);
    let sum = u16::from_be_bytes([bytes[start - 2], bytes[start - 1]]);
    if sum != 0 {
        let sum = kilo_common::checksum::replace(sum, &old, said);
        let sum = if sum == 0 { 0xffff } else { sum };
        bytes[start - 2..start].copy_from_slice(&sum.to_be_bytes());
    }
    let counted = vec![Action::Reflect.label()];
    Wanted { verdict: REDIRECT, counted, bytes: Bytes::Exactly(bytes), ..drops(DropReason::NoHop) }
}

/// `lan_ingress` for a packet to this node's private address; `None`: it is not a signal.
pub fn on_lan(tables: &Tables, input: &Input, link: usize, ip: &Ip) -> Option<Wanted> {
    let start = start(input, link, ip)?;
    if tables.config.flags & CONFIG_NATIVE != 0 && !tables.node.contains_key(&ip.src) {
        return None;
    }
    Some(taken_on_lan(tables, input, link, ip, start).unwrap_or_else(drops))
}

fn taken_on_lan(
    tables: &Tables,
    input: &Input,
    link: usize,
    ip: &Ip,
    start: usize,
) -> Result<Wanted, DropReason> {
    Decisions(tables).arrives(ip.src, input.ifindex)?;
    let header = header(input, start)?;
    let bytes = &input.frame[start..start + header.length];
    match header.kind {
        Kind::Probe => return Ok(turned(input, link, ip, start, &reflected(bytes))),
        Kind::Reflected => return Ok(hears()),
        _ => {}
    }
    let key = tables.signal_key.get(&ip.src).ok_or(DropReason::UnknownSignal)?;
    if header.sender != key.sender {
        return Err(DropReason::ForgedSignal);
    }
    match header.kind {
        Kind::Claim | Kind::Moved | Kind::End => return Err(DropReason::UnknownSignal),
        Kind::Roll | Kind::Announce if header.length != 64 => return Err(DropReason::Malformed),
        _ if header.length == 64 && !signal::is_authentic(bytes, Key(key.key)) => {
            return Err(DropReason::ForgedSignal);
        }
        Kind::Roll | Kind::Announce => {}
        _ => return Ok(hears()),
    }
    let said = signal::parse(bytes).unwrap();
    let Body::Word { cookie, gateway } = said.body else { panic!("64 bytes") };
    let own = sender_id(&tables.config.control);
    let answer = |kind, term, body: Body<Vec<u64>>| {
        let signal = Signal { kind, nonce: said.nonce, term, sender: own, location: said.location, body };
        let mut out = [0; LONGEST];
        let length = signal::write(&mut out, &signal, Some(Key(key.key))).unwrap();
        turned(input, link, ip, start, &out[..length])
    };
    let word = tables.lead[1];
    if header.kind == Kind::Roll {
        let body = Body::Word { cookie: key.cookie, gateway: named(tables, own) };
        return Ok(answer(Kind::Present, term_of(word), body));
    }
    if gateway != header.sender || key.flags & SIGNAL_GATEWAY == 0 {
        return Err(DropReason::ForgedSignal);
    }
    if key.cookie == 0 || cookie != key.cookie {
        return Err(DropReason::StaleSignal);
    }
    if key.hop < HOP_FIRST_NODE {
        return Err(DropReason::NoHop);
    }
    let offered = lead::word(header.term, u16::try_from(key.hop).unwrap());
    assert!(!obeys(word, offered), "what follows would be checked against another word");
    if word != offered {
        return Err(DropReason::StaleSignal);
    }
    Ok(answer(Kind::Follows, header.term, Body::Word { cookie: 0, gateway }))
}

/// The id of the gateway that the word names.
fn named(tables: &Tables, own: u64) -> u64 {
    match u32::from(hop_of(tables.lead[1])) {
        HOP_REMOTE => own,
        id => match tables.hop.get(&id) {
            Some(Hop::Node { remote, .. }) => tables.signal_key.get(remote).map_or(0, |key| key.sender),
            _ => 0,
        },
    }
}

fn reflected(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[2] = Kind::Reflected as u8;
    bytes
}

/// `kilo_ingress`; `None`: it is not a signal for this node.
pub fn in_tunnel(tables: &Tables, input: &Input, ip: &Ip) -> Option<Wanted> {
    let config = &tables.config;
    let wireguard = match ip.dst {
        IpAddr::V4(dst) => dst.octets() == config.wireguard_v4,
        IpAddr::V6(dst) => dst.octets() == config.wireguard_v6,
    };
    let control = matches!(ip.dst, IpAddr::V6(dst) if is_control(ip.dst) && dst.octets() == config.control);
    if !tables.is_private(ip.dst) && !wireguard && !control {
        return None;
    }
    let start = start(input, 0, ip)?;
    let header = match header(input, start) {
        Ok(header) => header,
        Err(reason) => return Some(drops(reason)),
    };
    let remote = |hop| matches!(hop, HOP_REMOTE | HOP_ACTING);
    let foreign = longest(&tables.prefix, ip.src).is_some_and(|owner| remote(owner.hop));
    let bytes = &input.frame[start..start + header.length];
    Some(match header.kind {
        _ if !foreign && !is_control(ip.src) => drops(DropReason::UnknownSignal),
        Kind::Probe if (wireguard || control) && config.flags & CONFIG_GATEWAY != 0 => {
            turned(input, 0, ip, start, &reflected(bytes))
        }
        Kind::Reflected => hears(),
        Kind::Moved if control && is_control(ip.src) => hears(),
        Kind::Claim | Kind::End if control && is_control(ip.src) => match tables.signal_key.get(&ip.src) {
            Some(key) if key.sender != header.sender => drops(DropReason::ForgedSignal),
            Some(key) if key.flags & SIGNAL_GATEWAY != 0 => hears(),
            _ => drops(DropReason::UnknownSignal),
        },
        _ => drops(DropReason::UnknownSignal),
    })
}

/// A node's key for random tables.
pub fn key(random: &mut Random, hop: u32) -> SignalKey {
    let id = u64::from(hop) << 48 | 7;
    SignalKey {
        key: [id, 1],
        // Sometimes that of no node.
        cookie: if random.chance(8) { 0 } else { 5 },
        sender: id,
        hop: if random.chance(12) { HOP_REMOTE } else { hop },
        flags: if random.chance(4) { 0 } else { SIGNAL_GATEWAY },
    }
}

/// A datagram with a signal from the node with this key. ANNOUNCE never names a later term, because later
/// packets are checked against the same word.
pub fn datagram(random: &mut Random, key: &SignalKey) -> Vec<u8> {
    let word = |random: &mut Random, gateway| {
        let cookie = if random.chance(6) { 6 } else { key.cookie };
        Body::Word { cookie, gateway: if random.chance(8) { 1 } else { gateway } }
    };
    let list = || vec![3, 4];
    let kind = random.below(10);
    let (kind, body) = match kind {
        0 | 1 => (Kind::Probe, Body::Empty),
        2 => (Kind::Reflected, Body::Empty),
        3 => (Kind::Roll, word(random, 0)),
        4 | 5 => (Kind::Announce, word(random, key.sender)),
        6 => (Kind::Present, word(random, key.sender)),
        7 => (
            Kind::Hello,
            Body::Hello { is_fit: true, is_busy: false, leads: false, gateway: 3, cookie: 5, losses: list() },
        ),
        8 => (Kind::Adopt, Body::Members { cookie: 5, age: 1, members: list() }),
        _ => (Kind::Claim, Body::Claim { gateway: 1, shared: Shared::Stay, part: (0, 1), members: list() }),
    };
    let sender = if random.chance(12) { 9 } else { key.sender };
    let signal = Signal { kind, nonce: 1, term: Term::NONE, sender, location: 2, body };
    let mut out = [0; LONGEST];
    let length = signal::write(&mut out, &signal, Some(Key(key.key))).unwrap();
    let mut bytes = out[..length].to_vec();
    if random.chance(8) {
        let at = random.below(bytes.len());
        // Not the term: a forged one with a right tag is none.
        if !(16..24).contains(&at) || kind != Kind::Announce {
            bytes[at] ^= 1 << random.below(8);
        }
    }
    let mut udp = [random.byte(), random.byte()].to_vec();
    udp.extend(VXLAN_PORT.to_be_bytes());
    udp.extend(u16::try_from(8 + bytes.len()).unwrap().to_be_bytes());
    udp.extend(if random.chance(2) { [0, 0] } else { [random.byte(), 1] });
    udp.extend(bytes);
    udp
}

//! Which address packets get that leave by an uplink, by destination: as the kernel
//! chooses the source of the host's own (route's preferred source, next hop's subnet;
//! RFC 6724 for IPv6). Pure.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use super::links::{Address, Link};
use kilo_core::{observed::Uplink, prefixes};

/// A route of the main table, as far as it says what packets look like that use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MainRoute {
    /// Index of the outgoing interface.
    pub interface: u32,
    /// Prefix it leads to; of length 0 for the default route.
    pub destination: IpNet,
    /// Preferred source address; `None`: the route names none, and the kernel chooses.
    pub source: Option<IpAddr>,
    /// Next hop; `None`: the route names none.
    pub gateway: Option<IpAddr>,
    /// Metric; smaller wins.
    pub priority: u32,
}

/// Prefixes with labels of their own, as the kernel has them from the start: a source of
/// the destination's label is preferred (RFC 6724, section 2.1 and rule 6).
const LABELS: [(Ipv6Addr, u8, u8); 8] = [
    (Ipv6Addr::UNSPECIFIED, 0, 1),
    (Ipv6Addr::new(0xfc00, 0, 0, 0, 0, 0, 0, 0), 7, 5),
    (Ipv6Addr::new(0x2002, 0, 0, 0, 0, 0, 0, 0), 16, 2),
    (Ipv6Addr::new(0x2001, 0, 0, 0, 0, 0, 0, 0), 32, 6),
    (Ipv6Addr::new(0x2001, 0x10, 0, 0, 0, 0, 0, 0), 28, 7),
    (Ipv6Addr::new(0, 0, 0, 0, 0, 0xffff, 0, 0), 96, 4),
    (Ipv6Addr::UNSPECIFIED, 96, 3),
    (Ipv6Addr::LOCALHOST, 128, 0),
];

/// The address of each family that packets usually get that leave by this link, and the
/// destinations that want another. `own`: every address of this host, of which a
/// route's preferred source is one.
pub fn choose(link: &Link, ways: &[MainRoute], own: &BTreeSet<IpAddr>) -> (Uplink, BTreeMap<IpNet, IpAddr>) {
    let ways = by_destination(link.index, ways, own);
    let (mut usual, mut others) = (Uplink::default(), BTreeMap::new());
    let v4: Vec<Ipv4Net> = link.addresses.iter().filter_map(usable_v4).collect();
    // An interface whose first address is link-local is not one that leads anywhere.
    let first = v4.first().filter(|net| !net.addr().is_link_local());
    if let Some(first) = first.map(Ipv4Net::addr) {
        usual.v4 = Some(first);
        let places = v4.iter().map(|net| IpNet::V4(net.trunc()));
        let places = places.chain(ways.keys().copied().filter(|way| way.addr().is_ipv4()));
        let answer = |place: IpNet| choose_v4(place, &ways, &v4).unwrap_or(first).into();
        others.extend(compress(first.into(), places.map(|place| (place, answer(place))).collect()));
    }
    let v6: Vec<(Ipv6Net, bool)> = link.addresses.iter().filter_map(usable_v6).collect();
    if let Some(first) = choose_v6(IpNet::V6(Ipv6Net::default()), &ways, &v6) {
        usual.v6 = Some(first);
        let labels = LABELS.iter().filter_map(|(addr, length, _)| Ipv6Net::new(*addr, *length).ok());
        // Where a destination ceases to be like this address and not like another.
        let near = v6.iter().flat_map(|(net, _)| {
            (1..=net.prefix_len()).filter_map(|length| Ipv6Net::new(net.addr(), length).ok())
        });
        let places = labels.chain(near).map(|net| IpNet::V6(net.trunc()));
        let places = places.chain(ways.keys().copied().filter(|way| way.addr().is_ipv6()));
        let answer = |place: IpNet| choose_v6(place, &ways, &v6).unwrap_or(first).into();
        others.extend(compress(first.into(), places.map(|place| (place, answer(place))).collect()));
    }
    (usual, others)
}

/// The ways by this interface; of two to one destination the better.
fn by_destination(interface: u32, ways: &[MainRoute], own: &BTreeSet<IpAddr>) -> BTreeMap<IpNet, MainRoute> {
    let mut best = BTreeMap::<IpNet, MainRoute>::new();
    for way in ways.iter().filter(|way| way.interface == interface) {
        let source = way.source.filter(|source| own.contains(source));
        let way = MainRoute { source, destination: way.destination.trunc(), ..*way };
        let kept = best.entry(way.destination).or_insert(way);
        if way.priority < kept.priority {
            *kept = way;
        }
    }
    best
}

fn usable_v4(address: &Address) -> Option<Ipv4Net> {
    match address.net {
        IpNet::V4(net) if address.global && !address.secondary && !net.addr().is_loopback() => Some(net),
        _ => None,
    }
}

/// With whether it is deprecated. Privacy addresses do not last as long as flows.
fn usable_v6(address: &Address) -> Option<(Ipv6Net, bool)> {
    let usable = address.global && !address.secondary && (!address.unusable || address.deprecated);
    match address.net {
        IpNet::V6(net) if usable && !net.addr().is_loopback() && !net.addr().is_unicast_link_local() => {
            Some((net, address.deprecated))
        }
        _ => None,
    }
}

/// For destinations in this prefix, but not in a longer one of those asked for.
fn choose_v4(place: IpNet, ways: &BTreeMap<IpNet, MainRoute>, addresses: &[Ipv4Net]) -> Option<Ipv4Addr> {
    let way = prefixes::holding(ways, place).next().map(|(_, way)| way);
    if let Some(IpAddr::V4(source)) = way.and_then(|way| way.source) {
        return Some(source);
    }
    let next = match way.and_then(|way| way.gateway) {
        Some(gateway) => IpNet::from(gateway),
        None => place,
    };
    addresses.iter().find(|net| IpNet::V4(**net).contains(&next)).map(Ipv4Net::addr)
}

/// As [`choose_v4`]: RFC 6724, rules 3 (deprecated), 6 (label) and 8 (longest match); all
/// addresses are of one scope (2) and of the outgoing interface (5), and none is temporary (7).
fn choose_v6(
    place: IpNet,
    ways: &BTreeMap<IpNet, MainRoute>,
    addresses: &[(Ipv6Net, bool)],
) -> Option<Ipv6Addr> {
    let IpNet::V6(net) = place else { return None };
    let way = prefixes::holding(ways, place).next().map(|(_, way)| way);
    if let Some(IpAddr::V6(source)) = way.and_then(|way| way.source) {
        return Some(source);
    }
    let wanted = label(net);
    let score = |(candidate, deprecated): &(Ipv6Net, bool)| {
        let same = (candidate.addr().to_bits() ^ net.addr().to_bits()).leading_zeros();
        let most = net.prefix_len().min(candidate.prefix_len());
        (!deprecated, label(candidate.addr().into()) == wanted, same.min(most.into()))
    };
    // Of equal ones the first counts.
    addresses.iter().rev().max_by_key(|candidate| score(candidate)).map(|(net, _)| net.addr())
}

fn label(net: Ipv6Net) -> u8 {
    let holds = |addr: Ipv6Addr, length| Ipv6Net::new(addr, length).is_ok_and(|prefix| prefix.contains(&net));
    let found = LABELS.iter().filter(|(addr, length, _)| holds(*addr, *length));
    found.max_by_key(|(_, length, _)| *length).map_or(1, |(_, _, label)| *label)
}

/// Leaves out what the next shorter prefix says, too; the shortest says `usual`.
fn compress(usual: IpAddr, all: BTreeMap<IpNet, IpAddr>) -> BTreeMap<IpNet, IpAddr> {
    let mut kept = BTreeMap::new();
    let mut by_length: Vec<_> = all.into_iter().collect();
    by_length.sort_by_key(|(place, _)| place.prefix_len());
    for (place, addr) in by_length {
        let above = prefixes::holding(&kept, place).next().map_or(usual, |(_, addr)| *addr);
        if above != addr {
            kept.insert(place, addr);
        }
    }
    kept
}

//! Pure: which source address packets leaving by an uplink get, by destination. The choice is the kernel's
//! for the host's own packets (route's preferred source, next hop's subnet; RFC 6724 for IPv6).

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use super::links::{Address, Link};
use kilo_core::{observed::Uplink, prefixes};

/// A route of the main table, reduced to what determines the source address of packets.
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

/// The kernel's default address labels (prefix, its length, label): a source with the destination's label is
/// preferred (RFC 6724, section 2.1 and rule 6).
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

/// The usual source address of each family for packets that leave by this link, and the destinations that
/// need another one. `own`: every address of this host; a route's preferred source counts only if it is one.
pub fn choose(
    link: &Link,
    routes: &[MainRoute],
    own: &BTreeSet<IpAddr>,
) -> (Uplink, BTreeMap<IpNet, IpAddr>) {
    let routes = by_destination(link.index, routes, own);
    let (mut usual, mut others) = (Uplink::default(), BTreeMap::new());
    let v4: Vec<Ipv4Net> = link.addresses.iter().filter_map(usable_v4).collect();
    // An interface whose first address is link-local is not one that leads anywhere.
    let first = v4.first().filter(|net| !net.addr().is_link_local());
    if let Some(first) = first.map(Ipv4Net::addr) {
        usual.v4 = Some(first);
        let destinations = v4.iter().map(|net| IpNet::V4(net.trunc()));
        let destinations = destinations.chain(routes.keys().copied().filter(|route| route.addr().is_ipv4()));
        let answer = |net: IpNet| choose_v4(net, &routes, &v4).unwrap_or(first).into();
        others.extend(compress(first.into(), destinations.map(|net| (net, answer(net))).collect()));
    }
    let v6: Vec<(Ipv6Net, bool)> = link.addresses.iter().filter_map(usable_v6).collect();
    if let Some(first) = choose_v6(IpNet::V6(Ipv6Net::default()), &routes, &v6) {
        usual.v6 = Some(first);
        let labels = LABELS.iter().filter_map(|(addr, length, _)| Ipv6Net::new(*addr, *length).ok());
        // Prefixes of each address: where a destination may match it longer than another address.
        let near = v6.iter().flat_map(|(net, _)| {
            (1..=net.prefix_len()).filter_map(|length| Ipv6Net::new(net.addr(), length).ok())
        });
        let destinations = labels.chain(near).map(|net| IpNet::V6(net.trunc()));
        let destinations = destinations.chain(routes.keys().copied().filter(|route| route.addr().is_ipv6()));
        let answer = |net: IpNet| choose_v6(net, &routes, &v6).unwrap_or(first).into();
        others.extend(compress(first.into(), destinations.map(|net| (net, answer(net))).collect()));
    }
    (usual, others)
}

/// Routes through this interface; of several to one destination, the one with the smallest metric.
fn by_destination(
    interface: u32,
    routes: &[MainRoute],
    own: &BTreeSet<IpAddr>,
) -> BTreeMap<IpNet, MainRoute> {
    let mut best = BTreeMap::<IpNet, MainRoute>::new();
    for route in routes.iter().filter(|route| route.interface == interface) {
        let source = route.source.filter(|source| own.contains(source));
        let route = MainRoute { source, destination: route.destination.trunc(), ..*route };
        let kept = best.entry(route.destination).or_insert(route);
        if route.priority < kept.priority {
            *kept = route;
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

/// The address and whether it is deprecated. Privacy addresses are not usable: they do not last as long as
/// flows.
fn usable_v6(address: &Address) -> Option<(Ipv6Net, bool)> {
    let usable = address.global && !address.secondary && (!address.unusable || address.deprecated);
    match address.net {
        IpNet::V6(net) if usable && !net.addr().is_loopback() && !net.addr().is_unicast_link_local() => {
            Some((net, address.deprecated))
        }
        _ => None,
    }
}

/// Source address for destinations in this prefix that are not in a longer one that is asked for, too.
fn choose_v4(
    destination: IpNet,
    routes: &BTreeMap<IpNet, MainRoute>,
    addresses: &[Ipv4Net],
) -> Option<Ipv4Addr> {
    let route = prefixes::holding(routes, destination).next().map(|(_, route)| route);
    if let Some(IpAddr::V4(source)) = route.and_then(|route| route.source) {
        return Some(source);
    }
    let next = match route.and_then(|route| route.gateway) {
        Some(gateway) => IpNet::from(gateway),
        None => destination,
    };
    addresses.iter().find(|net| IpNet::V4(**net).contains(&next)).map(Ipv4Net::addr)
}

/// As [`choose_v4`], by RFC 6724: rules 3 (deprecated), 6 (label) and 8 (longest match). All addresses are of
/// one scope (2) and on the outgoing interface (5), and none is temporary (7).
fn choose_v6(
    destination: IpNet,
    routes: &BTreeMap<IpNet, MainRoute>,
    addresses: &[(Ipv6Net, bool)],
) -> Option<Ipv6Addr> {
    let IpNet::V6(net) = destination else { return None };
    let route = prefixes::holding(routes, destination).next().map(|(_, route)| route);
    if let Some(IpAddr::V6(source)) = route.and_then(|route| route.source) {
        return Some(source);
    }
    let wanted = label(net);
    let score = |(candidate, deprecated): &(Ipv6Net, bool)| {
        let same = (candidate.addr().to_bits() ^ net.addr().to_bits()).leading_zeros();
        let most = net.prefix_len().min(candidate.prefix_len());
        (!deprecated, label(candidate.addr().into()) == wanted, same.min(most.into()))
    };
    // Of equal candidates the first wins.
    addresses.iter().rev().max_by_key(|candidate| score(candidate)).map(|(net, _)| net.addr())
}

fn label(net: Ipv6Net) -> u8 {
    let holds = |addr: Ipv6Addr, length| Ipv6Net::new(addr, length).is_ok_and(|prefix| prefix.contains(&net));
    let found = LABELS.iter().filter(|(addr, length, _)| holds(*addr, *length));
    found.max_by_key(|(_, length, _)| *length).map_or(1, |(_, _, label)| *label)
}

/// Leaves out prefixes with the same address as the next shorter one, or as `usual` where there is none.
fn compress(usual: IpAddr, all: BTreeMap<IpNet, IpAddr>) -> BTreeMap<IpNet, IpAddr> {
    let mut kept = BTreeMap::new();
    let mut by_length: Vec<_> = all.into_iter().collect();
    by_length.sort_by_key(|(prefix, _)| prefix.prefix_len());
    for (prefix, addr) in by_length {
        let above = prefixes::holding(&kept, prefix).next().map_or(usual, |(_, addr)| *addr);
        if above != addr {
            kept.insert(prefix, addr);
        }
    }
    kept
}

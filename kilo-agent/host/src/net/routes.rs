//! Routes through the WireGuard device, marked with [`PROTOCOL`], and lookups.
//!
//! Behind a route that is [`closed`](Route::closed) stands an `unreachable` one of
//! a high metric. The kernel removes routes together with their device, or when it
//! goes down; these stay, and the default route does not get the packets. To pods of
//! this node and of nodes that were given up there is only such a one.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::IpNet;
use rtnetlink::{
    packet_core::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE},
    packet_route::{
        AddressFamily, RouteNetlinkMessage,
        route::{
            RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteMetric, RouteProtocol, RouteScope,
            RouteType,
        },
    },
};

use rtnetlink::packet_route::route::RouteFlags;

use super::{NetError, PROTOCOL, Refused, Rtnl, Way, addresses::keep, links};
use kilo_core::{
    flat_map::{FlatSet, Key as _, merge},
    observed::Elsewhere,
    plan::{MAIN_TABLE, Route},
};

/// Metric of the `unreachable` routes: behind everything else.
const UNREACHABLE_METRIC: u32 = 2_000_000_000;

/// Metric the kernel gives IPv6 routes that bear none.
const DEFAULT_METRIC_V6: u32 = 1024;

/// A route of the kernel's tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Found {
    /// Destination, table and preferred source.
    pub route: Route,
    /// Output interface; `None` for multipath and unreachable routes.
    pub interface: Option<u32>,
    /// Metric; smaller wins.
    pub priority: u32,
    /// Who made it: 2 = kernel, 3 = boot, 4 = static, [`PROTOCOL`] = us.
    pub protocol: u8,
    /// It answers that the destination is unreachable.
    pub unreachable: bool,
    /// There is no gateway: the destinations are on the link.
    pub on_link: bool,
}

/// A route as the kernel holds it: one to the WireGuard device, or the
/// `unreachable` one behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Destination, source and MTU.
    pub route: Route,
    /// It answers that the destination is unreachable.
    pub unreachable: bool,
}

impl Entry {
    /// The entries of a route that is wanted, in the form the kernel gives back.
    fn of(route: &Route) -> impl Iterator<Item = Self> {
        let behind = Route { source: None, mtu: None, ..normalise(*route) };
        let behind = route.closed.then_some(Self { route: behind, unreachable: true });
        [Self { route: normalise(*route), unreachable: false }].into_iter().chain(behind)
    }

    /// The `unreachable` route to a prefix that has no other of ours.
    fn unreachable(destination: IpNet) -> Self {
        let route = Route { destination, table: MAIN_TABLE, source: None, mtu: None, closed: false };
        Self { route: normalise(route), unreachable: true }
    }

    /// What there is one of.
    const fn key(&self) -> (u32, IpNet, bool) {
        (self.route.table, self.route.destination, self.unreachable)
    }
}

/// Difference between the routes there are and those wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// New destinations.
    pub add: Vec<Entry>,
    /// Ours with another source or interface: changed in place, never absent.
    pub replace: Vec<Entry>,
    /// Ours that nobody wants, deleted last.
    pub delete: Vec<Found>,
}

/// Pure: what has to change so that our routes are `wanted`, all through `kilo`, and those that
/// answer that these destinations are `unreachable`.
pub fn diff<'a>(
    current: &[Found],
    wanted: impl IntoIterator<Item = &'a Route>,
    unreachable: impl IntoIterator<Item = &'a IpNet>,
    kilo: u32,
) -> Changes {
    let unreachable = unreachable.into_iter().copied().map(Entry::unreachable);
    let wanted = wanted.into_iter().flat_map(Entry::of).chain(unreachable);
    let wanted: BTreeMap<_, Entry> = wanted.map(|entry| (entry.key(), entry)).collect();
    let mut changes = Changes::default();
    let mut right = BTreeSet::new();
    let mut present = BTreeSet::new();
    for found in current {
        let key = (found.route.table, found.route.destination, found.unreachable);
        match wanted.get(&key) {
            None => changes.delete.push(*found),
            Some(entry) => {
                present.insert(key);
                let leads = found.unreachable || found.interface == Some(kilo);
                if entry.route == found.route && leads {
                    right.insert(key);
                }
            }
        }
    }
    for (key, entry) in wanted {
        if right.contains(&key) {
        } else if present.contains(&key) {
            changes.replace.push(entry);
        } else {
            changes.add.push(entry);
        }
    }
    changes
}

/// Pure: what has to change where exactly the routes `before` are there, all
/// through `kilo`.
pub fn between(before: &FlatSet<Route>, wanted: &FlatSet<Route>, kilo: u32) -> Changes {
    let found = |entry: Entry| Found {
        route: entry.route,
        interface: (!entry.unreachable).then_some(kilo),
        // Whatever the kernel chose.
        priority: if entry.unreachable { UNREACHABLE_METRIC } else { 0 },
        protocol: PROTOCOL,
        unreachable: entry.unreachable,
        on_link: true,
    };
    let (mut gone, mut new) = (Vec::new(), Vec::new());
    let order = |one: &&Route, other: &&Route| one.rank().cmp(&other.rank());
    merge(before.iter(), wanted.iter(), order, |before, wanted| match (before, wanted) {
        (Some(_), Some(_)) => {}
        (before, wanted) => {
            gone.extend(before.into_iter().flat_map(Entry::of).map(found));
            new.extend(wanted);
        }
    });
    diff(&gone, new, [], kilo)
}

/// The form the kernel gives back: no host bits; a source of the other family
/// cannot be expressed and is left out.
fn normalise(mut route: Route) -> Route {
    route.destination = route.destination.trunc();
    route.closed = false;
    route.source = route.source.filter(|source| source.is_ipv4() == route.destination.addr().is_ipv4());
    route
}

/// Our routes in all tables, both families.
pub async fn read(rtnl: &Rtnl) -> Result<Vec<Found>, NetError> {
    dump(rtnl, RouteProtocol::from(PROTOCOL)).await
}

async fn dump(rtnl: &Rtnl, protocol: RouteProtocol) -> Result<Vec<Found>, NetError> {
    Ok(messages(rtnl, protocol).await?.iter().filter_map(parse).collect())
}

async fn messages(rtnl: &Rtnl, protocol: RouteProtocol) -> Result<Vec<RouteMessage>, NetError> {
    let mut all = Vec::new();
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        let mut request = RouteMessage::default();
        request.header.address_family = family;
        request.header.protocol = protocol;
        let answers = rtnl.dump("list routes", RouteNetlinkMessage::GetRoute(request)).await?;
        all.extend(answers.into_iter().filter_map(|message| match message {
            // A kernel without IPv6 answers with IPv4's routes again, and an
            // old one does not filter.
            RouteNetlinkMessage::NewRoute(route)
                if route.header.address_family == family
                    && (protocol == RouteProtocol::Unspec || route.header.protocol == protocol) =>
            {
                Some(route)
            }
            _ => None,
        }));
    }
    Ok(all)
}

fn parse(message: &RouteMessage) -> Option<Found> {
    let any = match message.header.address_family {
        AddressFamily::Inet => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        _ => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    };
    let mut found = Found {
        route: Route {
            destination: IpNet::new(any, message.header.destination_prefix_length).ok()?,
            table: u32::from(message.header.table),
            source: None,
            mtu: None,
            closed: false,
        },
        interface: None,
        priority: 0,
        protocol: message.header.protocol.into(),
        unreachable: message.header.kind == RouteType::Unreachable,
        on_link: true,
    };
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Destination(address) => {
                found.route.destination =
                    IpNet::new(ip(address)?, message.header.destination_prefix_length).ok()?;
            }
            RouteAttribute::PrefSource(address) => found.route.source = ip(address),
            RouteAttribute::Metrics(metrics) => {
                found.route.mtu = metrics.iter().find_map(|metric| match metric {
                    RouteMetric::Mtu(mtu) => Some(*mtu),
                    _ => None,
                });
            }
            RouteAttribute::Table(table) => found.route.table = *table,
            RouteAttribute::Oif(index) => found.interface = Some(*index),
            RouteAttribute::Priority(priority) => found.priority = *priority,
            RouteAttribute::Gateway(_) | RouteAttribute::Via(_) => found.on_link = false,
            RouteAttribute::MultiPath(hops) => {
                found.on_link = false;
                // Any of the hops will do for "which interface leads there".
                found.interface = hops.first().map(|hop| hop.interface_index);
            }
            _ => {}
        }
    }
    Some(found)
}

fn is_temporary(message: &RouteMessage) -> bool {
    message
        .attributes
        .iter()
        .any(|attribute| matches!(attribute, RouteAttribute::CacheInfo(cache) if cache.expires != 0))
}

fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(address) => Some(IpAddr::V4(*address)),
        RouteAddress::Inet6(address) => Some(IpAddr::V6(*address)),
        _ => None,
    }
}

/// Adds and replaces; returns the number of writes.
pub(super) async fn apply_sets(
    rtnl: &Rtnl,
    changes: &Changes,
    kilo: u32,
    refused: &mut Vec<Refused>,
) -> Result<usize, NetError> {
    let mut writes = 0;
    let mut taken = Vec::new();
    for entry in &changes.add {
        match set(rtnl, entry, kilo, NLM_F_CREATE | NLM_F_EXCL).await {
            Err(error) if error.errno() == Some(nix::libc::EEXIST) && !entry.unreachable => {
                taken.push(*entry);
            }
            other => writes += keep(refused, other)?,
        }
    }
    for entry in &changes.replace {
        writes += keep(refused, set(rtnl, entry, kilo, NLM_F_CREATE | NLM_F_REPLACE).await)?;
    }
    if !taken.is_empty() {
        writes += take_over(rtnl, &taken, kilo, refused).await?;
    }
    Ok(writes)
}

/// Destinations somebody else already routes: what an earlier Kilo left (over
/// the WireGuard or an IPIP device, or marked as its own) and what a CNI beside
/// us leads through its overlay is replaced in place, the rest is refused.
async fn take_over(
    rtnl: &Rtnl,
    taken: &[Entry],
    kilo: u32,
    refused: &mut Vec<Refused>,
) -> Result<usize, NetError> {
    let mut writes = 0;
    let links = links::list(rtnl).await?;
    let existing = messages(rtnl, RouteProtocol::Unspec).await?;
    let existing: Vec<_> = existing.iter().filter_map(|m| Some((parse(m)?, is_kilos(m)))).collect();
    for entry in taken {
        let route = &entry.route;
        let holder = existing
            .iter()
            .filter(|(found, _)| {
                found.route.table == route.table
                    && found.route.destination == route.destination
                    && !found.unreachable
            })
            .min_by_key(|(found, _)| found.priority);
        let by_kilo = holder.is_some_and(|(_, by_kilo)| *by_kilo);
        let holder = holder.map(|(found, _)| found);
        let device = holder.and_then(|found| links.iter().find(|link| Some(link.index) == found.interface));
        let ours = by_kilo
            || device.is_some_and(|link| link.index == kilo || link.kind == "ipip" || is_overlay(&link.name));
        if ours {
            writes += keep(refused, set(rtnl, entry, kilo, NLM_F_CREATE | NLM_F_REPLACE).await)?;
        } else {
            refused.push(Refused {
                what: format!(
                    "route to {} (table {}) exists already through {} (protocol {}); remove it, or give this \
                     node another pod CIDR",
                    route.destination,
                    route.table,
                    device.map_or("no interface", |link| link.name.as_str()),
                    holder.map_or(0, |found| found.protocol),
                ),
                source: io::Error::from_raw_os_error(nix::libc::EEXIST),
            });
        }
    }
    Ok(writes)
}

/// Device by which flannel or Cilium lead to the pods of every other node. Both
/// know nothing of locations, so that theirs stand in the way of ours to others.
fn is_overlay(device: &str) -> bool {
    device.starts_with("flannel.") || device.starts_with("flannel-v6.") || device == "cilium_host"
}

/// Kilo's routes to nodes of the own location, where it does not encapsulate:
/// static, and the next hop taken as a neighbour without proof.
fn is_kilos(message: &RouteMessage) -> bool {
    message.header.protocol == RouteProtocol::Static && message.header.flags.contains(RouteFlags::Onlink)
}

/// Deletes; returns the number of writes.
pub(super) async fn apply_deletes(
    rtnl: &Rtnl,
    changes: &Changes,
    refused: &mut Vec<Refused>,
) -> Result<usize, NetError> {
    let mut writes = 0;
    for found in &changes.delete {
        let mut message = message(&found.route, found.interface.filter(|_| !found.unreachable));
        message.header.scope = RouteScope::NoWhere;
        message.header.kind = if found.unreachable { RouteType::Unreachable } else { RouteType::Unspec };
        if found.priority != 0 {
            message.attributes.push(RouteAttribute::Priority(found.priority));
        }
        let what = format!("delete route to {} (table {})", found.route.destination, found.route.table);
        match rtnl.write(&what, RouteNetlinkMessage::DelRoute(message), 0).await {
            // The kernel took it away meanwhile.
            Err(error) if error.errno() == Some(nix::libc::ESRCH) => {}
            other => writes += keep(refused, other)?,
        }
    }
    Ok(writes)
}

async fn set(rtnl: &Rtnl, entry: &Entry, kilo: u32, flags: u16) -> Result<(), NetError> {
    let Entry { route, unreachable } = entry;
    let mut message = message(route, Some(kilo).filter(|_| !unreachable));
    let mut what = format!("route to {}", route.destination);
    if *unreachable {
        what.insert_str(0, "unreachable ");
        message.header.kind = RouteType::Unreachable;
        message.header.scope = RouteScope::Universe;
        message.attributes.push(RouteAttribute::Priority(UNREACHABLE_METRIC));
    }
    what += &route.source.map_or_else(String::new, |source| format!(" from {source}"));
    what += &format!(" (table {})", route.table);
    rtnl.write(&what, RouteNetlinkMessage::NewRoute(message), flags).await
}

fn message(route: &Route, interface: Option<u32>) -> RouteMessage {
    let mut message = RouteMessage::default();
    let v4 = route.destination.addr().is_ipv4();
    message.header.address_family = if v4 { AddressFamily::Inet } else { AddressFamily::Inet6 };
    message.header.destination_prefix_length = route.destination.prefix_len();
    // The attribute carries tables beyond the header's byte.
    message.header.table = u8::try_from(route.table).unwrap_or(RouteHeader::RT_TABLE_UNSPEC);
    message.header.protocol = RouteProtocol::from(PROTOCOL);
    message.header.scope = if v4 { RouteScope::Link } else { RouteScope::Universe };
    message.header.kind = RouteType::Unicast;
    message.attributes.push(RouteAttribute::Destination(route.destination.addr().into()));
    message.attributes.push(RouteAttribute::Table(route.table));
    if let Some(source) = route.source {
        message.attributes.push(RouteAttribute::PrefSource(source.into()));
    }
    if let Some(mtu) = route.mtu {
        message.attributes.push(RouteAttribute::Metrics(vec![RouteMetric::Mtu(mtu)]));
    }
    if let Some(index) = interface {
        message.attributes.push(RouteAttribute::Oif(index));
    }
    message
}

/// Output interface the kernel would use towards an address from this host;
/// `None` when there is no route.
pub async fn lookup(rtnl: &Rtnl, address: IpAddr) -> Result<Option<Found>, NetError> {
    let request = question(address);
    match rtnl.get("look up a route", RouteNetlinkMessage::GetRoute(request)).await {
        Ok(answers) => Ok(answers.into_iter().find_map(|message| match message {
            RouteNetlinkMessage::NewRoute(route) if route.header.kind == RouteType::Unicast => {
                let mut found = parse(&route)?;
                // What the kernel learnt for a while is no setting of the route.
                found.route.mtu = found.route.mtu.filter(|_| !is_temporary(&route));
                Some(found)
            }
            _ => None,
        })),
        Err(NetError::Kernel { .. }) => Ok(None),
        Err(other) => Err(other),
    }
}

/// Routes of the main table by this interface, both families.
pub async fn by_interface(rtnl: &Rtnl, interface: u32) -> Result<Vec<Way>, NetError> {
    let mut all = Vec::new();
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        let mut request = RouteMessage::default();
        request.header.address_family = family;
        request.header.table = RouteHeader::RT_TABLE_MAIN;
        request.attributes.push(RouteAttribute::Oif(interface));
        let answers =
            rtnl.dump("list the routes of an interface", RouteNetlinkMessage::GetRoute(request)).await;
        // A kernel without IPv6, or without this table of a family, has none.
        for answer in
            answers.or_else(|error| if error.errno().is_some() { Ok(Vec::new()) } else { Err(error) })?
        {
            let RouteNetlinkMessage::NewRoute(message) = answer else { continue };
            if message.header.address_family == family && message.header.kind == RouteType::Unicast {
                all.extend(way(&message, interface));
            }
        }
    }
    Ok(all)
}

fn way(message: &RouteMessage, interface: u32) -> Option<Way> {
    let found = parse(message).filter(|found| found.route.table == MAIN_TABLE)?;
    let next_hop = |attributes: &[RouteAttribute]| {
        attributes.iter().find_map(|attribute| match attribute {
            RouteAttribute::Gateway(address) => ip(address),
            _ => None,
        })
    };
    let of_several = message.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::MultiPath(hops) => hops.iter().find(|hop| hop.interface_index == interface),
        _ => None,
    });
    if of_several.is_none() && found.interface != Some(interface) {
        return None;
    }
    Some(Way {
        interface,
        destination: found.route.destination,
        source: found.route.source,
        gateway: next_hop(of_several.map_or(&message.attributes, |hop| &hop.attributes)),
        priority: found.priority,
    })
}

/// Interfaces of all next hops of the route to an address; empty without a route.
pub async fn next_hops(rtnl: &Rtnl, address: IpAddr) -> Result<Vec<u32>, NetError> {
    let mut request = question(address);
    request.header.flags |= RouteFlags::FibMatch;
    let answers =
        match rtnl.get("look up the next hops of a route", RouteNetlinkMessage::GetRoute(request)).await {
            Ok(answers) => answers,
            Err(NetError::Kernel { .. }) => return Ok(Vec::new()),
            Err(other) => return Err(other),
        };
    let attributes = answers.into_iter().filter_map(|message| match message {
        RouteNetlinkMessage::NewRoute(route) if route.header.kind == RouteType::Unicast => {
            Some(route.attributes)
        }
        _ => None,
    });
    let interfaces = attributes.flatten().flat_map(|attribute| match attribute {
        RouteAttribute::Oif(index) => vec![index],
        RouteAttribute::MultiPath(hops) => hops.iter().map(|hop| hop.interface_index).collect(),
        _ => Vec::new(),
    });
    Ok(interfaces.collect())
}

fn question(address: IpAddr) -> RouteMessage {
    let mut request = RouteMessage::default();
    let (family, length) = match address {
        IpAddr::V4(_) => (AddressFamily::Inet, 32),
        IpAddr::V6(_) => (AddressFamily::Inet6, 128),
    };
    request.header.address_family = family;
    request.header.destination_prefix_length = length;
    request.attributes.push(RouteAttribute::Destination(address.into()));
    request
}

/// The interfaces that routes of the main table lead out of the host by, without those
/// in `own`: these are the agent's, which follow the others.
pub async fn ways_out(rtnl: &Rtnl, own: &[u32]) -> Result<WaysOut, NetError> {
    let messages = messages(rtnl, RouteProtocol::Unspec).await?;
    let routes: Vec<Found> = messages.iter().filter_map(parse).collect();
    let next_hops: BTreeSet<u32> = messages
        .iter()
        .filter(|message| message.header.kind == RouteType::Unicast)
        .flat_map(next_hop_interfaces)
        .filter(|index| !own.contains(index))
        .collect();
    let elsewhere = routes.iter().filter(|found| {
        found.protocol != PROTOCOL
            && found.route.table == MAIN_TABLE
            && found.route.destination.prefix_len() > 0
            && !found.unreachable
    });
    let elsewhere = elsewhere.filter_map(|found| {
        let destination = found.route.destination;
        let ours = if destination.addr().is_ipv4() { 1 } else { DEFAULT_METRIC_V6 };
        let way = Elsewhere { on_link: found.on_link, wins: found.priority < ours };
        Some((destination, found.interface?, way))
    });
    Ok(WaysOut {
        default: default_of(&routes, own),
        next_hops: next_hops.into_iter().collect(),
        elsewhere: elsewhere.collect(),
    })
}

/// What [`ways_out`] finds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WaysOut {
    /// Interface of the default route with the smallest metric, IPv4 before IPv6.
    pub default: Option<u32>,
    /// Interfaces with a route that has a next hop, or with a default route.
    pub next_hops: Vec<u32>,
    /// What others' routes lead to, without default routes: prefix, interface, and how
    /// the kernel takes the route.
    pub elsewhere: Vec<(IpNet, u32, Elsewhere)>,
}

fn next_hop_interfaces(message: &RouteMessage) -> Vec<u32> {
    let mut interfaces = Vec::new();
    let mut has_next_hop = message.header.destination_prefix_length == 0;
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Gateway(_) | RouteAttribute::Via(_) => has_next_hop = true,
            RouteAttribute::Oif(index) => interfaces.push(*index),
            RouteAttribute::MultiPath(hops) => {
                has_next_hop = true;
                interfaces.extend(hops.iter().map(|hop| hop.interface_index));
            }
            _ => {}
        }
    }
    if has_next_hop { interfaces } else { Vec::new() }
}

fn default_of(routes: &[Found], own: &[u32]) -> Option<u32> {
    routes
        .iter()
        .filter(|found| found.route.table == MAIN_TABLE && found.route.destination.prefix_len() == 0)
        .filter(|found| !found.unreachable)
        .filter_map(|found| {
            let index = found.interface.filter(|index| !own.contains(index))?;
            Some((found.route.destination.addr().is_ipv6(), found.priority, index))
        })
        .min_by_key(|(v6, priority, _)| (*v6, *priority))
        .map(|(_, _, index)| index)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn route(destination: &str, source: Option<&str>) -> Route {
        Route {
            destination: destination.parse().unwrap(),
            table: MAIN_TABLE,
            source: source.map(|text| text.parse().unwrap()),
            mtu: None,
            closed: false,
        }
    }

    fn found(route: Route, interface: u32, priority: u32) -> Found {
        let route = Route { closed: false, ..route };
        Found {
            route,
            interface: Some(interface),
            priority,
            protocol: PROTOCOL,
            unreachable: false,
            on_link: true,
        }
    }

    /// The route behind a closed one.
    fn unreachable(route: Route) -> Found {
        let route = Route { source: None, mtu: None, ..route };
        Found { interface: None, unreachable: true, ..found(route, 0, UNREACHABLE_METRIC) }
    }

    const fn entry(route: Route) -> Entry {
        Entry { route, unreachable: false }
    }

    #[test]
    fn another_source_or_interface_is_replaced_in_place() {
        let old = route("10.2.0.0/24", Some("10.0.0.1"));
        let new = route("10.2.0.0/24", Some("10.0.0.2"));
        let changes = diff(&[found(old, 5, 0)], &BTreeSet::from([new]), [], 5);
        assert_eq!(changes, Changes { replace: vec![entry(new)], ..Changes::default() });
        let changes = diff(&[found(new, 4, 0)], &BTreeSet::from([new]), [], 5);
        assert_eq!(changes, Changes { replace: vec![entry(new)], ..Changes::default() });
        assert_eq!(diff(&[found(new, 5, 0)], &BTreeSet::from([new]), [], 5), Changes::default());
    }

    #[test]
    fn a_source_of_the_other_family_is_no_difference() {
        let wanted = BTreeSet::from([route("fd00:1::/64", Some("10.0.0.1"))]);
        assert_eq!(diff(&[found(route("fd00:1::/64", None), 5, 1024)], &wanted, [], 5), Changes::default());
    }

    #[test]
    fn default_route_is_the_cheapest_and_prefers_ipv4() {
        let any4 = route("0.0.0.0/0", None);
        let any6 = route("::/0", None);
        let routes = [found(any6, 2, 0), found(any4, 3, 600), found(any4, 4, 100)];
        assert_eq!(default_of(&routes, &[]), Some(4));
        assert_eq!(default_of(&routes, &[4]), Some(3), "not a device of ours");
        assert_eq!(default_of(&routes, &[3, 4]), Some(2));
        assert_eq!(default_of(&[found(any6, 2, 1024)], &[]), Some(2));
        assert_eq!(default_of(&[found(route("10.0.0.0/8", None), 2, 0)], &[]), None);
    }

    proptest! {
        #[test]
        fn applying_a_diff_reaches_the_plan(
            have in proptest::collection::btree_map(0u8..40, (0u8..3, 4u32..6, any::<[bool; 2]>()), 0..30),
            want in proptest::collection::btree_map(0u8..40, (0u8..3, any::<bool>()), 0..30),
        ) {
            let make = |net: u8, source: u8, closed: bool| Route {
                closed,
                ..route(&format!("10.{net}.0.0/24"), Some(&format!("192.0.2.{source}")))
            };
            // Either may be missing: the kernel removes those of a device that went down.
            let current: Vec<Found> = have
                .iter()
                .flat_map(|(net, (source, oif, there))| {
                    let route = make(*net, *source, false);
                    let both = [found(route, *oif, 0), unreachable(route)];
                    both.into_iter().zip(*there).filter(|(_, there)| *there).map(|(found, _)| found)
                })
                .collect();
            let wanted: BTreeSet<Route> =
                want.iter().map(|(net, (source, closed))| make(*net, *source, *closed)).collect();
            let changes = diff(&current, &wanted, [], 5);
            let key = |found: &Found| (found.route.destination, found.unreachable);
            let mut table: BTreeMap<_, Found> = current.iter().map(|f| (key(f), *f)).collect();
            for Entry { route, unreachable: behind } in changes.add.iter().chain(&changes.replace) {
                let made = if *behind { unreachable(*route) } else { found(*route, 5, 0) };
                table.insert(key(&made), made);
            }
            for gone in &changes.delete {
                prop_assert!(table.remove(&key(gone)).is_some());
            }
            let after: Vec<Found> = table.into_values().collect();
            for route in &wanted {
                let behind = after.contains(&unreachable(*route));
                prop_assert_eq!(behind, route.closed);
                prop_assert!(after.contains(&found(*route, 5, 0)));
            }
            prop_assert_eq!(after.len(), wanted.iter().map(|route| 1 + usize::from(route.closed)).sum::<usize>());
            prop_assert_eq!(diff(&after, &wanted, [], 5), Changes::default());
            let before: FlatSet<Route> = wanted.iter().copied().collect();
            prop_assert_eq!(between(&before, &before, 5), Changes::default());
            let gone = between(&before, &FlatSet::from_iter([]), 5).delete;
            prop_assert_eq!(gone.len(), after.len());
        }
    }
}

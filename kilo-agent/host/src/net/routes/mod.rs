//! Routes through the WireGuard device, marked with [`PROTOCOL`], and lookups.
//!
//! A [`closed`](Route::closed) route is backed by an `unreachable` one with a high metric. The kernel removes
//! routes when their device goes down or away; the `unreachable` ones stay and keep the packets from the
//! default route. Prefixes of this node's pods, and of nodes that were declared dead, have only such a route.

mod diff;
mod lookup;

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::IpNet;
use rtnetlink::{
    packet_core::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE},
    packet_route::{
        AddressFamily, RouteNetlinkMessage,
        route::{
            RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteMetric, RouteProtocol,
            RouteScope, RouteType,
        },
    },
};

pub use self::{
    diff::{Changes, Entry, Found, between, diff},
    lookup::{RoutesOut, by_interface, lookup, matched, routes_out},
};
use super::{NetError, PROTOCOL, Refused, Rtnl, addresses::keep, links};
use kilo_core::net::Route;

/// Metric of the `unreachable` routes: behind everything else.
const UNREACHABLE_METRIC: u32 = 2_000_000_000;

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
        let answers = rtnl.dump_much("list routes", RouteNetlinkMessage::GetRoute(request)).await?;
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

/// Adds and replaces routes; returns the number of writes.
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

/// Handles destinations that already have a route: one that an earlier Kilo left (over the WireGuard or an
/// IPIP device, or marked as its own) or that leads through another CNI's overlay is replaced in place; any
/// other is refused.
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

/// Whether flannel or Cilium reach the pods of all other nodes through this device. Neither knows about
/// locations, so their routes are in the way of ours to other locations.
fn is_overlay(device: &str) -> bool {
    device.starts_with("flannel.") || device.starts_with("flannel-v6.") || device == "cilium_host"
}

/// Whether this is Kilo's route to a node of its location, without encapsulation: static, with a next hop
/// that is on-link by declaration.
fn is_kilos(message: &RouteMessage) -> bool {
    message.header.protocol == RouteProtocol::Static && message.header.flags.contains(RouteFlags::Onlink)
}

/// Deletes routes; returns the number of writes.
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

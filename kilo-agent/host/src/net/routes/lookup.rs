//! Which routes lead to an address, and out of the host.

use std::{collections::BTreeSet, net::IpAddr};

use ipnet::IpNet;
use rtnetlink::packet_route::{
    AddressFamily, RouteNetlinkMessage,
    route::{RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteProtocol, RouteType},
};

use super::{
    super::{MainRoute, NetError, PROTOCOL, Rtnl},
    Found, ip, is_temporary, messages, parse,
};
use kilo_core::{net::MAIN_TABLE, observed::Elsewhere};

/// Metric the kernel gives IPv6 routes that have none.
const DEFAULT_METRIC_V6: u32 = 1024;

/// Route the kernel would use towards an address from this host; `None` when there is no unicast route.
///
/// # Errors
/// When the kernel has not answered: there may be a route.
pub async fn lookup(rtnl: &Rtnl, address: IpAddr) -> Result<Option<Found>, NetError> {
    let answers = ask(rtnl, "look up a route", question(address)).await?;
    Ok(answers.into_iter().find_map(|message| match message {
        RouteNetlinkMessage::NewRoute(route) if route.header.kind == RouteType::Unicast => {
            let mut found = parse(&route)?;
            // A learnt path MTU expires: it is not a setting of the route.
            found.route.mtu = found.route.mtu.filter(|_| !is_temporary(&route));
            Some(found)
        }
        _ => None,
    }))
}

/// The kernel's answers to a route lookup; none when there is no route.
async fn ask(rtnl: &Rtnl, what: &str, request: RouteMessage) -> Result<Vec<RouteNetlinkMessage>, NetError> {
    match rtnl.get(what, RouteNetlinkMessage::GetRoute(request)).await {
        Err(error) if error.errno().is_some_and(is_no_route) => Ok(Vec::new()),
        other => other,
    }
}

/// Whether the kernel says with this error number that it sends no packets to an address: there is no route,
/// or one of the types unreachable, prohibit (EACCES) or blackhole (EINVAL), or the kernel lacks the family.
const fn is_no_route(errno: i32) -> bool {
    use nix::libc::{EACCES, EAFNOSUPPORT, EHOSTUNREACH, EINVAL, ENETUNREACH, EOPNOTSUPP};
    matches!(errno, ENETUNREACH | EHOSTUNREACH | EACCES | EINVAL | EAFNOSUPPORT | EOPNOTSUPP)
}

/// Whether a list failed with this error number only because too much happened meanwhile.
const fn is_transient(errno: i32) -> bool {
    use nix::libc::{EINTR, ENOBUFS, ENOMEM};
    matches!(errno, EINTR | ENOBUFS | ENOMEM)
}

/// Unicast routes of the main table through this interface, both families.
pub async fn by_interface(rtnl: &Rtnl, interface: u32) -> Result<Vec<MainRoute>, NetError> {
    let mut all = Vec::new();
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        let mut request = RouteMessage::default();
        request.header.address_family = family;
        request.header.table = RouteHeader::RT_TABLE_MAIN;
        request.attributes.push(RouteAttribute::Oif(interface));
        let answers =
            rtnl.dump("list the routes of an interface", RouteNetlinkMessage::GetRoute(request)).await;
        let answers = match answers {
            // A kernel without IPv6, or without this table of a family, has none.
            Err(error) if error.errno().is_some_and(|errno| !is_transient(errno)) => Vec::new(),
            other => other?,
        };
        for answer in answers {
            let RouteNetlinkMessage::NewRoute(message) = answer else { continue };
            if message.header.address_family == family && message.header.kind == RouteType::Unicast {
                all.extend(main_route(&message, interface));
            }
        }
    }
    Ok(all)
}

fn main_route(message: &RouteMessage, interface: u32) -> Option<MainRoute> {
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
    Some(MainRoute {
        interface,
        destination: found.route.destination,
        source: found.route.source,
        gateway: next_hop(of_several.map_or(&message.attributes, |hop| &hop.attributes)),
        priority: found.priority,
    })
}

/// The routing table entry that the kernel would use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Matched {
    /// It is a default route, or a part of one: `0.0.0.0/1` of VPN clients, `2000::/3` of the Internet's
    /// addresses.
    pub is_default: bool,
    /// Interfaces of all its next hops.
    pub interfaces: Vec<u32>,
}

/// The table entry that matches an address, as opposed to the lookup's result; `None` without a route.
///
/// # Errors
/// As [`lookup`].
pub async fn matched(rtnl: &Rtnl, address: IpAddr) -> Result<Option<Matched>, NetError> {
    let mut request = question(address);
    request.header.flags |= RouteFlags::FibMatch;
    let answers = ask(rtnl, "look up the entry of a route", request).await?;
    let mut routes = answers.into_iter().filter_map(|message| match message {
        RouteNetlinkMessage::NewRoute(route) if route.header.kind == RouteType::Unicast => Some(route),
        _ => None,
    });
    let Some(route) = routes.next() else { return Ok(None) };
    let is_default = route.header.destination_prefix_length <= if address.is_ipv4() { 1 } else { 3 };
    // Older kernels answer with a route for each next hop of IPv6.
    let attributes = route.attributes.into_iter().chain(routes.flat_map(|route| route.attributes));
    let interfaces = attributes.flat_map(|attribute| match attribute {
        RouteAttribute::Oif(index) => vec![index],
        RouteAttribute::MultiPath(hops) => hops.iter().map(|hop| hop.interface_index).collect(),
        _ => Vec::new(),
    });
    Ok(Some(Matched { is_default, interfaces: interfaces.collect() }))
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

/// How routes lead out of the host, except by the interfaces in `own`: these are the agent's, whose routes
/// follow the others. Also returns what [`read`](super::read) would find.
pub async fn routes_out(rtnl: &Rtnl, own: &[u32]) -> Result<(RoutesOut, Vec<Found>), NetError> {
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
        let how = Elsewhere { on_link: found.on_link, wins: found.priority < ours };
        Some((destination, found.interface?, how))
    });
    let out = RoutesOut {
        default: default_of(&routes, own),
        next_hops: next_hops.into_iter().collect(),
        elsewhere: elsewhere.collect(),
    };
    Ok((out, routes.into_iter().filter(|found| found.protocol == PROTOCOL).collect()))
}

/// What [`routes_out`] finds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RoutesOut {
    /// Interface of the default route with the smallest metric, IPv4 before IPv6.
    pub default: Option<u32>,
    /// Interfaces with a route that has a next hop, or with a default route.
    pub next_hops: Vec<u32>,
    /// Destinations of routes that are not ours, without default routes: prefix, interface, and how the
    /// kernel uses the route.
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
    use super::*;
    use kilo_core::net::Route;

    fn found(destination: &str, interface: u32, priority: u32) -> Found {
        let destination = destination.parse().unwrap();
        Found {
            route: Route { destination, table: MAIN_TABLE, source: None, mtu: None, closed: false },
            interface: Some(interface),
            priority,
            protocol: PROTOCOL,
            unreachable: false,
            on_link: true,
        }
    }

    #[test]
    fn only_errors_that_mean_no_route_count_as_one() {
        use nix::libc::{EACCES, EHOSTUNREACH, EINTR, EINVAL, ENETUNREACH, ENOBUFS, ENOMEM, EPERM};
        assert!([ENETUNREACH, EHOSTUNREACH, EACCES, EINVAL].into_iter().all(is_no_route));
        assert!(![ENOBUFS, ENOMEM, EINTR, EPERM].into_iter().any(is_no_route));
    }

    #[test]
    fn default_route_is_the_cheapest_and_prefers_ipv4() {
        let (any4, any6) = ("0.0.0.0/0", "::/0");
        let routes = [found(any6, 2, 0), found(any4, 3, 600), found(any4, 4, 100)];
        assert_eq!(default_of(&routes, &[]), Some(4));
        assert_eq!(default_of(&routes, &[4]), Some(3), "not a device of ours");
        assert_eq!(default_of(&routes, &[3, 4]), Some(2));
        assert_eq!(default_of(&[found(any6, 2, 1024)], &[]), Some(2));
        assert_eq!(default_of(&[found("10.0.0.0/8", 2, 0)], &[]), None);
    }
}

//! Addresses and routes that bring packets to the WireGuard device.

use std::net::IpAddr;

use ipnet::IpNet;
use kilo_common::maps::{HOP_LOCAL, HOP_NONE, PREFIX_NEVER_CLEAR, PREFIX_ROUTE, PrefixValue};

use super::{Hop, Inputs, MAIN_TABLE, NetPlan, Own, Remote, Route, Tables};
use crate::{flat_map::Key, settings::Tunnel};

pub(super) fn net(inputs: &Inputs<'_>, own: &Own<'_>, remote: &Remote, tables: &Tables) -> NetPlan {
    let mut net = NetPlan { mtu: inputs.mtu, ..NetPlan::default() };
    net.addresses.extend(own.wireguard_address(inputs.mesh));
    let mut destinations = Vec::with_capacity(remote.claims().len() + own.segment.members.len());
    if let Some(ip) = own.segment.wireguard_ip.filter(|_| !own.acts) {
        destinations.push(IpNet::from(ip));
    }
    for member in own.others().filter(|_| inputs.settings.local) {
        destinations.extend(member.node.pod_cidrs.iter().map(IpNet::trunc));
    }
    for claim in remote.claims() {
        // On a gateway the tunnel itself goes to the endpoint, and the device's
        // address brings a route to all WireGuard addresses.
        let has_other_route = own.is_gateway
            && inputs.mesh.segments.get(claim.owner).is_some_and(|segment| {
                claim.endpoint || own.acts && segment.wireguard_ip.map(IpNet::from) == Some(claim.prefix)
            });
        if !has_other_route && !claim.is_hosts(inputs.links) {
            destinations.push(claim.prefix);
        }
    }
    let carries = |prefix: &IpNet| prefix.addr().is_ipv4() || !is_without_ipv6(inputs, own);
    destinations.retain(carries);
    destinations.sort_by_key(Key::rank);
    destinations.dedup();
    // Programs alone close the subnet of WireGuard addresses: an unreachable route would also refuse
    // destinations of others' shorter routes, such as a node with a private address in it.
    let closed = tables.prefix.iter().filter(|(_, value)| {
        value.flags & (PREFIX_NEVER_CLEAR | PREFIX_ROUTE) == PREFIX_NEVER_CLEAR | PREFIX_ROUTE
            && matches!(value.hop, HOP_LOCAL | HOP_NONE)
    });
    let without_route =
        |prefix: &IpNet| destinations.binary_search_by_key(&prefix.rank(), Key::rank).is_err();
    let is_own = |prefix: &IpNet| own.acts && own.segment.wireguard_ip.map(IpNet::from) == Some(*prefix);
    let closed = closed.map(|(prefix, _)| *prefix).filter(|prefix| !is_own(prefix));
    net.unreachable = closed.filter(without_route).filter(carries).collect();
    let source = source(inputs, own);
    // One walk over both: they are sorted.
    let mut prefixes = tables.prefix.iter().peekable();
    let route = |destination: IpNet| {
        while prefixes.next_if(|(prefix, _)| prefix.rank() < destination.rank()).is_some() {}
        let value = prefixes.peek().filter(|(prefix, _)| *prefix == destination).map(|(_, value)| value);
        let mtu = value.and_then(|value| hop_mtu(tables, *value)).filter(|mtu| *mtu < inputs.mtu);
        let source = source.filter(|source| source.is_ipv4() == destination.addr().is_ipv4());
        let closed = value.is_some_and(|value| value.flags & PREFIX_NEVER_CLEAR != 0);
        Route { destination, table: MAIN_TABLE, source, mtu, closed }
    };
    net.routes = destinations.into_iter().map(route).collect();
    // Packets without an outer header name their next hop, and the first ones to an unresolved
    // next hop would be lost.
    net.neighbours = tables
        .hop
        .values()
        .filter_map(|hop| match *hop {
            // Interfaces without a link-layer header have no neighbours.
            Hop::Node { tunnel: Tunnel::None, ifindex, remote, .. }
                if ifindex != 0 && !inputs.links.layer3.contains(&ifindex) =>
            {
                Some((ifindex, remote))
            }
            _ => None,
        })
        .collect();
    net
}

/// Whether IPv6 is off on a host that needs none, because its pods have none: each route would be refused, and
/// the refusals would keep this node from ever being ready.
fn is_without_ipv6(inputs: &Inputs<'_>, own: &Own<'_>) -> bool {
    inputs.links.has_no_ipv6 && own.member.node.pod_cidrs.iter().all(|cidr| cidr.addr().is_ipv4())
}

/// Largest packet in bytes that the hop of a prefix carries, the leader's for prefixes behind it; `None` for
/// WireGuard, whose device has that MTU, and where it is not known.
fn hop_mtu(tables: &Tables, value: PrefixValue) -> Option<u32> {
    match tables.hop(value.hop)? {
        Hop::Node { mtu, .. } if *mtu != 0 => Some(*mtu),
        _ => None,
    }
}

/// Source address of this host's own packets into the mesh: its private one. A leader whose private
/// address is an endpoint of WireGuard takes its WireGuard address, because answers to an endpoint would
/// not come through the tunnel.
fn source(inputs: &Inputs<'_>, own: &Own<'_>) -> Option<IpAddr> {
    let endpoint = super::endpoints::member_endpoint(inputs, own.member).map(|endpoint| endpoint.ip());
    let given = own.member.node.endpoint.as_ref().and_then(crate::wireguard::Endpoint::ip);
    let is_endpoint = |ip| endpoint == Some(ip) || given == Some(ip);
    match own.member.private_ip() {
        Some(ip) if !(own.acts && is_endpoint(ip)) => Some(ip),
        _ if own.acts => own.segment.wireguard_ip,
        _ => None,
    }
}

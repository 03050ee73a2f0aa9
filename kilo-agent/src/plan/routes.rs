//! Addresses and routes that bring packets to the WireGuard device.

use std::net::IpAddr;

use ipnet::IpNet;

use super::{Hop, Inputs, MAIN_TABLE, NetPlan, Own, Route, Tables};
use crate::topology::Tunnel;

pub(super) fn net(inputs: &Inputs<'_>, own: &Own<'_>, tables: &Tables) -> NetPlan {
    let mut net = NetPlan { mtu: inputs.mtu, ..NetPlan::default() };
    net.addresses.extend(super::wireguard_address(inputs.mesh, inputs.node));
    let source = source(own);
    let mut add = |prefix: IpNet| {
        let source = source.filter(|source| source.is_ipv4() == prefix.addr().is_ipv4());
        let destination = prefix.trunc();
        let mtu = hop_mtu(tables, destination).filter(|mtu| *mtu < inputs.mtu);
        net.routes.insert(Route { destination, table: MAIN_TABLE, source, mtu });
    };
    if let Some(ip) = own.segment.wireguard_ip.filter(|_| !own.leads) {
        add(IpNet::from(ip));
    }
    for member in own.others().filter(|_| inputs.settings.local) {
        for cidr in &member.pod_cidrs {
            add(*cidr);
        }
    }
    for (index, segment) in inputs.mesh.segments.iter().enumerate() {
        if index == own.index {
            continue;
        }
        for prefix in segment.all_allowed_ips() {
            let is = |ip: Option<IpAddr>| ip.is_some_and(|ip| prefix == IpNet::from(ip));
            // On a leader the tunnel itself goes to the endpoint, and the
            // device's address brings a route to all WireGuard addresses.
            let other_way = own.leads && (is(segment.endpoint.ip()) || is(segment.wireguard_ip));
            if !other_way {
                add(prefix);
            }
        }
    }
    for prefix in inputs.mesh.peers.iter().flat_map(|peer| &peer.allowed_ips) {
        add(*prefix);
    }
    // Packets without an outer header name their next hop, and one that is not
    // resolved yet would lose the first of them.
    net.neighbours = tables
        .hop
        .values()
        .filter_map(|hop| match *hop {
            Hop::Node { tunnel: Tunnel::None, ifindex, remote, .. } if ifindex != 0 => {
                Some((ifindex, remote))
            }
            _ => None,
        })
        .collect();
    net
}

/// Largest packet the hop of a prefix carries; `None` for WireGuard, whose
/// device has that MTU, and where it is not known.
fn hop_mtu(tables: &Tables, prefix: IpNet) -> Option<u32> {
    match tables.hop.get(&tables.prefix.get(&prefix)?.hop)? {
        Hop::Node { mtu, .. } if *mtu != 0 => Some(*mtu),
        _ => None,
    }
}

/// The address this host's own packets into the mesh get: its private one. A
/// leader whose private address is its WireGuard endpoint takes its WireGuard
/// address, because answers to the endpoint would not come through the tunnel.
fn source(own: &Own<'_>) -> Option<IpAddr> {
    match own.member.private_ip() {
        Some(ip) if !(own.leads && own.segment.is_endpoint(ip)) => Some(ip),
        _ if own.leads => own.segment.wireguard_ip,
        _ => None,
    }
}

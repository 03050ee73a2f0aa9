//! Peers of this host's WireGuard device. A Node's annotations become a peer in four steps:
//! `objects/annotations.rs` reads them into a `Node`, `topology/segment.rs` groups nodes into locations
//! with allowed IPs, `plan/endpoints.rs` chooses the endpoint, and this file makes the peer, which
//! `wireguard/diff.rs` compares with the device.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv6Addr, SocketAddr},
};

use ipnet::IpNet;

use super::{
    Inputs, Own, Remote,
    endpoints::{endpoint, gateway_endpoint, speaks_first},
    remote::PrefixClaim,
};
use crate::{
    relay::EndpointOverride,
    signal_id,
    topology::Peer,
    wireguard::{
        WireguardPeer, WireguardPlan,
        key::{PublicKey, SecretKey},
    },
};

pub(super) fn peers(inputs: &Inputs<'_>, own: &Own<'_>, remote: &Remote) -> WireguardPlan {
    let mut plan = WireguardPlan { listen_port: inputs.settings.port, ..WireguardPlan::default() };
    if !own.is_gateway {
        return plan;
    }
    let mesh = inputs.mesh;
    let own_key = own.member.node.key;
    let mut wanted: Vec<Wanted> = Vec::with_capacity(mesh.segments.len() + mesh.peers.len());
    // Index in `wanted` of the first gateway of each segment, then of the first VPN peer.
    let mut first = Vec::with_capacity(mesh.segments.len() + 1);
    for (index, segment) in mesh.segments.iter().enumerate() {
        first.push(wanted.len());
        let fails_over = mesh.fails_over(index);
        let gateways = mesh.gateways_of(index);
        let members = gateways.order.iter().filter_map(|at| segment.members.get(*at));
        wanted.extend(members.enumerate().filter_map(|(place, member)| {
            let node = &member.node;
            let key = node.key?;
            Some(Wanted {
                // The kernel silently leaves out a peer with its own key, so wanting one would differ for
                // ever. A node that does not know stand-bys would not answer one.
                refused: index == own.index || Some(key) == own_key || !(fails_over || own.leads),
                key,
                endpoint: gateway_endpoint(inputs, member, place == 0),
                // A stand-by that has become the leader keeps the endpoint at which its tunnel already works.
                roams: node.persistent_keepalive > 0 || fails_over && speaks_first(inputs, member),
                preshared_key: None,
                control: fails_over.then(|| signal_id::control_address(&key)),
                is_warm: fails_over && !(own.leads && place == 0),
            })
        }));
    }
    first.push(wanted.len());
    let fails_over = mesh.fails_over(own.index);
    let follows = |peer: &Peer| fails_over && peer.follows;
    wanted.extend(mesh.peers.iter().map(|peer| Wanted {
        // A peer that does not follow knows one key, that of Kilo's leader.
        refused: Some(peer.public_key) == own_key || !(own.leads || follows(peer)),
        key: peer.public_key,
        endpoint: endpoint(inputs, &peer.public_key, peer.endpoint.as_ref(), peer.persistent_keepalive > 0),
        roams: peer.persistent_keepalive > 0,
        preshared_key: peer.preshared_key,
        control: follows(peer).then(|| signal_id::control_address(&peer.public_key)),
        is_warm: follows(peer) && !own.leads,
    }));
    let place_of = |claim: &PrefixClaim| match first.get(claim.owner) {
        Some(at) if claim.owner < mesh.segments.len() => at + claim.gateway,
        _ => first.last().copied().unwrap_or(0) + claim.owner - mesh.segments.len(),
    };
    // A key that two claim belongs to the first: a location, or a peer by name.
    let mut keys = BTreeSet::new();
    for one in &mut wanted {
        one.refused = one.refused || !keys.insert(one.key);
    }
    // And so does a prefix.
    let mut allowed_ips: Vec<Vec<IpNet>> = vec![Vec::new(); wanted.len()];
    let mut last = None;
    for claim in remote.claims() {
        let place = place_of(claim);
        if last != Some(claim.prefix) && wanted.get(place).is_some_and(|owner| !owner.refused) {
            allowed_ips[place].push(claim.prefix);
            last = Some(claim.prefix);
        }
    }
    // Control addresses are in no object's prefixes.
    for (one, allowed_ips) in wanted.iter().zip(&mut allowed_ips) {
        allowed_ips.extend(one.control.map(|address| IpNet::from(IpAddr::V6(address))));
    }
    let own_keepalive = u16::try_from(inputs.persistent_keepalive).unwrap_or(u16::MAX);
    let warm = if own_keepalive == 0 { KEEPALIVE } else { own_keepalive.min(KEEPALIVE) };
    let peers = wanted.iter().zip(allowed_ips).filter(|(one, _)| !one.refused).map(|(one, allowed_ips)| {
        let (endpoint, roams) = one.place(inputs.relays.endpoints.get(&one.key));
        let peer = WireguardPeer {
            allowed_ips: allowed_ips.into_iter().collect(),
            endpoint,
            roams,
            persistent_keepalive: if one.is_warm { warm } else { own_keepalive },
            preshared_key: one.preshared_key,
        };
        (one.key, peer)
    });
    plan.peers = peers.collect();
    plan
}

/// The peer that a gateway of a location or a VPN peer becomes, without its prefixes.
struct Wanted {
    /// It is not a peer of this device.
    refused: bool,
    key: PublicKey,
    endpoint: Option<SocketAddr>,
    /// Its endpoint is where it was heard last, as long as it is heard.
    roams: bool,
    preshared_key: Option<SecretKey>,
    /// Its address for signals, if it knows them.
    control: Option<Ipv6Addr>,
    /// Either end is a stand-by: the tunnel is kept alive although nothing uses it.
    is_warm: bool,
}

impl Wanted {
    /// Its endpoint, and whether it may roam from there.
    fn place(&self, relays: Option<&EndpointOverride>) -> (Option<SocketAddr>, bool) {
        match relays {
            Some(EndpointOverride::At(at)) => (Some(*at), true),
            Some(EndpointOverride::LeavesRelay) => (self.endpoint, false),
            // A stand-by speaks first, from wherever it is.
            None => (self.endpoint, self.roams || self.endpoint.is_none() || self.is_warm),
        }
    }
}

/// Seconds between keepalives of a tunnel that has to work when it is needed.
const KEEPALIVE: u16 = 10;

//! Peers of this host's WireGuard device.

use std::{collections::BTreeSet, net::SocketAddr};

use ipnet::IpNet;

use super::{Inputs, Own, Remote};
use crate::wireguard::{WireguardPeer, WireguardPlan};
use crate::{
    topology::Segment,
    wireguard::{
        Endpoint, EndpointHost,
        key::{PublicKey, SecretKey},
    },
};

pub(super) fn peers(inputs: &Inputs<'_>, own: &Own<'_>, remote: &Remote) -> WireguardPlan {
    let mut plan = WireguardPlan { listen_port: inputs.settings.port, ..WireguardPlan::default() };
    if !own.leads {
        return plan;
    }
    let mesh = inputs.mesh;
    let segments = mesh.segments.iter().enumerate().map(|(index, segment)| Wanted {
        // The kernel silently leaves out a peer with its own key, so asking
        // for one would be a difference for ever.
        refused: index == own.index || segment.key == own.segment.key,
        key: segment.key,
        endpoint: Some(&segment.endpoint),
        behind_nat: is_behind_nat(segment),
        preshared_key: None,
    });
    let vpn_peers = mesh.peers.iter().map(|peer| Wanted {
        refused: peer.public_key == own.segment.key,
        key: peer.public_key,
        endpoint: peer.endpoint.as_ref(),
        behind_nat: peer.persistent_keepalive > 0,
        preshared_key: peer.preshared_key,
    });
    let mut wanted: Vec<Wanted<'_>> = segments.chain(vpn_peers).collect();
    // A key that two claim belongs to the first: a location, or a peer by name.
    let mut keys = BTreeSet::new();
    for one in &mut wanted {
        one.refused = one.refused || !keys.insert(one.key);
    }
    // And so does a prefix.
    let mut allowed_ips: Vec<Vec<IpNet>> = vec![Vec::new(); wanted.len()];
    let mut last = None;
    for claim in remote.claims() {
        if last != Some(claim.prefix) && wanted.get(claim.owner).is_some_and(|owner| !owner.refused) {
            allowed_ips[claim.owner].push(claim.prefix);
            last = Some(claim.prefix);
        }
    }
    let peers = wanted.iter().zip(allowed_ips).filter(|(one, _)| !one.refused).map(|(one, allowed_ips)| {
        let peer = WireguardPeer {
            allowed_ips: allowed_ips.into_iter().collect(),
            endpoint: endpoint(inputs, &one.key, one.endpoint, one.behind_nat),
            roams: one.behind_nat || one.endpoint.is_none(),
            persistent_keepalive: u16::try_from(inputs.persistent_keepalive).unwrap_or(u16::MAX),
            preshared_key: one.preshared_key,
        };
        (one.key, peer)
    });
    plan.peers = peers.collect();
    plan
}

/// What a location or a VPN peer wants of the device, besides prefixes.
struct Wanted<'a> {
    /// It is no peer of this device.
    refused: bool,
    key: PublicKey,
    endpoint: Option<&'a Endpoint>,
    behind_nat: bool,
    preshared_key: Option<SecretKey>,
}

/// Where this host's WireGuard sends what is for a location.
pub(super) fn location_endpoint(inputs: &Inputs<'_>, segment: &Segment) -> Option<SocketAddr> {
    endpoint(inputs, &segment.key, Some(&segment.endpoint), is_behind_nat(segment))
}

const fn is_behind_nat(segment: &Segment) -> bool {
    segment.persistent_keepalive > 0
}

/// Behind NAT a peer is where somebody last saw it, the own device first.
fn endpoint(
    inputs: &Inputs<'_>,
    key: &PublicKey,
    given: Option<&Endpoint>,
    behind_nat: bool,
) -> Option<SocketAddr> {
    let seen = || inputs.seen.get(key).or_else(|| inputs.mesh.discovered.get(key));
    if behind_nat && let Some(seen) = seen() {
        return Some(*seen);
    }
    let given = given?;
    let ip = match &given.host {
        EndpointHost::Ip(ip) => *ip,
        EndpointHost::Dns(name) => *inputs.resolved.get(name)?,
    };
    Some(SocketAddr::new(ip, given.port))
}

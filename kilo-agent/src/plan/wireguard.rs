//! Peers of this host's WireGuard device.

use std::{
    collections::{BTreeSet, btree_map::Entry},
    net::SocketAddr,
};

use ipnet::IpNet;

use super::{Inputs, Own, WireguardPeer, WireguardPlan};
use crate::{
    topology::{Endpoint, EndpointHost},
    wireguard::key::{PublicKey, SecretKey},
};

pub(super) fn peers(inputs: &Inputs<'_>, own: &Own<'_>) -> WireguardPlan {
    let mut plan = WireguardPlan { listen_port: inputs.settings.port, ..WireguardPlan::default() };
    if !own.leads {
        return plan;
    }
    let segments = inputs.mesh.segments.iter().enumerate().filter(|(index, _)| *index != own.index);
    let locations = segments.map(|(_, segment)| Claim {
        key: segment.key,
        allowed_ips: segment.all_allowed_ips().collect(),
        endpoint: Some(&segment.endpoint),
        behind_nat: segment.persistent_keepalive > 0,
        preshared_key: None,
    });
    let vpn_peers = inputs.mesh.peers.iter().map(|peer| Claim {
        key: peer.public_key,
        allowed_ips: peer.allowed_ips.clone(),
        endpoint: peer.endpoint.as_ref(),
        behind_nat: peer.persistent_keepalive > 0,
        preshared_key: peer.preshared_key,
    });
    let mut claimed = BTreeSet::new();
    for claim in locations.chain(vpn_peers) {
        // The kernel silently leaves out a peer with its own key, so asking
        // for one would be a difference for ever.
        if claim.key == own.segment.key {
            continue;
        }
        // A key that two claim belongs to the first: a location, or a peer by name.
        let Entry::Vacant(entry) = plan.peers.entry(claim.key) else { continue };
        entry.insert(WireguardPeer {
            allowed_ips: claim.allowed_ips.into_iter().filter(|prefix| claimed.insert(*prefix)).collect(),
            endpoint: endpoint(inputs, claim.endpoint, &claim.key, claim.behind_nat),
            roams: claim.behind_nat || claim.endpoint.is_none(),
            persistent_keepalive: u16::try_from(inputs.persistent_keepalive).unwrap_or(u16::MAX),
            preshared_key: claim.preshared_key,
        });
    }
    plan
}

/// What a location or a VPN peer wants of the device.
struct Claim<'a> {
    key: PublicKey,
    allowed_ips: Vec<IpNet>,
    endpoint: Option<&'a Endpoint>,
    behind_nat: bool,
    preshared_key: Option<SecretKey>,
}

/// Behind NAT a peer is where somebody last saw it, the own device first.
fn endpoint(
    inputs: &Inputs<'_>,
    given: Option<&Endpoint>,
    key: &PublicKey,
    behind_nat: bool,
) -> Option<SocketAddr> {
    if behind_nat && let Some(seen) = inputs.seen.get(key).or_else(|| inputs.mesh.discovered.get(key)) {
        return Some(*seen);
    }
    let given = given?;
    let ip = match &given.host {
        EndpointHost::Ip(ip) => *ip,
        EndpointHost::Dns(name) => *inputs.resolved.get(name)?,
    };
    Some(SocketAddr::new(ip, given.port))
}

//! Peers of this host's WireGuard device.

use std::{
    collections::{BTreeSet, btree_map::Entry},
    net::SocketAddr,
};

use super::{Inputs, Own, WireguardPeer, WireguardPlan};
use crate::{
    topology::{Endpoint, EndpointHost},
    wireguard::key::PublicKey,
};

pub(super) fn peers(inputs: &Inputs<'_>, own: &Own<'_>) -> WireguardPlan {
    let mut plan = WireguardPlan { listen_port: inputs.settings.port, ..WireguardPlan::default() };
    if !own.leads {
        return plan;
    }
    let persistent_keepalive = u16::try_from(inputs.persistent_keepalive).unwrap_or(u16::MAX);
    let mut claimed = BTreeSet::new();
    for (index, segment) in inputs.mesh.segments.iter().enumerate() {
        if index == own.index {
            continue;
        }
        let peer = plan.peers.entry(segment.key).or_default();
        peer.allowed_ips.extend(segment.all_allowed_ips().filter(|prefix| claimed.insert(*prefix)));
        peer.roams = segment.persistent_keepalive > 0;
        peer.endpoint = endpoint(inputs, Some(&segment.endpoint), &segment.key, peer.roams);
        peer.persistent_keepalive = persistent_keepalive;
    }
    for vpn in &inputs.mesh.peers {
        // A key that two claim belongs to the first: a node, or the first peer by name.
        let Entry::Vacant(entry) = plan.peers.entry(vpn.public_key) else { continue };
        let roams = vpn.persistent_keepalive > 0 || vpn.endpoint.is_none();
        entry.insert(WireguardPeer {
            allowed_ips: vpn.allowed_ips.iter().copied().filter(|prefix| claimed.insert(*prefix)).collect(),
            endpoint: endpoint(inputs, vpn.endpoint.as_ref(), &vpn.public_key, vpn.persistent_keepalive > 0),
            roams,
            persistent_keepalive,
            preshared_key: vpn.preshared_key,
        });
    }
    plan
}

/// Behind NAT a peer is where somebody last saw it, the own device first.
fn endpoint(
    inputs: &Inputs<'_>,
    given: Option<&Endpoint>,
    key: &PublicKey,
    roams: bool,
) -> Option<SocketAddr> {
    if roams && let Some(seen) = inputs.seen.get(key).or_else(|| inputs.mesh.discovered.get(key)) {
        return Some(*seen);
    }
    let given = given?;
    let ip = match &given.host {
        EndpointHost::Ip(ip) => *ip,
        EndpointHost::Dns(name) => *inputs.resolved.get(name)?,
    };
    Some(SocketAddr::new(ip, given.port))
}

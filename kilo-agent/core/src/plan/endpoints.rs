//! The endpoint at which this host's WireGuard reaches a node or a VPN peer: from a location
//! (`topology/segment.rs`) to a WireGuard peer (`plan/wireguard.rs`).

use std::net::SocketAddr;

use super::Inputs;
use crate::{
    addresses::is_reached_from_anywhere,
    topology::Member,
    wireguard::{Endpoint, EndpointHost, key::PublicKey},
};

/// The endpoint at which this host's WireGuard reaches a gateway of a location. A stand-by's private address
/// is used if an annotation forces it, or a route leads there: otherwise it lies behind its own location's
/// leader, and the stand-by speaks first.
pub(super) fn gateway_endpoint(inputs: &Inputs<'_>, member: &Member, leads: bool) -> Option<SocketAddr> {
    let endpoint = member_endpoint(inputs, member)?;
    (leads || !is_out_of_reach(inputs, member, endpoint)).then_some(endpoint)
}

/// Whether a gateway's endpoint may be out of reach from other locations, so that it has to speak first.
pub(super) fn speaks_first(inputs: &Inputs<'_>, member: &Member) -> bool {
    member_endpoint(inputs, member).is_none_or(|endpoint| is_out_of_reach(inputs, member, endpoint))
}

fn is_out_of_reach(inputs: &Inputs<'_>, member: &Member, endpoint: SocketAddr) -> bool {
    let ip = endpoint.ip();
    let is_near = || inputs.links.elsewhere.keys().any(|prefix| prefix.contains(&ip));
    let is_private = !is_reached_from_anywhere(ip) && Some(ip) == member.private_ip();
    is_private && !member.node.endpoint_forced && !is_near()
}

/// The endpoint of a node of the mesh: behind NAT where a device last saw it, else where it says.
pub(super) fn member_endpoint(inputs: &Inputs<'_>, member: &Member) -> Option<SocketAddr> {
    let node = &member.node;
    endpoint(inputs, &node.key?, node.endpoint.as_ref(), node.persistent_keepalive > 0)
}

/// The endpoint of a peer: behind NAT where a device last saw it, this host's own first; else `given`.
pub(super) fn endpoint(
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

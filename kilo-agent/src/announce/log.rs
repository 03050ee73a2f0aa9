//! Writes changes as log lines.

use kilo_core::topology::changes::Change;

/// Writes one line: the change, with fields for old, new and why.
pub fn write(change: &Change) {
    match change {
        Change::LocationAppeared { location, leader, rule } => {
            tracing::info!(location, new = leader, why = %rule, "location joined the mesh");
        }
        Change::LocationVanished { location, leader, why } => {
            tracing::info!(location, old = leader, %why, "location has no ready node left");
        }
        Change::LeaderMoved { location, from, to, why } => {
            tracing::info!(location, old = from, new = to, %why, "leader changed");
        }
        Change::NodeJoined { node, location } => {
            tracing::info!(subject = node, new = location, "node joined the mesh");
        }
        Change::NodeMoved { node, from, to } => {
            tracing::info!(subject = node, old = from, new = to, "node moved to another location");
        }
        Change::NodeLeft { node, location, why } => {
            tracing::info!(subject = node, old = location, %why, "node left the mesh");
        }
        Change::Role { from, to } => {
            tracing::info!(old = %from, new = %to, "role of this node changed");
        }
        Change::PeerAccepted { peer, without: None } => {
            tracing::info!(peer, "peer joined the mesh");
        }
        Change::PeerAccepted { peer, without: Some(problem) } => {
            tracing::warn!(peer, problem, "peer is in the mesh, but some of its prefixes belong to others");
        }
        Change::PeerRefused { peer, why } => {
            tracing::info!(peer, why, "peer is not in the mesh");
        }
        Change::PeerLeft { peer } => {
            tracing::info!(peer, why = "its Peer object was deleted", "peer left the mesh");
        }
    }
}

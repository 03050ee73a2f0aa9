//! What relays mean for a host's plan.

use std::{collections::BTreeMap, net::SocketAddr};

use crate::wireguard::key::PublicKey;

/// What a host's plan depends on because tunnels may go through relays: an input of
/// [`host_plan`](crate::plan::host_plan), so that no plan has to be changed afterwards.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RelayInputs {
    /// The programs look for relay messages among what arrives at WireGuard's port.
    pub listens: bool,
    /// Peers whose endpoint is decided by relays and hole punching, and not by the mesh.
    pub endpoints: BTreeMap<PublicKey, EndpointOverride>,
}

/// What is planned for a peer instead of the endpoint and the roaming that follow from the mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndpointOverride {
    /// The peer is reached here, at a relay or where its NAT lets packets in, and may roam from there.
    At(SocketAddr),
    /// The device still has a relay as its endpoint, and relays are off: it goes back to the endpoint
    /// that follows from the mesh, and does not roam.
    LeavesRelay,
}

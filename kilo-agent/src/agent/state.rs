//! What one reconcile leaves for the next.

use std::sync::Arc;

use kilo_core::{
    objects::Snapshot,
    plan::HopIds,
    topology::{FreedAddresses, LeadersSince, Liveness, Mesh, Node, among, with_own},
};

use kilo_host::cni::former::FormerPodCidrs;

use super::host_state::HostState;

/// The agent's internal state; its public part is a [`View`](crate::status::View).
#[derive(Default)]
pub(super) struct State {
    /// Nodes and peers as last seen.
    pub snapshot: Arc<Snapshot>,
    /// The host matches `snapshot`, and nothing has failed since.
    pub applied: bool,
    /// This node as last found on this host.
    pub own: Option<Arc<Node>>,
    /// Which of the snapshot's nodes take part, in their order.
    pub ready: Vec<bool>,
    /// The mesh as this node sees it.
    pub mesh: Arc<Mesh>,
    /// Which node leads each location, and since when.
    pub leaders: LeadersSince,
    /// When each node's latest heartbeat arrived, by this agent's clock.
    pub liveness: Liveness,
    /// Addresses that left the mesh recently.
    pub freed: FreedAddresses,
    /// Hop ids of the nodes of this location.
    pub hops: HopIds,
    /// Pod CIDRs that this node had earlier in this boot.
    pub former_pod_cidrs: FormerPodCidrs,
    /// This host as far as known; `None` when it must be read.
    pub host: Option<HostState>,
    /// Forwarding was off, and a reconcile could not turn it on.
    pub cannot_forward: bool,
    /// An uplink has no egress program, so pod traffic may leave it in clear.
    pub is_open: bool,
    /// Interface index of the WireGuard device when it was last seen.
    pub device: Option<u32>,
}

/// The nodes and peers that the next agent of this host starts with.
pub(super) struct Known {
    pub snapshot: Arc<Snapshot>,
    own: Option<Arc<Node>>,
    ready: Vec<bool>,
    without_address: Vec<Arc<Node>>,
}

impl State {
    /// A copy of nodes and peers for tasks that outlive this reconcile.
    pub fn known(&self) -> Known {
        Known {
            snapshot: Arc::clone(&self.snapshot),
            own: self.own.clone(),
            ready: self.ready.clone(),
            without_address: self.liveness.without_address().cloned().collect(),
        }
    }
}

impl Known {
    /// Nodes that take part, including this one as last found.
    pub fn ready_nodes(&self) -> impl Iterator<Item = &Node> + Clone {
        among(with_own(&self.snapshot.nodes, self.own.as_ref()), &self.ready).map(|node| &**node)
    }

    /// Nodes that have lost their private address, as they were while they had it.
    pub fn without_address(&self) -> impl Iterator<Item = &Node> + Clone {
        self.without_address.iter().map(|node| &**node)
    }
}

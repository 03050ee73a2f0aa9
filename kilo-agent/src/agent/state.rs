//! What one reconcile leaves for the next.

use std::{collections::BTreeMap, sync::Arc};

use kilo_core::{
    observed::Uplink,
    plan::HopIds,
    topology::{FreedAddresses, Liveness, ObservedMesh},
};
use kilo_host::cni::former::FormerPodCidrs;

use super::host_state::HostState;

/// The agent's internal state; its public part is a [`View`](crate::status::View).
#[derive(Default)]
pub(super) struct State {
    /// The mesh of the last reconcile.
    pub observed: Arc<ObservedMesh>,
    /// The host matches `observed`, and nothing has failed since.
    pub applied: bool,
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
    /// Interfaces that lead out of the host, with the addresses that masqueraded packets get.
    pub uplinks: BTreeMap<u32, Uplink>,
}

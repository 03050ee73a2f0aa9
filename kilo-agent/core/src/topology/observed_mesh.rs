//! The mesh at one moment, and the objects it was computed from: made once by a reconcile, and shared by all
//! who look at it.

use std::sync::Arc;

use super::{LeadersSince, Mesh, Node, among, with_own};
use crate::objects::Snapshot;

/// What a reconcile knows of the mesh.
#[derive(Clone, Debug, Default)]
pub struct ObservedMesh {
    /// Nodes and peers, in the mesh or not.
    pub snapshot: Arc<Snapshot>,
    /// This node as it is now; its object may lag behind.
    pub own: Option<Arc<Node>>,
    /// Which of the snapshot's nodes take part, in their order.
    pub ready: Vec<bool>,
    /// Locations and peers, as this node sees them.
    pub mesh: Arc<Mesh>,
    /// Which node leads each location, and since when.
    pub leaders: LeadersSince,
}

impl ObservedMesh {
    /// Nodes that take part, with this one as it is now.
    pub fn ready_nodes(&self) -> impl Iterator<Item = &Node> + Clone {
        among(with_own(&self.snapshot.nodes, self.own.as_ref()), &self.ready).map(|node| &**node)
    }

    /// The same mesh after a change of heartbeats only.
    #[must_use]
    pub fn with_heartbeats(&self, snapshot: Arc<Snapshot>) -> Self {
        Self { snapshot, ..self.clone() }
    }
}

//! What nodes claim although one of them, or the mesh, has it, as a status shows it.

use kilo_core::{
    plan::{self, Conflict},
    topology::Mesh,
};
use serde::{Deserialize, Serialize};

/// What nodes claim although one of them, or the mesh, has it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
// An agent of another version may report it in other words.
#[serde(rename_all = "camelCase", default)]
pub struct ConflictStatus {
    /// `address/IP`, `key/KEY` or `prefix/CIDR`.
    pub object: String,
    /// Names of the nodes, sorted.
    pub nodes: Vec<String>,
    /// What it is about, what comes of it, and what to do about it.
    pub text: String,
}

/// All conflicts of a mesh.
pub fn of(mesh: &Mesh) -> Vec<ConflictStatus> {
    let status = |conflict: Conflict| ConflictStatus {
        object: conflict.claimed.object(),
        text: conflict.to_string(),
        nodes: conflict.nodes,
    };
    plan::conflicts(mesh).into_iter().map(status).collect()
}

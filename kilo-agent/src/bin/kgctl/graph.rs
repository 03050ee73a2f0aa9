//! `kgctl graph`: the mesh as Graphviz text.

use kilo_core::topology::{self, Mesh};

/// The mesh in the DOT language.
pub fn run(mesh: &Mesh) -> String {
    topology::dot(mesh)
}

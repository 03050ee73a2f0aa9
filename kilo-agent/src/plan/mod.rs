//! From the mesh, this node and its links to the complete desired state of
//! this host, as plain values. Pure: no I/O, no clock.

mod types;

pub use types::*;

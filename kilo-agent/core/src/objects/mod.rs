//! Kubernetes objects and what Kilo reads from and writes into them.

pub mod annotations;
pub mod events;
pub mod leaving;
pub mod node;
pub mod peer;
mod snapshot;

pub use snapshot::{ObjectRef, Published, Snapshot};

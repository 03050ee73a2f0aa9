//! Kubernetes objects, and what Kilo reads from and writes into them: nodes and VPN peers as values,
//! which everything after this is computed from.

pub mod annotations;
pub mod events;
pub mod leaving;
pub mod node;
mod nodes;
pub mod peer;
pub mod slices;
mod snapshot;
mod types;

pub use nodes::{CheckedIn, CheckedInRef, Nodes, Replaced, among, not_among, with_own};
pub use snapshot::{ObjectRef, Published, Snapshot};
pub use types::{InternalIpBy, Leaving, Node, Peer};

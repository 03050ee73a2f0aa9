//! From nodes, peers and settings to the mesh: locations, leaders, addresses
//! and allowed IPs. Pure: no I/O, no clock.

mod acting;
mod address_shortage;
mod allocate;
pub mod changes;
pub mod former;
mod freed;
mod graph;
mod heartbeat_shares;
pub mod heartbeats;
mod homes;
mod leader;
mod leader_since;
mod liveness;
mod local;
mod location_ips;
mod mesh;
mod observed_mesh;
mod peer_acceptance;
mod prefix_owners;
mod private_endpoint;
mod published_subnet;
mod readiness;
mod segment;
mod stand_bys;
mod tunnel_ends;
mod why_fewer_leaders;

/// What a mesh is made of.
pub use crate::objects::{
    CheckedIn, CheckedInRef, InternalIpBy, Leaving, Node, Nodes, Peer, Replaced, among, not_among, with_own,
};
pub use acting::{Acting, ActingLocation, Gateways, REPLACED_LEADER_TERM};
pub use freed::FreedAddresses;
pub use graph::{TunnelPaths, acting, dot};
pub use homes::Homes;
pub use leader::LeaderReason;
pub use leader_since::{LeaderSince, LeadersSince};
pub use liveness::Liveness;
pub use local::LocalMesh;
pub use mesh::{Lost, Mesh, location_of};
pub use observed_mesh::ObservedMesh;
pub use peer_acceptance::{PeerAcceptance, PeerAcceptances, leave_out_unused, peer_acceptances};
pub use prefix_owners::PrefixOwner;
pub use private_endpoint::PRIVATE_ENDPOINT_REMEDY;
pub use published_subnet::{SubnetsDiffer, published_subnet};
pub use readiness::{
    NO_POD_CIDR, READY_SECONDS, is_complete, is_recent, missing, ready_at, ready_seconds, with_remedy,
};
pub(crate) use segment::LocationPrefix;
pub use segment::{Member, Segment};
pub use tunnel_ends::{TunnelEnd, tunnel_ends};

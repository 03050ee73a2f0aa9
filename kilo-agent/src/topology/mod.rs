//! From nodes, peers and settings to the mesh: locations, leaders, addresses
//! and allowed IPs. Pure: no I/O, no clock.

mod types;

pub use types::*;

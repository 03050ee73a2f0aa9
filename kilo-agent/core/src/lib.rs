//! Kilo's pure core: from Kubernetes objects to the desired state of one host, as plain values.
//!
//! Data flows one way: `objects` → `topology` → `plan`, and a plan is made of the desired states that
//! the actuators know: `wireguard`, `net` and `tables`. Nothing here does I/O, reads a clock or
//! knows tokio, aya or netlink; `kilo-host` applies what is computed here, and `kilo-agent` runs
//! the loop.

pub mod addresses;
pub mod errors;
pub mod flat_map;
mod label_values;
pub mod multicluster;
pub mod net;
pub mod objects;
pub mod observed;
pub mod plan;
pub mod prefixes;
pub mod relay;
pub mod settings;
pub mod showconf;
pub mod signal_id;
pub mod tables;
pub mod topology;
pub mod tunnel_path;
pub mod vpn_peer;
pub mod wireguard;

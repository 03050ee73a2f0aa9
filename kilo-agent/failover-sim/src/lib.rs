//! Fault schedules over the modules of `kilo-failover`, in simulated time: what the
//! agents, the kernels' rules and the parser do is the code that ships, the rest
//! (wires, delays, netlink, stalls) is modelled.
//!
//! An outage of a member counts from when some gateway could serve it until its
//! kernel's word, the far leader's owner and the paths in both directions agree.
//! Not modelled: WireGuard's handshakes, NAT, netlink under load, the API server.

pub mod engine;
pub mod faults;
pub mod host;
mod invariants;
pub mod planned;
pub mod report;
pub mod restarts;
pub mod rng;
pub mod scenarios;
pub mod several;

pub use engine::{Noise, Shape, Sim};
pub use invariants::Invariant;

//! Kilo's actuators: each reads what the host has, compares it with the plan of `kilo-core`, and
//! writes the difference. Nothing here knows the agent.

pub mod cni;
pub mod dataplane;
pub mod firewall;
pub mod interface;
pub mod lock;
pub mod memory;
pub mod net;
pub mod wireguard;

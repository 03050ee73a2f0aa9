//! Code that the BPF programs and the agent share: map layouts, counters, signals and packet arithmetic. No
//! I/O, no allocation; everything here is tested on the host.
#![cfg_attr(not(test), no_std)]

pub mod checksum;
pub mod counters;
pub mod direct;
pub mod drop_reasons;
pub mod ecn;
pub mod encap;
pub mod event;
pub mod forwarding;
pub mod icmp_too_big;
pub mod inject;
pub mod lead;
pub mod map_table;
pub mod maps;
pub mod nat;
pub mod packet;
pub mod pod_flow;
pub mod relay;
pub mod signal;
pub mod siphash;
mod wire_enum;

//! Kilo's agent as a library: a loop that takes the objects of a backend, has `kilo-core` compute the desired
//! state of the host, and has `kilo-host` apply it.
//!
//! Without the feature `agent` it has only what `kgctl` needs, and builds for every target of Rust.

#[cfg(feature = "agent")]
pub mod agent;
#[cfg(feature = "agent")]
pub mod announce;
pub mod backend;
pub mod cli;
#[cfg(feature = "agent")]
pub mod failover;
pub mod far;
#[cfg(any(debug_assertions, test))]
pub mod flags_markdown;
#[cfg(feature = "agent")]
pub mod health;
#[cfg(feature = "agent")]
pub mod http;
#[cfg(feature = "agent")]
pub mod leaving;
#[cfg(feature = "agent")]
pub mod metrics;
#[cfg(feature = "agent")]
mod packets;
#[cfg(feature = "agent")]
pub mod relay;
pub mod resolve;
pub mod status;
#[cfg(feature = "agent")]
pub mod takeover;
pub mod timestamp;
#[cfg(feature = "agent")]
pub mod webhook;

/// Namespace of the agents in the manifests.
pub const AGENTS_NAMESPACE: &str = "kube-system";

//! Kilo's agent as a library: the loop that takes what a backend knows, has `kilo-core` compute the
//! desired state of the host, and has `kilo-host` apply it.

pub mod agent;
pub mod backend;
pub mod cli;
pub mod flag_table;
pub mod health;
pub mod http;
pub mod leaving;
pub mod metrics;
pub mod resolve;
pub mod status;
pub mod webhook;

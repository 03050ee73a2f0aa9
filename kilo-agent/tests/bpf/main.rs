//! The BPF programs, by `BPF_PROG_TEST_RUN` and on real hooks. Needs root.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    dead_code,
    unused_imports,
    reason = "tests"
)]
#![deny(clippy::disallowed_methods)]

#[path = "../netns/mod.rs"]
mod netns;
#[path = "../support/mod.rs"]
mod support;
#[path = "../support/wait.rs"]
mod wait;

mod agreement;
mod attach;
mod clear;
mod gso;
mod host_routing;
mod layouts;
mod links;
mod load;
mod map_sizes;
mod masquerade;
mod masquerade_both;
mod monitor;
mod pods;
mod programs;
mod receive;
mod relay;
mod send;
mod signals;
mod trace;

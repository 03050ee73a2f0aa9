//! The BPF programs, by `BPF_PROG_TEST_RUN` and on real hooks. Needs root.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]
#![deny(clippy::disallowed_methods)]

use kilo_test_support::{bpf, netns, seed, wait};

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

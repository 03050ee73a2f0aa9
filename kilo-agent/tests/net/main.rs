//! The agent and its actuators in network namespaces of their own. Needs root.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]
#![deny(clippy::disallowed_methods)]

use kilo_test_support::{bpf, netns, scrape, seed, wait};

mod cluster;

mod apply;
mod bad_hosts;
mod claim_moves;
mod cli_bad_input;
mod cni_plugins;
mod forward;
mod hand_over;
mod hooks;
mod http_server;
mod killed;
mod leaks;
mod leaving_container;
mod left_by_kilo;
mod links;
mod lock;
mod masquerade;
mod nat_rules;
mod node_gone;
mod overlay;
mod page;
mod path_probe;
mod publish_hangs;
mod quiet;
mod relay_settings;
mod strangers;
mod uninstall;
mod unknown_locations;
mod wireguard_kernel;
mod wireguard_userspace;

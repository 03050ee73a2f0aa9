//! Tests that need only cargo: topology, plans, files, documents.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]
#![deny(clippy::disallowed_methods)]

use kilo_test_support::dot;

mod generators;
mod plans;
mod trace;

mod backend_file;
mod bad_objects;
mod crate_graph;
mod docs;
mod docs_counters;
mod errors;
mod golden;
mod kgctl_files;
mod last_good;
mod manifest_crd;
mod overlay_senders;
mod plan_clear;
mod plan_closed;
mod plan_duplicates;
mod plan_failover;
mod plan_full_location;
mod plan_gateways;
mod plan_host_routing;
mod plan_neighbours;
mod plan_overlay;
mod plan_relays;
mod plan_subnet;
mod plan_via_wireguard;
mod topology_properties;

//! The agent and kgctl against a real kube-apiserver.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]
#![deny(clippy::disallowed_methods)]

use kilo_test_support::{api, dot, netns, scrape, wait};

mod accounts;
mod front;
mod proxy;

mod agent;
mod backend;
mod connect;
mod crd;
mod kgctl;
mod kgctl_access;
mod kgctl_connectivity;
mod kgctl_limits;
mod kgctl_nodes;
mod kgctl_probe;
mod kgctl_status;
mod last_good;
mod leaving;
mod manifests;
mod multicluster;
mod operator;
mod page_access;
mod server_failures;
mod slices;
mod slices_failures;
mod status;
mod takeover;
mod through_mesh;
mod webhook;

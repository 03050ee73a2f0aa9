//! The agent and kgctl against a real kube-apiserver.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    dead_code,
    unused_imports,
    reason = "tests"
)]
#![deny(clippy::disallowed_methods)]

#[path = "../support/accounts.rs"]
mod accounts;
#[path = "../support/api.rs"]
mod api;
#[path = "../support/dot.rs"]
mod dot;
#[path = "../support/front.rs"]
mod front;
#[path = "../netns/mod.rs"]
mod netns;
#[path = "../support/proxy.rs"]
mod proxy;
#[path = "../support/scrape.rs"]
mod scrape;
#[path = "../support/wait.rs"]
mod wait;

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

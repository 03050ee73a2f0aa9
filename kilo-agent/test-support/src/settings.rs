//! Settings of agents in tests.

use kilo_core::settings::{Encapsulate, Granularity, Settings, Tunnel};

/// One leader in each location, IPIP to all others there, and defaults otherwise.
pub fn settings() -> Settings {
    Settings {
        granularity: Granularity::Location,
        encapsulate: Encapsulate::Always,
        tunnel: Tunnel::Ipip,
        local: true,
        cni: true,
        subnet: "10.4.0.0/16".parse().unwrap(),
        service_cidrs: Vec::new(),
        port: 51_820,
    }
}

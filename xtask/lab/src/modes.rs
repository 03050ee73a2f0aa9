//! Ways to carry packets besides the lab's own, each tried in a lab of its own.

use std::time::Instant;

use super::{
    Lab, check, checks,
    network::Underlay,
    options::{Choice, LabOptions},
    topology::Topology,
};
use crate::report::TestOutcome;

/// A way to carry packets that is not the default.
pub struct Mode {
    /// What comes before the names of its tests.
    pub name: &'static str,
    underlay: Underlay,
    topology: Topology,
    flag: &'static str,
}

const fn mode(name: &'static str, underlay: Underlay, flag: &'static str) -> Mode {
    Mode { name, underlay, topology: Topology::Plain, flag }
}

const fn network(name: &'static str, topology: Topology) -> Mode {
    Mode { name, underlay: Underlay::V4, topology, flag: "--tunnel=ipip" }
}

/// All modes.
pub const MODES: [Mode; 10] = [
    mode("vxlan", Underlay::V4, "--tunnel=vxlan"),
    mode("crosssubnet", Underlay::V4, "--encapsulate=crosssubnet"),
    mode("nftables", Underlay::V4, "--masquerade=nftables"),
    mode("IPv6 underlay", Underlay::V6, "--tunnel=ipip"),
    mode("vxlan over IPv6", Underlay::V6, "--tunnel=vxlan"),
    network("two NICs in one LAN", Topology::TwoNics),
    network("private network in a VLAN", Topology::Vlan),
    network("uplink without Ethernet", Topology::PointToPoint),
    network("LAN host with a static route", Topology::StaticRoute),
    network("private addresses as endpoints", Topology::PrivateEndpoints),
];

impl Mode {
    /// Builds a lab, tries who reaches whom, takes the lab down.
    pub fn run(&self, args: &LabOptions, prefix: &str) -> Vec<TestOutcome> {
        println!("\n-- lab: {}", self.name);
        let started = Instant::now();
        let prefix = format!("{prefix}{}: ", self.name);
        let Self { underlay, topology, .. } = *self;
        if let Some(reason) = topology.missing() {
            return vec![check::skipped(&prefix, "the mesh comes up", reason)];
        }
        let mut args = LabOptions { underlay, topology, checks: Choice::Carried, ..args.clone() };
        args.kg_flags.push(self.flag.to_owned());
        match Lab::up(&args, None) {
            Ok(lab) => {
                let checks = args.checks.checks().into_iter().flatten().chain(topology.checks());
                checks::run(lab, started, &prefix, &args, checks)
            }
            Err(error) => vec![check::outcome(&prefix, "the mesh comes up", started, &Err(error))],
        }
    }
}

//! Meshes beside something else: another CNI, or nodes that still have Kilo.

use std::time::Instant;

use anyhow::Result;
use clap::ValueEnum;

use super::{
    Lab,
    check::{self, Check},
    checks, cilium, flannel, kernel_ipip,
    network::Network,
    options::LabOptions,
};
use crate::report::TestOutcome;

/// What the mesh stands beside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Scenario {
    /// Flannel's VXLAN overlay, in a cloud that drops IP protocol 4.
    Flannel,
    /// Cilium's devices and programs before and after ours, in the same cloud.
    Cilium,
    /// Nodes with plain IPIP, as Kilo sets them, in each role.
    Mixed,
}

impl Scenario {
    const fn label(self) -> &'static str {
        match self {
            Self::Flannel => "flannel",
            Self::Cilium => "cilium",
            Self::Mixed => "mixed",
        }
    }

    /// Flags of every agent.
    const fn flags(self) -> &'static [&'static str] {
        match self {
            Self::Flannel => flannel::FLAGS,
            Self::Cilium => cilium::FLAGS,
            Self::Mixed => kernel_ipip::FLAGS,
        }
    }

    const fn checks(self) -> &'static [Check] {
        match self {
            Self::Flannel => flannel::CHECKS,
            Self::Cilium => cilium::CHECKS,
            Self::Mixed => kernel_ipip::CHECKS,
        }
    }

    /// Adds to a network that has just been built what was there before the agents.
    pub fn prepare(self, network: &mut Network) -> Result<()> {
        match self {
            Self::Flannel => flannel::install(network)?,
            Self::Cilium => cilium::install(network)?,
            Self::Mixed => kernel_ipip::install(network)?,
        }
        Ok(())
    }

    /// Adds what comes only once the agents run.
    pub fn complete(self, network: &Network) -> Result<()> {
        if self == Self::Cilium { cilium::complete(network) } else { Ok(()) }
    }

    /// Builds the lab and runs every check; the caller takes the lab down.
    pub fn run(self, args: &LabOptions, prefix: &str) -> Vec<TestOutcome> {
        println!("\n-- lab: {}", self.label());
        let started = Instant::now();
        let prefix = format!("{prefix}{}: ", self.label());
        let mut args = args.clone();
        args.kg_flags.splice(0..0, self.flags().iter().map(|&flag| flag.to_owned()));
        match Lab::up(&args, Some(self)) {
            Ok(lab) => checks::run(lab, started, &prefix, &args, self.checks()),
            Err(error) => vec![check::outcome(&prefix, "the mesh comes up", started, &Err(error))],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agents_beside_another_cni_have_the_flags_of_its_manifests() {
        let manifests = crate::workspace_root().join("manifests");
        for (scenario, count) in [(Scenario::Flannel, 4), (Scenario::Cilium, 2)] {
            let files = std::fs::read_dir(&manifests).unwrap().map(|entry| entry.unwrap());
            let of_cni = |name: &str| name.starts_with("kilo-") && name.contains(scenario.label());
            let named = files.filter(|file| of_cni(&file.file_name().to_string_lossy()));
            let mut found = 0;
            // The one for userspace WireGuard has a container more.
            for file in named.filter(|file| !file.file_name().to_string_lossy().contains("userspace")) {
                let text = std::fs::read_to_string(file.path()).unwrap();
                let flags = text.lines().filter_map(|line| line.trim().strip_prefix("- --"));
                let places = ["kubeconfig=", "hostname=", "listen=", "wireguard="];
                let of_place = |flag: &&str| places.iter().any(|place| flag.starts_with(place));
                let flags: std::collections::BTreeSet<_> =
                    flags.filter(|flag| !of_place(flag)).map(|flag| format!("--{flag}")).collect();
                assert_eq!(flags, scenario.flags().iter().map(|&flag| flag.to_owned()).collect(), "{file:?}");
                found += 1;
            }
            assert_eq!(found, count, "{}", scenario.label());
        }
    }
}

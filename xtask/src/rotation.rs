//! Long parts of the tests: every `cargo xtask test --rotate` runs one of them, drawn by the commit's hash. The
//! same commit always draws the same part, and over many commits each part is drawn about equally often.

use std::process::Command;

use clap::ValueEnum;

use crate::{cluster::ClusterPart, command::output, workspace_root};

/// A kernel that tests run on in a virtual machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Kernel {
    /// Debian 12's, the oldest that is supported.
    #[value(name = "6.1")]
    Oldest,
    /// Debian 12's backport, the first here with TCX.
    #[value(name = "6.12")]
    Tcx,
    /// The newest that Debian has.
    Newest,
}

impl Kernel {
    /// Its value for `cargo xtask vm --kernel`.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Oldest => "6.1",
            Self::Tcx => "6.12",
            Self::Newest => "newest",
        }
    }
}

/// What runs on a kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum OnKernel {
    /// Tests and labs.
    #[default]
    All,
    /// Tests alone.
    Tests,
    /// Of the tests those of masquerading, of GSO packets and of random packets.
    Packets,
    /// Of the tests those of what a node receives: from kilo0, signals of failover, what it relays.
    Receiving,
    /// The other tests.
    OtherTests,
    /// Labs alone.
    Labs,
}

/// Tests of [`OnKernel::Packets`].
const PACKETS: [&str; 4] = ["bpf::agreement", "bpf::gso", "bpf::masquerade", "bpf::masquerade_both"];
/// Tests of [`OnKernel::Receiving`].
const RECEIVING: [&str; 3] = ["bpf::receive", "bpf::relay", "bpf::signals"];

impl OnKernel {
    /// Whether tests of this module run.
    pub fn has_tests(self, module: &str) -> bool {
        match self {
            Self::All | Self::Tests => true,
            Self::Packets => PACKETS.contains(&module),
            Self::Receiving => RECEIVING.contains(&module),
            Self::OtherTests => !PACKETS.contains(&module) && !RECEIVING.contains(&module),
            Self::Labs => false,
        }
    }

    /// Whether labs run.
    pub const fn has_labs(self) -> bool {
        matches!(self, Self::All | Self::Labs)
    }
}

/// Labs that take long, on this machine's kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum LongLab {
    /// Failover's cases in which one leader or its links fail, or leadership is moved, that not every run has.
    Leader,
    /// Those about what holds meanwhile: dead agents, Kilo itself, lost packets, strangers, many members.
    Conditions,
    /// Those of several active leaders and of `kgctl connect`.
    Gateways,
    /// Pairs of NATs, relays, and faults that not every run has.
    Nat,
}

/// A part that takes long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Long {
    /// Random faults.
    Soak,
    /// Instructions of packets.
    Bench,
    /// Labs.
    Lab(LongLab),
    /// Checks of the cluster that ordinary runs do not have.
    Cluster(ClusterPart),
    /// Tests or labs on one kernel.
    Vm(Kernel, OnKernel),
}

/// The parts of which one is drawn. The oldest kernel has most to run: each third of its tests is a part, and so
/// are its labs.
const TURNS: [Long; 14] = [
    Long::Vm(Kernel::Tcx, OnKernel::All),
    Long::Soak,
    Long::Vm(Kernel::Oldest, OnKernel::Packets),
    Long::Vm(Kernel::Newest, OnKernel::All),
    Long::Vm(Kernel::Oldest, OnKernel::OtherTests),
    Long::Vm(Kernel::Oldest, OnKernel::Labs),
    Long::Vm(Kernel::Oldest, OnKernel::Receiving),
    Long::Lab(LongLab::Leader),
    Long::Lab(LongLab::Gateways),
    Long::Lab(LongLab::Nat),
    Long::Cluster(ClusterPart::Operators),
    Long::Bench,
    Long::Lab(LongLab::Conditions),
    Long::Cluster(ClusterPart::Nodes),
];

impl Long {
    /// Its arguments for `cargo xtask test`.
    pub fn label(self) -> String {
        match self {
            Self::Soak => "soak".to_owned(),
            Self::Bench => "bench".to_owned(),
            Self::Lab(lab) => format!("long-labs --labs {}", name(&lab)),
            Self::Cluster(part) => format!("cluster --checks always --checks {}", name(&part)),
            Self::Vm(kernel, OnKernel::All) => format!("vm --kernel {}", kernel.label()),
            Self::Vm(kernel, what) => format!("vm --kernel {} --only {}", kernel.label(), name(&what)),
        }
    }

    /// The one that the checked-out commit's hash draws; the first one outside a repository.
    pub fn of_this_commit() -> Self {
        let head = output(Command::new("git").current_dir(workspace_root()).args(["rev-parse", "HEAD"]));
        of_commit(head.unwrap_or_default().trim())
    }

    /// Every long part, in the order of the list.
    pub fn all() -> impl Iterator<Item = Self> {
        TURNS.into_iter()
    }
}

/// Its name on the command line.
pub fn name(value: &impl ValueEnum) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

fn of_commit(hash: &str) -> Long {
    let number = hash.get(..8).and_then(|digits| u32::from_str_radix(digits, 16).ok()).unwrap_or_default();
    TURNS[number as usize % TURNS.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_long_part_has_its_turn_with_as_many_commits_as_the_others() {
        let mut turns = std::collections::BTreeMap::new();
        for number in 0..1_000_u32 {
            let hash = format!("{:08x}", number.wrapping_mul(2_654_435_761));
            *turns.entry(of_commit(&hash)).or_insert(0) += 1;
        }
        assert_eq!(turns.len(), TURNS.len());
        assert!(turns.values().all(|count| (50..110).contains(count)), "{turns:?}");
        assert_eq!(of_commit("not a hash"), TURNS[0]);
        assert_eq!(TURNS[4].label(), "vm --kernel 6.1 --only other-tests");
        assert_eq!(TURNS[8].label(), "long-labs --labs gateways");
    }

    #[test]
    fn the_turns_of_the_oldest_kernel_are_all_that_runs_on_it() {
        let turns = || {
            Long::all().filter_map(|long| match long {
                Long::Vm(Kernel::Oldest, what) => Some(what),
                _ => None,
            })
        };
        for module in ["bpf::masquerade", "bpf::gso", "bpf::relay", "bpf::attach", "net::strangers"] {
            assert_eq!(turns().filter(|what| what.has_tests(module)).count(), 1, "{module}");
        }
        assert_eq!(turns().filter(|what| what.has_labs()).count(), 1);
    }
}

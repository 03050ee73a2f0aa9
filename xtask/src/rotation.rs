//! The parts of the tests that take long take turns: every `cargo xtask test --rotate`
//! runs one of them, chosen by the commit, so that all are run every few commits.

use std::process::Command;

use clap::ValueEnum;

use crate::{command::output, workspace_root};

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
    /// All of them, the oldest first.
    pub const ALL: [Self; 3] = [Self::Oldest, Self::Tcx, Self::Newest];

    /// As `cargo xtask vm --kernel` takes it.
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
    /// Labs alone.
    Labs,
}

/// A part that takes long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Long {
    /// Faults by chance.
    Soak,
    /// What runs on one kernel.
    Vm(Kernel, OnKernel),
}

/// In the order in which they take turns. The oldest kernel has most to do: its tests and its
/// lab have a turn each.
const TURNS: [Long; 5] = [
    Long::Vm(Kernel::Tcx, OnKernel::All),
    Long::Soak,
    Long::Vm(Kernel::Oldest, OnKernel::Tests),
    Long::Vm(Kernel::Newest, OnKernel::All),
    Long::Vm(Kernel::Oldest, OnKernel::Labs),
];

impl Long {
    /// As `cargo xtask test` names it.
    pub fn label(self) -> String {
        match self {
            Self::Soak => "soak".to_owned(),
            Self::Vm(kernel, OnKernel::All) => format!("vm --kernel {}", kernel.label()),
            Self::Vm(kernel, OnKernel::Tests) => format!("vm --kernel {} --only tests", kernel.label()),
            Self::Vm(kernel, OnKernel::Labs) => format!("vm --kernel {} --only labs", kernel.label()),
        }
    }

    /// The one whose turn it is with the commit that is checked out; the first
    /// where there is no repository.
    pub fn of_this_commit() -> Self {
        let head = output(Command::new("git").current_dir(workspace_root()).args(["rev-parse", "HEAD"]));
        of_commit(head.unwrap_or_default().trim())
    }

    /// Every long part, in the order of their turns.
    pub fn all() -> impl Iterator<Item = Self> {
        TURNS.into_iter()
    }
}

fn of_commit(hash: &str) -> Long {
    let number = hash.get(..8).and_then(|digits| u32::from_str_radix(digits, 16).ok()).unwrap_or_default();
    TURNS[number as usize % TURNS.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_long_part_has_its_turn_with_a_fifth_of_the_commits() {
        let mut turns = std::collections::BTreeMap::new();
        for number in 0..1_000_u32 {
            let hash = format!("{:08x}", number.wrapping_mul(2_654_435_761));
            *turns.entry(of_commit(&hash)).or_insert(0) += 1;
        }
        assert_eq!(turns.len(), TURNS.len());
        assert!(turns.values().all(|count| (150..250).contains(count)), "{turns:?}");
        assert_eq!(of_commit("not a hash"), TURNS[0]);
    }
}

//! The part `cluster`: each release of Kubernetes is brought up and checked.

use std::process::Command;

use anyhow::Result;

use super::{Part, run_own};
use crate::{
    cluster::release::{DEBIAN, Release},
    command::own_program,
    report::TestOutcome,
    second_try::SecondTries,
};

/// One cluster, in a process of its own because it handles signals.
#[derive(Debug, PartialEq, Eq)]
struct Run {
    release: Release,
    flags: &'static [&'static str],
}

/// Which checks run, and on which releases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checks {
    /// The checks of every run, on the newest release.
    Ordinary,
    /// Every check, on the newest release.
    Every,
    /// Every check on the newest release, then the ordinary ones on the oldest.
    EveryAndOldest,
}

/// Runs these checks.
pub fn run(checks: Checks, tries: &mut SecondTries) -> Result<Vec<TestOutcome>> {
    let this = own_program()?;
    let mut outcomes = Vec::new();
    for Run { release, flags } in runs(checks, Release::newest()?) {
        println!("-- Kubernetes {}", release.version);
        let ran = tries.run(|_| {
            let file = tempfile::NamedTempFile::new()?;
            let mut command = Command::new(&this);
            command.args(["cluster", "test", "--json"]).arg(file.path()).args(flags);
            run_own(Part::Cluster, "cluster test", &mut command, file.path())
        })?;
        outcomes.extend(ran.into_iter().map(|outcome| TestOutcome {
            name: format!("{} (Kubernetes {})", outcome.name, release.version),
            ..outcome
        }));
    }
    Ok(outcomes)
}

/// Long checks run on the newest release only: they exercise the nodes more than the API server.
fn runs(checks: Checks, newest: Release) -> Vec<Run> {
    let flags: &[&str] = if checks == Checks::Ordinary { &[] } else { &["--all"] };
    let mut runs = vec![Run { release: newest, flags }];
    if checks == Checks::EveryAndOldest && newest != DEBIAN {
        runs.push(Run { release: DEBIAN, flags: &["--old"] });
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::release::CURRENT;

    #[test]
    fn all_means_both_releases_and_the_newest_as_a_whole() {
        let wanted = |runs: Vec<Run>| {
            runs.iter().map(|run| (run.release.version, run.flags.join(" "))).collect::<Vec<_>>()
        };
        assert_eq!(wanted(runs(Checks::Ordinary, CURRENT)), [("1.36.2", String::new())]);
        assert_eq!(wanted(runs(Checks::Every, CURRENT)), [("1.36.2", "--all".to_owned())]);
        let both = [("1.36.2", "--all".to_owned()), ("1.20.2", "--old".to_owned())];
        assert_eq!(wanted(runs(Checks::EveryAndOldest, CURRENT)), both);
        // The newer release's source is unavailable.
        assert_eq!(wanted(runs(Checks::EveryAndOldest, DEBIAN)), [("1.20.2", "--all".to_owned())]);
    }
}

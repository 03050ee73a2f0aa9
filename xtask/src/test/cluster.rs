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

/// One cluster, in a process of its own because it takes over signals.
#[derive(Debug, PartialEq, Eq)]
struct Run {
    release: Release,
    flags: &'static [&'static str],
}

/// Runs the checks on the newest release, with `all` every one of them, and then the ordinary ones on the
/// oldest.
pub fn run(all: bool, tries: &mut SecondTries) -> Result<Vec<TestOutcome>> {
    let this = own_program()?;
    let mut outcomes = Vec::new();
    for Run { release, flags } in runs(all, Release::newest()?) {
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

/// What takes long is left to the newest: it asks the nodes more than the API server.
fn runs(all: bool, newest: Release) -> Vec<Run> {
    let mut runs = vec![Run { release: newest, flags: if all { &["--all"] } else { &[] } }];
    if all && newest != DEBIAN {
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
        assert_eq!(wanted(runs(false, CURRENT)), [("1.36.2", String::new())]);
        let both = [("1.36.2", "--all".to_owned()), ("1.20.2", "--old".to_owned())];
        assert_eq!(wanted(runs(true, CURRENT)), both);
        // Where the newer one's source is not at hand.
        assert_eq!(wanted(runs(true, DEBIAN)), [("1.20.2", "--all".to_owned())]);
    }
}

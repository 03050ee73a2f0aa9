//! The part `cluster`: each release of Kubernetes is brought up and checked.

use std::process::Command;

use anyhow::Result;
use clap::ValueEnum as _;

use super::{Part, run_own};
use crate::{
    cluster::{
        COMES_UP, ClusterPart, is_about_those_before,
        release::{DEBIAN, Release},
    },
    command::own_program,
    report::TestOutcome,
    rotation,
    second_try::SecondTries,
};

/// One cluster, in a process of its own because it handles signals.
#[derive(Debug, PartialEq, Eq)]
struct Run {
    release: Release,
    parts: Vec<ClusterPart>,
}

impl Run {
    /// Arguments of `cluster test` for everything, or for the checks of the outcomes `names`. A cluster that did
    /// not come up means everything, and so does a check of what the others have left.
    fn arguments(&self, names: &[String]) -> Vec<String> {
        let pairs = |option: &str, values: Vec<String>| -> Vec<String> {
            values.into_iter().flat_map(|value| [option.to_owned(), value]).collect()
        };
        let parts = || self.parts.iter().map(rotation::name).collect();
        let old = (self.release == DEBIAN).then(|| "--old".to_owned());
        let chosen = match names {
            [] => pairs("--part", parts()),
            names if names.iter().any(|name| name == COMES_UP || is_about_those_before(name)) => {
                pairs("--part", parts())
            }
            names => pairs("--only", names.to_vec()),
        };
        old.into_iter().chain(chosen).collect()
    }
}

/// Which checks run, and on which releases.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Checks {
    /// The checks of these parts, on the newest release.
    Parts(Vec<ClusterPart>),
    /// Every check on the newest release, then the ordinary ones on the oldest.
    EveryAndOldest,
}

/// Runs these checks.
pub fn run(checks: &Checks, tries: &mut SecondTries) -> Result<Vec<TestOutcome>> {
    let this = own_program()?;
    let mut outcomes = Vec::new();
    for run in runs(checks, Release::newest()?) {
        println!("-- Kubernetes {}", run.release.version);
        let ran = tries.run(|names| {
            let file = tempfile::NamedTempFile::new()?;
            let mut command = Command::new(&this);
            command.args(["cluster", "test", "--json"]).arg(file.path()).args(run.arguments(names));
            run_own(Part::Cluster, "cluster test", &mut command, file.path())
        })?;
        outcomes.extend(ran.into_iter().map(|outcome| TestOutcome {
            name: format!("{} (Kubernetes {})", outcome.name, run.release.version),
            ..outcome
        }));
    }
    Ok(outcomes)
}

/// Long checks run on the newest release only: they exercise the nodes more than the API server.
fn runs(checks: &Checks, newest: Release) -> Vec<Run> {
    match checks {
        Checks::Parts(parts) => vec![Run { release: newest, parts: parts.clone() }],
        Checks::EveryAndOldest => {
            let every = Run { release: newest, parts: ClusterPart::value_variants().to_vec() };
            let oldest = Run { release: DEBIAN, parts: vec![ClusterPart::Always] };
            std::iter::once(every).chain((newest != DEBIAN).then_some(oldest)).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::release::CURRENT;

    const EVERY: &str = "--part always --part operators --part nodes";

    #[test]
    fn all_means_both_releases_and_the_newest_as_a_whole() {
        let wanted = |checks: &Checks, newest| {
            let runs = runs(checks, newest);
            runs.iter().map(|run| (run.release.version, run.arguments(&[]).join(" "))).collect::<Vec<_>>()
        };
        let ordinary = Checks::Parts(vec![ClusterPart::Always]);
        assert_eq!(wanted(&ordinary, CURRENT), [("1.36.2", "--part always".to_owned())]);
        let both = [("1.36.2", EVERY.to_owned()), ("1.20.2", "--old --part always".to_owned())];
        assert_eq!(wanted(&Checks::EveryAndOldest, CURRENT), both);
        // The newer release's source is unavailable.
        assert_eq!(wanted(&Checks::EveryAndOldest, DEBIAN), [("1.20.2", format!("--old {EVERY}"))]);
    }

    #[test]
    fn a_second_try_is_of_what_failed_alone_on_a_cluster_that_came_up() {
        let run = Run { release: CURRENT, parts: vec![ClusterPart::Always, ClusterPart::Nodes] };
        let again = |names: &[&str]| {
            run.arguments(&names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>()).join("|")
        };
        assert_eq!(
            again(&["a drained node takes nothing with it"]),
            "--only|a drained node takes nothing with it"
        );
        assert_eq!(again(&[COMES_UP]), "--part|always|--part|nodes");
        // Alone on a new cluster these pass, whatever the others had done to the first one.
        let attached = "every program is on this kernel's hooks, and none was attached again";
        for name in [attached, &format!("in the end {attached}")] {
            assert_eq!(again(&["a drained node takes nothing with it", name]), "--part|always|--part|nodes");
        }
    }
}

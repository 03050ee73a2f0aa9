//! The parts `lab` and `long-labs`: labs in processes of their own, because they handle signals.

use std::process::Command;

use anyhow::{Context as _, Result};

use super::{Part, run_own};
use crate::{command::own_program, report::TestOutcome, rotation::LongLab, second_try::SecondTries};

/// One process: arguments of `cargo xtask lab`, and how to run parts of it again.
struct Run {
    arguments: &'static [&'static str],
    /// The option for the outcomes' file.
    outcomes: &'static str,
    /// The option that selects one part, and the prefix of that part in the outcomes' names; `None`:
    /// everything runs again.
    single: Option<(&'static str, &'static str)>,
}

impl Run {
    const fn checks(arguments: &'static [&'static str]) -> Self {
        Self { arguments, outcomes: "--json", single: None }
    }

    const fn of(arguments: &'static [&'static str], option: &'static str, word: &'static str) -> Self {
        Self { arguments, outcomes: "--outcomes", single: Some((option, word)) }
    }

    /// Arguments for everything, or for the parts of the outcomes `names`. A name that belongs to no part
    /// means everything.
    fn arguments(&self, names: &[String]) -> Vec<String> {
        let all = || self.arguments.iter().map(|&argument| argument.to_owned());
        let single = self.single.filter(|_| !names.is_empty()).and_then(|(option, word)| {
            let id = |name: &String| name.strip_prefix(word)?.split([':', ' ']).next().map(str::to_owned);
            let ids = names.iter().map(id).collect::<Option<Vec<_>>>()?;
            Some(ids.into_iter().flat_map(move |id| [option.to_owned(), id]))
        });
        match single {
            Some(named) => all().take(1).chain(named).collect(),
            None => all().collect(),
        }
    }
}

const QUICK: [Run; 4] = [
    Run::checks(&["test", "--modes"]),
    Run::checks(&["scenario"]),
    Run::of(&["faults", "--part", "always"], "--fault", "fault "),
    Run::of(&["failover", "--part", "always"], "--case", "failover "),
];

const LEADER: [Run; 1] = [Run::of(&["failover", "--part", "leader"], "--case", "failover ")];
const CONDITIONS: [Run; 1] = [Run::of(&["failover", "--part", "conditions"], "--case", "failover ")];
const GATEWAYS: [Run; 1] = [Run::of(&["failover", "--part", "gateways"], "--case", "failover ")];
const NAT: [Run; 2] =
    [Run::of(&["nat"], "--part", "nat "), Run::of(&["faults", "--part", "on-request"], "--fault", "fault ")];

const fn runs_of(lab: LongLab) -> &'static [Run] {
    match lab {
        LongLab::Leader => &LEADER,
        LongLab::Conditions => &CONDITIONS,
        LongLab::Gateways => &GATEWAYS,
        LongLab::Nat => &NAT,
    }
}

/// Runs the labs of every run.
pub fn quick(tries: &mut SecondTries) -> Result<Vec<TestOutcome>> {
    run(Part::Lab, &QUICK, tries)
}

/// Runs these long labs.
pub fn long(labs: &[LongLab], tries: &mut SecondTries) -> Result<Vec<TestOutcome>> {
    let mut outcomes = Vec::new();
    for lab in labs {
        outcomes.extend(run(Part::LongLabs, runs_of(*lab), tries)?);
    }
    Ok(outcomes)
}

fn run(part: Part, runs: &[Run], tries: &mut SecondTries) -> Result<Vec<TestOutcome>> {
    let this = own_program()?;
    let bin = this.parent().context("no directory")?.to_owned();
    let mut outcomes = Vec::new();
    for run in runs {
        outcomes.extend(tries.run(|names| {
            let file = tempfile::NamedTempFile::new()?;
            let arguments = run.arguments(names);
            let mut command = Command::new(&this);
            command.args(["lab", "--name", "kilo-test", "--bin"]).arg(&bin).args(&arguments);
            command.arg(run.outcomes).arg(file.path());
            run_own(part, &format!("lab {}", arguments.join(" ")), &mut command, file.path())
        })?);
    }
    Ok(outcomes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_try_is_of_what_failed_alone_where_that_can_be_named() {
        let again = |run: &Run, names: &[&str]| {
            let names: Vec<_> = names.iter().map(|&name| name.to_owned()).collect();
            run.arguments(&names).join(" ")
        };
        let [checks, _, faults, failover] = &QUICK;
        assert_eq!(again(faults, &[]), "faults --part always");
        let failed = ["fault static-stability: agents dead, a node reboots", "fault rp-filter: it is 0"];
        assert_eq!(again(faults, &failed), "faults --fault static-stability --fault rp-filter");
        assert_eq!(again(failover, &["failover power-off"]), "failover --case power-off");
        assert_eq!(again(checks, &["a leader that leaves"]), "test --modes");
        let ends = ["failover, network Plain: every agent is as it is deployed"];
        assert_eq!(again(failover, &ends), "failover --part always", "it is about all of them");
    }
}

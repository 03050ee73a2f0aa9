//! A second try for tests with real processes, sockets and clocks: a machine
//! that stands still for seconds fails one of a thousand. Each that needed it
//! is named and counted; more than a few are no chance and get none.

use anyhow::Result;

use crate::report::TestOutcome;

/// Outcome of a test that passed at its second try.
pub const FLAKY: &str = "flaky";
const FAILED: &str = "failed";

/// How many more tests of this run may be tried again.
#[derive(Debug)]
pub struct SecondTries {
    left: usize,
}

impl Default for SecondTries {
    fn default() -> Self {
        Self { left: 2 }
    }
}

impl SecondTries {
    /// Runs tests, and those again that failed. `run` gets the names of the
    /// tests to run, none for all; it may run more, whose failures then count.
    ///
    /// # Errors
    /// Those of `run`.
    pub fn run(
        &mut self,
        mut run: impl FnMut(&[String]) -> Result<Vec<TestOutcome>>,
    ) -> Result<Vec<TestOutcome>> {
        let mut outcomes = run(&[])?;
        let names = failed(&outcomes);
        if names.is_empty() || names.len() > self.left {
            return Ok(outcomes);
        }
        self.left -= names.len();
        println!("-- failed, and tried again: {}", names.join(", "));
        let second = run(&names)?;
        for outcome in &mut outcomes {
            let passed = |other: &TestOutcome| other.name == outcome.name && other.outcome == "passed";
            if outcome.outcome == FAILED && second.iter().any(passed) {
                FLAKY.clone_into(&mut outcome.outcome);
            }
        }
        let new =
            second.into_iter().filter(|outcome| outcome.outcome == FAILED && !names.contains(&outcome.name));
        outcomes.extend(new);
        Ok(outcomes)
    }
}

fn failed(outcomes: &[TestOutcome]) -> Vec<String> {
    let failed = outcomes.iter().filter(|outcome| outcome.outcome == FAILED);
    failed.map(|outcome| outcome.name.clone()).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    /// Runs tests, named by number, of which those fail; returns what is said of the `n`-th.
    fn outcomes(tries: &mut SecondTries, failures: &[&[usize]]) -> Vec<String> {
        let mut failures = failures.iter();
        let run = |names: &[String]| {
            let failing = failures.next().copied().unwrap();
            let outcome = |number: usize| {
                let result = if failing.contains(&number) { FAILED } else { "passed" };
                TestOutcome::new("lab", number.to_string(), result, 0.0)
            };
            let wanted = |number: &usize| names.is_empty() || names.contains(&number.to_string());
            Ok((0..5).filter(wanted).map(outcome).collect())
        };
        let said = tries.run(run).unwrap();
        said.into_iter().map(|outcome| outcome.outcome).collect()
    }

    #[test]
    fn what_fails_once_is_flaky_and_what_fails_twice_has_failed() {
        let mut tries = SecondTries::default();
        assert_eq!(outcomes(&mut tries, &[&[1, 3], &[3]]), ["passed", FLAKY, "passed", FAILED, "passed"]);
    }

    #[test]
    fn many_failures_and_those_after_the_last_second_try_stand() {
        let mut tries = SecondTries::default();
        assert_eq!(outcomes(&mut tries, &[&[0, 1, 2]])[..3], [FAILED; 3]);
        assert_eq!(outcomes(&mut tries, &[&[0, 1], &[]])[..2], [FLAKY; 2]);
        assert_eq!(outcomes(&mut tries, &[&[4]])[4], FAILED);
    }
}

//! A second try for tests with real processes, sockets and clocks: a machine that stalls for seconds fails
//! one in a thousand. Each retried test is named and counted. More than a few failures are not chance and
//! get no second try; cleartext packets never do.

use anyhow::Result;

use crate::report::{Outcome, TestOutcome};

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
    /// Runs tests, and the failed ones a second time. `run` gets the names of the tests to run, none for
    /// all; it may run more, whose failures then count.
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
            let passed = |other: &TestOutcome| other.name == outcome.name && other.outcome == Outcome::Passed;
            if outcome.is_failed() && second.iter().any(passed) {
                outcome.outcome = Outcome::Flaky;
            }
        }
        // Tests that failed both times are already in `outcomes`.
        let is_new = |other: &TestOutcome| {
            let same = |outcome: &TestOutcome| outcome.name == other.name && outcome.is_failed();
            other.is_failed() && !outcomes.iter().any(same)
        };
        let new: Vec<_> = second.into_iter().filter(is_new).collect();
        outcomes.extend(new);
        Ok(outcomes)
    }
}

/// Tests that may be retried. A final failure may not: a cleartext packet stays sent even when no second
/// one is.
fn failed(outcomes: &[TestOutcome]) -> Vec<String> {
    let failed = outcomes.iter().filter(|outcome| outcome.is_failed() && !outcome.is_final);
    failed.map(|outcome| outcome.name.clone()).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    /// Runs tests, named by number; the n-th run fails those of `failures[n]`. Returns what is reported of
    /// each.
    fn outcomes(tries: &mut SecondTries, failures: &[&[usize]]) -> Vec<Outcome> {
        let mut failures = failures.iter();
        let run = |names: &[String]| {
            let failing = failures.next().copied().unwrap();
            let outcome = |number: usize| {
                let result = if failing.contains(&number) { Outcome::Failed } else { Outcome::Passed };
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
        assert_eq!(
            outcomes(&mut tries, &[&[1, 3], &[3]]),
            [Outcome::Passed, Outcome::Flaky, Outcome::Passed, Outcome::Failed, Outcome::Passed]
        );
    }

    #[test]
    fn packets_in_clear_stand_whatever_the_second_try_shows() {
        let outcome = |name: &str, result, is_final| TestOutcome {
            is_final,
            ..TestOutcome::new("cluster", name, result, 0.0)
        };
        let mut turns = 0;
        let said = SecondTries::default().run(|names| {
            turns += 1;
            match turns {
                1 => {
                    Ok(vec![outcome("clear", Outcome::Failed, true), outcome("loss", Outcome::Failed, false)])
                }
                _ => {
                    assert_eq!(names, ["loss"]);
                    Ok(vec![outcome("clear", Outcome::Failed, true), outcome("loss", Outcome::Passed, false)])
                }
            }
        });
        let said: Vec<_> = said.unwrap().into_iter().map(|one| (one.name, one.outcome)).collect();
        assert_eq!(
            said,
            [("clear", Outcome::Failed), ("loss", Outcome::Flaky)]
                .map(|(name, outcome)| (name.to_owned(), outcome))
        );
        let alone = SecondTries::default().run(|_| {
            turns += 1;
            Ok(vec![outcome("clear", Outcome::Failed, true)])
        });
        assert_eq!((alone.unwrap()[0].outcome, turns), (Outcome::Failed, 3), "it was run once");
    }

    #[test]
    fn many_failures_and_those_after_the_last_second_try_stand() {
        let mut tries = SecondTries::default();
        assert_eq!(outcomes(&mut tries, &[&[0, 1, 2]])[..3], [Outcome::Failed; 3]);
        assert_eq!(outcomes(&mut tries, &[&[0, 1], &[]])[..2], [Outcome::Flaky; 2]);
        assert_eq!(outcomes(&mut tries, &[&[4]])[4], Outcome::Failed);
    }
}

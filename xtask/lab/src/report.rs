//! Outcomes of tests, as `target/test-report.json` lists them.

use std::{fmt, time::Instant};

use serde::{Deserialize, Serialize};

/// Outcome of one test: an element of the JSON report, and of a part's `--outcomes`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TestOutcome {
    /// The part of the run, such as `unit`, `net` or `long-labs`.
    pub part: String,
    /// What it shows.
    pub name: String,
    /// How it ended.
    pub outcome: Outcome,
    /// Wall time.
    pub seconds: f64,
    /// It failed by packets in cleartext ([`InClear`]): whatever a second try shows, they were sent.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_final: bool,
}

/// How a test ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// It passed at once.
    Passed,
    /// It passed at the second try.
    Flaky,
    /// It failed.
    Failed,
    /// It did not run.
    Skipped,
    /// It was skipped on this kernel, and passed in a virtual machine of the same run.
    Elsewhere,
}

impl From<bool> for Outcome {
    fn from(is_passed: bool) -> Self {
        if is_passed { Self::Passed } else { Self::Failed }
    }
}

impl fmt::Display for Outcome {
    /// The text that the report has.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// Packets of the mesh were seen in cleartext; says how many, and who sent what where that is known.
#[derive(Debug)]
pub struct InClear(pub String);

impl fmt::Display for InClear {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for InClear {}

impl TestOutcome {
    /// A test with this outcome.
    pub fn new(part: &str, name: impl Into<String>, outcome: Outcome, seconds: f64) -> Self {
        Self { part: part.to_owned(), name: name.into(), outcome, seconds, is_final: false }
    }

    /// Whether it failed.
    pub fn is_failed(&self) -> bool {
        self.outcome == Outcome::Failed
    }

    /// Marks it as final when it failed by packets in cleartext.
    pub fn because_of(self, error: Option<&anyhow::Error>) -> Self {
        Self { is_final: error.is_some_and(anyhow::Error::is::<InClear>), ..self }
    }

    /// A test that passed or failed, and began then.
    pub fn ended(part: &str, name: impl Into<String>, is_passed: bool, began: Instant) -> Self {
        Self::new(part, name, is_passed.into(), began.elapsed().as_secs_f64())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use anyhow::anyhow;

    use super::*;

    #[test]
    fn an_outcome_is_shown_as_the_report_has_it() {
        for (outcome, text) in [(Outcome::Passed, "passed"), (Outcome::Elsewhere, "elsewhere")] {
            assert_eq!(
                (outcome.to_string(), serde_json::to_value(outcome).unwrap()),
                (text.to_owned(), text.into())
            );
        }
    }

    #[test]
    fn packets_in_clear_are_final_whatever_is_said_around_them() {
        let clear = anyhow::Error::new(InClear("3 packets in cleartext".to_owned()))
            .context("a node")
            .context("boot");
        let outcome = |error: &anyhow::Error| {
            TestOutcome::new("lab", "x", Outcome::Failed, 0.0).because_of(Some(error))
        };
        assert!(outcome(&clear).is_final && !outcome(&anyhow!("3 packets were lost")).is_final);
        let text = serde_json::to_string(&outcome(&clear)).unwrap();
        assert!(serde_json::from_str::<TestOutcome>(&text).unwrap().is_final);
        let lost = serde_json::to_string(&outcome(&anyhow!("lost"))).unwrap();
        assert!(!lost.contains("is_final") && !serde_json::from_str::<TestOutcome>(&lost).unwrap().is_final);
    }
}

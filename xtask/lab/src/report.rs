//! Outcomes of tests, as `target/test-report.json` lists them.

use std::{fmt, time::Instant};

use serde::{Deserialize, Serialize};

/// Outcome of one test: an element of the JSON report, and of a part's `--outcomes`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TestOutcome {
    /// `unit`, `bpf`, `lab`, `soak`, `api`, `cluster` or `vm`.
    pub part: String,
    /// What it shows.
    pub name: String,
    /// `passed`, `flaky` (at the second try), `failed`, `skipped`, or `elsewhere` (skipped on this
    /// kernel, passed in a virtual machine of the same run).
    pub outcome: String,
    /// Wall time.
    pub seconds: f64,
    /// It failed by packets in clear ([`InClear`]): whatever a second try shows, they were sent.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_final: bool,
}

/// Packets of the mesh were seen in clear; says how many, and who sent what where that is known.
#[derive(Debug)]
pub struct InClear(pub String);

impl fmt::Display for InClear {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for InClear {}

impl TestOutcome {
    /// A test with this outcome, which is one of those listed above.
    pub fn new(part: &str, name: impl Into<String>, outcome: &str, seconds: f64) -> Self {
        Self {
            part: part.to_owned(),
            name: name.into(),
            outcome: outcome.to_owned(),
            seconds,
            is_final: false,
        }
    }

    /// Marks it as final when it failed by packets in clear.
    pub fn because_of(self, error: Option<&anyhow::Error>) -> Self {
        Self { is_final: error.is_some_and(anyhow::Error::is::<InClear>), ..self }
    }

    /// A test that passed or failed, and began then.
    pub fn ended(part: &str, name: impl Into<String>, is_passed: bool, began: Instant) -> Self {
        Self::new(part, name, if is_passed { "passed" } else { "failed" }, began.elapsed().as_secs_f64())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use anyhow::anyhow;

    use super::*;

    #[test]
    fn packets_in_clear_are_final_whatever_is_said_around_them() {
        let clear =
            anyhow::Error::new(InClear("3 packets in clear".to_owned())).context("a node").context("boot");
        let outcome =
            |error: &anyhow::Error| TestOutcome::new("lab", "x", "failed", 0.0).because_of(Some(error));
        assert!(outcome(&clear).is_final && !outcome(&anyhow!("3 packets were lost")).is_final);
        let text = serde_json::to_string(&outcome(&clear)).unwrap();
        assert!(serde_json::from_str::<TestOutcome>(&text).unwrap().is_final);
        let lost = serde_json::to_string(&outcome(&anyhow!("lost"))).unwrap();
        assert!(!lost.contains("is_final") && !serde_json::from_str::<TestOutcome>(&lost).unwrap().is_final);
    }
}

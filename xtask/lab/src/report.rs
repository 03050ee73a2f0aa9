//! Outcomes of tests, as `target/test-report.json` lists them.

use std::time::Instant;

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
}

impl TestOutcome {
    /// A test that has ended so; `outcome` is one of those above.
    pub fn new(part: &str, name: impl Into<String>, outcome: &str, seconds: f64) -> Self {
        Self { part: part.to_owned(), name: name.into(), outcome: outcome.to_owned(), seconds }
    }

    /// One that passed or failed, and began then.
    pub fn ended(part: &str, name: impl Into<String>, is_passed: bool, began: Instant) -> Self {
        Self::new(part, name, if is_passed { "passed" } else { "failed" }, began.elapsed().as_secs_f64())
    }
}

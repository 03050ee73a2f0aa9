//! Outcomes of tests, as `target/test-report.json` lists them.

use serde::{Deserialize, Serialize};

/// One test.
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

//! Outcomes of tests, as `target/test-report.json` lists them.

use serde::{Deserialize, Serialize};

/// One test.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TestOutcome {
    /// `unit`, `bpf`, `lab`, `api` or `vm`.
    pub part: String,
    /// What it shows.
    pub name: String,
    /// `passed`, `flaky` (at the second try), `failed` or `skipped`.
    pub outcome: String,
    /// Wall time.
    pub seconds: f64,
}

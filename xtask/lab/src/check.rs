//! A check of the lab, and how its outcome is printed and recorded.

use std::time::Instant;

use anyhow::Result;

use super::Lab;
use crate::report::{Outcome, TestOutcome};

/// Name (a sentence) and function of a check, which gets the lab as the previous check left it.
pub type Check = (&'static str, fn(&mut Lab) -> Result<String>);

/// Prints and records one outcome.
pub fn outcome(prefix: &str, name: &str, began: Instant, result: &Result<String>) -> TestOutcome {
    match result {
        Ok(figure) => println!("test {prefix}{name} ... ok {figure}"),
        Err(error) => println!("test {prefix}{name} ... FAILED\n    {error:#}"),
    }
    TestOutcome::ended("lab", format!("{prefix}{name}"), result.is_ok(), began)
        .because_of(result.as_ref().err())
}

/// Prints and records a check that cannot run here.
pub fn skipped(prefix: &str, name: &str, reason: &str) -> TestOutcome {
    println!("SKIPPED {prefix}{name}: {reason}");
    TestOutcome::new("lab", format!("{prefix}{name}"), Outcome::Skipped, 0.0)
}

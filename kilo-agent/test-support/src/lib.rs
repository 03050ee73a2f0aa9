//! What several test programs and benchmarks of the agent share.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::missing_panics_doc,
    reason = "a test's helper fails as the test does"
)]
#![deny(clippy::disallowed_methods)]

pub mod api;
pub mod bpf;
pub mod dot;
pub mod netns;
pub mod scrape;
pub mod seed;
pub mod settings;
pub mod wait;

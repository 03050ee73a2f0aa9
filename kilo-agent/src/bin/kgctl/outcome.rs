//! What a command prints, and how it ended: its exit code.

use std::process::ExitCode;

/// How a command ended. A command line that is not understood exits with 2, as clap has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// All is well.
    Good,
    /// It could not do what it was told to, and has said why.
    Failed,
    /// It asked, and found that something is wrong or missing.
    Wrong,
}

impl From<End> for ExitCode {
    fn from(end: End) -> Self {
        match end {
            End::Good => Self::SUCCESS,
            End::Failed => Self::FAILURE,
            End::Wrong => Self::from(3),
        }
    }
}

/// What a command prints, and how it ended.
#[derive(Debug)]
pub struct Outcome {
    /// Standard output.
    pub text: String,
    /// The exit code.
    pub end: End,
}

impl Outcome {
    /// The answer of a command that asked about the cluster.
    pub fn found(text: String, is_good: bool) -> Self {
        Self { text, end: if is_good { End::Good } else { End::Wrong } }
    }

    /// The end of a command whose output was printed meanwhile.
    pub fn of(done: bool) -> Self {
        Self { text: String::new(), end: if done { End::Good } else { End::Failed } }
    }
}

/// What was asked for, done.
impl From<String> for Outcome {
    fn from(text: String) -> Self {
        Self { text, end: End::Good }
    }
}

//! Kubernetes objects and what Kilo reads from and writes into them.

pub mod annotations;
pub mod events;
pub mod leaving;
pub mod node;
pub mod peer;
mod snapshot;

pub use snapshot::{ObjectRef, Published, Snapshot};

/// An error with its causes, each said once.
pub fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}

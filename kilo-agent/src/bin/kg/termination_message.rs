//! The termination message of an agent that is asked to stop while something is wrong. The agent exits
//! without an error, so the kubelet would not use the end of its log (`FallbackToLogsOnError`).

use std::{fs, path::Path, sync::Arc};

use kilo_agent::{health::Health, status::View};
use tokio::sync::watch::Receiver;

/// File in the container that the kubelet copies into the pod's status.
const TERMINATION_LOG: &str = "/dev/termination-log";

/// Sources of the current problems.
pub struct LastWords {
    health: Health,
    view: Receiver<Arc<View>>,
}

impl LastWords {
    pub const fn new(health: Health, view: Receiver<Arc<View>>) -> Self {
        Self { health, view }
    }

    /// The current problems, one sentence each.
    pub fn said(&self) -> Vec<String> {
        let warnings = self.view.borrow().warnings.clone();
        self.health.problem().into_iter().chain(warnings).collect()
    }
}

/// Writes the message, unless it is empty. Outside of a container the file does not exist, and is not
/// created.
pub fn write(said: &[String]) {
    let file = Path::new(TERMINATION_LOG);
    if said.is_empty() || !file.exists() {
        return;
    }
    if let Err(error) = fs::write(file, said.join("\n")) {
        tracing::warn!(%error, file = TERMINATION_LOG, "failed to write the termination message");
    }
}

//! What can go wrong in a reconciliation.

use crate::{backend::BackendError, metrics::Metrics};
use kilo_host::{dataplane::DataplaneError, lock::LockError, net::NetError, wireguard::WireguardError};

/// Why a reconciliation failed, in whole or in part.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// Reading or writing nodes and peers.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// The task that follows nodes and peers has ended, which it never does by itself.
    #[error(
        "the watches of nodes and peers have ended; start kg again, and report this as a bug with its log"
    )]
    BackendEnded,
    /// Links, addresses or routes.
    #[error(transparent)]
    Net(#[from] NetError),
    /// The WireGuard device.
    #[error(transparent)]
    Wireguard(#[from] WireguardError),
    /// BPF programs and maps.
    #[error(transparent)]
    Dataplane(#[from] DataplaneError),
    /// Another agent holds the pinned programs and maps.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// The node lacks something; the text says what.
    #[error("node {node}: {missing}")]
    Incomplete {
        /// This node.
        node: String,
        /// What is missing and where it comes from.
        missing: &'static str,
    },
    /// More than one part of this host could not be reconciled.
    #[error("{first}; also: {}", texts(others))]
    Several {
        /// The error of the first part that failed, whose label is counted.
        #[source]
        first: Box<Self>,
        /// The others, in order.
        others: Vec<Self>,
    },
}

fn texts(errors: &[AgentError]) -> String {
    errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// Results of the parts that are applied one after the other.
#[derive(Debug, Default)]
pub(super) struct Parts {
    writes: u64,
    failed: Vec<AgentError>,
}

impl Parts {
    /// Takes the result of a part: its writes, or why it failed.
    pub fn add(&mut self, part: Result<u64, AgentError>) {
        match part {
            Ok(writes) => self.writes += writes,
            Err(error) => self.failed.push(error),
        }
    }

    /// The writes of all parts when none failed. The caller counts the first failure.
    pub fn end(self, metrics: &Metrics) -> Result<u64, AgentError> {
        let mut failed = self.failed.into_iter();
        let Some(first) = failed.next() else { return Ok(self.writes) };
        // These writes happened although another part failed.
        metrics.writes.inc_by(self.writes);
        let others: Vec<AgentError> = failed.collect();
        if others.is_empty() {
            return Err(first);
        }
        others.iter().for_each(|error| metrics.error(error.label()));
        Err(AgentError::Several { first: Box::new(first), others })
    }
}

impl AgentError {
    /// The step that failed: label `event` of `kilo_errors_total`.
    pub const fn label(&self) -> &'static str {
        match self {
            Self::Backend(error) => error.label(),
            Self::BackendEnded => "backend_ended",
            Self::Net(error) => error.label(),
            Self::Wireguard(error) => error.label(),
            Self::Dataplane(error) => error.label(),
            Self::Lock(_) => "lock",
            Self::Incomplete { .. } => "incomplete",
            Self::Several { first, .. } => first.label(),
        }
    }
}

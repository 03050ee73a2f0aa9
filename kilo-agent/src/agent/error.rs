//! What can go wrong in a reconciliation.

use crate::{
    backend::BackendError, dataplane::DataplaneError, lock::LockError, net::NetError,
    wireguard::WireguardError,
};

/// Why a reconciliation fell short.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// Nodes and peers.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// Links, addresses, routes.
    #[error(transparent)]
    Net(#[from] NetError),
    /// The WireGuard device.
    #[error(transparent)]
    Wireguard(#[from] WireguardError),
    /// Programs and maps.
    #[error(transparent)]
    Dataplane(#[from] DataplaneError),
    /// Another agent has the pinned programs and maps.
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
}

impl AgentError {
    /// Metric label.
    pub const fn label(&self) -> &'static str {
        match self {
            Self::Backend(error) => error.label(),
            Self::Net(error) => error.label(),
            Self::Wireguard(error) => error.label(),
            Self::Dataplane(error) => error.label(),
            Self::Lock(_) => "lock",
            Self::Incomplete { .. } => "incomplete",
        }
    }
}

//! Where nodes and peers come from, and where a node writes about itself.

pub mod file;
pub mod kubernetes;
#[cfg(feature = "agent")]
pub mod last_good;
pub mod mass_delete_guard;

#[cfg(feature = "agent")]
use std::fmt;
use std::{collections::BTreeSet, net::SocketAddr, sync::Arc, time::SystemTime};

use crate::timestamp::Timestamp;
use kilo_core::{
    errors::Explained,
    objects::{Published, Snapshot, events::EventReason},
    topology::PeerAcceptances,
};

/// Why a backend could not do what was asked; the variant's label is a metric label.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// The node this agent runs on is not known to the backend.
    #[error("node {0:?} does not exist; check --hostname against the names of the Node objects")]
    NoSuchNode(String),
    /// Reading or writing the directory failed.
    #[error("{path}: {source}")]
    Io {
        /// File or directory.
        path: String,
        /// Error of the system.
        #[source]
        source: std::io::Error,
    },
    /// The Kubernetes API refused.
    #[error("{0}")]
    Api(#[source] Explained),
    /// The Kubernetes API is out of reach or overloaded.
    #[error("{0}")]
    Unreachable(#[source] Explained),
    /// The configuration (kubeconfig, directory) cannot be used.
    #[error("{0}")]
    Config(#[source] Explained),
}

impl BackendError {
    /// What failed at the backend: label `event` of `kilo_errors_total`.
    pub const fn label(&self) -> &'static str {
        match self {
            Self::NoSuchNode(_) => "no_such_node",
            Self::Io { .. } => "io",
            Self::Api(_) => "api",
            Self::Unreachable(_) => "unreachable",
            Self::Config(_) => "config",
        }
    }

    /// Whether a retry may succeed without intervention.
    pub const fn is_temporary(&self) -> bool {
        matches!(self, Self::Unreachable(_))
    }
}

/// The last handshake of a VPN peer with a leader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handshake {
    /// When it took place.
    pub time: Timestamp,
    /// Endpoint of the peer as that leader sees it.
    pub endpoint: Option<SocketAddr>,
}

/// What a Peer object says about the peer's tunnels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TunnelStatus {
    /// The last handshake; `None` before the first.
    pub handshake: Option<Handshake>,
}

/// Something that has happened to a Node or a Peer, for the operator. Written twice, it is the same Event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Happened {
    /// Name of the Node or Peer.
    pub object: String,
    /// Reason of the Event, which also determines the object's kind.
    pub reason: EventReason,
    /// Message of the Event.
    pub text: String,
    /// When it happened, by this host's clock.
    pub at: SystemTime,
    /// Random, so that names of Events are unique.
    pub id: u64,
}

impl Happened {
    /// Something that happens at this moment.
    pub fn now(object: String, reason: EventReason, text: String) -> Self {
        Self { object, reason, text, at: SystemTime::now(), id: rand::random() }
    }
}

/// Result of writing the status of Peer objects.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeersReported {
    /// Number of statuses written.
    pub writes: u64,
    /// Peers whose status could not be written, while that of others could.
    pub failed: BTreeSet<String>,
}

/// Source of an agent's nodes, and what it writes.
#[cfg(feature = "agent")]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SlicesReport {
    /// It reads slices instead of Nodes.
    pub reads: bool,
    /// Why it does not read slices, or will not much longer.
    pub against: Option<String>,
    /// It writes slices for all agents.
    pub writes: bool,
    /// Writes of slices so far.
    pub written: u64,
    /// Writes of slices that failed so far.
    pub failed: u64,
    /// Slices that are missing, or cannot be read.
    pub bad: usize,
    /// Number of entries for a node that another entry describes, too.
    pub twice: usize,
}

#[cfg(feature = "agent")]
impl fmt::Display for SlicesReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.reads { "slices" } else { "Nodes" })?;
        if let Some(against) = &self.against {
            write!(f, " ({against})")?;
        }
        f.write_str(if self.writes { "; this agent writes slices" } else { "" })
    }
}

/// A source of nodes and peers.
pub trait Backend: Send + Sync + 'static {
    /// The latest snapshot; the receiver signals changes. The first value is complete: every object has been
    /// read once.
    fn watch(&self) -> tokio::sync::watch::Receiver<Arc<Snapshot>>;

    /// Writes annotations that differ from those of the node object; without a difference nothing is written.
    /// Returns whether something was written.
    fn publish(
        &self,
        node: &str,
        published: &Published,
    ) -> impl Future<Output = Result<bool, BackendError>> + Send;

    /// Writes into each Peer object whether it is part of the mesh, or why not. Backends that cannot store
    /// this write nothing.
    fn report_peers(
        &self,
        _peers: &PeerAcceptances,
    ) -> impl Future<Output = Result<PeersReported, BackendError>> + Send {
        async { Ok(PeersReported::default()) }
    }

    /// What a Peer object says about the peer's tunnels; `None` when there is no object to write into.
    fn tunnel_status(&self, _peer: &str) -> Option<TunnelStatus> {
        None
    }

    /// Writes a handshake into a Peer object, unless the object has changed since the version that
    /// [`Self::tunnel_status`] knows. Returns whether it was written.
    fn report_handshake(
        &self,
        _peer: &str,
        _handshake: &Handshake,
    ) -> impl Future<Output = Result<bool, BackendError>> + Send {
        async { Ok(false) }
    }

    /// Writes into the node object whether pods have network there. Backends that cannot store this write
    /// nothing.
    fn report_network(
        &self,
        _node: &str,
        _available: bool,
    ) -> impl Future<Output = Result<(), BackendError>> + Send {
        async { Ok(()) }
    }

    /// Whether this agent reads and writes slices; `None` when slices are not configured.
    #[cfg(feature = "agent")]
    fn slices(&self) -> Option<SlicesReport> {
        None
    }

    /// Marks a node as dead by setting its `last-seen` to 0, unless it is no longer `last_seen`, i.e. the
    /// node has renewed its heartbeat. Nodes with Kilo then consider it dead, too. Returns whether something
    /// was written.
    fn declare_dead(
        &self,
        node: &str,
        last_seen: i64,
    ) -> impl Future<Output = Result<bool, BackendError>> + Send;

    /// Writes an Event about a Node or a Peer, unless it has been written before. Backends that cannot store
    /// it write nothing: the log has it, too.
    fn event(&self, _happened: &Happened) -> impl Future<Output = Result<(), BackendError>> + Send {
        async { Ok(()) }
    }

    /// Removes every annotation `publish` writes.
    fn retract(&self, node: &str) -> impl Future<Output = Result<(), BackendError>> + Send;
}

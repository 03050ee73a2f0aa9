//! Where nodes and peers come from, and where a node writes about itself.

pub mod file;
pub mod kubernetes;
#[cfg(feature = "agent")]
pub mod last_good;
pub mod mass_delete_guard;

#[cfg(feature = "agent")]
use std::fmt;
use std::{net::SocketAddr, sync::Arc, time::SystemTime};

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
        /// What the system said.
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

    /// True when the same may work later without anybody's doing.
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

/// What the object of a peer says of its tunnels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Said {
    /// The last handshake, once there was one.
    pub handshake: Option<Handshake>,
}

/// Something that has happened to a Node or a Peer, for its operator. Written again, it is the same Event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Happened {
    /// Name of the object.
    pub object: String,
    /// Its reason, which says what kind of object that is.
    pub reason: EventReason,
    /// Its message.
    pub text: String,
    /// When it happened, by this host's clock.
    pub at: SystemTime,
    /// Drawn at random, so that no two have the same.
    pub id: u64,
}

impl Happened {
    /// It happens now.
    pub fn now(object: String, reason: EventReason, text: String) -> Self {
        Self { object, reason, text, at: SystemTime::now(), id: rand::random() }
    }
}

/// Where an agent reads nodes, and what it writes.
#[cfg(feature = "agent")]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SlicesReport {
    /// It reads slices and not Nodes.
    pub reads: bool,
    /// Why it does not, or will not soon.
    pub against: Option<String>,
    /// It writes them for all.
    pub writes: bool,
    /// Writes of slices so far.
    pub written: u64,
    /// Writes of slices that failed so far.
    pub failed: u64,
    /// Slices that are missing, or cannot be read.
    pub bad: usize,
    /// Places that say something of a node that another says something of, too.
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
    /// The latest snapshot; changes are signalled by the receiver. The first
    /// value is there once every object has been read once.
    fn watch(&self) -> tokio::sync::watch::Receiver<Arc<Snapshot>>;

    /// Writes what differs from what the node object holds now; no difference,
    /// no write. Returns whether something was written.
    fn publish(
        &self,
        node: &str,
        published: &Published,
    ) -> impl Future<Output = Result<bool, BackendError>> + Send;

    /// Writes into each Peer object whether it is part of the mesh, or why not. A backend
    /// without such a place writes nothing. Returns the
    /// number of writes.
    fn report_peers(
        &self,
        _peers: &PeerAcceptances,
    ) -> impl Future<Output = Result<u64, BackendError>> + Send {
        async { Ok(0) }
    }

    /// What the object of a peer says of its tunnels; `None`: there is no such object to write into.
    fn said(&self, _peer: &str) -> Option<Said> {
        None
    }

    /// Writes a handshake into the object of a peer, unless that is another version by now
    /// than [`Self::said`] knows. Returns whether it was written.
    fn report_handshake(
        &self,
        _peer: &str,
        _handshake: &Handshake,
    ) -> impl Future<Output = Result<bool, BackendError>> + Send {
        async { Ok(false) }
    }

    /// Says in the node object whether pods have a network there. A backend without such a
    /// place writes nothing.
    fn report_network(
        &self,
        _node: &str,
        _available: bool,
    ) -> impl Future<Output = Result<(), BackendError>> + Send {
        async { Ok(()) }
    }

    /// Where nodes are read and who writes that, where there are slices of the list of nodes.
    #[cfg(feature = "agent")]
    fn slices(&self) -> Option<SlicesReport> {
        None
    }

    /// Marks a node as dead, unless it has renewed its heartbeat since: its `last-seen` becomes 0 if it is
    /// still this, by which nodes with Kilo take it for dead, too. Returns whether something was written.
    fn declare_dead(
        &self,
        node: &str,
        last_seen: i64,
    ) -> impl Future<Output = Result<bool, BackendError>> + Send;

    /// Writes an Event about a Node, unless it has been written before. A backend without such a place writes
    /// nothing: it is in the log, too.
    fn event(&self, _happened: &Happened) -> impl Future<Output = Result<(), BackendError>> + Send {
        async { Ok(()) }
    }

    /// Removes every annotation `publish` writes.
    fn retract(&self, node: &str) -> impl Future<Output = Result<(), BackendError>> + Send;
}

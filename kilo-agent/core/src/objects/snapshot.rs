//! What a backend knows, and what an agent publishes.

use std::{
    collections::BTreeMap,
    fmt,
    net::{SocketAddr, SocketAddrV6},
    sync::Arc,
};

use ipnet::IpNet;

use super::{Nodes, Peer};
use crate::{
    settings::Granularity,
    wireguard::{Endpoint, PublicKey},
};

/// Everything a backend knows at one moment. Invalid objects are left out
/// and named in `problems`; they never hide valid ones.
/// ```
/// use kilo_core::objects::{CheckedIn, Node, Snapshot};
///
/// let node = Node { name: "a1".into(), ..Node::default() };
/// let mut before = Snapshot::default();
/// before.nodes.insert(CheckedIn { node: node.clone(), last_seen: 1_000 });
/// let mut after = before.clone();
/// after.nodes.insert(CheckedIn { node: node.clone(), last_seen: 1_030 });
/// assert!(after.differs_only_in_heartbeats(&before));
/// after.nodes.insert(CheckedIn { node: Node { leader: true, ..node }, last_seen: 1_030 });
/// assert!(!after.differs_only_in_heartbeats(&before));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Nodes by name, ready or not; unchanged ones are shared with the previous snapshot.
    pub nodes: Nodes,
    /// Valid peers by name; shared likewise.
    pub peers: Arc<BTreeMap<String, Peer>>,
    /// Why an object (or one of its fields) was not used.
    pub problems: BTreeMap<ObjectRef, String>,
}

/// The object that a problem is about.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ObjectRef {
    /// The directory of the file backend.
    Directory,
    /// A file in it, by its name without the path.
    File(String),
    /// A Node, by name.
    Node(String),
    /// A Peer, by name.
    Peer(String),
}

impl fmt::Display for ObjectRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directory => f.write_str("directory"),
            Self::File(name) => write!(f, "file {name}"),
            Self::Node(name) => write!(f, "node {name}"),
            Self::Peer(name) => write!(f, "peer {name}"),
        }
    }
}

impl ObjectRef {
    /// The Node object with this `metadata.name`; it need not exist.
    pub fn node(name: impl Into<String>) -> Self {
        Self::Node(name.into())
    }

    /// The Peer object with this `metadata.name`; it need not exist.
    pub fn peer(name: impl Into<String>) -> Self {
        Self::Peer(name.into())
    }

    /// The file of this name in the directory, without a path.
    pub fn file(name: impl Into<String>) -> Self {
        Self::File(name.into())
    }
}

impl Snapshot {
    /// True when at most nodes' heartbeats differ.
    pub fn differs_only_in_heartbeats(&self, other: &Self) -> bool {
        self.nodes.differs_only_in_heartbeats(&other.nodes)
            && self.peers == other.peers
            && self.problems == other.problems
    }
}

/// What an agent publishes about its own node (docs/annotations.md, "Written by the agent").
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Published {
    /// `endpoint`: where WireGuard of other nodes reaches this one; `None` removes the annotation.
    pub endpoint: Option<Endpoint>,
    /// `ipv6-endpoint`; `None` removes the annotation.
    pub ipv6_endpoint: Option<SocketAddrV6>,
    /// `relay-off`; `false` removes the annotation.
    pub relay_off: bool,
    /// `internal-ip`; `None` writes an empty value.
    pub internal_ip: Option<IpNet>,
    /// `key`: the WireGuard public key, written as base64; `None` removes the annotation.
    pub key: Option<PublicKey>,
    /// `last-seen`: the heartbeat, in Unix seconds by this host's clock.
    pub last_seen: i64,
    /// Seconds until the next one at most, in `heartbeat`; `None` removes the annotation.
    pub heartbeat: Option<u16>,
    /// `wireguard-ip`; `None` writes an empty value.
    pub wireguard_ip: Option<IpNet>,
    /// `discovered-endpoints`; empty removes the annotation.
    pub discovered_endpoints: BTreeMap<PublicKey, SocketAddr>,
    /// `granularity`; `None` removes the annotation.
    pub granularity: Option<Granularity>,
    /// `cni-compatibility-ip`; `None` removes the annotation.
    pub cni_compatibility_ip: Option<IpNet>,
    /// `signal`; `false` removes the annotation.
    pub signal: bool,
    /// `leading`; `None` removes the annotation.
    pub leading: Option<u64>,
    /// `leaders`; `None` removes the annotation.
    pub leaders: Option<usize>,
    /// `state`; `None` removes the annotation.
    pub state: Option<String>,
}

//! What a backend knows, and what an agent publishes.

use std::{collections::BTreeMap, net::SocketAddr, sync::Arc};

use ipnet::IpNet;

use crate::{
    settings::Granularity,
    topology::{Nodes, Peer},
    wireguard::{Endpoint, PublicKey},
};

/// Everything a backend knows at one moment. Invalid objects are left out
/// and named in `problems`; they never hide valid ones.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Nodes by name, ready or not; shared with the snapshot before, as far as they are the same.
    pub nodes: Nodes,
    /// Valid peers by name; shared as well.
    pub peers: Arc<BTreeMap<String, Peer>>,
    /// Object -> why it (or one of its fields) was not used.
    pub problems: BTreeMap<String, String>,
}

impl Snapshot {
    /// True when nothing but nodes' heartbeats may differ.
    pub fn differs_only_in_heartbeats(&self, other: &Self) -> bool {
        self.nodes.differs_only_in_heartbeats(&other.nodes)
            && self.peers == other.peers
            && self.problems == other.problems
    }
}

/// What an agent publishes about its own node (docs/annotations.md, "Written by the agent").
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Published {
    /// `endpoint`.
    pub endpoint: Option<Endpoint>,
    /// `internal-ip`; `None` writes an empty value.
    pub internal_ip: Option<IpNet>,
    /// `key`.
    pub key: Option<PublicKey>,
    /// `last-seen`, Unix seconds.
    pub last_seen: i64,
    /// `wireguard-ip`; `None` writes an empty value.
    pub wireguard_ip: Option<IpNet>,
    /// `discovered-endpoints`; empty removes the annotation.
    pub discovered_endpoints: BTreeMap<PublicKey, SocketAddr>,
    /// `granularity`; `None` removes the annotation.
    pub granularity: Option<Granularity>,
    /// `cni-compatibility-ip`; `None` removes the annotation.
    pub cni_compatibility_ip: Option<IpNet>,
}

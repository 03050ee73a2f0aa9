//! Hop ids of the nodes of this location. An id stays with its node, so that nodes that come and go
//! change no other entry.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use kilo_common::{
    map_table::HOP,
    maps::{HOP_FIRST_NODE, NodeValue},
};

use crate::topology::{LocalMesh, Member};

/// Maximum number of other nodes of this location that have a hop.
pub const MOST_OTHERS: u32 = HOP.size - HOP_FIRST_NODE;

/// Node name -> hop id.
/// ```
/// use std::collections::BTreeMap;
/// use kilo_core::{plan::HopIds, settings::Granularity, topology::{Mesh, Node}, wireguard::PublicKey};
///
/// let mesh = |names: &[&str]| {
///     let node = |name: &&str| Node {
///         name: (*name).into(),
///         key: Some(PublicKey([name.as_bytes()[1]; 32])),
///         endpoint: "192.0.2.1:51820".parse().ok(),
///         internal_ip: "10.0.0.1/24".parse().ok(),
///         pod_cidrs: vec!["10.42.0.0/24".parse().unwrap()],
///         location: "a".into(),
///         ..Node::default()
///     };
///     let nodes: Vec<Node> = names.iter().map(node).collect();
///     Mesh::new(&nodes, &BTreeMap::new(), Granularity::Location, "10.4.0.0/16".parse().unwrap())
/// };
/// let before = HopIds::default().update(&mesh(&["a1", "a3"]).as_seen_from("a1"));
/// let after = before.update(&mesh(&["a1", "a2", "a3"]).as_seen_from("a1"));
/// assert_eq!(after.get("a3"), before.get("a3"), "an id stays with its node");
/// assert_ne!(after.get("a2"), after.get("a3"));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HopIds {
    of: BTreeMap<String, u32>,
    /// Ids that an earlier agent left, by private address, until the mesh says whose they are.
    adopted: BTreeMap<IpAddr, u32>,
}

impl HopIds {
    /// The ids an earlier agent left in the map of senders (`node`): private
    /// address -> id. A restarted agent that numbered the nodes anew would
    /// rewrite hops while packets still follow the old prefixes to them.
    #[must_use]
    pub fn adopt(senders: &BTreeMap<IpAddr, NodeValue>) -> Self {
        let ids = senders.iter().map(|(address, sender)| (*address, sender.hop));
        let usable = ids.filter(|(_, id)| (HOP_FIRST_NODE..HOP.size).contains(id));
        Self { of: BTreeMap::new(), adopted: usable.collect() }
    }

    /// Keeps the ids of nodes that are still in this node's location, frees the others, and gives the
    /// lowest free ids to new nodes.
    #[must_use]
    pub fn update(&self, mesh: &LocalMesh<'_>) -> Self {
        let Some((segment, _)) = mesh.own() else { return Self::default() };
        let mut taken = BTreeSet::new();
        let mut ids = BTreeMap::new();
        for member in mesh.others() {
            let adopted = || self.adopted.get(&member.private_ip()?);
            let known = self.of.get(member.name()).or_else(adopted);
            if let Some(id) = known.filter(|id| taken.insert(**id)) {
                ids.insert(member.name().to_owned(), *id);
            }
        }
        let mut free = (HOP_FIRST_NODE..HOP.size).filter(|id| !taken.contains(id));
        for name in mesh.others().map(Member::name) {
            if !ids.contains_key(name)
                && let Some(id) = free.next()
            {
                ids.insert(name.to_owned(), id);
            }
        }
        // The leader always gets an id: everything else goes through it.
        if let Some(leader) = mesh.segments[segment].leading().map(Member::name)
            && leader != mesh.node()
            && !ids.contains_key(leader)
            && let Some((_, id)) = ids.pop_last()
        {
            ids.insert(leader.to_owned(), id);
        }
        Self { of: ids, adopted: BTreeMap::new() }
    }

    /// How many other nodes of the location have no id.
    pub fn left_out(&self, mesh: &LocalMesh<'_>) -> usize {
        mesh.others().filter(|member| self.get(member.name()).is_none()).count()
    }

    /// The id of a node.
    pub fn get(&self, node: &str) -> Option<u32> {
        self.of.get(node).copied()
    }
}

//! Hop ids of the nodes of the own location. An id stays with its node, so
//! that nodes that come and go change no other entry.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use kilo_common::{
    map_table::HOP,
    maps::{HOP_FIRST_NODE, NodeValue},
};

use crate::topology::{Member, Mesh};

/// Nodes of the own location, without this one, that have a hop.
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
/// let before = HopIds::default().update(&mesh(&["a1", "a3"]), "a1");
/// let after = before.update(&mesh(&["a1", "a2", "a3"]), "a1");
/// assert_eq!(after.get("a3"), before.get("a3"), "an id stays with its node");
/// assert_ne!(after.get("a2"), after.get("a3"));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HopIds(BTreeMap<String, u32>);

impl HopIds {
    /// True before the first node got an id.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Keeps the ids of nodes that are still in the location of `node`, frees
    /// the others, and gives the lowest free ids to new ones.
    #[must_use]
    pub fn update(&self, mesh: &Mesh, node: &str) -> Self {
        let mesh = mesh.around(node);
        let Some((segment, _)) = mesh.find(node) else { return Self::default() };
        let names: BTreeSet<&str> =
            mesh.segments[segment].members.iter().map(Member::name).filter(|name| *name != node).collect();
        let mut ids: BTreeMap<String, u32> = self
            .0
            .iter()
            .filter(|(name, _)| names.contains(name.as_str()))
            .map(|(n, id)| (n.clone(), *id))
            .collect();
        let taken: BTreeSet<u32> = ids.values().copied().collect();
        let mut free = (HOP_FIRST_NODE..HOP.size).filter(|id| !taken.contains(id));
        for name in names {
            if !ids.contains_key(name)
                && let Some(id) = free.next()
            {
                ids.insert(name.to_owned(), id);
            }
        }
        // Whoever goes without, it is not the node everything else goes through.
        if let Some(leader) = mesh.segments[segment].leading().map(Member::name)
            && leader != node
            && !ids.contains_key(leader)
            && let Some((_, id)) = ids.pop_last()
        {
            ids.insert(leader.to_owned(), id);
        }
        Self(ids)
    }

    /// How many nodes of the location of `node` have no id.
    pub fn left_out(&self, mesh: &Mesh, node: &str) -> usize {
        let mesh = mesh.around(node);
        let Some((segment, _)) = mesh.find(node) else { return 0 };
        let members = mesh.segments[segment].members.iter().filter(|member| member.name() != node);
        members.filter(|member| self.get(member.name()).is_none()).count()
    }

    /// The ids an earlier agent left in the map of senders (`node`): private
    /// address -> id. A restarted agent that numbered the nodes anew would
    /// rewrite hops while packets still follow the old prefixes to them.
    #[must_use]
    pub fn adopt(senders: &BTreeMap<IpAddr, NodeValue>, mesh: &Mesh, node: &str) -> Self {
        let mesh = mesh.around(node);
        let Some((segment, _)) = mesh.find(node) else { return Self::default() };
        let mut taken = BTreeSet::new();
        let others = mesh.segments[segment].members.iter().filter(|member| member.name() != node);
        let ids = others.filter_map(|member| {
            let id = senders.get(&member.private_ip()?)?.hop;
            let usable = (HOP_FIRST_NODE..HOP.size).contains(&id) && taken.insert(id);
            usable.then(|| (member.name().to_owned(), id))
        });
        Self(ids.collect())
    }

    /// The id of a node.
    pub fn get(&self, node: &str) -> Option<u32> {
        self.0.get(node).copied()
    }
}

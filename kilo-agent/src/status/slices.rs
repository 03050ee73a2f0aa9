//! Comparison of slices with the Nodes that they describe.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::timestamp::Timestamp;
use kilo_core::{
    objects::{
        CheckedInRef, Nodes, node,
        slices::{Entry, SliceSet},
    },
    topology::{is_complete, is_recent, ready_at, ready_seconds},
};

/// Maximum number of names shown.
const SHOWN: usize = 5;

/// Slices compared with Nodes that were read at the same time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SlicesStatus {
    /// The node whose agent writes them.
    pub writer: String,
    /// When the writer was last alive, by its clock; absent if the Lease may not be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub renewed: Option<Timestamp>,
    /// Number of slices.
    pub slices: usize,
    /// Number of slices that are missing or cannot be read.
    pub bad: usize,
    /// Number of nodes in slices.
    pub nodes: usize,
    /// Nodes that differ between slice and Node object, or exist in only one of them.
    pub behind: Vec<String>,
    /// Nodes that slices call alive although their heartbeats ended long ago, or dead although these go on.
    #[serde(default)]
    pub misjudged: Vec<String>,
}

impl SlicesStatus {
    /// `None` where nobody has written slices. `now`: when the Nodes were read.
    pub fn new(
        set: &SliceSet,
        nodes: &Nodes,
        topology_label: &str,
        renewed: Option<Timestamp>,
        now: Timestamp,
    ) -> Option<Self> {
        let index = set.index()?;
        let label = if index.topology_label.is_empty() { topology_label } else { &index.topology_label };
        let sliced = set.nodes().0;
        let in_slices = |name: &str| {
            let entry = sliced.get(name)?;
            Some(node::from_object(&entry.to_object(label), label).0.node)
        };
        let names: BTreeSet<&str> = nodes.names().chain(sliced.keys().copied()).collect();
        let is_behind = |name: &&str| nodes.get(name).map(|known| (**known.node).clone()) != in_slices(name);
        Some(Self {
            writer: index.writer.clone(),
            renewed,
            slices: index.slices.len(),
            bad: set.bad(),
            nodes: sliced.len(),
            behind: names.into_iter().filter(is_behind).map(ToOwned::to_owned).collect(),
            misjudged: nodes
                .iter()
                .filter(|known| {
                    sliced.get(&*known.name).is_some_and(|entry| is_misjudged(*known, entry, now))
                })
                .map(|known| known.name.clone())
                .collect(),
        })
    }

    /// A one-line summary.
    pub fn line(&self, now: Timestamp) -> String {
        let ago =
            self.renewed.map(|renewed| format!(" (alive {} ago)", now.since(renewed))).unwrap_or_default();
        let mut text =
            format!("Slices: {} with {} nodes, written by {}{ago}", self.slices, self.nodes, self.writer);
        if self.bad > 0 {
            text += &format!("; {} missing or not readable", self.bad);
        }
        let wrong = [
            ("behind their Nodes", &self.behind),
            ("liveness contradicts their heartbeats", &self.misjudged),
        ];
        let wrong = wrong.into_iter().filter(|(_, names)| !names.is_empty());
        let wrong: String = wrong.map(|(what, names)| format!("; {what}: {}", some_of(names))).collect();
        text + if wrong.is_empty() { "; all as their Nodes say" } else { &*wrong } + "."
    }
}

/// Names, as many as fit into a line.
fn some_of(names: &[String]) -> String {
    match names.split_at_checked(SHOWN) {
        Some((first, more @ [_, ..])) => format!("{} and {} more", first.join(", "), more.len()),
        _ => names.join(", "),
    }
}

/// Whether a slice contradicts a node's heartbeats: for longer than a writer needs to declare it dead, or at
/// all where heartbeats go on. A node that takes no part anyway counts as alive in slices.
fn is_misjudged(known: CheckedInRef<'_>, entry: &Entry, now: Timestamp) -> bool {
    if entry.alive {
        is_complete(known.node) && !is_recent(known, now.0.saturating_sub(ready_seconds(known.node)))
    } else {
        ready_at(known, now.0)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use kilo_core::{
        objects::{
            CheckedIn, Node,
            slices::{INDEX, Index, NodeSliceSpec},
        },
        wireguard::PublicKey,
    };

    fn set(nodes: Vec<Entry>) -> SliceSet {
        let mut set = SliceSet::default();
        let index = Index {
            slices: vec!["one".to_owned()],
            topology_label: "l".to_owned(),
            writer: "w".to_owned(),
            ..Index::default()
        };
        set.replace(vec![
            (INDEX.to_owned(), Some(NodeSliceSpec { nodes: Vec::new(), index: Some(index) })),
            ("one".to_owned(), Some(NodeSliceSpec { nodes, index: None })),
        ]);
        set
    }

    #[test]
    fn nodes_that_slices_do_not_follow_are_named() {
        let entry = |name: &str, key: &str| Entry {
            name: name.to_owned(),
            annotations: [("location".to_owned(), key.to_owned())].into_iter().collect(),
            ..Entry::default()
        };
        let set = set(vec![entry("a", "x"), entry("b", "x"), entry("ghost", "x")]);
        let known = |name: &str, location: &str| {
            let (name, location) = (name.to_owned(), location.to_owned());
            CheckedIn { node: Node { name, location, ..Node::default() }, last_seen: 7 }
        };
        let nodes: Nodes = [known("a", "x"), known("b", "y"), known("new", "x")].into_iter().collect();
        let status = SlicesStatus::new(&set, &nodes, "l", Some(Timestamp(7)), Timestamp(10)).unwrap();
        assert_eq!(
            (&status.behind[..], status.misjudged.len()),
            (&["b", "ghost", "new"].map(String::from)[..], 0)
        );
        let line = status.line(Timestamp(10));
        assert_eq!(
            line,
            "Slices: 1 with 3 nodes, written by w (alive 3s ago); behind their Nodes: b, ghost, new."
        );
        let none = SliceSet::default();
        assert_eq!(SlicesStatus::new(&none, &nodes, "l", None, Timestamp(10)), None);
    }

    #[test]
    fn nodes_that_slices_call_alive_or_dead_against_their_heartbeats_are_named() {
        let cases = [
            // Name, promised interval, seconds since the last heartbeat, alive as slices say.
            ("a-live", 30, 20, true),
            ("b-live-called-dead", 30, 20, false),
            ("c-dead", 30, 500, false),
            ("d-dead-called-alive", 30, 121, true),
            ("e-not-yet-declared-dead", 30, 110, true),
            ("f-rests", 300, 310, true),
            ("g-rests-called-dead", 300, 310, false),
            ("h-rested", 300, 1201, true),
        ];
        let now = 10_000;
        let nodes: Nodes = cases
            .iter()
            .map(|(name, heartbeat, age, _)| {
                let node = Node {
                    name: (*name).to_owned(),
                    key: Some(PublicKey([1; 32])),
                    endpoint: "192.0.2.1:51820".parse().ok(),
                    pod_cidrs: vec!["10.42.0.0/24".parse().unwrap()],
                    heartbeat: Some(*heartbeat),
                    ..Node::default()
                };
                CheckedIn { node, last_seen: now - age }
            })
            .collect();
        let entries = cases.iter().map(|(name, _, age, alive)| {
            let node = nodes.get(name).unwrap().node;
            let object = node::to_object(node, now - age);
            Entry::new(&object, &CheckedIn { node: (**node).clone(), last_seen: now - age }, "l", *alive)
        });
        let set = set(entries.collect());
        let status = SlicesStatus::new(&set, &nodes, "l", None, Timestamp(now)).unwrap();
        assert_eq!(status.behind, Vec::<String>::new());
        assert_eq!(
            status.line(Timestamp(now)),
            "Slices: 1 with 8 nodes, written by w; liveness contradicts their heartbeats: b-live-called-dead, \
             d-dead-called-alive, g-rests-called-dead, h-rested."
        );
    }
}

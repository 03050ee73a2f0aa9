//! Comparison of slices with the Nodes that they describe.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::timestamp::Timestamp;
use kilo_core::objects::{Nodes, node, slices::SliceSet};

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
}

impl SlicesStatus {
    /// `None` where nobody has written slices.
    pub fn new(
        set: &SliceSet,
        nodes: &Nodes,
        topology_label: &str,
        renewed: Option<Timestamp>,
    ) -> Option<Self> {
        let index = set.index()?;
        let label = if index.topology_label.is_empty() { topology_label } else { &index.topology_label };
        let sliced = set.nodes().0;
        let says = |name: &str| {
            let entry = sliced.get(name)?;
            Some(node::from_object(&entry.to_object(label), label).0.node)
        };
        let names: BTreeSet<&str> = nodes.names().chain(sliced.keys().copied()).collect();
        let is_behind = |name: &&str| nodes.get(name).map(|known| (**known.node).clone()) != says(name);
        Some(Self {
            writer: index.writer.clone(),
            renewed,
            slices: index.slices.len(),
            bad: set.bad(),
            nodes: sliced.len(),
            behind: names.into_iter().filter(is_behind).map(ToOwned::to_owned).collect(),
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
        text + &match &self.behind[..] {
            [] => "; all as their Nodes say.".to_owned(),
            few if few.len() <= SHOWN => format!("; behind their Nodes: {}.", few.join(", ")),
            many => {
                let (first, more) = many.split_at(SHOWN);
                format!("; behind their Nodes: {} and {} more.", first.join(", "), more.len())
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use kilo_core::objects::{
        CheckedIn, Node,
        slices::{Entry, INDEX, Index, NodeSliceSpec},
    };

    #[test]
    fn nodes_that_slices_do_not_follow_are_named() {
        let entry = |name: &str, key: &str| Entry {
            name: name.to_owned(),
            annotations: [("location".to_owned(), key.to_owned())].into_iter().collect(),
            ..Entry::default()
        };
        let mut set = SliceSet::default();
        let index = Index {
            slices: vec!["one".to_owned()],
            topology_label: "l".to_owned(),
            writer: "w".to_owned(),
            ..Index::default()
        };
        let nodes = vec![entry("a", "x"), entry("b", "x"), entry("ghost", "x")];
        set.replace(vec![
            (INDEX.to_owned(), Some(NodeSliceSpec { nodes: Vec::new(), index: Some(index) })),
            ("one".to_owned(), Some(NodeSliceSpec { nodes, index: None })),
        ]);
        let known = |name: &str, location: &str| {
            let (name, location) = (name.to_owned(), location.to_owned());
            CheckedIn { node: Node { name, location, ..Node::default() }, last_seen: 7 }
        };
        let nodes: Nodes = [known("a", "x"), known("b", "y"), known("new", "x")].into_iter().collect();
        let status = SlicesStatus::new(&set, &nodes, "l", Some(Timestamp(7))).unwrap();
        assert_eq!(status.behind, ["b", "ghost", "new"]);
        let line = status.line(Timestamp(10));
        assert_eq!(
            line,
            "Slices: 1 with 3 nodes, written by w (alive 3s ago); behind their Nodes: b, ghost, new."
        );
        assert_eq!(SlicesStatus::new(&SliceSet::default(), &nodes, "l", None), None);
    }
}

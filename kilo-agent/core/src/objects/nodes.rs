//! All nodes of a snapshot, by name. Consecutive snapshots share descriptions and
//! the list of them: a heartbeat changes only a number, and pointer equality proves
//! a description unchanged.

use std::{
    ops::{Deref, Index},
    sync::Arc,
};

use super::Node;

/// A node and its last heartbeat.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CheckedIn {
    /// Everything else that its object says.
    pub node: Node,
    /// Unix seconds of its last heartbeat; 0: never.
    pub last_seen: i64,
}

impl Deref for CheckedIn {
    type Target = Node;
    fn deref(&self) -> &Node {
        &self.node
    }
}

/// A node in [`Nodes`] and its last heartbeat, borrowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckedInRef<'a> {
    /// Everything else that its object says.
    pub node: &'a Arc<Node>,
    /// Unix seconds of its last heartbeat; 0: never.
    pub last_seen: i64,
}

impl Deref for CheckedInRef<'_> {
    type Target = Node;
    fn deref(&self) -> &Node {
        self.node
    }
}

/// What [`Nodes::insert`] replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replaced {
    /// The description is the same; at most the heartbeat differs.
    pub is_same: bool,
    /// Unix seconds of the previous heartbeat; 0: never.
    pub last_seen: i64,
}

/// Nodes, sorted by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Nodes {
    list: Arc<Vec<Arc<Node>>>,
    /// Unix seconds, one per node of the list.
    last_seen: Vec<i64>,
}

impl Nodes {
    /// Number of nodes the backend knows, in the mesh or not.
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// True when there are no nodes.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Every node, sorted by name.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = CheckedInRef<'_>> + Clone {
        self.list
            .iter()
            .zip(&self.last_seen)
            .map(|(node, last_seen)| CheckedInRef { node, last_seen: *last_seen })
    }

    /// The names of all nodes, sorted.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.list.iter().map(|node| node.name.as_str())
    }

    /// Index of a node.
    ///
    /// # Errors
    /// The index at which to insert it, when there is no node of this name.
    pub fn position(&self, name: &str) -> Result<usize, usize> {
        self.list.binary_search_by(|node| node.name.as_str().cmp(name))
    }

    /// The node of this name.
    pub fn get(&self, name: &str) -> Option<CheckedInRef<'_>> {
        let at = self.position(name).ok()?;
        Some(CheckedInRef { node: self.list.get(at)?, last_seen: *self.last_seen.get(at)? })
    }

    /// Whether there is a node of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.position(name).is_ok()
    }

    /// Inserts a node, or replaces the one of its name and returns what it
    /// replaced. An unchanged description keeps its allocation.
    pub fn insert(&mut self, CheckedIn { node, last_seen }: CheckedIn) -> Option<Replaced> {
        match self.position(&node.name) {
            Ok(at) => {
                let is_same = *self.list[at] == node;
                if !is_same {
                    Arc::make_mut(&mut self.list)[at] = node.into();
                }
                let last_seen = std::mem::replace(&mut self.last_seen[at], last_seen);
                Some(Replaced { is_same, last_seen })
            }
            Err(at) => {
                Arc::make_mut(&mut self.list).insert(at, node.into());
                self.last_seen.insert(at, last_seen);
                None
            }
        }
    }

    /// Removes a node; false when there was none of this name.
    pub fn remove(&mut self, name: &str) -> bool {
        let place = self.position(name);
        if let Ok(at) = place {
            Arc::make_mut(&mut self.list).remove(at);
            self.last_seen.remove(at);
        }
        place.is_ok()
    }

    /// True when at most heartbeats differ.
    pub fn differs_only_in_heartbeats(&self, other: &Self) -> bool {
        // `Arc::eq` compares pointers first.
        self.list == other.list
    }
}

impl Index<&str> for Nodes {
    type Output = Node;
    #[allow(clippy::expect_used, reason = "as the standard library's maps")]
    fn index(&self, name: &str) -> &Node {
        self.get(name).expect("no node of this name").node
    }
}

impl FromIterator<CheckedIn> for Nodes {
    /// Of several nodes with one name, the last one wins.
    fn from_iter<I: IntoIterator<Item = CheckedIn>>(nodes: I) -> Self {
        let mut all = Self::default();
        for node in nodes {
            all.insert(node);
        }
        all
    }
}

/// All nodes, with `own` in place of the node of its name.
pub fn with_own<'a>(
    nodes: &'a Nodes,
    own: Option<&'a Arc<Node>>,
) -> impl ExactSizeIterator<Item = CheckedInRef<'a>> + Clone {
    let own = own.and_then(|own| Some((nodes.position(&own.name).ok()?, own)));
    nodes.iter().enumerate().map(move |(at, known)| match own {
        Some((place, node)) if place == at => CheckedInRef { node, ..known },
        _ => known,
    })
}

/// The nodes that take part, by the flag at the same index of `ready`.
pub fn among<'a>(
    nodes: impl Iterator<Item = CheckedInRef<'a>> + Clone,
    ready: &[bool],
) -> impl Iterator<Item = &'a Arc<Node>> + Clone {
    nodes.zip(ready).filter_map(|(known, ready)| ready.then_some(known.node))
}

/// The nodes that do not take part.
pub fn not_among<'a>(
    nodes: impl Iterator<Item = CheckedInRef<'a>>,
    ready: &[bool],
) -> impl Iterator<Item = &'a Arc<Node>> {
    nodes.zip(ready).filter_map(|(known, ready)| (!ready).then_some(known.node))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    fn checked_in(name: &str, location: &str, last_seen: i64) -> CheckedIn {
        let (name, location) = (name.to_owned(), location.to_owned());
        CheckedIn { node: Node { name, location, ..Node::default() }, last_seen }
    }

    #[test]
    fn nodes_are_kept_by_name_whatever_comes_first() {
        let mut nodes: Nodes = ["b", "c", "a"].map(|name| checked_in(name, "", 1)).into_iter().collect();
        assert!(nodes.names().eq(["a", "b", "c"]));
        nodes.insert(checked_in("b", "there", 2));
        assert_eq!((nodes.len(), nodes["b"].location.as_str()), (3, "there"));
        assert!(nodes.remove("a") && !nodes.remove("a"));
        assert_eq!(nodes.iter().map(|node| node.last_seen).collect::<Vec<_>>(), [2, 1]);
        assert!(nodes.contains("c") && nodes.get("a").is_none());
    }

    #[test]
    fn a_heartbeat_copies_no_list_and_no_description() {
        let before: Nodes = ["a", "b"].map(|name| checked_in(name, "", 1)).into_iter().collect();
        let mut after = before.clone();
        after.insert(checked_in("a", "", 31));
        assert!(Arc::ptr_eq(&before.list, &after.list));
        assert!(before.differs_only_in_heartbeats(&after) && before != after);
        after.insert(checked_in("a", "there", 31));
        assert!(!before.differs_only_in_heartbeats(&after));
        assert!(Arc::ptr_eq(before.get("b").unwrap().node, after.get("b").unwrap().node));
    }
}

//! What nodes had a moment ago. Other nodes may still send there, because they learn of a
//! change later, and this host's own connections are open: none of it may leave in clear now.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use super::Node;

/// Longer than any agent takes to learn of a change, and connections try again.
pub(super) const KEPT: Duration = Duration::from_secs(60);

/// Nodes as they were.
#[derive(Debug, Default)]
pub(super) struct Former {
    /// Those without an object, and since when.
    gone: BTreeMap<String, (Arc<Node>, Instant)>,
    /// Those that have lost their private address, and have no other: its interface is down.
    without: BTreeMap<String, Arc<Node>>,
}

impl Former {
    /// A node's object is not there any more.
    pub fn gone(&mut self, node: Arc<Node>, now: Instant) {
        let name = node.name.clone();
        let node = self.without.remove(&name).unwrap_or(node);
        self.gone.insert(name, (node, now));
    }

    /// A node's description has changed.
    pub fn changed(&mut self, before: &Arc<Node>, node: &Node) {
        if node.internal_ip.is_some() || node.no_internal_ip {
            self.without.remove(&node.name);
        } else if before.internal_ip.is_some() {
            self.without.insert(node.name.clone(), Arc::clone(before));
        }
    }

    /// All of them; forgets those that are gone for long.
    pub fn nodes(&mut self, now: Instant) -> impl Iterator<Item = &Arc<Node>> {
        self.gone.retain(|_, (_, since)| now.saturating_duration_since(*since) < KEPT);
        self.gone.values().map(|(node, _)| node).chain(self.without.values())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    fn node(name: &str, address: &str) -> Arc<Node> {
        Node { name: name.to_owned(), internal_ip: address.parse().ok(), ..Node::default() }.into()
    }

    #[test]
    fn a_node_that_left_is_remembered_for_a_minute() {
        let (mut former, start) = (Former::default(), Instant::now());
        former.gone(node("a", "10.1.0.1/24"), start);
        assert_eq!(former.nodes(start + Duration::from_secs(59)).count(), 1);
        assert_eq!(former.nodes(start + KEPT).count(), 0);
    }

    #[test]
    fn an_address_is_remembered_until_the_node_has_one_or_says_that_it_has_none() {
        let (mut former, start) = (Former::default(), Instant::now());
        let with = node("a", "10.1.0.1/24");
        let without = node("a", "");
        let long = start + KEPT * 100;
        let held = |former: &mut Former| {
            former
                .nodes(long)
                .filter_map(|node| node.internal_ip)
                .map(|ip| ip.to_string())
                .collect::<Vec<_>>()
        };
        former.changed(&with, &without);
        former.changed(&without, &node("a", ""));
        assert_eq!(held(&mut former), ["10.1.0.1/24"]);
        former.changed(&without, &node("a", "10.1.0.2/24"));
        assert!(held(&mut former).is_empty());
        former.changed(&with, &without);
        former.changed(&without, &Node { no_internal_ip: true, name: "a".to_owned(), ..Node::default() });
        assert!(held(&mut former).is_empty());
        // It leaves without: what it had counts.
        former.changed(&with, &without);
        former.gone(without, long);
        assert_eq!(held(&mut former), ["10.1.0.1/24"]);
    }
}

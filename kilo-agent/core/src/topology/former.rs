//! What nodes had until a moment ago. Other nodes may still send there, because they learn of a change later,
//! and this host may have open connections: none of these packets may leave in cleartext.

use std::{
    collections::BTreeMap,
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use ipnet::IpNet;

use super::{InternalIpBy, Node};

/// Longer than any agent takes to learn of a change; hosts' connections try again at once.
pub const KEPT: Duration = Duration::from_secs(60);
/// Pods try their connections to pods of a lost node for longer: TCP gives up after 15 minutes
/// (`tcp_retries2`). Only the node that gets such a pod CIDR next has a reason to use it.
pub const PODS_KEPT: Duration = Duration::from_secs(20 * 60);

/// Nodes as they were.
#[derive(Debug, Default)]
pub(super) struct Former {
    /// Nodes without an object, and since when: one that had other pod CIDRs each time it left
    /// is listed once for each.
    gone: BTreeMap<(String, Vec<IpNet>), (Arc<Node>, Instant)>,
    /// Nodes that have lost their private address and have no other: its interface is down.
    without: BTreeMap<String, Arc<Node>>,
    /// Nodes that an earlier agent of this host knew, until the first nodes are seen.
    remembered: BTreeMap<String, Arc<Node>>,
}

impl Former {
    /// Adds nodes as an earlier agent of this host knew them: what they have lost since counts as lost.
    pub fn remember(&mut self, nodes: impl IntoIterator<Item = Arc<Node>>) {
        self.remembered.extend(nodes.into_iter().map(|node| (node.name.clone(), node)));
    }

    /// Records that a node is seen for the first time.
    pub fn first_seen(&mut self, node: &Node, now: Instant) {
        if let Some(before) = self.remembered.remove(&node.name) {
            self.changed(&before, node, now);
        }
    }

    /// Records that all existing nodes have been seen: other remembered ones have gone.
    pub fn all_seen(&mut self, now: Instant) {
        for (_, node) in std::mem::take(&mut self.remembered) {
            self.gone(node, now);
        }
    }

    /// Records that a node's object is gone.
    pub fn gone(&mut self, node: Arc<Node>, now: Instant) {
        let node = self.without.remove(&node.name).unwrap_or(node);
        let entry = self.gone.entry((node.name.clone(), node.pod_cidrs.clone()));
        // A node without a key had left the mesh before its object went: what it had there
        // counts, from that time on.
        if node.key.is_some() {
            entry.insert_entry((node, now));
        } else {
            entry.or_insert((node, now));
        }
    }

    /// Records that a node's description has changed. One that has lost its key has left the mesh,
    /// though its object stays.
    pub fn changed(&mut self, before: &Arc<Node>, node: &Node, now: Instant) {
        if before.key.is_some() && node.key.is_none() {
            self.gone(Arc::clone(before), now);
            return;
        }
        if node.internal_ip.is_some() || node.internal_ip_by == InternalIpBy::ForcedNone {
            self.without.remove(&node.name);
        } else if before.internal_ip.is_some() {
            self.without.insert(node.name.clone(), Arc::clone(before));
        }
    }

    /// Nodes that have lost their private address, as they were with it, by name.
    pub fn without_address(&self) -> impl Iterator<Item = &Arc<Node>> {
        self.without.values()
    }

    /// Nodes that left a moment ago; forgets those that have been gone for long.
    pub fn nodes(&mut self, now: Instant) -> impl Iterator<Item = &Arc<Node>> {
        self.gone.retain(|_, (_, since)| now.saturating_duration_since(*since) < PODS_KEPT);
        self.gone_for(now, Duration::ZERO..KEPT).chain(self.without.values())
    }

    /// Nodes that have been gone for longer, whose pods others may still try to reach.
    pub fn gone_before(&self, now: Instant) -> impl Iterator<Item = &Arc<Node>> {
        self.gone_for(now, KEPT..PODS_KEPT)
    }

    fn gone_for(&self, now: Instant, time: Range<Duration>) -> impl Iterator<Item = &Arc<Node>> {
        let gone = move |since: &Instant| time.contains(&now.saturating_duration_since(*since));
        self.gone.values().filter(move |(_, since)| gone(since)).map(|(node, _)| node)
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
    fn a_node_that_left_is_remembered_for_a_minute_and_its_pods_for_as_long_as_others_try() {
        let (mut former, start) = (Former::default(), Instant::now());
        former.gone(node("a", "10.1.0.1/24"), start);
        let counts = |former: &mut Former, at| [former.nodes(at).count(), former.gone_before(at).count()];
        assert_eq!(counts(&mut former, start + Duration::from_secs(59)), [1, 0]);
        assert_eq!(counts(&mut former, start + KEPT), [0, 1]);
        assert_eq!(counts(&mut former, start + PODS_KEPT - Duration::from_secs(1)), [0, 1]);
        assert_eq!(counts(&mut former, start + PODS_KEPT), [0, 0]);
        for cidr in ["10.42.1.0/24", "10.42.2.0/24"] {
            let pod_cidrs = vec![cidr.parse().unwrap()];
            former.gone(Node { name: "a".to_owned(), pod_cidrs, ..Node::default() }.into(), start);
        }
        assert_eq!(counts(&mut former, start + KEPT), [0, 2], "it had another pod CIDR each time");
    }

    #[test]
    fn a_node_without_its_key_has_left_the_mesh() {
        let (mut former, start) = (Former::default(), Instant::now());
        let without = node("a", "10.1.0.1/24");
        let with: Arc<Node> =
            Node { key: Some(crate::wireguard::PublicKey([1; 32])), ..(*without).clone() }.into();
        former.changed(&without, &with, start);
        assert_eq!(former.nodes(start).count(), 0, "it has come");
        former.changed(&with, &without, start);
        let keys: Vec<_> = former.nodes(start).map(|node| node.key.is_some()).collect();
        assert_eq!(keys, [true], "as it was before");
        former.gone(without, start + KEPT);
        let keys: Vec<_> = former.gone_before(start + KEPT).map(|node| node.key.is_some()).collect();
        assert_eq!(keys, [true], "then its object goes");
    }

    #[test]
    fn what_an_earlier_agent_knew_and_nodes_have_lost_since_is_remembered() {
        let (mut former, start) = (Former::default(), Instant::now());
        let earlier = [node("a", "10.1.0.1/24"), node("b", "10.1.0.2/24"), node("c", "10.1.0.3/24")];
        former.remember(earlier);
        former.first_seen(&node("a", ""), start);
        former.first_seen(&node("b", "10.1.0.2/24"), start);
        former.first_seen(&node("new", ""), start);
        former.all_seen(start);
        let names = |former: &mut Former, at| {
            former.nodes(at).map(|node| node.name.clone()).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(names(&mut former, start), "c a");
        // The next agent learns a's address again, and not c's, which has gone.
        assert_eq!(former.without_address().map(|node| &*node.name).collect::<Vec<_>>(), ["a"]);
        assert_eq!(names(&mut former, start + KEPT), "a");
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
        former.changed(&with, &without, start);
        former.changed(&without, &node("a", ""), start);
        assert_eq!(held(&mut former), ["10.1.0.1/24"]);
        former.changed(&without, &node("a", "10.1.0.2/24"), start);
        assert!(held(&mut former).is_empty());
        former.changed(&with, &without, start);
        former.changed(
            &without,
            &Node { internal_ip_by: InternalIpBy::ForcedNone, name: "a".to_owned(), ..Node::default() },
            start,
        );
        assert!(held(&mut former).is_empty());
        // It leaves without an address: the one it had counts.
        former.changed(&with, &without, start);
        former.gone(without, long);
        assert_eq!(held(&mut former), ["10.1.0.1/24"]);
    }
}

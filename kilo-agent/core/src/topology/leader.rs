//! Which node Kilo's rule chooses as a location's leader. With failover another node may act in its place:
//! `acting.rs` overrides this choice.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::Node;
use crate::{addresses::is_public, wireguard::Endpoint};

/// The rule that made a node the leader of its location: the first that applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum LeaderReason {
    /// There is no other ready node in the location.
    OnlyNode,
    /// First by name of those that ask to lead and have a public endpoint.
    AsksWithPublicEndpoint,
    /// First by name of those that ask to lead; none of them has a public endpoint.
    Asks,
    /// First by name of those with a public endpoint; none asks to lead.
    PublicEndpoint,
    /// First by name; none asks to lead or has a public endpoint.
    FirstByName,
}

impl fmt::Display for LeaderReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OnlyNode => "the only ready node",
            Self::AsksWithPublicEndpoint => "asks to lead, has a public endpoint",
            Self::Asks => "asks to lead",
            Self::PublicEndpoint => "has a public endpoint",
            Self::FirstByName => "first by name",
        })
    }
}

/// Index of the leader among the nodes of a location, sorted by name, and why:
/// the first that asks to lead and has a public endpoint address; else the
/// first that asks; else the first with a public endpoint address; else the first.
pub fn choose<'a>(nodes: impl ExactSizeIterator<Item = &'a Node>) -> (usize, LeaderReason) {
    let count = nodes.len();
    let ranked = nodes.enumerate().map(|(index, node)| (rank(node), index)).min();
    let (reason, index) = ranked.unwrap_or((LeaderReason::FirstByName, 0));
    (index, if count == 1 { LeaderReason::OnlyNode } else { reason })
}

/// The rule that would make a node the leader; an earlier one comes first.
pub(super) fn rank(node: &Node) -> LeaderReason {
    match (node.leader, has_public_endpoint(node)) {
        (true, true) => LeaderReason::AsksWithPublicEndpoint,
        (true, false) => LeaderReason::Asks,
        (false, true) => LeaderReason::PublicEndpoint,
        (false, false) => LeaderReason::FirstByName,
    }
}

fn has_public_endpoint(node: &Node) -> bool {
    node.endpoint.as_ref().and_then(Endpoint::ip).is_some_and(is_public)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(leader: bool, endpoint: &str) -> Node {
        let endpoint: std::net::SocketAddr = endpoint.parse().unwrap();
        Node { leader, endpoint: Some(endpoint.into()), ..Node::default() }
    }

    #[test]
    fn asking_to_lead_counts_more_than_a_public_address() {
        let (public, asks, both) =
            (node(false, "1.1.1.1:1"), node(true, "10.0.0.1:1"), node(true, "2.2.2.2:1"));
        let neither = node(false, "10.0.0.2:1");
        assert_eq!(
            choose([&neither, &public, &asks, &both].into_iter()),
            (3, LeaderReason::AsksWithPublicEndpoint)
        );
        assert_eq!(choose([&neither, &public, &asks].into_iter()), (2, LeaderReason::Asks));
        assert_eq!(choose([&neither, &public].into_iter()), (1, LeaderReason::PublicEndpoint));
        assert_eq!(choose([&neither, &neither].into_iter()), (0, LeaderReason::FirstByName));
        assert_eq!(choose([&both].into_iter()), (0, LeaderReason::OnlyNode));
    }
}

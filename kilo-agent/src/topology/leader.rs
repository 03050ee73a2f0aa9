//! Who leads a location.

use std::net::IpAddr;

use super::Node;

/// Index of the leader among the nodes of a location, sorted by name: the
/// first that asks to lead and has a public endpoint address; else the first
/// that asks; else the first with a public endpoint address; else the first.
pub fn choose(nodes: &[&Node]) -> usize {
    let rank = |node: &Node| match (node.leader, has_public_endpoint(node)) {
        (true, true) => 0,
        (true, false) => 1,
        (false, true) => 2,
        (false, false) => 3,
    };
    (0..nodes.len()).min_by_key(|&index| (rank(nodes[index]), index)).unwrap_or(0)
}

fn has_public_endpoint(node: &Node) -> bool {
    node.endpoint.as_ref().and_then(super::Endpoint::ip).is_some_and(is_public)
}

/// Public as Kilo means it: not RFC 1918, not `fd00::/16`.
pub fn is_public(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(v4) => !v4.is_private(),
        IpAddr::V6(v6) => v6.segments()[0] != 0xfd00,
    }
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
        assert_eq!(choose(&[&neither, &public, &asks, &both]), 3);
        assert_eq!(choose(&[&neither, &public, &asks]), 2);
        assert_eq!(choose(&[&neither, &public]), 1);
        assert_eq!(choose(&[&neither]), 0);
    }

    #[test]
    fn private_ranges_are_those_kilo_knows() {
        for (ip, public) in
            [("10.1.1.1", false), ("172.31.0.1", false), ("192.168.0.1", false), ("100.64.0.1", true)]
        {
            assert_eq!(is_public(ip.parse().unwrap()), public, "{ip}");
        }
        assert!(!is_public("fd00::1".parse().unwrap()));
        assert!(is_public("fd01::1".parse().unwrap()));
    }
}

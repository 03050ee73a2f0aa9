//! The subnet of WireGuard addresses, read from the addresses that nodes publish: other clusters and machines
//! outside the mesh do not know the agents' flags.

use ipnet::IpNet;

use super::Node;

/// Two nodes publish WireGuard addresses of different subnets.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("node {node} has a WireGuard address of {subnet}, and node {other_node} one of {other_subnet}")]
pub struct SubnetsDiffer {
    /// Name of one node.
    pub node: String,
    /// The subnet of its address.
    pub subnet: IpNet,
    /// Name of the other node.
    pub other_node: String,
    /// The subnet of that one's address.
    pub other_subnet: IpNet,
}

/// The subnet of which these nodes have published WireGuard addresses; `None`: none of them has.
/// ```
/// use kilo_core::topology::{Node, published_subnet};
///
/// let node = |name: &str, address: &str| Node {
///     name: name.to_owned(),
///     wireguard_ip: address.parse().ok(),
///     ..Node::default()
/// };
/// let (leader, member) = (node("a1", "10.5.0.1/16"), node("a2", ""));
/// assert_eq!(published_subnet([&leader, &member]), Ok("10.5.0.0/16".parse().ok()));
/// assert_eq!(published_subnet([&member]), Ok(None));
/// ```
///
/// # Errors
/// When two nodes contradict each other.
pub fn published_subnet<'a>(
    nodes: impl IntoIterator<Item = &'a Node>,
) -> Result<Option<IpNet>, SubnetsDiffer> {
    let of = |node: &'a Node| Some((&node.name, node.wireguard_ip?.trunc()));
    let mut published = nodes.into_iter().filter_map(of);
    let Some((node, subnet)) = published.next() else { return Ok(None) };
    match published.find(|(_, other)| *other != subnet) {
        Some((other_node, other_subnet)) => {
            Err(SubnetsDiffer { node: node.clone(), subnet, other_node: other_node.clone(), other_subnet })
        }
        None => Ok(Some(subnet)),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn a_contradiction_names_both_subnets_and_a_node_of_each() {
        let node = |name: &str, address: &str| Node {
            name: name.to_owned(),
            wireguard_ip: address.parse().ok(),
            ..Node::default()
        };
        let nodes = [node("a1", "10.4.0.1/16"), node("a2", "10.4.0.2/16"), node("b1", "10.5.0.1/16")];
        assert_eq!(published_subnet(&nodes[..2]), Ok("10.4.0.0/16".parse().ok()));
        let said = published_subnet(&nodes).unwrap_err().to_string();
        assert_eq!(said, "node a1 has a WireGuard address of 10.4.0.0/16, and node b1 one of 10.5.0.0/16");
        let longer = [node("a1", "10.4.0.1/16"), node("b1", "10.4.0.2/17")];
        assert!(published_subnet(&longer).is_err(), "the length is part of the subnet");
    }
}

//! Leaders that other locations may not reach, because their endpoint is private.

use super::{Mesh, Segment};
use crate::addresses::is_public;
use crate::wireguard::Endpoint;

/// What an operator does about a private endpoint.
pub const PRIVATE_ENDPOINT_REMEDY: &str = "give the Node an ExternalIP or the annotation \
     kilo.squat.ai/force-endpoint, or kilo.squat.ai/persistent-keepalive when it is behind NAT";

impl Mesh {
    /// Locations whose leader has a private endpoint although there are nodes in other locations,
    /// nobody has forced that endpoint, and no keepalive keeps a path open from inside.
    pub fn private_endpoints(&self) -> impl Iterator<Item = (&Segment, &Endpoint)> {
        let segments = if self.spans_locations() { &*self.segments } else { &[] };
        segments.iter().filter_map(|segment| Some((&**segment, private_endpoint(segment)?)))
    }

    /// The private endpoint of the location this node leads, if it is one of
    /// [`Self::private_endpoints`].
    pub fn private_endpoint_of(&self, node: &str) -> Option<&Endpoint> {
        let leads = |segment: &Segment| segment.leading().is_some_and(|leader| leader.name() == node);
        self.private_endpoints().find(|(segment, _)| leads(segment)).map(|(_, endpoint)| endpoint)
    }

    /// Whether there are nodes in more than one location, whatever the granularity.
    fn spans_locations(&self) -> bool {
        let mut locations =
            self.segments.iter().filter_map(|segment| Some(&segment.leading()?.node.location));
        let first = locations.next();
        locations.any(|location| Some(location) != first)
    }
}

fn private_endpoint(segment: &Segment) -> Option<&Endpoint> {
    let private = segment.endpoint.ip().is_some_and(|ip| !is_public(ip));
    let forced = segment.leading()?.node.endpoint_forced;
    (private && !forced && segment.persistent_keepalive == 0).then_some(&segment.endpoint)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::{settings::Granularity, topology::Node, wireguard::key::PublicKey};

    fn node(name: &str, location: &str, endpoint: &str) -> Node {
        Node {
            name: name.to_owned(),
            location: location.to_owned(),
            endpoint: endpoint.parse().ok(),
            key: Some(PublicKey([name.as_bytes()[0]; 32])),
            internal_ip: "10.0.0.1/24".parse().ok(),
            ..Node::default()
        }
    }

    fn warned(nodes: &[Node], granularity: Granularity) -> Vec<String> {
        let mesh = Mesh::new(nodes, &BTreeMap::new(), granularity, "10.4.0.0/16".parse().unwrap());
        let of_node = |node: &Node| mesh.private_endpoint_of(&node.name).map(ToString::to_string);
        assert_eq!(mesh.private_endpoints().count(), nodes.iter().filter_map(of_node).count());
        nodes.iter().filter_map(of_node).collect()
    }

    #[test]
    fn a_private_endpoint_is_warned_about_where_another_location_needs_it() {
        let (a, b) = (node("a", "x", "10.0.0.1:51820"), node("b", "y", "192.0.2.1:51820"));
        let both = [a.clone(), b.clone()];
        assert_eq!(warned(&both, Granularity::Location), ["10.0.0.1:51820"]);
        assert_eq!(warned(&both, Granularity::Full), ["10.0.0.1:51820"]);
        let same =
            [a.clone(), Node { location: "x".to_owned(), endpoint: "10.0.0.2:1".parse().ok(), ..b.clone() }];
        assert_eq!(warned(&same, Granularity::Location), [""; 0], "nobody elsewhere");
        assert_eq!(warned(&same, Granularity::Full), [""; 0], "nodes of one location reach each other");
        let forced = Node { endpoint_forced: true, ..a.clone() };
        assert_eq!(warned(&[forced, b.clone()], Granularity::Location), [""; 0]);
        let keeps = Node { persistent_keepalive: 25, ..a.clone() };
        assert_eq!(warned(&[keeps, b.clone()], Granularity::Location), [""; 0]);
        let dns = Node { endpoint: "vpn.example.com:1".parse().ok(), ..a };
        assert_eq!(warned(&[dns, b], Granularity::Location), [""; 0]);
    }
}

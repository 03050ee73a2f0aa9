//! Where relays are: an endpoint at one of their ports for pairs is the relay, not the node that is seen
//! there.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};

use kilo_common::relay::is_port;

use crate::{
    objects::Nodes,
    wireguard::{Endpoint, key::PublicKey},
};

/// Addresses of nodes that offer to relay: a peer that is seen at one of their ports for pairs is elsewhere.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RelayAddresses(BTreeSet<IpAddr>);

impl RelayAddresses {
    /// Addresses that nodes publish, and at which they see each other; `seen` is what
    /// this host's device sees.
    pub fn of(nodes: &Nodes, seen: &BTreeMap<PublicKey, SocketAddr>) -> Self {
        let (mut found, mut keys) = (BTreeSet::new(), BTreeSet::new());
        for node in nodes.iter().filter(|node| node.relay) {
            found.extend(node.endpoint.as_ref().and_then(Endpoint::ip));
            found.extend(&node.external_ips);
            found.extend(node.ipv6_endpoint.map(|endpoint| IpAddr::from(*endpoint.ip())));
            keys.extend(node.key);
        }
        let mut see = |seen: &BTreeMap<PublicKey, SocketAddr>| {
            let endpoints = seen.iter().filter(|(key, at)| keys.contains(key) && !is_port(at.port()));
            found.extend(endpoints.map(|(_, at)| at.ip()));
        };
        // Most meshes have no relay.
        if !keys.is_empty() {
            see(seen);
            nodes.iter().for_each(|node| see(&node.discovered_endpoints));
        }
        Self(found)
    }

    /// Whether this is a port of a relay.
    pub fn contains(&self, at: SocketAddr) -> bool {
        is_port(at.port()) && self.0.contains(&at.ip())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use crate::{objects::CheckedIn, topology::Node};

    #[test]
    fn ports_of_relays_alone_are_theirs() {
        let key = |byte| PublicKey([byte; 32]);
        let at = |text: &str| text.parse::<SocketAddr>().unwrap();
        let node = |name: &str, byte, relay| Node {
            name: name.into(),
            key: Some(key(byte)),
            endpoint: Some(at(&format!("203.0.113.{byte}:51820")).into()),
            relay,
            ..Node::default()
        };
        let seen_elsewhere = [(key(1), at("198.51.100.7:40000")), (key(2), at("203.0.113.1:51900"))];
        let other = Node { discovered_endpoints: seen_elsewhere.into(), ..node("y", 2, false) };
        // It sees the relay through another one, whose address is not the relay's, and a
        // node that is not a relay.
        let through = [(key(1), at("203.0.113.77:51900")), (key(2), at("203.0.113.88:40000"))];
        let third = Node { discovered_endpoints: through.into(), ..node("x", 3, false) };
        let relay = Node {
            external_ips: vec!["198.51.100.30".parse().unwrap()],
            ipv6_endpoint: "[2001:db8::30]:51820".parse().ok(),
            ..node("z", 1, true)
        };
        let nodes: Nodes =
            [relay, other, third].map(|node| CheckedIn { node, last_seen: 0 }).into_iter().collect();
        let addresses = RelayAddresses::of(&nodes, &[(key(1), at("192.0.2.9:51820"))].into());
        for relay in [
            "203.0.113.1:51830",
            "203.0.113.1:52829",
            "198.51.100.7:51900",
            "192.0.2.9:51900",
            "198.51.100.30:51900",
            "[2001:db8::30]:51900",
        ] {
            assert!(addresses.contains(at(relay)), "{relay}");
        }
        for none in [
            "203.0.113.1:51820",
            "203.0.113.2:51900",
            "203.0.113.1:52830",
            "198.51.100.7:40000",
            "203.0.113.77:51900",
            "203.0.113.88:51900",
        ] {
            assert!(!addresses.contains(at(none)), "{none}");
        }
        let without = nodes
            .iter()
            .map(|known| CheckedIn { node: Node { relay: false, ..Node::clone(&known) }, last_seen: 0 });
        assert_eq!(RelayAddresses::of(&without.collect(), &BTreeMap::new()), RelayAddresses::default());
    }
}

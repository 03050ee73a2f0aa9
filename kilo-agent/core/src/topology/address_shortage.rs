//! Locations that have no WireGuard address, because there are more of them than addresses.

use super::Mesh;

impl Mesh {
    /// Why some locations have no WireGuard address, and what to do; `None`: all have one.
    pub fn address_shortage(&self) -> Option<String> {
        let all = self.segments.len();
        let with = self.segments.iter().filter(|segment| segment.wireguard_ip.is_some()).count();
        let addresses = if with == 1 { "address" } else { "addresses" };
        (with < all).then(|| {
            format!(
                "no WireGuard address: --subnet {} has {with} {addresses} for {all} locations; give all agents a larger \
                 one",
                self.subnet
            )
        })
    }

    /// [`Self::address_shortage`] if the location of this node has no address.
    pub fn address_shortage_of(&self, node: &str) -> Option<String> {
        let (at, _) = self.find(node)?;
        self.segments[at].wireguard_ip.is_none().then(|| self.address_shortage())?
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::{settings::Granularity, topology::Node, wireguard::key::PublicKey};

    #[test]
    fn more_locations_than_addresses_are_a_shortage_for_the_last_ones() {
        let node = |n: u8| Node {
            name: format!("n{n}"),
            location: format!("l{n}"),
            endpoint: format!("192.0.2.{n}:51820").parse().ok(),
            key: Some(PublicKey([n; 32])),
            internal_ip: format!("10.0.{n}.1/24").parse().ok(),
            ..Node::default()
        };
        let mesh = |nodes: u8| {
            let nodes: Vec<_> = (1..=nodes).map(node).collect();
            Mesh::new(&nodes, &BTreeMap::new(), Granularity::Location, "10.4.0.0/30".parse().unwrap())
        };
        assert_eq!(mesh(2).address_shortage(), None);
        let five = mesh(5);
        let wanted = "no WireGuard address: --subnet 10.4.0.0/30 has 2 addresses for 5 locations; give all agents a \
                      larger one";
        assert_eq!(five.address_shortage().as_deref(), Some(wanted));
        let short: Vec<_> =
            (1..=5).filter(|n| five.address_shortage_of(&format!("n{n}")).is_some()).collect();
        assert_eq!(short, [3, 4, 5]);
        assert_eq!(five.address_shortage_of("n5").as_deref(), Some(wanted));
    }
}

//! WireGuard addresses that no location has any more. Other nodes may still send there until they
//! learn of it, and this host would forward such packets by its default route.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
    time::Instant,
};

use super::{Mesh, Segment, former::KEPT};

/// Addresses that were freed at most a minute ago.
#[derive(Debug, Default)]
pub struct FreedAddresses {
    since: BTreeMap<IpAddr, Instant>,
}

impl FreedAddresses {
    /// Adds what `before` had and `mesh` does not, and returns all that is kept, sorted.
    pub fn after(&mut self, before: &Mesh, mesh: &Mesh, now: Instant) -> Vec<IpAddr> {
        let same = |(one, other): (&Arc<Segment>, &Arc<Segment>)| Arc::ptr_eq(one, other);
        let is_same = before.segments.len() == mesh.segments.len()
            && before.segments.iter().zip(&mesh.segments).all(same);
        if !is_same {
            let used: BTreeSet<_> = addresses(mesh).collect();
            let freed = addresses(before).filter(|address| !used.contains(address));
            self.since.extend(freed.map(|address| (address, now)));
            self.since.retain(|address, _| !used.contains(address));
        }
        self.since.retain(|_, since| now.saturating_duration_since(*since) < KEPT);
        self.since.keys().copied().collect()
    }
}

fn addresses(mesh: &Mesh) -> impl Iterator<Item = IpAddr> {
    mesh.segments.iter().filter_map(|segment| segment.wireguard_ip)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{settings::Granularity, topology::Node, wireguard::key::PublicKey};

    /// A mesh of so many locations with one node each.
    fn mesh(locations: u8) -> Mesh {
        let nodes: Vec<_> = (1..=locations)
            .map(|n| Node {
                name: format!("n{n}"),
                location: format!("l{n}"),
                key: Some(PublicKey([n; 32])),
                endpoint: format!("192.0.2.{n}:51820").parse().ok(),
                ..Node::default()
            })
            .collect();
        Mesh::new(&nodes, &BTreeMap::new(), Granularity::Location, "10.4.0.0/16".parse().unwrap())
    }

    #[test]
    fn an_address_without_a_location_is_kept_for_a_minute_or_until_it_is_used_again() {
        let (mut freed, start) = (FreedAddresses::default(), Instant::now());
        let (two, three) = (mesh(2), mesh(3));
        let third = [IpAddr::from([10, 4, 0, 3])];
        assert!(freed.after(&Mesh::default(), &three, start).is_empty());
        assert_eq!(freed.after(&three, &two, start), third);
        assert_eq!(freed.after(&two, &two, start + KEPT - Duration::from_secs(1)), third);
        assert!(freed.after(&two, &two, start + KEPT).is_empty());
        assert_eq!(freed.after(&three, &two, start), third);
        assert!(freed.after(&two, &three, start).is_empty());
    }
}

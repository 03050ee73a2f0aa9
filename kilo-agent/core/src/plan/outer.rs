//! Addresses that this host's WireGuard sends to, inside of a prefix that somebody has chosen. Routed there with the
//! rest of it, WireGuard's own packets would go through WireGuard: they keep the way they have without that prefix.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use ipnet::IpNet;
use kilo_common::maps::{PREFIX_HOST_STEERED, PREFIX_NEVER_CLEAR, PREFIX_PODS_STEERED, PrefixValue};

use super::{Inputs, Own, Remote, Route};
use crate::{
    flat_map::{FlatMap, FlatSet},
    topology::prefixes,
    wireguard::WireguardPlan,
};

/// Chosen prefixes that hold such addresses, each with those.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Outer(BTreeMap<IpNet, BTreeSet<IpAddr>>);

impl Outer {
    /// Where WireGuard reaches its peers, as far as no route of the host's own is nearer. A default route of the
    /// host's own is one of several, and stays.
    pub fn of(inputs: &Inputs<'_>, own: &Own<'_>, remote: &Remote, wireguard: &WireguardPlan) -> Self {
        if !own.is_gateway {
            return Self::default();
        }
        let endpoints: BTreeSet<IpAddr> =
            wireguard.peers.values().filter_map(|peer| Some(peer.endpoint?.ip())).collect();
        let elsewhere = &inputs.links.elsewhere;
        let mut found: BTreeMap<IpNet, BTreeSet<IpAddr>> = BTreeMap::new();
        for claim in remote.claims().filter(|claim| claim.chosen && claim.prefix.prefix_len() > 0) {
            let whole = claim.prefix;
            for &address in endpoints.range(whole.network()..=whole.broadcast()) {
                let is_nearer = |(prefix, way): (&IpNet, &crate::observed::Elsewhere)| {
                    prefix.contains(&address) && (prefix.prefix_len() > whole.prefix_len() || way.wins)
                };
                if !elsewhere.iter().any(is_nearer) {
                    found.entry(whole).or_default().insert(address);
                }
            }
        }
        Self(found)
    }

    /// Lets WireGuard's own packets to these addresses leave by the uplinks. What has an entry of its own keeps it.
    pub fn open(&self, table: &mut FlatMap<IpNet, PrefixValue>) {
        let opened = |value: &PrefixValue| PrefixValue {
            flags: value.flags & !(PREFIX_NEVER_CLEAR | PREFIX_HOST_STEERED) | PREFIX_PODS_STEERED,
            ..*value
        };
        let mut entries = Vec::new();
        for (whole, address) in self.pairs() {
            let address = IpNet::from(address);
            let held_by = prefixes::holding(table, address).next();
            entries.extend(held_by.filter(|(by, _)| *by == whole).map(|(_, value)| (address, opened(value))));
        }
        table.extend(entries);
    }

    /// The same routes without these addresses: what is left of each prefix, in as few as that takes.
    pub fn left_out(&self, routes: FlatSet<Route>) -> FlatSet<Route> {
        if self.0.is_empty() {
            return routes;
        }
        let mut all = Vec::with_capacity(routes.len());
        for route in routes {
            match self.0.get(&route.destination) {
                Some(addresses) => {
                    let mut rest = Vec::new();
                    without(route.destination, addresses, &mut rest);
                    all.extend(rest.into_iter().map(|destination| Route { destination, ..route }));
                }
                None => all.push(route),
            }
        }
        all.into_iter().collect()
    }

    /// Each prefix and address.
    pub fn pairs(&self) -> impl Iterator<Item = (IpNet, IpAddr)> {
        self.0.iter().flat_map(|(whole, addresses)| addresses.iter().map(|address| (*whole, *address)))
    }
}

/// What is left of a prefix.
fn without(prefix: IpNet, addresses: &BTreeSet<IpAddr>, rest: &mut Vec<IpNet>) {
    if addresses.range(prefix.network()..=prefix.broadcast()).next().is_none() {
        rest.push(prefix);
    } else if let Ok(halves) = prefix.subnets(prefix.prefix_len() + 1) {
        halves.for_each(|half| without(half, addresses, rest));
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_is_left_of_a_prefix_takes_as_few_as_there_are() {
        let left = |prefix: &str, addresses: &[&str]| {
            let mut rest = Vec::new();
            let addresses = addresses.iter().map(|address| address.parse().unwrap()).collect();
            without(prefix.parse().unwrap(), &addresses, &mut rest);
            rest.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(left("192.0.2.8/30", &["192.0.2.9"]), ["192.0.2.8/32", "192.0.2.10/31"]);
        assert_eq!(left("192.0.2.9/32", &["192.0.2.9"]), [""; 0]);
        assert_eq!(left("192.0.2.0/24", &["198.51.100.1"]), ["192.0.2.0/24"]);
        assert_eq!(left("2001:db8::/48", &["2001:db8::7"]).len(), 80);
    }

    proptest! {
        #[test]
        fn what_is_left_is_all_but_the_addresses(holes in prop::collection::btree_set(0u8.., 1..6)) {
            let address = |last: u8| IpAddr::from([10, 0, 0, last]);
            let addresses = holes.iter().map(|last| address(*last)).collect();
            let mut rest = Vec::new();
            without("10.0.0.0/24".parse().unwrap(), &addresses, &mut rest);
            for last in 0..=u8::MAX {
                let times = rest.iter().filter(|prefix| prefix.contains(&address(last))).count();
                prop_assert_eq!(times, usize::from(!holes.contains(&last)));
            }
        }
    }
}

//! Pure: the difference between present and wanted routes.

use std::collections::BTreeSet;

use ipnet::IpNet;
use itertools::{
    EitherOrBoth::{Both, Left, Right},
    Itertools as _,
};

use super::{super::PROTOCOL, UNREACHABLE_METRIC};
use kilo_core::{
    flat_map::{FlatSet, Key},
    net::{MAIN_TABLE, Route},
};

/// A route of the kernel's tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Found {
    /// Destination, table and preferred source.
    pub route: Route,
    /// Output interface; `None` for multipath and unreachable routes.
    pub interface: Option<u32>,
    /// Metric; smaller wins.
    pub priority: u32,
    /// Who made it: 2 = kernel, 3 = boot, 4 = static, [`PROTOCOL`] = us.
    pub protocol: u8,
    /// It is an `unreachable` route.
    pub unreachable: bool,
    /// It has no gateway: the destinations are on-link.
    pub on_link: bool,
}

/// A route as the kernel holds it: one to the WireGuard device, or the
/// `unreachable` one behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Destination, source and MTU.
    pub route: Route,
    /// It is an `unreachable` route.
    pub unreachable: bool,
}

impl Entry {
    /// Entries for a wanted route, in the form the kernel returns them.
    fn of(route: &Route) -> impl Iterator<Item = Self> {
        let behind = Route { source: None, mtu: None, ..normalise(*route) };
        let behind = route.closed.then_some(Self { route: behind, unreachable: true });
        [Self { route: normalise(*route), unreachable: false }].into_iter().chain(behind)
    }

    /// The `unreachable` route to a prefix to which we have no other route.
    fn unreachable(destination: IpNet) -> Self {
        let route = Route { destination, table: MAIN_TABLE, source: None, mtu: None, closed: false };
        Self { route: normalise(route), unreachable: true }
    }

    /// Sort key; [`diff`] keeps one wanted entry of each.
    fn rank(&self) -> Rank {
        (self.route.table, self.route.destination.rank(), self.unreachable)
    }
}

impl Found {
    /// Sort key, comparable with that of an [`Entry`].
    fn rank(&self) -> Rank {
        (self.route.table, self.route.destination.rank(), self.unreachable)
    }
}

/// Table, destination, and whether it is an `unreachable` one.
type Rank = (u32, <IpNet as Key>::Rank, bool);

/// Difference between present and wanted routes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// New destinations.
    pub add: Vec<Entry>,
    /// Routes of ours with another source or interface: replaced in place, never absent.
    pub replace: Vec<Entry>,
    /// Routes of ours that are no longer wanted, deleted last.
    pub delete: Vec<Found>,
}

/// Pure: what has to change so that our routes are those `wanted`, all through `kilo`, and `unreachable`
/// routes to these destinations.
pub fn diff<'a>(
    current: &[Found],
    wanted: impl IntoIterator<Item = &'a Route>,
    unreachable: impl IntoIterator<Item = &'a IpNet>,
    kilo: u32,
) -> Changes {
    let unreachable = unreachable.into_iter().copied().map(Entry::unreachable);
    let wanted = wanted.into_iter().flat_map(Entry::of).chain(unreachable);
    // Sorted and merged: with tens of thousands of routes, trees cost several times as much, and both lists
    // are nearly sorted. Of an entry that is wanted twice, the last counts.
    let mut wanted: Vec<Entry> = wanted.collect();
    wanted.reverse();
    wanted.sort_by_key(Entry::rank);
    wanted.dedup_by_key(|entry| entry.rank());
    let mut current: Vec<&Found> = current.iter().collect();
    current.sort_by_key(|found| found.rank());
    let mut changes = Changes::default();
    let mut current = current.into_iter().peekable();
    for entry in wanted {
        let rank = entry.rank();
        while let Some(gone) = current.next_if(|found| found.rank() < rank) {
            changes.delete.push(*gone);
        }
        let (mut is_present, mut is_right) = (false, false);
        // The kernel may have several routes, with different metrics.
        while let Some(found) = current.next_if(|found| found.rank() == rank) {
            let leads = found.unreachable || found.interface == Some(kilo);
            is_present = true;
            is_right |= entry.route == found.route && leads;
        }
        match (is_present, is_right) {
            (_, true) => {}
            (true, false) => changes.replace.push(entry),
            (false, false) => changes.add.push(entry),
        }
    }
    changes.delete.extend(current.copied());
    changes
}

/// Routes of a plan, and the prefixes that are to be unreachable.
pub type Wanted<'a> = (&'a FlatSet<Route>, &'a BTreeSet<IpNet>);

/// Pure: what has to change when the kernel has exactly what `before` wants, all through `kilo`.
pub fn between((before, closed): Wanted<'_>, (wanted, unreachable): Wanted<'_>, kilo: u32) -> Changes {
    let found = |entry: Entry| Found {
        route: entry.route,
        interface: (!entry.unreachable).then_some(kilo),
        // 0: deleted with whatever metric the kernel chose.
        priority: if entry.unreachable { UNREACHABLE_METRIC } else { 0 },
        protocol: PROTOCOL,
        unreachable: entry.unreachable,
        on_link: true,
    };
    let (mut gone, mut new) = (Vec::new(), Vec::new());
    let order = |one: &&Route, other: &&Route| one.rank().cmp(&other.rank());
    for side in before.iter().merge_join_by(wanted, order) {
        match side {
            Left(before) => gone.extend(Entry::of(before).map(found)),
            Right(wanted) => new.push(wanted),
            Both(..) => {}
        }
    }
    gone.extend(closed.difference(unreachable).copied().map(Entry::unreachable).map(found));
    diff(&gone, new, unreachable.difference(closed), kilo)
}

/// The form the kernel returns: no host bits; a source of the other family cannot be expressed and is left
/// out.
fn normalise(mut route: Route) -> Route {
    route.destination = route.destination.trunc();
    route.closed = false;
    route.source = route.source.filter(|source| source.is_ipv4() == route.destination.addr().is_ipv4());
    route
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;

    fn route(destination: &str, source: Option<&str>) -> Route {
        Route {
            destination: destination.parse().unwrap(),
            table: MAIN_TABLE,
            source: source.map(|text| text.parse().unwrap()),
            mtu: None,
            closed: false,
        }
    }

    fn found(route: Route, interface: u32, priority: u32) -> Found {
        let route = Route { closed: false, ..route };
        Found {
            route,
            interface: Some(interface),
            priority,
            protocol: PROTOCOL,
            unreachable: false,
            on_link: true,
        }
    }

    /// The route behind a closed one.
    fn unreachable(route: Route) -> Found {
        let route = Route { source: None, mtu: None, ..route };
        Found { interface: None, unreachable: true, ..found(route, 0, UNREACHABLE_METRIC) }
    }

    const fn entry(route: Route) -> Entry {
        Entry { route, unreachable: false }
    }

    #[test]
    fn another_source_or_interface_is_replaced_in_place() {
        let old = route("10.2.0.0/24", Some("10.0.0.1"));
        let new = route("10.2.0.0/24", Some("10.0.0.2"));
        let changes = diff(&[found(old, 5, 0)], &BTreeSet::from([new]), [], 5);
        assert_eq!(changes, Changes { replace: vec![entry(new)], ..Changes::default() });
        let changes = diff(&[found(new, 4, 0)], &BTreeSet::from([new]), [], 5);
        assert_eq!(changes, Changes { replace: vec![entry(new)], ..Changes::default() });
        assert_eq!(diff(&[found(new, 5, 0)], &BTreeSet::from([new]), [], 5), Changes::default());
    }

    #[test]
    fn of_several_routes_to_a_prefix_one_must_be_right_and_what_is_named_last_is_wanted() {
        let (one, other) = (route("10.2.0.0/24", Some("10.0.0.1")), route("10.2.0.0/24", Some("10.0.0.2")));
        let both = [found(one, 5, 0), found(other, 5, 7)];
        assert_eq!(diff(&both, &[other], [], 5), Changes::default());
        assert_eq!(diff(&both[..1], &[one, other], [], 5).replace, [entry(other)]);
        assert_eq!(diff(&both, &[], [], 5).delete, both, "each of them is to go");
    }

    #[test]
    fn a_source_of_the_other_family_is_no_difference() {
        let wanted = BTreeSet::from([route("fd00:1::/64", Some("10.0.0.1"))]);
        assert_eq!(diff(&[found(route("fd00:1::/64", None), 5, 1024)], &wanted, [], 5), Changes::default());
    }

    proptest! {
        #[test]
        fn applying_a_diff_reaches_the_plan(
            have in proptest::collection::btree_map(0u8..40, (0u8..3, 4u32..6, any::<[bool; 2]>()), 0..30),
            want in proptest::collection::btree_map(0u8..40, (0u8..3, any::<bool>()), 0..30),
        ) {
            let make = |net: u8, source: u8, closed: bool| Route {
                closed,
                ..route(&format!("10.{net}.0.0/24"), Some(&format!("192.0.2.{source}")))
            };
            // Either may be missing: the kernel removes those of a device that went down.
            let current: Vec<Found> = have
                .iter()
                .flat_map(|(net, (source, oif, there))| {
                    let route = make(*net, *source, false);
                    let both = [found(route, *oif, 0), unreachable(route)];
                    both.into_iter().zip(*there).filter(|(_, there)| *there).map(|(found, _)| found)
                })
                .collect();
            let wanted: BTreeSet<Route> =
                want.iter().map(|(net, (source, closed))| make(*net, *source, *closed)).collect();
            let changes = diff(&current, &wanted, [], 5);
            let key = |found: &Found| (found.route.destination, found.unreachable);
            let mut table: BTreeMap<_, Found> = current.iter().map(|f| (key(f), *f)).collect();
            for Entry { route, unreachable: behind } in changes.add.iter().chain(&changes.replace) {
                let made = if *behind { unreachable(*route) } else { found(*route, 5, 0) };
                table.insert(key(&made), made);
            }
            for gone in &changes.delete {
                prop_assert!(table.remove(&key(gone)).is_some());
            }
            let after: Vec<Found> = table.into_values().collect();
            for route in &wanted {
                let behind = after.contains(&unreachable(*route));
                prop_assert_eq!(behind, route.closed);
                prop_assert!(after.contains(&found(*route, 5, 0)));
            }
            prop_assert_eq!(after.len(), wanted.iter().map(|route| 1 + usize::from(route.closed)).sum::<usize>());
            prop_assert_eq!(diff(&after, &wanted, [], 5), Changes::default());
        }

        /// Each prefix has no route, a route (with one of two sources, closed or not), or only an
        /// `unreachable` one.
        #[test]
        fn what_differs_between_two_plans_is_what_differs_from_the_kernel(
            plans in proptest::collection::vec(proptest::collection::btree_map(0u8..20, 0u8..5, 0..20), 2),
        ) {
            let prefix = |net: u8| format!("10.{net}.0.0/24");
            let sides: Vec<(FlatSet<Route>, BTreeSet<IpNet>)> = plans
                .iter()
                .map(|plan| {
                    let (routed, closed): (Vec<_>, Vec<_>) = plan.iter().partition(|(_, how)| **how < 4);
                    let routed = routed.into_iter().map(|(net, how)| Route {
                        closed: how % 2 == 1,
                        ..route(&prefix(*net), Some(&format!("192.0.2.{}", how / 2)))
                    });
                    (routed.collect(), closed.into_iter().map(|(net, _)| prefix(*net).parse().unwrap()).collect())
                })
                .collect();
            let [before, wanted] = &sides[..] else { unreachable!() };
            let of = |(routes, closed): &(FlatSet<Route>, BTreeSet<IpNet>)| -> Vec<Found> {
                let made = diff(&[], routes, closed, 5).add;
                let found = |entry: &Entry| match entry.unreachable {
                    true => unreachable(entry.route),
                    false => found(entry.route, 5, 0),
                };
                made.iter().map(found).collect()
            };
            let expected = diff(&of(before), &wanted.0, &wanted.1, 5);
            let mut got = between((&before.0, &before.1), (&wanted.0, &wanted.1), 5);
            let mut deleted = expected.delete.clone();
            deleted.sort_by_key(|found| (found.route.destination, found.unreachable));
            got.delete.sort_by_key(|found| (found.route.destination, found.unreachable));
            prop_assert_eq!(&got.add, &expected.add);
            prop_assert_eq!(&got.replace, &expected.replace);
            prop_assert_eq!(got.delete, deleted);
        }
    }
}

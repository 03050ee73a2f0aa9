//! Which prefixes of a set hold a prefix, or lie in it: a walk over its lengths or
//! one range of the sorted set, never a walk over the whole set.

use std::{collections::BTreeMap, net::IpAddr};

use ipnet::IpNet;

use crate::flat_map::FlatMap;

/// Values by prefix (without host bits), sorted by address, then length.
pub trait Table {
    /// The value kept for a prefix.
    type Value;

    /// The value of exactly this prefix.
    fn value(&self, prefix: &IpNet) -> Option<&Self::Value>;

    /// This prefix, if it is there, and all that sort behind it.
    fn from(&self, prefix: IpNet) -> impl Iterator<Item = (&IpNet, &Self::Value)>;
}

impl<V> Table for BTreeMap<IpNet, V> {
    type Value = V;
    fn value(&self, prefix: &IpNet) -> Option<&V> {
        self.get(prefix)
    }
    fn from(&self, prefix: IpNet) -> impl Iterator<Item = (&IpNet, &V)> {
        self.range(prefix..)
    }
}

impl<V> Table for FlatMap<IpNet, V> {
    type Value = V;
    fn value(&self, prefix: &IpNet) -> Option<&V> {
        self.get(prefix)
    }
    fn from(&self, prefix: IpNet) -> impl Iterator<Item = (&IpNet, &V)> {
        self.since(&prefix).iter().map(|(prefix, value)| (prefix, value))
    }
}

/// Values by prefix, sorted by address, then length.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prefixes<V>(BTreeMap<IpNet, V>);

impl<V> Default for Prefixes<V> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<V> FromIterator<(IpNet, V)> for Prefixes<V> {
    fn from_iter<I: IntoIterator<Item = (IpNet, V)>>(entries: I) -> Self {
        Self(entries.into_iter().map(|(prefix, value)| (prefix.trunc(), value)).collect())
    }
}

impl FromIterator<IpNet> for Prefixes<()> {
    fn from_iter<I: IntoIterator<Item = IpNet>>(prefixes: I) -> Self {
        prefixes.into_iter().map(|prefix| (prefix, ())).collect()
    }
}

impl<V> Prefixes<V> {
    /// The value of exactly this prefix, mutable; a default one is
    /// inserted if it is missing.
    pub fn entry(&mut self, prefix: IpNet) -> &mut V
    where
        V: Default,
    {
        self.0.entry(prefix.trunc()).or_default()
    }

    /// Entries that hold all of `prefix` (itself too), longest first.
    pub fn holding(&self, prefix: IpNet) -> impl Iterator<Item = (IpNet, &V)> {
        holding(&self.0, prefix)
    }

    /// Entries that lie in `prefix` (itself too), in order.
    pub fn covered_by(&self, prefix: IpNet) -> impl Iterator<Item = (IpNet, &V)> {
        covered_by(&self.0, prefix)
    }

    /// Whether any entry overlaps `prefix`.
    pub fn intersect(&self, prefix: IpNet) -> bool {
        self.holding(prefix).next().is_some() || self.covered_by(prefix).next().is_some()
    }
}

/// The value of the longest prefix of `table` (prefixes without host bits)
/// that holds `addr`.
pub fn longest<T: Table<Value: Copy>>(table: &T, addr: IpAddr) -> Option<T::Value> {
    longest_entry(table, addr).map(|(_, value)| value)
}

/// As [`longest`], with the prefix.
pub fn longest_entry<T: Table<Value: Copy>>(table: &T, addr: IpAddr) -> Option<(IpNet, T::Value)> {
    holding(table, addr.into()).next().map(|(prefix, value)| (prefix, *value))
}

/// Entries of `table` that hold all of `prefix` (itself too), longest first.
pub fn holding<T: Table>(table: &T, prefix: IpNet) -> impl Iterator<Item = (IpNet, &T::Value)> {
    (0..=prefix.prefix_len()).rev().filter_map(move |length| {
        let shorter = IpNet::new(prefix.addr(), length).ok()?.trunc();
        Some((shorter, table.value(&shorter)?))
    })
}

/// Entries of `table` that lie in `prefix` (itself too), in order.
pub fn covered_by<T: Table>(table: &T, prefix: IpNet) -> impl Iterator<Item = (IpNet, &T::Value)> {
    let prefix = prefix.trunc();
    // A prefix sorts before everything that lies in it.
    let entries = table.from(prefix).take_while(move |(other, _)| prefix.contains(*other));
    entries.map(|(other, value)| (*other, value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Few addresses, so that prefixes often meet.
    fn prefix() -> impl Strategy<Value = IpNet> {
        let v4 = (0u32..64, 24u8..=32).prop_map(|(low, len)| (IpAddr::from((low << 2).to_be_bytes()), len));
        let v6 = (0u128..64, 120u8..=128).prop_map(|(low, len)| (IpAddr::from(low.to_be_bytes()), len));
        let any = prop_oneof![v4, v6, Just((IpAddr::from([0; 4]), 0)), Just((IpAddr::from([0; 16]), 0))];
        any.prop_map(|(addr, len)| IpNet::new(addr, len).unwrap())
    }

    proptest! {
        #[test]
        fn the_results_are_those_of_a_look_at_every_prefix(
            list in prop::collection::btree_set(prefix().prop_map(|p| p.trunc()), 0..20),
            asked in prefix(),
        ) {
            let set: Prefixes<()> = list.iter().copied().collect();
            let mut holding: Vec<_> = set.holding(asked).map(|(prefix, ())| prefix).collect();
            holding.reverse();
            prop_assert_eq!(holding, list.iter().copied().filter(|p| p.contains(&asked)).collect::<Vec<_>>());
            let covered: Vec<_> = set.covered_by(asked).map(|(prefix, ())| prefix).collect();
            prop_assert_eq!(covered, list.iter().copied().filter(|p| asked.contains(p)).collect::<Vec<_>>());
            let meets = list.iter().any(|p| p.contains(&asked) || asked.contains(p));
            prop_assert_eq!(set.intersect(asked), meets);
        }
    }
}

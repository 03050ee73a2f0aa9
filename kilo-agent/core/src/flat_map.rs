//! Maps and sets that are built, walked and compared as a whole: sorted vectors. With 20,000 entries a tree
//! costs several times as much to build and to drop. They are read as slices; a single insertion or removal
//! moves all entries behind it.

use std::{
    net::{Ipv4Addr, Ipv6Addr},
    ops::Index,
};

use derive_more::{Deref, IntoIterator};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};

/// A key whose order costs few instructions: derived orders compare addresses byte by byte.
pub trait Key: Copy + Eq {
    /// A cheap value that compares as the key does.
    type Rank: Ord;

    /// The key's position in the order.
    fn rank(&self) -> Self::Rank;
}

macro_rules! keys {
    ($($key:ty, $rank:ty, $rule:expr;)*) => {$(
        impl Key for $key {
            type Rank = $rank;
            #[inline]
            fn rank(&self) -> $rank {
                let rule: fn(&$key) -> $rank = $rule;
                rule(self)
            }
        }
    )*};
}

keys! {
    u16, u16, |number| *number;
    u32, u32, |number| *number;
    u64, u64, |number| *number;
    Ipv4Addr, u32, |addr| addr.to_bits();
    Ipv6Addr, u128, |addr| addr.to_bits();
    Ipv4Net, u64, |net| u64::from(net.addr().to_bits()) << 8 | u64::from(net.prefix_len());
    Ipv6Net, (u128, u8), |net| (net.addr().to_bits(), net.prefix_len());
    // IPv4 before IPv6.
    IpNet, (bool, u128, u8), |net| match net {
        IpNet::V4(net) => (false, u128::from(net.addr().to_bits()), net.prefix_len()),
        IpNet::V6(net) => (true, net.addr().to_bits(), net.prefix_len()),
    };
}

/// An element that is sorted by a key it holds: the key itself, or a key with its value.
pub trait Entry {
    /// The key that sorts the entries; each key occurs once.
    type Key: Key;

    /// The key of this entry.
    fn key(&self) -> &Self::Key;
}

impl<K: Key> Entry for K {
    type Key = K;
    fn key(&self) -> &K {
        self
    }
}

impl<K: Key, V> Entry for (K, V) {
    type Key = K;
    fn key(&self) -> &K {
        &self.0
    }
}

/// Entries, sorted by their keys.
#[derive(Clone, Debug, PartialEq, Eq, Deref, IntoIterator)]
#[deref(forward)]
#[into_iterator(owned, ref)]
pub struct Flat<E>(Vec<E>);

/// A set: keys without values.
pub type FlatSet<K> = Flat<K>;

/// Values by key.
/// ```
/// use ipnet::IpNet;
/// use kilo_core::flat_map::FlatMap;
///
/// let net = |text: &str| text.parse::<IpNet>().unwrap();
/// let hops: FlatMap<IpNet, u32> = [(net("10.42.2.0/24"), 4), (net("10.42.1.0/24"), 3)].into_iter().collect();
/// assert_eq!(hops.get(&net("10.42.2.0/24")), Some(&4));
/// assert_eq!(hops.first(), Some(&(net("10.42.1.0/24"), 3)), "sorted");
/// ```
pub type FlatMap<K, V> = Flat<(K, V)>;

impl<E> Default for Flat<E> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<E: Entry> FromIterator<E> for Flat<E> {
    /// Of equal keys, the last one wins.
    fn from_iter<I: IntoIterator<Item = E>>(entries: I) -> Self {
        let mut flat = Self::default();
        flat.extend(entries);
        flat
    }
}

impl<E: Entry> Extend<E> for Flat<E> {
    fn extend<I: IntoIterator<Item = E>>(&mut self, entries: I) {
        self.0.extend(entries);
        if self.0.is_sorted_by(|one, other| one.key().rank() < other.key().rank()) {
            return;
        }
        // The sort is stable: once reversed, the last of equal keys comes first and survives.
        self.0.reverse();
        self.0.sort_by_key(|entry| entry.key().rank());
        self.0.dedup_by_key(|entry| *entry.key());
    }
}

impl<E: Entry> Flat<E> {
    fn search(&self, key: &E::Key) -> Result<usize, usize> {
        let rank = key.rank();
        self.0.binary_search_by(|entry| entry.key().rank().cmp(&rank))
    }

    /// Whether there is an entry of this key.
    pub fn contains(&self, key: &E::Key) -> bool {
        self.search(key).is_ok()
    }

    /// Removes the entry of a key; returns it.
    pub fn remove(&mut self, key: &E::Key) -> Option<E> {
        self.search(key).ok().map(|at| self.0.remove(at))
    }

    /// The entry of this key, if there is one, and all that sort behind it.
    pub fn since(&self, key: &E::Key) -> &[E] {
        &self.0[self.search(key).unwrap_or_else(|at| at)..]
    }
}

impl<K: Key, V> FlatMap<K, V> {
    /// The value of a key.
    pub fn get(&self, key: &K) -> Option<&V> {
        self.search(key).ok().map(|at| &self.0[at].1)
    }

    /// Sets the value of a key; returns the previous one.
    pub fn insert(&mut self, key: K, value: V) -> Option<V> {
        match self.search(&key) {
            Ok(at) => Some(std::mem::replace(&mut self.0[at].1, value)),
            Err(at) => {
                self.0.insert(at, (key, value));
                None
            }
        }
    }

    /// All keys, in order.
    pub fn keys(&self) -> impl Iterator<Item = &K> {
        self.iter().map(|(key, _)| key)
    }
}

impl<K: Key, V> Index<&K> for FlatMap<K, V> {
    type Output = V;
    #[allow(clippy::expect_used, reason = "as the standard library's maps")]
    fn index(&self, key: &K) -> &V {
        self.get(key).expect("no entry of this key")
    }
}

/// Sorts by prefix, stably. Compares one number per item instead of addresses: several times as fast as a
/// sort by [`Key::rank`].
pub fn sort_by_prefix<T: Copy>(items: &mut Vec<T>, prefix: impl Fn(&T) -> IpNet) {
    let (mut v4, mut v6) = (Vec::with_capacity(items.len()), Vec::new());
    for (at, item) in items.iter().enumerate() {
        match prefix(item) {
            IpNet::V4(net) => v4.push(u128::from(net.rank()) << 64 | at as u128),
            IpNet::V6(net) => v6.push((net.rank(), at)),
        }
    }
    // This sort profits from partly sorted input, such as the prefixes of each location.
    v4.sort_unstable();
    v6.sort_unstable();
    let places = v4.iter().map(|ranked| *ranked as u64 as usize).chain(v6.iter().map(|(_, at)| *at));
    *items = places.map(|at| items[at]).collect();
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    /// Few addresses of both families, so that prefixes often meet.
    fn prefix() -> impl Strategy<Value = IpNet> {
        prop_oneof![
            (0u32..64, 24u8..=32).prop_map(|(low, length)| Ipv4Net::new(low.into(), length).unwrap().into()),
            (0u128..64, 120u8..=128)
                .prop_map(|(low, length)| Ipv6Net::new(low.into(), length).unwrap().into()),
        ]
    }

    /// Entries as a tree gives them.
    fn pairs(entries: &[(IpNet, u8)]) -> impl Iterator<Item = (&IpNet, &u8)> {
        entries.iter().map(|(key, value)| (key, value))
    }

    proptest! {
        #[test]
        fn it_holds_what_a_tree_holds_in_the_same_order(
            first in prop::collection::vec((prefix(), 0u8..9), 0..30),
            more in prop::collection::vec((prefix(), 0u8..9), 0..30),
            asked in prefix(),
        ) {
            let mut tree: BTreeMap<IpNet, u8> = first.iter().copied().collect();
            let mut map: FlatMap<IpNet, u8> = first.into_iter().collect();
            prop_assert_eq!(map.remove(&asked).map(|(_, value)| value), tree.remove(&asked));
            for (key, value) in more.iter().take(9) {
                prop_assert_eq!(map.insert(*key, *value), tree.insert(*key, *value));
            }
            map.extend(more.clone());
            tree.extend(more);
            prop_assert!(pairs(&map).eq(tree.iter()), "{map:?} {tree:?}");
            prop_assert_eq!(map.get(&asked), tree.get(&asked));
            prop_assert!(pairs(map.since(&asked)).eq(tree.range(asked..)));
        }

        #[test]
        fn sorting_by_prefix_leaves_equal_ones_in_their_order(list in prop::collection::vec(prefix(), 0..60)) {
            let numbered = || list.iter().copied().enumerate().collect::<Vec<_>>();
            let (mut sorted, mut expected) = (numbered(), numbered());
            sort_by_prefix(&mut sorted, |(_, prefix)| *prefix);
            expected.sort_by_key(|(_, prefix)| *prefix);
            prop_assert_eq!(sorted, expected);
        }
    }
}

//! Maps and sets that are made as a whole, walked and compared: sorted vectors.
//! With 20,000 entries a tree costs several times as much to make and to drop.
//! The methods are those of the standard library's trees; a single insertion
//! or removal moves all that comes behind.

use std::{
    cmp::Ordering,
    net::{Ipv4Addr, Ipv6Addr},
    ops::{Bound, Index, RangeBounds},
    slice, vec,
};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

/// A key with an order that costs few instructions: derived ones compare
/// addresses byte by byte.
pub trait Key: Copy + Eq {
    /// Compares as the key does.
    type Rank: Ord;

    /// The place in the order.
    fn rank(&self) -> Self::Rank;
}

impl Key for Ipv4Net {
    type Rank = u64;
    #[inline]
    fn rank(&self) -> u64 {
        u64::from(self.addr().to_bits()) << 8 | u64::from(self.prefix_len())
    }
}

impl Key for Ipv6Net {
    type Rank = (u128, u8);
    #[inline]
    fn rank(&self) -> (u128, u8) {
        (self.addr().to_bits(), self.prefix_len())
    }
}

/// IPv4 before IPv6.
impl Key for IpNet {
    type Rank = (bool, u128, u8);
    #[inline]
    fn rank(&self) -> (bool, u128, u8) {
        match self {
            Self::V4(net) => (false, u128::from(net.addr().to_bits()), net.prefix_len()),
            Self::V6(net) => (true, net.addr().to_bits(), net.prefix_len()),
        }
    }
}

impl Key for u32 {
    type Rank = u32;
    #[inline]
    fn rank(&self) -> u32 {
        *self
    }
}

impl Key for Ipv4Addr {
    type Rank = u32;
    #[inline]
    fn rank(&self) -> u32 {
        self.to_bits()
    }
}

impl Key for Ipv6Addr {
    type Rank = u128;
    #[inline]
    fn rank(&self) -> u128 {
        self.to_bits()
    }
}

/// Values by key.
/// ```
/// use ipnet::IpNet;
/// use kilo_core::flat_map::FlatMap;
///
/// let net = |text: &str| text.parse::<IpNet>().unwrap();
/// let hops: FlatMap<IpNet, u32> = [(net("10.42.2.0/24"), 4), (net("10.42.1.0/24"), 3)].into_iter().collect();
/// assert_eq!(hops.get(&net("10.42.2.0/24")), Some(&4));
/// assert_eq!(hops.keys().next(), Some(&net("10.42.1.0/24")), "sorted");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlatMap<K, V>(Vec<(K, V)>);

impl<K, V> Default for FlatMap<K, V> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<K: Key, V> FromIterator<(K, V)> for FlatMap<K, V> {
    /// Of equal keys the last counts.
    fn from_iter<I: IntoIterator<Item = (K, V)>>(entries: I) -> Self {
        let mut map = Self(entries.into_iter().collect());
        map.sort();
        map
    }
}

impl<K: Key, V, const N: usize> From<[(K, V); N]> for FlatMap<K, V> {
    fn from(entries: [(K, V); N]) -> Self {
        entries.into_iter().collect()
    }
}

impl<K: Key, V> Extend<(K, V)> for FlatMap<K, V> {
    fn extend<I: IntoIterator<Item = (K, V)>>(&mut self, entries: I) {
        self.0.extend(entries);
        self.sort();
    }
}

impl<K: Key, V> FlatMap<K, V> {
    fn sort(&mut self) {
        if self.0.is_sorted_by(|(one, _), (other, _)| one.rank() < other.rank()) {
            return;
        }
        self.0.sort_by_key(|(key, _)| key.rank());
        self.0.dedup_by(|later, kept| {
            let same = later.0 == kept.0;
            if same {
                std::mem::swap(later, kept);
            }
            same
        });
    }

    fn search(&self, key: &K) -> Result<usize, usize> {
        let rank = key.rank();
        self.0.binary_search_by(|(other, _)| other.rank().cmp(&rank))
    }

    /// The value of a key.
    pub fn get(&self, key: &K) -> Option<&V> {
        self.search(key).ok().map(|at| &self.0[at].1)
    }

    /// Whether there is a value of this key.
    pub fn contains_key(&self, key: &K) -> bool {
        self.search(key).is_ok()
    }

    /// Sets the value of a key; returns the one before.
    pub fn insert(&mut self, key: K, value: V) -> Option<V> {
        match self.search(&key) {
            Ok(at) => Some(std::mem::replace(&mut self.0[at].1, value)),
            Err(at) => {
                self.0.insert(at, (key, value));
                None
            }
        }
    }

    /// Removes a key; returns its value.
    pub fn remove(&mut self, key: &K) -> Option<V> {
        self.search(key).ok().map(|at| self.0.remove(at).1)
    }

    /// Entries with keys in a range, in order.
    pub fn range(&self, keys: impl RangeBounds<K>) -> impl Iterator<Item = (&K, &V)> {
        let start = match keys.start_bound() {
            Bound::Included(key) => self.search(key).unwrap_or_else(|at| at),
            Bound::Excluded(key) => self.search(key).map_or_else(|at| at, |at| at + 1),
            Bound::Unbounded => 0,
        };
        let end = match keys.end_bound() {
            Bound::Included(key) => self.search(key).map_or_else(|at| at, |at| at + 1),
            Bound::Excluded(key) => self.search(key).unwrap_or_else(|at| at),
            Bound::Unbounded => self.0.len(),
        };
        self.0.get(start..end).unwrap_or_default().iter().map(|(key, value)| (key, value))
    }
}

impl<K, V> FlatMap<K, V> {
    /// Number of entries.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// True without entries.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// All entries, in order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (&K, &V)> + ExactSizeIterator + Clone {
        self.0.iter().map(|(key, value)| (key, value))
    }

    /// All entries, in order, their values to be changed.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (&K, &mut V)> {
        self.0.iter_mut().map(|(key, value)| (&*key, value))
    }

    /// All keys, in order.
    pub fn keys(&self) -> impl DoubleEndedIterator<Item = &K> + ExactSizeIterator + Clone {
        self.iter().map(|(key, _)| key)
    }

    /// All values, in the order of their keys.
    pub fn values(&self) -> impl DoubleEndedIterator<Item = &V> + ExactSizeIterator + Clone {
        self.iter().map(|(_, value)| value)
    }
}

impl<K: Key, V> Index<&K> for FlatMap<K, V> {
    type Output = V;
    #[allow(clippy::expect_used, reason = "as the standard library's maps")]
    fn index(&self, key: &K) -> &V {
        self.get(key).expect("no entry of this key")
    }
}

impl<K, V> IntoIterator for FlatMap<K, V> {
    type Item = (K, V);
    type IntoIter = vec::IntoIter<(K, V)>;
    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

/// Keys alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlatSet<K>(Vec<K>);

impl<K> Default for FlatSet<K> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<K: Key> FromIterator<K> for FlatSet<K> {
    fn from_iter<I: IntoIterator<Item = K>>(keys: I) -> Self {
        let mut set = Self::default();
        set.extend(keys);
        set
    }
}

impl<K: Key, const N: usize> From<[K; N]> for FlatSet<K> {
    fn from(keys: [K; N]) -> Self {
        keys.into_iter().collect()
    }
}

impl<K: Key> Extend<K> for FlatSet<K> {
    fn extend<I: IntoIterator<Item = K>>(&mut self, keys: I) {
        self.0.extend(keys);
        if !self.0.is_sorted_by(|one, other| one.rank() < other.rank()) {
            self.0.sort_by_key(Key::rank);
            self.0.dedup();
        }
    }
}

impl<K: Key> FlatSet<K> {
    fn search(&self, key: &K) -> Result<usize, usize> {
        let rank = key.rank();
        self.0.binary_search_by(|other| other.rank().cmp(&rank))
    }

    /// Whether it has this key.
    pub fn contains(&self, key: &K) -> bool {
        self.search(key).is_ok()
    }

    /// Adds a key; false when it was there.
    pub fn insert(&mut self, key: K) -> bool {
        let place = self.search(&key);
        if let Err(at) = place {
            self.0.insert(at, key);
        }
        place.is_err()
    }

    /// Removes a key; false when it was not there.
    pub fn remove(&mut self, key: &K) -> bool {
        let place = self.search(key);
        if let Ok(at) = place {
            self.0.remove(at);
        }
        place.is_ok()
    }

    /// Keeps the keys `wanted` says yes to.
    pub fn retain(&mut self, wanted: impl FnMut(&K) -> bool) {
        self.0.retain(wanted);
    }
}

impl<K> FlatSet<K> {
    /// Number of keys.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// True without keys.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// All keys, in order.
    pub fn iter(&self) -> slice::Iter<'_, K> {
        self.0.iter()
    }
}

impl<'a, K> IntoIterator for &'a FlatSet<K> {
    type Item = &'a K;
    type IntoIter = slice::Iter<'a, K>;
    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl<K> IntoIterator for FlatSet<K> {
    type Item = K;
    type IntoIter = vec::IntoIter<K>;
    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

/// Sorts by prefix; what has the same prefix stays in its order. Compares one number an
/// item instead of addresses: several times as fast as a sort by [`Key::rank`].
pub fn sort_by_prefix<T: Copy>(items: &mut Vec<T>, prefix: impl Fn(&T) -> IpNet) {
    let (mut v4, mut v6) = (Vec::with_capacity(items.len()), Vec::new());
    for (at, item) in items.iter().enumerate() {
        match prefix(item) {
            IpNet::V4(net) => v4.push(u128::from(net.rank()) << 64 | at as u128),
            IpNet::V6(net) => v6.push((net.rank(), at)),
        }
    }
    // This one makes use of what is sorted in parts, such as what locations stand for.
    v4.sort_unstable();
    v6.sort_unstable();
    let places = v4.iter().map(|ranked| *ranked as u64 as usize).chain(v6.iter().map(|(_, at)| *at));
    *items = places.map(|at| items[at]).collect();
}

/// One walk over two sequences that are sorted by `order`, without equal ones within each:
/// `each` gets what only the first has, what only the second has, or both that are equal.
pub fn merge<A, B>(
    one: impl Iterator<Item = A>,
    other: impl Iterator<Item = B>,
    order: impl Fn(&A, &B) -> Ordering,
    mut each: impl FnMut(Option<A>, Option<B>),
) {
    let (mut one, mut other) = (one.fuse(), other.fuse());
    let (mut a, mut b) = (one.next(), other.next());
    loop {
        let place = match (&a, &b) {
            (None, None) => return,
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (Some(a), Some(b)) => order(a, b),
        };
        let left = if place.is_le() { std::mem::replace(&mut a, one.next()) } else { None };
        let right = if place.is_ge() { std::mem::replace(&mut b, other.next()) } else { None };
        each(left, right);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

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

    proptest! {
        #[test]
        fn it_holds_what_a_tree_holds_in_the_same_order(
            first in prop::collection::vec((prefix(), 0u8..9), 0..30),
            more in prop::collection::vec((prefix(), 0u8..9), 0..30),
            (asked, last) in (prefix(), prefix()),
        ) {
            let mut tree: BTreeMap<IpNet, u8> = first.iter().copied().collect();
            let mut map: FlatMap<IpNet, u8> = first.into_iter().collect();
            prop_assert_eq!(map.remove(&asked), tree.remove(&asked));
            for (key, value) in more.iter().take(9) {
                prop_assert_eq!(map.insert(*key, *value), tree.insert(*key, *value));
            }
            map.extend(more.clone());
            tree.extend(more);
            prop_assert!(map.iter().eq(tree.iter()), "{map:?} {tree:?}");
            prop_assert_eq!(map.get(&asked), tree.get(&asked));
            prop_assert!(map.range(asked..).eq(tree.range(asked..)));
            prop_assert!(map.range(..asked).eq(tree.range(..asked)));
            if asked < last {
                prop_assert!(map.range(asked..=last).eq(tree.range(asked..=last)));
                let both = (Bound::Excluded(asked), Bound::Excluded(last));
                prop_assert!(map.range(both).eq(tree.range(both)));
            }
        }

        #[test]
        fn sorting_by_prefix_leaves_equal_ones_in_their_order(list in prop::collection::vec(prefix(), 0..60)) {
            let numbered = || list.iter().copied().enumerate().collect::<Vec<_>>();
            let (mut sorted, mut expected) = (numbered(), numbered());
            sort_by_prefix(&mut sorted, |(_, prefix)| *prefix);
            expected.sort_by_key(|(_, prefix)| *prefix);
            prop_assert_eq!(sorted, expected);
        }

        #[test]
        fn a_walk_over_two_tells_what_is_where(
            one in prop::collection::vec(prefix(), 0..30), other in prop::collection::vec(prefix(), 0..30),
        ) {
            let trees: [BTreeSet<IpNet>; 2] = [&one, &other].map(|list| list.iter().copied().collect());
            let (one, other): (FlatSet<_>, FlatSet<_>) = (one.into_iter().collect(), other.into_iter().collect());
            let (mut left, mut right, mut both) = <(Vec<IpNet>, Vec<IpNet>, Vec<IpNet>)>::default();
            merge(one.iter(), other.iter(), |a, b| a.rank().cmp(&b.rank()), |a, b| match (a, b) {
                (Some(a), Some(b)) => { assert_eq!(a, b); both.push(*a); }
                (a, b) => { left.extend(a); right.extend(b); }
            });
            prop_assert!(left.iter().eq(trees[0].difference(&trees[1])));
            prop_assert!(right.iter().eq(trees[1].difference(&trees[0])));
            prop_assert!(both.iter().eq(trees[0].intersection(&trees[1])));
        }
    }
}

//! Entries of one map: converting keys, reading all entries, writing those that differ.

use std::{
    collections::BTreeMap,
    net::{Ipv4Addr, Ipv6Addr},
    os::fd::AsFd as _,
};

use aya::{
    Pod,
    maps::{
        HashMap, Map, MapData, MapError,
        lpm_trie::{Key as TrieKey, LpmTrie},
    },
};
use ipnet::{Ipv4Net, Ipv6Net};
use itertools::{
    EitherOrBoth::{Both, Left, Right},
    Itertools as _,
};
use kilo_common::maps::{MASQ_ADDR_INDEX_BITS, masq_addr_key};
use kilo_core::flat_map::Key;

use super::{
    super::{DataplaneError, batch, load::PinnedMaps},
    encoding::Towards,
};

/// A prefix that is the key of an LPM trie.
pub(super) trait Prefix: Ord + Key {
    type Octets: Pod;
    fn key(&self) -> TrieKey<Self::Octets>;
    fn from_key(key: &TrieKey<Self::Octets>) -> Option<Self>;
}

impl Prefix for Ipv4Net {
    type Octets = [u8; 4];
    fn key(&self) -> TrieKey<[u8; 4]> {
        TrieKey::new(u32::from(self.prefix_len()), self.network().octets())
    }
    fn from_key(key: &TrieKey<[u8; 4]>) -> Option<Self> {
        Self::new(Ipv4Addr::from(key.data()), u8::try_from(key.prefix_len()).ok()?).ok()
    }
}

impl Prefix for Ipv6Net {
    type Octets = [u8; 16];
    fn key(&self) -> TrieKey<[u8; 16]> {
        TrieKey::new(u32::from(self.prefix_len()), self.network().octets())
    }
    fn from_key(key: &TrieKey<[u8; 16]>) -> Option<Self> {
        Self::new(Ipv6Addr::from(key.data()), u8::try_from(key.prefix_len()).ok()?).ok()
    }
}

impl Prefix for Towards {
    type Octets = [u8; 20];
    fn key(&self) -> TrieKey<[u8; 20]> {
        let Self(ifindex, net) = self;
        let bits = MASQ_ADDR_INDEX_BITS + u32::from(net.prefix_len());
        TrieKey::new(bits, masq_addr_key(*ifindex, &net.network().octets()))
    }
    fn from_key(key: &TrieKey<[u8; 20]>) -> Option<Self> {
        let octets = key.data();
        let (ifindex, addr) = octets.split_first_chunk::<4>()?;
        let length = u8::try_from(key.prefix_len().checked_sub(MASQ_ADDR_INDEX_BITS)?).ok()?;
        let net = Ipv6Net::new(Ipv6Addr::from(<[u8; 16]>::try_from(addr).ok()?), length).ok()?;
        Some(Self(u32::from_be_bytes(*ifindex), net))
    }
}

pub(super) fn read_trie<P: Prefix, V: Pod>(
    maps: &mut PinnedMaps,
    name: &'static str,
) -> Result<BTreeMap<P, V>, DataplaneError> {
    let trie = LpmTrie::<_, P::Octets, V>::try_from(maps.get(name)?)?;
    let mut content = BTreeMap::new();
    for entry in &trie {
        let (key, value) = entry?;
        content.extend(P::from_key(&key).map(|prefix| (prefix, value)));
    }
    Ok(content)
}

/// Reads the entries of an array that are not all zeros.
pub(super) fn read_array<V: Pod + Default + PartialEq>(
    maps: &mut PinnedMaps,
    name: &'static str,
) -> Result<BTreeMap<u32, V>, DataplaneError> {
    let Map::Array(array) = maps.get(name)? else { return Err(DataplaneError::Object(name)) };
    if array.info()?.value_size() as usize != size_of::<V>() {
        return Err(DataplaneError::Object(name));
    }
    // SAFETY: an array has keys of 32 bits, and this one values of the size of `V`.
    let slots: Vec<(u32, V)> = unsafe { batch::read(array.fd().as_fd()) }.map_err(MapError::from)?;
    Ok(slots.into_iter().filter(|(_, value)| *value != V::default()).collect())
}

pub(super) fn read_hash<P: Pod, K: Ord, V: Pod>(
    maps: &mut PinnedMaps,
    name: &'static str,
    key: impl Fn(P) -> K,
) -> Result<BTreeMap<K, V>, DataplaneError> {
    let hash = HashMap::<_, P, V>::try_from(maps.get(name)?)?;
    let mut content = BTreeMap::new();
    for entry in &hash {
        let (raw, value) = entry?;
        content.insert(key(raw), value);
    }
    Ok(content)
}

/// What one map needs: entries to write, keys to remove.
pub struct Difference<K, V> {
    pub write: Vec<(K, V)>,
    pub remove: Vec<K>,
}

/// Compares both in one walk: they are sorted.
pub fn difference<K: Key, V: PartialEq + Copy>(
    present: &BTreeMap<K, V>,
    desired: impl Iterator<Item = (K, V)>,
) -> Difference<K, V> {
    let (mut write, mut remove) = (Vec::new(), Vec::new());
    let present = present.iter().map(|(key, value)| (*key, *value));
    let order = |one: &(K, V), other: &(K, V)| one.0.rank().cmp(&other.0.rank());
    for side in present.merge_join_by(desired, order) {
        match side {
            Both((_, before), (_, value)) if before == value => {}
            Right(entry) | Both(_, entry) => write.push(entry),
            Left((gone, _)) => remove.push(gone),
        }
    }
    Difference { write, remove }
}

pub(super) fn write_trie<P: Prefix, V: Pod>(
    maps: &mut PinnedMaps,
    name: &'static str,
    entries: &[(P, V)],
    present: &mut BTreeMap<P, V>,
) -> Result<u64, DataplaneError> {
    let mut trie: LpmTrie<&mut MapData, P::Octets, V> = maps.get(name)?.try_into()?;
    for (prefix, value) in entries {
        trie.insert(&prefix.key(), value, 0)?;
        present.insert(*prefix, *value);
    }
    Ok(entries.len() as u64)
}

pub(super) fn remove_trie<P: Prefix, V: Pod>(
    maps: &mut PinnedMaps,
    name: &'static str,
    prefixes: &[P],
    present: &mut BTreeMap<P, V>,
) -> Result<u64, DataplaneError> {
    let mut trie: LpmTrie<&mut MapData, P::Octets, V> = maps.get(name)?.try_into()?;
    for prefix in prefixes {
        gone(trie.remove(&prefix.key()))?;
        present.remove(prefix);
    }
    Ok(prefixes.len() as u64)
}

pub(super) fn write_hash<K: Ord + Copy, P: Pod, V: Pod>(
    maps: &mut PinnedMaps,
    name: &'static str,
    difference: Difference<K, V>,
    present: &mut BTreeMap<K, V>,
    raw: impl Fn(K) -> P,
) -> Result<u64, DataplaneError> {
    let mut hash: HashMap<&mut MapData, P, V> = maps.get(name)?.try_into()?;
    let writes = difference.write.len() + difference.remove.len();
    for (key, value) in difference.write {
        hash.insert(raw(key), value, 0)?;
        present.insert(key, value);
    }
    for key in difference.remove {
        gone(hash.remove(&raw(key)))?;
        present.remove(&key);
    }
    Ok(writes as u64)
}

/// Accepts that an entry to be removed or changed is already gone.
pub fn gone(result: Result<(), MapError>) -> Result<(), MapError> {
    match result {
        Err(MapError::SyscallError(error)) if error.io_error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(MapError::KeyNotFound) => Ok(()),
        other => other,
    }
}

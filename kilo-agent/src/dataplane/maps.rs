//! Desired map content against what the maps hold: only differences are
//! written, in an order in which no packet sees a prefix without its hop.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr},
};

use aya::{
    Ebpf, Pod,
    maps::{
        Array, HashMap, MapData, MapError,
        lpm_trie::{Key, LpmTrie},
    },
};
use ipnet::{IpNet, Ipv4Net};
use kilo_common::maps::{
    Config, Device, HOP_KIND_LOCAL, HOP_KIND_NODE, HOP_KIND_WIREGUARD, Hop, MAX_DEVICES, MAX_HOPS,
    MAX_MASQ_PREFIXES, MAX_NODES, MAX_PREFIXES, NodeValue, PrefixValue, TUNNEL_IPIP, TUNNEL_NONE, name,
};

use super::{DataplaneError, load::map};
use crate::plan;

/// Map content as the programs read it. They handle IPv4; what leads over an
/// IPv6 underlay has no hop, and so is dropped and counted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Content {
    prefix_v4: BTreeMap<Ipv4Net, PrefixValue>,
    hop: BTreeMap<u32, Hop>,
    node_v4: BTreeMap<Ipv4Addr, NodeValue>,
    masq_src: BTreeMap<Ipv4Net, u32>,
    masq_dst: BTreeMap<Ipv4Net, u32>,
    device: BTreeMap<u32, Device>,
    config: Config,
}

impl Content {
    pub(super) fn held_senders(&self) -> BTreeMap<IpAddr, NodeValue> {
        self.node_v4.iter().map(|(addr, node)| (IpAddr::V4(*addr), *node)).collect()
    }
}

impl From<&plan::Tables> for Content {
    fn from(tables: &plan::Tables) -> Self {
        Self {
            prefix_v4: ipv4(&tables.prefix),
            hop: tables.hop.iter().filter_map(|(id, hop)| Some((*id, raw_hop(hop)?))).collect(),
            node_v4: tables
                .node
                .iter()
                .filter_map(|(addr, value)| match addr {
                    IpAddr::V4(addr) => Some((*addr, *value)),
                    IpAddr::V6(_) => None,
                })
                .collect(),
            masq_src: ipv4(&tables.masq_src),
            masq_dst: ipv4(&tables.masq_dst),
            device: tables.device.clone(),
            config: tables.config,
        }
    }
}

fn ipv4<V: Copy>(table: &BTreeMap<IpNet, V>) -> BTreeMap<Ipv4Net, V> {
    table
        .iter()
        .filter_map(|(prefix, value)| match prefix {
            IpNet::V4(prefix) => Some((*prefix, *value)),
            IpNet::V6(_) => None,
        })
        .collect()
}

fn raw_hop(hop: &plan::Hop) -> Option<Hop> {
    match *hop {
        plan::Hop::Local => Some(Hop { kind: HOP_KIND_LOCAL, ..Hop::default() }),
        plan::Hop::Wireguard => Some(Hop { kind: HOP_KIND_WIREGUARD, ..Hop::default() }),
        plan::Hop::Node {
            encapsulated,
            ifindex,
            mtu,
            local: IpAddr::V4(local),
            remote: IpAddr::V4(remote),
        } => Some(Hop {
            kind: HOP_KIND_NODE,
            tunnel: if encapsulated { TUNNEL_IPIP } else { TUNNEL_NONE },
            ifindex,
            mtu,
            local: local.octets(),
            remote: remote.octets(),
        }),
        plan::Hop::Node { .. } => None,
    }
}

/// Reads everything the maps hold.
pub fn read(bpf: &mut Ebpf) -> Result<Content, DataplaneError> {
    let mut tables = Content {
        prefix_v4: read_trie::<PrefixValue>(bpf, name::PREFIX_V4)?,
        masq_src: read_trie::<u32>(bpf, name::MASQ_SRC)?,
        masq_dst: read_trie::<u32>(bpf, name::MASQ_DST)?,
        ..Content::default()
    };
    let hops = Array::<_, Hop>::try_from(map(bpf, name::HOP)?)?;
    for id in 0..hops.len() {
        let hop = hops.get(&id, 0)?;
        if hop != Hop::default() {
            tables.hop.insert(id, hop);
        }
    }
    let nodes = HashMap::<_, [u8; 4], NodeValue>::try_from(map(bpf, name::NODE_V4)?)?;
    for entry in nodes.iter() {
        let (addr, value) = entry?;
        tables.node_v4.insert(addr.into(), value);
    }
    let devices = HashMap::<_, u32, Device>::try_from(map(bpf, name::DEVICE)?)?;
    for entry in devices.iter() {
        let (ifindex, value) = entry?;
        tables.device.insert(ifindex, value);
    }
    tables.config = Array::<_, Config>::try_from(map(bpf, name::CONFIG)?)?.get(&0, 0)?;
    Ok(tables)
}

fn read_trie<V: Pod>(bpf: &mut Ebpf, name: &'static str) -> Result<BTreeMap<Ipv4Net, V>, DataplaneError> {
    let trie = LpmTrie::<_, [u8; 4], V>::try_from(map(bpf, name)?)?;
    let mut content = BTreeMap::new();
    for entry in trie.iter() {
        let (key, value) = entry?;
        let length = u8::try_from(key.prefix_len()).unwrap_or(32).min(32);
        if let Ok(prefix) = Ipv4Net::new(Ipv4Addr::from(key.data()), length) {
            content.insert(prefix, value);
        }
    }
    Ok(content)
}

/// What one map needs: entries to write, keys to remove.
struct Difference<K, V> {
    write: Vec<(K, V)>,
    remove: Vec<K>,
}

fn difference<K: Ord + Copy, V: PartialEq + Copy>(
    present: &BTreeMap<K, V>,
    desired: &BTreeMap<K, V>,
) -> Difference<K, V> {
    Difference {
        write: desired
            .iter()
            .filter(|(key, value)| present.get(key) != Some(value))
            .map(|(k, v)| (*k, *v))
            .collect(),
        remove: present.keys().filter(|key| !desired.contains_key(key)).copied().collect(),
    }
}

/// Writes what differs and keeps `present` true; answers the number of writes.
pub fn apply(bpf: &mut Ebpf, present: &mut Content, desired: &Content) -> Result<u64, DataplaneError> {
    check_capacity(desired)?;
    let mut writes = 0;
    // First what others point to, then the pointers; on the way back the other way round.
    let hops = difference(&present.hop, &desired.hop);
    let nodes = difference(&present.node_v4, &desired.node_v4);
    let devices = difference(&present.device, &desired.device);
    let prefixes = difference(&present.prefix_v4, &desired.prefix_v4);
    let sources = difference(&present.masq_src, &desired.masq_src);
    let destinations = difference(&present.masq_dst, &desired.masq_dst);

    let mut map_of_hops = Array::<_, Hop>::try_from(map(bpf, name::HOP)?)?;
    for (id, hop) in hops.write {
        map_of_hops.set(id, hop, 0)?;
        present.hop.insert(id, hop);
        writes += 1;
    }
    // What must not be masqueraded is known before anything is.
    writes += write_trie(bpf, name::MASQ_DST, &destinations.write, &mut present.masq_dst)?;
    writes += write_hash(bpf, name::DEVICE, devices, &mut present.device, |key| key)?;
    writes += write_hash(bpf, name::NODE_V4, nodes, &mut present.node_v4, |addr| addr.octets())?;
    writes += write_trie(bpf, name::PREFIX_V4, &prefixes.write, &mut present.prefix_v4)?;
    writes += write_trie(bpf, name::MASQ_SRC, &sources.write, &mut present.masq_src)?;
    if present.config != desired.config {
        Array::<_, Config>::try_from(map(bpf, name::CONFIG)?)?.set(0, desired.config, 0)?;
        present.config = desired.config;
        writes += 1;
    }
    writes += remove_trie(bpf, name::PREFIX_V4, &prefixes.remove, &mut present.prefix_v4)?;
    writes += remove_trie(bpf, name::MASQ_SRC, &sources.remove, &mut present.masq_src)?;
    writes += remove_trie(bpf, name::MASQ_DST, &destinations.remove, &mut present.masq_dst)?;
    let mut map_of_hops = Array::<_, Hop>::try_from(map(bpf, name::HOP)?)?;
    for id in hops.remove {
        map_of_hops.set(id, Hop::default(), 0)?;
        present.hop.remove(&id);
        writes += 1;
    }
    Ok(writes)
}

fn check_capacity(desired: &Content) -> Result<(), DataplaneError> {
    let full = |map, capacity: u32, wanted: usize| {
        if wanted > capacity as usize { Err(DataplaneError::Full { map, capacity, wanted }) } else { Ok(()) }
    };
    full(name::PREFIX_V4, MAX_PREFIXES, desired.prefix_v4.len())?;
    full(name::NODE_V4, MAX_NODES, desired.node_v4.len())?;
    full(name::MASQ_SRC, MAX_MASQ_PREFIXES, desired.masq_src.len())?;
    full(name::MASQ_DST, MAX_MASQ_PREFIXES, desired.masq_dst.len())?;
    full(name::DEVICE, MAX_DEVICES, desired.device.len())?;
    full(name::HOP, MAX_HOPS, desired.hop.keys().last().map_or(0, |&id| id as usize + 1))
}

fn key(prefix: &Ipv4Net) -> Key<[u8; 4]> {
    Key::new(u32::from(prefix.prefix_len()), prefix.network().octets())
}

fn write_trie<V: Pod>(
    bpf: &mut Ebpf,
    name: &'static str,
    entries: &[(Ipv4Net, V)],
    present: &mut BTreeMap<Ipv4Net, V>,
) -> Result<u64, DataplaneError> {
    let mut trie: LpmTrie<&mut MapData, [u8; 4], V> = map(bpf, name)?.try_into()?;
    for (prefix, value) in entries {
        trie.insert(&key(prefix), value, 0)?;
        present.insert(*prefix, *value);
    }
    Ok(entries.len() as u64)
}

fn remove_trie<V: Pod>(
    bpf: &mut Ebpf,
    name: &'static str,
    prefixes: &[Ipv4Net],
    present: &mut BTreeMap<Ipv4Net, V>,
) -> Result<u64, DataplaneError> {
    let mut trie: LpmTrie<&mut MapData, [u8; 4], V> = map(bpf, name)?.try_into()?;
    for prefix in prefixes {
        gone(trie.remove(&key(prefix)))?;
        present.remove(prefix);
    }
    Ok(prefixes.len() as u64)
}

fn write_hash<K: Ord + Copy, P: Pod, V: Pod>(
    bpf: &mut Ebpf,
    name: &'static str,
    difference: Difference<K, V>,
    present: &mut BTreeMap<K, V>,
    raw: impl Fn(K) -> P,
) -> Result<u64, DataplaneError> {
    let mut hash: HashMap<&mut MapData, P, V> = map(bpf, name)?.try_into()?;
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

/// An entry that somebody else has removed is removed.
fn gone(result: Result<(), MapError>) -> Result<(), MapError> {
    match result {
        Err(MapError::SyscallError(error)) if error.io_error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(MapError::KeyNotFound) => Ok(()),
        other => other,
    }
}

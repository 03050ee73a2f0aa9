//! Compares the desired map content with what the maps hold and writes only differences, in an order in which
//! no packet sees a prefix without its hop.

mod direct;
mod encoding;
pub mod entries;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

use aya::maps::Array;
use ipnet::{Ipv4Net, Ipv6Net};
use kilo_common::{
    map_table::{MapSpec, name},
    maps::{
        Config, Device, Hop, LEAD_ACTING, LEAD_KILO, MASQ_EXCLUDE, MasqAddr, NodeValue, PrefixValue,
        SignalKey,
    },
};
use kilo_core::tables::Tables;
use parking_lot::Mutex;

use self::{
    encoding::{Desired, Towards, slots},
    entries::{difference, read_array, read_hash, read_trie, remove_trie, write_hash, write_trie},
};
use super::{
    DataplaneError, lead,
    load::{FOLLOW, PinnedMaps},
    programs::Programs,
};

/// Locked while entries of `node_v4` and `node_v6` are changed. The kernel replaces an entry as a whole: a mark
/// ([`led_members`](super::led_members)) could otherwise bring back the other fields as they were before a
/// reconcile wrote them, and no later reconcile would see a difference. A mark that a reconcile overwrites with
/// an older plan is in the next plan.
pub type SenderLock = Arc<Mutex<()>>;

/// Map content as the programs read it: each family in maps of its own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Content {
    prefix_v4: BTreeMap<Ipv4Net, PrefixValue>,
    prefix_v6: BTreeMap<Ipv6Net, PrefixValue>,
    direct_v4: BTreeMap<u32, u64>,
    hop: BTreeMap<u32, Hop>,
    node_v4: BTreeMap<Ipv4Addr, NodeValue>,
    node_v6: BTreeMap<Ipv6Addr, NodeValue>,
    masq_src: BTreeMap<Ipv6Net, u32>,
    masq_dst: BTreeMap<Ipv6Net, u32>,
    masq_addr: BTreeMap<Towards, MasqAddr>,
    device: BTreeMap<u32, Device>,
    signal_key: BTreeMap<Ipv6Addr, SignalKey>,
    /// As last read: BPF programs write the second word.
    lead: [u64; 2],
    config: Config,
    /// Destinations newly excluded from masquerading: flows to them may still have entries in the NAT table.
    pub(super) pending_exclusions: BTreeSet<Ipv6Net>,
}

/// A map the agent fills, and how to count its present and desired entries.
struct Filled {
    name: &'static str,
    present: fn(&Content) -> usize,
    desired: fn(&Desired<'_>) -> usize,
}

const fn filled(
    name: &'static str,
    present: fn(&Content) -> usize,
    desired: fn(&Desired<'_>) -> usize,
) -> Filled {
    Filled { name, present, desired }
}

const FILLED: &[Filled] = &[
    filled(name::PREFIX_V4, |present| present.prefix_v4.len(), |desired| desired.prefix_v4().count()),
    filled(name::PREFIX_V6, |present| present.prefix_v6.len(), |desired| desired.prefix_v6().count()),
    filled(name::NODE_V4, |present| present.node_v4.len(), |desired| desired.node_v4().count()),
    filled(name::NODE_V6, |present| present.node_v6.len(), |desired| desired.node_v6().count()),
    filled(name::MASQ_SRC, |present| present.masq_src.len(), |desired| desired.masq_src.len()),
    filled(name::MASQ_DST, |present| present.masq_dst.len(), |desired| desired.masq_dst.len()),
    filled(name::MASQ_ADDR, |present| present.masq_addr.len(), |desired| desired.masq_addr.len()),
    filled(name::DEVICE, |present| present.device.len(), |desired| desired.tables.device.len()),
    filled(name::SIGNAL_KEY, |present| present.signal_key.len(), |desired| desired.tables.signal_key.len()),
    filled(
        name::HOP,
        |present| slots(present.hop.keys().last().copied()),
        |desired| slots(desired.hop().last().map(|(id, _)| id)),
    ),
];

impl Content {
    /// Entries in each map the agent fills, by map name.
    pub(super) fn entries(&self) -> BTreeMap<&'static str, usize> {
        FILLED.iter().map(|map| (map.name, (map.present)(self))).collect()
    }

    pub(super) fn held_keys(&self) -> BTreeMap<IpAddr, SignalKey> {
        self.signal_key.iter().map(|(addr, key)| (IpAddr::V6(*addr).to_canonical(), *key)).collect()
    }

    pub(super) fn held_senders(&self) -> BTreeMap<IpAddr, NodeValue> {
        let v4 = self.node_v4.iter().map(|(addr, node)| (IpAddr::V4(*addr), *node));
        v4.chain(self.node_v6.iter().map(|(addr, node)| (IpAddr::V6(*addr), *node))).collect()
    }
}

/// Reads everything the maps hold.
pub fn read_all(maps: &mut PinnedMaps) -> Result<Content, DataplaneError> {
    let mut content = read(maps)?;
    content.direct_v4 = read_array(maps, name::DIRECT_V4)?;
    Ok(content)
}

/// Reads the maps of the plan, except `direct_v4`, which has nothing that `prefix_v4` does not.
pub fn read(maps: &mut PinnedMaps) -> Result<Content, DataplaneError> {
    // Names every field, so that a new one is read, too.
    Ok(Content {
        prefix_v4: read_trie(maps, name::PREFIX_V4)?,
        prefix_v6: read_trie(maps, name::PREFIX_V6)?,
        direct_v4: BTreeMap::new(),
        hop: read_array(maps, name::HOP)?,
        node_v4: read_hash(maps, name::NODE_V4, |addr: [u8; 4]| addr.into())?,
        node_v6: read_hash(maps, name::NODE_V6, |addr: [u8; 16]| addr.into())?,
        masq_src: read_trie(maps, name::MASQ_SRC)?,
        masq_dst: read_trie(maps, name::MASQ_DST)?,
        masq_addr: read_trie(maps, name::MASQ_ADDR)?,
        device: read_hash(maps, name::DEVICE, |ifindex: u32| ifindex)?,
        signal_key: read_hash(maps, name::SIGNAL_KEY, |addr: [u8; 16]| addr.into())?,
        lead: read_lead(maps)?,
        config: Array::<_, Config>::try_from(maps.get(name::CONFIG)?)?.get(&0, 0)?,
        pending_exclusions: BTreeSet::new(),
    })
}

/// Reads both words of `lead`: Kilo's leader, then the acting leader.
pub fn read_lead(maps: &mut PinnedMaps) -> Result<[u64; 2], DataplaneError> {
    let lead = Array::<_, u64>::try_from(maps.get(name::LEAD)?)?;
    Ok([lead.get(&LEAD_KILO, 0)?, lead.get(&LEAD_ACTING, 0)?])
}

/// Writes what differs and updates `present`; returns the number of writes. `replaces_layout`: maps of another
/// layout carried packets until now.
pub fn apply(
    maps: &mut PinnedMaps,
    programs: &Programs,
    present: &mut Content,
    tables: &Tables,
    senders: &SenderLock,
    replaces_layout: bool,
) -> Result<u64, DataplaneError> {
    let desired = Desired::new(tables);
    check_capacity(&desired)?;
    let mut writes = 0;
    // Entries that others refer to are written first and removed last.
    let hops = difference(&present.hop, desired.hop());
    let nodes_v4 = difference(&present.node_v4, desired.node_v4());
    let nodes_v6 = difference(&present.node_v6, desired.node_v6());
    let devices =
        difference(&present.device, tables.device.iter().map(|(ifindex, device)| (*ifindex, *device)));
    let keys = difference(&present.signal_key, desired.signal_key());
    let prefixes_v4 = difference(&present.prefix_v4, desired.prefix_v4());
    let direct_v4 = difference(&present.direct_v4, direct::words(tables).into_iter());
    let prefixes_v6 = difference(&present.prefix_v6, desired.prefix_v6());
    let addrs = difference(&present.masq_addr, desired.masq_addr.iter().map(|(to, addr)| (*to, *addr)));
    let sources = difference(&present.masq_src, desired.masq_src.iter().copied());
    let destinations = difference(&present.masq_dst, desired.masq_dst.iter().copied());
    let excluded = destinations.write.iter().filter(|(_, value)| *value == MASQ_EXCLUDE);
    // Noted before anything is written: when a write is refused, the next apply finds some exclusions in place.
    present.pending_exclusions.extend(excluded.map(|(prefix, _)| *prefix));

    // The programs look up the array before every other table, and its words combine those. Words that change
    // or go are cleared first, so that the trie answers until all tables are written, even if that fails or
    // this process ends.
    let changed =
        direct_v4.write.iter().map(|(slot, _)| *slot).filter(|slot| present.direct_v4.contains_key(slot));
    let outdated: Vec<_> = direct_v4.remove.iter().copied().chain(changed).map(|slot| (slot, 0)).collect();
    writes += direct::write(maps, outdated, &mut present.direct_v4)?;
    let mut map_of_hops = Array::<_, Hop>::try_from(maps.get(name::HOP)?)?;
    for (id, hop) in hops.write {
        map_of_hops.set(id, hop, 0)?;
        present.hop.insert(id, hop);
        writes += 1;
    }
    present.lead = read_lead(maps)?;
    if present.lead[0] != tables.lead[0] {
        Array::<_, u64>::try_from(maps.get(name::LEAD)?)?.set(LEAD_KILO, tables.lead[0], 0)?;
        present.lead[0] = tables.lead[0];
        writes += 1;
    }
    // A booting host asks who leads. One that keeps carrying packets must not steer to another leader
    // meanwhile.
    let goes_on = replaces_layout && present.lead[1] == 0;
    let acting = tables.lead_of_term.filter(|_| goes_on).unwrap_or(tables.lead[1]);
    if present.lead[1] != acting && !kilo_common::lead::is_later(present.lead[1], acting) {
        let swap = lead::Swap { current: present.lead[1], new: acting };
        present.lead[1] = lead::swap(programs.get(FOLLOW)?, swap)?;
        writes += 1;
    }
    writes += write_hash(maps, name::SIGNAL_KEY, keys, &mut present.signal_key, |addr| addr.octets())?;
    writes += write_trie(maps, name::MASQ_ADDR, &addrs.write, &mut present.masq_addr)?;
    writes += write_hash(maps, name::DEVICE, devices, &mut present.device, |key| key)?;
    let locked = senders.lock();
    writes += write_hash(maps, name::NODE_V4, nodes_v4, &mut present.node_v4, |addr| addr.octets())?;
    writes += write_hash(maps, name::NODE_V6, nodes_v6, &mut present.node_v6, |addr| addr.octets())?;
    drop(locked);
    writes += write_trie(maps, name::PREFIX_V4, &prefixes_v4.write, &mut present.prefix_v4)?;
    writes += write_trie(maps, name::PREFIX_V6, &prefixes_v6.write, &mut present.prefix_v6)?;
    // Prefixes are written before masquerading excludes them, or packets to them would leave in cleartext
    // meanwhile. Exclusions are written before any source is masqueraded.
    writes += write_trie(maps, name::MASQ_DST, &destinations.write, &mut present.masq_dst)?;
    writes += write_trie(maps, name::MASQ_SRC, &sources.write, &mut present.masq_src)?;
    if present.config != tables.config {
        Array::<_, Config>::try_from(maps.get(name::CONFIG)?)?.set(0, tables.config, 0)?;
        present.config = tables.config;
        writes += 1;
    }
    writes += remove_trie(maps, name::MASQ_SRC, &sources.remove, &mut present.masq_src)?;
    writes += remove_trie(maps, name::MASQ_DST, &destinations.remove, &mut present.masq_dst)?;
    writes += remove_trie(maps, name::PREFIX_V4, &prefixes_v4.remove, &mut present.prefix_v4)?;
    writes += remove_trie(maps, name::PREFIX_V6, &prefixes_v6.remove, &mut present.prefix_v6)?;
    writes += remove_trie(maps, name::MASQ_ADDR, &addrs.remove, &mut present.masq_addr)?;
    let mut map_of_hops = Array::<_, Hop>::try_from(maps.get(name::HOP)?)?;
    for id in hops.remove {
        map_of_hops.set(id, Hop::default(), 0)?;
        present.hop.remove(&id);
        writes += 1;
    }
    writes += direct::write(maps, direct_v4.write, &mut present.direct_v4)?;
    Ok(writes)
}

/// Fails, before anything is written, when a map cannot hold all entries: with half of the exclusions, mesh
/// traffic would be masqueraded.
fn check_capacity(desired: &Desired<'_>) -> Result<(), DataplaneError> {
    for map in FILLED {
        let wanted = (map.desired)(desired);
        let capacity = MapSpec::named(map.name).map_or(0, |spec| spec.size);
        if wanted > capacity as usize {
            return Err(DataplaneError::Full { map: map.name, capacity, wanted });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use kilo_common::map_table::MAPS;

    #[test]
    fn every_map_that_the_plan_fills_is_counted() {
        let content = Content::default();
        let planned: Vec<_> = MAPS.iter().filter(|map| map.is_filled()).map(|map| map.name).collect();
        let counted = content.entries();
        assert!(!planned.is_empty());
        assert!(planned.iter().all(|map| counted.contains_key(map)), "{planned:?}: {counted:?}");
        assert_eq!(planned.len(), counted.len(), "{planned:?}: {counted:?}");
    }
}

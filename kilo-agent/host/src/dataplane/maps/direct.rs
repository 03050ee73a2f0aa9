//! Content of `direct_v4`: the part of `prefix_v4` that an array lookup answers (`kilo_common::direct`).

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr},
};

use aya::maps::Array;
use ipnet::{IpNet, Ipv4Net};
use kilo_common::{
    direct::{Slot, shift},
    map_table::name,
    maps::{
        HOP_FIRST_NODE, MASQ_EXCLUDE, PREFIX_KNOWN_SENDER, PREFIX_NOT_MASQUERADED, PREFIX_NOT_TRANSLATED,
        PREFIX_SOURCE, PrefixValue,
    },
};
use kilo_core::tables::{Hop, Tables};

use super::super::{DataplaneError, load::PinnedMaps};

/// The array's words for these tables, with their indexes, sorted by index.
pub(super) fn words(tables: &Tables) -> Vec<(u32, u64)> {
    let is_wanted = |prefix: &Ipv4Net| {
        let wanted = tables.config.direct_shift;
        wanted != 0 && shift(prefix.prefix_len()) == wanted
    };
    let mut prefixes = v4(tables.prefix.iter()).peekable();
    let mut excluded = Excluded { entries: v4(tables.masq_dst.iter()).peekable() };
    let given = given(tables);
    let mut words = Vec::new();
    while let Some((prefix, value)) = prefixes.next() {
        // Prefixes within this one come next in this order.
        if !is_wanted(&prefix) || prefixes.peek().is_some_and(|(next, _)| prefix.contains(next)) {
            continue;
        }
        let mut flags = value.flags;
        if is_known_sender(tables, *value) {
            flags |= PREFIX_KNOWN_SENDER;
        }
        if !is_translated_to(&given, prefix) {
            flags |= PREFIX_NOT_TRANSLATED;
        }
        if excluded.holds(prefix) {
            flags |= PREFIX_NOT_MASQUERADED;
        }
        let slot = Slot::of(prefix.network().octets(), tables.config.direct_shift);
        words.extend(slot.word(PrefixValue { hop: value.hop, flags }).map(|word| (slot.index, word)));
    }
    // The first of several prefixes with the same index keeps it.
    words.sort_by_key(|(index, _)| *index);
    words.dedup_by_key(|(index, _)| *index);
    words
}

fn v4<'a, V: 'a>(entries: impl Iterator<Item = &'a (IpNet, V)>) -> impl Iterator<Item = (Ipv4Net, &'a V)> {
    entries.map_while(|(prefix, value)| match prefix {
        IpNet::V4(prefix) => Some((*prefix, value)),
        // IPv6 sorts behind IPv4.
        IpNet::V6(_) => None,
    })
}

/// Entries of `masq_dst`; prefixes must be looked up in order.
struct Excluded<I: Iterator> {
    entries: std::iter::Peekable<I>,
}

impl<'a, I: Iterator<Item = (Ipv4Net, &'a u32)>> Excluded<I> {
    /// True when exactly this prefix is excluded from masquerading, with every entry within it.
    fn holds(&mut self, prefix: Ipv4Net) -> bool {
        while self.entries.next_if(|(entry, _)| *entry < prefix).is_some() {}
        let mut holds = self.entries.peek().is_some_and(|(entry, _)| *entry == prefix);
        while let Some((_, value)) = self.entries.next_if(|(entry, _)| prefix.contains(entry)) {
            holds &= *value == MASQ_EXCLUDE;
        }
        holds
    }
}

/// IPv4 addresses that masqueraded packets get as source.
fn given(tables: &Tables) -> BTreeSet<Ipv4Addr> {
    let usual = tables.device.values().map(|device| Ipv4Addr::from(device.masq_v4));
    let others = tables.masq_addr.values().filter_map(|addr| match addr {
        IpAddr::V4(addr) => Some(*addr),
        IpAddr::V6(_) => None,
    });
    usual.chain(others).collect()
}

/// Whether one of these addresses is in the prefix.
fn is_translated_to(given: &BTreeSet<Ipv4Addr>, prefix: Ipv4Net) -> bool {
    given.range(prefix.network()..=prefix.broadcast()).next().is_some()
}

/// Whether the entry in `hop` alone proves that a packet is from this prefix's node: the node's address is a
/// sender with that hop, and may arrive by the interface that leads there.
fn is_known_sender(tables: &Tables, value: PrefixValue) -> bool {
    if value.hop < HOP_FIRST_NODE || value.flags & PREFIX_SOURCE == 0 {
        return false;
    }
    let Some(Hop::Node { local: IpAddr::V4(_), remote: remote @ IpAddr::V4(_), ifindex, .. }) =
        tables.hop.get(&value.hop)
    else {
        return false;
    };
    let sender = tables.node.get(remote);
    *ifindex != 0 && sender.is_some_and(|sender| sender.hop == value.hop && sender.may_arrive_by(*ifindex))
}

/// Writes words by index, 0 to clear one; returns how many.
pub(super) fn write(
    maps: &mut PinnedMaps,
    words: impl IntoIterator<Item = (u32, u64)>,
    present: &mut BTreeMap<u32, u64>,
) -> Result<u64, DataplaneError> {
    let mut array = Array::<_, u64>::try_from(maps.get(name::DIRECT_V4)?)?;
    let mut writes = 0;
    for (index, word) in words {
        array.set(index, word, 0)?;
        if word == 0 {
            present.remove(&index);
        } else {
            present.insert(index, word);
        }
        writes += 1;
    }
    Ok(writes)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use kilo_common::maps::{NodeValue, PREFIX_ROUTE};
    use kilo_core::{flat_map::FlatMap, prefixes::longest, settings::Tunnel};
    use proptest::prelude::*;

    use super::*;

    type Spoil = fn(&mut Tables);

    const MARKS: u32 = PREFIX_KNOWN_SENDER | PREFIX_NOT_MASQUERADED | PREFIX_NOT_TRANSLATED;
    const WITHOUT_SENDER: u32 = MARKS & !PREFIX_KNOWN_SENDER;
    const WITHOUT_EXCLUDED: u32 = MARKS & !PREFIX_NOT_MASQUERADED;

    fn found(tables: &Tables, addr: [u8; 4]) -> Option<PrefixValue> {
        let slot = Slot::of(addr, tables.config.direct_shift);
        let words = words(tables);
        let at = words.binary_search_by_key(&slot.index, |(index, _)| *index).ok()?;
        slot.read(words[at].1)
    }

    fn net(text: &str) -> IpNet {
        text.parse().unwrap()
    }

    proptest! {
        #[test]
        fn what_is_found_is_what_the_trie_finds(
            prefixes in prop::collection::vec((0u32..4, 0u32..0x400, 8u8..=32, 0u32..9), 0..40),
            addr in (0u32..4, 0u32..0x400), shift in 0u16..32,
        ) {
            // Few bits differ, so that prefixes contain each other and share indexes.
            let spread = |(high, low): (u32, u32)| high << 30 | low << 4;
            let mut tables = Tables::default();
            for (high, low, length, hop) in prefixes {
                let prefix = Ipv4Net::new(spread((high, low)).into(), length).unwrap().trunc();
                tables.prefix.insert(prefix.into(), PrefixValue { hop, flags: PREFIX_SOURCE });
            }
            tables.config.direct_shift = shift;
            let addr = spread(addr).to_be_bytes();
            let known = found(&tables, addr).map(|value| PrefixValue { flags: value.flags & !MARKS, ..value });
            prop_assert!(known.is_none() || known == longest(&tables.prefix, addr.into()));
        }
    }

    #[test]
    fn the_first_prefix_of_the_wanted_length_has_the_place_and_none_that_holds_another() {
        let mut tables = Tables::default();
        tables.config.direct_shift = 8;
        let value = |hop| PrefixValue { hop, flags: PREFIX_ROUTE };
        for (prefix, hop) in
            [("10.0.1.0/24", 4), ("10.0.2.0/24", 5), ("10.0.2.9/32", 6), ("11.0.1.0/24", 7), ("0.0.0.0/0", 8)]
        {
            tables.prefix.insert(net(prefix), value(hop));
        }
        assert_eq!(found(&tables, [10, 0, 1, 7]).map(|value| value.hop), Some(4));
        assert_eq!(found(&tables, [10, 0, 2, 7]), None, "a longer one lies within");
        assert_eq!(found(&tables, [11, 0, 1, 7]), None, "another has the place");
        assert_eq!(found(&tables, [12, 0, 1, 7]), None, "not of that length");
        tables.prefix.remove(&net("10.0.1.0/24"));
        assert_eq!(found(&tables, [11, 0, 1, 7]).map(|value| value.hop), Some(7));
    }

    #[test]
    fn marks_are_given_only_where_every_table_agrees() {
        let (remote, cidr) = (IpAddr::from([10, 1, 0, 12]), net("10.0.1.0/24"));
        let hop =
            Hop::Node { tunnel: Tunnel::Ipip, ifindex: 3, mtu: 0, local: [10, 1, 0, 11].into(), remote };
        let mut tables = Tables::default();
        tables.config.direct_shift = 8;
        tables.prefix.insert(cidr, PrefixValue { hop: 4, flags: PREFIX_SOURCE });
        tables.hop.insert(4, hop);
        tables.node.insert(remote, NodeValue { hop: 4, interfaces: [9, 3, 0, 0], ..NodeValue::default() });
        tables.masq_dst.insert(cidr, MASQ_EXCLUDE);
        let marks = |tables: &Tables| found(tables, [10, 0, 1, 1]).map_or(0, |value| value.flags & MARKS);
        assert_eq!(marks(&tables), MARKS);
        let spoilt: [(u32, Spoil); 7] = [
            (WITHOUT_SENDER, |tables| tables.node.clear()),
            (WITHOUT_SENDER, |tables| {
                tables.node.values_mut().for_each(|node| node.hop = 5);
            }),
            (WITHOUT_SENDER, |tables| {
                tables.node.values_mut().for_each(|node| node.interfaces = [9, 0, 0, 0]);
            }),
            (WITHOUT_SENDER, |tables| {
                tables.prefix.insert(net("10.0.1.0/24"), PrefixValue { hop: 4, flags: PREFIX_ROUTE });
            }),
            (MARKS & !PREFIX_NOT_TRANSLATED, |tables| {
                let masq_v4 = [10, 0, 1, 255];
                tables.device.insert(9, kilo_common::maps::Device { masq_v4, ..Default::default() });
            }),
            (WITHOUT_EXCLUDED, |tables| tables.masq_dst = FlatMap::default()),
            (WITHOUT_EXCLUDED, |tables| {
                tables.masq_dst.insert(net("10.0.1.128/25"), kilo_common::maps::MASQ_FORCE);
            }),
        ];
        for (left, spoil) in spoilt {
            let mut tables = tables.clone();
            spoil(&mut tables);
            assert_eq!(marks(&tables), left);
        }
    }
}

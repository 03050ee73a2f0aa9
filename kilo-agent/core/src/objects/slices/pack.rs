//! Assigns nodes to slices, so that a node that changes touches its own slice alone.

use std::collections::{BTreeMap, BTreeSet};

use super::Entry;

/// Maximum number of nodes in a slice.
pub const MOST_NODES: usize = 20;
/// Maximum size of a slice in bytes, unless a single node exceeds it.
pub const MOST_BYTES: usize = 32 << 10;

/// What is to be written, in the order of the fields.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Slices that gain nodes, or are new.
    pub gain: BTreeMap<String, Vec<Entry>>,
    /// All slices that are to exist afterwards, if that changes; written after those that gain.
    pub names: Option<Vec<String>>,
    /// Slices in which nodes only change or go.
    pub others: BTreeMap<String, Vec<Entry>>,
    /// Slices to be deleted last.
    pub gone: Vec<String>,
}

impl Plan {
    /// True when everything is as it should be.
    pub fn is_empty(&self) -> bool {
        self.gain.is_empty() && self.names.is_none() && self.others.is_empty() && self.gone.is_empty()
    }
}

/// Plans the writes that turn the existing slices, and the names in the index, into slices
/// that describe `nodes`.
///
/// A node stays in its slice; a new one goes where something is written anyway, or else into the fullest
/// slice that has room. Of two half-empty slices one is emptied into the other, one pair at a time.
pub fn plan(
    old: &BTreeMap<String, Vec<Entry>>,
    indexed: Option<&[String]>,
    nodes: &BTreeMap<String, Entry>,
) -> Plan {
    let mut packing = Packing::keep(old, nodes);
    packing.shrink();
    packing.add(nodes);
    packing.compact(old);
    packing.plan(old, indexed)
}

struct Packing {
    slices: BTreeMap<String, Vec<Entry>>,
    /// Slices in which something other than a heartbeat changes.
    touched: BTreeSet<String>,
    homeless: Vec<Entry>,
    placed: BTreeSet<String>,
}

impl Packing {
    /// Nodes that still exist stay where they are; of two places, the first counts.
    fn keep(old: &BTreeMap<String, Vec<Entry>>, nodes: &BTreeMap<String, Entry>) -> Self {
        let mut packing = Self {
            slices: BTreeMap::new(),
            touched: BTreeSet::new(),
            homeless: Vec::new(),
            placed: BTreeSet::new(),
        };
        for (slice, entries) in old {
            let mut kept = Vec::new();
            for entry in entries {
                match nodes.get(&entry.name) {
                    Some(now) if packing.placed.insert(entry.name.clone()) => {
                        if !now.has_same_content(entry) {
                            packing.touched.insert(slice.clone());
                        }
                        kept.push(now.clone());
                    }
                    _ => drop(packing.touched.insert(slice.clone())),
                }
            }
            packing.slices.insert(slice.clone(), kept);
        }
        packing
    }

    /// Nodes that have grown too large for their slice leave it, the last first.
    fn shrink(&mut self) {
        for (slice, entries) in &mut self.slices {
            while entries.len() > 1 && (entries.len() > MOST_NODES || bytes(entries) > MOST_BYTES) {
                self.touched.insert(slice.clone());
                self.homeless.extend(entries.pop());
            }
        }
    }

    fn add(&mut self, nodes: &BTreeMap<String, Entry>) {
        let new = nodes.values().filter(|entry| !self.placed.contains(&entry.name)).cloned();
        for entry in std::mem::take(&mut self.homeless).into_iter().chain(new) {
            let room = self.slices.iter().filter(|(_, entries)| has_room(entries, &entry));
            let best = room.max_by_key(|(name, entries)| (self.touched.contains(*name), entries.len()));
            let slice = best.map_or_else(|| self.unused_name(), |(name, _)| name.clone());
            self.touched.insert(slice.clone());
            self.slices.entry(slice).or_default().push(entry);
        }
    }

    /// One more name than there are slices is enough to find an unused one.
    fn unused_name(&self) -> String {
        let names = (0..=self.slices.len()).map(|number| format!("nodes-{number:05}"));
        names.into_iter().find(|name| !self.slices.contains_key(name)).unwrap_or_default()
    }

    /// Moves the emptiest slice into the next emptiest if that is then at most three quarters
    /// full; both must be old.
    fn compact(&mut self, old: &BTreeMap<String, Vec<Entry>>) {
        let mut by_size: Vec<_> = self.slices.iter().filter(|(name, _)| old.contains_key(*name)).collect();
        by_size.retain(|(_, entries)| !entries.is_empty());
        by_size.sort_by_key(|(name, entries)| (entries.len(), (*name).clone()));
        let [(from, few), (to, more), ..] = by_size[..] else { return };
        let together = few.len() + more.len();
        if together * 4 > MOST_NODES * 3 || (bytes(few) + bytes(more)) * 4 > MOST_BYTES * 3 {
            return;
        }
        let (from, to) = (from.clone(), to.clone());
        let moved = self.slices.remove(&from).unwrap_or_default();
        self.touched.insert(to.clone());
        self.slices.entry(to).or_default().extend(moved);
    }

    fn plan(mut self, old: &BTreeMap<String, Vec<Entry>>, indexed: Option<&[String]>) -> Plan {
        self.slices.retain(|_, entries| !entries.is_empty());
        let mut plan = Plan::default();
        let names: Vec<String> = self.slices.keys().cloned().collect();
        plan.gone = old.keys().filter(|name| !self.slices.contains_key(*name)).cloned().collect();
        plan.names = (indexed != Some(&names[..])).then_some(names);
        for (name, entries) in self.slices {
            if !self.touched.contains(&name) {
                continue;
            }
            let known = old.get(&name).map_or(&[][..], |old| old);
            let gains = entries.iter().any(|entry| !known.iter().any(|old| old.name == entry.name));
            if gains { &mut plan.gain } else { &mut plan.others }.insert(name, entries);
        }
        plan
    }
}

fn bytes(entries: &[Entry]) -> usize {
    entries.iter().map(Entry::bytes).sum()
}

fn has_room(entries: &[Entry], entry: &Entry) -> bool {
    entries.is_empty() || entries.len() < MOST_NODES && bytes(entries) + entry.bytes() <= MOST_BYTES
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use proptest::prelude::*;

    use super::*;

    type Slices = BTreeMap<String, Vec<Entry>>;

    fn entry(number: usize, key: &str) -> Entry {
        let annotations = [("key".to_owned(), key.to_owned())].into_iter().collect();
        Entry { name: format!("n{number:04}"), annotations, alive: true, last_seen: 1, ..Entry::default() }
    }

    fn nodes(numbers: impl IntoIterator<Item = usize>) -> BTreeMap<String, Entry> {
        numbers.into_iter().map(|number| (format!("n{number:04}"), entry(number, "k"))).collect()
    }

    /// The slices and the index after a plan.
    fn after(slices: &Slices, indexed: Option<Vec<String>>, plan: &Plan) -> (Slices, Option<Vec<String>>) {
        let mut slices = slices.clone();
        slices.extend(plan.gain.clone());
        slices.extend(plan.others.clone());
        slices.retain(|name, _| !plan.gone.contains(name));
        (slices, plan.names.clone().or(indexed))
    }

    fn settle(
        slices: &Slices,
        indexed: Option<Vec<String>>,
        nodes: &BTreeMap<String, Entry>,
    ) -> (Slices, Option<Vec<String>>) {
        let mut state = (slices.clone(), indexed);
        for _ in 0..100 {
            let plan = plan(&state.0, state.1.as_deref(), nodes);
            if plan.is_empty() {
                return state;
            }
            state = after(&state.0, state.1.clone(), &plan);
        }
        unreachable!("it never rests: {:?}", plan(&state.0, state.1.as_deref(), nodes));
    }

    #[test]
    fn a_thousand_nodes_are_fifty_slices_and_a_change_writes_one() {
        let mut all = nodes(0..1000);
        let (slices, index) = settle(&Slices::new(), None, &all);
        assert_eq!((slices.len(), index.as_ref().unwrap().len()), (50, 50));
        all.insert("n0333".to_owned(), entry(333, "other"));
        let change = plan(&slices, index.as_deref(), &all);
        assert_eq!((change.others.len(), change.gain.len(), change.names.is_none()), (1, 0, true));
        // Heartbeats are not passed on.
        let mut beat = all.clone();
        beat.values_mut().for_each(|entry| (entry.last_seen, entry.resource_version) = (2, "9".to_owned()));
        let (slices, index) = after(&slices, index, &change);
        assert!(plan(&slices, index.as_deref(), &beat).is_empty());
        // A node goes, and another comes.
        beat.remove("n0001");
        let gone = plan(&slices, index.as_deref(), &beat);
        assert_eq!((gone.others.len(), gone.gain.len()), (1, 0));
        let (slices, index) = after(&slices, index, &gone);
        beat.insert("new".to_owned(), Entry { name: "new".to_owned(), ..entry(0, "k") });
        let come = plan(&slices, index.as_deref(), &beat);
        assert_eq!((come.gain.len(), come.others.len(), come.names), (1, 0, None));
    }

    #[test]
    fn a_slice_that_was_deleted_comes_back_and_half_empty_ones_become_one() {
        let all = nodes(0..100);
        let (mut slices, index) = settle(&Slices::new(), None, &all);
        slices.remove("nodes-00002");
        let back = plan(&slices, index.as_deref(), &all);
        assert_eq!(back.gain.keys().collect::<Vec<_>>(), ["nodes-00002"]);
        assert_eq!((back.gain["nodes-00002"].len(), back.names), (20, None));
        let few = nodes((0..100).filter(|number| number % 4 == 0));
        let (slices, index) = settle(&slices, index, &few);
        assert_eq!((slices.len(), index.unwrap().len()), (2, 2), "25 nodes");
    }

    #[test]
    fn a_node_in_two_slices_and_one_that_grows_have_one_place() {
        let all = nodes(0..30);
        let (mut slices, index) = settle(&Slices::new(), None, &all);
        slices.get_mut("nodes-00001").unwrap().push(entry(0, "forged"));
        let mended = plan(&slices, index.as_deref(), &all);
        assert_eq!(mended.others.keys().collect::<Vec<_>>(), ["nodes-00001"]);
        let mut large = all.clone();
        large.insert("n0003".to_owned(), entry(3, &"x".repeat(MOST_BYTES)));
        let (slices, _) = settle(&slices, index, &large);
        assert_eq!(slices.values().map(Vec::len).sum::<usize>(), 30);
        let own = slices.values().find(|entries| entries.iter().any(|entry| entry.name == "n0003")).unwrap();
        assert_eq!(own.len(), 1, "it is too large for others beside it");
    }

    proptest! {
        #[test]
        fn whatever_was_there_each_node_has_one_place_in_the_end(
            before in proptest::collection::btree_set(0_usize..200, 0..150),
            now in proptest::collection::btree_set(0_usize..200, 0..150),
            lost in proptest::collection::vec(0_usize..10, 0..3),
        ) {
            let (mut slices, index) = settle(&Slices::new(), None, &nodes(before));
            for number in lost {
                slices.remove(&format!("nodes-{number:05}"));
            }
            let all = nodes(now);
            let (slices, index) = settle(&slices, index, &all);
            let mut found: Vec<_> = slices.values().flatten().map(|entry| entry.name.clone()).collect();
            found.sort();
            prop_assert_eq!(found, all.keys().cloned().collect::<Vec<_>>());
            prop_assert_eq!(index.unwrap(), slices.keys().cloned().collect::<Vec<_>>());
            prop_assert!(slices.values().all(|entries| !entries.is_empty() && entries.len() <= MOST_NODES));
            // Three quarters of two: bounded waste.
            prop_assert!(slices.len() <= 1 + all.len() * 2 / (MOST_NODES * 3 / 4) + 1);
        }
    }
}

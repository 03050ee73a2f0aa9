//! A reader's view of the slices: which nodes exist, whatever is wrong with some slices.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{Entry, INDEX, Index, NodeSliceSpec};

/// How many slices that the index does not name are held: new ones are written before the index
/// names them, 20,000 nodes at once. Further ones are held without content, and cannot be read
/// should the index name them.
const MOST_UNNAMED: usize = 1000;

/// Why the slices are incomplete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Incomplete {
    /// Not listed yet.
    NotListed,
    /// There is no index.
    NoIndex,
    /// A slice that the index names is missing.
    Missing,
    /// A slice that the index names cannot be read.
    Malformed,
    /// The index is for another `--topology-label`.
    OtherLabel,
}

#[derive(Clone, Debug, Default)]
struct Slice {
    entries: Vec<Arc<Entry>>,
    /// The object is gone, or cannot be read; `entries` are then the last that could be read.
    missing: bool,
    malformed: bool,
}

/// All slices as far as they are known.
///
/// A slice that is gone although the index names it, or that cannot be read, keeps its last content until it
/// is mended or no longer named: a node goes only when a readable slice no longer has it. Slices that the
/// index does not name do not count. If several slices have a node, the one with the highest resource version
/// counts, then the first slice by name.
#[derive(Clone, Debug, Default)]
pub struct SliceSet {
    listed: bool,
    index: Option<Index>,
    index_missing: bool,
    slices: BTreeMap<String, Slice>,
    changes: u64,
}

impl SliceSet {
    /// A number that changes whenever anything but the renewal time of the index may have changed: in a large
    /// mesh, reading all nodes for nothing would be most of an idle agent's work.
    pub const fn changes(&self) -> u64 {
        self.changes
    }

    /// Takes one slice; `None`: it cannot be read.
    pub fn put(&mut self, name: &str, spec: Option<NodeSliceSpec>) {
        if name == INDEX {
            let Some(index) = spec.and_then(|spec| spec.index) else { return self.delete(INDEX) };
            let names = |index: &Index| (index.slices.clone(), index.topology_label.clone());
            let is_same = !self.index_missing && self.index.as_ref().map(names) == Some(names(&index));
            (self.index, self.index_missing) = (Some(index), false);
            if !is_same {
                self.forget();
                self.changes += 1;
            }
            return;
        }
        self.changes += 1;
        let spec = spec.filter(|_| self.has_room(name));
        let slice = self.slices.entry(name.to_owned()).or_default();
        slice.missing = false;
        slice.malformed = spec.is_none();
        if let Some(spec) = spec {
            // Unchanged entries keep their allocation.
            let before = std::mem::take(&mut slice.entries);
            let same = |entry: Entry| {
                let known = before.iter().find(|known| ***known == entry);
                known.map_or_else(|| Arc::new(entry), Arc::clone)
            };
            let entries = spec.nodes.into_iter().map(same).collect();
            self.slices.entry(name.to_owned()).or_default().entries = entries;
        }
    }

    /// Whether the slice is named, held already, or one of not too many that are not named.
    fn has_room(&self, name: &str) -> bool {
        let named = self.index.as_ref().map_or(&[][..], |index| &index.slices);
        let is_held = self.slices.get(name).is_some_and(|slice| !slice.malformed);
        is_held || self.slices.len() < named.len() + MOST_UNNAMED || named.iter().any(|named| named == name)
    }

    /// Records that a slice was deleted.
    pub fn delete(&mut self, name: &str) {
        self.changes += 1;
        if name == INDEX {
            self.index_missing = true;
        } else if let Some(slice) = self.slices.get_mut(name) {
            slice.missing = true;
        }
        self.forget();
    }

    /// Replaces everything by a complete list.
    pub fn replace(&mut self, mut list: Vec<(String, Option<NodeSliceSpec>)>) {
        self.listed = true;
        self.changes += 1;
        list.sort_by_key(|(name, _)| name != INDEX);
        let names: BTreeSet<String> = list.iter().map(|(name, _)| name.clone()).collect();
        let known = self.slices.keys().cloned().chain([INDEX.to_owned()]);
        let gone: Vec<String> = known.filter(|name| !names.contains(name)).collect();
        for name in gone {
            self.delete(&name);
        }
        for (name, spec) in list {
            self.put(&name, spec);
        }
    }

    /// Forgets missing slices that the index does not name.
    fn forget(&mut self) {
        let named: BTreeSet<&String> = self.index.iter().flat_map(|index| &index.slices).collect();
        self.slices.retain(|name, slice| !slice.missing || named.contains(name));
    }

    /// The index; `None` when it is missing.
    pub fn index(&self) -> Option<&Index> {
        self.index.as_ref().filter(|_| !self.index_missing)
    }

    /// Slices that exist and can be read, with their nodes.
    pub fn readable(&self) -> impl Iterator<Item = (&str, &[Arc<Entry>])> {
        let readable = self.slices.iter().filter(|(_, slice)| !slice.missing && !slice.malformed);
        readable.map(|(name, slice)| (name.as_str(), &slice.entries[..]))
    }

    /// Names of all slices that exist, readable or not.
    pub fn present(&self) -> impl Iterator<Item = &str> {
        self.slices.iter().filter(|(_, slice)| !slice.missing).map(|(name, _)| name.as_str())
    }

    /// Checks that the set is complete; while it is not, the last content of bad slices still counts.
    ///
    /// # Errors
    /// Why it is incomplete.
    pub fn complete(&self, topology_label: &str) -> Result<(), Incomplete> {
        let index = match &self.index {
            _ if !self.listed => return Err(Incomplete::NotListed),
            Some(index) if !self.index_missing => index,
            _ => return Err(Incomplete::NoIndex),
        };
        if index.topology_label != topology_label {
            return Err(Incomplete::OtherLabel);
        }
        for name in &index.slices {
            match self.slices.get(name) {
                Some(slice) if slice.malformed => return Err(Incomplete::Malformed),
                Some(slice) if !slice.missing => {}
                _ => return Err(Incomplete::Missing),
            }
        }
        Ok(())
    }

    /// Nodes by name, and how many entries describe a node that an earlier entry describes already.
    pub fn nodes(&self) -> (BTreeMap<&str, &Arc<Entry>>, usize) {
        let (mut nodes, mut twice) = (BTreeMap::<&str, &Arc<Entry>>::new(), 0);
        let mut named: Vec<&String> = self.index.iter().flat_map(|index| &index.slices).collect();
        named.sort_unstable();
        named.dedup();
        for slice in named.into_iter().filter_map(|name| self.slices.get(name)) {
            for entry in slice.entries.iter().filter(|entry| !entry.name.is_empty()) {
                match nodes.get_mut(entry.name.as_str()) {
                    Some(known) => {
                        twice += 1;
                        if entry.version() > known.version() {
                            *known = entry;
                        }
                    }
                    None => drop(nodes.insert(&entry.name, entry)),
                }
            }
        }
        (nodes, twice)
    }

    /// Number of slices that are missing or cannot be read.
    pub fn bad(&self) -> usize {
        self.slices.values().filter(|slice| slice.missing || slice.malformed).count()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::unnecessary_wraps, reason = "tests")]
mod tests {
    use super::*;

    fn slice(nodes: &[(&str, u64)]) -> Option<NodeSliceSpec> {
        let entry = |(name, version): &(&str, u64)| Entry {
            name: (*name).to_owned(),
            resource_version: version.to_string(),
            ..Entry::default()
        };
        Some(NodeSliceSpec { nodes: nodes.iter().map(entry).collect(), index: None })
    }

    fn index(slices: &[&str]) -> Option<NodeSliceSpec> {
        let slices = slices.iter().map(|name| (*name).to_owned()).collect();
        let index = Index { slices, topology_label: "l".to_owned(), writer: "w".to_owned(), renewed: 0 };
        Some(NodeSliceSpec { nodes: Vec::new(), index: Some(index) })
    }

    fn names(set: &SliceSet) -> Vec<(String, u64)> {
        set.nodes().0.values().map(|entry| (entry.name.clone(), entry.version())).collect()
    }

    fn known() -> SliceSet {
        let mut set = SliceSet::default();
        assert_eq!(set.complete("l"), Err(Incomplete::NotListed));
        set.replace(vec![
            (INDEX.to_owned(), index(&["one", "two"])),
            ("one".to_owned(), slice(&[("a", 1), ("b", 2)])),
            ("two".to_owned(), slice(&[("c", 3)])),
        ]);
        assert_eq!(set.complete("l"), Ok(()));
        assert_eq!(set.complete("other"), Err(Incomplete::OtherLabel));
        set
    }

    #[test]
    fn a_slice_that_goes_or_is_spoiled_takes_no_node_along() {
        let all = names(&known());
        for spoil in [
            (|set: &mut SliceSet| set.delete("one")) as fn(&mut SliceSet),
            |set| set.put("one", None),
            |set| set.delete(INDEX),
            |set| set.put(INDEX, None),
            |set| set.replace(vec![(INDEX.to_owned(), index(&["one", "two"]))]),
            |set| set.replace(Vec::new()),
        ] {
            let mut set = known();
            spoil(&mut set);
            assert!(set.complete("l").is_err());
            assert_eq!(names(&set), all);
            set.put("one", slice(&[("a", 1)]));
            set.put("two", slice(&[("c", 3)]));
            set.put(INDEX, index(&["one", "two"]));
            assert_eq!(set.complete("l"), Ok(()));
            assert_eq!(names(&set), [("a".to_owned(), 1), ("c".to_owned(), 3)]);
        }
    }

    #[test]
    fn a_slice_that_is_not_named_says_nothing() {
        let mut set = known();
        set.put("forged", slice(&[("z", 99), ("a", 99)]));
        assert_eq!(names(&set).len(), 3);
        set.put(INDEX, index(&["one"]));
        assert_eq!(names(&set).len(), 2);
        set.delete("two");
        assert_eq!((set.complete("l"), set.bad()), (Ok(()), 0));
    }

    #[test]
    fn slices_that_are_not_named_are_not_held_without_bound() {
        let mut set = known();
        for number in 0..MOST_UNNAMED + 100 {
            set.put(&format!("forged-{number:05}"), slice(&[("z", 1)]));
        }
        assert_eq!(set.readable().count(), MOST_UNNAMED + 2);
        set.put("one", slice(&[("a", 7)]));
        assert_eq!((set.complete("l"), set.nodes().0["a"].version()), (Ok(()), 7));
        set.put(INDEX, index(&["one", "two", "forged-01099"]));
        assert_eq!(set.complete("l"), Err(Incomplete::Malformed));
    }

    #[test]
    fn of_a_node_in_two_slices_the_newer_counts() {
        let mut set = known();
        set.put("two", slice(&[("c", 3), ("a", 7), ("b", 1), ("", 9)]));
        assert_eq!(names(&set), [("a".to_owned(), 7), ("b".to_owned(), 2), ("c".to_owned(), 3)]);
        assert_eq!(set.nodes().1, 2);
    }

    #[test]
    fn an_index_that_is_renewed_is_no_change_and_everything_else_is() {
        let mut set = known();
        let mut changes = |change: &dyn Fn(&mut SliceSet)| {
            let before = set.changes();
            change(&mut set);
            set.changes() != before
        };
        let renewed = || {
            let mut spec = index(&["one", "two"]).unwrap();
            spec.index.as_mut().unwrap().renewed = 60;
            Some(spec)
        };
        assert!(!changes(&|set| set.put(INDEX, renewed())));
        assert!(changes(&|set| set.put("two", slice(&[("c", 4)]))));
        assert!(changes(&|set| set.put(INDEX, index(&["one"]))));
        assert!(changes(&|set| set.put(INDEX, None)));
        assert!(changes(&|set| set.put(INDEX, index(&["one"]))), "it is there again");
        assert!(changes(&|set| set.delete("one")));
        assert!(changes(&|set| set.replace(Vec::new())));
        let mut other = index(&["one"]).unwrap();
        other.index.as_mut().unwrap().topology_label = "other".to_owned();
        assert!(changes(&|set| set.put(INDEX, Some(other.clone()))));
    }

    #[test]
    fn what_is_the_same_stays_where_it_is() {
        let mut set = known();
        let before = Arc::clone(set.nodes().0["a"]);
        set.put("one", slice(&[("a", 1), ("b", 9)]));
        assert!(Arc::ptr_eq(&before, set.nodes().0["a"]));
    }
}

//! Copies nodes from slices into the cache that snapshots are made from.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

use kilo_core::{objects::CheckedIn, objects::slices::Entry};

use super::{Context, SeenNode, see_entry};
use crate::backend::kubernetes::cache::Urgency;

/// A node missing from slices is removed after this time, during which all slices must be readable: it may be
/// moving from one slice to another.
const GONE: Duration = Duration::from_secs(1);

/// A loss of this many nodes at once, and of more than a third, is doubted for as long as a writer may need
/// to repair it.
const MANY: usize = 3;
const DOUBTED: Duration = Duration::from_secs(45);

/// Entries sorted by name. They are changed in place, because a copy of many nodes would take a megabyte.
#[derive(Default)]
struct Entries(Vec<Arc<Entry>>);

impl Entries {
    fn position(&self, name: &str) -> Result<usize, usize> {
        self.0.binary_search_by(|entry| entry.name.as_str().cmp(name))
    }

    fn get(&self, name: &str) -> Option<&Arc<Entry>> {
        self.0.get(self.position(name).ok()?)
    }

    fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|entry| entry.name.as_str())
    }

    /// Inserts or replaces entries, and removes the nodes in `gone`.
    fn change(&mut self, news: Vec<Arc<Entry>>, gone: &BTreeSet<String>) {
        self.0.retain(|entry| !gone.contains(&entry.name));
        for entry in news {
            match self.position(&entry.name) {
                Ok(at) => self.0[at] = entry,
                Err(at) => self.0.insert(at, entry),
            }
        }
    }
}

/// The nodes that are in the cache because of slices.
#[derive(Default)]
pub(super) struct Shown {
    nodes: Entries,
    /// Nodes that slices no longer contain, and since when.
    gone: BTreeMap<String, Instant>,
    /// The [`SliceSet::changes`](kilo_core::objects::slices::SliceSet::changes) shown last.
    changes: u64,
}

impl Shown {
    /// Replaces the known nodes with those of slices; this node comes from its own object. A node that slices
    /// do not have is removed as late as if they had had it.
    pub(super) fn replace(context: &Context, own: Option<SeenNode<CheckedIn>>) -> Self {
        let changes = context.seen().set.changes();
        let nodes = entries(context).0;
        let list = nodes.0.iter().map(|entry| see_entry(entry, &context.label)).chain(own).collect();
        let mut shown = Self { nodes, gone: BTreeMap::new(), changes };
        context.shared.change(|cache| {
            let others = cache.nodes.values().names().filter(|name| *name != context.hostname);
            let missing = shown.miss(others, Instant::now());
            cache.nodes.replace(list, &missing)
        });
        shown
    }

    /// Adds the known nodes that slices do not have, and returns them.
    fn miss<'a>(&mut self, known: impl Iterator<Item = &'a str>, time: Instant) -> BTreeSet<String> {
        let missing: BTreeSet<String> =
            known.filter(|name| self.nodes.get(name).is_none()).map(ToOwned::to_owned).collect();
        let entry = |name: &String| Arc::new(Entry { name: name.clone(), ..Entry::default() });
        self.nodes.change(missing.iter().map(entry).collect(), &BTreeSet::new());
        self.gone = missing.iter().map(|name| (name.clone(), time)).collect();
        missing
    }

    pub(super) fn len(&self) -> usize {
        self.nodes.0.len()
    }

    /// Shows what has changed since; returns when to look again even if nothing changes.
    pub(super) fn follow(&mut self, context: &Context) -> Option<Instant> {
        let changes = context.seen().set.changes();
        // A missing node still waits for its removal.
        if std::mem::replace(&mut self.changes, changes) == changes && self.gone.is_empty() {
            return None;
        }
        let (now, complete) = entries(context);
        let gone = self.note_gone(&now, complete, Instant::now());
        let is_known = |entry: &Arc<Entry>| {
            self.nodes.get(&entry.name).is_some_and(|known| Arc::ptr_eq(known, entry) || known == entry)
        };
        let news: Vec<_> = now.0.into_iter().filter(|entry| !is_known(entry)).collect();
        if !(news.is_empty() && gone.is_empty()) {
            context.shared.change(|cache| {
                let mut urgency = Urgency::Never;
                for name in &gone {
                    urgency = urgency.max(cache.nodes.remove(name));
                }
                for entry in &news {
                    urgency = urgency.max(cache.nodes.put(see_entry(entry, &context.label)));
                }
                urgency
            });
            self.nodes.change(news, &gone);
        }
        let pause = self.pause();
        self.gone.values().min().map(|since| *since + pause)
    }

    /// How long nodes must have been missing before they are removed.
    fn pause(&self) -> Duration {
        let many = self.gone.len() >= MANY && self.gone.len() * 3 > self.nodes.0.len();
        if many { DOUBTED } else { GONE }
    }

    /// Notes which nodes are missing, and returns those to remove.
    fn note_gone(&mut self, now: &Entries, complete: bool, time: Instant) -> BTreeSet<String> {
        self.gone.retain(|name, _| now.get(name).is_none());
        for name in self.nodes.names().filter(|name| now.get(name).is_none()) {
            let since = self.gone.entry(name.to_owned()).or_insert(time);
            if !complete {
                *since = time;
            }
        }
        let pause = self.pause();
        let is_due = |since: &Instant| complete && time.saturating_duration_since(*since) >= pause;
        let due: BTreeSet<String> =
            self.gone.iter().filter(|(_, since)| is_due(since)).map(|(name, _)| name.clone()).collect();
        self.gone.retain(|name, _| !due.contains(name));
        due
    }
}

/// All nodes of slices except this one, and whether the slices are complete, which includes this node.
fn entries(context: &Context) -> (Entries, bool) {
    let seen = context.seen();
    let nodes = seen.set.nodes().0;
    let complete = nodes.contains_key(&*context.hostname) && seen.set.complete(&context.label).is_ok();
    let others = nodes.into_values().filter(|entry| *entry.name != *context.hostname);
    (Entries(others.map(Arc::clone).collect()), complete)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    fn entry(name: &str, last_seen: i64) -> Arc<Entry> {
        Arc::new(Entry { name: name.to_owned(), last_seen, ..Entry::default() })
    }

    #[test]
    fn news_take_the_place_of_what_was_known_and_the_order_stays() {
        let mut entries = Entries(["a", "c", "d"].map(|name| entry(name, 1)).into());
        entries.change(vec![entry("b", 2), entry("d", 2), entry("e", 2)], &["a".to_owned()].into());
        let all: Vec<_> = entries.0.iter().map(|entry| (&*entry.name, entry.last_seen)).collect();
        assert_eq!(all, [("b", 2), ("c", 1), ("d", 2), ("e", 2)]);
        assert_eq!(entries.get("c").unwrap().last_seen, 1);
        assert!(entries.get("a").is_none());
    }

    #[test]
    fn a_node_goes_when_slices_that_say_everything_have_not_had_it_for_a_second() {
        let all = |names: &[&str]| Entries(names.iter().map(|name| entry(name, 1)).collect());
        let mut shown = Shown { nodes: all(&["a", "b"]), ..Shown::default() };
        let start = Instant::now();
        let mut at = |ms: u64, names: &[&str], complete| {
            shown.note_gone(&all(names), complete, start + Duration::from_millis(ms)).len()
        };
        assert_eq!(at(0, &["a"], true), 0);
        assert_eq!(at(900, &["a", "b"], true), 0, "it has moved");
        assert_eq!(at(1100, &["a"], true), 0);
        assert_eq!(at(1900, &["a"], false), 0, "a slice is missing");
        assert_eq!(at(2800, &["a"], true), 0);
        assert_eq!(at(2900, &["a"], true), 1);
    }

    #[test]
    fn slices_that_an_agent_turns_to_remove_nodes_as_late_as_those_that_it_reads() {
        let all = |names: &[&str]| Entries(names.iter().map(|name| entry(name, 1)).collect());
        let start = Instant::now();
        let turned = |known: &[&str]| {
            let mut shown = Shown { nodes: all(&["a", "b"]), ..Shown::default() };
            assert_eq!(shown.miss(known.iter().copied(), start).len(), known.len() - 2);
            assert_eq!(shown.len(), known.len());
            shown
        };
        let due = |shown: &mut Shown, milliseconds| {
            shown.note_gone(&all(&["a", "b"]), true, start + Duration::from_millis(milliseconds)).len()
        };
        let mut shown = turned(&["a", "b", "c"]);
        assert_eq!((due(&mut shown, 0), due(&mut shown, 900), due(&mut shown, 1000)), (0, 0, 1));
        let mut shown = turned(&["a", "b", "c", "d", "e"]);
        assert_eq!((due(&mut shown, 44_000), due(&mut shown, 45_000)), (0, 3), "many");
        let mut shown = turned(&["a", "b", "c"]);
        assert_eq!(shown.note_gone(&all(&["a", "b", "c"]), true, start).len(), 0);
        assert!(shown.gone.is_empty(), "it is there again");
    }

    #[test]
    fn many_nodes_that_go_at_once_are_doubted_for_as_long_as_a_writer_may_take() {
        let all =
            |number: usize| Entries((0..number).map(|number| entry(&format!("{number:02}"), 1)).collect());
        let mut shown = Shown { nodes: all(9), ..Shown::default() };
        let start = Instant::now();
        let mut at = |seconds: u64, number: usize| {
            shown.note_gone(&all(number), true, start + Duration::from_secs(seconds)).len()
        };
        assert_eq!((at(0, 0), at(44, 0)), (0, 0), "an index that names no slice");
        assert_eq!((at(44, 9), at(46, 9)), (0, 0), "it was mended");
        assert_eq!((at(50, 6), at(52, 6)), (0, 3), "a third");
        assert_eq!((at(60, 5), at(100, 5), at(105, 5)), (0, 0, 4));
    }
}

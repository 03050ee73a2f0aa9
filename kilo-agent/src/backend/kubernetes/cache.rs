//! What the watches have delivered so far: translated objects only, and how urgent
//! each change is.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use kube::core::ObjectMeta;

use crate::backend::TunnelStatus;

use kilo_core::{
    objects::{ObjectRef, Snapshot, annotations::PREFIX, slices::NODE_BYTES},
    topology::{CheckedIn, Node, Nodes, Peer, heartbeats::OFTEN},
};

/// A heartbeat later than this many seconds, 1.5 times the promised interval, is news; a regular one is not.
fn late_check_in(node: &Node) -> i64 {
    i64::from(node.heartbeat.unwrap_or(OFTEN).max(OFTEN)) * 3 / 2
}

/// How soon a change is to be forwarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Urgency {
    /// Nothing changed.
    Never,
    /// Only a regular heartbeat.
    Later,
    /// Anything else.
    Now,
}

/// A kind of value that the cache holds.
pub trait Kept: Sized {
    /// Name of the kind in the log.
    const KIND: &'static str;

    /// Approximate size of an object in a list, in bytes.
    const BYTES: f64;

    /// All values of this kind by name; copies share unchanged ones.
    type All: Default;

    /// The object of this kind with that name.
    fn object(name: &str) -> ObjectRef;

    /// Stores a value; returns how urgent the change is.
    fn put(self, name: &str, all: &mut Self::All) -> Urgency;

    /// Removes a value; false when there was none of this name.
    fn remove(name: &str, all: &mut Self::All) -> bool;

    /// Whether there is a value with this name.
    fn contains(name: &str, all: &Self::All) -> bool;

    /// Names of all values.
    fn names(all: &Self::All) -> impl Iterator<Item = &str>;
}

impl Kept for Peer {
    const KIND: &'static str = "peer";

    const BYTES: f64 = 1e3;

    type All = Arc<BTreeMap<String, Self>>;

    fn object(name: &str) -> ObjectRef {
        ObjectRef::peer(name)
    }

    fn put(self, name: &str, all: &mut Self::All) -> Urgency {
        if all.get(name) == Some(&self) {
            return Urgency::Never;
        }
        Arc::make_mut(all).insert(name.to_owned(), self);
        Urgency::Now
    }

    fn remove(name: &str, all: &mut Self::All) -> bool {
        all.contains_key(name) && Arc::make_mut(all).remove(name).is_some()
    }

    fn contains(name: &str, all: &Self::All) -> bool {
        all.contains_key(name)
    }

    fn names(all: &Self::All) -> impl Iterator<Item = &str> {
        all.keys().map(String::as_str)
    }
}

impl Kept for CheckedIn {
    const KIND: &'static str = "node";

    const BYTES: f64 = NODE_BYTES;

    type All = Nodes;

    fn object(name: &str) -> ObjectRef {
        ObjectRef::node(name)
    }

    fn put(self, _: &str, all: &mut Nodes) -> Urgency {
        let (last_seen, late) = (self.last_seen, late_check_in(&self.node));
        match all.insert(self) {
            Some(before) if before.is_same => match last_seen.saturating_sub(before.last_seen) {
                0 => Urgency::Never,
                since if (1..late).contains(&since) => Urgency::Later,
                _ => Urgency::Now,
            },
            _ => Urgency::Now,
        }
    }

    fn remove(name: &str, all: &mut Nodes) -> bool {
        all.remove(name)
    }

    fn contains(name: &str, all: &Nodes) -> bool {
        all.contains(name)
    }

    fn names(all: &Nodes) -> impl Iterator<Item = &str> {
        all.names()
    }
}

/// One object as a watch reported it.
#[derive(Debug)]
pub struct Seen<T> {
    /// Name of the object in the API server.
    pub name: String,
    /// The value, unless it is invalid.
    pub value: Option<T>,
    /// What is wrong with it.
    pub problem: Option<String>,
}

/// What agents have written into a Peer object, apart from what a snapshot contains.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Note {
    /// `resourceVersion` of the object when this was read.
    pub version: String,
    /// What the object says about the peer's tunnels.
    pub tunnels: TunnelStatus,
}

/// All objects of one kind.
#[derive(Debug)]
pub struct Store<T: Kept> {
    values: T::All,
    problems: BTreeMap<ObjectRef, String>,
    /// Notes by object name.
    notes: BTreeMap<String, Note>,
    listed: bool,
}

impl<T: Kept> Default for Store<T> {
    fn default() -> Self {
        Self { values: T::All::default(), problems: BTreeMap::new(), notes: BTreeMap::new(), listed: false }
    }
}

impl<T: Kept> Store<T> {
    /// Stores one object.
    pub fn put(&mut self, seen: Seen<T>) -> Urgency {
        let object = T::object(&seen.name);
        let before = match seen.problem {
            Some(problem) => self.problems.insert(object, problem.clone()) != Some(problem),
            None => self.problems.remove(&object).is_some(),
        };
        let value = match seen.value {
            None => changed(T::remove(&seen.name, &mut self.values)),
            Some(value) => value.put(&seen.name, &mut self.values),
        };
        changed(before).max(value)
    }

    /// Stores what an object says besides its value.
    pub fn note(&mut self, name: &str, note: Note) {
        self.notes.insert(name.to_owned(), note);
    }

    /// What a present and valid object says besides its value.
    pub fn note_of(&self, name: &str) -> Option<&Note> {
        self.notes.get(name).filter(|_| self.contains(name))
    }

    /// Removes one object.
    pub fn remove(&mut self, name: &str) -> Urgency {
        self.notes.remove(name);
        let problem = self.problems.remove(&T::object(name)).is_some();
        changed(T::remove(name, &mut self.values) || problem)
    }

    /// Takes a complete list; objects that are not in it are removed, except names in `keep`.
    pub fn replace(&mut self, list: Vec<Seen<T>>, keep: &BTreeSet<String>) -> Urgency {
        let listed: BTreeSet<String> = list.iter().map(|seen| seen.name.clone()).collect();
        let mut urgency = changed(!self.listed);
        self.listed = true;
        let with_problems = self.problems.keys().filter_map(|object| match object {
            ObjectRef::Node(name) | ObjectRef::Peer(name) => Some(name.as_str()),
            ObjectRef::Directory | ObjectRef::File(_) => None,
        });
        let gone: BTreeSet<String> = T::names(&self.values)
            .chain(with_problems)
            .filter(|name| !listed.contains(*name) && !keep.contains(*name))
            .map(ToOwned::to_owned)
            .collect();
        for name in gone {
            urgency = urgency.max(self.remove(&name));
        }
        for seen in list {
            urgency = urgency.max(self.put(seen));
        }
        urgency
    }

    /// All valid objects.
    pub const fn values(&self) -> &T::All {
        &self.values
    }

    /// Estimated size of a list of all objects, in bytes.
    pub fn bytes(&self) -> f64 {
        T::names(&self.values).map(|_| T::BYTES).sum()
    }

    /// Whether this object is present and valid.
    pub fn contains(&self, name: &str) -> bool {
        T::contains(name, &self.values)
    }
}

fn changed(yes: bool) -> Urgency {
    if yes { Urgency::Now } else { Urgency::Never }
}

/// How an object arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrived {
    /// In a list, which is the state of the server.
    Listed,
    /// As an event of a watch, or as the answer to a patch, which may overtake each other.
    Reported,
}

/// Our annotations of this node, as the API server has them.
#[derive(Debug)]
pub struct Own {
    /// Only ours; other annotations may be large.
    pub annotations: BTreeMap<String, String>,
    /// `resourceVersion`, when it is a number.
    pub version: Option<u64>,
}

impl Own {
    /// Extracts what is kept of a node's metadata.
    pub fn new(metadata: &ObjectMeta) -> Self {
        let annotations = metadata.annotations.iter().flatten();
        let ours = annotations.filter(|(name, _)| name.starts_with(PREFIX));
        Self {
            annotations: ours.map(|(name, value)| (name.clone(), value.clone())).collect(),
            version: version(metadata),
        }
    }
}

/// An object's `resourceVersion`, when it is a number.
pub fn version(metadata: &ObjectMeta) -> Option<u64> {
    metadata.resource_version.as_deref()?.parse().ok()
}

/// All objects that the watches have reported; snapshots are made from them.
#[derive(Debug, Default)]
pub struct Cache {
    /// Node objects, with the heartbeat of each.
    pub nodes: Store<CheckedIn>,
    /// Peers.
    pub peers: Store<Peer>,
    own: Option<Own>,
}

impl Cache {
    /// Takes this node's annotations, unless newer ones are already known: the answer to a patch may overtake
    /// the watch. A list always counts, because versions start again lower after a restore of etcd.
    pub fn put_own(&mut self, own: Own, arrived: Arrived) {
        let older = match (&self.own, own.version) {
            (Some(known), Some(version)) => known.version.is_some_and(|known| version < known),
            _ => false,
        };
        if !older || arrived == Arrived::Listed {
            self.own = Some(own);
        }
    }

    /// This node's annotations.
    pub fn own(&self) -> Option<&BTreeMap<String, String>> {
        self.own.as_ref().map(|own| &own.annotations)
    }

    /// The version of this node's object that its annotations are of, when it is a number.
    pub fn own_version(&self) -> Option<u64> {
        self.own.as_ref()?.version
    }

    /// Everything, once each kind has been listed; `None` before.
    pub fn snapshot(&self) -> Option<Snapshot> {
        let problems = self.nodes.problems.iter().chain(&self.peers.problems);
        (self.nodes.listed && self.peers.listed).then(|| Snapshot {
            nodes: self.nodes.values.clone(),
            peers: Arc::clone(&self.peers.values),
            problems: problems.map(|(object, problem)| (object.clone(), problem.clone())).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(name: &str, last_seen: i64) -> Seen<CheckedIn> {
        let node = Node { name: name.to_owned(), ..Node::default() };
        Seen { name: name.to_owned(), value: Some(CheckedIn { node, last_seen }), problem: None }
    }

    #[test]
    fn only_a_regular_heartbeat_can_wait() {
        let mut store = Store::default();
        assert_eq!(store.put(seen("a", 100)), Urgency::Now);
        assert_eq!(store.put(seen("a", 100)), Urgency::Never);
        assert_eq!(store.put(seen("a", 130)), Urgency::Later);
        assert_eq!(store.put(seen("a", 200)), Urgency::Now, "it was away");
        assert_eq!(store.put(seen("a", 190)), Urgency::Now, "its clock was set back");
        let mut led = seen("a", 191);
        led.value.as_mut().unwrap().node.leader = true;
        assert_eq!(store.put(led), Urgency::Now);
        let resting = |last_seen| {
            let mut resting = seen("b", last_seen);
            resting.value.as_mut().unwrap().node.heartbeat = Some(300);
            resting
        };
        store.put(resting(100));
        assert_eq!(store.put(resting(430)), Urgency::Later, "as it promised");
        assert_eq!(store.put(resting(880)), Urgency::Now, "it was away");
    }

    #[test]
    fn a_list_removes_what_it_misses_unless_it_is_to_be_kept() {
        let mut store = Store::default();
        store.put(seen("gone", 1));
        store.put(seen("kept", 1));
        store.put(Seen::<CheckedIn> { name: "bad".into(), value: None, problem: Some("x".into()) });
        let keep = BTreeSet::from(["kept".to_owned()]);
        assert_eq!(store.replace(vec![seen("a", 1)], &keep), Urgency::Now);
        assert_eq!(store.values.names().collect::<Vec<_>>(), ["a", "kept"]);
        assert!(store.problems.is_empty());
        assert_eq!(store.replace(vec![seen("a", 1), seen("kept", 1)], &BTreeSet::new()), Urgency::Never);
    }

    #[test]
    fn what_an_object_says_goes_with_it() {
        let mut store = Store::default();
        for name in ["a", "b", "bad"] {
            store.note(name, Note::default());
        }
        store.put(seen("a", 1));
        store.put(seen("b", 1));
        store.put(Seen::<CheckedIn> { name: "bad".into(), value: None, problem: Some("x".into()) });
        assert!(store.note_of("a").is_some() && store.note_of("bad").is_none());
        store.remove("a");
        assert_eq!(store.notes.keys().collect::<Vec<_>>(), ["b", "bad"]);
        store.replace(Vec::new(), &BTreeSet::new());
        assert!(store.notes.is_empty());
    }

    #[test]
    fn an_invalid_object_is_named_until_it_is_mended() {
        let mut store = Store::default();
        store.put(seen("a", 1));
        let bad = || Seen::<CheckedIn> { name: "a".into(), value: None, problem: Some("wrong".into()) };
        assert_eq!(store.put(bad()), Urgency::Now);
        assert_eq!(store.put(bad()), Urgency::Never);
        assert!(!store.contains("a") && store.problems.contains_key(&ObjectRef::node("a")));
        assert_eq!(store.put(seen("a", 1)), Urgency::Now);
        assert!(store.contains("a") && store.problems.is_empty());
    }

    #[test]
    fn a_watch_that_lags_does_not_undo_the_answer_to_a_patch() {
        let own = |version, text: &str| Own {
            annotations: BTreeMap::from([("k".to_owned(), text.to_owned())]),
            version: Some(version),
        };
        let mut cache = Cache::default();
        cache.put_own(own(10, "patched"), Arrived::Reported);
        cache.put_own(own(9, "late event"), Arrived::Reported);
        assert_eq!(cache.own().unwrap()["k"], "patched");
        cache.put_own(own(11, "newer"), Arrived::Reported);
        assert_eq!(cache.own().unwrap()["k"], "newer");
        // etcd was restored from a backup.
        cache.put_own(own(5, "listed"), Arrived::Listed);
        assert_eq!(cache.own().unwrap()["k"], "listed");
        cache.put_own(own(6, "since"), Arrived::Reported);
        assert_eq!(cache.own().unwrap()["k"], "since");
    }

    #[test]
    fn other_peoples_annotations_are_not_kept() {
        let large = "x".repeat(100_000);
        let ours = format!("{PREFIX}key");
        let annotations =
            BTreeMap::from([(ours.clone(), "k".to_owned()), ("example.com/large".to_owned(), large)]);
        let metadata = ObjectMeta { annotations: Some(annotations), ..ObjectMeta::default() };
        assert_eq!(Own::new(&metadata).annotations, BTreeMap::from([(ours, "k".to_owned())]));
    }

    #[test]
    fn there_is_no_snapshot_before_everything_is_listed() {
        let mut cache = Cache::default();
        cache.nodes.replace(Vec::new(), &BTreeSet::new());
        assert!(cache.snapshot().is_none());
        cache.peers.replace(Vec::new(), &BTreeSet::new());
        assert_eq!(cache.snapshot(), Some(Snapshot::default()));
    }
}

//! All Nodes as the writer sees them, and which of them are alive.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use kilo_core::{
    objects::{CheckedIn, Nodes, slices::Entry},
    topology::{Liveness, heartbeats::OFTEN, is_complete},
};
use kube::{Resource as _, runtime::watcher};

use super::{PartialNode, entry_of};
use crate::{backend::mass_delete_guard::MassDeleteGuard, timestamp::Timestamp};

/// A writer whose own heartbeat has been missing for this many intervals does not see what happens.
const MISSED: u16 = 3;

#[derive(Default)]
pub(super) struct Mirror {
    own: String,
    /// This node's heartbeat, and when it arrived, or when this mirror was created.
    beat: (i64, Option<Instant>),
    pub entries: BTreeMap<String, Entry>,
    nodes: Nodes,
    liveness: Liveness,
    listing: Option<Vec<PartialNode>>,
    guard: MassDeleteGuard,
    /// All Nodes have been listed once.
    pub listed: bool,
    /// Something other than heartbeats has changed.
    pub dirty: bool,
    /// Heartbeats have arrived, or may have ceased, since liveness was last applied.
    unchecked: bool,
}

impl Mirror {
    /// Starts from the liveness that slices recorded: this agent may have seen no heartbeat yet.
    pub(super) fn begin<'a>(known: impl Iterator<Item = &'a Entry>, own: &str, label: &str) -> Self {
        let beat = (0, Some(Instant::now()));
        let mut mirror = Self { own: own.to_owned(), beat, ..Self::default() };
        let nodes: Nodes = known.filter_map(|entry| super::see_entry(entry, label).value).collect();
        mirror.guard.list(&nodes.names().map(ToOwned::to_owned).collect());
        mirror.liveness.ready(nodes.iter(), own, Instant::now(), Timestamp::now().0);
        mirror
    }

    /// Takes an event; returns true when a list misses many nodes and is to be confirmed.
    pub(super) fn take(&mut self, event: watcher::Event<PartialNode>, label: &str) -> bool {
        match event {
            watcher::Event::Init => self.listing = Some(Vec::new()),
            watcher::Event::InitApply(object) => self.listing.get_or_insert_default().push(object),
            watcher::Event::InitDone => {
                let list = self.listing.take().unwrap_or_default();
                let names: BTreeSet<String> =
                    list.iter().filter_map(|node| node.meta().name.clone()).collect();
                let keep = self.guard.list(&names).clone();
                let known: Vec<String> = self.entries.keys().cloned().collect();
                for name in known.iter().filter(|name| !names.contains(*name) && !keep.contains(*name)) {
                    self.remove(name);
                }
                for object in list {
                    self.put(object, label);
                }
                // Nodes that this agent has never seen cannot be kept in slices: they wait for the second list.
                self.listed = keep.is_empty();
                return !keep.is_empty();
            }
            watcher::Event::Apply(object) => {
                self.guard.add(&object.meta().name.clone().unwrap_or_default());
                self.put(object, label);
            }
            watcher::Event::Delete(object) => {
                let name = object.meta().name.clone().unwrap_or_default();
                self.guard.remove(&name);
                self.remove(&name);
            }
        }
        false
    }

    fn put(&mut self, object: PartialNode, label: &str) {
        let (mut entry, CheckedIn { node, last_seen }) = entry_of(object, label);
        let before = self.entries.get(&entry.name);
        entry.alive = before.is_none_or(|before| before.alive);
        self.unchecked = true;
        if entry.name == self.own && last_seen != self.beat.0 {
            self.beat = (last_seen, Some(Instant::now()));
        }
        self.dirty |= before.is_none_or(|before| !before.says_the_same(&entry));
        self.nodes.insert(CheckedIn { node, last_seen });
        self.entries.insert(entry.name.clone(), entry);
    }

    fn remove(&mut self, name: &str) {
        self.dirty |= self.entries.remove(name).is_some();
        self.nodes.remove(name);
    }

    /// Why this agent must not judge others, if so: silence proves nothing to an agent that does not hear
    /// itself.
    pub(super) fn unfit(&self, now: Instant) -> Option<&'static str> {
        let Some(own) = self.nodes.get(&self.own) else {
            return self.listed.then_some("the own Node is not there");
        };
        let often = Duration::from_secs(own.heartbeat.unwrap_or(OFTEN).max(OFTEN).into());
        let is_heard =
            self.beat.1.is_some_and(|beat| now.saturating_duration_since(beat) < often * MISSED.into());
        (!is_heard).then_some("this node's heartbeat does not appear in what it watches")
    }

    /// Updates which nodes are alive from their heartbeats; `often`: also when none has arrived since.
    pub(super) fn apply_liveness(&mut self, often: bool) {
        let now = Instant::now();
        let hears_itself = self.nodes.contains(&self.own) && self.unfit(now).is_none();
        if !hears_itself || !self.unchecked && !often {
            return;
        }
        self.unchecked = false;
        let ready = self.liveness.ready(self.nodes.iter(), &self.own, now, Timestamp::now().0);
        for (known, ready) in self.nodes.iter().zip(ready) {
            let alive = ready || !is_complete(known.node);
            if let Some(entry) = self.entries.get_mut(&known.name).filter(|entry| entry.alive != alive) {
                entry.alive = alive;
                self.dirty = true;
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use crate::backend::kubernetes::partial_node::PartialNode;

    fn node(name: &str, last_seen: i64) -> watcher::Event<PartialNode> {
        let object = serde_json::json!({"metadata": {"name": name, "annotations": {
            "kilo.squat.ai/last-seen": last_seen.to_string(), "kilo.squat.ai/heartbeat": format!("{last_seen}/30")}}});
        watcher::Event::Apply(serde_json::from_value(object).unwrap())
    }

    #[test]
    fn a_writer_that_does_not_hear_itself_declares_nobody_dead() {
        let mut mirror = Mirror::begin(std::iter::empty(), "a", "l");
        let later = |seconds| Instant::now() + Duration::from_secs(seconds);
        mirror.take(node("b", 1000), "l");
        assert_eq!(mirror.unfit(later(0)), None, "not listed yet");
        mirror.apply_liveness(true);
        assert!(mirror.unchecked, "without the own Node it decides about nobody");
        mirror.listed = true;
        assert_eq!(mirror.unfit(later(0)), Some("the own Node is not there"));
        mirror.take(node("a", 1000), "l");
        assert_eq!(mirror.unfit(later(80)), None);
        assert_eq!(mirror.unfit(later(95)), Some("this node's heartbeat does not appear in what it watches"));
        mirror.apply_liveness(true);
        assert!(!mirror.unchecked);
    }
}

//! All Nodes as the writer sees them, and which of them are alive.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use kilo_core::{
    objects::{CheckedIn, CheckedInRef, Nodes, slices::Entry},
    topology::{Liveness, heartbeats::OFTEN, is_complete, ready_seconds},
};
use kube::{Resource as _, runtime::watcher};

use super::{PartialNode, entry_of};
use crate::{backend::mass_delete_guard::MassDeleteGuard, timestamp::Timestamp};

/// A writer whose own heartbeat has been missing for this many intervals does not see what happens.
const MISSED: u16 = 3;
/// A node whose last heartbeat is older, in seconds, may have died while nobody wrote slices: two of the longest
/// intervals that count.
const OLD: i64 = 20 * 60;

#[derive(Default)]
pub(super) struct Mirror {
    own: String,
    /// This node's heartbeat, and when it arrived, or when this mirror was created.
    beat: (i64, Option<Instant>),
    pub entries: BTreeMap<String, Entry>,
    nodes: Nodes,
    liveness: Liveness,
    /// What slices said when this agent took the Lease, until liveness begins with it.
    recorded: Option<Recorded>,
    listing: Option<Vec<PartialNode>>,
    guard: MassDeleteGuard,
    /// All Nodes have been listed once.
    pub listed: bool,
    /// Something other than heartbeats has changed.
    pub dirty: bool,
    /// Heartbeats have arrived, or may have ceased, since liveness was last applied.
    unchecked: bool,
}

/// The nodes as slices described them, alive or dead.
struct Recorded {
    nodes: Nodes,
    /// When somebody wrote slices last, in Unix seconds.
    renewed: i64,
}

impl Recorded {
    /// What still counts. A node that was alive when somebody wrote slices last, and was heard then but not for
    /// long, has died since: it is for its heartbeats to say whether it lives, as for an agent that starts. One
    /// whose heartbeat was older already has a clock that is behind.
    fn still(self, nodes: &Nodes, unix_now: i64) -> Nodes {
        let has_died = |known: &CheckedInRef<'_>| {
            nodes.get(&known.name).is_some_and(|now| {
                let heard = now.last_seen.saturating_add(ready_seconds(now.node));
                now.last_seen < unix_now.saturating_sub(OLD) && heard >= self.renewed
            })
        };
        let still = self.nodes.iter().filter(|known| !has_died(known));
        still.map(|known| CheckedIn { node: (**known.node).clone(), last_seen: known.last_seen }).collect()
    }
}

impl Mirror {
    /// Starts from the liveness that slices recorded when they were `renewed` last: this agent may have seen no
    /// heartbeat yet.
    pub(super) fn begin<'a>(
        known: impl Iterator<Item = &'a Entry>,
        renewed: i64,
        own: &str,
        label: &str,
    ) -> Self {
        let beat = (0, Some(Instant::now()));
        let mut mirror = Self { own: own.to_owned(), beat, ..Self::default() };
        let nodes: Nodes = known.filter_map(|entry| super::see_entry(entry, label).value).collect();
        mirror.guard.list(&nodes.names().map(ToOwned::to_owned).collect());
        mirror.recorded = Some(Recorded { nodes, renewed });
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
        // Liveness may take it for alive again, for which others wait.
        let is_heard = self.nodes.get(&entry.name).is_none_or(|known| known.last_seen != last_seen);
        self.dirty |= !entry.alive && is_heard;
        if entry.name == self.own && last_seen != self.beat.0 {
            self.beat = (last_seen, Some(Instant::now()));
        }
        self.dirty |= before.is_none_or(|before| !before.has_same_content(&entry));
        self.nodes.insert(CheckedIn { node, last_seen });
        self.entries.insert(entry.name.clone(), entry);
    }

    fn remove(&mut self, name: &str) {
        self.dirty |= self.entries.remove(name).is_some();
        self.nodes.remove(name);
    }

    /// Why this agent must not declare others dead, if so: silence proves nothing to an agent that does not
    /// hear itself.
    pub(super) fn unfit(&self, now: Instant) -> Option<&'static str> {
        let Some(own) = self.nodes.get(&self.own) else {
            return self.listed.then_some("the own Node is not there");
        };
        let often = Duration::from_secs(own.heartbeat.unwrap_or(OFTEN).max(OFTEN).into());
        let is_heard =
            self.beat.1.is_some_and(|beat| now.saturating_duration_since(beat) < often * MISSED.into());
        (!is_heard).then_some("the API server has not sent this node's heartbeat back")
    }

    /// Updates which nodes are alive from their heartbeats, which costs as much as there are nodes; `often`:
    /// also when none has arrived since.
    pub(super) fn apply_liveness(&mut self, often: bool) {
        let now = Instant::now();
        let hears_itself = self.nodes.contains(&self.own) && self.unfit(now).is_none();
        if !hears_itself || !self.unchecked && !often {
            return;
        }
        self.unchecked = false;
        let unix_now = Timestamp::now().0;
        if let Some(recorded) = self.recorded.take() {
            self.liveness.ready(recorded.still(&self.nodes, unix_now).iter(), &self.own, now, unix_now);
        }
        let ready = self.liveness.ready(self.nodes.iter(), &self.own, now, unix_now);
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
    use kilo_core::wireguard::PublicKey;

    use super::*;
    use crate::backend::kubernetes::partial_node::PartialNode;

    fn node(name: &str, last_seen: i64) -> watcher::Event<PartialNode> {
        watcher::Event::Apply(object(name, last_seen))
    }

    fn object(name: &str, last_seen: i64) -> PartialNode {
        let object = serde_json::json!({
            "metadata": {"name": name, "annotations": {
                "kilo.squat.ai/key": PublicKey([1; 32]).to_string(), "kilo.squat.ai/endpoint": "192.0.2.1:51820",
                "kilo.squat.ai/last-seen": last_seen.to_string(), "kilo.squat.ai/heartbeat": format!("{last_seen}/300"),
            }},
            "spec": {"podCIDR": "10.42.0.0/24"},
        });
        serde_json::from_value(object).unwrap()
    }

    #[test]
    fn a_writer_that_does_not_hear_itself_declares_nobody_dead() {
        let mut mirror = Mirror::begin(std::iter::empty(), 0, "a", "l");
        let later = |seconds| Instant::now() + Duration::from_secs(seconds);
        mirror.take(node("b", 1000), "l");
        assert_eq!(mirror.unfit(later(0)), None, "not listed yet");
        mirror.apply_liveness(true);
        assert!(mirror.unchecked, "without the own Node it decides about nobody");
        mirror.listed = true;
        assert_eq!(mirror.unfit(later(0)), Some("the own Node is not there"));
        mirror.take(node("a", 1000), "l");
        assert_eq!(mirror.unfit(later(880)), None);
        assert_eq!(mirror.unfit(later(905)), Some("the API server has not sent this node's heartbeat back"));
        mirror.apply_liveness(true);
        assert!(!mirror.unchecked);
    }

    /// Whether each node lives by a writer that finds these nodes, all alive, in slices renewed that many
    /// seconds ago; the numbers are the ages of their heartbeats then and now.
    fn alive(renewed: i64, nodes: &[(&str, i64, i64)]) -> Vec<bool> {
        let now = Timestamp::now().0;
        let known: Vec<Entry> =
            nodes.iter().map(|(name, then, _)| entry_of(object(name, now - then), "l").0).collect();
        let mut mirror = Mirror::begin(known.iter(), now - renewed, "a", "l");
        mirror.take(watcher::Event::Init, "l");
        for (name, _, age) in nodes {
            mirror.take(watcher::Event::InitApply(object(name, now - age)), "l");
        }
        mirror.take(watcher::Event::InitDone, "l");
        mirror.apply_liveness(true);
        mirror.entries.values().map(|entry| entry.alive).collect()
    }

    #[test]
    fn a_node_that_died_while_nobody_wrote_slices_is_dead_for_the_next_writer() {
        let long_ago = [("a", 4000, 10), ("b", 4000, 20), ("died", 9000, 3000), ("rests", 4000, 290)];
        assert_eq!(alive(3600, &long_ago), [true, true, false, true]);
        // Its clock is an hour behind, and it lived when slices were written last.
        let behind = [("a", 100, 10), ("b", 100, 20), ("behind", 4000, 3700)];
        assert_eq!(alive(30, &behind), [true; 3], "a writer follows another");
        // Most are old: it is the API server, or this agent's clock.
        let all = [("a", 9000, 3000), ("b", 9000, 3000), ("c", 9000, 10)];
        assert_eq!(alive(3600, &all), [true; 3]);
    }

    #[test]
    fn a_heartbeat_makes_work_only_when_it_may_bring_a_node_back() {
        let mut mirror = Mirror::begin(std::iter::empty(), 0, "a", "l");
        for name in ["a", "b"] {
            mirror.take(node(name, 1000), "l");
        }
        mirror.entries.get_mut("b").unwrap().alive = false;
        mirror.dirty = false;
        mirror.take(node("a", 1030), "l");
        mirror.take(node("b", 1000), "l");
        assert!(!mirror.dirty);
        mirror.take(node("b", 1030), "l");
        assert!(mirror.dirty);
    }
}

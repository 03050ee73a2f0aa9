//! All Nodes as the writer sees them, and which of them live.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

use kilo_core::{
    objects::{CheckedIn, Nodes, slices::Entry},
    topology::{Liveness, is_complete},
};
use kube::{Resource as _, runtime::watcher};

use super::{PartialNode, entry_of};
use crate::{backend::mass_delete_guard::MassDeleteGuard, status::Timestamp};

#[derive(Default)]
pub(super) struct Mirror {
    pub entries: BTreeMap<String, Entry>,
    nodes: Nodes,
    liveness: Liveness,
    listing: Option<Vec<PartialNode>>,
    guard: MassDeleteGuard,
    /// All have been listed once.
    pub listed: bool,
    /// Something else than heartbeats has changed.
    pub dirty: bool,
    /// Heartbeats have come, or may have ended.
    unjudged: bool,
}

impl Mirror {
    /// Begins with what slices said of who lives: this agent may have seen no heartbeat yet.
    pub(super) fn begin<'a>(known: impl Iterator<Item = &'a Entry>, own: &str, label: &str) -> Self {
        let mut mirror = Self::default();
        let nodes: Nodes = known.filter_map(|entry| super::see_entry(entry, label).value).collect();
        mirror.guard.list(&nodes.names().map(ToOwned::to_owned).collect());
        mirror.liveness.ready(nodes.iter(), own, Instant::now(), Timestamp::now().0);
        mirror
    }

    /// Takes an event; `true`: a list misses many nodes, and is to be confirmed.
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
        self.unjudged = true;
        self.dirty |= before.is_none_or(|before| !before.says_the_same(&entry));
        self.nodes.insert(CheckedIn { node, last_seen });
        self.entries.insert(entry.name.clone(), entry);
    }

    fn remove(&mut self, name: &str) {
        self.dirty |= self.entries.remove(name).is_some();
        self.nodes.remove(name);
    }

    /// Who lives now, by heartbeats; `often`: also when none has come since.
    pub(super) fn judge(&mut self, own: &str, often: bool) {
        if !self.unjudged && !often {
            return;
        }
        self.unjudged = false;
        let ready = self.liveness.ready(self.nodes.iter(), own, Instant::now(), Timestamp::now().0);
        for (known, ready) in self.nodes.iter().zip(ready) {
            let alive = ready || !is_complete(known.node);
            if let Some(entry) = self.entries.get_mut(&known.name).filter(|entry| entry.alive != alive) {
                entry.alive = alive;
                self.dirty = true;
            }
        }
    }
}

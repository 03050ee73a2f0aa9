//! Follows slices: lists all of them once, then watches for changes.

use std::{
    collections::{BTreeMap, BTreeSet},
    pin::pin,
    sync::Arc,
    time::Instant,
};

use futures::StreamExt as _;
use kilo_core::objects::slices::{ENTRY_BYTES, Entry, INDEX, NodeSliceSpec, Renewals, SliceSet};
use kube::{api::DynamicObject, runtime::watcher};

use super::{Cache, Context, with_pauses};
use crate::timestamp::Timestamp;

/// Slices per page: a page is about a megabyte.
const PAGE: u32 = 100;

/// The known slices and their objects.
#[derive(Default)]
pub(super) struct Seen {
    pub set: SliceSet,
    /// `resourceVersion` of each existing object.
    pub versions: BTreeMap<String, String>,
    /// The version at which an object was last deleted.
    pub deleted: BTreeMap<String, u64>,
    /// When the index changed.
    pub renewals: Renewals,
    /// Complete lists so far.
    pub lists: u64,
    /// Summary of all entries, and the [`SliceSet::changes`] it was made at.
    said: Option<(u64, Said)>,
}

/// Summary of all entries.
pub(super) struct Said {
    /// Whether a live node has a heartbeat without a promise, as Kilo's own agent writes it.
    pub foreign: bool,
    /// Names of dead nodes.
    pub dead: BTreeSet<String>,
    /// This node's entry.
    pub own: Option<Arc<Entry>>,
}

impl Said {
    fn of(set: &SliceSet, hostname: &str) -> Self {
        let (nodes, _) = set.nodes();
        // A dead node does not wait for heartbeats.
        let foreign = nodes.values().any(|entry| {
            entry.alive
                && entry.last_seen != 0
                && entry.heartbeat.is_none()
                && entry.annotations.get("key").is_some()
                && entry.name != hostname
        });
        let dead = nodes.values().filter(|entry| !entry.alive).map(|entry| entry.name.clone()).collect();
        Self { foreign, dead, own: nodes.get(hostname).map(|own| Arc::clone(own)) }
    }
}

impl Seen {
    /// The current summary of all entries.
    pub(super) fn said(&mut self, hostname: &str) -> &Said {
        let changes = self.set.changes();
        self.said.take_if(|(at, _)| *at != changes);
        &self.said.get_or_insert_with(|| (changes, Said::of(&self.set, hostname))).1
    }

    /// Records an object's version, and the index's renewal by the writer.
    fn note(&mut self, Translated { name, version, spec }: Translated) -> (String, Option<NodeSliceSpec>) {
        self.deleted.remove(&name);
        if let Some(index) = spec.as_ref().and_then(|spec| spec.index.as_ref()).filter(|_| name == INDEX) {
            self.renewals.see(&version, index.renewed, Instant::now(), Timestamp::now().0);
        }
        self.versions.insert(name.clone(), version);
        (name, spec)
    }

    fn list(&mut self, list: Vec<Translated>) {
        self.versions.clear();
        self.deleted.clear();
        let list = list.into_iter().map(|slice| self.note(slice)).collect();
        self.set.replace(list);
        self.lists += 1;
    }

    fn put(&mut self, slice: Translated) {
        let (name, spec) = self.note(slice);
        self.set.put(&name, spec);
    }

    fn delete(&mut self, object: &DynamicObject) {
        let name = name(object);
        self.versions.remove(&name);
        let version = object.metadata.resource_version.as_deref().and_then(|version| version.parse().ok());
        self.deleted.insert(name.clone(), version.unwrap_or(u64::MAX));
        self.set.delete(&name);
    }
}

fn name(object: &DynamicObject) -> String {
    object.metadata.name.clone().unwrap_or_default()
}

/// A parsed slice. The object, a tree of JSON values, is several times as large.
struct Translated {
    name: String,
    version: String,
    /// `None` when it cannot be parsed.
    spec: Option<NodeSliceSpec>,
}

impl From<DynamicObject> for Translated {
    fn from(object: DynamicObject) -> Self {
        let (metadata, mut data) = (object.metadata, object.data);
        let spec = data.get_mut("spec").and_then(|spec| serde_json::from_value(spec.take()).ok());
        Self {
            name: metadata.name.unwrap_or_default(),
            version: metadata.resource_version.unwrap_or_default(),
            spec,
        }
    }
}

impl Context {
    /// Returns once slices have been listed.
    pub(super) async fn listed(&self) {
        while self.seen().lists == 0 {
            self.chooses.notified().await;
        }
    }
}

/// Runs until the right to read slices is gone.
pub(super) async fn run(context: Arc<Context>) {
    let config = watcher::Config::default().page_size(PAGE);
    let bytes = |cache: &mut Cache| cache.nodes.values().names().map(|_| ENTRY_BYTES).sum();
    let mut stream = pin!(with_pauses(watcher(context.slices(), config), &context.shared, bytes));
    let mut listed = Vec::new();
    while let Some(event) = stream.next().await {
        match event {
            Ok(watcher::Event::Init) => listed.clear(),
            Ok(watcher::Event::InitApply(object)) => listed.push(Translated::from(object)),
            Ok(watcher::Event::InitDone) => context.seen().list(std::mem::take(&mut listed)),
            Ok(watcher::Event::Apply(object)) => context.seen().put(object.into()),
            Ok(watcher::Event::Delete(object)) => context.seen().delete(&object),
            Err(error) => {
                if is_refused(&error) {
                    *context.seen() = Seen::default();
                    context.slices_changed();
                    return;
                }
                tracing::debug!(%error, "watch of slices interrupted; retrying");
                continue;
            }
        }
        context.slices_changed();
    }
}

fn is_refused(error: &watcher::Error) -> bool {
    let code = match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status))
        | watcher::Error::WatchFailed(kube::Error::Api(status)) => status.code,
        watcher::Error::WatchError(status) => status.code,
        _ => return false,
    };
    matches!(code, 403 | 404)
}

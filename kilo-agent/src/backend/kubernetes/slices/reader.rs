//! Follows slices where that is allowed: lists all of them once, then watches for changes.

use std::{
    collections::{BTreeMap, BTreeSet},
    pin::pin,
    sync::Arc,
    time::{Duration, Instant},
};

use futures::StreamExt as _;
use kilo_core::objects::slices::{ENTRY_BYTES, Entry, INDEX, NodeSliceSpec, Renewals, SliceSet};
use kube::{
    api::{DynamicObject, ListParams},
    runtime::watcher,
};

use super::{
    Cache, Context, GRANT,
    client::ANSWER,
    deleted::Deleted,
    pauses::{pause_after, with_pauses},
};
use crate::timestamp::Timestamp;

/// Slices per page: a page is about a megabyte.
const PAGE: u32 = 100;

/// How often a missing right is tested again, give or take a fifth: it may be granted later.
const AGAIN: Duration = Duration::from_mins(10);
/// Slices in use that are refused are denied only after this time: an API server that has just started refuses
/// what it allows a moment later.
const REFUSED: Duration = Duration::from_secs(30);

/// Whether this account may read slices, and the API server knows them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Access {
    /// The API server has not said yet.
    #[default]
    Unknown,
    Granted,
    Denied,
}

/// The known slices and their objects.
#[derive(Default)]
pub(super) struct Seen {
    pub access: Access,
    pub set: SliceSet,
    /// `resourceVersion` of each existing object.
    pub versions: BTreeMap<String, String>,
    /// The version at which an object was last deleted.
    pub deleted: Deleted,
    /// When the index changed.
    pub renewals: Renewals,
    /// Complete lists so far.
    pub lists: u64,
    /// How often the API server had answered when it was found not to answer; `None`: it answers.
    pub lost: Option<u64>,
    /// Summary of all entries, and the [`SliceSet::changes`] it was made at.
    summary: Option<(u64, Summary)>,
}

/// Summary of all entries.
pub(super) struct Summary {
    /// Whether a live node has a heartbeat without a promise, as Kilo's own agent writes it.
    pub foreign: bool,
    /// Names of dead nodes.
    pub dead: BTreeSet<String>,
    /// This node's entry.
    pub own: Option<Arc<Entry>>,
    /// Slices that are missing or cannot be read.
    pub bad: usize,
    /// Entries of nodes that another entry describes, too.
    pub twice: usize,
}

impl Summary {
    fn of(set: &SliceSet, hostname: &str) -> Self {
        let (nodes, twice) = set.nodes();
        // A dead node does not wait for heartbeats.
        let foreign = nodes.values().any(|entry| {
            entry.alive
                && entry.last_seen != 0
                && entry.heartbeat.is_none()
                && entry.annotations.get("key").is_some()
                && entry.name != hostname
        });
        let dead = nodes.values().filter(|entry| !entry.alive).map(|entry| entry.name.clone()).collect();
        let own = nodes.get(hostname).map(|own| Arc::clone(own));
        Self { foreign, dead, own, bad: set.bad(), twice }
    }
}

impl Seen {
    /// The current summary of all entries.
    pub(super) fn summary(&mut self, hostname: &str) -> &Summary {
        let changes = self.set.changes();
        self.summary.take_if(|(at, _)| *at != changes);
        &self.summary.get_or_insert_with(|| (changes, Summary::of(&self.set, hostname))).1
    }

    /// Records that the API server, which had answered this often, does not answer.
    pub(super) fn lose(&mut self, answers: u64, now: Instant) {
        if !self.is_away(answers, now) {
            self.lost = Some(answers);
            self.renewals.lose(now);
        }
    }

    /// Whether the API server, which has answered this often, has not since it was found not to.
    pub(super) fn is_away(&mut self, answers: u64, now: Instant) -> bool {
        if self.lost.is_some_and(|lost| lost != answers) {
            self.lost = None;
            self.renewals.find(now);
        }
        self.lost.is_some()
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
    /// Whether this account may not read slices; `Err`: unknown.
    async fn is_denied(&self) -> Result<bool, ()> {
        let one = ListParams::default().limit(1);
        match tokio::time::timeout(ANSWER, self.slices().list(&one)).await {
            Ok(Ok(_)) => Ok(false),
            Ok(Err(kube::Error::Api(status))) if matches!(status.code, 401 | 403 | 404) => {
                tracing::debug!(reason = status.message, "slices cannot be read");
                Ok(true)
            }
            Ok(Err(_)) | Err(_) => Err(()),
        }
    }

    /// Whether slices that were refused are refused for good.
    async fn stays_denied(&self) -> bool {
        let began = Instant::now();
        let mut failures = 0;
        loop {
            tokio::time::sleep(self.pause(failures)).await;
            if self.is_denied().await != Ok(true) {
                return false;
            }
            if began.elapsed() >= REFUSED {
                return true;
            }
            failures += 1;
        }
    }

    /// The pause after a failure that followed this many others.
    pub(super) fn pause(&self, failures: u32) -> Duration {
        pause_after(failures, self.shared.size(), rand::random_range(0.0..1.0))
    }

    fn grant(&self) {
        self.seen().access = Access::Granted;
        self.slices_changed();
    }

    fn deny(&self) {
        let denied = Seen { access: Access::Denied, ..Seen::default() };
        if std::mem::replace(&mut *self.seen(), denied).access != Access::Denied {
            tracing::info!(
                "slices are not in use: this account may not read NodeSlices, or the API server does not know \
                 them; apply manifests/crds.yaml, and {GRANT}"
            );
        }
        self.slices_changed();
    }
}

/// Reads slices whenever this account may; runs forever.
pub(super) async fn run(context: Arc<Context>) {
    let mut failures = 0;
    loop {
        match context.is_denied().await {
            Ok(false) => {
                context.grant();
                follow(&context).await;
            }
            Ok(true) => {}
            Err(()) => {
                tokio::time::sleep(context.pause(failures)).await;
                failures += 1;
                continue;
            }
        }
        failures = 0;
        context.deny();
        // Tested seldom: nothing depends on it.
        tokio::time::sleep(AGAIN.mul_f64(rand::random_range(0.8..1.2))).await;
    }
}

/// Runs until the right to read slices is gone.
async fn follow(context: &Context) {
    let config = watcher::Config::default().page_size(PAGE);
    let bytes = |cache: &mut Cache| cache.nodes.values().names().map(|_| ENTRY_BYTES).sum();
    let watch = || watcher(context.slices(), config.clone());
    let mut stream = pin!(with_pauses(watch, &context.shared, bytes));
    let mut listed = Vec::new();
    while let Some(event) = stream.next().await {
        match event {
            Ok(watcher::Event::Init) => listed.clear(),
            Ok(watcher::Event::InitApply(object)) => listed.push(Translated::from(object)),
            Ok(watcher::Event::InitDone) => context.seen().list(std::mem::take(&mut listed)),
            Ok(watcher::Event::Apply(object)) => context.seen().put(object.into()),
            Ok(watcher::Event::Delete(object)) => context.seen().delete(&object),
            Err(error) => {
                tracing::debug!(%error, "watch of slices interrupted; retrying");
                if is_unanswered(&error) {
                    context.lose();
                }
                // What is known stays in use until it is certain.
                if is_refused(&error) && context.stays_denied().await {
                    return;
                }
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

/// Whether a request had no answer. A watch that has ended says nothing: the next one may begin at once.
fn is_unanswered(error: &watcher::Error) -> bool {
    use kube::Error::{Api, SerdeError};
    use watcher::Error::{InitialListFailed, WatchStartFailed};
    matches!(error, InitialListFailed(error) | WatchStartFailed(error) if !matches!(error, Api(_) | SerdeError(_)))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use crate::backend::kubernetes::test_server::{self, Answer};

    /// A context whose slices can be listed but not watched, and the number of answers.
    fn listed_only() -> (Arc<Context>, tokio::sync::watch::Sender<u64>) {
        let renewed = Timestamp::now().0;
        let client = test_server::client(move |asked| {
            if asked.watches() {
                return Answer::Broken;
            }
            let index =
                serde_json::json!({ "slices": [], "topologyLabel": "l", "writer": "a", "renewed": renewed });
            let slice = serde_json::json!({
                "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "NodeSlice",
                "metadata": { "name": INDEX, "resourceVersion": "7" }, "spec": { "index": index },
            });
            let list = serde_json::json!({ "metadata": { "resourceVersion": "7" }, "items": [slice] });
            Answer::Object(200, list)
        });
        let (shared, answered) = test_server::shared("a");
        let namespace = "kube-system".to_owned();
        (Context::new((client, namespace), "a", "l", shared, Arc::default()), answered)
    }

    #[tokio::test]
    async fn an_api_server_that_does_not_answer_is_noticed_and_its_writer_gets_time_when_it_does() {
        let (context, answered) = listed_only();
        let following = Arc::clone(&context);
        let following = tokio::spawn(async move { follow(&following).await });
        let lost = async {
            while context.seen().lost.is_none() {
                context.chooses.notified().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), lost).await.unwrap();
        assert_eq!(context.seen().lists, 1);
        assert!(context.is_away());
        let later = |seconds| Instant::now() + Duration::from_secs(seconds);
        assert!(context.seen().renewals.go_on(later(3600)), "nobody can renew the index");
        following.abort();
        assert!(following.await.unwrap_err().is_cancelled());
        answered.send_modify(|count| *count += 1);
        tokio::time::timeout(Duration::from_secs(10), context.answered()).await.unwrap();
        assert!(!context.is_away());
        let seen = context.seen();
        assert!(seen.renewals.go_on(later(140)) && !seen.renewals.go_on(later(160)));
    }
}

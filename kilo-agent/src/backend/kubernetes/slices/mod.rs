//! Reads nodes from slices where possible, otherwise from Node objects: carries out what
//! [`kilo_core::objects::slices`] decides.

mod lease;
mod mirror;
mod reader;
mod report;
mod store;
mod writer;

use std::{
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use futures::StreamExt as _;
use k8s_openapi::api::core::v1 as core;
use kilo_core::{
    objects::{
        CheckedIn, node,
        slices::{Chosen, Entry, Inputs, NodeSlice, Reason, Source},
    },
    topology::heartbeats,
};
use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject, ListParams},
    runtime::watcher,
};
use tokio::sync::Notify;
use tokio_util::task::AbortOnDropHandle;

pub(super) use self::report::Report;
use self::{reader::Seen, store::Shown};
use super::{
    Asked, PartialNode, Shared,
    cache::{Cache, Seen as SeenNode},
    client::in_time,
    follow,
    pauses::with_pauses,
};

/// How often a missing right is tested again, give or take a fifth: it may be granted later.
const AGAIN: Duration = Duration::from_mins(10);
/// Nodes are read if slices have not been listed within this time.
const LISTED: Duration = Duration::from_secs(10);
/// How often conditions without an event are checked.
const LOOK: Duration = Duration::from_secs(5);

/// State shared by reader, writer and source selection.
pub(super) struct Context {
    pub client: Client,
    pub hostname: String,
    pub label: String,
    /// The namespace of the Lease.
    pub namespace: String,
    pub shared: Arc<Shared>,
    pub report: Arc<Report>,
    seen: Mutex<Seen>,
    /// Signalled when slices change: for the source selection and for the writer.
    chooses: Notify,
    writes: Notify,
}

impl Context {
    pub(super) fn new(
        (client, namespace): (Client, String),
        hostname: &str,
        label: &str,
        shared: Arc<Shared>,
        report: Arc<Report>,
    ) -> Arc<Self> {
        Arc::new(Self {
            client,
            hostname: hostname.to_owned(),
            label: label.to_owned(),
            namespace,
            shared,
            report,
            seen: Mutex::default(),
            chooses: Notify::new(),
            writes: Notify::new(),
        })
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn slices(&self) -> Api<DynamicObject> {
        Api::all_with(self.client.clone(), &ApiResource::erase::<NodeSlice>(&()))
    }

    fn nodes(&self) -> Api<PartialNode> {
        Api::all_with(self.client.clone(), &ApiResource::erase::<core::Node>(&()))
    }

    /// Signals that slices have changed.
    fn slices_changed(&self) {
        self.chooses.notify_one();
        self.writes.notify_one();
    }

    /// Whether this account may not read slices; `Err`: unknown.
    async fn is_denied(&self) -> Result<bool, ()> {
        let one = ListParams::default().limit(1);
        match tokio::time::timeout(LISTED, self.slices().list(&one)).await {
            Ok(Ok(_)) => Ok(false),
            Ok(Err(kube::Error::Api(status))) if matches!(status.code, 401 | 403 | 404) => {
                tracing::debug!(reason = status.message, "slices cannot be read");
                Ok(true)
            }
            Ok(Err(_)) | Err(_) => Err(()),
        }
    }

    /// Why slices must not be read at the moment, if so.
    fn against(&self) -> Option<Reason> {
        let cache = self.shared.cache();
        let mut seen = self.seen();
        if let Err(incomplete) = seen.set.complete(&self.label) {
            return Some(Reason::Incomplete(incomplete));
        }
        if !seen.renewals.go_on(Instant::now()) {
            return Some(Reason::NoWriter);
        }
        let said = seen.said(&self.hostname);
        let known = cache.nodes.values();
        let counts = |name: &str| name != self.hostname && !said.dead.contains(name);
        if said.foreign || known.iter().any(|known| heartbeats::is_foreign(known) && counts(&known.name)) {
            return Some(Reason::Foreign);
        }
        // Before this node is known, there is nothing to compare with.
        let own = known.get(&self.hostname)?;
        // An agent whose own slice entry says that it is dead is alive: others leave it out because of a
        // forgery or a faulty writer.
        let entry = said.own.as_ref().filter(|entry| entry.alive);
        let says = entry.map(|entry| node::from_object(&entry.to_object(&self.label), &self.label).0.node);
        (says.as_ref() != Some(&**own.node)).then_some(Reason::Late)
    }
}

/// Chooses the source of nodes, forever, and reads them from there.
pub(super) async fn run(context: Arc<Context>) {
    let mut is_logged = false;
    let mut source = Source::default();
    let mut reading = Reading::Nothing;
    loop {
        let denied = context.is_denied().await;
        if denied == Ok(false) {
            is_logged = false;
            let reader = AbortOnDropHandle::new(tokio::spawn(reader::run(Arc::clone(&context))));
            let _writer = AbortOnDropHandle::new(tokio::spawn(writer::run(Arc::clone(&context))));
            let _ = tokio::time::timeout(LISTED, context.listed()).await;
            while !reader.is_finished() {
                step(&context, &mut source, &mut reading, None, Instant::now() + LOOK).await;
            }
        }
        if denied.is_ok() && !std::mem::replace(&mut is_logged, true) {
            tracing::info!(
                "slices are not in use: this account may not read NodeSlices, or the API server does not know \
                 them; apply manifests/crds.yaml and manifests/slices.yaml"
            );
        }
        // Tested seldom: nothing depends on it.
        let pause = if denied.is_ok() { AGAIN.mul_f64(rand::random_range(0.8..1.2)) } else { LOOK };
        let until = Instant::now() + pause;
        while Instant::now() < until {
            step(&context, &mut source, &mut reading, Some(Reason::Denied), until).await;
        }
    }
}

/// The current source; dropping it ends the reading.
enum Reading {
    Nothing,
    Nodes { task: AbortOnDropHandle<()> },
    Slices { own: AbortOnDropHandle<()>, shown: Shown },
}

impl Reading {
    /// Returns once the task has ended: an aborted task ends at its next await point, and may write until
    /// then.
    async fn end(&mut self) {
        let task = match std::mem::replace(self, Self::Nothing) {
            Self::Nothing => return,
            Self::Nodes { task } => task,
            Self::Slices { own, .. } => own,
        };
        task.abort();
        // It was aborted, or had ended before.
        let _ = task.await;
    }
}

/// Reads from the best source; returns when that may have changed, or at `until`.
async fn step(
    context: &Arc<Context>,
    source: &mut Source,
    reading: &mut Reading,
    denied: Option<Reason>,
    until: Instant,
) {
    let against = denied.or_else(|| context.against());
    let nodes = context.shared.cache().nodes.values().len();
    let inputs = Inputs { against, nodes, now: Instant::now(), random: rand::random_range(0.0..1.0) };
    let (chosen, due) = source.next(inputs);
    turn(context, reading, chosen, against).await;
    context.report.choose(matches!(reading, Reading::Slices { .. }), against);
    let look = match reading {
        Reading::Slices { shown, .. } => shown.follow(context),
        Reading::Nothing | Reading::Nodes { .. } => None,
    };
    let wake = [due, look].into_iter().flatten().fold(until, Instant::min);
    tokio::select! {
        () = context.chooses.notified() => {}
        () = tokio::time::sleep_until(wake.into()) => {}
    }
}

/// Switches to the chosen source.
async fn turn(context: &Arc<Context>, reading: &mut Reading, chosen: Chosen, against: Option<Reason>) {
    match (chosen, &reading) {
        (Chosen::Nodes, Reading::Nodes { .. }) | (Chosen::Slices, Reading::Slices { .. }) => {}
        (Chosen::Nodes, _) => {
            if let (Reading::Slices { .. }, Some(reason)) = (&reading, against) {
                tracing::info!(%reason, "reading Nodes instead of slices");
            }
            // The nodes from slices stay until Nodes have been listed.
            reading.end().await;
            *reading = Reading::Nodes { task: spawn_nodes(context) };
        }
        (Chosen::Slices, _) => {
            let one = ListParams::default().fields(&format!("metadata.name={}", context.hostname));
            let Ok(own) = in_time(context.nodes().list(&one), Asked::Nodes).await else { return };
            let own = own.items.into_iter().next().map(|own| context.shared.see_node(own, &context.label));
            reading.end().await;
            let shown = Shown::replace(context, own);
            tracing::info!(nodes = shown.len(), "reading slices instead of Nodes");
            let own = tokio::spawn(follow_own(Arc::clone(context)));
            *reading = Reading::Slices { own: AbortOnDropHandle::new(own), shown };
        }
    }
}

fn spawn_nodes(context: &Arc<Context>) -> AbortOnDropHandle<()> {
    let own = Arc::clone(context);
    let see = move |object| own.shared.see_node(object, &own.label);
    let shared = Arc::clone(&context.shared);
    let follow = follow(context.nodes(), Asked::Nodes, shared, see, |cache: &mut Cache| &mut cache.nodes);
    AbortOnDropHandle::new(tokio::spawn(follow))
}

/// Follows this node's own object, at once and whole: its annotations configure this agent.
async fn follow_own(context: Arc<Context>) {
    let one = watcher::Config::default().fields(&format!("metadata.name={}", context.hostname));
    let mut stream = pin!(with_pauses(watcher(context.nodes(), one), &context.shared, |_| 0.0));
    let mut listed = None;
    let put = |own: SeenNode<CheckedIn>| {
        context.shared.change(|cache| cache.nodes.put(own));
        context.chooses.notify_one();
    };
    let remove = || context.shared.change(|cache| cache.nodes.remove(&context.hostname));
    while let Some(event) = stream.next().await {
        match event {
            Ok(watcher::Event::Init) => listed = None,
            Ok(watcher::Event::InitApply(own)) => {
                listed = Some(context.shared.see_node(own, &context.label));
            }
            Ok(watcher::Event::InitDone) => listed.take().map_or_else(remove, put),
            Ok(watcher::Event::Apply(own)) => put(context.shared.see_node(own, &context.label)),
            Ok(watcher::Event::Delete(_)) => remove(),
            Err(error) => super::report(error, Asked::Nodes),
        }
    }
}

/// A node as a slice describes it, alive or not as the writer sees it.
fn see_entry(entry: &Entry, label: &str) -> SeenNode<CheckedIn> {
    let (mut seen, problems) = node::from_object(&entry.to_object(label), label);
    seen.node.declared_alive = Some(entry.alive);
    let problem = (!problems.is_empty()).then(|| problems.join("; "));
    SeenNode { name: entry.name.clone(), value: Some(seen), problem }
}

/// A slice's entry for a whole Node, and what is read of it.
fn entry_of(object: PartialNode, label: &str) -> (Entry, CheckedIn) {
    let object = core::Node::from(object);
    let (read, _) = node::from_object(&object, label);
    let entry = Entry::new(&object, &read, label, true);
    (entry, read)
}

//! Reads nodes from slices where possible, otherwise from Node objects: carries out what
//! [`kilo_core::objects::slices`] decides.

mod deleted;
mod lease;
mod mirror;
mod order;
mod reader;
mod report;
mod store;
mod write;
mod writer;

use std::{
    pin::pin,
    sync::Arc,
    time::{Duration, Instant},
};

use futures::StreamExt as _;
use k8s_openapi::api::core::v1 as core;
use kilo_core::{
    objects::{
        CheckedIn, CheckedInRef, Node, Nodes, node,
        slices::{CANDIDATES, Chosen, Entry, Inputs, NodeSlice, Reason, Source, rank},
    },
    topology::{heartbeats, is_complete},
};
use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject, ListParams},
    runtime::watcher,
};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;
use tokio_util::task::AbortOnDropHandle;

pub(super) use self::report::Report;
use self::{
    reader::{Access, Seen},
    store::Shown,
};
use super::{
    Asked, PartialNode, Shared,
    cache::{Arrived, Cache, Seen as SeenNode},
    client::{self, in_time},
    follow,
    pauses::{self, with_pauses},
};

/// How often conditions without an event are checked.
const LOOK: Duration = Duration::from_secs(5);
/// How to grant the rights for slices.
const GRANT: &str =
    "apply manifests/slices.yaml (with kustomize the component slices, with the chart slices.enabled=true)";

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
        self.seen.lock()
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

    /// Notes that the API server does not answer.
    fn lose(&self) {
        let answers = *self.shared.answers.borrow();
        self.seen().lose(answers, Instant::now());
        self.chooses.notify_one();
    }

    /// Whether the API server has not answered since that was noted.
    fn is_away(&self) -> bool {
        let answers = *self.shared.answers.borrow();
        self.seen().is_away(answers, Instant::now())
    }

    /// Returns when the API server answers after that was noted; never if it was not.
    async fn answered(&self) {
        let lost = self.seen().lost;
        let mut answers = self.shared.answers.clone();
        if let Some(lost) = lost
            && answers.wait_for(|answers| *answers != lost).await.is_ok()
        {
            return;
        }
        std::future::pending::<()>().await;
    }

    /// Whether this agent is one of the first to write slices, by what they say.
    fn is_candidate(&self) -> bool {
        let seen = self.seen();
        let entries = seen.set.nodes().0.into_values();
        let nodes: Nodes = entries.filter_map(|entry| see_entry(entry, &self.label).value).collect();
        rank(&nodes, &self.hostname) < CANDIDATES
    }

    /// Reads this node's object from the API server; `Err`: the API server does not return it.
    async fn own_node(&self) -> Result<Option<SeenNode<CheckedIn>>, ()> {
        let one = ListParams::default().fields(&format!("metadata.name={}", self.hostname));
        let own = in_time(self.nodes().list(&one), Asked::Nodes).await.map_err(drop)?;
        Ok(own.items.into_iter().next().map(|own| self.see(own, Arrived::Listed)))
    }

    fn see(&self, object: PartialNode, arrived: Arrived) -> SeenNode<CheckedIn> {
        self.shared.see_node(object, &self.label, arrived)
    }

    /// Why slices must not be read at the moment, if so.
    fn against(&self) -> Option<Reason> {
        let cache = self.shared.cache();
        let mut seen = self.seen();
        if seen.access == Access::Denied {
            return Some(Reason::Denied);
        }
        if let Err(incomplete) = seen.set.complete(&self.label) {
            return Some(Reason::Incomplete(incomplete));
        }
        if !seen.renewals.go_on(Instant::now()) {
            return Some(Reason::NoWriter);
        }
        let summary = seen.summary(&self.hostname);
        let known = cache.nodes.values();
        let counts = |name: &str| name != self.hostname && !summary.dead.contains(name);
        if summary.foreign || known.iter().any(|known| heartbeats::is_foreign(known) && counts(&known.name)) {
            return Some(Reason::Foreign);
        }
        // Before this node is known, there is nothing to compare with.
        let own = known.get(&self.hostname)?;
        // An agent whose own slice entry says that it is dead is alive: others leave it out because of a
        // forgery or a faulty writer.
        let entry = summary.own.as_ref().filter(|entry| entry.alive);
        let says = entry.map(|entry| read_entry(entry, &self.label).0.node);
        (says.as_ref() != Some(&**own.node)).then_some(Reason::Late)
    }

    /// A node that takes part by its Node object, and not, or elsewhere, by the slices: their writer has not got
    /// to it yet, and an agent that read them now would forget what it knows.
    fn behind(&self) -> Option<String> {
        let cache = self.shared.cache();
        let seen = self.seen();
        let (entries, _) = seen.set.nodes();
        let is_behind = |known: &CheckedInRef<'_>| {
            let says = entries.get(&*known.name).map(|entry| read_entry(entry, &self.label).0.node);
            let reached_by = |node: &Node| (node.key, node.endpoint.clone(), node.internal_ip);
            is_complete(known.node) && says.as_ref().map(reached_by) != Some(reached_by(known.node))
        };
        cache.nodes.values().iter().find(is_behind).map(|known| known.name.clone())
    }
}

/// Chooses the source of nodes, forever, and reads them from there.
pub(super) async fn run(context: Arc<Context>) {
    let reader = AbortOnDropHandle::new(tokio::spawn(reader::run(Arc::clone(&context))));
    let mut writer: Option<AbortOnDropHandle<()>> = None;
    let mut source = Source::default();
    let mut reading = Reading::Nothing;
    // Only a panic ends it, and then the backend is to end as well.
    while !reader.is_finished() {
        if context.seen().access == Access::Granted {
            let writes = || AbortOnDropHandle::new(tokio::spawn(writer::run(Arc::clone(&context))));
            writer.get_or_insert_with(writes);
        } else {
            writer = None;
        }
        step(&context, &mut source, &mut reading).await;
    }
}

/// The current source; dropping it ends the reading. `asks` asks the API server until it answers.
enum Reading {
    Nothing,
    Nodes { task: AbortOnDropHandle<()> },
    Slices { own: AbortOnDropHandle<()>, shown: Shown, asks: Option<AbortOnDropHandle<()>> },
}

impl Reading {
    fn is_from(&self, chosen: Chosen) -> bool {
        match self {
            Self::Nothing => false,
            Self::Nodes { .. } => chosen == Chosen::Nodes,
            Self::Slices { .. } => chosen == Chosen::Slices,
        }
    }

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

/// Reads from the best source; returns when that may have changed, or to look again.
async fn step(context: &Arc<Context>, source: &mut Source, reading: &mut Reading) {
    let until = Instant::now() + LOOK;
    let is_away = context.is_away();
    let against = context.against();
    {
        let mut seen = context.seen();
        let summary = seen.summary(&context.hostname);
        context.report.wrong(summary.bad, summary.twice);
    }
    let starts = matches!(reading, Reading::Nothing);
    let inputs = Inputs {
        against,
        nodes: context.shared.size(),
        is_away,
        is_candidate: starts && against == Some(Reason::NoWriter) && context.is_candidate(),
        now: Instant::now(),
        random: rand::random_range(0.0..1.0),
    };
    let (chosen, due) = source.next(inputs);
    if let Some(chosen) = chosen.filter(|chosen| !reading.is_from(*chosen)) {
        if turn(context, reading, chosen).await {
            source.reads(chosen);
        } else {
            source.failed(Instant::now());
        }
    }
    context.report.choose(matches!(reading, Reading::Slices { .. }), against);
    let look = match reading {
        Reading::Slices { shown, .. } => shown.follow(context),
        Reading::Nothing | Reading::Nodes { .. } => None,
    };
    let wake = [due, look].into_iter().flatten().fold(until, Instant::min);
    tokio::select! {
        () = context.chooses.notified() => {}
        () = context.answered() => {}
        () = tokio::time::sleep_until(wake.into()) => {}
    }
}

/// Switches to the chosen source; false when that is not possible, or no longer right.
async fn turn(context: &Arc<Context>, reading: &mut Reading, chosen: Chosen) -> bool {
    match chosen {
        Chosen::Nodes => {
            if let Reading::Slices { asks, .. } = reading {
                // A server that is away would get the lists of all agents as soon as it is back.
                if context.own_node().await.is_err() {
                    context.lose();
                    *asks = Some(AbortOnDropHandle::new(tokio::spawn(ask(Arc::clone(context)))));
                    return false;
                }
                let Some(reason) = context.against() else { return false };
                tracing::info!(%reason, "reading Nodes instead of slices");
            }
            // The nodes from slices stay until Nodes have been listed.
            reading.end().await;
            *reading = Reading::Nodes { task: spawn_nodes(context) };
        }
        Chosen::Slices => {
            if matches!(reading, Reading::Nodes { .. })
                && let Some(node) = context.behind()
            {
                tracing::debug!(node, "slices lag behind Nodes; reading Nodes for now");
                return false;
            }
            let Ok(own) = context.own_node().await else { return false };
            // Slices may have been emptied meanwhile.
            if context.against().is_some() {
                return false;
            }
            reading.end().await;
            let shown = Shown::replace(context, own);
            tracing::info!(nodes = shown.len(), "reading slices instead of Nodes");
            let own = tokio::spawn(follow_own(Arc::clone(context)));
            *reading = Reading::Slices { own: AbortOnDropHandle::new(own), shown, asks: None };
        }
    }
    true
}

/// Asks the API server until it answers.
async fn ask(context: Arc<Context>) {
    let mut failures = 0;
    loop {
        tokio::time::sleep(context.pause(failures)).await;
        if context.own_node().await.is_ok() {
            return;
        }
        failures += 1;
    }
}

fn spawn_nodes(context: &Arc<Context>) -> AbortOnDropHandle<()> {
    let own = Arc::clone(context);
    let see = move |object, arrived| own.see(object, arrived);
    let shared = Arc::clone(&context.shared);
    let follow = follow(context.nodes(), Asked::Nodes, shared, see, |cache: &mut Cache| &mut cache.nodes);
    AbortOnDropHandle::new(tokio::spawn(follow))
}

/// Follows this node's own object, at once and whole: its annotations configure this agent.
async fn follow_own(context: Arc<Context>) {
    let one = watcher::Config::default().fields(&format!("metadata.name={}", context.hostname));
    let watch = || watcher(context.nodes(), one.clone());
    let mut stream = pin!(with_pauses(watch, &context.shared, |_| 0.0));
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
                listed = Some(context.see(own, Arrived::Listed));
            }
            Ok(watcher::Event::InitDone) => listed.take().map_or_else(remove, put),
            Ok(watcher::Event::Apply(own)) => put(context.see(own, Arrived::Reported)),
            Ok(watcher::Event::Delete(_)) => remove(),
            Err(error) => context.shared.errors.report(error, Asked::Nodes),
        }
    }
}

/// What an entry says about its node, read as from a Node, and what is wrong with it.
fn read_entry(entry: &Entry, label: &str) -> (CheckedIn, Vec<String>) {
    node::from_object(&entry.to_object(label), label)
}

/// A node as a slice describes it, alive or not as the writer sees it.
fn see_entry(entry: &Entry, label: &str) -> SeenNode<CheckedIn> {
    let (mut seen, problems) = read_entry(entry, label);
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

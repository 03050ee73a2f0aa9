//! Writes slices for all agents, while this one holds the Lease.

use std::{
    collections::{BTreeMap, BTreeSet},
    pin::pin,
    sync::Arc,
    time::{Duration, Instant},
};

use futures::{Stream, StreamExt as _};
use kilo_core::objects::slices::{
    EGRESS, Entry, INDEX, Index, NodeSlice, NodeSliceSpec, Plan, plan, poll_seconds, rank,
};
use kube::{
    Api, Resource as _, ResourceExt as _,
    api::{DeleteParams, PostParams, Preconditions},
    runtime::watcher,
};

use super::{
    Context, PartialNode,
    lease::{Held, Tried},
    mirror::Mirror,
    with_pauses,
};
use crate::timestamp::Timestamp;

/// How long changes are collected before they are written.
const DEBOUNCE: Duration = Duration::from_millis(200);
/// Maximum number of slices written in a round.
const BURST: usize = 8;
/// How often liveness is evaluated, also when no heartbeats come.
const LIVENESS_CHECK: Duration = Duration::from_secs(5);
/// Pause before a failed write is retried; it doubles each time, up to a minute.
const RETRY: Duration = Duration::from_millis(500);
const MOST_RETRY: Duration = Duration::from_mins(1);
/// This many consecutive failures of a slice are more than a race with another writer.
const LASTING: u32 = 4;
/// Interval for rewriting the index, so that others know that a writer is at work.
const RENEWED: Duration = Duration::from_mins(1);
/// How long an agent that may not write, or does not hear itself, leaves the Lease to others.
const RESIGNED: Duration = Duration::from_mins(1);
/// Timeout of a write, short enough for the Lease to be renewed in time.
const ANSWER: Duration = Duration::from_secs(4);
/// How often a refused Lease is tried again: the right may come back, and some agent must write.
const REFUSED: Duration = Duration::from_mins(1);
/// Pause while this node, and hence its rank as a writer, is unknown.
const UNKNOWN: Duration = Duration::from_millis(500);
/// A list of Nodes that misses many is repeated after this time.
const CONFIRM: Duration = Duration::from_secs(5);

/// Waits for the Lease, and writes while this agent holds it; runs forever.
pub(super) async fn run(context: Arc<Context>) {
    let leases = Api::namespaced(context.client.clone(), &context.namespace);
    let mut held = Held::new(leases, &context.hostname);
    let (mut refused, mut starts) = (false, true);
    let own_place = || rank(context.shared.cache().nodes.values(), &context.hostname);
    let mut pause = Duration::ZERO;
    loop {
        tokio::time::sleep(pause).await;
        let place = own_place();
        if place == usize::MAX {
            pause = UNKNOWN;
            continue;
        }
        if std::mem::take(&mut starts) {
            // Agents that start together must not all ask at once.
            let most = Duration::from_secs(poll_seconds(place).min(poll_seconds(3)));
            tokio::time::sleep(most.mul_f64(rand::random_range(0.0..0.4))).await;
        }
        pause = Duration::from_secs(poll_seconds(place)).mul_f64(rand::random_range(0.8..1.2));
        match held.take().await {
            Tried::Has => {
                tracing::info!("this agent writes the slices of nodes");
                context.report.set_writes(true);
                let _writing = Writing(&context);
                let (why, rest) = Writer::new(&context, &mut held).run().await;
                pause = pause.max(rest);
                tracing::info!(why, "this agent no longer writes the slices of nodes");
            }
            Tried::Another => {}
            Tried::Refused(reason) => {
                if !refused {
                    tracing::info!(
                        reason,
                        "this agent cannot write the slices of nodes; another agent may, with the rights and the Lease of \
                         manifests/slices.yaml"
                    );
                }
                (refused, pause) = (true, REFUSED.mul_f64(rand::random_range(0.8..1.2)));
            }
            Tried::Failed(reason) => tracing::debug!(reason, "failed to read the Lease kilo-node-slices"),
        }
    }
}

/// Reports, until dropped, that this agent writes.
struct Writing<'a>(&'a Context);

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        self.0.report.set_writes(false);
    }
}

/// The existing slices.
struct Present {
    slices: BTreeMap<String, Vec<Entry>>,
    index: Option<Index>,
    /// `resourceVersion` of each object.
    versions: BTreeMap<String, String>,
    /// Names of objects that cannot be parsed.
    spoiled: Vec<String>,
}

struct Writer<'a> {
    context: &'a Context,
    held: &'a mut Held,
    mirror: Mirror,
    /// Own writes that the watch has not shown yet, with their versions; `None`: a deletion.
    written: BTreeMap<String, (u64, Option<NodeSliceSpec>)>,
    lists: u64,
    /// Slices whose latest writes have failed.
    failing: BTreeMap<String, Failing>,
    /// When this agent last wrote the index.
    renewed: Option<Instant>,
}

/// Why a writer stops, and how long it leaves the Lease to others.
type Stopped = (&'static str, Duration);

/// Consecutive failed writes of a slice.
struct Failing {
    times: u32,
    until: Instant,
}

/// Why a write failed.
enum Failed {
    /// This account may not write slices.
    Refused(String),
    /// Another attempt may succeed.
    Again(String),
}

impl<'a> Writer<'a> {
    fn new(context: &'a Context, held: &'a mut Held) -> Self {
        let mirror = {
            let seen = context.seen();
            Mirror::begin(
                seen.set.nodes().0.into_values().map(|entry| &**entry),
                &context.hostname,
                &context.label,
            )
        };
        Self {
            context,
            held,
            mirror,
            written: BTreeMap::new(),
            lists: 0,
            failing: BTreeMap::new(),
            renewed: None,
        }
    }

    /// Runs until the Lease is lost; returns why.
    async fn run(mut self) -> Stopped {
        loop {
            let watch = watcher(self.context.nodes(), watcher::Config::default());
            // Only one agent lists, so it need not wait for others.
            let stream = with_pauses(watch, &self.context.shared, |_| 0.0);
            let mut stream = pin!(stream);
            match self.follow(&mut stream).await {
                Some(why) => return why,
                None => tokio::time::sleep(CONFIRM).await,
            }
        }
    }

    /// Runs until the writer stops; `None`: Nodes are to be listed again.
    async fn follow<S>(&mut self, stream: &mut S) -> Option<Stopped>
    where
        S: Stream<Item = watcher::Result<watcher::Event<PartialNode>>> + Unpin,
    {
        let mut round = Instant::now();
        let mut check = tokio::time::interval(LIVENESS_CHECK);
        check.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let works = self.mirror.listed && self.mirror.dirty && self.context.seen().lists > 0;
            let context = self.context;
            tokio::select! {
                biased;
                () = tokio::time::sleep_until(self.held.renewal().into()) => {
                    match self.held.renew().await {
                        Tried::Has => {}
                        Tried::Failed(_) if self.held.is_valid() => tokio::time::sleep(RETRY).await,
                        Tried::Failed(_) => return Some(("the Lease was not renewed in time", Duration::ZERO)),
                        Tried::Another => return Some(("another agent has the Lease", Duration::ZERO)),
                        Tried::Refused(_) => return Some(("the right to renew the Lease is missing", REFUSED)),
                    }
                }
                () = tokio::time::sleep_until(round.into()), if works => {
                    if !self.held.is_valid() {
                        return Some(("the Lease was not renewed in time", Duration::ZERO));
                    }
                    self.mirror.apply_liveness(false);
                    match self.run_round().await {
                        Ok(pause) => round = Instant::now() + pause,
                        Err(stopped) => return Some(stopped),
                    }
                }
                event = stream.next() => match event {
                    Some(Ok(event)) => {
                        let was_dirty = self.mirror.dirty;
                        if self.mirror.take(event, &self.context.label) {
                            return None;
                        }
                        self.mirror.apply_liveness(false);
                        if self.mirror.dirty && !was_dirty {
                            round = round.max(Instant::now() + DEBOUNCE);
                        }
                    }
                    Some(Err(error)) => super::super::report(error, super::Asked::Nodes),
                    None => return None,
                },
                () = context.writes.notified() => self.mirror.dirty = true,
                _ = check.tick() => {
                    if let Some(why) = self.mirror.unfit(Instant::now()) {
                        return Some((why, RESIGNED));
                    }
                    self.mirror.apply_liveness(true);
                    self.mirror.dirty |= !self.failing.is_empty() || self.is_renewal_due();
                }
            }
        }
    }

    /// Reads the existing slices, including own writes that the watch has not shown yet.
    fn read_present(&mut self) -> Present {
        let context = self.context;
        let seen = context.seen();
        if seen.lists != self.lists {
            // Earlier writes are in the list, or have been undone.
            self.written.clear();
            self.lists = seen.lists;
        }
        let version = |text: &String| text.parse::<u64>().unwrap_or(0);
        self.written.retain(|name, (written, content)| {
            let shown = seen.versions.get(name).map_or(0, version);
            let gone = seen.deleted.get(name).is_some_and(|deleted| deleted > written);
            let is_shown =
                if content.is_some() { shown >= *written || gone } else { shown > *written || shown == 0 };
            !is_shown
        });
        let readable = seen.set.readable();
        let mut slices: BTreeMap<String, Vec<Entry>> = readable
            .map(|(name, entries)| (name.to_owned(), entries.iter().map(|entry| (**entry).clone()).collect()))
            .collect();
        let mut index = seen.set.index().cloned();
        let mut versions = seen.versions.clone();
        let spoiled = seen.set.present().filter(|name| !slices.contains_key(*name)).map(ToOwned::to_owned);
        let spoiled: Vec<String> = spoiled.collect();
        for (name, (version, content)) in &self.written {
            match content {
                Some(content) if name == INDEX => index.clone_from(&content.index),
                Some(content) => drop(slices.insert(name.clone(), content.nodes.clone())),
                None => {
                    slices.remove(name);
                    versions.remove(name);
                    continue;
                }
            }
            versions.insert(name.clone(), version.to_string());
        }
        Present { slices, index, versions, spoiled }
    }

    /// Whether it is time to show others that a writer is at work.
    fn is_renewal_due(&self) -> bool {
        self.renewed.is_none_or(|renewed| renewed.elapsed() >= RENEWED)
    }

    /// Writes some of what differs; returns the pause until the next round.
    async fn run_round(&mut self) -> Result<Duration, Stopped> {
        let Present { slices, index, versions, spoiled } = self.read_present();
        let ours = index.filter(|index| {
            index.topology_label == self.context.label && index.writer == self.context.hostname
        });
        let names = ours.as_ref().map(|index| &index.slices[..]).filter(|_| !self.is_renewal_due());
        let plan = plan(&slices, names, &self.mirror.entries);
        let useless = useless(spoiled, &plan, names);
        let mut writes = self.ordered(plan, &slices);
        writes.extend(useless.into_iter().map(|name| (name, None)));
        self.failing.retain(|name, _| writes.iter().any(|(wanted, _)| wanted == name));
        self.mirror.dirty = false;
        let (mut bytes, mut tried, mut order) = (0, 0, Order::default());
        for (name, content) in writes {
            let waits = self.failing.get(&name).is_some_and(|failing| failing.until > Instant::now());
            if waits || order.is_held(&name, content.as_ref(), &slices) {
                order.hold(&name, content.as_ref());
                continue;
            }
            if tried == BURST || !self.held.is_valid() || self.held.renewal() <= Instant::now() {
                self.mirror.dirty = true;
                break;
            }
            tried += 1;
            let size = content.as_ref().map_or(0, |content| content.nodes.iter().map(Entry::bytes).sum());
            match self.write(&name, versions.get(&name), content.clone()).await {
                Ok(()) => {
                    bytes += size;
                    self.failing.remove(&name);
                    if name == INDEX {
                        self.renewed = Some(Instant::now());
                    }
                }
                Err(Failed::Again(error)) => {
                    order.hold(&name, content.as_ref());
                    self.failed(&name, &error);
                }
                Err(Failed::Refused(reason)) => {
                    self.context.report.failed();
                    tracing::warn!(
                        reason,
                        "this account may not write NodeSlices; apply manifests/slices.yaml"
                    );
                    return Err(("the right to write slices is missing", RESIGNED));
                }
            }
        }
        let retry = self.failing.values().map(|failing| failing.until).min();
        let retry = retry.map(|until| until.saturating_duration_since(Instant::now()));
        self.mirror.dirty |= retry.is_some_and(|retry| retry < LIVENESS_CHECK);
        // The first burst goes out at once, and what follows waits until all agents have received it.
        #[allow(clippy::cast_precision_loss, reason = "far below 2^52")]
        let pause = bytes as f64 * self.mirror.entries.len() as f64 / EGRESS;
        Ok(DEBOUNCE.max(Duration::from_secs_f64(pause)))
    }

    /// Records a failed write, and logs a warning once when failures persist.
    fn failed(&mut self, name: &str, error: &str) {
        self.written.remove(name);
        self.context.report.failed();
        let failing =
            self.failing.entry(name.to_owned()).or_insert(Failing { times: 0, until: Instant::now() });
        failing.until = Instant::now() + RETRY.saturating_mul(1 << failing.times.min(7)).min(MOST_RETRY);
        failing.times = failing.times.saturating_add(1);
        if failing.times == LASTING {
            tracing::warn!(
                slice = name,
                error,
                "writing this slice has failed for some time; the other slices are written; if this lasts, apply manifests/crds.yaml, \
                 or delete the slice: it will be recreated"
            );
        } else {
            tracing::debug!(slice = name, error, "failed to write a slice; retrying");
        }
    }

    /// All writes, in an order in which readers lose no node.
    fn ordered(
        &self,
        plan: Plan,
        old: &BTreeMap<String, Vec<Entry>>,
    ) -> Vec<(String, Option<NodeSliceSpec>)> {
        let slice = |(name, nodes)| (name, Some(NodeSliceSpec { nodes, index: None }));
        let mut writes: Vec<_> = plan.gain.into_iter().map(slice).collect();
        if let Some(slices) = plan.names {
            let index = Index {
                slices,
                topology_label: self.context.label.clone(),
                writer: self.context.hostname.clone(),
                renewed: Timestamp::now().0,
            };
            writes.push((INDEX.to_owned(), Some(NodeSliceSpec { nodes: Vec::new(), index: Some(index) })));
        }
        // Others are waiting for news of nodes that have died or come back.
        let lives = |entries: &[Entry]| -> BTreeSet<String> {
            entries.iter().filter(|entry| entry.alive).map(|entry| entry.name.clone()).collect()
        };
        let (urgent, others): (Vec<_>, Vec<_>) = plan
            .others
            .into_iter()
            .partition(|(name, nodes)| old.get(name).is_some_and(|old| lives(old) != lives(nodes)));
        writes.extend(urgent.into_iter().chain(others).map(slice));
        writes.extend(plan.gone.into_iter().map(|name| (name, None)));
        writes
    }

    async fn write(
        &mut self,
        name: &str,
        version: Option<&String>,
        content: Option<NodeSliceSpec>,
    ) -> Result<(), Failed> {
        let slices: Api<NodeSlice> = Api::all(self.context.client.clone());
        let parameters = PostParams { field_manager: Some("kilo".to_owned()), ..PostParams::default() };
        let request = async {
            let Some(spec) = content.clone() else {
                // Spares what another writer has written meanwhile.
                let preconditions = Preconditions { resource_version: version.cloned(), uid: None };
                let parameters =
                    DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
                return slices.delete(name, &parameters).await.map(|_| None);
            };
            let mut slice = NodeSlice::new(name, spec);
            slice.meta_mut().resource_version = version.cloned();
            match version {
                Some(_) => slices.replace(name, &parameters, &slice).await.map(Some),
                None => slices.create(&parameters, &slice).await.map(Some),
            }
        };
        let answer = tokio::time::timeout(ANSWER, request).await;
        let object = match answer.map_err(|_| Failed::Again("no answer".to_owned()))? {
            Ok(object) => object,
            Err(kube::Error::Api(status)) if status.code == 403 => {
                return Err(Failed::Refused(status.message));
            }
            Err(error) => return Err(Failed::Again(kilo_core::errors::error_chain(&error))),
        };
        let written = object.and_then(|object| object.resource_version()?.parse().ok());
        let known = version.and_then(|version| version.parse().ok()).unwrap_or(0);
        self.written.insert(name.to_owned(), (written.unwrap_or(known), content));
        self.context.report.wrote();
        Ok(())
    }
}

/// Unparsable objects whose names no slice will use.
fn useless(spoiled: Vec<String>, plan: &Plan, indexed: Option<&[String]>) -> Vec<String> {
    // If the plan does not change the index, the present one names the slices to keep.
    let names = plan.names.as_deref().or(indexed).unwrap_or_default();
    spoiled.into_iter().filter(|name| !names.contains(name)).collect()
}

/// What has not been written, and what must wait for it so that readers lose no node.
#[derive(Default)]
struct Order {
    /// Nodes of slices that were not written.
    nodes: BTreeSet<String>,
    /// Whether the index was not written.
    index: bool,
}

impl Order {
    /// Notes that this was not written.
    fn hold(&mut self, name: &str, content: Option<&NodeSliceSpec>) {
        self.index |= name == INDEX;
        self.nodes
            .extend(content.into_iter().flat_map(|content| &content.nodes).map(|entry| entry.name.clone()));
    }

    /// Whether this write would take a node out of a slice before it is elsewhere, or name or remove a slice
    /// too early.
    fn is_held(
        &self,
        name: &str,
        content: Option<&NodeSliceSpec>,
        old: &BTreeMap<String, Vec<Entry>>,
    ) -> bool {
        if name == INDEX {
            return !self.nodes.is_empty();
        }
        let new = content.map_or(&[][..], |content| &content.nodes[..]);
        let loses = |entry: &Entry| {
            self.nodes.contains(&entry.name) && !new.iter().any(|kept| kept.name == entry.name)
        };
        content.is_none() && self.index || old.get(name).is_some_and(|old| old.iter().any(loses))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slice(names: &[&str]) -> NodeSliceSpec {
        let entry = |name: &&str| Entry { name: (*name).to_owned(), ..Entry::default() };
        NodeSliceSpec { nodes: names.iter().map(entry).collect(), index: None }
    }

    #[test]
    fn a_slice_that_cannot_be_written_holds_up_what_would_lose_its_nodes_and_nothing_else() {
        let old: BTreeMap<_, _> =
            [("one", slice(&["a", "b"])), ("two", slice(&["c"])), ("three", slice(&["d"]))]
                .map(|(name, slice)| (name.to_owned(), slice.nodes))
                .into();
        let mut order = Order::default();
        assert!(!order.is_held("two", None, &old));
        // b moves to a slice whose write fails.
        order.hold("new", Some(&slice(&["b"])));
        assert!(order.is_held(INDEX, Some(&slice(&[])), &old), "it would name a slice that is missing");
        assert!(order.is_held("one", Some(&slice(&["a"])), &old), "b would be nowhere");
        assert!(!order.is_held("one", Some(&slice(&["a", "b"])), &old));
        assert!(!order.is_held("two", Some(&slice(&[])), &old), "c has gone");
        assert!(!order.is_held("two", None, &old));
        order.hold(INDEX, Some(&slice(&[])));
        assert!(order.is_held("two", None, &old), "the index still names it");
    }

    #[test]
    fn a_slice_that_is_written_again_under_its_name_is_not_deleted_in_the_same_round() {
        let spoiled = || vec!["nodes-00001".to_owned(), "forged".to_owned()];
        let named = ["nodes-00000".to_owned(), "nodes-00001".to_owned()];
        let mut plan = Plan::default();
        assert_eq!(useless(spoiled(), &plan, Some(&named)), ["forged"], "the index stays as it is");
        plan.names = Some(named.to_vec());
        assert_eq!(useless(spoiled(), &plan, None), ["forged"]);
    }
}

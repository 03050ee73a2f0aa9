//! Writes slices for all agents, while this one holds the Lease.

use std::{
    collections::BTreeMap,
    pin::pin,
    sync::Arc,
    time::{Duration, Instant},
};

use futures::{Stream, StreamExt as _};
use kilo_core::objects::slices::{
    EGRESS, Entry, INDEX, Index, NodeSliceSpec, Plan, plan, poll_seconds, rank,
};
use kube::{Api, runtime::watcher};

use super::{
    Context, GRANT, PartialNode,
    lease::{Held, Tried},
    mirror::Mirror,
    order::{Order, ordered},
    with_pauses,
    write::{self, Failed, Written},
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
/// A writer that has not written the index for this long does not work, whatever the reason. Others take its
/// place before agents read Nodes (after 150 s).
const UNWRITTEN: Duration = Duration::from_secs(100);
/// How long an agent that cannot or may not write, or does not hear itself, leaves the Lease to others.
const RESIGNED: Duration = Duration::from_mins(1);
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
                        "this agent cannot take the Lease of the slices' writer; if no agent can, all read Nodes: {GRANT}"
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
    /// Slices that the API server has not kept as they were sent.
    pruned: BTreeMap<String, Pruned>,
    /// Slices that are to be written, and since when.
    waiting: BTreeMap<String, Instant>,
    /// When this agent last wrote the index.
    renewed: Option<Instant>,
    /// When this agent last showed that it can write: see [`UNWRITTEN`].
    worked: Instant,
}

/// Why a writer stops, and how long it leaves the Lease to others.
type Stopped = (&'static str, Duration);

/// Consecutive failed writes of a slice.
struct Failing {
    times: u32,
    until: Instant,
    /// The API server did not answer the last one.
    unanswered: bool,
}

/// A slice of which the API server has dropped something, as one with an older CRD does.
struct Pruned {
    sent: Vec<Entry>,
    kept: Vec<Entry>,
}

impl Pruned {
    /// Whether the slice would be written as before although it is still as the API server keeps it.
    fn is_vain(&self, present: Option<&Vec<Entry>>, content: &NodeSliceSpec) -> bool {
        let is_same = self.sent.len() == content.nodes.len()
            && self.sent.iter().zip(&content.nodes).all(|(sent, wanted)| sent.has_same_content(wanted));
        is_same && present == Some(&self.kept)
    }
}

impl<'a> Writer<'a> {
    fn new(context: &'a Context, held: &'a mut Held) -> Self {
        let mirror = {
            let seen = context.seen();
            let known = seen.set.nodes().0.into_values().map(|entry| &**entry);
            let renewed = seen.set.index().map_or(0, |index| index.renewed);
            Mirror::begin(known, renewed, &context.hostname, &context.label)
        };
        Self {
            context,
            held,
            mirror,
            written: BTreeMap::new(),
            lists: 0,
            failing: BTreeMap::new(),
            pruned: BTreeMap::new(),
            waiting: BTreeMap::new(),
            renewed: None,
            worked: Instant::now(),
        }
    }

    /// Runs until the Lease is lost; returns why.
    async fn run(mut self) -> Stopped {
        loop {
            let context = self.context;
            let watch = || watcher(context.nodes(), watcher::Config::default());
            // Only one agent lists, so it need not wait for others.
            let stream = with_pauses(watch, &context.shared, |_| 0.0);
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
                // Before the events, which may come without end.
                _ = check.tick() => {
                    if let Some(why) = self.mirror.unfit(Instant::now()).or_else(|| self.stuck()) {
                        return Some((why, RESIGNED));
                    }
                    self.mirror.apply_liveness(true);
                    self.mirror.dirty |= !self.failing.is_empty() || self.is_renewal_due();
                }
                event = stream.next() => match event {
                    Some(Ok(event)) => {
                        let was_dirty = self.mirror.dirty;
                        if self.mirror.take(event, &self.context.label) {
                            return None;
                        }
                        if self.mirror.dirty && !was_dirty {
                            round = round.max(Instant::now() + DEBOUNCE);
                        }
                    }
                    Some(Err(error)) => self.context.shared.errors.report(error, super::Asked::Nodes),
                    None => return None,
                },
                () = context.writes.notified() => self.mirror.dirty = true,
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
            let gone = seen.deleted.get(name).is_some_and(|deleted| deleted > *written);
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

    /// Why this agent is to leave the Lease to others, if it has held it for long without using it.
    fn stuck(&self) -> Option<&'static str> {
        let why = if !self.mirror.listed {
            "Nodes could not be listed"
        } else if self.context.seen().lists == 0 {
            "slices could not be listed"
        } else {
            "slices could not be written; the API server may be overloaded, or large requests of this node do not \
             arrive"
        };
        (self.worked.elapsed() >= UNWRITTEN).then_some(why)
    }

    /// The index that names these slices.
    fn index(&self, slices: Vec<String>) -> NodeSliceSpec {
        let index = Index {
            slices,
            topology_label: self.context.label.clone(),
            writer: self.context.hostname.clone(),
            renewed: Timestamp::now().0,
        };
        NodeSliceSpec { nodes: Vec::new(), index: Some(index) }
    }

    /// Writes some of what differs; returns the pause until the next round.
    async fn run_round(&mut self) -> Result<Duration, Stopped> {
        let Present { slices, index, mut versions, spoiled } = self.read_present();
        let index = index.filter(|index| index.topology_label == self.context.label);
        let named = index.as_ref().map(|index| &index.slices[..]);
        let is_foreign = index.as_ref().is_some_and(|index| index.writer != self.context.hostname);
        let plan = plan(&slices, named, &self.mirror.entries);
        let useless = useless(spoiled, &plan, named);
        self.note_waiting(&plan);
        let mut writes = Vec::new();
        // Others read Nodes when it is not renewed, so it waits for nothing, unless this agent cannot write.
        let may_renew = !self.failing.iter().any(|(name, failing)| failing.unanswered && name != INDEX);
        if let Some(named) = named.filter(|_| may_renew && (is_foreign || self.is_renewal_due())) {
            writes.push((INDEX.to_owned(), Some(self.index(named.to_vec()))));
        }
        writes.extend(ordered(plan, &slices, &self.waiting, |names| self.index(names)));
        writes.extend(useless.into_iter().map(|name| (name, None)));
        writes.retain(|(name, content)| {
            let pruned = self.pruned.get(name).zip(content.as_ref());
            !pruned.is_some_and(|(pruned, content)| pruned.is_vain(slices.get(name), content))
        });
        self.failing.retain(|name, _| writes.iter().any(|(wanted, _)| wanted == name));
        self.mirror.dirty = false;
        let (mut bytes, mut tried, mut order) = (0, 0, Order::default());
        for (name, content) in writes {
            let waits = self.failing.get(&name).is_some_and(|failing| failing.until > Instant::now());
            if waits || order.is_held((&name, content.as_ref()), &slices, named) {
                order.hold(&name, content.as_ref());
                continue;
            }
            if tried == BURST || !self.held.is_valid() || self.held.renewal() <= Instant::now() {
                self.mirror.dirty = true;
                break;
            }
            tried += 1;
            let size = content.as_ref().map_or(0, |content| content.nodes.iter().map(Entry::bytes).sum());
            match self.write(&name, versions.get(&name), content.clone()).await? {
                Some(version) => {
                    bytes += size;
                    versions.insert(name, version);
                }
                None => order.hold(&name, content.as_ref()),
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

    /// Notes since when slices have been waiting to be written.
    fn note_waiting(&mut self, plan: &Plan) {
        let now = Instant::now();
        let mut before = std::mem::take(&mut self.waiting);
        let wanted = plan.gain.keys().chain(plan.others.keys());
        self.waiting =
            wanted.map(|name| before.remove_entry(name).unwrap_or_else(|| (name.clone(), now))).collect();
    }

    /// Writes one slice; returns its version, or `None` when it is to be tried again.
    async fn write(
        &mut self,
        name: &str,
        version: Option<&String>,
        content: Option<NodeSliceSpec>,
    ) -> Result<Option<String>, Stopped> {
        match write::write(&self.context.client, name, version, content.clone()).await {
            Ok(Written { version, kept }) => {
                self.context.report.wrote();
                self.failing.remove(name);
                // The next wish of this name is another one.
                self.waiting.remove(name);
                if name == INDEX {
                    self.renewed = Some(Instant::now());
                }
                // Before there is an index, slices alone show that this agent can write.
                if name == INDEX || self.renewed.is_none() {
                    self.worked = Instant::now();
                }
                self.note_pruned(name, content.as_ref(), kept);
                self.written.insert(name.to_owned(), (version, content));
                Ok(Some(version.to_string()))
            }
            Err(Failed::Again { error, unanswered }) => {
                self.failed(name, &error, unanswered);
                Ok(None)
            }
            Err(Failed::Refused(reason)) => {
                self.context.report.failed();
                tracing::warn!(
                    reason,
                    "this account may not write NodeSlices, so agents read Nodes until another one writes: {GRANT}"
                );
                Err(("the right to write slices is missing", RESIGNED))
            }
        }
    }

    /// Notes whether the API server has kept a slice as it was sent: otherwise writing it again would change
    /// nothing.
    fn note_pruned(&mut self, name: &str, content: Option<&NodeSliceSpec>, kept: Option<NodeSliceSpec>) {
        let (Some(content), Some(kept)) = (content, kept) else {
            self.pruned.remove(name);
            return;
        };
        if kept.nodes == content.nodes {
            self.pruned.remove(name);
            return;
        }
        if self.pruned.is_empty() {
            tracing::warn!(
                slice = name,
                "the API server dropped fields of this slice, and perhaps of others, because its NodeSlice CRD is older \
                 than this agent; such slices are not updated until their nodes change: apply manifests/crds.yaml"
            );
        }
        let pruned = Pruned { sent: content.nodes.clone(), kept: kept.nodes };
        self.pruned.insert(name.to_owned(), pruned);
    }

    /// Records a failed write, and logs a warning once when failures persist.
    fn failed(&mut self, name: &str, error: &str, unanswered: bool) {
        self.written.remove(name);
        self.context.report.failed();
        let now = Instant::now();
        let failing =
            self.failing.entry(name.to_owned()).or_insert(Failing { times: 0, until: now, unanswered });
        failing.unanswered = unanswered;
        failing.until = now + RETRY.saturating_mul(1 << failing.times.min(7)).min(MOST_RETRY);
        failing.times = failing.times.saturating_add(1);
        if failing.times == LASTING {
            tracing::warn!(
                slice = name,
                error,
                "repeatedly failed to write this slice (other slices are unaffected); if it persists, apply \
                 manifests/crds.yaml, or delete the slice, which is then made anew"
            );
        } else {
            tracing::debug!(slice = name, error, "failed to write a slice; retrying");
        }
    }
}

/// Unparsable objects whose names no slice will use.
fn useless(spoiled: Vec<String>, plan: &Plan, indexed: Option<&[String]>) -> Vec<String> {
    // If the plan does not change the index, the present one names the slices to keep.
    let names = plan.names.as_deref().or(indexed).unwrap_or_default();
    spoiled.into_iter().filter(|name| !names.contains(name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_that_is_written_again_under_its_name_is_not_deleted_in_the_same_round() {
        let spoiled = || vec!["nodes-00001".to_owned(), "forged".to_owned()];
        let named = ["nodes-00000".to_owned(), "nodes-00001".to_owned()];
        let mut plan = Plan::default();
        assert_eq!(useless(spoiled(), &plan, Some(&named)), ["forged"], "the index stays as it is");
        plan.names = Some(named.to_vec());
        assert_eq!(useless(spoiled(), &plan, None), ["forged"]);
    }

    #[test]
    fn a_slice_of_which_a_part_was_dropped_is_left_until_it_or_the_nodes_change() {
        let entry = |heartbeat: Option<u16>, last_seen: i64| Entry {
            name: "a".to_owned(),
            heartbeat,
            last_seen,
            ..Entry::default()
        };
        let wanted = |heartbeat, last_seen| NodeSliceSpec {
            nodes: vec![entry(heartbeat, last_seen)],
            ..NodeSliceSpec::default()
        };
        let pruned = Pruned { sent: vec![entry(Some(300), 7)], kept: vec![entry(None, 7)] };
        let kept = vec![entry(None, 7)];
        assert!(pruned.is_vain(Some(&kept), &wanted(Some(300), 9)));
        assert!(!pruned.is_vain(Some(&kept), &wanted(Some(30), 9)), "the node has changed");
        assert!(!pruned.is_vain(Some(&vec![entry(Some(7), 7)]), &wanted(Some(300), 9)), "somebody wrote it");
        assert!(!pruned.is_vain(None, &wanted(Some(300), 9)), "it was deleted");
    }
}

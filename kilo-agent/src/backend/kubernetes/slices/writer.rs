//! Writes slices for all: the agent that has the Lease.

use std::{
    collections::BTreeMap,
    pin::pin,
    sync::Arc,
    time::{Duration, Instant},
};

use futures::{Stream, StreamExt as _};
use kilo_core::objects::slices::{
    Entry, INDEX, Index, NodeSlice, NodeSliceSpec, Plan, plan, poll_seconds, rank,
};
use kube::{
    Api, Resource as _, ResourceExt as _,
    api::{DeleteParams, PostParams},
    runtime::{WatchStreamExt as _, watcher},
};

use super::{
    Context, PartialNode,
    lease::{Held, Tried},
    mirror::Mirror,
};

/// Changes are collected for so long.
const DEBOUNCE: Duration = Duration::from_millis(200);
/// Slices written at once.
const BURST: usize = 8;
/// Bytes a second that the API server may send to all agents together because of slices, but for the first of a burst.
const EGRESS: f64 = 50e6;
/// Who lives is looked at so often without heartbeats.
const JUDGED: Duration = Duration::from_secs(5);
/// A write that was refused is tried again after this time.
const RETRY: Duration = Duration::from_millis(500);
/// No write takes longer: the Lease is to be renewed.
const ANSWER: Duration = Duration::from_secs(4);
/// Where the Lease is refused, it is asked for again so seldom.
const REFUSED: Duration = Duration::from_mins(30);
/// Before the own Node is known, nobody can say who writes.
const UNKNOWN: Duration = Duration::from_millis(500);
/// A list of Nodes that misses many is confirmed after this time.
const CONFIRM: Duration = Duration::from_secs(5);

/// Waits for the Lease, and writes while this agent has it; for ever.
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
            // Not all that start at the same time ask at the same time.
            let most = Duration::from_secs(poll_seconds(place).min(poll_seconds(3)));
            tokio::time::sleep(most.mul_f64(rand::random_range(0.0..0.4))).await;
        }
        pause = Duration::from_secs(poll_seconds(place)).mul_f64(rand::random_range(0.8..1.2));
        match held.take().await {
            Tried::Has => {
                tracing::info!("this agent writes the slices of nodes");
                context.report.set_writes(true);
                let _writing = Writing(&context);
                let why = Writer::new(&context, &mut held).run().await;
                tracing::info!(why, "this agent no longer writes the slices of nodes");
            }
            Tried::Another => {}
            Tried::Refused(reason) => {
                if !refused {
                    tracing::info!(reason, "this agent cannot write the slices of nodes; another may");
                }
                (refused, pause) = (true, REFUSED.mul_f64(rand::random_range(0.8..1.2)));
            }
            Tried::Failed(reason) => tracing::debug!(reason, "failed to look at the Lease of slices"),
        }
    }
}

/// Says until dropped that this agent writes.
struct Writing<'a>(&'a Context);

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        self.0.report.set_writes(false);
    }
}

/// What there is of slices.
struct Present {
    slices: BTreeMap<String, Vec<Entry>>,
    index: Option<Index>,
    /// `resourceVersion` of each object.
    versions: BTreeMap<String, String>,
    /// Objects that cannot be read.
    spoiled: Vec<String>,
}

struct Writer<'a> {
    context: &'a Context,
    held: &'a mut Held,
    mirror: Mirror,
    /// What this agent has written and the watch has not shown yet, with the version; `None`: deleted.
    written: BTreeMap<String, (u64, Option<NodeSliceSpec>)>,
    lists: u64,
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
        Self { context, held, mirror, written: BTreeMap::new(), lists: 0 }
    }

    /// Until the Lease is lost; returns why.
    async fn run(mut self) -> &'static str {
        loop {
            let stream = watcher(self.context.nodes(), watcher::Config::default()).default_backoff();
            let mut stream = pin!(stream);
            match self.follow(&mut stream).await {
                Some(why) => return why,
                None => tokio::time::sleep(CONFIRM).await,
            }
        }
    }

    /// `None`: Nodes are to be listed again.
    async fn follow<S>(&mut self, stream: &mut S) -> Option<&'static str>
    where
        S: Stream<Item = watcher::Result<watcher::Event<PartialNode>>> + Unpin,
    {
        let mut round = Instant::now();
        let mut judged = tokio::time::interval(JUDGED);
        judged.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let works = self.mirror.listed && self.mirror.dirty && self.context.seen().lists > 0;
            let context = self.context;
            tokio::select! {
                biased;
                () = tokio::time::sleep_until(self.held.renewal().into()) => {
                    match self.held.renew().await {
                        Tried::Has => {}
                        Tried::Failed(_) if self.held.is_valid() => tokio::time::sleep(RETRY).await,
                        Tried::Failed(_) => return Some("the Lease was not renewed in time"),
                        Tried::Another => return Some("another agent has the Lease"),
                        Tried::Refused(_) => return Some("the right to renew the Lease is missing"),
                    }
                }
                () = tokio::time::sleep_until(round.into()), if works => {
                    if !self.held.is_valid() {
                        return Some("the Lease was not renewed in time");
                    }
                    self.mirror.judge(&self.context.hostname, false);
                    round = Instant::now() + self.round().await;
                }
                event = stream.next() => match event {
                    Some(Ok(event)) => {
                        let was_dirty = self.mirror.dirty;
                        if self.mirror.take(event, &self.context.label) {
                            return None;
                        }
                        self.mirror.judge(&self.context.hostname, false);
                        if self.mirror.dirty && !was_dirty {
                            round = round.max(Instant::now() + DEBOUNCE);
                        }
                    }
                    Some(Err(error)) => super::super::report(error, super::Asked::Nodes),
                    None => return None,
                },
                () = context.writes.notified() => self.mirror.dirty = true,
                _ = judged.tick() => self.mirror.judge(&self.context.hostname, true),
            }
        }
    }

    /// What there is, with what was written and not shown yet.
    fn present(&mut self) -> Present {
        let context = self.context;
        let seen = context.seen();
        if seen.lists != self.lists {
            // Whatever was written before is in the list, or has been undone.
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

    /// Writes some of what differs; returns the pause until the next round.
    async fn round(&mut self) -> Duration {
        let Present { slices, index, versions, spoiled } = self.present();
        let ours = index.filter(|index| {
            index.topology_label == self.context.label && index.writer == self.context.hostname
        });
        let names = ours.as_ref().map(|index| &index.slices[..]);
        let plan = plan(&slices, names, &self.mirror.entries);
        let (mut writes, all) = self.ordered(plan);
        let useless = spoiled.into_iter().filter(|name| !all.contains(name));
        writes.extend(useless.map(|name| (name, None)));
        self.mirror.dirty = writes.len() > BURST;
        writes.truncate(BURST);
        let mut bytes = 0;
        for (name, content) in writes {
            let size = content.as_ref().map_or(0, |content| content.nodes.iter().map(Entry::bytes).sum());
            if let Err(error) = self.write(&name, versions.get(&name), content).await {
                tracing::debug!(slice = name, error, "failed to write a slice; trying again");
                self.written.remove(&name);
                self.mirror.dirty = true;
                return RETRY;
            }
            bytes += size;
        }
        #[allow(clippy::cast_precision_loss, reason = "far below 2^52")]
        let pause = bytes as f64 * self.mirror.entries.len() as f64 / EGRESS;
        DEBOUNCE.max(Duration::from_secs_f64(pause))
    }

    /// All writes in the order in which readers lose nothing, and the names of all slices afterwards.
    fn ordered(&self, plan: Plan) -> (Vec<(String, Option<NodeSliceSpec>)>, Vec<String>) {
        let slice = |(name, nodes)| (name, Some(NodeSliceSpec { nodes, index: None }));
        let mut writes: Vec<_> = plan.gain.into_iter().map(slice).collect();
        let all = plan.names.clone().unwrap_or_default();
        if let Some(slices) = plan.names {
            let index = Index {
                slices,
                topology_label: self.context.label.clone(),
                writer: self.context.hostname.clone(),
            };
            writes.push((INDEX.to_owned(), Some(NodeSliceSpec { nodes: Vec::new(), index: Some(index) })));
        }
        writes.extend(plan.others.into_iter().map(slice));
        writes.extend(plan.gone.into_iter().map(|name| (name, None)));
        (writes, all)
    }

    async fn write(
        &mut self,
        name: &str,
        version: Option<&String>,
        content: Option<NodeSliceSpec>,
    ) -> Result<(), String> {
        let slices: Api<NodeSlice> = Api::all(self.context.client.clone());
        let parameters = PostParams { field_manager: Some("kilo".to_owned()), ..PostParams::default() };
        let request = async {
            let Some(spec) = content.clone() else {
                return slices.delete(name, &DeleteParams::default()).await.map(|_| None);
            };
            let mut slice = NodeSlice::new(name, spec);
            slice.meta_mut().resource_version = version.cloned();
            match version {
                Some(_) => slices.replace(name, &parameters, &slice).await.map(Some),
                None => slices.create(&parameters, &slice).await.map(Some),
            }
        };
        let answer = tokio::time::timeout(ANSWER, request).await.map_err(|_| "no answer".to_owned())?;
        let object = answer.map_err(|error| kilo_core::errors::error_chain(&error))?;
        let written = object.and_then(|object| object.resource_version()?.parse().ok());
        let known = version.and_then(|version| version.parse().ok()).unwrap_or(0);
        self.written.insert(name.to_owned(), (written.unwrap_or(known), content));
        self.context.report.wrote();
        Ok(())
    }
}

//! Reports what changes in the mesh: log lines, Events, gauges, and whether `/health` is degraded. Runs
//! beside the reconciles, from the views that they publish.

mod events;
mod handshakes;
mod limiter;
mod log;
mod tunnels;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use kilo_core::{
    objects::events::EventReason,
    topology::{
        ObservedMesh,
        changes::{self, Change, Role},
        is_recent,
    },
};
use kilo_host::wireguard::Reading;
use tokio::{
    sync::watch,
    time::{MissedTickBehavior, interval},
};
use tokio_util::sync::CancellationToken;

use self::{events::Notice, handshakes::Handshakes, limiter::Limiter, tunnels::Watched};
use crate::{
    backend::{Backend, Happened},
    health::Health,
    metrics::{Metrics, gauge},
    status::View,
    timestamp::Timestamp,
};

/// Interval between looks at the tunnels.
const LOOK: Duration = Duration::from_secs(5);
/// Reading a device with many prefixes takes at most 1/`SHARE` of the time.
const SHARE: u32 = 400;
/// The device is read at least this often.
const LOOK_AT_LEAST: Duration = Duration::from_secs(60);
/// A starting node joins the mesh within this time; only afterwards its absence is reported.
const STARTS: Duration = Duration::from_secs(30);

/// What reporting needs.
pub struct Context<B> {
    /// Where Events are written.
    pub backend: Arc<B>,
    /// The node of this agent.
    pub node: String,
    /// Gauges of locations and tunnels.
    pub metrics: Metrics,
    /// Where degraded tunnels are recorded.
    pub health: Health,
    /// The views that reconciles publish.
    pub view: watch::Receiver<Arc<View>>,
    /// Cancelled when the task is to end.
    pub stop: CancellationToken,
}

/// Reports changes until it is stopped.
pub async fn run<B: Backend>(context: Context<B>) {
    let now = Instant::now();
    let mut view = context.view.clone();
    let mut announcer = Announcer {
        context,
        before: None,
        lines: Limiter::new(now),
        events: Limiter::new(now),
        tunnels: Watched::default(),
        handshakes: Handshakes::new(now),
        look_again: now,
        counts: Duration::ZERO,
        out_since: None,
    };
    let mut looks = interval(LOOK);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = announcer.context.stop.cancelled() => return,
            changed = view.changed() => {
                if changed.is_err() {
                    return;
                }
                let now = Arc::clone(&view.borrow_and_update());
                announcer.see(now, Instant::now());
            }
            _ = looks.tick() => announcer.look().await,
        }
    }
}

/// Writes an Event in a task of its own.
pub fn write_event<B: Backend>(backend: &Arc<B>, node: String, reason: EventReason, text: String) {
    let (backend, happened) = (Arc::clone(backend), Happened::now(node, reason, text));
    tokio::spawn(async move { write_until_done(&*backend, &happened, Duration::from_secs(1)).await });
}

/// Pauses between attempts to write an Event, in seconds, ten minutes in all: the API server may have run on
/// the node that failed.
const PAUSES: [u32; 24] =
    [1, 2, 4, 8, 16, 30, 30, 30, 30, 30, 30, 30, 30, 30, 30, 30, 30, 30, 30, 30, 30, 30, 30, 30];

/// Retries until the Event is written, while the API server is away. A refusal is retried only after an
/// outage, because a starting server may refuse for a moment. The pauses are in `unit`s.
async fn write_until_done(backend: &impl Backend, happened: &Happened, unit: Duration) {
    let mut was_away = false;
    let mut pauses = PAUSES.into_iter();
    loop {
        let Err(error) = backend.event(happened).await else { return };
        was_away |= error.is_temporary();
        let pause = pauses.next().filter(|_| was_away);
        tracing::debug!(
            %error,
            node = happened.object,
            reason = happened.reason.as_str(),
            is_tried_again = pause.is_some(),
            "failed to write an Event"
        );
        let Some(pause) = pause else { return };
        // All agents lose the server at once, but must not ask it at once.
        tokio::time::sleep((unit * pause).mul_f64(rand::random_range(0.8..1.2))).await;
    }
}

struct Announcer<B> {
    context: Context<B>,
    /// The last view.
    before: Option<Arc<View>>,
    lines: Limiter,
    events: Limiter,
    tunnels: Watched,
    handshakes: Handshakes,
    look_again: Instant,
    /// How long a reading of the device stays valid.
    counts: Duration,
    /// Since when this node has not been in the mesh; `None` while it is, and once that was logged.
    out_since: Option<Instant>,
}

impl<B: Backend> Announcer<B> {
    /// Reports the differences from the view before.
    fn see(&mut self, view: Arc<View>, now: Instant) {
        // Before the first reconcile there is no mesh.
        let ObservedMesh { mesh, snapshot, .. } = &*view.observed;
        if mesh.granularity().is_none() {
            return;
        }
        let own = self.context.node.clone();
        if let Some(own) = snapshot.nodes.get(&own) {
            self.context.metrics.last_check_in.set(own.last_seen);
        }
        let found = match &self.before {
            Some(before) if is_same(&before.observed, &view.observed) => {
                self.before = Some(view);
                return;
            }
            Some(before) => changes::changes(&before.observed, &view.observed, &own),
            None => self.first(&view.observed),
        };
        let leaderless = changes::locations_without_leader(&view.observed).len();
        let out = mesh.lost.iter().filter(|lost| snapshot.nodes.contains(lost.member.name()));
        self.context.metrics.set_missing(leaderless, out.count());
        let mesh_before = self.before.as_ref().map(|before| &*before.observed.mesh);
        view.history.observe(&found, mesh_before, mesh, Timestamp::now());
        for change in &found {
            self.log(now, || log::write(change));
        }
        for notice in events::notices(&found, mesh, &own) {
            self.announce(notice, now);
        }
        let is_out = mesh.find(&own).is_none();
        if !is_out {
            self.out_since = None;
        } else if self.before.is_none() {
            self.out_since = Some(now);
        }
        self.before = Some(view);
    }

    /// Reports the state found at startup. That this node joins is news if its heartbeat was too old for
    /// the other agents.
    fn first(&self, observed: &ObservedMesh) -> Vec<Change> {
        let mesh = &observed.mesh;
        let role = Role::of(mesh, &self.context.node);
        // Why a node is not in the mesh is logged later, by `report_why_out`.
        if role != Role::Out {
            tracing::info!(
                locations = mesh.segments.len(),
                nodes = mesh.node_count(),
                peers = mesh.peers.len(),
                role = %role,
                "this node takes part in the mesh"
            );
        }
        let known = observed.snapshot.nodes.get(&self.context.node);
        let was_in = known.is_some_and(|own| own.key.is_some() && is_recent(own, Timestamp::now().0));
        let is_news = !was_in && role != Role::Out;
        is_news.then_some(Change::Role { from: Role::Out, to: role }).into_iter().collect()
    }

    /// Reads the tunnels, and reports what was held back.
    async fn look(&mut self) {
        let now = Instant::now();
        if let Some(left_out) = self.lines.take_left_out(now) {
            tracing::info!(
                left_out,
                "the mesh changes too often to log everything; `kgctl status` shows how it is now"
            );
        }
        if let Some(left_out) = self.events.take_left_out(now) {
            tracing::info!(
                left_out,
                "too many Events; the remaining ones are only in the log and in `kgctl status`"
            );
        }
        self.report_why_out(now);
        if now < self.look_again {
            return;
        }
        let Some(view) = self.before.clone() else { return };
        // A reconcile may just have read the device.
        let Reading { at, took, peers } = match view.reading(self.counts).await {
            Ok(reading) => reading,
            Err(error) => {
                tracing::debug!(%error, "failed to read WireGuard peers");
                return;
            }
        };
        let mesh = &view.observed.mesh;
        let (now, seen) = (Instant::now(), handshakes::seen(mesh, &peers, Timestamp::now()));
        let leaders = mesh.segments.len();
        self.handshakes.observe(&self.context.backend, &seen, leaders, now).await;
        for news in self.tunnels.observe(&view, &peers, at) {
            self.log(now, || news.log());
            if let Some((reason, text)) = news.event() {
                self.announce(Notice { node: self.context.node.clone(), reason, text }, now);
            }
        }
        let degraded = self.tunnels.degraded(now);
        self.context.metrics.silent_tunnels.set(gauge(degraded.len()));
        self.context.health.set_degraded(degraded);
        self.counts = (took * SHARE).min(LOOK_AT_LEAST);
        self.look_again = at + took + self.counts;
    }

    /// Reports once that this node has not joined the mesh since its agent started.
    fn report_why_out(&mut self, now: Instant) {
        if self.out_since.is_none_or(|since| now.saturating_duration_since(since) < STARTS) {
            return;
        }
        let view = self.before.clone();
        let node = self.context.node.clone();
        let why = view.and_then(|view| changes::why_out(&node, &view.observed));
        if let Some(why) = why {
            self.out_since = None;
            self.log(now, || tracing::info!(%why, "this node is not in the mesh"));
            let text = format!("is not in the mesh: {why}");
            self.announce(Notice { node, reason: EventReason::NotInMesh, text }, now);
        }
    }

    fn log(&mut self, now: Instant, write: impl FnOnce()) {
        if self.lines.admit(now) {
            write();
        }
    }

    fn announce(&mut self, notice: Notice, now: Instant) {
        if self.events.admit(now) {
            write_event(&self.context.backend, notice.node, notice.reason, notice.text);
        }
    }
}

/// True when nothing but heartbeats may differ.
fn is_same(before: &ObservedMesh, now: &ObservedMesh) -> bool {
    Arc::ptr_eq(&before.mesh, &now.mesh) && before.snapshot.problems == now.snapshot.problems
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use kilo_core::objects::{Published, Snapshot};
    use parking_lot::Mutex;

    use super::*;
    use crate::backend::BackendError;

    /// Answers each attempt with the next of `errors`, then accepts everything.
    struct Answers {
        errors: Mutex<Vec<BackendError>>,
        tries: Mutex<Vec<Happened>>,
    }

    impl Backend for Answers {
        fn watch(&self) -> watch::Receiver<Arc<Snapshot>> {
            watch::channel(Arc::default()).1
        }

        async fn publish(&self, _: &str, _: &Published) -> Result<bool, BackendError> {
            Ok(false)
        }

        async fn declare_dead(&self, _: &str, _: i64) -> Result<bool, BackendError> {
            Ok(false)
        }

        async fn event(&self, happened: &Happened) -> Result<(), BackendError> {
            self.tries.lock().push(happened.clone());
            self.errors.lock().pop().map_or(Ok(()), Err)
        }

        async fn retract(&self, _: &str) -> Result<(), BackendError> {
            Ok(())
        }
    }

    /// The number of attempts to write an Event that gets these answers in turn.
    async fn tries(mut errors: Vec<BackendError>) -> usize {
        errors.reverse();
        let backend = Answers { errors: Mutex::new(errors), tries: Mutex::default() };
        let happened = Happened::now("a2".to_owned(), EventReason::LeadsLocation, "leads".to_owned());
        write_until_done(&backend, &happened, Duration::from_micros(1)).await;
        let tries = backend.tries.lock();
        assert!(tries.iter().all(|tried| *tried == happened), "it is one Event: {tries:?}");
        tries.len()
    }

    fn away() -> BackendError {
        BackendError::Unreachable("away".into())
    }

    fn refused() -> BackendError {
        BackendError::Api("forbidden".into())
    }

    #[tokio::test]
    async fn an_event_is_written_once_the_api_server_is_back() {
        assert_eq!(tries(vec![]).await, 1);
        assert_eq!(tries(vec![away(), away(), away()]).await, 4);
        // The server is starting and does not know all permissions yet.
        assert_eq!(tries(vec![away(), refused()]).await, 3);
    }

    #[tokio::test]
    async fn an_event_that_is_refused_is_given_up_and_an_outage_is_waited_out_for_ten_minutes() {
        assert_eq!(tries(vec![refused(), away()]).await, 1);
        assert_eq!(tries((0..99).map(|_| away()).collect()).await, PAUSES.len() + 1);
        assert!((540..660).contains(&PAUSES.iter().sum::<u32>()));
    }
}

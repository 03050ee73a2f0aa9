//! How long a broken watch waits before it asks the API server again.
//!
//! All agents lose the API server at the same moment, and retry until it is back. Pauses grow with the mesh,
//! so the total request rate does not; and the first answered request of an agent ends the pauses of all its
//! watches. [`Pauses`] is pure: time and random numbers are parameters.

use std::{
    pin::Pin,
    sync::Arc,
    time::{Duration, Instant},
};

use futures::{Stream, StreamExt as _, stream};
use kilo_core::objects::slices::time_to_send;
use kube::runtime::watcher;

use super::{Shared, cache::Cache};

/// The pause after the first failure; each further one is twice as long.
const FIRST: Duration = Duration::from_millis(800);
/// Limit for pauses: `FOR_EACH_NODE` times the number of nodes, within these bounds.
const FOR_EACH_NODE: Duration = Duration::from_millis(10);
const LEAST: Duration = Duration::from_secs(2);
const MOST: Duration = Duration::from_secs(30);
/// When another request has been answered, a watch retries after a random delay of at most this, plus
/// `FOLLOWS_FOR_EACH_NODE` times the number of nodes.
const FOLLOWS: Duration = Duration::from_secs(1);
const FOLLOWS_FOR_EACH_NODE: Duration = Duration::from_millis(1);
/// A request that fails later than this was a working watch: connecting or waiting for an answer times out
/// sooner.
const SLOWEST: Duration = Duration::from_secs(100);
/// An expired history is listed again within this time.
const LISTED_AGAIN: Duration = Duration::from_mins(1);

/// Inputs of a pause besides the history of the watch.
#[derive(Clone, Copy, Debug)]
struct Circumstances {
    now: Instant,
    /// Nodes of the mesh: that many agents may ask at the same time.
    nodes: usize,
    /// A random number from 0 to 1, so that many agents do not ask at the same moment.
    random: f64,
}

/// History of a watch's failures.
#[derive(Clone, Copy, Debug, Default)]
struct Pauses {
    /// Consecutive failures.
    failures: u32,
    /// When the last pause ends, or ended.
    until: Option<Instant>,
    /// The history has expired, and no change has come since.
    is_expired: bool,
    /// Another request's answer has already ended a pause since this watch failed, in vain.
    has_followed: bool,
}

/// A pause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Pause {
    time: Duration,
    /// Ends the pause this long after an answer to another request, if that is sooner.
    follows: Option<Duration>,
}

/// `time` multiplied by `nodes`, saturating.
fn for_each(nodes: usize, time: Duration) -> Duration {
    time.saturating_mul(u32::try_from(nodes).unwrap_or(u32::MAX))
}

/// The longest pause in a mesh of `nodes` nodes, before the random part up to doubles it.
fn longest(nodes: usize) -> Duration {
    for_each(nodes, FOR_EACH_NODE).clamp(LEAST, MOST)
}

/// The pause after a failure that followed this many others, in a mesh of `nodes` nodes; `random` is from 0
/// to 1.
pub(super) fn pause_after(failures: u32, nodes: usize, random: f64) -> Duration {
    FIRST.saturating_mul(1 << failures.min(16)).min(longest(nodes)).mul_f64(1.0 + random)
}

impl Pauses {
    /// The watch has delivered something: a whole list, or a change.
    fn delivered(&mut self) {
        *self = Self { is_expired: self.is_expired, until: self.until, ..Self::default() };
    }

    /// The watch has delivered a change, so its history was intact.
    fn changed(&mut self) {
        self.delivered();
        self.is_expired = false;
    }

    /// The watch has failed.
    fn failed(&mut self, at: Circumstances) -> Pause {
        self.is_expired = false;
        self.fail(at)
    }

    fn fail(&mut self, Circumstances { now, nodes, random }: Circumstances) -> Pause {
        let most = longest(nodes);
        // A working watch may have nothing to report; a request may take long before it fails.
        let silent = (most * 2).max(SLOWEST);
        if self.until.is_some_and(|until| now.saturating_duration_since(until) > silent) {
            self.delivered();
        }
        let random = random.clamp(0.0, 1.0);
        let time = pause_after(self.failures, nodes, random);
        self.failures = self.failures.saturating_add(1);
        self.until = Some(now + time);
        let follows = (FOLLOWS + for_each(nodes, FOLLOWS_FOR_EACH_NODE)).mul_f64(random);
        Pause { time, follows: Some(follows).filter(|_| !self.has_followed) }
    }

    /// The API server has lost the history since the last event, so each agent lists `bytes` again. That is
    /// not a failure, unless it happens again without a change in between.
    fn expired(&mut self, bytes: f64, at: Circumstances) -> Pause {
        let share = time_to_send(at.nodes, bytes).min(LISTED_AGAIN).mul_f64(at.random.clamp(0.0, 1.0));
        if std::mem::replace(&mut self.is_expired, true) {
            let failed = self.fail(at);
            return Pause { time: failed.time.max(share), follows: None };
        }
        self.until = Some(at.now + share);
        Pause { time: share, follows: None }
    }

    /// A pause has ended because another request was answered. That may happen only once until the watch
    /// delivers something, because an overloaded server, or one that refuses this one request, answers
    /// others.
    fn followed(&mut self) {
        self.has_followed = true;
    }
}

/// A watch that pauses after each error, when its reader asks for the next event, and that `watch` begins
/// anew with a list when the history of the API server has begun anew. `bytes`: size of a full list.
pub(super) fn with_pauses<K: Send, W>(
    watch: impl Fn() -> W + Send,
    shared: &Arc<Shared>,
    bytes: impl Fn(&mut Cache) -> f64 + Send,
) -> impl Stream<Item = watcher::Result<watcher::Event<K>>> + Send
where
    W: Stream<Item = watcher::Result<watcher::Event<K>>> + Send,
{
    let (shared, answers) = (Arc::clone(shared), shared.answers.clone());
    let watch = Watch { restored: shared.restored.subscribe(), current: Box::pin(watch()), begin: watch };
    let state = (watch, shared, answers, bytes, Pauses::default(), None);
    stream::unfold(state, |(mut watch, shared, mut answers, bytes, mut pauses, pause)| async move {
        if let Some(pause) = pause
            && wait(pause, &mut answers).await
        {
            pauses.followed();
        }
        let event = watch.next().await?;
        let pause = match &event {
            // The objects of a page arrive before the next page is requested.
            Ok(watcher::Event::Init | watcher::Event::InitApply(_)) => None,
            Ok(watcher::Event::InitDone) => {
                pauses.delivered();
                None
            }
            Ok(watcher::Event::Apply(_) | watcher::Event::Delete(_)) => {
                pauses.changed();
                None
            }
            Err(error) => {
                // Only answers from here on count.
                answers.mark_unchanged();
                let (nodes, bytes) = (shared.size(), bytes(&mut shared.cache()));
                let at = Circumstances { now: Instant::now(), nodes, random: rand::random_range(0.0..1.0) };
                let pause = if is_expired(error) { pauses.expired(bytes, at) } else { pauses.failed(at) };
                Some(pause)
            }
        };
        Some((event, (watch, shared, answers, bytes, pauses, pause)))
    })
}

/// A watch, and how to begin it anew.
struct Watch<F, W> {
    begin: F,
    current: Pin<Box<W>>,
    /// Changes when the history of the API server has begun anew.
    restored: tokio::sync::watch::Receiver<()>,
}

impl<W: Stream, F: Fn() -> W> Watch<F, W> {
    async fn next(&mut self) -> Option<W::Item> {
        loop {
            tokio::select! {
                event = self.current.next() => return event,
                // The sender lives as long as the backend.
                Ok(()) = self.restored.changed() => self.current = Box::pin((self.begin)()),
            }
        }
    }
}

/// Waits for the pause to end; true when another request's answer ended it early.
async fn wait(pause: Pause, answers: &mut tokio::sync::watch::Receiver<u64>) -> bool {
    let answered = async {
        match pause.follows {
            Some(follows) if answers.changed().await.is_ok() => tokio::time::sleep(follows).await,
            _ => std::future::pending().await,
        }
    };
    tokio::select! {
        () = tokio::time::sleep(pause.time) => false,
        () = answered => true,
    }
}

/// Whether the API server no longer has the history since the last event.
fn is_expired(error: &watcher::Error) -> bool {
    matches!(error, watcher::Error::WatchError(status) if status.code == 410)
}

#[cfg(test)]
mod tests {
    use kilo_core::objects::slices::{ENTRY_BYTES, NODE_BYTES};

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// A watch, and a clock that only pauses and requests advance.
    struct Case {
        pauses: Pauses,
        start: Instant,
        now: Instant,
        nodes: usize,
        random: f64,
    }

    impl Case {
        fn new(nodes: usize, random: f64) -> Self {
            let now = Instant::now();
            Self { pauses: Pauses::default(), start: now, now, nodes, random }
        }

        fn at(&self) -> Circumstances {
            Circumstances { now: self.now, nodes: self.nodes, random: self.random }
        }

        /// A failure; returns the pause after it in seconds.
        fn fail(&mut self) -> f64 {
            let pause = self.pauses.failed(self.at());
            self.now += pause.time;
            pause.time.as_secs_f64()
        }

        fn expire(&mut self, bytes: f64) -> f64 {
            let pause = self.pauses.expired(bytes, self.at());
            assert_eq!(pause.follows, None, "everybody would list at once");
            self.now += pause.time;
            pause.time.as_secs_f64()
        }
    }

    #[test]
    fn pauses_grow_to_a_length_that_depends_on_the_mesh() {
        let grow = |nodes, random| {
            let mut case = Case::new(nodes, random);
            (0..8).map(|_| case.fail()).collect::<Vec<_>>()
        };
        assert_eq!(grow(40, 0.0), [0.8, 1.6, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]);
        assert_eq!(grow(40, 1.0), [1.6, 3.2, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0]);
        assert_eq!(grow(1000, 0.0), [0.8, 1.6, 3.2, 6.4, 10.0, 10.0, 10.0, 10.0]);
        assert_eq!(grow(10_000, 1.0)[7], 60.0);
        assert_eq!(grow(usize::MAX, 0.0)[7], 30.0);
    }

    #[test]
    fn in_a_small_mesh_little_time_passes_between_the_end_of_an_outage_and_the_list() {
        let mut case = Case::new(40, 1.0);
        while case.now < case.start + 40 * SECOND {
            case.fail();
        }
        // The first answer reports that the history has expired.
        let bytes = 40.0 * NODE_BYTES;
        let listed = case.expire(bytes);
        assert!(listed < 0.5, "{listed}");
        let late = case.now - case.start - 40 * SECOND;
        assert!(late < 5 * SECOND, "{late:?}");
    }

    #[test]
    fn what_a_watch_delivers_ends_the_row_of_failures_and_so_does_time_without_one() {
        let mut case = Case::new(1000, 0.0);
        case.fail();
        case.fail();
        case.pauses.delivered();
        assert_eq!([case.fail(), case.fail(), case.fail()], [0.8, 1.6, 3.2]);
        case.now += 100 * SECOND;
        assert_eq!(case.fail(), 6.4, "a request may take that long");
        case.now += 101 * SECOND;
        assert_eq!(case.fail(), 0.8);
    }

    #[test]
    fn an_answer_to_another_request_ends_one_pause_and_not_all_of_a_request_that_is_refused() {
        let follows = |case: &mut Case| case.pauses.failed(case.at()).follows;
        let mut case = Case::new(40, 0.5);
        assert_eq!(follows(&mut case), Some(Duration::from_millis(520)));
        assert!(follows(&mut case).is_some());
        case.pauses.followed();
        assert_eq!(follows(&mut case), None);
        case.pauses.delivered();
        assert!(follows(&mut case).is_some());
        assert_eq!(follows(&mut Case::new(10_000, 1.0)), Some(11 * SECOND));
    }

    #[test]
    fn a_lost_history_is_listed_again_no_faster_than_the_server_can_send_it_to_all() {
        assert_eq!(Case::new(1000, 0.5).expire(1000.0 * ENTRY_BYTES), 5.0);
        assert_eq!(Case::new(10_000, 1.0).expire(10_000.0 * NODE_BYTES), 60.0);
        assert_eq!(Case::new(10_000, 1.0).expire(0.0), 0.0);
        // It does not count as a failure.
        let mut case = Case::new(40, 0.0);
        case.expire(0.0);
        assert_eq!(case.fail(), 0.8);
    }

    #[test]
    fn a_server_that_lists_and_then_says_that_the_history_is_gone_is_not_asked_without_pause() {
        let mut case = Case::new(40, 0.0);
        let turn = |case: &mut Case| {
            case.pauses.delivered();
            case.expire(0.0)
        };
        assert_eq!([turn(&mut case), turn(&mut case), turn(&mut case)], [0.0, 0.8, 0.8]);
        case.now += 5 * SECOND;
        assert_eq!(turn(&mut case), 0.8, "a list may take that long");
        case.pauses.changed();
        assert_eq!(turn(&mut case), 0.0);
    }
}

//! Publishes this node's annotations beside the reconciles, so that a hanging API server delays none of them.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use tokio_util::task::AbortOnDropHandle;

use crate::backend::{Backend, BackendError};
use kilo_core::{errors::Explained, objects::Published, topology::heartbeats::OFTEN};

/// Pause before a failed write is repeated, unless something else causes it earlier.
const RETRY: Duration = Duration::from_secs(2);
/// A heartbeat that somebody needs sooner than promised is written within this time.
const SOON: Duration = Duration::from_secs(20);
/// An overloaded or unreachable API server is asked again after 2, 4, 8, 16, 16, ... seconds.
const MOST_DOUBLINGS: u32 = 3;
/// What somebody else undoes again and again is written after pauses of 2, 4, 8, 16, 32, 32, ... seconds.
const MOST_PATIENT: u32 = 4;
/// This many times in a row are no coincidence.
const LASTING: u32 = 3;
/// A write without answer is reported after this time; the answer may come later.
const PATIENCE: Duration = Duration::from_secs(2);
/// Patience while nobody knows this node's key.
pub(super) const PATIENCE_UNKNOWN: Duration = Duration::from_secs(5);

/// The last write, the one under way, and when the next heartbeat is due.
pub(super) struct Publisher<B> {
    backend: Arc<B>,
    node: String,
    asked: Option<Asked>,
    /// What to write once `asked` is answered.
    wanted: Option<Published>,
    next_check_in: Instant,
    /// Seconds between two heartbeats; the publisher adds its own jitter.
    every: u16,
    /// Interval that the last heartbeat promised, written or under way.
    promised: u16,
    /// A heartbeat is due soon because another node needs it.
    hurries: bool,
    /// Only this node's heartbeats can settle a doubt, so they are renewed often, whatever was promised.
    doubts: bool,
    /// Consecutive attempts that the API server did not answer.
    unanswered: u32,
    /// The last write failed.
    failed: bool,
    /// Unix seconds of the last heartbeat written; 0 = none yet.
    checked_in: i64,
    /// Others have declared this node dead, by a heartbeat of 0.
    is_declared_dead: bool,
    /// What was written last.
    written: Option<Published>,
    /// How often in a row somebody has undone that, at least.
    undone: u32,
    /// Until when what somebody undoes is not written again, except with a heartbeat.
    rests: Option<Instant>,
}

/// A write that is under way.
struct Asked {
    published: Published,
    since: Instant,
    write: AbortOnDropHandle<Result<bool, BackendError>>,
    patience: Duration,
    /// When the lack of an answer is to be reported; `None` once it has been.
    overdue: Option<Instant>,
}

impl<B: Backend> Publisher<B> {
    /// Creates a publisher whose first heartbeat is due at once.
    pub fn new(backend: Arc<B>, node: String, now: Instant) -> Self {
        Self {
            backend,
            node,
            asked: None,
            wanted: None,
            next_check_in: now,
            every: OFTEN,
            promised: OFTEN,
            hurries: false,
            doubts: false,
            unanswered: 0,
            failed: false,
            checked_in: 0,
            is_declared_dead: false,
            written: None,
            undone: 0,
            rests: None,
        }
    }

    /// When a heartbeat or a retry is due.
    pub const fn next_check_in(&self) -> Instant {
        self.next_check_in
    }

    /// Seconds between two heartbeats.
    pub const fn every(&self) -> u16 {
        self.every
    }

    /// Whether the API server answered the last request, as far as is known.
    pub const fn is_answered(&self) -> bool {
        self.unanswered == 0
    }

    /// Whether everything that was to be written has been.
    pub const fn is_settled(&self) -> bool {
        self.asked.is_none() && !self.failed
    }

    /// Whether somebody has undone what was written too often to write it again now: each write goes to all agents.
    pub fn is_resting(&self, now: Instant) -> bool {
        self.rests.is_some_and(|until| now < until)
    }

    /// Delays the next attempt by the retry pause after a failure.
    pub fn hold_back(&mut self, now: Instant) {
        self.next_check_in = self.next_check_in.max(now + jittered(RETRY));
    }

    /// Sets the heartbeat interval. If it is shorter than promised, or only new heartbeats of this node can
    /// settle a doubt, the next one is brought forward to a random time, because all agents may do so. While
    /// the doubt lasts, others follow as often as Kilo's.
    pub fn pace(&mut self, every: u16, doubts: bool, now: Instant) {
        (self.every, self.doubts) = (every, doubts);
        let hurries = every < self.promised || doubts;
        if hurries && !self.hurries && self.is_answered() {
            self.next_check_in = self.next_check_in.min(now + SOON.mul_f64(rand::random_range(0.0..1.0)));
        }
        self.hurries = hurries;
    }

    /// Takes this node's heartbeat as the backend has it. While this runs, a node that others declared dead
    /// is alive, so a heartbeat is due at once. Returns whether the declaration is new.
    pub fn note_seen(&mut self, last_seen: i64, now: Instant) -> bool {
        let before = self.is_declared_dead;
        self.is_declared_dead = last_seen == 0 && self.checked_in > 0;
        let is_new = self.is_declared_dead && !before;
        if is_new {
            self.next_check_in = self.next_check_in.min(now);
        }
        is_new
    }

    /// Has the backend write this, with the heartbeat if one is due, otherwise `last_seen` as others know it.
    /// Returns at once; [`Self::answered`] yields the result. A write under way goes first.
    pub fn publish(&mut self, mut published: Published, patience: Duration, now: Instant, unix_now: i64) {
        let due = now >= self.next_check_in;
        let is_undone = || self.written.as_ref().is_some_and(|written| says_the_same(written, &published));
        if !due && (!self.is_answered() || self.is_resting(now) && is_undone()) {
            return;
        }
        // The backend's view may be older than the last write, the one under way or the one waiting. The
        // latest is not always the greatest, since the clock may have been set back.
        let asked = self.asked.as_ref().map(|asked| &asked.published);
        let known = self.wanted.as_ref().or(asked).map(|known| known.last_seen);
        let written = (self.checked_in != 0).then_some(self.checked_in);
        published.last_seen = known.or(written).unwrap_or(published.last_seen);
        if due {
            published.last_seen = unix_now;
            self.promised = self.every;
            self.next_check_in = next_after(now, self.interval());
        }
        published.heartbeat = Some(self.promised);
        match &mut self.asked {
            None => self.ask(published, patience, now),
            Some(asked) => {
                if due && asked.overdue.is_none() {
                    asked.overdue = Some(now + asked.patience);
                }
                self.wanted = Some(published);
            }
        }
    }

    /// [`Self::publish`] with the usual patience.
    pub fn publish_beside(&mut self, published: Published, now: Instant, unix_now: i64) {
        self.publish(published, PATIENCE, now, unix_now);
    }

    /// Waits for the write that is under way, for as long as its patience lasts.
    pub async fn finish(&mut self) {
        while self.asked.as_ref().is_some_and(|asked| asked.overdue.is_some()) {
            let _ = self.answered().await;
        }
    }

    /// Seconds until the heartbeat after the one that is being written.
    fn interval(&self) -> u16 {
        if self.doubts { self.promised.min(OFTEN) } else { self.promised }
    }

    fn ask(&mut self, published: Published, patience: Duration, now: Instant) {
        let (backend, node, written) = (Arc::clone(&self.backend), self.node.clone(), published.clone());
        let write = tokio::spawn(async move { backend.publish(&node, &written).await });
        let write = AbortOnDropHandle::new(write);
        self.asked = Some(Asked { published, since: now, write, patience, overdue: Some(now + patience) });
    }

    /// Waits for the answer to a write, or until it is overdue; forever when nothing is under way.
    ///
    /// # Errors
    /// When the write failed, or is overdue; an overdue write goes on, and its answer may come later.
    pub async fn answered(&mut self) -> Result<(), BackendError> {
        let Some(asked) = &mut self.asked else { return std::future::pending().await };
        let overdue = asked.overdue;
        let answer = tokio::select! {
            // An answer that has arrived counts, however late a busy thread looks for it.
            biased;
            answer = &mut asked.write => answer,
            () = until(overdue) => {
                asked.overdue = None;
                let seconds = asked.patience.as_secs();
                let text = format!(
                    "the API server (or the directory of --backend=file) has not answered within {seconds} s; going on without"
                );
                return self.record(Err(BackendError::Unreachable(text.into()))).map(drop);
            }
        };
        let Some(asked) = self.asked.take() else { return Ok(()) };
        let answer = answer.unwrap_or_else(|panic| {
            Err(BackendError::Api(Explained::of("annotation writer panicked", panic)))
        });
        let wanted = self.wanted.take();
        let is_written = self.record(answer)?;
        self.note_written(&asked.published, is_written);
        if asked.published.last_seen != self.checked_in {
            self.checked_in = asked.published.last_seen;
            // It may have been reported as overdue, and a retry scheduled.
            self.next_check_in = self.next_check_in.max(next_after(asked.since, self.interval()));
        }
        if let Some(wanted) = wanted.filter(|wanted| *wanted != asked.published) {
            self.ask(wanted, PATIENCE, Instant::now());
        }
        Ok(())
    }

    /// Notes an answer: the backend `is_written` when its node did not have all of this. If that is so although it was
    /// written last, too, somebody has undone it.
    fn note_written(&mut self, published: &Published, is_written: bool) {
        let before = self.written.replace(published.clone());
        let same = before.as_ref().is_some_and(|before| says_the_same(before, published));
        if !is_written || !same {
            (self.undone, self.rests) = (0, None);
        } else if before.as_ref() == Some(published) {
            self.undone = self.undone.saturating_add(1);
            // Once may be Kilo's own agent, which removes annotations when it leaves.
            let doublings = self.undone.checked_sub(2).map(|again| again.min(MOST_PATIENT));
            self.rests = doublings.map(|doublings| Instant::now() + jittered(RETRY * (1 << doublings)));
            if self.undone == LASTING {
                tracing::error!(
                    node = self.node,
                    "something else changes again and again what this agent writes into its node's annotations; it is \
                     written more and more seldom: look for another agent with this --hostname, such as one of a copied \
                     machine, and for a controller that manages annotations of Nodes"
                );
            }
        }
    }

    fn record(&mut self, answer: Result<bool, BackendError>) -> Result<bool, BackendError> {
        self.failed = answer.is_err();
        match &answer {
            Err(error) if error.is_temporary() => {
                let pause = RETRY * (1 << self.unanswered.min(MOST_DOUBLINGS));
                self.next_check_in = Instant::now() + jittered(pause);
                self.unanswered = self.unanswered.saturating_add(1);
            }
            Err(_) => {
                self.next_check_in = self.next_check_in.min(Instant::now() + jittered(RETRY));
                self.unanswered = 0;
            }
            Ok(_) => self.unanswered = 0,
        }
        answer
    }
}

/// Whether at most heartbeats differ.
fn says_the_same(one: &Published, other: &Published) -> bool {
    Published { last_seen: other.last_seen, heartbeat: other.heartbeat, ..one.clone() } == *other
}

/// When the heartbeat after `heartbeat` is due.
fn next_after(heartbeat: Instant, seconds: u16) -> Instant {
    heartbeat + Duration::from_secs(seconds.into()).mul_f64(rand::random_range(0.9..1.1))
}

fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(rand::random_range(0.8..1.2))
}

/// Waits until that time, then yields once to all runnable tasks: the write may be one of them.
async fn until(time: Option<Instant>) {
    match time {
        Some(time) => tokio::time::sleep_until(time.into()).await,
        None => std::future::pending().await,
    }
    tokio::task::yield_now().await;
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use std::sync::atomic::{AtomicBool, Ordering};

    use kilo_core::{objects::Snapshot, wireguard::key::SecretKey};
    use parking_lot::Mutex;
    use tokio::sync::{Semaphore, watch};

    use super::*;

    const CHECK_IN: Duration = Duration::from_secs(OFTEN as u64);

    /// Records what is written, and answers only when allowed to.
    struct Held {
        written: Mutex<Vec<Published>>,
        answers: Semaphore,
        /// Somebody undoes each write at once.
        undoes: AtomicBool,
    }

    impl Backend for Held {
        fn watch(&self) -> watch::Receiver<Arc<Snapshot>> {
            watch::channel(Arc::default()).1
        }

        async fn publish(&self, _: &str, published: &Published) -> Result<bool, BackendError> {
            self.answers.acquire().await.unwrap().forget();
            let mut written = self.written.lock();
            let differs = written.last() != Some(published);
            written.push(published.clone());
            Ok(differs || self.undoes.load(Ordering::Relaxed))
        }

        async fn declare_dead(&self, _: &str, _: i64) -> Result<bool, BackendError> {
            Ok(false)
        }

        async fn retract(&self, _: &str) -> Result<(), BackendError> {
            Ok(())
        }
    }

    impl Held {
        fn heartbeats(&self) -> Vec<i64> {
            self.written.lock().iter().map(|published| published.last_seen).collect()
        }
    }

    fn begin() -> (Arc<Held>, Publisher<Held>, Instant) {
        let (written, answers, undoes) = (Mutex::default(), Semaphore::new(0), AtomicBool::new(false));
        let (held, now) = (Arc::new(Held { written, answers, undoes }), Instant::now());
        (Arc::clone(&held), Publisher::new(held, "n1".into(), now), now)
    }

    /// What a reconcile publishes when the backend has seen a heartbeat of that second.
    fn seen(last_seen: i64) -> Published {
        Published { last_seen, ..Published::default() }
    }

    #[tokio::test]
    async fn a_heartbeat_under_way_is_not_taken_back() {
        let (held, mut publisher, now) = begin();
        publisher.publish_beside(seen(0), now, 1000);
        publisher.publish_beside(seen(0), now, 1001);
        let key = Some(SecretKey::from_bytes([1; 32]).public());
        publisher.publish_beside(Published { key, ..seen(0) }, now, 1001);
        held.answers.add_permits(9);
        while publisher.asked.is_some() {
            publisher.answered().await.unwrap();
        }
        assert_eq!(held.heartbeats(), [1000, 1000]);
        assert_eq!(held.written.lock()[1].key, key, "the other change is not lost");
    }

    #[tokio::test]
    async fn who_is_declared_dead_renews_its_heartbeat_once_and_at_once() {
        let (held, mut publisher, now) = begin();
        assert!(!publisher.note_seen(0, now), "there was none yet");
        held.answers.add_permits(9);
        publisher.publish_beside(seen(0), now, 1000);
        publisher.answered().await.unwrap();
        assert!(!publisher.note_seen(1000, now));
        assert!(publisher.note_seen(0, now), "declared dead");
        assert!(!publisher.note_seen(0, now), "the same word of the others");
        publisher.publish_beside(seen(0), now, 1007);
        publisher.answered().await.unwrap();
        assert_eq!(held.heartbeats(), [1000, 1007]);
        assert!(!publisher.note_seen(1007, now));
        assert!(publisher.note_seen(0, now), "once more");
    }

    #[tokio::test]
    async fn a_heartbeat_that_waits_for_another_write_is_not_lost() {
        let (held, mut publisher, now) = begin();
        publisher.publish_beside(seen(0), now, 1000);
        publisher.publish_beside(seen(0), now + CHECK_IN * 2, 1060);
        publisher.publish_beside(seen(1000), now + CHECK_IN * 2, 1061);
        held.answers.add_permits(9);
        while publisher.asked.is_some() {
            publisher.answered().await.unwrap();
        }
        assert_eq!(held.heartbeats(), [1000, 1060]);
    }

    #[tokio::test]
    async fn a_clock_that_is_set_back_writes_no_more_than_heartbeats() {
        let (held, mut publisher, now) = begin();
        held.answers.add_permits(9);
        // An hour back, then forward again; a reconcile after each heartbeat finds it or the previous one in
        // the backend.
        let heartbeats = [5_000, 1_430, 5_060];
        for (time, heartbeat) in (0..).zip(heartbeats) {
            let at = now + CHECK_IN * 2 * time;
            publisher.publish_beside(seen(heartbeats[0]), at, heartbeat);
            publisher.answered().await.unwrap();
            for view in [heartbeats[0], heartbeat] {
                publisher.publish_beside(seen(view), at, heartbeat + 1);
                publisher.answered().await.unwrap();
            }
        }
        assert_eq!(held.heartbeats(), heartbeats.map(|heartbeat| [heartbeat; 3]).concat());
    }

    #[tokio::test]
    async fn a_late_answer_ends_the_tries_for_it() {
        let (held, mut publisher, now) = begin();
        publisher.publish(seen(0), Duration::ZERO, now, 1000);
        assert!(publisher.answered().await.is_err(), "overdue");
        assert!(publisher.next_check_in() < now + CHECK_IN / 2, "another try is planned");
        held.answers.add_permits(1);
        publisher.answered().await.unwrap();
        assert!(publisher.next_check_in() > now + CHECK_IN / 2);
    }

    #[tokio::test]
    async fn an_answer_that_came_while_the_thread_was_busy_is_no_lack_of_one() {
        // A random `select!` would also see the answer half the time, hence so many tries.
        for _ in 0..20 {
            let (held, mut publisher, now) = begin();
            held.answers.add_permits(1);
            publisher.publish(seen(0), Duration::ZERO, now, 1000);
            std::thread::sleep(Duration::from_millis(2));
            publisher.answered().await.unwrap();
        }
    }

    #[tokio::test]
    async fn a_heartbeat_comes_as_seldom_as_promised_and_sooner_when_it_is_needed() {
        let (held, mut publisher, now) = begin();
        held.answers.add_permits(9);
        publisher.pace(300, false, now);
        publisher.publish_beside(seen(0), now, 1000);
        publisher.answered().await.unwrap();
        assert!(publisher.next_check_in() > now + CHECK_IN * 8);
        // With a node running Kilo's own agent, every node must write within a minute, but not at once.
        publisher.pace(30, false, now + CHECK_IN);
        let due = publisher.next_check_in();
        assert!(due < now + CHECK_IN + SOON);
        publisher.pace(30, false, now + CHECK_IN * 2);
        assert_eq!(publisher.next_check_in(), due, "asked for once");
        publisher.publish_beside(seen(1000), due - SOON / 1000, 1040);
        publisher.publish_beside(seen(1000), due, 1050);
        while publisher.asked.is_some() {
            publisher.answered().await.unwrap();
        }
        let written = held.written.lock().clone();
        let promises: Vec<_> = written.iter().map(|written| (written.last_seen, written.heartbeat)).collect();
        assert_eq!(promises.last(), Some(&(1050, Some(30))));
        assert!(
            promises[..promises.len() - 1].iter().all(|promise| *promise == (1000, Some(300))),
            "{promises:?}"
        );
        assert!(publisher.next_check_in() < due + CHECK_IN * 2);
        // Another node is silent.
        publisher.pace(30, false, due);
        publisher.pace(30, true, due);
        assert!(publisher.next_check_in() < due + SOON);
    }

    #[tokio::test]
    async fn while_another_node_is_suspected_heartbeats_come_often_and_promise_what_they_did() {
        let (held, mut publisher, now) = begin();
        held.answers.add_permits(9);
        let mut at = now;
        for (time, doubts) in [(0, false), (1, true), (2, true), (3, false)] {
            publisher.pace(300, doubts, at);
            if doubts {
                at = publisher.next_check_in();
                assert!(at < now + CHECK_IN * 2 * time, "heartbeat {time}");
            }
            publisher.publish_beside(seen(1000), at, 1000 + i64::from(time));
            while publisher.asked.is_some() {
                publisher.answered().await.unwrap();
            }
        }
        let written = held.written.lock().clone();
        let said: Vec<_> =
            written.iter().take(3).map(|written| (written.last_seen, written.heartbeat)).collect();
        assert_eq!(said, [1000, 1001, 1002].map(|last_seen| (last_seen, Some(300))));
    }

    #[tokio::test]
    async fn what_somebody_undoes_again_and_again_is_written_more_and_more_seldom() {
        let (held, mut publisher, now) = begin();
        held.answers.add_permits(1000);
        held.undoes.store(true, Ordering::Relaxed);
        // As often as snapshots come; the other one writes as fast.
        let mut publish = async |milliseconds: u64, published| {
            let at = now + Duration::from_millis(milliseconds);
            publisher.publish_beside(published, at, 1000 + i64::try_from(milliseconds / 1000).unwrap());
            while publisher.asked.is_some() {
                publisher.answered().await.unwrap();
            }
            held.written.lock().len()
        };
        let mut writes = 0;
        for tenth in 0..100 {
            writes = publish(tenth * 100, seen(1000)).await;
        }
        // Pauses are by the clock of the test, in which no time passes.
        assert!((3..20).contains(&writes), "{writes} writes");
        let key = Some(SecretKey::from_bytes([1; 32]).public());
        let changed = Published { key, ..seen(1000) };
        assert_eq!(publish(10_100, changed.clone()).await, writes + 1, "news are written");
        let mut after = writes + 1;
        for tenth in 102..120 {
            after = publish(tenth * 100, changed.clone()).await;
        }
        assert!(after < writes + 9, "{after} writes");
        assert_eq!(publish(60_000, changed).await, after + 1, "a heartbeat is due");
    }

    #[tokio::test]
    async fn what_fails_while_nobody_answers_pauses_too() {
        let (_, mut publisher, now) = begin();
        publisher.publish(seen(0), Duration::ZERO, now, 1000);
        assert!(publisher.answered().await.is_err(), "overdue");
        let later = now + CHECK_IN;
        publisher.hold_back(later);
        assert!(publisher.next_check_in() > later);
    }
}

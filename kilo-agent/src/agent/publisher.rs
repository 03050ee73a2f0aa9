//! Writes what this node says of itself beside the reconciles: an API server that hangs delays none of them.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use tokio_util::task::AbortOnDropHandle;

use super::RETRY;
use crate::backend::{Backend, BackendError};
use kilo_core::{errors::Explained, objects::Published};

/// Seconds between two heartbeats; every agent adds its own jitter.
const CHECK_IN: Duration = Duration::from_secs(30);
/// An API server that is overloaded or away is asked again after 2, 4, 8, 16, 16, ... seconds.
const MOST_DOUBLINGS: u32 = 3;
/// A write without answer is reported after this time; the answer may come later.
const PATIENCE: Duration = Duration::from_secs(2);
/// The same while nobody knows this node's key.
pub(super) const PATIENCE_UNKNOWN: Duration = Duration::from_secs(5);

/// What was written last, what is being written, and when the next heartbeat is due.
pub(super) struct Publisher<B> {
    backend: Arc<B>,
    node: String,
    asked: Option<Asked>,
    /// What to write once that is answered.
    wanted: Option<Published>,
    next_check_in: Instant,
    /// Attempts in a row that the API server did not answer.
    unanswered: u32,
    /// The last write failed.
    failed: bool,
    /// Unix seconds of the last heartbeat written; 0 = none yet.
    checked_in: i64,
}

/// A write that is under way.
struct Asked {
    published: Published,
    write: AbortOnDropHandle<Result<bool, BackendError>>,
    patience: Duration,
    /// When the lack of an answer is to be reported; `None`: it has been.
    overdue: Option<Instant>,
}

impl<B: Backend> Publisher<B> {
    /// The first heartbeat is due at once.
    pub fn new(backend: Arc<B>, node: String, now: Instant) -> Self {
        Self {
            backend,
            node,
            asked: None,
            wanted: None,
            next_check_in: now,
            unanswered: 0,
            failed: false,
            checked_in: 0,
        }
    }

    /// When a heartbeat or another try is due.
    pub const fn next_check_in(&self) -> Instant {
        self.next_check_in
    }

    /// The API server answered when it was last asked, as far as is known.
    pub const fn is_answered(&self) -> bool {
        self.unanswered == 0
    }

    /// All that was to be written has been.
    pub const fn is_settled(&self) -> bool {
        self.asked.is_none() && !self.failed
    }

    /// What failed is not tried again before this pause has passed.
    pub fn hold_back(&mut self, now: Instant) {
        if self.is_answered() {
            self.next_check_in = self.next_check_in.max(now + jittered(RETRY));
        }
    }

    /// Has the backend write this, with the heartbeat that is due, or `last_seen` as others know it.
    /// Returns at once; [`Self::answered`] says what became of it. A write under way goes first.
    pub fn publish(&mut self, mut published: Published, patience: Duration, now: Instant, unix_now: i64) {
        let due = now >= self.next_check_in;
        if !due && !self.is_answered() {
            return;
        }
        // The backend's view may be older than what was written last.
        published.last_seen = if due { unix_now } else { published.last_seen.max(self.checked_in) };
        if due {
            self.next_check_in = now + CHECK_IN.mul_f64(rand::random_range(0.9..1.1));
        }
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

    /// As [`Self::publish`], with the usual patience.
    pub fn publish_beside(&mut self, published: Published, now: Instant, unix_now: i64) {
        self.publish(published, PATIENCE, now, unix_now);
    }

    /// Waits for the write that is under way, for as long as anybody is patient with it.
    pub async fn finish(&mut self) {
        while self.asked.as_ref().is_some_and(|asked| asked.overdue.is_some()) {
            let _ = self.answered().await;
        }
    }

    fn ask(&mut self, published: Published, patience: Duration, now: Instant) {
        let (backend, node, written) = (Arc::clone(&self.backend), self.node.clone(), published.clone());
        let write = tokio::spawn(async move { backend.publish(&node, &written).await });
        let write = AbortOnDropHandle::new(write);
        self.asked = Some(Asked { published, write, patience, overdue: Some(now + patience) });
    }

    /// Waits for the answer to a write, or until it is overdue; for ever when nothing is under way.
    ///
    /// # Errors
    /// When the write failed, or is overdue; it goes on then, and its answer may come later.
    pub async fn answered(&mut self) -> Result<(), BackendError> {
        let Some(asked) = &mut self.asked else { return std::future::pending().await };
        let overdue = asked.overdue;
        let answer = tokio::select! {
            answer = &mut asked.write => answer,
            () = until(overdue) => {
                asked.overdue = None;
                let seconds = asked.patience.as_secs();
                let text = format!("the API server has not answered within {seconds} s; going on without");
                return self.record(Err(BackendError::Unreachable(text.into())));
            }
        };
        let Some(asked) = self.asked.take() else { return Ok(()) };
        let answer = answer.unwrap_or_else(|panic| {
            Err(BackendError::Api(Explained::of("writing the annotations has panicked", panic)))
        });
        let wanted = self.wanted.take();
        self.record(answer)?;
        self.checked_in = self.checked_in.max(asked.published.last_seen);
        if let Some(wanted) = wanted.filter(|wanted| *wanted != asked.published) {
            self.ask(wanted, PATIENCE, Instant::now());
        }
        Ok(())
    }

    fn record(&mut self, answer: Result<bool, BackendError>) -> Result<(), BackendError> {
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
        answer.map(drop)
    }
}

fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(rand::random_range(0.8..1.2))
}

async fn until(time: Option<Instant>) {
    match time {
        Some(time) => tokio::time::sleep_until(time.into()).await,
        None => std::future::pending().await,
    }
}

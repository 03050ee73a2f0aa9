//! Whether the agent does its work: `/health` says it.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

/// Shared record of the last reconciliation.
#[derive(Clone, Debug)]
pub struct Health {
    inner: Arc<Mutex<State>>,
    /// Longest time without a successful reconciliation that is still healthy.
    patience: Duration,
}

#[derive(Debug)]
struct State {
    last_success: Instant,
    last_error: Option<String>,
    /// What cannot become well again.
    broken: Option<String>,
    /// What works less well than it should, through no fault of this agent.
    degraded: Vec<String>,
}

/// How long `/health` reports a panic before the process ends.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// Exit code after a panic, as the standard library's.
const PANICKED: i32 = 101;

impl Health {
    /// Starts healthy; turns unhealthy after `patience` without a success.
    pub fn new(now: Instant, patience: Duration) -> Self {
        let state = State { last_success: now, last_error: None, broken: None, degraded: Vec::new() };
        Self { inner: Arc::new(Mutex::new(state)), patience }
    }

    /// Begins to wait for a success now: until now there was nothing to do.
    pub fn begin(&self, now: Instant) {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).last_success = now;
    }

    /// Records a reconciliation that did all it meant to.
    pub fn succeeded(&self, now: Instant) {
        let mut state = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        state.last_success = now;
        state.last_error = None;
    }

    /// Records why the last reconciliation fell short.
    pub fn failed(&self, why: String) {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).last_error = Some(why);
    }

    /// What is wrong now, however short: a fault, or why the last reconciliation fell short.
    pub fn problem(&self) -> Option<String> {
        let state = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        state.broken.clone().or_else(|| state.last_error.clone())
    }

    /// Records a fault that only a new process can repair.
    pub fn broken(&self, why: String) {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).broken = Some(why);
    }

    /// Replaces what works less well than it should. The agent still counts as healthy: restarting it
    /// repairs no other location.
    pub fn set_degraded(&self, degraded: Vec<String>) {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).degraded = degraded;
    }

    /// What works less well than it should, a sentence each.
    pub fn degraded(&self) -> Vec<String> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).degraded.clone()
    }

    /// Ends the process after a panic of any task or thread: one that is missing
    /// is not noticed, and the data path needs no agent until the next one.
    pub fn end_on_panic(&self) {
        let health = self.clone();
        end_on_panic(LAST_WORDS, move |why| health.broken(why));
    }

    /// `Err` with a reason once the agent has made no progress for too long.
    pub fn check(&self, now: Instant) -> Result<(), String> {
        let state = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(why) = &state.broken {
            return Err(why.clone());
        }
        let idle = now.saturating_duration_since(state.last_success);
        if idle <= self.patience {
            return Ok(());
        }
        let why = state.last_error.as_deref().unwrap_or("the reconcile loop does not answer");
        Err(format!("no successful reconciliation for {} s: {why}", idle.as_secs()))
    }
}

/// After a panic anywhere in the process: its message as always, `report`, and the
/// end with exit code 101 that much later.
pub fn end_on_panic(later: Duration, report: impl Fn(String) + Send + Sync + 'static) {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        usual(panic);
        report(panic.to_string());
        // The thread that panicked may hold anything; this one holds nothing.
        let ends = std::thread::Builder::new().spawn(move || {
            std::thread::sleep(later);
            std::process::exit(PANICKED);
        });
        if ends.is_err() {
            std::process::exit(PANICKED);
        }
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn health_fails_with_the_reason_only_after_patience_is_over() {
        let start = Instant::now();
        let health = Health::new(start, Duration::from_secs(90));
        health.failed("no route socket".to_owned());
        assert_eq!(health.check(start + Duration::from_secs(90)), Ok(()));
        let reason = health.check(start + Duration::from_secs(91)).unwrap_err();
        assert!(reason.contains("no route socket"), "{reason}");
        health.succeeded(start + Duration::from_secs(92));
        assert_eq!(health.check(start + Duration::from_secs(93)), Ok(()));
    }

    #[test]
    fn who_begins_late_has_the_whole_patience_from_then_on() {
        let (start, patience) = (Instant::now(), Duration::from_secs(90));
        let health = Health::new(start, patience);
        let later = start + patience * 10;
        assert!(health.check(later).is_err());
        health.begin(later);
        assert_eq!(health.check(later + patience), Ok(()));
        assert!(health.check(later + patience * 2).is_err());
    }

    #[test]
    fn what_is_broken_stays_broken() {
        let start = Instant::now();
        let health = Health::new(start, Duration::from_secs(90));
        health.broken("a task panicked".to_owned());
        health.succeeded(start);
        assert_eq!(health.check(start), Err("a task panicked".to_owned()));
    }
}

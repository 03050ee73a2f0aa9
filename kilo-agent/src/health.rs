//! Whether the agent works, for `/health`.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;

/// Shared record of the last reconciliation, which counts once this node's annotations are written, too.
#[derive(Clone, Debug)]
pub struct Health {
    inner: Arc<Mutex<State>>,
    /// Maximum time since the last successful reconciliation that still counts as healthy.
    patience: Duration,
}

#[derive(Debug)]
struct State {
    /// `None` until the first: a rollout waits for it, and stops at an agent that never has one.
    last_success: Option<Instant>,
    last_error: Option<String>,
    /// A fault that cannot be repaired in this process.
    broken: Option<String>,
    /// Impairments that are not this agent's fault.
    degraded: Vec<String>,
}

/// How long `/health` reports a panic before the process ends.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// Exit code after a panic, like that of the standard library.
const PANICKED: i32 = 101;

impl Health {
    /// Healthy from the first success on, and unhealthy again after `patience` without another.
    pub fn new(patience: Duration) -> Self {
        let state = State { last_success: None, last_error: None, broken: None, degraded: Vec::new() };
        Self { inner: Arc::new(Mutex::new(state)), patience }
    }

    /// Records that the host is in sync, and this node's annotations are written.
    pub fn succeeded(&self, now: Instant) {
        let mut state = self.inner.lock();
        state.last_success = Some(now);
        state.last_error = None;
    }

    /// Records why the last reconciliation failed, or the last write of this node's annotations.
    pub fn failed(&self, why: String) {
        self.inner.lock().last_error = Some(why);
    }

    /// The current problem, however short: a fault, or why the last reconciliation failed.
    pub fn problem(&self) -> Option<String> {
        let state = self.inner.lock();
        state.broken.clone().or_else(|| state.last_error.clone())
    }

    /// Records a fault that only a new process can repair.
    pub fn broken(&self, why: String) {
        self.inner.lock().broken = Some(why);
    }

    /// Replaces the list of impairments. The agent still counts as healthy: restarting it would not repair
    /// another location.
    pub fn set_degraded(&self, degraded: Vec<String>) {
        self.inner.lock().degraded = degraded;
    }

    /// Current impairments, one sentence each.
    pub fn degraded(&self) -> Vec<String> {
        self.inner.lock().degraded.clone()
    }

    /// Exits the process after a panic of any task or thread: a missing one would go unnoticed, and the data
    /// path works without an agent until the next one starts.
    pub fn end_on_panic(&self) {
        let health = self.clone();
        end_on_panic(LAST_WORDS, move |why| health.broken(why));
    }

    /// `Err` with a reason before the first success, and once there has been none for too long.
    pub fn check(&self, now: Instant) -> Result<(), String> {
        let state = self.inner.lock();
        if let Some(why) = &state.broken {
            return Err(why.clone());
        }
        let Some(last_success) = state.last_success else {
            let why = state.last_error.as_deref().unwrap_or("the first one is under way");
            return Err(format!("no reconciliation has succeeded yet: {why}"));
        };
        let idle = now.saturating_duration_since(last_success);
        if idle <= self.patience {
            return Ok(());
        }
        let why = state.last_error.as_deref().unwrap_or("the reconcile loop does not answer");
        Err(format!("no successful reconciliation for {} s: {why}", idle.as_secs()))
    }
}

/// Installs a panic hook for the whole process: the usual message, then `report`, then exit with code 101
/// after `later`.
pub fn end_on_panic(later: Duration, report: impl Fn(String) + Send + Sync + 'static) {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        usual(panic);
        report(panic.to_string());
        // The thread that panicked may hold locks; this one holds none.
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

    const PATIENCE: Duration = Duration::from_secs(90);

    #[test]
    fn nobody_is_healthy_before_the_first_success() {
        let (start, health) = (Instant::now(), Health::new(PATIENCE));
        let reason = health.check(start).unwrap_err();
        assert!(reason.contains("is under way"), "{reason}");
        health.failed("port 51820 is in use".to_owned());
        let reason = health.check(start).unwrap_err();
        assert!(reason.contains("port 51820 is in use"), "{reason}");
        health.succeeded(start);
        assert_eq!(health.check(start), Ok(()));
    }

    #[test]
    fn later_failures_count_only_after_patience_is_over() {
        let (start, health) = (Instant::now(), Health::new(PATIENCE));
        health.succeeded(start);
        health.failed("no route socket".to_owned());
        assert_eq!(health.check(start + PATIENCE), Ok(()));
        let reason = health.check(start + Duration::from_secs(91)).unwrap_err();
        assert!(reason.contains("no route socket"), "{reason}");
        health.succeeded(start + Duration::from_secs(92));
        assert_eq!(health.check(start + Duration::from_secs(93)), Ok(()));
    }

    #[test]
    fn what_is_broken_stays_broken() {
        let (start, health) = (Instant::now(), Health::new(PATIENCE));
        health.broken("a task panicked".to_owned());
        health.succeeded(start);
        assert_eq!(health.check(start), Err("a task panicked".to_owned()));
    }
}

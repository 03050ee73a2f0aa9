//! Whether the agent does its work: `/health` tells the truth.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

/// Shared record of the last reconciliation.
#[derive(Clone, Debug)]
pub struct Health {
    inner: Arc<Mutex<State>>,
    /// Longest time without a finished reconciliation that is still healthy.
    patience: Duration,
}

#[derive(Debug)]
struct State {
    last_success: Instant,
    last_error: Option<String>,
}

impl Health {
    /// Starts healthy; turns unhealthy after `patience` without a success.
    pub fn new(now: Instant, patience: Duration) -> Self {
        Self { inner: Arc::new(Mutex::new(State { last_success: now, last_error: None })), patience }
    }

    /// Records a reconciliation that did all it meant to.
    pub fn succeeded(&self, now: Instant) {
        let mut state = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        *state = State { last_success: now, last_error: None };
    }

    /// Records why the last reconciliation fell short.
    pub fn failed(&self, why: String) {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).last_error = Some(why);
    }

    /// `Err` with a reason once the agent has made no progress for too long.
    pub fn check(&self, now: Instant) -> Result<(), String> {
        let state = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let idle = now.saturating_duration_since(state.last_success);
        if idle <= self.patience {
            return Ok(());
        }
        let why = state.last_error.as_deref().unwrap_or("the reconcile loop does not answer");
        Err(format!("no successful reconciliation for {} s: {why}", idle.as_secs()))
    }
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
}

//! Waiting in tests, as in the lab, except that a wait in vain panics with its description. Functions that
//! block the thread are here, those that yield to other tasks in [`task`]. Nothing else in tests may sleep.

use std::time::Duration;

pub use kilo_lab::wait::{Awaited, pace, time_passes};

/// Waits until `look` finds something; returns it, or for a `bool` how long that took.
#[track_caller]
pub fn until<L: Awaited>(what: &str, limit: Duration, mut look: impl FnMut() -> L) -> L::Found {
    match kilo_lab::wait::until(what, limit, || Ok(look())) {
        Ok(found) => found,
        Err(error) => panic!("{error}"),
    }
}

/// Waits until a value has been stable for `quiet`; returns it.
#[track_caller]
pub fn settled<T: PartialEq>(what: &str, limit: Duration, quiet: Duration, mut look: impl FnMut() -> T) -> T {
    match kilo_lab::wait::settled(what, limit, quiet, || Ok(look())) {
        Ok(value) => value,
        Err(error) => panic!("{error}"),
    }
}

/// Checks for that long that a condition holds, and fails as soon as it does not: for what must not happen.
#[track_caller]
pub fn stays(what: &str, time: Duration, mut is_so: impl FnMut() -> bool) {
    if let Err(error) = kilo_lab::wait::stays(what, time, || Ok(is_so())) {
        panic!("{error}");
    }
}

/// Counterparts for tasks that share their thread with others.
pub mod task {
    use std::{
        ops::ControlFlow,
        time::{Duration, Instant},
    };

    use kilo_lab::wait::{Awaited, Patience};

    /// Waits until `look` finds something; returns it, or for a `bool` how long that took.
    pub async fn until<L: Awaited>(
        what: &str,
        limit: Duration,
        mut look: impl AsyncFnMut() -> L,
    ) -> L::Found {
        let patience = Patience::new(what, limit);
        loop {
            match patience.after(look().await) {
                Ok(ControlFlow::Break(found)) => return found,
                Ok(ControlFlow::Continue(pause)) => sleep(pause).await,
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Checks for that long that a condition holds, and fails as soon as it does not: for what must not
    /// happen.
    pub async fn stays(what: &str, time: Duration, mut is_so: impl AsyncFnMut() -> bool) {
        let began = Instant::now();
        loop {
            let waited = began.elapsed();
            assert!(is_so().await, "no longer so after {waited:?} of {time:?}: {what}");
            if waited >= time {
                return;
            }
            sleep(Duration::from_millis(100).min(time.saturating_sub(waited))).await;
        }
    }

    /// Keeps a fault in place for that long before it is mended.
    pub async fn fault_lasts(time: Duration) {
        sleep(time).await;
    }

    /// Lets time pass where time itself is needed: a clock is read, traffic is counted, or nothing signals
    /// the end.
    pub async fn time_passes(time: Duration, _why: &str) {
        sleep(time).await;
    }

    /// The pause between repeated actions, such as heartbeats.
    pub async fn pace(pause: Duration) {
        sleep(pause).await;
    }

    #[expect(clippy::disallowed_methods, reason = "all waiting of the tests goes through this module")]
    async fn sleep(time: Duration) {
        tokio::time::sleep(time).await;
    }
}

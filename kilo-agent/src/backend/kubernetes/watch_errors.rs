//! Log lines about watches that break, and about a start that fails: while the API server is away, each is tried
//! again every few seconds.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use kilo_core::errors::error_chain;
use kube::runtime::watcher;
use parking_lot::Mutex;

use super::client::{Asked, explain};

/// How often it is logged that something still fails.
const AGAIN: Duration = Duration::from_mins(1);

/// The last log line of each kind of objects, or of errors.
#[derive(Debug, Default)]
pub struct WatchErrors(Mutex<BTreeMap<&'static str, Logged>>);

#[derive(Debug)]
struct Logged {
    at: Instant,
    /// Errors since then that were not logged.
    left_out: u32,
}

impl WatchErrors {
    /// Logs why a watch broke, at most once a minute; the watcher restarts by itself.
    pub fn report(&self, error: watcher::Error, asked: Asked<'static>) {
        let reason = match error {
            watcher::Error::WatchError(status) if status.code == 410 => {
                tracing::debug!(?asked, "watch expired; listing again");
                return;
            }
            // The watch restarts at once; if the server is really away, that fails and is reported. Without
            // bookmarks a server sends nothing while nothing changes.
            watcher::Error::WatchFailed(error) if !matches!(error, kube::Error::Api(_)) => {
                tracing::debug!(?asked, reason = error_chain(&error), "watch ended; restarting it");
                return;
            }
            watcher::Error::WatchError(status) => explain(kube::Error::Api(status), asked).to_string(),
            watcher::Error::InitialListFailed(error)
            | watcher::Error::WatchStartFailed(error)
            | watcher::Error::WatchFailed(error) => explain(error, asked).to_string(),
            other => error_chain(&other),
        };
        match self.admit(asked.kind(), Instant::now()) {
            Some(0) => tracing::warn!(?asked, reason, "watch interrupted; retrying"),
            Some(left_out) => {
                tracing::warn!(?asked, reason, left_out, "watch is still interrupted; retrying");
            }
            None => tracing::debug!(?asked, reason, "watch interrupted; retrying"),
        }
    }

    /// Whether an error is logged now, and then how many before it were not.
    pub fn admit(&self, kind: &'static str, now: Instant) -> Option<u32> {
        let mut all = self.0.lock();
        let logged = all.get_mut(kind).filter(|logged| now.saturating_duration_since(logged.at) < AGAIN);
        if let Some(logged) = logged {
            logged.left_out = logged.left_out.saturating_add(1);
            return None;
        }
        let before = all.insert(kind, Logged { at: now, left_out: 0 });
        Some(before.map_or(0, |before| before.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watch_that_stays_broken_is_logged_once_a_minute() {
        let (errors, start) = (WatchErrors::default(), Instant::now());
        let at = |kind, seconds| errors.admit(kind, start + Duration::from_secs(seconds));
        assert_eq!((at("Nodes", 0), at("Peers", 1)), (Some(0), Some(0)), "each kind is logged");
        assert_eq!((at("Nodes", 3), at("Nodes", 59)), (None, None));
        assert_eq!(at("Nodes", 60), Some(2), "and how often it was tried meanwhile");
        assert_eq!((at("Nodes", 61), at("Nodes", 7_000)), (None, Some(1)));
        assert_eq!(at("Nodes", 14_000), Some(0), "long after that it is news");
    }
}

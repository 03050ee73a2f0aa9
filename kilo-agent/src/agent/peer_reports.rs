//! Writes the status of Peer objects beside the reconciles: there may be many, or the server may hang.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use tokio_util::task::AbortOnDropHandle;

use crate::backend::{Backend, BackendError, PeersReported};
use kilo_core::topology::{PeerAcceptance, PeerAcceptances};

/// Peers whose status was refused are tried again after this time: it may be refused for good.
const AGAIN: Duration = Duration::from_mins(1);
/// What was written is compared with the objects again after this time: since then somebody may have made them anew,
/// restored them from a backup, or granted the right to write their status.
const COUNTS: Duration = Duration::from_mins(10);

/// What the Peer objects contain, and what is being written.
#[derive(Default)]
pub(super) struct PeerReports {
    written: Option<PeerAcceptances>,
    task: Option<Task>,
    /// What was refused; until `again` only other things are written.
    refused: PeerAcceptances,
    again: Option<Instant>,
    /// Until when `written` counts.
    counts: Option<Instant>,
}

/// A write that is under way.
struct Task {
    wanted: PeerAcceptances,
    write: AbortOnDropHandle<Result<PeersReported, BackendError>>,
}

impl PeerReports {
    /// Forgets what was written: another agent writes it from now on.
    pub fn forget(&mut self) {
        *self = Self::default();
    }

    /// Starts writing what differs, unless a write is under way; then a later call does.
    pub fn report<B: Backend>(&mut self, backend: &Arc<B>, wanted: PeerAcceptances) {
        if self.task.is_some() {
            return;
        }
        if self.counts.is_none_or(|until| Instant::now() >= until) {
            self.written = None;
        }
        if self.written.as_ref() == Some(&wanted) {
            return;
        }
        if self.again.is_none_or(|again| Instant::now() >= again) {
            self.refused.clear();
        }
        let mut said = differing(&wanted, self.written.as_ref());
        said.retain(|name, acceptance| self.refused.get(name) != Some(acceptance));
        if said.is_empty() && !self.refused.is_empty() {
            return;
        }
        let backend = Arc::clone(backend);
        let write = tokio::spawn(async move { backend.report_peers(&said).await });
        self.task = Some(Task { wanted, write: AbortOnDropHandle::new(write) });
    }

    /// Waits for the write that is under way, forever when there is none. True when it has written everything
    /// that it was to write.
    pub async fn finished(&mut self) -> bool {
        let Some(task) = &mut self.task else { return std::future::pending().await };
        let answer = (&mut task.write).await;
        let Some(Task { wanted, .. }) = self.task.take() else { return false };
        match answer {
            Ok(Ok(PeersReported { failed, .. })) => {
                // Otherwise only a part was compared.
                if self.written.is_none() {
                    self.counts = Some(Instant::now() + COUNTS);
                }
                let is_complete = failed.is_empty();
                if !is_complete {
                    self.again = Some(Instant::now() + AGAIN);
                }
                let refused = failed.into_iter().filter_map(|name| wanted.get_key_value(&name));
                self.refused.extend(refused.map(|(name, acceptance)| (name.clone(), acceptance.clone())));
                let is_written = |(name, acceptance): &(String, PeerAcceptance)| {
                    self.refused.get(name) != Some(acceptance)
                };
                self.written = Some(wanted.into_iter().filter(is_written).collect());
                return is_complete;
            }
            Ok(Err(error)) => tracing::debug!(%error, "the status of peers is not written yet"),
            Err(error) => tracing::error!(%error, "failed to write the status of peers"),
        }
        false
    }
}

/// What is not written yet: usually one of thousands of peers.
fn differing(wanted: &PeerAcceptances, written: Option<&PeerAcceptances>) -> PeerAcceptances {
    let is_written =
        |name: &str, acceptance| written.is_some_and(|written| written.get(name) == Some(acceptance));
    let differs = wanted.iter().filter(|(name, acceptance)| !is_written(name, *acceptance));
    differs.map(|(name, acceptance)| (name.clone(), acceptance.clone())).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use kilo_core::objects::{Published, Snapshot};
    use parking_lot::Mutex;
    use tokio::sync::watch;

    use super::*;

    /// An API server that refuses the status of the peer b, and all it was asked to write.
    #[derive(Default)]
    struct Refuses(Mutex<Vec<Vec<String>>>);

    impl Backend for Refuses {
        fn watch(&self) -> watch::Receiver<Arc<Snapshot>> {
            watch::channel(Arc::default()).1
        }

        async fn publish(&self, _: &str, _: &Published) -> Result<bool, BackendError> {
            Ok(true)
        }

        async fn report_peers(&self, peers: &PeerAcceptances) -> Result<PeersReported, BackendError> {
            self.0.lock().push(peers.keys().cloned().collect());
            let failed = peers.keys().filter(|name| *name == "b").cloned().collect();
            Ok(PeersReported { writes: 1, failed })
        }

        async fn declare_dead(&self, _: &str, _: i64) -> Result<bool, BackendError> {
            Ok(false)
        }

        async fn retract(&self, _: &str) -> Result<(), BackendError> {
            Ok(())
        }
    }

    #[tokio::test]
    async fn a_peer_that_was_refused_is_tried_again_in_a_minute_and_others_are_written_meanwhile() {
        let (backend, mut reports) = (Arc::new(Refuses::default()), PeerReports::default());
        let wanted = |names: &[&str]| -> PeerAcceptances {
            names.iter().map(|name| ((*name).to_owned(), PeerAcceptance::Accepted)).collect()
        };
        reports.report(&backend, wanted(&["a", "b"]));
        assert!(!reports.finished().await, "or it would be tried again at once");
        reports.report(&backend, wanted(&["a", "b"]));
        assert!(reports.task.is_none(), "not so soon");
        reports.report(&backend, wanted(&["a", "b", "c"]));
        assert!(reports.finished().await);
        reports.again = Some(Instant::now());
        reports.report(&backend, wanted(&["a", "b", "c"]));
        assert!(!reports.finished().await);
        assert_eq!(*backend.0.lock(), [vec!["a", "b"], vec!["c"], vec!["b"]]);
    }

    #[tokio::test]
    async fn what_was_written_is_compared_with_the_objects_again_after_a_while() {
        let (backend, mut reports) = (Arc::new(Refuses::default()), PeerReports::default());
        let wanted = || PeerAcceptances::from([("a".to_owned(), PeerAcceptance::Accepted)]);
        for time in 1..=2 {
            reports.report(&backend, wanted());
            assert!(reports.task.is_some(), "time {time}");
            assert!(reports.finished().await);
            reports.report(&backend, wanted());
            assert!(reports.task.is_none(), "nothing has changed");
            // Meanwhile its object is deleted and made anew, or its status may be written at last.
            reports.counts = Some(Instant::now());
        }
        assert_eq!(*backend.0.lock(), [["a"], ["a"]]);
    }

    #[test]
    fn only_what_is_new_or_other_than_written_is_reported() {
        let all = |names: &[&str]| -> PeerAcceptances {
            names.iter().map(|name| ((*name).to_owned(), PeerAcceptance::Accepted)).collect()
        };
        let written = all(&["a", "gone"]);
        assert_eq!(differing(&all(&["a", "b"]), Some(&written)), all(&["b"]));
        assert_eq!(differing(&all(&["a", "b"]), None), all(&["a", "b"]));
    }
}

//! Sets a dead leader's `last-seen` to 0; otherwise nodes without failover would wait for its heartbeat to
//! expire.

use std::{sync::Arc, time::Duration};

use super::Agent;
use crate::backend::Backend;

/// Pauses between attempts to mark a dead leader, in seconds. The API server may have run on that node, and a
/// snapshot may lack the last heartbeat. After a minute every node considers the heartbeat too old.
const PAUSES: [u32; 16] = [1, 1, 2, 2, 3, 3, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5];

impl<B: Backend> Agent<B> {
    /// Marks a dead leader as dead for nodes without failover, beside the reconciles.
    pub(super) fn declare_dead(&self) {
        let Some(failover) = &self.sources.failover else { return };
        let Some(node) = failover.declares_dead() else { return };
        let (backend, reporter) = (Arc::clone(&self.backend), failover.reporter());
        tokio::spawn(async move {
            mark_dead(&*backend, &node, || reporter.declares_dead(&node), Duration::from_secs(1)).await
        });
    }
}

/// Retries until the leader is marked or no longer dead; returns whether this agent marked it. Each attempt
/// compares with the newest known heartbeat, so one written meanwhile is not lost. The pauses are in `unit`s.
async fn mark_dead(backend: &impl Backend, node: &str, is_dead: impl Fn() -> bool, unit: Duration) -> bool {
    let snapshots = backend.watch();
    for pause in PAUSES {
        let last_seen = snapshots.borrow().nodes.get(node).map(|known| known.last_seen);
        let Some(last_seen) = last_seen.filter(|last_seen| *last_seen != 0 && is_dead()) else {
            return false;
        };
        match backend.declare_dead(node, last_seen).await {
            Ok(true) => {
                tracing::info!(node, "the leader is dead; set its last-seen to 0 for nodes without failover");
                return true;
            }
            Ok(false) => {
                tracing::debug!(node, "the dead leader's last-seen has changed since it was read; retrying");
            }
            Err(error) if error.is_temporary() => {
                tracing::debug!(%error, node, "failed to mark the dead leader's Node; retrying");
            }
            Err(error) => tracing::warn!(%error, node, "failed to mark the dead leader's Node; retrying"),
        }
        tokio::time::sleep(unit * pause).await;
    }
    false
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use kilo_core::{
        objects::{Published, Snapshot},
        topology::{CheckedIn, Node},
    };
    use parking_lot::Mutex;
    use tokio::sync::watch;

    use super::*;
    use crate::backend::BackendError;

    const MS: Duration = Duration::from_millis(1);

    /// An API server whose latest heartbeat, `has`, shows up in snapshots only after `shown` tries.
    struct Lags {
        snapshots: watch::Sender<Arc<Snapshot>>,
        has: i64,
        shown: usize,
        tries: Mutex<Vec<i64>>,
    }

    fn snapshot(last_seen: i64) -> Arc<Snapshot> {
        let mut snapshot = Snapshot::default();
        let node = Node { name: "a1".to_owned(), ..Node::default() };
        snapshot.nodes.insert(CheckedIn { node, last_seen });
        snapshot.into()
    }

    impl Backend for Lags {
        fn watch(&self) -> watch::Receiver<Arc<Snapshot>> {
            self.snapshots.subscribe()
        }

        async fn publish(&self, _: &str, _: &Published) -> Result<bool, BackendError> {
            Ok(false)
        }

        async fn declare_dead(&self, _: &str, last_seen: i64) -> Result<bool, BackendError> {
            let mut tries = self.tries.lock();
            tries.push(last_seen);
            if tries.len() == self.shown {
                self.snapshots.send_replace(snapshot(self.has));
            }
            Ok(last_seen == self.has)
        }

        async fn retract(&self, _: &str) -> Result<(), BackendError> {
            Ok(())
        }
    }

    fn lags(known: i64, has: i64, shown: usize) -> Lags {
        Lags { snapshots: watch::channel(snapshot(known)).0, has, shown, tries: Mutex::default() }
    }

    #[tokio::test]
    async fn a_heartbeat_that_is_not_known_yet_costs_a_second_and_not_the_minute() {
        let backend = lags(970, 1_000, 3);
        assert!(mark_dead(&backend, "a1", || true, MS).await);
        assert_eq!(*backend.tries.lock(), [970, 970, 970, 1_000]);
        assert!(PAUSES[..3].iter().sum::<u32>() < 5);
    }

    #[tokio::test]
    async fn who_is_heard_again_or_was_declared_dead_is_left_alone() {
        let backend = lags(970, 1_000, 99);
        let heard = Mutex::new(3);
        let is_dead = || {
            let mut left = heard.lock();
            *left -= 1;
            *left > 0
        };
        assert!(!mark_dead(&backend, "a1", is_dead, MS).await);
        assert_eq!(backend.tries.lock().len(), 2, "it is heard again");
        for known in [lags(0, 0, 99), lags(970, 0, 1)] {
            assert!(!mark_dead(&known, "a1", || true, MS).await);
            assert!(known.tries.lock().len() <= 1, "somebody else has said it");
        }
        assert!(!mark_dead(&backend, "gone", || true, MS).await);
    }

    #[tokio::test]
    async fn it_is_tried_for_a_minute() {
        let backend = lags(970, 1_000, 99);
        assert!(!mark_dead(&backend, "a1", || true, MS).await);
        assert!((60..90).contains(&PAUSES.iter().sum::<u32>()));
        assert_eq!(backend.tries.lock().len(), PAUSES.len());
    }
}

//! Saves the last good topology beside the reconciles: with thousands of nodes writing takes longer than a
//! reconcile.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use parking_lot::Mutex;
use tokio::task::JoinSet;

use super::state::State;
use crate::{
    backend::last_good::{self, LastGood},
    metrics::Metrics,
};
use kilo_core::topology::Node;

/// The other nodes as an earlier agent of this host, `node`, knew them; empty when it left no file.
pub(super) fn nodes(path: &Path, node: &str) -> Vec<Node> {
    last_good::load_nodes(path, node).unwrap_or_else(|error| {
        let path = path.display();
        tracing::warn!(%path, %error, "ignoring the saved topology: addresses that nodes lost before this start are not known");
        Vec::new()
    })
}

/// The file and the tasks that write it.
pub(super) struct LastGoodWriter {
    file: Arc<Mutex<LastGood>>,
    /// Something besides heartbeats may differ from what was written.
    stale: Arc<AtomicBool>,
    writers: JoinSet<()>,
}

impl LastGoodWriter {
    pub fn new(file: LastGood) -> Self {
        Self {
            file: Arc::new(Mutex::new(file)),
            stale: Arc::new(AtomicBool::new(true)),
            writers: JoinSet::new(),
        }
    }

    /// Notes that something besides heartbeats has changed.
    pub fn note_change(&self) {
        self.stale.store(true, Ordering::Release);
    }

    /// Starts writing `state` if something has changed and the last write was some seconds ago; otherwise a
    /// later call does.
    pub fn keep(&mut self, state: &State, metrics: &Metrics, now: Instant) {
        while self.writers.try_join_next().is_some() {}
        let due = self.file.try_lock().is_some_and(|file| file.is_due(now));
        if !due || !self.stale.swap(false, Ordering::AcqRel) {
            return;
        }
        let (file, stale) = (Arc::clone(&self.file), Arc::clone(&self.stale));
        let (observed, metrics) = (Arc::clone(&state.observed), metrics.clone());
        let without_address: Vec<_> = state.liveness.without_address().cloned().collect();
        self.writers.spawn_blocking(move || {
            let mut file = file.lock();
            let without_address = without_address.iter().map(|node| &**node);
            let peers = observed.snapshot.peers.values();
            if let Err(error) = file.keep(observed.ready_nodes(), without_address, peers, now) {
                stale.store(true, Ordering::Release);
                metrics.error("last_good");
                tracing::warn!(%error, "failed to save the last good topology; a start without API server would have none");
            }
        });
    }

    /// Waits for the write that is under way.
    pub async fn finish(mut self) {
        while self.writers.join_next().await.is_some() {}
    }
}

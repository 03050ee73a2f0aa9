//! Starts while the API server is away: after a short wait the agent works with the last good topology, until
//! the server answers.

use std::{
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use kube::Client;
use tokio::sync::{oneshot, watch};
use tokio_util::task::AbortOnDropHandle;

use super::{KubernetesBackend, NodesFrom, watch_errors::WatchErrors};
use crate::backend::{Backend, BackendError, Handshake, Happened, PeersReported, SlicesReport, TunnelStatus};
use kilo_core::{
    errors::Explained,
    objects::{Published, Snapshot},
    topology::PeerAcceptances,
};

/// How long to wait for the server before the last good topology is used.
const WAIT: Duration = Duration::from_secs(5);
/// Time between two attempts, give or take a fifth.
const RETRY: Duration = Duration::from_secs(5);

/// The Kubernetes backend, or its saved topology while the server is away.
pub struct StartupFallback {
    connected: Arc<OnceLock<KubernetesBackend>>,
    snapshots: watch::Receiver<Arc<Snapshot>>,
    _connecting: AbortOnDropHandle<()>,
}

impl StartupFallback {
    /// Waits until the server has listed everything; if that takes long and a topology was saved, that is the
    /// first snapshot. The server is contacted after `spread`.
    ///
    /// # Errors
    /// When the server refuses before a saved topology is in use.
    pub async fn start(
        client: Client,
        hostname: &str,
        topology_label: &str,
        from: NodesFrom,
        spread: Duration,
        remembered: impl FnOnce() -> Option<Snapshot>,
    ) -> Result<Self, BackendError> {
        let (sender, snapshots) = watch::channel(Arc::default());
        let connected = Arc::new(OnceLock::new());
        let (answer, mut answered) = oneshot::channel();
        let (holder, own) = (Arc::clone(&connected), sender.clone());
        let (hostname, label) = (hostname.to_owned(), topology_label.to_owned());
        let connecting = async move {
            tokio::time::sleep(spread).await;
            let Some(backend) = connect(client, (&hostname, &label, &from), answer).await else { return };
            let mut real = backend.watch();
            let _ = holder.set(backend);
            loop {
                let snapshot = Arc::clone(&real.borrow_and_update());
                own.send_replace(snapshot);
                if real.changed().await.is_err() {
                    return;
                }
            }
        };
        let connecting = AbortOnDropHandle::new(tokio::spawn(connecting));
        let backend = |snapshots| Self { connected, snapshots, _connecting: connecting };
        if let Ok(answer) = tokio::time::timeout(WAIT, &mut answered).await {
            return finish(answer, sender, snapshots).await.map(backend);
        }
        if let Some(remembered) = remembered() {
            tracing::warn!(
                nodes = remembered.nodes.len(),
                peers = remembered.peers.len(),
                "{}; working with the last good topology",
                if spread > WAIT {
                    "all nodes may be booting, so agents contact the API server one after another"
                } else {
                    "API server unreachable"
                }
            );
            // The server may have answered this very moment.
            sender.send_if_modified(|current| {
                let first = current.nodes.is_empty();
                if first {
                    *current = Arc::new(remembered);
                }
                first
            });
            drop(answered);
            return Ok(backend(snapshots));
        }
        finish(answered.await, sender, snapshots).await.map(backend)
    }
}

/// Interprets the server's first answer; waits for the snapshot it brings.
async fn finish(
    answer: Result<Result<(), BackendError>, oneshot::error::RecvError>,
    sender: watch::Sender<Arc<Snapshot>>,
    mut snapshots: watch::Receiver<Arc<Snapshot>>,
) -> Result<watch::Receiver<Arc<Snapshot>>, BackendError> {
    drop(sender);
    answer.unwrap_or_else(|gone| {
        Err(BackendError::Api(Explained::of("failed to connect; see the log", gone)))
    })?;
    // Marked as unseen again for the first reconcile.
    let _ = snapshots.changed().await;
    snapshots.mark_changed();
    Ok(snapshots)
}

/// Retries until the server has listed everything. A refusal ends it while the caller waits for the answer;
/// afterwards it is retried, because the agent is already at work.
async fn connect(
    client: Client,
    (hostname, label, from): (&str, &str, &NodesFrom),
    answer: oneshot::Sender<Result<(), BackendError>>,
) -> Option<KubernetesBackend> {
    let errors = WatchErrors::default();
    loop {
        match KubernetesBackend::start_from(client.clone(), Some(hostname), label, from).await {
            Ok(backend) => {
                if answer.send(Ok(())).is_err() {
                    tracing::info!("API server reachable again");
                }
                return Some(backend);
            }
            Err(error) if error.is_temporary() || answer.is_closed() => {
                match errors.admit(error.label(), Instant::now()) {
                    Some(left_out) => tracing::warn!(%error, left_out, "{}", why_not_yet(&error)),
                    None => tracing::debug!(%error, "{}", why_not_yet(&error)),
                }
            }
            Err(error) => {
                let _ = answer.send(Err(error));
                return None;
            }
        }
        tokio::time::sleep(RETRY.mul_f64(rand::random_range(0.8..1.2))).await;
    }
}

/// The log line about an attempt that failed; the error says the rest.
const fn why_not_yet(error: &BackendError) -> &'static str {
    if error.is_temporary() {
        "API server unreachable; retrying"
    } else {
        "the API server refuses to list nodes and peers; going on with the last good topology and retrying"
    }
}

impl Backend for StartupFallback {
    fn watch(&self) -> watch::Receiver<Arc<Snapshot>> {
        self.snapshots.clone()
    }

    async fn publish(&self, node: &str, published: &Published) -> Result<bool, BackendError> {
        self.connected.get().ok_or_else(away)?.publish(node, published).await
    }

    async fn report_peers(&self, peers: &PeerAcceptances) -> Result<PeersReported, BackendError> {
        self.connected.get().ok_or_else(away)?.report_peers(peers).await
    }

    fn tunnel_status(&self, peer: &str) -> Option<TunnelStatus> {
        self.connected.get()?.tunnel_status(peer)
    }

    async fn report_handshake(&self, peer: &str, handshake: &Handshake) -> Result<bool, BackendError> {
        self.connected.get().ok_or_else(away)?.report_handshake(peer, handshake).await
    }

    fn slices(&self) -> Option<SlicesReport> {
        self.connected.get()?.slices()
    }

    async fn declare_dead(&self, node: &str, last_seen: i64) -> Result<bool, BackendError> {
        self.connected.get().ok_or_else(away)?.declare_dead(node, last_seen).await
    }

    async fn report_network(&self, node: &str, available: bool) -> Result<(), BackendError> {
        self.connected.get().ok_or_else(away)?.report_network(node, available).await
    }

    async fn event(&self, happened: &Happened) -> Result<(), BackendError> {
        self.connected.get().ok_or_else(away)?.event(happened).await
    }

    async fn retract(&self, node: &str) -> Result<(), BackendError> {
        self.connected.get().ok_or_else(away)?.retract(node).await
    }
}

fn away() -> BackendError {
    BackendError::Unreachable("the API server has not answered since the start".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_refuses_is_not_called_unreachable() {
        assert!(why_not_yet(&away()).contains("unreachable"));
        let refused = BackendError::Api("nodes is forbidden".into());
        assert!(why_not_yet(&refused).contains("refuses"), "{}", why_not_yet(&refused));
    }
}

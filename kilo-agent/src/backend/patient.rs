//! A backend that is not there yet: until it is, what is known from before is
//! worked with, and nothing is published.

use std::sync::{Arc, OnceLock};

use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use super::{Backend, BackendError, Published, Snapshot};

/// Answers from a remembered snapshot, then from the backend itself. Should
/// the backend never come, the receivers of snapshots are closed.
pub struct Patient<B> {
    snapshots: watch::Receiver<Arc<Snapshot>>,
    backend: Arc<OnceLock<B>>,
    _task: AbortOnDropHandle<()>,
}

impl<B: Backend> Patient<B> {
    /// Works with `remembered` until `connect` has the backend.
    pub fn start(
        remembered: Snapshot,
        connect: impl Future<Output = Result<B, BackendError>> + Send + 'static,
    ) -> Self {
        let (sender, snapshots) = watch::channel(Arc::new(remembered));
        let backend = Arc::new(OnceLock::new());
        let own = Arc::clone(&backend);
        let task = tokio::spawn(async move {
            let mut inner = match connect.await {
                Ok(backend) => own.get_or_init(|| backend).watch(),
                Err(error) => {
                    tracing::error!(%error, "the backend cannot be used");
                    return;
                }
            };
            tracing::info!("nodes and peers come from the backend again");
            loop {
                let snapshot = Arc::clone(&inner.borrow_and_update());
                sender.send_replace(snapshot);
                if inner.changed().await.is_err() {
                    return;
                }
            }
        });
        Self { snapshots, backend, _task: AbortOnDropHandle::new(task) }
    }

    fn backend(&self) -> Result<&B, BackendError> {
        let away = "the backend has not answered since the start; nothing is published until it does";
        self.backend.get().ok_or_else(|| BackendError::Unreachable(away.to_owned()))
    }
}

impl<B: Backend> Backend for Patient<B> {
    fn watch(&self) -> watch::Receiver<Arc<Snapshot>> {
        self.snapshots.clone()
    }

    async fn publish(&self, node: &str, published: &Published) -> Result<bool, BackendError> {
        self.backend()?.publish(node, published).await
    }

    async fn retract(&self, node: &str) -> Result<(), BackendError> {
        self.backend()?.retract(node).await
    }
}

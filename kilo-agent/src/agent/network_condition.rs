//! This node's condition NetworkUnavailable: true from the start of a boot until the data path is up. Agents
//! that restart later do not touch it.

use std::{sync::Arc, time::Duration};

use tokio::sync::watch;

use super::Agent;
use crate::backend::Backend;
use kilo_host::cni::boot::BootConfiguration;

/// Pause between two attempts to write the condition.
const AGAIN: Duration = Duration::from_secs(5);
/// Pause after a refusal: the permission may be granted later.
const REFUSED: Duration = Duration::from_secs(60);

/// Whether pods have network here; `None` as long as there is nothing to report.
pub(super) type Availability = watch::Sender<Option<bool>>;

/// Writes the condition whenever it changes, beside the reconciles: the API server
/// may be away, or be reached through the mesh only.
pub(super) async fn write<B: Backend>(
    backend: Arc<B>,
    node: String,
    mut availability: watch::Receiver<Option<bool>>,
) {
    while availability.changed().await.is_ok() {
        loop {
            let Some(available) = *availability.borrow_and_update() else { break };
            let pause = match backend.report_network(&node, available).await {
                Ok(()) => break,
                Err(error) if error.is_temporary() => {
                    tracing::debug!(%error, "node condition NetworkUnavailable is not written yet");
                    AGAIN
                }
                Err(error) => {
                    tracing::warn!(%error, "failed to write node condition NetworkUnavailable");
                    REFUSED
                }
            };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                // The value changed.
                changed = availability.changed() => if changed.is_err() { return } else { availability.mark_changed() },
            }
        }
    }
}

impl<B: Backend> Agent<B> {
    /// Reports that pods have no network yet, unless an agent of this boot has already published the CNI
    /// configuration.
    pub(super) fn announce_no_network(&self) {
        if self.boot_configuration().is_some_and(|configuration| !configuration.is_published()) {
            self.writers.availability.send_replace(Some(false));
        }
    }

    /// Reports that pods have network, once an agent of this boot has published the CNI configuration.
    pub(super) fn announce_network(&self) {
        if self.boot_configuration().is_some_and(BootConfiguration::is_published) {
            self.writers.availability.send_if_modified(|said| {
                let differs = *said != Some(true);
                *said = Some(true);
                differs
            });
        }
    }
}

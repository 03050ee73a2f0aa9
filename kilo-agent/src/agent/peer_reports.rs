//! Writes the status of Peer objects beside the reconciles: there may be many, or the server may hang.

use std::sync::Arc;

use tokio_util::task::AbortOnDropHandle;

use crate::backend::{Backend, BackendError};
use kilo_core::topology::PeerAcceptances;

/// What the Peer objects contain, and what is being written.
#[derive(Default)]
pub(super) struct PeerReports {
    written: Option<PeerAcceptances>,
    task: Option<(PeerAcceptances, AbortOnDropHandle<Result<u64, BackendError>>)>,
}

impl PeerReports {
    /// Forgets what was written: another agent writes it from now on.
    pub fn forget(&mut self) {
        *self = Self::default();
    }

    /// Starts writing what differs, unless a write is under way; then a later call does.
    pub fn report<B: Backend>(&mut self, backend: &Arc<B>, wanted: PeerAcceptances) {
        if self.task.is_some() || self.written.as_ref() == Some(&wanted) {
            return;
        }
        let (backend, said) = (Arc::clone(backend), differing(&wanted, self.written.as_ref()));
        let report = tokio::spawn(async move { backend.report_peers(&said).await });
        self.task = Some((wanted, AbortOnDropHandle::new(report)));
    }

    /// Waits for the write that is under way, forever when there is none. True when everything was written.
    pub async fn finished(&mut self) -> bool {
        let Some((_, task)) = &mut self.task else { return std::future::pending().await };
        let answer = task.await;
        let Some((said, _)) = self.task.take() else { return false };
        match answer {
            Ok(Ok(_)) => {
                self.written = Some(said);
                return true;
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
mod tests {
    use super::*;
    use kilo_core::topology::PeerAcceptance;

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

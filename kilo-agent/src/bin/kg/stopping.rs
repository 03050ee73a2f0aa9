//! The signals that ask this process to stop.

use anyhow::Result;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Catches SIGTERM and SIGINT from [`Stopping::listen`] on. The first process of a container otherwise
/// ignores them, and its pod is killed only after the grace period.
pub struct Stopping {
    terminate: Signal,
    interrupt: Signal,
}

impl Stopping {
    pub fn listen() -> Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    /// Waits for either signal.
    pub async fn requested(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }

    /// The result of `work`, before anything is set up; `None` when this process is asked to stop first.
    pub async fn before<T>(&mut self, work: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            () = self.requested() => {
                tracing::info!("kg is stopping; it has not set anything up");
                None
            }
            done = work => Some(done),
        }
    }
}

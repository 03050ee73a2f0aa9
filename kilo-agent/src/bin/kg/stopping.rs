//! The signals that ask this process to stop.

use anyhow::Result;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// SIGTERM and SIGINT, from the moment of [`Stopping::listen`] on. The first process of a container
/// ignores them otherwise, and its pod is killed only after the grace period.
pub struct Stopping {
    terminate: Signal,
    interrupt: Signal,
}

impl Stopping {
    pub fn listen() -> Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    /// Waits for one of them.
    pub async fn requested(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }

    /// What this brings, while nothing is set up yet; `None` when this process is to stop before.
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

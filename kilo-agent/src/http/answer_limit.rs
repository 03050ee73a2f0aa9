//! Limits expensive answers: how many are worked on at a time, and how many bytes may wait for clients that
//! read slowly. `/health` is not limited.

use std::{sync::Arc, time::Duration};

use http_body_util::{BodyExt as _, Full};
use hyper::{StatusCode, body::Bytes};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};

use super::{Answer, text};

/// Number of answers worked on at a time.
const WORKING: usize = 2;
/// Maximum KiB of answers that clients have not read yet.
const UNREAD: usize = 64 << 10;
/// How long a request waits for its turn.
const PATIENCE: Duration = Duration::from_secs(5);

/// Limits of one server, shared by its clones: answers being worked on, and unread KiB.
#[derive(Clone, Debug)]
pub struct AnswerLimit {
    working: Arc<Semaphore>,
    unread: Arc<Semaphore>,
}

impl Default for AnswerLimit {
    fn default() -> Self {
        Self { working: Arc::new(Semaphore::new(WORKING)), unread: Arc::new(Semaphore::new(UNREAD)) }
    }
}

/// Bytes that count as unread until the last of them is sent.
struct Unread {
    bytes: Bytes,
    _share: OwnedSemaphorePermit,
}

impl AsRef<[u8]> for Unread {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl AnswerLimit {
    /// Runs `work` when it is its turn; answers that the agent is busy if the turn does not come in time, or
    /// too much is unread.
    pub async fn answer(&self, work: impl Future<Output = Answer>) -> Answer {
        let busy = || text(StatusCode::SERVICE_UNAVAILABLE, "too many requests at a time; try again later\n");
        let Ok(Ok(turn)) = timeout(PATIENCE, self.working.acquire()).await else { return busy() };
        let (head, body) = work.await.into_parts();
        drop(turn);
        let Ok(body) = body.collect().await;
        match self.account(body.to_bytes()) {
            Some(bytes) => Answer::from_parts(head, Full::new(bytes).boxed_unsync()),
            None => busy(),
        }
    }

    /// The bytes, counted as unread while anybody holds them; `None` when too much is unread.
    pub fn account(&self, bytes: Bytes) -> Option<Bytes> {
        let share = u32::try_from(bytes.len().div_ceil(1 << 10)).unwrap_or(u32::MAX);
        let share = Arc::clone(&self.unread).try_acquire_many_owned(share).ok()?;
        Some(Bytes::from_owner(Unread { bytes, _share: share }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_nobody_reads_is_bounded() {
        let answer_limit = AnswerLimit::default();
        let large = || async { text(StatusCode::OK, vec![b'x'; 20 << 20]) };
        let mut held = Vec::new();
        for _ in 0..3 {
            held.push(answer_limit.answer(large()).await);
        }
        assert!(held.iter().all(|answer| answer.status() == StatusCode::OK));
        assert_eq!(answer_limit.answer(large()).await.status(), StatusCode::SERVICE_UNAVAILABLE);
        held.pop();
        assert_eq!(answer_limit.answer(large()).await.status(), StatusCode::OK);
    }
}

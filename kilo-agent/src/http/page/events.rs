//! `/events`: the report as server-sent events, for as long as the connection may last.

use std::{sync::Arc, time::Duration};

use futures::stream;
use http_body_util::{BodyExt as _, StreamBody};
use hyper::{
    Response, StatusCode,
    body::{Bytes, Frame},
    header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue, RETRY_AFTER, X_CONTENT_TYPE_OPTIONS},
};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, sleep},
};
use tokio_util::sync::CancellationToken;

use super::feed::Feed;
use crate::http::{Answer, text};

/// Listeners at a time, fewer than the connections that the node itself may have. The page of one
/// that is too many asks for the status now and then.
pub const MOST_LISTENERS: usize = 24;
/// A look at what is so.
const LOOK: Duration = Duration::from_secs(1);
/// What changes all the time is sent this often, and is how a page knows that the agent lives.
const BEAT: Duration = Duration::from_secs(3);
/// The whole is sent again after this long: heartbeats of nodes are in it.
const WHOLE: Duration = Duration::from_secs(30);
/// Before anything else: a browser comes back after so many milliseconds.
const RETRY: &str = "retry: 1000\n\n";

/// One who listens.
struct Listener {
    feed: Feed,
    /// Ends with the connection, or with the agent.
    closing: CancellationToken,
    _place: OwnedSemaphorePermit,
    /// What the listener knows: the shape, when the whole and when anything was sent.
    sent: Option<(u64, Instant, Instant)>,
    retry_sent: bool,
}

/// Answers with events until `closing`; 503 when too many listen.
pub fn answer(feed: Feed, listeners: &Arc<Semaphore>, closing: CancellationToken) -> Answer {
    let Ok(place) = Arc::clone(listeners).try_acquire_owned() else {
        let mut answer = text(StatusCode::SERVICE_UNAVAILABLE, "too many pages listen; ask for /status\n");
        answer.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("60"));
        return answer;
    };
    let listener = Listener { feed, closing, _place: place, sent: None, retry_sent: false };
    let frames = stream::unfold(listener, |mut listener| async move {
        let bytes = listener.next().await?;
        Some((Ok(Frame::data(bytes)), listener))
    });
    let mut answer = Response::new(StreamBody::new(frames).boxed_unsync());
    let headers = answer.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    answer
}

impl Listener {
    /// The next event; `None` at the end.
    async fn next(&mut self) -> Option<Bytes> {
        if !self.retry_sent {
            self.retry_sent = true;
            return Some(Bytes::from_static(RETRY.as_bytes()));
        }
        loop {
            if self.sent.is_some() {
                tokio::select! {
                    () = self.closing.cancelled() => return None,
                    () = sleep(LOOK) => {}
                }
            }
            let shared = self.feed.shared().await.ok()??;
            let now = Instant::now();
            match self.sent {
                Some((shape, whole, _)) if shape == shared.shape && now - whole < WHOLE => {}
                _ => {
                    self.sent = Some((shared.shape, now, now));
                    return Some(shared.whole);
                }
            }
            if let Some((_, _, last)) = &mut self.sent
                && now - *last >= BEAT
            {
                *last = now;
                return Some(shared.now);
            }
        }
    }
}

//! `/events`: the report as server-sent events, until the connection has to close.

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

/// Maximum number of listeners, lower than the limit for connections from the node itself. A page that is
/// rejected asks for the status now and then instead.
pub const MOST_LISTENERS: usize = 24;
/// Interval between checks for changes.
const LOOK: Duration = Duration::from_secs(1);
/// Interval of the frequently changing part, which also shows a page that the agent is alive.
const BEAT: Duration = Duration::from_secs(3);
/// Interval of the whole report, which includes nodes' heartbeats.
const WHOLE: Duration = Duration::from_secs(30);
/// Sent first: a browser reconnects after this many milliseconds.
const RETRY: &str = "retry: 1000\n\n";

/// A client of `/events`.
struct Listener {
    feed: Feed,
    /// Cancelled when the connection or the agent ends.
    closing: CancellationToken,
    _place: OwnedSemaphorePermit,
    /// What was sent: the shape, and when the whole report and the last event were sent.
    sent: Option<(u64, Instant, Instant)>,
    retry_sent: bool,
}

/// Responds with events until `closing`; 503 when there are too many listeners.
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
    /// The next event; `None` at the end of the stream.
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

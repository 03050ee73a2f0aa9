//! Shares reports among clients: one is made for all of them, so that a listener costs only the transfer.

use std::{
    fmt,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    pin::Pin,
    sync::Arc,
    time::{Duration, Instant},
};

use hyper::body::Bytes;
use serde::Serialize;
use tokio::sync::Mutex;

use super::report::{DropHelp, Report, Verdict};
use crate::{http::AnswerLimit, status::AgentStatus, timestamp::Timestamp};

/// A report is reused for this long.
const FRESH: Duration = Duration::from_secs(1);
/// Making reports takes at most 1/`SHARE` of the time.
const SHARE: u32 = 25;

type Making = Pin<Box<dyn Future<Output = Report> + Send>>;

/// Makes reports, one at a time; clones share it.
#[derive(Clone)]
pub struct Feed {
    source: Arc<dyn Fn() -> Making + Send + Sync>,
    /// Counts reports that listeners have not read yet.
    answer_limit: AnswerLimit,
    last: Arc<Mutex<Option<(Instant, Shared)>>>,
}

/// A report shared by all listeners.
#[derive(Clone, Debug)]
pub struct Shared {
    /// Changes when the mesh looks different, not when only times and counters change.
    pub shape: u64,
    /// The whole report, as an event.
    pub whole: Bytes,
    /// The frequently changing part, as an event.
    pub now: Bytes,
}

impl fmt::Debug for Feed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Feed").finish_non_exhaustive()
    }
}

/// The frequently changing part of a report.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Now<'a> {
    time: Timestamp,
    verdict: &'a Verdict,
    agent: Option<&'a AgentStatus>,
    drop_reasons: &'a std::collections::BTreeMap<String, DropHelp>,
}

impl Feed {
    /// Creates a feed from `source`; unread reports count towards `answer_limit`.
    pub fn new<F>(answer_limit: AnswerLimit, source: impl Fn() -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Report> + Send + 'static,
    {
        Self { source: Arc::new(move || Box::pin(source())), answer_limit, last: Arc::default() }
    }

    /// A report that the source makes now, however recent the last one is; it does not count towards the limit.
    pub async fn report(&self) -> Report {
        (self.source)().await
    }

    /// A recent report: at most a second old, or more where making it is expensive. `None` when slow
    /// listeners hold too many older ones.
    ///
    /// # Errors
    /// When the report cannot be serialized.
    pub async fn shared(&self) -> Result<Option<Shared>, serde_json::Error> {
        let mut last = self.last.lock().await;
        if let Some((until, shared)) = &*last
            && Instant::now() < *until
        {
            return Ok(Some(shared.clone()));
        }
        // Releases the last report: it must only count while a listener still has to read it.
        *last = None;
        let started = Instant::now();
        let made = shared(self.report().await)?;
        let (Some(whole), Some(now)) =
            (self.answer_limit.account(made.whole), self.answer_limit.account(made.now))
        else {
            return Ok(None);
        };
        let shared = Shared { whole, now, ..made };
        let fresh = FRESH.max(started.elapsed() * SHARE);
        *last = Some((Instant::now() + fresh, shared.clone()));
        Ok(Some(shared))
    }
}

fn shared(report: Report) -> Result<Shared, serde_json::Error> {
    let now = Now {
        time: report.status.time,
        verdict: &report.verdict,
        agent: report.status.agent.as_ref(),
        drop_reasons: &report.drop_reasons,
    };
    let now = event("now", &serde_json::to_string(&now)?);
    let whole = event("status", &serde_json::to_string(&report)?);
    let mut hasher = DefaultHasher::new();
    serde_json::to_string(&report.shape())?.hash(&mut hasher);
    Ok(Shared { shape: hasher.finish(), whole, now })
}

/// Formats a server-sent event. JSON as serialized has no line breaks.
fn event(name: &str, data: &str) -> Bytes {
    format!("event: {name}\ndata: {data}\n\n").into()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use crate::status::Status;

    #[tokio::test]
    async fn reports_that_nobody_reads_are_bounded_in_all() {
        let feed = Feed::new(AnswerLimit::default(), || async {
            let problems = [("peer/x".to_owned(), "x".repeat(10 << 20))];
            Report::new(Status { problems: problems.into(), ..Status::default() }, Vec::new())
        });
        // Reports expire by the real clock: the cache is cleared instead of waiting.
        let next = async || {
            *feed.last.lock().await = None;
            feed.shared().await.unwrap()
        };
        let mut held = Vec::new();
        while let Some(shared) = next().await {
            held.push(shared);
            assert!(held.len() < 10, "{} reports of 10 MiB are held", held.len());
        }
        assert!(held.len() >= 3, "{}", held.len());
        held.clear();
        assert!(next().await.is_some(), "what was read makes room");
    }
}

//! Reports for many who ask: one is made for all of them, so that listeners cost reading, not work.

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

/// A report is used for this long before another is made.
const FRESH: Duration = Duration::from_secs(1);
/// Making reports takes at most this part of the time.
const SHARE: u32 = 25;

type Making = Pin<Box<dyn Future<Output = Report> + Send>>;

/// Makes reports, one at a time; cloning shares it.
#[derive(Clone)]
pub struct Feed {
    source: Arc<dyn Fn() -> Making + Send + Sync>,
    /// Accounts for reports that listeners have not read yet.
    answer_limit: AnswerLimit,
    last: Arc<Mutex<Option<(Instant, Shared)>>>,
}

/// One report for all listeners.
#[derive(Clone, Debug)]
pub struct Shared {
    /// Changes when the mesh looks different, not when only times and counts do.
    pub shape: u64,
    /// The whole report, as an event.
    pub whole: Bytes,
    /// What changes all the time, as an event.
    pub now: Bytes,
}

impl fmt::Debug for Feed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Feed").finish_non_exhaustive()
    }
}

/// What of a report changes all the time.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Now<'a> {
    time: Timestamp,
    verdict: &'a Verdict,
    agent: Option<&'a AgentStatus>,
    drop_reasons: &'a std::collections::BTreeMap<String, DropHelp>,
}

impl Feed {
    /// Asks `source` for reports; those that wait to be read count among the answers of `answer_limit`.
    pub fn new<F>(answer_limit: AnswerLimit, source: impl Fn() -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Report> + Send + 'static,
    {
        Self { source: Arc::new(move || Box::pin(source())), answer_limit, last: Arc::default() }
    }

    /// How it is at this moment.
    pub async fn report(&self) -> Report {
        (self.source)().await
    }

    /// How it was a moment ago: a second, or more where a report is much work. `None` when listeners that
    /// do not read hold too many older ones.
    ///
    /// # Errors
    /// When the report cannot be written as JSON.
    pub async fn shared(&self) -> Result<Option<Shared>, serde_json::Error> {
        let mut last = self.last.lock().await;
        if let Some((until, shared)) = &*last
            && Instant::now() < *until
        {
            return Ok(Some(shared.clone()));
        }
        // The one before counts for as long as a listener has not read it, and no longer.
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

/// A server-sent event. JSON has no line breaks of its own.
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
        // The time of reports is the real one: each is asked for as if the last were too old.
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

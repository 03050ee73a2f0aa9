//! Whether the run that created a test's namespace goes on, by its heartbeat, an annotation.

use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Namespace;
use kilo_agent::timestamp::Timestamp;
use kube::ResourceExt as _;

/// Time of the last heartbeat of the run that holds the namespace, in seconds since 1970 by its own clock.
pub const ANNOTATION: &str = "kilo.squat.ai/connectivity-test-heartbeat";
/// Time between two heartbeats.
pub const PERIOD: Duration = Duration::from_secs(5);
/// A run without a heartbeat for this long has ended.
pub const STALE: Duration = Duration::from_secs(30);

/// The value of the annotation now.
pub fn now() -> String {
    Timestamp::now().0.to_string()
}

/// When a namespace was created, as text for errors.
pub fn made(namespace: &Namespace) -> String {
    namespace.creation_timestamp().map(|at| at.0.to_string()).unwrap_or_default()
}

/// State of the run that holds a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holder {
    /// Its heartbeat has changed.
    Runs,
    /// Its heartbeat has not changed yet.
    Unknown,
    /// Its heartbeat has not changed for [`STALE`]: the run has ended.
    Gone,
}

/// The namespace as first seen. Only a change shows that its holder runs: another machine's clock may be
/// wrong.
#[derive(Debug)]
pub struct Observed {
    uid: Option<String>,
    beat: Option<String>,
    since: Instant,
}

impl Observed {
    /// Starts observing this namespace.
    pub fn new(namespace: &Namespace) -> Self {
        let beat = namespace.annotations().get(ANNOTATION).cloned();
        Self { uid: namespace.uid(), beat, since: Instant::now() }
    }

    /// The holder's state, given the namespace as it is now.
    pub fn holder(&self, namespace: &Namespace) -> Holder {
        let is_same =
            namespace.uid() == self.uid && namespace.annotations().get(ANNOTATION) == self.beat.as_ref();
        match is_same {
            false => Holder::Runs,
            true if self.since.elapsed() > STALE => Holder::Gone,
            true => Holder::Unknown,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    fn namespace(uid: &str, beat: i64) -> Namespace {
        let mut namespace = Namespace::default();
        namespace.metadata.uid = Some(uid.to_owned());
        namespace.annotations_mut().insert(ANNOTATION.to_owned(), beat.to_string());
        namespace
    }

    fn after(observed: &Observed, time: Duration) -> Observed {
        let since = observed.since.checked_sub(time).unwrap();
        Observed { uid: observed.uid.clone(), beat: observed.beat.clone(), since }
    }

    #[test]
    fn a_run_is_there_when_its_heartbeat_moves_and_gone_when_it_rests() {
        let now = Timestamp::now().0;
        // A clock that is ahead or behind makes no run look dead.
        for beat in [now, now + 3600, now - 3600] {
            let observed = Observed::new(&namespace("one", beat));
            let late = after(&observed, STALE + PERIOD);
            assert_eq!(observed.holder(&namespace("one", beat)), Holder::Unknown);
            assert_eq!(after(&observed, PERIOD).holder(&namespace("one", beat)), Holder::Unknown);
            assert_eq!(late.holder(&namespace("one", beat)), Holder::Gone);
            assert_eq!(late.holder(&namespace("one", beat + 5)), Holder::Runs);
            assert_eq!(late.holder(&namespace("two", beat)), Holder::Runs);
        }
    }
}

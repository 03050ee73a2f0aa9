//! `kgctl status --wait`: repeats the check until nothing is wrong, and says what it waits for.

use std::time::{Duration, Instant};

use anyhow::Result;
use kilo_agent::status::{Problem, ask::AskError};
use kilo_core::errors::error_chain;

use super::{Checked, StatusArgs, check};
use crate::{
    cluster::NoAnswer,
    progress::{self, Progress},
    terminal,
};

/// Pause between two checks.
const POLL: Duration = Duration::from_secs(2);
/// Most objects that are named while waiting.
const NAMED: usize = 5;

/// The status once nothing is wrong, or what is still wrong when time is up.
///
/// # Errors
/// Errors that waiting cannot fix, at once; others when time is up.
pub async fn until_healthy(args: &StatusArgs) -> Result<Checked> {
    let started = Instant::now();
    let _progress = Progress::new("waiting until the mesh is healthy", 0);
    let mut last = String::new();
    loop {
        let checked = check(args).await;
        let is_late = started.elapsed() + POLL > args.timeout;
        let reason = match &checked {
            Ok(found) if found.problems.is_empty() => return checked,
            Ok(found) => short(found),
            Err(error) if may_pass(error) => error_chain(error.as_ref()),
            Err(_) => return checked,
        };
        if is_late {
            return checked;
        }
        if reason != last {
            progress::print_line(&format!("kgctl: waiting: {}", terminal::plain(&reason)));
            last = reason;
        }
        tokio::time::sleep(POLL).await;
    }
}

/// What is wrong, in words that stay the same while it does.
fn short(Checked { problems, verdict, .. }: &Checked) -> String {
    let mut objects: Vec<_> = problems.iter().map(|Problem { object, .. }| object.as_str()).collect();
    objects.dedup();
    let more = objects.len().saturating_sub(NAMED);
    objects.truncate(NAMED);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{verdict} ({}{more})", objects.join(", "))
}

/// Whether an error may go away by itself, while nobody changes flags, files or rights.
fn may_pass(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        cause.is::<NoAnswer>()
            || cause.downcast_ref().is_some_and(AskError::is_temporary)
            || cause.downcast_ref().is_some_and(is_temporary)
    })
}

fn is_temporary(error: &kube::Error) -> bool {
    match error {
        kube::Error::Api(answer) => match answer.code {
            429 | 500.. => true,
            // The server does not know Peers yet: it serves them a moment after crds.yaml was applied.
            404 => answer.reason != "NotFound",
            _ => false,
        },
        kube::Error::HyperError(_) | kube::Error::Service(_) => true,
        _ => false,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use crate::status_filter;
    use kilo_agent::status::{problems, verdict};
    use kilo_core::errors::Explained;

    fn refused(code: u16, reason: &str) -> anyhow::Error {
        let status = kube::core::Status::failure("no", reason).with_code(code);
        Explained::of("not now", kube::Error::Api(Box::new(status))).into()
    }

    #[test]
    fn only_what_mends_itself_is_waited_for() {
        for code in [429, 500, 503, 504] {
            assert!(may_pass(&refused(code, "")), "{code}");
        }
        for code in [401, 403, 404, 409, 422] {
            assert!(!may_pass(&refused(code, "NotFound")), "{code}");
        }
        assert!(may_pass(&refused(404, "")), "the definition of Peers has just been applied");
        let cannot_connect = std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
        let cannot_connect = kube::Error::Service(cannot_connect.into());
        assert!(may_pass(&Explained::of("cannot reach it", cannot_connect).into()));
        let away = AskError::Unreachable { url: "u".to_owned(), source: "refused".into() };
        assert!(may_pass(&away.into()));
        let wrong = AskError::Url { url: "u".to_owned(), source: "no".into() };
        assert!(!may_pass(&wrong.into()));
        assert!(!may_pass(&anyhow::anyhow!("node \"x\" does not exist")));
    }

    #[test]
    fn what_is_waited_for_has_no_words_that_change_meanwhile() {
        let of = |age: &str| {
            let mut status = status_filter::tests::status(9, &[1, 2, 3, 4, 5, 6, 7]);
            for node in &mut status.nodes {
                node.not_ready = vec![format!("its agent last checked in {age} ago")];
            }
            let problems = problems(&status);
            let verdict = verdict(&status, &problems);
            short(&Checked { status, problems, gaps: Vec::new(), verdict })
        };
        assert_eq!(of("2m"), of("2m 2s"));
        assert!(of("2m").contains("2 of 9 nodes ready") && of("2m").ends_with(" more)"), "{}", of("2m"));
    }
}

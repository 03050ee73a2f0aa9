//! What is going on, on a terminal, for what takes longer than a second.

use std::{
    io::{IsTerminal as _, Write as _, stderr},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use tokio_util::task::AbortOnDropHandle;

/// Nothing is shown earlier.
const QUIET: Duration = Duration::from_secs(1);
const RENEW: Duration = Duration::from_millis(200);
/// Back to the start of the line, and empty it.
const CLEAR: &str = "\r\x1b[2K";

/// One line on stderr, which goes when this does. Nothing where stderr is no terminal.
pub struct Progress {
    done: Arc<AtomicUsize>,
    _shows: Option<AbortOnDropHandle<()>>,
}

impl Progress {
    /// `total`: steps; 0 = nobody knows.
    pub fn new(what: &str, total: usize) -> Self {
        let done = Arc::new(AtomicUsize::new(0));
        let shows = stderr().is_terminal().then(|| {
            let (what, done) = (what.to_owned(), Arc::clone(&done));
            AbortOnDropHandle::new(tokio::spawn(async move {
                let (started, _clear) = (Instant::now(), Clear);
                tokio::time::sleep(QUIET).await;
                loop {
                    let line = line(&what, done.load(Ordering::Relaxed), total, started.elapsed());
                    let _ = write!(stderr(), "{CLEAR}{line}");
                    tokio::time::sleep(RENEW).await;
                }
            }))
        });
        Self { done, _shows: shows }
    }

    /// One step is done.
    pub fn step(&self) {
        self.done.fetch_add(1, Ordering::Relaxed);
    }
}

struct Clear;

impl Drop for Clear {
    fn drop(&mut self) {
        let _ = write!(stderr(), "{CLEAR}");
    }
}

fn line(what: &str, done: usize, total: usize, elapsed: Duration) -> String {
    let seconds = elapsed.as_secs();
    match total {
        0 => format!("{what} ({seconds} s)"),
        _ => format!("{what}: {done} of {total} ({seconds} s)"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_counted_where_their_number_is_known() {
        assert_eq!(line("asking agents", 3, 20, Duration::from_millis(2900)), "asking agents: 3 of 20 (2 s)");
        assert_eq!(line("waiting", 3, 0, Duration::from_secs(61)), "waiting (61 s)");
    }
}

//! What is going on, on a terminal, for what takes longer than a second.

use std::{
    io::{IsTerminal as _, Write as _, stderr},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use tokio_util::task::AbortOnDropHandle;

/// Nothing is shown earlier.
const QUIET: Duration = Duration::from_secs(1);
const RENEW: Duration = Duration::from_millis(200);
/// Back to the start of the line, and empty it.
const CLEAR: &str = "\r\x1b[2K";

/// A line is taken by one at a time: what goes on within shows nothing of its own.
static TAKEN: AtomicBool = AtomicBool::new(false);

/// One line on stderr, which goes when this does. Nothing where stderr is no terminal.
pub struct Progress {
    done: Arc<AtomicUsize>,
    total: Arc<AtomicUsize>,
    shows: Option<AbortOnDropHandle<()>>,
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.shows.take().is_some() {
            let _ = write!(stderr(), "{CLEAR}");
            TAKEN.store(false, Ordering::Relaxed);
        }
    }
}

impl Progress {
    /// `total`: steps; 0 = nobody knows.
    pub fn new(what: &str, total: usize) -> Self {
        let (done, total) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(total)));
        let may_show = stderr().is_terminal() && !TAKEN.swap(true, Ordering::Relaxed);
        let shows = may_show.then(|| {
            let (what, done, total) = (what.to_owned(), Arc::clone(&done), Arc::clone(&total));
            AbortOnDropHandle::new(tokio::spawn(async move {
                let started = Instant::now();
                tokio::time::sleep(QUIET).await;
                loop {
                    let line = line(
                        &what,
                        done.load(Ordering::Relaxed),
                        total.load(Ordering::Relaxed),
                        started.elapsed(),
                    );
                    let _ = write!(stderr(), "{CLEAR}{line}");
                    tokio::time::sleep(RENEW).await;
                }
            }))
        });
        Self { done, total, shows }
    }

    /// So many steps of so many are done.
    pub fn of(&self, done: i32, total: i32) {
        self.done.store(usize::try_from(done).unwrap_or_default(), Ordering::Relaxed);
        self.total.store(usize::try_from(total).unwrap_or_default(), Ordering::Relaxed);
    }

    /// One step is done.
    pub fn step(&self) {
        self.done.fetch_add(1, Ordering::Relaxed);
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

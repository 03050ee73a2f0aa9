//! Shows the progress of operations that take longer than a second, on a terminal.

use std::{
    io::{IsTerminal as _, Write, stderr},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use parking_lot::{Mutex, MutexGuard};
use tokio_util::task::AbortOnDropHandle;

/// Nothing is shown before this time.
const QUIET: Duration = Duration::from_secs(1);
const RENEW: Duration = Duration::from_millis(200);
/// Returns to the start of the line and clears it.
const CLEAR: &str = "\r\x1b[2K";

/// Only the oldest progress under way is shown: nested ones show nothing.
static LINE: Mutex<Line> = Mutex::new(Line { next: 0, under_way: Vec::new(), is_shown: false });

struct Line {
    next: u64,
    under_way: Vec<u64>,
    is_shown: bool,
}

impl Line {
    fn lock() -> MutexGuard<'static, Self> {
        LINE.lock()
    }

    fn begin(&mut self) -> u64 {
        self.next += 1;
        self.under_way.push(self.next);
        self.next
    }

    fn show(&mut self, id: u64, text: &str) {
        if self.under_way.first() == Some(&id) {
            self.is_shown = write!(stderr(), "{CLEAR}{text}").is_ok();
        }
    }

    fn clear(&mut self) {
        if std::mem::take(&mut self.is_shown) {
            let _ = write!(stderr(), "{CLEAR}");
        }
    }

    fn end(&mut self, id: u64) {
        if self.under_way.first() == Some(&id) {
            self.clear();
        }
        self.under_way.retain(|other| *other != id);
    }
}

/// A progress line on stderr, removed on drop. Shows nothing if stderr is not a terminal.
pub struct Progress {
    done: Arc<AtomicUsize>,
    total: Arc<AtomicUsize>,
    shows: Option<(u64, AbortOnDropHandle<()>)>,
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some((id, _)) = self.shows.take() {
            Line::lock().end(id);
        }
    }
}

impl Progress {
    /// `total`: number of steps; 0 = unknown.
    pub fn new(what: &str, total: usize) -> Self {
        let (done, total) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(total)));
        let shows = stderr().is_terminal().then(|| {
            let (what, done, total) = (what.to_owned(), Arc::clone(&done), Arc::clone(&total));
            let id = Line::lock().begin();
            let shows = tokio::spawn(async move {
                let started = Instant::now();
                tokio::time::sleep(QUIET).await;
                loop {
                    let (done, total) = (done.load(Ordering::Relaxed), total.load(Ordering::Relaxed));
                    Line::lock().show(id, &line(&what, done, total, started.elapsed()));
                    tokio::time::sleep(RENEW).await;
                }
            });
            (id, AbortOnDropHandle::new(shows))
        });
        Self { done, total, shows }
    }

    /// Sets the number of completed steps, and of all.
    pub fn of(&self, done: i32, total: i32) {
        self.done.store(usize::try_from(done).unwrap_or_default(), Ordering::Relaxed);
        self.total.store(usize::try_from(total).unwrap_or_default(), Ordering::Relaxed);
    }

    /// Counts one completed step.
    pub fn step(&self) {
        self.done.fetch_add(1, Ordering::Relaxed);
    }
}

/// Writes a line to stderr, in place of the progress line until that is renewed.
pub fn print_line(line: &str) {
    let mut progress = Line::lock();
    progress.clear();
    eprintln!("{line}");
}

/// Standard error for logs of `kgctl connect`, which replace the progress line.
#[cfg(target_os = "linux")]
pub struct Stderr;

#[cfg(target_os = "linux")]
impl Write for Stderr {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        Line::lock().clear();
        stderr().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        stderr().flush()
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

//! Networks and processes on this machine that go away however the program ends.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};

use crate::wait;

/// Set on Ctrl-C and SIGTERM: nothing more is to be made.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);
/// What is being made when a signal comes must be there to be removed.
const IN_THE_MAKING: Duration = Duration::from_millis(500);

/// Takes something down when dropped, on Ctrl-C and on SIGTERM.
#[must_use]
pub struct Takedown<F: Fn() -> Result<()>> {
    /// Who says so when it fails: `lab`, `cluster`.
    who: &'static str,
    down: F,
    /// Leave it where it is when dropped; a signal takes it down all the same.
    pub keep: bool,
}

impl<F: Fn() -> Result<()> + Clone + Send + 'static> Takedown<F> {
    /// Arranges it; once in a process. `down` also removes what is only half made.
    ///
    /// # Errors
    /// When the signals have a handler already.
    pub fn arrange(who: &'static str, down: F) -> Result<Self> {
        let on_signal = down.clone();
        ctrlc::set_handler(move || {
            eprintln!("\n{who}: interrupted, cleaning up");
            INTERRUPTED.store(true, Ordering::SeqCst);
            wait::time_passes(IN_THE_MAKING, "another thread may be in the middle of making something");
            if let Err(error) = on_signal() {
                eprintln!("{who}: {error:#}");
            }
            std::process::exit(130);
        })
        .context("signal handler")?;
        Ok(Self { who, down, keep: false })
    }
}

impl<F: Fn() -> Result<()>> Drop for Takedown<F> {
    fn drop(&mut self) {
        if INTERRUPTED.load(Ordering::SeqCst) {
            // The signal's thread cleans up and ends the process.
            loop {
                std::thread::park();
            }
        }
        if !self.keep
            && let Err(error) = (self.down)()
        {
            eprintln!("{}: {error:#}", self.who);
        }
    }
}

/// Fails once everything is to go away.
///
/// # Errors
/// After Ctrl-C and SIGTERM.
pub fn stop_if_interrupted() -> Result<()> {
    ensure!(!INTERRUPTED.load(Ordering::SeqCst), "interrupted");
    Ok(())
}

//! Networks and processes on this machine that are removed however the program ends.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use parking_lot::RwLock;

use crate::{descendants, wait};

/// Set on Ctrl-C and SIGTERM: nothing more is to be made.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);
/// Held for reading while something is made, until the takedown can find it.
static MAKING: RwLock<()> = RwLock::new(());
/// Longest wait for those that hold it; what takes longer is a command, which is ended with the others.
const IN_THE_MAKING: Duration = Duration::from_secs(5);
/// How long children have to end by themselves when a takedown follows.
const CHILDREN_END: Duration = Duration::from_secs(10);
/// The same when none follows: a child may be a lab or a cluster that cleans up after itself.
const LABS_END: Duration = Duration::from_secs(120);

/// Takes something down when dropped, on Ctrl-C and on SIGTERM.
#[must_use]
pub struct Takedown<F: Fn() -> Result<()>> {
    /// Prefix of the message when it fails: `lab`, `cluster`.
    who: &'static str,
    down: F,
    /// Leave everything in place when dropped; a signal takes it down all the same.
    pub keep: bool,
}

impl<F: Fn() -> Result<()> + Clone + Send + 'static> Takedown<F> {
    /// Arranges the takedown, once per process. `down` must also remove what is only half made. A signal ends
    /// this program's children first, since they would go on making it.
    ///
    /// # Errors
    /// When the signals have a handler already.
    pub fn arrange(who: &'static str, down: F) -> Result<Self> {
        Self::arranged(who, CHILDREN_END, down)
    }

    fn arranged(who: &'static str, patience: Duration, down: F) -> Result<Self> {
        let on_signal = down.clone();
        ctrlc::set_handler(move || {
            eprintln!("\n{who}: interrupted, cleaning up");
            INTERRUPTED.store(true, Ordering::SeqCst);
            let is_made = || Ok(MAKING.try_write().is_some());
            let _ = wait::until("what is being made is there", IN_THE_MAKING, is_made);
            descendants::end(std::process::id(), patience);
            if let Err(error) = on_signal() {
                eprintln!("{who}: {error:#}");
            }
            // What another thread has started since.
            descendants::end(std::process::id(), Duration::ZERO);
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

/// Ends this program's children with it on Ctrl-C and SIGTERM, where nothing else is to be taken down.
///
/// # Errors
/// When the signals have a handler already.
pub fn end_children_with_us(who: &'static str) -> Result<Takedown<impl Fn() -> Result<()>>> {
    Takedown::arranged(who, LABS_END, || Ok(()))
}

/// Runs `code`, which makes something that the takedown must find. A takedown waits until `code` has ended,
/// and nothing is made once it has begun. What `code` waits for must not be long.
///
/// # Errors
/// Those of `code`, and after Ctrl-C and SIGTERM.
pub fn make<T>(code: impl FnOnce() -> Result<T>) -> Result<T> {
    let _making = MAKING.read();
    stop_if_interrupted()?;
    code()
}

/// Fails once a takedown has begun.
///
/// # Errors
/// After Ctrl-C and SIGTERM.
pub fn stop_if_interrupted() -> Result<()> {
    ensure!(!INTERRUPTED.load(Ordering::SeqCst), "interrupted");
    Ok(())
}

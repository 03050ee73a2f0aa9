//! Loads the programs of [`ON_DEMAND`] after the others, in a thread or when an interface needs them.

use std::{
    error::Error,
    fs, io,
    path::Path,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use super::{
    DataplaneError,
    load::{self, ON_DEMAND, load_programs},
    pins::{self, ByName, open_all, pin_loaded},
};
use kilo_core::errors::error_chain;
use nix::errno::Errno;
use tokio::sync::watch;

/// Pause before retrying programs that the verifier has refused.
const AGAIN: Duration = Duration::from_secs(600);
/// Pause after any other failure, such as lack of memory.
const SOON: Duration = Duration::from_secs(5);

/// State of the programs of [`ON_DEMAND`] while they are not loaded.
#[derive(Default)]
pub(super) enum Late {
    /// No interface has needed them yet, and no thread loads them.
    #[default]
    Unasked,
    /// A thread loads them.
    Loading(Loading),
    /// They were refused.
    Refused {
        /// What the kernel said.
        error: String,
        /// When they may be loaded again.
        until: Instant,
    },
}

/// A thread that loads them.
pub(super) struct Loading {
    /// `None` only while it is joined.
    thread: Option<JoinHandle<Result<ByName, DataplaneError>>>,
    /// Closed when the thread is about to end.
    ends: watch::Receiver<()>,
}

impl Late {
    /// Starts a thread that loads them, unless they were just refused.
    pub(super) fn begin(&mut self, pins: &Path) {
        let may = match self {
            Self::Unasked => true,
            Self::Loading(_) => false,
            Self::Refused { until, .. } => *until <= Instant::now(),
        };
        if may {
            let pins = pins.to_owned();
            let (end, ends) = watch::channel(());
            let thread = thread::Builder::new().name("load-late".to_owned()).spawn(move || {
                let _end = end;
                let loaded = load_late(&pins);
                if let Err(error) = &loaded {
                    // Not an error: perhaps no interface will ever need them.
                    tracing::info!(%error, "{NOT_LOADED}; retrying when such an interface needs them");
                }
                loaded
            });
            // If no thread can be started, they are loaded when they are needed.
            *self =
                thread.map_or(Self::Unasked, |thread| Self::Loading(Loading { thread: Some(thread), ends }));
        }
    }

    /// True when a thread has tried to load them and is about to end, if it has not ended.
    pub(super) fn is_finished(&self) -> bool {
        matches!(self, Self::Loading(loading) if loading.ends.has_changed().is_err())
    }

    /// Waits until no thread loads them, without holding up the caller's thread.
    pub(super) async fn finished(&mut self) {
        if let Self::Loading(loading) = self {
            // Nothing is ever sent: this returns when the thread drops its end.
            let _ = loading.ends.changed().await;
        }
    }

    /// Loads them now, or waits for the thread that does.
    pub(super) fn wait(&mut self, pins: &Path) -> Result<ByName, DataplaneError> {
        let loaded = match self {
            Self::Refused { error, until } if *until > Instant::now() => {
                return Err(DataplaneError::Load(format!("{error} (not retried yet)").into()));
            }
            Self::Loading(loading) => match loading.thread.take().map(JoinHandle::join) {
                Some(Ok(loaded)) => loaded,
                _ => Err(DataplaneError::Load("the thread that loads them has ended".into())),
            },
            _ => load_late(pins),
        };
        *self = match &loaded {
            // A pin failure may be gone at once; a program that was refused is refused again.
            Err(DataplaneError::Load(error)) => {
                let pause = if is_refusal(error.as_ref()) { AGAIN } else { SOON };
                let (error, seconds) = (error_chain(error.as_ref()), pause.as_secs());
                tracing::error!(
                    error,
                    "{NOT_LOADED}; retrying in {seconds} s, or when another uplink without link-layer header appears"
                );
                Self::Refused { error, until: Instant::now() + pause }
            }
            _ => Self::Unasked,
        };
        loaded
    }
}

/// Waits for the thread, so that nothing is pinned after the data path has been closed.
impl Drop for Late {
    fn drop(&mut self) {
        if let Self::Loading(loading) = self
            && let Some(thread) = loading.thread.take()
        {
            // Its result is no longer needed.
            let _ = thread.join();
        }
    }
}

const NOT_LOADED: &str = "failed to load the BPF programs for interfaces without link-layer header (such as tun \
                          and ppp), and for those of pods with host routing";

/// Whether the kernel would refuse these programs again: the verifier rejects them, or a privilege is
/// missing.
fn is_refusal(error: &(dyn Error + 'static)) -> bool {
    let refusals = [Errno::EACCES, Errno::EINVAL, Errno::EPERM, Errno::E2BIG].map(|errno| errno as i32);
    std::iter::successors(Some(error), |error| (*error).source())
        .filter_map(|error| error.downcast_ref::<io::Error>()?.raw_os_error())
        .any(|errno| refusals.contains(&errno))
}

/// Loads them, then returns the memory that this needed to the system.
fn load_late(pins: &Path) -> Result<ByName, DataplaneError> {
    let loaded = load_from(pins);
    crate::memory::give_back();
    loaded
}

/// Loads them with the pinned maps of the other programs, pins them beside those, and opens their pins.
fn load_from(pins: &Path) -> Result<ByName, DataplaneError> {
    let failed = |source| DataplaneError::Pin { path: pins.to_owned(), source };
    let maps = pins.ancestors().nth(2).ok_or(DataplaneError::Object("directory of pins"))?;
    // A map that is no longer pinned would be created anew, and nobody would fill it.
    if pins::directory(maps)?.as_deref() != Some(pins) {
        return Err(failed(io::Error::other("pins were removed or replaced; restart kg")));
    }
    // Remove what an attempt that failed half way has pinned: its programs do not share memory with those of
    // the next.
    remove_late(pins).map_err(failed)?;
    let mut object = load::object(maps, false)?;
    load_programs(&mut object, |name| ON_DEMAND.contains(&name))?;
    let failed = |error| DataplaneError::Pin { path: pins.to_owned(), source: io::Error::other(error) };
    pin_loaded(pins, &mut object).map_err(failed)?;
    let all = open_all(pins).map_err(failed)?;
    Ok(all.into_iter().filter(|(name, _)| ON_DEMAND.contains(name)).collect())
}

fn remove_late(pins: &Path) -> io::Result<()> {
    for entry in fs::read_dir(pins)? {
        let entry = entry?;
        let is_late = |name: &str| ON_DEMAND.iter().any(|late| name.split('-').next() == Some(late));
        if entry.file_name().to_str().is_some_and(is_late) {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

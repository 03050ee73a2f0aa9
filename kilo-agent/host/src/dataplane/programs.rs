//! The programs in the kernel: taken over from an earlier agent of the same build when the data path is
//! opened, or loaded and pinned for the next one; those of [`ON_DEMAND`] when an interface needs them.

use std::path::{Path, PathBuf};

use aya::{Ebpf, programs::SchedClassifier};

use super::{
    DataplaneError, earlier_layouts,
    load::{self, ON_DEMAND, load_programs},
    on_demand::Late,
    pins::{self, ByName, is_ours_alone, open_all, pin_anew},
};
use kilo_core::errors::error_chain;

/// The loaded programs, held by their pins or by this process.
pub enum Programs {
    /// They are pinned, and opened from there.
    Pinned {
        /// Directory of the pins.
        pins: PathBuf,
        /// Opened programs; those of [`ON_DEMAND`] may be missing.
        by_name: ByName,
        /// How many of them this process has loaded itself.
        loaded: usize,
        /// State of [`ON_DEMAND`] while they are missing.
        late: Late,
    },
    /// They are not pinned: they go away with this process and their hooks.
    Loaded(Ebpf),
}

impl Programs {
    /// Takes over the programs of an earlier agent, or loads them. With `debug` they are always loaded, and
    /// not pinned: nobody could read the log of an earlier agent's programs.
    ///
    /// # Errors
    /// When the kernel refuses one, or a pinned map cannot be opened.
    pub fn open(directory: &Path, debug: bool) -> Result<Self, DataplaneError> {
        load::remove_unfit(directory)?;
        earlier_layouts::take_over(directory)?;
        if !debug
            && let Some(pins) = pins::directory(directory)?
            && is_ours_alone(&pins)
        {
            match open_all(&pins) {
                Ok(by_name) => return Ok(Self::Pinned { pins, by_name, loaded: 0, late: Late::default() }),
                Err(error) => {
                    let (pins, error) = (pins.display(), error_chain(&*error));
                    tracing::warn!(%pins, error, "ignoring pinned programs; loading new ones");
                }
            }
        }
        let programs = Self::load(directory, debug);
        // Loading reads the whole kernel's BTF, tens of megabytes.
        crate::memory::give_back();
        programs
    }

    fn load(directory: &Path, debug: bool) -> Result<Self, DataplaneError> {
        let mut object = load::object(directory, debug)?;
        if debug {
            load_programs(&mut object, |_| true)?;
            load::forward_log(&mut object);
            return Ok(Self::Loaded(object));
        }
        load_programs(&mut object, |name| !ON_DEMAND.contains(&name))?;
        match pin_anew(directory, &mut object) {
            // Drops the object, and with it the instructions of all programs.
            Ok((pins, by_name)) => {
                let loaded = by_name.len();
                Ok(Self::Pinned { pins, by_name, loaded, late: Late::default() })
            }
            Err(error) => {
                let (path, error) = (directory.join(pins::PINS), error_chain(&*error));
                tracing::warn!(
                    path = %path.display(),
                    error,
                    "failed to pin BPF programs; the next agent will load them again"
                );
                Ok(Self::Loaded(object))
            }
        }
    }

    /// Number of programs that this process has loaded; it took the others over.
    pub fn loaded(&self) -> usize {
        match self {
            Self::Pinned { loaded, .. } => *loaded,
            Self::Loaded(object) => object.programs().filter(|(_, program)| program.fd().is_ok()).count(),
        }
    }

    /// The program of that name.
    ///
    /// # Errors
    /// When the object has none.
    pub fn get(&self, name: &'static str) -> Result<&SchedClassifier, DataplaneError> {
        match self {
            Self::Pinned { by_name, .. } => by_name.get(name).ok_or(DataplaneError::Object(name)),
            Self::Loaded(object) => {
                Ok(object.program(name).ok_or(DataplaneError::Object(name))?.try_into()?)
            }
        }
    }

    /// The program of that name, to be attached. One of [`ON_DEMAND`] is loaded first, together with the
    /// others.
    ///
    /// # Errors
    /// When the object has none, or the kernel refuses to load or to pin it; a refusal is not retried for a
    /// while.
    pub fn get_mut(&mut self, name: &'static str) -> Result<&mut SchedClassifier, DataplaneError> {
        let is_late = ON_DEMAND.contains(&name);
        match self {
            Self::Pinned { pins, by_name, loaded, late } => {
                if is_late && !by_name.contains_key(name) {
                    add(late.wait(pins)?, by_name, loaded);
                }
                by_name.get_mut(name).ok_or(DataplaneError::Object(name))
            }
            Self::Loaded(object) => {
                if is_late && load::program(object, name)?.fd().is_err() {
                    load_programs(object, |name| ON_DEMAND.contains(&name))?;
                }
                load::program(object, name)
            }
        }
    }

    /// Takes the programs that a thread has loaded meanwhile; `late` keeps a refusal.
    fn take_finished(&mut self) {
        if let Self::Pinned { pins, by_name, loaded, late } = self
            && late.is_finished()
            && let Ok(there) = late.wait(pins)
        {
            add(there, by_name, loaded);
        }
    }

    /// True while a thread loads [`ON_DEMAND`].
    pub const fn is_loading_late(&self) -> bool {
        matches!(self, Self::Pinned { late: Late::Loading(_), .. })
    }

    /// Loads [`ON_DEMAND`] in a thread unless they are loaded or were just refused, and waits for it without
    /// holding up the caller's, on which an agent has other tasks.
    pub async fn load_late(&mut self) {
        self.load_late_beside();
        if let Self::Pinned { late, .. } = self {
            late.finished().await;
        }
        self.take_finished();
    }

    /// Starts loading [`ON_DEMAND`] in a thread unless they are loaded, so that they are ready when an
    /// interface needs them.
    pub fn load_late_beside(&mut self) {
        self.take_finished();
        if let Self::Pinned { pins, by_name, late, .. } = self
            && !ON_DEMAND.iter().all(|name| by_name.contains_key(name))
        {
            late.begin(pins);
        }
    }

    /// Forgets a refusal because something has changed: the programs are loaded again when they are needed.
    pub fn ask_again(&mut self) {
        self.take_finished();
        if let Self::Pinned { late: late @ Late::Refused { .. }, .. } = self {
            *late = Late::Unasked;
        }
    }
}

/// Adds programs that this process has loaded to those that are open.
fn add(there: ByName, by_name: &mut ByName, loaded: &mut usize) {
    *loaded += there.len();
    by_name.extend(there);
}

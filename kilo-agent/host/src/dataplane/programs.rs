//! The programs in the kernel: taken over from an earlier agent of the same build when the data path is
//! opened, or loaded and pinned for the next one; those of [`ON_DEMAND`] when an interface needs them.
//!
//! It is all or none of the others: programs that were loaded together share the maps that are not pinned,
//! too. A pin is believed for what the kernel says of it, not for its name alone. The directory's name
//! is a hash of the agent's version, of the object, and of the ids of the pinned maps; the name of a
//! pin holds the program's tag and a hash of the ids of all its maps.

use std::{
    collections::BTreeMap,
    fs, io,
    os::{fd::AsFd as _, unix::fs::DirBuilderExt as _, unix::fs::MetadataExt as _},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    thread,
};

use aya::{
    Ebpf,
    programs::{Program, ProgramError, SchedClassifier},
};
use sha2::{Digest as _, Sha256};

use super::{
    DataplaneError,
    late::Late,
    load::{self, ON_DEMAND, PROGRAMS},
    program_info::{self, Identity},
};
use kilo_core::errors::{Cause, error_chain};

/// Where programs are pinned, below the directory of the maps they use.
const PINS: &str = "programs";
/// The kernel verifies as many at once, on as many processors: with more the longest one alone decides how long it takes.
const THREADS: usize = 4;

/// Programs by name.
pub(super) type ByName = BTreeMap<&'static str, SchedClassifier>;

/// The programs of the object.
pub enum Programs {
    /// They are pinned, and opened from there.
    Pinned {
        /// Directory of the pins.
        pins: PathBuf,
        /// Those of [`ON_DEMAND`] may be missing.
        by_name: ByName,
        /// Those of them that this process has had the kernel load.
        loaded: usize,
        /// What became of [`ON_DEMAND`] if they are missing.
        late: Late,
    },
    /// They end with this process and with their hooks.
    Loaded(Ebpf),
}

impl Programs {
    /// Takes over those of an earlier agent, or loads them. With `debug`, they are loaded anew and not
    /// pinned: what an earlier agent's programs log, nobody reads.
    ///
    /// # Errors
    /// When the kernel refuses one, or a pinned map may not be opened.
    pub fn open(directory: &Path, debug: bool) -> Result<Self, DataplaneError> {
        load::remove_unfit(directory)?;
        if !debug
            && let Some(pins) = pins(directory)?
            && is_ours_alone(&pins)
        {
            match open_all(&pins) {
                Ok(by_name) => return Ok(Self::Pinned { pins, by_name, loaded: 0, late: Late::default() }),
                Err(error) => {
                    let (pins, error) = (pins.display(), error_chain(&*error));
                    tracing::warn!(%pins, error, "pinned BPF programs are not taken over; loading them");
                }
            }
        }
        let programs = Self::load(directory, debug);
        // The types of the whole kernel were read for it, tens of megabytes.
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
            // The object goes, and with it the instructions of all programs.
            Ok((pins, by_name)) => {
                let loaded = by_name.len();
                Ok(Self::Pinned { pins, by_name, loaded, late: Late::default() })
            }
            Err(error) => {
                let (path, error) = (directory.join(PINS), error_chain(&*error));
                tracing::warn!(
                    path = %path.display(),
                    error,
                    "BPF programs cannot be pinned: the next agent loads them anew"
                );
                Ok(Self::Loaded(object))
            }
        }
    }

    /// Programs that this process has had the kernel load; the others were there.
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

    /// The program of that name, to be attached; one of [`ON_DEMAND`] is loaded first, with the others of it.
    ///
    /// # Errors
    /// When the object has none, or the kernel refuses to load or to pin it; it is not asked again for a while.
    pub fn get_mut(&mut self, name: &'static str) -> Result<&mut SchedClassifier, DataplaneError> {
        let is_late = ON_DEMAND.contains(&name);
        match self {
            Self::Pinned { pins, by_name, loaded, late } => {
                if is_late && !by_name.contains_key(name) {
                    let there = late.wait(pins)?;
                    *loaded += there.len();
                    by_name.extend(there);
                }
                by_name.get_mut(name).ok_or(DataplaneError::Object(name))
            }
            Self::Loaded(object) => {
                if is_late && of(object, name)?.fd().is_err() {
                    load_programs(object, |name| ON_DEMAND.contains(&name))?;
                }
                of(object, name)
            }
        }
    }

    /// Takes what a thread has loaded meanwhile; what it was refused, `late` remembers.
    fn take_finished(&mut self) {
        if let Self::Pinned { late, .. } = self
            && late.is_finished()
        {
            for name in ON_DEMAND {
                let _ = self.get_mut(name);
            }
        }
    }

    /// Begins to load [`ON_DEMAND`] in a thread, so that an interface that needs them finds them there.
    pub fn load_late_beside(&mut self) {
        self.take_finished();
        if let Self::Pinned { pins, by_name, late, .. } = self
            && !ON_DEMAND.iter().all(|name| by_name.contains_key(name))
        {
            late.begin(pins);
        }
    }

    /// Something has changed: what the kernel has refused it is asked again.
    pub fn ask_again(&mut self) {
        self.take_finished();
        if let Self::Pinned { late: late @ Late::Refused { .. }, .. } = self {
            *late = Late::Unasked;
        }
    }
}

fn of<'a>(object: &'a mut Ebpf, name: &'static str) -> Result<&'a mut SchedClassifier, DataplaneError> {
    Ok(object.program_mut(name).ok_or(DataplaneError::Object(name))?.try_into()?)
}

/// Directory for programs of this build with these maps; `None` before all maps are there.
pub(super) fn pins(directory: &Path) -> Result<Option<PathBuf>, DataplaneError> {
    let Some(maps) = load::pinned_ids(directory)? else { return Ok(None) };
    let mut build = Sha256::new();
    build.update(Sha256::digest(env!("CARGO_PKG_VERSION")));
    build.update(Sha256::digest(load::OBJECT));
    for (name, id) in maps {
        build.update(name);
        build.update(id.to_be_bytes());
    }
    Ok(Some(directory.join(PINS).join(hex(&build.finalize()))))
}

/// The first eight bytes of a hash.
fn hex(hash: &[u8]) -> String {
    hash.iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

/// Name of the pin of a program: what the kernel must say of it, too. (A bpffs allows no dots.)
fn pin_name(program: &str, identity: &Identity) -> String {
    let maps = identity.maps.iter().flat_map(|id| id.to_be_bytes()).collect::<Vec<_>>();
    format!("{program}-{}-{}", hex(&identity.tag), hex(&Sha256::digest(maps)))
}

/// True when something is there, and nobody else can have put it there: pins, their parent, the
/// maps' and ours.
fn is_ours_alone(pins: &Path) -> bool {
    let user = nix::unistd::geteuid().as_raw();
    for path in pins.ancestors().take(4) {
        // What is not there holds nothing.
        let Ok(data) = fs::symlink_metadata(path) else { return false };
        if !data.is_dir() || data.uid() != user || data.mode() & 0o022 != 0 {
            tracing::warn!(
                path = %path.display(),
                "others may write here: pinned BPF programs are not taken over but loaded anew"
            );
            return false;
        }
    }
    true
}

/// Opens the programs' pins, if the kernel says of each that it is what its name says. Of [`ON_DEMAND`] all are
/// there or none.
pub(super) fn open_all(pins: &Path) -> Result<ByName, Cause> {
    let mut there = BTreeMap::new();
    for entry in fs::read_dir(pins)? {
        let path = entry?.path();
        let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if let Some((program, _)) = file.split_once('-') {
            there.insert(program.to_owned(), path);
        }
    }
    let open = |name: &'static str| {
        let path = there.get(name).ok_or_else(|| format!("{name} is not there"))?;
        let program = SchedClassifier::from_pin(path)?;
        let found = pin_name(name, &identity(&program)?);
        if path.file_name().is_none_or(|file| *file != *found) {
            return Err(format!("{}: the kernel says that it is {found}", path.display()).into());
        }
        Ok((name, program))
    };
    let has_late = ON_DEMAND.iter().any(|name| there.contains_key(*name));
    PROGRAMS.into_iter().filter(|name| has_late || !ON_DEMAND.contains(name)).map(open).collect()
}

/// Pins the programs of an object in the place of all others, and opens the pins. Programs of
/// others that are on hooks stay there: their links hold them.
fn pin_anew(directory: &Path, object: &mut Ebpf) -> Result<(PathBuf, ByName), Cause> {
    // Now that all maps are there.
    let pins = pins(directory)?.ok_or("a map is not pinned")?;
    let all = directory.join(PINS);
    // Removed first: an agent that ends half way must not leave pins of two loads.
    match fs::remove_dir_all(&all).or_else(|_| fs::remove_file(&all)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    fs::DirBuilder::new().recursive(true).mode(0o700).create(&pins)?;
    pin_loaded(&pins, object)?;
    let by_name = open_all(&pins)?;
    Ok((pins, by_name))
}

/// Pins what the kernel has loaded of an object.
pub(super) fn pin_loaded(pins: &Path, object: &mut Ebpf) -> Result<(), Cause> {
    for name in PROGRAMS {
        let program = of(object, name)?;
        if program.fd().is_ok() {
            let path = pins.join(pin_name(name, &identity(program)?));
            program.pin(path)?;
        }
    }
    Ok(())
}

fn identity(program: &SchedClassifier) -> Result<Identity, Cause> {
    Ok(program_info::identity(program.fd()?.as_fd())?.ok_or("it is no TC program")?)
}

/// Has the kernel verify the programs that are wanted, [`THREADS`] at once at most, and two at least.
pub(super) fn load_programs(
    object: &mut Ebpf,
    is_wanted: impl Fn(&str) -> bool,
) -> Result<(), DataplaneError> {
    let place = |name: &str| PROGRAMS.iter().position(|program| *program == name && is_wanted(program));
    let mut programs: Vec<_> =
        object.programs_mut().filter_map(|(name, program)| Some((place(name)?, program))).collect();
    programs.sort_by_key(|(place, _)| *place);
    let programs = Mutex::new(programs.into_iter());
    let load = || -> Result<(), ProgramError> {
        let next = || programs.lock().unwrap_or_else(PoisonError::into_inner).next();
        while let Some((_, program)) = next() {
            let program: &mut Program = program;
            <&mut SchedClassifier>::try_from(program)?.load()?;
        }
        Ok(())
    };
    let processors = thread::available_parallelism().map_or(2, usize::from);
    thread::scope(|scope| {
        let threads: Vec<_> = (0..processors.clamp(2, THREADS)).map(|_| scope.spawn(load)).collect();
        for thread in threads {
            thread.join().map_err(|_| DataplaneError::Object("program that a thread could load"))??;
        }
        Ok(())
    })
}

//! Programs in the kernel: loaded when they are wanted, by a thread each, and pinned, so that the
//! next agent of the same build takes them over instead of having the kernel verify them anew.
//!
//! A pin is believed for what the kernel says of it, not for its name alone. The directory's name
//! is a hash of the object, of the constants that it was loaded with, and of the ids of the pinned
//! maps; the name of a pin holds the program's tag and a hash of the ids of all its maps. What
//! differs in any of these is loaded anew.

use std::{
    collections::BTreeMap,
    fs,
    os::{fd::AsFd as _, unix::fs::DirBuilderExt as _, unix::fs::MetadataExt as _},
    path::{Path, PathBuf},
};

use aya::{
    Ebpf,
    programs::{Program, ProgramError, SchedClassifier},
};
use sha2::{Digest as _, Sha256};

use super::{
    DataplaneError, load,
    program_info::{self, Identity},
};
use kilo_core::errors::{Cause, error_chain};

/// Programs that every node with an uplink has on its hooks; those that take longest come first.
const AT_START: [&str; 4] = ["kilo_egress", "uplink_egress", "kilo_ingress", "lan_ingress"];

/// Where programs are pinned, below the directory of the maps they use.
const PINS: &str = "programs";

/// The programs that this process holds.
pub struct Programs {
    /// Of the pinned maps.
    directory: PathBuf,
    debug: bool,
    held: BTreeMap<&'static str, SchedClassifier>,
    /// Programs that this process has had the kernel load.
    loaded: usize,
}

impl Programs {
    /// Adopts or loads those that every node needs. With `debug`, all are loaded anew: what an
    /// earlier agent's programs log, nobody reads.
    ///
    /// # Errors
    /// When the kernel refuses one.
    pub fn open(directory: PathBuf, debug: bool) -> Result<Self, DataplaneError> {
        let mut programs = Self { directory, debug, held: BTreeMap::new(), loaded: 0 };
        programs.prepare(if debug { &load::PROGRAMS } else { &AT_START })?;
        Ok(programs)
    }

    /// Programs that this process has loaded; the others were there.
    pub const fn loaded(&self) -> usize {
        self.loaded
    }

    /// The program of that name, if it is held.
    pub fn held(&self, name: &'static str) -> Option<&SchedClassifier> {
        self.held.get(name)
    }

    /// The program of that name, loaded when it was not.
    ///
    /// # Errors
    /// When the kernel refuses it.
    pub fn get(&mut self, name: &'static str) -> Result<&mut SchedClassifier, DataplaneError> {
        self.prepare(&[name])?;
        self.held.get_mut(name).ok_or(DataplaneError::Object(name))
    }

    /// Adopts or loads what is not held yet of these.
    ///
    /// # Errors
    /// When the kernel refuses one: then none is held more than before.
    pub fn prepare(&mut self, names: &[&'static str]) -> Result<(), DataplaneError> {
        let mut missing: Vec<_> =
            names.iter().copied().filter(|name| !self.held.contains_key(name)).collect();
        if missing.is_empty() {
            return Ok(());
        }
        load::remove_unfit(&self.directory)?;
        if !self.debug
            && let Some(pins) = self.pins()?
            && is_ours_alone(&pins)
        {
            missing.retain(|name| match adopt(&pins, name) {
                Some(program) => self.held.insert(name, program).is_some(),
                None => true,
            });
        }
        if missing.is_empty() {
            return Ok(());
        }
        let mut object = load::object(&self.directory, self.debug)?;
        load_at_once(&mut object, &missing)?;
        self.loaded += missing.len();
        if self.debug {
            load::forward_log(&mut object);
        }
        // Now that all maps are there.
        let pins = self.pins()?.ok_or(DataplaneError::Object("map"))?;
        remove_others(&pins);
        for name in missing {
            let program = program(&mut object, name)?;
            let pinned = pin(&pins, name, program);
            let pinned = pinned.map_err(|source| DataplaneError::ProgramPin { program: name, source })?;
            self.held.insert(name, pinned);
        }
        // The types of the whole kernel were in it, tens of megabytes.
        drop(object);
        crate::memory::give_back();
        Ok(())
    }

    /// Directory for programs of this object with these maps; `None` before all maps are there.
    fn pins(&self) -> Result<Option<PathBuf>, DataplaneError> {
        let Some(maps) = load::pinned_ids(&self.directory)? else { return Ok(None) };
        let mut build = Sha256::new();
        build.update(load::OBJECT);
        build.update([u8::from(self.debug)]);
        for (name, id) in maps {
            build.update(name);
            build.update(id.to_be_bytes());
        }
        Ok(Some(self.directory.join(PINS).join(hex(&build.finalize()))))
    }
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

/// True when nobody else can have put anything there: pins, their parent, the maps' and ours.
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

/// Pins of a program in a directory, whatever else their names say.
fn pins_of(pins: &Path, name: &str) -> Vec<PathBuf> {
    let is_of = |path: &PathBuf| {
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        file.split_once('-').is_some_and(|(program, _)| program == name)
    };
    fs::read_dir(pins).into_iter().flatten().flatten().map(|entry| entry.path()).filter(is_of).collect()
}

/// The program an earlier agent of the same build has pinned, if the kernel says that it is that.
fn adopt(pins: &Path, name: &'static str) -> Option<SchedClassifier> {
    for path in pins_of(pins, name) {
        match open(&path, name) {
            Ok(program) => return Some(program),
            Err(error) => {
                let error = error_chain(&*error);
                tracing::warn!(pin = %path.display(), error, "pinned BPF program is not taken over; loading it");
            }
        }
    }
    None
}

/// Opens a pin and compares what the kernel says of it with its name.
fn open(path: &Path, name: &str) -> Result<SchedClassifier, Cause> {
    let program = SchedClassifier::from_pin(path)?;
    let identity = program_info::identity(program.fd()?.as_fd())?.ok_or("it is no TC program")?;
    let found = pin_name(name, &identity);
    if path.file_name().is_none_or(|file| *file != *found) {
        return Err(format!("the kernel says that it is {found}").into());
    }
    Ok(program)
}

/// Pins a program in the place of others of its name, and opens the pin.
fn pin(pins: &Path, name: &'static str, program: &mut SchedClassifier) -> Result<SchedClassifier, Cause> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(pins)?;
    let identity = program_info::identity(program.fd()?.as_fd())?.ok_or("it is no TC program")?;
    for stale in pins_of(pins, name) {
        fs::remove_file(stale)?;
    }
    let path = pins.join(pin_name(name, &identity));
    program.pin(&path)?;
    open(&path, name)
}

/// Removes programs of other builds. Those on hooks stay there: their links hold them.
fn remove_others(pins: &Path) {
    let Some(parent) = pins.parent() else { return };
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let path = entry.path();
        if path != pins
            && let Err(error) = fs::remove_dir_all(&path).or_else(|_| fs::remove_file(&path))
        {
            tracing::warn!(path = %path.display(), %error, "BPF programs of another build stay pinned");
        }
    }
}

/// Has the kernel verify these programs, each in a thread of its own.
fn load_at_once(object: &mut Ebpf, names: &[&'static str]) -> Result<(), DataplaneError> {
    let wanted = object.programs_mut().filter(|(name, _)| names.contains(name));
    std::thread::scope(|scope| {
        let load = |program: &mut Program| <&mut SchedClassifier>::try_from(program)?.load();
        let threads: Vec<_> = wanted.map(|(_, program)| scope.spawn(move || load(program))).collect();
        for thread in threads {
            let loaded: Result<(), ProgramError> =
                thread.join().map_err(|_| DataplaneError::Object("program that a thread could load"))?;
            loaded?;
        }
        Ok(())
    })
}

fn program<'a>(object: &'a mut Ebpf, name: &'static str) -> Result<&'a mut SchedClassifier, DataplaneError> {
    Ok(object.program_mut(name).ok_or(DataplaneError::Object("program"))?.try_into()?)
}

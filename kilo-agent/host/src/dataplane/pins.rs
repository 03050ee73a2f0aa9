//! Programs pinned in the BPF file system: where they are, whether they are ours, and opening them.
//!
//! Either all of them are used or none: programs that were loaded together also share the maps that are not
//! pinned. A pin is trusted only when the kernel's data about the program match its name. The directory's
//! name is a hash of the agent's version, of the object, and of the ids of the pinned maps; the name of a pin
//! holds the program's tag and a hash of the ids of all its maps.

use std::{
    collections::BTreeMap,
    fs, io,
    os::{fd::AsFd as _, unix::fs::DirBuilderExt as _, unix::fs::MetadataExt as _},
    path::{Path, PathBuf},
};

use aya::{Ebpf, programs::SchedClassifier};
use sha2::{Digest as _, Sha256};

use super::{
    DataplaneError,
    load::{self, ON_DEMAND, PROGRAMS},
    program_info::{self, Identity},
};
use kilo_core::errors::Cause;

/// Where programs are pinned, below the directory of the maps they use.
pub const PINS: &str = "programs";

/// Opened programs by their name in the object, which is that of their pin.
pub type ByName = BTreeMap<&'static str, SchedClassifier>;

/// Directory for programs of this build with these maps; `None` before all maps are pinned.
pub fn directory(maps: &Path) -> Result<Option<PathBuf>, DataplaneError> {
    let Some(ids) = load::pinned_ids(maps)? else { return Ok(None) };
    let mut build = Sha256::new();
    build.update(Sha256::digest(env!("CARGO_PKG_VERSION")));
    build.update(Sha256::digest(load::OBJECT));
    for (name, id) in ids {
        build.update(name);
        build.update(id.to_be_bytes());
    }
    Ok(Some(maps.join(PINS).join(short_hex(&build.finalize()))))
}

/// The first eight bytes of a hash, in hexadecimal.
fn short_hex(hash: &[u8]) -> String {
    hex::encode(hash.get(..8).unwrap_or(hash))
}

/// Name of a program's pin, with what the kernel must report of the program. (A bpffs allows no dots.)
fn pin_name(program: &str, identity: &Identity) -> String {
    let maps = identity.maps.iter().flat_map(|id| id.to_be_bytes()).collect::<Vec<_>>();
    format!("{program}-{}-{}", short_hex(&identity.tag), short_hex(&Sha256::digest(maps)))
}

/// True when the directory of pins exists, and no other user can write to it or to the three directories
/// above.
pub fn is_ours_alone(pins: &Path) -> bool {
    let user = nix::unistd::geteuid().as_raw();
    for path in pins.ancestors().take(4) {
        // A missing directory holds no pins.
        let Ok(data) = fs::symlink_metadata(path) else { return false };
        if !data.is_dir() || data.uid() != user || data.mode() & 0o022 != 0 {
            tracing::warn!(
                path = %path.display(),
                "other users may write to the directory of pinned programs; ignoring these programs and loading new ones"
            );
            return false;
        }
    }
    true
}

/// Opens the programs' pins; fails unless the kernel's data about each match its name. Either all of
/// [`ON_DEMAND`] are there or none.
pub fn open_all(pins: &Path) -> Result<ByName, Cause> {
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

/// Pins the programs of an object in place of all pinned before, and opens the pins. Programs that are on
/// hooks stay there: their links hold them.
pub fn pin_anew(maps: &Path, object: &mut Ebpf) -> Result<(PathBuf, ByName), Cause> {
    // Possible only once all maps are pinned.
    let pins = directory(maps)?.ok_or("a map is not pinned")?;
    let all = maps.join(PINS);
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

/// Pins the programs of an object that are loaded.
pub fn pin_loaded(pins: &Path, object: &mut Ebpf) -> Result<(), Cause> {
    for name in PROGRAMS {
        let program = load::program(object, name)?;
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

//! Loads the BPF object: adopts pinned maps that fit, and replaces those that do not.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    io,
    path::{Path, PathBuf},
    thread,
};

use aya::{
    Ebpf, EbpfError, EbpfLoader,
    maps::{Map, MapData, MapError, MapType},
    programs::{Program, ProgramError, SchedClassifier},
};
use aya_log::EbpfLogger;
use kilo_common::map_table::{Kind, MAPS, MapSpec};
use nix::{
    mount::{MsFlags, mount},
    sys::statfs::{BPF_FS_MAGIC, statfs},
};
use parking_lot::Mutex;

use super::{DataplaneError, first_map};
use kilo_core::errors::error_chain;

/// The BPF object, embedded at build time; empty in a debug build without one.
pub static OBJECT: &[u8] = aya::include_bytes_aligned!(env!("KILO_EBPF_OBJECT"));

/// Programs of the object; those that the kernel verifies longest come first.
pub const PROGRAMS: [&str; 10] = [
    "lan_ingress",
    "l3_ingress",
    "uplink_egress",
    "kilo_egress",
    "l3_egress",
    "kilo_ingress",
    "tunnel_ingress",
    "pod_ingress",
    FOLLOW,
    INJECT,
];
/// Programs that only uplinks without link-layer header need, and pods' interfaces with host routing. They are
/// more than a third of what the kernel verifies, so they are loaded after the others or on demand.
pub const ON_DEMAND: [&str; 3] = ["l3_ingress", "l3_egress", "pod_ingress"];
/// Programs that are on no hook: the agent runs them.
pub const INJECT: &str = "inject";
pub const FOLLOW: &str = "follow";

/// Most programs verified in parallel: with more, the longest one alone determines how long it takes.
const THREADS: usize = 4;

/// Maps that outlive the agent.
pub fn pinned() -> impl Iterator<Item = &'static MapSpec> {
    MAPS.iter().filter(|map| map.is_pinned)
}

/// True where a BPF file system is mounted.
fn is_bpffs(path: &Path) -> bool {
    statfs(path).is_ok_and(|stat| stat.filesystem_type() == BPF_FS_MAGIC)
}

/// True in a container without the host's BPF file system, as in Kilo's own DaemonSet: pins are lost when the
/// container ends. To be called before [`mount_bpffs`].
pub fn ends_with_the_container(path: &Path) -> bool {
    // PID 1 of a container; on a host that is another program.
    std::process::id() == 1 && !is_bpffs(path)
}

/// Mounts a BPF file system unless one is there.
pub fn mount_bpffs(path: &Path) -> Result<(), DataplaneError> {
    let failed = |source: io::Error| DataplaneError::Bpffs { path: path.to_owned(), source };
    if is_bpffs(path) {
        return Ok(());
    }
    std::fs::create_dir_all(path).map_err(failed)?;
    // Without a mode, every user may create directories in it.
    mount(Some("bpf"), path, Some("bpf"), MsFlags::empty(), Some("mode=0700"))
        .map_err(|errno| failed(errno.into()))
}

/// Opens the object with its maps, which are pinned in `directory`; its programs are not loaded yet.
pub fn object(directory: &Path, debug: bool) -> Result<Ebpf, DataplaneError> {
    if OBJECT.is_empty() {
        return Err(DataplaneError::Object("programs"));
    }
    let level: u8 = if debug { aya_log::Level::Debug as u8 } else { 0 };
    let mut loader = beside(EbpfLoader::new, || make_first(directory));
    for map in pinned() {
        loader.map_pin_path(map.name, directory.join(map.name));
    }
    loader.override_global(aya_log::LEVEL, &level, false);
    Ok(loader.load(OBJECT)?)
}

/// Only logs errors: the loader runs into them again.
fn make_first(directory: &Path) {
    if let Err(error) = first_map::make(OBJECT, directory) {
        let error = error_chain(&*error);
        tracing::debug!(
            directory = %directory.display(),
            error,
            "failed to create the largest map ahead of the others; the loader will create it"
        );
    }
}

/// Runs both in parallel; returns the result of `one`.
fn beside<T>(one: impl FnOnce() -> T, other: impl FnOnce() + Send) -> T {
    thread::scope(|scope| {
        scope.spawn(other);
        one()
    })
}

/// Forwards the programs' log to `tracing`; debugging only. It is taken out of the object, so the programs
/// must be loaded.
pub fn forward_log(bpf: &mut Ebpf) {
    let logger = match EbpfLogger::init(bpf) {
        Ok(logger) => logger,
        Err(error) => {
            tracing::warn!(error = %error_chain(&error), "failed to read the log of the BPF programs");
            return;
        }
    };
    if tokio::runtime::Handle::try_current().is_err() {
        return;
    }
    tokio::spawn(async move {
        // SAFETY: the logger owns its descriptor and always returns the same one.
        let logger = unsafe {
            tokio::io::unix::AsyncFd::register_with_interest(logger, tokio::io::Interest::READABLE)
        };
        let Ok(mut logger) = logger else { return };
        while let Ok(mut guard) = logger.readable_mut().await {
            guard.get_inner_mut().flush();
            guard.clear_ready();
        }
    });
}

/// Has the kernel verify the wanted programs in parallel, in two to [`THREADS`] threads.
pub fn load_programs(object: &mut Ebpf, is_wanted: impl Fn(&str) -> bool) -> Result<(), DataplaneError> {
    let position = |name: &str| PROGRAMS.iter().position(|program| *program == name && is_wanted(program));
    let mut programs: Vec<_> =
        object.programs_mut().filter_map(|(name, program)| Some((position(name)?, program))).collect();
    programs.sort_by_key(|(position, _)| *position);
    let programs = Mutex::new(programs.into_iter());
    let load = || -> Result<(), ProgramError> {
        let next = || programs.lock().next();
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

/// A program of an object, by name.
///
/// # Errors
/// When the object has none, or it is of another kind.
pub fn program<'a>(
    object: &'a mut Ebpf,
    name: &'static str,
) -> Result<&'a mut SchedClassifier, DataplaneError> {
    Ok(object.program_mut(name).ok_or(DataplaneError::Object(name))?.try_into()?)
}

/// A directory of maps of another layout.
pub struct Layout {
    /// Version of the layout, from the name of the directory: `v` and this number.
    pub version: u32,
    /// Directory of its pins.
    pub path: PathBuf,
}

/// Directories of other layouts beside this one.
pub fn other_layouts(directory: &Path) -> Vec<Layout> {
    let Some(top) = directory.parent() else { return Vec::new() };
    let entries = std::fs::read_dir(top).into_iter().flatten().flatten();
    let layout = |entry: std::fs::DirEntry| {
        let version = entry.file_name().to_string_lossy().strip_prefix('v')?.parse().ok()?;
        Some(Layout { version, path: entry.path() })
    };
    entries.filter_map(layout).filter(|layout| layout.path != directory).collect()
}

/// Removes the pins of other versions' maps. Called when our programs have
/// replaced theirs on every hook: nobody reads those maps any more.
pub fn remove_other_layouts(directory: &Path) -> Result<(), DataplaneError> {
    for Layout { path, .. } in other_layouts(directory) {
        tracing::info!(path = %path.display(), "removing maps of another version");
        std::fs::remove_dir_all(&path).map_err(|source| DataplaneError::Pin { path, source })?;
    }
    Ok(())
}

/// Removes pinned maps whose type or sizes are not those of this layout.
pub fn remove_unfit(directory: &Path) -> Result<(), DataplaneError> {
    for map in pinned() {
        let path = directory.join(map.name);
        if !path.exists() || fits(map, &path)? {
            continue;
        }
        tracing::warn!(path = %path.display(), "replacing a pinned object of another version");
        std::fs::remove_file(&path).map_err(|source| DataplaneError::Pin { path, source })?;
    }
    Ok(())
}

/// True before the first start, when no map is pinned: all will be created, empty.
pub fn has_no_maps(directory: &Path) -> bool {
    pinned().all(|map| matches!(directory.join(map.name).try_exists(), Ok(false)))
}

/// The kernel's ids of the pinned maps, by name; `None` when one is missing.
pub fn pinned_ids(directory: &Path) -> Result<Option<Vec<(&'static str, u32)>>, DataplaneError> {
    let id = |map: &MapSpec| {
        let path = directory.join(map.name);
        if !path.exists() {
            return Ok(None);
        }
        let info = MapData::from_pin(path).and_then(|data| data.info()).map_err(EbpfError::from)?;
        Ok(Some((map.name, info.id())))
    };
    pinned().map(id).collect()
}

/// Whether a pinned map has the type and sizes of this layout. Lack of permission is an error, so that no pin
/// is removed for it.
pub fn fits(map: &MapSpec, path: &Path) -> Result<bool, DataplaneError> {
    let info = match MapData::from_pin(path).and_then(|data| data.info()) {
        Ok(info) => info,
        // Opening a directory in the place of a map fails with EACCES, too.
        Err(error) if !path.is_dir() && is_process_error(&error) => {
            return Err(EbpfError::from(error).into());
        }
        Err(_) => return Ok(false),
    };
    Ok(info.map_type().is_ok_and(|found| found == map_type(map.kind))
        && (info.key_size(), info.value_size(), info.max_entries()) == (map.key, map.value, map.size))
}

const fn map_type(kind: Kind) -> MapType {
    match kind {
        Kind::Array => MapType::Array,
        Kind::PerCpuArray => MapType::PerCpuArray,
        Kind::Hash => MapType::Hash,
        Kind::LruHash => MapType::LruHash,
        Kind::LpmTrie => MapType::LpmTrie,
        Kind::RingBuf => MapType::RingBuf,
    }
}

/// True for errors about this process (no permission, no resources), which say nothing about the map.
fn is_process_error(error: &MapError) -> bool {
    const ERRNOS: [i32; 5] =
        [nix::libc::EPERM, nix::libc::EACCES, nix::libc::ENOMEM, nix::libc::ENFILE, nix::libc::EMFILE];
    let causes = std::iter::successors(Some(error as &dyn std::error::Error), |cause| cause.source());
    causes
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .filter_map(io::Error::raw_os_error)
        .any(|errno| ERRNOS.contains(&errno))
}

/// The maps that are pinned in a directory, opened when they are asked for.
pub struct PinnedMaps {
    directory: PathBuf,
    opened: BTreeMap<&'static str, Map>,
}

impl PinnedMaps {
    /// The pinned maps of this directory; each is opened when it is first used.
    pub const fn of(directory: PathBuf) -> Self {
        Self { directory, opened: BTreeMap::new() }
    }

    /// The map of that name, opened on first use.
    ///
    /// # Errors
    /// When it does not exist or cannot be opened.
    pub fn get(&mut self, name: &'static str) -> Result<&mut Map, DataplaneError> {
        match self.opened.entry(name) {
            Entry::Occupied(entry) => Ok(entry.into_mut()),
            Entry::Vacant(entry) => {
                let data = super::open_pin(&self.directory, name)?;
                Ok(entry.insert(Map::from_map_data(data)?))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused_with(errno: i32) -> MapError {
        let io_error = io::Error::from_raw_os_error(errno);
        MapError::SyscallError(aya::sys::SyscallError { call: "bpf_obj_get", io_error })
    }

    /// The error decides whether a pin that is in use is removed.
    #[test]
    fn neither_a_denial_nor_a_shortage_says_that_a_pin_does_not_fit() {
        use nix::libc::{EACCES, EINVAL, EMFILE, ENFILE, ENOENT, ENOMEM, EPERM};
        for errno in [EPERM, EACCES, ENOMEM, ENFILE, EMFILE] {
            assert!(is_process_error(&refused_with(errno)), "{}", io::Error::from_raw_os_error(errno));
        }
        for errno in [EINVAL, ENOENT] {
            assert!(!is_process_error(&refused_with(errno)), "{}", io::Error::from_raw_os_error(errno));
        }
    }

    /// With a typo in its name, the loader would create it, and nobody would notice.
    #[test]
    fn the_object_has_the_map_that_is_made_first() {
        if !OBJECT.is_empty() {
            let object = aya_obj::Object::parse(OBJECT).unwrap();
            assert!(object.maps.contains_key(kilo_common::map_table::NAT.name));
        }
    }
}

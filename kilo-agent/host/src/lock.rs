//! Locks that allow one agent per interface and per data path. They are on files that only root can open: an
//! unprivileged process can neither take nor hold them. The kernel releases them when the process ends,
//! however it ends.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
    libc,
};

/// Where agents keep their state, and their locks.
pub const STATE: &str = "/var/lib/kilo";

/// Why a lock could not be taken.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another process manages the interface.
    #[error("an agent for interface {0} already runs on this node; stop it first")]
    Taken(String),
    /// Another process manages the pinned programs and maps.
    #[error(
        "{path}: another agent already runs on this node and manages these programs and maps, for another \
         interface or with another state directory; stop it first",
        path = .0.display()
    )]
    PinsTaken(PathBuf),
    /// The file belongs to another user, who could hold the lock for ever.
    #[error("{path} belongs to user {owner}, not to the agent's; remove it", path = path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// Its owner.
        owner: u32,
    },
    /// The system refuses.
    #[error(
        "failed to lock {path}: {source}; run the agent as root, and make this path writable",
        path = path.display()
    )]
    Refused {
        /// The file.
        path: PathBuf,
        /// The error underneath.
        source: io::Error,
    },
}

/// A lock that ends when this is dropped, or with the process.
#[derive(Debug)]
pub struct Lock {
    /// File to remove with the lock; `None` when the lock is on a directory.
    file: Option<PathBuf>,
    _held: Flock<File>,
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Removed while the lock is held: a process that opened the file before checks whether it still
        // exists.
        if let Some(path) = &self.file {
            let _ = fs::remove_file(path);
        }
    }
}

/// Warns when a process holds the abstract socket that agents of earlier versions used as lock; it may be
/// such an agent or anything else.
pub fn warn_of_former(interface: &str) {
    let former = format!("@kilo-agent/{interface}");
    let sockets = fs::read_to_string("/proc/self/net/unix").unwrap_or_default();
    if sockets.lines().any(|line| line.ends_with(&former)) {
        tracing::warn!(
            socket = former,
            "a process holds the lock of agents of earlier versions; if such an agent still runs, stop it"
        );
    }
}

/// Locks an interface's name in this network namespace: a file in `state` (mode 0600).
///
/// # Errors
/// When another process has the lock, or the file cannot be made.
pub fn interface(state: &Path, interface: &str) -> Result<Lock, LockError> {
    let refused = |path: &Path| {
        let path = path.to_owned();
        move |source| LockError::Refused { path, source }
    };
    // Clusters in namespaces of one machine may share the directory.
    let namespace = Path::new("/proc/self/ns/net");
    let namespace = fs::metadata(namespace).map_err(refused(namespace))?.ino();
    let path = state.join(format!("{interface}-{namespace}.lock"));
    fs::DirBuilder::new().recursive(true).mode(0o700).create(state).map_err(refused(state))?;
    loop {
        let mut options = OpenOptions::new();
        options.write(true).create(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
        let file = options.open(&path).map_err(refused(&path))?;
        let held = hold(file, &path, || LockError::Taken(interface.to_owned()))?;
        let is_same = |there: fs::Metadata| held.metadata().is_ok_and(|held| held.ino() == there.ino());
        // Its last holder may have removed it after it was opened here.
        if fs::metadata(&path).is_ok_and(is_same) {
            return Ok(Lock { file: Some(path), _held: held });
        }
    }
}

/// Locks the directory of pinned programs and maps, which agents of other
/// network namespaces and with other state directories share, too.
///
/// # Errors
/// When another process has the lock, or the directory is somebody else's.
pub fn pins(directory: &Path) -> Result<Lock, LockError> {
    let file =
        File::open(directory).map_err(|source| LockError::Refused { path: directory.to_owned(), source })?;
    let held = hold(file, directory, || LockError::PinsTaken(directory.to_owned()))?;
    Ok(Lock { file: None, _held: held })
}

fn hold(file: File, path: &Path, taken: impl FnOnce() -> LockError) -> Result<Flock<File>, LockError> {
    let refused = |source: io::Error| LockError::Refused { path: path.to_owned(), source };
    let owner = file.metadata().map_err(refused)?.uid();
    if owner != nix::unistd::geteuid().as_raw() {
        return Err(LockError::Foreign { path: path.to_owned(), owner });
    }
    Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| match errno {
        Errno::EWOULDBLOCK => taken(),
        errno => refused(errno.into()),
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn one_holder_at_a_time_and_no_file_stays() {
        let state = tempfile::tempdir().unwrap();
        let state = state.path().join("kilo");
        let held = interface(&state, "kilo0").unwrap();
        let other = interface(&state, "kilo1").unwrap();
        assert!(matches!(interface(&state, "kilo0"), Err(LockError::Taken(name)) if name == "kilo0"));
        let modes: Vec<_> =
            fs::read_dir(&state).unwrap().map(|entry| entry.unwrap().metadata().unwrap().mode()).collect();
        assert_eq!(modes, [0o100_600; 2]);
        drop((held, other));
        assert_eq!(fs::read_dir(&state).unwrap().count(), 0);
        // What a killed agent left is taken over.
        drop(interface(&state, "kilo0").map(std::mem::forget));
        let left: Vec<_> = fs::read_dir(&state).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert_eq!(left.len(), 1);
        assert!(interface(&state, "kilo0").is_err(), "the forgotten lock is still held");
    }

    #[test]
    fn a_link_is_not_followed() {
        let state = tempfile::tempdir().unwrap();
        let target = state.path().join("target");
        let name = fs::metadata("/proc/self/ns/net").unwrap().ino();
        std::os::unix::fs::symlink(&target, state.path().join(format!("kilo0-{name}.lock"))).unwrap();
        assert!(matches!(interface(state.path(), "kilo0"), Err(LockError::Refused { .. })));
        assert!(!target.exists());
    }

    #[test]
    fn the_directory_of_pins_has_one_holder() {
        let top = tempfile::tempdir().unwrap();
        let held = pins(top.path()).unwrap();
        assert!(matches!(pins(top.path()), Err(LockError::PinsTaken(_))));
        drop(held);
        assert!(pins(top.path()).is_ok() && top.path().exists());
    }
}

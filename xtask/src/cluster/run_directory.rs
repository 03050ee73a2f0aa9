//! Where disks, logs and the state of a cluster are. A node's root is an overlay whose upper part lies here, and the
//! kernel takes no directory of another overlay for that: where the machine's own root is one, as in a container or in
//! `cargo xtask vm`, this is a file system in memory.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use nix::{
    errno::Errno,
    mount::{MntFlags, MsFlags, mount, umount2},
    sys::statfs::{OVERLAYFS_SUPER_MAGIC, statfs},
};

use crate::apt;

/// Its path, whether or not it is there.
pub fn path() -> Result<PathBuf> {
    Ok(apt::cache_directory()?.join("cluster/run"))
}

/// Makes it.
pub fn make(run: &Path) -> Result<()> {
    fs::create_dir_all(run)?;
    if statfs(run)?.filesystem_type() == OVERLAYFS_SUPER_MAGIC {
        println!("cluster: {} is on an overlay, so disks of nodes are in memory", run.display());
        let nothing: Option<&str> = None;
        mount(Some("tmpfs"), run, Some("tmpfs"), MsFlags::empty(), nothing)
            .with_context(|| format!("failed to mount a tmpfs on {}", run.display()))?;
    }
    Ok(())
}

/// Removes it with all that is in it.
pub fn remove(run: &Path) -> Result<()> {
    // Not a mount, or not there, is what it mostly is.
    match umount2(run, MntFlags::MNT_DETACH) {
        Ok(()) | Err(Errno::EINVAL | Errno::ENOENT) => {}
        Err(error) => return Err(error).with_context(|| format!("failed to unmount {}", run.display())),
    }
    match fs::remove_dir_all(run) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| run.display().to_string())
        }
        _ => Ok(()),
    }
}

//! Directory of a cluster's disks, logs and state. A node's root is an overlay with its upper directory
//! here, and the kernel accepts no directory of another overlay for that. Where the machine's root is one,
//! as in a container or in `cargo xtask vm`, this is a tmpfs.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    sys::statfs::{OVERLAYFS_SUPER_MAGIC, statfs},
};

use crate::apt;

/// Mount source that identifies our mounts.
const SOURCE: &str = "kilo-cluster";

/// Its path, whether or not it exists.
pub fn path() -> Result<PathBuf> {
    Ok(apt::cache_directory()?.join("cluster/run"))
}

/// Creates it, in memory where the machine's root is an overlay.
pub fn make(run: &Path) -> Result<()> {
    fs::create_dir_all(run)?;
    if statfs(run)?.filesystem_type() == OVERLAYFS_SUPER_MAGIC {
        println!("cluster: {} is on an overlay, so disks of nodes are in memory", run.display());
        let nothing: Option<&str> = None;
        mount(Some(SOURCE), run, Some("tmpfs"), MsFlags::empty(), nothing)
            .with_context(|| format!("failed to mount a tmpfs on {}", run.display()))?;
    }
    Ok(())
}

/// Removes it with everything in it.
pub fn remove(run: &Path) -> Result<()> {
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let point = run.display().to_string();
    let is_ours = |line: &str| {
        let mut words = line.split(' ');
        words.nth(4) == Some(&point) && words.any(|word| word == SOURCE)
    };
    if mounts.lines().any(is_ours) {
        umount2(run, MntFlags::MNT_DETACH).with_context(|| format!("failed to unmount {point}"))?;
    }
    match fs::remove_dir_all(run) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| run.display().to_string())
        }
        _ => Ok(()),
    }
}

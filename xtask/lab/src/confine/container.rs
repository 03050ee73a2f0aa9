//! A container's view of the machine, made for the calling process: mounts of its
//! own, the root read-only, capabilities dropped. Process ids stay the host's.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::{fs::symlink, process::CommandExt as _},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};
use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, unshare},
    unistd::pivot_root,
};

use super::manifest::{Mount, Rights, Source};

/// Directories that are empty in an image, but not on the node or this machine.
const EMPTY_IN_IMAGES: [&str; 3] = ["run", "tmp", "var/lib"];
/// File systems of the kernel.
const KERNEL: [&str; 3] = ["proc", "sys", "dev"];
/// Devices every container has.
const DEVICES: [&str; 6] = ["null", "zero", "full", "random", "urandom", "tty"];
/// Parts of /proc a container cannot write to, and files there that it cannot read.
const PROC_READ_ONLY: [&str; 5] = ["bus", "fs", "irq", "sys", "sysrq-trigger"];
const PROC_MASKED: [&str; 5] = ["kcore", "keys", "latency_stats", "timer_list", "sched_debug"];

/// A path lent to the container in addition to its volumes.
#[derive(Clone, Debug)]
pub struct Lent {
    /// Path, the same on the host and in the container.
    pub path: PathBuf,
    /// Whether the container may write to it.
    pub writable: bool,
}

/// Replaces this process by `command` in a container with these rights. `root` is an empty directory.
///
/// # Errors
/// When a mount or the execution fails; on success this does not return.
pub fn enter(
    rights: &Rights,
    root: &Path,
    lent: &[Lent],
    command: &[String],
) -> Result<std::convert::Infallible> {
    unshare(CloneFlags::CLONE_NEWNS).context("a mount namespace of its own")?;
    attach(None, Path::new("/"), None, MsFlags::MS_REC | MsFlags::MS_PRIVATE)?;
    attach(Some(Path::new("/")), root, None, MsFlags::MS_BIND | MsFlags::MS_REC)?;
    detach_below(root)?;
    for name in EMPTY_IN_IMAGES {
        attach(None, &root.join(name), Some("tmpfs"), MsFlags::empty())?;
    }
    fs::create_dir_all(root.join("run/lock"))?;
    for mount in &rights.mounts {
        prepare(root, mount)?;
    }
    for Lent { path, .. } in lent {
        fs::create_dir_all(inside(root, path))?;
    }
    for point in mount_points(root)? {
        read_only(&point)?;
    }
    kernel_file_systems(root)?;
    for mount in &rights.mounts {
        volume(root, mount).with_context(|| format!("volume at {}", mount.target))?;
    }
    for Lent { path, writable } in lent {
        // Not recursively: the root may lie below this path.
        let target = inside(root, path);
        attach(Some(path), &target, None, MsFlags::MS_BIND).with_context(|| path.display().to_string())?;
        if !writable {
            read_only(&target)?;
        }
    }
    std::env::set_current_dir(root)?;
    pivot_root(".", ".").context("pivot_root")?;
    umount2(".", MntFlags::MNT_DETACH).context("the machine's root")?;
    std::env::set_current_dir("/")?;
    // The remaining capability sets follow from the execution, as they do for a container's root.
    let mut setpriv = Command::new("setpriv");
    setpriv.arg(format!("--bounding-set={}", only(&rights.capabilities)));
    setpriv.args(["--inh-caps=-all", "--ambient-caps=-all"]);
    if rights.no_new_privileges {
        setpriv.arg("--no-new-privs");
    }
    bail!("setpriv (of util-linux): {}", setpriv.arg("--").args(command).exec())
}

/// Unmounts everything where a container has its own file systems, or nothing.
fn detach_below(root: &Path) -> Result<()> {
    let places = KERNEL.iter().chain(&EMPTY_IN_IMAGES).map(|name| root.join(name)).collect::<Vec<_>>();
    // One mount may hide another, so unmount from the top and repeat.
    loop {
        let there = mount_points(root)?;
        let there = there.iter().rev().filter(|point| places.iter().any(|place| point.starts_with(place)));
        if there.filter(|point| umount2(*point, MntFlags::MNT_DETACH).is_ok()).count() == 0 {
            return Ok(());
        }
    }
}

/// A capability set in the syntax of setpriv.
fn only(capabilities: &BTreeSet<String>) -> String {
    let added = capabilities.iter().map(|name| format!(",+{}", name.to_lowercase()));
    std::iter::once("-all".to_owned()).chain(added).collect()
}

fn inside(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

fn attach(source: Option<&Path>, target: &Path, kind: Option<&str>, flags: MsFlags) -> Result<()> {
    let source = source.or(kind.map(Path::new));
    mount(source, target, kind, flags, None::<&str>).with_context(|| format!("mounting {}", target.display()))
}

fn bind(source: &Path, target: &Path, without_writing: bool) -> Result<()> {
    attach(Some(source), target, None, MsFlags::MS_BIND | MsFlags::MS_REC)
        .with_context(|| source.display().to_string())?;
    if without_writing { read_only(target) } else { Ok(()) }
}

fn read_only(target: &Path) -> Result<()> {
    attach(None, target, None, MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY)
}

/// Mount points at and below `root`, as the kernel lists them.
fn mount_points(root: &Path) -> Result<Vec<PathBuf>> {
    let text = fs::read_to_string("/proc/self/mountinfo").context("/proc/self/mountinfo")?;
    let points = text.lines().filter_map(|line| line.split(' ').nth(4));
    // Spaces and backslashes are octal escapes.
    let points = points.map(|point| PathBuf::from(point.replace("\\040", " ").replace("\\134", "\\")));
    Ok(points.filter(|point| point.starts_with(root)).collect())
}

/// Creates the volume's source on the node, and its mount point in the container.
fn prepare(root: &Path, mount: &Mount) -> Result<()> {
    let target = inside(root, Path::new(&mount.target));
    let failed = || format!("volume at {}", mount.target);
    let is_file = match &mount.source {
        Source::DirectoryOrCreate(path) => {
            fs::create_dir_all(path).with_context(failed)?;
            false
        }
        Source::FileOrCreate(path) => {
            fs::OpenOptions::new().create(true).append(true).open(path).with_context(failed)?;
            true
        }
        Source::Host(path) => !fs::metadata(path).with_context(|| path.clone())?.is_dir(),
        Source::Empty | Source::Objects => false,
    };
    // Mount points in kernel file systems are made once those are mounted.
    if KERNEL.iter().any(|name| target.starts_with(root.join(name))) {
        return Ok(());
    }
    make_place(&target, is_file).with_context(failed)
}

fn make_place(target: &Path, is_file: bool) -> Result<()> {
    if target.exists() {
        return Ok(());
    }
    if !is_file {
        return Ok(fs::create_dir_all(target)?);
    }
    fs::create_dir_all(target.parent().context("no directory")?)?;
    fs::write(target, "")?;
    Ok(())
}

/// /proc, /sys and /dev as a runtime mounts them.
fn kernel_file_systems(root: &Path) -> Result<()> {
    let safe = MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC | MsFlags::MS_NODEV;
    let proc = root.join("proc");
    attach(None, &proc, Some("proc"), safe)?;
    for path in PROC_READ_ONLY.map(|name| proc.join(name)).iter().filter(|path| path.exists()) {
        bind(path, path, true)?;
    }
    for path in PROC_MASKED.map(|name| proc.join(name)).iter().filter(|path| path.exists()) {
        bind(Path::new("/dev/null"), path, false)?;
    }
    attach(None, &root.join("sys"), Some("sysfs"), safe | MsFlags::MS_RDONLY)?;
    let dev = root.join("dev");
    attach(None, &dev, Some("tmpfs"), MsFlags::MS_NOSUID)?;
    for name in DEVICES {
        make_place(&dev.join(name), true)?;
        bind(&Path::new("/dev").join(name), &dev.join(name), false)?;
    }
    for (name, target) in [("fd", "/proc/self/fd"), ("stdout", "fd/1"), ("stderr", "fd/2")] {
        symlink(target, dev.join(name))?;
    }
    fs::create_dir(dev.join("shm"))?;
    attach(None, &dev.join("shm"), Some("tmpfs"), safe)
}

fn volume(root: &Path, mount: &Mount) -> Result<()> {
    let target = inside(root, Path::new(&mount.target));
    match &mount.source {
        Source::DirectoryOrCreate(path) | Source::FileOrCreate(path) | Source::Host(path) => {
            let path = Path::new(path);
            if !target.exists() {
                make_place(&target, !path.is_dir())?;
            }
            bind(path, &target, mount.read_only)?;
        }
        Source::Empty | Source::Objects => {
            attach(None, &target, Some("tmpfs"), MsFlags::empty())?;
            if mount.read_only {
                read_only(&target)?;
            }
        }
    }
    let propagation = if mount.from_host { MsFlags::MS_SLAVE } else { MsFlags::MS_PRIVATE };
    attach(None, &target, None, MsFlags::MS_REC | propagation)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_of_capabilities_is_written_as_setpriv_reads_it() {
        assert_eq!(only(&BTreeSet::from(["NET_ADMIN".to_owned(), "BPF".to_owned()])), "-all,+bpf,+net_admin");
    }
}

//! Network namespaces of the lab: running commands and code inside them.

use std::{
    fs::File,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, bail};
use nix::sched::{CloneFlags, setns};

use crate::takedown;

/// Where `ip netns` keeps its names.
const NETNS_DIR: &str = "/run/netns";

/// One named network namespace, optionally with a process that holds a mount
/// and a UTS namespace beside it.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub struct Netns {
    /// Name within the lab: `a1`, `pod-a1`, `router`.
    pub name: String,
    /// Name of the network namespace on the machine.
    pub id: String,
    /// Process that holds the other namespaces (nodes only).
    pub holder: Option<u32>,
}

impl Netns {
    /// Creates the network namespace and brings loopback up.
    pub fn create(lab: &str, name: &str) -> Result<Self> {
        let id = format!("{lab}-{name}");
        takedown::make(|| run(Command::new("ip").args(["netns", "add", &id])))?;
        let netns = Self { name: name.to_owned(), id, holder: None };
        netns.ip("link set lo up")?;
        Ok(netns)
    }

    /// Adds mount and UTS namespaces: own /sys, /sys/fs/bpf, /run, /etc and
    /// /var/lib, as a container host would have, and no name server; held by a
    /// sleeping process.
    pub fn hold(&mut self, log: &Path) -> Result<()> {
        super::stop_if_interrupted()?;
        let script = format!(
            "own() {{
                 case $2/ in $1/*) mount --bind $2 /mnt; esac
                 mount -t tmpfs $1 $1
                 case $2/ in $1/*) mkdir -p $2; mount --bind /mnt $2; umount /mnt; esac
             }}
             set -e
             mount -t sysfs sys /sys
             mount -t bpf bpf /sys/fs/bpf
             own /run '{checkout}'
             own /var/lib '{checkout}'
             mkdir -p /run/wireguard /run/etc/upper /run/etc/work
             mount -t overlay -o lowerdir=/etc,upperdir=/run/etc/upper,workdir=/run/etc/work etc /etc
             rm -f /etc/resolv.conf
             touch /etc/resolv.conf
             echo '127.0.0.1 localhost' > /etc/hosts
             mkdir -p /etc/cni/net.d
             hostname {name}
             echo ready
             exec sleep infinity",
            checkout = crate::workspace_root().display(),
            name = self.name
        );
        let mut child = Command::new("nsenter")
            .arg(format!("--net={}", self.path().display()))
            .args(["unshare", "--mount", "--uts", "--propagation", "private", "sh", "-c", &script])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(File::create(log)?)
            .spawn()
            .context("cannot run nsenter; install util-linux")?;
        let mut line = String::new();
        if let Some(stdout) = child.stdout.take() {
            std::io::BufRead::read_line(&mut std::io::BufReader::new(stdout), &mut line)?;
        }
        if line.trim() != "ready" {
            bail!("the namespaces of {} could not be set up; see {}", self.name, log.display());
        }
        self.holder = Some(child.id());
        Ok(())
    }

    /// Path of the network namespace.
    pub fn path(&self) -> PathBuf {
        Path::new(NETNS_DIR).join(&self.id)
    }

    /// A command that will run inside; its process id is the command's own.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        match self.holder {
            Some(pid) => {
                command.arg(format!("--target={pid}")).args(["--mount", "--net", "--uts"]);
                if let Ok(dir) = std::env::current_dir() {
                    command.arg(format!("--wd={}", dir.display()));
                }
            }
            None => {
                command.arg(format!("--net={}", self.path().display()));
            }
        }
        command.arg("--").arg(program);
        command
    }

    /// Runs a shell script inside and returns its standard output.
    pub fn sh(&self, script: &str) -> Result<String> {
        run(self.command("sh").args(["-euc", script])).with_context(|| format!("in {}", self.name))
    }

    /// Makes TCP connections last although connection tracking sees some of their segments only, as
    /// `--host-routing` needs it; or sets what the kernel sets at boot.
    pub fn tolerate_gaps_in_tcp(&self, tolerate: bool) -> Result<()> {
        let (liberal, timeout) =
            if tolerate { ("1", "$(cat nf_conntrack_tcp_timeout_established)") } else { ("0", "300") };
        let set = format!(
            "cd /proc/sys/net/netfilter; echo {liberal} > nf_conntrack_tcp_be_liberal
             for name in unacknowledged max_retrans; do echo {timeout} > nf_conntrack_tcp_timeout_$name; done"
        );
        self.sh(&set).map(drop)
    }

    /// Runs lines of `ip` commands inside in one go.
    pub fn ip(&self, batch: &str) -> Result<()> {
        let mut child = Command::new("ip")
            .args(["-n", &self.id, "-batch", "-"])
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("cannot run ip; install iproute2")?;
        if let Some(mut stdin) = child.stdin.take() {
            stdin.write_all(batch.as_bytes())?;
        }
        let output = child.wait_with_output()?;
        if !output.status.success() {
            bail!("ip in {}: {}", self.name, String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(())
    }

    /// Runs `code` on a thread of its own inside the network namespace.
    pub fn spawn<T: Send + 'static>(
        &self,
        code: impl FnOnce() -> T + Send + 'static,
    ) -> std::thread::JoinHandle<Result<T>> {
        let path = self.path();
        std::thread::spawn(move || {
            let file = File::open(&path).with_context(|| format!("{} is gone", path.display()))?;
            setns(file, CloneFlags::CLONE_NEWNET).context("setns")?;
            Ok(code())
        })
    }
}

/// Runs a command to its end; returns its standard output, or an error with its standard error.
pub fn run(command: &mut Command) -> Result<String> {
    let program = format!("{command:?}");
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("cannot run {program}"))?;
    if !output.status.success() {
        bail!("{program}: {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Removes these namespaces with all processes in them; missing ones are ignored.
pub fn remove(namespaces: impl IntoIterator<Item = Netns>) -> Result<()> {
    let namespaces: Vec<_> = namespaces.into_iter().filter(|netns| netns.path().exists()).collect();
    kill_processes(&namespaces);
    for netns in &namespaces {
        run(Command::new("ip").args(["netns", "delete", &netns.id]))?;
    }
    Ok(())
}

/// Ends every process that lives in one of these network namespaces.
pub fn kill_processes(namespaces: &[Netns]) {
    for process in namespaces.iter().flat_map(|netns| processes(netns).unwrap_or_default()) {
        let _ = nix::sys::signal::kill(
            nix::unistd::Pid::from_raw(process.cast_signed()),
            nix::sys::signal::Signal::SIGKILL,
        );
    }
}

/// Ids of all processes in the network namespace, except this one.
pub fn processes(netns: &Netns) -> Result<Vec<u32>> {
    use std::os::linux::fs::MetadataExt as _;
    let inode = std::fs::metadata(netns.path())?.st_ino();
    let numbers = std::fs::read_dir("/proc")?
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .filter(|&process| process != std::process::id());
    let is_in = |process: &u32| {
        std::fs::metadata(format!("/proc/{process}/ns/net")).is_ok_and(|link| link.st_ino() == inode)
    };
    Ok(numbers.filter(is_in).collect())
}

//! A node: a network namespace, and processes in namespaces of their own on a disk (a directory) that
//! outlives them.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};

use super::network::{self, NAME, Site};
use crate::{
    command::output,
    lab::{
        netns::{self, Netns},
        takedown, wait,
    },
};

const INIT: &str = include_str!("init.sh");
const CGROUPS: &str = "/sys/fs/cgroup";

/// Files and programs that the nodes of a cluster share.
#[derive(Clone, Debug)]
pub struct Parts {
    /// Directory of disks, logs and process identifiers.
    pub run: PathBuf,
    /// Root file system that nodes share, read-only.
    pub base: PathBuf,
    /// Programs of Kubernetes.
    pub bin: PathBuf,
    /// Name of the image that holds a pod's namespaces.
    pub pause: String,
    /// True where nodes forward IPv6.
    pub has_ipv6: bool,
}

/// A node of the cluster: a network namespace with containerd, kubelet and a root of its own.
#[derive(Clone, Debug)]
pub struct Node {
    /// Where it is.
    pub site: Site,
    parts: Parts,
}

impl Node {
    /// A handle for a node; creates nothing.
    pub fn new(site: Site, parts: &Parts) -> Self {
        Self { site, parts: parts.clone() }
    }

    /// Name of the node.
    pub fn name(&self) -> &str {
        &self.site.node
    }

    /// Its network namespace.
    pub fn netns(&self) -> Netns {
        network::node(self.name())
    }

    /// The directory that outlives a power cut.
    pub fn disk(&self) -> PathBuf {
        self.parts.run.join(self.name())
    }

    fn pid_file(&self) -> PathBuf {
        self.disk().join("pid")
    }

    /// Process identifier of its PID 1.
    fn pid(&self) -> Result<i32> {
        let text = fs::read_to_string(self.pid_file()).with_context(|| {
            format!("node {} is not running; see `cargo xtask cluster --help`", self.name())
        })?;
        Ok(text.trim().parse()?)
    }

    /// Path of the node's file as seen from outside.
    pub fn path(&self, file: &str) -> Result<PathBuf> {
        Ok(PathBuf::from(format!("/proc/{}/root{file}", self.pid()?)))
    }

    /// Switches the node on.
    pub fn start(&self) -> Result<()> {
        let disk = self.disk();
        for directory in ["upper", "work", "merged"] {
            fs::create_dir_all(disk.join(directory))?;
        }
        network::connect(&self.site)?;
        let groups = make_groups(self.name())?;
        let join: String =
            groups.iter().map(|group| format!("echo $$ > {}/cgroup.procs\n", group.display())).collect();
        let script = format!(
            "{join}exec nsenter --net={} unshare --mount --uts --ipc --pid --cgroup --fork --kill-child=KILL sh -c \"$INIT\"",
            self.netns().path().display()
        );
        let hierarchies: Vec<_> =
            hierarchies().iter().filter_map(|path| Some(path.file_name()?.to_str()?.to_owned())).collect();
        let ipv6 = if self.parts.has_ipv6 { self.site.address_v6.to_string() } else { String::new() };
        let mut command = Command::new("sh");
        command
            .args(["-euc", &script])
            .env_clear()
            .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
            .env("INIT", INIT)
            .env("NAME", self.name())
            .env("ADDRESS", self.site.address.to_string())
            .env("IPV6", ipv6)
            .env("DISK", &disk)
            .env("BASE", &self.parts.base)
            .env("BIN", &self.parts.bin)
            .env("PAUSE", &self.parts.pause)
            .env("HIERARCHIES", hierarchies.join(" "))
            // The terminal's Ctrl-C is for this process, not for the node.
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(fs::File::create(disk.join("boot.log"))?);
        // A cut before the node's init has started ends this process, which takes init with it.
        let mut process = takedown::make(|| {
            let process = command.spawn().context("nsenter, unshare")?;
            fs::write(self.pid_file(), process.id().to_string())?;
            Ok(process)
        })?;
        let id = process.id();
        let mut lines = process.stdout.take().into_iter().flat_map(|stdout| BufReader::new(stdout).lines());
        if let Some(began) = lines.next() {
            began?;
            leave_group(id)?;
        }
        if lines.next().transpose()?.is_none_or(|line| line != "ready") {
            bail!("node {} does not boot:\n{}", self.name(), fs::read_to_string(disk.join("boot.log"))?);
        }
        let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children"))?;
        let first = children.split_whitespace().next().context("the node has no first process")?;
        Ok(fs::write(self.pid_file(), first)?)
    }

    /// Cuts the power: only the disk survives.
    pub fn cut(&self) -> Result<()> {
        if let Ok(pid) = self.pid() {
            // The PID may belong to another process by now.
            let is_ours = |all: Vec<u32>| all.contains(&pid.cast_unsigned());
            let is_ours = netns::processes(&self.netns()).is_ok_and(is_ours);
            let pid = nix::unistd::Pid::from_raw(pid);
            if is_ours {
                let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
                let gone = || !Path::new(&format!("/proc/{pid}/ns/net")).exists();
                // Not `until`, which ends when everything is to be taken down.
                let _ = wait::until("the namespace is gone", Duration::from_secs(20), || Ok(gone()));
            }
            fs::remove_file(self.pid_file())?;
        }
        network::disconnect(self.name())?;
        remove_groups(&Path::new(NAME).join(self.name()));
        Ok(())
    }

    /// A command inside the node.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Result<Command> {
        let mut command = Command::new("nsenter");
        command
            .arg(format!("--target={}", self.pid()?))
            .args(["--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup", "--root", "--wdns=/", "--"])
            .args(["env", "-i", "HOME=/root", "KUBECONFIG=/etc/kubernetes/admin.conf"])
            .arg("PATH=/opt/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
            .arg(program);
        Ok(command)
    }

    /// kubectl as the cluster's administrator, in the node's network; it reads and writes files of this
    /// machine.
    pub fn kubectl(&self) -> Result<Command> {
        let mut command = self.netns().command(self.parts.bin.join("kubectl"));
        command
            .env("KUBECONFIG", self.path("/etc/kubernetes/admin.conf")?)
            // Clusters follow each other at the same address, and one's cache must not serve the next.
            .env("KUBECACHEDIR", self.disk().join("kubectl-cache"))
            .env("NO_PROXY", "*");
        Ok(command)
    }

    /// Runs a shell script inside; returns its standard output.
    pub fn sh(&self, script: &str) -> Result<String> {
        output(self.command("sh")?.args(["-euc", script])).with_context(|| format!("on {}", self.name()))
    }

    /// Writes a file inside.
    pub fn write(&self, file: &str, text: &str) -> Result<()> {
        let path = self.path(file)?;
        if let Some(directory) = path.parent() {
            fs::create_dir_all(directory)?;
        }
        fs::write(&path, text).with_context(|| path.display().to_string())
    }

    /// Kills a program that the node's init restarts, and waits for the new process.
    pub fn kill(&self, program: &str) -> Result<()> {
        let before = self.sh(&format!("pidof {program}"))?;
        self.sh(&format!("kill -KILL {}", before.trim()))?;
        super::until(&format!("{program} runs again"), Duration::from_secs(20), || {
            self.sh(&format!("pidof {program}")).ok().filter(|now| *now != before).map(drop)
        })
    }

    /// The network namespace of a container.
    pub fn container_netns(&self, pod: &str, container: &str) -> Result<Netns> {
        let id = self.of_process(container, "ns/net")?;
        Ok(Netns { name: pod.to_owned(), id: id.display().to_string(), holder: None })
    }

    /// /proc/PID/status of a container's first process.
    pub fn container_status(&self, container: &str) -> Result<String> {
        let path = self.of_process(container, "status")?;
        fs::read_to_string(&path).with_context(|| path.display().to_string())
    }

    /// Path of a file in /proc/PID for a container's first process.
    fn of_process(&self, container: &str, file: &str) -> Result<PathBuf> {
        let task = format!("/run/containerd/io.containerd.runtime.v2.task/k8s.io/{container}/init.pid");
        let path = self.path(&task)?;
        let process = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        self.path(&format!("/proc/{}/{file}", process.trim()))
    }
}

/// Directories of the cgroup v1 hierarchies, or the v2 one where there is no other.
fn hierarchies() -> Vec<PathBuf> {
    if Path::new(CGROUPS).join("cgroup.controllers").exists() {
        return vec![PathBuf::from(CGROUPS)];
    }
    let mut found: Vec<_> = fs::read_dir(CGROUPS)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.join("cgroup.procs").exists() && !path.join("cgroup.controllers").exists())
        // cpu,cpuacct are two names of one hierarchy.
        .filter(|path| path.file_name().is_some_and(|name| !name.to_string_lossy().contains(',')))
        .collect();
    found.sort();
    found
}

/// Creates the node's cgroup in each hierarchy.
fn make_groups(name: &str) -> Result<Vec<PathBuf>> {
    let mut made = Vec::new();
    for hierarchy in hierarchies() {
        let parent = hierarchy.join(NAME);
        let group = parent.join(name);
        for (above, group) in [(&hierarchy, &parent), (&parent, &group)] {
            if above.join("cgroup.subtree_control").exists() {
                for controller in fs::read_to_string(above.join("cgroup.controllers"))?.split_whitespace() {
                    let _ = fs::write(above.join("cgroup.subtree_control"), format!("+{controller}"));
                }
            }
            fs::create_dir_all(group).with_context(|| group.display().to_string())?;
            // A new cpuset group cannot hold a process before it has CPUs and memory nodes.
            for file in ["cpuset.cpus", "cpuset.mems"] {
                if hierarchy.ends_with("cpuset") {
                    fs::write(group.join(file), fs::read(above.join(file))?)?;
                }
            }
        }
        made.push(group);
    }
    Ok(made)
}

/// Moves the process that waits for a node's init out of its cgroup. A v2 group delegates controllers to
/// its children only while it has no processes of its own.
fn leave_group(process: u32) -> Result<()> {
    let all = Path::new(CGROUPS).join(NAME);
    if !all.join("cgroup.controllers").exists() {
        return Ok(());
    }
    let outside = all.join("outside");
    fs::create_dir_all(&outside).with_context(|| outside.display().to_string())?;
    Ok(fs::write(outside.join("cgroup.procs"), process.to_string())?)
}

/// Removes a cgroup and all below it as soon as they are empty.
pub fn remove_groups(group: &Path) {
    for path in hierarchies().iter().map(|hierarchy| hierarchy.join(group)) {
        let removed = || Ok(!path.exists() || remove_tree(&path).is_ok());
        let _ = wait::until("the group is empty", Duration::from_secs(5), removed);
    }
}

fn remove_tree(path: &Path) -> std::io::Result<()> {
    for entry in fs::read_dir(path)?.flatten() {
        if entry.file_type()?.is_dir() {
            remove_tree(&entry.path())?;
        }
    }
    fs::remove_dir(path)
}

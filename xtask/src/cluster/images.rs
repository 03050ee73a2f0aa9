//! Contents of nodes: their root file system, and a containerd directory that has every image already. Both
//! are made once; nodes get copies.

use std::{
    fs,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result};

use super::release::Release;
use crate::{
    apt,
    command::run,
    image::{self, Architecture, base, buildah::Buildah},
};

/// Image with the programs of a node and its pods.
pub const NODE: &str = "localhost/kilo-cluster/node:2";
/// Image of test pods, with a shell and `sleep`.
pub const TEST: &str = "docker.io/kilo-cluster/test:1";
/// Our image under another tag, for an update.
pub const OTHER_TAG: &str = "docker.io/kilo-ebpf/kilo:other";
const PACKAGES: &str = "busybox-static ca-certificates conntrack containerd dnsmasq-base ebtables ethtool iproute2 \
    iptables iputils-ping kmod mount nftables openssl procps runc socat tcpdump util-linux";
/// Incremented when [`PACKAGES`] changes, like the tag of [`NODE`].
const REVISION: u32 = 2;

/// A current kubeadm uses only flags of etcd 3.6, but Debian has 3.5.
const ETCD: &str = r#"#!/bin/sh
for argument; do
  shift
  case $argument in
    --feature-gates=*) continue ;;
    --watch-progress-notify-interval=*) argument=--experimental-${argument#--} ;;
  esac
  set -- "$@" "$argument"
done
exec etcd-itself "$@"
"#;

/// Directories shared by the nodes of a release.
#[derive(Clone, Debug)]
pub struct Images {
    /// Root file system.
    pub root: PathBuf,
    /// containerd's directory with the images of Kubernetes.
    pub containerd: PathBuf,
}

/// Finds or creates them.
pub fn prepare(release: Release, programs: &Path) -> Result<Images> {
    let directory = apt::cache_directory()?.join("cluster");
    fs::create_dir_all(&directory)?;
    let images = Images {
        root: directory.join(format!("root-{REVISION}")),
        containerd: directory.join(format!("containerd-{REVISION}-{}", release.version)),
    };
    if images.root.exists() && images.containerd.exists() {
        return Ok(images);
    }
    apt::install(&["containerd"])?;
    let buildah = Buildah::open()?;
    base::slim(&buildah, Architecture::Amd64)?;
    let context = tempfile::tempdir_in(&directory)?;
    let build = |text: &str, image: &str, context: &Path| {
        let file = context.join("Dockerfile");
        fs::write(&file, text)?;
        buildah.build(&file, context, image, Architecture::Amd64, &[])
    };
    if !buildah.has(NODE) {
        println!("cluster: the nodes' root file system");
        build(
            &format!(
                "FROM {}\nRUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes \
                 --no-install-recommends {PACKAGES} && rm -rf /var/lib/apt/lists/* && mkdir -p /before /opt/bin\n",
                base::SLIM
            ),
            NODE,
            context.path(),
        )?;
    }
    if !images.root.exists() {
        buildah.with(NODE, |_, root| {
            let part = directory.join("root.part");
            let _ = fs::remove_dir_all(&part);
            run(Command::new("cp").arg("-a").arg(root).arg(&part))?;
            Ok(fs::rename(part, &images.root)?)
        })?;
    }
    println!("cluster: images of Kubernetes {}", release.version);
    let bin = context.path().join("bin");
    fs::create_dir(&bin)?;
    for program in ["kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy", "etcdctl"] {
        fs::copy(programs.join(program), bin.join(program))?;
    }
    fs::copy(programs.join("etcd"), bin.join("etcd-itself"))?;
    fs::write(bin.join("etcd"), ETCD)?;
    fs::set_permissions(bin.join("etcd"), fs::Permissions::from_mode(0o755))?;
    // One image with many names: the command that runs it selects the program. Only as the pause image it
    // runs without a command, and sleeps.
    let all = format!("localhost/kilo-cluster/kubernetes:{}", release.version);
    build(
        &format!(
            "FROM {NODE}\nCOPY bin/ /usr/local/bin/\nENTRYPOINT [\"/bin/busybox\", \"sleep\", \"2147483647\"]\n"
        ),
        &all,
        context.path(),
    )?;
    let archive = context.path().join("kubernetes.tar");
    buildah.archive(&all, &all, &archive, false)?;
    let part = context.path().join("containerd");
    let store = Store::open(&part)?;
    store.import(&archive)?;
    for name in names(release) {
        store.tag(&all, &name)?;
    }
    store.close()?;
    let _ = fs::remove_dir_all(&images.containerd);
    fs::rename(&part, &images.containerd)?;
    Ok(images)
}

fn names(release: Release) -> Vec<String> {
    let registry = release.registry;
    let mut names: Vec<_> = ["kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy"]
        .map(|program| format!("{registry}/{program}:v{}", release.version))
        .into();
    names.extend([format!("{registry}/etcd:{}", release.etcd), pause(release), TEST.to_owned()]);
    names
}

/// Name of the image that holds a pod's namespaces.
pub fn pause(release: Release) -> String {
    format!("{}/pause:{}", release.registry, release.pause)
}

/// Copies a containerd directory and adds our image to it.
pub fn add_kilo(from: &Path, to: &Path, archive: &Path) -> Result<()> {
    copy(from, to)?;
    let store = Store::open(to)?;
    store.import(archive)?;
    store.tag(image::IMAGE, OTHER_TAG)?;
    store.close()
}

/// Copies a containerd directory. Layers and blobs never change and are hard-linked within a file system;
/// databases are copied.
pub fn copy(from: &Path, to: &Path) -> Result<()> {
    let parent = to.parent().context("no directory to copy to")?;
    fs::create_dir_all(parent)?;
    let is_near = fs::metadata(from)?.dev() == fs::metadata(parent)?.dev();
    run(Command::new("cp").arg(if is_near { "-al" } else { "-a" }).arg(from).arg(to))?;
    for plugin in ["metadata.v1.bolt/meta.db", "snapshotter.v1.overlayfs/metadata.db"] {
        let database = format!("io.containerd.{plugin}");
        let original = from.join(&database);
        run(Command::new("cp").args(["-a", "--remove-destination"]).arg(&original).arg(to.join(&database)))
            .with_context(|| original.display().to_string())?;
    }
    Ok(())
}

/// containerd on this machine, which fills its directory.
struct Store {
    process: Child,
    state: tempfile::TempDir,
}

impl Store {
    fn open(root: &Path) -> Result<Self> {
        apt::install(&["containerd"])?;
        let state = tempfile::tempdir()?;
        let socket = state.path().join("socket");
        let configuration = state.path().join("config.toml");
        fs::write(
            &configuration,
            format!(
                "version = 2\nroot = \"{}\"\nstate = \"{}/state\"\ndisabled_plugins = [\"io.containerd.grpc.v1.cri\"]\n\
                 [grpc]\naddress = \"{}\"\n",
                root.display(),
                state.path().display(),
                socket.display()
            ),
        )?;
        let process = Command::new("containerd")
            .arg("--config")
            .arg(&configuration)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(fs::File::create(state.path().join("log"))?)
            .spawn()
            .context("containerd")?;
        let store = Self { process, state };
        super::until("containerd answers", Duration::from_secs(30), || run(store.ctr().arg("version")).ok())?;
        Ok(store)
    }

    fn ctr(&self) -> Command {
        let mut command = Command::new("ctr");
        command.arg("--address").arg(self.state.path().join("socket")).args(["--namespace", "k8s.io"]);
        command
    }

    fn import(&self, archive: &Path) -> Result<()> {
        run(self.ctr().args(["images", "import"]).arg(archive))
    }

    fn tag(&self, image: &str, name: &str) -> Result<()> {
        run(self.ctr().args(["images", "tag", image, name]))
    }

    fn close(mut self) -> Result<()> {
        nix::sys::signal::kill(
            nix::unistd::Pid::from_raw(self.process.id().cast_signed()),
            nix::sys::signal::Signal::SIGTERM,
        )?;
        self.process.wait()?;
        Ok(())
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

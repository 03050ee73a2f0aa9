//! Kubernetes programs, built once: 1.36.2 where its source is at hand, else Debian's 1.20.2.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};

use crate::{
    apt::{self, Suites},
    command::{run, show},
    kubernetes, workspace_root,
};

/// Programs of a cluster; the one that other tests also use is built first.
const PROGRAMS: [&str; 7] = [
    "kube-apiserver",
    "kubelet",
    "kube-controller-manager",
    "kube-scheduler",
    "kube-proxy",
    "kubeadm",
    "kubectl",
];
const ETCD: [&str; 2] = ["etcd", "etcdctl"];
/// Variable with the path of the newer source's archive, which has a directory `kubernetes`.
const SOURCE: &str = "KILO_KUBERNETES_SOURCE";

/// A version of Kubernetes that can be built here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Release {
    /// Without the `v`.
    pub version: &'static str,
    /// Version of kubeadm's configuration.
    pub kubeadm_api: &'static str,
    /// Registry where kubeadm expects its own images.
    pub registry: &'static str,
    /// Tag of etcd's image.
    pub etcd: &'static str,
    /// Tag of the pause image.
    pub pause: &'static str,
    /// Whether it knows every field of our manifests.
    pub is_current: bool,
}

/// Built with Go 1.26 of trixie-backports, and run with etcd of trixie.
pub const CURRENT: Release = Release {
    version: kubernetes::CURRENT,
    kubeadm_api: "v1beta4",
    registry: "registry.k8s.io",
    etcd: "3.5.16-0",
    pause: "3.10.2",
    is_current: true,
};
/// The last release whose source Debian has completely.
pub const DEBIAN: Release = Release {
    version: "1.20.2",
    kubeadm_api: "v1beta2",
    registry: "k8s.gcr.io",
    etcd: "3.4.13-0",
    pause: "3.2",
    is_current: false,
};

impl Release {
    /// Whether pods and Services also have IPv6 addresses: the default since 1.21.
    pub const fn has_two_families(self) -> bool {
        self.is_current
    }

    /// The newest release that is built or can be.
    pub fn newest() -> Result<Self> {
        Ok(if CURRENT.is_built()? || source().is_some() { CURRENT } else { DEBIAN })
    }

    /// Directory of its programs.
    fn directory(self) -> Result<PathBuf> {
        kubernetes::built(self.version)
    }

    /// Whether nothing must be compiled.
    pub fn is_built(self) -> Result<bool> {
        let bin = self.directory()?.join("bin");
        Ok(PROGRAMS.iter().chain(&ETCD).all(|program| bin.join(program).is_file()))
    }

    /// Directory with the programs; builds what is missing.
    pub fn programs(self) -> Result<PathBuf> {
        let directory = self.directory()?;
        let bin = directory.join("bin");
        if !self.is_built()? {
            println!("cluster: building Kubernetes {}, once (10 to 20 minutes)", self.version);
            fs::create_dir_all(&bin).with_context(|| bin.display().to_string())?;
            if self.is_current { build_current(&directory, &bin)? } else { self.build_debian(&bin)? }
        }
        Ok(bin)
    }

    fn build_debian(self, bin: &Path) -> Result<()> {
        let tree = kubernetes::Tree::open()?;
        for program in PROGRAMS {
            tree.build(program, &bin.join(program), Some(self.version))?;
        }
        tree.copy_etcd(bin)?;
        tree.remove()
    }
}

/// Path of the archive with the newer source.
fn source() -> Option<PathBuf> {
    let named = std::env::var_os(SOURCE).map(PathBuf::from);
    named.or_else(|| {
        let beside = workspace_root().parent()?.join("shared/kubernetes-1.36.2-src.tar.xz");
        beside.is_file().then_some(beside)
    })
}

/// Debian suites with Go and etcd.
fn suites() -> Result<Suites> {
    Suites::open(&apt::cache_directory()?, &["trixie", "trixie-backports"], false)
}

/// Root of Go 1.26, unpacked once.
pub fn go_root() -> Result<PathBuf> {
    let go = apt::cache_directory()?.join("go-1.26");
    let root = go.join("usr/lib/go-1.26");
    if !root.join("bin/go").is_file() {
        let suites = suites()?;
        for package in ["golang-1.26-go", "golang-1.26-src"] {
            suites.unpack(package, &go)?;
        }
    }
    Ok(root)
}

/// Go in a source tree, without network access; `scratch` is for its caches.
pub fn go(root: &Path, tree: &Path, scratch: &Path) -> Command {
    let mut command = Command::new(root.join("bin/go"));
    command
        .current_dir(tree)
        .env("GOROOT", root)
        .env("GOTOOLCHAIN", "local")
        .env("GOPROXY", "off")
        .env("GOFLAGS", "")
        .env("GOCACHE", scratch.join("go-cache"))
        .env("CGO_ENABLED", "0");
    command
}

fn build_current(directory: &Path, bin: &Path) -> Result<()> {
    let root = go_root()?;
    let suites = suites()?;
    let unpacked = tempfile::tempdir_in(directory)?;
    for (package, program) in [("etcd-server", "etcd"), ("etcd-client", "etcdctl")] {
        suites.unpack(package, unpacked.path())?;
        fs::copy(unpacked.path().join("usr/bin").join(program), bin.join(program))?;
    }
    let Some(archive) = source() else { bail!("${SOURCE} names no archive of Kubernetes' source") };
    run(Command::new("tar").arg("-xf").arg(&archive).arg("-C").arg(unpacked.path()))
        .with_context(|| format!("${SOURCE}"))?;
    let tree = unpacked.path().join("kubernetes");
    let version = format!("v{}", CURRENT.version);
    let flags = format!(
        "-s -w -X k8s.io/component-base/version.gitVersion={version} -X k8s.io/component-base/version.gitMajor=1 \
         -X k8s.io/component-base/version.gitMinor=36 -X k8s.io/client-go/pkg/version.gitVersion={version}"
    );
    for program in PROGRAMS.iter().filter(|program| !bin.join(program).exists()) {
        println!("cluster: {program}");
        let part = unpacked.path().join(program);
        show(
            go(&root, &tree, unpacked.path())
                .args(["build", "-ldflags", &flags, "-o"])
                .arg(&part)
                .arg(format!("./cmd/{program}")),
        )?;
        fs::rename(&part, bin.join(program))?;
    }
    Ok(())
}

//! A real API server for tests: from `$KUBEBUILDER_ASSETS`, the newest Kubernetes built for the cluster,
//! the cache, or built once from Debian's sources.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};

use crate::{
    apt::{self, Suites},
    command::{output, run, show},
};

/// The newest version that clusters run.
pub const CURRENT: &str = "1.36.2";
/// The Debian source package that still builds with nothing but Debian's Go.
const SOURCE: &str = "kubernetes=1.20.5+really1.20.2-1.1";
const PACKAGE: &str = "k8s.io/kubernetes";

/// Directory with `etcd` and `kube-apiserver` (the envtest convention).
pub fn assets() -> Result<PathBuf> {
    if let Some(given) = std::env::var_os("KUBEBUILDER_ASSETS").map(PathBuf::from) {
        if is_complete(&given) {
            println!("kube-assets: found in $KUBEBUILDER_ASSETS");
            return Ok(given);
        }
        bail!("$KUBEBUILDER_ASSETS ({}) holds no etcd and kube-apiserver", given.display());
    }
    let directory = built(CURRENT)?.join("bin");
    if is_complete(&directory) {
        println!("kube-assets: Kubernetes {CURRENT}, found in {}", directory.display());
        return Ok(directory);
    }
    let cache = apt::cache_directory()?;
    let directory = cache.join("kube-assets");
    if is_complete(&directory) {
        println!("kube-assets: found in {}", directory.display());
        return Ok(directory);
    }
    build(&cache, &directory)?;
    Ok(directory)
}

/// Directory of a Kubernetes version that was built for the cluster.
pub fn built(version: &str) -> Result<PathBuf> {
    Ok(apt::cache_directory()?.join(format!("kubernetes-{version}")))
}

/// Whether the API server and its companions are there.
fn is_complete(directory: &Path) -> bool {
    ["etcd", "etcdctl", "kube-apiserver"].iter().all(|program| directory.join(program).is_file())
}

fn build(cache: &Path, directory: &Path) -> Result<()> {
    println!("kube-assets: building kube-apiserver from Debian's source, once (about five minutes)");
    let tree = Tree::open_in(cache)?;
    fs::create_dir_all(directory)?;
    tree.copy_etcd(directory)?;
    tree.build("kube-apiserver", &directory.join("kube-apiserver"), None)?;
    tree.remove()?;
    println!("kube-assets: built into {}", directory.display());
    Ok(())
}

/// Debian's source of Kubernetes, ready to be built.
pub struct Tree {
    work: PathBuf,
    root: PathBuf,
}

impl Tree {
    /// Fetches and patches the source.
    pub fn open() -> Result<Self> {
        Self::open_in(&apt::cache_directory()?)
    }

    fn open_in(cache: &Path) -> Result<Self> {
        apt::install(&["dpkg-dev", "golang-1.19-go", "git"])?;
        let suites = Suites::open(cache, &["bookworm"], true)?;
        let work = cache.join("kube-build");
        let _ = fs::remove_dir_all(&work);
        fs::create_dir_all(&work)?;
        for package in ["etcd-server", "etcd-client", "golang-github-modern-go-reflect2-dev"] {
            suites.unpack(package, &work.join(package))?;
        }
        fetch_source(&suites, &work)?;
        let tree = fs::read_dir(&work)?
            .flatten()
            .map(|entry| entry.path())
            .find(|path| path.join("cmd/kube-apiserver").is_dir())
            .context("the source package holds no cmd/kube-apiserver")?;
        // GOPATH mode expects the tree under its import path.
        let root = work.join("go/src").join(PACKAGE);
        fs::create_dir_all(root.parent().context("no parent")?)?;
        fs::rename(&tree, &root)?;
        mend(&work, &root)?;
        Ok(Self { work, root })
    }

    /// Builds one of its programs; `version` is what the program reports.
    pub fn build(&self, program: &str, to: &Path, version: Option<&str>) -> Result<()> {
        let mut flags = "-s -w".to_owned();
        let vendored = format!("{PACKAGE}/vendor/k8s.io");
        for package in ["component-base/version", "client-go/pkg/version"] {
            let values = version.map(|version| {
                let (major, minor) = version.split_once('.').unwrap_or((version, ""));
                let minor = minor.split('.').next().unwrap_or_default();
                [
                    ("gitVersion", format!("v{version}")),
                    ("gitMajor", major.to_owned()),
                    ("gitMinor", minor.to_owned()),
                ]
            });
            for (name, value) in values.into_iter().flatten() {
                flags += &format!(" -X {vendored}/{package}.{name}={value}");
            }
        }
        let part = self.work.join(program);
        show(
            go(&self.work.join("go"), &self.root)
                .args(["build", "-tags", "providerless dockerless", "-ldflags", &flags, "-o"])
                .arg(&part)
                .arg(format!("./cmd/{program}")),
        )
        .with_context(|| format!("{program} does not build"))?;
        fs::copy(&part, to).with_context(|| to.display().to_string())?;
        Ok(())
    }

    /// Copies Debian's etcd of the same time.
    pub fn copy_etcd(&self, to: &Path) -> Result<()> {
        fs::copy(self.work.join("etcd-server/usr/bin/etcd"), to.join("etcd"))?;
        fs::copy(self.work.join("etcd-client/usr/bin/etcdctl"), to.join("etcdctl"))?;
        Ok(())
    }

    /// Removes the source and everything built but the programs.
    pub fn remove(self) -> Result<()> {
        Ok(fs::remove_dir_all(&self.work)?)
    }
}

/// Fetches the source package, in any version when the exact one has gone.
fn fetch_source(suites: &Suites, work: &Path) -> Result<()> {
    let fetch = |package: &str| {
        run(suites.command("apt-get").current_dir(work).args(["source", "-q", "--only-source", package]))
    };
    fetch(SOURCE).or_else(|_| fetch("kubernetes"))
}

fn go(gopath: &Path, root: &Path) -> Command {
    let mut command = Command::new("/usr/lib/go-1.19/bin/go");
    command
        .current_dir(root)
        .env("GO111MODULE", "off")
        .env("GOPATH", gopath)
        .env("GOFLAGS", "")
        .env("GOCACHE", gopath.join("cache"))
        .env("CGO_ENABLED", "0");
    command
}

/// Debian's tree lacks a generated file, and carries a reflect2 too old for its Go.
fn mend(work: &Path, root: &Path) -> Result<()> {
    let vendored = root.join("vendor/github.com/modern-go/reflect2");
    let newer =
        work.join("golang-github-modern-go-reflect2-dev/usr/share/gocode/src/github.com/modern-go/reflect2");
    fs::remove_dir_all(&vendored).with_context(|| vendored.display().to_string())?;
    run(Command::new("cp").arg("-r").arg(&newer).arg(&vendored))?;
    let target = root.join("pkg/generated/openapi");
    if target.join("zz_generated.openapi.go").exists() {
        return Ok(());
    }
    let inputs = openapi_inputs(root)?;
    let boilerplate = root.join("hack/boilerplate/boilerplate.generatego.txt");
    let boilerplate = if boilerplate.exists() { boilerplate } else { PathBuf::from("/dev/null") };
    run(go(&work.join("go"), root)
        .args(["run", "./vendor/k8s.io/kube-openapi/cmd/openapi-gen"])
        .args([
            "-O",
            "zz_generated.openapi",
            "-p",
            &format!("{PACKAGE}/pkg/generated/openapi"),
            "-r",
            "/dev/null",
        ])
        .arg("-o")
        .arg(work.join("go/src"))
        .arg("-h")
        .arg(boilerplate)
        .args(["-i", &inputs.join(",")]))
}

/// Packages marked for `OpenAPI` generation.
fn openapi_inputs(root: &Path) -> Result<Vec<String>> {
    let marked = output(Command::new("grep").current_dir(root).args([
        "-rlE",
        "^// \\+k8s:openapi-gen=",
        "--include=*.go",
        "pkg",
        "staging/src",
        "vendor/k8s.io",
    ]))?;
    let mut packages: Vec<String> = marked
        .lines()
        .filter(|file| {
            !file.contains("/kube-openapi/")
                && !file.contains("code-generator")
                && !file.contains("/testdata/")
        })
        .filter_map(|file| Some(Path::new(file).parent()?.to_string_lossy().into_owned()))
        .map(|directory| match directory.strip_prefix("staging/src/").or(directory.strip_prefix("vendor/")) {
            Some(package) => format!("{PACKAGE}/vendor/{package}"),
            None => format!("{PACKAGE}/{directory}"),
        })
        .collect();
    packages.sort();
    packages.dedup();
    Ok(packages)
}

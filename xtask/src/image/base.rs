//! The base images that the Dockerfile names, made without a registry.

use std::{fs, os::unix::fs::symlink, path::Path, process::Command};

use anyhow::{Context as _, Result, bail};

use super::{
    Architecture,
    buildah::{Buildah, EPOCH},
};
use crate::{
    apt,
    command::{cargo_home, output, run, rust_sysroot},
};

/// Debian without what containers do not need.
pub const SLIM: &str = "docker.io/library/debian:bookworm-slim";
/// Debian's next release, which has current CNI plugins.
pub const NEXT: &str = "docker.io/library/debian:forky-slim";
/// Debian with Rust and a C compiler.
pub const RUST: &str = "docker.io/library/rust:1.95-bookworm";

const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Debian packages that the official Rust image has and our build uses.
const COMPILERS: &str = "build-essential ca-certificates curl git pkg-config zlib1g-dev libssl-dev";

/// Bases of the Dockerfile: its argument, and the image of the same tag that is made here.
pub const BASES: [(&str, &str); 3] = [("RUST_IMAGE", RUST), ("PLUGINS_IMAGE", NEXT), ("DEBIAN_IMAGE", SLIM)];

/// Build arguments that name the base images by tag: the Dockerfile's digests are those of a registry's
/// images.
pub fn arguments(architecture: Architecture) -> Vec<String> {
    let arguments = BASES.map(|(argument, _)| argument);
    let images = all(architecture);
    arguments.iter().zip(images).map(|(argument, image)| format!("--build-arg={argument}={image}")).collect()
}

/// Images that a build for the architecture starts from, in the order of [`BASES`].
pub fn all(architecture: Architecture) -> [&'static str; 3] {
    BASES.map(|(_, image)| if image == SLIM { architecture.slim() } else { image })
}

/// Packages that usrmerge pulls in, as apt patterns; Debian's essential perl-base stays.
const PERL: &str = "perl '^perl-modules' '^libperl5' '^lib.*-perl$'";

/// Makes the slim image unless it is there; another architecture's needs its emulation running.
pub fn slim(buildah: &Buildah, architecture: Architecture) -> Result<()> {
    debian(buildah, "bookworm", architecture, architecture.slim())
}

/// Makes the image with the sources of current CNI plugins unless it is there.
pub fn next(buildah: &Buildah) -> Result<()> {
    debian(buildah, "forky", Architecture::Amd64, NEXT)
}

fn debian(buildah: &Buildah, suite: &str, architecture: Architecture, image: &str) -> Result<()> {
    if buildah.has(image) {
        return Ok(());
    }
    println!("image: {image}, by mmdebstrap (about a minute)");
    let work = tempfile::tempdir()?;
    let (sources, tar) = (work.path().join("debian.sources"), work.path().join("root.tar"));
    let text = apt::debian_sources(suite)?;
    fs::write(&sources, &text)?;
    let mut bootstrap = Command::new("mmdebstrap");
    bootstrap.env("SOURCE_DATE_EPOCH", EPOCH.to_string()).args(["--quiet", "--variant=minbase"]);
    bootstrap.arg(format!("--architectures={}", architecture.name()));
    for left_out in ["/usr/share/man/*", "/usr/share/doc/*", "/usr/share/locale/*", "/usr/share/info/*"] {
        bootstrap.arg(format!("--dpkgopt=path-exclude={left_out}"));
    }
    // Accept a mirror that is no longer updated: its lists are signed all the same.
    bootstrap.arg("--aptopt=Acquire::Check-Valid-Until \"false\"");
    run(bootstrap
        .arg("--dpkgopt=path-include=/usr/share/doc/*/copyright")
        // Otherwise Debian prefers usrmerge, which depends on Perl.
        .arg("--include=usr-is-merged")
        .arg(format!("--customize-hook=chroot \"$1\" apt-get --yes purge usrmerge {PERL}"))
        .arg(suite)
        .arg(&tar)
        .arg(&sources))?;
    let configuration = [
        format!("--env=PATH={PATH}"),
        "--cmd=/bin/bash".to_owned(),
        format!("--arch={}", architecture.name()),
    ];
    buildah.make("scratch", image, &configuration.each_ref().map(String::as_str), |root| {
        run(Command::new("tar").arg("-xf").arg(&tar).arg("-C").arg(root))?;
        let lists = root.join("etc/apt/sources.list.d");
        let _ = fs::remove_dir_all(&lists);
        fs::create_dir_all(&lists)?;
        fs::write(lists.join("debian.sources"), &text)?;
        let _ = fs::remove_file(root.join("etc/apt/sources.list"));
        fs::write(
            root.join("etc/apt/apt.conf.d/docker-clean"),
            "DPkg::Post-Invoke { \"rm -f /var/cache/apt/archives/*.deb /var/cache/apt/*.bin || true\"; };\n\
             Dir::Cache::pkgcache \"\";\nDir::Cache::srcpkgcache \"\";\n",
        )?;
        fs::write(root.join("usr/sbin/policy-rc.d"), "#!/bin/sh\nexit 101\n")?;
        run(Command::new("chmod").arg("755").arg(root.join("usr/sbin/policy-rc.d")))?;
        forget(root, &["var/lib/apt/lists", "var/log", "var/cache/apt"])?;
        fs::write(root.join("etc/resolv.conf"), "")?;
        Ok(())
    })
}

/// Removes what the directories contain.
fn forget(root: &Path, directories: &[&str]) -> Result<()> {
    for directory in directories {
        let path = root.join(directory);
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

/// Makes the Rust image from this machine's toolchain unless it is there.
pub fn rust(buildah: &Buildah) -> Result<()> {
    if buildah.has(RUST) {
        return Ok(());
    }
    println!("image: {RUST}, of this machine's toolchain (about two minutes)");
    let sysroot = rust_sysroot()?;
    let version = output(Command::new("rustc").arg("--version"))?;
    let number = version.split_whitespace().nth(1).context("rustc --version printed no version")?;
    if !number.starts_with("1.95.") {
        bail!("the Dockerfile wants Rust 1.95, and this machine has {number}; run `rustup default 1.95`");
    }
    let cargo = cargo_home()?;
    if !cargo.join("bin/rustup").exists() {
        bail!(
            "{} has no rustup, which the Dockerfile calls; install Rust by rustup",
            cargo.join("bin").display()
        );
    }
    let configuration = [
        "--env=RUSTUP_HOME=/usr/local/rustup".to_owned(),
        "--env=CARGO_HOME=/usr/local/cargo".to_owned(),
        format!("--env=PATH=/usr/local/cargo/bin:{PATH}"),
        "--cmd=bash".to_owned(),
    ];
    buildah.make(SLIM, RUST, &configuration.each_ref().map(String::as_str), |root| {
        in_root(
            root,
            &format!(
                "export DEBIAN_FRONTEND=noninteractive; apt-get update -q; \
                 apt-get install -y -q --no-install-recommends {COMPILERS}; rm -rf /var/lib/apt/lists/*"
            ),
        )?;
        // Behind a proxy, this machine trusts the proxy's certificate authority.
        let authorities = "etc/ssl/certs/ca-certificates.crt";
        let _ = fs::copy(Path::new("/").join(authorities), root.join(authorities));
        let name = format!("{number}-x86_64-unknown-linux-gnu");
        let toolchain = root.join("usr/local/rustup/toolchains").join(&name);
        copy(&sysroot, &toolchain)?;
        let _ = fs::remove_dir_all(toolchain.join("share/doc"));
        fs::write(
            root.join("usr/local/rustup/settings.toml"),
            format!(
                "version = \"12\"\ndefault_toolchain = \"{name}\"\nprofile = \"minimal\"\n\n[overrides]\n"
            ),
        )?;
        let bin = root.join("usr/local/cargo/bin");
        fs::create_dir_all(&bin)?;
        fs::copy(cargo.join("bin/rustup"), bin.join("rustup"))?;
        for program in ["cargo", "rustc", "rustdoc", "rustfmt", "cargo-fmt", "cargo-clippy", "clippy-driver"]
        {
            symlink("rustup", bin.join(program))?;
        }
        Ok(())
    })
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).with_context(|| to.display().to_string())?;
    run(Command::new("cp").arg("-a").arg(from.join(".")).arg(to))
}

/// Runs a shell script in another root, which sees the network as this machine does.
fn in_root(root: &Path, script: &str) -> Result<()> {
    let names = root.join("etc/resolv.conf");
    fs::copy("/etc/resolv.conf", &names).with_context(|| names.display().to_string())?;
    run(Command::new("chroot").arg(root).args(["sh", "-ec", script]))?;
    Ok(fs::write(names, "")?)
}

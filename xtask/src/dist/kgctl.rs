//! `kgctl` for people's machines: static on Linux, so that it runs on any.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};

use crate::{
    apt,
    command::{cargo_home, run, rust_sysroot, show},
    workspace_root,
};

/// A system and architecture that `kgctl` is built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Target {
    /// Name of the system in Go and Kubernetes.
    pub os: &'static str,
    /// Name of the architecture in Go and Kubernetes.
    pub architecture: &'static str,
    /// File name of the program.
    pub program: &'static str,
    triple: &'static str,
    linker: &'static str,
    /// Debian packages with the cross linker and C library.
    packages: &'static [&'static str],
}

/// Targets that releases have a program for.
pub const TARGETS: [Target; 3] = [
    Target {
        os: "linux",
        architecture: "amd64",
        program: "kgctl",
        triple: "x86_64-unknown-linux-gnu",
        linker: "x86_64-linux-gnu-gcc",
        packages: &["gcc-x86-64-linux-gnu", "libc6-dev-amd64-cross"],
    },
    Target {
        os: "linux",
        architecture: "arm64",
        program: "kgctl",
        triple: "aarch64-unknown-linux-gnu",
        linker: "aarch64-linux-gnu-gcc",
        packages: &["gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross"],
    },
    Target {
        os: "windows",
        architecture: "amd64",
        program: "kgctl.exe",
        triple: "x86_64-pc-windows-gnu",
        linker: "x86_64-w64-mingw32-gcc",
        packages: &["gcc-mingw-w64-x86-64-win32"],
    },
];

/// Targets without a linker here, because macOS needs Apple's own libraries.
const CHECKED_ONLY: [&str; 2] = ["x86_64-apple-darwin", "aarch64-apple-darwin"];

impl Target {
    /// Name of the archive with the program and its companion files.
    pub fn archive(&self) -> String {
        format!("kgctl-{}-{}-{}.tar.gz", super::VERSION, self.os, self.architecture)
    }

    /// Whether this machine cannot run the program.
    pub fn is_foreign(&self) -> bool {
        self.os != env::consts::OS || !self.triple.starts_with(env::consts::ARCH)
    }
}

/// Triples other than Linux: checking them needs neither their linker nor their C compiler.
pub fn other_systems() -> impl Iterator<Item = &'static str> {
    TARGETS.iter().filter(|target| target.os != "linux").map(|target| target.triple).chain(CHECKED_ONLY)
}

/// Type-checks the program for another system, without a warning; false when the toolchain has no
/// standard library for it and none can be downloaded.
pub fn check(triple: &str) -> Result<bool> {
    if !has_std(&rust_sysroot()?, triple) {
        return Ok(false);
    }
    let variable = |name: &str| format!("{name}_{}", triple.replace('-', "_"));
    show(
        Command::new("cargo")
            .current_dir(workspace_root())
            // Type-checking does not need the C code of the cryptography.
            .env(variable("CC"), "true")
            .env(variable("AR"), "true")
            .env("SDKROOT", "/")
            .args(["clippy", "--locked", "--quiet", "--package", "kilo-agent", "--no-default-features"])
            .args(["--bin", "kgctl", "--target", triple, "--", "-D", "warnings"]),
    )
    .with_context(|| format!("kgctl does not build for {triple}"))?;
    Ok(true)
}

/// Builds the program in a directory of its own; returns its path.
pub fn build(target: &Target, directory: &Path) -> Result<PathBuf> {
    println!("dist: kgctl for {} on {}", target.os, target.architecture);
    if target.is_foreign() {
        apt::install(target.packages)?;
    }
    let root = workspace_root();
    let sysroot = rust_sysroot()?;
    let remap = |from: &Path, to: &str| format!("--remap-path-prefix={}={to}", from.display());
    // Paths of this machine must not reach the program: two builds are equal to the byte.
    let mut flags = vec![
        "-Ctarget-feature=+crt-static".to_owned(),
        format!("-Clinker={}", target.linker),
        remap(&root, "/kilo"),
        // After the root, which may contain it: the last matching remap wins.
        remap(directory, "/build"),
        remap(&cargo_home()?, "/cargo"),
        remap(&sysroot, "/rust"),
    ];
    if target.os == "windows" {
        // The PE header has a field for the link time.
        flags.push("-Clink-arg=-Wl,--no-insert-timestamp".to_owned());
    }
    let mut cargo = Command::new("cargo");
    cargo
        .current_dir(&root)
        .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\u{1f}"))
        .env("CARGO_PROFILE_RELEASE_STRIP", "symbols")
        .env("CARGO_PROFILE_RELEASE_DEBUG", "none")
        .env(format!("CC_{}", target.triple.replace('-', "_")), target.linker)
        .env_remove("RUSTFLAGS")
        .args(["build", "--release", "--locked", "--quiet", "--package", "kilo-agent"])
        .args(["--no-default-features", "--bin", "kgctl"])
        .arg("--target-dir")
        .arg(directory)
        .args(["--target", target.triple]);
    if !has_std(&sysroot, target.triple) {
        // Built from the toolchain's own sources where the target has no prebuilt standard library.
        cargo.env("RUSTC_BOOTSTRAP", "1").args(["-Z", "build-std=std,panic_abort"]);
    }
    show(&mut cargo).with_context(|| format!("kgctl does not build for {}", target.triple))?;
    Ok(directory.join(target.triple).join("release").join(target.program))
}

/// Has a program of this machine write its man pages into a directory.
pub fn man_pages(program: &Path, directory: &Path) -> Result<()> {
    run(Command::new(program).arg("man-pages").arg(directory)).map(drop)
}

fn has_std(sysroot: &Path, triple: &str) -> bool {
    let library = sysroot.join("lib/rustlib").join(triple).join("lib");
    library.is_dir()
        || (run(Command::new("timeout").args(["60", "rustup", "target", "add", triple])).is_ok()
            && library.is_dir())
}

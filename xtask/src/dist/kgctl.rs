//! `kgctl` for people's machines: static, so that it runs on any Linux.

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

/// What `kgctl` is built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Target {
    /// As Go and Kubernetes call it.
    pub architecture: &'static str,
    triple: &'static str,
    linker: &'static str,
    /// Debian's packages with linker and static C library, on a machine of another architecture.
    packages: [&'static str; 2],
}

/// Architectures that releases have.
pub const TARGETS: [Target; 2] = [
    Target {
        architecture: "amd64",
        triple: "x86_64-unknown-linux-gnu",
        linker: "x86_64-linux-gnu-gcc",
        packages: ["gcc-x86-64-linux-gnu", "libc6-dev-amd64-cross"],
    },
    Target {
        architecture: "arm64",
        triple: "aarch64-unknown-linux-gnu",
        linker: "aarch64-linux-gnu-gcc",
        packages: ["gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross"],
    },
];

impl Target {
    /// Name of the file with the program.
    pub fn archive(&self) -> String {
        format!("kgctl-{}-linux-{}.tar.gz", super::VERSION, self.architecture)
    }
}

/// Builds the program in a directory of its own; returns its path.
pub fn build(target: &Target, directory: &Path) -> Result<PathBuf> {
    println!("dist: kgctl for {}", target.architecture);
    if !target.triple.starts_with(env::consts::ARCH) {
        apt::install(&target.packages)?;
    }
    let root = workspace_root();
    let sysroot = rust_sysroot()?;
    let remap = |from: &Path, to: &str| format!("--remap-path-prefix={}={to}", from.display());
    // Paths of this machine must not reach the program: two builds are equal to the byte.
    let flags = [
        "-Ctarget-feature=+crt-static".to_owned(),
        format!("-Clinker={}", target.linker),
        remap(directory, "/build"),
        remap(&root, "/kilo"),
        remap(&cargo_home()?, "/cargo"),
        remap(&sysroot, "/rust"),
    ];
    let mut cargo = Command::new("cargo");
    cargo
        .current_dir(&root)
        .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\u{1f}"))
        .env("CARGO_PROFILE_RELEASE_STRIP", "symbols")
        .env(format!("CC_{}", target.triple.replace('-', "_")), target.linker)
        .env_remove("RUSTFLAGS")
        .args(["build", "--release", "--locked", "--quiet", "--package", "kilo-agent", "--bin", "kgctl"])
        .arg("--target-dir")
        .arg(directory)
        .args(["--target", target.triple]);
    if !has_std(&sysroot, target.triple) {
        // Of the toolchain's own sources, where no standard library can be had for the target.
        cargo.env("RUSTC_BOOTSTRAP", "1").args(["-Z", "build-std=std,panic_abort"]);
    }
    show(&mut cargo).with_context(|| format!("kgctl does not build for {}", target.triple))?;
    Ok(directory.join(target.triple).join("release/kgctl"))
}

fn has_std(sysroot: &Path, triple: &str) -> bool {
    let library = sysroot.join("lib/rustlib").join(triple).join("lib");
    library.is_dir()
        || (run(Command::new("timeout").args(["60", "rustup", "target", "add", triple])).is_ok()
            && library.is_dir())
}

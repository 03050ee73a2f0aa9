//! `cargo xtask image`: the container image without a registry, as an OCI archive.

pub mod base;
pub mod buildah;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};
use clap::Args;

use crate::{
    apt, build_ebpf,
    command::{output, run},
    workspace_root,
};
use buildah::{Archive, Buildah};

/// Name of the image in the manifests, as container runtimes store it.
pub const IMAGE: &str = concat!("docker.io/kilo-ebpf/kilo:", env!("CARGO_PKG_VERSION"));
/// CNI plugins that the image ships.
pub const PLUGINS: [&str; 4] = ["bridge", "host-local", "loopback", "portmap"];

/// Options of the image command.
#[derive(Args, Debug)]
pub struct ImageArgs {
    /// Take the binaries that `cargo build` makes here and Debian's CNI plugins, instead of compiling inside.
    #[arg(long)]
    quick: bool,
    /// Make the base images anew, with the distribution's updates.
    #[arg(long)]
    renew: bool,
    /// Where the archive goes (default: target/image/kilo.tar, or kilo-quick.tar).
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Builds the image and prints its size and digest.
pub fn main(args: &ImageArgs) -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        bail!("buildah mounts file systems here: run this as root");
    }
    let buildah = Buildah::open()?;
    if args.renew {
        buildah.remove(&[base::RUST, base::SLIM])?;
    }
    let name = if args.quick { "kilo-quick.tar" } else { "kilo.tar" };
    let file = args.output.clone().unwrap_or_else(|| workspace_root().join("target/image").join(name));
    let archive = if args.quick {
        build_ebpf::build(false)?;
        crate::build(&["--bins"])?;
        quick(&buildah, &workspace_root().join("target/debug"), &file)?
    } else {
        full(&buildah, &file)?
    };
    println!(
        "image: {IMAGE} in {}: {:.1} MB, digest {}",
        file.display(),
        archive.size as f64 / 1e6,
        archive.digest
    );
    Ok(())
}

/// Builds the Dockerfile as it is.
fn full(buildah: &Buildah, file: &Path) -> Result<Archive> {
    base::slim(buildah)?;
    base::rust(buildah)?;
    let root = workspace_root();
    buildah.build(&root.join("Dockerfile"), &root, IMAGE, &[])?;
    buildah.archive(IMAGE, file, true)
}

/// Builds the Dockerfile's last stage with binaries from `bin`, uncompressed.
pub fn quick(buildah: &Buildah, bin: &Path, file: &Path) -> Result<Archive> {
    apt::install(&["containernetworking-plugins", "binutils"])?;
    base::slim(buildah)?;
    let root = workspace_root();
    let dockerfile = fs::read_to_string(root.join("Dockerfile"))?;
    let context = tempfile::tempdir()?;
    for directory in ["kilo", "cni"] {
        fs::create_dir_all(context.path().join(directory))?;
    }
    for program in ["kg", "kgctl"] {
        let stripped = context.path().join("kilo").join(program);
        run(Command::new("strip").arg("--strip-debug").arg("-o").arg(&stripped).arg(bin.join(program)))?;
    }
    for plugin in PLUGINS {
        fs::copy(Path::new("/usr/lib/cni").join(plugin), context.path().join("cni").join(plugin))?;
    }
    let path = context.path().join("Dockerfile");
    fs::write(&path, last_stage(&dockerfile)?)?;
    buildah.build(&path, context.path(), IMAGE, &[])?;
    buildah.archive(IMAGE, file, false)
}

/// The last stage alone, with directories beside it in place of the other stages.
fn last_stage(dockerfile: &str) -> Result<String> {
    let start = dockerfile.rfind("\nFROM ").context("the Dockerfile has no second stage")?;
    let mut stage = dockerfile[start + 1..].to_owned();
    for (from, to) in [("COPY --from=kilo /out/", "COPY kilo/"), ("COPY --from=cni /out/", "COPY cni/")] {
        if !stage.contains(from) {
            bail!("the Dockerfile's last stage has no line `{from} ...`");
        }
        stage = stage.replace(from, to);
    }
    Ok(stage)
}

/// The commit the sources are at, for the image's label.
#[allow(dead_code, reason = "used by the full build")]
fn revision(root: &Path) -> String {
    output(Command::new("git").arg("-C").arg(root).args(["rev-parse", "HEAD"]))
        .map(|text| text.trim().to_owned())
        .unwrap_or_default()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    fn dockerfile() -> String {
        fs::read_to_string(workspace_root().join("Dockerfile")).unwrap()
    }

    #[test]
    fn the_last_stage_stands_alone() {
        let stage = last_stage(&dockerfile()).unwrap();
        assert!(stage.starts_with("FROM debian:bookworm-slim"), "{stage}");
        assert!(!stage.contains("--from="), "{stage}");
    }

    #[test]
    fn the_base_images_are_those_of_the_dockerfile() {
        for line in dockerfile().lines().filter(|line| line.starts_with("FROM ")) {
            let image = line.split_whitespace().find(|word| word.contains(':') && !word.starts_with("--"));
            let full = format!("docker.io/library/{}", image.unwrap());
            assert!([base::SLIM, base::RUST].contains(&full.as_str()), "{full} is not made by base.rs");
        }
    }

    #[test]
    fn the_label_names_this_version() {
        assert!(dockerfile().contains(&format!("ARG VERSION={}", env!("CARGO_PKG_VERSION"))));
    }
}

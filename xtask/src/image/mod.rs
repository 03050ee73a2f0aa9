//! `cargo xtask image`: the container image without a registry, as an OCI archive.

mod architecture;
pub mod base;
pub mod buildah;
mod contents;
mod emulation;
pub mod index;
pub mod sbom;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;

use crate::{
    apt, build_ebpf,
    command::{output, run},
    workspace_root,
};
pub use architecture::Architecture;
use buildah::{Archive, Buildah};

/// Name and tag of the image in the manifests, in the full form that container runtimes store.
pub const IMAGE: &str = concat!("docker.io/kilo-ebpf/kilo:", env!("CARGO_PKG_VERSION"));
/// CNI plugins that the image ships.
pub const PLUGINS: [&str; 4] = ["bridge", "host-local", "loopback", "portmap"];

/// Options of the image command.
#[derive(Args, Debug)]
pub struct ImageArgs {
    /// Take the binaries that `cargo build` makes here, instead of compiling them inside.
    #[arg(long)]
    quick: bool,
    /// What the image is for; another architecture's packages are installed under emulation.
    #[arg(long, default_value = "amd64", conflicts_with = "quick")]
    architecture: Architecture,
    /// Build the base images again, with the distribution's updates, and all layers on them.
    #[arg(long)]
    renew: bool,
    /// Build a second time, without any layer of the first, and compare the digests.
    #[arg(long)]
    check_reproducible: bool,
    /// Where the archive goes (default: target/image/kilo.tar, or kilo-quick.tar).
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Write what the image is made of beside the archive (SPDX, by syft).
    #[arg(long)]
    sbom: bool,
}

/// Builds the image for amd64 as it is shipped, and searches it, as `cargo xtask image` does.
///
/// # Errors
/// When the build fails, or the image holds what it must not or lacks what it needs.
pub fn build_shipped() -> Result<()> {
    main(&ImageArgs {
        quick: false,
        architecture: Architecture::Amd64,
        renew: false,
        check_reproducible: false,
        output: None,
        sbom: false,
    })
}

/// Builds the image and prints its size and digest.
pub fn main(args: &ImageArgs) -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        bail!("buildah mounts file systems here: run this as root");
    }
    let buildah = Buildah::open()?;
    buildah.prune()?;
    if args.renew {
        let all: Vec<_> = Architecture::ALL.into_iter().flat_map(base::all).collect();
        buildah.remove(&all)?;
    }
    // A renewed base without updates is identical, so cached layers would be used although their packages
    // have updates.
    let layers = if args.renew { Layers::New } else { Layers::Kept };
    let name = match (args.quick, args.architecture) {
        (true, _) => "kilo-quick.tar",
        (false, Architecture::Amd64) => "kilo.tar",
        (false, Architecture::Arm64) => "kilo-arm64.tar",
    };
    let file = args.output.clone().unwrap_or_else(|| workspace_root().join("target/image").join(name));
    if args.quick {
        build_ebpf::build(false)?;
        crate::build(&["--bins"])?;
    }
    let build = |layers| match args.quick {
        true => quick(&buildah, &workspace_root().join("target/debug"), &file, layers),
        false => full(&buildah, args.architecture, &file, layers),
    };
    let archive = build(layers)?;
    println!(
        "image: {IMAGE} in {}: {:.1} MB ({:.1} MB unpacked), digest {}",
        file.display(),
        archive.size as f64 / 1e6,
        buildah.size(args.architecture.image())? as f64 / 1e6,
        archive.digest
    );
    if args.sbom {
        let list = file.with_extension("spdx.json");
        let packages = sbom::write(&file, &archive, env!("CARGO_PKG_VERSION"), &list)?;
        println!("image: {packages} packages listed in {}", list.display());
    }
    if args.check_reproducible {
        let second = build(Layers::New)?;
        ensure!(
            second.digest == archive.digest,
            "two builds of the same sources differ: {} and {}",
            archive.digest,
            second.digest
        );
        println!("image: a second build from the first line on has the same digest");
    }
    Ok(())
}

/// Whether cached layers of earlier builds are used.
#[derive(Clone, Copy, Debug)]
pub enum Layers {
    /// Used where nothing changed.
    Kept,
    /// None is used: every line runs.
    New,
}

/// Builds the Dockerfile as it is.
pub fn full(buildah: &Buildah, architecture: Architecture, file: &Path, layers: Layers) -> Result<Archive> {
    let _emulation = architecture.emulation()?;
    base::slim(buildah, architecture)?;
    base::next(buildah)?;
    base::rust(buildah)?;
    let root = workspace_root();
    let mut arguments = arguments(architecture, layers);
    arguments.push(format!("--build-arg=REVISION={}", revision(&root)));
    // One timestamp for all commits: a cached layer bears that of the build which made it.
    let image = architecture.image();
    buildah.build(&root.join("Dockerfile"), &root, image, architecture, &arguments)?;
    buildah.with(image, |_, root| contents::check(root))?;
    buildah.archive(image, IMAGE, file, true)
}

/// Builds the Dockerfile, uncompressed, with binaries from `bin` instead of its compiling stage.
pub fn quick(buildah: &Buildah, bin: &Path, file: &Path, layers: Layers) -> Result<Archive> {
    apt::install(&["binutils"])?;
    base::slim(buildah, Architecture::Amd64)?;
    base::next(buildah)?;
    let root = workspace_root();
    let dockerfile = fs::read_to_string(root.join("Dockerfile"))?;
    let context = tempfile::tempdir()?;
    fs::create_dir_all(context.path().join("kilo"))?;
    for program in ["kg", "kgctl"] {
        let stripped = context.path().join("kilo").join(program);
        run(Command::new("strip").arg("--strip-debug").arg("-o").arg(&stripped).arg(bin.join(program)))?;
    }
    let path = context.path().join("Dockerfile");
    fs::write(&path, without_compiling(&dockerfile)?)?;
    let architecture = Architecture::Amd64;
    buildah.build(&path, context.path(), IMAGE, architecture, &arguments(architecture, layers))?;
    buildah.with(IMAGE, |_, root| contents::check(root))?;
    buildah.archive(IMAGE, IMAGE, file, false)
}

fn arguments(architecture: Architecture, layers: Layers) -> Vec<String> {
    let mut arguments = base::arguments(architecture);
    if architecture != Architecture::Amd64 {
        // Buildah 1.28 sets it to the target platform.
        arguments.push("--build-arg=BUILDPLATFORM=linux/amd64".to_owned());
    }
    if matches!(layers, Layers::New) {
        arguments.push("--no-cache".to_owned());
    }
    arguments
}

/// The Dockerfile without the stages that compile Rust; a directory `kilo` replaces them.
fn without_compiling(dockerfile: &str) -> Result<String> {
    let first = dockerfile.find("\nFROM ").context("the Dockerfile has no stage")?;
    let plugins = dockerfile.find("\nFROM --platform=$BUILDPLATFORM ${PLUGINS_IMAGE} ");
    let plugins = plugins.context("the Dockerfile has no stage of PLUGINS_IMAGE")?;
    let (from, to) = ("COPY --from=kilo /out/", "COPY kilo/");
    let rest = &dockerfile[plugins..];
    ensure!(rest.contains(from), "the Dockerfile has no line `{from} ...`");
    Ok(format!("{}{}", &dockerfile[..first], rest.replace(from, to)))
}

/// Commit of the sources, for the image's label; empty outside a clone.
fn revision(root: &Path) -> String {
    let mut git = Command::new("git");
    git.arg("-C").arg(root).args(["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]);
    output(&mut git).map(|text| text.trim().to_owned()).unwrap_or_default()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    fn dockerfile() -> String {
        fs::read_to_string(workspace_root().join("Dockerfile")).unwrap()
    }

    #[test]
    fn the_stages_that_compile_no_rust_stand_alone() {
        let stages = without_compiling(&dockerfile()).unwrap();
        assert!(!stages.contains("RUST_IMAGE} AS"), "{stages}");
        assert!(!stages.contains("FROM crates") && !stages.contains("RUN cargo"), "{stages}");
        assert!(!stages.contains("--from=kilo"), "{stages}");
        assert!(stages.contains("ARG DEBIAN_IMAGE="), "{stages}");
    }

    #[test]
    fn bases_have_a_digest_and_are_made_here_by_the_same_tag() {
        let dockerfile = dockerfile();
        for (argument, image) in base::BASES {
            let given = dockerfile.lines().find_map(|line| line.strip_prefix(&format!("ARG {argument}=")));
            let (tag, digest) = given.unwrap().split_once("@sha256:").unwrap();
            assert_eq!(format!("docker.io/library/{tag}"), image);
            assert!(digest.len() == 64 && digest.bytes().all(|byte| byte.is_ascii_hexdigit()), "{digest}");
        }
        let mut stages = vec!["scratch"];
        for line in dockerfile.lines().filter(|line| line.starts_with("FROM ")) {
            let words: Vec<_> = line.split(' ').filter(|word| !word.starts_with("--")).collect();
            let named = base::BASES.iter().any(|(argument, _)| words[1] == format!("${{{argument}}}"));
            assert!(named || stages.contains(&words[1]), "{line}: no base with a digest");
            stages.extend(words.get(3));
        }
    }

    /// The stage that compiles dependencies apart from sources names each crate of the workspace.
    #[test]
    fn each_crate_of_the_workspace_is_compiled_in_the_image() {
        let text = fs::read_to_string(workspace_root().join("Cargo.toml")).unwrap();
        let members = text.split_once("members = [").unwrap().1.split(']').next().unwrap();
        let dockerfile = dockerfile().replace("\\\n", " ");
        let made = dockerfile.lines().find_map(|line| line.split_once("for crate in ")).unwrap().1;
        let made: Vec<_> = made.split(';').next().unwrap().split_whitespace().collect();
        for member in members.split('"').skip(1).step_by(2) {
            assert!(dockerfile.contains(&format!("COPY {member}/Cargo.toml {member}/")), "{member}");
            assert!(made.contains(&member), "{member}: {made:?}");
        }
    }

    #[test]
    fn the_label_names_this_version() {
        assert!(dockerfile().contains(&format!("ARG VERSION={}", env!("CARGO_PKG_VERSION"))));
    }
}

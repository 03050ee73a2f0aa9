//! `cargo xtask dist`: the files of a release, equal for equal sources, base images and tools.

mod bundle;
pub mod kgctl;
mod krew;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;

use crate::{
    build_ebpf,
    command::output,
    image::{self, buildah},
    workspace_root,
};

const VERSION: &str = env!("CARGO_PKG_VERSION");
/// Checksums of all other files, as `sha256sum --check` reads them.
const SUMS: &str = "SHA256SUMS";

/// Options of the dist command.
#[derive(Args, Debug)]
pub struct DistArgs {
    /// Where the files go; what is there is replaced.
    #[arg(long, value_name = "DIR", default_value = "target/dist")]
    output: PathBuf,
    /// Digest of the image, when it is built elsewhere; none is built then.
    #[arg(long, value_name = "sha256:HEX")]
    image_digest: Option<String>,
    /// Go on where the toolchain has no standard library for a system that kgctl is only checked for; such files are not a release.
    #[arg(long)]
    unchecked: bool,
    /// Make everything a second time, without what the first run compiled, and compare the checksums.
    #[arg(long)]
    check_reproducible: bool,
}

/// Makes the files and lists them.
pub fn main(args: &DistArgs) -> Result<()> {
    if let Some(digest) = &args.image_digest {
        ensure!(
            is_digest(digest),
            "--image-digest {digest} is not a digest; write sha256: and 64 hexadecimal digits"
        );
    }
    let root = workspace_root();
    let output = root.join(&args.output);
    build_ebpf::build(true)?;
    for triple in kgctl::other_systems() {
        say_checked(triple, kgctl::check(triple)?, args.unchecked)?;
    }
    make(&output, args.image_digest.as_deref(), image::Layers::Kept, &root.join("target/dist-build"))?;
    print!("{}", fs::read_to_string(output.join(SUMS))?);
    if args.check_reproducible {
        let again = tempfile::tempdir_in(root.join("target"))?;
        let (files, build) = (again.path().join("files"), again.path().join("build"));
        make(&files, args.image_digest.as_deref(), image::Layers::New, &build)?;
        let (first, second) = (fs::read_to_string(output.join(SUMS))?, fs::read_to_string(files.join(SUMS))?);
        ensure!(first == second, "a second run made other files:\n{second}");
        println!("dist: a second run, without what the first compiled, made the same files");
    }
    println!("dist: {} files of {VERSION} in {}", fs::read_dir(&output)?.count(), output.display());
    Ok(())
}

/// Prints whether the program was checked for another system. An unchecked one is an error unless
/// `unchecked` allows it.
fn say_checked(triple: &str, is_checked: bool, unchecked: bool) -> Result<()> {
    ensure!(
        is_checked || unchecked,
        "kgctl is not checked for {triple}: `rustup target add {triple}` fails; --unchecked goes on without, for files \
         that are not released"
    );
    println!(
        "dist: kgctl for {triple}: {}",
        if is_checked { "type-checked" } else { "NOT CHECKED (--unchecked)" }
    );
    Ok(())
}

fn is_digest(text: &str) -> bool {
    let hex = text.strip_prefix("sha256:").unwrap_or_default();
    hex.len() == 64 && hex.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Removes the files of an earlier release, and nothing else that may be in the directory.
fn empty(output: &Path) -> Result<()> {
    let Ok(mut entries) = fs::read_dir(output) else { return Ok(()) };
    ensure!(
        entries.next().is_none() || output.join(SUMS).is_file(),
        "{} is neither empty nor a release (it has no {SUMS}); name another directory with --output",
        output.display()
    );
    fs::remove_dir_all(output).with_context(|| output.display().to_string())
}

fn make(output: &Path, digest: Option<&str>, layers: image::Layers, build: &Path) -> Result<()> {
    empty(output)?;
    fs::create_dir_all(output).with_context(|| output.display().to_string())?;
    let root = workspace_root();
    fs::write(
        output.join("RELEASE-NOTES.md"),
        changes(&fs::read_to_string(root.join("CHANGELOG.md"))?, VERSION)?,
    )?;
    let mut archives = BTreeMap::new();
    let programs: Result<Vec<_>> =
        kgctl::TARGETS.into_iter().map(|target| Ok((kgctl::build(&target, build)?, target))).collect();
    let programs = programs?;
    // All print the same man pages; the program for this machine can be run.
    let own = programs.iter().find(|(_, target)| !target.is_foreign());
    let man = tempfile::tempdir_in(output)?;
    kgctl::man_pages(&own.context("no kgctl for this machine")?.0, man.path())?;
    for (program, target) in programs {
        let file = output.join(target.archive());
        bundle::program(&program, &target, man.path(), &file)?;
        archives.insert(target, sha256(&file)?);
    }
    drop(man);
    fs::write(output.join("krew-kilo.yaml"), krew::manifest(VERSION, &archives))?;
    let digest = match digest {
        Some(digest) => digest.to_owned(),
        None => images(output, layers)?,
    };
    bundle::manifests(&digest, output)?;
    sums(output)
}

/// Writes the images of all architectures into one archive; returns the digest of their index.
fn images(output: &Path, layers: image::Layers) -> Result<String> {
    let buildah = buildah::Buildah::open()?;
    let work = tempfile::tempdir_in(output)?;
    for architecture in image::Architecture::ALL {
        let name = architecture.name();
        let file = work.path().join(name);
        let archive = image::full(&buildah, architecture, &file, layers)?;
        println!("dist: image for {name}: {:.1} MB, digest {}", archive.size as f64 / 1e6, archive.digest);
        let list = output.join(format!("kilo-{VERSION}-image-{name}.spdx.json"));
        image::sbom::write(&file, &archive, VERSION, &list)?;
    }
    drop(work);
    let file = output.join(format!("kilo-{VERSION}-image.tar"));
    let archive = image::index::archive(&buildah, &image::Architecture::ALL, &file)?;
    println!("dist: image for all: {:.1} MB, digest {}", archive.size as f64 / 1e6, archive.digest);
    Ok(archive.digest)
}

/// The section of this version in the changelog.
fn changes(all: &str, version: &str) -> Result<String> {
    let of_version = |line: &str| {
        line.strip_prefix("## ").is_some_and(|title| title.split_whitespace().next() == Some(version))
    };
    let section: Vec<_> = all
        .lines()
        .skip_while(|line| !of_version(line))
        .skip(1)
        .take_while(|line| !line.starts_with("## "))
        .collect();
    let text = section.join("\n").trim().to_owned();
    if text.is_empty() {
        bail!("CHANGELOG.md says nothing under `## {version}`");
    }
    Ok(text + "\n")
}

fn sha256(file: &Path) -> Result<String> {
    let text = output(Command::new("sha256sum").arg(file))?;
    Ok(text.split_whitespace().next().unwrap_or_default().to_owned())
}

fn sums(directory: &Path) -> Result<()> {
    let mut lines = BTreeMap::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        lines.insert(name, sha256(&path)?);
    }
    let text: String = lines.into_iter().map(|(name, sum)| format!("{sum}  {name}\n")).collect();
    Ok(fs::write(directory.join(SUMS), text)?)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn the_changes_of_this_version_are_written_down() {
        let all = fs::read_to_string(workspace_root().join("CHANGELOG.md")).unwrap();
        assert!(changes(&all, VERSION).unwrap().lines().count() > 3);
        assert_eq!(changes("# C\n\n## 2.0\nnew\n\n## 1.0\nold\n", "2.0").unwrap(), "new\n");
        assert!(changes("## 2.0.1\nother", "2.0").is_err());
    }

    #[test]
    fn only_a_release_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("thesis.txt"), "years").unwrap();
        assert!(empty(directory.path()).unwrap_err().to_string().contains("another directory"));
        fs::write(directory.path().join(SUMS), "").unwrap();
        empty(directory.path()).unwrap();
        assert!(!directory.path().exists());
        empty(directory.path()).unwrap();
    }

    #[test]
    fn a_release_is_checked_for_every_system() {
        say_checked("x86_64-apple-darwin", true, false).unwrap();
        let error = say_checked("x86_64-apple-darwin", false, false).unwrap_err().to_string();
        assert!(error.contains("rustup target add x86_64-apple-darwin"), "{error}");
        say_checked("x86_64-apple-darwin", false, true).unwrap();
    }

    #[test]
    fn a_digest_is_one() {
        assert!(is_digest(&format!("sha256:{}", "0a".repeat(32))));
        assert!(!is_digest("sha256:0a") && !is_digest(&"0a".repeat(32)));
    }
}

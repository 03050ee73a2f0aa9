//! `cargo xtask fuzz`: runs the targets of kilo-agent/fuzz under libFuzzer, with the stable toolchain.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};
use clap::Args;

use crate::{
    apt, build_ebpf,
    command::{output, show},
    workspace_root,
};

/// Directory of programs, found inputs and failures, relative to the workspace.
const DIRECTORY: &str = "target/fuzz";
/// Package of the targets, relative to the workspace.
const PACKAGE: &str = "kilo-agent/fuzz";

/// Instrumentation that libFuzzer needs: which edges were taken, and which values were compared.
const COVERAGE: [&str; 6] = [
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Cdebug-assertions=on",
];

/// Options of the fuzz command.
#[derive(Args, Debug)]
pub struct FuzzArgs {
    /// Seconds of fuzzing, shared among the targets.
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    time: u64,
    /// Only this target (a directory of kilo-agent/fuzz/corpus).
    #[arg(long, value_name = "NAME")]
    target: Option<String>,
    /// Add the inputs that reach new code to the kept corpus.
    #[arg(long)]
    keep: bool,
}

/// Builds the targets and runs them one after the other.
///
/// # Errors
/// When one does not build, or at the end when some failed.
pub fn main(args: &FuzzArgs) -> Result<()> {
    let targets = chosen(args.target.as_deref())?;
    let programs = build()?;
    let seconds = (args.time / u64::try_from(targets.len())?).max(1);
    let mut failed = Vec::new();
    for target in targets {
        println!("fuzz: {target} for {seconds} s");
        if let Err(error) = fuzz(&programs.join(&target), &target, seconds, args.keep) {
            println!("fuzz: {error:#}");
            failed.push(target);
        }
    }
    if !failed.is_empty() {
        bail!("failed: {}; the inputs are in {DIRECTORY}/failures", failed.join(", "));
    }
    Ok(())
}

/// Names of the targets, from their directories in the corpus.
fn chosen(only: Option<&str>) -> Result<Vec<String>> {
    let corpus = workspace_root().join(PACKAGE).join("corpus");
    let mut names: Vec<_> = fs::read_dir(&corpus)
        .with_context(|| corpus.display().to_string())?
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    match only {
        None => Ok(names),
        Some(only) if names.iter().any(|name| name == only) => Ok(vec![only.to_owned()]),
        Some(only) => bail!("no target {only:?}; there are: {}", names.join(", ")),
    }
}

/// Builds the programs; returns their directory.
fn build() -> Result<PathBuf> {
    apt::install(&["build-essential"])?;
    build_ebpf::build(true)?;
    let host = output(Command::new("rustc").arg("-vV"))?;
    let host = host.lines().find_map(|line| line.strip_prefix("host: ")).context("rustc names no host")?;
    let root = workspace_root();
    let directory = root.join(DIRECTORY).join("build");
    println!("fuzz: building the targets");
    // With --target, build scripts and macros are built without these flags.
    show(
        Command::new("cargo")
            .current_dir(&root)
            .env("CARGO_ENCODED_RUSTFLAGS", COVERAGE.join("\u{1f}"))
            .env("CARGO_TARGET_DIR", &directory)
            .env_remove("RUSTFLAGS")
            .args(["build", "--release", "--locked", "--quiet", "--package", "kilo-fuzz"])
            .args(["--features", "libfuzzer", "--bins", "--target", host]),
    )?;
    Ok(directory.join(host).join("release"))
}

/// Runs one target, starting from the inputs that earlier runs found.
fn fuzz(program: &Path, target: &str, seconds: u64, keep: bool) -> Result<()> {
    let root = workspace_root();
    let kept = root.join(PACKAGE).join("corpus").join(target);
    let found = root.join(DIRECTORY).join("found").join(target);
    let failures = root.join(DIRECTORY).join("failures").join(target);
    for directory in [&found, &failures] {
        fs::create_dir_all(directory)?;
    }
    show(
        Command::new(program)
            .arg(format!("-max_total_time={seconds}"))
            .arg(format!("-artifact_prefix={}/", failures.display()))
            .args([
                "-max_len=2048",
                "-timeout=10",
                "-rss_limit_mb=2048",
                "-print_final_stats=1",
                "-verbosity=0",
            ])
            .args([&found, &kept]),
    )?;
    if keep {
        // Chosen by edges alone, and merged into few files: the corpus is checked in.
        show(
            Command::new(program)
                .args(["-set_cover_merge=1", "-use_counters=0", "-max_len=400", "-verbosity=0"])
                .args([&kept, &found]),
        )?;
    }
    Ok(())
}

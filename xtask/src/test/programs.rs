//! Test programs that cargo compiles; the name of each decides its part.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsStr,
    io::{BufRead as _, BufReader},
    num::NonZero,
    path::PathBuf,
    process::{Command, Stdio},
    time::Instant,
};

use anyhow::{Context as _, Result, bail};
use parking_lot::Mutex;

use super::{Part, reader::Reader};
use crate::{
    command::output, lab::takedown::stop_if_interrupted, report::TestOutcome, second_try::SecondTries,
    static_checks, workspace_root,
};

/// Tests that need WireGuard in the kernel, which only the virtual machines' kernels are certain to have.
pub const KERNEL_WIREGUARD: &str = "net::wireguard_kernel";
/// Modules that take half of the time of the program `api`.
const HALF_OF_API: [&str; 3] = ["slices::", "slices_failures::", "server_failures::"];
/// The slowest program of the part `unit`.
const LONGEST: &str = "schedules";

/// One compiled test program.
pub struct TestBinary {
    /// Name of the target: `kilo_agent`, `unit`, `bpf`, `net`, `api` ...
    pub target: String,
    pub path: PathBuf,
}

impl TestBinary {
    /// The part it belongs to, by its name.
    pub fn part(&self) -> Part {
        match self.target.as_str() {
            "bpf" => Part::Bpf,
            "api" => Part::Api,
            "net" => Part::Net,
            _ => Part::Unit,
        }
    }

    /// Names of its modules that have tests, prefixed with the target's name.
    pub fn modules(&self) -> Result<BTreeSet<String>> {
        let listed = output(Command::new(&self.path).args(["--list", "--format=terse"]))?;
        let tests = listed.lines().filter_map(|line| line.split_once("::"));
        Ok(tests.map(|(module, _)| format!("{}::{module}", self.target)).collect())
    }
}

/// Compiles the test programs.
pub fn build() -> Result<Vec<TestBinary>> {
    println!("xtask: cargo test --no-run");
    let output = Command::new("cargo")
        .current_dir(workspace_root())
        .args(["test", "--locked", "--no-run", "--message-format", "json", "--quiet"])
        .stderr(Stdio::inherit())
        .output()
        .context("cargo")?;
    if !output.status.success() {
        bail!("the tests do not compile");
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let binaries = text.lines().filter_map(|line| {
        let message: serde_json::Value = serde_json::from_str(line).ok()?;
        let path = message.get("executable")?.as_str()?;
        message.pointer("/profile/test")?.as_bool()?.then_some(())?;
        let target = message.pointer("/target/name")?.as_str()?;
        Some(TestBinary { target: target.replace('-', "_"), path: PathBuf::from(path) })
    });
    Ok(binaries.collect())
}

/// Runs the programs of a part one after the other; with `tries`, failed tests are tried again.
pub fn run(
    part: Part,
    binaries: &[TestBinary],
    environment: &BTreeMap<String, PathBuf>,
    mut tries: Option<&mut SecondTries>,
) -> Result<Vec<TestOutcome>> {
    let mut outcomes = Vec::new();
    for binary in binaries.iter().filter(|binary| binary.part() == part) {
        let run = |names: &[String]| {
            if names.is_empty() && part == Part::Api {
                return run_halves(binary, environment);
            }
            let mut command = command(&binary.path, binary, environment);
            if names.is_empty() {
                if let Some(module) = KERNEL_WIREGUARD.strip_prefix(&format!("{}::", binary.target)) {
                    command.args(["--skip", module]);
                }
            } else {
                let own =
                    |name: &String| name.strip_prefix(&binary.target)?.strip_prefix("::").map(str::to_owned);
                command.args(names.iter().filter_map(own)).arg("--exact");
            }
            run_binary(part, &binary.target, command, &mut |line| println!("{line}"))
        };
        outcomes.extend(match &mut tries {
            Some(tries) => tries.run(run)?,
            None => run(&[])?,
        });
    }
    Ok(outcomes)
}

/// Runs the two halves of the program `api` at once, since its tests mostly wait. Each half has a network
/// namespace, so that servers of one never take the other's ports. The output of each is printed when it has
/// ended.
fn run_halves(binary: &TestBinary, environment: &BTreeMap<String, PathBuf>) -> Result<Vec<TestOutcome>> {
    let run = |arguments: Vec<&str>| {
        let mut inside = command("unshare", binary, environment);
        inside
            .args(["--net", "--", "sh", "-c", "ip link set lo up && exec \"$0\" \"$@\""])
            .arg(&binary.path)
            .args(arguments);
        run_quietly(binary.part(), &binary.target, inside)
    };
    let others = HALF_OF_API.iter().flat_map(|module| ["--skip", module]).collect();
    let (half, rest) = std::thread::scope(|scope| {
        let half = scope.spawn(|| run(HALF_OF_API.to_vec()));
        let rest = run(others);
        (half.join().unwrap_or_else(|_| bail!("a thread that runs tests has panicked")), rest)
    });
    Ok([half?, rest?].concat())
}

/// This program, in the directory in which cargo would run the tests.
fn command(
    program: impl AsRef<OsStr>,
    binary: &TestBinary,
    environment: &BTreeMap<String, PathBuf>,
) -> Command {
    let mut command = Command::new(program);
    command.envs(environment).current_dir(workspace_root().join(package_of(binary)));
    command
}

/// Runs the programs of the part `unit` and builds the BPF object twice, one job per processor, since
/// nearly all of them are CPU-bound. The output of each is printed when it has ended.
pub fn run_unit(
    binaries: &[TestBinary],
    environment: &BTreeMap<String, PathBuf>,
) -> Result<Vec<TestOutcome>> {
    let part = Part::Unit;
    // The simulation starts first, because it takes longest.
    let of_part = || binaries.iter().filter(|binary| binary.part() == part);
    let first = of_part().filter(|binary| binary.target == LONGEST).map(Some);
    let others = of_part().filter(|binary| binary.target != LONGEST).map(Some);
    let jobs = Mutex::new(first.chain([None]).chain(others));
    let outcomes = Mutex::new(Vec::new());
    let work = || -> Result<()> {
        // The lock is released before the job runs.
        while let Some(job) = next(&jobs) {
            let Some(binary) = job else {
                let built = static_checks::reproducible(part.label());
                outcomes.lock().push(built);
                continue;
            };
            let ran = run_quietly(part, &binary.target, command(&binary.path, binary, environment))?;
            outcomes.lock().extend(ran);
        }
        Ok(())
    };
    let workers = std::thread::available_parallelism().map_or(1, NonZero::get);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        workers
            .into_iter()
            .try_for_each(|worker| worker.join().unwrap_or_else(|_| bail!("a worker has panicked")))
    })?;
    Ok(outcomes.into_inner())
}

fn next<T>(jobs: &Mutex<impl Iterator<Item = T>>) -> Option<T> {
    jobs.lock().next()
}

/// Directory of the package, in which its tests run as under cargo.
pub fn package_of(binary: &TestBinary) -> &'static str {
    match binary.target.as_str() {
        "kilo_common" => "kilo-common",
        "kilo_core" => "kilo-agent/core",
        "kilo_host" => "kilo-agent/host",
        "kilo_lab" => "xtask/lab",
        "xtask" => "xtask",
        "kilo_failover" => "kilo-agent/failover",
        "kilo_failover_sim" | "rules" | "schedules" => "kilo-agent/failover-sim",
        "kilo_fuzz" | "kept_inputs" => "kilo-agent/fuzz",
        _ => "kilo-agent",
    }
}

/// Like [`run_binary`]; the output is printed when the program has ended.
fn run_quietly(part: Part, target: &str, command: Command) -> Result<Vec<TestOutcome>> {
    let mut said = String::new();
    let ran = run_binary(part, target, command, &mut |line| {
        said.push_str(line);
        said.push('\n');
    });
    print!("{said}");
    ran
}

/// Runs one program test by test, so that each test has its own time and one that says why it is skipped
/// counts as skipped.
fn run_binary(
    part: Part,
    target: &str,
    mut command: Command,
    say: &mut dyn FnMut(&str),
) -> Result<Vec<TestOutcome>> {
    // One thread keeps the lines and the time of one test together.
    command.args(["--test-threads=1", "--nocapture"]).stdin(Stdio::null());
    let (output, both) = std::io::pipe()?;
    command.stdout(both.try_clone()?).stderr(both);
    stop_if_interrupted()?;
    let started = Instant::now();
    let mut child = command.spawn().with_context(|| target.to_owned())?;
    // It also holds the pipe's write end.
    drop(command);
    let mut reader = Reader::new(part.label(), target);
    for line in BufReader::new(output).lines() {
        let said = reader.line(&line?, started.elapsed().as_secs_f64());
        say(&said);
    }
    let status = child.wait()?;
    Ok(reader.end(status.success(), target, &status.to_string()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt as _};

    use super::*;
    use crate::report::Outcome;

    /// A program that has a test in each half, runs those that it is asked for, and fails without loopback.
    const PROGRAM: &str = r#"#!/bin/sh
ip link show lo | grep -q UP || exit 1
case "$*" in
--skip*slices::*--skip*) name=agent::other ;;
slices::*) name=slices::one ;;
esac
echo "running 1 test"
echo "test $name ... ok"
"#;

    #[test]
    fn each_half_of_the_api_tests_runs_once_where_loopback_is_up() {
        if !nix::unistd::geteuid().is_root() {
            println!("kilo-skip: network namespaces need root");
            return;
        }
        // The part `unit` installs nothing.
        if Command::new("ip").arg("-Version").output().is_err() {
            println!("kilo-skip: iproute2 is not installed");
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("api");
        fs::write(&path, PROGRAM).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        let binary = TestBinary { target: "api".to_owned(), path };
        let outcomes = run_halves(&binary, &BTreeMap::new()).unwrap();
        let seen: Vec<_> = outcomes.iter().map(|one| (one.name.as_str(), one.outcome)).collect();
        assert_eq!(seen, [("api::slices::one", Outcome::Passed), ("api::agent::other", Outcome::Passed)]);
    }
}

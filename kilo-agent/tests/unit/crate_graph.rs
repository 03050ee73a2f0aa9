//! The crates depend on each other in one direction, and the pure one on nothing that does I/O.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::{collections::BTreeSet, process::Command};

/// Names of all packages that a package of this workspace is built from, with its default features.
fn built_from(package: &str) -> BTreeSet<String> {
    built_with(package, &[])
}

/// The same with more arguments for cargo.
fn built_with(package: &str, more: &[&str]) -> BTreeSet<String> {
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    let output = Command::new(env!("CARGO"))
        .args(["tree", "--locked", "--offline", "--edges=normal", "--prefix=none", "--format={p}"])
        .args(["--package", package, "--manifest-path", manifest])
        .args(more)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let names = String::from_utf8(output.stdout).unwrap();
    names.lines().filter_map(|line| line.split(' ').next()).map(ToOwned::to_owned).collect()
}

#[test]
fn the_pure_crate_is_built_from_nothing_that_does_io() {
    let core = built_from("kilo-core");
    assert!(core.contains("kilo-common") && core.contains("ipnet"), "no tree: {core:?}");
    let forbidden = |name: &&String| {
        ["tokio", "mio", "async-io", "aya", "aya-obj", "hyper", "socket2", "nix", "rustix", "reqwest"]
            .contains(&name.as_str())
            || name.contains("netlink")
            || name.starts_with("tokio-")
            || ["kilo-host", "kilo-agent"].contains(&name.as_str())
    };
    let found: Vec<_> = core.iter().filter(forbidden).collect();
    assert!(found.is_empty(), "kilo-core is pure, but is built from {found:?}");
}

#[test]
fn actuators_do_not_know_the_agent() {
    let host = built_from("kilo-host");
    assert!(host.contains("kilo-core") && host.contains("aya"), "no tree: {host:?}");
    let forbidden: Vec<_> =
        host.iter().filter(|name| ["kilo-agent", "kube-client", "hyper"].contains(&name.as_str())).collect();
    assert!(forbidden.is_empty(), "kilo-host is built from {forbidden:?}");
}

#[test]
fn kgctl_is_built_without_what_only_the_agent_needs() {
    let agent = ["rcgen", "prometheus-client", "form_urlencoded", "tokio-rustls"];
    let whole = built_from("kilo-agent");
    assert!(agent.iter().all(|name| whole.contains(*name)), "no tree: {whole:?}");
    for (target, linux) in [("x86_64-unknown-linux-gnu", true), ("x86_64-pc-windows-gnu", false)] {
        let made = built_with("kilo-agent", &["--no-default-features", "--target", target]);
        assert!(made.contains("kube-client"), "no tree: {made:?}");
        assert!(!made.contains("rcgen") && !made.contains("prometheus-client"), "{target}: {made:?}");
        for name in ["kilo-host", "aya", "gotatun"] {
            assert_eq!(made.contains(name), linux, "{target}: {name}");
        }
    }
}

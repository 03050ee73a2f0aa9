//! The crates depend on each other in one direction, the modules of `kilo-core` and of the agent as well, and the
//! pure ones on nothing that does I/O.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

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
fn the_pure_crates_are_built_from_nothing_that_does_io() {
    let forbidden = |name: &&String| {
        ["tokio", "mio", "async-io", "aya", "aya-obj", "hyper", "socket2", "nix", "rustix", "reqwest"]
            .contains(&name.as_str())
            || name.contains("netlink")
            || name.starts_with("tokio-")
            || ["kilo-host", "kilo-agent"].contains(&name.as_str())
    };
    for package in ["kilo-core", "kilo-failover"] {
        let built = built_from(package);
        assert!(built.contains("kilo-common"), "no tree: {built:?}");
        let found: Vec<_> = built.iter().filter(forbidden).collect();
        assert!(found.is_empty(), "{package} is pure, but is built from {found:?}");
    }
}

/// The simulation has a time and random numbers of its own.
#[test]
fn failover_is_decided_without_a_clock_and_without_io() {
    let files = sources("failover/src");
    assert!(!files.is_empty());
    for path in files {
        let names = named(&fs::read_to_string(&path).unwrap(), "std::");
        for module in ["time", "thread", "net", "io", "fs", "env", "process", "os"] {
            assert!(!names.contains(module), "{} uses std::{module}", path.display());
        }
    }
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

/// Modules of `kilo-core`, each before those that may know it.
const PURE: [&str; 17] = [
    "errors",
    "flat_map",
    "addresses",
    "prefixes",
    "settings",
    "observed",
    "wireguard",
    "signal_id",
    "objects",
    "topology",
    "relay",
    "net",
    "tables",
    "plan",
    "showconf",
    "multicluster",
    "vpn_peer",
];

/// Modules of `kilo-agent` beside its programs, each before those that may know it.
const AGENT: [&str; 17] = [
    "timestamp",
    "cli",
    "flag_table",
    "resolve",
    "health",
    "far",
    "failover",
    "backend",
    "metrics",
    "relay",
    "status",
    "http",
    "announce",
    "agent",
    "leaving",
    "takeover",
    "webhook",
];

/// Rust files in a directory of this package, and below it.
fn sources(directory: &str) -> Vec<PathBuf> {
    let (mut found, mut left) = (Vec::new(), vec![Path::new(env!("CARGO_MANIFEST_DIR")).join(directory)]);
    while let Some(directory) = left.pop() {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                left.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push(path);
            }
        }
    }
    found
}

/// The modules that code names directly behind `root` (`crate::`), one by one or in braces.
fn named(code: &str, root: &str) -> BTreeSet<String> {
    let lines = code.lines().map(|line| line.split("//").next().unwrap_or_default());
    let code: String = lines.flat_map(|line| [line, "\n"]).collect();
    let identifier = |text: &str| -> String {
        text.trim_start().chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect()
    };
    let mut names = BTreeSet::new();
    for (at, _) in code.match_indices(root) {
        let rest = &code[at + root.len()..];
        if !rest.starts_with('{') {
            names.insert(identifier(rest));
            continue;
        }
        let mut depth = 0;
        for (at, c) in rest.char_indices() {
            depth += i32::from(c == '{') - i32::from(c == '}');
            match (c, depth) {
                (_, 0) => break,
                ('{' | ',', 1) => drop(names.insert(identifier(&rest[at + 1..]))),
                _ => {}
            }
        }
    }
    names
}

/// The modules in a directory of this package know only those before them.
#[track_caller]
fn assert_ordered(directory: &str, order: &[&str]) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join(directory);
    let mut left: BTreeSet<_> = order.iter().copied().collect();
    for path in sources(directory) {
        let of = path.strip_prefix(&root).unwrap().components().next().unwrap();
        let of = of.as_os_str().to_str().unwrap().trim_end_matches(".rs");
        // Programs are crates of their own.
        if of == "lib" || of == "bin" {
            continue;
        }
        left.remove(of);
        let own = order.iter().position(|module| *module == of);
        let own = own.unwrap_or_else(|| panic!("{of}: give the module its place among those of {directory}"));
        let names = named(&fs::read_to_string(&path).unwrap(), "crate::");
        let later: Vec<_> = order[own + 1..].iter().filter(|module| names.contains(**module)).collect();
        assert!(later.is_empty(), "{} knows {later:?}, which come after {of}", path.display());
    }
    assert!(left.is_empty(), "{directory} has no {left:?}");
}

#[test]
fn modules_of_the_pure_crate_know_only_those_before_them() {
    assert_eq!(
        named("use crate::{a::{self, b}, c}; // crate::x\nlet y = crate::d::E;", "crate::"),
        ["a", "c", "d"].map(String::from).into()
    );
    assert_ordered("core/src", &PURE);
}

#[test]
fn modules_of_the_agent_know_only_those_before_them() {
    assert_ordered("src", &AGENT);
}

/// A wall clock that jumps moves no leader: what decides has the monotonic clock, which programs have, too.
#[test]
fn failover_knows_no_wall_clock() {
    let paths: Vec<_> = ["failover/src", "src/failover", "src/far"].into_iter().flat_map(sources).collect();
    assert!(paths.len() > 30, "{paths:?}");
    for path in paths {
        let code = fs::read_to_string(&path).unwrap();
        for clock in ["SystemTime", "Timestamp", "REALTIME"] {
            assert!(!code.contains(clock), "{} knows {clock}", path.display());
        }
    }
}

#[test]
fn no_actuator_knows_the_mesh_or_the_plan_and_the_agents_state_not_what_shows_it() {
    for path in sources("host/src") {
        let names = named(&fs::read_to_string(&path).unwrap(), "kilo_core::");
        for higher in ["topology", "plan"] {
            assert!(!names.contains(higher), "{} knows {higher}, which knows it", path.display());
        }
    }
    let state = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/src/agent/state.rs")).unwrap();
    assert!(!named(&state, "crate::").contains("status"), "the agent's state knows its view");
}

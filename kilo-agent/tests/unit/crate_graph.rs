//! Crates depend on each other in one direction, and so do the modules of each crate; the pure ones depend
//! on nothing that does I/O.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Names of all packages that a workspace package is built from with its default features.
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

/// The simulation provides time and random numbers.
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

/// Modules of each crate, each before those that may use it.
const ORDERS: [(&str, &str); 10] = [
    (
        "../kilo-common/src",
        "checksum counters drop_reasons ecn event lead packet siphash wire_enum inject relay maps encap forwarding pod_flow map_table \
         direct nat icmp_too_big signal",
    ),
    (
        "../kilo-ebpf/src",
        "maps cb inject leader_word follow subprogram word_memory packet gso ip masquerade orphaned link monitor mtu vxlan_order \
         ret encap reflect relay sender signal decap fast_path pod_flow pod_ingress kilo_egress kilo_ingress lan_ingress tunnel_ingress \
         wireguard_port uplink_egress",
    ),
    (
        "core/src",
        "label_values errors flat_map addresses prefixes settings tunnel_path observed wireguard signal_id objects topology relay \
         net tables plan showconf multicluster vpn_peer",
    ),
    (
        "src",
        "timestamp cli flags_markdown packets resolve health far failover backend metrics relay status http announce \
         agent leaving takeover webhook",
    ),
    (
        "src/bin/kgctl",
        "complete flags_before_command status_filter image_name manual needs_linux node_report outcome progress refusal terminal cluster remote \
         source status takeover uninstall version connect connectivity graph monitor peer_cluster showconf sysdump \
         trace",
    ),
    ("host/src", "memory lock cni net firewall wireguard dataplane interface"),
    (
        "failover/src",
        "planned params turn probes detector tunnel sentinel roll_call gateway far member other_gateways agent",
    ),
    ("failover-sim/src", "rng faults host invariants engine planned scenarios several restarts report"),
    (
        "../xtask/lab/src",
        "report wait descendants takedown durations command netns raw_udp cni_conf network plugins confine counters cni agents \
         members probe point_to_point_link tunl0 bulk matrix clear vpn check topology options deployed_state services \
         fail_closed forward_policy granularity nat node_ports offloads path_mtu pod_tunnels printer udp_segment wireguard_go \
         checks cloud cilium flannel kernel_ipip scenario faults failover nat_pairs modes run_times args",
    ),
    (
        "../xtask/src",
        "apt wheels build_ebpf kubernetes prometheus kube_tools web_tools vm image manifests cluster bench \
         dist docs fuzz sim static_checks rotation second_try test",
    ),
];

/// Rust files in a directory of this package, including subdirectories.
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

/// Code without everything after `//` in a line.
fn without_comments(code: &str) -> String {
    code.lines().flat_map(|line| [line.split("//").next().unwrap_or_default(), "\n"]).collect()
}

/// Names that follow a path after `up` more `super::`, single or in braces.
fn behind(path: &str, up: usize, names: &mut BTreeSet<String>) {
    let path = path.trim_start();
    if let Some(list) = path.strip_prefix('{') {
        let mut depth = 1;
        behind(list, up, names);
        for (at, c) in list.char_indices() {
            depth += i32::from(c == '{') - i32::from(c == '}');
            match (c, depth) {
                (_, 0) => break,
                (',', 1) => behind(&list[at + 1..], up, names),
                _ => {}
            }
        }
    } else if up > 0 {
        path.strip_prefix("super::").into_iter().for_each(|rest| behind(rest, up - 1, names));
    } else {
        let name: String =
            path.chars().take_while(|c| c.is_ascii_alphanumeric() || "_*".contains(*c)).collect();
        // Nothing follows the last comma of a list.
        names.extend(Some(name).filter(|name| !name.is_empty()));
    }
}

/// Modules that code names directly after `root` (`crate::`).
fn named(code: &str, root: &str) -> BTreeSet<String> {
    let code = without_comments(code);
    let mut names = BTreeSet::new();
    code.match_indices(root).for_each(|(at, _)| behind(&code[at + root.len()..], 0, &mut names));
    names
}

/// Number of modules (`mod x {`) open at the end of code formatted by rustfmt.
fn open_modules(code: &str) -> usize {
    let mut open = Vec::new();
    for line in code.lines() {
        let (text, words) = (line.trim(), line.split_whitespace().rev().collect::<Vec<_>>());
        let indent = line.len() - line.trim_start().len();
        if matches!(words[..], ["{", _, "mod", ..]) {
            open.push(indent);
        } else if text == "}" {
            open.pop_if(|of| *of == indent);
        }
    }
    open.len()
}

/// Modules of its crate that code in a module at this depth names: after `crate::`, and after as many
/// `super::` as lead to the crate's root.
fn modules_named(code: &str, depth: usize) -> BTreeSet<String> {
    let mut names = named(code, "crate::");
    let code = without_comments(code);
    for (at, _) in code.match_indices("super::") {
        if !code[..at].ends_with("super::") {
            behind(&code[at..], depth + open_modules(&code[..at]), &mut names);
        }
    }
    names
}

/// Names that a `use` brings into scope: for `{a::{B, C as D}, e}` these are `B`, `D` and `e`.
fn brought_in(tree: &str, names: &mut BTreeSet<String>) {
    let tree = tree.trim();
    if let Some((_, list)) = tree.split_once('{') {
        let list = list.rsplit_once('}').map_or(list, |(list, _)| list);
        let (mut depth, mut begin) = (0, 0);
        for (at, c) in list.char_indices().chain([(list.len(), ',')]) {
            depth += i32::from(c == '{') - i32::from(c == '}');
            if (c, depth) == (',', 0) {
                brought_in(&list[begin..at], names);
                begin = at + 1;
            }
        }
    } else {
        let last = tree.rsplit([':', ' ']).next().unwrap_or_default();
        names.extend(Some(last.to_owned()).filter(|last| !["", "self", "_"].contains(&last.as_str())));
    }
}

/// Names that the root imports from its modules, each with its module: every module of the crate can use
/// them through the root.
fn taken_by_root(code: &str, modules: &[&str]) -> BTreeMap<String, String> {
    let code = without_comments(code);
    let mut taken = BTreeMap::new();
    for item in code.split_inclusive(';') {
        // Attributes, and items without a semicolon, may come before.
        let begin = item.lines().position(|line| {
            line.starts_with("use ") || line.starts_with("pub use ") || line.starts_with("pub(crate) use ")
        });
        let Some(begin) = begin else { continue };
        let item = item.lines().skip(begin).collect::<Vec<_>>().join(" ");
        let (_, path) = item.trim_end_matches(';').split_once("use ").unwrap();
        let path = path.trim_start_matches("crate::").trim_start_matches("self::");
        let (module, tree) = path.split_once("::").unwrap_or((path, ""));
        if modules.contains(&module) {
            let mut names = BTreeSet::new();
            brought_in(tree, &mut names);
            taken.extend(names.into_iter().map(|name| (name, module.to_owned())));
        }
    }
    taken
}

/// Names that a crate's root imports from its modules.
fn root_of(directory: &Path, modules: &[&str]) -> BTreeMap<String, String> {
    let root = ["lib.rs", "main.rs"].map(|name| directory.join(name)).into_iter().find(|path| path.exists());
    taken_by_root(&fs::read_to_string(root.unwrap()).unwrap(), modules)
}

/// Asserts that the modules in a directory use only those before them, including through names that the
/// root imports.
#[track_caller]
fn assert_ordered(directory: &str, order: &str) {
    let order: Vec<_> = order.split_whitespace().collect();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join(directory);
    let at_root = root_of(&root, &order);
    let mut left: BTreeSet<_> = order.iter().copied().collect();
    for path in sources(directory) {
        let within = path.strip_prefix(&root).unwrap().with_extension("");
        let mut modules: Vec<_> = within.iter().map(|part| part.to_str().unwrap()).collect();
        modules.pop_if(|module| *module == "mod");
        let of = modules[0];
        // The crate's root uses all modules, and programs are crates of their own.
        if ["lib", "main", "bin"].contains(&of) {
            continue;
        }
        left.remove(of);
        let own = order.iter().position(|module| *module == of);
        let own = own.unwrap_or_else(|| panic!("{of}: give the module its place among those of {directory}"));
        let mut names = modules_named(&fs::read_to_string(&path).unwrap(), modules.len());
        let by_root: Vec<_> = names.iter().filter_map(|name| at_root.get(name).cloned()).collect();
        names.extend(by_root);
        assert!(!names.contains("*"), "{} uses all of the crate's root", path.display());
        let later: Vec<_> = order[own + 1..].iter().filter(|module| names.contains(**module)).collect();
        assert!(later.is_empty(), "{} knows {later:?}, which come after {of}", path.display());
    }
    assert!(left.is_empty(), "{directory} has no {left:?}");
}

#[test]
fn a_module_is_found_by_whichever_path_it_is_named() {
    let names = |code, depth| Vec::from_iter(modules_named(code, depth));
    assert_eq!(
        names("use crate::{a::{self, b}, c}; // crate::x\nlet y = crate::d::E;", 1),
        ["a", "c", "d"].map(String::from)
    );
    let code = "use super::{a, super::{b::X, c}};\nlet d = super::super::d::e(); super::f();\n";
    assert_eq!(names(code, 2), ["b", "c", "d"]);
    assert_eq!(names("use super::{\n    a,\n    b::{c, d},\n};", 1), ["a", "b"]);
    let tests = "#[cfg(test)]\nmod tests {\n    use super::{*, super::a};\n}\nuse super::b;\n";
    assert_eq!(names(tests, 1), ["a", "b"], "a module in a file is one deeper");
}

#[test]
fn a_name_that_the_root_takes_from_a_module_is_that_modules() {
    let root = "//! Words.\npub mod a;\nmod b;\n\n#[cfg(test)]\nuse b::{\n    C,\n    d::{self, E as F},\n};\npub use a::G;\n\
                use std::fmt::Debug;\npub(crate) use crate::a::h::I;\n\nfn use_of() {}\n";
    let taken = taken_by_root(root, &["a", "b"]);
    let taken: Vec<_> = taken.iter().map(|(name, module)| format!("{module}.{name}")).collect();
    assert_eq!(taken, ["b.C", "b.F", "a.G", "a.I"]);
    let failover = root_of(&Path::new(env!("CARGO_MANIFEST_DIR")).join("failover/src"), &["agent", "turn"]);
    assert_eq!(failover.get("Agent").map(String::as_str), Some("agent"));
}

#[test]
fn modules_know_only_those_before_them() {
    for (directory, order) in ORDERS {
        assert_ordered(directory, order);
    }
}

/// A jump of the wall clock must not move leadership: decisions use the monotonic clock, as BPF programs
/// do.
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
    let backends = concat!(env!("CARGO_MANIFEST_DIR"), "/src/backend/mod.rs");
    let backends = without_comments(&fs::read_to_string(backends).unwrap());
    for backend in ["kubernetes::", "file::", "last_good::"] {
        assert!(!backends.contains(backend), "the trait of all backends knows {backend}, which knows it");
    }
    let state = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/src/agent/state.rs")).unwrap();
    assert!(!named(&state, "crate::").contains("status"), "the agent's state knows its view");
}

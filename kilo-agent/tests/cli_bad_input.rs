//! Bad input to `kg` and `kgctl`: one clear message that says what to do, a
//! failing exit code, and nothing half set up left behind.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

const KG: &str = env!("CARGO_BIN_EXE_kg");
const KGCTL: &str = env!("CARGO_BIN_EXE_kgctl");

const NODE: &str = "apiVersion: v1\nkind: Node\nmetadata: {name: n1}\nspec: {podCIDR: 10.42.1.0/24}\n";

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// Runs, expects failure, and answers what was said.
fn fails(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).env_remove("KUBECONFIG").output().unwrap();
    let said = said(&output);
    assert!(!output.status.success(), "{arguments:?} succeeded: {said}");
    assert!(!said.contains("panicked"), "{said}");
    said
}

#[test]
fn an_unknown_value_of_a_flag_is_answered_with_the_possible_ones() {
    for (flag, possible) in [
        ("--backend=etcd", "kubernetes, file"),
        ("--encapsulate=sometimes", "never, crosssubnet, always"),
        ("--mesh-granularity=none", "location, full"),
        ("--log-level=loud", "all, debug, info, warn, error, none"),
        ("--compatibility=calico", "flannel, cilium"),
        ("--wireguard=rust", "auto, kernel, userspace"),
        ("--attach=xdp", "auto, tcx, clsact"),
        ("--masquerade=maybe", "ebpf, off"),
    ] {
        let said = fails(KG, &[flag]);
        assert!(said.contains(possible), "{flag}: {said}");
    }
}

#[test]
fn a_value_of_the_wrong_form_is_answered_with_an_example() {
    for (flag, hint) in [
        ("--mtu=big", "auto"),
        ("--resync-period=30", "30s"),
        ("--listen=1107", ":1107"),
        ("--subnet=10.4.0.0", "--subnet"),
        ("--port=0", "1.."),
        ("--service-cidr=x", "--service-cidr"),
        ("--interface=a-name-too-long-for-linux", "1 to 15 characters"),
    ] {
        let said = fails(KG, &[flag, "--backend=file"]);
        assert!(said.contains(hint), "{flag}: {said}");
    }
}

#[test]
fn a_kubeconfig_that_cannot_be_read_is_named() {
    let missing = fails(KG, &["--kubeconfig=/nonexistent/config"]);
    assert!(missing.contains("/nonexistent/config") && missing.contains("No such file"), "{missing}");
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("config");
    fs::write(&path, "clusters: [").unwrap();
    let rubbish = fails(KGCTL, &["--kubeconfig", path.to_str().unwrap(), "graph"]);
    assert!(rubbish.contains(path.to_str().unwrap()), "{rubbish}");
}

#[test]
fn a_backend_directory_that_is_missing_is_named() {
    assert!(fails(KG, &["--backend=file"]).contains("--backend-dir"));
    assert!(fails(KG, &["--backend=file", "--backend-dir=/nonexistent"]).contains("/nonexistent"));
}

#[test]
fn one_file_that_does_not_parse_is_named_and_hides_no_other() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("n1.yaml"), NODE).unwrap();
    fs::write(directory.path().join("bad.yaml"), "kind: Node\nmetadata: [").unwrap();
    fs::write(directory.path().join("peer.yaml"), "kind: Peer\nmetadata: {name: p}\nspec: {}\n").unwrap();
    let arguments = ["--backend=file", "--backend-dir", directory.path().to_str().unwrap(), "graph"];
    let output = Command::new(KGCTL).args(arguments).output().unwrap();
    let said = said(&output);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("bad.yaml") && said.contains("digraph"), "{said}");
    assert!(said.contains("peer"), "{said}");
}

#[test]
fn a_peer_or_node_that_does_not_exist_is_named() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("n1.yaml"), NODE).unwrap();
    let with = |arguments: &[&'static str]| {
        let mut all = vec!["--backend=file", "--backend-dir", directory.path().to_str().unwrap()];
        all.extend(arguments);
        fails(KGCTL, &all)
    };
    assert!(with(&["showconf", "peer", "nobody"]).contains("nobody"));
    assert!(with(&["showconf", "node", "nobody"]).contains("nobody"));
    assert!(with(&["showconf", "node", "n1"]).contains("not ready"));
}

/// Runs kg in mount and network namespaces of its own, and tells in the same
/// output what it left there.
fn isolated(directory: &Path, prefix: &str, arguments: &str) -> Option<(bool, String)> {
    if !nix::unistd::geteuid().is_root() {
        println!("kilo-skip: making namespaces needs root");
        return None;
    }
    let script = format!(
        "mount -t tmpfs lib /var/lib && mount -t tmpfs run /run && mkdir /run/wireguard && \
         mount -t sysfs sys /sys && mount -t bpf bpf /sys/fs/bpf && ip link set lo up && \
         timeout 20 {prefix} {KG} --backend file --backend-dir {} --hostname n1 {arguments}; code=$?; \
         ls -d /sys/fs/bpf/kilo 2>/dev/null && echo LEFT; ip -o link show kilo0 2>/dev/null && echo LEFT; exit $code",
        directory.display()
    );
    let output = Command::new("unshare").args(["--mount", "--net", "sh", "-c", &script]).output().unwrap();
    assert_ne!(output.status.code(), Some(124), "it kept running: {}", said(&output));
    Some((output.status.success(), said(&output)))
}

#[test]
fn without_capabilities_it_says_which_and_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("n1.yaml"), NODE).unwrap();
    let drop = "setpriv --bounding-set=-all --inh-caps=-all";
    let Some((success, said)) = isolated(directory.path(), drop, "") else { return };
    assert!(!success && said.contains("CAP_BPF"), "{said}");
    assert!(!said.contains("LEFT"), "{said}");
}

#[test]
fn a_kernel_without_wireguard_is_said_so_and_nothing_is_left() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("n1.yaml"), NODE).unwrap();
    if Path::new("/sys/module/wireguard").exists() {
        println!("kilo-skip: this kernel has WireGuard");
        return;
    }
    let Some((success, said)) = isolated(directory.path(), "", "--wireguard kernel") else { return };
    assert!(!success && said.to_lowercase().contains("wireguard"), "{said}");
    assert!(!said.contains("LEFT"), "{said}");
}

#[test]
fn an_interface_that_is_expected_but_absent_is_named() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("n1.yaml"), NODE).unwrap();
    let Some((success, said)) = isolated(directory.path(), "", "--create-interface=false") else { return };
    assert!(!success && said.contains("kilo0"), "{said}");
    assert!(!said.contains("LEFT"), "{said}");
}

#[test]
fn a_node_that_does_not_exist_is_named_without_a_flood() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("n2.yaml"), NODE.replace("n1", "n2")).unwrap();
    let soon = "timeout --preserve-status 5";
    let Some((_, said)) = isolated(directory.path(), soon, "--resync-period 1h") else { return };
    let lines = said.lines().filter(|line| line.contains("does not exist; check --hostname")).count();
    assert!((1..=6).contains(&lines), "{lines} times: {}", said.lines().next().unwrap_or_default());
}

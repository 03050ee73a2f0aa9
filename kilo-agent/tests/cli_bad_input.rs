//! Bad input to `kg` and `kgctl`: one clear message that says what to do, a
//! failing exit code, and nothing half set up left behind.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::{
    fs,
    path::Path,
    process::{Command, Output},
    sync::{Mutex, PoisonError},
};

const KG: &str = env!("CARGO_BIN_EXE_kg");
const KGCTL: &str = env!("CARGO_BIN_EXE_kgctl");

const NODE: &str = "apiVersion: v1\nkind: Node\nmetadata: {name: n1}\nspec: {podCIDR: 10.42.1.0/24}\n";

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// Runs, expects failure, and answers what was said.
fn fails(program: &str, arguments: &[&str]) -> String {
    // Two agents at once for one interface are another test's subject.
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let output = Command::new(program).args(arguments).env_remove("KUBECONFIG").output().unwrap();
    let said = said(&output);
    assert!(!output.status.success(), "{arguments:?} succeeded: {said}");
    assert!(!said.contains("panicked"), "{said}");
    said
}

/// Every flag of `kg` with rubbish, and what the answer must contain beside
/// the flag's name: what is possible, or an example of it.
const FLAGS: &[(&str, &[&str])] = &[
    ("--backend=etcd", &["kubernetes, file"]),
    ("--backend-dir=/nonexistent", &["/nonexistent", "does not exist; make it"]),
    ("--clean-up=maybe", &["true", "false"]),
    ("--clean-up-interface=maybe", &["true", "false"]),
    ("--create-interface=maybe", &["true", "false"]),
    ("--cni=maybe", &["true", "false"]),
    ("--cni-path=", &["a value is required"]),
    ("--compatibility=calico", &["flannel, cilium"]),
    ("--encapsulate=sometimes", &["never, crosssubnet, always"]),
    ("--hostname=no_name", &["DNS names in lower case"]),
    ("--interface=a-name-too-long-for-linux", &["1 to 15 characters"]),
    ("--interface=a/b", &["1 to 15 characters"]),
    ("--interface=", &["1 to 15 characters"]),
    ("--internal-cidr=10.0.0.1", &["10.0.0.1", "CIDR"]),
    ("--internal-cidr=10.0.0.0/8,x", &["\"x\"", "CIDR"]),
    ("--iptables-forward-rules=maybe", &["true", "false"]),
    ("--kubeconfig=/nonexistent", &["/nonexistent", "No such file"]),
    ("--listen=1107", &[":1107"]),
    ("--listen=:70000", &[":1107"]),
    ("--local=maybe", &["true", "false"]),
    ("--log-level=loud", &["all, debug, info, warn, error, none"]),
    ("--masquerade=maybe", &["ebpf", "off"]),
    ("--master=ftp://x", &["http", "https://192.0.2.1:6443"]),
    ("--mesh-granularity=none", &["location, full"]),
    ("--mtu=big", &["auto", "576"]),
    ("--mtu=10", &["auto", "576"]),
    ("--mtu=-1", &["auto", "576"]),
    ("--port=0", &["1 to 65535"]),
    ("--port=70000", &["1 to 65535"]),
    ("--port=x", &["1 to 65535"]),
    ("--prioritise-private-addresses=maybe", &["true", "false"]),
    ("--resync-period=30", &["30s"]),
    ("--resync-period=0", &["30s"]),
    ("--resync-period=-5s", &["30s"]),
    ("--service-cidr=x", &["\"x\"", "CIDR"]),
    ("--service-cidr=10.96.0.0/33", &["10.96.0.0/33", "CIDR"]),
    ("--subnet=10.4.0.0", &["10.4.0.0/16"]),
    ("--topology-label=", &["topology.kubernetes.io/region"]),
    ("--topology-label=not/a/label", &["topology.kubernetes.io/region"]),
    ("--tunnel=gre", &["auto, ipip, vxlan, none"]),
    ("--wireguard=rust", &["auto, kernel, userspace"]),
];

/// Flags that take any text, or none.
const ANY_TEXT: [&str; 2] = ["--help", "--version"];

fn flag_name(argument: &str) -> &str {
    argument.split_once('=').map_or(argument, |(name, _)| name)
}

#[test]
fn rubbish_in_any_flag_of_kg_is_answered_with_the_flag_and_what_is_possible() {
    for (argument, wanted) in FLAGS {
        let name = flag_name(argument);
        // Flags of one backend are looked at by that one.
        let mut arguments = vec![*argument];
        arguments.extend((name == "--backend-dir").then_some("--backend=file"));
        let said = fails(KG, &arguments);
        assert!(said.contains(name), "{argument}: {said}");
        for part in *wanted {
            assert!(said.contains(part), "{argument}: {part:?} is not in {said}");
        }
        assert!(!said.contains("made the WireGuard device"), "{argument}: {said}");
    }
}

#[test]
fn no_flag_of_kg_is_left_out_of_the_list_of_rubbish() {
    let help = said(&Command::new(KG).arg("--help").output().unwrap());
    let flags: Vec<_> = help
        .split_whitespace()
        .filter(|word| word.starts_with("--"))
        .map(|word| word.trim_end_matches(['.', ',', ';', ':']).split(['=', '[']).next().unwrap())
        .collect();
    assert!(flags.len() > 20, "{help}");
    for flag in flags {
        let tried = FLAGS.iter().any(|(argument, _)| flag_name(argument) == flag);
        assert!(tried || ANY_TEXT.contains(&flag), "{flag} is not tried");
    }
}

#[test]
fn words_that_are_no_command_are_refused_with_those_that_are() {
    let refused = fails(KG, &["frobnicate"]);
    assert!(refused.contains("frobnicate") && refused.contains("--help"), "{refused}");
    assert!(fails(KG, &["--no-such-flag"]).contains("--no-such-flag"));
    assert!(fails(KG, &["completion", "tcsh"]).contains("bash"));
    assert!(fails(KG, &["completion"]).contains("<SHELL>"));
    assert!(fails(KGCTL, &["frobnicate"]).contains("frobnicate"));
    assert!(fails(KGCTL, &[]).contains("showconf"));
}

#[test]
fn rubbish_in_any_flag_of_kgctl_is_answered_with_the_flag_and_what_is_possible() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("n1.yaml"), NODE).unwrap();
    let from_files = format!("--backend-dir={}", directory.path().display());
    let cases: &[(&[&str], &[&str])] = &[
        (&["graph", "--backend=etcd"], &["--backend", "kubernetes, file"]),
        (&["graph", "--backend=file"], &["--backend-dir"]),
        (&["graph", "--backend=file", "--backend-dir=/nonexistent"], &["/nonexistent", "does not exist"]),
        (&["graph", "--kubeconfig=/nonexistent"], &["--kubeconfig", "/nonexistent", "No such file"]),
        (&["graph", "--backend=file", &from_files, "--mesh-granularity=none"], &["location, full, auto"]),
        (&["graph", "--port=0"], &["--port", "1 to 65535"]),
        (&["graph", "--subnet=10.4.0.0"], &["--subnet", "10.4.0.0/16"]),
        (&["graph", "--topology-label="], &["--topology-label", "topology.kubernetes.io/region"]),
        (&["graph", "more"], &["more"]),
        (&["showconf"], &["node", "peer"]),
        (&["showconf", "cluster"], &["cluster"]),
        (&["showconf", "node"], &["<NAME>"]),
        (&["showconf", "node", "n1", "-o", "toml"], &["--output", "wireguard, yaml, json"]),
        (&["showconf", "peer", "p", "--as-peer", "--allowed-ips=x"], &["--allowed-ips", "CIDR"]),
        (&["showconf", "node", "n1", "--as-peer", "--allowed-ips=10.0.0.1"], &["--allowed-ips", "CIDR"]),
        (&["status", "-o", "toml"], &["--output", "json"]),
        (&["completion", "tcsh"], &["bash"]),
    ];
    for (arguments, wanted) in cases {
        let said = fails(KGCTL, arguments);
        for part in *wanted {
            assert!(said.contains(part), "{arguments:?}: {part:?} is not in {said}");
        }
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
fn each_way_a_kubeconfig_can_be_wrong_is_named_with_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("config");
    let whole = |user: &str, cluster: &str| {
        format!(
            "kind: Config\ncurrent-context: c\ncontexts: [{{name: c, context: {{cluster: k, user: u}}}}]\n\
             users: [{user}]\nclusters: [{cluster}]\n"
        )
    };
    let server = "{name: k, cluster: {server: 'https://127.0.0.1:1'}}";
    let user = "{name: u, user: {token: t}}";
    let cases = [
        (String::new(), "current-context"),
        ("\0".to_owned(), "YAML"),
        ("7".to_owned(), "expected mapping"),
        ("kind: Config\nclusters: 7".to_owned(), "line 2"),
        ("kind: Config\ncurrent-context: nope".to_owned(), "\"nope\" does not exist"),
        (whole("", server), "user \"u\" does not exist"),
        (whole(user, "{name: other, cluster: {}}"), "cluster \"k\" does not exist; there are: other"),
        (whole(user, "{name: k, cluster: {}}"), "cluster url is missing"),
        (whole(user, &server.replace("https://127.0.0.1:1", "not a url")), "cluster url"),
        (whole(user, &server.replace("https", "ftp")), "write for example https://192.0.2.1:6443"),
        (whole(user, &server.replace("}}", ", certificate-authority: ca.crt}}")), "ca.crt"),
        (whole(user, &server.replace("}}", ", certificate-authority-data: '!!'}}")), "base64"),
        (
            whole(user, &server.replace("}}", ", certificate-authority-data: aGFsbG8=}}")),
            "no certificate in PEM",
        ),
        (whole("{name: u, user: {tokenFile: token}}", server), "/token"),
        (whole("{name: u, user: {client-certificate: me.crt, client-key: me.key}}", server), "me.crt"),
    ];
    for (text, wanted) in cases {
        fs::write(&path, &text).unwrap();
        for (program, arguments) in [(KG, &[][..]), (KGCTL, &["graph"])] {
            let said = fails(program, &[&["--kubeconfig", path.to_str().unwrap()], arguments].concat());
            assert!(said.contains(wanted), "{text}: {wanted:?} is not in {said}");
            assert!(said.contains(path.to_str().unwrap()), "{text}: {said}");
        }
    }
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

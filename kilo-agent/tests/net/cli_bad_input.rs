//! Bad input to `kg` and `kgctl` gives one clear message with the remedy and a failing exit code, and
//! leaves nothing half set up.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

use parking_lot::Mutex;

const KG: &str = env!("CARGO_BIN_EXE_kg");
const KGCTL: &str = env!("CARGO_BIN_EXE_kgctl");

const NODE: &str = "apiVersion: v1\nkind: Node\nmetadata: {name: n1}\nspec: {podCIDR: 10.42.1.0/24}\n";

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// Runs the program, expects failure, and returns its output.
fn fails(program: &str, arguments: &[&str]) -> String {
    // Two agents at once on one interface are tested elsewhere.
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock();
    let output = Command::new(program).args(arguments).env_remove("KUBECONFIG").output().unwrap();
    let said = said(&output);
    assert!(!output.status.success(), "{arguments:?} succeeded: {said}");
    assert!(!said.contains("panicked"), "{said}");
    said
}

/// Flags that accept any text or path, whose errors show only later.
const ANY_TEXT: [&str; 7] =
    ["backend-dir", "cni-path", "cni-run-dir", "cni-source", "kubeconfig", "master", "version"];

/// Invalid values for flags of `kg`, and what the message must name.
const RUBBISH: &[(&str, &str, &str)] = &[
    ("attach", "maybe", "auto, tcx, clsact"),
    ("backend", "etcd", "kubernetes, file"),
    ("clean-up", "maybe", "neither true nor false"),
    ("clean-up-interface", "2", "neither true nor false"),
    ("cni", "yes", "neither true nor false"),
    ("compatibility", "calico", "flannel, cilium"),
    ("create-interface", "tRUE", "neither true nor false"),
    ("encapsulate", "sometimes", "never, crosssubnet, always"),
    ("endpoint-from", "nic", "auto, interface, external-ip"),
    ("failover", "fast", "auto, off"),
    ("slices", "maybe", "auto, off"),
    ("failover-interval", "19ms", "20ms to 200ms"),
    ("hostname", "no_name", "DNS names in lower case"),
    ("interface", "a b", "without slash, colon and white space"),
    ("internal-cidr", "10.0.0.0/33", "10.0.0.0/33"),
    ("iptables-forward-rules", "on", "neither true nor false"),
    ("listen", "1107", ":1107"),
    ("local", "", "neither true nor false"),
    ("log-level", "loud", "all, debug, info, warn, error, none"),
    ("masquerade", "maybe", "ebpf, "),
    ("mesh-granularity", "none", "location, full, cross"),
    ("mtu", "big", "auto"),
    ("page-access", "closed", "open, token"),
    ("port", "0", "1 to 65535"),
    ("prioritise-private-addresses", "x", "neither true nor false"),
    ("relay", "always", "auto, off"),
    ("resync-period", "30", "30s"),
    ("service-cidr", "10.96.0.0/12,x", "\"x\""),
    ("relay-rate", "65536", "from 0 to 65535"),
    ("stand-bys", "5", "from 0 to 4"),
    ("leaders", "0", "from 1 to 8"),
    ("leaders", "9", "from 1 to 8"),
    ("leaders", "two", "\"two\" is not a number from 1 to 8"),
    ("take-over-from-kilo", "maybe", "neither true nor false"),
    ("subnet", "10.4.0.0", "10.4.0.0/16"),
    ("topology-label", "", "topology.kubernetes.io/region"),
    ("tunnel", "gre", "auto, ipip, vxlan, none"),
];

#[test]
fn each_flag_refuses_rubbish_and_names_what_is_possible() {
    for (flag, rubbish, possible) in RUBBISH.iter().chain(&[("wireguard", "rust", "auto, kernel, userspace")])
    {
        let said = fails(KG, &["--backend=file", &format!("--{flag}={rubbish}")]);
        assert!(said.contains(possible) && said.contains(flag), "--{flag}={rubbish}: {said}");
    }
    for (flag, rubbish, hint) in [
        ("interface", "a-name-too-long-for-linux", "1 to 15 bytes"),
        ("interface", "", "1 to 15 bytes"),
        ("interface", "a/b", "1 to 15 bytes"),
        ("interface", "kilo0:1", "for example kilo0"),
        ("interface", "..", "for example kilo0"),
        ("mtu", "-1", "576"),
        ("mtu", "70000", "576"),
        ("port", "65536", "1 to 65535"),
        ("port", "x", "1 to 65535"),
        ("resync-period", "0", "\"0\" is not longer than zero; write for example 30s"),
        ("topology-label", "not/a/label", "topology.kubernetes.io/region"),
        ("resync-period", "-1s", "30s"),
        ("listen", ":99999", ":1107"),
        ("internal-cidr", "10.0.0.1", "10.0.0.1 has no prefix length; write 10.0.0.1/32"),
    ] {
        let said = fails(KG, &["--backend=file", &format!("--{flag}={rubbish}")]);
        assert!(said.contains(hint), "--{flag}={rubbish}: {said}");
    }
    let said = fails(KG, &["--backend=file", "--cnii=true"]);
    assert!(said.contains("--cnii") && said.contains("--cni"), "{said}");
    let said = fails(KG, &["--master=ftp://x"]);
    assert!(said.contains("--master") && said.contains("https://192.0.2.1:6443"), "{said}");
}

/// Phrases of messages that say which values are possible.
const HINTS: [&str; 4] = ["possible values", "for example", "neither true nor false", "not a number from"];

#[test]
fn each_flag_of_kg_refuses_values_that_it_does_not_have() {
    let output = Command::new(KG).arg("flags-as-markdown").output().unwrap();
    let tables = String::from_utf8(output.stdout).unwrap();
    let table = tables.split("<!-- flags: kg -->").nth(1).unwrap().split("<!-- /flags -->").next().unwrap();
    let names = table.lines().filter_map(|line| line.strip_prefix("| `--"));
    let names: Vec<&str> = names
        .map(|rest| rest.split(|c: char| !c.is_ascii_lowercase() && c != '-').next().unwrap())
        .filter(|name| !ANY_TEXT.contains(name))
        .collect();
    for name in &names {
        let said = fails(KG, &["--backend=file", &format!("--{name}=no value")]);
        let is_clear = said.contains(name) && HINTS.iter().any(|hint| said.contains(hint));
        assert!(
            is_clear,
            "--{name} takes any text (`ANY_TEXT`), or its answer names no value that it takes: {said}"
        );
    }
    assert!(names.len() > 20, "{names:?}");
}

#[test]
fn flags_are_read_as_manifests_for_kilo_write_them() {
    // The directory is missing, but the flags before that check were accepted.
    for arguments in [
        &["--cni=False", "--local=0", "--clean-up=t", "--create-interface=TRUE"][..],
        &["--cni", "--local", "--prioritise-private-addresses", "--iptables-forward-rules"],
        &["--port", "51819", "--port=51822", "--mtu=auto", "--mtu", "1300"],
        &["--internal-cidr=10.0.0.0/8,192.168.0.0/16", "--internal-cidr", "fd00::/8", "--service-cidr="],
        &["--resync-period=+1m0.5s", "--kubeconfig=", "--master=", "--compatibility=", "--hostname="],
        &["--subnet=10.4.3.2/16", "--listen=localhost:1107", "--log-level=all"],
    ] {
        let mut all = vec!["--backend", "file", "--backend-dir=/nonexistent"];
        all.extend(arguments);
        let said = fails(KG, &all);
        assert!(said.contains("/nonexistent"), "{arguments:?}: {said}");
    }
}

#[test]
fn help_version_and_completion_answer_on_stdout() {
    let answer = |arguments: &[&str]| {
        let output = Command::new(KG).args(arguments).output().unwrap();
        assert!(output.status.success() && output.stderr.is_empty(), "{arguments:?}: {}", said(&output));
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(answer(&["-h"]).lines().next(), answer(&["--help"]).lines().next());
    for arguments in [&["version"][..], &["--version"], &["--version", "--cni=false"]] {
        assert_eq!(answer(arguments), format!("{}\n", env!("CARGO_PKG_VERSION")), "{arguments:?}");
    }
    for shell in ["bash", "zsh", "fish", "powershell"] {
        assert!(answer(&["completion", shell]).contains("mesh-granularity"), "{shell}");
    }
    let said = fails(KG, &["completion", "cmd"]);
    assert!(said.contains("bash") && said.contains("powershell"), "{said}");
}

#[test]
fn help_of_each_command_of_kg_shows_the_flags_that_it_uses_and_all_are_taken() {
    let help = |arguments: &[&str]| {
        let output = Command::new(KG).args(arguments).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", said(&output));
        String::from_utf8(output.stdout).unwrap()
    };
    let uninstall = help(&["uninstall", "--help"]);
    for used in ["--backend-dir", "--cni-path", "--cni-run-dir", "--hostname", "--interface", "--kubeconfig"]
    {
        assert!(uninstall.contains(used), "{used}: {uninstall}");
    }
    for unused in ["--wireguard", "--topology-label", "--create-interface"] {
        assert!(!uninstall.contains(unused), "{unused}: {uninstall}");
    }
    let webhook = help(&["webhook", "--help"]);
    assert!(webhook.contains("--log-level") && webhook.contains("--cert-file"), "{webhook}");
    for unused in ["--interface", "--kubeconfig", "--hostname"] {
        assert!(!webhook.contains(unused), "{unused}: {webhook}");
    }
    // Where nothing is done, with the agent's own arguments on either side.
    for arguments in [
        &["--wireguard=kernel", "--interface=wg0", "version"][..],
        &["version", "--wireguard=kernel", "--interface=wg0", "--topology-label=region"],
    ] {
        assert_eq!(help(arguments), format!("{}\n", env!("CARGO_PKG_VERSION")), "{arguments:?}");
    }
    let agent = help(&["--help"]);
    let compatibility = agent.split("--compatibility").nth(1).unwrap().split("--encapsulate").next().unwrap();
    assert!(compatibility.contains("flannel") && !compatibility.contains("No other CNI"), "{compatibility}");
}

#[test]
fn who_reads_kgctl_may_stop_early() {
    let (reader, writer) = std::io::pipe().unwrap();
    // `| head` does this once it has its lines.
    drop(reader);
    let output = Command::new(KGCTL).args(["completion", "bash"]).stdout(writer).output().unwrap();
    assert_eq!((output.status.code(), said(&output)), (Some(0), String::new()));
}

#[test]
fn logs_are_json_lines_on_stdout_and_none_means_none() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("n2.yaml"), NODE.replace("n1", "n2")).unwrap();
    let soon = "timeout --preserve-status 3";
    let failed = ends_after("ERROR", 0);
    let Some((_, loud)) = isolated(directory.path(), &failed, "--listen 127.0.0.1:0") else { return };
    let lines: Vec<serde_json::Value> = loud
        .lines()
        .filter(|line| line.starts_with('{'))
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert!(lines.iter().any(|line| line["level"] == "INFO" && line["message"] == "kg started"), "{loud}");
    assert!(lines.iter().any(|line| line["level"] == "ERROR"), "{loud}");
    let Some((_, quiet)) = isolated(directory.path(), soon, "--listen 127.0.0.1:0 --log-level none") else {
        return;
    };
    assert!(!quiet.contains("level"), "{quiet}");
    let Some((_, errors)) = isolated(directory.path(), &failed, "--listen 127.0.0.1:0 --log-level error")
    else {
        return;
    };
    assert!(errors.contains("ERROR") && !errors.contains("INFO") && !errors.contains("WARN"), "{errors}");
}

#[test]
fn rubbish_to_status_connect_and_webhook_is_named() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("n1.yaml"), NODE).unwrap();
    let place = directory.path().to_str().unwrap();
    for (arguments, words) in [
        (&["status", "--agent=ftp://x"][..], "http://"),
        (&["status", "--agent=http://127.0.0.1:1"], "does not answer"),
        (&["status", "nobody"], "nobody"),
        (&["status", "-o", "toml"], "table, wide, json, yaml, name"),
        (&["status", "--mesh-granularity=x"], "location, full, cross, auto"),
        (&["connect", "--mtu=1"], "576..=65535"),
        (&["connect", "--resync-period=30"], "30s"),
        (&["connect", "--resync-period=0"], "not longer than zero"),
        (&["connect", "--interface=a/b"], "without slash, colon and white space"),
        (&["status", "--agent", "http://127.0.0.1:1107"], "write --agent=http://127.0.0.1:1107"),
        (&["connect", "--persistent-keepalive=70000"], "0..=65535"),
        (&["connect", "--allowed-ip=x"], "\"x\" is not a valid prefix; write for example 10.4.0.0/16"),
        (&["connect", "--allowed-ip=10.5.0.1"], "10.5.0.1 has no prefix length; write 10.5.0.1/32"),
        (&["connect", "--allowed-ips=10.43.0.0"], "10.43.0.0 has no prefix length"),
        (&["connect", "x", "--private-key", place], place),
    ] {
        let said = fails(KGCTL, &[&["--backend=file", "--backend-dir", place], arguments].concat());
        assert!(said.contains(words), "{arguments:?}: {said}");
    }
    let refused = fails(KG, &["webhook"]);
    assert!(refused.contains("--cert-file") && refused.contains("--secret"), "{refused}");
    assert!(fails(KG, &["webhook", "--cert-file=x", "--key-file=y", "--listen=8443"]).contains(":1107"));
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
        (
            &["graph", "--backend=file", &from_files, "--mesh-granularity=none"],
            &["--mesh-granularity", "location, full, cross, auto"],
        ),
        // Before anything is read.
        (
            &["graph", "--mesh-granularity=none", "--kubeconfig=/nonexistent"],
            &["location, full, cross, auto"],
        ),
        (&["showconf", "node", "n1", "--port=0"], &["--port", "1 to 65535"]),
        (&["graph", "--port=0"], &["--port", "1 to 65535"]),
        (&["peer-cluster", "--port=1"], &["--port"]),
        (&["connectivity-test", "--outside=example.com:443"], &["--outside", "192.0.2.80:443", "not a name"]),
        (&["showconf", "peer", "p", "--backend=file", &from_files], &["no valid peers", "kgctl status"]),
        (&["uninstall", "--subnet=10.0.0.0/8"], &["--subnet"]),
        (&["graph", "--request-timeout=soon"], &["--request-timeout", "30s"]),
        (&["graph", "--as-group=g"], &["--as <USER>"]),
        (&["peer-cluster"], &["--remote-kubeconfig", "--remote-context"]),
        (&["monitor", "--reason=x"], &["--reason", "possible values are", "too_big"]),
        (&["graph", "--subnet=10.4.0.0"], &["--subnet", "auto", "10.4.0.0/16"]),
        (&["graph", "--topology-label="], &["--topology-label", "topology.kubernetes.io/region"]),
        (&["graph", "more"], &["more"]),
        (&["showconf"], &["node", "peer"]),
        (&["showconf", "cluster"], &["cluster"]),
        (&["showconf", "node"], &["<NAME>"]),
        (&["showconf", "node", "n1", "-o", "toml"], &["--output", "wireguard, yaml, json"]),
        (&["showconf", "peer", "p", "--as-peer", "--allowed-ips=x"], &["--allowed-ips", "prefix"]),
        (&["showconf", "node", "n1", "--as-peer", "--allowed-ips=10.0.0.1"], &["--allowed-ips", "prefix"]),
        (&["trace", "--src=a1", "--dst=10.42.1.2"], &["--src", "\"a1\" is not an IP address", "10.42.1.2"]),
        (&["trace", "--src=10.42.1.2", "--dst=10.42.1.3/32"], &["--dst", "write 10.42.1.3"]),
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
        (whole(user, "{name: other, cluster: {}}"), "cluster \"k\" does not exist; choose one of: other"),
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
    for program in [&[KG][..], &[KGCTL, "graph"], &[KGCTL, "status"]] {
        let fails_with = |arguments: &[&str]| fails(program[0], &[&program[1..], arguments].concat());
        assert!(fails_with(&["--backend=file"]).contains("--backend-dir"), "{program:?}");
        // Else the objects of some API server would be taken for those of the directory.
        let said = fails_with(&["--backend-dir=/nonexistent", "--kubeconfig=/nonexistent"]);
        assert!(
            said.contains("write --backend=file") && !said.contains("No such file"),
            "{program:?}: {said}"
        );
    }
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

/// For [`isolated`]: ends the agent `seconds` after its output contains `text`, or after 15 s.
fn ends_after(text: &str, seconds: u32) -> String {
    format!(
        r#"sh -c 'text=$1; shift; "$@" > /run/said 2>&1 & i=0; until grep -q "$text" /run/said || [ $i = 150 ]; do sleep 0.1; i=$((i + 1)); done; sleep {seconds}; kill $!; wait $!; code=$?; cat /run/said; exit $code' after '{text}'"#
    )
}

/// Runs kg in its own mount and network namespaces, and reports in the same output what it left there.
fn isolated(directory: &Path, prefix: &str, arguments: &str) -> Option<(bool, String)> {
    if !nix::unistd::geteuid().is_root() {
        println!("kilo-skip: making namespaces needs root");
        return None;
    }
    let script = format!(
        "mount -t tmpfs lib /var/lib && mount -t tmpfs run /run && mkdir /run/wireguard && \
         mount -t sysfs sys /sys && mount -t bpf bpf /sys/fs/bpf && ip link set lo up && \
         timeout 20 {prefix} {KG} --backend file --backend-dir {} --hostname n1 {arguments}; code=$?; \
         ls -d /sys/fs/bpf/kilo 2>/dev/null && echo LEFT; ip -o link show kilo0 2>/dev/null && echo LEFT; ip link delete kilo0 2>/dev/null; exit $code",
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

/// Documented for this capability in docs/security.md. If loading works without it, the manifests need not
/// grant it. Programs are loaded in parallel, so which of them is refused first, and why, differs.
#[test]
fn without_perfmon_the_verifier_refuses_the_programs() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("n1.yaml"), NODE).unwrap();
    let drop = "setpriv --no-new-privs --inh-caps=-all --bounding-set=-all,+net_admin,+bpf,+dac_override";
    let Some((success, said)) = isolated(directory.path(), drop, "") else { return };
    let refusals = ["attempt to corrupt spilled pointer", "pointer arithmetic with it prohibited for !root"];
    assert!(!success && refusals.iter().any(|refusal| said.contains(refusal)), "{said}");
    assert!(said.contains("CAP_PERFMON"), "{said}");
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

/// The default manifest: kernel WireGuard and a read-only root.
#[test]
fn a_confined_agent_on_a_kernel_without_wireguard_says_what_to_do() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("n1.yaml"), NODE).unwrap();
    if Path::new("/sys/module/wireguard").exists() {
        println!("kilo-skip: this kernel has WireGuard");
        return;
    }
    let confined = "sh -ec 'rmdir /run/wireguard; mount -o remount,ro /run; mount --bind / /; \
         mount -o remount,bind,ro /; exec setpriv --no-new-privs --inh-caps=-all \
         --bounding-set=-all,+net_admin,+bpf,+perfmon \"$@\"' sh";
    let Some((success, said)) = isolated(directory.path(), confined, "") else { return };
    assert!(!success, "{said}");
    for words in
        ["this kernel has no WireGuard", "modprobe wireguard", "-userspace.yaml", "Read-only file system"]
    {
        assert!(said.contains(words), "{words:?}: {said}");
    }
    assert!(!said.contains("kilo0.log"), "there is no such file: {said}");
    assert!(!said.contains("LEFT"), "{said}");
}

#[test]
fn an_address_that_cannot_be_listened_on_is_named_and_nothing_is_left() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("n1.yaml"), NODE).unwrap();
    let Some((success, said)) = isolated(directory.path(), "", "--listen=192.0.2.99:1107") else { return };
    assert!(!success && said.contains("--listen 192.0.2.99:1107"), "{said}");
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
    let soon = ends_after("does not exist; check --hostname", 4);
    let Some((_, said)) = isolated(directory.path(), &soon, "--resync-period 1h") else { return };
    let lines = said.lines().filter(|line| line.contains("does not exist; check --hostname")).count();
    assert!((1..=2).contains(&lines), "{lines} times: {said}");
}

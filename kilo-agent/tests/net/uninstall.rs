//! `kg uninstall` as manifests/uninstall.yaml runs it: it refuses while an agent runs, reports what it
//! removed, and fails when something stays.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::cluster;
use crate::netns;
use crate::wait::until;

use std::{fs, path::Path, process::Command, time::Duration};

use cluster::kg;
use netns::{Agent, isolated, sh};
use serde_yaml_ng::Value;

const LIMIT: Duration = Duration::from_secs(30);
const CONF: &str = "/run/cni/10-kilo.conflist";

/// A host on which an agent has applied everything once; it may still run.
fn installed() -> Agent {
    cluster::prepare();
    sh("touch /run/xtables.lock; mkdir /run/cni /run/kilo; ip link add kube-bridge type bridge");
    let file = "/run/kilo/10-kilo.conflist";
    fs::write(file, r#"{"name":"kilo","plugins":[{"type":"bridge","bridge":"kube-bridge"}]}"#).unwrap();
    std::os::unix::fs::symlink(file, CONF).unwrap();
    cluster::write_node(2, "a", "10.42.2.0/24", false);
    let agent = Agent(kg(&[]).spawn().unwrap());
    until("the agent has put everything right", LIMIT, || {
        cluster::has_done(&[("kilo_nodes", 2)]) && !sh("ip route show 10.42.2.0/24").is_empty()
    });
    // Duplicate address detection of IPv6 may not have finished.
    cluster::settle();
    agent
}

fn stop(agent: &mut Agent) {
    sh(&format!("kill -TERM {}", agent.0.id()));
    assert!(agent.0.wait().unwrap().success());
}

/// Runs it with the capabilities and writable paths of the manifest's container.
fn uninstall(flags: &[&str]) -> (bool, String) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../manifests/uninstall.yaml");
    let text = fs::read_to_string(path).unwrap();
    let objects = text.split("\n---\n").map(|document| serde_yaml_ng::from_str::<Value>(document).unwrap());
    let daemon_set = objects.into_iter().find(|object| object["kind"] == "DaemonSet").unwrap();
    let container = &daemon_set["spec"]["template"]["spec"]["initContainers"][0];
    let list = |value: &Value, key: &str| -> Vec<String> {
        let items = value.as_sequence().unwrap().iter();
        items
            .map(|item| if key.is_empty() { item } else { &item[key] }.as_str().unwrap().to_owned())
            .collect()
    };
    let capabilities: String = list(&container["securityContext"]["capabilities"]["add"], "")
        .iter()
        .map(|capability| format!(",+{}", capability.to_lowercase()))
        .collect();
    let mut mounts = container["volumeMounts"].clone();
    // This is the API server's token.
    mounts.as_sequence_mut().unwrap().retain(|mount| mount["readOnly"] != true);
    let keep: String = list(&mounts, "mountPath")
        .iter()
        .map(|path| path.replace("/etc/cni/net.d", "/run/cni"))
        .map(|path| format!("[ -e {path} ] || touch {path}; mount --bind {path} {path}; "))
        .collect();
    let script = format!(
        "{keep} mount --bind /run/cluster /run/cluster; mount --bind / /; \
         for m in /run /var/lib /; do mount -o remount,bind,ro $m; done; \
         exec setpriv --no-new-privs --inh-caps=-all --bounding-set=-all{capabilities} \"$0\" \"$@\""
    );
    let arguments = list(&container["args"], "").into_iter().map(|flag| flag.replace("$(NODE_NAME)", "n1"));
    let output = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "sh", "-ec", &script, env!("CARGO_BIN_EXE_kg")])
        .args(arguments)
        .args(["--backend=file", "--backend-dir=/run/cluster", "--cni-path", CONF])
        .args(flags)
        .output()
        .unwrap();
    (output.status.success(), String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
}

/// The agent's state that is left.
fn left() -> String {
    sh("ls -d /sys/fs/bpf/kilo 2>/dev/null || true; ip -o link | grep -E 'kilo|kube-bridge' || true; \
        ip route show table all proto 107; ip -6 route show table all proto 107; ip rule | grep 1107 || true; \
        for d in eth0 kilo0; do for h in ingress egress; do tc filter show dev $d $h 2>/dev/null; done; done | grep kilo || true; \
        iptables-save 2>/dev/null | grep KILO || true; nft list tables | grep kilo || true; \
        ls /run/cni /run/kilo | grep conflist || true; find /var/lib/kilo -name '*.json' -o -name '*.lock'; grep -l kilo.squat.ai/key /run/cluster/*n1* || true")
}

#[test]
fn it_refuses_beside_an_agent_and_removes_everything_afterwards() {
    isolated("it_refuses_beside_an_agent_and_removes_everything_afterwards", || async {
        let mut agent = installed();
        let before = cluster::host();
        let (done, said) = uninstall(&[]);
        assert!(!done && said.contains("nothing was removed: an agent runs on this node"), "{said}");
        assert!(said.contains("already runs on this node"), "{said}");
        assert_eq!(cluster::differences(&before, &cluster::host()), "");
        stop(&mut agent);
        let (done, said) = uninstall(&[]);
        assert!(done, "{said}");
        for removed in [
            "routes, policy rules, neighbours, addresses and tunnel devices",
            "interface kilo0",
            "pinned programs and maps below /sys/fs/bpf/kilo",
            "rules of the FORWARD chains",
            "CNI configuration /run/cni/10-kilo.conflist",
            "bridge kube-bridge",
            "annotations of node n1",
        ] {
            let line = |line: &str| line.starts_with("removed: ") && line.contains(removed);
            assert!(said.lines().any(line), "{removed}: {said}");
        }
        assert_eq!(left(), "", "{said}");
        let (done, said) = uninstall(&[]);
        assert!(done && said.trim() == "removed: annotations of node n1", "there is nothing more: {said}");
    });
}

#[test]
fn the_interface_is_kept_on_request_with_its_peers() {
    isolated("the_interface_is_kept_on_request_with_its_peers", || async {
        let mut agent = installed();
        cluster::write_node(3, "b", "10.42.3.0/24", true);
        let peers =
            || sh("ip -o link show kilo0 | cut -d: -f1; wg show kilo0 allowed-ips; wg show kilo0 public-key");
        until("the peer is on the device", LIMIT, || {
            let peers = peers();
            if peers.contains("10.42.3.0/24") { Ok(()) } else { Err(peers) }
        });
        let before = peers();
        stop(&mut agent);
        let (done, said) = uninstall(&["--keep-interface"]);
        assert!(done && !said.contains("interface kilo0"), "{said}");
        assert_eq!(peers(), before);
        assert_eq!(sh("ip -o address show kilo0 scope global; ip route show dev kilo0"), "");
    });
}

#[test]
fn the_configuration_of_this_boot_is_removed_from_the_directory_that_the_agent_had() {
    isolated("the_configuration_of_this_boot_is_removed_from_the_directory_that_the_agent_had", || async {
        cluster::prepare();
        sh("mkdir /run/cni /run/elsewhere");
        let file = "/run/elsewhere/10-kilo.conflist";
        fs::write(file, r#"{"name":"kilo","plugins":[{"type":"bridge","bridge":"kube-bridge"}]}"#).unwrap();
        std::os::unix::fs::symlink(file, CONF).unwrap();
        let run = |flags: &[&str]| {
            let arguments =
                ["uninstall", "--remove-cni", "--keep-annotations", "--hostname=n1", "--cni-path", CONF];
            let output = Command::new(env!("CARGO_BIN_EXE_kg")).args(arguments).args(flags).output().unwrap();
            (
                output.status.success(),
                String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned(),
            )
        };
        let (done, said) = run(&["--backend-dir=/run/cluster"]);
        assert!(!done && said.contains("write --backend=file") && Path::new(CONF).exists(), "{said}");
        let (done, said) = run(&["--cni-run-dir=/run/elsewhere"]);
        assert!(done && said.contains(&format!("CNI configuration {file}")), "{said}");
        assert_eq!(sh("ls /run/cni /run/elsewhere | grep conflist || true"), "", "{said}");
    });
}

#[test]
fn what_cannot_be_removed_is_named_and_it_fails() {
    isolated("what_cannot_be_removed_is_named_and_it_fails", || async {
        let mut agent = installed();
        stop(&mut agent);
        sh("mkdir /sys/fs/bpf/kilo/busy; mount -t tmpfs busy /sys/fs/bpf/kilo/busy");
        let (done, said) = uninstall(&[]);
        assert!(!done && said.contains("not everything could be removed:\n/sys/fs/bpf/kilo: "), "{said}");
        assert!(said.contains("removed: interface kilo0"), "the rest is removed all the same: {said}");
        sh("umount /sys/fs/bpf/kilo/busy");
        let (done, said) = uninstall(&[]);
        assert!(done, "{said}");
        assert_eq!(left(), "", "{said}");
    });
}

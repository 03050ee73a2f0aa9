//! `--iptables-forward-rules` with the host's real iptables: packets between
//! two namespaces through a third whose FORWARD policy is DROP.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::netns;

use std::{
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use ipnet::IpNet;
use kilo_host::firewall::forward::{self, Forward};
use netns::{isolated, sh, succeeds};
use serde_yaml_ng::Value;

const POD: &str =
    "ip netns exec pod ping -c 1 -W 1 192.0.2.2 && ip netns exec pod ping -c 1 -W 1 2001:db8::2";
const OTHER: &str = "ip netns exec outside ping -c 1 -W 1 10.99.0.2";

/// Sets up a pod and an outside host, with this namespace between them.
fn build() {
    sh(
        "mkdir -p /run/netns; ip link set lo up; sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1",
    );
    for (name, own, other, prefixes) in [
        ("pod", "10.42.1.1/24 fd00:42:1::1/64", "10.42.1.2/24 fd00:42:1::2/64", "10.42.1.1 fd00:42:1::1"),
        ("outside", "192.0.2.1/24 2001:db8::1/64", "192.0.2.2/24 2001:db8::2/64", "192.0.2.1 2001:db8::1"),
        ("other", "10.99.0.1/24", "10.99.0.2/24", "10.99.0.1"),
    ] {
        sh(&format!(
            "ip netns add {name}; ip link add {name} type veth peer name eth0 netns {name}; ip link set {name} up; \
             ip -n {name} link set eth0 up; for a in {own}; do ip address add $a dev {name} $(echo $a | grep -q : && echo nodad || true); done; \
             for a in {other}; do ip -n {name} address add $a dev eth0 $(echo $a | grep -q : && echo nodad || true); done; \
             for a in {prefixes}; do ip -n {name} route add default via $a; done"
        ));
    }
    let deadline = Instant::now() + Duration::from_secs(5);
    while !succeeds(POD) {
        assert!(Instant::now() < deadline, "forwarding does not work without rules");
    }
}

fn prefixes(list: &[&str]) -> Vec<IpNet> {
    list.iter().map(|prefix| prefix.parse().unwrap()).collect()
}

async fn forwards_as_configured(flavour: &str) {
    build();
    let policy = |policy: &str| {
        sh(&format!("iptables{flavour} -P FORWARD {policy}; ip6tables{flavour} -P FORWARD {policy}"));
    };
    let pods = prefixes(&["10.42.1.0/24", "fd00:42:1::/64"]);
    let (start, later) = (Instant::now(), |seconds| Duration::from_secs(seconds));
    let mut rules = Forward::default();

    policy("DROP");
    assert_eq!(rules.apply(&[], start).await.unwrap(), 0, "not asked for: nothing is written");
    assert!(!succeeds(POD), "the policy drops");
    assert_eq!(rules.apply(&pods, start).await.unwrap() % 2, 0, "both families");
    assert!(succeeds(POD), "{}", sh(&format!("iptables{flavour}-save; ip6tables{flavour}-save")));
    assert!(!succeeds(OTHER), "an address that no pod of this node has stays under the policy");
    assert_eq!(rules.apply(&pods, start + later(60)).await.unwrap(), 0, "nothing to do, nothing written");

    // The chain is flushed, and a jump to ours is added a second time.
    sh(&format!("iptables{flavour} -F FORWARD; ip6tables{flavour} -A FORWARD -j {}", forward::CHAIN));
    assert_eq!(rules.apply(&pods, start + later(61)).await.unwrap(), 0, "not looked at every time");
    assert_eq!(rules.apply(&pods, start + later(120)).await.unwrap(), 2);
    for family in ["iptables", "ip6tables"] {
        let there = sh(&format!("{family}{flavour} -S"));
        assert_eq!(there.matches("-A FORWARD -j KILO-FORWARD").count(), 1, "{there}");
        assert_eq!(there.matches("-A KILO-FORWARD").count(), 2, "{there}");
    }
    assert!(succeeds(POD));

    let moved = prefixes(&["10.43.1.0/24", "fd00:43:1::/64"]);
    rules.apply(&moved, start + later(120)).await.unwrap();
    assert!(!succeeds(POD), "rules of a pod CIDR that is no longer ours are gone");
    sh(&format!("iptables{flavour} -A FORWARD -s 203.0.113.0/24 -j ACCEPT"));
    forward::remove().await.unwrap();
    let left = sh(&format!("iptables{flavour} -S; ip6tables{flavour} -S"));
    assert!(!left.contains("KILO"), "{left}");
    assert!(left.contains("203.0.113.0/24"), "other people's rules stay: {left}");
    assert!(left.contains("-P FORWARD DROP"), "{left}");
    assert_eq!(forward::remove().await.unwrap(), 0);
}

#[test]
fn pods_pass_a_forward_policy_drop_of_nftables_iptables() {
    isolated("pods_pass_a_forward_policy_drop_of_nftables_iptables", || forwards_as_configured("-nft"));
}

#[test]
fn pods_pass_a_forward_policy_drop_of_legacy_iptables() {
    isolated("pods_pass_a_forward_policy_drop_of_legacy_iptables", || async {
        if !succeeds("iptables-legacy -S && ip6tables-legacy -S") {
            println!("kilo-skip: this kernel has no legacy iptables");
            return;
        }
        forwards_as_configured("-legacy").await;
    });
}

#[test]
fn a_host_without_iptables_is_reported_with_the_package_that_is_missing() {
    isolated("a_host_without_iptables_is_reported_with_the_package_that_is_missing", || async {
        // SAFETY: the process is this test's own, no other thread reads the environment.
        unsafe { std::env::set_var("PATH", "/nonexistent") };
        let refused =
            Forward::default().apply(&prefixes(&["10.42.1.0/24"]), Instant::now()).await.unwrap_err();
        assert!(refused.to_string().contains("install the package iptables"), "{refused}");
        assert_eq!(refused.label(), "iptables");
        assert_eq!(forward::remove().await.unwrap(), 0, "nothing can be there");
    });
}

const CONFINED: &str = "KILO_TEST_CONFINED";

fn strings(list: &Value) -> Vec<&str> {
    list.as_sequence().unwrap().iter().map(|item| item.as_str().unwrap()).collect()
}

/// Arguments, capabilities and writable host paths that kubeadm's DaemonSet and the component forward-rules
/// give the agent.
fn granted() -> (Vec<String>, Vec<String>, Vec<String>) {
    let manifests = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../manifests"));
    let read = |name: &str| std::fs::read_to_string(manifests.join(name)).unwrap();
    let documents = read("kilo-kubeadm.yaml");
    let daemon_set = documents
        .split("\n---\n")
        .map(|document| serde_yaml_ng::from_str::<Value>(document).unwrap())
        .find(|object| object["kind"] == "DaemonSet")
        .unwrap();
    let capabilities =
        &daemon_set["spec"]["template"]["spec"]["containers"][0]["securityContext"]["capabilities"]["add"];
    let mut capabilities: Vec<String> = strings(capabilities).into_iter().map(str::to_lowercase).collect();
    let component: Value =
        serde_yaml_ng::from_str(&read("components/forward-rules/kustomization.yaml")).unwrap();
    let patch: Value = serde_yaml_ng::from_str(component["patches"][0]["patch"].as_str().unwrap()).unwrap();
    let (mut arguments, mut paths) = (Vec::new(), Vec::new());
    for operation in patch.as_sequence().unwrap() {
        let (path, value) = (operation["path"].as_str().unwrap(), &operation["value"]);
        match path.rsplit('/').nth(1).unwrap() {
            "args" => arguments.push(value.as_str().unwrap().to_owned()),
            "add" => capabilities.push(value.as_str().unwrap().to_lowercase()),
            "volumeMounts" => paths.push(value["mountPath"].as_str().unwrap().to_owned()),
            "volumes" => assert_eq!(value["hostPath"]["path"].as_str(), paths.last().map(String::as_str)),
            other => panic!("{other}: {path}"),
        }
    }
    (arguments, capabilities, paths)
}

/// Writes the rules in a process with these capabilities and a read-only root except for these files;
/// returns its result and output.
fn confined(test: &str, capabilities: &[String], writable: &[String]) -> (bool, String) {
    let capabilities: String = capabilities.iter().map(|capability| format!(",+{capability}")).collect();
    let keep: String =
        writable.iter().map(|path| format!("touch {path}; mount --bind {path} {path}; ")).collect();
    let script = format!(
        "rm -f /run/xtables.lock; {keep} mount -o remount,bind,ro /run; mount --bind / /; mount -o remount,bind,ro /; \
         exec setpriv --no-new-privs --inh-caps=-all --bounding-set=-all{capabilities} \"$0\" \"$@\""
    );
    let output = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "sh", "-ec", &script])
        .arg(std::env::current_exe().unwrap())
        .args([netns::own_name(test).as_str(), "--exact", "--nocapture", "--test-threads=1"])
        .env(CONFINED, "1")
        .output()
        .unwrap();
    (output.status.success(), String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
}

#[test]
fn the_component_grants_what_legacy_tables_need_of_a_confined_agent() {
    const NAME: &str = "the_component_grants_what_legacy_tables_need_of_a_confined_agent";
    isolated(NAME, || async {
        let pods = prefixes(&["10.42.1.0/24", "fd00:42:1::/64"]);
        if std::env::var_os(CONFINED).is_some() {
            Forward::default().apply(&pods, Instant::now()).await.unwrap();
            return;
        }
        if !succeeds("iptables-legacy -S && ip6tables-legacy -S") {
            println!("kilo-skip: this kernel has no legacy iptables");
            return;
        }
        // Like /run on a host, below which the container's own root is read-only.
        sh("mount -t tmpfs run /run; iptables-legacy -P FORWARD DROP; ip6tables-legacy -P FORWARD DROP");
        let (arguments, capabilities, paths) = granted();
        assert_eq!(arguments, ["--iptables-forward-rules"]);
        assert!(!confined(NAME, &capabilities, &[]).0, "legacy tables need the lock");
        let fewer: Vec<_> = capabilities.iter().filter(|name| *name != "net_raw").cloned().collect();
        assert!(!confined(NAME, &fewer, &paths).0, "legacy tables need a raw socket");
        let (done, said) = confined(NAME, &capabilities, &paths);
        assert!(done, "{said}");
        for family in ["iptables-legacy", "ip6tables-legacy", "iptables-nft", "ip6tables-nft"] {
            let there = sh(&format!("{family} -S"));
            assert_eq!(there.matches("-A KILO-FORWARD").count(), 2, "{family}: {there}");
        }
    });
}

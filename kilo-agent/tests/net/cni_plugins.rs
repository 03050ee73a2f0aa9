//! CNI mode with Debian's plugins: a real `kg` completes the configuration that the manifest installs, and
//! bridge, host-local and portmap set up pods' interfaces.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::netns;
use crate::wait::task::until;

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use kilo_lab::plugins;
use serde_json::{Value, json};

const KG: &str = env!("CARGO_BIN_EXE_kg");

const LIMIT: Duration = Duration::from_secs(20);

/// Waits until addresses of bridge and pods answer: none does while the kernel looks for another host that
/// has it.
async fn addresses_answer() {
    let tentative =
        "for it in one two; do ip -n $it -6 address show tentative; done; ip -6 address show tentative";
    until("no address is tentative", LIMIT, async || netns::sh(tentative).trim().is_empty()).await;
}

/// The document of that kind in a manifest.
fn document(manifest: &str, kind: &str) -> Value {
    use serde::Deserialize as _;
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../manifests").join(manifest);
    let text = fs::read_to_string(path).unwrap();
    serde_yaml_ng::Deserializer::from_str(&text)
        .map(|document| Value::deserialize(document).unwrap())
        .find(|document| document["kind"] == kind)
        .unwrap()
}

/// Runs an init container's script; the container's paths are below `root`.
fn init_container(manifest: &str, name: &str, root: &Path) {
    let daemon_set = document(manifest, "DaemonSet");
    let containers = daemon_set["spec"]["template"]["spec"]["initContainers"].as_array().unwrap();
    let container = containers.iter().find(|container| container["name"] == name).unwrap();
    let mut script = container["args"][0].as_str().unwrap().to_owned();
    for path in ["/opt/cni/bin/*", "/host/", "/config/", "/var/lib/kilo/", "/k3s/", "/etc/kubernetes/"] {
        let below = root.join(path.trim_start_matches('/'));
        script = script.replace(&format!(" {path}"), &format!(" {}", below.display()));
        script = script.replace(&format!("\"{path}"), &format!("\"{}", below.display()));
        script = script.replace(&format!("={path}"), &format!("={}", below.display()));
    }
    netns::sh(&script);
}

/// Creates a node's files as they are before the init container `install-cni`; returns the path that it
/// writes.
fn node_directories(root: &Path) -> PathBuf {
    for directory in ["opt/cni/bin", "host/opt/cni/bin", "host/etc/cni/net.d", "config", "var/lib/kilo"] {
        fs::create_dir_all(root.join(directory)).unwrap();
    }
    let config = document("kilo-kubeadm.yaml", "ConfigMap");
    fs::write(root.join("config/cni-conf.json"), config["data"]["cni-conf.json"].as_str().unwrap()).unwrap();
    fs::write(root.join("opt/cni/bin/bridge"), "a plugin").unwrap();
    root.join("host/etc/cni/net.d/10-kilo.conflist")
}

/// A CNI plugin that only reports its version.
fn plugin_of(path: &Path, version: &str, mark: &str) {
    let script = format!("#!/bin/sh\n# {mark}\necho 'CNI bridge plugin {version}' >&2\n");
    fs::write(path, script).unwrap();
    netns::sh(&format!("chmod 755 {}", path.display()));
}

#[test]
fn the_init_container_installs_plugins_and_leaves_newer_ones_alone() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    node_directories(root);
    let (ours, theirs) = (root.join("opt/cni/bin/bridge"), root.join("host/opt/cni/bin/bridge"));
    let install = || {
        init_container("kilo-kubeadm.yaml", "install-cni", root);
        fs::read_to_string(&theirs).unwrap()
    };
    plugin_of(&ours, "v1.9.0", "ours");
    assert!(install().contains("ours"), "where there is none");
    for (version, stays) in
        [("v1.10.0", true), ("v1.9.0", true), ("v1.1.1", false), ("v0.9.1", false), ("version unknown", true)]
    {
        plugin_of(&theirs, version, "theirs");
        assert_eq!(install().contains("theirs"), stays, "{version}");
    }
    fs::write(&theirs, "not a program").unwrap();
    assert!(!install().contains("ours"), "what does not run here may run on the host");
    fs::remove_file(&theirs).unwrap();
    std::os::unix::fs::symlink("/usr/lib/cni/nowhere", &theirs).unwrap();
    init_container("kilo-kubeadm.yaml", "install-cni", root);
    assert!(fs::read_link(&theirs).is_ok(), "a link may lead to one on the host");
    fs::remove_file(&theirs).unwrap();
    fs::write(&theirs, "").unwrap();
    assert!(install().contains("ours"), "of a copy that did not end nothing is there");
    assert_eq!(fs::read_dir(root.join("host/opt/cni/bin")).unwrap().count(), 1, "nothing is left beside it");
}

#[test]
fn the_init_container_for_k3s_finds_the_api_server() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    fs::create_dir_all(root.join("k3s")).unwrap();
    fs::create_dir_all(root.join("etc/kubernetes")).unwrap();
    let kubelet = "apiVersion: v1\nclusters:\n- cluster:\n    server: https://127.0.0.1:6444\n    \
                   certificate-authority: /var/lib/rancher/k3s/agent/server-ca.crt\n  name: local\n";
    fs::write(root.join("k3s/kubelet.kubeconfig"), kubelet).unwrap();
    init_container("kilo-k3s.yaml", "kubeconfig", root);
    let config = kube::config::Kubeconfig::read_from(root.join("etc/kubernetes/kubeconfig")).unwrap();
    let cluster = config.clusters[0].cluster.as_ref().unwrap();
    assert_eq!(cluster.server.as_deref(), Some("https://127.0.0.1:6444"));
    let secrets = "/var/run/secrets/kubernetes.io/serviceaccount";
    assert_eq!(cluster.certificate_authority, Some(format!("{secrets}/ca.crt")));
    let user = config.auth_infos[0].auth_info.as_ref().unwrap();
    assert_eq!(user.token_file, Some(format!("{secrets}/token")));
    assert_eq!(config.current_context.as_deref(), Some("kilo"));
}

/// Kills the agent when the test ends.
struct Agent(Child);

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Addresses in a plugin's result, without prefix length.
fn addresses(result: &Value) -> Vec<String> {
    let ips = result["ips"].as_array().unwrap();
    ips.iter().map(|ip| ip["address"].as_str().unwrap().split('/').next().unwrap().to_owned()).collect()
}

#[test]
fn pods_of_both_families_are_made_from_the_configuration_kg_completes() {
    if !Path::new(plugins::PLUGINS).join("bridge").exists() {
        println!("kilo-skip: containernetworking-plugins is not installed");
        return;
    }
    netns::isolated("pods_of_both_families_are_made_from_the_configuration_kg_completes", || async {
        netns::sh(
            "mount -t tmpfs lib /var/lib; mkdir -p /run/wireguard /run/netns; \
             mount -t sysfs sys /sys; mount -t bpf bpf /sys/fs/bpf; \
             ip link set lo up; ip link add eth0 type veth peer name other; ip link set eth0 up; ip link set other up; \
             ip address add 10.1.0.11/24 dev eth0; ip route add default via 10.1.0.1 dev eth0",
        );
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        let conf = node_directories(root);
        fs::create_dir(root.join("cluster")).unwrap();
        let node = "apiVersion: v1\nkind: Node\nmetadata: {name: n1}\n\
                    spec: {podCIDR: 10.42.1.0/24, podCIDRs: [10.42.1.0/24, 'fd00:42:1::/64']}\n";
        fs::write(root.join("cluster/n1.yaml"), node).unwrap();

        // First garbage: it is reported and left alone, and fixing it suffices.
        fs::write(&conf, "{\"plugins\": 3}").unwrap();
        let log = root.join("kg.log");
        let _agent = Agent(
            Command::new(KG)
                .args(["--backend=file", "--hostname=n1", "--resync-period=1s"])
                .arg(format!("--backend-dir={}", root.join("cluster").display()))
                .arg(format!("--cni-path={}", conf.display()))
                .stdout(fs::File::create(&log).unwrap())
                .stderr(Stdio::inherit())
                .spawn()
                .unwrap(),
        );
        until("the rubbish is named", LIMIT, async || {
            let log = fs::read_to_string(&log).unwrap();
            log.contains("it has no list of plugins") && log.contains("10-kilo.conflist")
        })
        .await;
        assert_eq!(fs::read_to_string(&conf).unwrap(), "{\"plugins\": 3}");
        fs::copy(root.join("config/cni-conf.json"), &conf).unwrap();
        until("kg writes the ranges", LIMIT, async || {
            fs::read_to_string(&conf).unwrap().contains("fd00:42:1::/64")
        })
        .await;
        let list = fs::read_to_string(&conf).unwrap();

        netns::sh("ip netns add one; ip netns add two");
        let pod = |id| plugins::Pod {
            id,
            netns: if id == "one" { "/run/netns/one" } else { "/run/netns/two" },
            port_mappings: &[],
        };
        let here = |program: &Path| Command::new(program);
        let one = plugins::add(&list, pod("one"), here).unwrap();
        let two = plugins::add(&list, pod("two"), here).unwrap();
        assert_eq!(addresses(&one), ["10.42.1.2", "fd00:42:1::2"]);
        assert_eq!(addresses(&two), ["10.42.1.3", "fd00:42:1::3"]);
        let gateways: Vec<_> =
            one["ips"].as_array().unwrap().iter().map(|ip| ip["gateway"].clone()).collect();
        assert_eq!(gateways, [json!("10.42.1.1"), json!("fd00:42:1::1")]);

        let shown = netns::sh("ip -n one address show dev eth0");
        assert!(shown.contains("10.42.1.2/24") && shown.contains("fd00:42:1::2/64"), "{shown}");
        assert!(shown.contains("mtu 1420"), "{shown}");
        assert!(netns::sh("ip -n one route show default").contains("via 10.42.1.1"));
        assert!(netns::sh("ip -n one -6 route show default").contains("via fd00:42:1::1"));
        let bridge = netns::sh("ip address show dev kube-bridge");
        assert!(bridge.contains("10.42.1.1/24") && bridge.contains("fd00:42:1::1/64"), "{bridge}");
        addresses_answer().await;
        for target in ["10.42.1.1", "10.42.1.3", "fd00:42:1::1", "fd00:42:1::3"] {
            netns::sh(&format!("ip netns exec one ping -n -c 1 -W 5 {target}"));
        }

        plugins::delete(&list, pod("one"), &one, here).unwrap();
        assert_eq!(netns::sh("ip -n one -o link show dev eth0 2>/dev/null || true"), "");
        let kept = netns::sh("ls /var/lib/cni/networks/kilo");
        assert!(!kept.contains("10.42.1.2\n") && kept.contains("10.42.1.3\n"), "{kept}");
        plugins::delete(&list, pod("one"), &one, here).expect("deleting again is not an error");

        // host-local cycles through its range before it assigns an address again.
        let ports = [json!({ "hostPort": 8080, "containerPort": 80, "protocol": "tcp" })];
        let with_port = plugins::Pod { port_mappings: &ports, ..pod("one") };
        let one = plugins::add(&list, with_port, here).unwrap();
        assert_eq!(addresses(&one), ["10.42.1.4", "fd00:42:1::4"]);
        assert!(netns::sh("iptables -t nat -S; ip6tables -t nat -S").contains("10.42.1.4:80"));
        plugins::delete(&list, with_port, &one, here).unwrap();
        assert!(!netns::sh("iptables -t nat -S; ip6tables -t nat -S").contains("10.42.1.4:80"));
    });
}

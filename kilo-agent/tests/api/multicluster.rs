//! Two clusters, each with an API server, an agent and a pod: connected by `kgctl peer-cluster`, with a
//! service of each mirrored in the other.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::api;
use crate::netns;
use crate::wait::until;

use std::{
    collections::BTreeMap,
    path::PathBuf,
    process::{Child, Command},
    time::Duration,
};

use k8s_openapi::api::core::v1 as core;
use kilo_agent::timestamp::Timestamp;
use kilo_core::{
    objects::peer::{Peer, PeerSpec},
    wireguard::key::PublicKey,
};
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, ListParams, PostParams},
};
use netns::{isolated, sh, succeeds};
use serde::Deserialize as _;
use serde_json::{Value, json};

use api::{ADMIN, ApiServer, apply, apply_crds};

const LIMIT: Duration = Duration::from_secs(15);

/// A cluster of one node `nN` with one pod in the namespace `pN`.
struct Cluster {
    server: ApiServer,
    client: Client,
    number: u8,
    processes: Vec<Child>,
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for process in &mut self.processes {
            let _ = process.kill();
            let _ = process.wait();
        }
        // The userspace WireGuard process ends with its interface.
        succeeds(&format!("ip -n n{} link delete kilo0", self.number));
    }
}

fn services(number: u8) -> String {
    format!("10.9{number}.0.0/16")
}

fn pod(number: u8) -> String {
    format!("10.4{number}.0.2")
}

impl Cluster {
    async fn start(number: u8) -> Option<Self> {
        let server = ApiServer::start_with_services(&services(number)).await?;
        let client = server.client(ADMIN).await;
        apply_crds(&client).await;
        let node = json!({
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": format!("n{number}")},
            "spec": {"podCIDR": format!("10.4{number}.0.0/24")},
        });
        let nodes: Api<core::Node> = Api::all(client.clone());
        nodes.create(&PostParams::default(), &serde_json::from_value(node).unwrap()).await.unwrap();
        let mut cluster = Self { server, client, number, processes: Vec::new() };
        cluster.network();
        cluster.run();
        until("the node's key", LIMIT, || {
            cluster.kgctl(&["showconf", "node", &format!("n{number}")]).is_some()
        });
        Some(cluster)
    }

    /// The node on the bridge, its pod behind it, and its API server reachable through the bridge.
    fn network(&self) {
        let (n, port) = (self.number, self.server.port());
        sh(&format!(
            "ip netns add n{n}; ip netns add p{n}; ip link add b{n} type veth peer name eth0 netns n{n}
             ip link set b{n} master br0 up; ip -n n{n} link set lo up; ip -n n{n} link set eth0 up
             ip -n n{n} addr add 192.0.2.{n}/24 dev eth0; ip -n n{n} addr add 10.{n}.0.1/24 dev eth0
             ip -n n{n} route add default via 192.0.2.254
             ip -n n{n} link add pod type veth peer name eth0 netns p{n}; ip -n n{n} link set pod up
             ip -n n{n} addr add 10.4{n}.0.1/24 dev pod; ip -n p{n} link set lo up
             ip -n p{n} link set eth0 up; ip -n p{n} addr add {pod}/24 dev eth0
             ip -n p{n} route add default via 10.4{n}.0.1
             ip netns exec n{n} sysctl -qw net.ipv4.ip_forward=1
             nft 'add rule ip api pre tcp dport {port} dnat to 127.0.0.1'
             ip netns exec n{n} nft 'add table ip proxy; add chain ip proxy pre {{ type nat hook prerouting priority -100; }}'",
            pod = pod(n)
        ));
    }

    fn kubeconfig(&self) -> PathBuf {
        self.server.kubeconfig(ADMIN, self.server.port())
    }

    /// Runs the agent in the node's namespace, and a server in the pod that replies with its client's
    /// address.
    fn run(&mut self) {
        let n = self.number;
        let text = std::fs::read_to_string(self.kubeconfig()).unwrap();
        let remote = text.replace(
            "server: https://127.0.0.1",
            "tls-server-name: 127.0.0.1\n    server: https://192.0.2.254",
        );
        let kubeconfig = self.server.file("remote.kubeconfig");
        std::fs::write(&kubeconfig, remote).unwrap();
        let agent = format!(
            "mount -t tmpfs lib /var/lib; mount -t tmpfs wg /run/wireguard; mount -t bpf bpf /sys/fs/bpf
             exec {} --kubeconfig {} --hostname n{n} --resync-period 1s --cni=false --wireguard userspace \
             --subnet 10.20{n}.0.0/16 --service-cidr {} --listen 127.0.0.1:1107",
            env!("CARGO_BIN_EXE_kg"),
            kubeconfig.display(),
            services(n)
        );
        let spawn = |namespace: &str, line: &str| {
            Command::new("ip").args(["netns", "exec", namespace, "sh", "-ec", line]).spawn().unwrap()
        };
        self.processes.push(spawn(&format!("n{n}"), &agent));
        let server =
            "exec socat TCP-LISTEN:8080,fork,reuseaddr SYSTEM:'echo cluster $CLUSTER saw $SOCAT_PEERADDR'";
        self.processes.push(spawn(&format!("p{n}"), &format!("export CLUSTER={n}; {server}")));
    }

    fn kgctl(&self, arguments: &[&str]) -> Option<String> {
        let output = Command::new(env!("CARGO_BIN_EXE_kgctl"))
            .arg("--kubeconfig")
            .arg(self.kubeconfig())
            .args(arguments)
            .output()
            .unwrap();
        output.status.success().then(|| String::from_utf8(output.stdout).unwrap())
    }

    /// The Peer objects by name.
    async fn peers(&self) -> BTreeMap<String, Peer> {
        let list = Api::<Peer>::all(self.client.clone()).list(&ListParams::default()).await.unwrap();
        list.into_iter().map(|peer| (peer.name_any(), peer)).collect()
    }

    /// The Peer objects without the status, which agents may write at any time.
    async fn written(&self) -> Vec<Value> {
        let mut peers = self.peers().await.into_values().collect::<Vec<_>>();
        for peer in &mut peers {
            peer.status = None;
            peer.metadata.resource_version = None;
            let managers = peer.metadata.managed_fields.as_mut().unwrap();
            managers.retain(|manager| manager.subresource.as_deref() != Some("status"));
            // Kubernetes 1.20 names no subresource.
            for fields in
                managers.iter_mut().filter_map(|manager| manager.fields_v1.as_mut()?.0.as_object_mut())
            {
                fields.remove("f:status");
            }
        }
        peers.into_iter().map(|peer| serde_json::to_value(peer).unwrap()).collect()
    }

    /// Applies the object; returns the API server's version of it.
    async fn apply(&self, object: Value) -> Value {
        let object = serde_json::from_value(object).unwrap();
        serde_json::to_value(apply(&self.client, &object, false).await.unwrap()).unwrap()
    }

    /// Creates a Service without selector, its Endpoints, and a rule for them as kube-proxy would. Returns
    /// the ClusterIP.
    async fn service(&self, name: &str, address: &str, port: u16) -> String {
        let metadata = json!({"name": name, "namespace": "default"});
        let ports = json!([{"port": 80, "protocol": "TCP"}]);
        let service =
            json!({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"ports": ports}});
        let made = self.apply(service).await;
        let subsets = json!([{"addresses": [{"ip": address}], "ports": [{"port": port, "protocol": "TCP"}]}]);
        let endpoints =
            json!({"apiVersion": "v1", "kind": "Endpoints", "metadata": metadata, "subsets": subsets});
        let made_endpoints = self.apply(endpoints).await;
        let cluster_ip = made["spec"]["clusterIP"].as_str().unwrap().to_owned();
        let subset = &made_endpoints["subsets"][0];
        let (to, port) = (subset["addresses"][0]["ip"].as_str().unwrap(), &subset["ports"][0]["port"]);
        let rule = format!("add rule ip proxy pre ip daddr {cluster_ip} tcp dport 80 dnat to {to}:{port}");
        sh(&format!("ip netns exec n{} nft '{rule}'", self.number));
        cluster_ip
    }

    /// Response of a server to the pod.
    fn asks(&self, address: &str, port: u16) -> String {
        let line =
            format!("ip netns exec p{} socat -T 3 - TCP:{address}:{port},connect-timeout=3", self.number);
        sh(&format!("{line} </dev/null 2>&1 || true")).trim().to_owned()
    }
}

/// Runs `kgctl peer-cluster` for both; returns whether it succeeded, and its output.
fn peer_cluster(one: &Cluster, two: &Cluster, more: &[&str]) -> (bool, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_kgctl"))
        .args(["peer-cluster", "--name", "one", "--remote-name", "two", "--kubeconfig"])
        .arg(one.kubeconfig())
        .arg("--remote-kubeconfig")
        .arg(two.kubeconfig())
        .args(["--service-cidr", &services(1), "--remote-service-cidr", &services(2)])
        .args(more)
        .output()
        .unwrap();
    let said = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8(said).unwrap())
}

/// A node with everything that an agent would have published.
fn silent_node(name: &str, key: u8, pod_cidr: &str) -> core::Node {
    let annotations = json!({
        "kilo.squat.ai/endpoint": "192.0.2.77:51820", "kilo.squat.ai/internal-ip": "10.77.0.1/24",
        "kilo.squat.ai/key": PublicKey([key; 32]).to_string(), "kilo.squat.ai/location": "elsewhere",
        "kilo.squat.ai/last-seen": Timestamp::now().0.to_string(),
    });
    let node = json!({
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "annotations": annotations},
        "spec": {"podCIDR": pod_cidr},
    });
    serde_json::from_value(node).unwrap()
}

/// A dry run writes nothing; a real one writes the same Peers as `showconf` piped to kubectl.
async fn joins(one: &Cluster, two: &Cluster) {
    let (success, yaml) = peer_cluster(one, two, &["--dry-run"]);
    assert!(success && one.peers().await.is_empty() && two.peers().await.is_empty(), "{yaml}");
    let shown: Vec<Peer> = serde_yaml_ng::Deserializer::from_str(&yaml)
        .map(|document| Peer::deserialize(document).unwrap())
        .collect();
    for (peer, of) in shown.iter().zip([two, one]) {
        let n = of.number;
        let showconf = ["showconf", "node", &format!("n{n}"), "--as-peer", "-o", "yaml", "--allowed-ips"];
        let piped = of.kgctl(&[&showconf[..], &[&services(n)]].concat()).unwrap();
        assert_eq!(peer.spec, serde_yaml_ng::from_str::<Peer>(&piped).unwrap().spec);
    }
    let (success, said) = peer_cluster(one, two, &[]);
    assert!(success, "{said}");
    assert_eq!(said, "one: peer.kilo.squat.ai/two-n2 created\ntwo: peer.kilo.squat.ai/one-n1 created\n");
    for (peer, cluster, owner) in [(&shown[0], one, "two"), (&shown[1], two, "one")] {
        let peers = cluster.peers().await;
        let written = &peers[&peer.name_any()];
        assert_eq!((&written.spec, &written.labels()["kilo.squat.ai/cluster"][..]), (&peer.spec, owner));
    }
}

/// A second run writes nothing, later ones follow nodes that come and go, and a foreign Peer stays.
async fn follows(one: &Cluster, two: &Cluster) {
    let laptop = Peer::new(
        "laptop",
        PeerSpec {
            allowed_ips: vec!["10.66.0.1/32".to_owned()],
            endpoint: None,
            persistent_keepalive: None,
            preshared_key: None,
            public_key: PublicKey([66; 32]).to_string(),
        },
    );
    let peers: Api<Peer> = Api::all(two.client.clone());
    peers.create(&PostParams::default(), &laptop).await.unwrap();
    let before = two.written().await;
    let (success, said) = peer_cluster(one, two, &[]);
    assert!(success && said.contains("nothing to do: all 2 peers"), "{said}");
    assert_eq!(before, two.written().await, "nothing was written");
    let nodes: Api<core::Node> = Api::all(one.client.clone());
    nodes.create(&PostParams::default(), &silent_node("joined", 77, "10.77.1.0/24")).await.unwrap();
    let (success, said) = peer_cluster(one, two, &[]);
    assert!(success && said == "two: peer.kilo.squat.ai/one-joined created\n", "{said}");
    nodes.delete("joined", &DeleteParams::default()).await.unwrap();
    let (success, said) = peer_cluster(one, two, &[]);
    assert!(success && said == "two: peer.kilo.squat.ai/one-joined deleted\n", "{said}");
    assert_eq!(two.peers().await.into_keys().collect::<Vec<_>>(), ["laptop", "one-n1"]);
}

/// Overlapping ranges and duplicate keys are refused: both objects are named and nothing is written.
async fn refuses(one: &Cluster, two: &Cluster) {
    let before = (one.written().await, two.written().await);
    let nodes: Api<core::Node> = Api::all(two.client.clone());
    let (success, said) = peer_cluster(one, two, &["--remote-service-cidr", "10.91.128.0/17"]);
    assert!(!success, "{said}");
    let overlap = "10.91.0.0/16 (a service range of cluster one) overlaps 10.91.128.0/17 (a service range of cluster two)";
    assert!(said.contains(overlap), "{said}");
    nodes.create(&PostParams::default(), &silent_node("twin", 77, "10.41.0.0/25")).await.unwrap();
    let (success, said) = peer_cluster(one, two, &[]);
    let overlap = "10.41.0.0/24 (the pod CIDR of node n1 of cluster one) overlaps 10.41.0.0/25 (the pod CIDR of node twin of cluster two)";
    assert!(!success && said.contains(overlap), "{said}");
    nodes.delete("twin", &DeleteParams::default()).await.unwrap();
    let (success, said) = peer_cluster(one, one, &[]);
    assert!(
        !success
            && said.contains("node n1 of cluster one and node n1 of cluster two have the same public key"),
        "{said}"
    );
    assert_eq!(before, (one.written().await, two.written().await));
}

#[test]
fn one_command_joins_two_clusters_and_pods_and_mirrored_services_are_reached_both_ways() {
    isolated(
        "one_command_joins_two_clusters_and_pods_and_mirrored_services_are_reached_both_ways",
        two_clusters,
    );
}

async fn two_clusters() {
    sh("mkdir -p /run/wireguard /run/netns; ip link set lo up; ip link add br0 type bridge
        ip addr add 192.0.2.254/24 dev br0; ip link set br0 up; sysctl -qw net.ipv4.conf.br0.route_localnet=1
        nft 'add table ip api; add chain ip api pre { type nat hook prerouting priority -100; }'");
    let Some(one) = Cluster::start(1).await else { return };
    let Some(two) = Cluster::start(2).await else { return };
    assert!(!succeeds(&format!("ip netns exec p1 ping -c 1 -W 1 {}", pod(2))), "not connected yet");
    joins(&one, &two).await;
    for (here, there) in [(&one, &two), (&two, &one)] {
        let (n, far) = (here.number, there.number);
        let ping = format!("ip netns exec p{n} ping -c 1 -W 1 {}", pod(far));
        until("the other cluster's pod answers", LIMIT, || succeeds(&ping));
        let answer = format!("cluster {far} saw {}", pod(n));
        assert_eq!(here.asks(&pod(far), 8080), answer, "pod to pod, not masqueraded");
        let cluster_ip = there.service("important-service", &pod(far), 8080).await;
        assert_eq!(here.asks(&cluster_ip, 80), answer, "the other cluster's ClusterIP");
        let mirror = here.service("mirrored-service", &cluster_ip, 80).await;
        assert!(mirror.starts_with(&format!("10.9{n}.")), "{mirror} is of the own range");
        assert_eq!(here.asks(&mirror, 80), answer, "the own ClusterIP of the other cluster's service");
    }
    follows(&one, &two).await;
    refuses(&one, &two).await;
    let (success, said) = peer_cluster(&one, &two, &["--remove"]);
    assert!(success && said.matches(" deleted\n").count() == 2, "{said}");
    assert_eq!(two.peers().await.into_keys().collect::<Vec<_>>(), ["laptop"]);
    let ping = format!("ip netns exec p1 ping -c 1 -W 1 {}", pod(2));
    until("the other cluster's pod is gone", LIMIT, || !succeeds(&ping));
    assert!(peer_cluster(&one, &two, &["--remove"]).1.contains("nothing to do"));
}

//! `kgctl` on real API servers: recorded answers of Kilo for the same objects,
//! and two clusters that become one another's peers.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

#[path = "support/api.rs"]
mod api;
#[path = "support/dot.rs"]
mod dot;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    process::Command,
    time::{SystemTime, UNIX_EPOCH},
};

use k8s_openapi::api::core::v1 as core;
use kilo_agent::{
    backend::{
        Backend as _,
        kubernetes::KubernetesBackend,
        node::PREFIX,
        peer::{self, Peer},
    },
    plan::{self, HopIds, HostLinks, Inputs, model},
    topology::{Encapsulate, Granularity, Mesh, Settings, Tunnel},
    wireguard::{
        conf::{Conf, PeerSection},
        key::PublicKey,
    },
};
use kube::{
    Api, Client,
    api::{DeleteParams, DynamicObject, ListParams, PostParams},
};
use serde_json::{Value, json};

use api::{ADMIN, ApiServer, apply, apply_crds};
use dot::{Graph, without_nil};

const LABEL: &str = "topology.kubernetes.io/region";

fn now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs().try_into().unwrap()
}

/// What kgctl prints, or what it complains about.
fn kgctl(kubeconfig: &Path, flags: &[String], arguments: &[&str]) -> Result<String, String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kgctl"));
    let output = command.arg("--kubeconfig").arg(kubeconfig).args(flags).args(arguments).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    if output.status.success() {
        return Ok(text(output.stdout));
    }
    assert!(output.stdout.is_empty(), "{arguments:?} fails and prints {}", text(output.stdout));
    Err(text(output.stderr))
}

/// The recorded objects on this server, as fresh as they were then.
async fn put_recorded(client: &Client, scenario: &Value) {
    let nodes: Api<core::Node> = Api::all(client.clone());
    let peers: Api<Peer> = Api::all(client.clone());
    let all = ListParams::default();
    nodes.delete_collection(&DeleteParams::default(), &all).await.unwrap();
    peers.delete_collection(&DeleteParams::default(), &all).await.unwrap();
    let later = now() - scenario["now"].as_i64().unwrap();
    for object in scenario["nodes"].as_array().unwrap() {
        let mut node: core::Node = serde_json::from_value(object.clone()).unwrap();
        node.status = None;
        let seen = node.metadata.annotations.as_mut().unwrap().get_mut(&format!("{PREFIX}last-seen"));
        if let Some(seen) = seen
            && let Ok(seconds) = seen.parse::<i64>()
        {
            *seen = (seconds + later).to_string();
        }
        nodes.create(&PostParams::default(), &node).await.unwrap();
    }
    for object in scenario["peers"].as_array().into_iter().flatten() {
        apply(client, &serde_json::from_value(object.clone()).unwrap(), false).await.unwrap();
    }
}

/// Without the key, which is not kgctl's to know.
fn without_private_key(ini: &str) -> String {
    without_nil(ini)
        .lines()
        .filter(|line| !line.starts_with("PrivateKey"))
        .fold(String::new(), |text, line| text + line + "\n")
}

/// A Peer object as the section of a configuration.
fn section(object: &Peer) -> PeerSection {
    let peer = peer::from_object(object).unwrap();
    PeerSection {
        allowed_ips: peer.allowed_ips,
        endpoint: peer.endpoint,
        persistent_keepalive: peer.persistent_keepalive,
        preshared_key: peer.preshared_key,
        public_key: peer.public_key,
    }
}

fn recorded(view: &Value, what: &str) -> String {
    view[what].as_str().unwrap_or_default().to_owned()
}

#[tokio::test]
async fn recorded_answers_of_kilo_are_what_kgctl_prints_for_the_same_objects() {
    let Some(server) = ApiServer::start().await else { return };
    let client = server.client(ADMIN).await;
    apply_crds(&client).await;
    let kubeconfig = server.kubeconfig(ADMIN, server.port());
    let text = include_str!("../testdata/topology.jsonl");
    let mut compared: BTreeMap<&str, usize> = BTreeMap::new();
    let mut compare = |what: &'static str| *compared.entry(what).or_default() += 1;
    for line in text.lines() {
        let scenario: Value = serde_json::from_str(line).unwrap();
        let seed = scenario["seed"].as_i64().unwrap();
        // One node and many peers; several locations; seen endpoints; both families.
        if ![3, 5, 33, 45].contains(&seed) {
            continue;
        }
        put_recorded(&client, &scenario).await;
        let config = |name: &str| scenario["config"][name].as_str().unwrap();
        let flags = [
            ("subnet", "subnet"),
            ("mesh-granularity", "mesh_granularity"),
            ("topology-label", "topology_label"),
        ]
        .map(|(flag, name)| format!("--{flag}={}", config(name)));
        let views = scenario["views"].as_object().unwrap();
        for (name, view) in views {
            let at = format!("seed {seed}, node {name}");
            let conf: Conf = without_nil(&recorded(view, "conf")).parse().unwrap();
            let port = conf.interface.as_ref().map_or(51820, |(_, port)| *port);
            let flags = [&flags[..], &[format!("--port={port}")]].concat();
            let shown = kgctl(&kubeconfig, &flags, &["showconf", "node", name]);
            if view["leader"] == json!(false) {
                let refused = shown.unwrap_err();
                assert!(refused.contains(name) && refused.contains("does not lead"), "{at}: {refused}");
                compare("refusals");
                continue;
            }
            assert_eq!(shown.unwrap(), without_private_key(&recorded(view, "conf")), "{at}");
            let as_peer = without_nil(&recorded(view, "as_peer"));
            let as_peer_flags = ["showconf", "node", name, "--as-peer", "-o"];
            let of =
                |format: &str| kgctl(&kubeconfig, &flags, &[&as_peer_flags[..], &[format]].concat()).unwrap();
            assert_eq!(of("wireguard"), as_peer, "{at}");
            let expected: Conf = as_peer.parse().unwrap();
            let yaml: Peer = serde_yaml_ng::from_str(&of("yaml")).unwrap();
            let json: Peer = serde_json::from_str(&of("json")).unwrap();
            assert_eq!((&yaml.spec, yaml.metadata.name.as_ref()), (&json.spec, Some(name)), "{at}");
            assert_eq!(vec![section(&json)], expected.peers, "{at}");
            compare("nodes");
        }
        let dots: Vec<_> = views.values().map(|view| Graph::parse(&recorded(view, "dot"))).collect();
        let drawn = Graph::parse(&kgctl(&kubeconfig, &flags, &["graph"]).unwrap());
        assert!(dots.contains(&drawn), "seed {seed}: {drawn:#?}\n{dots:#?}");
        compare("graphs");
        let mut claimed = BTreeSet::new();
        for object in scenario["peers"].as_array().into_iter().flatten() {
            let name = object["metadata"]["name"].as_str().unwrap();
            // As seen from some node: kgctl stands at none.
            let known: Vec<_> = views
                .values()
                .map(|view| without_nil(view["peer_conf"][name].as_str().unwrap_or_default()))
                .collect();
            let shown = kgctl(&kubeconfig, &flags, &["showconf", "peer", name]).unwrap();
            assert!(known.contains(&shown), "seed {seed}, peer {name}: {shown}\n{known:#?}");
            let more = ["showconf", "peer", name, "--as-peer", "-o", "json", "--allowed-ips"];
            let first = object["spec"]["allowedIPs"][0].as_str().unwrap();
            let added = format!("10.96.0.0/16,{first}");
            let more = [&more[..], &[&added]].concat();
            let described: Peer = serde_json::from_str(&kgctl(&kubeconfig, &flags, &more).unwrap()).unwrap();
            let mut expected = section(&serde_json::from_value(object.clone()).unwrap());
            // The first by name keeps what two claim.
            expected.allowed_ips.retain(|prefix| claimed.insert(*prefix));
            expected.allowed_ips.push("10.96.0.0/16".parse().unwrap());
            assert_eq!(section(&described), expected, "seed {seed}, peer {name}: added once each");
            compare("peers");
        }
    }
    println!("compared: {compared:?}");
    assert!(compared.len() >= 3 && compared["graphs"] == 4, "{compared:?}");
}

/// A cluster of one node, and how it is asked.
struct Cluster {
    _server: ApiServer,
    client: Client,
    kubeconfig: PathBuf,
    node: &'static str,
    number: u8,
    key: PublicKey,
}

impl Cluster {
    async fn start(node: &'static str, number: u8) -> Option<Self> {
        let server = ApiServer::start().await?;
        let client = server.client(ADMIN).await;
        apply_crds(&client).await;
        let key = PublicKey([number; 32]);
        let annotations: BTreeMap<_, _> = [
            ("endpoint", format!("192.0.2.{number}:51820")),
            ("internal-ip", format!("10.{number}.0.1/24")),
            ("key", key.to_string()),
            ("last-seen", now().to_string()),
            ("granularity", "location".to_owned()),
        ]
        .map(|(name, value)| (format!("{PREFIX}{name}"), value))
        .into();
        let object = json!({
            "apiVersion": "v1", "kind": "Node", "metadata": { "name": node, "annotations": annotations },
            "spec": { "podCIDR": format!("10.4{number}.0.0/24") },
        });
        let nodes: Api<core::Node> = Api::all(client.clone());
        nodes.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await.unwrap();
        let kubeconfig = server.kubeconfig(ADMIN, server.port());
        Some(Self { _server: server, client, kubeconfig, node, number, key })
    }

    fn subnet(&self) -> String {
        format!("10.20{}.0.0/16", self.number)
    }

    fn services(&self) -> String {
        format!("10.9{}.0.0/16", self.number)
    }

    fn kgctl(&self, arguments: &[&str]) -> String {
        kgctl(&self.kubeconfig, &[format!("--subnet={}", self.subnet())], arguments).unwrap()
    }

    /// `kgctl showconf node NODE --as-peer -o yaml --allowed-ips SERVICES | kubectl apply -f -`
    async fn introduce_to(&self, other: &Self) -> DynamicObject {
        let yaml = self.kgctl(&[
            "showconf",
            "node",
            self.node,
            "--as-peer",
            "-o",
            "yaml",
            "--allowed-ips",
            &self.services(),
        ]);
        let object: DynamicObject = serde_yaml_ng::from_str(&yaml).unwrap();
        apply(&other.client, &object, false).await.unwrap_or_else(|error| panic!("{yaml}: {error}"))
    }

    /// What the agent of its node would set up.
    async fn plan(&self) -> plan::HostPlan {
        let backend = KubernetesBackend::start(self.client.clone(), Some(self.node), LABEL).await.unwrap();
        let snapshot = backend.watch().borrow().clone();
        assert!(snapshot.problems.is_empty(), "{:?}", snapshot.problems);
        let settings = Settings {
            granularity: Granularity::Location,
            encapsulate: Encapsulate::Always,
            tunnel: Tunnel::Ipip,
            local: true,
            cni: true,
            subnet: self.subnet().parse().unwrap(),
            service_cidrs: vec![self.services().parse().unwrap()],
            port: 51820,
        };
        let mesh = Mesh::new(snapshot.nodes.values(), &snapshot.peers, settings.granularity, settings.subnet);
        plan::host_plan(&Inputs {
            mesh: &mesh,
            settings: &settings,
            node: self.node,
            links: &HostLinks { kilo: 9, private: Some(2), ..HostLinks::default() },
            hops: &HopIds::default().update(&mesh, self.node),
            resolved: &BTreeMap::new(),
            seen: &BTreeMap::new(),
            persistent_keepalive: 0,
            masquerade: true,
            mtu: 1420,
        })
        .unwrap()
    }
}

#[tokio::test]
async fn nodes_of_two_clusters_become_one_anothers_peers_with_their_services() {
    let Some(one) = Cluster::start("paris", 1).await else { return };
    let Some(two) = Cluster::start("tokyo", 2).await else { return };
    for (from, to) in [(&one, &two), (&two, &one)] {
        let applied = from.introduce_to(to).await;
        let again = from.introduce_to(to).await;
        assert_eq!(applied.metadata.resource_version, again.metadata.resource_version, "nothing changed");
    }
    for (here, there) in [(&one, &two), (&two, &one)] {
        let shown = here.kgctl(&["showconf", "node", here.node]);
        let (interface, peers) = shown.split_once("\n\n").unwrap();
        assert_eq!(interface, "[Interface]\nListenPort = 51820");
        let conf: Conf = peers.parse().unwrap();
        let [section] = &conf.peers[..] else { panic!("{:?}", conf.peers) };
        let prefixes = |list: &[String]| list.iter().map(|text| text.parse().unwrap()).collect::<Vec<_>>();
        let number = there.number;
        let expected = prefixes(&[
            format!("10.4{number}.0.0/24"),
            format!("10.{number}.0.1/32"),
            format!("10.20{number}.0.1/32"),
            there.services(),
        ]);
        assert_eq!((section.public_key, &section.allowed_ips), (there.key, &expected));
        let endpoint = section.endpoint.as_ref().map(ToString::to_string);
        assert_eq!(endpoint, Some(format!("192.0.2.{number}:51820")));
        assert!(here.kgctl(&["graph"]).contains(there.node));

        let plan = here.plan().await;
        let peer = &plan.wireguard.peers[&there.key];
        assert_eq!(peer.allowed_ips, expected.into_iter().collect());
        let pod = format!("10.4{}.0.7", here.number).parse().unwrap();
        let service = model::Packet { src: pod, dst: format!("10.9{number}.0.10").parse().unwrap() };
        assert_eq!(plan.route(service), model::Route::Wireguard, "services of the other cluster");
        assert!(!plan.tables.masquerades(service), "with the pod's own address");
        let elsewhere = model::Packet { src: pod, dst: "198.51.100.1".parse().unwrap() };
        assert!(plan.tables.masquerades(elsewhere));
    }
}

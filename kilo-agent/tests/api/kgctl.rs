//! `kgctl` on a real API server: recorded output of Kilo for the same objects, and two clusters that have
//! each other's nodes as peers.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::api;
use crate::dot;
use crate::wait::task as wait;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use k8s_openapi::api::{apps::v1::DaemonSet, core::v1 as core};
use kilo_agent::backend::{Backend as _, kubernetes::KubernetesBackend};
use kilo_core::{
    objects::{
        annotations::PREFIX,
        peer::{self, Peer},
    },
    observed::HostLinks,
    plan::{self, HopIds, Inputs, model},
    relay::RelayInputs,
    settings::Settings,
    topology::Mesh,
    wireguard::{conf::Conf, key::PublicKey},
};
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};

use api::{ADMIN, ApiServer, apply, apply_crds, create_node};
use dot::Graph;
use kilo_test_support::settings::settings;

const KGCTL: &str = env!("CARGO_BIN_EXE_kgctl");
const LABEL: &str = "topology.kubernetes.io/region";
const LAST_SEEN: &str = "kilo.squat.ai/last-seen";
/// Recorded scenarios: leaders and peers, a full mesh, another label and subnet.
const SEEDS: [u64; 5] = [1, 2, 10, 11, 22];

fn now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs().try_into().unwrap()
}

/// Runs kgctl: whether it succeeded, standard output, standard error.
fn kgctl(kubeconfig: &Path, arguments: &[&str]) -> (bool, String, String) {
    let output = Command::new(KGCTL).arg("--kubeconfig").arg(kubeconfig).args(arguments).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.success(), text(output.stdout), text(output.stderr))
}

fn peers_of(ini: &str) -> String {
    let peers = ini.find("[Peer]").map_or("", |at| &ini[at..]);
    peers.lines().filter(|line| !line.contains("<nil>")).collect::<Vec<_>>().join("\n").trim_end().to_owned()
}

/// Applies a scenario's objects, with heartbeats moved to the present.
async fn put(client: &Client, scenario: &Value) {
    let nodes: Api<core::Node> = Api::all(client.clone());
    let peers: Api<Peer> = Api::all(client.clone());
    for node in nodes.list(&ListParams::default()).await.unwrap() {
        nodes.delete(&node.name_any(), &DeleteParams::default()).await.unwrap();
    }
    for peer in peers.list(&ListParams::default()).await.unwrap() {
        peers.delete(&peer.name_any(), &DeleteParams::default()).await.unwrap();
    }
    let later = now() - scenario["now"].as_i64().unwrap();
    for object in scenario["nodes"].as_array().unwrap() {
        let mut node: core::Node = serde_json::from_value(object.clone()).unwrap();
        if let Some(seen) = node.annotations_mut().get_mut(LAST_SEEN)
            && let Ok(seconds) = seen.parse::<i64>()
        {
            *seen = (seconds + later).to_string();
        }
        node.metadata.resource_version = None;
        nodes.create(&PostParams::default(), &node).await.unwrap_or_else(|error| panic!("{error}: {object}"));
    }
    for object in scenario["peers"].as_array().into_iter().flatten() {
        let peer: DynamicObject = serde_json::from_value(object.clone()).unwrap();
        if let Err(error) = apply(client, &peer, false).await {
            let valid =
                serde_json::from_value(object.clone()).is_ok_and(|peer| peer::from_object(&peer).is_ok());
            assert!(!valid, "{object} is valid, and refused: {error}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn kgctl_prints_what_kilo_prints_for_the_same_objects_on_a_server() {
    let Some(server) = ApiServer::start().await else { return };
    let client = server.client(ADMIN).await;
    apply_crds(&client).await;
    let kubeconfig = server.kubeconfig(ADMIN, server.port());
    let recorded = include_str!("../../testdata/topology.jsonl");
    let mut compared = 0;
    for scenario in recorded.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()) {
        let seed = scenario["seed"].as_u64().unwrap();
        if !SEEDS.contains(&seed) {
            continue;
        }
        put(&client, &scenario).await;
        let config = |key: &str| scenario["config"][key].as_str().unwrap();
        let run = |arguments: &[&str]| {
            let (granularity, subnet, label) =
                (config("mesh_granularity"), config("subnet"), config("topology_label"));
            let flags = ["--mesh-granularity", granularity, "--subnet", subnet, "--topology-label", label];
            kgctl(&kubeconfig, &[arguments, &flags[..]].concat())
        };
        let (_, dot, _) = run(&["graph"]);
        for (name, view) in scenario["views"].as_object().unwrap() {
            assert_eq!(Graph::parse(&dot), Graph::parse(view["dot"].as_str().unwrap()), "seed {seed}, graph");
            let (success, conf, said) = run(&["showconf", "node", name]);
            if view["leader"] != true {
                assert!(
                    conf.is_empty() && said.contains("does not lead"),
                    "seed {seed}, {name}: {conf}{said}"
                );
                continue;
            }
            assert!(success, "seed {seed}, {name}: {said}");
            assert_eq!(peers_of(&conf), peers_of(view["conf"].as_str().unwrap()), "seed {seed}, {name}");
            let as_peer = view["as_peer"].as_str().unwrap();
            let (_, ini, _) = run(&["showconf", "node", name, "--as-peer"]);
            assert_eq!(peers_of(&ini), peers_of(as_peer), "seed {seed}, {name} as peer");
            let (_, more, _) =
                run(&["showconf", "node", name, "--as-peer", "--allowed-ips", "10.96.0.0/12,10.96.0.0/12"]);
            assert_eq!(more.matches("10.96.0.0/12").count(), 1, "added once: {more}");
            let (_, yaml, _) = run(&["showconf", "node", name, "--as-peer", "-o", "yaml"]);
            let (_, json, _) = run(&["showconf", "node", name, "--as-peer", "-o", "json"]);
            let object: Peer = serde_json::from_str(&json).unwrap();
            assert_eq!(serde_yaml_ng::from_str::<Peer>(&yaml).unwrap(), object);
            assert_eq!(peer::from_object(&object).unwrap().name, *name);
            let ips = object.spec.allowed_ips.join(", ");
            assert!(ini.contains(&format!("AllowedIPs = {ips}\n")), "{ips} in {ini}");
            for (name, want) in view["peer_conf"].as_object().into_iter().flatten() {
                let (_, conf, said) = run(&["showconf", "peer", name]);
                assert_eq!(
                    peers_of(&conf),
                    peers_of(want.as_str().unwrap()),
                    "seed {seed}, peer {name}: {said}"
                );
            }
            compared += 1;
        }
    }
    println!("{compared} leaders compared");
    assert!(compared >= 10, "{compared}");
}

/// A cluster with one node, and the means to query it.
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
        let (success, shown, said) =
            kgctl(&self.kubeconfig, &[arguments, &["--subnet", &self.subnet()]].concat());
        assert!(success, "{arguments:?}: {said}");
        shown
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

    /// The plan that its node's agent would make.
    async fn plan(&self) -> plan::HostPlan {
        let backend = KubernetesBackend::start(self.client.clone(), Some(self.node), LABEL).await.unwrap();
        let snapshot = backend.watch().borrow().clone();
        assert!(snapshot.problems.is_empty(), "{:?}", snapshot.problems);
        let settings = Settings {
            subnet: self.subnet().parse().unwrap(),
            service_cidrs: vec![self.services().parse().unwrap()],
            ..settings()
        };
        let mesh = Mesh::new(
            snapshot.nodes.iter().map(|known| &**known.node),
            &snapshot.peers,
            settings.granularity,
            settings.subnet,
        );
        let mesh = mesh.as_seen_from(self.node);
        plan::host_plan(&Inputs {
            mesh: &mesh,
            settings: &settings,
            links: &HostLinks { kilo: 9, private: Some(2), ..HostLinks::default() },
            hops: &HopIds::default().update(&mesh),
            resolved: &BTreeMap::new(),
            seen: &BTreeMap::new(),
            relays: &RelayInputs::default(),
            signal_keys: &BTreeMap::new(),
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

#[tokio::test]
async fn uninstall_refuses_beside_a_daemon_set_of_any_namespace() {
    let Some(server) = ApiServer::start().await else { return };
    let client = server.client(ADMIN).await;
    let kubeconfig = server.kubeconfig(ADMIN, server.port());
    let daemon_sets: Api<DaemonSet> = Api::namespaced(client.clone(), "default");
    let pod = json!({
        "metadata": {"labels": {"app": "kilo"}},
        "spec": {"containers": [{"name": "kilo", "image": "kilo-ebpf/kilo:0.1.0"}]},
    });
    for name in ["kilo", "kilo-wireguard"] {
        let spec = json!({"selector": {"matchLabels": {"app": "kilo"}}, "template": pod});
        let daemon_set = json!({"metadata": {"name": name}, "spec": spec});
        daemon_sets
            .create(&PostParams::default(), &serde_json::from_value(daemon_set).unwrap())
            .await
            .unwrap();
        let (done, _, said) = kgctl(&kubeconfig, &["uninstall", "--timeout=1s"]);
        assert!(
            !done && said.contains(&format!("nothing was removed: DaemonSet {name} of default")),
            "{said}"
        );
        // Afterwards nothing says which image it had.
        assert!(said.contains("kgctl uninstall --namespace=default --image=kilo-ebpf/kilo:0.1.0"), "{said}");
        assert!(said.contains(&format!("kubectl --namespace default delete daemonset {name}")), "{said}");
        daemon_sets.delete(name, &DeleteParams::default()).await.unwrap();
    }
    let all: Api<DaemonSet> = Api::all(client);
    let left: Vec<_> =
        all.list(&ListParams::default()).await.unwrap().iter().map(kube::ResourceExt::name_any).collect();
    assert_eq!(left, Vec::<String>::new(), "nothing was started");
}

/// As the kubelet reports it of a pod whose image cannot be had.
fn waiting_pod(image: &str, reason: &str) -> (Value, Value) {
    let labels = json!({"app.kubernetes.io/name": "kilo-uninstall"});
    let containers = json!([{"name": "done", "image": image}]);
    let pod = json!({
        "metadata": {"name": "kilo-uninstall-x", "labels": labels},
        "spec": {"nodeName": "n1", "containers": containers},
    });
    let state = json!({"waiting": {"reason": reason, "message": "couldn't parse image name"}});
    let container = json!({"name": "uninstall", "image": image, "imageID": "", "ready": false, "restartCount": 0,
        "state": state});
    (pod, json!({"status": {"phase": "Pending", "initContainerStatuses": [container]}}))
}

#[tokio::test(flavor = "multi_thread")]
async fn uninstall_finds_the_agents_image_and_says_at_once_that_no_node_can_pull_it() {
    const IMAGE: &str = "registry.example/kilo:9";
    let Some(server) = ApiServer::start().await else { return };
    let client = server.client(ADMIN).await;
    let kubeconfig = server.kubeconfig(ADMIN, server.port());
    let images = json!({"status": {"images": [
        {"names": ["docker.io/squat/kilo:0.7.0"]}, {"names": ["registry.example/kilo@sha256:1", IMAGE]},
    ]}});
    create_node(&client, "n1", &[]).await;
    let (done, _, said) = kgctl(&kubeconfig, &["uninstall", "--timeout=1s"]);
    assert!(
        !done && said.contains("nothing was removed: which image the agents had is not certain"),
        "{said}"
    );
    assert!(said.contains("name it with --image"), "{said}");
    let nodes: Api<core::Node> = Api::all(client.clone());
    nodes.patch_status("n1", &PatchParams::default(), &Patch::Merge(&images)).await.unwrap();

    let daemon_sets: Api<DaemonSet> = Api::namespaced(client.clone(), "kube-system");
    let started = Instant::now();
    let running = {
        let kubeconfig = kubeconfig.clone();
        std::thread::spawn(move || kgctl(&kubeconfig, &["uninstall", "--timeout=5m"]))
    };
    let made = wait::until("the uninstaller is created", Duration::from_secs(30), async || {
        daemon_sets.get_opt("kilo-uninstall").await.unwrap()
    })
    .await;
    let template = made.spec.unwrap().template.spec.unwrap();
    let initial = template.init_containers.unwrap();
    assert_eq!([&initial[0].image, &template.containers[0].image], [&Some(IMAGE.to_owned()); 2]);
    // There is no kubelet, and no controller.
    let (pod, waits) = waiting_pod(IMAGE, "InvalidImageName");
    let pods: Api<core::Pod> = Api::namespaced(client, "kube-system");
    pods.create(&PostParams::default(), &serde_json::from_value(pod).unwrap()).await.unwrap();
    pods.patch_status("kilo-uninstall-x", &PatchParams::default(), &Patch::Merge(&waits)).await.unwrap();
    let seen = json!({"status": {"observedGeneration": 1, "desiredNumberScheduled": 1, "updatedNumberScheduled": 1,
        "currentNumberScheduled": 1, "numberMisscheduled": 0, "numberReady": 0}});
    daemon_sets.patch_status("kilo-uninstall", &PatchParams::default(), &Patch::Merge(&seen)).await.unwrap();
    let (done, _, said) = running.join().unwrap();
    println!("{said}");
    assert!(!done && started.elapsed() < Duration::from_secs(90), "{:?}: {said}", started.elapsed());
    for words in [
        "not done because nodes cannot pull the image (InvalidImageName): n1",
        "DaemonSet kilo-uninstall stays",
        "kubectl --namespace kube-system delete daemonset,serviceaccount kilo-uninstall",
        "n1: pod kilo-uninstall-x: container uninstall: InvalidImageName: couldn't parse image name",
    ] {
        assert!(said.contains(words), "{words:?} is missing in {said}");
    }
}

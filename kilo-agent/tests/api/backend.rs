//! The Kubernetes backend against a real API server.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test's helpers fail as the test does")]

use crate::api;
use crate::wait::task as wait;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use k8s_openapi::api::core::v1 as core;
use kilo_agent::{
    backend::{
        Backend as _, BackendError, Handshake, PeersReported, TunnelStatus, kubernetes::KubernetesBackend,
    },
    timestamp::Timestamp,
};
use kilo_core::{
    objects::{
        ObjectRef, Published,
        annotations::PREFIX,
        peer::{self, Peer},
    },
    settings::Granularity,
    topology::PeerAcceptance,
    wireguard::key::PublicKey,
};
use kube::{
    Api, Client,
    api::{DeleteParams, DynamicObject, Patch, PatchParams},
};
use parking_lot::Mutex;
use serde_json::{Value, json};

use api::{ADMIN, AGENT, ApiServer, NOBODY, apply, apply_crds, create_node, manifest, until, until_may};

const LABEL: &str = "topology.kubernetes.io/region";
const SOON: Duration = Duration::from_secs(5);

fn published() -> Published {
    Published {
        endpoint: "192.0.2.1:51820".parse().ok(),
        ipv6_endpoint: "[2001:db8::7]:51820".parse().ok(),
        relay_off: true,
        internal_ip: "10.0.0.1/24".parse().ok(),
        key: Some(PublicKey([1; 32])),
        last_seen: 1_700_000_000,
        wireguard_ip: "10.4.0.1/16".parse().ok(),
        discovered_endpoints: BTreeMap::from([(PublicKey([2; 32]), "192.0.2.7:7".parse().unwrap())]),
        granularity: Some(Granularity::Location),
        ..Published::default()
    }
}

/// A Peer object as users have written them for Kilo.
fn old_peer(name: &str, spec: &Value) -> DynamicObject {
    serde_json::from_value(json!({
        "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "Peer", "metadata": { "name": name }, "spec": spec,
    }))
    .unwrap()
}

async fn annotations(nodes: &Api<core::Node>, name: &str) -> (BTreeMap<String, String>, String) {
    let metadata = nodes.get(name).await.unwrap().metadata;
    (metadata.annotations.unwrap_or_default(), metadata.resource_version.unwrap())
}

async fn delete_node(client: &Client, name: &str) {
    let nodes: Api<core::Node> = Api::all(client.clone());
    nodes.delete(name, &DeleteParams::default()).await.unwrap();
}

#[tokio::test]
async fn nodes_and_peers_are_seen_and_changes_follow_soon() {
    let Some(server) = ApiServer::shared().await else { return };
    let client = server.client(ADMIN).await;
    apply_crds(&client).await;
    create_node(&client, "seen-a", &[("kilo.squat.ai/location", "here")]).await;
    let backend = KubernetesBackend::start(client.clone(), None, LABEL).await.unwrap();
    let mut snapshots = backend.watch();
    let first = snapshots.borrow_and_update().clone();
    assert_eq!(first.nodes["seen-a"].location, "here", "known when start returns");
    assert_eq!(first.nodes["seen-a"].pod_cidrs, [api::pod_cidr("seen-a").parse().unwrap()]);

    // Large annotations: a foreign one, and garbage under a name of ours.
    let large = "x".repeat(100_000);
    create_node(&client, "seen-b", &[("example.com/large", &large), ("kilo.squat.ai/key", &large)]).await;
    let took = until(&mut snapshots, SOON, |snapshot| snapshot.nodes.contains("seen-b")).await;
    println!("a new node was seen after {took:?}");
    let held = snapshots.borrow().clone();
    let (node, problem) = (&held.nodes["seen-b"], &held.problems[&ObjectRef::node("seen-b")]);
    assert!(problem.contains("kilo.squat.ai/key") && problem.len() < 1000, "{problem}");
    assert!(format!("{node:?}").len() < 2000, "only what is used is kept");

    let key = PublicKey([9; 32]).to_string();
    let spec = json!({ "allowedIPs": ["10.5.0.1/32"], "publicKey": key });
    apply(&client, &old_peer("seen-peer", &spec), false).await.unwrap();
    let took = until(&mut snapshots, SOON, |snapshot| snapshot.peers.contains_key("seen-peer")).await;
    println!("a new peer was seen after {took:?}");

    let nodes: Api<core::Node> = Api::all(client.clone());
    let patch = json!({ "metadata": { "annotations": { "kilo.squat.ai/leader": "" } } });
    nodes.patch("seen-a", &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap();
    until(&mut snapshots, SOON, |snapshot| snapshot.nodes["seen-a"].leader).await;

    let peers: Api<Peer> = Api::all(client.clone());
    peers.delete("seen-peer", &DeleteParams::default()).await.unwrap();
    delete_node(&client, "seen-a").await;
    delete_node(&client, "seen-b").await;
    until(&mut snapshots, SOON, |snapshot| {
        !snapshot.peers.contains_key("seen-peer")
            && !snapshot.nodes.names().any(|name| name.starts_with("seen"))
    })
    .await;
}

#[tokio::test]
async fn publishing_writes_what_differs_and_retracting_removes_it_again() {
    let Some(server) = ApiServer::shared().await else { return };
    let client = server.client(ADMIN).await;
    apply_crds(&client).await;
    let users = [("kilo.squat.ai/force-endpoint", "192.0.2.99:1"), ("example.com/theirs", "stays")];
    create_node(&client, "writer", &users).await;
    let nodes: Api<core::Node> = Api::all(client.clone());
    let backend = KubernetesBackend::start(client.clone(), Some("writer"), LABEL).await.unwrap();
    let mut snapshots = backend.watch();

    assert!(backend.publish("writer", &published()).await.unwrap());
    let (written, version) = annotations(&nodes, "writer").await;
    assert_eq!(written[&format!("{PREFIX}endpoint")], "192.0.2.1:51820");
    assert_eq!(written[&format!("{PREFIX}granularity")], "location");
    let ours = written.keys().filter(|name| name.starts_with(PREFIX)).count();
    assert_eq!(ours, 10, "nine written and the user's: {written:?}");
    until(&mut snapshots, SOON, |snapshot| {
        snapshot.nodes.get("writer").is_some_and(|node| node.last_seen == 1_700_000_000)
    })
    .await;

    assert!(!backend.publish("writer", &published()).await.unwrap());
    assert_eq!(annotations(&nodes, "writer").await.1, version, "nothing differs, nothing is written");

    let gone = Published { discovered_endpoints: BTreeMap::new(), ..published() };
    assert!(backend.publish("writer", &gone).await.unwrap());
    let (written, _) = annotations(&nodes, "writer").await;
    assert!(!written.contains_key(&format!("{PREFIX}discovered-endpoints")));

    // A third party removes one of ours: it is restored.
    let patch = json!({ "metadata": { "annotations": { "kilo.squat.ai/key": null } } });
    nodes.patch("writer", &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap();
    until(&mut snapshots, SOON, |snapshot| snapshot.nodes["writer"].key.is_none()).await;
    assert!(backend.publish("writer", &gone).await.unwrap());

    backend.retract("writer").await.unwrap();
    let (left, _) = annotations(&nodes, "writer").await;
    let users = users.map(|(name, value)| (name.to_owned(), value.to_owned()));
    assert_eq!(left, BTreeMap::from(users), "the users' own stay, ours are gone");
    delete_node(&client, "writer").await;
}

#[tokio::test]
async fn publishing_for_a_node_that_is_not_there_says_so() {
    let Some(server) = ApiServer::shared().await else { return };
    let client = server.client(ADMIN).await;
    apply_crds(&client).await;
    let backend = KubernetesBackend::start(client.clone(), Some("absent"), LABEL).await.unwrap();
    let refused = backend.publish("absent", &published()).await.unwrap_err();
    assert!(matches!(refused, BackendError::NoSuchNode(_)), "{refused}");
    assert!(matches!(backend.retract("absent").await, Err(BackendError::NoSuchNode(_))));
}

#[tokio::test]
async fn objects_of_the_old_kind_are_accepted_and_wrong_ones_refused_by_the_server() {
    let Some(server) = ApiServer::shared().await else { return };
    let client = server.client(ADMIN).await;
    apply_crds(&client).await;
    let key = PublicKey([9; 32]).to_string();
    let good = [
        json!({ "allowedIPs": ["10.5.0.1/32", "fd00:5::1/128"], "publicKey": key }),
        json!({ "allowedIPs": ["10.5.0.1/24"], "publicKey": format!("{key}\n"), "presharedKey": "" }),
        json!({ "allowedIPs": [], "publicKey": key, "persistentKeepalive": 10, "presharedKey": key,
                "endpoint": { "dnsOrIP": { "dns": "vpn.example.com", "ip": "" }, "port": 51820 } }),
        json!({ "allowedIPs": ["0.0.0.0/0"], "publicKey": key,
                "endpoint": { "dnsOrIP": { "ip": "2001:db8::1" }, "port": 1 } }),
    ];
    for (number, spec) in good.iter().enumerate() {
        let object = old_peer(&format!("good-{number}"), spec);
        apply(&client, &object, true).await.unwrap_or_else(|error| panic!("{spec}: {error}"));
        peer::from_object(&object.try_parse().unwrap()).unwrap();
    }
    let bad = [
        ("allowedIPs", json!({ "allowedIPs": ["10.5.0.1"], "publicKey": key })),
        ("publicKey", json!({ "allowedIPs": [], "publicKey": "short" })),
        ("publicKey", json!({ "allowedIPs": [] })),
        ("persistentKeepalive", json!({ "allowedIPs": [], "publicKey": key, "persistentKeepalive": -1 })),
        (
            "port",
            json!({ "allowedIPs": [], "publicKey": key,
                         "endpoint": { "dnsOrIP": { "ip": "1.2.3.4" }, "port": 0 } }),
        ),
        ("dnsOrIP", json!({ "allowedIPs": [], "publicKey": key, "endpoint": { "port": 1 } })),
        (
            "port",
            json!({ "allowedIPs": [], "publicKey": key,
                         "endpoint": { "dnsOrIP": { "ip": "1.2.3.4" }, "port": 65536 } }),
        ),
        (
            "port",
            json!({ "allowedIPs": [], "publicKey": key, "endpoint": { "dnsOrIP": { "ip": "1.2.3.4" } } }),
        ),
        ("allowedIPs", json!({ "publicKey": key })),
        ("allowedIPs", json!({ "allowedIPs": "10.5.0.1/32", "publicKey": key })),
        ("persistentKeepalive", json!({ "allowedIPs": [], "publicKey": key, "persistentKeepalive": 65536 })),
        ("persistentKeepalive", json!({ "allowedIPs": [], "publicKey": key, "persistentKeepalive": "10" })),
        ("presharedKey", json!({ "allowedIPs": [], "publicKey": key, "presharedKey": "short" })),
    ];
    for (field, spec) in bad {
        let refused = apply(&client, &old_peer("bad", &spec), true).await.unwrap_err().to_string();
        assert!(refused.contains(field), "{field} in {refused}");
    }
}

#[tokio::test]
async fn an_invalid_peer_is_named_and_hides_no_other() {
    // A separate server, because the old CRD validated hardly anything.
    let Some(server) = ApiServer::start().await else { return };
    let client = server.client(ADMIN).await;
    let mut lax = manifest("crds.yaml").remove(0);
    lax.data["spec"]["versions"][0]["schema"]["openAPIV3Schema"] =
        json!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true });
    apply(&client, &lax, false).await.unwrap();
    apply_crds_served(&client).await;
    let key = PublicKey([9; 32]).to_string();
    let objects = [
        ("good", json!({ "allowedIPs": ["10.5.0.1/32"], "publicKey": key })),
        ("bad-cidr", json!({ "allowedIPs": ["10.5.0.1"], "publicKey": key })),
        ("no-key", json!({ "allowedIPs": [] })),
        ("no-peer-at-all", json!(7)),
    ];
    for (name, spec) in &objects {
        apply(&client, &old_peer(name, spec), false).await.unwrap();
    }
    let backend = KubernetesBackend::start(client.clone(), None, LABEL).await.unwrap();
    let mut snapshots = backend.watch();
    let first = snapshots.borrow_and_update().clone();
    assert_eq!(first.peers.keys().collect::<Vec<_>>(), ["good"]);
    let problems: Vec<_> = first.problems.keys().map(ToString::to_string).collect();
    assert_eq!(problems, ["peer bad-cidr", "peer no-key", "peer no-peer-at-all"], "{:#?}", first.problems);
    assert!(first.problems[&ObjectRef::peer("bad-cidr")].contains("10.5.0.1"), "{:#?}", first.problems);
    assert!(first.problems[&ObjectRef::peer("no-key")].contains("publicKey"), "{:#?}", first.problems);

    let mended = old_peer("bad-cidr", &json!({ "allowedIPs": ["10.5.0.2/32"], "publicKey": key }));
    apply(&client, &mended, false).await.unwrap();
    until(&mut snapshots, SOON, |snapshot| {
        snapshot.peers.len() == 2 && !snapshot.problems.contains_key(&ObjectRef::peer("bad-cidr"))
    })
    .await;
    let spoilt = old_peer("good", &json!({ "allowedIPs": ["x"], "publicKey": key }));
    apply(&client, &spoilt, false).await.unwrap();
    until(&mut snapshots, SOON, |snapshot| snapshot.problems.contains_key(&ObjectRef::peer("good"))).await;
    assert_eq!(snapshots.borrow().peers.keys().collect::<Vec<_>>(), ["bad-cidr"]);
}

#[tokio::test]
async fn a_handshake_is_written_beside_the_condition_and_not_over_a_later_one() {
    let Some(server) = ApiServer::start().await else { return };
    let admin = server.client(ADMIN).await;
    apply_crds(&admin).await;
    api::grant_agent(&admin).await;
    let key = PublicKey([9; 32]).to_string();
    let spec = json!({ "allowedIPs": ["10.5.0.1/32"], "publicKey": key });
    apply(&admin, &old_peer("laptop", &spec), false).await.unwrap();
    let backends = [
        KubernetesBackend::start(server.client(AGENT).await, None, LABEL).await.unwrap(),
        KubernetesBackend::start(server.client(AGENT).await, None, LABEL).await.unwrap(),
    ];
    let [first, second] = &backends;
    let handshake = |second: i64, endpoint: &str| Handshake {
        time: Timestamp(1_700_000_000 + second),
        endpoint: endpoint.parse().ok(),
    };
    let (early, late) = (handshake(0, "192.0.2.7:4000"), handshake(100, "[2001:db8::7]:4000"));
    assert_eq!(first.tunnel_status("laptop"), Some(TunnelStatus::default()));
    assert_eq!(first.tunnel_status("nobody"), None);
    assert!(!first.report_handshake("nobody", &early).await.unwrap());

    // Both know the same version of the object, so one write comes too late.
    let (one, other) =
        tokio::join!(first.report_handshake("laptop", &late), second.report_handshake("laptop", &early));
    let wrote = [one.unwrap(), other.unwrap()];
    assert_eq!(wrote.iter().filter(|wrote| **wrote).count(), 1, "{wrote:?}");
    let written = if wrote[0] { late } else { early };
    wait::until("both backends know what is written", SOON, async || {
        backends
            .iter()
            .all(|backend| backend.tunnel_status("laptop") == Some(TunnelStatus { handshake: Some(written) }))
    })
    .await;

    // The condition is added, and not written again because of the handshake.
    let acceptances = BTreeMap::from([("laptop".to_owned(), PeerAcceptance::Accepted)]);
    let reported = |writes| PeersReported { writes, ..PeersReported::default() };
    assert_eq!(first.report_peers(&acceptances).await.unwrap(), reported(1));
    assert_eq!(first.report_peers(&acceptances).await.unwrap(), reported(0));
    let peers: Api<Peer> = Api::all(admin);
    let status = peers.get("laptop").await.unwrap().status.unwrap();
    assert_eq!(status.last_handshake, Some(written.time.to_string()));
    assert_eq!(status.endpoint, written.endpoint.map(|endpoint| endpoint.to_string()));
    assert!(status.accepted && status.conditions.len() == 1, "{status:?}");
}

/// Waits until Peer objects can be listed as dynamic objects.
async fn apply_crds_served(client: &Client) {
    let peers: Api<DynamicObject> =
        Api::all_with(client.clone(), &kube::api::ApiResource::erase::<Peer>(&()));
    wait::until("Peer objects are served", Duration::from_secs(20), async || {
        peers.list(&kube::api::ListParams::default()).await.map(drop)
    })
    .await;
}

#[tokio::test]
async fn the_manifests_role_is_enough_and_a_missing_right_is_named() {
    let Some(server) = ApiServer::start().await else { return };
    let admin = server.client(ADMIN).await;
    let missing = KubernetesBackend::start(admin.clone(), None, LABEL).await.err().unwrap().to_string();
    assert!(missing.contains("kubectl apply -f manifests/crds.yaml"), "{missing}");
    apply_crds(&admin).await;
    create_node(&admin, "rbac", &[]).await;

    let nobody = server.client(NOBODY).await;
    let refused = KubernetesBackend::start(nobody, Some("rbac"), LABEL).await.err().unwrap();
    println!("no rights: {refused}");
    assert!(refused.to_string().contains("cannot list resource \"nodes\""), "{refused}");
    assert!(refused.to_string().contains("manifests/"), "{refused}");
    assert!(!refused.is_temporary());

    let role = api::grant_agent(&admin).await;
    let agent = server.client(AGENT).await;
    let backend = KubernetesBackend::start(agent.clone(), Some("rbac"), LABEL).await.unwrap();
    let mut snapshots = backend.watch();
    assert!(backend.publish("rbac", &published()).await.unwrap());
    until(&mut snapshots, SOON, |snapshot| snapshot.nodes["rbac"].endpoint.is_some()).await;
    create_node(&admin, "rbac-2", &[]).await;
    until(&mut snapshots, SOON, |snapshot| snapshot.nodes.contains("rbac-2")).await;
    backend.retract("rbac").await.unwrap();
    let nodes: Api<core::Node> = Api::all(agent);
    let delete = nodes.delete("rbac-2", &DeleteParams::default()).await;
    assert!(delete.is_err(), "the role allows no more than it must");

    let mut readonly = role.clone();
    readonly.data["rules"][0]["verbs"] = json!(["list", "watch"]);
    apply(&admin, &readonly, false).await.unwrap();
    until_may(&admin, AGENT, ("patch", "", "nodes"), ("", ""), false).await;
    until(&mut snapshots, SOON, |snapshot| snapshot.nodes["rbac"].endpoint.is_none()).await;
    let refused = backend.publish("rbac", &published()).await.unwrap_err().to_string();
    println!("no patch: {refused}");
    assert!(refused.contains("cannot patch resource \"nodes\""), "{refused}");
}

/// Output of a log layer, as text.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock()).into_owned()
    }
}

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn each_right_that_is_missing_is_named_by_verb_and_resource() {
    let Some(server) = ApiServer::start().await else { return };
    let admin = server.client(ADMIN).await;
    apply_crds(&admin).await;
    create_node(&admin, "rights", &[]).await;
    let rules = |nodes: &[&str], peers: &[&str]| {
        json!({ "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole",
                "metadata": { "name": "some-rights" },
                "rules": [{ "apiGroups": [""], "resources": ["nodes"], "verbs": nodes },
                          { "apiGroups": ["kilo.squat.ai"], "resources": ["peers"], "verbs": peers }] })
    };
    let binding = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": { "name": "some" },
        "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "some-rights" },
        "subjects": [{ "apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": AGENT }],
    });
    apply(&admin, &serde_json::from_value(binding).unwrap(), false).await.unwrap();
    let log = Log::default();
    let writer = log.clone();
    // This thread also runs the backend's tasks.
    let _logging = tracing::subscriber::set_default(
        tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish(),
    );
    let all = ["list", "watch"];
    for (nodes, peers, wanted) in [
        (&["watch", "patch"][..], &all[..], "cannot list resource \\\"nodes\\\""),
        (&all, &["watch"], "cannot list resource \\\"peers\\\" in API group \\\"kilo.squat.ai\\\""),
        (&["list"], &all, "cannot watch resource \\\"nodes\\\""),
        (&all, &["list"], "cannot watch resource \\\"peers\\\""),
        (&all, &all, "cannot patch resource \\\"nodes\\\""),
    ] {
        apply(&admin, &serde_json::from_value(rules(nodes, peers)).unwrap(), false).await.unwrap();
        for verb in all {
            for (group, resource, verbs) in [("", "nodes", nodes), ("kilo.squat.ai", "peers", peers)] {
                until_may(&admin, AGENT, (verb, group, resource), ("", ""), verbs.contains(&verb)).await;
            }
        }
        let client = server.client(AGENT).await;
        let said = match KubernetesBackend::start(client, Some("rights"), LABEL).await {
            Err(refused) => format!("{:?}", refused.to_string()),
            Ok(backend) => {
                wait::until(&format!("the log says {wanted}"), SOON, async || {
                    if wanted.contains("patch") {
                        let refused = backend.publish("rights", &published()).await.unwrap_err();
                        tracing::warn!(reason = refused.to_string(), "publish");
                    }
                    let text = log.text();
                    if text.contains(wanted) { Ok(text) } else { Err(text) }
                })
                .await
            }
        };
        assert!(said.contains(wanted), "nodes {nodes:?}, peers {peers:?}: {wanted} is not in {said}");
        assert!(said.contains("apply the ClusterRole and ClusterRoleBinding of manifests/"), "{said}");
    }
}

#[tokio::test]
async fn large_annotations_of_others_pass_by() {
    let Some(server) = ApiServer::shared().await else { return };
    let client = server.client(ADMIN).await;
    apply_crds(&client).await;
    // A node that no other test uses: the server is shared.
    let large = "pass-by;".repeat(100 << 7);
    let foreign = [("example.com/large", large.as_str()), ("kilo.squat.ai/of-tomorrow", "?")];
    create_node(&client, "large", &foreign).await;
    let nodes: Api<core::Node> = Api::all(client.clone());
    let backend = KubernetesBackend::start(client.clone(), Some("large"), LABEL).await.unwrap();
    let mut snapshots = backend.watch();
    assert!(backend.publish("large", &published()).await.unwrap());
    until(&mut snapshots, SOON, |snapshot| snapshot.nodes["large"].key.is_some()).await;
    assert!(!backend.publish("large", &published()).await.unwrap(), "nothing differs");
    assert!(!format!("{:?}", snapshots.borrow()).contains("pass-by;"), "it is in the snapshot");
    backend.retract("large").await.unwrap();
    let (left, _) = annotations(&nodes, "large").await;
    assert_eq!(left["example.com/large"].len(), large.len());
    assert_eq!(left.len(), 2);
    delete_node(&client, "large").await;
}

#[tokio::test]
async fn credentials_that_are_not_accepted_are_named() {
    let Some(server) = ApiServer::shared().await else { return };
    let client = server.client("stranger").await;
    let refused = KubernetesBackend::start(client, None, LABEL).await.err().unwrap().to_string();
    assert!(refused.contains("401"), "{refused}");
}

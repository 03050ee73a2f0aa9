//! A real `kg` on a real API server: what it writes about its node, how it handles peers, and what
//! `kg uninstall` removes.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::api;
use crate::front;
use crate::netns;
use crate::proxy;
use crate::wait::task as wait;

use std::{
    collections::BTreeMap,
    path::Path,
    process::{Child, Command},
    time::{Duration, Instant},
};

use k8s_openapi::api::core::v1 as core;
use kilo_agent::timestamp::Timestamp;
use kilo_core::{
    objects::peer::{Peer, PeerStatus},
    wireguard::key::PublicKey,
};
use kube::{
    Api, Client,
    api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams},
};
use serde_json::json;

use api::{ADMIN, ApiServer, NOBODY, apply, apply_crds, create_node};
use front::{Front, Manner, plain_kubeconfig};
use proxy::{Mode, Proxy};

const KG: &str = env!("CARGO_BIN_EXE_kg");

/// Kills the agent when the test ends.
pub(crate) struct Agent(pub Child);

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub(crate) type Annotations = BTreeMap<String, String>;

pub(crate) async fn until(
    nodes: &Api<core::Node>,
    what: &str,
    wanted: impl Fn(&Annotations) -> bool,
) -> Annotations {
    wait::until(what, Duration::from_secs(20), async || {
        let annotations = nodes.get("n1").await.unwrap().metadata.annotations.unwrap_or_default();
        if wanted(&annotations) { Ok(annotations) } else { Err(format!("{annotations:?}")) }
    })
    .await
}

pub(crate) fn kg(kubeconfig: &Path) -> Command {
    let mut command = Command::new(KG);
    command.arg("--kubeconfig").arg(kubeconfig).args([
        "--hostname",
        "n1",
        "--resync-period",
        "1s",
        "--compatibility=cilium",
    ]);
    command
}

/// A node's namespace: private address, public address, default route, Cilium's device.
pub(crate) fn make_host() {
    netns::host(&["10.1.0.11/24", "192.0.2.11/32"], "10.1.0.1");
    netns::sh(
        "ip link add cilium_host type veth peer name cilium_net; ip address add 10.42.1.7/32 dev cilium_host; ip link set cilium_host up",
    );
}

/// Waits until the command's output satisfies `wanted`.
pub(crate) async fn until_said(command: &str, wanted: impl Fn(&str) -> bool) -> String {
    wait::until(command, Duration::from_secs(60), async || {
        let said = netns::sh(&format!("{command} 2>/dev/null || true"));
        if wanted(&said) { Ok(said) } else { Err(said) }
    })
    .await
}

pub(crate) fn peer(key: u8, allowed_ip: &str) -> DynamicObject {
    let peer = json!({
        "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "Peer", "metadata": {"name": "laptop"},
        "spec": {"allowedIPs": [allowed_ip], "publicKey": PublicKey([key; 32]).to_string()},
    });
    serde_json::from_value(peer).unwrap()
}

/// Waits until the agent has written the status of a peer; returns it.
async fn peer_status(peers: &Api<Peer>, name: &str) -> PeerStatus {
    let what = format!("peer {name} has a status");
    wait::until(&what, Duration::from_secs(15), async || peers.get(name).await.unwrap().status).await
}

pub(crate) async fn annotate(nodes: &Api<core::Node>, node: &str, annotations: serde_json::Value) {
    let patch = json!({"metadata": {"annotations": annotations}});
    nodes.patch(node, &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap();
}

pub(crate) fn name(name: &str) -> String {
    format!("kilo.squat.ai/{name}")
}

/// Whether a node's annotations name this endpoint.
fn at_endpoint(endpoint: &'static str) -> impl Fn(&Annotations) -> bool {
    move |all| all.get(&name("endpoint")).is_some_and(|found| found == endpoint)
}

/// Peers are configured, replaced, refused, corrected and removed on the agent's device.
async fn peers_come_and_go(client: &Client) {
    let (first, second) = (PublicKey([9; 32]).to_string(), PublicKey([10; 32]).to_string());
    let show = "wg show kilo0 allowed-ips";
    apply(client, &peer(9, "10.5.0.1/32"), false).await.unwrap();
    until_said(show, |peers| peers.contains(&first)).await;
    until_said("ip route show 10.5.0.1", |route| route.contains("dev kilo0")).await;
    apply(client, &peer(10, "10.5.0.2/32"), false).await.unwrap();
    until_said(show, |peers| peers.contains(&second) && !peers.contains(&first)).await;
    until_said("ip route show proto 107", |all| all.contains("10.5.0.2") && !all.contains("10.5.0.1")).await;
    let peers: Api<Peer> = Api::all(client.clone());
    let mut broken = peer(11, "10.5.0.9/32");
    broken.metadata.name = Some("broken".to_owned());
    broken.data["spec"]["endpoint"] = json!({"dnsOrIP": {}, "port": 1});
    apply(client, &broken, false).await.unwrap();
    let status = peer_status(&peers, "broken").await;
    assert!(!status.accepted && status.reason.as_deref().is_some_and(|why| why.contains("dnsOrIP")));
    assert!(peer_status(&peers, "laptop").await.accepted, "one invalid peer disturbs no other");
    assert!(!netns::sh(show).contains("10.5.0.9"), "it is not on the device");
    let mended = json!({"spec": {"endpoint": {"dnsOrIP": {"ip": "192.0.2.77"}}}});
    peers.patch("broken", &PatchParams::default(), &Patch::Merge(&mended)).await.unwrap();
    until_said(show, |peers| peers.contains("10.5.0.9")).await;
    wait::until("the mended peer is accepted", Duration::from_secs(20), async || {
        peer_status(&peers, "broken").await.reason.is_none()
    })
    .await;
    peers.delete("broken", &DeleteParams::default()).await.unwrap();
    peers.delete("laptop", &DeleteParams::default()).await.unwrap();
    until_said(show, |peers| !peers.contains(&second)).await;
    until_said("ip route show proto 107", |all| !all.contains("10.5.0.")).await;
}

/// A user who may patch this node and nothing else, like its kubelet.
async fn let_nobody_patch_its_node(client: &Client) {
    for object in [
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": { "name": "own-node" },
            "rules": [{
                "apiGroups": [""], "resources": ["nodes", "nodes/status"], "resourceNames": ["n1"], "verbs": ["patch"],
            }],
        }),
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
            "metadata": { "name": "own-node" },
            "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "own-node" },
            "subjects": [{ "apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": NOBODY }],
        }),
    ] {
        apply(client, &serde_json::from_value(object).unwrap(), false).await.unwrap();
    }
}

#[test]
fn the_agents_annotations_come_and_go_on_a_real_api_server() {
    netns::isolated("the_agents_annotations_come_and_go_on_a_real_api_server", || async {
        make_host();
        let Some(server) = ApiServer::start().await else { return };
        let client = server.client(ADMIN).await;
        apply_crds(&client).await;
        create_node(&client, "n1", &[("example.com/mine", "stays")]).await;
        let nodes: Api<core::Node> = Api::all(client.clone());
        let kubeconfig = server.kubeconfig(ADMIN, server.port());
        let started = Instant::now();
        let agent = Agent(kg(&kubeconfig).spawn().unwrap());

        let written = until(&nodes, "wireguard-ip", |annotations| {
            annotations.get(&name("wireguard-ip")).is_some_and(|ip| !ip.is_empty())
        })
        .await;
        println!("annotations complete after {:?}", started.elapsed());
        assert_eq!(written[&name("endpoint")], "192.0.2.11:51820");
        assert_eq!(written[&name("internal-ip")], "10.1.0.11/24");
        assert_eq!(written[&name("wireguard-ip")], "10.4.0.1/16");
        assert_eq!(written[&name("granularity")], "location");
        assert_eq!(written[&name("cni-compatibility-ip")], "10.42.1.7/32");
        assert!(written[&name("key")].parse::<PublicKey>().is_ok());
        assert!(written[&name("last-seen")].parse::<i64>().is_ok_and(|seconds| seconds > 1_700_000_000));
        assert_eq!(written["example.com/mine"], "stays");

        annotate(&nodes, "n1", json!({name("force-endpoint"): "vpn.example.com:7777"})).await;
        until(&nodes, "the forced endpoint", |annotations| {
            annotations.get(&name("endpoint")).is_some_and(|endpoint| endpoint == "vpn.example.com:7777")
        })
        .await;

        peers_come_and_go(&client).await;

        // Others declare it dead; its next heartbeat is not due for half a minute.
        let heartbeat =
            |all: &Annotations| all.get(&name("last-seen")).and_then(|seen| seen.parse::<i64>().ok());
        let before = heartbeat(&written).unwrap();
        wait::until("a heartbeat of now is another one", Duration::from_secs(5), async || {
            Timestamp::now().0 > before
        })
        .await;
        annotate(&nodes, "n1", json!({name("last-seen"): "0"})).await;
        let declared = Instant::now();
        until(&nodes, "a new heartbeat", |all| heartbeat(all) > Some(before)).await;
        assert!(declared.elapsed() < Duration::from_secs(10), "{:?}", declared.elapsed());

        drop(agent);
        let condition = |kind: &str, reason: &str| json!({"type": kind, "status": "True", "reason": reason});
        let conditions =
            [condition("NetworkUnavailable", "KiloIsStarting"), condition("DiskPressure", "Full")];
        let patch = Patch::Strategic(json!({"status": {"conditions": conditions}}));
        nodes.patch_status("n1", &PatchParams::default(), &patch).await.unwrap();
        let_nobody_patch_its_node(&client).await;
        let kubelet = server.kubeconfig(NOBODY, server.port());
        let removed = kg(&kubelet).arg("uninstall").output().unwrap();
        let said = String::from_utf8_lossy(&[removed.stdout, removed.stderr].concat()).into_owned();
        assert!(removed.status.success() && said.contains("removed: annotations of node n1"), "{said}");
        let left =
            until(&nodes, "annotations gone", |annotations| !annotations.contains_key(&name("key"))).await;
        assert_eq!(left["example.com/mine"], "stays");
        assert_eq!(left[&name("force-endpoint")], "vpn.example.com:7777", "the user's own stay");
        for gone in
            ["endpoint", "internal-ip", "last-seen", "wireguard-ip", "granularity", "cni-compatibility-ip"]
        {
            assert!(!left.contains_key(&name(gone)), "{gone} is still there");
        }
        let status = nodes.get("n1").await.unwrap().status.unwrap();
        let kinds: Vec<_> =
            status.conditions.into_iter().flatten().map(|condition| condition.type_).collect();
        assert_eq!(
            kinds,
            ["DiskPressure"],
            "what agents said of the pods' network is gone, and nothing else"
        );
        assert_eq!(netns::sh("ip -o link show kilo0 2>/dev/null || true"), "");
    });
}

#[test]
fn the_nodes_external_ip_is_the_endpoint_where_no_interface_is_public() {
    netns::isolated("the_nodes_external_ip_is_the_endpoint_where_no_interface_is_public", || async {
        make_host();
        netns::sh("ip address del 192.0.2.11/32 dev eth0");
        let Some(server) = ApiServer::start().await else { return };
        let client = server.client(ADMIN).await;
        apply_crds(&client).await;
        create_node(&client, "n1", &[]).await;
        create_member(&client, 3, "elsewhere").await;
        let nodes: Api<core::Node> = Api::all(client.clone());
        api::grant_agent(&client).await;
        let kubeconfig = server.kubeconfig(api::AGENT, server.port());
        let agent = Agent(kg(&kubeconfig).spawn().unwrap());
        until(&nodes, "the interface's endpoint", at_endpoint("10.1.0.11:51820")).await;
        let warning = "curl -s http://127.0.0.1:1107/status";
        until_said(warning, |status| status.contains("10.1.0.11:51820 is private")).await;

        let event = event_about_node(&client, "PrivateEndpoint").await;
        assert!(event.contains("10.1.0.11:51820") && event.contains("ExternalIP"), "{event}");
        // Another Node object with the private address of this one.
        create_member(&client, 4, "").await;
        annotate(&nodes, "n4", json!({name("internal-ip"): "10.1.0.11/24"})).await;
        let event = event_about_node(&client, "AddressConflict").await;
        assert!(event.contains("10.1.0.11") && event.contains("n4"), "{event}");
        nodes.delete("n4", &DeleteParams::default()).await.unwrap();
        assert_eq!(events_about_node(&client, "PrivateEndpoint").await.len(), 1, "said once");

        // A cloud controller writes this some time after the node has joined.
        let addresses = json!({"status": {"addresses": [
            {"type": "InternalIP", "address": "10.1.0.11"},
            {"type": "ExternalIP", "address": "203.0.113.9"},
        ]}});
        nodes.patch_status("n1", &PatchParams::default(), &Patch::Merge(&addresses)).await.unwrap();
        until(&nodes, "the external endpoint", at_endpoint("203.0.113.9:51820")).await;
        until_said(warning, |status| !status.is_empty() && !status.contains("is private")).await;
        annotate(&nodes, "n1", json!({name("force-endpoint"): "198.51.100.4:51820"})).await;
        until(&nodes, "the forced endpoint", at_endpoint("198.51.100.4:51820")).await;
        annotate(&nodes, "n1", json!({name("force-endpoint"): null})).await;
        netns::sh("ip address add 192.0.2.11/32 dev eth0");
        until(&nodes, "the public interface's endpoint", at_endpoint("192.0.2.11:51820")).await;
        drop(agent);
    });
}

/// Messages of the events with that reason about the node n1, as `kubectl describe node` finds them.
async fn events_about_node(client: &Client, reason: &str) -> Vec<String> {
    let about = format!(
        "involvedObject.kind=Node,involvedObject.name=n1,involvedObject.uid=n1,reason={reason},type=Warning"
    );
    let events: Api<core::Event> = Api::all(client.clone());
    let found = events.list(&ListParams::default().fields(&about)).await.unwrap();
    found.items.into_iter().filter_map(|event| event.message).collect()
}

async fn event_about_node(client: &Client, reason: &str) -> String {
    let what = format!("an Event {reason}");
    wait::until(&what, Duration::from_secs(15), async || events_about_node(client, reason).await.pop()).await
}

/// Another node of the location `location`, with a current heartbeat.
pub(crate) async fn create_member(client: &Client, number: u8, location: &str) {
    let unix = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    let mut node = core::Node::default();
    node.metadata.name = Some(format!("n{number}"));
    let annotations = [
        ("endpoint", format!("192.0.2.{number}:51820")),
        ("internal-ip", format!("10.1.0.{number}/24")),
        ("key", PublicKey([number; 32]).to_string()),
        ("last-seen", unix.to_string()),
        ("location", location.to_owned()),
    ];
    node.metadata.annotations =
        Some(annotations.into_iter().map(|(key, value)| (name(key), value)).collect());
    node.spec = Some(core::NodeSpec { pod_cidr: Some(format!("10.42.{number}.0/24")), ..Default::default() });
    Api::<core::Node>::all(client.clone()).create(&PostParams::default(), &node).await.unwrap();
}

#[test]
fn what_users_annotate_is_obeyed_and_taken_back() {
    netns::isolated("what_users_annotate_is_obeyed_and_taken_back", || async {
        make_host();
        let Some(server) = ApiServer::start().await else { return };
        let client = server.client(ADMIN).await;
        apply_crds(&client).await;
        create_node(&client, "n1", &[]).await;
        create_member(&client, 2, "").await;
        create_member(&client, 3, "elsewhere").await;
        let nodes: Api<core::Node> = Api::all(client.clone());
        let kubeconfig = server.kubeconfig(ADMIN, server.port());
        let agent = Agent(kg(&kubeconfig).spawn().unwrap());
        let reads = |key: &'static str, value: &'static str| {
            let nodes = &nodes;
            async move {
                let wanted = |all: &Annotations| all.get(&name(key)).is_some_and(|found| found == value);
                until(nodes, &format!("{key}={value}"), wanted).await;
            }
        };
        reads("wireguard-ip", "10.4.0.1/16").await;
        let peers = "wg show kilo0";
        let elsewhere = PublicKey([3; 32]).to_string();
        until_said(peers, |said| said.contains(&elsewhere)).await;

        annotate(&nodes, "n1", json!({name("persistent-keepalive"): "17"})).await;
        until_said("wg show kilo0 persistent-keepalive", |said| said.contains("17")).await;
        annotate(&nodes, "n3", json!({name("allowed-location-ips"): "198.51.100.0/24,rubbish"})).await;
        until_said("ip route show 198.51.100.0/24", |route| route.contains("dev kilo0")).await;
        annotate(&nodes, "n1", json!({name("force-internal-ip"): "10.9.9.9/24"})).await;
        reads("internal-ip", "10.9.9.9/24").await;
        annotate(&nodes, "n1", json!({name("force-internal-ip"): "-"})).await;
        reads("internal-ip", "").await;
        annotate(
            &nodes,
            "n1",
            json!({name("force-internal-ip"): "rubbish", name("force-endpoint"): "rubbish"}),
        )
        .await;
        reads("internal-ip", "10.1.0.11/24").await;
        reads("endpoint", "192.0.2.11:51820").await;

        // The other node leads: this one no longer has WireGuard peers or an address.
        annotate(&nodes, "n2", json!({name("leader"): ""})).await;
        reads("wireguard-ip", "").await;
        until_said(peers, |said| !said.contains(&elsewhere)).await;
        annotate(&nodes, "n2", json!({name("leader"): null})).await;
        reads("wireguard-ip", "10.4.0.1/16").await;
        // It gets a location of its own by annotation, which overrides the label; then the server restarts.
        annotate(&nodes, "n1", json!({name("location"): "far"})).await;
        let both = |said: &str| said.contains(&PublicKey([2; 32]).to_string()) && said.contains(&elsewhere);
        until_said(peers, both).await;
        server.stop_api();
        let goes_on = async || netns::sh(peers).contains(&elsewhere);
        wait::stays("without the API server the peers stay", Duration::from_secs(2), goes_on).await;
        server.start_api().await;
        apply(&client, &peer(9, "10.5.0.1/32"), false).await.unwrap();
        until_said(peers, |said| said.contains(&PublicKey([9; 32]).to_string())).await;
        drop(agent);
    });
}

#[test]
fn an_agent_that_starts_while_the_api_server_is_away_works_with_the_last_good_topology() {
    let test = "an_agent_that_starts_while_the_api_server_is_away_works_with_the_last_good_topology";
    netns::isolated(test, || async {
        make_host();
        let Some(server) = ApiServer::start().await else { return };
        let client = server.client(ADMIN).await;
        apply_crds(&client).await;
        create_node(&client, "n1", &[]).await;
        create_member(&client, 3, "elsewhere").await;
        apply(&client, &peer(9, "10.5.0.1/32"), false).await.unwrap();
        let proxy = Proxy::start(server.port()).await;
        let kubeconfig = server.kubeconfig(ADMIN, proxy.port());
        let first = Agent(kg(&kubeconfig).spawn().unwrap());
        let complete =
            |said: &str| [3, 9].iter().all(|key| said.contains(&PublicKey([*key; 32]).to_string()));
        until_said("wg show kilo0", complete).await;
        let file = "/var/lib/kilo/last-good.json";
        until_said(&format!("cat {file}"), |said| said.contains("10.42.3.0/24") && said.contains("laptop"))
            .await;
        assert_eq!(netns::sh(&format!("stat -c %a {file}")).trim(), "600");
        let tables = "bpftool map dump pinned $(ls -d /sys/fs/bpf/kilo/*/*prefix_v4 /sys/fs/bpf/kilo/*PREFIX_V4 /sys/fs/bpf/kilo/*/PREFIX_V4 2>/dev/null | head -1) | grep -c '\"key\"'";
        let before = netns::sh(tables);

        // The host reboots while the API server is away.
        drop(first);
        // Ending the userspace device's process, in this namespace only, removes the device.
        netns::sh(
            "rm -rf /sys/fs/bpf/kilo; kill $(pgrep --ns $$ --nslist net,mnt -f '[u]serspace-wireguard kilo0')",
        );
        until_said("wg show kilo0", str::is_empty).await;
        until_said("ip -o link show kilo0", str::is_empty).await;
        proxy.set(Mode::Cut);
        let started = Instant::now();
        let second = Agent(kg(&kubeconfig).spawn().unwrap());
        until_said("wg show kilo0", complete).await;
        println!("without API server, complete after {:?}", started.elapsed());
        for destination in ["10.42.3.0/24", "10.1.0.3", "10.5.0.1"] {
            until_said(&format!("ip route show {destination}"), |route| route.contains("dev kilo0")).await;
        }
        assert_eq!(netns::sh(tables), before, "the tables are as they were");

        proxy.set(Mode::Open);
        let nodes: Api<core::Node> = Api::all(client.clone());
        create_member(&client, 4, "new").await;
        until_said("wg show kilo0", |said| said.contains(&PublicKey([4; 32]).to_string())).await;
        let seen = until(&nodes, "a heartbeat", |all| all.contains_key(&name("last-seen"))).await;
        assert_eq!(seen[&name("wireguard-ip")], "10.4.0.1/16");
        drop(second);
        let uninstalled = kg(&kubeconfig).arg("uninstall").status().unwrap();
        assert!(uninstalled.success() && !Path::new(file).exists(), "it may hold pre-shared keys");
    });
}

#[test]
fn an_overloaded_api_server_is_asked_less_and_less_and_holds_up_nothing_on_the_host() {
    let test = "an_overloaded_api_server_is_asked_less_and_less_and_holds_up_nothing_on_the_host";
    netns::isolated(test, || async {
        make_host();
        let Some(server) = ApiServer::start().await else { return };
        let client = server.client(ADMIN).await;
        apply_crds(&client).await;
        create_node(&client, "n1", &[]).await;
        let nodes: Api<core::Node> = Api::all(client.clone());
        let front = Front::start(client.clone()).await;
        let _agent = Agent(kg(&plain_kubeconfig(&server.file(""), front.port())).spawn().unwrap());
        until(&nodes, "the first endpoint", at_endpoint("192.0.2.11:51820")).await;
        until_said("ip -o link show kilo0", |said| said.contains("UP")).await;

        // Open watches continue; any other request is refused.
        front.set(Manner::Busy);
        annotate(&nodes, "n1", json!({name("force-endpoint"): "192.0.2.99:9"})).await;
        apply(&client, &peer(9, "10.5.0.1/32"), false).await.unwrap();
        until_said("wg show kilo0", |said| said.contains(&PublicKey([9; 32]).to_string())).await;
        wait::time_passes(Duration::from_secs(11), "attempts are counted").await;
        let asked = front.asked();
        let patches = asked.iter().filter(|(_, what)| what.starts_with("PATCH")).count();
        println!("{patches} attempts in 11 s");
        assert!((2..=4).contains(&patches), "after 0, 2, 6, 14 s: {asked:?}");

        front.set(Manner::Honest);
        until(&nodes, "the forced endpoint", at_endpoint("192.0.2.99:9")).await;
    });
}

#[test]
fn an_api_server_that_takes_requests_and_never_answers_holds_up_nothing_on_the_host() {
    let test = "an_api_server_that_takes_requests_and_never_answers_holds_up_nothing_on_the_host";
    netns::isolated(test, || async {
        make_host();
        let Some(server) = ApiServer::start().await else { return };
        let client = server.client(ADMIN).await;
        apply_crds(&client).await;
        create_node(&client, "n1", &[]).await;
        create_member(&client, 3, "elsewhere").await;
        let nodes: Api<core::Node> = Api::all(client.clone());
        let proxy = Proxy::start(server.port()).await;
        let _agent = Agent(kg(&server.kubeconfig(ADMIN, proxy.port())).spawn().unwrap());
        until(&nodes, "the first endpoint", at_endpoint("192.0.2.11:51820")).await;
        until_said("ip route show 10.42.3.0/24", |route| route.contains("dev kilo0")).await;

        // The agent has to write another address, and gets no response.
        proxy.set(Mode::Silent);
        let holds = proxy.holds_a_request();
        netns::sh("ip address add 192.0.2.12/32 dev eth0; ip address del 192.0.2.11/32 dev eth0");
        holds.await;
        netns::sh("ip route del 10.42.3.0/24");
        let started = Instant::now();
        until_said("ip route show 10.42.3.0/24", |route| route.contains("dev kilo0")).await;
        println!("the route is back after {:?}", started.elapsed());
        assert!(started.elapsed() < Duration::from_secs(10), "an answer may take 20 s");
        proxy.set(Mode::Open);
        until(&nodes, "the other endpoint", at_endpoint("192.0.2.12:51820")).await;
    });
}

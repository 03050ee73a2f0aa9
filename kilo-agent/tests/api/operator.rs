//! What an operator sees: log lines, Events, conditions, `/health` and metrics of a real `kg` on a real API
//! server.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::{
    fs::File,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use k8s_openapi::api::core::v1 as core;
use kilo_agent::timestamp::Timestamp;
use kilo_core::{objects::peer::Peer, wireguard::key::SecretKey};
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, ListParams, Patch, PatchParams},
};
use serde_json::{Value, json};

use crate::{
    agent::{Agent, annotate, create_member, kg, make_host, name, peer, until_said},
    api::{self, ADMIN, ApiServer, apply, apply_crds, create_node},
    netns,
    wait::task,
};

const LIMIT: Duration = Duration::from_secs(60);

/// One server, one node `n1`, and its agent with the rights of the manifests.
struct Site {
    server: ApiServer,
    client: Client,
    nodes: Api<core::Node>,
    log: PathBuf,
    _agent: Agent,
}

impl Site {
    async fn start(pod_cidr: bool) -> Option<Self> {
        make_host();
        let server = ApiServer::start().await?;
        let client = server.client(ADMIN).await;
        apply_crds(&client).await;
        api::grant_agent(&client).await;
        let nodes: Api<core::Node> = Api::all(client.clone());
        if pod_cidr {
            create_node(&client, "n1", &[]).await;
        } else {
            let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}});
            apply(&client, &serde_json::from_value(node).unwrap(), false).await.unwrap();
        }
        let log = PathBuf::from("/var/lib/kg.log");
        let file = File::create(&log).unwrap();
        let mut command = kg(&server.kubeconfig(api::AGENT, server.port()));
        let command = command.stdout(file.try_clone().unwrap()).stderr(file);
        let agent = Agent(command.spawn().unwrap());
        Some(Self { server, client, nodes, log, _agent: agent })
    }

    /// Reasons and messages of the Events about an object, found by its uid as `kubectl describe` does.
    async fn events(&self, object: &str, uid: &str) -> Vec<(String, String)> {
        let events: Api<core::Event> = Api::all(self.client.clone());
        let about = format!("involvedObject.name={object},involvedObject.uid={uid}");
        let found = events.list(&ListParams::default().fields(&about)).await.unwrap();
        let text = |event: core::Event| (event.reason.unwrap(), event.message.unwrap());
        found.items.into_iter().map(text).collect()
    }

    /// Waits for an Event about a Node.
    async fn event(&self, node: &str, reason: &str, part: &str) {
        task::until(&format!("{reason} {part:?} about {node}"), LIMIT, async || {
            let events = self.events(node, node).await;
            if events.iter().any(|(other, text)| other == reason && text.contains(part)) {
                return Ok(());
            }
            Err(format!("{events:#?}\n{}", std::fs::read_to_string(&self.log).unwrap()))
        })
        .await;
    }

    /// Waits until the annotation `state` of a node satisfies `wanted`.
    async fn state(&self, node: &str, wanted: impl Fn(&str) -> bool) {
        task::until(&format!("the annotation of {node} is as wanted"), LIMIT, async || {
            let node = self.nodes.get(node).await.unwrap();
            let state = node.annotations().get(&name("state")).cloned().unwrap_or_default();
            if wanted(&state) { Ok(()) } else { Err(state) }
        })
        .await;
    }

    /// The last line of the log with this message.
    async fn line(&self, message: &str) -> Value {
        task::until(&format!("a line {message:?}"), LIMIT, async || {
            let log = std::fs::read_to_string(&self.log).unwrap();
            let mut lines = log.lines().rev().filter_map(|line| serde_json::from_str::<Value>(line).ok());
            lines.find(|line| field(line, "message") == message).ok_or(log)
        })
        .await
    }

    /// Waits until a page of the agent satisfies `wanted`; returns it.
    async fn page(&self, path: &str, wanted: impl Fn(&str) -> bool) -> String {
        task::until(&format!("{path} is as wanted"), Duration::from_secs(90), async || {
            let page = netns::sh(&format!("curl -s http://127.0.0.1:1107{path} || true"));
            if wanted(&page) { Ok(page) } else { Err(page) }
        })
        .await
    }
}

/// A field of a log line, wherever the format puts it.
fn field(line: &Value, name: &str) -> String {
    let value = line.get(name).or_else(|| line.get("fields")?.get(name));
    value.and_then(Value::as_str).unwrap_or_default().to_owned()
}

fn sorted(events: &[(String, String)]) -> Vec<&str> {
    let mut reasons = reasons(events);
    reasons.sort_unstable();
    reasons
}

fn reasons(events: &[(String, String)]) -> Vec<&str> {
    events.iter().map(|(reason, _)| reason.as_str()).collect()
}

/// Path of kubectl where `cargo xtask kube-tools` puts it.
fn kubectl() -> Option<PathBuf> {
    let home = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")))?;
    Some(home.join("kilo/kube-tools/kubectl")).filter(|path| path.is_file())
}

#[test]
fn leaders_and_members_that_come_and_go_are_announced() {
    netns::isolated("leaders_and_members_that_come_and_go_are_announced", || async {
        let Some(site) = Site::start(true).await else { return };
        site.event("n1", "JoinedMesh", "leader of location:").await;
        site.event("n1", "LeadsLocation", "leads location:").await;
        assert_eq!(
            field(&site.line("this node takes part in the mesh").await, "role"),
            "leader of location:"
        );

        site.state("n1", |state| state == "leader of location:").await;

        // Another node asks to lead.
        create_member(&site.client, 2, "").await;
        annotate(&site.nodes, "n2", json!({name("leader"): ""})).await;
        site.event("n1", "FollowsLeader", "follows n2").await;
        let line = site.line("leader changed").await;
        assert_eq!((field(&line, "old"), field(&line, "new")), ("n1".to_owned(), "n2".to_owned()), "{line}");
        assert!(field(&line, "why").contains("asks to lead"), "{line}");
        assert_eq!(field(&line, "level"), "INFO", "{line}");
        let line = site.line("role of this node changed").await;
        assert!(field(&line, "new").contains("which n2 leads"), "{line}");
        site.state("n1", |state| state == "member of location:").await;

        // It is deleted: n1 reports its own leadership and the other's leaving.
        site.nodes.delete("n2", &DeleteParams::default()).await.unwrap();
        site.event("n1", "LeadsLocation", "after n2 (the previous leader left: its Node object was").await;
        site.event("n2", "LeftMesh", "its Node object was deleted").await;
        let line = site.line("node left the mesh").await;
        assert_eq!(field(&line, "subject"), "n2");

        // A location of its own comes and goes.
        create_member(&site.client, 3, "away").await;
        let line = site.line("location joined the mesh").await;
        assert_eq!(
            (field(&line, "location"), field(&line, "new")),
            ("location:away".to_owned(), "n3".to_owned())
        );
        annotate(&site.nodes, "n3", json!({name("key"): null})).await;
        site.event("n3", "LeftMesh", "it has no key").await;
        assert_eq!(field(&site.line("location has no ready node left").await, "old"), "n3");

        let events = site.events("n1", "n1").await;
        let wanted = ["FollowsLeader", "JoinedMesh", "LeadsLocation", "LeadsLocation"];
        let mut found = sorted(&events);
        found.retain(|reason| *reason != "TunnelSilent");
        assert_eq!(found, wanted, "each once: {events:#?}");
    });
}

#[test]
fn a_tunnel_that_does_not_answer_is_reported_until_its_node_is_deleted() {
    netns::isolated("a_tunnel_that_does_not_answer_is_reported_until_its_node_is_deleted", || async {
        let Some(site) = Site::start(true).await else { return };
        site.page("/health", |page| page == "ok\n").await;
        create_member(&site.client, 3, "away").await;
        // On a busy machine, something else may be wrong at first.
        let silent = "location:away (n3 at 192.0.2.3:51820) does not answer";
        let health = site.page("/health", |page| page.contains(silent)).await;
        assert!(health.starts_with("degraded: "), "{health}");
        assert!(health.contains("there was no handshake yet"), "{health}");
        let code = netns::sh("curl -s -o /dev/null -w '%{http_code}' http://127.0.0.1:1107/health");
        assert_eq!(code, "200", "readiness does not fail for another location's fault");
        site.event("n1", "TunnelSilent", "location:away (n3 at 192.0.2.3:51820) does not answer").await;
        assert_eq!(
            field(&site.line("tunnel does not answer although bytes are sent").await, "tunnel"),
            "location:away"
        );
        site.page("/metrics", |page| page.contains("kilo_silent_tunnels 1\n")).await;
        let labels = "location=\"location:away\",node=\"n3\"";
        site.page("/metrics", |page| page.contains(labels)).await;
        let kgctl = env!("CARGO_BIN_EXE_kgctl");
        let status = netns::sh(&format!("{kgctl} status n1 --agent=http://127.0.0.1:1107"));
        assert!(status.contains("Agent of n1") && status.contains(": degraded\n"), "{status}");
        assert!(status.contains("warning: location:away (n3"), "{status}");

        site.nodes.delete("n3", &DeleteParams::default()).await.unwrap();
        site.page("/health", |page| page == "ok\n").await;
        site.page("/metrics", |page| page.contains("kilo_silent_tunnels 0\n")).await;
        let events = site.events("n1", "n1").await;
        assert_eq!(
            reasons(&events).iter().filter(|reason| **reason == "TunnelSilent").count(),
            1,
            "{events:#?}"
        );
        assert!(!reasons(&events).contains(&"TunnelAnswers"), "it never did: {events:#?}");
    });
}

#[test]
fn a_peer_has_a_condition_to_wait_for() {
    netns::isolated("a_peer_has_a_condition_to_wait_for", || async {
        let Some(site) = Site::start(true).await else { return };
        site.line("this node takes part in the mesh").await;
        apply(&site.client, &peer(9, "10.5.0.1/32"), false).await.unwrap();
        let kubeconfig = site.server.kubeconfig(ADMIN, site.server.port());
        let peers: Api<Peer> = Api::all(site.client.clone());
        until_ready(&peers, &kubeconfig, "True").await;
        let laptop = peers.get("laptop").await.unwrap();
        let uid = laptop.uid().unwrap();
        let accepted = laptop.status.unwrap().conditions.remove(0);
        assert_eq!((accepted.type_.as_str(), accepted.reason.as_str()), ("Ready", "Accepted"));
        println!("{}", site.table().await);
        assert!(
            site.table()
                .await
                .contains("[\"laptop\",\"[\\\"10.5.0.1/32\\\"]\",null,null,null,null,\"True\",\"Accepted\"")
        );

        // The key of this node's own device.
        let key = site.nodes.get("n1").await.unwrap().annotations()[&name("key")].clone();
        let stolen = json!({"spec": {"publicKey": key}});
        peers.patch("laptop", &PatchParams::default(), &Patch::Merge(&stolen)).await.unwrap();
        until_ready(&peers, &kubeconfig, "False").await;
        let status = peers.get("laptop").await.unwrap().status.unwrap();
        assert!(!status.accepted);
        assert_eq!(status.conditions[0].reason, "KeyOfAnother");
        assert!(status.conditions[0].message.contains("belongs to location:"), "{:?}", status.conditions);
        assert_ne!(status.conditions[0].last_transition_time, "");
        // Event names are random, and so is the order of the list.
        task::until("both Events", LIMIT, async || {
            let events = site.events("laptop", &uid).await;
            if sorted(&events) == ["PeerAccepted", "PeerRefused"] {
                Ok(())
            } else {
                Err(format!("{events:#?}"))
            }
        })
        .await;
        assert_eq!(field(&site.line("peer joined the mesh").await, "peer"), "laptop");
        assert!(field(&site.line("peer is not in the mesh").await, "why").contains("spec.publicKey"));
        peers.delete("laptop", &DeleteParams::default()).await.unwrap();
        assert_eq!(field(&site.line("peer left the mesh").await, "peer"), "laptop");
    });
}

#[test]
fn the_last_handshake_and_endpoint_of_a_peer_are_in_its_object() {
    netns::isolated("the_last_handshake_and_endpoint_of_a_peer_are_in_its_object", || async {
        let Some(site) = Site::start(true).await else { return };
        site.line("this node takes part in the mesh").await;
        let secret = SecretKey::from_bytes([0x48; 32]);
        let mut laptop = peer(9, "10.5.0.1/32");
        laptop.data["spec"]["publicKey"] = json!(secret.public().to_string());
        apply(&site.client, &laptop, false).await.unwrap();
        let known = format!("wg show kilo0 peers | grep -q {}", secret.public());
        until_said(&format!("{known} && echo yes"), |said| said.contains("yes")).await;
        let peers: Api<Peer> = Api::all(site.client.clone());
        // Longer than the agent's interval between two checks of handshakes.
        task::stays(
            "a peer that is known, and away, has shaken no hands",
            Duration::from_secs(7),
            async || {
                let status = peers.get("laptop").await.unwrap().status.unwrap_or_default();
                (status.last_handshake, status.endpoint) == (None, None)
            },
        )
        .await;

        // It connects, from another network.
        netns::sh(
            "mkdir -p /run/netns; ip netns add b; ip -n b link set lo up; ip link add va type veth peer name vb netns b; \
             ip link set va up; ip -n b link set vb up; ip address add 198.51.100.1/24 dev va; \
             ip -n b address add 198.51.100.7/24 dev vb",
        );
        let mut device = Command::new("ip");
        device.args(["netns", "exec", "b", env!("CARGO_BIN_EXE_kg"), "userspace-wireguard", "wgb"]);
        let _device = Agent(device.stdout(Stdio::null()).spawn().unwrap());
        until_said("ls /run/wireguard", |sockets| sockets.contains("wgb.sock")).await;
        std::fs::write("/run/laptop.key", secret.reveal()).unwrap();
        let key = site.nodes.get("n1").await.unwrap().annotations()[&name("key")].clone();
        netns::sh(&format!(
            "wg set wgb listen-port 40123 private-key /run/laptop.key peer {key} endpoint 198.51.100.1:51820 \
             persistent-keepalive 1 allowed-ips 10.4.0.0/16; ip -n b link set wgb up"
        ));
        let written = task::until("the handshake is in the object", LIMIT, async || {
            let laptop = peers.get("laptop").await.unwrap();
            match laptop.status.as_ref().is_some_and(|status| status.last_handshake.is_some()) {
                true => Ok(laptop),
                false => Err(format!("{laptop:?}: {}", netns::sh("wg show kilo0; wg show wgb"))),
            }
        })
        .await;
        let status = written.status.clone().unwrap();
        let time: Timestamp = status.last_handshake.unwrap().parse().unwrap();
        assert!(Timestamp::now().0 - time.0 < 60, "{time}");
        assert_eq!(status.endpoint.as_deref(), Some("198.51.100.7:40123"));
        assert!(status.accepted && status.conditions.len() == 1, "the condition stays");
        let table = site.table().await;
        assert!(
            table.contains("\"True\",\"Accepted\",\"") && table.contains("\"198.51.100.7:40123\""),
            "{table}"
        );
        task::stays(
            "packets pass each second, and nothing is written",
            Duration::from_secs(15),
            async || peers.get("laptop").await.unwrap().resource_version() == written.resource_version(),
        )
        .await;
    });
}

impl Site {
    /// Rows that `kubectl get peers` prints.
    async fn table(&self) -> String {
        let request = hyper::http::Request::get("/apis/kilo.squat.ai/v1alpha1/peers")
            .header("Accept", "application/json;as=Table;v=v1;g=meta.k8s.io")
            .body(Vec::new())
            .unwrap();
        let table: Value = self.client.request(request).await.unwrap();
        table["rows"].as_array().unwrap().iter().map(|row| row["cells"].to_string()).collect()
    }
}

/// Runs `kubectl wait`, or polls where there is no kubectl.
async fn until_ready(peers: &Api<Peer>, kubeconfig: &Path, status: &'static str) {
    let Some(kubectl) = kubectl() else {
        println!("kilo-skip: there is no kubectl; `cargo xtask kube-tools` gets it");
        task::until(&format!("the condition is {status}"), Duration::from_secs(30), async || {
            let peer = peers.get("laptop").await.unwrap();
            peer.status.is_some_and(|said| {
                said.conditions.iter().any(|one| one.type_ == "Ready" && one.status == status)
            })
        })
        .await;
        return;
    };
    let (kubectl, kubeconfig) = (kubectl.display().to_string(), kubeconfig.display().to_string());
    let line = format!(
        "{kubectl} --kubeconfig {kubeconfig} wait --timeout=30s --for=condition=Ready={status} peer/laptop"
    );
    let said = tokio::task::spawn_blocking(move || netns::sh(&line)).await.unwrap();
    assert!(said.contains("condition met"), "{said}");
}

#[test]
fn a_node_that_does_not_come_into_the_mesh_says_why() {
    netns::isolated("a_node_that_does_not_come_into_the_mesh_says_why", || async {
        let Some(site) = Site::start(false).await else { return };
        let started = Instant::now();
        site.event("n1", "NotInMesh", "is not in the mesh: it has no pod CIDR").await;
        assert!(started.elapsed() > Duration::from_secs(25), "a node that starts is given time");
        site.state("n1", |state| state.starts_with("not in the mesh: it has no pod CIDR")).await;
        let spec = json!({"spec": {"podCIDR": "10.42.1.0/24", "podCIDRs": ["10.42.1.0/24"]}});
        site.nodes.patch("n1", &PatchParams::default(), &Patch::Merge(&spec)).await.unwrap();
        site.event("n1", "JoinedMesh", "leader of location:").await;
        site.state("n1", |state| state == "leader of location:").await;
        assert_eq!(
            site.events("n1", "n1").await.iter().filter(|(reason, _)| reason == "NotInMesh").count(),
            1
        );
    });
}

//! `kgctl status` against a real API server and a real agent.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::api;
use crate::netns;
use crate::wait::{task, until};

use std::{
    io::{Read as _, Write as _},
    net::TcpStream,
    path::Path,
    process::Command,
    time::Duration,
};

use k8s_openapi::api::core::v1 as core;
use kilo_agent::{status::Status, timestamp::Timestamp};
use kilo_core::{topology::LeaderReason, wireguard::key::PublicKey};
use kube::{
    Api, Client,
    api::{ListParams, Patch, PatchParams, PostParams},
};
use serde_json::json;

use api::{ADMIN, AGENT, ApiServer, apply, apply_crds, create_node, manifest};

const LIMIT: Duration = Duration::from_secs(20);

fn kgctl(kubeconfig: &Path, arguments: &[&str]) -> (bool, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kgctl"));
    let output = command.arg("--kubeconfig").arg(kubeconfig).arg("status").args(arguments).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.success(), text(output.stdout), text(output.stderr))
}

fn status(kubeconfig: &Path, arguments: &[&str]) -> Status {
    let (success, stdout, stderr) = kgctl(kubeconfig, &[arguments, &["-o", "json"]].concat());
    assert!(success, "{stderr}");
    serde_json::from_str(&stdout).unwrap_or_else(|error| panic!("{error}: {stdout}"))
}

fn scrape() -> String {
    let mut stream = TcpStream::connect("127.0.0.1:1107").unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

fn name(name: &str) -> String {
    format!("kilo.squat.ai/{name}")
}

/// A live node, a dead one in a location of its own, one without annotations, and two peers with the same
/// prefix.
async fn create_objects(client: &Client, now: i64) {
    let member = |endpoint: &str, private: &str, key: u8, seen: i64| {
        [
            (name("endpoint"), endpoint.to_owned()),
            (name("internal-ip"), private.to_owned()),
            (name("key"), PublicKey([key; 32]).to_string()),
            // The live one's is far in the future, because nobody renews it here.
            (name("last-seen"), seen.to_string()),
        ]
    };
    for (node, annotations) in [
        ("n0", member("10.1.0.10:51820", "10.1.0.10/24", 1, now + 3600)),
        ("n2", member("10.1.0.12:51820", "10.1.0.12/24", 2, now - 600)),
    ] {
        let mut pairs: Vec<_> = annotations.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
        let location = name("location");
        if node == "n2" {
            pairs.push((&location, "gone"));
        }
        create_node(client, node, &pairs).await;
    }
    create_node(client, "n1", &[]).await;
    for (peer, prefix) in [("laptop", "10.5.0.1/32"), ("tablet", "10.5.0.1/32")] {
        let key = PublicKey([peer.as_bytes()[0]; 32]).to_string();
        let object = json!({
            "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "Peer", "metadata": {"name": peer},
            "spec": {"allowedIPs": [prefix], "publicKey": key},
        });
        apply(client, &serde_json::from_value(object).unwrap(), false).await.unwrap();
    }
}

/// Without an agent, only the objects are shown.
fn shown_without_agents(kubeconfig: &Path) {
    let (success, table, stderr) = kgctl(kubeconfig, &[]);
    assert!(success, "{stderr}");
    for words in [
        "first by name",
        "the only ready node",
        "its agent last checked in 10m",
        "its agent never checked in",
    ] {
        assert!(table.contains(words), "{words} is missing from\n{table}");
    }
    assert!(table.contains("location:gone   <none>"), "{table}");
    let found = status(kubeconfig, &[]);
    assert_eq!(found.locations[0].leader.as_deref(), Some("n0"));
    let gone = &found.locations[1];
    assert_eq!((gone.name.as_str(), &gone.leader, gone.ready, gone.nodes), ("location:gone", &None, 0, 1));
    assert_eq!((found.locations[0].since, found.agent.as_ref()), (None, None));
    assert_eq!(
        found.peers[1].reason.as_deref(),
        Some("spec.allowedIPs: 10.5.0.1/32 belong to a peer that comes first by name")
    );
    let (success, _, stderr) = kgctl(kubeconfig, &["n0"]);
    assert!(success && stderr.contains("no running pod"), "{stderr}");
    let (success, stdout, stderr) = kgctl(kubeconfig, &["nowhere"]);
    assert!(!success && stdout.is_empty() && stderr.contains("nowhere"), "{stderr}");
}

/// What the agent of n1 adds, and its Prometheus metrics.
fn shown_by_the_agent(found: &Status, now: i64) {
    let agent = found.agent.as_ref().unwrap();
    assert_eq!((agent.node.as_str(), agent.interface.as_str()), ("n1", "kilo0"));
    assert_eq!((&agent.unhealthy, &agent.errors), (&None, &vec![]));
    assert!(agent.drops.contains_key("unknown_sender") && agent.packets.contains_key("steer"));
    let at = |program: &str, interface: &str| {
        agent.programs.iter().any(|at| at.program == program && at.interface == interface)
    };
    assert!(at("kilo_egress", "kilo0") && at("lan_ingress", "eth0"), "{:?}", agent.programs);
    assert!(found.locations[0].since.is_some_and(|since| since.0 >= now));

    // The same figures are in the metrics, even zeros of an idle data path.
    let metrics = scrape();
    for label in agent.drops.keys() {
        let name = format!("kilo_dropped_packets_total{{reason=\"{label}\"}}");
        assert!(metrics.contains(&name), "{name} is missing from\n{metrics}");
    }
    for label in agent.packets.keys() {
        assert!(metrics.contains(&format!("kilo_packets_total{{action=\"{label}\"}}")), "{label}");
    }
    for line in ["kilo_leader 1", "kilo_peers 2", "kilo_wireguard_received_bytes_total{public_key="] {
        assert!(metrics.contains(line), "{line} is missing from\n{metrics}");
    }
}

/// The pod of n1's agent is in the namespace `default`, and those of other nodes are missing.
fn the_agent_is_found_in_its_namespace(kubeconfig: &Path) {
    let (success, _, stderr) = kgctl(kubeconfig, &["n1", "--check", "--namespace=default"]);
    assert!(success, "{stderr}");
    let (success, table, stderr) = kgctl(kubeconfig, &["n1", "--check", "-n", "kube-system"]);
    assert!(!success && stderr.contains("no running pod"), "{table}{stderr}");
    assert!(table.contains("node/n1   tunnels and counters are not available"), "{table}");
    let (success, table, stderr) = kgctl(kubeconfig, &["--check"]);
    let row = |node: &str| {
        table.lines().find(|line| line.starts_with(&format!("node/{node} "))).unwrap_or_default()
    };
    assert!(!success && row("n0").contains("no pod of Kilo is on it"), "{table}{stderr}");
    assert!(row("n1").contains("pod kilo-x is not Ready: `kgctl status n1` shows why"), "{table}");
}

/// Versions of the program and of n1's agent, and the reason why another node's is missing.
async fn versions_of_all_agents(client: &Client, pods: &Api<core::Pod>, kubeconfig: &Path) {
    create_node(client, "n9", &[]).await;
    let pod = json!({
        "metadata": {"name": "kilo-y", "labels": {"app.kubernetes.io/name": "kilo"}},
        "spec": {"nodeName": "n9", "hostNetwork": true, "containers": [{"name": "kilo", "image": "kilo:9"}]},
    });
    pods.create(&PostParams::default(), &serde_json::from_value(pod).unwrap()).await.unwrap();
    let kubeconfig_flag = format!("--kubeconfig={}", kubeconfig.display());
    let version = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kgctl"));
        let output = command.arg("version").args(arguments).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap();
        (output.status.code(), text)
    };
    let (code, table) = version(&[&kubeconfig_flag]);
    assert_eq!(code, Some(3), "one agent does not answer: {table}");
    println!("{table}");
    let own = env!("CARGO_PKG_VERSION");
    let row = |node: &str| table.lines().find(|line| line.starts_with(node)).unwrap().to_owned();
    assert!(table.starts_with(&format!("kgctl {own}\n")), "{table}");
    assert_eq!(row("n1").split_whitespace().collect::<Vec<_>>(), ["n1", own, "kilo"]);
    assert!(row("n9").contains("<unknown>") && row("n9").contains("pod kilo-y is Pending"), "{table}");
    let said: serde_json::Value =
        serde_json::from_str(&version(&[&kubeconfig_flag, "-o", "json"]).1).unwrap();
    assert_eq!((&said["client"], &said["agents"][0]["version"]), (&json!(own), &json!(own)));
    let (code, none) = version(&[&kubeconfig_flag, "--namespace=elsewhere"]);
    assert_eq!(code, Some(3), "{none}");
    assert!(
        none.contains("no pod in namespace elsewhere has the label app.kubernetes.io/name=kilo"),
        "{none}"
    );
    let (code, said) = version(&["--client", "-o", "yaml"]);
    let said: serde_json::Value = serde_yaml_ng::from_str(&said).unwrap();
    assert_eq!(code, Some(0));
    assert_eq!(said, json!({"client": own}));
}

#[test]
fn who_leads_since_when_and_why_is_shown_with_and_without_agents() {
    netns::isolated("who_leads_since_when_and_why_is_shown_with_and_without_agents", || async {
        netns::host(&["10.1.0.11/24", "192.0.2.11/32"], "10.1.0.1");
        let Some(server) = ApiServer::start().await else { return };
        let client = server.client(ADMIN).await;
        apply_crds(&client).await;
        let now = Timestamp::now().0;
        create_objects(&client, now).await;
        let kubeconfig = server.kubeconfig(ADMIN, server.port());

        shown_without_agents(&kubeconfig);
        let mut kg = Command::new(env!("CARGO_BIN_EXE_kg"));
        kg.arg("--kubeconfig").arg(&kubeconfig).args(["--hostname", "n1", "--resync-period", "1s"]);
        let _agent = netns::Agent(kg.spawn().unwrap());
        let url = "--agent=http://127.0.0.1:1107";
        until("the agent's answer", LIMIT, || kgctl(&kubeconfig, &[url]).0);
        until("n1 leads by its public endpoint", LIMIT, || {
            let found = status(&kubeconfig, &[url]);
            let location = found.locations.first();
            location.is_some_and(|location| {
                location.leader.as_deref() == Some("n1")
                    && location.reason == Some(LeaderReason::PublicEndpoint)
            })
        });
        // The status is available shortly before the device has its peers and the first reconcile ends.
        until("the device's peers and a successful reconcile", LIMIT, || {
            let agent = status(&kubeconfig, &[url]).agent.unwrap();
            let names = agent.tunnels.iter().filter_map(|tunnel| tunnel.name.as_deref());
            let peers: Vec<_> = names.filter(|name| name.starts_with("peer:")).collect();
            peers == ["peer:laptop", "peer:tablet"] && !agent.programs.is_empty() && agent.unhealthy.is_none()
        });
        shown_by_the_agent(&status(&kubeconfig, &[url]), now);

        // The leader changes, and the agent reports it.
        let nodes: Api<core::Node> = Api::all(client.clone());
        let ask = json!({"metadata": {"annotations": {name("leader"): ""}}});
        nodes.patch("n0", &PatchParams::default(), &Patch::Merge(&ask)).await.unwrap();
        until("n0 leads because it asks", LIMIT, || {
            let location = status(&kubeconfig, &[url]).locations.remove(0);
            location.leader.as_deref() == Some("n0")
                && location.reason == Some(LeaderReason::Asks)
                && location.changes == Some(1)
        });

        // Through the API server's proxy to the agent's pod, as from any machine.
        let pods: Api<core::Pod> = Api::namespaced(client.clone(), "default");
        let pod = json!({
            "metadata": {"name": "kilo-x", "labels": {"app.kubernetes.io/name": "kilo"}},
            "spec": {"nodeName": "n1", "hostNetwork": true, "containers": [{"name": "kilo", "image": "kilo"}]},
        });
        pods.create(&PostParams::default(), &serde_json::from_value(pod).unwrap()).await.unwrap();
        let running =
            json!({"status": {"phase": "Running", "podIP": "10.1.0.11", "podIPs": [{"ip": "10.1.0.11"}]}});
        pods.patch_status("kilo-x", &PatchParams::default(), &Patch::Merge(&running)).await.unwrap();
        let found = status(&kubeconfig, &["n1"]);
        assert_eq!(found.agent.map(|agent| agent.node), Some("n1".to_owned()));
        assert_eq!(found.nodes.len(), 1);
        let (_, table, _) = kgctl(&kubeconfig, &["n1"]);
        assert!(table.contains("Agent of n1") && table.contains("kilo_egress"), "{table}");
        println!("{table}");
        the_agent_is_found_in_its_namespace(&kubeconfig);

        versions_of_all_agents(&client, &pods, &kubeconfig).await;
        let (_, _, refused) = kgctl(&server.kubeconfig(AGENT, server.port()), &["n1"]);
        assert!(refused.contains("forbidden"), "{refused}");
    });
}

#[test]
fn a_duplicate_address_is_an_event_of_the_node_with_the_rights_of_the_manifests() {
    netns::isolated(
        "a_duplicate_address_is_an_event_of_the_node_with_the_rights_of_the_manifests",
        || async {
            netns::host(&["10.1.0.11/24"], "10.1.0.1");
            let Some(server) = ApiServer::start().await else { return };
            let client = server.client(ADMIN).await;
            apply_crds(&client).await;
            let mut objects = manifest("kilo-kubeadm.yaml");
            objects.retain(|object| {
                object.types.as_ref().unwrap().api_version == "rbac.authorization.k8s.io/v1"
            });
            // Gives this user the rights of the agent's service account.
            for object in &mut objects {
                if let Some(subjects) = object.data.get_mut("subjects") {
                    *subjects = json!([{"kind": "User", "name": AGENT}]);
                }
            }
            for object in &objects {
                apply(&client, object, false).await.unwrap();
            }
            let name = |name: &str| format!("kilo.squat.ai/{name}");
            let seen = (Timestamp::now().0 + 3600).to_string();
            let stale = |address: &str| {
                [
                    (name("endpoint"), "10.1.0.10:51820".to_owned()),
                    (name("internal-ip"), address.to_owned()),
                    (name("key"), PublicKey([1; 32]).to_string()),
                    (name("last-seen"), seen.clone()),
                ]
            };
            let other = stale("10.1.0.11/24");
            let pairs: Vec<_> = other.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
            create_node(&client, "n0", &pairs).await;
            create_node(&client, "n1", &[]).await;
            let kubeconfig = server.kubeconfig(AGENT, server.port());
            let mut kg = Command::new(env!("CARGO_BIN_EXE_kg"));
            kg.arg("--kubeconfig").arg(&kubeconfig).args(["--hostname", "n1", "--resync-period", "1s"]);
            let _agent = netns::Agent(kg.spawn().unwrap());

            let events: Api<core::Event> = Api::namespaced(client.clone(), "default");
            let of_node = ListParams::default().fields("involvedObject.name=n1,reason=AddressConflict");
            let found = task::until("an Event", Duration::from_secs(30), async || {
                Some(events.list(&of_node).await.unwrap().items).filter(|found| !found.is_empty())
            })
            .await;
            let [event] = &found[..] else { panic!("one: {found:?}") };
            let text = event.message.as_deref().unwrap();
            assert!(text.starts_with("n0, n1 claim the private address 10.1.0.11, so packets"), "{text}");
            assert_eq!(
                (event.type_.as_deref(), event.involved_object.uid.as_deref()),
                (Some("Warning"), Some("n1"))
            );
            assert!(scrape().contains("kilo_address_conflicts 1"), "{}", scrape());
            // The Event is still the only one several reconciles later, and the conflict ends when the
            // object changes.
            let nodes: Api<core::Node> = Api::all(client.clone());
            let moved = json!({"metadata": {"annotations": {name("internal-ip"): "10.1.0.10/24"}}});
            nodes.patch("n0", &PatchParams::default(), &Patch::Merge(&moved)).await.unwrap();
            until("the conflict is over", LIMIT, || scrape().contains("kilo_address_conflicts 0"));
            assert_eq!(events.list(&of_node).await.unwrap().items.len(), 1);
        },
    );
}

/// Uses only the roles of the manifests, bound as documented.
#[tokio::test]
async fn why_the_pod_of_a_node_does_not_run_is_shown_to_who_has_the_shipped_roles() {
    let Some(server) = ApiServer::start().await else { return };
    let client = server.client(ADMIN).await;
    apply_crds(&client).await;
    let mut objects = manifest("kilo-kubeadm.yaml");
    objects
        .retain(|object| object.metadata.name.as_deref().is_some_and(|name| name.starts_with("kilo-kgctl")));
    assert_eq!(objects.len(), 4);
    let binding = |kind: &str, role: &str, namespace: Option<&str>| {
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": format!("{kind}Binding"),
            "metadata": {"name": role, "namespace": namespace},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": role},
            "subjects": [{"kind": "User", "name": api::NOBODY}],
        })
    };
    for object in [
        binding("ClusterRole", "kilo-kgctl", None),
        binding("Role", "kilo-kgctl-agents", Some("kube-system")),
    ] {
        objects.push(serde_json::from_value(object).unwrap());
    }
    for object in &objects {
        apply(&client, object, false).await.unwrap();
    }
    for node in ["arm", "tainted", "young"] {
        create_node(&client, node, &[]).await;
    }
    let kubeconfig = server.kubeconfig(api::NOBODY, server.port());
    let (success, table, stderr) = kgctl(&kubeconfig, &[]);
    assert!(success && !table.contains("no pod of Kilo"), "agents may not be pods at all: {table}{stderr}");

    let pods: Api<core::Pod> = Api::namespaced(client.clone(), "kube-system");
    // Status that the kubelet writes for an init container whose program the kernel cannot run.
    let stopped = json!({"name": "install-cni", "image": "", "imageID": "", "ready": false, "restartCount": 2,
        "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 20s restarting failed container"}},
        "lastState": {"terminated": {"exitCode": 255, "message": "exec /bin/sh: exec format error\n"}}});
    let starting = json!({"name": "install-cni", "image": "", "imageID": "", "ready": false, "restartCount": 0,
        "state": {"waiting": {"reason": "PodInitializing"}}});
    for (node, container) in [("arm", stopped), ("young", starting)] {
        let name = format!("kilo-{node}");
        let pod = json!({
            "metadata": {"name": name, "labels": {"app.kubernetes.io/name": "kilo"}},
            "spec": {"nodeName": node, "hostNetwork": true, "containers": [{"name": "kilo", "image": "kilo"}]},
        });
        pods.create(&PostParams::default(), &serde_json::from_value(pod).unwrap()).await.unwrap();
        let status = json!({"status": {"phase": "Pending", "initContainerStatuses": [container]}});
        pods.patch_status(&name, &PatchParams::default(), &Patch::Merge(&status)).await.unwrap();
    }
    let (success, table, stderr) = kgctl(&kubeconfig, &[]);
    assert!(success, "{stderr}");
    println!("{table}");
    let row =
        |node: &str| table.lines().find(|line| line.starts_with(&format!("{node} "))).unwrap_or_default();
    assert!(
        row("arm").contains("CrashLoopBackOff: exec /bin/sh: exec format error; the image is of another"),
        "{table}"
    );
    assert!(row("tainted").contains("no pod of Kilo is on it"), "{table}");
    assert!(
        !row("tainted").contains("log of its pod") && row("young").contains("describe pod kilo-young`"),
        "{table}"
    );
    let (success, table, stderr) = kgctl(&kubeconfig, &["arm"]);
    assert!(success && table.contains("exec format error"), "{table}{stderr}");
    assert!(stderr.contains("no running pod"), "the role suffices to look for it: {stderr}");
}

//! `kgctl status` in scripts: exit codes, waiting, and part of the mesh.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::api;
use crate::wait::task;

use std::{
    io::{Read as _, Write as _},
    net::TcpListener,
    path::Path,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use k8s_openapi::api::core::v1 as core;
use kilo_agent::{status::Status, timestamp::Timestamp};
use kilo_core::wireguard::key::PublicKey;
use kube::{
    Api, Client,
    api::{Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};

use crate::front::plain_kubeconfig;
use api::{ADMIN, ApiServer, NOBODY, apply, apply_crds, bind_nobody, create_node, manifest};

/// `kgctl status`: exit code, standard output and standard error.
fn kgctl(kubeconfig: &Path, arguments: &[&str]) -> (i32, String, String) {
    run("status", kubeconfig, arguments)
}

fn run(subcommand: &str, kubeconfig: &Path, arguments: &[&str]) -> (i32, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kgctl"));
    let output =
        command.arg(subcommand).arg("--kubeconfig").arg(kubeconfig).args(arguments).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

#[tokio::test(flavor = "multi_thread")]
async fn scripts_learn_from_status_whether_all_is_well_and_wait_until_it_is() {
    let Some(server) = ApiServer::start().await else { return };
    let client = server.client(ADMIN).await;
    apply_crds(&client).await;
    let kubeconfig = server.kubeconfig(ADMIN, server.port());
    let name = |name: &str| format!("kilo.squat.ai/{name}");
    let now = Timestamp::now().0;
    // Far in the future, because nobody renews the heartbeat of the ready ones.
    for (at, location, seen) in [(1_u8, "east", now + 3600), (2, "east", now - 600), (3, "west", now + 3600)]
    {
        let annotations = [
            (name("endpoint"), format!("192.0.2.{at}:51820")),
            (name("internal-ip"), format!("10.{at}.0.1/24")),
            (name("key"), PublicKey([at; 32]).to_string()),
            (name("location"), location.to_owned()),
            (name("last-seen"), seen.to_string()),
        ];
        let pairs: Vec<_> = annotations.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        create_node(&client, &format!("n{at}"), &pairs).await;
    }

    let (code, shown, _) = kgctl(&kubeconfig, &[]);
    assert!(code == 0 && shown.starts_with("Not healthy, 1 problem: 2 of 3 nodes ready"), "{shown}");
    assert!(shown.contains("node/n2   not ready: its agent last checked in 10m"), "{shown}");
    assert!(!shown.contains('\u{1b}'), "no colours in a pipe: {shown:?}");
    let (code, shown, said) = kgctl(&kubeconfig, &["--check", "-o", "name", "--not-ready"]);
    assert_eq!((code, shown.as_str()), (3, "node/n2\n"), "{said}");
    // No agent runs in a pod, so that none is missing, and none can be asked.
    let (code, shown, said) = kgctl(&kubeconfig, &["--check", "--location=west", "-o", "name"]);
    assert_eq!((code, shown.as_str()), (0, "node/n3\n"), "{said}");
    let (code, _, said) = kgctl(&kubeconfig, &["--location=north"]);
    assert!(code == 1 && said.contains("choose one of: location:east, location:west"), "{said}");
    let (_, yaml, _) = kgctl(&kubeconfig, &["-o", "yaml"]);
    assert_eq!(serde_yaml_ng::from_str::<Status>(&yaml).unwrap().nodes.len(), 3);
    let (_, wide, _) = kgctl(&kubeconfig, &["-o", "wide"]);
    assert!(wide.contains(&PublicKey([3; 32]).to_string()), "{wide}");

    let (_, plain, _) = run("graph", &kubeconfig, &[]);
    let (code, dot, said) = run("graph", &kubeconfig, &["--paths"]);
    assert_eq!((code, &dot), (0, &plain), "nobody runs agents, so no path is known: {said}");
    assert!(said.contains("tunnel paths of n1 are unknown: its agent did not answer: "), "{said}");

    for name in ["--location=north", "nowhere"] {
        let started = Instant::now();
        let (code, _, said) = kgctl(&kubeconfig, &[name, "--wait", "--timeout=10m"]);
        assert!(code == 1 && said.contains("does not exist"), "{said}");
        assert!(started.elapsed() < Duration::from_secs(30), "{name} is not waited for");
    }
    let started = Instant::now();
    let (code, shown, said) = kgctl(&kubeconfig, &["--wait", "--timeout=5s"]);
    assert!(code == 3 && shown.contains("node/n2"), "{shown}");
    assert!(started.elapsed() < Duration::from_secs(30), "{:?}", started.elapsed());
    let reason = "kgctl: waiting: Not healthy, 1 problem: 2 of 3 nodes ready";
    assert_eq!(said.matches(reason).count(), 1, "once per reason: {said}");
    assert!(said.contains("(node/n2)"), "{said}");
    let waiting = {
        let kubeconfig = kubeconfig.clone();
        thread::spawn(move || kgctl(&kubeconfig, &["--wait", "--timeout=1m"]))
    };
    task::stays("it waits for the node", Duration::from_secs(1), async || !waiting.is_finished()).await;
    let seen = json!({"metadata": {"annotations": {name("last-seen"): (now + 3600).to_string()}}});
    let nodes: Api<core::Node> = Api::all(client);
    nodes.patch("n2", &PatchParams::default(), &Patch::Merge(&seen)).await.unwrap();
    let (code, shown, said) = waiting.join().unwrap();
    assert!(code == 0 && shown.starts_with("Healthy: 3 of 3 nodes ready"), "{shown}{said}");
}

/// Creates a node that takes part; nobody renews its heartbeat.
async fn create_member(client: &Client, name: &str, number: u8) {
    let annotations = [
        ("endpoint", format!("192.0.2.{number}:51820")),
        ("internal-ip", format!("10.{number}.0.1/24")),
        ("key", PublicKey([number; 32]).to_string()),
        ("location", "east".to_owned()),
        ("last-seen", (Timestamp::now().0 + 3600).to_string()),
    ];
    let annotations = annotations.map(|(name, value)| (format!("kilo.squat.ai/{name}"), value));
    let pairs: Vec<_> = annotations.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    create_node(client, name, &pairs).await;
}

/// Creates the pod of a node's agent, Ready or not.
async fn create_pod(client: &Client, namespace: &str, node: &str, ready: &str) {
    let pods: Api<core::Pod> = Api::namespaced(client.clone(), namespace);
    let name = format!("kilo-{node}");
    let pod = json!({
        "metadata": {"name": name, "labels": {"app.kubernetes.io/name": "kilo"}},
        "spec": {"nodeName": node, "hostNetwork": true, "containers": [{"name": "kilo", "image": "kilo"}]},
    });
    pods.create(&PostParams::default(), &serde_json::from_value(pod).unwrap()).await.unwrap();
    let status = json!({"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": ready}]}});
    pods.patch_status(&name, &PatchParams::default(), &Patch::Merge(&status)).await.unwrap();
}

/// Binds rules, or a role of the manifests without any, to the user without rights.
async fn grant(client: &Client, kind: &str, name: &str, rules: &[Value]) {
    let namespace = (kind == "Role").then_some("kube-system");
    let role = manifest("kilo-kubeadm.yaml")
        .into_iter()
        .find(|object| object.metadata.name.as_deref() == Some(name))
        .unwrap_or_else(|| {
            let role = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": kind,
                "metadata": {"name": name, "namespace": namespace}, "rules": rules});
            serde_json::from_value(role).unwrap()
        });
    apply(client, &role, false).await.unwrap();
    bind_nobody(client, (kind, name), namespace).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn agents_that_fail_or_cannot_be_looked_at_are_no_healthy_mesh() {
    let Some(server) = ApiServer::start().await else { return };
    let client = server.client(ADMIN).await;
    apply_crds(&client).await;
    for (number, node) in [(1, "a1"), (2, "fails"), (3, "without")] {
        create_member(&client, node, number).await;
    }
    create_pod(&client, "kube-system", "a1", "True").await;
    create_pod(&client, "kube-system", "fails", "False").await;
    let admin = server.kubeconfig(ADMIN, server.port());

    // By their heartbeats all take part.
    let (code, shown, said) = kgctl(&admin, &[]);
    assert_eq!(code, 0, "{said}");
    assert!(shown.starts_with("Not healthy, 2 problems: 3 of 3 nodes ready, 1 of 1"), "{shown}");
    assert!(
        shown.contains("node/fails     pod kilo-fails is not Ready: `kgctl status fails` shows why"),
        "{shown}"
    );
    assert!(shown.contains("node/without   no pod of Kilo is on it"), "{shown}");
    let (code, shown, said) = kgctl(&admin, &["--check"]);
    assert!(code == 3 && shown.starts_with("Not healthy, 3 problems: "), "{shown}{said}");
    // There is no kubelet, so that the leader's agent cannot be asked.
    assert!(
        shown.contains("node/a1        its agent did not answer, so nothing is known of its tunnels"),
        "{shown}"
    );
    assert!(said.contains("kgctl: node/a1: its agent did not answer"), "{said}");
    let (code, _, said) = kgctl(&admin, &["fails", "--check"]);
    assert!(code == 3 && said.contains("node/fails: tunnels and counters are not available"), "{said}");

    let nobody = server.kubeconfig(NOBODY, server.port());
    grant(&client, "ClusterRole", "kilo-kgctl", &[]).await;
    api::until_may(&client, NOBODY, ("list", "", "nodes"), ("", ""), true).await;
    api::until_may(&client, NOBODY, ("list", "kilo.squat.ai", "peers"), ("", ""), true).await;
    let refused = |code: i32, said: &str, right: &str| {
        assert_eq!(code, 3, "{said}");
        assert!(said.contains(&format!("not allowed to {right} in namespace kube-system")), "{said}");
        assert!(said.contains("--role=kilo-kgctl-agents --user=nobody"), "{said}");
    };
    let (code, shown, said) = kgctl(&nobody, &["--check"]);
    refused(code, &said, "list pods");
    assert!(
        shown.starts_with("Not healthy, 1 problem: ") && shown.contains("node/*    agents are not checked"),
        "{shown}"
    );
    let (code, _, said) = kgctl(&nobody, &[]);
    assert!(code == 0 && said.contains("agents are not checked: not allowed to list pods"), "{said}");
    let list = json!({"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]});
    grant(&client, "Role", "lists-pods", &[list]).await;
    api::until_may(&client, NOBODY, ("list", "", "pods"), ("kube-system", ""), true).await;
    let (code, _, said) = kgctl(&nobody, &["--check"]);
    refused(code, &said, "get pods/proxy");

    // Elsewhere there are none: this account cannot know whether they are in a third namespace.
    let (code, _, said) = kgctl(&admin, &["--check", "--namespace=default"]);
    assert!(code == 3 && said.contains("no pod in namespace default has the label"), "{said}");
    assert!(said.contains("--namespace"), "{said}");
    create_pod(&client, "default", "a1", "True").await;
    let (_, shown, said) = kgctl(&admin, &["--check", "-n", "default"]);
    assert!(shown.contains("node/fails     no pod of Kilo is on it"), "{shown}{said}");
}

/// Runs `kgctl status --wait` with a kubeconfig for a server at this port; it must end in time.
fn waits(port: u16, arguments: &[&str]) -> (i32, String) {
    let directory = tempfile::tempdir().unwrap();
    let kubeconfig = plain_kubeconfig(directory.path(), port);
    let started = Instant::now();
    let (code, shown, said) = kgctl(&kubeconfig, &[&["--wait"], arguments].concat());
    assert!(started.elapsed() < Duration::from_secs(40), "{:?}", started.elapsed());
    assert_eq!(shown, "");
    (code, said)
}

/// A server that answers each request with this status.
fn refuses(code: u16) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let body =
        json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "no", "code": code});
    let answer = format!(
        "HTTP/1.1 {code} X\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.to_string().len()
    );
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(answer.as_bytes());
        }
    });
    port
}

#[test]
fn errors_that_no_waiting_mends_end_it_at_once_and_others_are_named() {
    for (code, words) in [(401, "does not accept the credentials"), (403, "not allowed to list nodes")] {
        let (ended, said) = waits(refuses(code), &["--timeout=10m"]);
        assert_eq!((ended, said.contains(words), said.contains("waiting")), (1, true, false), "{said}");
    }
    for (port, reason) in [
        (api::free_port(), "kgctl: waiting: cannot reach the API server"),
        (refuses(503), "cannot list nodes now (503)"),
        (refuses(429), "cannot list nodes now (429)"),
    ] {
        let (ended, said) = waits(port, &["--timeout=5s"]);
        assert_eq!(ended, 1, "{said}");
        assert_eq!(said.matches("kgctl: waiting: ").count(), 1, "once per reason: {said}");
        assert!(said.contains(reason), "{reason:?} is missing in {said}");
    }
    let free = api::free_port();
    for (arguments, code, words) in [
        (&["--context=other", "--timeout=10m"][..], 1, "\"other\" does not exist"),
        (&["--backend=file", "--timeout=10m"], 1, "needs --backend-dir"),
        (&["--timeout=soon"], 2, "--timeout"),
        (&["--agent=ftp://x", "--timeout=10m"], 1, "http://127.0.0.1:1107"),
    ] {
        let (ended, said) = waits(free, arguments);
        assert_eq!((ended, said.contains(words)), (code, true), "{arguments:?}: {said}");
        assert!(!said.contains("waiting"), "{said}");
    }
    let (code, _, said) = kgctl(Path::new("/nowhere"), &["--wait", "--timeout=10m"]);
    assert!(code == 1 && said.contains("/nowhere") && !said.contains("waiting"), "{said}");
    let away = format!("--agent=http://127.0.0.1:{free}");
    let (code, said) = waits(free, &[&away, "--timeout=3s"]);
    assert!(code == 1 && said.contains("waiting: the agent at"), "{said}");
}

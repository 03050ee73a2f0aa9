//! What `kgctl` does in a node's pod, and its shell completion: on a real API server, without kubelets.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::api;
use crate::wait::until;

use std::{
    collections::BTreeMap,
    io::Read as _,
    net::TcpListener,
    os::unix::fs::PermissionsExt as _,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use k8s_openapi::api::core::v1 as core;
use kube::{
    Api, Client,
    api::{Patch, PatchParams, PostParams},
};
use serde_json::json;

use api::{ADMIN, ApiServer, NOBODY, apply, apply_crds, bind_nobody, create_node, manifest};

/// Exit code, standard output and standard error.
fn run(kubeconfig: &Path, arguments: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kgctl"));
    let output = command.arg("--kubeconfig").arg(kubeconfig).args(arguments).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

fn kgctl(kubeconfig: &Path, arguments: &[&str]) -> (bool, String, String) {
    let (code, shown, said) = run(kubeconfig, arguments);
    (code == Some(0), shown, said)
}

/// The agent's pod as its DaemonSet would create it, in this phase.
async fn agents_pod(client: &Client, node: &str, phase: &str) {
    let pods: Api<core::Pod> = Api::namespaced(client.clone(), "kube-system");
    let name = format!("kilo-{node}");
    let pod = json!({
        "metadata": {"name": name, "labels": {"app.kubernetes.io/name": "kilo"}},
        "spec": {"nodeName": node, "hostNetwork": true, "containers": [{"name": "kilo", "image": "kilo"}]},
    });
    pods.create(&PostParams::default(), &serde_json::from_value(pod).unwrap()).await.unwrap();
    let status = json!({"status": {"phase": phase}});
    pods.patch_status(&name, &PatchParams::default(), &Patch::Merge(&status)).await.unwrap();
}

/// Binds a role of the manifests to the user without rights.
async fn grant(client: &Client, role: &str) {
    let found = manifest("kilo-kubeadm.yaml")
        .into_iter()
        .find(|object| object.metadata.name.as_deref() == Some(role))
        .unwrap_or_else(|| panic!("the manifests have no role {role}"));
    apply(client, &found, false).await.unwrap();
    let kind = &found.types.as_ref().unwrap().kind;
    let binding = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": format!("{kind}Binding"),
        "metadata": {"name": role, "namespace": found.metadata.namespace},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": role},
        "subjects": [{"kind": "User", "name": NOBODY}],
    });
    apply(client, &serde_json::from_value(binding).unwrap(), false).await.unwrap();
}

/// Retries until the output contains these words: authorisation follows shortly after.
fn until_said(kubeconfig: &Path, arguments: &[&str], words: &[&str]) -> String {
    until(&format!("{arguments:?} say {words:?}"), Duration::from_secs(20), || {
        let (_, _, said) = kgctl(kubeconfig, arguments);
        if words.iter().all(|words| said.contains(words)) { Ok(said) } else { Err(said) }
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn who_may_not_run_kgctl_on_a_node_learns_which_role_to_ask_for() {
    let Some(server) = ApiServer::start().await else { return };
    let client = server.client(ADMIN).await;
    apply_crds(&client).await;
    for (node, phase) in [("runs", "Running"), ("waits", "Pending")] {
        create_node(&client, node, &[]).await;
        agents_pod(&client, node, phase).await;
    }
    create_node(&client, "bare", &[]).await;
    let admin = server.kubeconfig(ADMIN, server.port());
    let trace = ["--src=10.42.1.2", "--dst=10.42.4.2"];
    let of = |node: &'static str| [&["trace", node][..], &trace].concat();

    let (done, _, said) = kgctl(&admin, &of("bare"));
    assert!(!done && said.contains("no agent pod") && said.contains("runs on node bare"), "{said}");
    assert!(said.contains("`kgctl status`"), "{said}");
    let (done, _, said) = kgctl(&admin, &["monitor", "waits"]);
    assert!(!done && said.contains("on node waits is not running: pod kilo-waits is Pending"), "{said}");
    // There is no kubelet: the API server says so, and the message says where kgctl was to run.
    let (done, _, said) = kgctl(&admin, &of("runs"));
    assert!(
        !done && said.contains("failed to start kgctl trace --src=10.42.1.2 --dst=10.42.4.2 in pod"),
        "{said}"
    );
    let (done, _, said) = kgctl(&admin, &["monitor"]);
    assert!(!done && said.contains("--kubeconfig needs the name of a node"), "{said}");

    let nobody = server.kubeconfig(NOBODY, server.port());
    let said = until_said(
        &nobody,
        &of("runs"),
        &["not allowed to list pods", "--role=kilo-kgctl-agents --user=nobody"],
    );
    assert!(said.contains("in namespace kube-system"), "{said}");
    grant(&client, "kilo-kgctl-agents").await;
    let words = [
        "not allowed to get and create pods/exec in namespace kube-system",
        "--role=kilo-kgctl-nodes --user=nobody",
    ];
    let said = until_said(&nobody, &of("runs"), &words);
    assert!(said.contains("cannot get resource \"pods/exec\""), "{said}");
    grant(&client, "kilo-kgctl-nodes").await;
    until_said(&nobody, &of("runs"), &["in pod kilo-runs: the API server", "no preferred addresses"]);
}

/// What bash completes for the last word of a line.
fn offered(line: &[&str]) -> Vec<String> {
    let index = (line.len() - 1).to_string();
    let output = Command::new(env!("CARGO_BIN_EXE_kgctl"))
        .env("KGCTL_COMPLETE", "bash")
        .env("_CLAP_COMPLETE_INDEX", index)
        .env("_CLAP_COMPLETE_COMP_TYPE", "9")
        .env("_CLAP_IFS", "\n")
        .arg("--")
        .args(line)
        .output()
        .unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    String::from_utf8(output.stdout).unwrap().lines().map(|line| line.trim().to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shell_is_offered_nodes_peers_and_contexts_and_nothing_by_a_server_that_is_away() {
    let Some(server) = ApiServer::start().await else { return };
    let client = server.client(ADMIN).await;
    apply_crds(&client).await;
    for node in ["a1", "a2", "b1"] {
        create_node(&client, node, &[("kilo.squat.ai/location", &node[..1])]).await;
    }
    let peer = json!({
        "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "Peer", "metadata": {"name": "laptop"},
        "spec": {"allowedIPs": ["10.5.0.1/32"], "publicKey": "GY5aT1N9dTR/nJnT1N2f4ClZWVj0jOAld0r8ysWLyjg="},
    });
    apply(&client, &serde_json::from_value(peer).unwrap(), false).await.unwrap();
    let path = server.kubeconfig(ADMIN, server.port());
    let here = format!("--kubeconfig={}", path.display());
    assert_eq!(offered(&["kgctl", "status", &here, "a"]), ["a1", "a2"]);
    assert_eq!(offered(&["kgctl", "trace", &here, "b"]), ["b1"]);
    assert_eq!(offered(&["kgctl", "showconf", "peer", &here, "l"]), ["laptop"]);
    assert_eq!(offered(&["kgctl", "showconf", "node", &here, "l"]), Vec::<String>::new());
    assert_eq!(offered(&["kgctl", "status", &here, "--location", ""]), ["a", "b"]);
    assert!(!offered(&["kgctl", "status", &here, "--context", ""]).is_empty());
    assert_eq!(offered(&["kgctl", "monitor", "--reason", "too_"]), ["too_big"]);
    assert!(offered(&["kgctl", "status", "--outp"]).contains(&"--output".to_owned()));

    // Accepts connections but never responds.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let path = server.kubeconfig(ADMIN, silent.local_addr().unwrap().port());
    let started = Instant::now();
    let silence = offered(&["kgctl", "status", &format!("--kubeconfig={}", path.display()), "a"]);
    assert_eq!(silence, Vec::<String>::new());
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    assert_eq!(offered(&["kgctl", "status", "--kubeconfig=/nowhere", "a"]), Vec::<String>::new());
}

const PSK: &str = "Q0FOQVJZQ0FOQVJZQ0FOQVJZQ0FOQVJZQ0FOQVJZQ0E=";
const PASSWORD: &str = "canary-password-1";
const JOIN: &str = "canary.canarycanary1234";

#[tokio::test(flavor = "multi_thread")]
async fn a_report_goes_on_without_nodes_that_fail_and_holds_no_secret() {
    let Some(server) = ApiServer::start().await else { return };
    let client = server.client(ADMIN).await;
    apply_crds(&client).await;
    let public = "GY5aT1N9dTR/nJnT1N2f4ClZWVj0jOAld0r8ysWLyjg=";
    create_node(&client, "runs", &[("kilo.squat.ai/key", public), ("provider/secret", PASSWORD)]).await;
    create_node(&client, "bare", &[("k3s.io/node-args", &format!("--token {JOIN}"))]).await;
    agents_pod(&client, "runs", "Running").await;
    let peer = json!({
        "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "Peer",
        "metadata": {"name": "laptop", "annotations": {
            "kubectl.kubernetes.io/last-applied-configuration": format!("{{\"spec\":{{\"presharedKey\":\"{PSK}\"}}}}"),
        }},
        "spec": {"allowedIPs": ["10.5.0.1/32"], "publicKey": public, "presharedKey": PSK},
    });
    apply(&client, &serde_json::from_value(peer).unwrap(), false).await.unwrap();
    let labels = json!({"app.kubernetes.io/name": "kilo"});
    let daemon_set = json!({
        "apiVersion": "apps/v1", "kind": "DaemonSet",
        "metadata": {"name": "kilo", "namespace": "kube-system", "labels": labels},
        "spec": {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": {"containers": [
            {"name": "kilo", "image": "kilo", "env": [{"name": "LOGIN", "value": PASSWORD}],
             "args": [format!("--password={PASSWORD}")]},
        ]}}},
    });
    apply(&client, &serde_json::from_value(daemon_set).unwrap(), false).await.unwrap();

    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("dump.tar.gz");
    let output = format!("--output={}", path.display());
    let kubeconfig = server.kubeconfig(ADMIN, server.port());
    let (code, shown, said) = run(&kubeconfig, &["sysdump", &output]);
    println!("{shown}{said}");
    assert_eq!(code, Some(3), "{shown}{said}");
    assert!(shown.contains("parts are missing (problems.txt)"), "{shown}{said}");
    assert!(!said.contains("daemonsets.yaml is missing") && !said.contains("events-"), "{said}");
    assert!(said.contains("nodes/bare/* is missing: no agent pod"), "{said}");
    assert!(said.contains("nodes/runs/status.json is missing"), "{said}");
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);

    let mut files = BTreeMap::new();
    let mut packed = tar::Archive::new(flate2::read::GzDecoder::new(std::fs::File::open(&path).unwrap()));
    for entry in packed.entries().unwrap() {
        let mut entry = entry.unwrap();
        let name = entry.path().unwrap().display().to_string();
        let mut text = String::new();
        entry.read_to_string(&mut text).unwrap();
        files.insert(name.split_once('/').unwrap().1.to_owned(), text);
    }
    for secret in [PSK, PASSWORD, JOIN] {
        for (name, text) in &files {
            assert!(!text.contains(secret), "{secret} is in {name}: {text}");
        }
    }
    assert!(files["problems.txt"].contains("nodes/bare/*"), "{}", files["problems.txt"]);
    assert!(
        files["peers.yaml"].contains("laptop") && files["peers.yaml"].contains(public),
        "{}",
        files["peers.yaml"]
    );
    assert!(files["nodes.yaml"].contains("runs") && files["daemonsets.yaml"].contains("LOGIN"));
    for name in ["README.txt", "status.txt", "status.json", "versions.json", "pods.yaml", "events-node.yaml"]
    {
        assert!(!files[name].is_empty(), "{name}");
    }
    let (done, _, said) = kgctl(&kubeconfig, &["sysdump", &output]);
    assert!(!done && said.contains("exists"), "{said}");
    let (done, _, said) = kgctl(&kubeconfig, &["sysdump", "nowhere", "--output=/nowhere/x"]);
    assert!(!done && said.contains("\"nowhere\" does not exist; choose one of: bare, runs"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_report_needs_daemon_sets_and_events_of_two_namespaces_and_not_of_all() {
    let Some(server) = ApiServer::start().await else { return };
    let client = server.client(ADMIN).await;
    apply_crds(&client).await;
    create_node(&client, "runs", &[]).await;
    agents_pod(&client, "runs", "Running").await;
    for role in ["kilo-kgctl", "kilo-kgctl-nodes"] {
        grant(&client, role).await;
    }
    let nobody = server.kubeconfig(NOBODY, server.port());
    let directory = tempfile::tempdir().unwrap();
    let output = |name: &str| format!("--output={}/{name}.tar.gz", directory.path().display());
    for what in [("list", "", "nodes"), ("list", "kilo.squat.ai", "peers")] {
        api::until_may(&client, NOBODY, what, ("", ""), true).await;
    }
    let (_, _, said) = run(&nobody, &["sysdump", &output("without")]);
    for (file, resource, namespace) in [
        ("daemonsets.yaml", "daemonsets", "kube-system"),
        ("events-node.yaml", "events", "default"),
        ("events-daemonset.yaml", "events", "kube-system"),
    ] {
        let refused = format!("{file} is missing: not allowed to list {resource} in namespace {namespace}");
        assert!(said.contains(&refused), "{refused} is missing in {said}");
        let remedy = format!(
            "kubectl --namespace {namespace} create rolebinding kgctl-sysdump --clusterrole=kilo-kgctl-sysdump --user=nobody"
        );
        assert!(said.contains(&remedy), "{remedy} is missing in {said}");
    }
    let rule = |group: &str, resource: &str| json!({"apiGroups": [group], "resources": [resource], "verbs": ["get", "list"]});
    let role = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole",
        "metadata": {"name": "kilo-kgctl-sysdump"},
        "rules": [rule("apps", "daemonsets"), rule("", "events")],
    });
    apply(&client, &serde_json::from_value(role).unwrap(), false).await.unwrap();
    for namespace in ["kube-system", "default"] {
        bind_nobody(&client, ("ClusterRole", "kilo-kgctl-sysdump"), Some(namespace)).await;
        api::until_may(&client, NOBODY, ("list", "", "events"), (namespace, ""), true).await;
    }
    let (code, _, said) = run(&nobody, &["sysdump", &output("with")]);
    assert!(!said.contains("not allowed to"), "{said}");
    assert_eq!(code, Some(3), "there is no kubelet: {said}");
}

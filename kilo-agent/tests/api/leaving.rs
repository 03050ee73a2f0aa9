//! A real `kg` is asked to stop: the image that the DaemonSet names next decides what it leaves.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::{accounts, api, netns, scrape, wait::task as wait};

use std::{
    path::{Path, PathBuf},
    process::{Child, Command},
    time::Duration,
};

use k8s_openapi::api::{apps::v1::DaemonSet, core::v1::Node, rbac::v1::RoleBinding};
use kube::{
    Api, Client,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use serde_json::json;

use accounts::account;
use api::{ADMIN, ApiServer, apply_crds, create_node};
use netns::sh;

const KG: &str = env!("CARGO_BIN_EXE_kg");
const NAMESPACE: &str = "kube-system";
const OURS: &str = "kilo-ebpf/kilo:0.1.0";
const KILO: &str = "squat/kilo:0.7.0";
const PINS: &str = "find /sys/fs/bpf/kilo 2>/dev/null || true";
const RULES: &str = "nft list table inet kilo 2>/dev/null || true";

/// A node's namespace, and the file in which a pod finds its own namespace.
fn make_host() {
    netns::host(&["10.1.0.11/24", "192.0.2.11/32"], "10.1.0.1");
    sh("d=/run/secrets/kubernetes.io/serviceaccount; mkdir -p $d; printf kube-system > $d/namespace");
}

async fn create_daemon_set(client: &Client) -> Api<DaemonSet> {
    let daemon_sets: Api<DaemonSet> = Api::namespaced(client.clone(), NAMESPACE);
    let daemon_set = json!({
        "metadata": {"name": "kilo"},
        "spec": {
            "selector": {"matchLabels": {"app": "kilo"}},
            "template": {
                "metadata": {"labels": {"app": "kilo"}},
                "spec": {"containers": [{"name": "kilo", "image": OURS}]},
            },
        },
    });
    daemon_sets.create(&PostParams::default(), &serde_json::from_value(daemon_set).unwrap()).await.unwrap();
    daemon_sets
}

/// An API server with this node, the DaemonSet, and the account of our manifests.
struct Cluster {
    client: Client,
    daemon_sets: Api<DaemonSet>,
    kubeconfig: PathBuf,
    /// Stops the server when dropped.
    server: ApiServer,
}

/// `None` where no API server can run.
async fn cluster() -> Option<Cluster> {
    make_host();
    let server = ApiServer::start().await?;
    let client = server.client(ADMIN).await;
    apply_crds(&client).await;
    create_node(&client, "n1", &[]).await;
    let daemon_sets = create_daemon_set(&client).await;
    let kubeconfig = account(&server, "kilo-kubeadm.yaml", NAMESPACE, "kilo").await;
    Some(Cluster { client, daemon_sets, kubeconfig, server })
}

async fn set_image(daemon_sets: &Api<DaemonSet>, image: &str) {
    set(daemon_sets, image, &["--hostname=n1"]).await;
}

async fn set(daemon_sets: &Api<DaemonSet>, image: &str, arguments: &[&str]) {
    let containers = json!([{"name": "kilo", "image": image, "args": arguments}]);
    let patch = Patch::Strategic(json!({"spec": {"template": {"spec": {"containers": containers}}}}));
    daemon_sets.patch("kilo", &PatchParams::default(), &patch).await.unwrap();
}

/// Starts an agent, and waits until it has set up everything.
async fn start(kubeconfig: &Path) -> Child {
    let mut command = Command::new(KG);
    command.arg("--kubeconfig").arg(kubeconfig).args(["--hostname=n1", "--cni-path=/run/absent.conflist"]);
    command.args(["--failover=auto", "--leaders=2"]);
    let agent = command.spawn().unwrap();
    wait::until("the agent has put everything right", Duration::from_secs(20), async || {
        let pins = sh(PINS);
        // A thread loads the last two programs.
        let all = pins.matches("/links/").count() >= 4 && pins.contains("/l3_egress");
        if scrape::has_done(&[]) && all { Ok(()) } else { Err(pins) }
    })
    .await;
    agent
}

fn stop(mut agent: Child) {
    sh(&format!("kill -TERM {}", agent.id()));
    assert!(agent.wait().unwrap().success());
}

#[test]
fn only_kilos_own_image_gets_a_host_without_programs() {
    netns::isolated("only_kilos_own_image_gets_a_host_without_programs", || async {
        let Some(Cluster { client, daemon_sets, kubeconfig, server: _server }) = cluster().await else {
            return;
        };

        let agent = start(&kubeconfig).await;
        let pins = sh(PINS);
        set_image(&daemon_sets, "registry.example/mirror/kilo:0.2.0").await;
        stop(agent);
        assert_eq!(sh(PINS), pins, "another tag, or a mirror of ours, is an upgrade");
        assert_eq!(sh(RULES), "");

        let nodes: Api<Node> = Api::all(client.clone());
        let annotations = async || nodes.get("n1").await.unwrap().metadata.annotations.unwrap_or_default();
        let of_failover = ["kilo.squat.ai/signal", "kilo.squat.ai/leaders"];
        let kept = annotations().await;
        assert!(of_failover.iter().all(|name| kept.contains_key(*name)), "an upgrade: {kept:?}");

        let agent = start(&kubeconfig).await;
        set(&daemon_sets, KILO, &["--hostname=n1", "--cni-source=/etc/kilo/cni.conflist"]).await;
        stop(agent);
        assert_eq!(sh(PINS), pins, "Kilo's agent does not start with a flag of ours");

        let agent = start(&kubeconfig).await;
        let (routes, addresses) = (sh("ip route show proto 107"), sh("ip -o address show kilo0"));
        set_image(&daemon_sets, KILO).await;
        stop(agent);
        assert_eq!(sh(PINS), "", "nothing is in the way of Kilo's tunl0");
        assert_eq!(sh("ip route show proto 107"), routes, "Kilo replaces them");
        assert_eq!(sh("ip -o address show kilo0"), addresses);
        let rules = sh(RULES);
        assert!(rules.contains("10.42.1.0/24") && rules.contains("masquerade"), "{rules}");
        let kept = annotations().await;
        assert!(!of_failover.iter().any(|name| kept.contains_key(*name)), "Kilo knows no signals: {kept:?}");
        assert!(kept.contains_key("kilo.squat.ai/key"), "others go on with this node: {kept:?}");

        set_image(&daemon_sets, OURS).await;
        let agent = start(&kubeconfig).await;
        assert_eq!(sh(RULES), "", "the programs masquerade again");
        daemon_sets.delete("kilo", &DeleteParams::default()).await.unwrap();
        stop(agent);
        assert!(!sh(PINS).is_empty(), "without DaemonSet traffic goes on as it is");
    });
}

#[test]
fn an_agent_that_may_not_read_its_daemon_set_leaves_everything_in_place() {
    netns::isolated("an_agent_that_may_not_read_its_daemon_set_leaves_everything_in_place", || async {
        let Some(Cluster { client, daemon_sets, kubeconfig, server: _server }) = cluster().await else {
            return;
        };
        // Kilo's own roles do not have this either.
        let bindings: Api<RoleBinding> = Api::namespaced(client.clone(), NAMESPACE);
        bindings.delete("kilo-agent", &DeleteParams::default()).await.unwrap();
        let user = format!("system:serviceaccount:{NAMESPACE}:kilo");
        api::until_may(&client, &user, ("get", "apps", "daemonsets"), (NAMESPACE, "kilo"), false).await;
        let agent = start(&kubeconfig).await;
        let pins = sh(PINS);
        set_image(&daemon_sets, KILO).await;
        stop(agent);
        assert_eq!(sh(PINS), pins);
    });
}

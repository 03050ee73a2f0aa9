//! A real `kg` waits beside Kilo's agent, which here is only a taken port; and `kgctl takeover`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::{accounts, api, netns, scrape, wait::task as wait};

use std::{
    collections::BTreeMap,
    net::TcpListener,
    path::Path,
    process::{Child, Command, Output},
    time::Duration,
};

use futures::StreamExt as _;
use k8s_openapi::api::{apps::v1::DaemonSet, core::v1::Node};
use kube::{
    Api,
    api::{DeleteParams, Patch, PatchParams, PostParams, WatchEvent, WatchParams},
};
use serde_json::{Value, json};

use accounts::account;
use api::{ADMIN, ApiServer, apply_crds, create_node};
use netns::sh;

const KG: &str = env!("CARGO_BIN_EXE_kg");
const KGCTL: &str = env!("CARGO_BIN_EXE_kgctl");
const LIMIT: Duration = Duration::from_secs(30);
/// Annotations that Kilo's agent writes on its node, and removes when it stops.
const KILOS: [(&str, &str); 7] = [
    ("kilo.squat.ai/endpoint", "192.0.2.11:51820"),
    ("kilo.squat.ai/internal-ip", "10.1.0.11/24"),
    ("kilo.squat.ai/key", "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAE="),
    ("kilo.squat.ai/last-seen", "1763866800"),
    ("kilo.squat.ai/wireguard-ip", "10.4.0.1/16"),
    ("kilo.squat.ai/discovered-endpoints", "{}"),
    ("kilo.squat.ai/granularity", "location"),
];

struct Agent(Child);

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(kubeconfig: &Path) -> Agent {
    let mut command = Command::new(KG);
    command.arg("--kubeconfig").arg(kubeconfig).args(["--hostname=n1", "--cni-path=/run/absent.conflist"]);
    Agent(command.arg("--take-over-from-kilo").spawn().unwrap())
}

/// Removes the annotations with Kilo's patch.
async fn clean_up(nodes: &Api<Node>) -> kube::Result<Node> {
    let remove = |(name, _): (&str, &str)| json!({"op": "remove", "path": format!("/metadata/annotations/{}", name.replace('/', "~1"))});
    let patch = serde_json::from_value(Value::Array(KILOS.map(remove).to_vec())).unwrap();
    nodes.patch("n1", &PatchParams::default(), &Patch::<Node>::Json(patch)).await
}

#[test]
fn kilos_annotations_outlive_its_clean_up_and_are_written_again_where_it_was_quicker() {
    let name = "kilos_annotations_outlive_its_clean_up_and_are_written_again_where_it_was_quicker";
    netns::isolated(name, || async {
        netns::host(&["10.1.0.11/24", "192.0.2.11/32"], "10.1.0.1");
        let Some(server) = ApiServer::start().await else { return };
        let client = server.client(ADMIN).await;
        apply_crds(&client).await;
        create_node(&client, "n1", &KILOS).await;
        let kubeconfig = account(&server, "kilo-kubeadm.yaml", "kube-system", "kilo").await;
        let nodes: Api<Node> = Api::all(client.clone());
        let annotations = async || nodes.get("n1").await.unwrap().metadata.annotations.unwrap_or_default();
        let before = annotations().await;
        let kilo = TcpListener::bind("[::]:1107").unwrap();
        let _agent = start(&kubeconfig);
        wait::until("the agent has its key", LIMIT, async || sh("ls /var/lib/kilo || true").contains("key"))
            .await;
        wait::stays("nothing is written beside Kilo's agent", Duration::from_secs(1), async || {
            annotations().await == before
        })
        .await;
        let version = nodes.get("n1").await.unwrap().metadata.resource_version.unwrap();
        let mut writes = nodes.watch(&WatchParams::default(), &version).await.unwrap().boxed();
        drop(kilo);
        let first = tokio::time::timeout(LIMIT, writes.next()).await.unwrap().unwrap().unwrap();
        let WatchEvent::Modified(first) = first else { panic!("{first:?}") };
        let mut expected = before.clone();
        expected.remove("kilo.squat.ai/discovered-endpoints");
        assert_eq!(
            first.metadata.annotations,
            Some(expected),
            "the first write keeps Kilo from removing anything"
        );
        let refused = clean_up(&nodes).await.unwrap_err();
        assert!(matches!(&refused, kube::Error::Api(status) if status.code == 422), "{refused}");
        let is_whole = |present: &BTreeMap<String, String>| {
            KILOS
                .iter()
                .all(|(name, _)| name.ends_with("discovered-endpoints") || present.contains_key(*name))
        };
        assert!(is_whole(&annotations().await));
        wait::until("the agent has put everything right", LIMIT, async || scrape::has_done(&[])).await;
        // As if Kilo had been faster.
        let found = json!({"metadata": {"annotations": {"kilo.squat.ai/discovered-endpoints": "{}"}}});
        nodes.patch("n1", &PatchParams::default(), &Patch::Merge(found)).await.unwrap();
        match clean_up(&nodes).await {
            Ok(left) => assert!(!is_whole(&left.metadata.annotations.unwrap_or_default())),
            // The agent has removed it again.
            Err(error) => {
                assert!(matches!(&error, kube::Error::Api(status) if status.code == 422), "{error}");
            }
        }
        wait::until("what was removed is written again", LIMIT, async || is_whole(&annotations().await))
            .await;
    });
}

fn takeover(kubeconfig: &Path, flags: &[&str]) -> (bool, String) {
    kgctl("takeover", kubeconfig, flags)
}

fn kgctl(command: &str, kubeconfig: &Path, flags: &[&str]) -> (bool, String) {
    let Output { status, stdout, stderr } =
        Command::new(KGCTL).arg(command).arg("--kubeconfig").arg(kubeconfig).args(flags).output().unwrap();
    (status.success(), [stdout, stderr].map(|text| String::from_utf8(text).unwrap()).concat())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_daemon_set_that_takes_over_is_accepted_beside_kilos() {
    let Some(server) = ApiServer::start().await else { return };
    let client = server.client(ADMIN).await;
    let kubeconfig = server.kubeconfig(ADMIN, server.port());
    let (success, said) = takeover(&kubeconfig, &[]);
    assert!(!success && said.contains("--image"), "nothing in the cluster says which: {said}");
    let (success, said) = takeover(&kubeconfig, &["--image=registry.example/kilo:9"]);
    assert!(!success && said.contains("there is no DaemonSet kilo"), "{said}");
    let daemon_sets: Api<DaemonSet> = Api::namespaced(client, "kube-system");
    let kilos = json!({
        "metadata": {"name": "kilo"},
        "spec": {
            "selector": {"matchLabels": {"app.kubernetes.io/name": "kilo"}},
            "template": {
                "metadata": {"labels": {"app.kubernetes.io/name": "kilo"}},
                "spec": {
                    "hostNetwork": true,
                    "containers": [{
                        "name": "kilo",
                        "image": "squat/kilo:0.7.0",
                        "args": ["--hostname=$(NODE_NAME)"],
                        "ports": [{"containerPort": 1107}],
                    }],
                },
            },
        },
    });
    daemon_sets.create(&PostParams::default(), &serde_json::from_value(kilos).unwrap()).await.unwrap();
    let (success, printed) = takeover(&kubeconfig, &["--image=registry.example/kilo:9"]);
    assert!(success, "{printed}");
    let made: DaemonSet = serde_yaml_ng::from_str(&printed).unwrap();
    let made = daemon_sets.create(&PostParams::default(), &made).await.unwrap();
    let container = &made.spec.unwrap().template.spec.unwrap().containers[0];
    assert_eq!(container.image.as_deref(), Some("registry.example/kilo:9"));
    assert_eq!(
        container.args,
        Some(vec!["--hostname=$(NODE_NAME)".to_owned(), "--take-over-from-kilo".to_owned()])
    );
    assert_eq!(container.ports, None, "the kubelet's scheduler gives a port of the host to one pod");
    let (success, said) =
        takeover(&kubeconfig, &["--image=docker.io/squat/kilo", "--daemonset=kilo-takeover"]);
    assert!(!success && said.contains("already"), "{said}");
    daemon_sets.delete("kilo", &DeleteParams::background()).await.unwrap();
    wait::until("Kilo's DaemonSet is gone", LIMIT, async || {
        daemon_sets.get_opt("kilo").await.unwrap().is_none()
    })
    .await;
    let (success, said) = kgctl("uninstall", &kubeconfig, &[]);
    assert!(!success && said.contains("DaemonSet kilo-takeover of kube-system is there"), "{said}");
}

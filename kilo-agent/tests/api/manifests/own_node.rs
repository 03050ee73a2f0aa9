//! The policy that keeps an agent to its own node: manifests/own-node.yaml.

use k8s_openapi::api::core::v1::Pod;

use super::*;
use crate::accounts::token_of_pod;

/// Fails unless the policy denied it.
#[track_caller]
fn denied<T>(what: &str, answer: kube::Result<T>) {
    match answer.map(drop) {
        Err(error) if error.to_string().contains("ValidatingAdmissionPolicy 'kilo-own-node'") => {
            println!("denied: {error}");
        }
        other => panic!("{what}: {other:?}"),
    }
}

/// A pod as a node's kubelet would have it.
async fn pod_on(admin: &Client, node: &str) -> Pod {
    let pods: Api<Pod> = Api::namespaced(admin.clone(), "kube-system");
    let pod = json!({
        "metadata": { "name": format!("kilo-{node}") },
        "spec": {
            "nodeName": node, "serviceAccountName": "kilo", "containers": [{ "name": "kilo", "image": "kilo" }],
        },
    });
    pods.create(&PostParams::default(), &serde_json::from_value(pod).unwrap()).await.unwrap()
}

#[tokio::test]
async fn with_the_policy_an_agent_changes_its_own_node_alone() {
    let Some(server) = ApiServer::start().await else { return };
    let admin = server.client(ADMIN).await;
    let served = Discovery::new(admin.clone()).run().await.unwrap();
    let policy = GroupVersionKind::gvk("admissionregistration.k8s.io", "v1", "ValidatingAdmissionPolicy");
    if served.resolve_gvk(&policy).is_none() {
        println!("kilo-skip: Kubernetes before 1.30 has no ValidatingAdmissionPolicy");
        return;
    }
    apply_crds(&admin).await;
    let of_no_pod = account(&server, "kilo-kubeadm.yaml", "kube-system", "kilo").await;
    create_node(&admin, "own", &[]).await;
    create_node(&admin, "other", &[("kilo.squat.ai/last-seen", "1700000000")]).await;
    let of_pod = token_of_pod(&server, "kilo", &pod_on(&admin, "own").await).await;
    let [client, without_node] = [
        kubernetes::client(Some(&of_pod), None).await.unwrap(),
        kubernetes::client(Some(&of_no_pod), None).await.unwrap(),
    ];
    let nodes: Api<Node> = Api::all(client.clone());
    let patch = async |node: &str, patch: &Value| {
        nodes.patch(node, &PatchParams::default(), &Patch::Merge(patch)).await
    };
    let patch_status = async |node: &str, patch: &Value| {
        nodes.patch_status(node, &PatchParams::default(), &Patch::Merge(patch)).await
    };
    let annotation = |name: &str, value: &str| json!({ "metadata": { "annotations": { name: value } } });
    let label = json!({ "metadata": { "labels": { "team": "a" } } });
    let dead = annotation("kilo.squat.ai/last-seen", "0");
    // The role alone would allow it.
    patch("other", &annotation("kilo.squat.ai/leader", "true")).await.unwrap();

    for object in manifest("own-node.yaml") {
        apply(&admin, &object, false).await.unwrap();
    }
    wait::until("the policy is in force", LIMIT, async || {
        let dry = PatchParams { dry_run: true, ..PatchParams::default() };
        nodes.patch("other", &dry, &Patch::Merge(&label)).await.is_err()
    })
    .await;
    denied("another node's label", patch("other", &label).await);
    denied("another node's annotation", patch("other", &annotation("kilo.squat.ai/leader", "")).await);
    denied("another node's heartbeat", patch("other", &annotation("kilo.squat.ai/last-seen", "5")).await);
    denied("another node's taints", patch("other", &json!({ "spec": { "unschedulable": true } })).await);
    let address = json!({ "status": { "addresses": [{ "type": "InternalIP", "address": "192.0.2.7" }] } });
    denied("another node's address", patch_status("other", &address).await);
    denied("the status of one that is dead", patch_status("other", &dead).await);
    denied("its own label", patch("own", &label).await);
    denied("its own label, by the status", patch_status("own", &label).await);
    denied("its own taints", patch("own", &json!({ "spec": { "unschedulable": true } })).await);
    denied("somebody else's annotation", patch("own", &annotation("example.com/a", "b")).await);
    let of_nobody: Api<Node> = Api::all(without_node);
    let own = annotation("kilo.squat.ai/leader", "true");
    for (node, change) in [("own", &own), ("other", &dead)] {
        let patched = of_nobody.patch(node, &PatchParams::default(), &Patch::Merge(change)).await;
        denied("a token of no pod", patched);
    }

    // The agent's usual writes still work.
    let backend = KubernetesBackend::start(client, Some("own"), "region").await.unwrap();
    let published = Published { last_seen: 1_700_000_001, ..Published::default() };
    assert!(backend.publish("own", &published).await.unwrap());
    backend.report_network("own", false).await.unwrap();
    backend.report_network("own", true).await.unwrap();
    assert!(backend.declare_dead("other", 1_700_000_000).await.unwrap());
    backend.retract("own").await.unwrap();
    // The policy does not apply to others.
    let everybodys: Api<Node> = Api::all(admin);
    everybodys.patch("other", &PatchParams::default(), &Patch::Merge(&label)).await.unwrap();
}

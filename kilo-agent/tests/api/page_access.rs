//! `--page-access=token`: a real agent, reviews by a real API server, and the rights of the manifests.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::wait::until;
use crate::{accounts, api, netns};

use std::{
    fs,
    io::{Read as _, Write as _},
    net::TcpStream,
    path::Path,
    process::Command,
    time::Duration,
};

use k8s_openapi::api::core::v1 as core;
use kube::{
    Api,
    api::{Patch, PatchParams, PostParams},
    config::Kubeconfig,
};
use serde_json::json;

use api::{ADMIN, ApiServer, apply, apply_crds, create_node, manifest};

const LIMIT: Duration = Duration::from_secs(20);

/// Status code and whole response.
fn get(path: &str, token: Option<&str>) -> (u16, String) {
    let Ok(mut stream) = TcpStream::connect("127.0.0.1:1107") else { return (0, String::new()) };
    let shown = token.map(|token| format!("Authorization: Bearer {token}\r\n")).unwrap_or_default();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{shown}\r\n").unwrap();
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    let text = String::from_utf8_lossy(&bytes).into_owned();
    (text.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0), text)
}

fn kgctl(arguments: &[&str]) -> (bool, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kgctl"));
    let output = command.arg("status").args(arguments).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.success(), text(output.stdout), text(output.stderr))
}

fn token_in(kubeconfig: &Path) -> String {
    use serde_json::Value;
    let config = Kubeconfig::read_from(kubeconfig).unwrap();
    let user: Value = serde_json::to_value(&config.auth_infos[0]).unwrap();
    user["user"]["token"].as_str().unwrap().to_owned()
}

#[test]
fn the_page_wants_a_token_that_the_api_server_accepts() {
    netns::isolated("the_page_wants_a_token_that_the_api_server_accepts", || async {
        netns::host(&["10.1.0.11/24"], "10.1.0.1");
        let Some(server) = ApiServer::start().await else { return };
        let client = server.client(ADMIN).await;
        apply_crds(&client).await;
        create_node(&client, "n1", &[]).await;
        for name in ["viewer", "nosy"] {
            let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name, "namespace": "default"}});
            apply(&client, &serde_json::from_value(account).unwrap(), false).await.unwrap();
        }
        let agents = accounts::account(&server, "kilo-kubeadm.yaml", "kube-system", "kilo").await;
        let mut kg = Command::new(env!("CARGO_BIN_EXE_kg"));
        kg.arg("--kubeconfig").arg(&agents).args(["--hostname", "n1", "--page-access", "token"]);
        let _agent = netns::Agent(kg.spawn().unwrap());
        until("health", LIMIT, || get("/health", None).0 == 200);
        let viewer_config = accounts::token_of(&server, "default", "viewer").await;
        let viewer = token_in(&viewer_config);

        // Without the right to review tokens the agent shows nothing, and says why.
        let (code, text) = get("/status", Some(&viewer));
        assert!(code == 503 && text.contains("tokenreviews") && !text.contains("\"locations\""), "{text}");
        assert_eq!(get("/metrics", None).0, 200);

        for object in manifest("components/page-access/rbac.yaml") {
            apply(&client, &object, false).await.unwrap();
        }
        let binding = json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": "viewer"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "kilo-page"},
            "subjects": [{"kind": "ServiceAccount", "name": "viewer", "namespace": "default"}],
        });
        apply(&client, &serde_json::from_value(binding).unwrap(), false).await.unwrap();
        let nosy = token_in(&accounts::token_of(&server, "default", "nosy").await);
        until("the viewer's right", LIMIT, || get("/status", Some(&viewer)).0 == 200);
        for path in ["/", "/page/app.js", "/status", "/graph"] {
            assert_eq!(get(path, Some(&viewer)).0, 200, "{path}");
            let (code, text) = get(path, None);
            assert!(code == 401 && text.contains("kubectl create token"), "{path}: {text}");
            let (code, text) = get(path, Some(&nosy));
            let command = "kubectl create clusterrolebinding kilo-page --clusterrole=kilo-page --serviceaccount=default:nosy";
            assert!(code == 403 && text.contains(command), "{path}: {text}");
            assert_eq!(get(path, Some("no-token-of-anybody")).0, 401, "{path}");
        }
        assert_eq!(get("/events", None).0, 401);
        assert_eq!([get("/health", None).0, get("/metrics", None).0], [200, 200]);

        // kgctl with a token, as root on the node, and through the API server, which forwards no token.
        let file = viewer_config.with_extension("token");
        fs::write(&file, format!("{viewer}\n")).unwrap();
        let shown = format!("--agent-token-file={}", file.display());
        let url = "--agent=http://127.0.0.1:1107";
        let (done, text, said) = kgctl(&[url, &shown]);
        assert!(done && text.contains("as n1 sees it"), "{text}{said}");
        let (done, _, said) = kgctl(&[url]);
        assert!(!done && said.contains("Authorization: Bearer"), "{said}");
        let (done, text, said) = kgctl(&["--agent"]);
        assert!(done && text.contains("as n1 sees it"), "{text}{said}");
        let pods: Api<core::Pod> = Api::namespaced(client.clone(), "default");
        let pod = json!({
            "metadata": {"name": "kilo-x", "labels": {"app.kubernetes.io/name": "kilo"}},
            "spec": {"nodeName": "n1", "hostNetwork": true, "containers": [{"name": "kilo", "image": "kilo"}]},
        });
        pods.create(&PostParams::default(), &serde_json::from_value(pod).unwrap()).await.unwrap();
        let running =
            json!({"status": {"phase": "Running", "podIP": "10.1.0.11", "podIPs": [{"ip": "10.1.0.11"}]}});
        pods.patch_status("kilo-x", &PatchParams::default(), &Patch::Merge(&running)).await.unwrap();
        let kubeconfig = format!("--kubeconfig={}", server.kubeconfig(ADMIN, server.port()).display());
        // No kubelet is there to run kgctl in the pod; the message shows the attempt.
        let (_, _, said) = kgctl(&[&kubeconfig, "n1"]);
        assert!(
            said.contains("requires a token")
                && said.contains("failed to start kgctl status --agent --output=json"),
            "{said}"
        );
        let (done, text, said) = kgctl(&[&kubeconfig]);
        assert!(
            done && (text.contains("The agent of n1 did not respond") || !text.contains(" 1 of 1 loc")),
            "{text}{said}"
        );

        // Without the API server nobody new gets in, but root on the node does.
        server.stop_api();
        let (code, text) = get("/status", Some("another-token"));
        assert!(code == 503 && text.contains("kgctl status --agent"), "{text}");
        assert_eq!(get("/status", None).0, 401);
        let (done, _, said) = kgctl(&["--agent"]);
        assert!(done, "{said}");
    });
}

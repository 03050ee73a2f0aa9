//! `kgctl status` in scripts: exit codes, waiting, and part of the mesh.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::api;
use crate::wait::task;

use std::{
    path::Path,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use k8s_openapi::api::core::v1 as core;
use kilo_agent::{status::Status, timestamp::Timestamp};
use kilo_core::wireguard::key::PublicKey;
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use serde_json::json;

use api::{ADMIN, ApiServer, apply_crds, create_node};

fn kgctl(kubeconfig: &Path, arguments: &[&str]) -> (bool, String, String) {
    run("status", kubeconfig, arguments)
}

fn run(subcommand: &str, kubeconfig: &Path, arguments: &[&str]) -> (bool, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kgctl"));
    let output =
        command.arg(subcommand).arg("--kubeconfig").arg(kubeconfig).args(arguments).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.success(), text(output.stdout), text(output.stderr))
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

    let (done, shown, _) = kgctl(&kubeconfig, &[]);
    assert!(done && shown.starts_with("Not healthy, 1 problem: 2 of 3 nodes ready"), "{shown}");
    assert!(shown.contains("node/n2   not ready: its agent last checked in 10m"), "{shown}");
    assert!(!shown.contains('\u{1b}'), "no colours in a pipe: {shown:?}");
    let (done, shown, said) = kgctl(&kubeconfig, &["--check", "-o", "name", "--not-ready"]);
    assert_eq!((done, shown.as_str()), (false, "node/n2\n"), "{said}");
    let (done, shown, said) = kgctl(&kubeconfig, &["--check", "--location=west", "-o", "name"]);
    assert_eq!((done, shown.as_str()), (true, "node/n3\n"), "{said}");
    let (done, _, said) = kgctl(&kubeconfig, &["--location=north"]);
    assert!(!done && said.contains("choose one of: location:east, location:west"), "{said}");
    let (_, yaml, _) = kgctl(&kubeconfig, &["-o", "yaml"]);
    assert_eq!(serde_yaml_ng::from_str::<Status>(&yaml).unwrap().nodes.len(), 3);
    let (_, wide, _) = kgctl(&kubeconfig, &["-o", "wide"]);
    assert!(wide.contains(&PublicKey([3; 32]).to_string()), "{wide}");

    let (_, plain, _) = run("graph", &kubeconfig, &[]);
    let (done, dot, said) = run("graph", &kubeconfig, &["--ways"]);
    assert_eq!((done, &dot), (true, &plain), "nobody runs agents, so no way is known: {said}");
    assert!(said.contains("the ways of n1 are unknown, its agent did not answer: "), "{said}");

    let started = Instant::now();
    let (done, shown, _) = kgctl(&kubeconfig, &["--wait", "--timeout=3s"]);
    assert!(!done && shown.contains("node/n2"), "{shown}");
    assert!(started.elapsed() < Duration::from_secs(15), "{:?}", started.elapsed());
    let waiting = {
        let kubeconfig = kubeconfig.clone();
        thread::spawn(move || kgctl(&kubeconfig, &["--wait", "--timeout=1m"]))
    };
    task::stays("it waits for the node", Duration::from_secs(1), async || !waiting.is_finished()).await;
    let seen = json!({"metadata": {"annotations": {name("last-seen"): (now + 3600).to_string()}}});
    let nodes: Api<core::Node> = Api::all(client);
    nodes.patch("n2", &PatchParams::default(), &Patch::Merge(&seen)).await.unwrap();
    let (done, shown, said) = waiting.join().unwrap();
    assert!(done && shown.starts_with("Healthy: 3 of 3 nodes ready"), "{shown}{said}");
}

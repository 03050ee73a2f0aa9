//! `kgctl connectivity-test` when interrupted, and when two run at once: on a real API server, with this
//! test in place of the namespace controller.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::api;
use crate::wait::task as wait;

use std::{
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use k8s_openapi::api::core::v1 as core;
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::json;

use api::{ADMIN, ApiServer, apply_crds, create_node};

const LIMIT: Duration = Duration::from_secs(60);

const NAME: &str = "kilo-connectivity-test";
const HEARTBEAT: &str = "kilo.squat.ai/connectivity-test-heartbeat";

/// Removes the test's namespace and its content once it is deleted.
fn control(client: &Client) {
    let namespaces: Api<core::Namespace> = Api::all(client.clone());
    let pods: Api<core::Pod> = Api::namespaced(client.clone(), NAME);
    tokio::spawn(async move {
        loop {
            wait::pace(Duration::from_millis(100)).await;
            let Ok(Some(mut left)) = namespaces.get_opt(NAME).await else { continue };
            if left.metadata.deletion_timestamp.is_some() {
                let _ = pods.delete_collection(&DeleteParams::default(), &ListParams::default()).await;
                left.spec = Some(core::NamespaceSpec { finalizers: Some(Vec::new()) });
                let _ = namespaces.replace_subresource("finalize", NAME, &PostParams::default(), &left).await;
            }
        }
    });
}

/// A cluster with one participating node, whose pods never run.
async fn cluster(server: &ApiServer) -> Client {
    let client = server.client(ADMIN).await;
    apply_crds(&client).await;
    let now = (kilo_agent::timestamp::Timestamp::now().0 + 3600).to_string();
    let annotations = [
        ("kilo.squat.ai/endpoint", "192.0.2.1:51820"),
        ("kilo.squat.ai/internal-ip", "10.1.0.1/24"),
        ("kilo.squat.ai/key", "GY5aT1N9dTR/nJnT1N2f4ClZWVj0jOAld0r8ysWLyjg="),
        ("kilo.squat.ai/last-seen", &now),
    ];
    create_node(&client, "n1", &annotations).await;
    control(&client);
    client
}

/// A running kgctl, killed with the test.
struct Run(Option<Child>);

impl Run {
    fn start(kubeconfig: &Path) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kgctl"));
        command.arg("--kubeconfig").arg(kubeconfig).args(["connectivity-test", "--image=kilo"]);
        Self(Some(command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap()))
    }

    fn signal(&self, signal: Signal) {
        let id = self.0.as_ref().unwrap().id();
        kill(Pid::from_raw(id.try_into().unwrap()), signal).unwrap();
    }

    fn has_ended(&mut self) -> bool {
        self.0.as_mut().unwrap().try_wait().unwrap().is_some()
    }

    /// Its error output; awaited on another thread, so that the namespace can be removed meanwhile.
    async fn failure(mut self) -> String {
        let child = self.0.take().unwrap();
        let output = tokio::task::spawn_blocking(|| child.wait_with_output().unwrap()).await.unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success(), "{said}");
        said
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The namespace's uid, once the namespace has the pod of a run.
async fn begun(client: &Client, other_than: Option<&str>) -> String {
    let namespaces: Api<core::Namespace> = Api::all(client.clone());
    let pods: Api<core::Pod> = Api::namespaced(client.clone(), NAME);
    wait::until("a run has begun", LIMIT, async || {
        let uid = namespaces.get_opt(NAME).await.unwrap()?.uid()?;
        let pods = pods.list(&ListParams::default()).await.ok()?;
        (other_than != Some(&uid) && !pods.items.is_empty()).then_some(uid)
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_test_that_is_interrupted_takes_its_namespace_with_it() {
    let Some(server) = ApiServer::start().await else { return };
    let client = cluster(&server).await;
    let kubeconfig = server.kubeconfig(ADMIN, server.port());
    let mut command = Command::new(env!("CARGO_BIN_EXE_kgctl"));
    let output = command.arg("--kubeconfig").arg(&kubeconfig).arg("connectivity-test").output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && said.contains("name one with --image"), "{said}");

    let namespaces: Api<core::Namespace> = Api::all(client.clone());
    let run = Run::start(&kubeconfig);
    wait::until("a namespace", LIMIT, async || namespaces.get_opt(NAME).await.unwrap()).await;
    run.signal(Signal::SIGTERM);
    let said = run.failure().await;
    assert!(said.contains("interrupted"), "{said}");
    assert!(namespaces.get_opt(NAME).await.unwrap().is_none());

    // A namespace that only shares the name stays.
    let foreign = serde_json::from_value(json!({"metadata": {"name": NAME}})).unwrap();
    namespaces.create(&PostParams::default(), &foreign).await.unwrap();
    let said = Run::start(&kubeconfig).failure().await;
    assert!(said.contains("was not created by kgctl"), "{said}");
    assert!(namespaces.get(NAME).await.unwrap().metadata.deletion_timestamp.is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_tests_at_once_one_says_so_and_neither_touches_the_others_namespace() {
    let Some(server) = ApiServer::start().await else { return };
    let client = cluster(&server).await;
    let kubeconfig = server.kubeconfig(ADMIN, server.port());
    let namespaces: Api<core::Namespace> = Api::all(client.clone());

    let mut runs = vec![Run::start(&kubeconfig), Run::start(&kubeconfig)];
    let uid = begun(&client, None).await;
    let late =
        wait::until("one of two gives way", LIMIT, async || runs.iter_mut().position(Run::has_ended)).await;
    let said = runs.remove(late).failure().await;
    assert!(said.contains("another connectivity-test has been running in this cluster since "), "{said}");
    let mut first = runs.remove(0);
    let said = Run::start(&kubeconfig).failure().await;
    assert!(said.contains("another connectivity-test has been running in this cluster since "), "{said}");
    assert!(!first.has_ended());
    assert_eq!(begun(&client, None).await, uid, "it has kept its namespace and its pod");

    // A stopped run looks dead by its heartbeat; when it continues, it finds that out.
    first.signal(Signal::SIGSTOP);
    let long_ago = (kilo_agent::timestamp::Timestamp::now().0 - 3600).to_string();
    let aged = json!({"metadata": {"annotations": {HEARTBEAT: long_ago}}});
    namespaces.patch(NAME, &PatchParams::default(), &Patch::Merge(&aged)).await.unwrap();
    let second = Run::start(&kubeconfig);
    let other = begun(&client, Some(&uid)).await;
    first.signal(Signal::SIGCONT);
    let said = first.failure().await;
    assert!(said.contains(" of this run was deleted by somebody else"), "{said}");
    assert_eq!(begun(&client, None).await, other, "the other's stays");
    second.signal(Signal::SIGTERM);
    assert!(second.failure().await.contains("interrupted"));
    assert!(namespaces.get_opt(NAME).await.unwrap().is_none());
}

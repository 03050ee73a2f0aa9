//! manifests/ on a real API server: every object is accepted as written, the roles suffice and grant no
//! more, and a real `kg` runs with the arguments and under the confinement of the DaemonSet.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::api;
use crate::netns;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{Read as _, Write as _},
    path::Path,
    process::{Child, Command},
    time::Duration,
};

use k8s_openapi::{
    api::{
        admissionregistration::v1::{
            ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding, ValidatingWebhookConfiguration,
        },
        apps::v1::{DaemonSet, Deployment},
        coordination::v1::Lease,
        core::v1::{ConfigMap, Event, Namespace, Node, Secret, Service, ServiceAccount},
        policy::v1::PodDisruptionBudget,
        rbac::v1::{ClusterRole, ClusterRoleBinding, Role, RoleBinding},
    },
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kilo_agent::{
    backend::{
        Backend as _,
        kubernetes::{self, KubernetesBackend},
    },
    metrics::Metrics,
    timestamp::Timestamp,
};
use kilo_core::{
    objects::{Published, peer::Peer, slices::NodeSlice},
    wireguard::key::PublicKey,
};
use kilo_host::{dataplane, wireguard::PeerStatus};
use kube::{
    Api, Client,
    api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams},
    core::GroupVersionKind,
    discovery::{ApiGroup, Discovery, Scope},
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};

use crate::accounts::{account, token_of, until_granted};
use crate::wait::task as wait;
use api::{ADMIN, ApiServer, apply, apply_crds, create_node, manifest};

const LIMIT: Duration = Duration::from_secs(30);

mod accounts;
mod confined;
mod helm;
mod own_node;
mod webhook;

const KG: &str = env!("CARGO_BIN_EXE_kg");

/// CRDs of the Prometheus operator, with the required fields of its schema.
fn monitoring_crds() -> [DynamicObject; 2] {
    let open = json!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true });
    let list = json!({ "type": "array", "items": open });
    [
        monitoring_crd("PodMonitor", &json!({ "selector": open, "podMetricsEndpoints": list })),
        monitoring_crd("PrometheusRule", &json!({ "groups": list })),
    ]
}

/// A CRD of that group whose `spec` requires these fields.
fn monitoring_crd(kind: &str, fields: &Value) -> DynamicObject {
    let singular = kind.to_lowercase();
    let plural = format!("{singular}s");
    let required: Vec<_> = fields.as_object().unwrap().keys().cloned().collect();
    serde_json::from_value(json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": { "name": format!("{plural}.monitoring.coreos.com") },
        "spec": {
            "group": "monitoring.coreos.com", "scope": "Namespaced",
            "names": { "kind": kind, "plural": plural, "singular": singular },
            "versions": [{ "name": "v1", "served": true, "storage": true, "schema": { "openAPIV3Schema": {
                "type": "object", "properties": { "spec": {
                    "type": "object", "required": required,
                    "x-kubernetes-preserve-unknown-fields": true,
                    "properties": fields,
                } },
            } } }],
        },
    }))
    .unwrap()
}

/// Names of all manifests that are applied as they are.
fn manifests() -> Vec<String> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../manifests");
    let names =
        fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names
        .filter(|name| Path::new(name).extension() == Some("yaml".as_ref()) && name != "kustomization.yaml")
        .collect();
    names.sort();
    names
}

fn kind(object: &DynamicObject) -> &str {
    &object.types.as_ref().unwrap().kind
}

fn name(object: &DynamicObject) -> &str {
    object.metadata.name.as_deref().unwrap()
}

/// The one object of that kind and name in a manifest.
fn find(manifest_name: &str, wanted: (&str, &str)) -> DynamicObject {
    let found = manifest(manifest_name).into_iter().find(|object| (kind(object), name(object)) == wanted);
    found.unwrap_or_else(|| panic!("{manifest_name} has no {wanted:?}"))
}

#[tokio::test]
async fn every_object_of_every_manifest_is_accepted_as_it_is_written() {
    let Some(server) = ApiServer::start().await else { return };
    let client = server.client(ADMIN).await;
    apply_crds(&client).await;
    for crd in monitoring_crds() {
        apply(&client, &crd, false).await.unwrap();
    }
    let namespace = find("peer-validation.yaml", ("Namespace", "kilo"));
    apply(&client, &namespace, false).await.unwrap();
    let discovery = served(&client, "prometheusrules").await;
    let mut kinds = BTreeSet::new();
    let files = manifests();
    for file in &files {
        for object in manifest(file) {
            let what = format!("{file}: {} {}", kind(&object), name(&object));
            let written = serde_json::to_value(&object).unwrap();
            contains(&of_newest_kubernetes(&written), &written, &what);
            let mut object = object;
            without_young_fields(&mut object.data);
            let group = GroupVersionKind::try_from(object.types.as_ref().unwrap()).unwrap();
            let is_young = group.group == "policy" || group.kind.starts_with("ValidatingAdmissionPolicy");
            if is_young && discovery.resolve_gvk(&group).is_none() {
                println!("{what}: {group:?} is not served by so old a Kubernetes");
                continue;
            }
            let (resource, capabilities) =
                discovery.resolve_gvk(&group).unwrap_or_else(|| panic!("{what}: {group:?} is not served"));
            let api: Api<DynamicObject> = match (&capabilities.scope, &object.metadata.namespace) {
                (Scope::Namespaced, Some(namespace)) => {
                    Api::namespaced_with(client.clone(), namespace, &resource)
                }
                (Scope::Cluster, None) => Api::all_with(client.clone(), &resource),
                (scope, namespace) => panic!("{what}: {scope:?}, but its namespace is {namespace:?}"),
            };
            let parameters = PatchParams { dry_run: true, ..PatchParams::apply("kilo-test") };
            let answer = api.patch(name(&object), &parameters, &Patch::Apply(&object)).await;
            let answer = answer.unwrap_or_else(|error| panic!("{what}: {error}"));
            // This server silently drops fields that it does not know.
            contains(&serde_json::to_value(&answer).unwrap(), &serde_json::to_value(&object).unwrap(), &what);
            kinds.insert(kind(&object).to_owned());
        }
    }
    println!("{} files, kinds {kinds:?}", files.len());
    assert!(files.len() >= 17, "{files:?}");
    for kind in ["PodMonitor", "PrometheusRule", "ValidatingWebhookConfiguration"] {
        assert!(kinds.contains(kind), "{kind}: {kinds:?}");
    }
}

/// What the server serves, once that includes this resource.
async fn served(client: &Client, plural: &str) -> Discovery {
    // A group is announced shortly before it is served.
    wait::until(&format!("{plural} are served"), Duration::from_secs(20), async || {
        let there = |group: &ApiGroup| group.recommended_resources().iter().any(|(r, _)| r.plural == plural);
        match Discovery::new(client.clone()).run().await {
            Ok(discovery) if discovery.groups().any(there) => Ok(discovery),
            other => Err(format!("{:?}", other.err())),
        }
    })
    .await
}

/// Reads the object as its type in Kubernetes 1.33 and writes it again, which drops unknown fields.
fn of_newest_kubernetes(object: &Value) -> Value {
    fn through<T: DeserializeOwned + Serialize>(object: &Value) -> Value {
        let typed: T =
            serde_json::from_value(object.clone()).unwrap_or_else(|error| panic!("{error}: {object}"));
        serde_json::to_value(typed).unwrap()
    }
    match object["kind"].as_str().unwrap() {
        "ClusterRole" => through::<ClusterRole>(object),
        "ClusterRoleBinding" => through::<ClusterRoleBinding>(object),
        "ConfigMap" => through::<ConfigMap>(object),
        "CustomResourceDefinition" => through::<CustomResourceDefinition>(object),
        "DaemonSet" => through::<DaemonSet>(object),
        "Deployment" => through::<Deployment>(object),
        "Lease" => through::<Lease>(object),
        "Namespace" => through::<Namespace>(object),
        "PodDisruptionBudget" => through::<PodDisruptionBudget>(object),
        "Role" => through::<Role>(object),
        "RoleBinding" => through::<RoleBinding>(object),
        "Service" => through::<Service>(object),
        "ServiceAccount" => through::<ServiceAccount>(object),
        "ValidatingAdmissionPolicy" => through::<ValidatingAdmissionPolicy>(object),
        "ValidatingAdmissionPolicyBinding" => through::<ValidatingAdmissionPolicyBinding>(object),
        "ValidatingWebhookConfiguration" => through::<ValidatingWebhookConfiguration>(object),
        // Not types of Kubernetes itself.
        "PodMonitor" | "PrometheusRule" => object.clone(),
        other => panic!("{other}: add its type here"),
    }
}

/// Removes fields younger than the server that these tests run against (1.20).
fn without_young_fields(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.remove("appArmorProfile");
            fields.values_mut().for_each(without_young_fields);
        }
        Value::Array(items) => items.iter_mut().for_each(without_young_fields),
        _ => {}
    }
}

/// Asserts that `theirs` contains everything in `ours`.
fn contains(theirs: &Value, ours: &Value, at: &str) {
    match (ours, theirs) {
        (Value::Object(ours), Value::Object(theirs)) => {
            for (name, value) in ours.iter().filter(|(_, value)| !is_empty(value)) {
                let answer = theirs.get(name).unwrap_or_else(|| panic!("{at}.{name} was dropped"));
                contains(answer, value, &format!("{at}.{name}"));
            }
        }
        (Value::Array(ours), Value::Array(theirs)) => {
            assert_eq!(ours.len(), theirs.len(), "{at}");
            for (number, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
                contains(theirs, ours, &format!("{at}[{number}]"));
            }
        }
        (Value::Number(ours), Value::Number(theirs)) => assert_eq!(ours.as_f64(), theirs.as_f64(), "{at}"),
        _ => assert_eq!(ours, theirs, "{at}"),
    }
}

fn is_empty(value: &Value) -> bool {
    value.is_null() || value.as_array().is_some_and(Vec::is_empty)
}

#[test]
fn every_container_ends_with_the_last_lines_of_its_log_as_its_message() {
    let mut count = 0;
    for file in manifests().iter().filter(|file| file.starts_with("kilo-") || file.starts_with("peer-")) {
        for object in manifest(file) {
            let pod = &object.data["spec"]["template"]["spec"];
            let containers = ["initContainers", "containers"].map(|list| pod[list].as_array().cloned());
            for container in containers.into_iter().flatten().flatten() {
                let what = format!("{file}: {} {}", name(&object), container["name"]);
                assert_eq!(container["terminationMessagePolicy"], "FallbackToLogsOnError", "{what}");
                count += 1;
            }
        }
    }
    assert!(count >= 30, "{count}");
}

#[test]
fn every_daemon_sets_role_is_that_of_its_place() {
    let daemons: Vec<_> = manifests().into_iter().filter(|file| file.starts_with("kilo-")).collect();
    let role = |file: &str| find(file, ("ClusterRole", "kilo")).data["rules"].clone();
    for file in &daemons {
        let beside_another = file.contains("-flannel") || file.contains("-cilium");
        let like = if beside_another { "kilo-kubeadm-flannel.yaml" } else { "kilo-kubeadm.yaml" };
        assert_eq!(role(file), role(like), "{file}");
    }
}

fn strings(value: &Value) -> Vec<String> {
    value.as_array().unwrap().iter().map(|item| item.as_str().unwrap().to_owned()).collect()
}

/// Kills the process when the test ends.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Body of `http://HOST:PORT/path`, once the status is 200.
async fn http_at(host: &str, port: u16, path: &str) -> String {
    let ask = || -> std::io::Result<String> {
        let mut stream = std::net::TcpStream::connect((host, port))?;
        write!(stream, "GET {path} HTTP/1.1\r\nHost: n1\r\nConnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    wait::until(&format!("{path} is answered"), LIMIT, async || {
        let answer = ask().unwrap_or_else(|error| error.to_string());
        if answer.starts_with("HTTP/1.1 200") { Ok(answer) } else { Err(answer) }
    })
    .await
}

/// Mounts the files that the kubelet gives a container of this account.
fn mount_account(server: &ApiServer, kubeconfig: &Path) {
    let kubeconfig: Value = serde_yaml_ng::from_str(&fs::read_to_string(kubeconfig).unwrap()).unwrap();
    let token = kubeconfig["users"][0]["user"]["token"].as_str().unwrap();
    let secrets = Path::new("/run/secrets/kubernetes.io/serviceaccount");
    fs::create_dir_all(secrets).unwrap();
    fs::write(secrets.join("token"), token).unwrap();
    fs::write(secrets.join("namespace"), "kube-system").unwrap();
    fs::copy(server.file("ca.crt"), secrets.join("ca.crt")).unwrap();
    netns::sh("chmod -R a+rX /run/secrets");
}

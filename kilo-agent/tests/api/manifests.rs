//! manifests/ on a real API server: every object is accepted as it is written,
//! the roles are enough and no more, and a real `kg` runs with the arguments
//! and under the confinement of the DaemonSet.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::api;
use crate::netns;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{Read as _, Write as _},
    path::Path,
    process::{Child, Command},
    time::{Duration, Instant},
};

use k8s_openapi::{
    api::{
        admissionregistration::v1::ValidatingWebhookConfiguration,
        apps::v1::{DaemonSet, Deployment},
        core::v1::{ConfigMap, Namespace, Node, Secret, Service, ServiceAccount},
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
    status::Timestamp,
};
use kilo_core::{
    objects::{Published, peer::Peer},
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

use crate::accounts::{account, token_of};
use api::{ADMIN, ApiServer, apply, apply_crds, create_node, manifest};

const KG: &str = env!("CARGO_BIN_EXE_kg");

/// A PodMonitor CRD without a schema worth the name: the operator's has thousands of lines.
fn pod_monitor_crd() -> DynamicObject {
    serde_json::from_value(json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": { "name": "podmonitors.monitoring.coreos.com" },
        "spec": {
            "group": "monitoring.coreos.com", "scope": "Namespaced",
            "names": { "kind": "PodMonitor", "plural": "podmonitors", "singular": "podmonitor" },
            "versions": [{ "name": "v1", "served": true, "storage": true, "schema": { "openAPIV3Schema": {
                "type": "object", "properties": { "spec": {
                    "type": "object", "required": ["selector", "podMetricsEndpoints"],
                    "x-kubernetes-preserve-unknown-fields": true,
                    "properties": {
                        "selector": { "type": "object", "x-kubernetes-preserve-unknown-fields": true },
                        "podMetricsEndpoints": { "type": "array", "items": {
                            "type": "object", "x-kubernetes-preserve-unknown-fields": true } },
                    },
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
    apply(&client, &pod_monitor_crd(), false).await.unwrap();
    let namespace = find("peer-validation.yaml", ("Namespace", "kilo"));
    apply(&client, &namespace, false).await.unwrap();
    let discovery = served(&client, "podmonitors").await;
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
            if group.group == "policy" && discovery.resolve_gvk(&group).is_none() {
                println!("{what}: {group:?} is not served before Kubernetes 1.21");
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
            // This server drops fields it does not know without a word.
            contains(&serde_json::to_value(&answer).unwrap(), &serde_json::to_value(&object).unwrap(), &what);
            kinds.insert(kind(&object).to_owned());
        }
    }
    println!("{} files, kinds {kinds:?}", files.len());
    assert!(files.len() >= 17, "{files:?}");
    assert!(kinds.contains("PodMonitor") && kinds.contains("ValidatingWebhookConfiguration"), "{kinds:?}");
}

/// What the server serves, once this resource is among it.
async fn served(client: &Client, plural: &str) -> Discovery {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let discovery = Discovery::new(client.clone()).run().await;
        let there = |group: &ApiGroup| group.recommended_resources().iter().any(|(r, _)| r.plural == plural);
        match discovery {
            Ok(discovery) if discovery.groups().any(there) => return discovery,
            // A group is announced a moment before it is served.
            other => assert!(Instant::now() < deadline, "{plural} are not served: {:?}", other.err()),
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Read as the type of Kubernetes 1.33 and written again: fields it does not know are gone.
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
        "Namespace" => through::<Namespace>(object),
        "PodDisruptionBudget" => through::<PodDisruptionBudget>(object),
        "Role" => through::<Role>(object),
        "RoleBinding" => through::<RoleBinding>(object),
        "Service" => through::<Service>(object),
        "ServiceAccount" => through::<ServiceAccount>(object),
        "ValidatingWebhookConfiguration" => through::<ValidatingWebhookConfiguration>(object),
        // Not of Kubernetes itself.
        "PodMonitor" => object.clone(),
        other => panic!("{other}: add its type here"),
    }
}

/// Removes what is younger than the server these tests run against (1.20).
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

/// Everything `ours` says is in `theirs`.
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

async fn client_of(kubeconfig: &Path) -> Client {
    kubernetes::client(Some(kubeconfig), None).await.unwrap()
}

/// Fails unless the server refused for want of rights.
#[track_caller]
fn refused<T>(what: &str, answer: kube::Result<T>) {
    match answer {
        Err(kube::Error::Api(status)) if status.code == 403 => println!("refused: {}", status.message),
        Err(error) => panic!("{what}: {error}"),
        Ok(_) => panic!("{what} was allowed"),
    }
}

#[tokio::test]
async fn the_agents_account_may_do_what_the_agent_does_and_nothing_else() {
    let Some(server) = ApiServer::start().await else { return };
    let admin = server.client(ADMIN).await;
    apply_crds(&admin).await;
    create_node(&admin, "own", &[]).await;
    let client = client_of(&account(&server, "kilo-kubeadm.yaml", "kube-system", "kilo").await).await;

    let backend = KubernetesBackend::start(client.clone(), Some("own"), "region").await.unwrap();
    let mut snapshots = backend.watch();
    let published = Published { last_seen: 1_700_000_000, ..Published::default() };
    assert!(backend.publish("own", &published).await.unwrap());
    create_node(&admin, "other", &[]).await;
    api::until(&mut snapshots, Duration::from_secs(5), |snapshot| snapshot.nodes.contains("other")).await;
    backend.retract("own").await.unwrap();

    let nodes: Api<Node> = Api::all(client.clone());
    refused("deleting a node", nodes.delete("other", &DeleteParams::default()).await);
    refused("creating a node", nodes.create(&PostParams::default(), &Node::default()).await);
    // The condition NetworkUnavailable, which belongs to whoever is the pods' network.
    nodes.patch_status("own", &PatchParams::default(), &Patch::Merge(json!({}))).await.unwrap();
    let addon = client_of(&account(&server, "kilo-kubeadm-flannel.yaml", "kube-system", "kilo").await).await;
    let beside_flannel: Api<Node> = Api::all(addon);
    refused(
        "patching a node's status beside another CNI",
        beside_flannel.patch_status("own", &PatchParams::default(), &Patch::Merge(json!({}))).await,
    );
    let daemon_sets: Api<DaemonSet> = Api::namespaced(client.clone(), "kube-system");
    assert!(daemon_sets.get_opt("kilo").await.unwrap().is_none(), "its own, which may not be there");
    refused("reading another DaemonSet", daemon_sets.get("kube-proxy").await);
    refused("changing its own", daemon_sets.delete("kilo", &DeleteParams::default()).await);
    let secrets: Api<Secret> = Api::all(client.clone());
    refused("reading secrets", secrets.list(&ListParams::default()).await);
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), "kube-system");
    refused("reading config maps", maps.list(&ListParams::default()).await);
    let peers: Api<Peer> = Api::all(client.clone());
    refused("deleting a peer", peers.delete("anyone", &DeleteParams::default()).await);
    let roles: Api<ClusterRole> = Api::all(client);
    let wider = Patch::Merge(json!({ "rules": [] }));
    refused("changing its own role", roles.patch("kilo", &PatchParams::default(), &wider).await);
}

#[tokio::test]
async fn people_read_with_kgctls_role_and_peers_are_in_view_and_edit() {
    let Some(server) = ApiServer::start().await else { return };
    let admin = server.client(ADMIN).await;
    apply_crds(&admin).await;
    let namespace = json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": "people" } });
    apply(&admin, &serde_json::from_value(namespace).unwrap(), false).await.ok();
    for object in manifest("kilo-kubeadm.yaml").iter().filter(|object| kind(object) == "ClusterRole") {
        apply(&admin, object, false).await.unwrap();
    }
    // The roles view and edit are the API server's own; its controller manager, which is not
    // here, fills them from those with the label.
    let labelled = |label: &str| {
        let roles = manifest("kilo-kubeadm.yaml").into_iter();
        let key = format!("rbac.authorization.k8s.io/aggregate-to-{label}");
        let has = |object: &DynamicObject| {
            object
                .metadata
                .labels
                .as_ref()
                .is_some_and(|labels| labels.get(&key).is_some_and(|on| on == "true"))
        };
        let names: Vec<_> = roles.filter(has).map(|object| name(&object).to_owned()).collect();
        assert!(names.iter().all(|name| name.starts_with("kilo-peers-")), "{names:?}");
        names
    };
    assert_eq!(labelled("view"), ["kilo-peers-view"]);
    assert_eq!(
        (labelled("edit"), labelled("admin")),
        (vec!["kilo-peers-edit".into()], vec!["kilo-peers-edit".into()])
    );
    let person = async |role: &str| {
        let objects = [
            json!({ "apiVersion": "v1", "kind": "ServiceAccount", "metadata": { "name": role, "namespace": "people" } }),
            json!({
                "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": { "name": role },
                "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role },
                "subjects": [{ "kind": "ServiceAccount", "name": role, "namespace": "people" }],
            }),
        ];
        for object in objects {
            apply(&admin, &serde_json::from_value(object).unwrap(), false).await.unwrap();
        }
        client_of(&token_of(&server, "people", role).await).await
    };

    let reader = person("kilo-kgctl").await;
    let nodes: Api<Node> = Api::all(reader.clone());
    nodes.list(&ListParams::default()).await.unwrap();
    refused("patching a node", nodes.patch("a", &PatchParams::default(), &Patch::Merge(json!({}))).await);
    let peers: Api<Peer> = Api::all(reader.clone());
    peers.list(&ListParams::default()).await.unwrap();
    refused("deleting a peer", peers.delete("anyone", &DeleteParams::default()).await);
    let secrets: Api<Secret> = Api::all(reader);
    refused("reading secrets", secrets.list(&ListParams::default()).await);

    let viewer: Api<Peer> = Api::all(person("kilo-peers-view").await);
    viewer.list(&ListParams::default()).await.unwrap();
    refused("deleting a peer", viewer.delete("anyone", &DeleteParams::default()).await);
    let editor: Api<Peer> = Api::all(person("kilo-peers-edit").await);
    let gone = editor.delete("anyone", &DeleteParams::default()).await;
    assert!(matches!(&gone, Err(kube::Error::Api(status)) if status.code == 404), "{:?}", gone.err());
}

/// Without rights the agent ends, and the last line, which becomes the message of the terminated
/// container, says what to apply.
#[tokio::test]
async fn without_the_cluster_role_the_last_line_of_the_log_says_what_to_apply() {
    let Some(server) = ApiServer::start().await else { return };
    apply_crds(&server.client(ADMIN).await).await;
    let kubeconfig = server.kubeconfig(api::NOBODY, server.port());
    let mut command = Command::new(KG);
    command.arg("--kubeconfig").arg(kubeconfig).args([
        "--hostname=n1",
        "--interface=kilotest0",
        "--listen=127.0.0.1:0",
    ]);
    let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    assert!(!output.status.success());
    let said = String::from_utf8(output.stderr).unwrap();
    let last = said.trim_end().lines().last().unwrap();
    assert!(last.contains("apply the ClusterRole and ClusterRoleBinding of manifests/"), "{said}");
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

#[tokio::test]
async fn the_webhooks_account_touches_its_own_secret_and_configuration_only() {
    let Some(server) = ApiServer::start().await else { return };
    let admin = server.client(ADMIN).await;
    let hook = find("peer-validation.yaml", ("ValidatingWebhookConfiguration", "peers.kilo.squat.ai"));
    apply(&admin, &hook, false).await.unwrap();
    let client =
        client_of(&account(&server, "peer-validation.yaml", "kilo", "kilo-peer-validation").await).await;

    let name = "peer-validation-webhook-tls";
    let secrets: Api<Secret> = Api::namespaced(client.clone(), "kilo");
    let missing = secrets.get(name).await;
    assert!(matches!(&missing, Err(kube::Error::Api(status)) if status.code == 404), "{missing:?}");
    let secret: Secret = serde_json::from_value(json!({ "metadata": { "name": name } })).unwrap();
    secrets.create(&PostParams::default(), &secret).await.unwrap();
    let mut kept = secrets.get(name).await.unwrap();
    kept.metadata.annotations.get_or_insert_default().insert("a".to_owned(), "b".to_owned());
    secrets.replace(name, &PostParams::default(), &kept).await.unwrap();
    let hooks: Api<ValidatingWebhookConfiguration> = Api::all(client.clone());
    let mut configuration = hooks.get("peers.kilo.squat.ai").await.unwrap();
    configuration.webhooks.as_mut().unwrap()[0].client_config.ca_bundle =
        Some(k8s_openapi::ByteString(fs::read(server.file("ca.crt")).unwrap()));
    hooks.replace("peers.kilo.squat.ai", &PostParams::default(), &configuration).await.unwrap();

    refused("reading another secret", secrets.get("other").await);
    refused("listing secrets", secrets.list(&ListParams::default()).await);
    refused("deleting its secret", secrets.delete(name, &DeleteParams::default()).await);
    let elsewhere: Api<Secret> = Api::namespaced(client, "kube-system");
    refused("secrets elsewhere", elsewhere.create(&PostParams::default(), &secret).await);
    refused("another webhook", hooks.get("other").await);
}

/// The container of a DaemonSet as a command: its arguments, its capabilities,
/// a read-only root, and what the manifest mounts from the host as it is here.
fn container(file: &str, daemon_set: &str, kubeconfig: &Path) -> Command {
    let object = find(file, ("DaemonSet", daemon_set));
    let container = &object.data["spec"]["template"]["spec"]["containers"][0];
    let context = &container["securityContext"];
    assert_eq!(context["readOnlyRootFilesystem"], true);
    assert_eq!(context["allowPrivilegeEscalation"], false);
    assert_eq!(context["privileged"], Value::Null);
    assert_eq!(strings(&context["capabilities"]["drop"]), ["ALL"]);
    let capabilities: String = strings(&context["capabilities"]["add"])
        .iter()
        .map(|capability| format!(",+{}", capability.to_lowercase()))
        .collect();
    let arguments = strings(&container["args"]).into_iter().map(|argument| {
        argument
            .replace("$(NODE_NAME)", "n1")
            .replace("$(HOST_IP)", HOST_IP)
            .replace("/etc/kubernetes/kubeconfig", kubeconfig.to_str().unwrap())
    });
    let script = "mount --bind / / && mount -o remount,bind,ro / && \
         mount --bind /proc/sys /proc/sys && mount -o remount,bind,ro /proc/sys && exec \"$0\" \"$@\"";
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "--propagation", "private", "sh", "-ec", script])
        .args(["setpriv", "--no-new-privs", "--inh-caps=-all"])
        .arg(format!("--bounding-set=-all{capabilities}"))
        .arg(KG)
        .args(arguments);
    command
}

fn strings(value: &Value) -> Vec<String> {
    value.as_array().unwrap().iter().map(|item| item.as_str().unwrap().to_owned()).collect()
}

/// Ends the process with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The private address of the node in the tests.
const HOST_IP: &str = "10.1.0.11";

/// The body of `http://HOST:1107/path`, once it is answered with 200.
async fn http(host: &str, path: &str) -> String {
    http_at(host, 1107, path).await
}

/// The same at another port.
async fn http_at(host: &str, port: u16, path: &str) -> String {
    let deadline = Instant::now() + Duration::from_secs(20);
    let ask = || -> std::io::Result<String> {
        let mut stream = std::net::TcpStream::connect((host, port))?;
        write!(stream, "GET {path} HTTP/1.1\r\nHost: n1\r\nConnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    loop {
        let answer = ask().unwrap_or_else(|error| error.to_string());
        if answer.starts_with("HTTP/1.1 200") {
            return answer;
        }
        assert!(Instant::now() < deadline, "{path}: {answer}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// A node's namespace: private address, public address, default route.
fn make_host() {
    netns::sh(
        "mount -t tmpfs lib /var/lib; mkdir -p /var/lib/kilo /run/wireguard; \
         mount -t sysfs sys /sys; mount -t bpf bpf /sys/fs/bpf; \
         ip link set lo up; ip link add eth0 type veth peer name other; ip link set eth0 up; ip link set other up; \
         ip address add 10.1.0.11/24 dev eth0; ip address add 192.0.2.11/32 dev eth0; \
         ip route add default via 10.1.0.1 dev eth0",
    );
}

/// Waits until the node leads its location.
async fn leads(nodes: &Api<Node>) {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let annotations = nodes.get("n1").await.unwrap().metadata.annotations.unwrap_or_default();
        if annotations.get("kilo.squat.ai/wireguard-ip").is_some_and(|ip| ip == "10.4.0.1/16") {
            return;
        }
        assert!(Instant::now() < deadline, "{annotations:?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Runs the agent of a manifest on one node until the node leads its location.
async fn runs_confined(file: &str) {
    make_host();
    let Some(server) = ApiServer::start().await else { return };
    let admin = server.client(ADMIN).await;
    apply_crds(&admin).await;
    create_node(&admin, "n1", &[]).await;
    let peer = json!({
        "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "Peer", "metadata": { "name": "laptop" },
        "spec": { "allowedIPs": ["10.5.0.1/32"], "publicKey": PublicKey([9; 32]).to_string() },
    });
    apply(&admin, &serde_json::from_value(peer).unwrap(), false).await.unwrap();
    let kubeconfig = account(&server, file, "kube-system", "kilo").await;

    let has_wireguard = manifest(file).iter().any(|object| name(object) == "kilo-wireguard");
    let start = || Running(container(file, "kilo-wireguard", &kubeconfig).spawn().unwrap());
    let mut wireguard = has_wireguard.then(start);
    while has_wireguard && !Path::new("/run/wireguard/kilo0.sock").exists() {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let agent = Running(container(file, "kilo", &kubeconfig).spawn().unwrap());
    leads(&Api::all(admin)).await;
    let status = fs::read_to_string(format!("/proc/{}/status", agent.0.id())).unwrap();
    // NET_ADMIN is bit 12, PERFMON 38, BPF 39.
    assert!(status.contains("CapEff:\t000000c000001000"), "{status}");
    assert!(http(HOST_IP, "/health").await.ends_with("ok\n"));
    let elsewhere = std::net::TcpStream::connect(("192.0.2.11", 1107));
    assert!(elsewhere.is_err(), "the agent listens on the node's address only");
    is_configured().await;
    if wireguard.take().is_some() {
        // The pod is replaced: the interface is another one, and everything comes back.
        wireguard = Some(start());
        is_configured().await;
    }
    let pins = dataplane::pin_directory(Path::new("/sys/fs/bpf"));
    assert!(pins.join("prefix_v4").exists());
    dashboard_shows_what_is_there(&http(HOST_IP, "/metrics").await);
    drop(wireguard);
}

/// Waits until the device has the peer, and the host a route to it.
async fn is_configured() {
    let deadline = Instant::now() + Duration::from_secs(40);
    let key = PublicKey([9; 32]);
    let there = format!("wg show kilo0 peers | grep -qF {key} && ip route show 10.5.0.1 | grep -q kilo0");
    while !netns::succeeds(&there) {
        assert!(Instant::now() < deadline, "`{there}` is not so");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Every metric the dashboard asks for is one the agent has.
fn dashboard_shows_what_is_there(scraped: &str) {
    // A handshake needs somebody at the other end.
    let metrics = Metrics::default();
    let peer = PeerStatus { handshake_age: Some(Duration::from_secs(1)), ..PeerStatus::default() };
    metrics.set_peers(BTreeMap::from([(PublicKey([1; 32]), peer)]), BTreeMap::new(), Timestamp::now());
    metrics.error("any");
    let all = scraped.to_owned() + &metrics.encode().unwrap();
    let there: BTreeSet<_> = all.lines().filter_map(|line| line.split(['{', ' ']).next()).collect();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../manifests/grafana-dashboard.json");
    let dashboard: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels.iter().filter_map(|panel| panel["targets"].as_array()).flatten();
    let mut asked = BTreeSet::new();
    for target in targets {
        let expression = target["expr"].as_str().unwrap();
        let words = expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        asked.extend(words.filter(|word| word.starts_with("kilo_")).map(ToOwned::to_owned));
    }
    assert!(asked.len() >= 10, "{asked:?}");
    for metric in &asked {
        assert!(
            there.contains(metric.as_str()),
            "the dashboard asks for {metric}, which is not among {there:?}"
        );
    }
}

#[test]
fn the_agent_runs_under_the_confinement_of_its_daemon_set() {
    netns::isolated("the_agent_runs_under_the_confinement_of_its_daemon_set", || async {
        runs_confined("kilo-k3s-userspace-heterogeneous.yaml").await;
    });
}

#[test]
fn without_kube_proxys_config_map_the_agent_asks_the_service_of_the_api_server() {
    let test = "without_kube_proxys_config_map_the_agent_asks_the_service_of_the_api_server";
    netns::isolated(test, || async {
        make_host();
        let Some(server) = ApiServer::start().await else { return };
        let admin = server.client(ADMIN).await;
        apply_crds(&admin).await;
        create_node(&admin, "n1", &[]).await;
        let file = "kilo-kubeadm.yaml";
        let daemon = find(file, ("DaemonSet", "kilo"));
        let volumes = daemon.data["spec"]["template"]["spec"]["volumes"].as_array().unwrap().clone();
        let volume = volumes.iter().find(|volume| volume["name"] == "kubeconfig").unwrap();
        assert_eq!(volume["configMap"]["optional"], true, "the pod starts without it");

        // What the kubelet gives every pod; a service implementation stands behind the address.
        mount_account(&server, &account(&server, file, "kube-system", "kilo").await);
        let mut command = container(file, "kilo", Path::new("/etc/kubernetes/kubeconfig"));
        command.env("KUBERNETES_SERVICE_HOST", "127.0.0.1");
        command.env("KUBERNETES_SERVICE_PORT", server.port().to_string());
        let _agent = Running(command.spawn().unwrap());
        leads(&Api::all(admin)).await;
    });
}

#[test]
fn userspace_wireguard_and_the_agent_run_in_daemon_sets_of_their_own() {
    netns::isolated("userspace_wireguard_and_the_agent_run_in_daemon_sets_of_their_own", || async {
        runs_confined("kilo-k3s-userspace.yaml").await;
    });
}

#[test]
fn the_webhook_of_the_manifest_makes_its_certificate_and_refuses_invalid_peers() {
    netns::isolated(
        "the_webhook_of_the_manifest_makes_its_certificate_and_refuses_invalid_peers",
        webhook_refuses,
    );
}

/// What the kubelet gives a container of this account.
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

/// A replica of the webhook's Deployment, confined as there; the second has ports of its own.
fn replica(server: &ApiServer, number: u16) -> Running {
    let deployment = find("peer-validation.yaml", ("Deployment", "peer-validation-server"));
    let pod = &deployment.data["spec"]["template"]["spec"];
    let container = &pod["containers"][0];
    assert_eq!(strings(&container["securityContext"]["capabilities"]["drop"]), ["ALL"]);
    assert_eq!(container["securityContext"]["readOnlyRootFilesystem"], true);
    assert_eq!(pod["securityContext"]["runAsUser"], 1000);
    let port = |argument: String| {
        argument
            .replace(":8443", &format!(":{}", 8443 + number))
            .replace(":1107", &format!(":{}", 1107 + number))
    };
    let script = "mount --bind / / && mount -o remount,bind,ro / && exec \"$0\" \"$@\"";
    let child = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "sh", "-ec", script])
        .args(["setpriv", "--no-new-privs", "--reuid=1000", "--regid=1000", "--clear-groups"])
        .args(["--inh-caps=-all", "--bounding-set=-all", "/run/kg"])
        .args(strings(&container["args"]).into_iter().map(port))
        .env("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        .env("KUBERNETES_SERVICE_PORT", server.port().to_string())
        .spawn();
    Running(child.unwrap())
}

/// The certificate a replica serves with, and what the API server trusts.
fn served_certificate(port: u16) -> String {
    netns::sh(&format!("openssl s_client -connect 127.0.0.1:{port} </dev/null 2>/dev/null | openssl x509"))
}

/// Waits until it is so.
async fn until(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !is_so().await {
        assert!(Instant::now() < deadline, "{what} within 30 s");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

async fn webhook_refuses() {
    // No kube-proxy here: the Service's name leads to the containers' own ports.
    netns::sh(&format!(
        "ip link set lo up; touch /run/kg; mount --bind {KG} /run/kg; \
         echo '127.0.0.1 localhost peer-validation.kilo.svc' > /run/hosts; mount --bind /run/hosts /etc/hosts"
    ));
    let Some(server) = ApiServer::start().await else { return };
    let admin = server.client(ADMIN).await;
    apply_crds(&admin).await;
    mount_account(&server, &account(&server, "peer-validation.yaml", "kilo", "kilo-peer-validation").await);
    let replicas = [replica(&server, 0), replica(&server, 1)];
    let mut hook = find("peer-validation.yaml", ("ValidatingWebhookConfiguration", "peers.kilo.squat.ai"));
    let client = &mut hook.data["webhooks"][0]["clientConfig"];
    let path = client["service"]["path"].as_str().unwrap().to_owned();
    *client = json!({ "url": format!("https://peer-validation.kilo.svc:8443{path}") });
    apply(&admin, &hook, false).await.unwrap();
    assert!(http_at("127.0.0.1", 1107, "/health").await.contains("200"));
    assert!(http_at("127.0.0.1", 1108, "/health").await.contains("200"));

    let secrets: Api<Secret> = Api::namespaced(admin.clone(), "kilo");
    let name = "peer-validation-webhook-tls";
    let kept = async |key: &str| -> String {
        let data = secrets.get(name).await.unwrap().data.unwrap_or_default();
        data.get(key).map(|bytes| String::from_utf8(bytes.0.clone()).unwrap()).unwrap_or_default()
    };
    let hooks: Api<ValidatingWebhookConfiguration> = Api::all(admin.clone());
    let trusted = async || -> String {
        let hook = hooks.get("peers.kilo.squat.ai").await.unwrap();
        let bundle = hook.webhooks.unwrap()[0].client_config.ca_bundle.clone();
        bundle.map(|bundle| String::from_utf8(bundle.0).unwrap()).unwrap_or_default()
    };
    let first = kept("tls.crt").await;
    assert_eq!((served_certificate(8443), served_certificate(8444)), (first.clone(), first.clone()));
    assert_eq!(trusted().await, kept("ca.crt").await);
    let names = netns::sh(
        "openssl s_client -connect 127.0.0.1:8443 </dev/null 2>/dev/null | openssl x509 -noout -ext subjectAltName",
    );
    assert!(names.contains("DNS:peer-validation.kilo.svc,"), "{names}");

    // The schema lets this pass; and the server takes a moment to learn of the webhook.
    let bad = validated("bad", &json!({}));
    let deadline = Instant::now() + Duration::from_secs(20);
    let refusal = loop {
        match apply(&admin, &bad, true).await {
            Err(error) if error.to_string().contains("denied") => break error.to_string(),
            other => assert!(Instant::now() < deadline, "the webhook is not asked: {other:?}"),
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    };
    println!("{refusal}");
    assert!(refusal.contains("admission webhook \"peers.kilo.squat.ai\" denied"), "{refusal}");
    assert!(refusal.contains("dnsOrIP"), "{refusal}");
    let good = validated("good", &json!({ "dns": "vpn.example.com" }));
    apply(&admin, &good, false).await.unwrap();

    // Renewal: the next authority is trusted before the next certificate is used.
    let make_due = async || {
        let due = Patch::Merge(
            json!({ "metadata": { "annotations": { "kilo.squat.ai/renew-after": "2020-01-01T00:00:00Z" } } }),
        );
        secrets.patch(name, &PatchParams::default(), &due).await.unwrap();
    };
    make_due().await;
    // So late that no time is left to wait: the replicas take both steps one after the other.
    until("a new certificate is in use", async || kept("tls.crt").await != first).await;
    let second = kept("tls.crt").await;
    until("both replicas serve with it", async || {
        served_certificate(8443) == second && served_certificate(8444) == second
    })
    .await;
    assert_eq!(trusted().await, kept("ca.crt").await);
    assert_eq!(trusted().await.matches("BEGIN CERTIFICATE").count(), 2, "the former one is trusted, too");
    assert_eq!(kept("next.crt").await, "");
    until("peers can be written", async || apply(&admin, &good, false).await.is_ok()).await;
    // Somebody takes the authority away (a manifest applied anew): it comes back.
    let mut object = hooks.get("peers.kilo.squat.ai").await.unwrap();
    object.webhooks.as_mut().unwrap()[0].client_config.ca_bundle = None;
    hooks.replace("peers.kilo.squat.ai", &PostParams::default(), &object).await.unwrap();
    until("the authority is back", async || !trusted().await.is_empty()).await;
    drop(replicas);
}

/// A Peer with an endpoint at this host.
fn validated(name: &str, host: &Value) -> DynamicObject {
    serde_json::from_value(json!({
        "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "Peer", "metadata": { "name": name },
        "spec": { "allowedIPs": [], "publicKey": PublicKey([9; 32]).to_string(),
                  "endpoint": { "dnsOrIP": host, "port": 51820 } },
    }))
    .unwrap()
}

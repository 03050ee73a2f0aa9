//! The roles of the manifests: enough for what each account does, and no more.

use super::*;

async fn client_of(kubeconfig: &Path) -> Client {
    kubernetes::client(Some(kubeconfig), None).await.unwrap()
}

/// Fails unless the server refused for lack of rights.
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
    // The condition NetworkUnavailable belongs to the program that provides the pod network.
    nodes.patch_status("own", &PatchParams::default(), &Patch::Merge(json!({}))).await.unwrap();
    let event = |namespace: &str| -> (Api<Event>, Event) {
        let text = json!({
            "metadata": { "name": "own.1", "namespace": namespace },
            "involvedObject": { "kind": "Node", "name": "own" },
        });
        (Api::namespaced(client.clone(), namespace), serde_json::from_value(text).unwrap())
    };
    let (events, about_node) = event("default");
    events.create(&PostParams::default(), &about_node).await.unwrap();
    refused("reading Events", events.list(&ListParams::default()).await);
    let (elsewhere, about_node) = event("kube-system");
    refused("Events elsewhere", elsewhere.create(&PostParams::default(), &about_node).await);
    let slices: Api<NodeSlice> = Api::all(client.clone());
    refused("reading slices, which slices.yaml allows", slices.list(&ListParams::default()).await);
    // From here on, the role is that of the other manifest.
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
    // The roles view and edit are the API server's own. Its controller manager, which does not run here,
    // aggregates the labelled roles into them.
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
        let is_role = |object: &DynamicObject| kind(object) == "ClusterRole" && name(object) == role;
        let granted = manifest("kilo-kubeadm.yaml").into_iter().find(is_role).unwrap();
        until_granted(&admin, &format!("system:serviceaccount:people:{role}"), &granted, "").await;
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

/// Bound as docs/install.md says: in the agents' namespace, and in the one with the Events about Nodes and Peers.
#[tokio::test]
async fn who_collects_a_sysdump_reads_daemon_sets_and_events_of_two_namespaces() {
    let Some(server) = ApiServer::start().await else { return };
    let admin = server.client(ADMIN).await;
    let role = find("kilo-kubeadm.yaml", ("ClusterRole", "kilo-kgctl-sysdump"));
    apply(&admin, &role, false).await.unwrap();
    for namespace in ["kube-system", "default"] {
        let binding = json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding",
            "metadata": { "name": "sysdump", "namespace": namespace },
            "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name(&role) },
            "subjects": [{ "kind": "User", "name": api::NOBODY }],
        });
        apply(&admin, &serde_json::from_value(binding).unwrap(), false).await.unwrap();
        api::until_may(&admin, api::NOBODY, ("list", "", "events"), (namespace, ""), true).await;
    }
    let reader = server.client(api::NOBODY).await;
    for namespace in ["kube-system", "default"] {
        let events: Api<Event> = Api::namespaced(reader.clone(), namespace);
        events.list(&ListParams::default()).await.unwrap();
        assert!(events.get_opt("none").await.unwrap().is_none(), "{namespace}");
    }
    let daemon_sets: Api<DaemonSet> = Api::namespaced(reader.clone(), "kube-system");
    daemon_sets.list(&ListParams::default()).await.unwrap();
    assert!(daemon_sets.get_opt("kilo").await.unwrap().is_none(), "it is not there");
    refused("changing a DaemonSet", daemon_sets.delete("kilo", &DeleteParams::default()).await);
    let everywhere: Api<Event> = Api::all(reader.clone());
    refused("Events of every namespace", everywhere.list(&ListParams::default()).await);
    let secrets: Api<Secret> = Api::namespaced(reader, "kube-system");
    refused("reading secrets", secrets.list(&ListParams::default()).await);
}

/// Without rights the agent ends, and its last log line, which becomes the container's termination message,
/// says what to apply.
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

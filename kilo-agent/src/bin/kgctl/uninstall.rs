//! `kgctl uninstall`: takes Kilo off every node by the manifest that does it by hand, waits, and
//! shows what each node has removed.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use k8s_openapi::{
    NamespaceResourceScope,
    api::{
        apps::v1::DaemonSet,
        core::v1::{Pod, ServiceAccount},
        rbac::v1::{ClusterRole, ClusterRoleBinding},
    },
};
use kilo_agent::cli::parse_period;
use kube::{
    Api, Client, Resource, ResourceExt as _,
    api::{ApiResource, DeleteParams, DynamicObject, ListParams, LogParams, Patch, PatchParams, PostParams},
};

use crate::{
    cluster::{ApiFlags, Cluster},
    progress::Progress,
    refusal::Asked,
    remote, takeover, terminal,
};

const MANIFEST: &str = include_str!("../../../../manifests/uninstall.yaml");
/// The image and the namespace that the manifest names.
const IMAGE: &str = concat!("kilo-ebpf/kilo:", env!("CARGO_PKG_VERSION"));
const NAMESPACE: &str = "kube-system";
/// Name of every object of the manifest, and of the pods' label.
const NAME: &str = "kilo-uninstall";
/// What must not run meanwhile, beside what `kgctl takeover` prints.
const RUNNING: [&str; 2] = ["kilo", "kilo-wireguard"];
const POLL: Duration = Duration::from_millis(300);
/// The pods that are done end within this time, or nobody waits for them.
const LEAVING: Duration = Duration::from_secs(30);

#[derive(Args, Debug)]
#[command(after_help = "Examples:
  kubectl --namespace kube-system delete daemonset kilo
  kgctl uninstall
  kgctl uninstall --image=registry.example/kilo:0.1.0 --timeout=10m")]
pub struct UninstallArgs {
    /// Image of the pods that remove everything.
    #[arg(long, default_value = IMAGE)]
    image: String,
    /// Namespace that Kilo was in.
    #[arg(long, default_value = NAMESPACE)]
    namespace: String,
    /// Nodes that are not done after this time are named, and nothing of the uninstaller is removed.
    #[arg(long, default_value = "3m", value_parser = parse_period)]
    timeout: Duration,
    #[command(flatten)]
    api: ApiFlags,
}

/// Returns what each node removed.
pub async fn run(args: &UninstallArgs) -> Result<String> {
    let cluster = Cluster::open(&args.api).await?;
    let client = cluster.client.clone();
    let daemon_sets: Api<DaemonSet> = Api::namespaced(client.clone(), &args.namespace);
    let everywhere: Api<DaemonSet> = Api::all(client.clone());
    let named = RUNNING.map(|name| ListParams::default().fields(&format!("metadata.name={name}")));
    for agents in named.into_iter().chain([takeover::made_here()]) {
        let found = cluster.ask(Asked::new("list", "daemonsets"), everywhere.list(&agents)).await?;
        if let Some(first) = found.items.first() {
            let (name, namespace) = (first.name_any(), first.namespace().unwrap_or_default());
            bail!(
                "nothing was removed: DaemonSet {name} of {namespace} is there, and its pods would put everything \
                 back; delete it first: kubectl --namespace {namespace} delete daemonset {name}"
            );
        }
    }
    let text = MANIFEST.replace(IMAGE, &args.image).replace(NAMESPACE, &args.namespace);
    for document in text.split("\n---\n").skip(1) {
        let object: DynamicObject = serde_yaml_ng::from_str(document).context("uninstall.yaml")?;
        write(&cluster, &object).await?;
    }
    let done = wait(&cluster, &daemon_sets, args.timeout).await?;
    let pods: Api<Pod> = Api::namespaced(client.clone(), &args.namespace);
    let said = logs(&cluster, &pods, &args.namespace).await?;
    if !done {
        bail!(
            "not every node was done after {}; the pods of DaemonSet {NAME} go on trying:\n{said}",
            humantime::format_duration(args.timeout)
        );
    }
    remove(&cluster, &daemon_sets, &args.namespace).await?;
    Ok(said)
}

/// Creates an object, or brings one that is there to this content.
async fn write(cluster: &Cluster, object: &DynamicObject) -> Result<()> {
    let client = &cluster.client;
    let kind = object.types.as_ref().map(|types| types.kind.as_str()).unwrap_or_default();
    let namespace = object.namespace();
    let of = |resource| match &namespace {
        Some(namespace) => Api::namespaced_with(client.clone(), namespace, resource),
        None => Api::<DynamicObject>::all_with(client.clone(), resource),
    };
    let objects = of(&match kind {
        "ServiceAccount" => ApiResource::erase::<ServiceAccount>(&()),
        "ClusterRole" => ApiResource::erase::<ClusterRole>(&()),
        "ClusterRoleBinding" => ApiResource::erase::<ClusterRoleBinding>(&()),
        "DaemonSet" => ApiResource::erase::<DaemonSet>(&()),
        other => bail!("uninstall.yaml has an object of kind {other}"),
    });
    let resource = format!("{}s", kind.to_lowercase());
    let create = async {
        match objects.create(&PostParams::default(), object).await {
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(true),
            other => other.map(|_| false),
        }
    };
    if cluster.ask(Asked::new("create", &resource), create).await? {
        let patch = Patch::Merge(object);
        let parameters = PatchParams::default();
        cluster.ask(Asked::new("patch", &resource), objects.patch(NAME, &parameters, &patch)).await?;
    }
    Ok(())
}

/// False when not every node is done in time.
async fn wait(cluster: &Cluster, daemon_sets: &Api<DaemonSet>, limit: Duration) -> Result<bool> {
    let started = Instant::now();
    let progress = Progress::new("waiting for every node", 0);
    loop {
        let daemon_set = cluster.ask(Asked::new("get", "daemonsets"), daemon_sets.get(NAME)).await?;
        let seen = daemon_set.status.clone().unwrap_or_default();
        let current = seen.observed_generation == daemon_set.metadata.generation;
        let updated = seen.updated_number_scheduled.unwrap_or_default();
        let wanted = seen.desired_number_scheduled;
        progress.of(seen.number_ready, wanted);
        if current && wanted > 0 && updated == wanted && seen.number_ready == wanted {
            return Ok(true);
        }
        if started.elapsed() > limit {
            return Ok(false);
        }
        tokio::time::sleep(POLL).await;
    }
}

/// What the pods said, by node.
async fn logs(cluster: &Cluster, pods: &Api<Pod>, namespace: &str) -> Result<String> {
    let labelled = ListParams::default().labels(&format!("app.kubernetes.io/name={NAME}"));
    let listed = cluster.ask(Asked::new("list", "pods").within(namespace), pods.list(&labelled)).await?;
    let progress = Progress::new("reading what the nodes removed", listed.items.len());
    let mut nodes = BTreeMap::new();
    for pod in listed {
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone()).unwrap_or_default();
        let container = LogParams { container: Some("uninstall".to_owned()), ..LogParams::default() };
        let said = remote::log(cluster, &pod, container).await;
        nodes.insert(node, said.unwrap_or_else(|error| format!("its log cannot be read: {error:#}")));
        progress.step();
    }
    let mut text = String::new();
    for (node, said) in nodes {
        for line in said.lines() {
            writeln!(text, "{node}: {}", terminal::plain(line))?;
        }
    }
    Ok(text)
}

async fn remove(cluster: &Cluster, daemon_sets: &Api<DaemonSet>, namespace: &str) -> Result<()> {
    let client = &cluster.client;
    let foreground = DeleteParams::foreground();
    cluster.ask(Asked::new("delete", "daemonsets"), daemon_sets.delete(NAME, &foreground)).await?;
    // It goes after its pods.
    let _progress = Progress::new("removing the uninstaller", 0);
    let started = Instant::now();
    while cluster.ask(Asked::new("get", "daemonsets"), daemon_sets.get_opt(NAME)).await?.is_some()
        && started.elapsed() < LEAVING
    {
        tokio::time::sleep(POLL).await;
    }
    delete(cluster, Api::<ClusterRoleBinding>::all(client.clone())).await?;
    delete(cluster, Api::<ClusterRole>::all(client.clone())).await?;
    delete(cluster, namespaced::<ServiceAccount>(client, namespace)).await
}

fn namespaced<K>(client: &Client, namespace: &str) -> Api<K>
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
{
    Api::namespaced(client.clone(), namespace)
}

async fn delete<K>(cluster: &Cluster, objects: Api<K>) -> Result<()>
where
    K: Resource<DynamicType = ()> + Clone + std::fmt::Debug + serde::de::DeserializeOwned,
{
    let (resource, parameters) = (K::plural(&()), DeleteParams::default());
    cluster.ask(Asked::new("delete", &resource), objects.delete(NAME, &parameters)).await.map(drop)
}

//! `kgctl uninstall`: removes Kilo from every node with the manifest for doing so by hand, waits, and shows
//! what each node has removed.

mod image;

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
        core::v1::{ContainerState, Pod, ServiceAccount},
    },
};
use kilo_agent::{AGENTS_NAMESPACE, backend::kubernetes, cli::parse_period, status::pods};
use kilo_core::{
    errors::error_chain,
    settings::defaults::{self, CNI_DIRECTORY},
};
use kube::{
    Api, Client, Resource, ResourceExt as _,
    api::{ApiResource, DeleteParams, DynamicObject, ListParams, LogParams, Patch, PatchParams, PostParams},
};
use serde_json::json;

use crate::{
    cluster::{ApiFlags, Cluster},
    image_name,
    progress::Progress,
    refusal::Asked,
    remote, takeover, terminal,
};

const MANIFEST: &str = include_str!("../../../../manifests/uninstall.yaml");
/// The image in the manifest, which stands for the one that the agents have.
const IMAGE: &str = concat!("kilo-ebpf/kilo:", env!("CARGO_PKG_VERSION"));
/// The argument in the manifest that others are added to.
const ARGUMENT: &str = "            - --remove-cni\n";
/// Name of every object in the manifest, and label of its pods.
const NAME: &str = "kilo-uninstall";
/// The container that removes everything.
const CONTAINER: &str = "uninstall";
/// `DaemonSets` that must not run meanwhile, besides those that `kgctl takeover` prints.
const RUNNING: [&str; 2] = ["kilo", "kilo-wireguard"];
const POLL: Duration = Duration::from_millis(300);
/// How long to wait for the pods to end once they are done.
const LEAVING: Duration = Duration::from_secs(30);

#[derive(Args, Debug)]
#[command(after_help = "Examples:
  kubectl --namespace kube-system delete daemonset kilo
  kgctl uninstall --image=registry.example/kilo:0.1.0
  kgctl uninstall --timeout=10m               with the image that is found on the nodes")]
pub struct UninstallArgs {
    /// Image of the pods that remove everything: the agents' own. Default: what the deleted DaemonSet kilo has left,
    /// else the one image on the nodes whose name without tag ends in /kilo.
    #[arg(long, value_parser = image_name::parse)]
    image: Option<String>,
    /// Secret in the namespace of --namespace with which kubelets pull the image (repeatable).
    #[arg(long = "image-pull-secret", value_name = "NAME")]
    image_pull_secrets: Vec<String>,
    /// Namespace Kilo was installed in.
    #[arg(long, short, value_name = "NAME", default_value = AGENTS_NAMESPACE)]
    namespace: String,
    /// Directory on the nodes that holds the CNI configuration: /etc/kubernetes/cni/net.d on bootkube and
    /// Typhoon.
    #[arg(long, default_value = CNI_DIRECTORY, value_parser = parse_directory)]
    cni_dir: String,
    /// WireGuard interface of the agents, if they had --interface.
    #[arg(long, default_value = defaults::INTERFACE, value_parser = parse_interface)]
    interface: String,
    /// Longest time to wait; nodes not done by then are listed, and the uninstaller is left in place.
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
    refuse_beside_agents(&cluster).await?;
    let image = match &args.image {
        Some(image) => image.clone(),
        None => image::of_agents(&cluster, &args.namespace).await?,
    };
    let (mounted, on_host) =
        (format!("            path: {CNI_DIRECTORY}\n"), format!("            path: {}\n", args.cni_dir));
    // The namespace first: an image's name may have the text of it, too.
    let text = MANIFEST.replace(AGENTS_NAMESPACE, &args.namespace).replace(IMAGE, &image);
    // This machine reaches the API server; a pod may not, once the mesh is gone.
    let arguments =
        format!("{ARGUMENT}            - --keep-annotations\n            - --interface={}\n", args.interface);
    let text = text.replace(&mounted, &on_host).replace(ARGUMENT, &arguments);
    // The role to change Nodes is for applying the manifest by hand: with --keep-annotations the pods send no
    // requests.
    let is_role = |document: &&str| document.contains("\nkind: ClusterRole");
    for document in text.split("\n---\n").skip(1).filter(|document| !is_role(document)) {
        let mut object: DynamicObject =
            serde_yaml_ng::from_str(document).context("failed to parse uninstall.yaml")?;
        pull_with(&mut object, &args.image_pull_secrets);
        write(&cluster, &object).await?;
    }
    let pods: Api<Pod> = Api::namespaced(client.clone(), &args.namespace);
    let waited = wait(&cluster, &daemon_sets, &pods, args).await?;
    let (mut said, mut waits_for) = reports(&cluster, &pods, &args.namespace).await?;
    retract(&cluster, &mut said, &waits_for).await?;
    let missing = waited.wanted.saturating_sub(said.len());
    if missing > 0 {
        waits_for.push(format!("{missing} nodes without a running pod"));
    }
    // The last one may have finished meanwhile.
    if let Some(why) = waited.why_not.filter(|_| !waits_for.is_empty()) {
        bail!(
            "not done {why}: {}; DaemonSet {NAME} stays, and its pods keep retrying. Run this again{}, or remove it: \
             kubectl --namespace {} delete daemonset,serviceaccount {NAME}\n{}",
            waits_for.join(", "),
            waited.again,
            args.namespace,
            lines(&said)?
        );
    }
    remove(&cluster, &daemon_sets, &args.namespace).await?;
    lines(&said)
}

/// Refuses while a DaemonSet runs agents, which would put everything back.
async fn refuse_beside_agents(cluster: &Cluster) -> Result<()> {
    let everywhere: Api<DaemonSet> = Api::all(cluster.client.clone());
    let named = RUNNING.map(|name| ListParams::default().fields(&format!("metadata.name={name}")));
    for agents in named.into_iter().chain([takeover::made_here()]) {
        let found = cluster.ask(Asked::new("list", "daemonsets"), everywhere.list(&agents)).await?;
        if let Some(first) = found.items.first() {
            let (name, namespace) = (first.name_any(), first.namespace().unwrap_or_default());
            let template = first.spec.as_ref().and_then(|spec| spec.template.spec.as_ref());
            let image = template.and_then(image::of_template).filter(|image| !image::is_kilos(image));
            let image = image.map(|image| format!(" --image={image}")).unwrap_or_default();
            bail!(
                "nothing was removed: DaemonSet {name} of {namespace} is there, and its pods would put everything \
                 back. Delete it first: kubectl --namespace {namespace} delete daemonset {name}; then run: kgctl \
                 uninstall --namespace={namespace}{image}"
            );
        }
    }
    Ok(())
}

/// Sets the pull secrets of a DaemonSet's pods; an empty list removes those of an earlier call.
fn pull_with(object: &mut DynamicObject, secrets: &[String]) {
    if let Some(pod) = object.data.pointer_mut("/spec/template/spec") {
        let secrets: Vec<_> = secrets.iter().map(|name| json!({ "name": name })).collect();
        pod["imagePullSecrets"] = secrets.into();
    }
}

/// Parses a directory of a node, limited to characters that are safe in a manifest.
fn parse_directory(text: &str) -> Result<String, String> {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "/._-".contains(letter);
    if text.starts_with('/') && text.chars().all(is_plain) {
        Ok(text.to_owned())
    } else {
        Err("write an absolute path of letters, digits, dots, dashes and slashes".to_owned())
    }
}

/// Parses an interface name that is valid for the kernel and safe in a manifest.
fn parse_interface(text: &str) -> Result<String, String> {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "._-".contains(letter);
    if (1..16).contains(&text.len()) && text.chars().all(is_plain) {
        Ok(text.to_owned())
    } else {
        Err("write an interface name: at most 15 letters, digits, dots, dashes and underscores".to_owned())
    }
}

/// Creates an object, or updates an existing one.
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

/// How the wait for all nodes ended.
struct Waited {
    /// Number of nodes that are to be done.
    wanted: usize,
    /// Why the wait ended before they were; `None` = they are.
    why_not: Option<String>,
    /// With what to run the command again.
    again: &'static str,
}

/// Waits for every node, until time runs out or the pods' image cannot be had.
async fn wait(
    cluster: &Cluster,
    daemon_sets: &Api<DaemonSet>,
    pods: &Api<Pod>,
    args: &UninstallArgs,
) -> Result<Waited> {
    let started = Instant::now();
    let progress = Progress::new("waiting for every node", 0);
    let mut pulls = image::Pulls::default();
    loop {
        let daemon_set = cluster.ask(Asked::new("get", "daemonsets"), daemon_sets.get(NAME)).await?;
        let seen = daemon_set.status.clone().unwrap_or_default();
        let current = seen.observed_generation == daemon_set.metadata.generation;
        let updated = seen.updated_number_scheduled.unwrap_or_default();
        let wanted = seen.desired_number_scheduled;
        progress.of(seen.number_ready, wanted);
        let ended = |why_not, again| Waited { wanted: usize::try_from(wanted).unwrap_or(0), why_not, again };
        if current && wanted > 0 && updated == wanted && seen.number_ready == wanted {
            return Ok(ended(None, ""));
        }
        // Pods of an earlier call may have had another image.
        if current && wanted > 0 && updated == wanted && pulls.is_due() {
            let listed = list(cluster, pods, &args.namespace).await?;
            if let Some(why) = pulls.failed(&listed) {
                return Ok(ended(Some(why), " with the agents' --image (and --image-pull-secret)"));
            }
        }
        if started.elapsed() > args.timeout {
            let why = format!("after {}", humantime::format_duration(args.timeout));
            return Ok(ended(Some(why), ""));
        }
        tokio::time::sleep(POLL).await;
    }
}

/// The uninstaller's pods.
async fn list(cluster: &Cluster, pods: &Api<Pod>, namespace: &str) -> Result<Vec<Pod>> {
    let labelled = ListParams::default().labels(&format!("app.kubernetes.io/name={NAME}"));
    Ok(cluster.ask(Asked::new("list", "pods").within(namespace), pods.list(&labelled)).await?.items)
}

/// The pods' output by node, and the nodes whose pods are not done.
async fn reports(
    cluster: &Cluster,
    pods: &Api<Pod>,
    namespace: &str,
) -> Result<(BTreeMap<String, String>, Vec<String>)> {
    let listed = list(cluster, pods, namespace).await?;
    let progress = Progress::new("reading what the nodes removed", listed.len());
    let (mut nodes, mut waits_for) = (BTreeMap::new(), Vec::new());
    for pod in listed {
        // A pod that is still to be scheduled has no node yet.
        let Some(node) = pod.spec.as_ref().and_then(|spec| spec.node_name.clone()) else { continue };
        if !pods::is_ready(&pod) {
            waits_for.push(node.clone());
        }
        let said = match report(&pod).or_else(|| image::not_pulled(&pod)) {
            Some(report) => report,
            None => {
                let container = LogParams { container: Some(CONTAINER.to_owned()), ..LogParams::default() };
                let log = remote::log(cluster, &pod, container).await;
                log.unwrap_or_else(|error| format!("its log cannot be read: {error:#}"))
            }
        };
        nodes.insert(node, said);
        progress.step();
    }
    waits_for.sort_unstable();
    Ok((nodes, waits_for))
}

/// What the container has removed, according to the pod's status. Unlike a log this does not need the node's
/// kubelet, which may be reachable only through the mesh.
fn report(pod: &Pod) -> Option<String> {
    let containers = pod.status.as_ref()?.init_container_statuses.as_deref()?;
    let container = containers.iter().find(|container| container.name == CONTAINER)?;
    let ended = |state: Option<&ContainerState>| state?.terminated.as_ref()?.message.clone();
    ended(container.state.as_ref()).or_else(|| ended(container.last_state.as_ref()))
}

/// Removes what the agents of nodes that are done have published (annotations, the condition
/// NetworkUnavailable), and adds that to their reports; the error lists all nodes for which it failed.
async fn retract(cluster: &Cluster, said: &mut BTreeMap<String, String>, waits_for: &[String]) -> Result<()> {
    let mut refused = Vec::new();
    for (node, said) in said.iter_mut().filter(|(node, _)| !waits_for.contains(node)) {
        match kubernetes::retract(cluster.client.clone(), node).await {
            Ok(()) => *said = format!("{}\nremoved: annotations of node {node}", said.trim_end()),
            Err(error) => refused.push(format!("{node}: {}", error_chain(&error))),
        }
    }
    if refused.is_empty() {
        return Ok(());
    }
    bail!("not done: annotations could not be removed; run this again:\n{}", refused.join("\n"))
}

/// Prefixes each line with the name of its node.
fn lines(nodes: &BTreeMap<String, String>) -> Result<String> {
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
    // The DaemonSet is deleted after its pods.
    let _progress = Progress::new("removing the uninstaller", 0);
    let started = Instant::now();
    while cluster.ask(Asked::new("get", "daemonsets"), daemon_sets.get_opt(NAME)).await?.is_some()
        && started.elapsed() < LEAVING
    {
        tokio::time::sleep(POLL).await;
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_of_a_pod_says_what_was_removed_also_while_it_tries_again() {
        let pod = |state: &str| -> Pod {
            let text = format!(
                "metadata: {{name: kilo-uninstall-x}}\nstatus:\n  initContainerStatuses:\n  - {{name: uninstall, image: i, \
                 imageID: '', ready: false, restartCount: 1, {state}}}\n"
            );
            serde_yaml_ng::from_str(&text).unwrap()
        };
        let ended = "{terminated: {exitCode: 0, message: \"removed: interface kilo0\\n\"}}";
        let done = pod(&format!("state: {ended}"));
        assert_eq!(report(&done).as_deref(), Some("removed: interface kilo0\n"));
        let again = pod(&format!("state: {{waiting: {{reason: CrashLoopBackOff}}}}, lastState: {ended}"));
        assert!(report(&again).is_some());
        assert_eq!(report(&pod("state: {running: {}}")), None);
    }

    #[test]
    fn pods_alone_are_pulled_with_a_secret_and_with_none_again() {
        let objects = || MANIFEST.split("\n---\n").skip(1).map(|text| serde_yaml_ng::from_str(text).unwrap());
        let named = |mut object: DynamicObject, secrets: &[&str]| {
            let secrets: Vec<_> = secrets.iter().map(|&name| name.to_owned()).collect();
            pull_with(&mut object, &secrets);
            object.data.pointer("/spec/template/spec/imagePullSecrets").cloned()
        };
        let found: Vec<_> = objects().filter_map(|object| named(object, &["registry"])).collect();
        assert_eq!(found, [json!([{"name": "registry"}])], "of the one DaemonSet");
        let found: Vec<_> = objects().filter_map(|object| named(object, &[])).collect();
        assert_eq!(found, [json!([])]);
    }

    #[test]
    fn the_manifest_has_what_is_replaced_in_it() {
        for text in [IMAGE, AGENTS_NAMESPACE, ARGUMENT, &format!("            path: {CNI_DIRECTORY}\n")] {
            assert!(MANIFEST.contains(text), "{text}");
        }
    }
}

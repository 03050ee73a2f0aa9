//! `kgctl sysdump`: collects what a bug report needs, in one archive.

mod archive;
mod redact;

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use anyhow::{Context as _, Result, anyhow, bail};
use clap::Args;
use futures::{StreamExt as _, stream};
use k8s_openapi::api::{
    apps::v1::DaemonSet,
    core::v1::{Event, Node, Pod},
};
use kilo_agent::{
    status::{self, ask, pods},
    timestamp::Timestamp,
};
use kilo_core::{errors::error_chain, objects::peer::Peer};
use kube::{
    Api, ResourceExt as _,
    api::{ApiResource, DynamicObject, ListParams, LogParams},
};
use serde::Serialize;

use crate::{
    cluster::{AgentsFlags, Cluster},
    complete,
    outcome::Outcome,
    progress::Progress,
    refusal::Asked,
    remote,
    source::{self, MeshFlags},
    terminal, version,
};
use archive::Archive;
use redact::Redactor;

/// Hidden command that runs in the agents' pods.
pub const NODE_REPORT: &str = "node-report";
/// Number of nodes collected from at the same time.
const AT_A_TIME: usize = 8;
/// Maximum total bytes and time of the data from one node.
const LARGEST: usize = 256 << 20;
const PATIENCE: Duration = Duration::from_mins(5);
/// Paths that an agent serves, and the names of their files.
const PAGES: [(&str, &str); 3] =
    [("status", "status.json"), ("metrics", "metrics.txt"), ("health", "health.txt")];
/// Events about objects without a namespace are in this one.
const DEFAULT: &str = "default";

#[derive(Args, Debug)]
#[command(after_help = "Examples:
  kgctl sysdump                                of all nodes, into kilo-sysdump-TIME.tar.gz
  kgctl sysdump a1 b1 --output=dump.tar.gz     of two nodes
  kgctl sysdump --log-lines=50000
  kgctl sysdump --namespace=networking         where the agents are not in kube-system")]
pub struct SysdumpArgs {
    /// Only these nodes; objects and the status of the mesh are collected in any case.
    #[arg(add = complete::nodes())]
    nodes: Vec<String>,
    /// File to write the archive to; default: kilo-sysdump-TIME.tar.gz in the current directory.
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Number of lines from the end of each container's log.
    #[arg(long, value_name = "N", default_value = "5000", value_parser = clap::value_parser!(i64).range(1..))]
    log_lines: i64,
    #[command(flatten)]
    agents: AgentsFlags,
    #[command(flatten)]
    flags: MeshFlags,
}

/// Writes the archive; returns its name, and whether nothing is missing.
pub async fn run(args: &SysdumpArgs) -> Result<Outcome> {
    let now = Timestamp::now();
    let name = format!("kilo-sysdump-{}", now.to_string().replace([':', '-'], ""));
    let path = args.output.clone().unwrap_or_else(|| PathBuf::from(format!("{name}.tar.gz")));
    if path.exists() {
        bail!("{} exists; name another file with --output", path.display());
    }
    let cluster = Cluster::open(&args.flags.api).await?.with_agents(&args.agents);
    let snapshot = cluster.snapshot(&args.flags.shape.topology_label).await?;
    let mut names: Vec<String> = snapshot.nodes.names().map(ToOwned::to_owned).collect();
    if let Some(unknown) = args.nodes.iter().find(|wanted| !names.contains(wanted)) {
        bail!("node {unknown:?} does not exist; choose one of: {}", names.join(", "));
    }
    if !args.nodes.is_empty() {
        names.retain(|name| args.nodes.contains(name));
    }

    let mut archive = Archive::default();
    archive.add("README.txt", Ok(readme(now)));
    let found = cluster.agents_pods(None).await;
    archive.add("pods.yaml", found.as_ref().map_err(copy).and_then(|listed| cleaned(&listed.pods)));
    let found = found.unwrap_or_default().pods;

    let mesh = source::mesh_anyway(&snapshot, &args.flags);
    let mut seen = source::status(&mesh, &snapshot, &args.flags.shape, now);
    pods::explain(&found, &mut seen);
    archive.add("status.txt", Ok(status::table(&seen, true)));
    archive.add("status.json", serde_json::to_string_pretty(&seen).map_err(Into::into));
    archive.add("versions.json", version::as_json(&cluster).await);
    objects(&cluster, cluster.namespace_of(&found), &mut archive).await;

    let progress = Progress::new("collecting from nodes", names.len());
    let of_nodes = names.iter().map(async |node| {
        let part = of_node(&cluster, &found, node, args.log_lines).await;
        progress.step();
        part
    });
    let parts: Vec<_> = stream::iter(of_nodes).buffer_unordered(AT_A_TIME).collect().await;
    drop(progress);
    parts.into_iter().for_each(|part| archive.extend(part));

    let keys = snapshot.nodes.iter().filter_map(|known| known.node.key);
    let keys = keys.chain(snapshot.peers.values().map(|peer| peer.public_key)).map(|key| key.to_string());
    let progress = Progress::new("writing the archive", 0);
    let time = u64::try_from(now.0).unwrap_or_default();
    archive.write(&path, &name, time, &Redactor::new(keys))?;
    drop(progress);
    let is_complete = archive.problems().is_empty();
    Ok(Outcome::found(summary(&archive, &path, names.len()), is_complete))
}

fn copy(error: &anyhow::Error) -> anyhow::Error {
    anyhow!(error_chain(error.as_ref()))
}

fn readme(now: Timestamp) -> String {
    format!(
        "Collected by kgctl {} at {now}.\n\n\
         problems.txt     what could not be collected, and why\n\
         status.*         the mesh as the objects have it\n\
         nodes/NODE/      what the agent says (status, metrics, health), its log, and what the host has: tables\n\
         \x20                of the data path, links, routes, rules, neighbours, firewall\n\
         *.yaml           objects, without annotations of others and without values of variables\n\n\
         Private and pre-shared keys, tokens and passwords were taken out. Addresses and names of nodes, peers\n\
         and pods are in it: look through it before it leaves your hands.\n",
        env!("CARGO_PKG_VERSION")
    )
}

fn summary(archive: &Archive, path: &std::path::Path, nodes: usize) -> String {
    let problems = archive.problems();
    for problem in problems {
        eprintln!("kgctl: {}", terminal::plain(problem));
    }
    let missing = match problems.len() {
        0 => "nothing is missing".to_owned(),
        1 => "1 part is missing (problems.txt)".to_owned(),
        many => format!("{many} parts are missing (problems.txt)"),
    };
    let nodes = if nodes == 1 { "1 node".to_owned() } else { format!("{nodes} nodes") };
    format!("{}: {} files of {nodes}, {missing}.\n", path.display(), archive.len())
}

/// Serializes objects as YAML, without secrets.
fn cleaned<T: Serialize>(objects: &T) -> Result<String> {
    let mut value = serde_json::to_value(objects)?;
    redact::object(&mut value);
    Ok(serde_yaml_ng::to_string(&value)?)
}

/// Adds objects that show how Kilo was set up, with its agents in this namespace.
async fn objects(cluster: &Cluster, namespace: &str, archive: &mut Archive) {
    let client = &cluster.client;
    let all = ListParams::default();
    let ours = ListParams::default().labels(pods::LABEL);
    let nodes = Api::<Node>::all(client.clone());
    let listed = cluster.ask(Asked::new("list", "nodes"), nodes.list(&all)).await;
    archive.add(
        "nodes.yaml",
        listed.and_then(|listed| cleaned(&listed.items.into_iter().map(without_images).collect::<Vec<_>>())),
    );
    // Untyped, so that an invalid one does not hide the others.
    let peers = Api::<DynamicObject>::all_with(client.clone(), &ApiResource::erase::<Peer>(&()));
    let listed = cluster.ask(Asked::new("list", "peers"), peers.list(&all)).await;
    archive.add("peers.yaml", listed.and_then(|listed| cleaned(&listed.items)));
    let daemon_sets = Api::<DaemonSet>::namespaced(client.clone(), namespace);
    let asked = Asked::new("list", "daemonsets").within(namespace);
    let listed = cluster.ask(asked, daemon_sets.list(&ours)).await;
    archive.add("daemonsets.yaml", listed.and_then(|listed| cleaned(&listed.items)));
    for (kind, event_namespace) in [("Node", DEFAULT), ("Peer", DEFAULT), ("DaemonSet", namespace)] {
        let events = Api::<Event>::namespaced(client.clone(), event_namespace);
        let about = ListParams::default().fields(&format!("involvedObject.kind={kind}"));
        let asked = Asked::new("list", "events").within(event_namespace);
        let listed = cluster.ask(asked, events.list(&about)).await;
        let name = format!("events-{}.yaml", kind.to_lowercase());
        archive.add(&name, listed.and_then(|listed| cleaned(&listed.items)));
    }
}

/// Removes the list of images, which holds every image the node has ever pulled.
fn without_images(mut node: Node) -> Node {
    if let Some(status) = &mut node.status {
        status.images = None;
    }
    node
}

/// Collects from one node, limited in size and time so that the others get their turn.
async fn of_node(cluster: &Cluster, all: &[Pod], node: &str, log_lines: i64) -> Archive {
    let mut archive = Archive::of_at_most(LARGEST);
    if tokio::time::timeout(PATIENCE, fill(cluster, all, node, log_lines, &mut archive)).await.is_err() {
        let late = anyhow!("not everything arrived within {} s", PATIENCE.as_secs());
        archive.add(&format!("nodes/{node}/*"), Err(late));
    }
    archive
}

async fn fill(cluster: &Cluster, all: &[Pod], node: &str, log_lines: i64, archive: &mut Archive) {
    let path = |file: &str| format!("nodes/{node}/{file}");
    let own: Vec<_> = all.iter().filter(|pod| pods::node_of(pod) == Some(node)).collect();
    if own.is_empty() {
        archive.add(&path("*"), Err(anyhow!("no agent pod (label {}) runs on node {node}", pods::LABEL)));
    }
    for pod in own {
        logs(cluster, pod, log_lines, &path, archive).await;
        if let Some(reason) = pods::not_running(pod) {
            archive.add(&path("*"), Err(anyhow!(reason)));
            continue;
        }
        for (page, file) in PAGES {
            archive.add(&path(file), page_of(cluster, pod, page).await);
        }
        match report(cluster, pod).await {
            Ok(files) => files.into_iter().for_each(|(file, text)| match is_file_name(&file) {
                true => archive.add(&path(&file), Ok(text)),
                false => archive
                    .add(&path("*"), Err(anyhow!("the node sent a file with the unexpected name {file:?}"))),
            }),
            Err(error) => archive.add(&path("tables.txt and the host's other files"), Err(error)),
        }
    }
}

/// What an agent serves at a path.
async fn page_of(cluster: &Cluster, pod: &Pod, path: &str) -> Result<String> {
    let namespace = pod.namespace().unwrap_or_default();
    let asked = Asked::new("get", "pods/proxy").within(&namespace);
    let page = cluster.ask(asked, ask::page(&cluster.client, pod, path)).await;
    match page {
        // An agent that requires a token returns its status to kgctl in its own pod.
        Err(error) if path == "status" => {
            let words = ["kgctl", "status", "--agent", "--output=json"];
            let text = remote::output(cluster, pod, &words).await.map_err(|inside| {
                let [page, inside] = [error, inside].map(|error| error_chain(error.as_ref()));
                anyhow!("{page}; kgctl in its pod fails, too: {inside}")
            })?;
            Ok(String::from_utf8(text)?)
        }
        page => page,
    }
}

/// Whether a node may use this file name: it must not leave the node's directory.
fn is_file_name(name: &str) -> bool {
    let may = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    !name.starts_with('.') && (1..=64).contains(&name.len()) && name.chars().all(may)
}

/// The report about the host of kgctl in the pod: texts by file name.
async fn report(cluster: &Cluster, pod: &Pod) -> Result<BTreeMap<String, String>> {
    let report = remote::output(cluster, pod, &["kgctl", NODE_REPORT]).await?;
    serde_json::from_slice(&report).context("the report was truncated")
}

/// The logs of a pod's containers, and of those that ran before them.
async fn logs(
    cluster: &Cluster,
    pod: &Pod,
    lines: i64,
    path: &impl Fn(&str) -> String,
    archive: &mut Archive,
) {
    let statuses =
        pod.status.iter().flat_map(|status| [&status.init_container_statuses, &status.container_statuses]);
    for container in statuses.flatten().flatten() {
        for previous in [false, true] {
            if previous && container.restart_count == 0 {
                continue;
            }
            let wanted = LogParams {
                container: Some(container.name.clone()),
                previous,
                tail_lines: Some(lines),
                timestamps: true,
                ..LogParams::default()
            };
            let said = remote::log(cluster, pod, wanted).await;
            let suffix = if previous { "-previous" } else { "" };
            archive.add(&path(&format!("log-{}{suffix}.txt", container.name)), said);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn what_a_node_sends_stays_in_its_directory() {
        for name in ["tables.txt", "ip6tables-save.txt", "a_1"] {
            assert!(is_file_name(name), "{name}");
        }
        let long = "a".repeat(65);
        for name in
            ["", ".", "..", "../b1/status.json", "/etc/passwd", "a/b", "a\\b", "a\n", "\u{202e}", &long]
        {
            assert!(!is_file_name(name), "{name}");
        }
    }
}

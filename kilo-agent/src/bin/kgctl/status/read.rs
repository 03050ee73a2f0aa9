//! The status as the objects have it, with what agents and their pods add; and what could not be read.

use anyhow::{Result, anyhow};
use futures::{StreamExt as _, stream};
use k8s_openapi::api::core::v1::Pod;
use kilo_agent::{
    backend::kubernetes::read_once,
    status::{Problem, SlicesStatus, Status, pods},
    timestamp::Timestamp,
};
use kilo_core::{errors::error_chain, objects::Snapshot};

use super::StatusArgs;
use crate::{
    cluster::Cluster,
    progress::Progress,
    remote,
    source::{self, Flags},
};

/// Object of what concerns all nodes.
pub const WHOLE: &str = "node/*";

/// A status, and what could not be checked for it.
pub struct Read {
    /// What is known.
    pub status: Status,
    /// What is not known, and why: agents that did not answer, rights that are missing.
    pub gaps: Vec<Problem>,
}

/// What an agent says of itself has no gaps.
impl From<Status> for Read {
    fn from(status: Status) -> Self {
        Self { status, gaps: Vec::new() }
    }
}

impl Read {
    /// Keeps what concerns the nodes that the status still has.
    pub fn retain_nodes(&mut self) {
        let Self { status, gaps } = self;
        let is_kept = |object: &str| status.nodes.iter().any(|node| object == of_node(&node.name));
        gaps.retain(|gap| gap.object == WHOLE || is_kept(&gap.object));
    }

    fn miss(&mut self, object: &str, what: String) {
        self.gaps.push(Problem { object: object.to_owned(), what });
    }
}

/// There is no node of this name.
pub fn no_node(name: &str) -> anyhow::Error {
    anyhow!("node {name:?} does not exist")
}

fn of_node(name: &str) -> String {
    format!("node/{name}")
}

/// Reads objects, and asks agents through the API server as far as there is one.
pub async fn objects(args: &StatusArgs) -> Result<Read> {
    let flags = &args.flags;
    let (snapshot, cluster) = source::objects(flags).await?;
    let time = Timestamp::now();
    let mesh = source::mesh(&snapshot, &flags.mesh)?;
    let mut read = Read::from(source::status(&mesh, &snapshot, &flags.mesh.shape, time));
    let Some(cluster) = cluster.map(|cluster| cluster.with_agents(&args.agents)) else { return Ok(read) };
    if let Some(name) = &args.node {
        if !snapshot.nodes.contains(name) {
            return Err(no_node(name));
        }
        let progress = Progress::new(&format!("asking the agent of {name}"), 0);
        let asked = remote::status_on(&cluster, name).await;
        drop(progress);
        match asked {
            // The agent's view decides how packets are forwarded.
            Ok(seen) => return Ok(seen.into()),
            Err(error) => {
                let why = error_chain(error.as_ref());
                read.miss(&of_node(name), format!("tunnels and counters are not available: {why}"));
            }
        }
    }
    let progress = Progress::new("looking at the agents' pods", 0);
    let listed = cluster.agents_pods(None).await;
    drop(progress);
    let found = listed.as_ref().map_or(&[][..], |listed| &listed.pods);
    slices(&mut read.status, &cluster, cluster.namespace_of(found), &snapshot, flags).await;
    pods::explain(found, &mut read.status);
    if args.node.is_some() {
        return Ok(read);
    }
    match &listed {
        Err(error) => read.miss(WHOLE, format!("agents are not checked: {}", error_chain(error.as_ref()))),
        // Where all namespaces were looked at, agents run outside of pods.
        Ok(listed) if listed.pods.is_empty() && listed.within.is_some() => {
            read.miss(WHOLE, format!("agents are not checked: {}", listed.none_found()));
        }
        Ok(_) => {}
    }
    leaders(&mut read, &cluster, found, args.wait).await;
    Ok(read)
}

/// Adds what the slices say; the right to read them is optional.
async fn slices(status: &mut Status, cluster: &Cluster, namespace: &str, snapshot: &Snapshot, flags: &Flags) {
    if let Ok(set) = read_once::slices(&cluster.client).await {
        let renewed = read_once::slices_renewed(&cluster.client, namespace).await.ok().flatten();
        let label = &flags.mesh.shape.topology_label;
        status.slices = SlicesStatus::new(&set, &snapshot.nodes, label, renewed.map(Timestamp), status.time);
    }
}

/// Number of agents asked at the same time.
const AT_A_TIME: usize = 16;

/// Asks the leaders' agents for what objects do not record: since when nodes lead, and which tunnels do not
/// answer.
async fn leaders(read: &mut Read, cluster: &Cluster, found: &[Pod], quiet: bool) {
    let leaders = read.status.leading();
    let progress = (!quiet).then(|| Progress::new("asking the leaders' agents", leaders.len()));
    let asked = leaders.into_iter().map(async |node| {
        let own: Vec<_> = found.iter().filter(|pod| pods::node_of(pod) == Some(&node)).cloned().collect();
        let seen = match pods::running(&own) {
            Some(pod) => Some(remote::status_of(cluster, pod).await),
            None => None,
        };
        progress.iter().for_each(Progress::step);
        (node, seen)
    });
    let seen: Vec<_> = stream::iter(asked).buffered(AT_A_TIME).collect().await;
    let mut heard = Vec::new();
    for (leader, seen) in seen {
        match seen {
            Some(Ok(seen)) => heard.push((leader, seen)),
            Some(Err(error)) => {
                silent(read, &leader, &error);
                read.status.unheard.push(leader);
            }
            // A pod that does not run is a problem in any case.
            None => read.status.unheard.push(leader),
        }
    }
    let status = &mut read.status;
    if let Some((_, first)) = heard.first() {
        status.remember_leaders(first);
    }
    heard.iter().for_each(|(_, seen)| status.remember_ills(seen));
    status.remember_paths(&heard);
}

/// Notes why an agent's answer is missing: a missing right once for all of them.
fn silent(read: &mut Read, leader: &str, error: &anyhow::Error) {
    let why = error_chain(error.as_ref());
    let is_refusal = |error: &kube::Error| matches!(error, kube::Error::Api(answer) if answer.code == 403);
    if !error.chain().filter_map(|cause| cause.downcast_ref()).any(is_refusal) {
        let what = format!("its agent did not answer, so nothing is known of its tunnels: {why}");
        read.miss(&of_node(leader), what);
    } else if !read.gaps.iter().any(|gap| gap.object == WHOLE) {
        read.miss(WHOLE, format!("agents are not asked: {why}"));
    }
}

//! `kgctl version`: versions of this program, and of the agent on each node.

use std::{collections::BTreeMap, fmt::Write as _};

use anyhow::Result;
use clap::{Args, ValueEnum};
use futures::{StreamExt as _, stream};
use k8s_openapi::api::core::v1::Pod;
use kilo_agent::status::pods;
use serde::Serialize;

use crate::{
    cluster::{AgentsFlags, ApiFlags, Cluster},
    outcome::Outcome,
    progress::Progress,
    remote,
};

/// Number of agents asked at the same time.
const AT_A_TIME: usize = 16;
const OWN: &str = env!("CARGO_PKG_VERSION");

#[derive(Args, Debug)]
#[command(after_help = "Examples:
  kgctl version                 this program and every agent
  kgctl version --client        this program only: no API server is asked
  kgctl version >/dev/null      for scripts: exit code 3 when an agent does not answer
  kgctl version -o json | jq -r '.agents[] | select(.version != \"0.1.0\") | .node'")]
pub struct VersionArgs {
    /// Print the version of this program only.
    #[arg(long)]
    client: bool,
    /// Format.
    #[arg(long, short, default_value = "table")]
    output: Output,
    #[command(flatten)]
    agents: AgentsFlags,
    #[command(flatten)]
    api: ApiFlags,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Output {
    /// For people.
    Table,
    /// As table, with the pods.
    Wide,
    /// For programs.
    Json,
    /// For programs.
    Yaml,
    /// node/NAME
    Name,
}

#[derive(Debug, Serialize)]
struct Versions {
    client: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    agents: Option<Vec<Agent>>,
}

/// The agent of a node.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Agent {
    node: String,
    pod: String,
    image: String,
    /// The version that the agent reports; `None` if it does not answer.
    version: Option<String>,
    /// Why there is no version.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// Returns the versions as text, and whether every agent has one.
pub async fn run(args: &VersionArgs) -> Result<Outcome> {
    let agents = if args.client {
        None
    } else {
        let cluster = Cluster::open(&args.api).await?.with_agents(&args.agents);
        let found = agents(&cluster).await?;
        if let Err(none) = &found {
            eprintln!("kgctl: {none}");
        }
        Some(found.unwrap_or_default())
    };
    let versions = Versions { client: OWN.to_owned(), agents };
    let text = match args.output {
        Output::Json => serde_json::to_string_pretty(&versions)? + "\n",
        Output::Yaml => serde_yaml_ng::to_string(&versions)?,
        Output::Table => table(&versions, false),
        Output::Wide => table(&versions, true),
        Output::Name => {
            let agents = versions.agents.iter().flatten();
            agents.map(|agent| format!("node/{}\n", agent.node)).collect()
        }
    };
    Ok(Outcome::found(text, versions.are_complete()))
}

impl Versions {
    /// Whether there are agents, and each says its version; or no agent was to be asked.
    fn are_complete(&self) -> bool {
        self.agents
            .as_ref()
            .is_none_or(|agents| !agents.is_empty() && agents.iter().all(|agent| agent.version.is_some()))
    }
}

/// The versions as JSON.
pub async fn as_json(cluster: &Cluster) -> Result<String> {
    let agents = agents(cluster).await?.unwrap_or_default();
    let versions = Versions { client: OWN.to_owned(), agents: Some(agents) };
    Ok(serde_json::to_string_pretty(&versions)? + "\n")
}

/// The agents of all nodes; the inner error says that there are none.
async fn agents(cluster: &Cluster) -> Result<Result<Vec<Agent>, String>> {
    let listed = cluster.agents_pods(None).await?;
    if listed.pods.is_empty() {
        return Ok(Err(listed.none_found()));
    }
    let progress = Progress::new("asking agents", listed.pods.len());
    let one = async |pod: &Pod| {
        let (version, error) = match pods::not_running(pod) {
            Some(reason) => (None, Some(reason)),
            None => match remote::status_of(cluster, pod).await {
                Ok(status) => (status.agent.map(|agent| agent.version), None),
                Err(error) => (None, Some(format!("{error:#}"))),
            },
        };
        progress.step();
        let spec = pod.spec.as_ref();
        Agent {
            node: spec.and_then(|spec| spec.node_name.clone()).unwrap_or_default(),
            pod: pod.metadata.name.clone().unwrap_or_default(),
            image: spec.and_then(agents_image).unwrap_or_default(),
            version,
            error,
        }
    };
    let mut agents: Vec<Agent> =
        stream::iter(listed.pods.iter().map(one)).buffer_unordered(AT_A_TIME).collect().await;
    agents.sort_by(|a, b| (&a.node, &a.pod).cmp(&(&b.node, &b.pod)));
    Ok(Ok(agents))
}

fn agents_image(spec: &k8s_openapi::api::core::v1::PodSpec) -> Option<String> {
    let named = spec.containers.iter().find(|container| container.name == "kilo");
    named.or(spec.containers.first())?.image.clone()
}

fn table(versions: &Versions, wide: bool) -> String {
    let mut text = format!("kgctl {}\n", versions.client);
    let Some(agents) = &versions.agents else { return text };
    if agents.is_empty() {
        return text;
    }
    let rows = agents.iter().map(|agent| {
        let version = agent.version.clone().unwrap_or_else(|| "<unknown>".to_owned());
        let reason = agent.error.clone().unwrap_or_default();
        let pod = wide.then(|| agent.pod.clone());
        [agent.node.clone(), version, agent.image.clone()].into_iter().chain(pod).chain([reason]).collect()
    });
    text += "\n";
    let head: &[_] = if wide {
        &["NODE", "VERSION", "IMAGE", "POD", "REASON"]
    } else {
        &["NODE", "VERSION", "IMAGE", "REASON"]
    };
    text += &kilo_agent::status::columns(head, rows);
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for version in agents.iter().filter_map(|agent| agent.version.as_deref()) {
        *counts.entry(version).or_default() += 1;
    }
    if counts.len() > 1 {
        let counts: Vec<_> = counts.iter().map(|(version, count)| format!("{count} of {version}")).collect();
        let _ = writeln!(text, "\nAgents differ: {}.", counts.join(", "));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agent(node: &str, version: Option<&str>) -> Agent {
        Agent {
            node: node.to_owned(),
            pod: format!("kilo-{node}"),
            image: "kilo-ebpf/kilo:0.1.0".to_owned(),
            version: version.map(ToOwned::to_owned),
            error: version.is_none().then(|| "it does not answer".to_owned()),
        }
    }

    #[test]
    fn agents_that_differ_and_those_that_do_not_answer_are_shown() {
        let agents = vec![agent("a", Some("0.1.0")), agent("b", Some("0.2.0")), agent("c", None)];
        let versions = Versions { client: "0.2.0".to_owned(), agents: Some(agents) };
        let wide = table(&versions, true);
        assert!(wide.contains("kilo-ebpf/kilo:0.1.0   kilo-c   it does not answer\n"), "{wide}");
        let text = table(&versions, false);
        assert!(text.starts_with("kgctl 0.2.0\n\nNODE "), "{text}");
        assert!(text.contains("c      <unknown>   kilo-ebpf/kilo:0.1.0   it does not answer\n"), "{text}");
        assert!(text.ends_with("\nAgents differ: 1 of 0.1.0, 1 of 0.2.0.\n"), "{text}");
        assert!(!versions.are_complete());
        let of = |agents| Versions { client: "0.2.0".to_owned(), agents };
        assert!(of(Some(vec![agent("a", Some("0.1.0")), agent("b", Some("0.2.0"))])).are_complete());
        let (none, alone) = (of(Some(Vec::new())), of(None));
        assert!(!none.are_complete() && alone.are_complete());
        assert_eq!(table(&alone, false), "kgctl 0.2.0\n");
    }
}

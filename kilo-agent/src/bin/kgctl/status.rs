//! `kgctl status`: leaders and why they lead, readiness, tunnels and counters.

use std::{
    fmt::Write as _,
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use clap::{Args, ValueEnum};
use kilo_agent::{
    backend::kubernetes::read_once,
    cli::parse_period,
    status::{self, SlicesStatus, Status, ask, pods},
    timestamp::Timestamp,
};

use crate::{
    complete,
    health::{self, Problem},
    progress::Progress,
    remote,
    source::{self, Flags},
    terminal::{self, Terminal},
};

/// With more nodes than this a table shows only those that lead or are not ready.
const ALL_SHOWN: usize = 40;
/// Namespace of the agents in the manifests.
const NAMESPACE: &str = "kube-system";
/// Pause between two checks of --wait.
const POLL: Duration = Duration::from_secs(2);

#[derive(Args, Debug)]
#[command(after_help = "Examples:
  kgctl status                        what is wrong first, then locations, nodes and peers
  kgctl status NODE                   one node, with its tunnels and packet counters
  kgctl status --wait --timeout=2m    until all is well, after an installation for example
  kgctl status --check >/dev/null     for scripts: exit code 1 when something is wrong
  kgctl status --location=east --not-ready -o name")]
pub struct StatusArgs {
    /// Show this node only, with its tunnels and packet counters: its agent is
    /// asked through the API server (needs get on pods/proxy).
    #[arg(add = complete::nodes())]
    node: Option<String>,
    /// Ask the agent at this address instead of the API server; without a
    /// value the one on this machine, at port 1107 of `$HOST_IP` or 127.0.0.1.
    #[arg(long, value_name = "URL", num_args = 0..=1, default_missing_value = "", require_equals = true)]
    agent: Option<String>,
    /// File with the bearer token, for an agent that requires one (kg --page-access=token). Root on the agent's own
    /// node needs none.
    #[arg(long, value_name = "FILE", requires = "agent")]
    agent_token_file: Option<PathBuf>,
    /// Only this location.
    #[arg(long, value_name = "LOCATION", conflicts_with = "node", add = complete::locations())]
    location: Option<String>,
    /// Only nodes that are not ready, and their locations.
    #[arg(long, conflicts_with = "node")]
    not_ready: bool,
    /// Exit with 1 when something is wrong: a node that is not ready, a location without a leader, tunnels that do
    /// not answer, an address that two nodes claim.
    #[arg(long)]
    check: bool,
    /// Wait until nothing is wrong; exit with 1 when that takes longer than --timeout.
    #[arg(long)]
    wait: bool,
    /// Longest time to wait.
    #[arg(long, value_name = "DURATION", default_value = "5m", requires = "wait", value_parser = parse_period)]
    timeout: Duration,
    /// Format; name is one node a line, as kubectl takes it.
    #[arg(long, short, default_value = "table")]
    output: Output,
    #[command(flatten)]
    flags: Flags,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Output {
    /// For people; of many nodes those that matter.
    Table,
    /// All nodes, with keys, and nothing cut.
    Wide,
    /// For programs.
    Json,
    /// For programs.
    Yaml,
    /// node/NAME
    Name,
}

/// The status as text, and whether to exit with success.
pub async fn run(args: &StatusArgs) -> Result<(String, bool)> {
    let started = Instant::now();
    let waiting = args.wait.then(|| Progress::new("waiting until the mesh is healthy", 0));
    loop {
        let checked = check(args).await;
        let late = started.elapsed() + POLL > args.timeout;
        let Checked { status, problems, verdict } = match checked {
            // An API server that is unreachable may come back.
            Err(_) if args.wait && !late => {
                tokio::time::sleep(POLL).await;
                continue;
            }
            checked => checked?,
        };
        let healthy = problems.is_empty();
        if healthy || !args.wait || late {
            drop(waiting);
            let text = show(Checked { status, problems, verdict }, args.output)?;
            return Ok((text, healthy || !(args.check || args.wait)));
        }
        tokio::time::sleep(POLL).await;
    }
}

/// A status, filtered as requested.
struct Checked {
    /// What the tables show.
    status: Status,
    /// All problems, even if the tables leave ready nodes out.
    problems: Vec<Problem>,
    /// A summary of the same nodes.
    verdict: String,
}

impl Checked {
    fn at(mut status: Status, not_ready: bool) -> Self {
        let problems = health::problems(&status);
        let verdict = health::verdict(&status, &problems);
        if not_ready {
            health::retain_not_ready(&mut status);
        }
        Self { status, problems, verdict }
    }
}

/// The current status, filtered as requested.
async fn check(args: &StatusArgs) -> Result<Checked> {
    let mut status = match &args.agent {
        Some(url) if url.is_empty() => {
            let token = args.agent_token_file.as_deref().map(token).transpose()?.or_else(local_token);
            ask::agent(&own_agent(std::env::var("HOST_IP").ok().as_deref()), token.as_deref()).await?
        }
        Some(url) => {
            let token = args.agent_token_file.as_deref().map(token).transpose()?;
            ask::agent(url, token.as_deref()).await?
        }
        None => from_objects(args).await?,
    };
    if let Some(name) = &args.node
        && !status.retain_node(name)
    {
        bail!("node {name:?} does not exist");
    }
    if let Some(location) = &args.location {
        let names: Vec<_> = status.locations.iter().map(|location| location.name.clone()).collect();
        if !health::retain_location(&mut status, location) {
            bail!("location {location:?} does not exist; choose one of: {}", names.join(", "));
        }
    }
    Ok(Checked::at(status, args.not_ready))
}

fn show(checked: Checked, output: Output) -> Result<String> {
    Ok(match output {
        Output::Json => serde_json::to_string_pretty(&checked.status)? + "\n",
        Output::Yaml => serde_yaml_ng::to_string(&checked.status)?,
        Output::Name => checked.status.nodes.iter().map(|node| format!("node/{}\n", node.name)).collect(),
        Output::Table => Terminal::of_stdout().show(&tables(checked, ALL_SHOWN), false),
        Output::Wide => Terminal::of_stdout().show(&tables(checked, usize::MAX), true),
    })
}

/// Problems first, then the tables: nodes that are not ready, leaders, others.
fn tables(Checked { mut status, problems, verdict }: Checked, most: usize) -> String {
    let mut text = verdict + "\n";
    if problems.is_empty() && status.nodes.is_empty() {
        // Only nodes that are not ready were requested, and there are none.
        return text;
    }
    text += "\n";
    if let Some(slices) = &status.slices {
        text += &(slices.line(status.time) + "\n\n");
    }
    if !problems.is_empty() {
        let rows = problems.into_iter().map(|problem| vec![problem.object, problem.what]);
        text += &status::columns(&["PROBLEM", "WHAT"], rows);
        text += "\n";
    }
    status.nodes.sort_by_key(|node| (node.ready, !node.leads));
    let all = status.nodes.len();
    if all > most {
        status.nodes.retain(|node| !node.ready || node.leads);
    }
    let left_out = all - status.nodes.len();
    text += &status::table(&status, most == usize::MAX);
    if left_out > 0 {
        let _ = writeln!(text, "\n{left_out} more nodes are ready; -o wide shows all.");
    }
    text
}

/// The token in a file.
fn token(path: &Path) -> Result<String> {
    let text = fs::read_to_string(path)
        .with_context(|| format!("failed to read --agent-token-file {}", path.display()))?;
    Ok(text.trim().to_owned())
}

/// The token of the agent on this machine, if it requires one and this user may read it.
fn local_token() -> Option<String> {
    fs::read_to_string(ask::LOCAL_TOKEN).ok().map(|text| text.trim().to_owned())
}

/// URL of the agent on this machine. In its container `$HOST_IP` is the address it listens on.
fn own_agent(host_ip: Option<&str>) -> String {
    let ip = host_ip.and_then(|ip| ip.parse().ok()).unwrap_or(IpAddr::from(Ipv4Addr::LOCALHOST));
    format!("http://{}", SocketAddr::new(ip, 1107))
}

async fn from_objects(args: &StatusArgs) -> Result<Status> {
    let flags = &args.flags;
    let (snapshot, cluster) = source::objects(flags).await?;
    let time = Timestamp::now();
    let granularity = source::granularity(&snapshot, &flags.mesh.shape)?;
    let ready = source::ready(&snapshot, time.0);
    let mesh = source::mesh(&snapshot, &flags.mesh)?;
    let mut status = status::of_objects(&mesh, &snapshot, &ready, granularity, time);
    let Some(cluster) = cluster else { return Ok(status) };
    // The right to read slices is optional.
    if let Ok(set) = read_once::slices(&cluster.client).await {
        let renewed = read_once::slices_renewed(&cluster.client, NAMESPACE).await.ok().flatten();
        let label = &flags.mesh.shape.topology_label;
        status.slices = SlicesStatus::new(&set, &snapshot.nodes, label, renewed.map(Timestamp));
    }
    match &args.node {
        Some(name) if snapshot.nodes.contains(name) => {
            let progress = Progress::new(&format!("asking the agent of {name}"), 0);
            let asked = remote::status_on(&cluster, name).await;
            drop(progress);
            match asked {
                // The agent's view decides how packets are forwarded.
                Ok(seen) => return Ok(seen),
                Err(error) => {
                    eprintln!(
                        "kgctl: tunnels and counters are not available: {}",
                        terminal::plain(&format!("{error:#}"))
                    );
                }
            }
        }
        Some(_) => {}
        // The objects do not record since when nodes lead, or which tunnels do not answer.
        None => {
            let leaders = status.leading();
            let progress = (!args.wait).then(|| Progress::new("asking the leaders' agents", leaders.len()));
            let seen = remote::statuses_on(&cluster, leaders, progress.as_ref()).await;
            if let Some(first) = seen.iter().find_map(|(_, seen)| seen.as_ref().ok()) {
                status.remember_leaders(first);
            }
            let mut heard = Vec::new();
            for (leader, seen) in seen {
                match seen {
                    Ok(seen) => heard.push((leader, seen)),
                    Err(_) => status.unheard.push(leader),
                }
            }
            heard.iter().for_each(|(_, seen)| status.remember_ills(seen));
            status.remember_ways(&heard);
        }
    }
    let _progress = Progress::new("looking at the agents' pods", 0);
    pods::explain(&cluster.client, &mut status).await;
    Ok(status)
}

#[cfg(test)]
#[allow(clippy::panic, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn of_two_hundred_nodes_the_ill_and_the_leaders_are_shown_first() {
        let status = health::tests::status(200, &[7, 150]);
        let text = tables(Checked::at(status.clone(), false), ALL_SHOWN);
        assert!(text.starts_with("Not healthy, 2 problems: 198 of 200 nodes ready"), "{text}");
        assert!(text.lines().count() < 30, "{text}");
        let at = |words: &str| text.find(words).unwrap_or_else(|| panic!("{words} is missing from {text}"));
        assert!(at("node/n007") < at("LOCATION") && at("\nn007") < at("\nn000"), "{text}");
        assert!(text.ends_with("\n196 more nodes are ready; -o wide shows all.\n"), "{text}");
        let wide = tables(Checked::at(status, false), usize::MAX);
        assert!(wide.contains("\nn199") && wide.contains("KEY") && !wide.contains("more nodes"), "{wide}");
    }

    #[test]
    fn the_verdict_counts_ready_nodes_that_are_left_out() {
        let text = tables(Checked::at(health::tests::status(6, &[3]), true), ALL_SHOWN);
        assert!(text.starts_with("Not healthy, 1 problem: 5 of 6 nodes ready, 2 of 2"), "{text}");
        assert!(text.contains("\nn003") && !text.contains("\nn002"), "{text}");
        let text = tables(Checked::at(health::tests::status(6, &[]), true), ALL_SHOWN);
        assert_eq!(text, "Healthy: 6 of 6 nodes ready, 2 of 2 locations have a leader.\n");
    }

    #[test]
    fn the_own_agent_is_where_the_manifest_has_it_listen() {
        assert_eq!(own_agent(Some("10.1.0.11")), "http://10.1.0.11:1107");
        assert_eq!(own_agent(Some("fd00::1")), "http://[fd00::1]:1107");
        assert_eq!(own_agent(Some("")), "http://127.0.0.1:1107");
        assert_eq!(own_agent(None), "http://127.0.0.1:1107");
    }
}

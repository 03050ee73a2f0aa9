//! `kgctl status`: leaders and why they lead, readiness, tunnels and counters.

mod read;
mod wait;

use std::{
    fmt::Write as _,
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use clap::{Args, ValueEnum};
use kilo_agent::{
    cli::{parse_node_not_url, parse_period},
    status::{self, Problem, Status, ask},
};
use kilo_core::settings::defaults::AGENT_PORT;

use crate::{
    cluster::AgentsFlags,
    complete,
    outcome::Outcome,
    source::{Flags, UnusedPort},
    status_filter,
    terminal::{self, Terminal},
};
use read::{Read, WHOLE};

/// With more nodes than this a table shows only those that lead or are not ready.
const ALL_SHOWN: usize = 40;

#[derive(Args, Debug)]
#[command(after_help = "Examples:
  kgctl status                        what is wrong first, then locations, nodes and peers
  kgctl status NODE                   one node, with its tunnels and packet counters
  kgctl status --wait --timeout=2m    until all is well, after an installation for example
  kgctl status --check >/dev/null     for scripts: exit code 3 when something is wrong
  kgctl status --location=east --not-ready -o name")]
pub struct StatusArgs {
    /// Show this node only, with its tunnels and packet counters: its agent is
    /// asked through the API server (needs get on pods/proxy).
    #[arg(add = complete::nodes(), value_parser = parse_node_not_url)]
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
    /// Exit with 3 when something is wrong: a node that is not ready, an agent whose pod is not Ready or that does not
    /// answer, a location without a leader, tunnels that do not answer, an address, a key or a pod CIDR that two nodes
    /// claim, a Peer that overlaps nodes. What could not be checked, for lack of a right for example, counts as well.
    /// Exit with 1 when the state cannot be read.
    #[arg(long)]
    check: bool,
    /// Wait until --check finds nothing wrong; exit with 3 when something is still wrong after --timeout, and with 1 when
    /// the state still cannot be read then. Errors that waiting cannot fix, such as the name of an unknown node or missing
    /// rights, end it at once with 1.
    #[arg(long)]
    wait: bool,
    /// Longest time to wait.
    #[arg(long, value_name = "DURATION", default_value = "5m", requires = "wait", value_parser = parse_period)]
    timeout: Duration,
    /// Format; name prints one node per line, in the form that kubectl accepts.
    #[arg(long, short, default_value = "table")]
    output: Output,
    #[command(flatten)]
    agents: AgentsFlags,
    #[command(flatten)]
    _port: UnusedPort,
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

/// Returns the status as text, and whether all is well if that was asked.
pub async fn run(args: &StatusArgs) -> Result<Outcome> {
    let checked = if args.wait { wait::until_healthy(args).await? } else { check(args).await? };
    let is_strict = args.check || args.wait;
    let is_said = |gap: &&Problem| is_strict || args.node.is_some() || gap.object == WHOLE;
    // Standard output may be thrown away.
    for Problem { object, what } in checked.gaps.iter().filter(is_said) {
        let whose = if object == WHOLE { String::new() } else { format!("{object}: ") };
        eprintln!("kgctl: {}", terminal::plain(&format!("{whose}{what}")));
    }
    let is_good = !is_strict || checked.problems.is_empty();
    Ok(Outcome::found(show(checked, args.output)?, is_good))
}

/// A status, filtered as requested.
struct Checked {
    /// What the tables show.
    status: Status,
    /// All problems, even if the tables leave ready nodes out.
    problems: Vec<Problem>,
    /// What could not be checked; with --check and --wait these are among the problems.
    gaps: Vec<Problem>,
    /// A summary of the same nodes.
    verdict: String,
}

impl Checked {
    fn at(Read { mut status, gaps }: Read, args: &StatusArgs) -> Self {
        let mut problems = status::problems(&status);
        if args.check || args.wait {
            problems.extend(gaps.iter().cloned());
        }
        let verdict = status::verdict(&status, &problems);
        if args.not_ready {
            status_filter::retain_not_ready(&mut status);
        }
        Self { status, problems, gaps, verdict }
    }
}

/// The current status, filtered as requested.
async fn check(args: &StatusArgs) -> Result<Checked> {
    let mut read = match &args.agent {
        Some(url) if url.is_empty() => {
            let token = args.agent_token_file.as_deref().map(token).transpose()?.or_else(local_token);
            let url = own_agent(std::env::var("HOST_IP").ok().as_deref());
            Read::from(ask::agent(&url, token.as_deref()).await?)
        }
        Some(url) => {
            let token = args.agent_token_file.as_deref().map(token).transpose()?;
            Read::from(ask::agent(url, token.as_deref()).await?)
        }
        None => read::objects(args).await?,
    };
    if let Some(name) = &args.node
        && !read.status.retain_node(name)
    {
        return Err(read::no_node(name));
    }
    if let Some(location) = &args.location {
        let names: Vec<_> = read.status.locations.iter().map(|location| location.name.clone()).collect();
        if !status_filter::retain_location(&mut read.status, location) {
            bail!("location {location:?} does not exist; choose one of: {}", names.join(", "));
        }
        read.retain_nodes();
    }
    Ok(Checked::at(read, args))
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
fn tables(Checked { mut status, problems, verdict, .. }: Checked, most: usize) -> String {
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
    format!("http://{}", SocketAddr::new(ip, AGENT_PORT))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic, reason = "tests")]
mod tests {
    use super::*;
    use clap::Parser as _;

    /// What `kgctl status FLAGS` makes of a status and of what could not be checked.
    fn checked(status: Status, gaps: Vec<Problem>, flags: &[&str]) -> Checked {
        #[derive(clap::Parser)]
        struct Cli {
            #[command(flatten)]
            args: StatusArgs,
        }
        let cli = Cli::try_parse_from([&["kgctl"], flags].concat()).unwrap();
        Checked::at(Read { status, gaps }, &cli.args)
    }

    #[test]
    fn of_two_hundred_nodes_the_ill_and_the_leaders_are_shown_first() {
        let status = status_filter::tests::status(200, &[7, 150]);
        let text = tables(checked(status.clone(), vec![], &[]), ALL_SHOWN);
        assert!(text.starts_with("Not healthy, 2 problems: 198 of 200 nodes ready"), "{text}");
        assert!(text.lines().count() < 30, "{text}");
        let at = |words: &str| text.find(words).unwrap_or_else(|| panic!("{words} is missing from {text}"));
        assert!(at("node/n007") < at("LOCATION") && at("\nn007") < at("\nn000"), "{text}");
        assert!(text.ends_with("\n196 more nodes are ready; -o wide shows all.\n"), "{text}");
        let wide = tables(checked(status, vec![], &[]), usize::MAX);
        assert!(wide.contains("\nn199") && wide.contains("KEY") && !wide.contains("more nodes"), "{wide}");
    }

    #[test]
    fn the_verdict_counts_ready_nodes_that_are_left_out() {
        let text =
            tables(checked(status_filter::tests::status(6, &[3]), vec![], &["--not-ready"]), ALL_SHOWN);
        assert!(text.starts_with("Not healthy, 1 problem: 5 of 6 nodes ready, 2 of 2"), "{text}");
        assert!(text.contains("\nn003") && !text.contains("\nn002"), "{text}");
        let text = tables(checked(status_filter::tests::status(6, &[]), vec![], &["--not-ready"]), ALL_SHOWN);
        assert_eq!(text, "Healthy: 6 of 6 nodes ready, 2 of 2 locations have a leader.\n");
    }

    #[test]
    fn what_could_not_be_checked_is_a_problem_when_all_is_to_be_well() {
        let gap = Problem { object: "node/n001".to_owned(), what: "its agent did not answer".to_owned() };
        let of = |flags: &[&str]| checked(status_filter::tests::status(6, &[]), vec![gap.clone()], flags);
        assert!(of(&[]).problems.is_empty() && of(&[]).verdict.starts_with("Healthy"));
        for flag in ["--check", "--wait"] {
            let found = of(&[flag]);
            assert_eq!(found.problems, std::slice::from_ref(&gap));
            assert!(found.verdict.starts_with("Not healthy, 1 problem"), "{}", found.verdict);
        }
    }

    #[test]
    fn the_own_agent_is_where_the_manifest_has_it_listen() {
        assert_eq!(own_agent(Some("10.1.0.11")), "http://10.1.0.11:1107");
        assert_eq!(own_agent(Some("fd00::1")), "http://[fd00::1]:1107");
        assert_eq!(own_agent(Some("")), "http://127.0.0.1:1107");
        assert_eq!(own_agent(None), "http://127.0.0.1:1107");
    }
}

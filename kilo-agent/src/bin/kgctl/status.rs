//! `kgctl status`: who leads and why, who is ready, tunnels and counters.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use futures::{StreamExt as _, stream};
use kilo_agent::status::{self, Status, Timestamp, ask, pods};

use crate::source::{self, Flags};

/// Agents asked at the same time.
const AT_A_TIME: usize = 16;

#[derive(Args, Debug)]
pub struct StatusArgs {
    /// Show this node only, with its tunnels and packet counters: its agent is
    /// asked through the API server (needs get on pods/proxy).
    node: Option<String>,
    /// Ask the agent at this address instead of the API server; without a
    /// value the one on this machine, at port 1107 of `$HOST_IP` or 127.0.0.1.
    #[arg(long, value_name = "URL", num_args = 0..=1, default_missing_value = "", require_equals = true)]
    agent: Option<String>,
    /// table or json.
    #[arg(long, short, default_value = "table")]
    output: Output,
    #[command(flatten)]
    flags: Flags,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Output {
    /// For people.
    Table,
    /// For programs.
    Json,
}

/// The status as text.
pub async fn run(args: &StatusArgs) -> Result<String> {
    let mut status = match &args.agent {
        Some(url) if url.is_empty() => {
            ask::agent(&own_agent(std::env::var("HOST_IP").ok().as_deref())).await?
        }
        Some(url) => ask::agent(url).await?,
        None => from_objects(args).await?,
    };
    if let Some(name) = &args.node
        && !status.retain_node(name)
    {
        bail!("node {name:?} does not exist");
    }
    match args.output {
        Output::Table => Ok(status::table(&status)),
        Output::Json => Ok(serde_json::to_string_pretty(&status)? + "\n"),
    }
}

/// The agent on this machine. In its container `$HOST_IP` is the address it listens on.
fn own_agent(host_ip: Option<&str>) -> String {
    let ip = host_ip.and_then(|ip| ip.parse().ok()).unwrap_or(IpAddr::from(Ipv4Addr::LOCALHOST));
    format!("http://{}", SocketAddr::new(ip, 1107))
}

async fn from_objects(args: &StatusArgs) -> Result<Status> {
    let flags = &args.flags;
    let (snapshot, cluster) = source::objects(flags).await?;
    let time = Timestamp::now();
    let granularity = source::granularity(&snapshot, &flags.shape)?;
    let ready = source::ready(&snapshot, time.0);
    let mesh = source::mesh(&snapshot, flags)?;
    let mut status = status::of_objects(&mesh, &snapshot, &ready, granularity, time);
    let Some(client) = cluster.map(|cluster| cluster.client) else { return Ok(status) };
    match &args.node {
        Some(name) if snapshot.nodes.contains(name) => {
            match ask::through_api(&client, name).await {
                // The agent's view is the one by which its packets go.
                Ok(seen) => return Ok(seen),
                Err(error) => eprintln!("kgctl: no tunnels and counters: {error}"),
            }
        }
        Some(_) => {}
        // Since when somebody leads, and which tunnels do not answer, is not written in the objects.
        None => {
            let leaders: Vec<_> =
                status.locations.iter().filter_map(|location| location.leader.clone()).collect();
            let asked = leaders.iter().map(|leader| ask::through_api(&client, leader));
            let seen: Vec<_> = stream::iter(asked).buffered(AT_A_TIME).collect().await;
            let mut seen = seen.into_iter().flatten().peekable();
            if let Some(first) = seen.peek() {
                status.remember_leaders(first);
            }
            seen.for_each(|seen| status.remember_degraded(&seen));
        }
    }
    pods::explain(&client, &mut status).await;
    Ok(status)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_own_agent_is_where_the_manifest_has_it_listen() {
        assert_eq!(own_agent(Some("10.1.0.11")), "http://10.1.0.11:1107");
        assert_eq!(own_agent(Some("fd00::1")), "http://[fd00::1]:1107");
        assert_eq!(own_agent(Some("")), "http://127.0.0.1:1107");
        assert_eq!(own_agent(None), "http://127.0.0.1:1107");
    }
}

//! Counters of the agents, read from `/metrics` inside each node.

use std::{
    collections::BTreeMap,
    io::{Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    time::Duration,
};

use anyhow::{Context as _, Result};

use super::{netns::Netns, network::Network};

/// Metrics by name and labels, whole numbers only.
pub type Metrics = BTreeMap<String, u64>;

/// Reads the metrics of the agent in that namespace.
pub fn scrape(netns: &Netns) -> Result<Metrics> {
    let text = netns.spawn(|| get("/metrics")).join().map_err(|_| anyhow::anyhow!("scrape thread"))???;
    Ok(parse(&text))
}

/// Pure: the whole numbers in the text of `/metrics`.
pub fn parse(text: &str) -> Metrics {
    let metric = |line: &str| {
        let (name, value) = line.rsplit_once(' ')?;
        Some((name.to_owned(), value.parse().ok()?))
    };
    text.lines().filter_map(metric).collect()
}

/// Seconds that the agent in that namespace has spent reconciling.
pub fn at_work(netns: &Netns) -> Result<f64> {
    let text = netns.spawn(|| get("/metrics")).join().map_err(|_| anyhow::anyhow!("scrape thread"))???;
    let sum = text.lines().find_map(|line| line.strip_prefix("kilo_reconcile_duration_seconds_sum "));
    sum.context("no time of reconciles in /metrics")?.parse().context("time of reconciles")
}

/// Response of `/health`, with its status line.
pub fn health(netns: &Netns) -> Result<String> {
    netns.spawn(|| answer("/health")).join().map_err(|_| anyhow::anyhow!("health thread"))??
}

/// The mesh as the agent in that namespace reports it (`/status`, JSON).
pub fn status(netns: &Netns) -> Result<serde_json::Value> {
    let text = netns.spawn(|| get("/status")).join().map_err(|_| anyhow::anyhow!("status thread"))???;
    Ok(serde_json::from_str(&text)?)
}

/// The mesh as the agent in that namespace draws it (`/graph`).
pub fn picture(netns: &Netns) -> Result<String> {
    netns.spawn(|| get("/graph")).join().map_err(|_| anyhow::anyhow!("picture thread"))??
}

fn get(path: &str) -> Result<String> {
    answer(path)?.split_once("\r\n\r\n").map(|(_, body)| body.to_owned()).context("no HTTP answer")
}

fn answer(path: &str) -> Result<String> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 1107));
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(5))?;
    stream.set_read_timeout(Some(Duration::from_secs(20)))?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text)
}

/// Packets that a node counted for one action.
pub fn action(metrics: &Metrics, action: &str) -> u64 {
    metrics.get(&format!("kilo_packets_total{{action=\"{action}\"}}")).copied().unwrap_or(0)
}

/// Dropped packets by reason, zeros left out.
pub fn drops(metrics: &Metrics) -> BTreeMap<String, u64> {
    metrics
        .iter()
        .filter_map(|(name, &value)| {
            let reason = name.strip_prefix("kilo_dropped_packets_total{reason=\"")?.strip_suffix("\"}")?;
            (value > 0).then(|| (reason.to_owned(), value))
        })
        .collect()
}

const SHOWN: [&str; 8] =
    ["steer", "encrypt", "transit", "forward", "deliver", "decrypt", "masquerade", "unmasquerade"];

/// Prints a table with a row for each node and a column for each action.
pub fn print(network: &Network) {
    let header: String = SHOWN.iter().map(|action| format!("{action:>13}")).collect();
    println!("{:6}{header}  dropped", "");
    for node in &network.nodes {
        match scrape(&node.netns) {
            Ok(metrics) => {
                let row: String =
                    SHOWN.iter().map(|name| format!("{:>13}", action(&metrics, name))).collect();
                let drops: Vec<_> =
                    drops(&metrics).iter().map(|(reason, count)| format!("{reason} {count}")).collect();
                let drops = if drops.is_empty() { "-".to_owned() } else { drops.join(", ") };
                println!("{:6}{row}  {drops}", node.name());
            }
            Err(error) => println!("{:6} {error:#}", node.name()),
        }
    }
}

/// Packets with a pod's address that the router saw in cleartext.
pub fn clear_pod_packets(network: &Network) -> Result<u64> {
    nft(&network.router, "inet lab clear-pod-traffic")
}

/// Packets of an nftables counter, given as "family table name".
pub fn nft(netns: &Netns, counter: &str) -> Result<u64> {
    let text = netns.sh(&format!("nft list counter {counter}"))?;
    text.split_whitespace()
        .skip_while(|word| *word != "packets")
        .nth(1)
        .and_then(|number| number.parse().ok())
        .with_context(|| format!("nft says: {text}"))
}

//! What nodes and test pods count while flows run, to explain a loss.

use std::collections::BTreeMap;

use super::agents;
use crate::{
    cluster::{Cluster, deploy::Pod, node::Node},
    lab::{counters, netns::Netns},
};

/// Metrics of an agent that show a loss, or a change of what it wrote; those of the programs outlive it.
const METRICS: [&str; 3] = ["kilo_dropped_packets_total", "kilo_writes_total", "kilo_reconciles_total"];
/// Lines of a namespace's statistics, of which a pod's show where a datagram got lost.
const STATISTICS: &str = "cat /proc/net/snmp /proc/net/snmp6";

/// Counters by name.
type Counters = BTreeMap<String, u64>;

/// Counters at the start of flows.
pub struct Accounts {
    nodes: Vec<Node>,
    pods: Vec<(String, Netns)>,
    /// By node or pod; those that did not answer are missing.
    before: BTreeMap<String, Counters>,
}

impl Accounts {
    /// Reads the counters of all nodes and these pods.
    pub fn take(cluster: &Cluster, pods: &[Pod]) -> Self {
        let pods = pods.iter().map(|pod| (format!("pod of {}", pod.node), pod.netns.clone())).collect();
        let mut accounts = Self { nodes: cluster.nodes.clone(), pods, before: BTreeMap::new() };
        accounts.before = accounts.read();
        accounts
    }

    fn read(&self) -> BTreeMap<String, Counters> {
        let nodes = self.nodes.iter().filter_map(|node| {
            let metrics = counters::parse(&agents::ask(node, "/metrics").ok()?);
            let is_wanted = |name: &str| METRICS.iter().any(|wanted| name.starts_with(wanted));
            Some((node.name().to_owned(), metrics.into_iter().filter(|(name, _)| is_wanted(name)).collect()))
        });
        let pods = self.pods.iter().filter_map(|(name, netns)| {
            Some((name.clone(), datagrams(&netns.sh(STATISTICS).ok()?).into_iter().collect()))
        });
        nodes.chain(pods).collect()
    }

    /// What has changed since. A counter of an agent that has started anew begins again at 0.
    pub fn since(&self) -> String {
        let changes = self.read().into_iter().map(|(source, now)| {
            let Some(before) = self.before.get(&source) else {
                return format!("{source} did not answer at the start");
            };
            let changed = now.into_iter().filter_map(|(name, now)| {
                let difference = now.checked_sub(before.get(&name).copied().unwrap_or(0)).unwrap_or(now);
                (difference > 0).then(|| format!("{name} {difference}"))
            });
            format!("{source}: {}", changed.collect::<Vec<_>>().join(", "))
        });
        format!("counted meanwhile: {}", changes.collect::<Vec<_>>().join("; "))
    }
}

/// Pure: the counters of UDP in a namespace's statistics: pairs of a line of names and one of values, and
/// for IPv6 a line each.
fn datagrams(text: &str) -> Vec<(String, u64)> {
    let lines: Vec<&str> = text.lines().collect();
    let v4 = lines.windows(2).find_map(|pair| match pair {
        [names, values] if names.starts_with("Udp: ") && values.starts_with("Udp: ") => {
            let pairs = names.split_whitespace().zip(values.split_whitespace()).skip(1);
            Some(pairs.filter_map(|(name, value)| Some((format!("Udp{name}"), value.parse().ok()?))))
        }
        _ => None,
    });
    let v6 = text.lines().filter_map(|line| {
        let (name, value) =
            line.split_once(char::is_whitespace).filter(|(name, _)| name.starts_with("Udp6"))?;
        Some((name.to_owned(), value.trim().parse().ok()?))
    });
    v4.into_iter().flatten().chain(v6).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn datagrams_of_both_families_are_read() {
        let text = "Ip: Forwarding DefaultTTL\nIp: 1 64\nUdp: InDatagrams NoPorts InErrors\nUdp: 7 2 0\n\
                    Ip6InReceives   9\nUdp6InDatagrams   \t5\n";
        let read = datagrams(text);
        let wanted = [("UdpInDatagrams", 7), ("UdpNoPorts", 2), ("UdpInErrors", 0), ("Udp6InDatagrams", 5)];
        assert_eq!(read, wanted.map(|(name, value)| (name.to_owned(), value)));
    }
}

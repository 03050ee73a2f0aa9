//! What nodes and test pods count while flows run, to explain a loss.

use std::collections::BTreeMap;

use super::agents;
use crate::{
    cluster::{Cluster, deploy::Pod, node::Node},
    lab::netns::Netns,
};

/// Metrics of an agent that show a loss, or a change of what it wrote; those of the programs outlive it.
const METRICS: [&str; 3] = ["kilo_dropped_packets_total", "kilo_writes_total", "kilo_reconciles_total"];
/// Lines of a namespace's statistics, of which a pod's show where a datagram got lost.
const STATISTICS: &str = "cat /proc/net/snmp; awk '{ print \"IPv6: \" $1 \" \" $2 }' /proc/net/snmp6";

/// Counters at the start of flows.
pub struct Accounts {
    nodes: Vec<Node>,
    pods: Vec<(String, Netns)>,
    before: BTreeMap<String, u64>,
}

impl Accounts {
    /// Reads the counters of all nodes and these pods. One that does not answer has none.
    pub fn take(cluster: &Cluster, pods: &[Pod]) -> Self {
        let pods = pods.iter().map(|pod| (format!("pod of {}", pod.node), pod.netns.clone())).collect();
        let mut accounts = Self { nodes: cluster.nodes.clone(), pods, before: BTreeMap::new() };
        accounts.before = accounts.read();
        accounts
    }

    fn read(&self) -> BTreeMap<String, u64> {
        let mut counters = BTreeMap::new();
        for node in &self.nodes {
            let metrics = agents::ask(node, "/metrics").unwrap_or_default();
            let wanted = |line: &&str| METRICS.iter().any(|name| line.starts_with(name));
            for (name, value) in metrics.lines().filter(wanted).filter_map(|line| line.rsplit_once(' ')) {
                if let Ok(value) = value.parse() {
                    counters.insert(format!("{} {name}", node.name()), value);
                }
            }
        }
        for (name, netns) in &self.pods {
            let text = netns.sh(STATISTICS).unwrap_or_default();
            counters.extend(
                datagrams(&text).into_iter().map(|(counter, value)| (format!("{name} {counter}"), value)),
            );
        }
        counters
    }

    /// What has changed since. A counter of an agent that has started anew begins again at 0.
    pub fn since(&self) -> String {
        let changed = self.read().into_iter().filter_map(|(name, now)| {
            let before = self.before.get(&name).copied().unwrap_or(0);
            let difference = now.checked_sub(before).unwrap_or(now);
            (difference > 0).then(|| format!("{name} {difference}"))
        });
        format!("counted meanwhile: {}", changed.collect::<Vec<_>>().join(", "))
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
        let (name, value) = line.strip_prefix("IPv6: Udp6")?.split_once(' ')?;
        Some((format!("Udp6{name}"), value.parse().ok()?))
    });
    v4.into_iter().flatten().chain(v6).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn datagrams_of_both_families_are_read() {
        let text = "Ip: Forwarding DefaultTTL\nIp: 1 64\nUdp: InDatagrams NoPorts InErrors\nUdp: 7 2 0\n\
                    IPv6: Ip6InReceives 9\nIPv6: Udp6InDatagrams 5\n";
        let read = datagrams(text);
        let wanted = [("UdpInDatagrams", 7), ("UdpNoPorts", 2), ("UdpInErrors", 0), ("Udp6InDatagrams", 5)];
        assert_eq!(read, wanted.map(|(name, value)| (name.to_owned(), value)));
    }
}

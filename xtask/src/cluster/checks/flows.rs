//! Flows between pods of a real cluster during an operation, and their losses.

use std::{fmt, net::IpAddr, time::Duration};

use anyhow::{Context as _, Result, bail};

use super::accounts::Accounts;
use crate::{
    cluster::{
        Cluster, deploy,
        network::{self, OUTSIDE},
        node::Node,
    },
    lab::{
        faults::traffic::{Figures, Traffic},
        netns::Netns,
        probe,
    },
    report::InClear,
};

/// Interval between two datagrams of a flow.
pub const TICK: Duration = Duration::from_millis(5);

/// Flows from a node's test pod to those of other nodes, and one to the outside host.
pub struct Flows {
    running: Vec<(String, Traffic)>,
    clear: u64,
    accounts: Accounts,
}

impl Flows {
    /// Starts them from the first node, with none to the node `but`.
    pub fn start(cluster: &Cluster, but: Option<&str>) -> Result<Self> {
        let outside = if but.is_some() { cluster.first() } else { cluster.remote() };
        Self::between(cluster, cluster.first(), but, outside)
    }

    /// Starts them from a node, with none to the node `but`; the one to the outside host starts from
    /// `outside`.
    pub fn between(cluster: &Cluster, from: &Node, but: Option<&str>, outside: &Node) -> Result<Self> {
        let pods = deploy::start_test_servers(cluster)?;
        let _ = probe::serve(&network::outside(), OUTSIDE.into());
        let from = deploy::pod_on(&pods, from)?;
        let mut flows = Vec::new();
        let mut start = |netns: &Netns, target, name: String| {
            flows.push((name, Traffic::start_every(netns, target, TICK)));
        };
        for pod in pods.iter().filter(|pod| pod.name != from.name && Some(pod.node.as_str()) != but) {
            for address in pod.addresses() {
                let family = if address.is_ipv6() { " by IPv6" } else { "" };
                start(&from.netns, address, format!("{} to {}{family}", from.node, pod.node));
            }
        }
        let outside = deploy::pod_on(&pods, outside)?;
        start(&outside.netns, OUTSIDE.into(), format!("{} to outside", outside.node));
        for (_, traffic) in &flows {
            traffic.settle(Duration::from_secs(20))?;
        }
        Ok(Self {
            running: flows,
            clear: network::clear_packets()?,
            accounts: Accounts::take(cluster, &pods),
        })
    }

    /// Adds a flow from a node's pod to an address.
    pub fn also(&mut self, cluster: &Cluster, from: &Node, target: IpAddr, name: &str) -> Result<()> {
        let pods = deploy::start_test_servers(cluster)?;
        let traffic = Traffic::start_every(&deploy::pod_on(&pods, from)?.netns, target, TICK);
        traffic.settle(Duration::from_secs(20)).with_context(|| name.to_owned())?;
        self.running.push((name.to_owned(), traffic));
        Ok(())
    }

    /// Ends them.
    pub fn measure(self) -> Result<Measured> {
        // All at once: waiting for late answers of one must not let the others go on.
        self.running.iter().for_each(|(_, traffic)| traffic.stop());
        let mut flows = Vec::new();
        for (name, traffic) in self.running {
            flows.push((name, traffic.finish()?));
        }
        let counted = self.accounts.since();
        Ok(Measured { flows, clear: network::clear_packets()? - self.clear, counted })
    }

    /// Ends them; fails when anything was lost.
    pub fn finish(self) -> Result<String> {
        let measured = self.measure()?;
        measured.all(|_, figures| figures.lost == 0)
    }
}

/// Results of flows.
pub struct Measured {
    /// Name and figures of each flow.
    pub flows: Vec<(String, Figures)>,
    /// Packets with pods' addresses that the router saw.
    pub clear: u64,
    /// What nodes and pods counted meanwhile.
    pub counted: String,
}

impl Measured {
    /// Number of lost datagrams.
    pub fn lost(&self) -> u64 {
        self.flows.iter().map(|(_, figures)| figures.lost).sum()
    }

    /// All figures as text; fails when a flow is not as expected, its connection broke, or packets were in
    /// cleartext.
    pub fn all(&self, is_right: impl Fn(&str, &Figures) -> bool) -> Result<String> {
        let is_wrong =
            |(name, figures): &&(String, Figures)| figures.broken.is_some() || !is_right(name, figures);
        let mut wrong: Vec<_> = self.flows.iter().filter(is_wrong).map(Self::text).collect();
        if !wrong.is_empty() {
            // What others did at the same time shows where to look.
            let right = self.flows.iter().filter(|flow| !is_wrong(flow)).map(Self::text);
            wrong.push(format!("the other flows: {}", right.collect::<Vec<_>>().join("; ")));
            wrong.push(self.counted.clone());
        }
        if self.clear > 0 {
            wrong.push(format!("{} packets with a pod's address were on the router", self.clear));
        }
        match (wrong.is_empty(), self.clear) {
            (true, _) => Ok(self.to_string()),
            (false, 0) => bail!("{}", wrong.join("\n    ")),
            (false, _) => Err(InClear(wrong.join("\n    ")).into()),
        }
    }

    fn text((name, figures): &(String, Figures)) -> String {
        let Figures { sent, lost, gap, stall, broken, holes } = figures;
        let (gap, stall) = (gap.as_millis(), stall.as_millis());
        let broken = broken.as_ref().map(|why| format!(" and broke: {why}")).unwrap_or_default();
        let holes = if holes.is_empty() { String::new() } else { format!(" ({})", figures.said_of_holes()) };
        format!("{name}: {lost} of {sent} lost{holes}, gap {gap} ms, TCP stood {stall} ms{broken}")
    }
}

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.flows.iter().map(Self::text).collect::<Vec<_>>().join("; "))
    }
}

//! Flows between pods of a real cluster while something is done to it, and what became of them.

use std::{fmt, net::IpAddr, time::Duration};

use anyhow::{Context as _, Result, bail};

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

/// Between two datagrams of a flow.
const TICK: Duration = Duration::from_millis(5);

/// Flows of a test pod of the first node: to the other location, to a node beside it, and outside.
pub struct Flows {
    flows: Vec<(String, Traffic)>,
    clear: u64,
}

impl Flows {
    /// Starts them from the first node; none to that other node.
    pub fn start(cluster: &Cluster, but: Option<&str>) -> Result<Self> {
        let outside = if but.is_some() { cluster.first() } else { cluster.remote() };
        Self::between(cluster, cluster.first(), but, outside)
    }

    /// Starts them from a node; none to that other node, and to the outside from a third.
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
        Ok(Self { flows, clear: network::clear_packets()? })
    }

    /// Adds one from the pod of a node to an address.
    pub fn also(&mut self, cluster: &Cluster, from: &Node, target: IpAddr, name: &str) -> Result<()> {
        let pods = deploy::start_test_servers(cluster)?;
        let traffic = Traffic::start_every(&deploy::pod_on(&pods, from)?.netns, target, TICK);
        traffic.settle(Duration::from_secs(20)).with_context(|| name.to_owned())?;
        self.flows.push((name.to_owned(), traffic));
        Ok(())
    }

    /// Ends them.
    pub fn measure(self) -> Result<Measured> {
        let mut flows = Vec::new();
        for (name, traffic) in self.flows {
            flows.push((name, traffic.finish()?));
        }
        Ok(Measured { flows, clear: network::clear_packets()? - self.clear })
    }

    /// Ends them; an error when something was lost.
    pub fn finish(self) -> Result<String> {
        let measured = self.measure()?;
        measured.all(|_, figures| figures.lost == 0)
    }
}

/// What became of flows.
pub struct Measured {
    /// Each with its name.
    pub flows: Vec<(String, Figures)>,
    /// Packets with pods' addresses on the router.
    pub clear: u64,
}

impl Measured {
    /// Datagrams that were lost.
    pub fn lost(&self) -> u64 {
        self.flows.iter().map(|(_, figures)| figures.lost).sum()
    }

    /// All as text; an error when a flow is not what it should be, its connection ended, or packets were in clear.
    pub fn all(&self, is_right: impl Fn(&str, &Figures) -> bool) -> Result<String> {
        let is_wrong =
            |(name, figures): &&(String, Figures)| figures.broken.is_some() || !is_right(name, figures);
        let mut wrong: Vec<_> = self.flows.iter().filter(is_wrong).map(Self::text).collect();
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
        let Figures { sent, lost, gap, stall, broken, .. } = figures;
        let (gap, stall) = (gap.as_millis(), stall.as_millis());
        let broken = broken.as_ref().map(|why| format!(" and broke: {why}")).unwrap_or_default();
        format!("{name}: {lost} of {sent} lost, gap {gap} ms, TCP stood {stall} ms{broken}")
    }
}

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.flows.iter().map(Self::text).collect::<Vec<_>>().join("; "))
    }
}

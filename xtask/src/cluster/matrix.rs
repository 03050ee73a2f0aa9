//! Reachability between pods that a kubelet started, nodes, Services and the outside.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use anyhow::Result;

use super::{
    Cluster,
    deploy::{self, HOST_PORT, NODE_PORT, Pod, SERVICE, SERVICE_V6},
    network::{self, OUTSIDE, OUTSIDE_V6, ROUTER, ROUTER_V6},
    node::Node,
};
use crate::lab::{
    netns::Netns,
    probe::{self, Protocol},
};

const TIMEOUT: Duration = Duration::from_secs(4);

/// One path to probe.
#[derive(Clone, Debug)]
struct Path {
    source: String,
    target: String,
    protocol: Protocol,
    address: SocketAddr,
    /// Source address that the target must see, where it is certain.
    sees: Option<IpAddr>,
}

/// One path and why it failed.
#[derive(Debug)]
pub struct Cell {
    source: String,
    target: String,
    protocol: Protocol,
    address: SocketAddr,
    error: Option<String>,
}

/// Results of all probes.
#[derive(Debug, Default)]
pub struct Matrix {
    cells: Vec<Cell>,
}

/// Probes every path, with a thread for each source.
pub fn run(cluster: &Cluster) -> Result<Matrix> {
    let pods = deploy::start_test_servers(cluster)?;
    deploy::addresses_hold(cluster)?;
    for node in &cluster.nodes {
        let _ = probe::serve(&node.netns(), node.site.address.into());
    }
    let outside = network::outside();
    for address in [OUTSIDE.into(), OUTSIDE_V6.into()] {
        let _ = probe::serve(&outside, address);
    }
    let mut sources: Vec<(Netns, Vec<Path>)> = Vec::new();
    let path = |source: &str, target: &str, protocol, address: SocketAddr, sees| Path {
        source: source.to_owned(),
        target: target.to_owned(),
        protocol,
        address,
        sees,
    };
    let at = |address: IpAddr| SocketAddr::from((address, probe::PORT));
    for pod in &pods {
        let name = &pod.netns.name;
        let mut paths = Vec::new();
        for protocol in Protocol::ALL {
            for other in pods.iter().filter(|other| other.name != pod.name) {
                for (own, address) in pod.addresses().zip(other.addresses()) {
                    paths.push(path(name, &other.netns.name, protocol, at(address), Some(own)));
                }
            }
            for node in &cluster.nodes {
                let sees = (node.name() != pod.node).then_some(pod.address);
                paths.push(path(name, node.name(), protocol, at(node.site.address.into()), sees));
            }
            let outside = [(OUTSIDE.into(), ROUTER.into()), (OUTSIDE_V6.into(), ROUTER_V6.into())];
            for (address, sees) in outside.into_iter().take(pod.addresses().count()) {
                paths.push(path(name, "outside", protocol, at(address), Some(sees)));
            }
        }
        for service in services(&pods).cycle().take(2 * pods.len() * services(&pods).count()) {
            paths.push(path(name, "ClusterIP", Protocol::Tcp, service, None));
        }
        sources.push((pod.netns.clone(), paths));
    }
    for node in &cluster.nodes {
        let mut paths = Vec::new();
        for protocol in Protocol::ALL {
            for (pod, address) in pods.iter().flat_map(|pod| pod.addresses().map(move |a| (pod, a))) {
                paths.push(path(node.name(), &pod.netns.name, protocol, at(address), None));
            }
        }
        for service in services(&pods).cycle().take(2 * pods.len() * services(&pods).count()) {
            paths.push(path(node.name(), "ClusterIP", Protocol::Tcp, service, None));
        }
        for other in cluster.nodes.iter().filter(|other| other.name() != node.name()) {
            for address in addresses(other, &pods) {
                paths.push(path(node.name(), "hostPort", Protocol::Tcp, (address, HOST_PORT).into(), None));
            }
        }
        sources.push((node.netns(), paths));
    }
    let mut paths = Vec::new();
    for address in cluster.nodes.iter().flat_map(|node| addresses(node, &pods)) {
        for _ in 0..pods.len() {
            paths.push(path("outside", "NodePort", Protocol::Tcp, (address, NODE_PORT).into(), None));
        }
        paths.push(path("outside", "hostPort", Protocol::Tcp, (address, HOST_PORT).into(), None));
    }
    sources.push((outside, paths));
    let threads: Vec<_> = sources
        .into_iter()
        .map(|(netns, paths)| netns.spawn(move || paths.into_iter().map(probe).collect::<Vec<_>>()))
        .collect();
    let mut matrix = Matrix::default();
    for thread in threads {
        matrix.cells.extend(thread.join().map_err(|_| anyhow::anyhow!("probe thread"))??);
    }
    Ok(matrix)
}

/// The test pods' Service, in each address family that pods have.
fn services(pods: &[Pod]) -> impl Iterator<Item = SocketAddr> + Clone + use<> {
    of_families(pods, SERVICE.into(), SERVICE_V6.into()).map(|address| SocketAddr::from((address, 80)))
}

/// The node's addresses on which the test pods have ports.
fn addresses(node: &Node, pods: &[Pod]) -> impl Iterator<Item = IpAddr> + use<> {
    of_families(pods, node.site.address.into(), node.site.address_v6.into())
}

/// Both addresses where every pod has IPv6; only the first otherwise, because Kilo's own CNI gives pods one
/// address.
fn of_families(pods: &[Pod], v4: IpAddr, v6: IpAddr) -> impl Iterator<Item = IpAddr> + Clone + use<> {
    [v4].into_iter().chain(pods.iter().all(|pod| pod.second.is_some()).then_some(v6))
}

fn probe(path: Path) -> Cell {
    let error = match probe::probe_port(path.protocol, path.address, super::extended(TIMEOUT)) {
        Ok(Some(seen)) if path.sees.is_some_and(|sees| sees != seen) => {
            Some(format!("came from {seen} instead of {:?}", path.sees))
        }
        Ok(_) => None,
        Err(error) => Some(format!("{error:#}")),
    };
    Cell { source: path.source, target: path.target, protocol: path.protocol, address: path.address, error }
}

impl Matrix {
    /// Number of probes sent.
    pub fn total(&self) -> usize {
        self.cells.len()
    }

    /// Number of probes that passed.
    pub fn passed(&self) -> usize {
        self.cells.iter().filter(|cell| cell.error.is_none()).count()
    }

    /// The results without probes of these targets.
    pub fn without(mut self, targets: &[&str]) -> Self {
        self.cells.retain(|cell| !targets.contains(&&*cell.target));
        self
    }

    /// Failed probes, one per line.
    pub fn failures(&self) -> Vec<String> {
        let failed = self.cells.iter().filter_map(|cell| Some((cell, cell.error.as_ref()?)));
        failed
            .map(|(cell, error)| {
                let Cell { source, target, protocol, address, .. } = cell;
                format!("{source} -> {target} at {address}, {}: {error}", protocol.label())
            })
            .collect()
    }

    /// Prints a row per source and a column per target: passed of tried.
    pub fn print(&self) {
        let unique = |name: fn(&Cell) -> &str| {
            let mut names: Vec<&str> = Vec::new();
            for cell in &self.cells {
                if !names.contains(&name(cell)) {
                    names.push(name(cell));
                }
            }
            names
        };
        let (sources, targets) = (unique(|cell| &cell.source), unique(|cell| &cell.target));
        let header: String = targets.iter().map(|target| format!("{target:>10}")).collect();
        println!("{:8}{header}", "");
        for source in sources {
            let row: String = targets
                .iter()
                .map(|target| {
                    let cells =
                        self.cells.iter().filter(|cell| cell.source == source && cell.target == *target);
                    let (passed, all) = cells.fold((0, 0), |(passed, all), cell| {
                        (passed + usize::from(cell.error.is_none()), all + 1)
                    });
                    let shown = if all == 0 { "-".to_owned() } else { format!("{passed}/{all}") };
                    format!("{shown:>10}")
                })
                .collect();
            println!("{source:8}{row}");
        }
        for failure in self.failures() {
            println!("  FAILED {failure}");
        }
    }
}

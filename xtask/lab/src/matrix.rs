//! Who reaches whom, by which protocol, and with which source address.

use std::{
    net::IpAddr,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};

use super::{
    netns::Netns,
    network::{LAPTOP, LAPTOP6, Network, OUTSIDE, OUTSIDE6, ROUTER_OUTSIDE, ROUTER_OUTSIDE6, Underlay},
    probe::{self, Protocol},
    wait,
};

/// Longest wait for one answer; more than a WireGuard handshake takes.
const TIMEOUT: Duration = Duration::from_secs(4);

/// An endpoint of probes.
#[derive(Clone, Debug)]
pub struct ProbeEndpoint {
    /// Name of its namespace.
    pub name: String,
    /// `pod`, `host`, `vpn` or `outside`.
    kind: &'static str,
    /// Its network namespace.
    pub netns: Netns,
    /// Its addresses, at most one per family.
    addresses: Vec<IpAddr>,
    /// Address the outside host sees its packets come from.
    outside_sees: IpAddr,
    /// Another CNI masquerades between the pods' network and others.
    foreign_cni: bool,
    /// Node it is on, for pods and hosts.
    node: Option<String>,
    /// Location of that node.
    location: Option<String>,
    /// WireGuard address from which this host sends through the tunnel, where private addresses are WireGuard
    /// endpoints.
    via_wireguard: Option<IpAddr>,
}

impl ProbeEndpoint {
    /// The address of that family.
    pub fn address(&self, v4: bool) -> Option<IpAddr> {
        self.addresses.iter().copied().find(|address| address.is_ipv4() == v4)
    }
}

/// One probe's result.
#[derive(Clone, Debug)]
pub struct Cell {
    /// Name of the endpoint it started from.
    pub source: String,
    /// `pod`, `host` or `vpn`.
    pub source_kind: &'static str,
    /// Name of the endpoint it went to.
    pub target: String,
    /// `pod`, `host`, `vpn` or `outside`.
    pub target_kind: &'static str,
    /// True for IPv4, false for IPv6.
    pub v4: bool,
    /// Kind of probe.
    pub protocol: Protocol,
    /// Why it failed; `None` when it passed.
    pub error: Option<String>,
}

impl Cell {
    /// `tcp`, or `tcp over IPv6`.
    pub fn label(&self) -> String {
        format!("{}{}", self.protocol.label(), if self.v4 { "" } else { " over IPv6" })
    }
}

/// All results.
#[derive(Debug, Default)]
pub struct Matrix {
    /// One per probe.
    pub cells: Vec<Cell>,
    targets: Vec<String>,
}

/// All endpoints that probes start from.
pub fn sources(network: &Network) -> Vec<ProbeEndpoint> {
    let mut endpoints = Vec::new();
    let router: IpAddr = match network.underlay {
        Underlay::V4 => ROUTER_OUTSIDE.into(),
        Underlay::V6 => ROUTER_OUTSIDE6.into(),
    };
    for node in &network.nodes {
        endpoints.push(ProbeEndpoint {
            name: format!("pod-{}", node.name()),
            kind: "pod",
            netns: node.pod.clone(),
            addresses: node.pod_ips(),
            outside_sees: node.public.unwrap_or(router),
            foreign_cni: network.foreign_cni,
            node: Some(node.name().to_owned()),
            location: Some(node.location.clone()),
            via_wireguard: None,
        });
    }
    for node in &network.nodes {
        endpoints.push(ProbeEndpoint {
            name: node.name().to_owned(),
            kind: "host",
            netns: node.netns.clone(),
            addresses: vec![node.private],
            outside_sees: node.public.unwrap_or(router),
            foreign_cni: network.foreign_cni,
            node: Some(node.name().to_owned()),
            location: Some(node.location.clone()),
            via_wireguard: network.private_endpoints.then(|| network.wireguard_address(node)).flatten(),
        });
    }
    endpoints.push(ProbeEndpoint {
        name: "laptop".to_owned(),
        kind: "vpn",
        netns: network.laptop.clone(),
        addresses: vec![LAPTOP.into(), LAPTOP6.into()],
        outside_sees: router,
        foreign_cni: network.foreign_cni,
        node: None,
        location: None,
        via_wireguard: None,
    });
    endpoints
}

/// Source address the target must see; `None` where any will do.
pub fn expected_source(source: &ProbeEndpoint, target: &ProbeEndpoint, v4: bool) -> Option<IpAddr> {
    if target.kind == "outside" {
        return Some(source.outside_sees);
    }
    // The rest of the location, and WireGuard's endpoints, are reached without the tunnel.
    let by_network =
        target.kind == "host" && (target.via_wireguard.is_some() || target.location == source.location);
    if let Some(address) = source.via_wireguard.filter(|_| !by_network && source.node != target.node) {
        return Some(address);
    }
    // Between a host and its own pod the kernel takes the bridge's address.
    let same_node = source.node.is_some() && source.node == target.node;
    let masqueraded =
        source.foreign_cni && source.kind != "vpn" && (source.kind == "pod") != (target.kind == "pod");
    if same_node || masqueraded { None } else { source.address(v4) }
}

/// All endpoints that probes go to: the sources, and the outside host.
pub fn targets(network: &Network) -> Vec<ProbeEndpoint> {
    let mut targets = sources(network);
    let addresses = match network.underlay {
        Underlay::V4 => vec![OUTSIDE.into()],
        Underlay::V6 => vec![OUTSIDE6.into()],
    };
    targets.push(ProbeEndpoint {
        name: "outside".to_owned(),
        kind: "outside",
        netns: network.outside.clone(),
        addresses,
        outside_sees: OUTSIDE.into(),
        foreign_cni: network.foreign_cni,
        node: None,
        location: None,
        via_wireguard: None,
    });
    targets
}

/// Starts the servers the probes talk to.
pub fn serve(network: &Network) -> Result<()> {
    for target in targets(network) {
        target.addresses.iter().try_for_each(|address| probe::serve(&target.netns, *address))?;
    }
    Ok(())
}

/// Sends every probe, each source on a thread of its own.
pub fn run(network: &Network) -> Result<Matrix> {
    let sources = sources(network);
    let targets = targets(network);
    let names = targets.iter().map(|target| target.name.clone()).collect();
    let threads: Vec<_> = sources
        .into_iter()
        .map(|source| {
            let targets = targets.clone();
            source.netns.clone().spawn(move || probe_all(&source, &targets))
        })
        .collect();
    let mut matrix = Matrix { cells: Vec::new(), targets: names };
    for thread in threads {
        matrix.cells.extend(thread.join().map_err(|_| anyhow::anyhow!("probe thread"))??);
    }
    Ok(matrix)
}

fn probe_all(source: &ProbeEndpoint, targets: &[ProbeEndpoint]) -> Vec<Cell> {
    let mut cells = Vec::new();
    for target in targets.iter().filter(|target| target.name != source.name) {
        for (v4, protocol) in
            [true, false].into_iter().flat_map(|v4| Protocol::ALL.map(|protocol| (v4, protocol)))
        {
            // A host has a mesh address in one family only.
            let (Some(_), Some(address)) = (source.address(v4), target.address(v4)) else { continue };
            let error = match probe::probe(protocol, address, TIMEOUT) {
                Ok(Some(seen)) => match expected_source(source, target, v4) {
                    Some(expected) if expected != seen => {
                        Some(format!("came from {seen} instead of {expected}"))
                    }
                    _ => None,
                },
                Ok(None) => None,
                Err(error) => Some(format!("{error:#}")),
            };
            cells.push(Cell {
                source: source.name.clone(),
                source_kind: source.kind,
                target: target.name.clone(),
                target_kind: target.kind,
                v4,
                protocol,
                error,
            });
        }
    }
    cells
}

/// Waits until pods of all nodes reach each other and the laptop once, so that tunnels are up before anything
/// is counted.
pub fn settle(network: &Network, limit: Duration) -> Result<()> {
    let started = Instant::now();
    let mut shown = None;
    loop {
        let matrix = run_pings(network)?;
        if shown != Some(matrix.0) {
            println!(
                "lab:   {} of {} paths answer, {:.1} s",
                matrix.0,
                matrix.1,
                started.elapsed().as_secs_f32()
            );
            shown = Some(matrix.0);
        }
        if matrix.0 == matrix.1 || started.elapsed() > limit {
            return Ok(());
        }
        wait::pace(Duration::from_millis(300));
    }
}

/// Sends one short ping between all pods, and from the laptop; returns (answered, sent).
fn run_pings(network: &Network) -> Result<(usize, usize)> {
    let endpoints: Vec<_> = sources(network).into_iter().filter(|endpoint| endpoint.kind != "host").collect();
    let threads: Vec<_> = endpoints
        .iter()
        .map(|source| {
            let source = source.clone();
            let targets: Vec<_> = endpoints
                .iter()
                .filter(|target| target.name != source.name)
                .flat_map(|target| target.addresses.clone())
                .filter(|address| source.address(address.is_ipv4()).is_some())
                .collect();
            source.netns.clone().spawn(move || {
                let ok = targets
                    .iter()
                    .filter(|&&target| probe::probe(Protocol::Icmp, target, Duration::from_secs(1)).is_ok())
                    .count();
                (ok, targets.len())
            })
        })
        .collect();
    let mut sum = (0, 0);
    for thread in threads {
        match thread.join() {
            Ok(Ok((ok, sent))) => sum = (sum.0 + ok, sum.1 + sent),
            Ok(Err(error)) => return Err(error),
            Err(_) => bail!("ping thread"),
        }
    }
    Ok(sum)
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

    /// Prints the matrix and fails when a probe failed.
    pub fn all_passed(&self) -> Result<()> {
        if self.passed() < self.total() {
            self.print();
            bail!("{} of {} probes failed", self.total() - self.passed(), self.total());
        }
        Ok(())
    }

    /// Prints a row per source and a column per target: `ok`, or the protocols that failed.
    pub fn print(&self) {
        let header: String = self.targets.iter().map(|target| format!("{target:>9}")).collect();
        println!("{:8}{header}", "");
        let mut sources: Vec<&str> = Vec::new();
        for cell in &self.cells {
            if !sources.contains(&cell.source.as_str()) {
                sources.push(&cell.source);
            }
        }
        for source in sources {
            let row: String =
                self.targets.iter().map(|target| format!("{:>9}", self.show(source, target))).collect();
            println!("{source:8}{row}");
        }
        for cell in self.cells.iter().filter(|cell| cell.error.is_some()) {
            let error = cell.error.as_deref().unwrap_or_default();
            println!("  FAILED {} -> {} {}: {error}", cell.source, cell.target, cell.label());
        }
    }

    fn show(&self, source: &str, target: &str) -> String {
        let cells: Vec<_> =
            self.cells.iter().filter(|cell| cell.source == source && cell.target == target).collect();
        let failed: Vec<_> = cells
            .iter()
            .filter(|cell| cell.error.is_some())
            .map(|cell| format!("{}{}", &cell.protocol.label()[..1], if cell.v4 { 4 } else { 6 }))
            .collect();
        match (cells.is_empty(), failed.is_empty()) {
            (true, _) => "-".to_owned(),
            (false, true) => "ok".to_owned(),
            (false, false) => format!("!{}", failed.join("")),
        }
    }
}

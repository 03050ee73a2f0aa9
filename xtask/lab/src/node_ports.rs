//! Ports of nodes that lead to pods: NodePort as kube-proxy makes it for
//! externalTrafficPolicy Cluster, hostPort as the portmap plugin does. Connection
//! tracking translates both, while our programs masquerade the pods' own flows
//! to and from the same addresses.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::json;

use super::{
    Lab, cni_conf, counters, matrix,
    netns::{self, Netns},
    network::{Network, Node, OUTSIDE, OUTSIDE6, PRINTER, Underlay},
    plugins::{self, Pod},
    probe::{self, Protocol},
    services,
};

const TIMEOUT: Duration = Duration::from_secs(4);
/// Of so many flows of the pods themselves, one may get no answer within [`TIMEOUT`]: a busy machine may lose
/// a datagram, and nobody resends it.
const FLOWS_PER_UNANSWERED: usize = 1000;
/// Port of each node that leads to its second pod.
const HOST_PORT: u16 = 8080;
/// Port of every node that leads to the first node's pod; the next port leads to the second's, and so on.
const NODE_PORT: u16 = 30080;
/// Address of a node's second pod in its pod CIDR.
const SECOND: u8 = 3;

/// Address of the router on the public network, which translates what members send there.
const ROUTER_WAN: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const ROUTER_WAN6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 2, 0, 0, 0, 0, 1);

/// Namespaces of the pods with a hostPort.
pub fn namespaces(lab: &str) -> Vec<Netns> {
    let nodes = Network::plan(lab, Underlay::default()).nodes;
    nodes.iter().map(|node| planned(lab, node)).collect()
}

fn planned(lab: &str, node: &Node) -> Netns {
    let name = format!("port-{}", node.name());
    Netns { id: format!("{lab}-{name}"), name, holder: None }
}

/// Makes pods and rules, sends requests while the pods probe the outside, and removes them.
pub fn run(lab: &mut Lab) -> Result<String> {
    let mut pods = Vec::new();
    let result = prepare(lab, &mut pods).and_then(|()| ask_all(lab));
    for (node, pod) in &pods {
        node.netns.sh("nft delete table inet ports 2>/dev/null || true")?;
        pod.remove(node)?;
    }
    netns::remove(namespaces(&lab.name))?;
    // Requests to a node's public address, and their answers, do not go through the mesh. Connections to the
    // printer from the check before are retried for minutes.
    lab.in_clear_but(|address| is_public(address) || address == PRINTER)?;
    result
}

/// Whether it is on the public network, to which nothing of the mesh leads.
fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => v4.octets()[..3] == ROUTER_WAN.octets()[..3],
        IpAddr::V6(v6) => v6.segments()[..3] == ROUTER_WAN6.segments()[..3],
    }
}

/// A pod with a hostPort.
struct Second {
    list: String,
    path: String,
    id: String,
    result: serde_json::Value,
}

impl Second {
    fn add(lab: &str, node: &Node, address: IpAddr) -> Result<Self> {
        let netns = Netns::create(lab, &planned(lab, node).name)?;
        let path = format!("/proc/{}/root{}", std::process::id(), netns.path().display());
        let mut pod = Self {
            list: node.netns.sh(&format!("cat {}", cni_conf::CONF))?,
            path,
            id: netns.name.clone(),
            result: serde_json::Value::Null,
        };
        let ports = ["tcp", "udp"].map(
            |protocol| json!({"hostPort": HOST_PORT, "containerPort": probe::PORT, "protocol": protocol}),
        );
        pod.result = plugins::add(
            &pod.list,
            Pod { id: &pod.id, netns: &pod.path, port_mappings: &ports },
            |program: &Path| node.netns.command(program),
        )?;
        ensure!(
            pod.result["ips"].to_string().contains(&format!("\"{address}/")),
            "the second pod of {} was to have {address}: {}",
            node.name(),
            pod.result
        );
        probe::serve(&netns, address)?;
        Ok(pod)
    }

    fn remove(&self, node: &Node) -> Result<()> {
        // portmap finds its rules by the container's name alone.
        let ports = [json!({"hostPort": HOST_PORT, "containerPort": probe::PORT, "protocol": "tcp"})];
        let pod = Pod { id: &self.id, netns: &self.path, port_mappings: &ports };
        plugins::delete(&self.list, pod, &self.result, |program: &Path| node.netns.command(program))
    }
}

fn v4(network: &Network) -> bool {
    network.underlay == Underlay::V4
}

fn pod_address(network: &Network, node: &Node) -> IpAddr {
    if v4(network) { node.pod_ip().into() } else { node.pod_ip6().into() }
}

fn second_address(network: &Network, node: &Node) -> IpAddr {
    let mut segments = node.pod_ip6().segments();
    segments[7] = SECOND.into();
    if v4(network) { node.pod_address(SECOND).into() } else { IpAddr::from(segments) }
}

fn prepare(lab: &Lab, pods: &mut Vec<(Node, Second)>) -> Result<()> {
    let rules = rules(&lab.network);
    for node in &lab.network.nodes {
        let address = second_address(&lab.network, node);
        let pod = Second::add(&lab.name, node, address).with_context(|| node.name().to_owned())?;
        pods.push((node.clone(), pod));
        node.netns.sh(&format!("nft -f - <<'RULES'\n{rules}RULES"))?;
    }
    Ok(())
}

/// kube-proxy's rules: every port on any address of the node. Clients are masqueraded to an address of the
/// node, because the answer must pass here.
fn rules(network: &Network) -> String {
    let family = if v4(network) { "ip" } else { "ip6" };
    let mut translate = String::new();
    for (node, port) in network.nodes.iter().zip(NODE_PORT..) {
        let pod = SocketAddr::from((pod_address(network, node), probe::PORT));
        for protocol in ["tcp", "udp"] {
            translate += &format!(
                "fib daddr type local {protocol} dport {port} counter name translated \
                 meta mark set meta mark or 0x4000 dnat {family} to {pod}\n"
            );
        }
    }
    format!(
        "table inet ports {{
    counter translated {{ }}
    counter invalid {{ }}
    chain prerouting {{ type nat hook prerouting priority -100; policy accept; {translate} }}
    chain postrouting {{
        type nat hook postrouting priority 100; policy accept;
        meta mark and 0x4000 != 0 meta mark set meta mark xor 0x4000 masquerade fully-random
    }}
    chain forward {{
        type filter hook forward priority 0; policy accept;
        ct state invalid counter name invalid drop
    }}
}}
"
    )
}

/// A request to one node's port, and what the pod behind it may see.
#[derive(Clone, Debug)]
struct Question {
    target: SocketAddr,
    /// Source that the pod must see; `None`: any but the client's own.
    sees: Option<IpAddr>,
}

fn ask_all(lab: &Lab) -> Result<String> {
    let network = &lab.network;
    let own = OwnFlows::start(network);
    let mut threads = Vec::new();
    for (netns, address, questions) in clients(network) {
        threads.push((netns.name.clone(), netns.spawn(move || ask(&questions, address))));
    }
    let mut asked = 0;
    let mut failed = Vec::new();
    for (name, thread) in threads {
        match thread.join().map_err(|_| anyhow::anyhow!("client thread")).and_then(|asked| asked?) {
            Ok(count) => asked += count,
            Err(error) => failed.push(format!("{name}: {error:#}")),
        }
    }
    let (own, unanswered) = own.finish()?;
    if unanswered > 0 || !failed.is_empty() {
        print_counters(network)?;
    }
    ensure!(failed.is_empty(), "{}", failed.join("; "));
    ensure!(own > 0, "no pod had a flow of its own meanwhile");
    ensure!(
        unanswered * FLOWS_PER_UNANSWERED <= own,
        "{unanswered} of {own} flows of pods' own got no answer"
    );
    let translated =
        network.nodes.iter().map(|node| services::translated(node, "ports")).sum::<Result<u64>>()?;
    Ok(format!(
        "({asked} requests, {translated} connections translated, {own} flows of pods' own meanwhile, {unanswered} \
         of them unanswered)"
    ))
}

/// What may explain a flow without an answer.
fn print_counters(network: &Network) -> Result<()> {
    for node in &network.nodes {
        let invalid = node.netns.sh("nft list counter inet ports invalid | grep packets")?;
        let drops = counters::drops(&counters::scrape(&node.netns)?);
        eprintln!("lab: {}: INVALID:{}, dropped by the programs: {drops:?}", node.name(), invalid.trim());
    }
    let tracked = network.router.sh("nft list counter inet lab clear-pod-traffic | grep packets
         grep -c . /proc/net/nf_conntrack || true
         grep 'tcp.*dport=7007' /proc/net/nf_conntrack | grep -v TIME_WAIT | head -n 20 || true")?;
    eprintln!("lab: the router: {tracked}");
    Ok(())
}

/// Clients, with the source address and the requests of each.
fn clients(network: &Network) -> Vec<(Netns, IpAddr, Vec<Question>)> {
    let outside: IpAddr = if v4(network) { OUTSIDE.into() } else { OUTSIDE6.into() };
    let ports: Vec<u16> = (NODE_PORT..).take(network.nodes.len()).collect();
    let node_ports = |address: IpAddr| {
        let question = move |port| Question { target: (address, port).into(), sees: None };
        ports.iter().copied().map(question).collect::<Vec<_>>()
    };
    let host_port =
        |address: IpAddr, sees| Question { target: (address, HOST_PORT).into(), sees: Some(sees) };
    let mut clients = Vec::new();
    // From outside only leaders are reached, and through them the pods of all nodes.
    let public: Vec<IpAddr> = network.nodes.iter().filter_map(|node| node.public).collect();
    let mut questions: Vec<_> = public.iter().flat_map(|address| node_ports(*address)).collect();
    questions.extend(public.iter().map(|address| host_port(*address, outside)));
    clients.push((network.outside.clone(), outside, questions));
    if v4(network) {
        // A neighbour of nodes that do not lead.
        let near = network.nodes.iter().filter(|node| node.lan == "lan-a").map(|node| node.private);
        let questions =
            near.flat_map(|address| [node_ports(address), vec![host_port(address, PRINTER.into())]].concat());
        clients.push((network.printer.clone(), PRINTER.into(), questions.collect()));
    }
    let router: IpAddr = if v4(network) { ROUTER_WAN.into() } else { ROUTER_WAN6.into() };
    for node in &network.nodes {
        let pod = pod_address(network, node);
        let others = || network.nodes.iter().filter(|other| other.name() != node.name());
        let mut questions = Vec::new();
        for other in others() {
            questions.extend(node_ports(other.private));
            questions.push(host_port(other.private, pod));
            if let Some(public) = other.public {
                questions.extend(node_ports(public));
                // Public addresses are not of the mesh: masqueraded as towards the outside.
                questions.push(host_port(public, node.public.unwrap_or(router)));
            }
        }
        clients.push((node.pod.clone(), pod, questions));
    }
    clients
}

/// Sends the requests by TCP and UDP; returns how many were answered.
fn ask(questions: &[Question], own: IpAddr) -> Result<usize> {
    let mut asked = 0;
    for Question { target, sees } in questions {
        for protocol in [Protocol::Tcp, Protocol::Udp] {
            let seen = probe::probe_port(protocol, *target, TIMEOUT)
                .with_context(|| format!("{} to {target}", protocol.label()))?;
            match (seen, sees) {
                (Some(seen), Some(wanted)) if seen != *wanted => {
                    bail!("{} to {target} saw {seen} instead of {wanted}", protocol.label())
                }
                (Some(seen), None) if seen == own => bail!("{target} saw {seen}: nobody masqueraded it"),
                _ => asked += 1,
            }
        }
    }
    Ok(asked)
}

/// Number of flows, and of those without an answer.
type Counted = Result<(usize, usize)>;

/// Flows of the pods themselves to the outside, one after the other until stopped.
struct OwnFlows {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Result<Counted>>>,
}

impl OwnFlows {
    fn start(network: &Network) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let endpoints = matrix::sources(network);
        let outside = matrix::targets(network).pop();
        let threads = network.nodes.iter().filter_map(|node| {
            let source = endpoints.iter().find(|endpoint| endpoint.netns.name == node.pod.name)?.clone();
            let target = outside.as_ref()?.clone();
            let (ended, v4, name) = (Arc::clone(&stop), v4(network), node.pod.name.clone());
            Some(source.netns.clone().spawn(move || {
                let address = target.address(v4).context("no address outside")?;
                let wanted = matrix::expected_source(&source, &target, v4);
                let (mut flows, mut unanswered) = (0, 0);
                while !ended.load(Ordering::Relaxed) {
                    for protocol in Protocol::ALL {
                        match probe::probe(protocol, address, TIMEOUT) {
                            Ok(seen) => ensure!(
                                seen.is_none() || seen == wanted,
                                "outside saw {seen:?}, not {wanted:?}"
                            ),
                            Err(error) => {
                                eprintln!("lab: {name}, {} to the outside: {error:#}", protocol.label());
                                unanswered += 1;
                            }
                        }
                        flows += 1;
                    }
                }
                Ok((flows, unanswered))
            }))
        });
        Self { stop: Arc::clone(&stop), threads: threads.collect() }
    }

    /// How many flows there were, and how many of them got no answer.
    fn finish(self) -> Counted {
        self.stop.store(true, Ordering::Relaxed);
        let ended = self.threads.into_iter().map(|thread| {
            thread.join().map_err(|_| anyhow::anyhow!("thread of a pod")).and_then(|flows| flows?)
        });
        let ended = ended.collect::<Result<Vec<_>>>()?;
        Ok(ended.iter().fold((0, 0), |(all, none), (flows, unanswered)| (all + flows, none + unanswered)))
    }
}

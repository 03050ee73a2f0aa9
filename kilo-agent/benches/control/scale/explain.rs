//! Explains where packets of a silent path are lost: the tables of each node on the path (`kgctl trace`),
//! which WireGuard peer has their source and destination, what programs drop meanwhile, and the next hops'
//! neighbours.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    process::Command,
};

use ipnet::IpNet;
use kilo_lab::{counters, netns::run};

use super::{host::Host, probes::Pair};
use crate::{
    objects::{self, LOCATIONS},
    process,
};

/// Most nodes that a packet passes: sender, gateway, another one of each location, receiver.
const MOST_NODES: usize = 8;
/// How often a path is tried while drops are counted.
const TRIES: usize = 20;
/// State of the machine before the benchmark.
pub struct Machine {
    overflows: u64,
}

impl Machine {
    pub fn before() -> Self {
        Self { overflows: Neighbours::read().overflows }
    }

    /// How many neighbours the kernel's table has, and how often it has overflowed.
    pub fn neighbours(&self) -> String {
        let Neighbours { entries, overflows } = Neighbours::read();
        let log = run(&mut Command::new("dmesg")).unwrap_or_default();
        let line = log.lines().rfind(|line| line.contains("neighbor table overflow"));
        format!(
            "{entries} neighbours in the kernel's table, which has overflowed {} times since the start; the kernel's \
             last line about it: {}",
            overflows - self.overflows,
            line.unwrap_or("none")
        )
    }
}

/// The kernel's neighbour table, one for all namespaces; only the machine's own namespace shows it.
#[derive(Default)]
struct Neighbours {
    entries: u64,
    overflows: u64,
}

impl Neighbours {
    /// Reads a line of names, and one of hexadecimal numbers per CPU.
    fn read() -> Self {
        let path = format!("/proc/{}/net/stat/arp_cache", std::os::unix::process::parent_id());
        let text = fs::read_to_string(path).unwrap_or_default();
        let mut lines = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        let names = lines.next().unwrap_or_default();
        let mut found = Self::default();
        for line in lines {
            for (name, field) in names.iter().zip(line) {
                let value = u64::from_str_radix(field, 16).unwrap_or(0);
                match *name {
                    "entries" => found.entries = value,
                    "table_fulls" => found.overflows += value,
                    _ => {}
                }
            }
        }
        found
    }
}

/// The path according to the tables, one line per node, and what was dropped while `send` tried it.
pub fn pair(hosts: &[Host], (from, to): Pair, send: impl Fn()) -> String {
    let mut path = Path { hosts, src: objects::gateway(from), dst: objects::gateway(to), lines: Vec::new() };
    let mut nodes = BTreeSet::from([from, to]);
    let mut step = Step { node: from, origin: Origin::Host };
    let mut is_open = false;
    for _ in 0..MOST_NODES {
        nodes.insert(step.node);
        match path.next(&step) {
            Next::On(next) => step = next,
            Next::Arrived => {
                is_open = step.node == to;
                break;
            }
            Next::Lost => break,
        }
    }
    let verdict = if is_open { "all tables let it through" } else { "it is lost at the last node named" };
    let mut text = format!("bench: pair {from} -> {to}: {verdict}\n");
    for line in path.lines {
        text += &format!("bench:     {line}\n");
    }
    let drops = |nodes: &BTreeSet<usize>| -> BTreeMap<(usize, String), u64> {
        let of = |node: usize| {
            let metrics = counters::scrape(&hosts[node].netns).unwrap_or_default();
            counters::drops(&metrics).into_iter().map(move |(reason, count)| ((node, reason), count))
        };
        nodes.iter().copied().flat_map(of).collect()
    };
    let before = drops(&nodes);
    (0..TRIES).for_each(|_| send());
    std::thread::sleep(std::time::Duration::from_secs(1));
    for ((node, reason), count) in drops(&nodes) {
        let more = count - before.get(&(node, reason.clone())).copied().unwrap_or(0);
        if more > 0 {
            text += &format!("bench:     node {node} dropped {more} meanwhile: {reason}\n");
        }
    }
    text
}

/// The node to ask next, and where it gets the packet from.
struct Step {
    node: usize,
    origin: Origin,
}

enum Origin {
    Host,
    /// From the node with this private address.
    Lan(IpAddr),
    /// Out of WireGuard.
    Kilo,
}

enum Next {
    On(Step),
    Arrived,
    Lost,
}

struct Path<'a> {
    hosts: &'a [Host],
    src: Ipv4Addr,
    dst: Ipv4Addr,
    lines: Vec<String>,
}

impl Path<'_> {
    fn note(&mut self, node: usize, what: impl std::fmt::Display) {
        self.lines.push(format!("node {node}: {what}"));
    }

    fn next(&mut self, step: &Step) -> Next {
        let node = step.node;
        let Some(trace) = self.trace(step) else {
            self.note(node, "kgctl trace does not answer: the agent has not set this node up");
            return Next::Lost;
        };
        let word = |key: &str| trace[key].as_str().unwrap_or_default().to_owned();
        let (outcome, text) = (word("outcome"), word("text"));
        let steps = trace["steps"].as_array().cloned().unwrap_or_default();
        let finding = |at: &str| steps.iter().rfind(|step| step["at"] == at)?["finding"].as_str();
        let towards = finding("prefix").unwrap_or_default().to_owned();
        self.note(node, format!("{outcome} {}: {text} ({towards})", word("reason")));
        match outcome.as_str() {
            "encrypt" | "transit" => self.through_wireguard(node),
            "deliver" | "decrypt" | "stack" if self.hosts[node].gateway() == self.dst => Next::Arrived,
            "steer" | "forward" | "pass_on" => {
                let Some(to) = node_address(&towards) else { return Next::Lost };
                let neighbour = self.hosts[node].netns.sh(&format!("ip neigh show to {to}"));
                self.note(node, format!("neighbour {}", neighbour.unwrap_or_default().trim()));
                match self.number_of(to) {
                    Some(next) => {
                        let sender = IpAddr::from(objects::private(node));
                        Next::On(Step { node: next, origin: Origin::Lan(sender) })
                    }
                    None => Next::Lost,
                }
            }
            _ => Next::Lost,
        }
    }

    fn trace(&self, step: &Step) -> Option<serde_json::Value> {
        let mut words = vec![format!("--src={}", self.src), format!("--dst={}", self.dst)];
        words.extend(
            ["--proto=udp", "--sport=7777", "--dport=7777", "--size=32", "-o=json"].map(str::to_owned),
        );
        match step.origin {
            Origin::Host => words.push("--from=host".to_owned()),
            Origin::Kilo => words.push("--from=kilo".to_owned()),
            Origin::Lan(sender) => words.extend(["--from=lan".to_owned(), format!("--sender={sender}")]),
        }
        let netns = &self.hosts[step.node].netns;
        let text = run(netns.command(process::kgctl()).arg("trace").args(words)).ok()?;
        serde_json::from_str(&text).ok()
    }

    /// The peer that this node sends to, and whether that peer accepts the source from this node.
    fn through_wireguard(&mut self, node: usize) -> Next {
        let peers = self.peers(node);
        let Some(peer) = holder(&peers, self.dst) else {
            self.note(node, format!("WireGuard: no peer has {}", self.dst));
            return Next::Lost;
        };
        let Some(next) = peer.endpoint.and_then(|endpoint| self.number_of(endpoint.ip())) else {
            self.note(
                node,
                format!("WireGuard: the peer with {} is at {:?}, no node", self.dst, peer.endpoint),
            );
            return Next::Lost;
        };
        self.note(
            node,
            format!("WireGuard: {} is node {next}'s, last handshake {}", self.dst, peer.handshake),
        );
        let key = |node: usize| self.hosts[node].netns.sh("wg show kilo0 public-key").unwrap_or_default();
        if key(next).trim() != peer.key {
            self.note(next, "WireGuard: it has another key than that peer");
            return Next::Lost;
        }
        let (own, theirs) = (key(node), self.peers(next));
        match holder(&theirs, self.src) {
            Some(sender) if sender.key == own.trim() => Next::On(Step { node: next, origin: Origin::Kilo }),
            sender => {
                let whose = sender.and_then(|sender| self.number_of(sender.endpoint?.ip()));
                self.note(
                    next,
                    format!(
                        "WireGuard: {} is node {whose:?}'s, so nothing of it is taken from node {node}",
                        self.src
                    ),
                );
                Next::Lost
            }
        }
    }

    fn peers(&self, node: usize) -> Vec<Peer> {
        let text = self.hosts[node].netns.sh("wg show kilo0 dump").unwrap_or_default();
        text.lines().skip(1).filter_map(Peer::read).collect()
    }

    fn number_of(&self, address: IpAddr) -> Option<usize> {
        (0..self.hosts.len()).find(|number| {
            let public = Ipv4Addr::new(198, 18, (number % LOCATIONS) as u8, (number / LOCATIONS) as u8 + 1);
            address == IpAddr::from(objects::private(*number)) || address == IpAddr::from(public)
        })
    }
}

/// A line of `wg show … dump`.
struct Peer {
    key: String,
    endpoint: Option<SocketAddr>,
    allowed: Vec<IpNet>,
    /// Seconds since 1970; 0: never.
    handshake: String,
}

impl Peer {
    fn read(line: &str) -> Option<Self> {
        let mut fields = line.split('\t');
        let (key, _, endpoint) = (fields.next()?, fields.next()?, fields.next()?);
        let (allowed, handshake) = (fields.next()?, fields.next()?);
        Some(Self {
            key: key.to_owned(),
            endpoint: endpoint.parse().ok(),
            allowed: allowed.split(',').filter_map(|net| net.parse().ok()).collect(),
            handshake: handshake.to_owned(),
        })
    }
}

/// The peer with the longest prefix that holds this address.
fn holder(peers: &[Peer], address: Ipv4Addr) -> Option<&Peer> {
    let address = IpAddr::from(address);
    let length = |peer: &&Peer| {
        peer.allowed.iter().filter(|net| net.contains(&address)).map(|net| i16::from(net.prefix_len())).max()
    };
    peers.iter().filter(|peer| length(peer).is_some()).max_by_key(length)
}

/// The node that a finding about a prefix names: `… -> hop 5 (a node of the location): 10.201.0.2 (ipip …)`.
fn node_address(finding: &str) -> Option<IpAddr> {
    finding.split_once("): ")?.1.split_whitespace().next()?.parse().ok()
}

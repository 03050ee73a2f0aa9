//! The state of the mesh as `/status` and `kgctl status` show it: leaders and why they lead, readiness of
//! nodes and reasons, tunnels and packet counters. Plain values.

pub mod ask;
mod conflicts;
mod history;
pub mod pods;
mod problems;
mod slices;
mod table;
#[cfg(feature = "agent")]
mod view;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::timestamp::Timestamp;
pub use conflicts::ConflictStatus;
pub use history::{History, LeaderChange};
pub use problems::{Problem, problems, verdict};
pub use slices::SlicesStatus;
pub use table::{ago, bytes, columns, table};
#[cfg(feature = "agent")]
pub use view::View;

use kilo_core::{
    objects::{ObjectRef, Snapshot},
    observed::Attached,
    settings::Granularity,
    topology::{self, CheckedInRef, LeaderReason, Mesh, PRIVATE_ENDPOINT_REMEDY, PeerAcceptance},
    tunnel_path::{PathWithRelay, TunnelPath},
    wireguard::key::PublicKey,
};

/// The status as `kgctl status -o json` prints it and `/status` answers: the whole mesh, as one observer sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Status {
    /// The time of this status, by the clock of the observer.
    pub time: Timestamp,
    /// `location`, `full` or `cross`.
    pub granularity: String,
    /// CIDR from which WireGuard addresses are allocated.
    pub subnet: IpNet,
    /// Locations, sorted by name, including those without a ready node.
    pub locations: Vec<LocationStatus>,
    /// All nodes, sorted by name.
    pub nodes: Vec<NodeStatus>,
    /// All peers, sorted by name.
    pub peers: Vec<PeerStatus>,
    /// Other objects, files and fields that are not used, with the reason.
    pub problems: BTreeMap<String, String>,
    /// What nodes claim although one of them, or the mesh, has it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conflicts: Vec<ConflictStatus>,
    /// Leaders whose agents did not answer, so nothing is known of their tunnels.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unheard: Vec<String>,
    /// Impairments that agents reported, by node.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub degraded: BTreeMap<String, Vec<String>>,
    /// Why agents are not healthy, by node, as far as they were asked.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub unhealthy: BTreeMap<String, String>,
    /// Why no pod of the agent on a node that takes part is Ready, by node, as far as pods were listed.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub pods: BTreeMap<String, String>,
    /// Number of working direct tunnels between locations, as reported by leaders' agents.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub direct_tunnels: usize,
    /// Tunnels that are not direct, sorted by the names of their ends.
    #[serde(skip_deserializing, skip_serializing_if = "Vec::is_empty")]
    pub indirect_tunnels: Vec<IndirectTunnel>,
    /// Comparison of slices with Nodes; absent when nobody writes slices, or they were not read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slices: Option<SlicesStatus>,
    /// What only a node's agent knows; absent when none was asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<AgentStatus>,
}

/// A location with at least one node on which an agent has run, with or without a leader.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LocationStatus {
    /// `location:<name>` or `node:<name>`.
    pub name: String,
    /// The leader by Kilo's rule; `None` = no node is ready, and nothing reaches the location.
    pub leader: Option<String>,
    /// The acting leader if it is another node, according to its annotation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub acting: Option<String>,
    /// Active leaders, if there are several; shared prefixes stay with `leader` or `acting`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gateways: Vec<String>,
    /// The rule that chose the leader.
    pub reason: Option<LeaderReason>,
    /// When the agent first saw the current leader lead; known to agents only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Timestamp>,
    /// Leader changes that the agent has seen; 0 = the leader may have led since before `since`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub changes: Option<u64>,
    /// Host and port of the WireGuard endpoint of the node that leads now; `None` without a leader.
    pub endpoint: Option<String>,
    /// WireGuard address; `None` also when the subnet is exhausted.
    #[serde(rename = "wireguardIP")]
    pub wireguard_ip: Option<IpAddr>,
    /// What keeps other locations from reaching it, with a remedy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// What may keep other locations from reaching it, with a remedy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
    /// Number of its nodes that take part in the mesh.
    pub ready: usize,
    /// Number of its Node objects, ready or not.
    pub nodes: usize,
}

/// A Node object and its part in the mesh, or why it has none.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeStatus {
    /// Name of the Node object.
    pub name: String,
    /// The node's location, ready or not.
    pub location: String,
    /// Whether it leads its location by Kilo's rule, even if another node acts.
    pub leads: bool,
    /// With several active leaders, the one that this node is to use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<String>,
    /// Whether it takes part in the mesh.
    pub ready: bool,
    /// Why it does not take part, as phrases; empty when it does.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub not_ready: Vec<String>,
    /// Host and port of its WireGuard endpoint, used if it leads; `None` when it has none.
    pub endpoint: Option<String>,
    /// Private address, without prefix length; `None` when it has none, or has not published one.
    #[serde(rename = "internalIP")]
    pub internal_ip: Option<IpAddr>,
    /// Pod CIDRs of the Node's spec, `spec.podCIDR` first.
    #[serde(rename = "podCIDRs")]
    pub pod_cidrs: Vec<IpNet>,
    /// Last check-in by the node's own clock; `None` = never.
    pub last_seen: Option<Timestamp>,
    /// WireGuard public key; `None` when its agent has not published one.
    pub key: Option<PublicKey>,
}

/// A Peer object, whether the mesh uses it or not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PeerStatus {
    /// Name of the Peer object.
    pub name: String,
    /// Whether the mesh uses it.
    pub valid: bool,
    /// Why it is not used, wholly or in part, or what it overlaps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Whether it attracts packets for pods.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub overlaps: bool,
    /// Prefixes that are routed to it and that it may send from; empty when its object is invalid.
    #[serde(rename = "allowedIPs")]
    pub allowed_ips: Vec<IpNet>,
    /// Host and port of its endpoint; `None` when it has no fixed one.
    pub endpoint: Option<String>,
    /// Public key of a valid peer.
    pub key: Option<PublicKey>,
}

/// What only a node's agent knows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AgentStatus {
    /// The agent's node.
    pub node: String,
    /// Version of the agent's program (`kg version`).
    pub version: String,
    /// Name of its WireGuard interface (`--interface`).
    pub interface: String,
    /// Why it is not healthy; absent = it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unhealthy: Option<String>,
    /// Impairments despite which the agent is healthy.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub degraded: Vec<String>,
    /// Peers of its WireGuard device.
    pub tunnels: Vec<Tunnel>,
    /// Packets by the data path's action.
    pub packets: BTreeMap<String, u64>,
    /// Packets the data path dropped, by reason.
    pub drops: BTreeMap<String, u64>,
    /// Programs and the interfaces they are attached to, as of the last reconcile.
    pub programs: Vec<Attached>,
    /// Source of other nodes: `slices`, or `Nodes` and why; absent when there is no choice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nodes_from: Option<String>,
    /// Failover state of this node; absent when failover is off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failover: Option<FailoverStatus>,
    /// Number of pairs of other locations that it relays for.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub relays: usize,
    /// Effect of its annotation `relay`; absent without the annotation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub relay: Option<String>,
    /// Problems of the host, with remedies.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
    /// Errors of reading this status.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub errors: Vec<String>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
const fn is_zero(count: &usize) -> bool {
    *count == 0
}

/// The leader that a node's kernel uses, and the other gateways.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FailoverStatus {
    /// Role of this node: `leader`, `stand-by` or `member`.
    pub role: String,
    /// The gateway that its packets use.
    pub leader: String,
    /// The node that leads by Kilo's rule.
    pub kilos_leader: String,
    /// Number of leader changes so far.
    pub term: u32,
    /// Since when it uses this leader; absent when since before its agent started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Timestamp>,
    /// The other gateways.
    pub stand_bys: Vec<StandByStatus>,
    /// The last change that this node made or saw.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_change: Option<String>,
}

/// A gateway that does not lead.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StandByStatus {
    /// Name of its Node object.
    pub node: String,
    /// Whether it could lead now; absent when this node does not hear it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fit: Option<bool>,
    /// Round trip through its tunnels in milliseconds, as measured by this node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub round_trip: Option<u64>,
}

/// One peer of the WireGuard device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Tunnel {
    /// The location or peer at the far end; `None` = unknown to the mesh.
    pub name: Option<String>,
    /// Public key of the far end.
    pub key: PublicKey,
    /// Endpoint where it was last seen, or that was configured.
    pub endpoint: Option<SocketAddr>,
    /// The last handshake; `None` = there was none.
    pub last_handshake: Option<Timestamp>,
    /// Bytes received, as counted by WireGuard since the peer was added to the device.
    pub received_bytes: u64,
    /// Bytes sent, counted likewise.
    pub sent_bytes: u64,
    /// Path of a working tunnel; unknown where the agent has not read the device yet.
    #[serde(default, deserialize_with = "TunnelPath::known", skip_serializing_if = "Option::is_none")]
    pub path: Option<TunnelPath>,
    /// Name of the relaying node; absent unless relayed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub relay: Option<String>,
}

/// A tunnel between two locations that is not direct.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct IndirectTunnel {
    /// The nodes at both ends, sorted by name.
    pub nodes: [String; 2],
    /// Punched or relayed.
    pub path: TunnelPath,
    /// Name of the relaying node; absent unless relayed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub relay: Option<String>,
}

impl Tunnel {
    /// How a working tunnel is connected, where that is known.
    pub fn connection(&self) -> Option<PathWithRelay> {
        self.path.map(|path| PathWithRelay { path, relay: self.relay.clone() })
    }
}

impl IndirectTunnel {
    /// How the tunnel is connected.
    pub fn connection(&self) -> PathWithRelay {
        PathWithRelay { path: self.path, relay: self.relay.clone() }
    }
}

/// Builds the status from the objects alone. `ready`: names of the nodes that take part, the same that `mesh`
/// was made of.
pub fn of_objects(
    mesh: &Mesh,
    snapshot: &Snapshot,
    ready: &BTreeSet<&str>,
    granularity: Granularity,
    time: Timestamp,
) -> Status {
    let leaders: BTreeSet<&str> =
        mesh.segments.iter().filter_map(|segment| Some(segment.leading()?.name())).collect();
    let gateways = mesh.gateways_in_use();
    let node = |node: CheckedInRef<'_>| {
        let ready = ready.contains(node.name.as_str());
        NodeStatus {
            name: node.name.clone(),
            location: topology::location_of(&node, granularity),
            leads: leaders.contains(node.name.as_str()),
            gateway: gateways.get(node.name.as_str()).map(|gateway| (*gateway).to_owned()),
            ready,
            not_ready: if ready { Vec::new() } else { why_not_ready(node, time) },
            endpoint: node.endpoint.as_ref().map(ToString::to_string),
            internal_ip: node.internal_ip.map(|net| net.addr()),
            pod_cidrs: node.pod_cidrs.clone(),
            last_seen: last_seen(node),
            key: node.key,
        }
    };
    Status {
        time,
        granularity: granularity.as_str().to_owned(),
        subnet: mesh.subnet,
        locations: locations(mesh, snapshot, granularity),
        nodes: snapshot.nodes.iter().map(node).collect(),
        peers: peers(mesh, snapshot),
        problems: ignored(mesh, snapshot),
        conflicts: conflicts::of(mesh),
        unheard: Vec::new(),
        degraded: BTreeMap::new(),
        unhealthy: BTreeMap::new(),
        pods: BTreeMap::new(),
        direct_tunnels: 0,
        indirect_tunnels: Vec::new(),
        slices: None,
        agent: None,
    }
}

/// What is ignored by object, and why: fields that cannot be read, and prefixes that the mesh does not use. Peers
/// have a reason of their own.
fn ignored(mesh: &Mesh, snapshot: &Snapshot) -> BTreeMap<String, String> {
    let invalid = snapshot.problems.iter().map(|(object, why)| (object, why.clone()));
    let unused = mesh.unused_location_ips();
    let unused = unused.iter().map(|(object, why)| (object, why.clone()));
    let mut ignored: BTreeMap<String, String> = BTreeMap::new();
    for (object, why) in invalid.chain(unused).filter(|(object, _)| !matches!(object, ObjectRef::Peer(_))) {
        let text = ignored.entry(object.to_string()).or_default();
        *text = if text.is_empty() { why } else { format!("{text}; {why}") };
    }
    ignored
}

fn locations(mesh: &Mesh, snapshot: &Snapshot, granularity: Granularity) -> Vec<LocationStatus> {
    let mut all: BTreeMap<String, LocationStatus> = BTreeMap::new();
    let empty = |name: &str| LocationStatus {
        name: name.to_owned(),
        leader: None,
        acting: None,
        gateways: Vec::new(),
        reason: None,
        since: None,
        changes: None,
        endpoint: None,
        wireguard_ip: None,
        problem: None,
        warning: None,
        ready: 0,
        nodes: 0,
    };
    let mut known = BTreeSet::new();
    for node in snapshot.nodes.iter() {
        let name = topology::location_of(&node, granularity);
        all.entry(name.clone()).or_insert_with(|| empty(&name)).nodes += 1;
        if node.key.is_some() {
            known.insert(name);
        }
    }
    // Nodes on which no agent has ever run do not form a location.
    all.retain(|name, _| known.contains(name));
    let shortage = mesh.address_shortage();
    for (at, segment) in mesh.segments.iter().enumerate() {
        let location = all.entry(segment.location.clone()).or_insert_with(|| empty(&segment.location));
        location.leader = segment.leading().map(|leader| leader.name().to_owned());
        let acting = acting(segment);
        location.acting = acting.map(|acting| acting.name().to_owned());
        let active = mesh.homes_of(at).map_or_else(Vec::new, |homes| homes.active.clone());
        location.gateways = active.iter().map(|at| segment.members[*at].name().to_owned()).collect();
        location.reason = Some(segment.leader_reason);
        let endpoint = acting.and_then(|acting| acting.node.endpoint.as_ref());
        location.endpoint = Some(endpoint.unwrap_or(&segment.endpoint).to_string());
        location.wireguard_ip = segment.wireguard_ip;
        if segment.wireguard_ip.is_none() {
            location.problem = shortage.as_ref().map(|shortage| format!("it has {shortage}"));
        }
        location.ready = segment.members.len();
        location.warning = mesh.stand_by_warning(at).or_else(|| mesh.fewer_leaders_warning(at));
    }
    for (segment, endpoint) in mesh.private_endpoints() {
        if let Some(location) = all.get_mut(&segment.location) {
            let text =
                format!("{endpoint} is private, other locations may not reach it: {PRIVATE_ENDPOINT_REMEDY}");
            location.warning = Some(text);
        }
    }
    all.into_values().collect()
}

/// The acting leader if it is not Kilo's: the node with the latest published term, if it takes part.
fn acting(segment: &topology::Segment) -> Option<&topology::Member> {
    let written = segment.members.iter().filter(|member| member.node.leading.is_some());
    let capable = written.filter(|member| member.node.is_capable());
    let latest = capable.max_by_key(|member| (member.node.leading, member.name()))?;
    (Some(latest.name()) != segment.leading().map(topology::Member::name)).then_some(latest)
}

fn last_seen(node: CheckedInRef<'_>) -> Option<Timestamp> {
    (node.last_seen != 0).then_some(Timestamp(node.last_seen))
}

/// Reason for a node whose agent has not written anything yet, and the remedy until somebody has looked at
/// its pod.
const NEVER_CHECKED_IN: &str = "its agent never checked in";
const LOOK_AT_LOG: &str = ": the log of its pod says why";

fn why_not_ready(node: CheckedInRef<'_>, time: Timestamp) -> Vec<String> {
    let has_run = last_seen(node).is_some();
    // An agent that never ran has written nothing: that is one reason, not several.
    let missing = topology::missing(&node).filter(|missing| has_run || *missing == topology::NO_POD_CIDR);
    let mut reasons: Vec<String> = missing.map(topology::with_remedy).collect();
    match last_seen(node) {
        None => reasons.push(format!("{NEVER_CHECKED_IN}{LOOK_AT_LOG}")),
        Some(seen) if !topology::is_recent(node, time.0) => {
            reasons.push(format!("its agent last checked in {} ago", time.since(seen)));
        }
        // Recent by the clock, but considered dead by an agent that watches for changes.
        Some(_) if reasons.is_empty() => reasons.push("its last-seen no longer changes".to_owned()),
        Some(_) => {}
    }
    reasons
}

fn peers(mesh: &Mesh, snapshot: &Snapshot) -> Vec<PeerStatus> {
    let status = |(name, acceptance): (String, PeerAcceptance)| {
        let peer = snapshot.peers.get(&name);
        PeerStatus {
            valid: acceptance.is_accepted(),
            overlaps: matches!(acceptance, PeerAcceptance::Overlaps(_)),
            reason: (acceptance != PeerAcceptance::Accepted).then(|| acceptance.message()),
            allowed_ips: peer.map(|peer| peer.allowed_ips.clone()).unwrap_or_default(),
            endpoint: peer.and_then(|peer| peer.endpoint.as_ref()).map(ToString::to_string),
            key: peer.map(|peer| peer.public_key),
            name,
        }
    };
    topology::peer_acceptances(mesh, snapshot).into_iter().map(status).collect()
}

impl Status {
    /// Nodes that carry their location's packets, or may: leaders by Kilo's rule, acting leaders and
    /// gateways.
    pub fn leading(&self) -> BTreeSet<String> {
        let of = |location: &LocationStatus| {
            let leaders = location.leader.iter().chain(&location.acting).chain(&location.gateways);
            leaders.cloned().collect::<Vec<_>>()
        };
        self.locations.iter().flat_map(of).collect()
    }

    /// Takes over from an agent's view since when leaders lead, where both agree on the leader, and its
    /// warnings, because the number of stand-bys is a flag of agents.
    pub fn remember_leaders(&mut self, seen: &Self) {
        for location in &mut self.locations {
            let same =
                |other: &&LocationStatus| other.name == location.name && other.leader == location.leader;
            if let Some(other) = seen.locations.iter().find(same) {
                location.since = other.since;
                location.changes = other.changes;
                if location.warning.is_none() {
                    location.warning.clone_from(&other.warning);
                }
            }
        }
    }

    /// Takes over the paths of tunnels between locations from the agents of nodes. Agents are not trusted:
    /// only names of known nodes are accepted, and paths that [`TunnelPath`] has. If both ends disagree, the path
    /// that is not direct counts.
    pub fn remember_paths(&mut self, seen: &[(String, Self)]) {
        let names: BTreeMap<_, _> =
            self.nodes.iter().filter_map(|node| Some((node.key?, node.name.as_str()))).collect();
        let nodes: BTreeSet<_> = self.nodes.iter().map(|node| node.name.as_str()).collect();
        let mut found = BTreeMap::<[&str; 2], (TunnelPath, Option<&str>)>::new();
        for (asked, Self { agent, .. }) in seen {
            for tunnel in agent.iter().flat_map(|agent| &agent.tunnels) {
                let (Some(path), Some(other)) = (tunnel.path, names.get(&tunnel.key)) else { continue };
                let mut ends = [asked, *other];
                ends.sort_unstable();
                let known = found.entry(ends).or_insert((path, None));
                if known.0 == TunnelPath::Direct || path == TunnelPath::Relayed {
                    *known = (path, tunnel.relay.as_deref().filter(|relay| nodes.contains(relay)));
                }
            }
        }
        let is_direct = |(_, (path, _)): &(_, (TunnelPath, _))| *path == TunnelPath::Direct;
        let (direct, others): (Vec<_>, Vec<_>) = found.into_iter().partition(is_direct);
        let indirect = |(nodes, (path, relay)): ([&str; 2], (TunnelPath, Option<&str>))| IndirectTunnel {
            nodes: nodes.map(str::to_owned),
            path,
            relay: relay.map(str::to_owned),
        };
        (self.direct_tunnels, self.indirect_tunnels) =
            (direct.len(), others.into_iter().map(indirect).collect());
    }

    /// Takes over the problems and impairments that an agent reports for its node.
    pub fn remember_ills(&mut self, seen: &Self) {
        let Some(agent) = &seen.agent else { return };
        if !agent.degraded.is_empty() {
            self.degraded.insert(agent.node.clone(), agent.degraded.clone());
        }
        if let Some(why) = &agent.unhealthy {
            self.unhealthy.insert(agent.node.clone(), why.clone());
        }
    }

    /// Keeps only one node and its location; `false` when the node does not exist.
    pub fn retain_node(&mut self, name: &str) -> bool {
        let Some(location) =
            self.nodes.iter().find(|node| node.name == name).map(|node| node.location.clone())
        else {
            return false;
        };
        self.nodes.retain(|node| node.name == name);
        self.locations.retain(|other| other.name == location);
        self.peers.clear();
        self.degraded.retain(|node, _| node == name);
        self.unhealthy.retain(|node, _| node == name);
        self.pods.retain(|node, _| node == name);
        self.unheard.retain(|node| node == name);
        self.conflicts.retain(|conflict| conflict.nodes.iter().any(|node| node == name));
        let own = ObjectRef::node(name).to_string();
        self.problems.retain(|object, _| *object == own);
        true
    }
}

//! Conformance to recorded output of Kilo, scenario by scenario.
//!
//! `KILO_GOLDEN=<file>` reads another file of the same format. Deviations, all
//! deliberate:
//!
//! * an unknown endpoint is left out of a configuration, where Kilo writes `<nil>`,
//!   which no tool reads;
//! * a packet to 0.0.0.0/8 is dropped and counted, where Kilo encrypts it when
//!   somebody allows 0.0.0.0/0: that is not a destination (RFC 6890);
//! * a packet to an address of this very node stays here. The recording has only
//!   Kilo's routes and says `wireguard` when one of them is 0.0.0.0/0; the host's
//!   own routes, which are longer, are not in it;
//! * on a leader, packets of pods and VPN peers to the private address that is
//!   another leader's endpoint go through WireGuard, where Kilo sends them in cleartext.
//!   Only the host's own packets cannot be told from those that carry the tunnel;
//! * packets that a node forwards for others to the private address of a node of
//!   its location get an outer header, as those of its own pods do in Kilo, too.
//!
//! Deviations that no recorded packet shows:
//!
//! * between two of one location's allowed-location-ips nothing is masqueraded
//!   (squat/kilo#496), unless the source's prefix also holds known addresses;
//! * of two nodes with one key the first in topology order is the peer, where
//!   Kilo's device ends up with a mixture;
//! * a leader whose private address is its endpoint speaks to the mesh from its
//!   WireGuard address, or the replies would not come through the tunnel;
//! * a node that does not lead has no WireGuard peers; Kilo's keeps unused ones;
//! * a node without a public address on an interface takes the Node's `ExternalIP`
//!   as its endpoint (Kilo's behaviour is `--endpoint-from=interface`): the recordings
//!   here begin with the annotations, where both are the same.
//! * with `--local=false` and another location that offers 0.0.0.0/0, a packet to
//!   a pod of this location that no CNI route takes is dropped (`no_prefix`),
//!   where Kilo carries it to the leader by that route: those pods belong to the
//!   CNI, and their path is never the one to another location (`unit::plan_clear`);
//! * packets to the pods of a node that was declared dead are dropped while its object
//!   exists, and so are pods' packets to its private address in another location; Kilo
//!   leaves both to the default route, in cleartext. The same holds for packets to this
//!   node's pods that no local route takes. Only our tables and `unreachable` routes do
//!   this: WireGuard's configuration and the routes recorded here do not differ
//!   (`unit::plan_clear`);
//! * of two nodes with one private address the first by name receives the packets, and
//!   neither sends to itself those for the other (`unit::plan_clear`).
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test's helpers fail as the test does")]

use crate::dot;

use std::{
    collections::BTreeMap,
    fmt::Debug,
    net::{IpAddr, Ipv4Addr},
};

use kilo_core::{
    objects::{node, peer},
    observed::HostLinks,
    plan::{self, HopIds, Inputs, model},
    relay::RelayInputs,
    settings::Settings,
    topology::{self, Member, Mesh, Peer},
    wireguard::{EndpointHost, conf, key::SecretKey},
};
use serde::Deserialize;
use serde_json::Value;

use dot::Graph;

/// Address to which every name resolves here.
const RESOLVED: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 53));

#[derive(Deserialize)]
struct Scenario {
    seed: Value,
    now: i64,
    config: Config,
    nodes: Vec<k8s_openapi::api::core::v1::Node>,
    peers: Option<Vec<Value>>,
    views: BTreeMap<String, View>,
}

#[derive(Deserialize)]
struct Config {
    cni: bool,
    encapsulate: String,
    local: bool,
    mesh_granularity: String,
    service_cidrs: Option<Vec<String>>,
    subnet: String,
    topology_label: String,
}

#[derive(Deserialize)]
struct View {
    leader: bool,
    location: String,
    wireguard_cidr: Option<String>,
    segments: Option<Vec<Value>>,
    conf: String,
    as_peer: String,
    peer_conf: Option<BTreeMap<String, String>>,
    dot: String,
    probes: Vec<Probe>,
}

#[derive(Deserialize)]
struct Probe {
    src: String,
    dst: String,
    masquerade: bool,
    route: Value,
    route_if_received_from_kilo0: Option<Value>,
}

/// Counts comparisons and collects differences.
#[derive(Default)]
struct Report {
    compared: BTreeMap<&'static str, usize>,
    deviations: BTreeMap<&'static str, usize>,
    differences: Vec<String>,
}

impl Report {
    fn deviates(&mut self, how: &'static str) {
        *self.deviations.entry(how).or_default() += 1;
    }

    #[allow(clippy::needless_pass_by_value, reason = "callers compare what they have just made")]
    fn equal<T: PartialEq + Debug>(&mut self, what: &'static str, at: &str, got: T, want: T) {
        *self.compared.entry(what).or_default() += 1;
        if got != want {
            self.differences.push(format!("{at}: {what}\n   got {got:?}\n  want {want:?}"));
        }
    }
}

#[test]
fn every_recorded_answer_of_kilo_is_ours() {
    results_are_kilos(|_| {});
}

/// Kilo knows none of these annotations, so its results stay the same: beside a node with Kilo itself
/// nobody may see another leader, however many active leaders are requested.
#[test]
fn beside_a_node_with_kilo_itself_gateways_change_no_answer() {
    results_are_kilos(|nodes| {
        for node in nodes.iter_mut().skip(1) {
            let annotations = node.metadata.annotations.get_or_insert_default();
            for (name, value) in [("signal", "1"), ("leaders", "3"), ("gateway", "true")] {
                annotations.insert(format!("kilo.squat.ai/{name}"), value.to_owned());
            }
        }
    });
}

fn results_are_kilos(change: fn(&mut [k8s_openapi::api::core::v1::Node])) {
    let path = std::env::var("KILO_GOLDEN")
        .unwrap_or_else(|_| concat!(env!("CARGO_MANIFEST_DIR"), "/testdata/topology.jsonl").to_owned());
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    let mut report = Report::default();
    let mut scenarios = 0;
    for line in text.lines().filter(|line| !line.trim().is_empty()) {
        let mut scenario: Scenario = serde_json::from_str(line).unwrap();
        change(&mut scenario.nodes);
        compare(&scenario, &mut report);
        scenarios += 1;
    }
    println!("{scenarios} scenarios: {:?}; not compared: {:?}", report.compared, report.deviations);
    let shown = report.differences.iter().take(20).cloned().collect::<Vec<_>>().join("\n");
    assert!(report.differences.is_empty(), "{} differences, the first:\n{shown}", report.differences.len());
    assert!(scenarios > 0, "{path} holds no scenario");
}

fn compare(scenario: &Scenario, report: &mut Report) {
    let config = &scenario.config;
    let nodes: topology::Nodes =
        scenario.nodes.iter().map(|object| node::from_object(object, &config.topology_label).0).collect();
    let peers: BTreeMap<String, Peer> = scenario
        .peers
        .iter()
        .flatten()
        .filter_map(|object| peer::from_object(&serde_json::from_value(object.clone()).ok()?).ok())
        .map(|peer| (peer.name.clone(), peer))
        .collect();
    let ready: Vec<_> = nodes.iter().filter(|node| topology::ready_at(*node, scenario.now)).collect();
    let at = format!("seed {}", scenario.seed);
    let names: Vec<_> = ready.iter().map(|node| node.name.as_str()).collect();
    report.equal("ready nodes", &at, names, scenario.views.keys().map(String::as_str).collect());
    let mut settings = Settings {
        granularity: config.mesh_granularity.parse().unwrap(),
        encapsulate: kilo_core::settings::parse_value("encapsulation", &config.encapsulate).unwrap(),
        tunnel: kilo_core::settings::Tunnel::Ipip,
        local: config.local,
        cni: config.cni,
        subnet: config.subnet.parse().unwrap(),
        service_cidrs: config.service_cidrs.iter().flatten().map(|cidr| cidr.parse().unwrap()).collect(),
        port: 0,
    };
    let mesh = Mesh::new(ready.iter().map(|node| &**node), &peers, settings.granularity, settings.subnet);
    for (name, view) in &scenario.views {
        let at = format!("{at}, node {name}");
        let Some(node) = nodes.get(name) else { continue };
        let mesh = mesh.clone().seen_by(&node.discovered_endpoints);
        settings.port = node.endpoint.as_ref().map_or(0, |endpoint| endpoint.port);
        compare_view(&mesh, &node, &settings, view, &at, report);
    }
}

fn compare_view(
    mesh: &Mesh,
    node: &topology::Node,
    settings: &Settings,
    view: &View,
    at: &str,
    report: &mut Report,
) {
    let (own, _) = mesh.find(&node.name).unwrap();
    let segment = &mesh.segments[own];
    report.equal("leader", at, mesh.leads(&node.name), view.leader);
    report.equal("location", at, segment.location.as_str(), &view.location);
    if view.leader {
        let cidr = plan::wireguard_address(mesh, &node.name).map(|cidr| cidr.to_string());
        report.equal("wireguard_cidr", at, cidr, view.wireguard_cidr.clone());
    }
    if let Some(want) = &view.segments {
        let got: Vec<Value> = mesh.segments.iter().map(|segment| segment_value(segment)).collect();
        report.equal("number of segments", at, got.len(), want.len());
        for (got, want) in got.into_iter().zip(want) {
            report.equal("segment", at, got, want.clone());
        }
    }
    let mut secret = [0; 32];
    secret[0] = 1;
    let conf = kilo_core::showconf::of_node(
        mesh,
        own,
        SecretKey::from_bytes(secret),
        settings.port,
        node.persistent_keepalive,
    );
    report.equal("conf", at, conf.to_ini(), without_nil(&view.conf));
    let as_peer = conf::Conf { interface: None, peers: vec![kilo_core::showconf::as_peer(segment)] };
    report.equal("as_peer", at, as_peer.to_ini(), without_nil(&view.as_peer));
    for (name, want) in view.peer_conf.iter().flatten() {
        let got = kilo_core::showconf::of_peer(mesh, name).map(|conf| conf.to_ini());
        report.equal("peer_conf", at, got, Some(without_nil(want)));
    }
    report.equal(
        "dot",
        at,
        Graph::parse(&topology::dot(mesh, &topology::TunnelPaths::default())),
        Graph::parse(&view.dot),
    );
    compare_probes(mesh, node, settings, view, at, report);
}

fn compare_probes(
    mesh: &Mesh,
    node: &topology::Node,
    settings: &Settings,
    view: &View,
    at: &str,
    report: &mut Report,
) {
    let links = HostLinks { kilo: 9, private: Some(2), ..HostLinks::default() };
    let mesh = &mesh.as_seen_from(&node.name);
    let hops = HopIds::default().update(mesh);
    let endpoints = mesh.segments.iter().map(|segment| Some(&segment.endpoint));
    let endpoints = endpoints.chain(mesh.peers.iter().map(|peer| peer.endpoint.as_ref())).flatten();
    let resolved: BTreeMap<String, IpAddr> = endpoints
        .filter_map(|endpoint| match &endpoint.host {
            EndpointHost::Dns(name) => Some((name.clone(), RESOLVED)),
            EndpointHost::Ip(_) => None,
        })
        .collect();
    let plan = plan::host_plan(&Inputs {
        mesh,
        settings,
        links: &links,
        hops: &hops,
        resolved: &resolved,
        seen: &BTreeMap::new(),
        relays: &RelayInputs::default(),
        signal_keys: &BTreeMap::new(),
        persistent_keepalive: node.persistent_keepalive,
        masquerade: true,
        mtu: 1420,
    })
    .unwrap();
    compare_wireguard(&plan.wireguard, view, at, report);
    for probe in &view.probes {
        if probe.dst.starts_with("0.") {
            report.deviates("destination 0.0.0.0/8");
            continue;
        }
        let packet = model::Packet { src: probe.src.parse().unwrap(), dst: probe.dst.parse().unwrap() };
        let at = format!("{at}, {} -> {}", probe.src, probe.dst);
        report.equal("masquerade", &at, plan.tables.masquerades(packet), probe.masquerade);
        let from_kilo = probe.route_if_received_from_kilo0.as_ref().unwrap_or(&probe.route);
        let here = serde_json::json!({"via": "other"});
        for (what, got, recorded) in [
            ("route", plan.route(packet), &probe.route),
            ("route from kilo0", plan.route_from_kilo(packet), from_kilo),
        ] {
            let mut wanted = recorded.clone();
            if plan.tables.is_local(packet.dst) && *recorded != here {
                report.deviates("destination on this node");
                wanted = here.clone();
            }
            if let Some(steered) = steered_by_source(&plan, packet).filter(|_| *recorded == here) {
                report.deviates("steered by its source");
                wanted = steered;
            }
            report.equal(what, &at, route_value(got), wanted);
        }
    }
}

/// Hop of mesh packets that the reference sends in cleartext: those to an address that a leader's WireGuard
/// sends to, and those that a node forwards to another node itself.
fn steered_by_source(plan: &plan::HostPlan, packet: model::Packet) -> Option<Value> {
    let wireguard = serde_json::json!({"via": "wireguard"});
    match plan.tables.uplink_egress(packet).ok()?? {
        plan::Hop::Wireguard => Some(wireguard),
        plan::Hop::Node { remote, .. } if !plan.tables.is_local(packet.src) => Some(serde_json::json!(
            {"via": "gateway", "gateway": remote.to_string(), "encapsulated": true}
        )),
        _ => None,
    }
}

/// Compares the device's configuration with the one that the reference writes.
fn compare_wireguard(plan: &kilo_core::wireguard::WireguardPlan, view: &View, at: &str, report: &mut Report) {
    if !view.leader {
        // The reference keeps unused peers there; our data path must not have any.
        report.equal("peers of a node that does not lead", at, plan.peers.len(), 0);
        return;
    }
    let recorded: conf::Conf = without_nil(&view.conf).parse().unwrap();
    report.equal("conf read and written", at, recorded.to_ini(), without_nil(&view.conf));
    report.equal("listen port", at, Some(plan.listen_port), recorded.interface.map(|(_, port)| port));
    report.equal("peers", at, plan.peers.len(), recorded.peers.len());
    for section in recorded.peers {
        let got = plan.peers.get(&section.public_key);
        let at = format!("{at}, WireGuard peer {}", section.public_key);
        let want = kilo_core::wireguard::WireguardPeer {
            allowed_ips: section.allowed_ips.into_iter().collect(),
            endpoint: section
                .endpoint
                .map(|endpoint| std::net::SocketAddr::new(endpoint.ip().unwrap_or(RESOLVED), endpoint.port)),
            // No configuration contains this.
            roams: got.is_some_and(|peer| peer.roams),
            persistent_keepalive: section.persistent_keepalive.try_into().unwrap_or(u16::MAX),
            preshared_key: section.preshared_key,
        };
        report.equal("WireGuard peer", &at, got, Some(&want));
    }
}

fn route_value(route: model::Route) -> Value {
    match route {
        model::Route::Wireguard => serde_json::json!({"via": "wireguard"}),
        model::Route::Gateway { gateway, encapsulated } => {
            serde_json::json!({"via": "gateway", "gateway": gateway.to_string(), "encapsulated": encapsulated})
        }
        model::Route::Other => serde_json::json!({"via": "other"}),
        model::Route::Dropped(reason) => serde_json::json!({"dropped": reason.label()}),
    }
}

fn segment_value(segment: &topology::Segment) -> Value {
    let texts = |list: &[ipnet::IpNet]| list.iter().map(ToString::to_string).collect::<Vec<_>>();
    let members = &segment.members;
    serde_json::json!({
        "allowed_ips": texts(&segment.allowed_ips),
        "allowed_location_ips": texts(&segment.allowed_location_ips),
        "endpoint": segment.endpoint.to_string(),
        "hostnames": members.iter().map(Member::name).collect::<Vec<_>>(),
        "leader": members[segment.leader].name(),
        "location": segment.location,
        "persistent_keepalive_seconds": segment.persistent_keepalive,
        "pod_cidrs": members.iter().flat_map(|member| texts(&member.node.pod_cidrs)).collect::<Vec<_>>(),
        "private_ips": members.iter().filter_map(|m| Some(m.private_ip()?.to_string())).collect::<Vec<_>>(),
        "public_key": segment.key.to_string(),
        "wireguard_ip": segment.wireguard_ip.map(|ip| ip.to_string()),
    })
}

fn without_nil(ini: &str) -> String {
    let mut text: String =
        ini.lines().filter(|line| !line.contains("<nil>")).map(|line| format!("{line}\n")).collect();
    text.truncate(text.trim_end().len());
    if !text.is_empty() {
        text.push('\n');
    }
    text
}

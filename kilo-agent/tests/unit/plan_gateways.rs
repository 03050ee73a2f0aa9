//! Several active leaders of a location: each node's packets use one of them in both directions, and every
//! far side agrees. Where some node does not know several, nothing differs from one.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use ipnet::IpNet;
use kilo_agent::{status, timestamp::Timestamp};
use kilo_common::{
    counters::Action,
    lead::{Term, word},
    maps::HOP_REMOTE,
};
use kilo_core::{
    objects::{CheckedIn, Snapshot},
    plan::{Hop, HopIds, HostPlan, model::Packet},
    settings::Granularity,
    showconf,
    signal_id::{self, NodeId},
    topology::{Acting, ActingLocation, Mesh, Node, TunnelPaths, dot},
    wireguard::key::{PublicKey, SecretKey},
};

use crate::plans;

const STAND_BYS: usize = 1;

/// A node of site a or b by its number, 1 to 99.
fn node(site: u8, number: u8, leaders: Option<usize>) -> Node {
    Node {
        name: format!("{}{number:02}", char::from(b'a' + site)),
        endpoint: format!("192.0.{site}.{number}:51820").parse().ok(),
        key: Some(PublicKey([site * 100 + number; 32])),
        internal_ip: format!("10.{}.0.{number}/24", site + 1).parse().ok(),
        location: site.to_string(),
        pod_cidrs: vec![format!("10.42.{}.0/24", site * 100 + number).parse().unwrap()],
        signal: true,
        leaders,
        ..Node::default()
    }
}

fn nodes(leaders: usize, of_a: u8, of_b: u8) -> Vec<Node> {
    let site = |site, count| (1..=count).map(move |number| node(site, number, Some(leaders)));
    site(0, of_a).chain(site(1, of_b)).collect()
}

fn id(node: &Node) -> NodeId {
    signal_id::node(&node.key.unwrap())
}

fn mesh(nodes: &[Node], acting: Acting) -> Mesh {
    mesh_with(STAND_BYS, nodes, acting)
}

fn mesh_with(stand_bys: usize, nodes: &[Node], acting: Acting) -> Mesh {
    plans::mesh(nodes).with_acting(stand_bys, Arc::new(acting))
}

fn planned(mesh: &Mesh, own: &str) -> (HostPlan, HopIds) {
    plans::plan(mesh, own, &HopIds::default())
}

/// All plans, after each node's gateway has announced and claimed it.
struct World {
    nodes: BTreeMap<String, Node>,
    plans: BTreeMap<String, HostPlan>,
    uses: BTreeMap<String, String>,
}

impl World {
    fn new(nodes: &[Node]) -> Self {
        let term = Term::NONE.next(1);
        let quiet = mesh(nodes, Acting::default());
        let uses: BTreeMap<String, String> = quiet
            .gateways_in_use()
            .into_iter()
            .map(|(node, gateway)| (node.to_owned(), gateway.to_owned()))
            .collect();
        let by_name: BTreeMap<String, Node> =
            nodes.iter().map(|node| (node.name.clone(), node.clone())).collect();
        let mut acting = Acting::default();
        for segment in &quiet.segments {
            let member = |node: &Node| (id(node), (term, id(&by_name[&uses[&node.name]])));
            let members = segment.members.iter().map(|it| member(&it.node)).collect();
            let said = ActingLocation { leader: None, members };
            acting.locations.insert(signal_id::location(&segment.location), said);
        }
        let plan = |node: &Node| {
            let is_led = |other: &&Node| other.name != node.name && uses[&other.name] == node.name;
            let led: BTreeSet<NodeId> = nodes.iter().filter(is_led).map(id).collect();
            let (mut plan, hops) = planned(&mesh(nodes, Acting { led, ..acting.clone() }), &node.name);
            let hop =
                if uses[&node.name] == node.name { HOP_REMOTE } else { hops.get(&uses[&node.name]).unwrap() };
            plan.tables.lead[1] = word(term, u16::try_from(hop).unwrap());
            (node.name.clone(), plan)
        };
        let plans = nodes.iter().map(plan).collect();
        Self { plans, uses, nodes: by_name }
    }

    fn named(&self, is: impl Fn(&Node) -> bool) -> &str {
        self.nodes.values().find(|node| is(node)).map(|node| node.name.as_str()).unwrap()
    }

    fn at(&self, address: IpAddr) -> &str {
        self.named(|node| node.internal_ip.unwrap().addr() == address)
    }

    /// Follows a packet between pods; returns the node that encrypted it.
    fn send(&self, from: &str, to: &str) -> String {
        let address = |name: &str| self.nodes[name].pod_cidrs[0].hosts().nth(4).unwrap();
        let private = |name: &str| self.nodes[name].internal_ip.unwrap().addr();
        let packet = Packet { src: address(from), dst: address(to) };
        let way = format!("{from} to {to}");
        let gateway = match self.plans[from].tables.kilo_egress(packet) {
            Ok((Action::Encrypt, _)) => from,
            Ok((Action::Steer, Some(Hop::Node { remote, .. }))) => {
                let gateway = self.at(remote);
                let verdict = self.plans[gateway].tables.lan_ingress(private(from), packet);
                assert!(matches!(verdict, Ok((Action::Transit, _))), "{way} at {gateway}: {verdict:?}");
                gateway
            }
            verdict => panic!("{way}: {verdict:?}"),
        };
        let has = |net: &IpNet, address: IpAddr| net.contains(&address);
        let peers = &self.plans[gateway].wireguard.peers;
        let (key, _) =
            peers.iter().find(|(_, peer)| peer.allowed_ips.iter().any(|net| has(net, packet.dst))).unwrap();
        let far = self.named(|node| node.key == Some(*key));
        let back = &self.plans[far].wireguard.peers[&self.nodes[gateway].key.unwrap()];
        assert!(
            back.allowed_ips.iter().any(|net| has(net, packet.src)),
            "{way}: {far} refuses it from {gateway}"
        );
        match self.plans[far].tables.kilo_ingress(packet) {
            Ok((Action::Decrypt, _)) => assert_eq!(far, to),
            Ok((Action::Forward, Some(Hop::Node { remote, .. }))) => {
                assert_eq!(self.at(remote), to);
                let verdict = self.plans[to].tables.lan_ingress(private(far), packet);
                assert!(matches!(verdict, Ok((Action::Deliver, _))), "{way} at its end: {verdict:?}");
            }
            verdict => panic!("{way} at {far}: {verdict:?}"),
        }
        gateway.to_owned()
    }
}

#[test]
fn everybody_reaches_everybody_by_its_own_gateway_and_shares_are_fair() {
    for leaders in 2..=4u8 {
        let nodes = nodes(usize::from(leaders), 12 + leaders, 5);
        let world = World::new(&nodes);
        let mut encrypted: BTreeMap<String, u32> = BTreeMap::new();
        let of = |site: &'static str| {
            nodes.iter().filter(move |node| node.location == site).map(move |node| node.name.as_str())
        };
        for a in of("0") {
            for b in of("1") {
                let gateway = world.send(a, b);
                assert_eq!(gateway, world.uses[a]);
                *encrypted.entry(gateway).or_default() += 1;
                assert_eq!(world.send(b, a), world.uses[b]);
            }
        }
        assert_eq!(encrypted.len(), usize::from(leaders));
        let fair = f64::from(encrypted.values().sum::<u32>()) / f64::from(leaders);
        println!(
            "{leaders} leaders, each of 12 nodes and theirs sends alike: {encrypted:?} packets encrypted"
        );
        assert!(
            encrypted.values().all(|count| (f64::from(*count) - fair).abs() <= 0.25 * fair),
            "{encrypted:?}"
        );
    }
}

#[test]
fn one_leader_and_a_node_that_knows_no_several_are_planned_as_before() {
    let before: Vec<Node> = nodes(1, 5, 2).into_iter().map(|node| Node { leaders: None, ..node }).collect();
    let plans_with = |stand_bys, nodes: &[Node]| -> Vec<HostPlan> {
        let mesh = mesh_with(stand_bys, nodes, Acting::default());
        nodes.iter().map(|node| planned(&mesh, &node.name).0).collect()
    };
    let plans = |nodes: &[Node]| plans_with(STAND_BYS, nodes);
    let wanted = plans(&before);
    assert_eq!(plans(&nodes(1, 5, 2)), wanted, "--leaders=1");
    // Text of a host's tables, device and routes, of configurations, and of kgctl's graph.
    let texts = |nodes: &[Node]| {
        let mesh = mesh(nodes, Acting::default());
        let key = SecretKey::from_bytes([1; 32]);
        let confs = (0..mesh.segments.len()).map(|at| showconf::of_node(&mesh, at, key, 51820, 0).to_ini());
        (format!("{:?}", plans(nodes)), confs.collect::<Vec<_>>(), dot(&mesh, &TunnelPaths::default()))
    };
    assert_eq!(texts(&nodes(1, 5, 2)), texts(&before), "--leaders=1");
    assert_ne!(texts(&nodes(2, 5, 2)).2, texts(&before).2);
    let mut mixed = nodes(3, 5, 2);
    mixed[6].leaders = None;
    // A node that would be an active leader beside the leader is a stand-by.
    assert_eq!(plans(&mixed), plans_with(2, &before), "one of the other location does not know them");
    mixed[6] = Node { signal: false, ..node(1, 2, Some(3)) };
    assert_eq!(plans(&mixed).len(), 7);
    assert!(mesh(&mixed, Acting::default()).gateways_in_use().is_empty(), "it is Kilo itself");
    assert_ne!(plans(&nodes(3, 5, 2)), wanted);
}

#[test]
fn status_and_graph_name_the_gateway_of_each_node() {
    for leaders in 1..=3usize {
        let nodes = nodes(leaders, 9, 4);
        let mesh = mesh(&nodes, Acting::default());
        let checked_in = nodes.iter().map(|node| CheckedIn { node: node.clone(), last_seen: 0 });
        let snapshot = Snapshot { nodes: checked_in.collect(), ..Snapshot::default() };
        let ready = nodes.iter().map(|node| node.name.as_str()).collect();
        let status = status::of_objects(&mesh, &snapshot, &ready, Granularity::Location, Timestamp(0));
        let (table, graph) = (status::table(&status, false), dot(&mesh, &TunnelPaths::default()));
        let used = mesh.gateways_in_use();
        assert_eq!(used.len(), if leaders > 1 { nodes.len() } else { 0 });
        for node in &nodes {
            let name = node.name.as_str();
            // Node, location, role.
            let row = table.lines().find(|line| line.split_whitespace().next() == Some(name)).unwrap();
            let role = row.split("   ").map(str::trim).filter(|cell| !cell.is_empty()).nth(2).unwrap();
            let leader = if node.location == "0" { "a01" } else { "b01" };
            let (wanted, joined) = match used.get(name) {
                _ if name == leader => ("leader".to_owned(), None),
                Some(gateway) if *gateway == name => ("gateway".to_owned(), Some(leader)),
                Some(gateway) => (format!("by {gateway}"), Some(*gateway)),
                None => ("<none>".to_owned(), Some(leader)),
            };
            assert_eq!(role, wanted, "{leaders}\n{table}");
            let ends = format!(" -> \"{name}\" [ dir=both ];");
            let all: Vec<_> = graph.lines().filter_map(|line| line.trim().strip_suffix(&ends)).collect();
            let of_location: Vec<_> =
                all.into_iter().filter(|from| from.starts_with(&format!("\"{}", &name[..1]))).collect();
            let wanted: Vec<_> = joined.map(|gateway| format!("\"{gateway}\"")).into_iter().collect();
            assert_eq!(of_location, wanted, "{leaders}, {name}\n{graph}");
        }
    }
}

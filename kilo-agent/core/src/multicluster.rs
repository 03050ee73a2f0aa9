//! Two clusters that peer with each other: the Peer objects each gets for the other, and what
//! prevents joining them. Pure.

use std::collections::BTreeMap;

use ipnet::IpNet;
use kube::core::DynamicObject;

use crate::{
    objects::{Snapshot, peer},
    prefixes::Prefixes,
    settings::Granularity,
    showconf,
    topology::{Mesh, Node, Nodes, Peer, SubnetsDiffer, published_subnet, ready_at},
};

/// Label of Peer objects that stand for a location of another cluster; its
/// value is that cluster's name. Objects with it belong to `kgctl peer-cluster`.
pub const LABEL: &str = "kilo.squat.ai/cluster";

/// A Peer object as it exists in a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Present {
    /// Name of the Peer object.
    pub name: String,
    /// Value of [`LABEL`]: the cluster for which it was made; `None`: it was not made
    /// by `kgctl peer-cluster`.
    pub owner: Option<String>,
    /// The parsed object; `None` when it is invalid.
    pub peer: Option<Peer>,
}

impl Present {
    /// Reads an object of any shape.
    pub fn new(object: &DynamicObject) -> Self {
        let labels = object.metadata.labels.as_ref();
        Self {
            name: object.metadata.name.clone().unwrap_or_default(),
            owner: labels.and_then(|labels| labels.get(LABEL)).cloned(),
            peer: peer::parse(object.clone()).ok(),
        }
    }

    /// Whether the object is as wanted. The pre-shared key is left to the operator, in both clusters.
    fn matches(&self, wanted: &Peer) -> bool {
        self.peer.as_ref().is_some_and(|peer| Peer { preshared_key: None, ..peer.clone() } == *wanted)
    }
}

/// One of the two clusters that `kgctl peer-cluster` joins, as its own API server describes it.
#[derive(Clone, Debug)]
pub struct Cluster {
    /// The name by which the other cluster knows it.
    pub name: String,
    /// Every node, ready or not.
    pub nodes: Nodes,
    /// The mesh of those that are ready.
    pub mesh: Mesh,
    /// The ranges of its ClusterIPs.
    pub services: Vec<IpNet>,
    /// Its Peer objects, including foreign and invalid ones.
    pub peers: Vec<Present>,
}

/// Why a cluster cannot be joined with another.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unfit {
    /// No node is ready, so nothing is known about where its traffic would go.
    #[error("cluster {0} has no ready node; see `kgctl status`. Nothing was changed")]
    NobodyReady(String),
    /// No leader has published a WireGuard address.
    #[error("no leader of cluster {0} has published its WireGuard address yet; try again in a minute")]
    NoSubnet(String),
    /// Nodes have published addresses of different subnets.
    #[error("in cluster {0} {1}; give all agents the same --subnet")]
    Subnets(String, #[source] SubnetsDiffer),
}

impl Cluster {
    /// A cluster from its objects at this time (Unix seconds). The WireGuard
    /// subnet is the one its nodes publish addresses of.
    ///
    /// # Errors
    /// When no node is ready, or the subnet is not clear.
    pub fn new(
        name: &str,
        snapshot: &Snapshot,
        granularity: Granularity,
        services: Vec<IpNet>,
        peers: Vec<Present>,
        now: i64,
    ) -> Result<Self, Unfit> {
        if !snapshot.nodes.iter().any(|node| ready_at(node, now)) {
            return Err(Unfit::NobodyReady(name.to_owned()));
        }
        // By a clock that is ahead some of the nodes look dead, and their locations would lose their Peers.
        let newest = snapshot.nodes.iter().map(|node| node.last_seen).max().unwrap_or(now);
        let now = now.min(newest);
        let ready: Vec<&Node> =
            snapshot.nodes.iter().filter(|node| ready_at(*node, now)).map(|known| &**known.node).collect();
        let subnet = published_subnet(ready.iter().copied())
            .map_err(|differ| Unfit::Subnets(name.to_owned(), differ))?
            .ok_or_else(|| Unfit::NoSubnet(name.to_owned()))?;
        let mesh = Mesh::new(ready, &snapshot.peers, granularity, subnet);
        Ok(Self { name: name.to_owned(), nodes: snapshot.nodes.clone(), mesh, services, peers })
    }

    /// Peer objects here that stand for the other cluster.
    pub fn owned_by<'a>(&'a self, other: &'a str) -> impl Iterator<Item = &'a Present> {
        self.peers.iter().filter(move |present| present.owner.as_deref() == Some(other))
    }

    fn foreign<'a>(&'a self, other: &'a str) -> impl Iterator<Item = &'a Present> {
        self.peers.iter().filter(move |present| present.owner.as_deref() != Some(other))
    }

    /// Ranges here to which the other cluster will send, with a description of each.
    fn exported(&self) -> Vec<(IpNet, String)> {
        let name = &self.name;
        let mut ranges = vec![(self.mesh.subnet, format!("the WireGuard subnet of cluster {name}"))];
        ranges
            .extend(self.services.iter().map(|range| (*range, format!("a service range of cluster {name}"))));
        for node in self.nodes.iter() {
            let of = |what: &str| format!("the {what} of node {} of cluster {name}", node.name);
            ranges.extend(node.pod_cidrs.iter().map(|cidr| (cidr.trunc(), of("pod CIDR"))));
            ranges.extend(node.internal_ip.map(|ip| (ip.addr().into(), of("private IP"))));
        }
        ranges
    }

    /// Ranges that are also in use here, but not exported to the other cluster.
    fn kept(&self, other: &str) -> Vec<(IpNet, String)> {
        let name = &self.name;
        let mut ranges = Vec::new();
        for node in self.nodes.iter() {
            let what = format!("an allowed-location-ip of node {} of cluster {name}", node.name);
            ranges.extend(node.allowed_location_ips.iter().map(|range| (range.trunc(), what.clone())));
        }
        for present in self.foreign(other) {
            let what = format!("an allowed IP of Peer {} of cluster {name}", present.name);
            let allowed_ips = present.peer.iter().flat_map(|peer| &peer.allowed_ips);
            ranges.extend(allowed_ips.map(|range| (range.trunc(), what.clone())));
        }
        ranges
    }
}

/// What prevents joining the two, one text per conflict, which names both objects; empty
/// when they may be joined.
pub fn conflicts(one: &Cluster, two: &Cluster) -> Vec<String> {
    let mut conflicts = keys(one, two);
    let (exported, theirs) = (one.exported(), two.exported());
    overlaps(&exported, &theirs, &mut conflicts);
    overlaps(&exported, &two.kept(&one.name), &mut conflicts);
    overlaps(&one.kept(&two.name), &theirs, &mut conflicts);
    for (here, there) in [(one, two), (two, one)] {
        for wanted in wanted(there, here) {
            if here.foreign(&there.name).any(|present| present.name == wanted.name) {
                conflicts.push(format!(
                    "Peer {} of cluster {} was not made by `kgctl peer-cluster` for cluster {}: rename or delete it",
                    wanted.name, here.name, there.name
                ));
            }
        }
    }
    conflicts
}

fn overlaps(ours: &[(IpNet, String)], theirs: &[(IpNet, String)], conflicts: &mut Vec<String>) {
    let mut by_prefix: Prefixes<Vec<&str>> = Prefixes::default();
    for (prefix, what) in theirs {
        by_prefix.entry(*prefix).push(what);
    }
    for (prefix, what) in ours {
        let same = |other: &IpNet| *other == prefix.trunc();
        let meeting =
            by_prefix.holding(*prefix).chain(by_prefix.covered_by(*prefix).filter(|(other, _)| !same(other)));
        for (other, of) in meeting.flat_map(|(other, list)| list.iter().map(move |of| (other, of))) {
            conflicts.push(format!("{prefix} ({what}) overlaps {other} ({of})"));
        }
    }
}

fn keys(one: &Cluster, two: &Cluster) -> Vec<String> {
    let holders = |cluster: &Cluster, other: &str| {
        let mut holders = Vec::new();
        for node in cluster.nodes.iter() {
            let what = format!("node {} of cluster {}", node.name, cluster.name);
            holders.extend(node.key.map(|key| (key, what, true)));
        }
        for present in cluster.foreign(other) {
            let what = format!("Peer {} of cluster {}", present.name, cluster.name);
            holders.extend(present.peer.as_ref().map(|peer| (peer.public_key, what, false)));
        }
        holders
    };
    let mut theirs: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for (key, what, is_node) in holders(two, &one.name) {
        theirs.entry(key).or_default().push((what, is_node));
    }
    let mut conflicts = Vec::new();
    for (key, what, is_node) in holders(one, &two.name) {
        for (other, other_is_node) in theirs.get(&key).into_iter().flatten() {
            let remedy = match (is_node, other_is_node) {
                (true, true) => "are both kubeconfigs of one cluster, or was a disk copied?",
                // A VPN peer may well be known to both clusters.
                (false, false) => continue,
                _ => "delete the Peer, if it stands for that node: `kgctl peer-cluster` makes its own",
            };
            conflicts.push(format!("{what} and {other} have the same public key; {remedy}"));
        }
    }
    conflicts
}

/// The peers that stand for `from` in `to`: one per location, named after the cluster and its leader.
/// Service ranges stay with the peer that already has them; else the first peer gets them.
pub fn wanted(from: &Cluster, to: &Cluster) -> Vec<Peer> {
    let mut peers: Vec<Peer> = from
        .mesh
        .segments
        .iter()
        .filter_map(|segment| {
            let section = showconf::as_peer(segment);
            Some(Peer {
                name: format!("{}-{}", from.name, segment.leading()?.name()),
                allowed_ips: section.allowed_ips,
                endpoint: section.endpoint,
                // A leader with a keepalive is behind NAT: it must be answered at the
                // endpoint where it is seen.
                persistent_keepalive: segment.persistent_keepalive,
                preshared_key: None,
                public_key: section.public_key,
                follows: false,
            })
        })
        .collect();
    peers.sort_by(|a, b| a.name.cmp(&b.name));
    let has_services = |peer: &Peer| {
        let present = to.owned_by(&from.name).find(|present| present.name == peer.name);
        let allowed_ips = present.and_then(|present| present.peer.as_ref()).map(|peer| &peer.allowed_ips);
        from.services.iter().any(|range| allowed_ips.is_some_and(|list| list.contains(range)))
    };
    let carrier = peers.iter().position(has_services).unwrap_or(0);
    if let Some(peer) = peers.get_mut(carrier) {
        peer.allowed_ips.extend(&from.services);
    }
    peers
}

/// The changes to be written to one cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Peers that do not exist yet.
    pub create: Vec<Peer>,
    /// Peers that exist and differ.
    pub update: Vec<Peer>,
    /// Names of objects to be deleted.
    pub delete: Vec<String>,
    /// Number of peers that are as wanted.
    pub unchanged: usize,
}

impl Changes {
    /// Compares `wanted` with the objects that `to` has for `from`.
    pub fn between(wanted: Vec<Peer>, to: &Cluster, from: &str) -> Self {
        let mut present: BTreeMap<&str, &Present> =
            to.owned_by(from).map(|present| (present.name.as_str(), present)).collect();
        let mut changes = Self::default();
        for peer in wanted {
            match present.remove(peer.name.as_str()) {
                None => changes.create.push(peer),
                Some(found) if found.matches(&peer) => changes.unchanged += 1,
                Some(_) => changes.update.push(peer),
            }
        }
        changes.delete = present.into_keys().map(ToOwned::to_owned).collect();
        changes
    }

    /// How many objects are created, updated and deleted.
    pub fn writes(&self) -> usize {
        self.create.len() + self.update.len() + self.delete.len()
    }
}

/// The Peer object of `peer`, labelled as one that stands for `cluster`.
pub fn object(peer: &Peer, cluster: &str) -> peer::Peer {
    let mut object = peer::to_object(peer);
    object.metadata.labels = Some([(LABEL.to_owned(), cluster.to_owned())].into());
    object
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{topology::CheckedIn, wireguard::key::PublicKey};

    const NOW: i64 = 1_000;

    fn node(cluster: u8, name: &str, location: &str, number: u8) -> Node {
        Node {
            name: name.to_owned(),
            location: location.to_owned(),
            endpoint: format!("192.0.{cluster}.{number}:51820").parse().ok(),
            key: Some(PublicKey([cluster * 16 + number; 32])),
            internal_ip: format!("10.{cluster}.0.{number}/24").parse().ok(),
            pod_cidrs: vec![format!("10.4{cluster}.{number}.0/24").parse().unwrap()],
            wireguard_ip: format!("10.20{cluster}.0.{number}/16").parse().ok(),
            ..Node::default()
        }
    }

    fn cluster(number: u8, nodes: Vec<Node>, peers: Vec<Present>) -> Result<Cluster, Unfit> {
        checked_in(number, nodes, peers, NOW)
    }

    fn checked_in(
        number: u8,
        nodes: Vec<Node>,
        peers: Vec<Present>,
        last_seen: i64,
    ) -> Result<Cluster, Unfit> {
        let nodes = nodes.into_iter().map(|node| CheckedIn { node, last_seen }).collect();
        let snapshot = Snapshot { nodes, ..Snapshot::default() };
        let services = vec![format!("10.9{number}.0.0/16").parse().unwrap()];
        Cluster::new(&format!("c{number}"), &snapshot, Granularity::Location, services, peers, NOW)
    }

    fn change(cluster: &mut Cluster, name: &str, change: impl FnOnce(&mut Node)) {
        let known = cluster.nodes.get(name).unwrap();
        let (mut node, last_seen) = (Node::clone(known.node), known.last_seen);
        change(&mut node);
        cluster.nodes.insert(CheckedIn { node, last_seen });
    }

    fn plain(number: u8) -> Cluster {
        let nodes =
            vec![node(number, "a", "east", 1), node(number, "b", "east", 2), node(number, "c", "west", 3)];
        cluster(number, nodes, Vec::new()).unwrap()
    }

    fn present(name: &str, owner: Option<&str>, key: u8, prefix: &str) -> Present {
        let peer = Peer {
            name: name.to_owned(),
            allowed_ips: vec![prefix.parse().unwrap()],
            endpoint: None,
            persistent_keepalive: 0,
            preshared_key: None,
            public_key: PublicKey([key; 32]),
            follows: false,
        };
        Present { name: name.to_owned(), owner: owner.map(ToOwned::to_owned), peer: Some(peer) }
    }

    fn written(changes: &Changes, owner: &str) -> Vec<Present> {
        let peers = changes.create.iter().chain(&changes.update);
        let object =
            |peer| serde_json::from_value(serde_json::to_value(object(peer, owner)).unwrap()).unwrap();
        peers.map(|peer| Present::new(&object(peer))).collect()
    }

    #[test]
    fn each_location_becomes_a_peer_and_one_brings_the_services() {
        let (one, mut two) = (plain(1), plain(2));
        assert_eq!(conflicts(&one, &two), Vec::<String>::new());
        let changes = Changes::between(wanted(&one, &two), &two, "c1");
        let names: Vec<_> = changes.create.iter().map(|peer| peer.name.as_str()).collect();
        assert_eq!(names, ["c1-a", "c1-c"]);
        let services: IpNet = "10.91.0.0/16".parse().unwrap();
        let carriers: Vec<_> =
            changes.create.iter().map(|peer| peer.allowed_ips.contains(&services)).collect();
        assert_eq!(carriers, [true, false]);
        // A second run has nothing to do, and a stranger's Peer is none of its business.
        two.peers = written(&changes, "c1");
        two.peers.push(present("laptop", None, 99, "10.5.0.1/32"));
        two.peers.push(present("c3-a", Some("c3"), 98, "10.6.0.0/16"));
        assert_eq!(conflicts(&one, &two), Vec::<String>::new());
        let again = Changes::between(wanted(&one, &two), &two, "c1");
        assert_eq!((again.writes(), again.unchanged), (0, 2));
    }

    #[test]
    fn a_new_leader_replaces_the_old_ones_peer_and_services_stay_where_they_are() {
        let (one, mut two) = (plain(1), plain(2));
        two.peers = written(&Changes::between(wanted(&one, &two), &two, "c1"), "c1");
        let joined = cluster(1, vec![node(1, "b", "east", 2), node(1, "c", "west", 3)], Vec::new()).unwrap();
        let changes = Changes::between(wanted(&joined, &two), &two, "c1");
        let names = |peers: &[Peer]| peers.iter().map(|peer| peer.name.clone()).collect::<Vec<_>>();
        assert_eq!(
            (names(&changes.create), changes.delete),
            (vec!["c1-b".to_owned()], vec!["c1-a".to_owned()])
        );
        // A location that sorts before the one with the services leaves them there.
        two.peers = written(
            &Changes::between(wanted(&joined, &two), &Cluster { peers: vec![], ..two.clone() }, "c1"),
            "c1",
        );
        let services: IpNet = "10.91.0.0/16".parse().unwrap();
        let grown = cluster(
            1,
            vec![node(1, "0", "north", 4), node(1, "b", "east", 2), node(1, "c", "west", 3)],
            Vec::new(),
        );
        let with: Vec<_> = wanted(&grown.unwrap(), &two)
            .into_iter()
            .filter(|peer| peer.allowed_ips.contains(&services))
            .map(|peer| peer.name)
            .collect();
        assert_eq!(with, ["c1-b"]);
    }

    #[test]
    fn what_overlaps_is_named_with_both_objects() {
        let two = plain(2);
        let against = |change: fn(&mut Cluster)| {
            let mut one = plain(1);
            change(&mut one);
            conflicts(&one, &two).join("\n")
        };
        let pods = against(|one| {
            change(one, "a", |node| node.pod_cidrs = vec!["10.42.0.0/16".parse().unwrap()]);
        });
        assert!(
            pods.contains("10.42.0.0/16 (the pod CIDR of node a of cluster c1) overlaps 10.42.1.0/24 (the pod CIDR of node a of cluster c2)"),
            "{pods}"
        );
        let services = against(|one| one.services = vec!["10.92.7.0/24".parse().unwrap()]);
        assert!(
            services.contains("a service range of cluster c1") && services.contains("10.92.0.0/16"),
            "{services}"
        );
        let subnet = against(|one| one.mesh.subnet = "10.202.0.0/16".parse().unwrap());
        assert_eq!(subnet.lines().count(), 1, "equal ranges are named once: {subnet}");
        assert!(subnet.contains("the WireGuard subnet of cluster c2"), "{subnet}");
        let vpn = against(|one| one.peers.push(present("laptop", None, 99, "10.42.3.9/32")));
        assert!(vpn.contains("Peer laptop of cluster c1"), "{vpn}");
        let printer = against(|one| {
            change(one, "a", |node| node.allowed_location_ips = vec!["10.2.0.0/24".parse().unwrap()]);
        });
        assert!(printer.contains("allowed-location-ip of node a of cluster c1"), "{printer}");
    }

    #[test]
    fn the_same_printer_network_in_both_clusters_is_nobodys_business() {
        let (mut one, mut two) = (plain(1), plain(2));
        for cluster in [&mut one, &mut two] {
            change(cluster, "a", |node| node.allowed_location_ips = vec!["192.168.1.0/24".parse().unwrap()]);
        }
        assert_eq!(conflicts(&one, &two), Vec::<String>::new());
    }

    #[test]
    fn duplicate_keys_and_taken_names_are_named() {
        let (mut one, mut two) = (plain(1), plain(2));
        change(&mut one, "b", |node| node.key = Some(PublicKey([33; 32])));
        let text = conflicts(&one, &two).join("\n");
        assert!(
            text.contains("node b of cluster c1 and node a of cluster c2 have the same public key"),
            "{text}"
        );
        one = plain(1);
        two.peers.push(present("by-hand", None, 17, "10.77.0.0/16"));
        let text = conflicts(&one, &two).join("\n");
        assert!(text.contains("node a of cluster c1 and Peer by-hand of cluster c2"), "{text}");
        two.peers = vec![present("c1-c", None, 99, "10.77.0.0/16")];
        let text = conflicts(&one, &two).join("\n");
        assert!(text.contains("Peer c1-c of cluster c2 was not made by"), "{text}");
    }

    #[test]
    fn a_clock_that_is_ahead_takes_no_peer_from_a_location_that_is_alive() {
        let (one, mut two) = (plain(1), plain(2));
        two.peers = written(&Changes::between(wanted(&one, &two), &two, "c1"), "c1");
        // Nodes check in every 30 s, each at its own time.
        let nodes = [("a", "east", 1, 2), ("b", "east", 2, 12), ("c", "west", 3, 29)];
        let nodes = nodes.map(|(name, location, number, age)| CheckedIn {
            node: node(1, name, location, number),
            last_seen: NOW - age,
        });
        let snapshot = Snapshot { nodes: nodes.into_iter().collect(), ..Snapshot::default() };
        for ahead in [0, 20, 45, 57] {
            let services = one.services.clone();
            let now = NOW + ahead;
            let one =
                Cluster::new("c1", &snapshot, Granularity::Location, services, Vec::new(), now).unwrap();
            let changes = Changes::between(wanted(&one, &two), &two, "c1");
            assert_eq!(changes, Changes { unchanged: 2, ..Changes::default() }, "{ahead} s");
        }
    }

    #[test]
    fn a_cluster_of_which_nothing_is_known_is_refused() {
        let late = checked_in(1, vec![node(1, "a", "east", 1)], Vec::new(), NOW - 61);
        assert!(matches!(late, Err(Unfit::NobodyReady(_))));
        let silent = Node { wireguard_ip: None, ..node(1, "a", "east", 1) };
        assert!(matches!(cluster(1, vec![silent], Vec::new()), Err(Unfit::NoSubnet(_))));
        let other = Node { wireguard_ip: "10.9.0.1/16".parse().ok(), ..node(1, "b", "west", 2) };
        assert!(matches!(
            cluster(1, vec![node(1, "a", "east", 1), other], Vec::new()),
            Err(Unfit::Subnets(..))
        ));
    }
}

//! Whether each VPN peer is part of the mesh, and if not, why not.

use std::{
    cell::LazyCell,
    collections::{BTreeMap, BTreeSet, HashMap, hash_map::Entry},
};

use ipnet::IpNet;

use super::{
    Mesh, Peer,
    prefix_owners::{PrefixOwner, PrefixOwners},
};
use crate::objects::{ObjectRef, Snapshot};

/// Whether the mesh uses a Peer object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerAcceptance {
    /// All of it is used.
    Accepted,
    /// Some of its prefixes belong to another peer or to a node; the sentence says which.
    Partly(String),
    /// It attracts packets for pods; the sentence says which, and what else of it is not used.
    Overlaps(String),
    /// It has addresses that a location may get one day; the sentence says which, and what else of it is not used.
    InSubnet(String),
    /// Nothing of it is used.
    Refused {
        /// One word, for the `reason` of a condition.
        reason: &'static str,
        /// Why, in a sentence.
        why: String,
    },
}

impl PeerAcceptance {
    /// Whether leaders accept the peer.
    pub const fn is_accepted(&self) -> bool {
        !matches!(self, Self::Refused { .. })
    }

    /// One word, for the `reason` of a condition.
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::Accepted => "Accepted",
            Self::Partly(_) => "PrefixesOfAnother",
            Self::Overlaps(_) => "OverlapsNodes",
            Self::InSubnet(_) => "InSubnet",
            Self::Refused { reason, .. } => reason,
        }
    }

    /// A sentence for people.
    pub fn message(&self) -> String {
        match self {
            Self::Accepted => "all leaders of the mesh accept this peer".to_owned(),
            Self::Partly(why) | Self::Overlaps(why) | Self::InSubnet(why) => why.clone(),
            Self::Refused { why, .. } => why.clone(),
        }
    }
}

/// Acceptances by the names of the peers.
pub type PeerAcceptances = BTreeMap<String, PeerAcceptance>;

/// Leaves out of a mesh the peers that leaders refuse, and the prefixes of the others that nodes keep. Returns who
/// loses something, with the reason.
pub fn leave_out_unused(mesh: &mut Mesh, snapshot: &Snapshot) -> Vec<(String, String)> {
    let acceptances = peer_acceptances(mesh, snapshot);
    let owners = PrefixOwners::new(mesh);
    let is_kept = |prefix: &IpNet| owners.find(*prefix).is_some_and(|owner| owner.keeps());
    let mut used = mesh.peers.clone();
    used.retain(|peer| acceptances.get(&peer.name).is_none_or(PeerAcceptance::is_accepted));
    for peer in &mut used {
        peer.allowed_ips.retain(|prefix| !is_kept(prefix));
    }
    mesh.peers = used;
    let lost = |acceptance: &PeerAcceptance| match acceptance {
        PeerAcceptance::Refused { why, .. } => Some(format!("is left out: {why}")),
        PeerAcceptance::Partly(why) => Some(format!("is used in part: {why}")),
        _ => None,
    };
    acceptances.iter().filter_map(|(name, acceptance)| Some((name.clone(), lost(acceptance)?))).collect()
}

/// All peers, as leaders treat them: a key or a prefix that two claim belongs to a node, or else to the first of
/// them.
pub fn peer_acceptances(mesh: &Mesh, snapshot: &Snapshot) -> PeerAcceptances {
    in_order(mesh, snapshot).into_iter().map(|(name, acceptance)| (name.to_owned(), acceptance)).collect()
}

/// As [`peer_acceptances`], sorted by name and without copies of the names: there may be many, and
/// mostly one has changed.
pub(super) fn in_order<'a>(mesh: &'a Mesh, snapshot: &'a Snapshot) -> Vec<(&'a str, PeerAcceptance)> {
    let locations = mesh.segments.iter().map(|segment| (segment.key, ("", segment.location.as_str())));
    let mut keys: HashMap<_, _> = locations.collect();
    keys.reserve(snapshot.peers.len());
    let owners = LazyCell::new(|| PrefixOwners::new(mesh));
    let mut used = mesh.peers.iter().peekable();
    let mut acceptances = Vec::with_capacity(snapshot.peers.len());
    for (name, peer) in snapshot.peers.iter() {
        // Both are sorted by name.
        while used.next_if(|used| used.name < *name).is_some() {}
        let used = used.peek().filter(|used| used.name == *name);
        let acceptance = match keys.entry(peer.public_key) {
            Entry::Occupied(owner) => {
                let (kind, owner) = owner.get();
                let why = format!(
                    "spec.publicKey belongs to {kind}{owner} already; give this peer a key of its own"
                );
                PeerAcceptance::Refused { reason: "KeyOfAnother", why }
            }
            Entry::Vacant(entry) => {
                entry.insert(("peer ", name.as_str()));
                by_prefixes(peer, used.map_or(&[], |used| &used.allowed_ips), &owners)
            }
        };
        acceptances.push((name.as_str(), acceptance));
    }
    let invalid = snapshot.problems.iter().filter_map(|(object, why)| {
        let ObjectRef::Peer(name) = object else { return None };
        let refused = PeerAcceptance::Refused { reason: "InvalidSpec", why: why.clone() };
        (!snapshot.peers.contains_key(name)).then_some((name.as_str(), refused))
    });
    let valid = acceptances.len();
    acceptances.extend(invalid);
    if acceptances.len() > valid {
        acceptances.sort_unstable_by_key(|(name, _)| *name);
    }
    acceptances
}

/// `used`: those of its prefixes that belong to no other peer, in its order.
fn by_prefixes(peer: &Peer, used: &[IpNet], owners: &PrefixOwners<'_>) -> PeerAcceptance {
    let owned: Vec<PrefixOwner> = used.iter().filter_map(|prefix| owners.find(*prefix)).collect();
    if owned.is_empty() && peer.allowed_ips.iter().map(IpNet::trunc).eq(used.iter().copied()) {
        return PeerAcceptance::Accepted;
    }
    let known: BTreeSet<IpNet> = used.iter().copied().collect();
    let lost = peer.allowed_ips.iter().filter(|prefix| !known.contains(&prefix.trunc()));
    let lost: Vec<_> = lost.map(ToString::to_string).collect();
    let mut why = Vec::new();
    if !lost.is_empty() {
        why.push(format!("{} belong to a peer that comes first by name", lost.join(", ")));
    }
    why.extend(owned.iter().map(|owner| format!("{owner}: {}", owner.consequence())));
    if why.is_empty() {
        return PeerAcceptance::Accepted;
    }
    let why = format!("spec.allowedIPs: {}", why.join("; "));
    let kept = owned.iter().filter(|owner| owner.keeps()).count();
    match () {
        () if kept == used.len() => PeerAcceptance::Refused { reason: "PrefixesOfAnother", why },
        () if owned.iter().any(PrefixOwner::is_deprived) => PeerAcceptance::Overlaps(why),
        () if kept < owned.len() => PeerAcceptance::InSubnet(why),
        () => PeerAcceptance::Partly(why),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{settings::Granularity, topology::Node, wireguard::key::PublicKey};

    fn peer(name: &str, key: u8, allowed_ips: &[&str]) -> (String, Peer) {
        let peer = Peer {
            name: name.to_owned(),
            allowed_ips: allowed_ips.iter().map(|prefix| prefix.parse().unwrap()).collect(),
            endpoint: None,
            persistent_keepalive: 0,
            preshared_key: None,
            public_key: PublicKey([key; 32]),
            follows: false,
        };
        (name.to_owned(), peer)
    }

    #[test]
    fn each_peer_is_accepted_or_refused_with_a_reason() {
        let node = Node {
            name: "n1".to_owned(),
            endpoint: "192.0.2.1:51820".parse().ok(),
            key: Some(PublicKey([1; 32])),
            internal_ip: "10.1.0.1/24".parse().ok(),
            pod_cidrs: vec!["10.42.0.0/24".parse().unwrap()],
            ..Node::default()
        };
        let peers = BTreeMap::from([
            peer("a", 2, &["10.5.0.1/32"]),
            peer("b", 3, &["10.5.0.1/32", "10.5.0.2/32"]),
            peer("c", 4, &["10.5.0.1/32"]),
            peer("d", 2, &["10.5.0.4/32"]),
            peer("e", 1, &["10.5.0.5/32"]),
            peer("g", 5, &["10.42.0.7/32", "10.5.0.2/32", "10.5.0.7/32"]),
            peer("h", 6, &["10.1.0.1/32", "10.5.0.8/32"]),
            peer("i", 7, &["10.1.0.1/32", "10.42.0.0/24"]),
            peer("j", 8, &["10.4.0.9/32"]),
            peer("k", 9, &["0.0.0.0/0", "10.42.0.0/16"]),
        ]);
        let mesh = Mesh::new([&node], &peers, Granularity::Location, "10.4.0.0/16".parse().unwrap());
        let problems = BTreeMap::from([
            (ObjectRef::peer("f"), "no key".to_owned()),
            (ObjectRef::node("f"), "no".to_owned()),
        ]);
        let snapshot = Snapshot { peers: Arc::new(peers), problems, ..Snapshot::default() };
        let acceptances = peer_acceptances(&mesh, &snapshot);
        let reasons: Vec<_> = acceptances
            .iter()
            .map(|(name, acceptance)| (name.as_str(), acceptance.is_accepted(), acceptance.reason()))
            .collect();
        assert_eq!(
            reasons,
            [
                ("a", true, "Accepted"),
                ("b", true, "PrefixesOfAnother"),
                ("c", false, "PrefixesOfAnother"),
                ("d", false, "KeyOfAnother"),
                ("e", false, "KeyOfAnother"),
                ("f", false, "InvalidSpec"),
                ("g", true, "OverlapsNodes"),
                ("h", true, "PrefixesOfAnother"),
                ("i", false, "PrefixesOfAnother"),
                ("j", true, "InSubnet"),
                ("k", true, "Accepted"),
            ]
        );
        assert!(acceptances["b"].message().contains("10.5.0.1/32"), "{}", acceptances["b"].message());
        assert!(!acceptances["b"].message().contains("10.5.0.2/32"), "{}", acceptances["b"].message());
        assert!(acceptances["d"].message().contains("peer a"), "{}", acceptances["d"].message());
        assert!(acceptances["e"].message().contains("location:"), "{}", acceptances["e"].message());
        assert_eq!(
            acceptances["g"].message(),
            "spec.allowedIPs: 10.5.0.2/32 belong to a peer that comes first by name; 10.42.0.7/32 lies in 10.42.0.0/24, \
             the pod CIDR of node n1: packets for it go to this peer instead"
        );
        assert_eq!(
            acceptances["h"].message(),
            "spec.allowedIPs: 10.1.0.1/32 is the private address of node n1: packets for it do not go to this peer"
        );
    }
}

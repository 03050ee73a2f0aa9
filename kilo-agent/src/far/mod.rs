//! The far side of failover: which gateway of another location carries what, as gateways claim it. For
//! agents, and for machines that have all gateways as VPN peers ([`follow`]).

pub mod follow;
mod refusal;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv6Addr},
};

use ipnet::IpNet;
use kilo_common::signal::Body;
use kilo_core::{
    signal_id,
    topology::{ActingLocation, Member, Mesh, Segment},
    wireguard::{DeviceState, WireguardPlan, key::PublicKey},
};
pub use kilo_failover::far::{SEED, SEEDED};
use kilo_failover::{
    Far, MS, Micros, NodeId, Params, SEC, Signal, Term,
    far::{Owners, Refused, Step},
};
pub use refusal::Refusal;

/// Time between the two probes of an old leader.
pub const APART: Micros = 20 * MS;
/// How long a probe waits for an answer.
pub const PATIENCE: Micros = 200 * MS;

/// Interval at which a following VPN peer announces itself.
pub const HELLO: Micros = 10 * SEC;

/// Another location: its gateways, and which of them has which prefixes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FarLocation {
    /// Its name, for logs.
    pub name: String,
    /// Address that path probes are sent to.
    pub wireguard_ip: Option<IpAddr>,
    /// Gateways in Kilo's order.
    pub gateways: Vec<FarGateway>,
    /// Index of the acting leader.
    pub acting: usize,
    /// Active leaders, if there are several.
    pub active: Vec<NodeId>,
    /// Prefixes by member.
    pub members: BTreeMap<NodeId, Vec<IpNet>>,
    /// Prefixes that belong to no single member.
    pub shared: Vec<IpNet>,
    /// The gateway that the device has for each member's prefixes.
    pub held: BTreeMap<NodeId, NodeId>,
    /// The acting leader and its term, if the mesh knows one.
    pub written: Option<(Term, NodeId)>,
}

/// A gateway of another location.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FarGateway {
    /// Node id.
    pub id: NodeId,
    /// Public key, which identifies its WireGuard peer.
    pub key: PublicKey,
    /// Address inside tunnels.
    pub control: Ipv6Addr,
    /// First address of its first pod CIDR of each family, IPv4 first, which its kernel answers probes to.
    pub pods: [Option<IpAddr>; 2],
}

impl FarGateway {
    /// The gateway with this key, of whose pods nothing is known.
    pub fn with(key: PublicKey) -> Self {
        Self { id: signal_id::node(&key), key, control: signal_id::control_address(&key), pods: [None; 2] }
    }
}

/// The first address of the first pod CIDR of each family, if its last byte is zero.
fn pods(member: &Member) -> [Option<IpAddr>; 2] {
    let first = |is_ipv4| {
        let mut networks = member.node.pod_cidrs.iter().map(IpNet::network);
        networks.find(|address| address.is_ipv4() == is_ipv4).filter(|address| ends_in_zero(*address))
    };
    [first(true), first(false)]
}

const fn ends_in_zero(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => matches!(v4.octets(), [.., 0]),
        IpAddr::V6(v6) => matches!(v6.octets(), [.., 0]),
    }
}

/// A member's pod CIDRs and private address.
fn prefixes_of(member: &Member) -> impl Iterator<Item = IpNet> + '_ {
    member.node.pod_cidrs.iter().map(IpNet::trunc).chain(member.private_ip().map(IpNet::from))
}

/// A node's id; `None` without a key.
pub fn id(member: &Member) -> Option<NodeId> {
    Some(signal_id::node(&member.node.key?))
}

/// Which of a location's gateways the device has for each member's prefixes.
pub fn held(segment: &Segment, gateways: &[usize], state: &DeviceState) -> BTreeMap<NodeId, NodeId> {
    let of_gateways = || gateways.iter().filter_map(|at| segment.members[*at].node.key);
    let held_by = |member: &Member| {
        of_gateways().find(|key| {
            let peer = state.peers.get(key);
            peer.is_some_and(|peer| prefixes_of(member).any(|prefix| peer.allowed_ips.contains(&prefix)))
        })
    };
    let members = segment.members.iter();
    members.filter_map(|member| Some((id(member)?, signal_id::node(&held_by(member)?)))).collect()
}

/// A location as planned for this host's device, with its current state.
pub fn far_location(
    mesh: &Mesh,
    plan: &WireguardPlan,
    state: &DeviceState,
    at: usize,
    segment: &Segment,
) -> FarLocation {
    let gateways = mesh.gateways_of(at);
    let of_gateways: Vec<FarGateway> = gateways
        .order
        .iter()
        .filter_map(|index| segment.members.get(*index))
        .filter_map(|member| Some((member, member.node.key?)))
        .map(|(member, key)| FarGateway { pods: pods(member), ..FarGateway::with(key) })
        .collect();
    // Only what the plan gives to one of them: a prefix that two locations claim belongs to one of them.
    let peers = of_gateways.iter().filter_map(|gateway| plan.peers.get(&gateway.key));
    let planned = peers.flat_map(|peer| peer.allowed_ips.iter().copied());
    // A gateway's control address always stays with its own peer.
    let planned: BTreeSet<IpNet> = planned.filter(|prefix| !signal_id::is_control(prefix)).collect();
    let is_planned = |prefix: &IpNet| planned.contains(prefix);
    let members = segment.members.iter();
    let members =
        members.filter_map(|member| Some((id(member)?, prefixes_of(member).filter(is_planned).collect())));
    let members = members.collect();
    let shared = segment.wireguard_ip.map(IpNet::from).into_iter();
    let shared = shared.chain(segment.allowed_location_ips.iter().map(IpNet::trunc));
    let acting = of_gateways.get(gateways.acting).map(|gateway| (gateways.term, gateway.id));
    let active = gateways.homes.iter().flat_map(|homes| &homes.active);
    FarLocation {
        name: segment.location.clone(),
        wireguard_ip: segment.wireguard_ip,
        acting: gateways.acting,
        active: active.filter_map(|at| id(segment.members.get(*at)?)).collect(),
        members,
        shared: shared.filter(|prefix| planned.contains(prefix)).collect(),
        held: held(segment, &gateways.order, state),
        written: acting.filter(|(term, _)| term.count() > 0),
        gateways: of_gateways,
    }
}

/// Takes over the set of locations, and their nodes. Returns whether any is new: it has then the owners that
/// the device has, until they are to be forgotten ([`SEEDED`]).
pub fn set_locations(fars: &mut BTreeMap<Far, Owners>, locations: &BTreeMap<Far, FarLocation>) -> bool {
    fars.retain(|far, _| locations.contains_key(far));
    let mut is_any_new = false;
    for (far, location) in locations {
        let Some(leader) = location.gateways.get(location.acting).map(|gateway| gateway.id) else {
            continue;
        };
        let acting = fars.entry(*far).or_insert_with(|| {
            is_any_new = true;
            let mut acting = Owners::new([], leader);
            for (member, gateway) in &location.held {
                acting.seed(*member, (SEED, *gateway));
            }
            acting
        });
        let members: Vec<NodeId> = location.members.keys().copied().collect();
        acting.set_members(&members);
        let gateways: Vec<NodeId> = location.gateways.iter().map(|gateway| gateway.id).collect();
        acting.set_gateways(&gateways);
        acting.set_default_leader(leader);
        if let Some((term, gateway)) = location.written {
            acting.record_written_term(term, gateway);
        }
    }
    is_any_new
}

/// Result of a CLAIM or END.
pub struct Claimed {
    /// How many nodes of another location it names.
    pub foreign: usize,
    /// The resulting step; `None` when it names nodes of another location, but none of this one.
    pub step: Result<Option<Step>, Refusal>,
}

/// Evaluates a CLAIM or END of a gateway, which WireGuard has authenticated. `names`: all known nodes; `me`,
/// `now`: this node, and the time.
pub fn claimed(
    params: &Params,
    (location, acting): (&FarLocation, &mut Owners),
    (far, from): (Far, NodeId),
    signal: &Signal,
    names: &BTreeMap<NodeId, String>,
    (me, now): (NodeId, Micros),
) -> Claimed {
    if signal.location != far {
        return Claimed { foreign: 0, step: Err(Refusal::Location) };
    }
    let names_any =
        |signal: &Signal| !matches!(&signal.body, Body::Claim { members, .. } if members.is_empty());
    // A node that has just joined may be claimed before its object is known here.
    let (known, foreign) = known_only(signal, location, names);
    if foreign > 0 && !names_any(&known) {
        return Claimed { foreign, step: Ok(None) };
    }
    let gateways: Vec<NodeId> = location.gateways.iter().map(|gateway| gateway.id).collect();
    let leader = gateways.get(location.acting).copied().filter(|_| names_any(signal));
    let led_by = (&gateways[..], leader);
    let step =
        acting.claimed_of_led(params, from, &known, led_by, (me, now)).map(Some).map_err(|why| match why {
            Refused::Kind | Refused::Gateway => Refusal::Gateway,
            Refused::Member => Refusal::Member,
            Refused::Leap => Refusal::Leap,
            Refused::Rate => Refusal::Rate,
        });
    Claimed { foreign, step }
}

/// Prefixes of these members, and the shared ones if requested.
pub fn prefixes(location: &FarLocation, members: &[NodeId], shared: bool) -> Vec<IpNet> {
    let of_members = members.iter().filter_map(|member| location.members.get(member)).flatten();
    of_members.chain(location.shared.iter().filter(|_| shared)).copied().collect()
}

/// The acting leaders and members of other locations, for plans.
pub fn known(fars: &BTreeMap<Far, Owners>) -> BTreeMap<u64, ActingLocation> {
    let of = |(far, known): (&Far, &Owners)| {
        let members =
            known.owners().filter(|(_, (term, gateway))| *term > Term::NONE && *gateway != 0).collect();
        let leader = Some(known.shared_since()).filter(|(term, _)| *term > Term::NONE);
        (*far, ActingLocation { leader, members })
    };
    fars.iter().map(of).collect()
}

/// The signal without members that are unknown here, so that the others need not wait; and how many of the
/// removed ones are nodes of another location, which this gateway must not claim.
fn known_only(signal: &Signal, location: &FarLocation, names: &BTreeMap<NodeId, String>) -> (Signal, usize) {
    let mut signal = signal.clone();
    let mut foreign = 0;
    if let Body::Claim { members, .. } = &mut signal.body {
        let is_foreign =
            |member: &&NodeId| !location.members.contains_key(*member) && names.contains_key(*member);
        foreign = members.iter().filter(is_foreign).count();
        members.retain(|member| location.members.contains_key(member));
    }
    (signal, foreign)
}

#[cfg(test)]
mod tests {
    use kilo_common::signal::{Kind, Shared};

    use super::*;

    /// `A1` leads by Kilo's rule, but `A2` since `A1` was cut off from the LAN; this agent started later.
    const A1: NodeId = 1 << 48;
    const A2: NodeId = 2 << 48;
    const A3: NodeId = 3 << 48;
    const FAR: Far = 7;

    fn led_by_a2(held: impl IntoIterator<Item = (NodeId, NodeId)>) -> FarLocation {
        let gateway = |id| FarGateway { id, ..FarGateway::with(PublicKey([0; 32])) };
        FarLocation {
            gateways: [A1, A2, A3].map(gateway).into(),
            acting: 1,
            written: Some((Term::NONE.next(A2), A2)),
            members: [A1, A2, A3].map(|id| (id, Vec::new())).into(),
            held: held.into_iter().collect(),
            ..FarLocation::default()
        }
    }

    fn claim(from: NodeId, members: &[NodeId]) -> Signal {
        let body =
            Body::Claim { gateway: from, shared: Shared::Move, part: (0, 1), members: members.to_vec() };
        Signal { kind: Kind::Claim, nonce: 1, term: Term::NONE.next(from), sender: from, location: FAR, body }
    }

    /// The owners after that signal, and whether it was accepted.
    fn after(location: &FarLocation, signal: &Signal) -> (BTreeMap<Far, Owners>, bool) {
        let names = [A1, A2, A3].map(|id| (id, format!("n{id}"))).into();
        let mut fars = BTreeMap::new();
        set_locations(&mut fars, &BTreeMap::from([(FAR, location.clone())]));
        let pair = (location, fars.get_mut(&FAR).unwrap());
        let step = claimed(&Params::default(), pair, (FAR, signal.sender), signal, &names, (99, 0)).step;
        (fars, step.is_ok_and(|step| step.is_some()))
    }

    /// The owner of `A1`'s prefixes after `A2` has sent these claims at these seconds, in a location that
    /// also has `A3` and 200 members; the device had nothing.
    fn of_many(said: &[(Micros, (u16, u16), &[NodeId])]) -> NodeId {
        let mut location = led_by_a2([]);
        location.members.extend((0..200).map(|member| (member, Vec::new())));
        let names = location.members.keys().map(|id| (*id, format!("n{id}"))).collect();
        let mut fars = BTreeMap::new();
        set_locations(&mut fars, &BTreeMap::from([(FAR, location.clone())]));
        for (second, which, members) in said {
            let mut signal = claim(A2, members);
            if let Body::Claim { part, .. } = &mut signal.body {
                *part = *which;
            }
            let pair = (&location, fars.get_mut(&FAR).unwrap());
            let now = (99, second * SEC);
            assert!(claimed(&Params::default(), pair, (FAR, A2), &signal, &names, now).step.is_ok());
        }
        known(&fars)[&FAR].members[&A1].1
    }

    /// The first node led until the others joined, and one of them adopted a member meanwhile.
    #[test]
    fn what_nobody_has_claimed_follows_kilos_order_until_somebody_leads_in_a_term() {
        const MEMBER: NodeId = 4 << 48;
        let names = [A1, A2, A3, MEMBER].map(|id| (id, format!("n{id}"))).into();
        let by_order = |gateways: &[NodeId]| {
            let mut location = led_by_a2([]);
            location.members.insert(MEMBER, Vec::new());
            location.gateways.retain(|gateway| gateways.contains(&gateway.id));
            (location.acting, location.written) = (0, None);
            location
        };
        let has = |fars: &BTreeMap<Far, Owners>, member| known(fars)[&FAR].members[&member].1;
        for (shared, owner) in [(Shared::Stay, A1), (Shared::Move, A2)] {
            let mut fars = BTreeMap::new();
            let early = by_order(&[A2, A3]);
            set_locations(&mut fars, &BTreeMap::from([(FAR, early.clone())]));
            let mut adopts = claim(A3, &[A3]);
            let Body::Claim { shared: of_none, .. } = &mut adopts.body else { return };
            *of_none = shared;
            let pair = (&early, fars.get_mut(&FAR).unwrap());
            assert!(claimed(&Params::default(), pair, (FAR, A3), &adopts, &names, (99, 0)).step.is_ok());
            assert_eq!((has(&fars, MEMBER), has(&fars, A3)), (A2, A3));
            set_locations(&mut fars, &BTreeMap::from([(FAR, by_order(&[A1, A2, A3]))]));
            assert_eq!((has(&fars, MEMBER), has(&fars, A3)), (owner, A3), "{shared:?}");
        }
    }

    #[test]
    fn a_location_that_reappears_has_owners_to_be_forgotten_again() {
        let there = BTreeMap::from([(FAR, led_by_a2([(A1, A2)]))]);
        let mut fars = BTreeMap::new();
        for (locations, is_new) in
            [(&there, true), (&there, false), (&BTreeMap::new(), false), (&there, true)]
        {
            assert_eq!(set_locations(&mut fars, locations), is_new);
        }
        assert_eq!(known(&fars)[&FAR].members[&A1].1, A2);
        fars.values_mut().for_each(|acting| acting.forget(SEED));
        assert!(!known(&fars)[&FAR].members.contains_key(&A1));
    }

    /// Members that this node confirmed before its host rebooted are not named in the next CLAIM.
    #[test]
    fn who_is_not_named_in_what_is_left_of_a_claim_stays_with_the_acting_leader() {
        let left = |second| (second, (0, 1), [3].as_slice());
        assert_eq!(of_many(&[left(0)]), A2);
        assert_eq!(of_many(&[left(0), (9, (0, 2), &[1, 2, A3]), (9, (1, 2), &[A1]), left(20)]), A2);
    }

    #[test]
    fn a_leader_that_a_large_location_has_lost_keeps_its_own_prefixes() {
        let parts = |second| [(second, (0, 2), [1, 2, A3].as_slice()), (second, (1, 2), &[3, A2])];
        let said: Vec<_> = [0, 10].into_iter().flat_map(parts).collect();
        assert_eq!(of_many(&said), A2, "a part may have been lost");
        let said: Vec<_> = [0, 10, 20].into_iter().flat_map(parts).collect();
        assert_eq!(of_many(&said), A1);
    }

    #[test]
    fn a_leader_that_its_location_has_lost_keeps_its_own_prefixes() {
        for (seed, from, members, owner) in [
            (None, A2, [A2, A3].as_slice(), A1),
            (Some(A1), A2, &[A2, A3], A1),
            // As in the device, until that is forgotten: before then A2 claims everything again.
            (Some(A2), A2, &[A2, A3], A2),
            (None, A2, &[A1, A2, A3], A2),
            (Some(A1), A2, &[A1, A2, A3], A2),
            // Claims of another gateway do not show who is cut off.
            (Some(A2), A3, &[A3], A2),
            (None, A3, &[A3], A2),
            (Some(A1), A3, &[A3], A1),
            // What A2 does not claim may belong to that one.
            (Some(A3), A2, &[A2], A3),
        ] {
            let location = led_by_a2(seed.map(|gateway| (A1, gateway)));
            let (mut fars, counts) = after(&location, &claim(from, members));
            assert!(counts);
            let seeded = known(&fars)[&FAR].members[&A1].1;
            assert_eq!(seeded, owner, "{seed:?} {from} {members:?}");
            // Independent of the device's former state, which is forgotten after a while.
            fars.values_mut().for_each(|acting| acting.forget(SEED));
            let members_known = &known(&fars)[&FAR].members;
            let is_sure = members.contains(&A1) || owner == A1 && from == A2 || seed.is_none();
            let later = members_known.get(&A1).map(|known| known.1);
            assert_eq!(later, is_sure.then_some(owner), "{seed:?} {from} {members:?}");
            assert!(members.iter().all(|member| *member == A1 || members_known[member].1 == from));
        }
    }

    #[test]
    fn what_is_refused_or_not_all_of_a_claim_takes_nothing_from_the_acting_leader() {
        let all = [A1, A2, A3].map(|member| (member, A2));
        let location = led_by_a2(all);
        let mut before = BTreeMap::new();
        set_locations(&mut before, &BTreeMap::from([(FAR, location.clone())]));
        let mut leap = claim(A2, &[A2, A3]);
        leap.term = Term::from_bits(u64::MAX);
        let (refused, counts) = after(&location, &leap);
        assert!(!counts);
        assert_eq!(known(&refused), known(&before));
        let mut part = claim(A2, &[A2, A3]);
        let Body::Claim { part: which, .. } = &mut part.body else { return };
        *which = (0, 2);
        let end = Signal { kind: Kind::End, ..claim(A2, &[A2, A3]) };
        for signal in [leap, part, end] {
            for location in [&location, &led_by_a2([])] {
                assert_eq!(known(&after(location, &signal).0)[&FAR].members[&A1].1, A2, "{signal:?}");
            }
        }
    }

    #[test]
    fn nodes_of_another_location_are_counted_and_new_ones_are_not() {
        const OWN: NodeId = 1;
        const FOREIGN: NodeId = 2;
        const NEW: NodeId = 3;
        let location = FarLocation { members: BTreeMap::from([(OWN, Vec::new())]), ..FarLocation::default() };
        let names = [OWN, FOREIGN].map(|id| (id, format!("n{id}"))).into();
        for (claims, keeps, foreign) in [
            (vec![OWN], vec![OWN], 0),
            (vec![OWN, NEW], vec![OWN], 0),
            (vec![FOREIGN, OWN], vec![OWN], 1),
            (vec![FOREIGN, NEW], vec![], 1),
        ] {
            let body = Body::Claim { gateway: 9, shared: Shared::Stay, part: (0, 1), members: claims };
            let signal =
                Signal { kind: Kind::Claim, nonce: 1, term: Term::NONE, sender: 9, location: 7, body };
            let (signal, counted) = known_only(&signal, &location, &names);
            assert!(matches!(&signal.body, Body::Claim { members, .. } if *members == keeps));
            assert_eq!(counted, foreign, "{keeps:?}");
        }
    }
}

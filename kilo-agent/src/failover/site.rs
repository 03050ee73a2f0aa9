//! The mesh as failover sees it: this location, the address and hop id of each node, and which gateway has
//! which prefixes of other locations. Each reconcile makes one, from the mesh and the plan.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv6Addr},
};

use kilo_common::{
    lead::{self, Term},
    maps::HOP_REMOTE,
    siphash,
};
use kilo_core::{
    plan::{HopIds, HostPlan},
    signal_id,
    topology::{Acting, ActingLocation, Gateways, Leaving, Member, Mesh, Segment},
    wireguard::{DeviceState, key::PublicKey},
};
use kilo_failover::{Cause, Far, NodeId, OwnLocation, Several};
use kilo_host::{net::link_down::Needed, wireguard::Device};

use crate::far::{FarLocation, far_location, held, id};

/// Everything the thread needs to know.
#[derive(Clone, Debug)]
pub struct Site {
    /// This location.
    pub own_location: OwnLocation,
    /// Private address of this node.
    pub private: IpAddr,
    /// Address of this node inside tunnels.
    pub control: Ipv6Addr,
    /// Other nodes of the location that support signals, and in any case the leader.
    pub nodes: BTreeMap<NodeId, Neighbour>,
    /// Other locations whose leaders support signals.
    pub fars: BTreeMap<Far, FarLocation>,
    /// VPN peers that follow claims: ids by control address.
    pub followers: BTreeMap<Ipv6Addr, NodeId>,
    /// Names of all nodes, for logs and the status.
    pub names: BTreeMap<NodeId, String>,
    /// The leader by Kilo's rule.
    pub leader: NodeId,
    /// Whether some nodes of the mesh have no failover and follow Kilo's rule.
    pub is_mixed: bool,
    /// The term that this node published before a restart as the one it leads in.
    pub written: Option<Term>,
    /// The WireGuard device.
    pub device: Device,
    /// Interfaces and addresses that this node needs to lead.
    pub needed: Vec<Needed>,
}

/// Another node of the location.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Neighbour {
    /// Private address.
    pub address: IpAddr,
    /// The node's hop id in this host's tables.
    pub hop: u16,
    /// Key that signals between it and this node are signed with.
    pub key: siphash::Key,
    /// Whether it may lead this node.
    pub is_gateway: bool,
}

/// Inputs of a site.
pub struct Facts<'a> {
    /// The mesh, with its gateways.
    pub mesh: &'a Mesh,
    /// Name of this node.
    pub node: &'a str,
    /// Hop ids of the location's nodes.
    pub hops: &'a HopIds,
    /// The plan being applied.
    pub plan: &'a HostPlan,
    /// The WireGuard device's state before the plan.
    pub state: &'a DeviceState,
    /// The WireGuard device.
    pub device: &'a Device,
    /// The interface of the default route.
    pub uplink: Option<u32>,
    /// Pairwise keys, by the nodes' public keys.
    pub keys: &'a BTreeMap<PublicKey, siphash::Key>,
}

const fn cause(leaving: Leaving) -> Cause {
    match leaving {
        Leaving::Cordoned => Cause::Cordoned,
        Leaving::Removed => Cause::Removed,
        Leaving::ShutsDown => Cause::ShutsDown,
    }
}

impl Site {
    /// `None` when the node is not in the mesh, or has no private address or key; or when the location has no
    /// gateway.
    pub fn of(facts: &Facts<'_>) -> Option<Self> {
        let Facts { mesh, node, .. } = *facts;
        let (index, position) = mesh.find(node)?;
        let segment = &mesh.segments[index];
        let own = &segment.members[position];
        let (key, private) = (own.node.key?, own.private_ip()?);
        let gateways = mesh.gateways_of(index);
        let me = signal_id::node(&key);
        let ids: Vec<NodeId> = gateways.order.iter().filter_map(|at| id(&segment.members[*at])).collect();
        let (mut nodes, mut cookies) = (BTreeMap::new(), BTreeMap::new());
        let mut all = Vec::new();
        for (at, member) in segment.members.iter().enumerate() {
            let Some(member_id) = id(member) else { continue };
            if at == position {
                all.push(me);
                continue;
            }
            let is_gateway = ids.contains(&member_id);
            let hop = facts.hops.get(member.name()).and_then(|hop| u16::try_from(hop).ok());
            let (Some(address), Some(hop), Some(key)) = (member.private_ip(), hop, member.node.key) else {
                continue;
            };
            let Some(key) = facts.keys.get(&key) else { continue };
            if member.node.is_capable() || is_gateway {
                nodes.insert(member_id, Neighbour { address, hop, key: *key, is_gateway });
            }
            let said = facts.plan.tables.signal_key.get(&address).filter(|_| is_gateway);
            cookies.extend(said.map(|said| (member_id, said.cookie)));
            if member.node.is_capable() {
                all.push(member_id);
            }
        }
        let fars: BTreeMap<Far, FarLocation> = mesh
            .segments
            .iter()
            .enumerate()
            .filter(|(at, _)| *at != index && mesh.fails_over(*at))
            .map(|(at, far)| {
                (
                    signal_id::location(&far.location),
                    far_location(mesh, &facts.plan.wireguard, facts.state, at, far),
                )
            })
            .collect();
        let answers = |far: &(&Far, &FarLocation)| {
            far.1.wireguard_ip.is_some_and(|address| address.is_ipv4() == private.is_ipv4())
        };
        let probed: Vec<Far> = fars.iter().filter(answers).map(|(far, _)| *far).collect();
        let named = mesh.segments.iter().flat_map(|segment| &segment.members);
        let names = named.filter_map(|member| Some((id(member)?, member.name().to_owned()))).collect();
        let leader = ids.first().copied()?;
        let leaves = |member: &Member| Some((id(member)?, cause(member.node.leaving?)));
        let leaving = segment.members.iter().filter_map(leaves).collect();
        let endpoint = own.node.endpoint.as_ref().and_then(kilo_core::wireguard::Endpoint::ip);
        let mut members = mesh.segments.iter().flat_map(|segment| &segment.members);
        let is_mixed = members.any(|member| !member.node.is_capable());
        Some(Self {
            is_mixed,
            own_location: OwnLocation {
                me,
                location: signal_id::location(&segment.location),
                gateways: ids,
                nodes: all,
                fars: probed,
                leaving,
                several: several(segment, &gateways),
                cookies,
            },
            private,
            control: signal_id::control_address(&key),
            nodes,
            fars,
            followers: followers(mesh, facts.plan),
            names,
            leader,
            written: own.node.leading.map(Term::from_bits),
            device: facts.device.clone(),
            needed: needed(facts, endpoint),
        })
    }

    /// The gateway a word's hop id stands for.
    pub fn gateway_of(&self, hop: u16) -> Option<NodeId> {
        gateway_of(self.own_location.me, &self.nodes, hop)
    }

    /// Term and gateway of a word; Kilo's leader if the hop id is unknown.
    pub fn said(&self, word: u64) -> (Term, NodeId) {
        said(self.own_location.me, &self.nodes, self.leader, word)
    }

    /// The hop id of a gateway.
    pub fn hop_of(&self, gateway: NodeId) -> Option<u16> {
        if gateway == self.own_location.me {
            return u16::try_from(HOP_REMOTE).ok();
        }
        self.nodes.get(&gateway).map(|node| node.hop)
    }

    /// The location and id of the gateway with this control address.
    pub fn far_gateway(&self, control: Ipv6Addr) -> Option<(Far, NodeId)> {
        self.fars.iter().find_map(|(far, location)| {
            let gateway = location.gateways.iter().find(|gateway| gateway.control == control)?;
            Some((*far, gateway.id))
        })
    }

    /// A node's name, for logs and the status.
    pub fn name(&self, id: NodeId) -> &str {
        self.names.get(&id).map_or("an unknown node", String::as_str)
    }

    /// Whether this node is a gateway.
    pub fn is_gateway(&self) -> bool {
        self.own_location.gateways.contains(&self.own_location.me)
    }
}

/// VPN peers on this host's device that follow claims.
fn followers(mesh: &Mesh, plan: &HostPlan) -> BTreeMap<Ipv6Addr, NodeId> {
    if !mesh.peers.iter().any(|peer| peer.follows) {
        return BTreeMap::new();
    }
    let keys = mesh.peers.iter().filter(|peer| peer.follows).map(|peer| peer.public_key);
    // A Peer object with a node's key is refused; the node is unaffected.
    let nodes =
        mesh.segments.iter().flat_map(|segment| &segment.members).filter_map(|member| member.node.key);
    let nodes: BTreeSet<_> = nodes.collect();
    let keys = keys.filter(|key| plan.wireguard.peers.contains_key(key) && !nodes.contains(key));
    keys.map(|key| (signal_id::control_address(&key), signal_id::node(&key))).collect()
}

/// The active leaders by id, if there are several.
fn several(segment: &Segment, gateways: &Gateways) -> Option<Several> {
    let homes = gateways.homes.as_ref()?;
    let at = |index: usize| id(segment.members.get(index)?);
    let pair = |(node, home): (usize, &usize)| Some((at(node)?, at(*home)?));
    Some(Several {
        active: homes.active.iter().filter_map(|index| at(*index)).collect(),
        homes: homes.of.iter().enumerate().filter_map(pair).collect(),
        acting: (gateways.term, gateways.ids.get(gateways.acting).copied().unwrap_or(0)),
    })
}

fn gateway_of(me: NodeId, nodes: &BTreeMap<NodeId, Neighbour>, hop: u16) -> Option<NodeId> {
    if u32::from(hop) == HOP_REMOTE {
        return Some(me);
    }
    nodes.iter().find(|(_, node)| node.hop == hop).map(|(id, _)| *id)
}

fn said(me: NodeId, nodes: &BTreeMap<NodeId, Neighbour>, leader: NodeId, word: u64) -> (Term, NodeId) {
    (lead::term_of(word), gateway_of(me, nodes, lead::hop_of(word)).unwrap_or(leader))
}

/// Whether the kernel's word is news for an agent that knows `known` from the word `before`: the same word
/// may name another node, one that was unknown before.
pub fn is_news(before: u64, known: Option<(Term, NodeId)>, word: u64, said: (Term, NodeId)) -> bool {
    word != before || known.is_some_and(|known| known != said)
}

fn needed(facts: &Facts<'_>, endpoint: Option<IpAddr>) -> Vec<Needed> {
    let kilo = Needed { index: facts.device.index(), address: None };
    let uplink = facts.uplink.map(|index| Needed { index, address: endpoint });
    [Some(kilo), uplink].into_iter().flatten().collect()
}

/// The acting leaders according to the device that an earlier agent set up, so that a restart moves nothing.
pub fn acting_before(mesh: &Mesh, state: &DeviceState, term: Term) -> Acting {
    let mut acting = Acting::default();
    if state.peers.is_empty() {
        return acting;
    }
    for (at, segment) in mesh.segments.iter().enumerate().filter(|(at, _)| mesh.fails_over(*at)) {
        let held = held(segment, &mesh.gateways_of(at).order, state);
        let members = held.into_iter().map(|(member, gateway)| (member, (term, gateway))).collect();
        let location = ActingLocation { leader: None, members };
        acting.locations.insert(signal_id::location(&segment.location), location);
    }
    acting
}

#[cfg(test)]
mod tests {
    use super::*;

    const ME: NodeId = 1 << 48;
    const OTHER: NodeId = 2 << 48;
    const HOP: u16 = 7;

    #[test]
    fn a_word_that_names_another_node_now_is_news() {
        let word = lead::word(Term::NONE, HOP);
        // A node that was alone until now takes the word for its own: it knows nobody else.
        let mut nodes = BTreeMap::new();
        let before = said(ME, &nodes, ME, word);
        assert_eq!(before, (Term::NONE, ME));
        assert!(!is_news(word, Some(before), word, before));
        // The node that it names appears, and leads: the same word now means that node.
        let key = siphash::Key([1, 2]);
        let address = IpAddr::from([10, 0, 0, 2]);
        nodes.insert(OTHER, Neighbour { address, hop: HOP, key, is_gateway: true });
        let now = said(ME, &nodes, OTHER, word);
        assert_eq!(now, (Term::NONE, OTHER));
        assert!(is_news(word, Some(before), word, now), "a stand-by would stay its own leader");
        assert!(!is_news(word, Some(now), word, now));
        // Without an agent only the word counts.
        assert!(!is_news(word, None, word, now));
        assert!(is_news(word, None, lead::word(Term::NONE, HOP + 1), now));
        assert_eq!(gateway_of(ME, &nodes, HOP_REMOTE as u16), Some(ME));
    }
}

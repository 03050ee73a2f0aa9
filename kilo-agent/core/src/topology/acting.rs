//! Who carries a location's packets, which may be another node than Kilo's rule chooses (`leader.rs`): by
//! term, for the location and for each member. It follows from CLAIMs and annotations, and every node that
//! plans computes the same.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use kilo_common::lead::Term;

use super::{Homes, Member, Node, Segment, homes::MOST_LEADERS, leader};
use crate::{
    signal_id::{self, NodeId},
    wireguard::key::PublicKey,
};

/// What was claimed or annotated for one location.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ActingLocation {
    /// The acting leader: it carries the shared prefixes.
    pub leader: Option<(Term, NodeId)>,
    /// Term and gateway of each member that has reported which gateway it uses.
    pub members: BTreeMap<NodeId, (Term, NodeId)>,
}

/// Every location by its id ([`signal_id::location`]).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Acting {
    /// What is known of each location, by its id.
    pub locations: BTreeMap<u64, ActingLocation>,
    /// Members of this location that this node leads.
    pub led: BTreeSet<NodeId>,
}

/// The gateways of one location in Kilo's order, and which of them carries what.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Gateways {
    /// Indexes of members, Kilo's leader first.
    pub order: Vec<usize>,
    /// Ids of those, in the same order.
    pub ids: Vec<NodeId>,
    /// Index in `order` of the acting leader.
    pub acting: usize,
    /// The term in which it acts; [`Term::NONE`]: it is Kilo's choice.
    pub term: Term,
    /// Several active leaders, and which one each member is to use; `None`: one leads all.
    pub homes: Option<Homes>,
    /// The acting leader is outside the set that Kilo's order and `--stand-bys` predict.
    pub is_unforeseen: bool,
}

impl Segment {
    /// The leader, and the next `stand_bys` capable nodes in Kilo's order, and as many that stay if some of
    /// these leave: a drained stand-by takes over from nobody. Where several active leaders are asked for, at
    /// least as many, and annotated nodes: they may still have members, or be active again in a moment.
    pub fn gateways(&self, stand_bys: usize) -> Vec<usize> {
        let leaders = self.members.iter().filter_map(|member| member.node.leaders).max().unwrap_or(1);
        let stand_bys = stand_bys.max(leaders.min(MOST_LEADERS).saturating_sub(1));
        let mut ranked: Vec<_> = self
            .members
            .iter()
            .enumerate()
            .filter(|(index, member)| *index != self.leader && member.node.is_capable())
            .map(|(index, member)| (leader::rank(&member.node), index))
            .collect();
        ranked.sort_unstable();
        let ranked: Vec<usize> = ranked.into_iter().map(|(_, index)| index).collect();
        let annotated = ranked.iter().filter(|index| self.members[**index].node.gateway);
        let annotated: Vec<usize> = annotated.take(MOST_LEADERS - 1).copied().collect();
        let stays = |index: &&usize| self.members[**index].node.leaving.is_none();
        let staying: Vec<usize> = ranked.iter().filter(stays).take(stand_bys).copied().collect();
        let next = ranked.iter().enumerate();
        let next = next
            .filter(|(at, index)| *at < stand_bys || staying.contains(index) || annotated.contains(index));
        std::iter::once(self.leader).chain(next.map(|(_, index)| *index)).collect()
    }

    /// Members whose private address is marked as led by this node: an earlier agent has left the
    /// marks in the data path.
    pub fn led(&self, is_marked: impl Fn(IpAddr) -> bool) -> BTreeSet<NodeId> {
        let marked = self.members.iter().filter(|member| member.private_ip().is_some_and(&is_marked));
        marked.filter_map(|member| Some(signal_id::node(&member.node.key?))).collect()
    }

    /// Whether its leader follows what gateways of other locations claim.
    pub fn is_capable(&self) -> bool {
        self.leading().is_some_and(|leader| leader.node.is_capable())
    }
}

impl Node {
    /// Whether its programs know signals, and its agent wants them.
    pub const fn is_capable(&self) -> bool {
        self.signal && self.key.is_some()
    }
}

impl Acting {
    /// The gateways of a location. The acting leader must be one of them: one that was declared
    /// dead does not act.
    pub fn gateways(&self, segment: &Segment, stand_bys: usize) -> Gateways {
        self.gateways_with(segment, stand_bys, None)
    }

    /// As [`Self::gateways`], where a location may have several active leaders: those come first, then
    /// leaders that are about to go, then stand-bys.
    pub fn gateways_with(&self, segment: &Segment, stand_bys: usize, homes: Option<Homes>) -> Gateways {
        let is_capable = segment.is_capable();
        let homes = homes.filter(|_| is_capable);
        let mut order = match &homes {
            Some(homes) => {
                let all = [&homes.active, &homes.leaving, &homes.stand_bys].into_iter().flatten();
                let others = all.copied().filter(|at| *at != segment.leader);
                std::iter::once(segment.leader).chain(others).collect()
            }
            None if is_capable => segment.gateways(stand_bys),
            None => vec![segment.leader],
        };
        let id = |index: usize| segment.members[index].node.key.map_or(0, |key| signal_id::node(&key));
        let mut ids: Vec<NodeId> = order.iter().map(|index| id(*index)).collect();
        let heard = self.of(segment).and_then(|location| location.leader);
        let written = segment.members.iter().enumerate().filter_map(|(index, member)| {
            let term = Term::from_bits(member.node.leading?);
            Some((term, id(index)))
        });
        // The acting leader stays, even if others would come first by now.
        let index_of = |(_, gateway): &(Term, NodeId)| {
            let capable = |index: &usize| is_capable && segment.members[*index].node.is_capable();
            let at = ids.iter().position(|id| id == gateway).map(|at| order[at]);
            at.or_else(|| (0..segment.members.len()).filter(capable).find(|index| id(*index) == *gateway))
        };
        let said =
            heard.into_iter().chain(written).filter(|said| said.0 > Term::NONE && index_of(said).is_some());
        let latest = latest(heard, said.collect());
        let unforeseen =
            latest.filter(|said| !ids.contains(&said.1)).and_then(|said| Some((index_of(&said)?, said.1)));
        if let Some((index, id)) = unforeseen {
            order.push(index);
            ids.push(id);
        }
        let acting = latest.and_then(|(_, id)| ids.iter().position(|gateway| *gateway == id)).unwrap_or(0);
        Gateways {
            order,
            ids,
            acting,
            term: latest.map_or(Term::NONE, |(term, _)| term),
            homes,
            is_unforeseen: unforeseen.is_some(),
        }
    }

    /// Whether this node leads that one, whichever gateway its own packets go to.
    pub fn leads(&self, member: &PublicKey) -> bool {
        !self.led.is_empty() && self.led.contains(&signal_id::node(member))
    }

    /// What was claimed for a location; `None`: nothing.
    pub fn of(&self, segment: &Segment) -> Option<&ActingLocation> {
        if self.locations.is_empty() {
            return None;
        }
        self.locations.get(&signal_id::location(&segment.location))
    }
}

/// The latest announced term, ignoring implausible jumps: a forged maximum would block every later change.
/// Jumps are measured from the term that was heard, else from one that another node has written; a single
/// term is believed.
fn latest(heard: Option<(Term, NodeId)>, mut said: Vec<(Term, NodeId)>) -> Option<(Term, NodeId)> {
    said.sort_unstable();
    let known = heard.map(|(term, _)| term).filter(|term| term.count() > 0);
    while let Some(last) = said.pop() {
        let before = known.or(said.last().map(|(term, _)| *term).filter(|term| term.count() > 0));
        if before.is_none_or(|before| last.0.is_near(before)) {
            return Some(last);
        }
    }
    None
}

/// The term of a leader that Kilo's rule no longer names, and that has not had time yet to hand leadership
/// over. Real terms are later, since they count from one above 16 bits.
pub const REPLACED_LEADER_TERM: Term = Term::from_bits(3);

impl Gateways {
    /// Whether the acting leader acts in no real term: it has led by Kilo's rule until now.
    pub fn stays(&self) -> bool {
        self.term > Term::NONE && self.term.count() == 0
    }

    /// Index in `order` of the gateway that a member has reported to use; without a
    /// report, of the acting leader.
    pub fn of_member(&self, location: Option<&ActingLocation>, member: NodeId) -> usize {
        let said = location.and_then(|location| location.members.get(&member));
        let said = said.filter(|(term, _)| *term > Term::NONE);
        said.and_then(|(_, id)| self.ids.iter().position(|gateway| gateway == id)).unwrap_or(self.acting)
    }

    /// Index in `order` of the gateway that carries a prefix of this member, or of the location as a whole.
    pub(crate) fn of_prefix(
        &self,
        segment: &Segment,
        said: Option<&ActingLocation>,
        member: Option<u32>,
    ) -> usize {
        match member.and_then(|at| segment.members.get(at as usize)) {
            Some(Member { node, .. }) if self.order.len() > 1 => {
                node.key.map_or(self.acting, |key| self.of_member(said, signal_id::node(&key)))
            }
            _ => self.acting,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::{
        settings::Granularity,
        topology::{Leaving, Mesh},
    };

    fn node(name: &str, endpoint: &str, signal: bool) -> Node {
        Node {
            name: name.to_owned(),
            location: "x".to_owned(),
            endpoint: endpoint.parse().ok(),
            key: Some(PublicKey([name.as_bytes()[0]; 32])),
            internal_ip: "10.0.0.1/24".parse().ok(),
            signal,
            ..Node::default()
        }
    }

    fn segment(nodes: &[Node]) -> Segment {
        let mesh = Mesh::new(nodes, &BTreeMap::new(), Granularity::Location, "10.4.0.0/16".parse().unwrap());
        Segment::clone(&mesh.segments[0])
    }

    fn id(name: char) -> NodeId {
        signal_id::node(&PublicKey([name as u8; 32]))
    }

    #[test]
    fn gateways_are_the_leader_and_the_next_capable_nodes_in_kilos_order() {
        let (private, public) = ("10.0.0.1:1", "192.0.2.1:1");
        let nodes = [
            node("a", private, true),
            node("b", private, false),
            node("c", public, true),
            node("d", public, true),
        ];
        let segment = segment(&nodes);
        assert_eq!(segment.gateways(2), [2, 3, 0]);
        assert_eq!(segment.gateways(0), [2]);
        assert_eq!(segment.gateways(4), [2, 3, 0], "b is not capable");
        // While nodes are drained, others stand by in their place.
        let mut drained = nodes.clone();
        (drained[2].leaving, drained[3].leaving) = (Some(Leaving::Cordoned), Some(Leaving::Removed));
        let drained = self::segment(&drained);
        assert_eq!((drained.gateways(1), drained.gateways(0)), (vec![2, 3, 0], vec![2]));
        // One capable node alone takes part as well: others' gateways have to be followed.
        assert!(self::segment(&[node("a", private, true)]).is_capable());
        let old = self::segment(&[node("a", private, false), node("b", private, true)]);
        assert_eq!(Acting::default().gateways(&old, 2).order, [0], "its leader knows no signals");
    }

    #[test]
    fn who_was_led_before_a_restart_is_known_by_the_marks() {
        let mut nodes = [node("a", "10.0.0.1:1", true), node("b", "10.0.0.2:1", true)];
        nodes[1].internal_ip = "10.0.0.2/24".parse().ok();
        let segment = segment(&nodes);
        let marked: IpAddr = "10.0.0.2".parse().unwrap();
        assert_eq!(segment.led(|address| address == marked), [id('b')].into());
        assert_eq!(segment.led(|_| false), [].into());
    }

    #[test]
    fn the_latest_of_what_was_heard_and_written_counts_if_it_is_a_gateway() {
        let mut nodes = [node("a", "10.0.0.1:1", true), node("b", "10.0.0.2:1", true)];
        let first = Term::NONE.next(id('b'));
        let mut acting = Acting::default();
        assert_eq!(acting.gateways(&segment(&nodes), 2).acting, 0);
        nodes[1].leading = Some(first.bits());
        let gateways = acting.gateways(&segment(&nodes), 2);
        assert_eq!((gateways.acting, gateways.term), (1, first), "it is written");
        let location = ActingLocation {
            leader: Some((first.next(id('a')), id('a'))),
            members: BTreeMap::from([(id('b'), (first, id('b')))]),
        };
        acting.locations.insert(signal_id::location("location:x"), location);
        let gateways = acting.gateways(&segment(&nodes), 2);
        assert_eq!(gateways.acting, 0, "a later one was heard");
        let of = acting.of(&segment(&nodes));
        assert_eq!((gateways.of_member(of, id('a')), gateways.of_member(of, id('b'))), (0, 1));
        // Somebody annotates a count near its maximum: after signals have announced one, and
        // when nobody has heard any.
        nodes[0].leading = Some(u64::MAX);
        assert_eq!(acting.gateways(&segment(&nodes), 2).term, first.next(id('a')), "heard");
        let nobody = Acting::default().gateways(&segment(&nodes), 2);
        assert_eq!((nobody.acting, nobody.term), (1, first), "another node has written");
        nodes[0].leading = None;
        // The node that acted has stopped being a gateway.
        assert_eq!(acting.gateways(&segment(&nodes[1..]), 2).acting, 0);
    }
}

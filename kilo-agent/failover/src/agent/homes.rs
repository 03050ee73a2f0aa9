//! Several active leaders: each takes the nodes whose home it is, a minute or two after another one last did.
//! Nothing is handed over: a node that is taken follows the later term, and the gateway that led it learns
//! that from the roll call.

use std::collections::BTreeMap;

use kilo_common::lead::LEAP;

use crate::{Agent, Micros, NodeId, Note, Output, SEC, Term, Turn, gateway::Lead, signal::Shared};

/// What the topology says about several active leaders.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Several {
    /// The active leaders.
    pub active: Vec<NodeId>,
    /// Which of them each node is to use; they use themselves.
    pub homes: BTreeMap<NodeId, NodeId>,
    /// The gateway with the shared prefixes according to the annotations, and since which term.
    pub acting: (Term, NodeId),
}

impl Several {
    /// The active leader that a node is to use.
    pub fn home(&self, node: NodeId) -> Option<NodeId> {
        self.homes.get(&node).copied()
    }

    /// Whether another active leader has taken this node from `before` in its turn: its home is
    /// there, or it was taken from `me`. For a moment, and while agents of two builds run, two may
    /// each take a node for their own.
    fn is_taken(&self, me: NodeId, node: NodeId, before: NodeId, to: NodeId) -> bool {
        to != me && (self.home(node) == Some(to) || before == me && self.active.contains(&to))
    }
}

/// Minimum time between two gateways that take members from others.
const APART: Micros = 60 * SEC;
/// How much later than the position before it each position takes members, at least.
const POSITIONS_APART: Micros = 3 * SEC;

/// How much later than the first position this one takes members. All see the same change, or start at the
/// same time: before its turn, a position has mostly seen in a roll call of the `whole` location that the one
/// before has taken some.
fn later(position: usize, whole: Micros) -> Micros {
    APART.min(position as u64 * POSITIONS_APART.max(2 * whole))
}

/// Whether a gateway that has been `healthy` for so long takes the members of one that has been about to go
/// for so long. Its members would no longer reach a far location that it does not reach, so it waits for a
/// path, or for others to come first; but not for a location that is never there.
fn takes_over(healthy: Micros, leaving: Micros, reaches_all: bool) -> bool {
    healthy >= SEC && (reaches_all || healthy.min(leaving) >= APART)
}

/// What a gateway remembers between two turns.
#[derive(Clone, Debug, Default)]
pub(crate) struct Homing {
    /// Since when its tunnels have worked without a break.
    fit_since: Option<Micros>,
    /// Since when it has been an active leader.
    active_since: Option<Micros>,
    /// The gateway that each member used when it was last looked at, and since which term.
    used: BTreeMap<NodeId, (Term, NodeId)>,
    /// When another gateway last took members that had a leader.
    others_took: Option<Micros>,
    /// When this gateway last took any.
    took: Option<Micros>,
}

impl Agent {
    /// How long a new gateway works before it takes members.
    const NEW: Micros = 10 * SEC;
    /// Minimum time between two times that this gateway takes members.
    const PAUSE: Micros = 5 * SEC;
    /// CLAIMs are repeated more often than with one leader: a far leader that has lost them, as after a boot,
    /// knows only Kilo's leader.
    const REFRESH: Micros = 2 * SEC;
    /// By how many changes its term may lag behind the latest one: far fewer than [`LEAP`], from which on
    /// others refuse its signals, and its members' kernels refuse theirs.
    const BEHIND: u32 = LEAP / 4;

    /// Takes the nodes whose home this gateway is.
    pub(crate) fn take_home(&mut self, turn: &mut Turn<'_>) {
        let (me, now, is_back) = (self.own_location.me, turn.now, self.is_back());
        let hears_others = self.hears_others(now);
        let (Some(several), Some(gateway)) = (&self.own_location.several, &mut self.gateway) else { return };
        if let Some(lead) = &mut gateway.lead {
            lead.claim_again_within(Self::REFRESH, now);
        }
        let rests = |at: Option<Micros>, pause: Micros| at.is_some_and(|at| now < at + pause);
        let homing = &mut gateway.homing;
        let led_in = gateway.lead.as_ref().map(Lead::term);
        let is_behind =
            led_in.is_some_and(|term| term.count().saturating_add(Self::BEHIND) < self.term.count());
        if is_behind && !rests(homing.took, Self::PAUSE) {
            // The same members in the latest term: no packets change their path.
            homing.took = Some(now);
            return self.lead_more([], Shared::Stay, turn);
        }
        let words = gateway.roll.heard_lately(now).map(|(node, present)| (node, present.word));
        homing.observe(words, |node, before, to| several.is_taken(me, node, before, to), now);
        let since = match homing.fit_since {
            _ if !gateway.tunnels.is_fit(&self.params, now) => None,
            known => Some(known.unwrap_or(now)),
        };
        homing.fit_since = since;
        let position = several.active.iter().position(|node| *node == me);
        homing.active_since = position.map(|_| homing.active_since.unwrap_or(now));
        let (Some(since), Some(position)) = (since, position) else { return };
        let healthy = now - since;
        let losses = gateway.others.losses(&self.params, now, me);
        // Gateways that start at the same time do not take members at the same time.
        let later = later(position, self.params.whole_roll(self.own_location.nodes.len()));
        let wait = if losses > 0 { self.params.hold_after(losses) } else { Self::NEW + later };
        // A far location that this gateway does not reach would go on answering through the previous gateway,
        // so its members stay there. Behind NATs, only the acting leader may have a path.
        let reaches_all = gateway.tunnels.all_answer(&self.params, now);
        // Stand-bys that have worked for long may become active by the same change.
        let is_turn = healthy >= wait
            && reaches_all
            && !rests(homing.active_since, later)
            && !rests(homing.others_took, APART + later);
        let leads = |node: NodeId| gateway.lead.as_ref().is_some_and(|lead| lead.has(node));
        let takes_itself = !leads(me) && (is_back || is_turn);
        let leaves = |node: NodeId| {
            let since = self.leaving_since.get(&node);
            since.is_some_and(|since| takes_over(healthy, now - since, reaches_all))
        };
        let members = gateway.roll.heard_lately(now).filter(|(node, present)| {
            // This includes a node that uses this gateway and was never claimed: a kernel's word may fall to
            // it when another gateway goes.
            several.home(*node) == Some(me) && *node != me && (leaves(present.word.1) || is_turn)
        });
        let mut members: Vec<NodeId> = members.map(|(node, _)| node).filter(|node| !leads(*node)).collect();
        members.extend(takes_itself.then_some(me));
        let first = self.own_location.first() == Some(me);
        let has_shared = gateway.lead.as_ref().is_some_and(|lead| lead.shared() == Shared::Move);
        // Without its LAN it could not pass on what comes for them.
        let takes_shared = first && !has_shared && hears_others && (is_turn || leaves(several.acting.1));
        if members.is_empty() && !takes_shared || rests(homing.took, Self::PAUSE) {
            return;
        }
        homing.took = Some(now);
        if !members.is_empty() {
            turn.push(Output::Note(Note::TakesHome(members.len())));
        }
        if self.word.1 != me && !members.contains(&me) && !leads(me) {
            members.push(me);
        }
        let shared = if takes_shared { Shared::Move } else { Shared::Stay };
        self.lead_more(members, shared, turn);
    }

    /// Whether this is an active leader that has booted: others have what was its own, and nobody has its
    /// packets by the word its kernel started with, until it says that it is back.
    pub(crate) fn is_back(&self) -> bool {
        let is_active = |several: &Several| several.active.contains(&self.own_location.me);
        self.word.0 == Term::NONE
            && self.term > Term::NONE
            && self.own_location.several.as_ref().is_some_and(is_active)
    }

    /// How many nodes use this gateway, itself included, as their kernels have recently said.
    pub fn users(&self, now: Micros) -> usize {
        let itself = usize::from(self.gateway.is_some() && self.word.1 == self.own_location.me);
        self.users_of(self.own_location.me, now).len() + itself
    }

    /// Leaves the shared prefixes to the acting leader, if that has them in a later term than this
    /// gateway leads in.
    pub(crate) fn leave_shared_to_acting(&mut self) {
        let (Some(several), Some(gateway)) = (&self.own_location.several, &mut self.gateway) else { return };
        let (term, acting) = several.acting;
        let outdated = |lead: &&mut Lead| acting != self.own_location.me && term > lead.term();
        if let Some(lead) = gateway.lead.as_mut().filter(outdated) {
            lead.give_up_shared();
        }
    }

    /// Counts a loss of leadership for the leader of a member that asks to be led because that leader has
    /// been silent for `age`.
    pub(crate) fn count_loss_by_adoption(&mut self, member: NodeId, age: Micros, now: Micros) {
        let Some(gateway) = &mut self.gateway else { return };
        let from = gateway.roll.last(member).map(|present| present.word.1);
        if let (Some(from), true, true) = (from, age > 0, self.own_location.several.is_some()) {
            gateway.others.lost(&self.params, now, from);
        }
    }
}

impl Homing {
    /// Records which gateway members use now, and whether another one has taken a member in its turn, as
    /// `is_taken` decides from the member, its previous gateway and its current one. A member that has booted or
    /// joined uses Kilo's leader in no term until the next ANNOUNCE, and a stand-by takes the members of a
    /// leader that has failed: neither is a turn.
    fn observe(
        &mut self,
        words: impl Iterator<Item = (NodeId, (Term, NodeId))>,
        is_taken: impl Fn(NodeId, NodeId, NodeId) -> bool,
        now: Micros,
    ) {
        for (node, word) in words {
            let before = self.used.get(&node).copied();
            if before.is_some_and(|before| word.0 < before.0) {
                continue;
            }
            self.used.insert(node, word);
            let before = before.filter(|(term, gateway)| *term > Term::NONE && *gateway != word.1);
            if before.is_some_and(|(_, gateway)| is_taken(node, gateway, word.1)) {
                self.others_took = Some(now);
            }
        }
    }

    /// Forgets nodes that are no longer in the location.
    pub(crate) fn set_nodes(&mut self, nodes: &[NodeId]) {
        self.used.retain(|node, _| nodes.contains(node));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Input, MS, Output, OwnLocation, Params, ProbePath, Signal, Start,
        signal::{Body, Kind},
    };

    const ME: NodeId = 2;

    fn own_location(location: u64) -> OwnLocation {
        OwnLocation {
            me: ME,
            location,
            gateways: vec![1, ME],
            nodes: vec![1, ME, 3, 4],
            fars: vec![9],
            cookies: BTreeMap::new(),
            leaving: BTreeMap::new(),
            several: None,
        }
    }

    fn agent(word: (Term, NodeId), led: Vec<NodeId>) -> Agent {
        let start = Start { now: 0, clock: 0, word, led, is_boot: false };
        Agent::new(Params::default(), own_location(7), start, &mut || 1)
    }

    #[test]
    fn gateways_that_see_the_same_change_take_their_turns_and_a_boot_is_no_change() {
        for (nodes, apart) in [(12, 3 * SEC), (1_000, 20 * SEC)] {
            let pauses = [0, 1, 2].map(|position| later(position, Params::default().whole_roll(nodes)));
            assert_eq!(pauses, [0, apart, 2 * apart], "{nodes} nodes");
        }
        assert_eq!(later(7, 40 * SEC), APART, "of the largest location");
        let word = |count: u64, gateway| (Term::from_bits(count << 16), gateway);
        let mut homing = Homing::default();
        for (now, heard, home, wanted) in [
            (1, word(3, 1), Some(7), None),
            // It has booted and uses Kilo's leader.
            (2, word(0, 7), Some(7), None),
            (3, word(3, 1), Some(7), None),
            (4, word(4, 1), Some(7), None),
            (5, word(5, ME), None, None),
            // A stand-by.
            (6, word(6, 8), Some(7), None),
            (7, word(7, 7), Some(7), Some(7)),
            (8, word(8, ME), Some(ME), Some(7)),
            // It takes the node for its own, as this gateway does.
            (9, word(9, 7), Some(ME), Some(9)),
        ] {
            let several = Several {
                active: vec![ME, 1, 7],
                homes: home.map(|home| (3, home)).into_iter().collect(),
                acting: (Term::NONE, ME),
            };
            let is_taken = |node, before, to| several.is_taken(ME, node, before, to);
            homing.observe([(3, heard)].into_iter(), is_taken, now);
            assert_eq!(homing.others_took, wanted, "at {now}");
        }
    }

    #[test]
    fn nodes_that_join_take_nobodys_turn() {
        let several = Several { active: vec![ME, 1, 7], ..Several::default() };
        let mut homing = Homing::default();
        let mut sees = |node: NodeId, word, now| {
            let several = Several { homes: BTreeMap::from([(node, 7)]), ..several.clone() };
            let is_taken = |node, before, to| several.is_taken(ME, node, before, to);
            homing.observe([(node, word)].into_iter(), is_taken, now);
            homing.others_took
        };
        for node in 10..20 {
            assert_eq!(sees(node, (Term::NONE, 1), node * SEC), None);
            assert_eq!(sees(node, (Term::NONE.next(7), 7), (node + 1) * SEC), None, "node {node}");
        }
        sees(30, (Term::NONE.next(1), 1), 40 * SEC);
        assert_eq!(sees(30, (Term::NONE.next(1).next(7), 7), 41 * SEC), Some(41 * SEC));
    }

    #[test]
    fn one_without_a_way_takes_those_of_a_gateway_that_goes_after_a_minute() {
        for (healthy, leaving, reaches_all, takes) in [
            (SEC - 1, 0, true, false),
            (SEC, 0, true, true),
            (APART, APART - 1, false, false),
            (APART - 1, APART, false, false),
            (APART, APART, false, true),
        ] {
            let taken = takes_over(healthy, leaving, reaches_all);
            assert_eq!(taken, takes, "{healthy} {leaving} {reaches_all}");
        }
    }

    const OTHER: NodeId = 1;
    const MEMBER: NodeId = 3;
    /// When `MEMBER` of `OTHER` is given to this gateway, which has worked for two minutes by then.
    const GIVEN: Micros = 120 * SEC;

    /// These lead, and `MEMBER` is to use `home`; 4 uses itself if it leads, and this gateway otherwise.
    fn location_of(active: &[NodeId], home: NodeId) -> OwnLocation {
        let mut homes: BTreeMap<_, _> = active.iter().map(|node| (*node, *node)).collect();
        homes.insert(MEMBER, home);
        homes.entry(4).or_insert(ME);
        let several = Several { active: active.to_vec(), homes, acting: (Term::NONE, OTHER) };
        OwnLocation { fars: vec![7, 8, 9], several: Some(several), ..own_location(7) }
    }

    /// When this gateway takes `MEMBER`. The topology changes from `before` to `after` at [`GIVEN`], `answers`
    /// names the far leaders that it reaches, and `word` what the kernel of each node says at each moment.
    fn takes_at(
        [before, after]: [OwnLocation; 2],
        answers: fn(u64) -> bool,
        word: fn(NodeId, Micros) -> (Term, NodeId),
    ) -> Option<Micros> {
        let start =
            Start { now: 0, clock: 0, word: (Term::NONE.next(ME), ME), led: vec![ME, 4], is_boot: false };
        let mut agent = Agent::new(Params::default(), before, start, &mut || 1);
        let (mut inputs, mut drawn) = (Vec::new(), 0);
        let mut random = || {
            drawn += 1;
            drawn
        };
        for now in (0..GIVEN + 80 * SEC).step_by(20_000) {
            let mut out = if now == GIVEN {
                agent.set_own_location(after.clone(), now, &mut random)
            } else {
                Vec::new()
            };
            out.extend(agent.turn(now, std::mem::take(&mut inputs), &mut random));
            for output in out {
                match output {
                    Output::Probe { nonce, path: ProbePath::Own(far) } if answers(far) => {
                        inputs.push(Input::Answer { nonce, at: now + 2 * MS });
                    }
                    Output::Probe { nonce, path: ProbePath::Lan(_) } => {
                        inputs.push(Input::Answer { nonce, at: now + MS });
                    }
                    Output::Lan(from, Signal { kind: Kind::Roll, nonce, .. }) => {
                        let (term, gateway) = word(from, now);
                        let body = Body::Word { cookie: 5, gateway };
                        let signal =
                            Signal { kind: Kind::Present, nonce, term, sender: from, location: 7, body };
                        inputs.push(Input::Signal { from, signal });
                    }
                    Output::Note(Note::TakesHome(_)) if now >= GIVEN => return Some(now),
                    _ => {}
                }
            }
        }
        None
    }

    #[test]
    fn one_that_has_worked_for_long_without_a_way_does_not_take_at_once() {
        let takes_after = |answers| {
            let active = [OTHER, ME];
            let mut after = location_of(&active, ME);
            after.leaving.insert(OTHER, crate::planned::Cause::Cordoned);
            let word = |node: NodeId, _: Micros| (Term::NONE.next(OTHER), if node == 4 { ME } else { OTHER });
            let at = takes_at([location_of(&active, OTHER), after], answers, word)?;
            Some((at - GIVEN) / SEC)
        };
        assert_eq!(takes_after(|_| true), Some(0));
        assert_eq!(takes_after(|far| far != 9), Some(60), "it does not reach all");
        assert_eq!(takes_after(|far| far == 9), None, "it is not fit");
    }

    #[test]
    fn one_takes_members_a_minute_after_another_one_has_and_later_by_its_position() {
        const TOOK: Micros = GIVEN - 10 * SEC;
        let word = |node: NodeId, now: Micros| match Term::NONE.next(OTHER) {
            term if node == 4 && now >= TOOK => (term.next(4), 4),
            term if node == 4 => (term, ME),
            term => (term, OTHER),
        };
        for (active, pause) in [([ME, OTHER, 4], 60 * SEC), ([OTHER, ME, 4], 63 * SEC)] {
            let at = takes_at([OTHER, ME].map(|home| location_of(&active, home)), |_| true, word);
            let after = at.map(|at| at - TOOK);
            // It learns what the other one has taken from its next roll call.
            assert!(after.is_some_and(|after| (pause..pause + 2 * SEC).contains(&after)), "{after:?}");
        }
    }

    #[test]
    fn in_another_location_nobody_is_led_as_in_the_one_before() {
        let term = Term::NONE.next(ME);
        let mut agent = agent((term, ME), vec![ME, 3]);
        assert!(agent.lead().is_some());
        let out = agent.set_own_location(own_location(8), SEC, &mut || 1);
        assert!(agent.lead().is_none() && out.contains(&Output::Led(Vec::new())), "{out:?}");
        assert_eq!((agent.word(), agent.sender().location), ((term, ME), 8));
        let again = agent.set_own_location(own_location(8), SEC, &mut || 1);
        assert!(again.is_empty(), "{again:?}");
    }

    #[test]
    fn who_uses_a_gateway_is_counted_also_by_kilos_rule_alone() {
        for (uses, users) in [(ME, 3), (1, 0)] {
            let mut agent = agent((Term::NONE, uses), Vec::new());
            let (mut now, mut inputs, mut drawn) = (0, Vec::new(), 0);
            let mut random = || {
                drawn += 1;
                drawn
            };
            while now < 3 * SEC {
                let out = agent.turn(now, std::mem::take(&mut inputs), &mut random);
                now += 20 * MS;
                for output in out {
                    let Output::Lan(from, Signal { kind: Kind::Roll, nonce, .. }) = output else { continue };
                    let word = Body::Word { cookie: 5, gateway: if from == 1 { 1 } else { uses } };
                    let signal = Signal {
                        kind: Kind::Present,
                        nonce,
                        term: Term::NONE,
                        sender: from,
                        location: 7,
                        body: word,
                    };
                    inputs.push(Input::Signal { from, signal });
                }
            }
            assert_eq!(agent.users(now), users, "they use {uses}");
        }
    }
}

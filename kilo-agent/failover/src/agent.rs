//! One node's agent: its parts, and what is due when.

mod declared_dead;
pub(crate) mod forgotten_terms;
mod homes;
mod inputs;
mod leading;
mod left_behind;
#[cfg(test)]
mod only_gateways;
mod other_leader;
mod overload;
mod own_location;
mod planned_change;
mod restore;
mod sequence_numbers;
mod stand_by;
mod terms;
#[cfg(test)]
mod test_bench;

use std::collections::BTreeMap;

pub use declared_dead::DeclaredAlone;
use forgotten_terms::Behind;
use homes::Homing;
pub use homes::Several;
use left_behind::Orphans;
use other_leader::Watch;
pub use own_location::OwnLocation;
use planned_change::Planned;
use restore::Returns;
use sequence_numbers::Numbers;
use terms::Raises;

use crate::{
    Far, Input, MS, Micros, NodeId, Note, Output, Params, Rule, SEC, Term, Turn,
    detector::Detector,
    gateway::{self, Lead, Sender},
    member::{Member, MemberView, adopt},
    other_gateways::Others,
    roll_call::Roll,
    sentinel::Sentinel,
    signal::{Body, Kind},
    tunnel::Tunnels,
};

/// What an agent finds when it starts.
#[derive(Clone, Debug)]
pub struct Start {
    /// Time of the start.
    pub now: Micros,
    /// What its numbers count from: later starts in one boot have a later value. Other boots do not matter.
    pub clock: u64,
    /// The kernel's word: term and gateway.
    pub word: (Term, NodeId),
    /// Members its kernel has marked `NODE_LED`.
    pub led: Vec<NodeId>,
    /// The kernel's word was made at this start: the node has to ask who leads.
    pub is_boot: bool,
}

/// State that only gateways have.
#[derive(Clone, Debug)]
pub(crate) struct Gateway {
    pub(crate) tunnels: Tunnels,
    pub(crate) detector: Detector,
    pub(crate) sentinel: Sentinel,
    pub(crate) roll: Roll,
    pub(crate) others: Others,
    pub(crate) numbers: Numbers,
    raises: Raises,
    pub(crate) lead: Option<Lead>,
    pub(crate) returns: Returns,
    pub(crate) planned: Planned,
    pub(crate) homing: Homing,
    pub(crate) watch: Watch,
    next_roll: Micros,
    next_hello: Micros,
    /// It leads in a new term, which the next HELLO says without waiting for its time.
    has_news: bool,
    wished: Micros,
    /// Until when the location is taken to be overloaded.
    overloaded_until: Micros,
    /// When an overload was last reported.
    busy_said: Option<Micros>,
    /// Since when this node is a gateway, as far as this agent knows.
    pub(crate) since: Micros,
    /// It continues in a later term than its own, which a member's kernel has named.
    has_resumed: bool,
    /// When each member that asked was last adopted.
    adopted: BTreeMap<NodeId, Micros>,
    /// When each node that nobody led was last taken.
    left_behind: BTreeMap<NodeId, Micros>,
    pub(crate) orphans: Orphans,
    /// Terms that far leaders remember and nobody here does.
    pub(crate) behind: Behind,
}

/// Failover of one node: takes [`Input`]s and returns [`Output`]s.
#[derive(Clone, Debug)]
pub struct Agent {
    pub(crate) params: Params,
    pub(crate) own_location: OwnLocation,
    pub(crate) word: (Term, NodeId),
    pub(crate) word_since: Micros,
    /// The latest term heard of.
    pub(crate) term: Term,
    /// As `term`, without what only one member has said.
    known: Term,
    member: Member,
    pub(crate) gateway: Option<Gateway>,
    /// The gateway that Kilo's order has put first although another one could lead, too, and since when.
    pub(crate) ordered: Option<(NodeId, Micros)>,
    /// When nodes that were about to go stopped being so.
    pub(crate) left: BTreeMap<NodeId, Micros>,
    /// Since when nodes that are about to go have been so, as far as this agent has seen.
    pub(crate) leaving_since: BTreeMap<NodeId, Micros>,
    /// Since when this node leads in term 0 without being first in Kilo's order.
    pub(crate) not_first_since: Option<Micros>,
    later: Vec<(Micros, Output)>,
    /// What its numbers count from, minus `now` at the start.
    clock: u64,
    /// When it is to be woken; the first time is never late.
    due: Micros,
}

impl Gateway {
    fn new(params: &Params, fars: &[Far], now: Micros, random: &mut dyn FnMut() -> u64) -> Self {
        Self {
            tunnels: Tunnels::new(params, fars, now),
            detector: Detector::new(now),
            sentinel: Sentinel::default(),
            roll: Roll::default(),
            others: Others::default(),
            numbers: Numbers::default(),
            raises: Raises::default(),
            lead: None,
            returns: Returns::default(),
            planned: Planned::default(),
            homing: Homing::default(),
            watch: Watch::default(),
            next_roll: now + random() % (params.roll / 10),
            next_hello: now + random() % params.hello,
            has_news: false,
            wished: 0,
            overloaded_until: 0,
            busy_said: None,
            since: now,
            has_resumed: false,
            adopted: BTreeMap::new(),
            left_behind: BTreeMap::new(),
            orphans: Orphans::default(),
            behind: Behind::default(),
        }
    }
}

impl Agent {
    /// Starts an agent, as a gateway if `own_location` says so. `random`: 64 random bits.
    pub fn new(
        params: Params,
        own_location: OwnLocation,
        start: Start,
        random: &mut dyn FnMut() -> u64,
    ) -> Self {
        let Start { now, clock, word, led, is_boot } = start;
        let first = now + random() % params.member_interval(own_location.nodes.len()).max(1);
        let mut agent = Self {
            member: Member::new(first),
            gateway: None,
            ordered: None,
            left: BTreeMap::new(),
            leaving_since: own_location.leaving.keys().map(|node| (*node, now)).collect(),
            not_first_since: None,
            word,
            word_since: now,
            term: word.0,
            known: word.0,
            later: Vec::new(),
            clock: clock.wrapping_sub(now),
            due: Micros::MAX,
            params,
            own_location,
        };
        if agent.own_location.gateways.contains(&agent.own_location.me) {
            agent.gateway = Some(Gateway::new(&agent.params, &agent.own_location.fars, now, random));
            agent.resume_leading(led, now);
        }
        if is_boot {
            agent.ask_after_boot(now);
        }
        agent
    }

    /// Whether another gateway could lead now, by its HELLO; `None` on nodes that are not gateways.
    pub fn heard_fit(&self, gateway: NodeId, now: Micros) -> Option<bool> {
        let others = &self.gateway.as_ref()?.others;
        Some(others.is_fit(gateway, now, self.params.heard + self.params.hello))
    }

    /// The longest usual round trip of this node's tunnels; `None`: it is not a gateway.
    pub fn round_trip(&self) -> Option<Micros> {
        Some(self.gateway.as_ref()?.tunnels.longest())
    }

    /// A node that has started anew asks every gateway whether it leads.
    fn ask_after_boot(&mut self, now: Micros) {
        let others =
            self.own_location.gateways.iter().copied().filter(|gateway| *gateway != self.own_location.me);
        for gateway in others.collect::<Vec<_>>() {
            for pause in [200 * MS, 500 * MS, SEC] {
                // As of the moment in which it is sent: what is sent before that has a smaller number.
                let stamp = self.stamp(now + pause);
                let signal = adopt(&MemberView { stamp, ..self.member_view(now) }, gateway, 0);
                self.later.push((now + pause, Output::Lan(gateway, signal)));
            }
        }
    }

    pub(crate) fn sender(&self) -> Sender {
        Sender { me: self.own_location.me, location: self.own_location.location }
    }

    /// A number that grows, even across restarts of the agent.
    pub(crate) fn stamp(&self, now: Micros) -> u64 {
        self.clock.wrapping_add(now)
    }

    pub(crate) fn member_view(&self, now: Micros) -> MemberView<'_> {
        MemberView {
            sender: self.sender(),
            word: self.word,
            gateways: &self.own_location.gateways,
            fars: &self.own_location.fars,
            nodes: self.own_location.nodes.len(),
            stamp: self.stamp(now),
            cookies: &self.own_location.cookies,
        }
    }

    /// The term and gateway this node's packets use, as its agent knows it.
    pub fn word(&self) -> (Term, NodeId) {
        self.word
    }

    /// Whether it is a gateway that could lead now.
    pub fn is_fit(&self, now: Micros) -> bool {
        self.gateway.as_ref().is_some_and(|gateway| gateway.tunnels.is_fit(&self.params, now))
    }

    /// Members it leads, and in which term.
    pub fn lead(&self) -> Option<&Lead> {
        self.gateway.as_ref().and_then(|gateway| gateway.lead.as_ref())
    }

    /// Longest time that regular work waits for the next wake-up.
    pub(crate) const WAITS: Micros = 100 * MS;

    /// When it has to be woken. A wake-up costs more than the work done in it, so regular work waits for
    /// the next one: a stand-by's probes of its leader come every interval, a leader's of its tunnels at
    /// every second or third.
    pub fn wake(&self) -> Micros {
        let later = self.later.iter().map(|(at, _)| *at).min().unwrap_or(Micros::MAX);
        let Some(gateway) = &self.gateway else { return self.member.wake().min(later) };
        let lead = gateway.lead.as_ref().map_or(Micros::MAX, Lead::wake);
        let soon = [
            gateway.detector.wake(),
            gateway.tunnels.deadline(),
            gateway.sentinel.wake(),
            gateway.planned.wake(),
            gateway.watch.wake(),
            self.member.deadline(),
            lead,
            later,
            self.next_ask(),
        ];
        let regular = [gateway.tunnels.next(), gateway.next_roll, gateway.next_hello, self.member.next()];
        let carrier = if gateway.detector.rests() { gateway.tunnels.next() } else { gateway.detector.wake() };
        let first = |times: &[Micros]| times.iter().copied().fold(Micros::MAX, Micros::min);
        let regular = first(&regular);
        first(&soon).min(regular.max(carrier.min(regular.saturating_add(Self::WAITS))))
    }

    /// Takes everything that has come, then does what is due: what has arrived is
    /// read before anything is decided.
    pub fn turn(&mut self, now: Micros, inputs: Vec<Input>, random: &mut dyn FnMut() -> u64) -> Vec<Output> {
        let is_late = now > self.due.saturating_add(self.params.late);
        let (mut out, mut later) = (Vec::new(), std::mem::take(&mut self.later));
        let mut turn = Turn { now, random, out: &mut out, later: &mut later };
        if !self.params.keeps(Rule::ReadFirst) {
            self.wake_up(&mut turn);
        }
        for input in inputs {
            self.take_in(input, &mut turn);
        }
        if is_late && self.params.keeps(Rule::DiscardWhenLate) {
            self.discard();
        }
        let mut due: Vec<_> = turn.later.extract_if(.., |(at, _)| *at <= now).collect();
        due.sort_by_key(|(at, _)| *at);
        turn.out.extend(due.into_iter().map(|(_, output)| output));
        self.wake_up(&mut turn);
        // Outputs that are to be sent without a pause.
        let due: Vec<_> = turn.later.extract_if(.., |(at, _)| *at <= now).map(|(_, output)| output).collect();
        turn.out.extend(due);
        self.later = later;
        self.due = self.wake();
        out
    }

    /// The leader is not to blame when this agent had no CPU for 200 ms.
    fn discard(&mut self) {
        self.member.discard();
        if let Some(gateway) = &mut self.gateway {
            gateway.detector.discard();
            gateway.tunnels.discard();
            gateway.watch.discard();
            gateway.sentinel.reset();
        }
    }

    fn wake_up(&mut self, turn: &mut Turn<'_>) {
        let mut member = std::mem::replace(&mut self.member, Member::new(0));
        member.wake_up(&self.params, &self.member_view(turn.now), turn);
        self.member = member;
        let Some(gateway) = &mut self.gateway else { return };
        let (params, sender, now) = (
            &self.params,
            Sender { me: self.own_location.me, location: self.own_location.location },
            turn.now,
        );
        let was_busy = gateway.tunnels.is_busy(now);
        gateway.tunnels.wake_up(params, turn);
        gateway.check_overload(params, sender.me, self.word, now);
        let is_overloaded = gateway.tunnels.is_busy(now) && gateway.leads(sender.me, self.word);
        let stays_so = is_overloaded && gateway.tunnels.stays_busy(now);
        if stays_so && gateway.busy_said.is_none_or(|said| said + 60 * SEC <= now) {
            gateway.busy_said = Some(now);
            turn.push(Output::Note(Note::Busy));
        }
        if is_overloaded && !was_busy {
            // A stand-by that suspects this node has to know at once.
            gateway.next_hello = now;
        }
        gateway.detector.expire(now);
        if gateway.detector.is_due(now) {
            if self.word.1 == sender.me {
                gateway.detector.rest();
            } else {
                let Gateway { tunnels, detector, .. } = gateway;
                detector.lan_counts = self.own_location.gateways.contains(&self.word.1);
                let targets = tunnels.targets(params, now);
                let far = detector.probe(params, self.word.1, &targets, |far| tunnels.usual(far), turn);
                // This node's own tunnel to the same far leader is probed at once.
                if let Some(far) = far.filter(|_| detector.misses().1 > 0) {
                    tunnels.probe(far, turn);
                }
            }
        } else {
            gateway.detector.probe_between(params, self.word.1, turn);
        }
        if now >= gateway.next_roll {
            let (pause, count) = params.roll_of(self.own_location.nodes.len());
            gateway.next_roll = now + turn.jittered(pause);
            for member in gateway.roll.next(&self.own_location.nodes, &self.own_location.gateways, count) {
                if member != sender.me {
                    gateway::ask(sender, member, &mut gateway.roll, turn);
                }
            }
        }
        let is_hello_due = now >= gateway.next_hello;
        if is_hello_due {
            gateway.next_hello = now + params.hello;
        }
        let says_hello = std::mem::take(&mut gateway.has_news) || is_hello_due;
        if let Some(lead) = &mut gateway.lead
            && lead.wake() <= now
            && lead.wake_up(params, &mut gateway.roll, turn)
        {
            self.mark_led(turn);
        }
        self.ask_far_leaders(turn);
        self.go_on_planned(turn);
        if says_hello {
            self.send_hello(turn);
        }
        if is_hello_due {
            self.give_as_planned(turn);
            self.give_away_when_unfit(turn);
            self.stay_leader(turn);
            self.choose_leader_to_watch(turn.now);
        }
        self.give_away_when_silent(turn);
        if let Some(gateway) = &mut self.gateway {
            gateway.sentinel.count_changes(&self.params, turn.now, self.known.count());
        }
        self.watch_leader(turn);
        self.decide(turn);
    }

    fn send_hello(&self, turn: &mut Turn<'_>) {
        let Some(gateway) = &self.gateway else { return };
        let leads = gateway.lead.as_ref().filter(|_| self.word.1 == self.own_location.me);
        let now = turn.now;
        let hello = |to: &NodeId| Body::Hello {
            is_fit: gateway.tunnels.is_fit(&self.params, now),
            is_busy: gateway.tunnels.is_busy(now) && gateway.leads(self.own_location.me, self.word),
            leads: leads.is_some(),
            gateway: self.word.1,
            cookie: self.own_location.cookie(*to),
            losses: gateway.others.recent_losses(&self.params, now),
        };
        // A term that only one member has named is not passed on.
        let term = leads.map_or(self.known, Lead::term);
        for other in self.own_location.gateways.iter().filter(|other| **other != self.own_location.me) {
            let signal = self.sender().signal(Kind::Hello, self.stamp(now), term, hello(other));
            turn.push(Output::Lan(*other, signal));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_grow_in_the_order_of_sending_after_a_boot() {
        use test_bench::{LEADER, ME, MEMBER};
        let own_location = test_bench::Bench::new().agent.own_location;
        let start = Start { now: SEC, clock: SEC, word: (Term::NONE, LEADER), led: vec![], is_boot: true };
        let mut agent =
            Agent::new(Params::default(), OwnLocation { me: MEMBER, ..own_location }, start, &mut || 1);
        let mut sent = Vec::new();
        for now in (SEC..3 * SEC).step_by(10_000) {
            for output in agent.turn(now, Vec::new(), &mut || 1) {
                if let Output::Lan(ME, signal) = output {
                    sent.push((now, signal.nonce));
                }
            }
        }
        assert!(sent.len() >= 3 && sent.iter().all(|(now, number)| number == now), "{sent:?}");
    }

    #[test]
    fn what_was_heard_counts_although_the_next_is_lost() {
        for interval in [20, 40, 100, 200] {
            let params = Params::new(interval * MS).unwrap();
            // Times vary by a tenth, and what is regular comes with the next wake-up.
            let late = |pause| pause * 11 / 10 + Agent::WAITS;
            assert!(params.heard > 2 * (params.hello + Agent::WAITS), "HELLO, {interval} ms");
            // These probes of a leader are what others wait for.
            let calm = Agent::WAITS.min(params.calm * 11 / 10);
            assert!(params.answers > 2 * (params.own * 11 / 10 + calm), "answers, {interval} ms");
            assert!(Roll::FRESH > 2 * late(params.roll), "roll call, {interval} ms");
        }
    }

    #[test]
    fn a_hello_counts_with_a_node_of_another_interval() {
        let of = |interval| Params::new(interval * MS).unwrap();
        let pairs = [20, 40, 100, 200].map(|slow| [20, 40, 100].map(|fast| (of(slow), of(fast))));
        for (slow, fast) in pairs.as_flattened() {
            let (said, heard) = (slow.interval / MS, fast.heard);
            assert!(heard > slow.hello + Agent::WAITS, "{said} ms, heard by {} ms", fast.interval / MS);
        }
        assert!(Params::default().heard > 2 * (of(200).hello + Agent::WAITS), "and one is lost");
    }
}

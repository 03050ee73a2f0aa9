//! One node's agent: the parts, and which of them each input is for.

use std::collections::BTreeMap;

use crate::{
    Far, Homing, Input, MS, Micros, NodeId, Note, Output, Params, Rule, SEC, Several, Signal, Term, Turn,
    detector::Detector,
    gateway::{self, Lead, Sender},
    giving::Planned,
    member::{Around, Member, adopt},
    numbers::Numbers,
    others::{Others, State},
    planned::Cause,
    restore::Returns,
    roll::{Present, Roll},
    sentinel::Sentinel,
    signal::{Body, Kind, Shared, Verdict},
    tunnel::Tunnels,
};

/// The location, as topology has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// This node.
    pub me: NodeId,
    /// First 8 bytes of SHA-256 of the location's name.
    pub location: u64,
    /// Gateways in Kilo's order.
    pub gateways: Vec<NodeId>,
    /// All nodes, this one included.
    pub nodes: Vec<NodeId>,
    /// Far leaders that can answer probes.
    pub fars: Vec<Far>,
    /// Nodes that are about to go, and why: they lead only where nobody else can.
    pub leaving: BTreeMap<NodeId, Cause>,
    /// Several active leaders; `None`: one leads all.
    pub several: Option<Several>,
    /// What this node's kernel answers the roll calls of each of the other gateways with: a secret of this boot.
    pub cookies: BTreeMap<NodeId, u64>,
}

impl Place {
    /// Who is to lead: the first gateway in Kilo's order that stays, else the first.
    pub fn first(&self) -> Option<NodeId> {
        let stays = |gateway: &&NodeId| !self.leaving.contains_key(gateway);
        self.gateways.iter().find(stays).or(self.gateways.first()).copied()
    }

    /// What this node's numbered signals to another one bear.
    pub(crate) fn cookie(&self, to: NodeId) -> u64 {
        self.cookies.get(&to).copied().unwrap_or(0)
    }
}

/// What an agent finds when it starts.
#[derive(Clone, Debug)]
pub struct Start {
    /// Now.
    pub now: Micros,
    /// What its numbers count from: of later starts in one boot it is later. Other boots do not matter.
    pub clock: u64,
    /// The kernel's word.
    pub word: (Term, NodeId),
    /// Members its kernel has marked `NODE_LED`.
    pub led: Vec<NodeId>,
    /// The kernel's word is no older than this start: who leads has to be asked.
    pub is_boot: bool,
}

/// What only gateways do.
#[derive(Clone, Debug)]
pub(crate) struct Gateway {
    pub(crate) tunnels: Tunnels,
    pub(crate) detector: Detector,
    pub(crate) sentinel: Sentinel,
    pub(crate) roll: Roll,
    pub(crate) others: Others,
    pub(crate) numbers: Numbers,
    pub(crate) lead: Option<Lead>,
    pub(crate) returns: Returns,
    pub(crate) planned: Planned,
    pub(crate) homing: Homing,
    next_roll: Micros,
    next_hello: Micros,
    wished: Micros,
    /// Until when the location is taken to be overloaded.
    overloaded_until: Micros,
    /// When it was said last that it is overloaded.
    busy_said: Option<Micros>,
    /// Since when it is one, as far as this agent knows.
    pub(crate) since: Micros,
}

/// An agent.
#[derive(Clone, Debug)]
pub struct Agent {
    pub(crate) params: Params,
    pub(crate) place: Place,
    pub(crate) word: (Term, NodeId),
    pub(crate) word_since: Micros,
    /// The latest term heard of.
    pub(crate) term: Term,
    member: Member,
    pub(crate) gateway: Option<Gateway>,
    /// Whom Kilo's order has named although another one could lead, too, and when.
    pub(crate) ordered: Option<(NodeId, Micros)>,
    /// When nodes stopped to be about to go.
    pub(crate) left: BTreeMap<NodeId, Micros>,
    /// Since when it leads in term 0 without being first.
    pub(crate) not_first_since: Option<Micros>,
    later: Vec<(Micros, Output)>,
    /// What its numbers count from, minus `now` at the start.
    clock: u64,
    /// When it means to be woken; the first time is never late.
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
            lead: None,
            returns: Returns::default(),
            planned: Planned::default(),
            homing: Homing::default(),
            next_roll: now + random() % (params.roll / 10),
            next_hello: now + random() % params.hello,
            wished: 0,
            overloaded_until: 0,
            busy_said: None,
            since: now,
        }
    }
}

impl Gateway {
    /// Whether it leads anybody, whose packets come out of its tunnel.
    fn leads(&self, me: NodeId, word: (Term, NodeId)) -> bool {
        self.lead.is_some() || word.1 == me
    }

    /// Looks whether the location sends more than its leader carries: the load goes with leadership, so what was
    /// seen of one leader is true of the next one, too.
    fn looks_for_overload(&mut self, params: &Params, me: NodeId, word: (Term, NodeId), now: Micros) {
        let leads = self.leads(me, word);
        let is_lossy = if leads { self.tunnels.is_busy(now) } else { self.detector.is_lossy(now) };
        if is_lossy || self.others.is_any_busy(now) {
            self.overloaded_until = now + params.busy;
        }
    }

    /// For how long nothing may have come back through a leader before it is lost: 0, unless the location is
    /// overloaded.
    pub(crate) fn patience(&self, params: &Params, now: Micros) -> Micros {
        let losses = self.others.all_losses(params, now);
        if self.overloaded_until > now { params.patience(losses) } else { 0 }
    }
}

impl Agent {
    /// Starts one: a gateway when `place` says so. `random`: 64 random bits.
    pub fn new(params: Params, place: Place, start: Start, random: &mut dyn FnMut() -> u64) -> Self {
        let Start { now, clock, word, led, is_boot } = start;
        let first = now + random() % params.member_interval(place.nodes.len()).max(1);
        let mut agent = Self {
            member: Member::new(first),
            gateway: None,
            ordered: None,
            left: BTreeMap::new(),
            not_first_since: None,
            word,
            word_since: now,
            term: word.0,
            later: Vec::new(),
            clock: clock.wrapping_sub(now),
            due: Micros::MAX,
            params,
            place,
        };
        if agent.place.gateways.contains(&agent.place.me) {
            agent.gateway = Some(Gateway::new(&agent.params, &agent.place.fars, now, random));
            agent.goes_on_leading(led, now);
        }
        if is_boot {
            agent.wishes(now);
        }
        agent
    }

    /// The location is another now: nodes, gateways or far leaders came or went. What is known
    /// of those that stay goes on.
    pub fn place_is(&mut self, place: Place, now: Micros, random: &mut dyn FnMut() -> u64) -> Vec<Output> {
        let mut out = Vec::new();
        if place == self.place {
            return out;
        }
        if place.location != self.place.location {
            return self.starts_anew(place, now, random);
        }
        let leads_no_more = match (&mut self.gateway, place.gateways.contains(&place.me)) {
            (Some(gateway), true) => {
                gateway.tunnels.fars_are(&self.params, &place.fars, now);
                gateway.roll.nodes_are(&place.nodes);
                gateway.numbers.nodes_are(&place.nodes);
                gateway.lead.as_mut().is_some_and(|lead| lead.place_is(&place.nodes, &place.fars, now))
            }
            (Some(gateway), false) => {
                let led = gateway.lead.is_some();
                self.gateway = None;
                led
            }
            (None, true) => {
                self.gateway = Some(Gateway::new(&self.params, &place.fars, now, random));
                false
            }
            (None, false) => false,
        };
        self.order_is(&place, now);
        self.place = place;
        self.shares_stay_with_who_acts();
        if leads_no_more {
            let (later, random) = (&mut Vec::new(), random);
            if self.gateway.is_some() {
                self.led_changed(&mut Turn { now, random, out: &mut out, later });
            } else {
                out.push(Output::Led(Vec::new()));
            }
        }
        self.due = Micros::MAX;
        out
    }

    /// The node is in another location now: what it led and what was said is that of the other one.
    fn starts_anew(&mut self, place: Place, now: Micros, random: &mut dyn FnMut() -> u64) -> Vec<Output> {
        let led = self.lead().is_some();
        let clock = self.clock.wrapping_add(now);
        let start = Start { now, clock, word: self.word, led: Vec::new(), is_boot: false };
        *self = Self::new(self.params.clone(), place, start, random);
        led.then_some(Output::Led(Vec::new())).into_iter().collect()
    }

    /// What another order means: a gateway that was there before and comes first now is to lead as
    /// soon as it can; one that has come, or does not leave any more, after a time of health.
    fn order_is(&mut self, place: &Place, now: Micros) {
        self.left.retain(|node, _| place.nodes.contains(node));
        for node in self.place.leaving.keys().filter(|node| !place.leaving.contains_key(node)) {
            self.left.insert(*node, now);
        }
        let first = place.first();
        if first != self.place.first() {
            let was_there =
                |node: &NodeId| self.place.nodes.contains(node) && !self.place.leaving.contains_key(node);
            self.ordered = first.filter(was_there).map(|first| (first, now));
        }
    }

    /// It leads the location, as was written before a restart: what belongs to no member, too.
    pub fn leads_location(&mut self) {
        if let Some(lead) = self.gateway.as_mut().and_then(|gateway| gateway.lead.as_mut()) {
            lead.claims(Shared::Move);
        }
    }

    /// What this gateway knows of the others: when each would be fit to lead, `None`: not known.
    pub fn is_heard_fit(&self, gateway: NodeId, now: Micros) -> Option<bool> {
        let others = &self.gateway.as_ref()?.others;
        Some(others.is_fit(gateway, now, 700 * MS))
    }

    /// The usual round trip of the own tunnels, at most.
    pub fn round_trip(&self) -> Option<Micros> {
        Some(self.gateway.as_ref()?.tunnels.longest())
    }

    /// After a restart it goes on with what its kernel has.
    fn goes_on_leading(&mut self, led: Vec<NodeId>, now: Micros) {
        let sender = self.sender();
        if led.is_empty() {
            return;
        }
        let is_mine = self.word.1 == self.place.me && self.word.0 > Term::NONE;
        let term = if is_mine { self.word.0 } else { self.term.next(self.place.me) };
        self.term = self.term.max(term);
        if let Some(gateway) = &mut self.gateway {
            let mut lead = Lead::new(sender, term, &self.place.fars, now);
            lead.add(led, now);
            if is_mine {
                lead.hears(self.place.me, self.word, now);
            }
            gateway.lead = Some(lead);
        }
    }

    /// A node that has started anew asks every gateway whether it leads.
    fn wishes(&mut self, now: Micros) {
        let others = self.place.gateways.iter().copied().filter(|gateway| *gateway != self.place.me);
        for gateway in others.collect::<Vec<_>>() {
            for (i, pause) in [200 * MS, 500 * MS, SEC].into_iter().enumerate() {
                let stamp = self.stamp(now) + i as u64;
                let signal = adopt(&Around { stamp, ..self.around(now) }, gateway, 0);
                self.later.push((now + pause, Output::Lan(gateway, signal)));
            }
        }
    }

    pub(crate) fn sender(&self) -> Sender {
        Sender { me: self.place.me, location: self.place.location }
    }

    /// A number that grows, over restarts of the agent, too.
    pub(crate) fn stamp(&self, now: Micros) -> u64 {
        self.clock.wrapping_add(now)
    }

    fn around(&self, now: Micros) -> Around<'_> {
        Around {
            sender: self.sender(),
            word: self.word,
            gateways: &self.place.gateways,
            fars: &self.place.fars,
            nodes: self.place.nodes.len(),
            stamp: self.stamp(now),
            cookies: &self.place.cookies,
        }
    }

    /// The term and gateway this node's packets use, as its agent knows it.
    pub fn word(&self) -> (Term, NodeId) {
        self.word
    }

    /// Whether it has a use for the kernel's count of what comes out of the tunnel: it leads.
    pub fn counts_decrypted(&self) -> bool {
        self.gateway.as_ref().is_some_and(|gateway| gateway.leads(self.place.me, self.word))
    }

    /// Whether it is a gateway that could lead now.
    pub fn is_fit(&self, now: Micros) -> bool {
        self.gateway.as_ref().is_some_and(|gateway| gateway.tunnels.is_fit(now))
    }

    /// Members it leads, and in which term.
    pub fn lead(&self) -> Option<&Lead> {
        self.gateway.as_ref().and_then(|gateway| gateway.lead.as_ref())
    }

    /// When it has to be woken. Each wake-up costs more than what is done in it, so what is regular is done
    /// in the next one: a stand-by's probes of its leader come every interval, a leader's of its tunnels at
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
            self.member.deadline(),
            lead,
            later,
        ];
        let regular = [gateway.tunnels.next(), gateway.next_roll, gateway.next_hello, self.member.next()];
        let carrier = if gateway.detector.rests() { gateway.tunnels.next() } else { gateway.detector.wake() };
        let first = |times: &[Micros]| times.iter().copied().fold(Micros::MAX, Micros::min);
        first(&soon).min(first(&regular).max(carrier))
    }

    /// Takes everything that has come, then does what is due: what has arrived is
    /// read before anything is judged.
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
        // What was put off by nothing.
        let due: Vec<_> = turn.later.extract_if(.., |(at, _)| *at <= now).map(|(_, output)| output).collect();
        turn.out.extend(due);
        self.later = later;
        self.due = self.wake();
        out
    }

    /// 200 ms of somebody else's CPU are no fault of the leader.
    fn discard(&mut self) {
        self.member.discard();
        if let Some(gateway) = &mut self.gateway {
            gateway.detector.discard();
            gateway.tunnels.discard();
            gateway.sentinel.reset();
        }
    }

    fn wake_up(&mut self, turn: &mut Turn<'_>) {
        let mut member = std::mem::replace(&mut self.member, Member::new(0));
        member.wake_up(&self.params, &self.around(turn.now), turn);
        self.member = member;
        let Some(gateway) = &mut self.gateway else { return };
        let (params, sender, now) =
            (&self.params, Sender { me: self.place.me, location: self.place.location }, turn.now);
        let was_busy = gateway.tunnels.is_busy(now);
        gateway.tunnels.wake_up(params, turn);
        gateway.looks_for_overload(params, sender.me, self.word, now);
        let is_overloaded = gateway.tunnels.is_busy(now) && gateway.leads(sender.me, self.word);
        if is_overloaded && gateway.busy_said.is_none_or(|said| said + 60 * SEC <= now) {
            gateway.busy_said = Some(now);
            turn.push(Output::Note(Note::Busy));
        }
        if is_overloaded && !was_busy {
            // Who suspects this node is to know at once.
            gateway.next_hello = now;
        }
        gateway.detector.expire(now);
        if gateway.detector.is_due(now) {
            if self.word.1 == sender.me {
                gateway.detector.rest();
            } else {
                let Gateway { tunnels, detector, .. } = gateway;
                detector.lan_counts = self.place.gateways.contains(&self.word.1);
                let targets = tunnels.targets(now);
                let far = detector.probe(params, self.word.1, &targets, |far| tunnels.usual(far), turn);
                // Its own way is asked at once about the same far leader.
                if let Some(far) = far.filter(|_| detector.misses().1 > 0) {
                    tunnels.probe(far, turn);
                }
            }
        }
        if now >= gateway.next_roll {
            let (pause, count) = params.roll_of(self.place.nodes.len());
            gateway.next_roll = now + turn.jittered(pause);
            for member in gateway.roll.next(&self.place.nodes, count) {
                if member != sender.me {
                    gateway::ask(sender, member, &mut gateway.roll, turn);
                }
            }
        }
        let says_hello = now >= gateway.next_hello;
        if says_hello {
            gateway.next_hello = now + params.hello;
        }
        if let Some(lead) = &mut gateway.lead
            && lead.wake() <= now
            && lead.wake_up(params, &mut gateway.roll, turn)
        {
            self.led_changed(turn);
        }
        self.go_on_planned(turn);
        if says_hello {
            self.hello(turn);
            self.give_as_planned(turn);
            self.stays_leader(turn);
        }
        self.give_away_when_silent(turn);
        if let Some(gateway) = &mut self.gateway {
            gateway.sentinel.counts(&self.params, turn.now, self.term.count());
        }
        self.decide(turn);
    }

    fn hello(&self, turn: &mut Turn<'_>) {
        let Some(gateway) = &self.gateway else { return };
        let leads = gateway.lead.as_ref().filter(|_| self.word.1 == self.place.me);
        let body = Body::Hello {
            is_fit: gateway.tunnels.is_fit(turn.now),
            is_busy: gateway.tunnels.is_busy(turn.now) && gateway.leads(self.place.me, self.word),
            leads: leads.is_some(),
            gateway: self.word.1,
            losses: gateway.others.told(&self.params, turn.now),
        };
        let term = leads.map_or(self.term, Lead::term);
        let signal = self.sender().signal(Kind::Hello, turn.nonce(), term, body);
        for other in self.place.gateways.iter().filter(|other| **other != self.place.me) {
            turn.push(Output::Lan(*other, signal.clone()));
        }
    }

    /// Tells the kernel whom it leads; leadership of nobody ends.
    pub(crate) fn led_changed(&mut self, turn: &mut Turn<'_>) {
        let Some(gateway) = &mut self.gateway else { return };
        let mut led: Vec<_> = gateway.lead.iter().flat_map(Lead::members).collect();
        led.extend(gateway.planned.takes_from().filter(|from| !led.contains(from)));
        gateway.lead = gateway.lead.take().filter(|lead| !lead.is_empty());
        turn.push(Output::Led(led));
    }

    // ---- what comes in --------------------------------------------------------

    fn take_in(&mut self, input: Input, turn: &mut Turn<'_>) {
        match input {
            Input::Wake => {}
            Input::Answer { nonce, at } => self.answered(nonce, at),
            Input::Signal { from, signal } => {
                if signal.sender == from && signal.location == self.place.location
                    || signal.kind == Kind::Moved
                {
                    self.signal(from, signal, turn);
                }
            }
            Input::Word(term, gateway) => self.word_is(term, gateway, turn),
            Input::LinkDown => self.give_away(0, turn),
            Input::Decrypted(count) => {
                if let Some(gateway) = &mut self.gateway {
                    gateway.tunnels.decrypted(count, turn.now);
                }
            }
            Input::FarMoved(far) => {
                if let Some(gateway) = &mut self.gateway {
                    gateway.tunnels.far_moved(far);
                }
            }
        }
    }

    fn answered(&mut self, nonce: u64, at: Micros) {
        if self.member.answered(&self.params, nonce, at) {
            return;
        }
        let Some(gateway) = &mut self.gateway else { return };
        let _ = gateway.tunnels.answered(&self.params, nonce, at)
            || gateway.detector.answered(&self.params, nonce, at);
    }

    fn word_is(&mut self, term: Term, to: NodeId, turn: &mut Turn<'_>) {
        self.term = self.term.max(term);
        let changed = self.word.1 != to;
        self.word = (term, to);
        let me = self.place.me;
        if changed {
            self.word_since = turn.now;
            self.discard_leader(turn);
            if let Some(gateway) = self.gateway.as_mut().filter(|_| to != me) {
                gateway.detector.begin(turn.now);
            }
            self.is_led_by(to, turn);
        }
        let lead = self.gateway.as_mut().and_then(|gateway| gateway.lead.as_mut());
        if lead.is_some_and(|lead| lead.hears(me, (term, to), turn.now)) {
            self.led_changed(turn);
        }
    }

    /// What is known of the leader so far says nothing about the next one.
    fn discard_leader(&mut self, turn: &mut Turn<'_>) {
        self.member.discard();
        turn.later.retain(|(_, output)| !matches!(output, Output::Lan(_, Signal { kind: Kind::Adopt, .. })));
        if let Some(gateway) = &mut self.gateway {
            gateway.detector.discard();
            gateway.sentinel.reset();
        }
    }

    pub(crate) fn signal(&mut self, from: NodeId, signal: Signal, turn: &mut Turn<'_>) {
        // The last of all counts would be the last change of leader.
        if !signal.term.is_near(self.term) && self.params.keeps(Rule::NoLeap) {
            return turn.push(Output::Note(Note::Leaps(from)));
        }
        if !self.is_new(from, &signal, turn) {
            return;
        }
        match (signal.kind, &signal.body) {
            (Kind::Witness, _) => {
                let mut member = std::mem::replace(&mut self.member, Member::new(0));
                member.asked(&self.params, signal, &self.around(turn.now), turn);
                self.member = member;
            }
            (Kind::Verdict, Body::Witness { id, verdict }) => self.verdict(from, *id, *verdict),
            (Kind::Present, Body::Word { cookie, gateway }) => {
                let present = Present { at: turn.now, cookie: *cookie, word: (signal.term, *gateway) };
                self.present(from, signal.nonce, present, turn);
            }
            (Kind::Follows, Body::Word { gateway, .. }) => {
                let word = (signal.term, *gateway);
                if let Some(gateway) = &mut self.gateway {
                    gateway.roll.follows(from, turn.now, word);
                }
                self.heard_word(from, word, turn);
            }
            (Kind::Hello, Body::Hello { is_fit, is_busy, leads, gateway, losses }) => {
                let state = State {
                    is_fit: *is_fit,
                    is_busy: *is_busy,
                    leads: *leads,
                    term: signal.term,
                    gateway: *gateway,
                };
                self.term = self.term.max(signal.term);
                if let Some(own) = &mut self.gateway {
                    own.others.hello(&self.params, turn.now, from, state, losses);
                }
                self.wish_of_returned(from, turn);
            }
            (Kind::Adopt, Body::Members { age, members, .. }) if members[..] == [from] => {
                self.adopts(from, signal.term, u64::from(*age) * MS, turn);
            }
            (Kind::Handover, Body::Members { age, members, .. }) => {
                self.is_given(from, &signal, u64::from(*age) * MS, members, turn);
            }
            (Kind::Prepare | Kind::Ready, _) => self.change(from, &signal, turn),
            (Kind::Moved, _) => self.has_moved(from, &signal, turn),
            _ => {}
        }
    }

    fn verdict(&mut self, from: NodeId, id: u32, verdict: Verdict) {
        if let Some(gateway) = &mut self.gateway {
            gateway.sentinel.verdict(from, id, verdict);
        }
    }

    fn present(&mut self, from: NodeId, nonce: u64, present: Present, turn: &mut Turn<'_>) {
        let Some(gateway) = &mut self.gateway else { return };
        if !gateway.roll.heard(from, nonce, present) {
            return;
        }
        if let Some(lead) = &gateway.lead {
            lead.announce(from, present, turn);
        }
        self.heard_word(from, present.word, turn);
        self.boot_is(from, present.cookie, turn);
    }

    fn heard_word(&mut self, from: NodeId, word: (Term, NodeId), turn: &mut Turn<'_>) {
        self.term = self.term.max(word.0);
        let lead = self.gateway.as_mut().and_then(|gateway| gateway.lead.as_mut());
        if lead.is_some_and(|lead| lead.hears(from, word, turn.now)) {
            self.led_changed(turn);
        }
    }

    /// A gateway that was away asks to be a member of who leads in a later term.
    fn wish_of_returned(&mut self, from: NodeId, turn: &mut Turn<'_>) {
        let (me, now) = (self.place.me, turn.now);
        // Of several each leads itself, and takes what is its own.
        if self.place.several.is_some() {
            return;
        }
        let Some(gateway) = &mut self.gateway else { return };
        let is_led = gateway.roll.users(now).any(|(member, uses)| member != me && uses == me);
        let may = [me, from].contains(&self.word.1);
        let later = gateway.others.leads(from).is_some_and(|term| term > self.word.0);
        if later && may && !is_led && now > gateway.wished + SEC {
            gateway.wished = now;
            let signal = adopt(&self.around(now), from, 0);
            turn.push(Output::Lan(from, signal));
        }
    }

    /// A member asks to be led: its leader has been silent for `age`, or it only
    /// asks (0) who leads.
    fn adopts(&mut self, member: NodeId, term: Term, age: Micros, turn: &mut Turn<'_>) {
        let (me, now) = (self.place.me, turn.now);
        let Some(gateway) = &self.gateway else { return };
        let tunnels = &gateway.tunnels;
        let lead = gateway.lead.as_ref();
        let is_overload = gateway.patience(&self.params, now) > 0;
        let may = if age == 0 {
            let is_home = self.place.several.as_ref().is_none_or(|several| several.home(member) == Some(me));
            is_home && self.word.1 == me && lead.is_some_and(|lead| lead.term() > term)
        } else {
            // Repeated to an agent that has restarted since, and remembers no numbers: its kernel has had a
            // later word since, or nobody has heard it yet.
            gateway.roll.last(member).is_some_and(|present| present.word.0 <= term)
                && (!is_overload || age >= self.params.overload_member)
                && tunnels.were_good(now.saturating_sub(age))
                && tunnels.proves(now.saturating_sub(300 * MS + tunnels.longest()))
        };
        let has = lead.is_some_and(|lead| {
            lead.has(member)
                && gateway.roll.last(member).is_some_and(|present| present.word == (lead.term(), me))
        });
        if !may || has || !tunnels.is_fit(now) {
            return;
        }
        // A leader that nobody uses any more brings what belongs to no member.
        let led_itself = self.place.several.is_none()
            && gateway.roll.last(member).is_some_and(|present| present.word.1 == member);
        let shared = if age == 0 && led_itself { Shared::Move } else { Shared::Stay };
        self.term = self.term.max(term);
        self.lost_by_adoption(member, age, turn.now);
        turn.push(Output::Note(Note::Adopts(member)));
        self.lead_more([member], shared, turn);
    }

    /// Leads these, too: in the term it leads in when that is the latest known, else
    /// in a new one, in which everything it has goes on.
    pub(crate) fn lead_more(
        &mut self,
        members: impl IntoIterator<Item = NodeId>,
        shared: Shared,
        turn: &mut Turn<'_>,
    ) {
        let leads_already = self.lead().is_some_and(|lead| lead.term() == self.term);
        if !leads_already {
            self.term = self.term.next(self.place.me);
        }
        self.lead_in(self.term, members, shared, turn);
    }

    /// Leads these in this term, in which everything it has goes on.
    pub(crate) fn lead_in(
        &mut self,
        term: Term,
        members: impl IntoIterator<Item = NodeId>,
        shared: Shared,
        turn: &mut Turn<'_>,
    ) {
        let (sender, now) = (self.sender(), turn.now);
        let Some(gateway) = &mut self.gateway else { return };
        let mut lead = match gateway.lead.take() {
            Some(lead) if lead.term() == term => lead,
            older => {
                let mut lead = Lead::new(sender, term, &self.place.fars, now);
                if let Some(older) = older {
                    lead.continues(&older);
                    lead.add(
                        older.members().filter(|member| *member != sender.me || self.word.1 == sender.me),
                        now,
                    );
                }
                lead
            }
        };
        lead.add(members, now);
        lead.claims(shared);
        let leads_itself = lead.has(sender.me);
        gateway.lead = Some(lead);
        // The mark first: who follows must not be passed on.
        self.led_changed(turn);
        if leads_itself && self.word != (term, sender.me) {
            turn.push(Output::Word(term, sender.me));
        }
        let Some(gateway) = &mut self.gateway else { return };
        if let Some(lead) = &mut gateway.lead {
            lead.wake_up(&self.params, &mut gateway.roll, turn);
        }
    }
}

//! The thread: it waits for signals, announcements of the kernel, the agent and the next
//! deadline in one `ppoll`, reads everything that has arrived, and then decides.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv6Addr},
    os::fd::{AsFd, AsRawFd as _, BorrowedFd},
    sync::{Arc, atomic::Ordering},
};

use aya::maps::{MapData, RingBuf};
use kilo_common::{
    event::Hook,
    lead::{self, Term},
    maps::Heard,
    signal::{self, Body, Kind, LONGEST, PORT},
};
use kilo_core::topology::{Acting, ActingLocation, NodeId};
use kilo_failover::{
    Agent, Far, Given, Input, Micros, Note, Output, Params, Signal, Start, Way, far,
    signal::Shared as SharedPrefixes,
};
use kilo_host::{
    dataplane::{
        CounterReader,
        lead::{Signals, Swap, Way as Into},
        led::Led,
        monitor::ktime,
    },
    net::link_down::LinkEvents,
};
use nix::{
    poll::{PollFd, PollFlags, ppoll},
    sys::time::{TimeSpec, TimeValLike as _},
};

use super::{
    Dead, Shared, StandBy, locked,
    moved::{Asked, Moved},
    packets,
    report::{FailoverMetrics, Out, unix_now},
    site::{FarGateway, FarLocation, Site, is_news},
};

/// What it works with.
pub struct Tools {
    pub signals: Signals,
    pub ring: RingBuf<MapData>,
    pub led: Led,
    pub counters: CounterReader,
}

/// It looks around so often at least: a record of the ring may come without a wake-up.
const LONGEST_WAIT: Micros = 1_000_000;
/// Between two reports for those who look, when nothing changes.
const REPORT: Micros = 1_000_000;
/// What is given by one leader within this time is one change.
const SUCCESSION: Micros = 1_000_000;

pub struct Thread {
    shared: Arc<Shared>,
    tools: Tools,
    links: Option<LinkEvents>,
    pub(super) params: Params,
    pub(super) metrics: FailoverMetrics,
    pub(super) site: Option<Arc<Site>>,
    agent: Option<Agent>,
    pub(super) fars: BTreeMap<Far, far::Acting>,
    /// Probes of old leaders that are due: when, whose, which gateway.
    pub(super) later: Vec<(Micros, Far, NodeId)>,
    pub(super) seeded_until: Option<Micros>,
    /// Which gateway of each far location was probed last.
    probed: BTreeMap<Far, NodeId>,
    /// The agent has to be told.
    pub(super) is_dirty: bool,
    led: BTreeSet<NodeId>,
    word: u64,
    /// Who has what belongs to no member of the own location, as far as this node knows.
    leader: Option<(Term, NodeId)>,
    since: i64,
    last_change: Option<String>,
    /// After whom it leads, and since when.
    succeeded: Option<(NodeId, Micros)>,
    /// Whom it has given up last, and in which term.
    given_up: Option<(NodeId, Term)>,
    out: Out,
    moved: Moved,
    next_report: Micros,
}

/// Of whom there is something to be read, besides signals.
struct Ready {
    agent: bool,
    links: bool,
}

fn micros() -> Micros {
    ktime() / 1_000
}

fn random() -> u64 {
    rand::random()
}

/// The source port of a path probe: another one each time, so that probes are new flows to whatever knows flows.
const fn source_port(nonce: u64) -> u16 {
    0xc000 | nonce as u16
}

/// Runs until it is told to stop.
pub fn run(shared: Arc<Shared>, params: Params, tools: Tools, metrics: FailoverMetrics) {
    let links = LinkEvents::open()
        .inspect_err(|error| tracing::warn!(%error, "failover does not hear of links that go"))
        .ok();
    let mut thread = Thread {
        shared,
        tools,
        links,
        params,
        metrics,
        site: None,
        agent: None,
        fars: BTreeMap::new(),
        later: Vec::new(),
        seeded_until: None,
        probed: BTreeMap::new(),
        is_dirty: false,
        led: BTreeSet::new(),
        word: 0,
        leader: None,
        since: 0,
        last_change: None,
        succeeded: None,
        given_up: None,
        out: Out::default(),
        moved: Moved::default(),
        next_report: 0,
    };
    // What came before this agent.
    while thread.tools.ring.next().is_some() {}
    while !thread.shared.stop.load(Ordering::Acquire) {
        let ready = thread.wait();
        thread.step(&ready);
    }
}

impl Thread {
    fn wake(&self) -> Micros {
        let agent = self.agent.as_ref().map_or(Micros::MAX, Agent::wake);
        let later = self.later.iter().map(|(at, ..)| *at).min().unwrap_or(Micros::MAX);
        let fars = self.fars.values().map(far::Acting::wake).min().unwrap_or(Micros::MAX);
        agent.min(later).min(fars)
    }

    fn wait(&self) -> Ready {
        let micros = self.wake().saturating_sub(micros()).min(LONGEST_WAIT);
        let time = TimeSpec::microseconds(i64::try_from(micros).unwrap_or(i64::MAX));
        // SAFETY: the ring owns its descriptor, which lives as long as it does.
        let ring = unsafe { BorrowedFd::borrow_raw(self.tools.ring.as_raw_fd()) };
        let fds = [Some(ring), Some(self.shared.wake.as_fd()), self.links.as_ref().map(LinkEvents::as_fd)];
        let mut fds: Vec<_> =
            fds.into_iter().flatten().map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
        // An interrupted wait is a short one.
        let _ = ppoll(&mut fds, Some(time), None);
        let is_ready = |at: usize| fds.get(at).is_some_and(|fd| fd.any() != Some(false));
        Ready { agent: is_ready(1), links: is_ready(2) }
    }

    fn step(&mut self, ready: &Ready) {
        if ready.agent {
            let _ = self.shared.wake.read();
        }
        let mut inputs = Vec::new();
        let site = locked(&self.shared.site).take();
        if let Some(site) = site {
            self.site_is(&site);
        }
        let Some(site) = self.site.clone() else {
            while self.tools.ring.next().is_some() {}
            return;
        };
        if ready.links && self.is_link_down(&site) {
            inputs.push(Input::LinkDown);
        }
        self.hear(&site, &mut inputs);
        self.look_at_fars(&site, &mut inputs);
        self.read_word(&site, &mut inputs);
        // One that cannot be read says nothing: what is silent is lost sooner.
        let is_due = |agent: &Agent| !inputs.is_empty() || agent.wake() <= micros();
        if self.agent.as_ref().is_some_and(|agent| agent.counts_decrypted() && is_due(agent))
            && let Ok(count) = self.tools.counters.decrypted()
        {
            inputs.push(Input::Decrypted(count));
        }
        self.turn(&site, inputs);
        let now = micros();
        self.forget_seeds(now);
        self.far_wakes(now);
        self.out.expire(now, &self.metrics);
        self.give_up(&site, now);
        self.tell();
        self.report(&site, now);
    }

    /// Which gateway of a far location answers probes through the own tunnel: who has what belongs to no member,
    /// as it was claimed a moment ago or as the mesh has it.
    fn acting_of(&self, far: Far, location: &FarLocation) -> Option<FarGateway> {
        let claimed = self.fars.get(&far).map(far::Acting::shared);
        let known = location.gateways.iter().find(|gateway| Some(gateway.id) == claimed);
        known.or_else(|| location.gateways.get(location.acting)).copied()
    }

    /// What one gateway of a far location has missed says nothing of the next one.
    fn look_at_fars(&mut self, site: &Site, inputs: &mut Vec<Input>) {
        let acting = |(far, location): (&Far, &FarLocation)| Some((*far, self.acting_of(*far, location)?.id));
        let now: BTreeMap<Far, NodeId> = site.fars.iter().filter_map(acting).collect();
        let has_moved =
            |(far, id): &(&Far, &NodeId)| self.probed.get(far).is_some_and(|before| before != *id);
        inputs.extend(now.iter().filter(has_moved).map(|(far, _)| Input::FarMoved(*far)));
        self.probed = now;
    }

    fn is_link_down(&self, site: &Site) -> bool {
        let Some(links) = &self.links else { return false };
        let events = links.read(&site.needed);
        events.is_down || events.is_lost && site.needed.iter().any(|needed| !needed.is_up())
    }

    /// The mesh is another, or was looked at again.
    fn site_is(&mut self, site: &Arc<Site>) {
        let now = micros();
        self.fars_are(site, now);
        self.site = Some(Arc::clone(site));
        let takes_part = site.place.gateways.len() > 1 && site.place.nodes.contains(&site.place.me);
        match &mut self.agent {
            Some(agent) if takes_part => {
                let out = agent.place_is(site.place.clone(), now, &mut random);
                self.act(site, out, &mut Vec::new());
            }
            Some(_) => {
                self.agent = None;
                self.mark(site, &[]);
            }
            None if takes_part => self.start(site, now),
            None => {}
        }
        self.next_report = 0;
    }

    fn start(&mut self, site: &Site, now: Micros) {
        let Ok([_, word]) = self.tools.signals.words() else { return };
        self.word = word;
        let (term, gateway) = site.said(word);
        let marked = self.tools.led.read();
        let is_marked = |(_, node): &(&NodeId, &super::site::Neighbour)| marked.contains(&node.address);
        self.led = site.nodes.iter().filter(is_marked).map(|(id, _)| *id).collect();
        let leads_itself = term > Term::NONE && gateway == site.place.me;
        let led: Vec<NodeId> =
            self.led.iter().copied().chain(leads_itself.then_some(site.place.me)).collect();
        let start = Start {
            now,
            // Of this boot, as the cookies of its kernel are.
            clock: now,
            word: (term, gateway),
            led,
            is_boot: term == Term::NONE,
        };
        let mut agent = Agent::new(self.params.clone(), site.place.clone(), start, &mut random);
        if leads_itself && site.written == Some(term) {
            agent.leads_location();
        }
        self.agent = Some(agent);
        self.is_dirty = true;
        tracing::info!(
            leader = self.name(gateway),
            term = term.count(),
            gateways = site.place.gateways.len(),
            nodes = site.place.nodes.len(),
            "failover is on in this location"
        );
    }

    /// The kernel's word may be another: it obeys ANNOUNCE by itself.
    fn read_word(&mut self, site: &Site, inputs: &mut Vec<Input>) {
        let Ok(word) = self.tools.signals.word() else { return };
        let (hop, term) = (lead::hop_of(word), lead::term_of(word));
        // The node it names has stopped being a gateway: Kilo's leader is who is left, and of several
        // leaders takes what is its own later.
        let is_gone = self.agent.is_some()
            && term > Term::NONE
            && site.gateway_of(hop).is_none_or(|gateway| !site.place.gateways.contains(&gateway));
        let word = match site.hop_of(site.leader) {
            Some(leader) if is_gone && leader != hop => {
                let new = lead::word(term, leader);
                self.tools.signals.swap(Swap { current: word, new }).unwrap_or(word)
            }
            _ => word,
        };
        if is_news(self.word, self.agent.as_ref().map(Agent::word), word, site.said(word)) {
            self.word_is(site, word, inputs);
        }
    }

    fn word_is(&mut self, site: &Site, word: u64, inputs: &mut Vec<Input>) {
        let (_, before) = self.agent.as_ref().map_or_else(|| site.said(self.word), Agent::word);
        self.word = word;
        let (term, gateway) = site.said(word);
        if gateway != before {
            self.since = unix_now();
            self.is_dirty = true;
            tracing::info!(
                from = self.name(before),
                to = self.name(gateway),
                term = term.count(),
                "this node uses another leader"
            );
            // Why, gateways say that have made the change.
            if !site.is_gateway() {
                self.last_change = Some(format!("{} leads after {}", self.name(gateway), self.name(before)));
            }
        }
        self.next_report = 0;
        inputs.push(Input::Word(term, gateway));
    }

    // ---- what comes in --------------------------------------------------------

    fn hear(&mut self, site: &Site, inputs: &mut Vec<Input>) {
        loop {
            let Some(record) = self.tools.ring.next() else { return };
            let Some((heard, bytes)) = Heard::read(&record).map(|(heard, bytes)| (heard, bytes.to_vec()))
            else {
                continue;
            };
            drop(record);
            match signal::parse(&bytes) {
                Ok(signal) => {
                    let signal = signal.map_list(|words| words.iter().collect());
                    self.take(site, &heard, &bytes, &signal, inputs);
                }
                Err(_) => self.metrics.refused("malformed"),
            }
        }
    }

    fn take(&mut self, site: &Site, heard: &Heard, bytes: &[u8], signal: &Signal, inputs: &mut Vec<Input>) {
        let at = heard.time / 1_000;
        let source = Ipv6Addr::from(heard.source);
        let by_tunnel = heard.hook == Hook::KiloIngress as u32;
        match signal.kind {
            Kind::Reflected => {
                self.out.answered(signal.nonce, at, &self.metrics);
                self.fars.values_mut().for_each(|acting| acting.answered(signal.nonce));
                inputs.push(Input::Answer { nonce: signal.nonce, at });
            }
            Kind::Claim | Kind::End | Kind::Moved => {
                let gateway = site.far_gateway(source).filter(|_| by_tunnel);
                let Some((far, from)) =
                    gateway.filter(|(_, from)| signal.kind == Kind::Moved || *from == signal.sender)
                else {
                    return self.metrics.refused("gateway");
                };
                if signal.kind == Kind::Moved {
                    let Some(location) = site.fars.get(&far) else { return };
                    let in_term =
                        |term| self.agent.as_ref().is_some_and(|agent: &Agent| agent.has_asked(term));
                    let asked = Asked { in_term: &in_term, nodes: &site.place.nodes };
                    let by_all = self.moved.by_all(far, location, from, signal, &asked, micros());
                    inputs.extend(by_all.map(|signal| Input::Signal { from: far, signal }));
                } else {
                    self.claimed((far, from), signal, micros());
                }
            }
            Kind::Probe | Kind::Roll | Kind::Announce => {}
            _ => {
                let from = signal.sender;
                let Some(node) = site.nodes.get(&from) else { return self.metrics.refused("unknown") };
                if node.address != source.to_canonical() || by_tunnel {
                    return self.metrics.refused("foreign");
                }
                if !signal::is_authentic(bytes, node.key) {
                    return self.metrics.refused("forged");
                }
                inputs.push(Input::Signal { from, signal: signal.clone() });
            }
        }
    }

    // ---- what is done ---------------------------------------------------------

    fn turn(&mut self, site: &Site, mut inputs: Vec<Input>) {
        // A word that was moved is news, once or twice.
        for _ in 0..4 {
            let now = micros();
            let Some(agent) = &mut self.agent else { return };
            if inputs.is_empty() && agent.wake() > now {
                return;
            }
            let out = agent.turn(now, std::mem::take(&mut inputs), &mut random);
            self.act(site, out, &mut inputs);
        }
    }

    fn act(&mut self, site: &Site, out: Vec<Output>, inputs: &mut Vec<Input>) {
        for output in out {
            match output {
                Output::Probe { nonce, way } => self.probe(site, nonce, way),
                Output::Lan(node, signal) => self.send_lan(site, node, &signal),
                Output::Tunnel(far, signal) => {
                    // Stand-bys hold what their leader holds.
                    if let Some(location) = site.fars.get(&far) {
                        for gateway in &location.gateways {
                            self.tunnel_to(location, gateway.id, &signal);
                        }
                    }
                }
                Output::Word(term, gateway) => {
                    let Some(hop) = site.hop_of(gateway) else { continue };
                    match self.tools.signals.follow(lead::word(term, hop)) {
                        Ok(word) if word != self.word => self.word_is(site, word, inputs),
                        Ok(_) => {}
                        Err(error) => tracing::error!(%error, "failed to move this node to another leader"),
                    }
                }
                Output::Led(members) => self.mark(site, &members),
                Output::Note(note) => self.note(&note),
            }
        }
    }

    fn probe(&mut self, site: &Site, nonce: u64, way: Way) {
        let (sender, location) = (site.place.me, site.place.location);
        let probe =
            Signal { kind: Kind::Probe, nonce, term: Term::NONE, sender, location, body: Body::Empty };
        self.out.sent(nonce, micros(), way);
        match way {
            Way::Lan(node) => self.send_lan(site, node, &probe),
            Way::Path(far) => {
                let Some(to) = site.fars.get(&far).and_then(|far| far.wireguard_ip) else { return };
                self.send(Into::Stack, (site.private, source_port(nonce)), to, &probe, None);
            }
            Way::Own(far) => {
                let Some(location) = site.fars.get(&far) else { return };
                let Some(to) = self.acting_of(far, location) else { return };
                self.send_tunnel(IpAddr::V6(site.control), IpAddr::V6(to.control), &probe);
            }
        }
    }

    fn send_lan(&self, site: &Site, node: NodeId, signal: &Signal) {
        let Some(to) = site.nodes.get(&node) else { return };
        self.send(Into::Lan, (site.private, PORT), to.address, signal, Some(to.key));
    }

    pub(super) fn send_tunnel(&self, from: IpAddr, to: IpAddr, signal: &Signal) {
        self.send(Into::Tunnel, (from, PORT), to, signal, None);
    }

    fn send(
        &self,
        way: Into,
        from: (IpAddr, u16),
        to: IpAddr,
        signal: &Signal,
        key: Option<kilo_common::siphash::Key>,
    ) {
        let mut bytes = [0; LONGEST];
        let Some(length) = signal::write(&mut bytes, signal, key) else { return };
        let Some(packet) = packets::udp(from, (to, PORT), &bytes[..length]) else { return };
        if let Err(error) = self.tools.signals.send(way, &packet) {
            tracing::debug!(%error, kind = ?signal.kind, %to, "signal not sent");
        }
    }

    /// Marks exactly these members as led.
    fn mark(&mut self, site: &Site, members: &[NodeId]) {
        let led: BTreeSet<NodeId> =
            members.iter().copied().filter(|member| *member != site.place.me).collect();
        for member in led.symmetric_difference(&self.led) {
            let Some(node) = site.nodes.get(member) else { continue };
            if let Err(error) = self.tools.led.mark(node.address, led.contains(member)) {
                tracing::error!(%error, "failed to mark a node that this one leads");
            }
        }
        if led != self.led {
            self.led = led;
        }
        self.is_dirty = true;
    }

    fn note(&mut self, note: &Note) {
        let text = match *note {
            Note::Suspects(leader) => {
                self.metrics.suspicion("asked");
                tracing::info!(
                    leader = self.name(leader),
                    "the leader does not answer; other nodes are asked"
                );
                return;
            }
            Note::OverBudget => {
                self.metrics.suspicion("over_budget");
                tracing::warn!("leadership changed too often lately; this node waits before it takes over");
                return;
            }
            Note::Busy => {
                tracing::warn!(
                    "the tunnels of this leader lose probes while packets come out of them: it carries more than it \
                     can, and leads on; give it more CPU, or the location several leaders (--leaders)"
                );
                return;
            }
            Note::Leaps(from) => {
                self.metrics.refused("leap");
                tracing::debug!(from = self.name(from), "a signal's term leaps");
                return;
            }
            Note::Replayed(from) => {
                self.metrics.refused("replayed");
                tracing::debug!(from = self.name(from), "a signal was said before, or in another boot");
                return;
            }
            Note::TakesOver { from, all, since } => {
                let (cause, whose) = if all { ("lost", "the location") } else { ("alone", "itself only") };
                self.metrics.suspicion(if all { "took_over" } else { "took_itself" });
                self.metrics.failover(cause);
                let silent = micros().saturating_sub(since);
                self.metrics.outage(silent);
                let why = format!("no packet passed it for {} ms", silent / 1_000);
                if all {
                    self.succeeds(from, &format!("lost: {why}"));
                }
                format!("{} lost: {why}, took over {whose}", self.name(from))
            }
            Note::IsGiven { from, why: Given::Trial } => {
                tracing::info!(from = self.name(from), "another gateway sends its own packets by this one");
                return;
            }
            Note::IsGiven { from, why } => {
                let (cause, why) = match why {
                    Given::Planned(cause) => ("planned", cause.text()),
                    Given::LinkDown => ("handed_over", "its link, address or route went"),
                    Given::Silent | Given::Trial => ("handed_over", "its tunnels failed"),
                };
                self.metrics.failover(cause);
                let how = if cause == "planned" { "planned" } else { "handed over" };
                self.succeeds(from, &format!("{how}: {why}"));
                format!("{} handed leadership over ({how}): {why}", self.name(from))
            }
            Note::Adopts(member) => {
                self.metrics.failover("adopted");
                format!("{} asked to be led", self.name(member))
            }
            Note::Gives { to, cause } => {
                let why = cause.map_or("this node cannot lead now", kilo_failover::Cause::text);
                format!("gave leadership to {}: {why}", self.name(to))
            }
            Note::TakesBack(to) => format!("leads again: what it gave to {} did not arrive", self.name(to)),
            Note::Tries(to) => {
                tracing::info!(
                    by = self.name(to),
                    "this node sends its own packets by the leader that returns"
                );
                return;
            }
            Note::TakesHome(nodes) => {
                self.metrics.failover("rebalanced");
                format!("took {nodes} nodes that are to use this one of several leaders")
            }
            Note::GivesUp(to) => {
                tracing::info!(
                    to = self.name(to),
                    "leadership is not given: the other gateway, or a far leader, is not ready; it is tried again"
                );
                return;
            }
        };
        tracing::warn!(change = text, "change of leader");
        self.last_change = Some(text);
        self.next_report = 0;
        self.is_dirty = true;
    }

    /// This node leads the location from now on: an Event says so once, though a change may come
    /// in several signals.
    fn succeeds(&mut self, from: NodeId, why: &str) {
        let now = micros();
        let is_again = self.succeeded.is_some_and(|(before, at)| before == from && at + SUCCESSION > now);
        self.succeeded = Some((from, now));
        if !is_again {
            locked(&self.shared.said).successions.push(format!("{} ({why})", self.name(from)));
            self.shared.changed.notify_one();
        }
    }

    pub(super) fn name(&self, id: NodeId) -> &str {
        self.site.as_ref().map_or("", |site| site.name(id))
    }

    // ---- what others are told --------------------------------------------------

    /// A leader is given up once while it is silent: if it lives and says so, it knows better. One that was heard
    /// again and dies again is given up again.
    fn give_up(&mut self, site: &Site, now: Micros) {
        let agent = self.agent.as_ref().filter(|_| site.is_mixed);
        let given_up = agent.and_then(|agent| Some((agent.gives_up(now)?, agent.word().0)));
        if given_up == self.given_up {
            return;
        }
        self.given_up = given_up;
        let dead = given_up.map(|(leader, _)| Dead { node: self.name(leader).to_owned(), is_taken: false });
        let is_dead = dead.is_some();
        locked(&self.shared.said).dead = dead;
        if is_dead {
            self.shared.changed.notify_one();
        }
    }

    /// Tells the agent what it needs to plan, when that has changed.
    pub(super) fn tell(&mut self) {
        if !std::mem::take(&mut self.is_dirty) {
            return;
        }
        let Some(site) = self.site.clone() else { return };
        let (term, gateway) = site.said(self.word);
        let me = site.place.me;
        let lead = self.agent.as_ref().and_then(Agent::lead);
        let shared = lead.map_or(SharedPrefixes::Stay, kilo_failover::gateway::Lead::shared);
        let is_one_of_several = site.place.several.is_some();
        self.leader = match () {
            () if self.agent.is_none() || term == Term::NONE => None,
            // Whom this node uses says nothing of who has what belongs to none.
            () if is_one_of_several && (gateway != me || shared == SharedPrefixes::Stay) => None,
            () if gateway != me || shared != SharedPrefixes::Stay => Some((term, gateway)),
            // It leads itself alone: the location's leader is who it was.
            () => self.leader.filter(|(_, leader)| *leader != me),
        };
        let leads = shared == SharedPrefixes::Move && gateway == me && term > Term::NONE;
        let mut acting = Acting { led: self.led.clone(), ..Acting::default() };
        let own = ActingLocation { leader: self.leader, members: BTreeMap::new() };
        acting.locations.insert(site.place.location, own);
        for (far, known) in &self.fars {
            let members =
                known.owners().filter(|(_, (term, gateway))| *term > Term::NONE && *gateway != 0).collect();
            let leader = Some(known.shared_since()).filter(|(term, _)| *term > Term::NONE);
            acting.locations.insert(*far, ActingLocation { leader, members });
        }
        let leading = self.agent.as_ref().and(leads.then_some(term.bits()));
        let mut said = locked(&self.shared.said);
        if *said.acting != acting || said.leading != leading || !said.is_told {
            said.acting = Arc::new(acting);
            said.leading = leading;
            said.is_told = true;
            self.shared.changed.notify_one();
        }
    }

    fn report(&mut self, site: &Site, now: Micros) {
        if now < self.next_report {
            return;
        }
        self.next_report = now + REPORT;
        let (term, gateway) = site.said(self.word);
        let me = site.place.me;
        let role = match () {
            () if gateway == me => "leader",
            () if site.is_gateway() => "stand-by",
            () => "member",
        };
        self.metrics.role(role);
        self.metrics.term.set(i64::from(term.count()));
        let is_fit = self.agent.as_ref().is_some_and(|agent| agent.is_fit(now));
        self.metrics.fit.set(i64::from(is_fit && site.is_gateway()));
        let users = self.agent.as_ref().map_or(0, |agent| agent.users(now));
        self.metrics.nodes.set(i64::try_from(users).unwrap_or(i64::MAX));
        let stand_by = |id: &NodeId| StandBy {
            node: site.name(*id).to_owned(),
            fit: match &self.agent {
                Some(_) if *id == me => Some(is_fit),
                Some(agent) => agent.is_heard_fit(*id, now),
                None => None,
            },
            round_trip: self
                .agent
                .as_ref()
                .filter(|_| *id == me)
                .and_then(Agent::round_trip)
                .map(|micros| micros / 1_000),
        };
        let report = super::Report {
            role,
            leader: site.name(gateway).to_owned(),
            kilos_leader: site.name(site.leader).to_owned(),
            term: term.count(),
            since: self.since,
            stand_bys: site.place.gateways.iter().filter(|id| **id != gateway).map(stand_by).collect(),
            last_change: self.last_change.clone(),
        };
        locked(&self.shared.said).report = report;
    }
}

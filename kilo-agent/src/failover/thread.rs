//! The thread: waits for signals, kernel announcements, the agent and the next deadline at once, reads
//! everything that has arrived, then decides.

mod act;
mod hear;
mod inbox;
mod report;
mod wait;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use aya::maps::{MapData, RingBuf};
use kilo_common::lead::Term;
use kilo_core::signal_id::NodeId;
use kilo_failover::{Agent, DeclaredAlone, Far, Input, Micros, Params, Start, far};
use kilo_host::{
    dataplane::{CounterReader, lead::Signals, led_members::Led, monitor::ktime},
    net::link_down::LinkEvents,
};

use self::{
    inbox::{Turns, deliver},
    wait::{Ready, Wait},
};
use super::{
    News, Shared, ThreadOutput,
    claim_answers::Moved,
    claim_rate::ClaimRate,
    followers::Followers,
    outbox::Asks,
    report::{FailoverMetrics, Out},
    site::Site,
    unaccepted_claims::Unmoved,
};

/// The thread's access to programs and maps.
pub struct Tools {
    pub signals: Signals,
    pub ring: RingBuf<MapData>,
    pub led: Led,
    pub counters: CounterReader,
}

/// Maximum time between two looks at the ring: a record may arrive without a wake-up.
const LONGEST_WAIT: Micros = 1_000_000;
/// Interval between status reports while nothing changes.
const REPORT: Micros = 1_000_000;
/// Changes from the same leader within this time count as one succession.
const SUCCESSION: Micros = 1_000_000;

pub struct Thread {
    pub(super) shared: Arc<Shared>,
    tools: Tools,
    links: Option<LinkEvents>,
    /// When a default route that disappeared must be back.
    routes_due: Option<Micros>,
    pub(super) params: Params,
    pub(super) metrics: FailoverMetrics,
    pub(super) site: Option<Arc<Site>>,
    agent: Option<Agent>,
    /// Inputs that have been read but not delivered to the state machine yet.
    inbox: Vec<Input>,
    pub(super) fars: BTreeMap<Far, far::Owners>,
    /// Claimed prefixes that the device has not accepted.
    pub(super) unmoved: Unmoved,
    asks: Asks,
    /// Due probes of old leaders: time, location and gateway.
    pub(super) later: Vec<(Micros, Far, NodeId)>,
    pub(super) seeded_until: Option<Micros>,
    /// The gateway of each far location that was probed last.
    pub(super) probed: BTreeMap<Far, NodeId>,
    /// Something has changed that the agent may have to be notified of.
    pub(super) is_dirty: bool,
    led: BTreeSet<NodeId>,
    word: u64,
    /// The gateway with this location's shared prefixes, as far as this node knows.
    leader: Option<(Term, NodeId)>,
    since: Option<Instant>,
    last_change: Option<String>,
    /// The leader that this node has succeeded, and when.
    succeeded: Option<(NodeId, Micros)>,
    /// The leader that this node last declared dead, and the term.
    declared_dead: Option<(NodeId, Term)>,
    /// Declarations made without a witness.
    declared_alone: DeclaredAlone,
    out: Out,
    pub(super) moved: Moved,
    pub(super) claim_rate: ClaimRate,
    followers: Followers,
    next_report: Micros,
}

fn micros() -> Micros {
    ktime() / 1_000
}

fn random() -> u64 {
    rand::random()
}

/// The source port of a path probe: varies, so that stateful devices on the path see a new flow each time.
const fn source_port(nonce: u64) -> u16 {
    0xc000 | nonce as u16
}

/// Runs until it is asked to stop.
pub fn run(shared: Arc<Shared>, params: Params, tools: Tools, metrics: FailoverMetrics) {
    let links = LinkEvents::open()
        .inspect_err(|error| tracing::warn!(%error, "failed to subscribe to link events; failover notices links that go down by probes only"))
        .ok();
    let wait = match Wait::for_any(&tools.ring, &shared.wake, links.as_ref()) {
        Ok(wait) => wait,
        Err(error) => {
            return tracing::error!(%error, "failover cannot wait for signals; retrying at the next reconcile");
        }
    };
    let mut thread = Thread {
        shared,
        tools,
        links,
        routes_due: None,
        params,
        metrics,
        site: None,
        agent: None,
        inbox: Vec::new(),
        fars: BTreeMap::new(),
        unmoved: Unmoved::default(),
        asks: Asks::default(),
        later: Vec::new(),
        seeded_until: None,
        probed: BTreeMap::new(),
        is_dirty: false,
        led: BTreeSet::new(),
        word: 0,
        leader: None,
        since: None,
        last_change: None,
        succeeded: None,
        declared_dead: None,
        declared_alone: DeclaredAlone::default(),
        out: Out::default(),
        moved: Moved::default(),
        claim_rate: ClaimRate::default(),
        followers: Followers::default(),
        next_report: 0,
    };
    // Discards signals from before the start of this agent.
    while thread.tools.ring.next().is_some() {}
    while !thread.shared.stop.load(Ordering::Acquire) {
        let micros = thread.wake().saturating_sub(micros()).min(LONGEST_WAIT);
        let ready = wait.at_most(micros);
        thread.step(ready);
    }
}

impl Thread {
    fn wake(&self) -> Micros {
        if !self.asks.is_empty() || !self.inbox.is_empty() {
            return 0;
        }
        let agent = self.agent.as_ref().map_or(Micros::MAX, Agent::wake);
        let later = self.later.iter().map(|(at, ..)| *at).min().unwrap_or(Micros::MAX);
        let fars = self.fars.values().map(far::Owners::wake).min().unwrap_or(Micros::MAX);
        let routes = self.routes_due.unwrap_or(Micros::MAX);
        agent.min(later).min(fars).min(self.followers.wake()).min(routes)
    }

    fn step(&mut self, ready: Ready) {
        if ready.agent {
            let _ = self.shared.wake.read();
        }
        let news = self.shared.news.lock().take();
        match news {
            Some(News::Site(site)) => self.set_site(&site),
            Some(News::Left) => self.leave(),
            None => {}
        }
        let Some(site) = self.site.clone() else {
            // Whatever wakes this thread is read, or it would be woken again at once.
            while self.tools.ring.next().is_some() {}
            if let Some(links) = &self.links {
                let _ = links.read(&[]);
            }
            return;
        };
        let now = micros();
        if ready.links && self.read_link_events(&site, now) || self.check_route_gone(&site, now) {
            self.inbox.push(Input::LinkDown);
        }
        self.hear(&site);
        self.look_at_fars(&site);
        self.read_word(&site);
        // An unreadable counter is left out: then a silent leader is only declared dead sooner.
        let is_due = |agent: &Agent| !self.inbox.is_empty() || agent.wake() <= micros();
        if self.agent.as_ref().is_some_and(|agent| agent.counts_decrypted() && is_due(agent))
            && let Ok(count) = self.tools.counters.decrypted()
        {
            self.inbox.push(Input::Decrypted(count));
        }
        deliver(&mut (&mut *self, &*site));
        self.send_asks(&site);
        let now = micros();
        self.notify_followers(&site, now);
        self.forget_seeds(now);
        self.check_old_leaders(now);
        self.out.expire(now, &self.metrics);
        self.declare_dead(&site, now);
        self.notify_agent();
        self.report(&site, now);
    }

    /// Takes over a new site: the mesh has changed, or was read again.
    fn set_site(&mut self, site: &Arc<Site>) {
        let now = micros();
        self.set_fars(site, now);
        self.followers.set_known(&site.followers, now);
        self.site = Some(Arc::clone(site));
        let takes_part =
            site.own_location.gateways.len() > 1 && site.own_location.nodes.contains(&site.own_location.me);
        match &mut self.agent {
            Some(agent) if takes_part => {
                let out = agent.set_own_location(site.own_location.clone(), now, &mut random);
                self.act(site, out);
            }
            Some(_) => {
                self.agent = None;
                self.asks.clear();
                self.inbox.clear();
                self.mark(site, &[]);
            }
            None if takes_part => self.start(site, now),
            None => {}
        }
        self.next_report = 0;
    }

    /// Ends this node's part: it leads nobody, and what it knew of a location that it has left is forgotten.
    fn leave(&mut self) {
        let Some(site) = self.site.take() else { return };
        self.mark(&site, &[]);
        (self.agent, self.leader, self.routes_due) = (None, None, None);
        self.asks.clear();
        self.inbox.clear();
        self.later.clear();
        self.fars.clear();
        self.followers.set_known(&BTreeMap::new(), micros());
        self.metrics.left();
        *self.shared.output.lock() = ThreadOutput { is_published: true, ..ThreadOutput::default() };
        self.shared.changed.notify_one();
        tracing::info!("this node no longer takes part in failover");
    }

    fn start(&mut self, site: &Site, now: Micros) {
        let Ok([_, word]) = self.tools.signals.words() else { return };
        self.word = word;
        let (term, gateway) = site.said(word);
        let marked = self.tools.led.read();
        let is_marked = |(_, node): &(&NodeId, &super::site::Neighbour)| marked.contains(&node.address);
        self.led = site.nodes.iter().filter(is_marked).map(|(id, _)| *id).collect();
        let leads_itself = term > Term::NONE && gateway == site.own_location.me;
        let led: Vec<NodeId> =
            self.led.iter().copied().chain(leads_itself.then_some(site.own_location.me)).collect();
        let start = Start {
            now,
            // Counts from boot, like the kernel's cookies.
            clock: now,
            word: (term, gateway),
            led,
            is_boot: term == Term::NONE,
        };
        if !site.is_gateway() {
            // This node leads nobody, whatever it did before.
            self.mark(site, &[]);
        }
        let mut agent = Agent::new(self.params.clone(), site.own_location.clone(), start, &mut random);
        if leads_itself && site.written == Some(term) {
            agent.lead_location();
        }
        self.agent = Some(agent);
        self.is_dirty = true;
        tracing::info!(
            leader = self.name(gateway),
            term = term.count(),
            gateways = site.own_location.gateways.len(),
            nodes = site.own_location.nodes.len(),
            "failover is on in this location"
        );
    }

    pub(super) fn name(&self, id: NodeId) -> &str {
        self.site.as_ref().map_or("", |site| site.name(id))
    }
}

impl Turns for (&mut Thread, &Site) {
    fn inbox(&mut self) -> &mut Vec<Input> {
        &mut self.0.inbox
    }

    fn is_due(&self) -> bool {
        self.0.agent.as_ref().is_some_and(|agent| agent.wake() <= micros())
    }

    fn look(&mut self) {
        let (thread, site) = self;
        if thread.hear(site) {
            thread.read_word(site);
        }
    }

    fn turn(&mut self, inputs: Vec<Input>) {
        let (thread, site) = self;
        if let Some(agent) = &mut thread.agent {
            let out = agent.turn(micros(), inputs, &mut random);
            thread.act(site, out);
        }
    }
}

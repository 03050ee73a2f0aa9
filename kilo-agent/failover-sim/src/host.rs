//! A node: its links, what its programs do with a signal, and its agent.

use std::collections::BTreeSet;

use kilo_common::{
    lead,
    signal::{self, Body, KERNEL, Kind, LONGEST},
    siphash::Key,
};
use kilo_failover::{
    Agent, Input, Micros, NodeId, Params, Rule, Signal, Term, gateway::Lead, signal::Shared,
};

/// Wall clock at the start of a run, in microseconds.
pub(crate) const CLOCK: u64 = 1_700_000_000_000_000;

/// The id of a node: its index is in the high bits, as hashes of keys differ there.
pub fn id(index: usize) -> NodeId {
    (index as u64 + 1) << 48 | 0x6b67
}

/// The index of the node with this id.
pub fn index(id: NodeId) -> usize {
    ((id >> 48) as usize).wrapping_sub(1)
}

/// The key two nodes share.
pub fn key(a: NodeId, b: NodeId) -> Key {
    Key([a.min(b), a.max(b)])
}

/// What works at a node.
#[derive(Clone, Debug)]
pub struct Wires {
    /// Power.
    pub on: bool,
    /// Until when the whole node is frozen.
    pub paused: Micros,
    /// The uplink as a whole, its outgoing and its incoming direction.
    pub uplink: [bool; 3],
    /// The LAN interface, likewise.
    pub lan: [bool; 3],
    /// Whether it forwards.
    pub forwards: bool,
    /// The half of the LAN it is in while the LAN is split.
    pub half: bool,
}

impl Wires {
    const GOOD: Self =
        Self { on: true, paused: 0, uplink: [true; 3], lan: [true; 3], forwards: true, half: false };

    /// Whether its kernel runs.
    pub fn runs(&self, now: Micros) -> bool {
        self.on && self.paused <= now
    }
}

/// A node of the location under test: wires, kernel and agent.
#[derive(Clone, Debug)]
pub struct Host {
    /// What works.
    pub wires: Wires,
    /// The kernel's `lead` word; the hop id is the gateway's index.
    pub word: u64,
    /// Members marked `NODE_LED`.
    pub led: BTreeSet<usize>,
    /// Secret of one boot, which is mixed with the asker's id to make a cookie.
    pub boot: u64,
    /// By how much the clock of an agent that starts there is ahead of simulated time.
    pub clock: u64,
    /// Whether it runs Go Kilo, which knows no signals.
    pub is_go: bool,
    /// When its agent started.
    pub since: Micros,
    /// Its agent, while it lives.
    pub agent: Option<Agent>,
    /// The term in which it led the location when its agent ended, as annotated on its Node.
    pub was_written: Option<Term>,
    /// Until when the agent does not run.
    pub stalled: Micros,
    /// Inputs that came meanwhile.
    pub inbox: Vec<Input>,
    /// When the agent is woken.
    pub wake: Micros,
    /// Packets that have come out of its tunnel, as its kernel counts them.
    pub decrypted: u64,
}

/// What a kernel does with a signal.
pub enum Taken {
    /// Nothing: it is refused.
    Refused,
    /// It answers.
    Answer(Vec<u8>),
    /// It obeys, so it has another word now, and answers.
    Obeys(Vec<u8>),
    /// It is for the agent.
    Agent(Signal),
}

impl Host {
    /// A healthy node that uses gateway 0.
    pub fn new(boot: u64) -> Self {
        Self {
            wires: Wires::GOOD,
            word: lead::word(Term::NONE, 0),
            led: BTreeSet::new(),
            boot,
            clock: CLOCK,
            is_go: false,
            since: 0,
            agent: None,
            was_written: None,
            stalled: 0,
            inbox: Vec::new(),
            wake: Micros::MAX,
            decrypted: 0,
        }
    }

    /// The gateway it uses.
    pub fn uses(&self) -> usize {
        usize::from(lead::hop_of(self.word))
    }

    /// Term and gateway of its word, as agents report it.
    pub fn said(&self) -> (Term, NodeId) {
        (lead::term_of(self.word), id(self.uses()))
    }

    /// The term in which it leads the location, as annotated on its Node.
    pub fn written(&self) -> Option<Term> {
        let Some(agent) = &self.agent else { return self.was_written };
        agent.lead().filter(|lead| lead.shared() == Shared::Move).map(Lead::term)
    }

    /// The cookie that an ANNOUNCE of a gateway must contain.
    pub(crate) fn cookie(&self, asker: NodeId) -> u64 {
        self.boot.rotate_left(17) ^ asker
    }

    /// Offers the kernel a word, by the rule for every ANNOUNCE; returns
    /// whether it is the word now.
    pub fn obey(&mut self, params: &Params, term: Term, gateway: NodeId) -> bool {
        let offered = lead::word(term, index(gateway) as u16);
        let leaps = !params.keeps(Rule::NoLeap) && lead::is_later(offered, self.word);
        if lead::obeys(self.word, offered) || leaps || !params.keeps(Rule::KernelLaterTerms) {
            self.word = offered;
        }
        self.word == offered
    }

    /// Takes the word that its own agent writes (the program `follow`): any of no earlier term.
    pub fn follow(&mut self, params: &Params, term: Term, gateway: NodeId) {
        let offered = lead::word(term, index(gateway) as u16);
        if !lead::is_later(self.word, offered) || !params.keeps(Rule::KernelLaterTerms) {
            self.word = offered;
        }
    }

    /// Handles a signal that came over the LAN.
    pub fn take(&mut self, params: &Params, me: NodeId, bytes: &[u8]) -> Taken {
        if self.is_go {
            return Taken::Refused;
        }
        let Ok(signal) = signal::parse(bytes) else { return Taken::Refused };
        let from = signal.sender;
        if !signal.kind.has_tag() || !signal::is_authentic(bytes, key(from, me)) {
            return Taken::Refused;
        }
        match (signal.kind, signal.body) {
            (Kind::Roll, Body::Word { .. }) => {
                let (term, gateway) = self.said();
                let body = Body::Word { cookie: self.cookie(from), gateway };
                Taken::Answer(kernel_writes(
                    Signal { kind: Kind::Present, term, ..owned(signal, body) },
                    me,
                    from,
                ))
            }
            (Kind::Announce, Body::Word { cookie, gateway }) => {
                let knows = cookie == self.cookie(from) || !params.keeps(Rule::KernelCookie);
                let before = self.word;
                if gateway != from || !knows || !self.obey(params, signal.term, gateway) {
                    return Taken::Refused;
                }
                let body = Body::Word { cookie: 0, gateway };
                let answer = kernel_writes(Signal { kind: Kind::Follows, ..owned(signal, body) }, me, from);
                if self.word == before { Taken::Answer(answer) } else { Taken::Obeys(answer) }
            }
            (Kind::Roll | Kind::Announce, _) => Taken::Refused,
            _ => Taken::Agent(read(&signal)),
        }
    }
}

fn owned(signal: signal::Signal<signal::Words<'_>>, body: Body<Vec<u64>>) -> Signal {
    let signal::Signal { kind, nonce, term, sender, location, .. } = signal;
    Signal { kind, nonce, term, sender, location, body }
}

/// A signal that has been parsed, with members of its own.
pub fn read(signal: &signal::Signal<signal::Words<'_>>) -> Signal {
    signal.map_list(|words| words.iter().collect())
}

/// The bytes of a signal from `from` to `to`; empty if it cannot be written.
pub fn write(signal: &Signal, from: NodeId, to: NodeId) -> Vec<u8> {
    let mut out = [0; LONGEST];
    let key = signal.kind.has_tag().then(|| key(from, to));
    let length = signal::write(&mut out, signal, key).unwrap_or_default();
    out.get(..length).unwrap_or_default().to_vec()
}

fn kernel_writes(signal: Signal, me: NodeId, to: NodeId) -> Vec<u8> {
    let bytes = write(&Signal { sender: me, ..signal }, me, to);
    debug_assert_eq!(bytes.len(), KERNEL, "an answer is as long as its question");
    bytes
}

//! A stand-by in tests of its parts.

use std::collections::BTreeMap;

use crate::{
    Agent, Far, Input, MS, Micros, NodeId, Output, OwnLocation, Params, SEC, Signal, Start, Term, Turn,
    signal::{Body, Kind, Shared},
};

pub const LEADER: NodeId = 1;
pub const ME: NodeId = 2;
pub const MEMBER: NodeId = 3;
/// Another stand-by, of [`Bench::with_third`].
pub const THIRD: NodeId = 4;
pub const FAR: Far = 9;
/// The cookie with which kernels answer roll calls.
pub const BOOT: u64 = 9;

/// A stand-by whose tunnel has answered for three seconds, as has its leader's kernel; the leader's term
/// is 7.
pub struct Bench {
    pub agent: Agent,
    pub now: Micros,
    drawn: u64,
    nonces: Vec<u64>,
}

impl Bench {
    pub fn new() -> Self {
        let own_location = OwnLocation {
            me: ME,
            location: 7,
            gateways: vec![LEADER, ME],
            nodes: vec![LEADER, ME, MEMBER],
            fars: vec![FAR],
            leaving: BTreeMap::new(),
            several: None,
            cookies: BTreeMap::new(),
        };
        let word = (Term::from_bits(7 << 16), LEADER);
        let start = Start { now: 0, clock: 0, word, led: vec![], is_boot: false };
        let agent = Agent::new(Params::default(), own_location, start, &mut || 1);
        let mut bench = Self { agent, now: 0, drawn: 1, nonces: Vec::new() };
        while bench.now < 3 * SEC {
            bench.turn(vec![]);
        }
        bench.answer_roll_call(LEADER, BOOT);
        bench
    }

    /// The same, with a third gateway.
    pub fn with_third() -> Self {
        let mut bench = Self::new();
        let mut own_location = bench.agent.own_location.clone();
        own_location.gateways.push(THIRD);
        own_location.nodes.push(THIRD);
        bench.agent.set_own_location(own_location, bench.now, &mut || 1);
        bench
    }

    /// A kernel answers the next roll call with the cookie of this boot.
    pub fn answer_roll_call(&mut self, node: NodeId, boot: u64) -> Vec<Output> {
        let nonce = self.roll_call_of(node);
        let body = Body::Word { cookie: boot, gateway: LEADER };
        self.hear(node, Kind::Present, nonce, Term::from_bits(7 << 16), body)
    }

    /// The next turn, 10 ms later, with the answers to all probes of the previous one.
    pub fn turn(&mut self, mut inputs: Vec<Input>) -> Vec<Output> {
        self.now += 10 * MS;
        let at = self.now;
        inputs.extend(self.nonces.drain(..).map(|nonce| Input::Answer { nonce, at }));
        let drawn = &mut self.drawn;
        let mut random = || {
            *drawn += 1;
            *drawn
        };
        let out = self.agent.turn(self.now, inputs, &mut random);
        let probes = out.iter().filter_map(|output| match output {
            Output::Probe { nonce, .. } => Some(*nonce),
            _ => None,
        });
        self.nonces.extend(probes);
        out
    }

    /// The nonce of the next roll call of a node.
    pub fn roll_call_of(&mut self, node: NodeId) -> u64 {
        loop {
            for output in self.turn(vec![]) {
                if let Output::Lan(to, Signal { kind: Kind::Roll, nonce, .. }) = output
                    && to == node
                {
                    return nonce;
                }
            }
        }
    }

    /// A gateway says that it could lead; it uses `uses`.
    pub fn hear_hello(&mut self, from: NodeId, term: Term, uses: NodeId) -> Vec<Output> {
        let leads = uses == from;
        let body =
            Body::Hello { is_fit: true, is_busy: false, leads, gateway: uses, cookie: BOOT, losses: vec![] };
        self.hear(from, Kind::Hello, self.now, term, body)
    }

    /// This gateway leads these nodes, too, and its own kernel does what it is told. Returns the outputs of the
    /// turn after it.
    pub fn lead(&mut self, members: &[NodeId], shared: Shared) -> Vec<Output> {
        let (now, mut out, mut later, mut random) = (self.now, Vec::new(), Vec::new(), || 1);
        let mut turn = Turn { now, random: &mut random, out: &mut out, later: &mut later };
        self.agent.lead_more(members.iter().copied(), shared, &mut turn);
        let words = out.iter().filter_map(|output| match output {
            Output::Word(term, gateway) => Some(Input::Word(*term, *gateway)),
            _ => None,
        });
        let words = words.collect();
        self.turn(words)
    }

    /// A kernel answers the next roll call with this word.
    pub fn present(&mut self, node: NodeId, term: Term, uses: NodeId) -> Vec<Output> {
        let nonce = self.roll_call_of(node);
        self.hear(node, Kind::Present, nonce, term, Body::Word { cookie: BOOT, gateway: uses })
    }

    pub fn hear(
        &mut self,
        from: u64,
        kind: Kind,
        nonce: u64,
        term: Term,
        body: Body<Vec<u64>>,
    ) -> Vec<Output> {
        let signal = Signal { kind, nonce, term, sender: from, location: 7, body };
        self.turn(vec![Input::Signal { from, signal }])
    }
}

//! What a relay gives to pairs: ports, tokens and bindings.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use kilo_common::relay::{BOTH, BOUND, FIRST_PORT, Kind, LAST_PORT, Message, Port};

use super::{NodeId, Output, RESTS, RelayAddresses, fresh::Latest, mapped, numbers::Numbers};

/// Maximum number of pairs, with two ports each.
pub const MOST_PAIRS: usize = 500;
/// Maximum number of pairs per node. For a pair with a stand-by at one end, half of both limits counts, which
/// leaves room for pairs that carry packets.
const MOST_OF_A_NODE: usize = 64;
/// A pair from which nothing was heard, and for which nothing was relayed, is forgotten after this long.
const IDLE: Duration = Duration::from_secs(180);
/// An end that this host's WireGuard does not reach, and from which nothing came for this long, is lost.
const LOST: Duration = Duration::from_secs(30);
/// The pairs of a node that has left the mesh end after this long.
const MISSING: Duration = Duration::from_secs(30);
/// A pair that an end has not bound this long after it was made is dropped. For `ABSENT`, only that end
/// can have it made again.
const NEVER_BOUND: Duration = Duration::from_secs(60);
const ABSENT: Duration = Duration::from_secs(120);
/// Minimum time between two invitations of one end.
const INVITES: Duration = Duration::from_millis(300);
/// Maximum number of answers to one node per second.
const ANSWERS: u32 = 200;

/// Where a message came from, and where it was sent to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heard {
    /// Address and port of the sender.
    pub source: SocketAddr,
    /// Local address that it was sent to.
    pub local: IpAddr,
    /// Local port that it was sent to.
    pub port: u16,
    /// Interface that it came by.
    pub ifindex: u32,
}

/// All pairs that this node relays for.
#[derive(Clone, Debug, Default)]
pub struct Server {
    pairs: BTreeMap<(NodeId, NodeId), PairState>,
    answers: BTreeMap<NodeId, (Instant, u32)>,
    latest: Latest,
    numbers: Numbers,
    /// Number of changes of the table.
    changes: u64,
    /// Since when it no longer relays.
    off: Option<Instant>,
    /// Gateways that carry no packets now.
    stand_bys: BTreeSet<NodeId>,
    /// Pairs that were dropped because an end did not bind its port.
    absent: BTreeMap<(NodeId, NodeId), Absent>,
    /// Where relays are.
    relay_addresses: Arc<RelayAddresses>,
}

/// What this node has given to the two ends of a pair.
#[derive(Clone, Debug)]
struct PairState {
    ends: [End; 2],
    made: Instant,
    /// When an end was last answered with more than a refusal, or packets last passed.
    used: Instant,
}

#[derive(Clone, Copy, Debug)]
struct End {
    id: NodeId,
    port: u16,
    token: u64,
    /// Nonce of the node that got the token.
    nonce: u64,
    /// The last number heard with the token.
    sequence: u64,
    bound: Option<Heard>,
    invited: Option<Instant>,
    /// When something last came from it: it asked, or its port forwarded something.
    came: Instant,
    /// Packets that its port had forwarded by then.
    packets: u64,
    /// The last answer was a refusal: what it still sends does not keep the pair.
    is_refused: bool,
    /// Since when it is not a gateway of the mesh.
    missing: Option<Instant>,
}

/// The end because of which a pair was dropped.
#[derive(Clone, Copy, Debug)]
struct Absent {
    end: NodeId,
    since: Instant,
    invited: Option<Instant>,
}

/// Whether an end that was last invited at `last` may be invited now.
fn may_invite(last: Option<Instant>, now: Instant) -> bool {
    last.is_none_or(|last| now.saturating_duration_since(last) >= INVITES)
}

/// Whether this source is the host of an end that WireGuard has at `endpoint`. Its NAT may have given it another
/// port; another address may be forged, and packets for this end would go to the host that has it.
fn is_same_host(source: SocketAddr, endpoint: SocketAddr) -> bool {
    source.ip().to_canonical() == endpoint.ip().to_canonical()
}

const fn key(one: NodeId, other: NodeId) -> (NodeId, NodeId) {
    if one < other { (one, other) } else { (other, one) }
}

impl Server {
    /// Takes over the pairs that an earlier agent has left in the table of ports.
    pub fn adopted(ports: &BTreeMap<u16, Port>, now: Instant, random: &mut impl FnMut() -> u64) -> Self {
        let mut server = Self::default();
        let address = |bytes: [u8; 16]| IpAddr::from(bytes).to_canonical();
        for (number, port) in ports {
            let [id, other_id] = port.ids;
            let Some(back) = ports.get(&port.by_port) else { continue };
            if id >= other_id || back.by_port != *number || back.ids != [other_id, id] {
                continue;
            }
            let mut end = |number: u16, port: &Port, towards: &Port| End {
                bound: (port.from_port != 0).then(|| Heard {
                    source: SocketAddr::new(address(port.from), port.from_port),
                    local: address(port.at),
                    port: number,
                    ifindex: towards.ifindex,
                }),
                packets: port.packets,
                ..End::new((port.ids[0], number), random().max(1), now)
            };
            let ends = [end(*number, port, back), end(port.by_port, back, port)];
            server.pairs.insert((id, other_id), PairState { ends, made: now, used: now });
        }
        server
    }

    /// Sets whether this node relays now. If it does not, it keeps its pairs for a while: it may become a
    /// gateway or offer again, and its users change to another relay meanwhile.
    pub fn set_relays(&mut self, relays: bool, now: Instant) {
        if relays {
            self.off = None;
            return;
        }
        let off = *self.off.get_or_insert(now);
        if now.saturating_duration_since(off) >= RESTS {
            self.pairs.clear();
        }
    }

    /// Sets which gateways carry no packets now.
    pub fn see_stand_bys(&mut self, stand_bys: BTreeSet<NodeId>) {
        self.stand_bys = stand_bys;
    }

    /// Sets where relays are: nobody may bind there, or packets would go from relay to relay.
    pub fn see_relays(&mut self, relay_addresses: Arc<RelayAddresses>) {
        self.relay_addresses = relay_addresses;
    }

    /// Ends the pairs of nodes that refuse relays.
    pub fn end_pairs_of(&mut self, refuses: impl Fn(NodeId) -> bool) {
        self.pairs.retain(|_, pair| pair.ends.iter().all(|end| !refuses(end.id)));
    }

    /// Ends pairs with an end that has been missing from the mesh for a while, whatever it sends. `is_there`
    /// says which nodes are gateways of other locations.
    pub fn end_pairs_without(&mut self, is_there: impl Fn(NodeId) -> bool, now: Instant) {
        for end in self.pairs.values_mut().flat_map(|pair| &mut pair.ends) {
            end.missing = if is_there(end.id) { None } else { end.missing.or(Some(now)) };
        }
        let is_gone = |end: &End| end.missing.is_some_and(|at| now.saturating_duration_since(at) >= MISSING);
        self.pairs.retain(|_, pair| !pair.ends.iter().any(is_gone));
        let pairs = &self.pairs;
        // A replayed ASK must not count as the latest of a pair that is kept for a while.
        self.latest.keep(|id| is_there(id) || pairs.keys().any(|(one, other)| [*one, *other].contains(&id)));
    }

    /// Forgets the pair that has this port, which another process has taken.
    pub fn forget_port(&mut self, port: u16) {
        self.pairs.retain(|_, pair| pair.ends.iter().all(|end| end.port != port));
    }

    /// Grows whenever a port is given or bound anew.
    pub const fn changes(&self) -> u64 {
        self.changes
    }

    /// Number of repeated messages that were refused so far.
    pub const fn refused(&self) -> u64 {
        self.latest.refused
    }

    /// Number of pairs this relay serves; the metric `kilo_relayed_pairs`.
    pub fn pairs(&self) -> usize {
        self.pairs.len()
    }

    /// Every port that belongs to a pair.
    pub fn taken(&self) -> BTreeSet<u16> {
        self.pairs.values().flat_map(|pair| pair.ends.map(|end| end.port)).collect()
    }

    /// Handles an ASK whose tag was right. `reachable` says where this host's WireGuard reaches nodes: only
    /// they are answered, and only there. `free` says whether a port is available.
    pub fn hear(
        &mut self,
        message: &Message,
        heard: Heard,
        (own, reachable): (NodeId, &BTreeMap<NodeId, SocketAddr>),
        free: &mut impl FnMut(u16) -> bool,
        random: &mut impl FnMut() -> u64,
        now: Instant,
    ) -> Vec<Output> {
        let (from, other) = (message.sender, message.other);
        if message.kind != Kind::Ask || from == other || [from, other].contains(&own) {
            return Vec::new();
        }
        // Replays must not use up the number of times that the node itself may ask.
        let Some(is_latest) = self.latest.hear((from, own), message.sequence, now) else { return Vec::new() };
        // Even one that cannot be answered shows that the end has not gone away.
        if let Some(pair) = self.pairs.get_mut(&key(from, other)) {
            pair.ends_mut(from).0.came = now;
        }
        let Some(endpoint) = reachable.get(&from).copied() else { return Vec::new() };
        if !self.admit(from, now) {
            return Vec::new();
        }
        let offer = Message { kind: Kind::Offer, flags: 0, sender: own, token: 0, port: 0, ..*message };
        let refuse = vec![Output::Send { node: from, to: endpoint, message: offer }];
        let there = reachable.get(&other).copied();
        // An existing pair may carry packets although the relay itself cannot reach the other end.
        if !self.pairs.contains_key(&key(from, other)) {
            let Some(there) = there else { return refuse };
            if let Some(invites) = self.check_absent(from, other, now) {
                // It may be back, and not know yet that somebody asks for it.
                let invite = invites.then(|| self.invite(from, (other, there), &offer));
                return refuse.into_iter().chain(invite).collect();
            }
            let of_node = self.pairs.keys().filter(|(one, other)| [*one, *other].contains(&from)).count();
            let waits = [from, other].iter().any(|end| self.stand_bys.contains(end));
            let share = if waits { 2 } else { 1 };
            if self.pairs.len() >= MOST_PAIRS / share || of_node >= MOST_OF_A_NODE / share {
                return refuse;
            }
            let Some(ports) = self.ports(free, random) else { return refuse };
            let (one, two) = key(from, other);
            let mut end = |id, port| End::new((id, port), random().max(1), now);
            let ends = [end(one, ports[0]), end(two, ports[1])];
            self.pairs.insert((one, two), PairState { ends, made: now, used: now });
            self.changes += 1;
        }
        let Some(pair) = self.pairs.get_mut(&key(from, other)) else { return refuse };
        let (mine, theirs) = pair.ends_mut(from);
        mine.is_refused = there.is_none() && now.saturating_duration_since(theirs.came) >= LOST;
        if mine.is_refused {
            return refuse;
        }
        if mine.nonce != message.nonce && is_latest {
            // The node has started anew; its binding stays until it binds again.
            (mine.nonce, mine.token) = (message.nonce, random().max(1));
        }
        let binds = heard.port == mine.port
            && message.token == mine.token
            && message.sequence > mine.sequence
            && is_same_host(heard.source, endpoint)
            && !self.relay_addresses.contains(heard.source);
        if binds {
            self.changes += u64::from(mine.bound != Some(heard));
            mine.sequence = message.sequence;
            mine.bound = Some(heard);
        }
        let invites = theirs.bound.is_none() && may_invite(theirs.invited, now);
        let invited = there.filter(|_| invites);
        if invited.is_some() {
            theirs.invited = Some(now);
        }
        let (token, port, is_bound) = (mine.token, mine.port, mine.bound.is_some());
        pair.used = now;
        let flags = if is_bound { BOUND } else { 0 } | if pair.passes() { BOTH } else { 0 };
        let mut outputs =
            vec![Output::Send { node: from, to: endpoint, message: Message { flags, token, port, ..offer } }];
        outputs.extend(invited.map(|there| self.invite(from, (other, there), &offer)));
        outputs
    }

    /// Reports to an end, at its WireGuard endpoint, that `from` asks for it.
    const fn invite(&mut self, from: NodeId, (end, there): (NodeId, SocketAddr), offer: &Message) -> Output {
        let sequence = self.numbers.next();
        let message = Message { kind: Kind::Invite, other: from, sequence, ..*offer };
        Output::Send { node: end, to: there, message }
    }

    /// Forgets idle pairs; `ports` says how many packets each port has forwarded, and `wall` is the wall
    /// clock in microseconds, which need not be right.
    pub fn turn(&mut self, ports: &BTreeMap<u16, Port>, now: Instant, wall: u64) {
        self.numbers.read_clocks(now, wall);
        for pair in self.pairs.values_mut() {
            for end in &mut pair.ends {
                let packets = ports.get(&end.port).map_or(0, |port| port.packets);
                // A smaller count means that the port was written anew.
                if packets > end.packets {
                    end.came = now;
                    if !end.is_refused {
                        pair.used = now;
                    }
                }
                end.packets = packets;
            }
        }
        self.pairs.retain(|_, pair| now.saturating_duration_since(pair.used) < IDLE);
        self.drop_those_never_bound(now);
        self.answers.retain(|_, (since, _)| now.saturating_duration_since(*since) < Duration::from_secs(2));
    }

    /// Where agents have different `--stand-bys`, one end may ask for another that never asks for it. Such a
    /// pair takes two ports and keeps the asker from another relay.
    fn drop_those_never_bound(&mut self, now: Instant) {
        let absent = &mut self.absent;
        absent.retain(|_, absent| now.saturating_duration_since(absent.since) < ABSENT);
        self.pairs.retain(|ids, pair| {
            if now.saturating_duration_since(pair.made) < NEVER_BOUND {
                return true;
            }
            // Where neither is bound, the one that has not even asked.
            let unbound = pair.ends.iter().filter(|end| end.bound.is_none());
            let Some(end) = unbound.min_by_key(|end| end.nonce != 0) else { return true };
            absent.insert(*ids, Absent { end: end.id, since: now, invited: None });
            false
        });
    }

    /// Returns `Some` where the pair was dropped because `other` was absent: whether to invite that end now.
    /// The absent end itself may have the pair again.
    fn check_absent(&mut self, from: NodeId, other: NodeId, now: Instant) -> Option<bool> {
        let ids = key(from, other);
        let absent = self.absent.get_mut(&ids)?;
        if absent.end == from {
            self.absent.remove(&ids);
            return None;
        }
        if now.saturating_duration_since(absent.since) >= ABSENT {
            return None;
        }
        let invites = may_invite(absent.invited, now);
        if invites {
            absent.invited = Some(now);
        }
        Some(invites)
    }

    /// The desired table of ports; each end may send `rate` megabits per second, unless that is zero.
    pub fn table(&self, rate: u16) -> BTreeMap<u16, Port> {
        let both = |pair: &PairState| {
            let [one, other] = pair.ends;
            let passes = pair.passes();
            [one.row(&other, passes), other.row(&one, passes)]
                .map(|(number, port)| (number, Port { rate, ..port }))
        };
        self.pairs.values().flat_map(both).collect()
    }

    fn admit(&mut self, from: NodeId, now: Instant) -> bool {
        let (since, count) = self.answers.entry(from).or_insert((now, 0));
        if now.saturating_duration_since(*since) >= Duration::from_secs(1) {
            (*since, *count) = (now, 0);
        }
        *count += 1;
        *count <= ANSWERS
    }

    /// Two free ports; `None`: there are none.
    fn ports(
        &self,
        free: &mut impl FnMut(u16) -> bool,
        random: &mut impl FnMut() -> u64,
    ) -> Option<[u16; 2]> {
        let taken = self.taken();
        let count = u64::from(LAST_PORT - FIRST_PORT) + 1;
        let start = random() % count;
        let all = (0..count).filter_map(|at| u16::try_from((start + at) % count).ok());
        let mut found =
            all.map(|at| FIRST_PORT + at).filter(|port| !taken.contains(port)).filter(|port| free(*port));
        Some([found.next()?, found.next()?])
    }
}

impl PairState {
    fn ends_mut(&mut self, of: NodeId) -> (&mut End, &mut End) {
        let [one, other] = &mut self.ends;
        if one.id == of { (one, other) } else { (other, one) }
    }

    /// Whether packets pass: both ends are bound, by the same family.
    fn passes(&self) -> bool {
        let [one, other] = &self.ends;
        let v6 = |end: &End| end.bound.map(|bound| bound.source.is_ipv6());
        v6(one).is_some() && v6(one) == v6(other)
    }
}

impl End {
    /// An end that has not bound its port yet.
    const fn new((id, port): (NodeId, u16), token: u64, now: Instant) -> Self {
        Self {
            id,
            port,
            token,
            nonce: 0,
            sequence: 0,
            bound: None,
            invited: None,
            came: now,
            packets: 0,
            is_refused: false,
            missing: None,
        }
    }

    fn row(&self, to: &Self, passes: bool) -> (u16, Port) {
        let mut port = Port { ids: [self.id, to.id], by_port: to.port, ..Port::default() };
        if let Some(bound) = self.bound {
            (port.from, port.at) = (mapped(bound.source.ip()), mapped(bound.local));
            port.from_port = bound.source.port();
        }
        if let Some(bound) = to.bound.filter(|_| passes) {
            (port.to, port.by) = (mapped(bound.source.ip()), mapped(bound.local));
            (port.to_port, port.ifindex) = (bound.source.port(), bound.ifindex);
        }
        (self.port, port)
    }
}

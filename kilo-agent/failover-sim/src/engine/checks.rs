//! What must hold at every moment of every run, and how long each member's path was broken although
//! some gateway could have served it.

use std::collections::{BTreeMap, BTreeSet};

use kilo_common::lead::{self, Exit, Sender, Term};
use kilo_failover::{MS, Micros, NodeId, Rule, SEC};

use super::Sim;
use crate::{host, invariants::Invariant};

/// Time to live of a packet that a member sends.
const TTL: u8 = 64;
/// Longer paths are cut: they are wrong already.
const LONGEST: usize = 12;

/// The path of a member's packet to WireGuard.
#[derive(Clone, Debug)]
pub struct Walk {
    /// The nodes on the path, the member first.
    pub nodes: Vec<usize>,
    /// Whether it reaches WireGuard at the last of them.
    pub leaves: bool,
    /// The time to live that is left there.
    pub ttl: u8,
}

/// Counters of a run.
#[derive(Clone, Debug, Default)]
pub struct Counts {
    /// Invariants that did not hold.
    pub broken: BTreeSet<Invariant>,
    /// The longest outage of any member.
    pub longest: Micros,
    /// The longest outage of each member.
    pub of_member: BTreeMap<usize, Micros>,
    /// When which one of several leaders took its own members.
    pub took_home: Vec<(Micros, usize)>,
    /// Takeovers of the location.
    pub taken: u32,
    /// Takeovers of a stand-by for itself alone.
    pub alone: u32,
    /// Changes in which a leader gave leadership away.
    pub given: u32,
    /// Gateways that were given members, in order.
    pub took: Vec<usize>,
    /// How often a leader reported that it gave leadership.
    pub gave: u32,
    /// Planned changes that were taken back.
    pub taken_back: u32,
    /// Signals that agents refused because they had heard them before.
    pub replayed: u32,
    /// Members adopted.
    pub adopted: u32,
    /// How often a stand-by suspected its leader.
    pub suspicions: u32,
    /// Changes of a kernel's word to another gateway.
    pub flips: u32,
    /// Probes and signals that agents sent.
    pub sent: u64,
    /// The gateway that was last given members, and when.
    last: Option<(usize, Micros)>,
}

impl Counts {
    /// Changes of leader, whatever the cause.
    pub fn switches(&self) -> u32 {
        self.taken + self.alone + self.given
    }

    /// How often a signal made a gateway lead members.
    pub fn accepted(&self) -> u32 {
        self.adopted + self.given
    }

    /// Counts that a gateway is given members; one change may come in several signals.
    pub fn count_given(&mut self, gateway: usize, now: Micros) {
        let again = self.last.is_some_and(|(last, at)| last == gateway && at + 50 * MS > now);
        self.last = Some((gateway, now));
        self.given += u32::from(!again);
        self.took.push(gateway);
    }
}

impl Sim {
    pub(crate) fn broken(&mut self, invariant: Invariant) {
        if self.counts.broken.insert(invariant) && self.log {
            println!("{:>9} BROKEN: {invariant}", self.now / MS);
        }
    }

    /// The path that a member's packets take now.
    pub fn walk(&self, member: usize) -> Walk {
        let keeps = |rule| self.params.keeps(rule);
        let mut nodes = vec![member];
        let mut ttl = TTL;
        let mut to = self.hosts[member].uses();
        let mut at = member;
        while to != at && nodes.len() <= LONGEST {
            if !self.lan_works(at, to) || ttl == 0 {
                return Walk { nodes, leaves: false, ttl };
            }
            ttl -= u8::from(keeps(Rule::TimeToLive));
            let host = &self.hosts[to];
            nodes.push(to);
            let sender = if host.led.contains(&at) {
                Sender::Led
            } else if at < self.gateways && keeps(Rule::TwoHops) {
                Sender::Gateway
            } else {
                Sender::Member
            };
            at = to;
            match lead::exit(sender, host.uses() == at) {
                Exit::WireGuard => break,
                Exit::Drop => return Walk { nodes, leaves: false, ttl },
                Exit::PassOn => to = host.uses(),
            }
        }
        let forwards = nodes[1..].iter().all(|node| self.hosts[*node].wires.forwards);
        Walk { leaves: forwards && at < self.gateways, nodes, ttl }
    }

    /// Checks that a path has at most two LAN hops and no node twice, and costs one of
    /// the time to live per hop.
    fn check_walk(&mut self, walk: &Walk) {
        let hops = walk.nodes.len() - 1;
        if hops > 2 {
            self.broken(Invariant::TwoHops);
        }
        if (0..hops).any(|i| walk.nodes[i + 1..].contains(&walk.nodes[i])) {
            self.broken(Invariant::NoLoop);
        }
        if usize::from(TTL - walk.ttl) != hops {
            self.broken(Invariant::TimeToLive);
        }
    }

    fn works(&self, walk: &Walk, member: usize, far: usize) -> bool {
        let exit = walk.nodes[walk.nodes.len() - 1];
        walk.leaves
            && self.fars[far].owner[member].1 == exit
            && self.uplink_works(exit, far, true)
            && self.uplink_works(exit, far, false)
            && (exit == member || self.lan_works(exit, member))
    }

    /// Whether some gateway could carry a member's packets both ways.
    pub fn is_possible(&self, member: usize, far: usize) -> bool {
        (0..self.gateways.min(self.hosts.len())).any(|gateway| {
            self.uplink_works(gateway, far, true)
                && self.uplink_works(gateway, far, false)
                && !self.hosts[gateway].is_go
                && (gateway == member
                    || self.hosts[gateway].wires.forwards
                        && self.lan_works(member, gateway)
                        && self.lan_works(gateway, member))
        })
    }

    /// Evaluates these members' paths after something changed.
    pub fn look(&mut self, members: impl IntoIterator<Item = usize>) {
        for member in members {
            let runs = self.hosts[member].wires.runs(self.now);
            let walk = self.walk(member);
            if runs {
                self.check_walk(&walk);
            }
            for far in 0..self.fars.len() {
                let counts = runs && self.counted[member];
                let bad = counts && !self.works(&walk, member, far) && self.is_possible(member, far);
                match (bad, self.down[member][far]) {
                    (true, None) => self.down[member][far] = Some(self.now),
                    (false, Some(since)) => {
                        self.down[member][far] = None;
                        self.count_outage(member, since);
                    }
                    _ => {}
                }
            }
        }
    }

    /// Evaluates every member's path.
    pub fn look_at_all(&mut self) {
        self.look(0..self.hosts.len());
    }

    /// Counts an outage that has ended, or lasts to the end of the run.
    pub fn count_outage(&mut self, member: usize, since: Micros) {
        if since >= self.watched_from {
            let longest = self.counts.of_member.entry(member).or_default();
            *longest = (*longest).max(self.now - since);
            self.counts.longest = self.counts.longest.max(self.now - since);
            if self.log && self.now - since > 300 * MS {
                println!("{:>9} an outage of {} ms ends", self.now / MS, (self.now - since) / MS);
            }
        }
    }

    /// A member's kernel has obeyed: the term must be later, and the ANNOUNCE not old.
    pub fn word_changed(&mut self, member: usize, before: u64, after: u64, sent_at: Micros) {
        if lead::term_of(after) <= lead::term_of(before) {
            self.broken(Invariant::WordRises);
        }
        if self.now > sent_at + 3 * SEC {
            self.broken(Invariant::NoReplay);
        }
        if lead::hop_of(before) != lead::hop_of(after) {
            self.counts.flips += 1;
            if self.log {
                println!("{:>9} {member} follows {}", self.now / MS, lead::hop_of(after));
            }
        }
        self.followed[member].insert((lead::term_of(after), host::id(usize::from(lead::hop_of(after)))));
    }

    /// A far leader moves a member's prefixes: the member's kernel must have named the new
    /// gateway, or that of the previous gateway must have in that term or still do, and the term must not
    /// fall, unless the far agent has forgotten terms.
    pub fn moved(&mut self, far: usize, member: usize, from: usize, to: (Term, NodeId)) {
        let passes_on = self.followed[from].contains(&to) || self.hosts[from].said().1 == to.1;
        if !self.followed[member].contains(&to) && !passes_on {
            self.broken(Invariant::FarFollows);
        }
        let seen = &mut self.fars[far].seen[member];
        let falls = to.0 < *seen;
        *seen = to.0.max(*seen);
        if falls {
            self.broken(Invariant::LatestTerm);
        }
    }

    /// Whether each gateway claims all nodes that use it in a term.
    pub fn is_claimed(&self) -> bool {
        let is_claimed = |(node, host): (usize, &host::Host)| {
            let agent = self.hosts[host.uses()].agent.as_ref();
            let lead = agent.and_then(kilo_failover::Agent::lead);
            lead.is_some_and(|lead| lead.has(host::id(node)))
        };
        let running = self.hosts.iter().enumerate().filter(|(_, host)| host.wires.runs(self.now));
        running.filter(|(_, host)| host.said().0 > Term::NONE).all(is_claimed)
    }

    /// Whether every member that can be served is, and every far leader that runs agrees with the
    /// member about its gateway.
    pub fn has_converged(&self) -> bool {
        (0..self.hosts.len())
            .filter(|member| self.hosts[*member].wires.runs(self.now) && self.counted[*member])
            .all(|member| {
                let walk = self.walk(member);
                (0..self.fars.len()).all(|far| {
                    !self.fars[far].on || !self.is_possible(member, far) || self.works(&walk, member, far)
                })
            })
    }
}

//! What goes into an agent and what comes out.

use crate::{Far, Micros, NodeId, Params, Rule, Signal, Term, planned::Cause};

/// Something that happened.
#[derive(Clone, Debug)]
pub enum Input {
    /// Time has passed: see [`crate::Agent::wake`].
    Wake,
    /// A kernel answered a probe. `at`: when it arrived, by this kernel's clock.
    Answer {
        /// Nonce of the probe.
        nonce: u64,
        /// When the answer arrived.
        at: Micros,
    },
    /// A signal whose tag or tunnel has been checked, from `from`.
    Signal {
        /// The node whose key or tunnel it was.
        from: NodeId,
        /// The signal.
        signal: Signal,
    },
    /// The kernel's word: the gateway that this node's packets use, and since which term.
    Word(Term, NodeId),
    /// The uplink, its address or its route has gone.
    LinkDown,
    /// Number of packets that have come out of this node's tunnel, as the kernel counts them from any start.
    Decrypted(u64),
    /// Another gateway of this far location answers probes from now on.
    FarMoved(Far),
}

/// Something to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Send a probe.
    Probe {
        /// Comes back in the answer.
        nonce: u64,
        /// Its path and destination.
        path: ProbePath,
    },
    /// Send a tagged signal to a node of the location.
    Lan(NodeId, Signal),
    /// Send a signal through this node's own tunnel to a far leader's control address.
    Tunnel(Far, Signal),
    /// Make the kernel obey this word, unless it has one of a later term. Unlike an ANNOUNCE, it may leap.
    Word(Term, NodeId),
    /// Mark exactly these members `NODE_LED`.
    Led(Vec<NodeId>),
    /// For the log, metrics and events.
    Note(Note),
}

/// The path of a probe, and its destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbePath {
    /// To the kernel of a node of the location.
    Lan(NodeId),
    /// As a forwarded packet, on whatever path this node's packets take.
    Path(Far, Target),
    /// Through this node's own tunnel.
    Own(Far),
}

/// The address of another location that a path probe is sent to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// The location's WireGuard address. The gateway that leads it has that address, but it is another one as soon as a
    /// location comes or goes whose name sorts before, and not every node learns that at the same time.
    Location,
    /// The first address of the acting leader's pods. It stays, but another gateway may lead by now.
    Pods,
}

impl Target {
    /// The two in turn, so that neither a change of addresses nor one of leaders makes three misses in a row.
    /// `locations`: how many are probed in turn; where that is even, the turns are shifted by one in each round. So
    /// within two rounds each location gets both, also where all the others are dead.
    pub fn of_turn(params: &Params, turn: usize, locations: usize) -> Self {
        let shift = if locations.is_multiple_of(2) { turn / locations.max(1) } else { 0 };
        let is_odd = (turn + shift) % 2 == 1;
        if is_odd && params.keeps(Rule::TwoTargets) { Self::Pods } else { Self::Location }
    }
}

/// Why a leader gives leadership.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Given {
    /// Its tunnels are silent.
    Silent,
    /// Its link, address or route has gone.
    LinkDown,
    /// It tries the path before others follow.
    Trial,
    /// A planned change.
    Planned(Cause),
}

/// Something that operators may want to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Note {
    /// A stand-by asks witnesses about this leader.
    Suspects(NodeId),
    /// A stand-by takes over from this leader.
    TakesOver {
        /// Leader it takes over from.
        from: NodeId,
        /// Whether it takes the location, or itself only.
        all: bool,
        /// Since when the leader has been silent.
        since: Micros,
    },
    /// It leads members that this leader gives it.
    IsGiven {
        /// Leader that gives.
        from: NodeId,
        /// Why it gives.
        why: Given,
    },
    /// It leads a member that asked for it.
    Adopts {
        /// The member.
        member: NodeId,
        /// Whether that one was the leader, and brings the shared prefixes.
        was_leader: bool,
        /// For how long the member's leader has been silent; 0: it has booted, and asked who leads.
        age: Micros,
    },
    /// As one of several leaders, it claims the shared prefixes of this acting leader, which is silent.
    ClaimsShared(NodeId),
    /// It continues to lead in a term of its own: this gateway, which Kilo's order names now, could
    /// not be given leadership.
    StaysLeader(NodeId),
    /// It has given leadership to this gateway.
    Gives {
        /// Gateway that leads now.
        to: NodeId,
        /// Why it gives; `None`: it cannot lead any more.
        cause: Option<Cause>,
    },
    /// It sends its own packets through this gateway, to see whether others' could go there.
    Tries(NodeId),
    /// It would give leadership to this gateway, which is not ready.
    NotReady(NodeId),
    /// It leads again, because this gateway did not take over.
    TakesBack(NodeId),
    /// A far leader remembers this term, which is later than the one this gateway leads in: it leads in
    /// the next one.
    Behind(Term),
    /// A signal of the node named was refused: its term is implausibly far ahead.
    Leaps(NodeId),
    /// A signal of the node named was refused: it is replayed, from another boot, or answers another
    /// question.
    Replayed(NodeId),
    /// It would take over, but has done so too often.
    OverBudget,
    /// Its tunnels lose probes while packets come out of them: it carries more than it can, and leads on.
    Busy,
    /// As one of several leaders, it takes this many nodes that are to use it.
    TakesHome(usize),
}

/// What a step may use: the time, random numbers, and where results go.
pub struct Turn<'a> {
    /// Time of this step.
    pub now: Micros,
    /// Returns 64 random bits.
    pub random: &'a mut dyn FnMut() -> u64,
    /// Outputs to be acted on now, in order.
    pub out: &'a mut Vec<Output>,
    /// Outputs to be acted on at a later time.
    pub later: &'a mut Vec<(Micros, Output)>,
}

impl Turn<'_> {
    /// Adds an output for now.
    pub fn push(&mut self, output: Output) {
        self.out.push(output);
    }

    /// Adds an output for after `pause`.
    pub fn after(&mut self, pause: Micros, output: Output) {
        self.later.push((self.now + pause, output));
    }

    /// A random nonce.
    pub fn nonce(&mut self) -> u64 {
        (self.random)()
    }

    /// A number below `bound`, which is not 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        (self.random)() % bound.max(1)
    }

    /// `base` ± 10 %.
    pub fn jittered(&mut self, base: Micros) -> Micros {
        base - base / 10 + self.below(base / 5 + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_location_gets_both_targets_and_never_three_of_a_kind_follow_each_other() {
        let params = Params::default();
        for locations in 1..=6 {
            let targets: Vec<_> = (0..200).map(|turn| Target::of_turn(&params, turn, locations)).collect();
            for far in 0..locations {
                for target in [Target::Location, Target::Pods] {
                    let mut of_far = targets.iter().skip(far).step_by(locations);
                    assert!(of_far.any(|probed| *probed == target), "{far} of {locations}: {target:?}");
                }
            }
            for (turn, pair) in targets.windows(locations + 1).enumerate() {
                assert_ne!(
                    pair[0], pair[locations],
                    "{locations}: turn {turn} and the next of that location"
                );
            }
            let is_row = |row: &&[Target]| row.iter().all(|target| *target == row[0]);
            assert_eq!(targets.windows(3).filter(is_row).count(), 0, "{locations}");
        }
    }
}

//! Times and counts; all times follow the probe interval.

use crate::{MS, Micros, SEC};

/// Shortest permitted probe interval.
pub const SHORTEST: Micros = 20 * MS;
/// Longest permitted probe interval.
pub const LONGEST: Micros = 200 * MS;

/// An interval outside 20 ms to 200 ms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfRange(pub Micros);

impl std::fmt::Display for OutOfRange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "a failover interval of {} ms is outside 20ms to 200ms; choose one within", self.0 / MS)
    }
}

impl std::error::Error for OutOfRange {}

macro_rules! rules {
    ($($(#[$about:meta])+ $name:ident,)+) => {
        /// A rule of the design. With the feature `leave-out` one of them can be left out, by which the
        /// simulation's tests show that each is needed.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Rule {
            $($(#[$about])+ $name,)+
        }

        impl Rule {
            /// Every rule.
            pub const ALL: &[Self] = &[$(Self::$name),+];
        }
    };
}

rules! {
    /// What has arrived is read before anything is decided.
    ReadFirst,
    /// After a late wake-up everything outstanding is discarded.
    DiscardWhenLate,
    /// A takeover needs proof that this node's own tunnel worked meanwhile.
    Proof,
    /// Witnesses are asked.
    Witnesses,
    /// A stand-by that hears no third node takes the shared prefixes only if the gateway that has them
    /// does not answer far leaders.
    SharedNeedsLan,
    /// A gateway that uses itself watches the one that others use.
    Watch,
    /// CLAIM names only members whose kernel follows.
    ClaimFollowers,
    /// The better stand-by goes first.
    Rank,
    /// Takeovers of the location have a budget.
    Budget,
    /// The budget holds back nobody who has not lost leadership lately.
    BudgetSparesOthers,
    /// A stand-by that alone is left with a silent leader asks the gateway that leads by now, and takes
    /// nothing from it.
    AsksWhoLeads,
    /// A returned leader waits until it is given anything back.
    Hold,
    /// A far leader takes later terms only.
    FarLaterTerms,
    /// A member's kernel obeys later terms only.
    KernelLaterTerms,
    /// The gateway that leads the location takes nodes that nobody leads.
    TakesLeftBehind,
    /// A location that has forgotten terms learns them from far leaders.
    CatchesUp,
    /// A term that is many more changes ahead than are known is refused.
    NoLeap,
    /// What one node says raises the latest term by few changes a minute.
    RaisesSlowly,
    /// A member's kernel asks for its cookie.
    KernelCookie,
    /// A number that grows counts within one boot of its sender.
    Boots,
    /// An overloaded leader loses leadership only after a longer silence, and the longer the more often
    /// leadership was lost.
    Patience,
    /// Path probes go to addresses of two kinds in turn.
    TwoTargets,
    /// A gateway passes on nothing that another gateway sent.
    TwoHops,
    /// Each steering hop decrements the time to live.
    TimeToLive,
}

/// Times in microseconds, and counts.
#[derive(Clone, Debug)]
pub struct Params {
    /// The interval that all times follow: the longest time between two probes of a stand-by
    /// whose leader does not answer.
    pub interval: Micros,
    /// Time between two path probes of a stand-by whose leader answers.
    pub calm: Micros,
    /// Time between two path probes, and between two LAN probes, once one was missed.
    pub silent: Micros,
    /// Time between two probes through a gateway's own tunnel.
    pub own: Micros,
    /// Time between two roll calls.
    pub roll: Micros,
    /// Nodes per second that each gateway calls in a large location.
    pub roll_rate: u64,
    /// Time between two HELLOs.
    pub hello: Micros,
    /// How long a HELLO counts: the next one may be lost.
    pub heard: Micros,
    /// How long an answer shows that a tunnel works, in addition to its round trip.
    pub answers: Micros,
    /// How long a stand-by waits for each better one.
    pub rank: Micros,
    /// A wake-up later than this is late.
    pub late: Micros,
    /// Deadline of a LAN probe.
    pub lan_deadline: Micros,
    /// Margin that is added to every deadline of path probes.
    pub margin: Micros,
    /// Minimum and maximum deadline of path probes.
    pub path_deadline: (Micros, Micros),
    /// Misses in a row of path and LAN that make a hard suspicion.
    pub hard: usize,
    /// Misses in a row of the path alone that make a soft one.
    pub soft: usize,
    /// How many members are asked.
    pub witnesses: usize,
    /// Maximum number of far leaders that are probed.
    pub targets: usize,
    /// A member's minimum probe interval.
    pub member: Micros,
    /// Probes per second that all members of a location send together.
    pub members_rate: u64,
    /// Misses in a row after which a member asks to be adopted.
    pub member_misses: usize,
    /// Misses in a row on all its tunnels after which a leader hands over.
    pub leader_misses: usize,
    /// How long all probes through a leader must be lost while packets still come out of its tunnel; four
    /// times as long after one loss of leadership within `memory`, 16 times after two.
    pub overload: Micros,
    /// How long a location counts as overloaded after that was observed.
    pub busy: Micros,
    /// How long nothing may have come back through an overloaded leader before a member is taken from it.
    pub overload_member: Micros,
    /// Time of health before a leader returns; doubled for each loss within `memory`.
    pub hold: Micros,
    /// The longest such time.
    pub longest_hold: Micros,
    /// How long losses are remembered, at least.
    pub memory: Micros,
    /// Takeovers of the location that may come at once, and the time after which one more is allowed.
    pub budget: (u64, Micros),
    /// Changes of a far location's leader that may come at once, and the time after
    /// which one more is allowed.
    pub far_budget: (u64, Micros),
    /// The rule that is left out (feature `leave-out`); `None`: none is.
    #[cfg(feature = "leave-out")]
    pub without: Option<Rule>,
}

impl Default for Params {
    fn default() -> Self {
        Self::scaled(40 * MS)
    }
}

impl Params {
    /// The times for a probe interval.
    ///
    /// # Errors
    /// When it is outside [`SHORTEST`] to [`LONGEST`].
    pub fn new(interval: Micros) -> Result<Self, OutOfRange> {
        if (SHORTEST..=LONGEST).contains(&interval) {
            Ok(Self::scaled(interval))
        } else {
            Err(OutOfRange(interval))
        }
    }

    fn scaled(interval: Micros) -> Self {
        Self {
            interval,
            calm: interval * 3 / 2,
            silent: interval * 3 / 4,
            own: interval * 5 / 2,
            roll: (interval * 25).min(SEC),
            roll_rate: 100,
            // At most what a node of the default interval expects: not all have the same one.
            hello: (interval * 5).min(200 * MS),
            heard: (interval * 16).max(500 * MS),
            answers: (interval * 10).max(400 * MS),
            rank: interval * 5 / 2,
            late: interval * 3 / 4,
            lan_deadline: interval * 3 / 4,
            margin: 15 * MS,
            path_deadline: (30 * MS, 250 * MS),
            hard: 3,
            soft: 6,
            witnesses: 5,
            targets: 3,
            member: interval * 25 / 4,
            members_rate: 500,
            member_misses: 7,
            leader_misses: 4,
            overload: interval * 14,
            busy: interval * 125,
            overload_member: interval * 100,
            hold: 60 * SEC,
            longest_hold: 3_600 * SEC,
            memory: 600 * SEC,
            budget: (8, 15 * SEC),
            far_budget: (16, SEC),
            #[cfg(feature = "leave-out")]
            without: None,
        }
    }

    /// Whether a rule holds: always, except in simulations that leave it out.
    #[inline]
    #[allow(unused_variables, clippy::unused_self, reason = "without the feature it is a constant")]
    pub fn keeps(&self, rule: Rule) -> bool {
        #[cfg(feature = "leave-out")]
        return self.without != Some(rule);
        #[cfg(not(feature = "leave-out"))]
        true
    }

    /// How long a leader with so many losses has to be healthy before it returns.
    pub fn hold_after(&self, losses: u32) -> Micros {
        let doubled = self.hold.saturating_mul(1 << losses.saturating_sub(1).min(12));
        if self.keeps(Rule::Hold) { doubled.min(self.longest_hold) } else { 0 }
    }

    /// How long so many losses, or returns, are remembered after the last one: twice as long as a leader then
    /// waits, or it would never wait for longer.
    pub fn remembers(&self, count: u32) -> Micros {
        self.memory.max(2 * self.hold_after(count))
    }

    /// How long nothing must have come back through an overloaded leader, in a location that has lost leaders
    /// so often lately. An overloaded tunnel drops many packets, but not all: each loss of leadership makes
    /// it harder to take a long row of drops for a fault, so that no load makes leadership go to and fro.
    pub fn patience(&self, losses: u32) -> Micros {
        if self.keeps(Rule::Patience) { self.overload << (2 * losses.min(2)) } else { 0 }
    }

    /// As [`Self::patience`], for a leader that nothing shows to be overloaded, and that has to give
    /// leadership itself: the first two faults cost no more than its probes.
    pub fn patience_with_faults(&self, losses: u32) -> Micros {
        losses.checked_sub(2).map_or(0, |more| self.patience(more))
    }

    /// How the roll of a location of so many nodes is called: the time between two parts of it, and
    /// how many nodes a part has. The ring of signals has no room for the answers of a large
    /// location at once. Gateways are called with each part, so that parts follow each other as
    /// quickly in the largest location.
    pub fn roll_of(&self, nodes: usize) -> (Micros, usize) {
        let whole = self.whole_roll(nodes);
        let parts = (nodes / 40).max(1);
        (whole / parts as u64, nodes.div_ceil(parts))
    }

    /// Time in which every node of a location of so many is called.
    pub fn whole_roll(&self, nodes: usize) -> Micros {
        self.roll.max(nodes as u64 * SEC / self.roll_rate)
    }

    /// A member's probe interval in a location of so many nodes.
    pub fn member_interval(&self, nodes: usize) -> Micros {
        self.member.max(nodes as u64 * SEC / self.members_rate)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_follow_the_interval_and_its_range_is_kept() {
        let slow = Params::new(200 * MS).unwrap();
        assert_eq!((slow.own, slow.hello, slow.rank), (500 * MS, 200 * MS, 500 * MS));
        for wrong in [0, 19 * MS, 201 * MS] {
            assert_eq!(Params::new(wrong).unwrap_err(), OutOfRange(wrong));
        }
        assert!(OutOfRange(0).to_string().contains("20ms to 200ms"));
    }

    #[test]
    fn each_loss_doubles_the_hold_until_an_hour() {
        let params = Params::default();
        let holds: Vec<_> = (0..9).map(|losses| params.hold_after(losses) / SEC).collect();
        assert_eq!(holds, [60, 60, 120, 240, 480, 960, 1920, 3600, 3600]);
    }

    #[test]
    fn patience_grows_with_losses_to_nine_seconds() {
        let params = Params::default();
        assert_eq!([0, 1, 2, 9].map(|losses| params.patience(losses) / MS), [560, 2_240, 8_960, 8_960]);
        assert_eq!([0, 1, 2, 3].map(|losses| params.patience_with_faults(losses) / MS), [0, 0, 560, 2_240]);
    }

    #[test]
    fn a_large_location_is_called_in_parts_and_less_often() {
        let params = Params::default();
        let [few, some, many, most] = [5, 100, 1_000, 4_000].map(|nodes| params.roll_of(nodes));
        assert_eq!((few, some), ((SEC, 5), (SEC / 2, 50)));
        assert_eq!((many, most), ((400 * MS, 40), (400 * MS, 40)));
    }

    #[test]
    fn members_of_a_large_location_probe_less_often() {
        let params = Params::default();
        assert_eq!([5, 125, 1_000].map(|nodes| params.member_interval(nodes) / MS), [250, 250, 2_000]);
    }
}

//! Whether an agent reads slices or Nodes. Pure: time and random numbers are parameters.

use std::{
    fmt,
    time::{Duration, Instant},
};

use super::Incomplete;

/// How long agents tolerate slices that are wrong or late, besides the time in which all of them can be
/// written: their writer repairs them within a second, and another agent takes its place within half a minute.
const PATIENCE: Duration = Duration::from_secs(45);
/// How long an agent that starts waits for the API server to say whether there are slices, and to list them,
/// besides [`patience_at_start`].
const LISTED: Duration = Duration::from_secs(10);
/// How long an agent that starts waits for each node of the mesh, up to [`PATIENCE`], before it lists Nodes:
/// all agents may start, and a small mesh costs the API server little.
const FOR_EACH_NODE: Duration = Duration::from_millis(45);
/// Pause after a switch that failed.
const RETRY: Duration = Duration::from_secs(5);
/// How long slices must be right before they are read again instead of Nodes.
const AGAIN: Duration = Duration::from_secs(60);
/// Bytes of a Node in a list. All agents may switch at once, and each then lists all nodes.
pub const NODE_BYTES: f64 = 7e3;
/// Bytes of a node in a slice, for agents that switch to slices.
pub const ENTRY_BYTES: f64 = 500.0;
/// Bytes per second that the API server may send to all agents together because of lists and slices.
pub const EGRESS: f64 = 50e6;
const MOST_SPREAD: Duration = Duration::from_mins(4);
/// Longest spread of agents that start: one that has not listed anything yet renews no heartbeat.
const MOST_SPREAD_OF_STARTS: Duration = Duration::from_mins(1);

/// What an agent reads nodes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chosen {
    /// Node objects.
    Nodes,
    /// Slices.
    Slices,
}

/// Why an agent reads Nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// `--slices=off`
    Off,
    /// This account may not read `NodeSlices`, or the API server does not know them.
    Denied,
    /// The slices are incomplete.
    Incomplete(Incomplete),
    /// Nobody has renewed the index for too long.
    NoWriter,
    /// A node runs Kilo's own agent, or an older one of ours.
    Foreign,
    /// The slices disagree with what this node has published.
    Late,
}

impl Reason {
    fn patience(self, nodes: usize) -> Duration {
        match self {
            Self::Incomplete(_) | Self::Late => PATIENCE + time_to_list(nodes, ENTRY_BYTES),
            Self::Off | Self::Denied | Self::NoWriter | Self::Foreign => Duration::ZERO,
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Off => "--slices=off",
            Self::Denied => "this account may not read NodeSlices, or the API server does not know them",
            Self::Incomplete(Incomplete::NotListed) => "slices have not been listed yet",
            Self::Incomplete(Incomplete::NoIndex) => "no agent has written slices",
            Self::Incomplete(Incomplete::Missing) => "a slice is missing",
            Self::Incomplete(Incomplete::Malformed) => "a slice cannot be read",
            Self::Incomplete(Incomplete::OtherLabel) => "slices were written with another --topology-label",
            Self::NoWriter => "no agent has renewed slices for minutes",
            Self::Foreign => "a node runs Kilo's own agent, or an older one of ours",
            Self::Late => "slices do not follow the own node",
        })
    }
}

/// What the choice depends on.
#[derive(Clone, Copy, Debug)]
pub struct Inputs {
    /// Why slices must not be read; `None`: they may be.
    pub against: Option<Reason>,
    /// Nodes of the mesh.
    pub nodes: usize,
    /// The API server does not answer, so nothing can be listed.
    pub is_away: bool,
    /// This agent may soon write slices, for which it has to know the Nodes.
    pub is_candidate: bool,
    /// The current time.
    pub now: Instant,
    /// A random number from 0 to 1, so that many agents do not list at the same moment.
    pub random: f64,
}

/// What is read now, and what is read next.
#[derive(Debug, Default)]
pub struct Source {
    reads: Option<Chosen>,
    due: Option<Due>,
    was_in_use: bool,
}

/// A switch to come, unless it is no longer wanted by then.
#[derive(Clone, Copy, Debug)]
struct Due {
    wanted: Chosen,
    at: Instant,
    /// The random part of the pause. It is drawn once: the least of many draws would be none.
    spread: Duration,
}

impl Source {
    /// Returns what to read, `None` if nothing yet, and when to ask again even if nothing has happened. Once
    /// that is read, [`Self::reads`] is to be called, or [`Self::failed`] if it cannot be read.
    pub fn next(&mut self, inputs: Inputs) -> (Option<Chosen>, Option<Instant>) {
        let wanted = if inputs.against.is_some() { Chosen::Nodes } else { Chosen::Slices };
        if self.reads == Some(wanted) || inputs.is_away {
            self.due = None;
            return (self.reads, None);
        }
        let known = self.due.filter(|due| due.wanted == wanted);
        let spread = known.map_or_else(|| spread(inputs), |due| due.spread);
        // A more pressing reason than the previous one brings it forward.
        let at = inputs.now + self.pause(inputs, spread);
        let at = known.map_or(at, |due| due.at.min(at));
        self.due = Some(Due { wanted, at, spread });
        if at <= inputs.now { (Some(wanted), None) } else { (self.reads, Some(at)) }
    }

    /// Nodes are read from there now.
    pub fn reads(&mut self, chosen: Chosen) {
        (self.reads, self.due) = (Some(chosen), None);
        self.was_in_use |= chosen == Chosen::Slices;
    }

    /// The switch that was due has failed, and nothing has changed.
    pub fn failed(&mut self, now: Instant) {
        if let Some(due) = &mut self.due {
            due.spread += RETRY;
            due.at = now + due.spread;
        }
    }

    fn pause(&self, Inputs { against, nodes, is_candidate, .. }: Inputs, spread: Duration) -> Duration {
        match (self.reads, against) {
            (None, Some(Reason::Incomplete(Incomplete::NotListed))) => {
                LISTED + patience_at_start(nodes) + time_to_list(nodes, ENTRY_BYTES).min(MOST_SPREAD) + spread
            }
            (None, Some(Reason::NoWriter)) if !is_candidate => patience_at_start(nodes) + spread,
            (None, _) => Duration::ZERO,
            (Some(_), Some(reason)) => reason.patience(nodes) + spread,
            (Some(_), None) if self.was_in_use => AGAIN + spread,
            (Some(_), None) => spread,
        }
    }
}

/// The random part of a pause: all agents may switch at once.
fn spread(Inputs { against, nodes, random, .. }: Inputs) -> Duration {
    let bytes = if against.is_some() { NODE_BYTES } else { ENTRY_BYTES };
    time_to_list(nodes, bytes).min(MOST_SPREAD).mul_f64(random.clamp(0.0, 1.0))
}

/// How long an agent that starts waits for a writer of the slices that it has found, before it lists Nodes.
fn patience_at_start(nodes: usize) -> Duration {
    FOR_EACH_NODE.saturating_mul(u32::try_from(nodes).unwrap_or(u32::MAX)).min(PATIENCE)
}

/// Within this time an agent that starts has listed Nodes, though all others start as well.
pub fn longest_start(nodes: usize) -> Duration {
    let slices = LISTED + patience_at_start(nodes) + time_to_list(nodes, ENTRY_BYTES).min(MOST_SPREAD);
    // They begin within this time, and the last one may need as long again.
    slices + time_to_list(nodes, NODE_BYTES).min(MOST_SPREAD) * 2
}

/// How long the API server sends when each of `nodes` agents lists all nodes.
fn time_to_list(nodes: usize, bytes: f64) -> Duration {
    time_to_send(nodes, f64::from(u32::try_from(nodes).unwrap_or(u32::MAX)) * bytes)
}

/// How long the API server sends when each of `agents` lists `bytes`.
pub fn time_to_send(agents: usize, bytes: f64) -> Duration {
    let agents = f64::from(u32::try_from(agents).unwrap_or(u32::MAX));
    Duration::from_secs_f64(agents * bytes / EGRESS)
}

/// How long an agent waits before it lists slices, in case all others start as well; `random` is from 0 to 1.
pub fn start_spread(nodes: usize, random: f64) -> Duration {
    time_to_list(nodes, ENTRY_BYTES).min(MOST_SPREAD_OF_STARTS).mul_f64(random.clamp(0.0, 1.0))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    const MISSING: Option<Reason> = Some(Reason::Incomplete(Incomplete::Missing));
    const NOT_LISTED: Option<Reason> = Some(Reason::Incomplete(Incomplete::NotListed));

    struct Case {
        source: Source,
        start: Instant,
        nodes: usize,
        random: f64,
        is_away: bool,
        is_candidate: bool,
        /// The next switch fails.
        fails: bool,
    }

    impl Case {
        fn new() -> Self {
            Self {
                source: Source::default(),
                start: Instant::now(),
                nodes: 1000,
                random: 5.0 / 140.0,
                is_away: false,
                is_candidate: false,
                fails: false,
            }
        }

        /// An agent that reads slices.
        fn with_slices() -> Self {
            let mut case = Self::new();
            case.at(0, None);
            case
        }

        fn at(&mut self, seconds: u64, against: Option<Reason>) -> (Option<Chosen>, Option<u64>) {
            let now = self.start + Duration::from_secs(seconds);
            let Self { nodes, random, is_away, is_candidate, .. } = *self;
            let (chosen, due) =
                self.source.next(Inputs { against, nodes, is_away, is_candidate, now, random });
            match chosen.filter(|chosen| self.source.reads != Some(*chosen)) {
                Some(_) if self.fails => self.source.failed(now),
                Some(chosen) => self.source.reads(chosen),
                None => {}
            }
            (self.source.reads, due.map(|due| due.duration_since(self.start).as_secs()))
        }
    }

    const NODES: Option<Chosen> = Some(Chosen::Nodes);
    const SLICES: Option<Chosen> = Some(Chosen::Slices);

    #[test]
    fn a_start_reads_slices_where_they_are_and_else_nodes() {
        assert_eq!(Case::new().at(0, None), (SLICES, None));
        let mut case = Case::new();
        assert_eq!(case.at(0, Some(Reason::Incomplete(Incomplete::NoIndex))), (NODES, None));
        assert_eq!(case.at(10, None), (NODES, Some(10)), "not all at once");
        assert_eq!(case.at(15, None), (SLICES, None));
    }

    #[test]
    fn a_slice_that_is_mended_in_time_changes_nothing() {
        let mut case = Case::with_slices();
        assert_eq!(case.at(1, MISSING), (SLICES, Some(61)));
        assert_eq!(case.at(5, None), (SLICES, None));
        assert_eq!(case.at(20, MISSING), (SLICES, Some(80)));
        assert_eq!(case.at(80, MISSING), (NODES, None));
        // And back, once the slices stay right.
        assert_eq!(case.at(90, None), (NODES, Some(150)));
        assert_eq!(case.at(100, MISSING), (NODES, None));
        assert_eq!(case.at(110, None), (NODES, Some(170)));
        assert_eq!(case.at(175, None), (SLICES, None));
    }

    #[test]
    fn a_writer_has_the_time_in_which_it_can_write_all_slices_anew() {
        let due = |nodes: usize, against| {
            let mut case = Case { nodes, random: 0.0, ..Case::with_slices() };
            case.at(0, against).1
        };
        assert_eq!([100, 1000, 5000].map(|nodes| due(nodes, MISSING)), [Some(45), Some(55), Some(295)]);
        assert_eq!(due(2000, Some(Reason::Late)), Some(85));
    }

    #[test]
    fn a_pressing_reason_does_not_wait_for_another() {
        let mut case = Case::with_slices();
        assert_eq!(case.at(1, MISSING), (SLICES, Some(61)));
        assert_eq!(case.at(2, Some(Reason::Foreign)), (SLICES, Some(7)));
        assert_eq!(case.at(3, MISSING), (SLICES, Some(7)));
    }

    #[test]
    fn agents_that_look_often_switch_no_sooner_than_others() {
        // What an agent draws at each look: at last the least, which must not count.
        let draws = [0.9, 0.5, 0.99, 0.01, 0.0];
        let mut case = Case::with_slices();
        for (seconds, random) in draws.into_iter().enumerate() {
            case.random = random;
            assert_eq!(case.at(seconds as u64, Some(Reason::Foreign)), (SLICES, Some(126)));
        }
        assert_eq!(case.at(125, Some(Reason::Foreign)).0, SLICES);
        assert_eq!(case.at(126, Some(Reason::Foreign)).0, NODES);
        // A mesh that has become smaller does not bring it forward either.
        let mut case = Case { random: 0.5, ..Case::with_slices() };
        assert_eq!(case.at(0, MISSING), (SLICES, Some(125)));
        case.nodes = 900;
        assert_eq!(case.at(60, MISSING), (SLICES, Some(125)));
    }

    #[test]
    fn switches_of_a_thousand_agents_are_spread_over_what_the_server_needs() {
        // A generator with a period of 2^32 is random enough.
        let mut state = 7_u32;
        let mut random = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            f64::from(state) / f64::from(u32::MAX)
        };
        let mut switched: Vec<u64> = (0..1000)
            .map(|_| {
                let mut case = Case::with_slices();
                let switches = |seconds: &u64| {
                    case.random = random();
                    case.at(*seconds, Some(Reason::Foreign)).0 == NODES
                };
                (0..=140).find(switches).unwrap()
            })
            .collect();
        switched.sort_unstable();
        let most = (0..140).map(|second| switched.iter().filter(|at| **at == second).count()).max().unwrap();
        assert!((60..80).contains(&switched[500]) && most < 20, "{} {most}", switched[500]);
    }

    #[test]
    fn a_node_of_kilos_own_sends_all_back_to_nodes_as_fast_as_the_server_can_send_them() {
        let mut case = Case::with_slices();
        assert_eq!(case.at(1, Some(Reason::Foreign)), (SLICES, Some(6)));
        assert_eq!(case.at(6, Some(Reason::Foreign)), (NODES, None));
        let mut case = Case { nodes: 1_000_000, random: 1.0, ..Case::with_slices() };
        assert_eq!(case.at(0, Some(Reason::Foreign)).1, Some(MOST_SPREAD.as_secs()));
    }

    #[test]
    fn nobody_switches_while_the_server_does_not_answer_or_as_soon_as_it_does() {
        let mut case = Case { random: 0.5, ..Case::with_slices() };
        assert_eq!(case.at(1, Some(Reason::Foreign)), (SLICES, Some(71)));
        case.is_away = true;
        assert_eq!(case.at(30, Some(Reason::Foreign)), (SLICES, None));
        assert_eq!(case.at(3600, Some(Reason::Foreign)), (SLICES, None));
        case.is_away = false;
        assert_eq!(case.at(3601, Some(Reason::Foreign)), (SLICES, Some(3671)));
        assert_eq!(case.at(3602, None), (SLICES, None), "mended meanwhile");
    }

    #[test]
    fn a_switch_that_fails_is_tried_again_later_and_only_while_it_is_wanted() {
        let mut case = Case { random: 0.0, ..Case::new() };
        case.at(0, Some(Reason::Incomplete(Incomplete::NoIndex)));
        case.fails = true;
        assert_eq!(case.at(10, None), (NODES, None));
        assert_eq!(case.at(11, None), (NODES, Some(15)));
        assert_eq!(case.at(12, MISSING), (NODES, None), "it would empty the mesh");
        assert_eq!(case.at(20, None), (NODES, None));
        case.fails = false;
        assert_eq!(case.at(24, None), (NODES, Some(25)));
        assert_eq!(case.at(25, None), (SLICES, None));
    }

    #[test]
    fn after_a_power_failure_all_but_the_first_candidates_give_a_writer_time_before_they_list_nodes() {
        let old = Some(Reason::NoWriter);
        let mut case = Case::new();
        assert_eq!(case.at(0, old), (None, Some(50)), "45 s, and at 50 MB/s");
        assert_eq!(case.at(20, None), (SLICES, None), "somebody writes");
        let mut case = Case::new();
        case.at(0, old);
        assert_eq!(case.at(49, old).0, None);
        assert_eq!(case.at(50, old), (NODES, None), "nobody may write");
        assert_eq!(Case { is_candidate: true, ..Case::new() }.at(0, old), (NODES, None));
        let mut small = Case { nodes: 20, random: 1.0, ..Case::new() };
        assert_eq!((small.at(0, old).0, small.at(1, old).0), (None, NODES));
        assert_eq!(Case::new().at(0, Some(Reason::Foreign)), (NODES, None));
    }

    #[test]
    fn a_server_that_is_slow_at_the_start_is_not_asked_for_fourteen_times_as_much() {
        let mut case = Case::new();
        assert_eq!(case.at(0, NOT_LISTED), (None, Some(70)), "10 s, 45 s, 10 s to send them, and the spread");
        assert_eq!(case.at(30, None), (SLICES, None));
        let mut case = Case::new();
        case.at(0, NOT_LISTED);
        assert_eq!(case.at(2, Some(Reason::Denied)), (NODES, None));
        assert_eq!(Case { nodes: 5, ..Case::new() }.at(0, NOT_LISTED), (None, Some(10)));
        let mut case = Case::new();
        case.at(0, NOT_LISTED);
        assert_eq!(case.at(70, NOT_LISTED), (NODES, None), "slices alone do not work");
        assert_eq!(longest_start(1000), Duration::from_secs(345));
        assert!(longest_start(usize::MAX) < Duration::from_mins(14));
    }

    #[test]
    fn starts_of_a_large_mesh_are_spread_over_what_the_server_needs_and_a_minute_at_most() {
        assert_eq!(start_spread(100, 1.0), Duration::from_millis(100));
        assert_eq!(start_spread(1000, 0.5), Duration::from_secs(5));
        assert_eq!(start_spread(5000, 1.0), Duration::from_mins(1));
        assert_eq!(start_spread(usize::MAX, 0.0), Duration::ZERO);
    }
}

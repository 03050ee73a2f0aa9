//! Whether an agent reads slices or Nodes. Pure: time and random numbers are parameters.

use std::{
    fmt,
    time::{Duration, Instant},
};

use super::Incomplete;

/// How long agents tolerate slices that are wrong or late: their writer repairs them within a second, and
/// another agent takes its place within half a minute.
const PATIENCE: Duration = Duration::from_secs(45);
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
    fn patience(self) -> Duration {
        match self {
            Self::Incomplete(_) | Self::Late => PATIENCE,
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
    /// The current time.
    pub now: Instant,
    /// A random number from 0 to 1, so that many agents do not list at the same moment.
    pub random: f64,
}

/// What is read now, and what is read next.
#[derive(Debug, Default)]
pub struct Source {
    chosen: Option<Chosen>,
    /// When to switch, unless that is no longer wanted by then.
    due: Option<(Chosen, Instant)>,
    was_in_use: bool,
}

impl Source {
    /// Returns what to read, and when to ask again even if nothing has happened.
    pub fn next(&mut self, inputs: Inputs) -> (Chosen, Option<Instant>) {
        let wanted = if inputs.against.is_some() { Chosen::Nodes } else { Chosen::Slices };
        let chosen = *self.chosen.get_or_insert(wanted);
        if chosen == wanted {
            self.due = None;
        } else {
            // A more pressing reason than the previous one brings it forward.
            let pause = inputs.now + self.pause(inputs);
            let due = self.due.map_or(pause, |(_, due)| due.min(pause));
            self.due = Some((wanted, due));
            if due <= inputs.now {
                (self.chosen, self.due) = (Some(wanted), None);
            }
        }
        let chosen = self.chosen.unwrap_or(wanted);
        self.was_in_use |= chosen == Chosen::Slices;
        (chosen, self.due.map(|(_, due)| due))
    }

    fn pause(&self, inputs: Inputs) -> Duration {
        let bytes = if inputs.against.is_some() { NODE_BYTES } else { ENTRY_BYTES };
        let spread =
            time_to_list(inputs.nodes, bytes).min(MOST_SPREAD).mul_f64(inputs.random.clamp(0.0, 1.0));
        match inputs.against {
            Some(reason) => reason.patience() + spread,
            None if self.was_in_use => AGAIN + spread,
            None => spread,
        }
    }
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

    struct Case {
        source: Source,
        start: Instant,
    }

    impl Case {
        fn new() -> Self {
            Self { source: Source::default(), start: Instant::now() }
        }

        fn at(&mut self, seconds: u64, against: Option<Reason>) -> (Chosen, Option<u64>) {
            let now = self.start + Duration::from_secs(seconds);
            let (chosen, due) = self.source.next(Inputs { against, nodes: 1000, now, random: 5.0 / 140.0 });
            (chosen, due.map(|due| due.duration_since(self.start).as_secs()))
        }
    }

    #[test]
    fn a_start_reads_slices_where_they_are_and_else_nodes() {
        assert_eq!(Case::new().at(0, None), (Chosen::Slices, None));
        let mut case = Case::new();
        assert_eq!(case.at(0, Some(Reason::Incomplete(Incomplete::NoIndex))), (Chosen::Nodes, None));
        assert_eq!(case.at(10, None), (Chosen::Nodes, Some(10)), "not all at once");
        assert_eq!(case.at(15, None), (Chosen::Slices, None));
    }

    #[test]
    fn a_slice_that_is_mended_in_time_changes_nothing() {
        let mut case = Case::new();
        case.at(0, None);
        assert_eq!(case.at(1, MISSING), (Chosen::Slices, Some(51)));
        assert_eq!(case.at(5, None), (Chosen::Slices, None));
        assert_eq!(case.at(20, MISSING), (Chosen::Slices, Some(70)));
        assert_eq!(case.at(70, MISSING), (Chosen::Nodes, None));
        // And back, once the slices stay right.
        assert_eq!(case.at(80, None), (Chosen::Nodes, Some(140)));
        assert_eq!(case.at(90, MISSING), (Chosen::Nodes, None));
        assert_eq!(case.at(100, None), (Chosen::Nodes, Some(160)));
        assert_eq!(case.at(165, None), (Chosen::Slices, None));
    }

    #[test]
    fn a_pressing_reason_does_not_wait_for_another() {
        let mut case = Case::new();
        case.at(0, None);
        assert_eq!(case.at(1, MISSING), (Chosen::Slices, Some(51)));
        assert_eq!(case.at(2, Some(Reason::Foreign)), (Chosen::Slices, Some(7)));
        assert_eq!(case.at(3, MISSING), (Chosen::Slices, Some(7)));
    }

    #[test]
    fn a_node_of_kilos_own_sends_all_back_to_nodes_as_fast_as_the_server_can_send_them() {
        let mut case = Case::new();
        case.at(0, None);
        let (chosen, due) = case.at(1, Some(Reason::Foreign));
        assert_eq!((chosen, due), (Chosen::Slices, Some(6)));
        assert_eq!(case.at(6, Some(Reason::Foreign)), (Chosen::Nodes, None));
        let most = Source { was_in_use: true, ..Source::default() }.pause(Inputs {
            against: Some(Reason::Foreign),
            nodes: 1_000_000,
            now: case.start,
            random: 1.0,
        });
        assert_eq!(most, MOST_SPREAD);
    }

    #[test]
    fn starts_of_a_large_mesh_are_spread_over_what_the_server_needs_and_a_minute_at_most() {
        assert_eq!(start_spread(100, 1.0), Duration::from_millis(100));
        assert_eq!(start_spread(1000, 0.5), Duration::from_secs(5));
        assert_eq!(start_spread(5000, 1.0), Duration::from_mins(1));
        assert_eq!(start_spread(usize::MAX, 0.0), Duration::ZERO);
    }
}

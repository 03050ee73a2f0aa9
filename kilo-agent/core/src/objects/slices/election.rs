//! Which agent writes the slices. Pure: time and random numbers are parameters.

use std::{
    cmp::Reverse,
    time::{Duration, Instant},
};

use crate::objects::Nodes;

/// Rank of a node among those that could write, 0 first; `usize::MAX`: the node is not known. Nodes of the
/// control plane come before others; then a hash of the name decides. Dead nodes do not count.
pub fn rank(nodes: &Nodes, own: &str) -> usize {
    let Some(own) = nodes.get(own) else { return usize::MAX };
    let place = |name: &str, control_plane: bool| (Reverse(control_plane), hash(name));
    let own_place = place(&own.name, own.control_plane);
    let others = nodes.iter().filter(|other| {
        other.name != own.name
            && other.last_seen != 0
            && other.declared_alive != Some(false)
            && other.key.is_some()
    });
    others.filter(|other| place(&other.name, other.control_plane) < own_place).count()
}

/// FNV-1a: the same in every version of an agent, which the standard library's does not promise.
fn hash(name: &str) -> u64 {
    name.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Agents with a lower rank look for a writer often enough to replace one within half a minute.
pub const CANDIDATES: usize = 10;

/// Seconds between two reads of the Lease: the first three read it often, everybody else
/// in case those are gone.
pub const fn poll_seconds(rank: usize) -> u64 {
    match rank {
        0..3 => 5,
        3..CANDIDATES => 30,
        _ => 300,
    }
}

/// An index that has not changed for this long has no writer, since a writer renews it each minute.
pub const NO_WRITER: Duration = Duration::from_secs(150);

/// Whether somebody writes slices, by when the index changed on this host's clock.
#[derive(Clone, Debug, Default)]
pub struct Renewals {
    /// The last version of the index (in any form), and when it was seen to change; `None`: it
    /// was old when first seen.
    seen: Option<(String, Option<Instant>)>,
    /// The API server does not answer; whether somebody wrote slices when it ceased to.
    lost: Option<bool>,
}

impl Renewals {
    /// Records the version of the index, and when it says that it was renewed. At first sight it counts
    /// as changed if that was not long ago by the wall clock (`unix_now`); should a clock be wrong, the
    /// next renewal shows it.
    pub fn see(&mut self, version: &str, renewed: i64, now: Instant, unix_now: i64) {
        let since = match &self.seen {
            Some((known, since)) if known == version => *since,
            Some(_) => Some(now),
            None => (unix_now.abs_diff(renewed) < NO_WRITER.as_secs()).then_some(now),
        };
        self.seen = Some((version.to_owned(), since));
    }

    /// The API server does not answer, so nobody can renew the index.
    pub fn lose(&mut self, now: Instant) {
        self.lost = Some(self.go_on(now));
    }

    /// The API server answers again. A writer that was at work before gets the whole time to renew the index.
    pub fn find(&mut self, now: Instant) {
        if self.lost.take() == Some(true)
            && let Some((_, since)) = &mut self.seen
        {
            *since = Some(now);
        }
    }

    /// Whether somebody writes slices; while the API server does not answer, whether somebody did before.
    pub fn go_on(&self, now: Instant) -> bool {
        if let Some(went_on) = self.lost {
            return went_on;
        }
        let since = self.seen.as_ref().and_then(|(_, since)| *since);
        since.is_some_and(|since| now.saturating_duration_since(since) < NO_WRITER)
    }
}

/// The last state of a Lease that was observed, and since when on this host's clock.
#[derive(Clone, Debug, Default)]
pub struct Observed {
    seen: Option<(String, Instant)>,
}

impl Observed {
    /// Records what the Lease says (holder and time of renewal, in any form); returns true once nobody has
    /// renewed it for `valid`.
    pub fn observe(&mut self, record: &str, valid: Duration, now: Instant) -> bool {
        match &self.seen {
            Some((known, since)) if known == record => now.saturating_duration_since(*since) >= valid,
            _ => {
                self.seen = Some((record.to_owned(), now));
                false
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use crate::{
        objects::{CheckedIn, Node},
        wireguard::PublicKey,
    };

    fn node(name: &str, control_plane: bool) -> CheckedIn {
        let key = Some(PublicKey([1; 32]));
        CheckedIn {
            node: Node { name: name.to_owned(), control_plane, key, ..Node::default() },
            last_seen: 1,
        }
    }

    #[test]
    fn each_node_has_a_place_and_the_control_plane_the_first() {
        let names = ["a", "b", "c", "d", "e"];
        let mut nodes: Nodes = names.map(|name| node(name, name == "d")).into_iter().collect();
        let mut ranks: Vec<_> = names.iter().map(|name| rank(&nodes, name)).collect();
        assert_eq!(ranks[3], 0);
        ranks.sort_unstable();
        assert_eq!(ranks, [0, 1, 2, 3, 4]);
        nodes.insert(CheckedIn { last_seen: 0, ..node("d", true) });
        assert!(names.iter().filter(|name| **name != "d").any(|name| rank(&nodes, name) == 0), "it is dead");
        assert_eq!(rank(&nodes, "nobody"), usize::MAX);
        assert!(poll_seconds(0) < poll_seconds(3) && poll_seconds(3) < poll_seconds(usize::MAX));
    }

    #[test]
    fn an_index_of_weeks_ago_has_no_writer_until_it_changes() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut renewals = Renewals::default();
        assert!(!renewals.go_on(start));
        renewals.see("7", 1_000_000, start, 3_000_000);
        assert!(!renewals.go_on(start), "--slices=off for weeks");
        renewals.see("7", 1_000_000, at(10), 3_000_010);
        assert!(!renewals.go_on(at(10)), "seen again");
        renewals.see("8", 1_000_000, at(20), 3_000_020);
        assert!(renewals.go_on(at(20)) && renewals.go_on(at(169)), "by the own clock");
        assert!(!renewals.go_on(at(170)), "nobody renews it");
        let mut renewals = Renewals::default();
        renewals.see("8", 2_999_900, start, 3_000_000);
        assert!(renewals.go_on(start) && !renewals.go_on(at(150)));
    }

    #[test]
    fn the_time_in_which_the_server_does_not_answer_is_not_held_against_the_writer() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut renewals = Renewals::default();
        renewals.see("1", 3_000_000, start, 3_000_000);
        renewals.lose(at(100));
        renewals.lose(at(1000));
        assert!(renewals.go_on(at(3600)), "nobody could renew it");
        renewals.find(at(3600));
        assert!(renewals.go_on(at(3749)) && !renewals.go_on(at(3750)), "from the first answer");
        renewals.find(at(3750));
        assert!(!renewals.go_on(at(3750)), "it was not away");
        // Without a writer before the outage there is none after it.
        renewals.lose(at(4000));
        assert!(!renewals.go_on(at(4000)));
        renewals.find(at(4100));
        assert!(!renewals.go_on(at(4100)));
        renewals.see("2", 3_000_000, at(4101), 3_004_101);
        assert!(renewals.go_on(at(4101)));
    }

    #[test]
    fn a_name_has_the_place_that_it_has_in_other_versions() {
        assert_eq!((hash(""), hash("a")), (0xcbf2_9ce4_8422_2325, 0xaf63_dc4c_8601_ec8c));
    }

    #[test]
    fn a_lease_expires_by_the_own_clock() {
        let (start, mut observed) = (Instant::now(), Observed::default());
        let valid = Duration::from_secs(20);
        let mut at = |record: &str, seconds: u64| {
            observed.observe(record, valid, start + Duration::from_secs(seconds))
        };
        assert!(!at("a 1", 0) && !at("a 1", 19));
        assert!(!at("a 2", 21), "renewed");
        assert!(!at("a 2", 40) && at("a 2", 41));
        assert!(!at("b 1", 42));
    }
}

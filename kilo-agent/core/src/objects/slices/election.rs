//! Who writes the slices: pure, time and chance are parameters.

use std::{
    cmp::Reverse,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    time::{Duration, Instant},
};

use crate::objects::Nodes;

/// The place of a node among those that could write, 0 first: nodes of the control plane before others, then by
/// a number that depends on the name alone. Nodes that do not live do not count.
pub fn rank(nodes: &Nodes, own: &str) -> usize {
    let Some(own) = nodes.get(own) else { return usize::MAX };
    let place = |name: &str, control_plane: bool| {
        let mut hasher = DefaultHasher::new();
        name.hash(&mut hasher);
        (Reverse(control_plane), hasher.finish())
    };
    let own_place = place(&own.name, own.control_plane);
    let others = nodes.iter().filter(|other| {
        other.name != own.name && other.last_seen != 0 && other.judged != Some(false) && other.key.is_some()
    });
    others.filter(|other| place(&other.name, other.control_plane) < own_place).count()
}

/// Seconds between two looks at the Lease: the first three look often, everybody else for the case that they are gone.
pub const fn poll_seconds(rank: usize) -> u64 {
    match rank {
        0..3 => 5,
        3..10 => 30,
        _ => 300,
    }
}

/// A Lease as it was seen, by the own clock.
#[derive(Clone, Debug, Default)]
pub struct Observed {
    seen: Option<(String, Instant)>,
}

impl Observed {
    /// Takes what the Lease says now (holder and time of renewal, in any form); whether nobody has renewed it for
    /// as long as it is valid.
    pub fn has_expired(&mut self, says: &str, valid: Duration, now: Instant) -> bool {
        match &self.seen {
            Some((known, since)) if known == says => now.saturating_duration_since(*since) >= valid,
            _ => {
                self.seen = Some((says.to_owned(), now));
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
    fn a_lease_expires_by_the_own_clock() {
        let (start, mut observed) = (Instant::now(), Observed::default());
        let valid = Duration::from_secs(20);
        let mut at = |says: &str, seconds: u64| {
            observed.has_expired(says, valid, start + Duration::from_secs(seconds))
        };
        assert!(!at("a 1", 0) && !at("a 1", 19));
        assert!(!at("a 2", 21), "renewed");
        assert!(!at("a 2", 40) && at("a 2", 41));
        assert!(!at("b 1", 42));
    }
}

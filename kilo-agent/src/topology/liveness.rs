//! Who is alive, without trusting anybody's wall clock: a node lives while its
//! `last-seen` keeps changing, by the clock of the one who looks.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use super::{Node, READY_SECONDS, is_complete, ready_at};

/// A value that has not changed for this long is no sign of life.
const PATIENCE: Duration = Duration::from_secs(READY_SECONDS as u64);

/// A node is given up only when the own sign of life came back this long after its last one:
/// longer than the 33 s (and 5 s of collecting) that may lie between the last ones of two
/// nodes when the API server goes away.
const EVIDENCE: Duration = Duration::from_secs(45);

/// What one agent has seen of the others.
#[derive(Debug, Default)]
pub struct Liveness {
    seen: BTreeMap<String, Sight>,
    ready: BTreeSet<String>,
}

#[derive(Debug, Clone, Copy)]
struct Sight {
    value: i64,
    /// When the value changed last; `None` = it has not changed since first seen, and was old then.
    changed: Option<Instant>,
}

impl Liveness {
    /// Judges every node. `own` is this agent's node, which checks in like all
    /// others: while its own sign of life does not come back, the view is
    /// stale, and nobody is given up.
    ///
    /// `unix_now` helps with nodes seen for the first time: one with an old
    /// sign of life must change it before it counts, unless most are old, which
    /// says more about our clock, or an API server that was away.
    pub fn ready<'a>(
        &mut self,
        nodes: impl Iterator<Item = &'a Node> + Clone,
        own: &str,
        now: Instant,
        unix_now: i64,
    ) -> BTreeSet<String> {
        let complete = nodes.clone().filter(|node| is_complete(node));
        let (all, fresh) = complete
            .fold((0, 0), |(all, fresh), node| (all + 1, fresh + usize::from(ready_at(node, unix_now))));
        let clocks_agree = fresh * 2 >= all;
        let mut count = 0;
        for node in nodes.clone() {
            count += 1;
            let sight = self.seen.entry(node.name.clone()).or_insert_with(|| Sight {
                value: node.last_seen,
                changed: (!clocks_agree || ready_at(node, unix_now)).then_some(now),
            });
            if sight.value != node.last_seen {
                *sight = Sight { value: node.last_seen, changed: Some(now) };
            }
        }
        if self.seen.len() != count {
            let known: BTreeSet<&str> = nodes.clone().map(|node| node.name.as_str()).collect();
            self.seen.retain(|name, _| known.contains(name.as_str()));
        }
        let alive = |name: &str| {
            let changed = self.seen.get(name).and_then(|sight| sight.changed);
            changed.is_some_and(|changed| now.saturating_duration_since(changed) < PATIENCE)
        };
        let stale = self.seen.contains_key(own) && !alive(own) && !self.ready.is_empty();
        let changed = |name: &str| self.seen.get(name).and_then(|sight| sight.changed);
        let unproved = |name: &str| {
            let known = changed(own).zip(changed(name));
            known.is_some_and(|(own, other)| own.saturating_duration_since(other) < EVIDENCE)
        };
        let ready = nodes.filter(|node| is_complete(node)).map(|node| node.name.as_str()).filter(|name| {
            *name == own || alive(name) || ((stale || unproved(name)) && self.ready.contains(*name))
        });
        self.ready = ready.map(ToOwned::to_owned).collect();
        self.ready.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wireguard::key::PublicKey;

    fn node(name: &str, last_seen: i64) -> Node {
        Node {
            name: name.to_owned(),
            endpoint: "192.0.2.1:51820".parse().ok(),
            key: Some(PublicKey([1; 32])),
            pod_cidrs: vec!["10.42.0.0/24".parse().unwrap()],
            last_seen,
            ..Node::default()
        }
    }

    fn nodes(list: &[(&str, i64)]) -> BTreeMap<String, Node> {
        list.iter().map(|(name, seen)| ((*name).to_owned(), node(name, *seen))).collect()
    }

    fn names(ready: &BTreeSet<String>) -> Vec<&str> {
        ready.iter().map(String::as_str).collect()
    }

    #[test]
    fn a_node_lives_while_its_sign_of_life_changes() {
        let (start, step) = (Instant::now(), Duration::from_secs(30));
        let mut liveness = Liveness::default();
        liveness.ready(nodes(&[("a", 1000), ("b", 1000)]).values(), "a", start, 1000);
        let ready = liveness.ready(nodes(&[("a", 1030), ("b", 1000)]).values(), "a", start + step, 1030);
        assert_eq!(names(&ready), ["a", "b"]);
        let ready = liveness.ready(nodes(&[("a", 1060), ("b", 1000)]).values(), "a", start + step * 2, 1060);
        assert_eq!(names(&ready), ["a"]);
    }

    #[test]
    fn a_clock_that_is_an_hour_wrong_changes_nothing() {
        let start = Instant::now();
        let mut liveness = Liveness::default();
        liveness.ready(nodes(&[("a", 10_000), ("b", 10_000), ("c", 6_400)]).values(), "a", start, 10_000);
        let later = nodes(&[("a", 10_030), ("b", 10_030), ("c", 6_430)]);
        let ready = liveness.ready(later.values(), "a", start + Duration::from_secs(30), 10_030);
        assert_eq!(names(&ready), ["a", "b", "c"]);
    }

    #[test]
    fn a_node_dead_for_long_is_not_taken_for_alive_at_start() {
        let mut liveness = Liveness::default();
        let ready = liveness.ready(
            nodes(&[("a", 9_990), ("b", 9_995), ("c", 100)]).values(),
            "a",
            Instant::now(),
            10_000,
        );
        assert_eq!(names(&ready), ["a", "b"]);
    }

    #[test]
    fn whose_sign_of_life_was_the_last_before_the_server_went_away_does_not_matter() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let mut liveness = Liveness::default();
        liveness.ready(nodes(&[("a", 1000), ("b", 1000), ("c", 1000)]).values(), "a", start, 1000);
        let last = nodes(&[("a", 1035), ("b", 1000), ("c", 1010)]);
        for after in 35..300 {
            let ready = liveness.ready(last.values(), "a", start + second * after, 1000 + i64::from(after));
            assert_eq!(names(&ready), ["a", "b", "c"], "{after} s");
        }
        // It is back, and b is not.
        let now = start + second * 300;
        let ready = liveness.ready(nodes(&[("a", 1300), ("b", 1000), ("c", 1300)]).values(), "a", now, 1300);
        assert_eq!(names(&ready), ["a", "c"]);
    }

    #[test]
    fn while_the_own_sign_of_life_does_not_come_back_nobody_is_given_up() {
        let start = Instant::now();
        let all = nodes(&[("a", 1000), ("b", 1000)]);
        let mut liveness = Liveness::default();
        liveness.ready(all.values(), "a", start, 1000);
        let ready = liveness.ready(all.values(), "a", start + Duration::from_secs(3600), 4600);
        assert_eq!(names(&ready), ["a", "b"]);
    }
}

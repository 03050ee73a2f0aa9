//! Which nodes are alive, without trusting any other machine's wall clock: a node is alive while its
//! `last-seen` keeps changing, by the monotonic clock of the agent that watches it.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    Known, Node, former::Former, heartbeat_shares::HeartbeatShares, is_complete, is_recent, ready_seconds,
};

/// How long a node counts as alive after its heartbeat last changed.
fn patience(node: &Node) -> Duration {
    Duration::from_secs(ready_seconds(node).unsigned_abs())
}

/// How long after a node's last heartbeat this agent's own must have come back before the node is declared
/// dead: longer than the 33 s (and 5 s of collecting) that may lie between the last ones of two nodes when
/// the API server goes away, or the 330 s (and 5) of nodes that renew it every 300 s.
fn evidence(node: &Node) -> Duration {
    patience(node) * 3 / 4
}

/// How long no heartbeat of any node arrives before the API server counts as having been away: longer than
/// the 33 s (and 5 s of collecting) that lie between two heartbeats of one node, or the 330 s (and 5) of one
/// that renews it every 300 s.
fn pause(node: &Node) -> Duration {
    patience(node) * 13 / 20
}

/// What one agent has observed of the others.
/// ```
/// use std::{sync::Arc, time::{Duration, Instant}};
/// use kilo_core::{topology::{Known, Liveness, Node}, wireguard::PublicKey};
///
/// let node = |name: &str| Arc::new(Node {
///     name: name.into(),
///     key: Some(PublicKey([1; 32])),
///     endpoint: "192.0.2.1:51820".parse().ok(),
///     pod_cidrs: vec!["10.42.0.0/24".parse().unwrap()],
///     ..Node::default()
/// });
/// let (own, other) = (node("a1"), node("a2"));
/// let (mut liveness, start) = (Liveness::default(), Instant::now());
/// let mut ready = |seconds: u64, heartbeats: [i64; 2]| {
///     let nodes = [&own, &other].into_iter().zip(heartbeats);
///     let nodes: Vec<Known> = nodes.map(|(node, last_seen)| Known { node, last_seen }).collect();
///     liveness.ready(nodes.into_iter(), "a1", start + Duration::from_secs(seconds), 1_000 + seconds as i64)
/// };
/// assert_eq!(ready(0, [1_000, 1_000]), [true, true]);
/// // A minute later this agent's heartbeat comes back, the other one does not.
/// assert_eq!(ready(50, [1_050, 1_000]), [true, true]);
/// assert_eq!(ready(70, [1_070, 1_000]), [true, false]);
/// ```
#[derive(Debug, Default)]
pub struct Liveness {
    /// Sorted by name.
    seen: Vec<Observation>,
    former: Former,
    /// A node has been silent for too long, and only this agent's own heartbeat can prove that
    /// this is the node's fault.
    suspects: bool,
    heard: Option<Heard>,
}

/// Heartbeats as they arrive at a machine that has none of its own.
#[derive(Clone, Copy, Debug)]
struct Heard {
    /// The first one since the last pause that was longer than between two heartbeats of one node.
    since: Instant,
    /// The last one.
    last: Instant,
}

#[derive(Debug)]
struct Observation {
    node: Arc<Node>,
    /// Its `last-seen`.
    value: i64,
    /// When the value changed last; `None` = it has not changed since first seen, and was old then.
    changed: Option<Instant>,
    /// It has all it needs to take part.
    complete: bool,
    /// It took part when asked last.
    ready: bool,
}

impl Observation {
    fn is_alive(&self, now: Instant) -> bool {
        self.node.declared_alive.unwrap_or_else(|| {
            self.changed.is_some_and(|changed| now.saturating_duration_since(changed) < patience(&self.node))
        })
    }
}

impl Liveness {
    /// Starts with nodes that an earlier agent of this host knew. They take no part until they are seen, but
    /// what they had and have lost by then is remembered as if this agent had seen it.
    pub fn remembering(nodes: impl IntoIterator<Item = Arc<Node>>) -> Self {
        let mut former = Former::default();
        former.remember(nodes);
        Self { former, ..Self::default() }
    }

    /// Decides about every node, and returns which take part, in the order given. They must be sorted by
    /// name, and should be the same in memory from one call to the next: then only their heartbeats are read.
    /// `own` is this agent's node, which checks in like all others: while its own heartbeat does not come
    /// back, the view is stale, and no node is declared dead.
    ///
    /// `unix_now` helps with nodes seen for the first time: one with an old heartbeat must change it before
    /// it counts, unless most are old, which points to a wrong clock here, or an API server that was away.
    pub fn ready<'a>(
        &mut self,
        nodes: impl ExactSizeIterator<Item = Known<'a>>,
        own: &str,
        now: Instant,
        unix_now: i64,
    ) -> Vec<bool> {
        self.update(nodes, Some(own), now, unix_now)
    }

    /// As [`Self::ready`], for a machine that is not a node: the node that was heard last stands in for
    /// its own. When no heartbeat arrives any more, the API server is away, and no node is declared
    /// dead; nor is one when they arrive again, until all have had time to be heard. A clock that is
    /// ahead of every heartbeat is wrong, or the API server was away: the newest heartbeat then says
    /// who was heard until then.
    pub fn ready_as_heard<'a>(
        &mut self,
        nodes: impl ExactSizeIterator<Item = Known<'a>> + Clone,
        now: Instant,
        unix_now: i64,
    ) -> Vec<bool> {
        let newest = nodes.clone().map(|known| known.last_seen).max().unwrap_or(unix_now);
        self.update(nodes, None, now, unix_now.min(newest))
    }

    fn update<'a>(
        &mut self,
        nodes: impl ExactSizeIterator<Item = Known<'a>>,
        own: Option<&str>,
        now: Instant,
        unix_now: i64,
    ) -> Vec<bool> {
        let is_first = !self.seen.iter().any(|seen| seen.ready);
        // One walk over both; nodes that are passed over have gone.
        let mut before = std::mem::take(&mut self.seen).into_iter().peekable();
        self.seen.reserve_exact(nodes.len());
        let (mut shares, mut new) = (HeartbeatShares::default(), Vec::new());
        for Known { node, last_seen } in nodes {
            let known_now = Known { node, last_seen };
            let known = before.next_if(|seen| Arc::ptr_eq(&seen.node, node)).or_else(|| {
                while let Some(seen) = before.next_if(|seen| seen.node.name < node.name) {
                    self.former.gone(seen.node, now);
                }
                let known = before.next_if(|seen| seen.node.name == node.name)?;
                self.former.changed(&known.node, node, now);
                Some(Observation { node: Arc::clone(node), complete: is_complete(node), ..known })
            });
            let seen = match known {
                Some(known) if known.value == last_seen => known,
                // Another node has declared it dead, for those that would wait for its heartbeat.
                Some(known) if last_seen == 0 => {
                    Observation { value: 0, changed: None, ready: false, ..known }
                }
                Some(known) => Observation { value: last_seen, changed: Some(now), ..known },
                None => {
                    self.former.first_seen(node, now);
                    let complete = is_complete(node);
                    new.push((self.seen.len(), complete && is_recent(known_now, unix_now)));
                    Observation {
                        node: Arc::clone(node),
                        value: last_seen,
                        changed: None,
                        complete,
                        ready: false,
                    }
                }
            };
            // Should its heartbeat count again, it counts from now.
            let seen = match node.declared_alive {
                Some(alive) => Observation { changed: alive.then_some(now), ..seen },
                None => seen,
            };
            let is_fresh = seen.complete && is_recent(known_now, unix_now);
            if seen.complete {
                shares.add(node, last_seen, is_fresh);
            }
            self.seen.push(seen);
        }
        before.for_each(|seen| self.former.gone(seen.node, now));
        self.former.all_seen(now);
        for (at, is_fresh) in new {
            let seen = &mut self.seen[at];
            if seen.node.declared_alive.is_none() {
                seen.changed = (!shares.blame(&seen.node, seen.value) || is_fresh).then_some(now);
            }
        }
        self.decide(own, is_first, now)
    }

    /// Which of the nodes that have just been looked at are ready; `is_first`: none was ready before.
    fn decide(&mut self, own: Option<&str>, is_first: bool, now: Instant) -> Vec<bool> {
        let own = own.map(|own| self.seen.binary_search_by(|seen| seen.node.name.as_str().cmp(own)).ok());
        let own_seen = match own {
            Some(own) => own.map(|own| &self.seen[own]),
            None => self.heard_last(),
        };
        let stale = own_seen.is_some_and(|seen| !seen.is_alive(now)) && !is_first;
        let own_changed = own_seen.and_then(|seen| seen.changed);
        let pause = own_seen.map(|seen| pause(&seen.node));
        let heard_since = match own {
            Some(_) => None,
            None => own_changed.zip(pause).map(|(changed, pause)| self.hear(changed, pause)),
        };
        let unproved = |seen: &Observation| {
            let known = own_changed.zip(seen.changed);
            known.is_some_and(|(own, other)| own.saturating_duration_since(other) < evidence(&seen.node))
        };
        let mut suspects = false;
        for (at, seen) in self.seen.iter_mut().enumerate() {
            let may_come =
                heard_since.is_some_and(|since| now.saturating_duration_since(since) < evidence(&seen.node));
            let spared =
                seen.ready && seen.node.declared_alive.is_none() && (stale || may_come || unproved(seen));
            let alive = own == Some(Some(at)) || seen.is_alive(now);
            suspects |= spared && !alive && seen.complete;
            seen.ready = seen.complete && (alive || spared);
        }
        self.suspects = suspects;
        self.seen.iter().map(|seen| seen.ready).collect()
    }

    /// Records a heartbeat at `last`; returns since when they have come without a pause as long as this.
    fn hear(&mut self, last: Instant, pause: Duration) -> Instant {
        let heard = self.heard.filter(|heard| last.saturating_duration_since(heard.last) < pause);
        let heard = match heard {
            // The node that was heard last may have gone.
            Some(Heard { since, last: before }) => Heard { since, last: before.max(last) },
            None => Heard { since: last, last },
        };
        self.heard = Some(heard);
        heard.since
    }

    /// The node that last renewed its heartbeat, of those whose heartbeats count.
    fn heard_last(&self) -> Option<&Observation> {
        let heard =
            self.seen.iter().filter(|seen| seen.node.declared_alive.is_none() && seen.changed.is_some());
        heard.max_by_key(|seen| seen.changed)
    }

    /// Nodes that have lost their private address and got no other, as they were with it: for the
    /// next agent of this host.
    pub fn without_address(&self) -> impl Iterator<Item = &Arc<Node>> {
        self.former.without_address()
    }

    /// Whether [`Self::ready`] last found a node silent for too long that is spared until this agent's own
    /// heartbeat has come back: it is worth one now, however long it would be until the next.
    pub const fn suspects(&self) -> bool {
        self.suspects
    }

    /// Nodes as they were before they left or lost their key, at most a minute ago, or lost their private
    /// address and got no other. Others may still send to an address at which they once saw a host.
    pub fn former(&mut self, now: Instant) -> impl Iterator<Item = &Arc<Node>> {
        self.former.nodes(now)
    }

    /// Nodes that left earlier, at most 20 minutes ago: pods elsewhere may still try to reach theirs.
    pub fn gone(&self, now: Instant) -> impl Iterator<Item = &Arc<Node>> {
        self.former.gone_before(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        topology::{CheckedIn, Nodes},
        wireguard::key::PublicKey,
    };

    fn checked_in(&(name, last_seen): &(&str, i64)) -> CheckedIn {
        let node = Node {
            name: name.to_owned(),
            endpoint: "192.0.2.1:51820".parse().ok(),
            key: Some(PublicKey([1; 32])),
            pod_cidrs: vec!["10.42.0.0/24".parse().unwrap()],
            ..Node::default()
        };
        CheckedIn { node, last_seen }
    }

    /// Names of those that take part.
    fn ready<'a>(
        liveness: &mut Liveness,
        list: &[(&'a str, i64)],
        own: &str,
        now: Instant,
        unix_now: i64,
    ) -> Vec<&'a str> {
        let nodes: Nodes = list.iter().map(checked_in).collect();
        let ready = liveness.ready(nodes.iter(), own, now, unix_now);
        assert_eq!(ready.len(), list.len());
        list.iter().zip(ready).filter_map(|((name, _), ready)| ready.then_some(*name)).collect()
    }

    #[test]
    fn a_node_lives_while_its_heartbeat_changes() {
        let (start, step) = (Instant::now(), Duration::from_secs(30));
        let mut liveness = Liveness::default();
        ready(&mut liveness, &[("a", 1000), ("b", 1000)], "a", start, 1000);
        let taking_part = ready(&mut liveness, &[("a", 1030), ("b", 1000)], "a", start + step, 1030);
        assert_eq!(taking_part, ["a", "b"]);
        let taking_part = ready(&mut liveness, &[("a", 1060), ("b", 1000)], "a", start + step * 2, 1060);
        assert_eq!(taking_part, ["a"]);
    }

    #[test]
    fn a_node_that_somebody_gives_up_is_out_at_once_until_it_speaks() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let mut liveness = Liveness::default();
        ready(&mut liveness, &[("a", 1000), ("b", 1000)], "a", start, 1000);
        for (after, last_seen, wanted) in [
            (3, 0, &["a"][..]),
            (9, 0, &["a"]),
            // Its last value, which it writes again when it is alive.
            (10, 1000, &["a", "b"]),
        ] {
            let list = [("a", 1000), ("b", last_seen)];
            let taking_part = ready(&mut liveness, &list, "a", start + second * after, 1000);
            assert_eq!(taking_part, wanted, "{after} s");
        }
    }

    #[test]
    fn a_clock_that_is_an_hour_wrong_changes_nothing() {
        let start = Instant::now();
        let mut liveness = Liveness::default();
        ready(&mut liveness, &[("a", 10_000), ("b", 10_000), ("c", 6_400)], "a", start, 10_000);
        let later = &[("a", 10_030), ("b", 10_030), ("c", 6_430)];
        let taking_part = ready(&mut liveness, later, "a", start + Duration::from_secs(30), 10_030);
        assert_eq!(taking_part, ["a", "b", "c"]);
    }

    #[test]
    fn a_node_dead_for_long_is_not_taken_for_alive_at_start() {
        let mut liveness = Liveness::default();
        let taking_part =
            ready(&mut liveness, &[("a", 9_990), ("b", 9_995), ("c", 100)], "a", Instant::now(), 10_000);
        assert_eq!(taking_part, ["a", "b"]);
    }

    #[test]
    fn whose_heartbeat_was_the_last_before_the_server_went_away_does_not_matter() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let mut liveness = Liveness::default();
        ready(&mut liveness, &[("a", 1000), ("b", 1000), ("c", 1000)], "a", start, 1000);
        let last = &[("a", 1035), ("b", 1000), ("c", 1010)];
        for after in 35..300 {
            let taking_part =
                ready(&mut liveness, last, "a", start + second * after, 1000 + i64::from(after));
            assert_eq!(taking_part, ["a", "b", "c"], "{after} s");
        }
        // It is back, and b is not.
        let now = start + second * 300;
        let taking_part = ready(&mut liveness, &[("a", 1300), ("b", 1000), ("c", 1300)], "a", now, 1300);
        assert_eq!(taking_part, ["a", "c"]);
    }

    fn resting(name: &str, heartbeat: Option<u16>, last_seen: i64) -> CheckedIn {
        let mut checked_in = checked_in(&(name, last_seen));
        checked_in.node.heartbeat = heartbeat;
        checked_in
    }

    #[test]
    fn each_node_is_declared_dead_by_its_own_interval_and_the_own_heartbeat_is_asked_for() {
        let start = Instant::now();
        let mut liveness = Liveness::default();
        let mut at = |after: u64, own: i64, leader: i64, member: i64| {
            let nodes: Nodes = [
                resting("a", Some(300), own),
                resting("b", Some(30), leader),
                resting("c", Some(300), member),
            ]
            .into_iter()
            .collect();
            let now = start + Duration::from_secs(after);
            let ready = liveness.ready(nodes.iter(), "a", now, 1000 + after as i64);
            (ready, liveness.suspects())
        };
        assert_eq!(at(0, 1000, 1000, 1000), (vec![true, true, true], false));
        assert_eq!(at(59, 1000, 1000, 1000), (vec![true, true, true], false));
        assert_eq!(at(61, 1000, 1000, 1000), (vec![true, true, true], true), "it may be the API server");
        assert_eq!(at(70, 1070, 1000, 1000), (vec![true, false, true], false), "b promised one in 30 s");
        assert_eq!(at(590, 1300, 1000, 1000), (vec![true, false, true], false));
        assert_eq!(at(610, 1600, 1000, 1000), (vec![true, false, false], false), "c promised one in 300 s");
    }

    #[test]
    fn nodes_of_long_intervals_do_not_prove_that_leaders_are_dead_when_the_server_was_away() {
        let at_start = |list: [CheckedIn; 4]| {
            let nodes: Nodes = list.into_iter().collect();
            Liveness::default().ready(nodes.iter(), "a", Instant::now(), 10_000)
        };
        let member = |name, seen| resting(name, Some(300), seen);
        // The API server was away for two minutes.
        let all = [member("a", 9_880), member("b", 9_880), member("c", 9_880), resting("d", Some(30), 9_880)];
        assert_eq!(at_start(all), [true, true, true, true]);
        // Others like it are heard, or another node has declared it dead.
        let leader = |name, seen| resting(name, Some(30), seen);
        let all = [leader("a", 9_990), member("b", 9_880), member("c", 1_000), leader("d", 9_880)];
        assert_eq!(at_start(all), [true, true, false, false], "most like them are heard");
        let all = [member("a", 9_880), member("b", 9_880), member("c", 1_000), leader("d", 0)];
        assert_eq!(at_start(all), [true, true, false, false]);
    }

    #[test]
    fn an_agent_that_starts_knows_a_node_whose_clock_is_an_hour_behind_by_its_next_heartbeat() {
        let start = Instant::now();
        let mut liveness = Liveness::default();
        let mut at = |after: u64, member: i64| {
            let now = 10_000 + after as i64;
            let nodes: Nodes = [
                resting("a", Some(30), now),
                resting("b", Some(30), now),
                resting("c", Some(300), now),
                resting("d", Some(300), member),
            ]
            .into_iter()
            .collect();
            liveness.ready(nodes.iter(), "a", start + Duration::from_secs(after), now)[3]
        };
        // It may as well be dead for an hour. One whose clock is an hour ahead is known at once.
        assert!(!at(0, 6_400) && !at(299, 6_400));
        assert!(at(300, 6_700));
        let nodes: Nodes = [("a", 10_000), ("b", 10_000), ("c", 13_600)].iter().map(checked_in).collect();
        let at_once = Liveness::default().ready(nodes.iter(), "a", start, 10_000);
        assert_eq!(at_once, [true, true, true]);
    }

    #[test]
    fn a_node_declared_alive_or_dead_by_another_is_so() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let mut liveness = Liveness::default();
        let mut at = |after: u32, declared_alive: Option<bool>| {
            let mut other = resting("b", Some(30), 1000);
            other.node.declared_alive = declared_alive;
            let own = resting("a", Some(30), 1000 + i64::from(after));
            let nodes: Nodes = [own, other].into_iter().collect();
            liveness.ready(nodes.iter(), "a", start + second * after, 1000 + i64::from(after))[1]
        };
        assert!(at(0, Some(true)) && at(3000, Some(true)), "its heartbeat is not passed on");
        assert!(!at(3001, Some(false)));
        assert!(at(3002, Some(true)));
    }

    #[test]
    fn an_address_lost_before_a_restart_is_known_after_it() {
        let with = |address: &str| {
            let node = checked_in(&("b", 1000)).node;
            Arc::new(Node { internal_ip: address.parse().ok(), ..node })
        };
        let mut liveness = Liveness::remembering([with("10.1.0.2/24")]);
        let start = Instant::now();
        let all = ready(&mut liveness, &[("a", 1000), ("b", 1000)], "a", start, 1000);
        assert_eq!(all, ["a", "b"], "what is remembered decides about nobody");
        let held = |liveness: &mut Liveness| {
            liveness.former(start).filter_map(|node| node.internal_ip).collect::<Vec<_>>()
        };
        assert_eq!(held(&mut liveness), ["10.1.0.2/24".parse().unwrap()]);
        assert_eq!(liveness.without_address().count(), 1);
        // The address is back.
        let nodes: Nodes =
            [CheckedIn { node: (*with("10.1.0.2/24")).clone(), last_seen: 1001 }].into_iter().collect();
        liveness.ready(nodes.iter(), "a", start, 1001);
        assert_eq!(liveness.without_address().count(), 0);
    }

    /// Names of those that take part, for a machine that is not a node.
    fn heard<'a>(
        liveness: &mut Liveness,
        list: &[(&'a str, i64)],
        now: Instant,
        unix_now: i64,
    ) -> Vec<&'a str> {
        let nodes: Nodes = list.iter().map(checked_in).collect();
        let ready = liveness.ready_as_heard(nodes.iter(), now, unix_now);
        list.iter().zip(ready).filter_map(|((name, _), ready)| ready.then_some(*name)).collect()
    }

    #[test]
    fn a_machine_that_hears_nothing_of_the_cluster_takes_nobody_for_dead_whatever_the_nodes_clocks_say() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        // The second one's clock is an hour ahead, the third one is dead.
        let all = [("a", 1_000), ("b", 4_600), ("dead", 900)];
        let mut liveness = Liveness::default();
        for after in [0, 59, 61, 600, 3_600, 36_000] {
            let taking_part = heard(&mut liveness, &all, start + second * after, 1_000 + i64::from(after));
            assert_eq!(taking_part, ["a", "b"], "{after} s");
        }
        // It is there again: one of them a few seconds later, or not at all.
        for (after, heartbeats, wanted) in [
            (36_001, [37_000, 4_600], &["a", "b"][..]),
            (36_031, [37_030, 4_600], &["a", "b"]),
            (36_061, [37_060, 4_600], &["a"]),
            (36_062, [37_060, 40_661], &["a", "b"]),
        ] {
            let [a, b] = heartbeats;
            let all = [("a", a), ("b", b), ("dead", 900)];
            let unix_now = 1_000 + i64::from(after);
            assert_eq!(heard(&mut liveness, &all, start + second * after, unix_now), wanted, "{after} s");
        }
    }

    #[test]
    fn a_machine_whose_own_clock_is_wrong_knows_who_lives() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        for unix_now in [10, 1_000, 100_000] {
            let mut liveness = Liveness::default();
            let all = [("a", 1_000), ("b", 990)];
            assert_eq!(heard(&mut liveness, &all, start, unix_now), ["a", "b"]);
            for (after, wanted) in [(35, &["a", "b"][..]), (70, &["a"])] {
                let later = [("a", 1_000 + i64::from(after)), ("b", 990)];
                let unix_now = unix_now + i64::from(after);
                assert_eq!(
                    heard(&mut liveness, &later, start + second * after, unix_now),
                    wanted,
                    "{unix_now}"
                );
            }
        }
    }

    #[test]
    fn a_machine_takes_nobody_for_dead_after_an_outage_of_less_than_a_minute() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let mut liveness = Liveness::default();
        // a is heard again after 42 s, and b, which was heard first, two seconds later.
        for (after, a, b) in [(0, 1_000, 1_000), (28, 1_028, 1_000), (70, 1_070, 1_000), (72, 1_070, 1_072)] {
            let all = [("a", a), ("b", b)];
            let taking_part = heard(&mut liveness, &all, start + second * after, 1_000 + i64::from(after));
            assert_eq!(taking_part, ["a", "b"], "{after} s");
        }
    }

    #[test]
    fn a_machine_whose_own_clock_is_ahead_takes_nobody_for_alive_who_was_dead_before() {
        for unix_now in [1_000, 1_060, 100_000] {
            let all = [("a", 1_000), ("b", 990), ("dead", 900)];
            let mut liveness = Liveness::default();
            assert_eq!(heard(&mut liveness, &all, Instant::now(), unix_now), ["a", "b"], "{unix_now}");
        }
    }

    #[test]
    fn while_the_own_heartbeat_does_not_come_back_nobody_is_given_up() {
        let start = Instant::now();
        let all = &[("a", 1000), ("b", 1000)];
        let mut liveness = Liveness::default();
        ready(&mut liveness, all, "a", start, 1000);
        let taking_part = ready(&mut liveness, all, "a", start + Duration::from_secs(3600), 4600);
        assert_eq!(taking_part, ["a", "b"]);
    }
}

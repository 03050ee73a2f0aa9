//! Which nodes are alive, without trusting any other machine's wall clock: a node is alive while its
//! `last-seen` keeps changing, by the monotonic clock of the agent that watches it.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    CheckedInRef, Node, former::Former, heartbeat_shares::HeartbeatShares, is_complete, is_recent,
    ready_seconds,
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
/// the 33 s (and 5 s of collecting) that lie between two heartbeats of one node. Where all rest for 300 s,
/// agents that suspect a node renew theirs that often.
const PAUSE: Duration = Duration::from_secs(39);

/// How long heartbeats must have come without a pause before a missing one proves anything. By then a node
/// that lives has been heard, whatever its interval: an attempt that hangs ends after 20 s, the next one
/// begins at most 19 s later, and heartbeats are collected for 5 s. Kilo's own agent needs 30 s.
const SETTLED: Duration = Duration::from_secs(45);

/// What one agent has observed of the others.
/// ```
/// use std::{sync::Arc, time::{Duration, Instant}};
/// use kilo_core::{topology::{CheckedInRef, Liveness, Node}, wireguard::PublicKey};
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
///     let nodes: Vec<CheckedInRef> = nodes.map(|(node, last_seen)| CheckedInRef { node, last_seen }).collect();
///     liveness.ready(nodes.into_iter(), "a1", start + Duration::from_secs(seconds), 1_000 + seconds as i64)
/// };
/// assert_eq!(ready(0, [1_000, 1_000]), [true, true]);
/// // This agent's heartbeat comes back twice, the other one does not.
/// assert_eq!(ready(31, [1_031, 1_000]), [true, true]);
/// assert_eq!(ready(62, [1_062, 1_000]), [true, false]);
/// ```
#[derive(Debug, Default)]
pub struct Liveness {
    /// Sorted by name.
    seen: Vec<Observation>,
    former: Former,
    /// A node has been silent for too long, and only this agent's own heartbeats can prove that
    /// this is the node's fault.
    suspects: bool,
    heard: Option<Heard>,
}

/// Heartbeats of any nodes as they arrive.
#[derive(Clone, Copy, Debug)]
struct Heard {
    /// The first one since the last [`PAUSE`].
    since: Instant,
    /// The last one.
    last: Instant,
}

impl Heard {
    /// Whether a node that lives must have been heard by now: before the first heartbeat after a pause, and
    /// for a while after it, silence is the API server's fault.
    fn settled(self) -> bool {
        self.last.saturating_duration_since(self.since) >= SETTLED
    }
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
    /// back, the view is stale, and no node is declared dead. Nor is one when heartbeats arrive again after a
    /// pause, until all have had time to be heard.
    ///
    /// `unix_now` helps with nodes seen for the first time: one with an old heartbeat must change it before
    /// it counts, unless most are old, which points to a wrong clock here, or an API server that was away.
    pub fn ready<'a>(
        &mut self,
        nodes: impl ExactSizeIterator<Item = CheckedInRef<'a>>,
        own: &str,
        now: Instant,
        unix_now: i64,
    ) -> Vec<bool> {
        self.update(nodes, Some(own), now, unix_now)
    }

    /// As [`Self::ready`], for a machine that is not a node: the node that was heard last stands in for
    /// its own. When no heartbeat arrives any more, the API server is away, and no node is declared
    /// dead. A clock that is ahead of every heartbeat is wrong, or the API server was away: the newest
    /// heartbeat then says who was heard until then.
    pub fn ready_as_heard<'a>(
        &mut self,
        nodes: impl ExactSizeIterator<Item = CheckedInRef<'a>> + Clone,
        now: Instant,
        unix_now: i64,
    ) -> Vec<bool> {
        let newest = nodes.clone().map(|known| known.last_seen).max().unwrap_or(unix_now);
        self.update(nodes, None, now, unix_now.min(newest))
    }

    fn update<'a>(
        &mut self,
        nodes: impl ExactSizeIterator<Item = CheckedInRef<'a>>,
        own: Option<&str>,
        now: Instant,
        unix_now: i64,
    ) -> Vec<bool> {
        let is_first = !self.seen.iter().any(|seen| seen.ready);
        // One walk over both; nodes that are passed over have gone.
        let mut before = std::mem::take(&mut self.seen).into_iter().peekable();
        self.seen.reserve_exact(nodes.len());
        let (mut shares, mut new) = (HeartbeatShares::default(), Vec::new());
        for CheckedInRef { node, last_seen } in nodes {
            let known_now = CheckedInRef { node, last_seen };
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
        let heard_last = self.heard_last();
        let own_seen = match own {
            Some(own) => own.map(|own| &self.seen[own]),
            None => heard_last,
        };
        let stale = own_seen.is_some_and(|seen| !seen.is_alive(now)) && !is_first;
        let own_changed = own_seen.and_then(|seen| seen.changed);
        let last = heard_last.and_then(|seen| seen.changed);
        let may_come = !last.is_some_and(|last| self.hear(last).settled());
        let unproved = |seen: &Observation| {
            let known = own_changed.zip(seen.changed);
            known.is_some_and(|(own, other)| own.saturating_duration_since(other) < evidence(&seen.node))
        };
        let mut suspects = false;
        for (at, seen) in self.seen.iter_mut().enumerate() {
            let spared =
                seen.ready && seen.node.declared_alive.is_none() && (stale || may_come || unproved(seen));
            let alive = own == Some(Some(at)) || seen.is_alive(now);
            suspects |= spared && !alive && seen.complete;
            seen.ready = seen.complete && (alive || spared);
        }
        self.suspects = suspects;
        self.seen.iter().map(|seen| seen.ready).collect()
    }

    /// Records a heartbeat at `last`.
    fn hear(&mut self, last: Instant) -> Heard {
        let heard = self.heard.filter(|heard| last.saturating_duration_since(heard.last) < PAUSE);
        let heard = match heard {
            // The node that was heard last may have gone.
            Some(Heard { since, last: before }) => Heard { since, last: before.max(last) },
            None => Heard { since: last, last },
        };
        *self.heard.insert(heard)
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
    /// heartbeat has come back again and again: they are worth it now, however long it would be until the next.
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
mod tests;

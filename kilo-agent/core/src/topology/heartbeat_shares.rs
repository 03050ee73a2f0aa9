//! The share of heartbeats that are recent. If most are, this agent's clock is right, and the
//! API server was reachable.

use super::{Node, READY_SECONDS, ready_seconds};

/// True if the node's heartbeat interval is longer than Kilo's.
fn is_slow(node: &Node) -> bool {
    ready_seconds(node) > READY_SECONDS
}

/// How many nodes there are, and how many of them have a recent heartbeat.
#[derive(Clone, Copy, Default)]
struct Share {
    all: usize,
    fresh: usize,
}

impl Share {
    fn add(&mut self, is_fresh: bool) {
        (self.all, self.fresh) = (self.all + 1, self.fresh + usize::from(is_fresh));
    }

    const fn is_most(self) -> bool {
        self.fresh * 2 >= self.all
    }
}

/// How many heartbeats are recent: for all nodes, for those with Kilo's heartbeat interval, and for
/// those with a longer one.
#[derive(Clone, Copy, Default)]
pub(super) struct HeartbeatShares {
    all: Share,
    fast: Share,
    slow: Share,
}

impl HeartbeatShares {
    /// Counts a node; `last_seen` is 0 if it was declared dead.
    pub(super) fn add(&mut self, node: &Node, last_seen: i64, is_fresh: bool) {
        self.all.add(is_fresh);
        // A node that was declared dead says nothing about the API server.
        if last_seen != 0 {
            if is_slow(node) { &mut self.slow } else { &mut self.fast }.add(is_fresh);
        }
    }

    /// Whether an old heartbeat of this node is its own fault. Recent heartbeats of slow nodes do not prove
    /// that the API server was reachable when fast nodes were due.
    pub(super) fn blame(&self, node: &Node, last_seen: i64) -> bool {
        let like_it = if is_slow(node) { self.slow } else { self.fast };
        self.all.is_most() && (last_seen == 0 || like_it.is_most())
    }
}

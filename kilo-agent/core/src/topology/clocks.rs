//! Whether this agent's clock is right, and the API server was there: most heartbeats are recent then.

use super::{Node, READY_SECONDS, ready_seconds};

/// It has more patience than one that renews its heartbeat as often as Kilo's own.
fn promises_seldom(node: &Node) -> bool {
    ready_seconds(node) > READY_SECONDS
}

/// Of how many nodes the heartbeat is recent.
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

/// How many heartbeats are recent: everybody's, of those who renew theirs as often as Kilo's own, and more seldom.
#[derive(Clone, Copy, Default)]
pub(super) struct Clocks {
    everybody: Share,
    often: Share,
    seldom: Share,
}

impl Clocks {
    /// Counts a node; `last_seen` is 0 of one that was declared dead.
    pub(super) fn add(&mut self, node: &Node, last_seen: i64, is_fresh: bool) {
        self.everybody.add(is_fresh);
        // Who was declared dead says nothing of the API server.
        if last_seen != 0 {
            if promises_seldom(node) { &mut self.seldom } else { &mut self.often }.add(is_fresh);
        }
    }

    /// Whether an old heartbeat of this node is its own fault. Patient ones do not prove that the API server was there
    /// when impatient ones were to be heard.
    pub(super) fn agree_about(&self, node: &Node, last_seen: i64) -> bool {
        let like_it = if promises_seldom(node) { self.seldom } else { self.often };
        self.everybody.is_most() && (last_seen == 0 || like_it.is_most())
    }
}

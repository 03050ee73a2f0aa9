//! A direct path that is used instead of a relay, and is not known to work yet.

use std::time::{Duration, Instant};

use super::Seen;

/// Bytes of a keepalive, of which WireGuard sends at most one a second.
pub(super) const KEEPALIVE: u64 = 32;
/// A direct path must be answered within `ANSWERED` of something sent on it, or within `ANSWERED_IDLE` if
/// nothing is sent at all. After `IN_FLIGHT`, whatever was sent through the relay before has arrived.
const ANSWERED: Duration = Duration::from_secs(5);
const ANSWERED_IDLE: Duration = Duration::from_secs(45);
const IN_FLIGHT: Duration = super::INSISTS;

/// When a trial began, and what has been sent in it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Trial {
    since: Instant,
    /// Bytes sent and received when it began to count.
    base: Option<(u64, u64)>,
    /// When more than a keepalive was sent.
    asked: Option<Instant>,
}

impl Trial {
    pub(super) const fn new(now: Instant) -> Self {
        Self { since: now, base: None, asked: None }
    }

    /// Goes on with what the device shows now; `is_relayed`: its endpoint is a relay's. `None`:
    /// the path was answered.
    pub(super) fn goes_on(mut self, seen: &Seen, is_relayed: bool, now: Instant) -> Option<Self> {
        let Some((sent, received)) = self.base else {
            if now.saturating_duration_since(self.since) >= IN_FLIGHT {
                self.base = Some((seen.sent, seen.received));
            }
            return Some(self);
        };
        if self.asked.is_none() && seen.sent.saturating_sub(sent) > KEEPALIVE {
            self.asked = Some(now);
        }
        (is_relayed || seen.received <= received).then_some(self)
    }

    pub(super) fn fails(&self, now: Instant) -> bool {
        let lasts = |since: Instant, most| now.saturating_duration_since(since) >= most;
        // As many seconds have gone since then as since the move, but for what was in flight.
        self.asked.is_some_and(|asked| lasts(asked, ANSWERED - IN_FLIGHT)) || lasts(self.since, ANSWERED_IDLE)
    }
}

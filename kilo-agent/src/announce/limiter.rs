//! A rate limit for lines and Events: a burst, and then one at a time.

use std::time::{Duration, Instant};

/// Number of tokens in a full burst.
const BURST: u32 = 50;
/// After the burst, one token per this time.
const EACH: Duration = Duration::from_secs(2);

/// Tokens for lines or Events.
#[derive(Debug)]
pub struct Limiter {
    left: u32,
    /// Time up to which tokens have been credited.
    counted: Instant,
    left_out: u64,
}

impl Limiter {
    /// Starts with the whole burst.
    pub const fn new(now: Instant) -> Self {
        Self { left: BURST, counted: now, left_out: 0 }
    }

    /// Takes a token; returns whether there was one. If not, the line or Event is counted as left out.
    pub fn admit(&mut self, now: Instant) -> bool {
        self.refill(now);
        let allowed = self.left > 0;
        self.left = self.left.saturating_sub(1);
        self.left_out += u64::from(!allowed);
        allowed
    }

    /// Takes the number left out, if it may be reported now; `None` when there are none, or not yet.
    pub fn take_left_out(&mut self, now: Instant) -> Option<u64> {
        self.refill(now);
        if self.left_out == 0 || self.left == 0 {
            return None;
        }
        self.left -= 1;
        Some(std::mem::take(&mut self.left_out))
    }

    fn refill(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.counted);
        let more = u32::try_from(passed.as_millis() / EACH.as_millis()).unwrap_or(u32::MAX);
        self.counted += EACH * more.min(BURST);
        if more >= BURST {
            self.counted = now;
        }
        self.left = self.left.saturating_add(more).min(BURST);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fifty_are_said_at_once_then_one_in_two_seconds_and_how_many_were_left_out() {
        let start = Instant::now();
        let mut limiter = Limiter::new(start);
        let said = (0..1000).filter(|_| limiter.admit(start)).count();
        assert_eq!(said, 50);
        assert_eq!(limiter.take_left_out(start), None, "that would be one more");
        let later = start + Duration::from_secs(2);
        assert_eq!(limiter.take_left_out(later), Some(950));
        assert_eq!(limiter.take_left_out(later), None);
        // Ten a second for a minute: one in two seconds passes.
        let busy = (0..600).filter(|tenth| limiter.admit(later + Duration::from_millis(tenth * 100)));
        assert_eq!(busy.count(), 29);
        let rested = start + Duration::from_secs(3600);
        assert_eq!((0..1000).filter(|_| limiter.admit(rested)).count(), 50, "no more than a burst is saved");
    }
}

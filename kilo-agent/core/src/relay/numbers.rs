//! Sequence numbers of a node's own messages: microseconds, so that the next agent's are later ones.

use std::time::Instant;

/// The number of the last message, and the clock that the next one follows.
#[derive(Clone, Debug, Default)]
pub(super) struct Numbers {
    last: u64,
    clock: u64,
    read: Option<Instant>,
}

impl Numbers {
    /// Reads the clocks; `wall` is in microseconds. Where the wall clock is set back, numbers grow with time all
    /// the same: others take the difference of two numbers for the time between the messages.
    pub(super) fn read_clocks(&mut self, now: Instant, wall: u64) {
        let passed = self.read.map_or(0, |read| now.saturating_duration_since(read).as_micros());
        self.clock = self.clock.saturating_add(u64::try_from(passed).unwrap_or(u64::MAX)).max(wall);
        self.read = Some(now);
        self.last = self.last.max(self.clock);
    }

    /// The number of the last message, or a later one that was not used.
    pub(super) const fn latest(&self) -> u64 {
        self.last
    }

    /// The number of the next message.
    pub(super) const fn next(&mut self) -> u64 {
        self.last += 1;
        self.last
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn numbers_grow_with_time_also_when_the_clock_is_set_back() {
        let (mut numbers, start) = (Numbers::default(), Instant::now());
        numbers.read_clocks(start, 9_000_000);
        assert_eq!((numbers.next(), numbers.next()), (9_000_001, 9_000_002));
        numbers.read_clocks(start + Duration::from_secs(1), 2_000_000);
        assert_eq!(numbers.latest(), 10_000_000);
        numbers.read_clocks(start + Duration::from_secs(2), 12_000_000);
        assert_eq!(numbers.next(), 12_000_001);
        // Many messages do not put the numbers ahead of the clock for good.
        for _ in 0..1_000 {
            numbers.next();
        }
        numbers.read_clocks(start + Duration::from_secs(3), 13_000_000);
        assert_eq!(numbers.latest(), 13_000_000);
    }
}

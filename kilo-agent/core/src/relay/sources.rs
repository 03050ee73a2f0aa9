//! Where tries from a pair's other end come from.

use std::{
    collections::BTreeSet,
    net::SocketAddr,
    time::{Duration, Instant},
};

use super::fresh;

/// Maximum number of addresses that are remembered.
const MOST: usize = 4;
/// An address from which no try has come for this long is forgotten.
const FORGOTTEN: Duration = Duration::from_secs(180);
/// Maximum number of tries whose numbers are remembered: more than come within the reordering window.
const MOST_NUMBERS: usize = 128;

/// The latest addresses, and the numbers of the tries by which they were found.
#[derive(Clone, Debug, Default)]
pub(super) struct Sources {
    addresses: Vec<(SocketAddr, Instant)>,
    numbers: BTreeSet<u64>,
}

impl Sources {
    /// Records a try from this source. A try that was heard before, from wherever, does not prove that the
    /// other end is there: an attacker may have carried it.
    pub(super) fn heard(&mut self, source: SocketAddr, number: u64, now: Instant) {
        let latest = self.numbers.last().copied().unwrap_or_default().max(number);
        self.numbers.retain(|known| fresh::is_recent(*known, latest));
        if !self.numbers.insert(number) {
            return;
        }
        if self.numbers.len() > MOST_NUMBERS {
            self.numbers.pop_first();
        }
        if let Some((_, last)) = self.addresses.iter_mut().find(|(address, _)| *address == source) {
            *last = now;
            return;
        }
        self.addresses.push((source, now));
        if self.addresses.len() > MOST {
            self.addresses.remove(0);
        }
    }

    /// Forgets addresses without recent tries.
    pub(super) fn keep(&mut self, now: Instant) {
        self.addresses.retain(|(_, last)| now.saturating_duration_since(*last) < FORGOTTEN);
    }

    /// The addresses, in the order in which they were found.
    pub(super) fn iter(&self) -> impl Iterator<Item = SocketAddr> {
        self.addresses.iter().map(|(address, _)| *address)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn a_try_that_was_heard_before_adds_no_place_and_places_are_forgotten_after_a_while() {
        let (mut sources, start) = (Sources::default(), Instant::now());
        let at = |port: u16| SocketAddr::from(([192, 0, 2, 1], port));
        let ports = |sources: &Sources| sources.iter().map(|address| address.port()).collect::<Vec<_>>();
        let later = |seconds| start + Duration::from_secs(seconds);
        sources.heard(at(1), 9_000_000, start);
        sources.heard(at(2), 9_000_000, start);
        assert_eq!(ports(&sources), [1], "it was carried");
        sources.heard(at(3), 8_999_999, start);
        sources.heard(at(4), 9_000_000, start);
        sources.heard(at(4), 8_999_999, start);
        assert_eq!(ports(&sources), [1, 3], "by another way");
        for number in 0..1_000 {
            sources.heard(at(3), 9_100_000 + number, later(100));
        }
        assert_eq!(sources.numbers.len(), MOST_NUMBERS);
        sources.keep(later(179));
        assert_eq!(ports(&sources), [1, 3]);
        sources.keep(later(180));
        assert_eq!(ports(&sources), [3]);
    }
}

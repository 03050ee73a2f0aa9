//! Where tries from a pair's other end come from.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

/// Maximum number of addresses that are remembered.
const MOST: usize = 4;
/// An address from which no try has come for this long is forgotten.
const FORGOTTEN: Duration = Duration::from_secs(180);
/// The latest addresses.
#[derive(Clone, Debug, Default)]
pub(super) struct Sources {
    addresses: Vec<(SocketAddr, Instant)>,
}

impl Sources {
    /// Records a try from this source. One that was heard before must not come here: it does not prove that
    /// the other end is there, because an attacker may have carried it.
    pub(super) fn heard(&mut self, source: SocketAddr, now: Instant) {
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
    fn the_latest_addresses_are_kept_and_forgotten_after_a_while() {
        let (mut sources, start) = (Sources::default(), Instant::now());
        let at = |port: u16| SocketAddr::from(([192, 0, 2, 1], port));
        let ports = |sources: &Sources| sources.iter().map(|address| address.port()).collect::<Vec<_>>();
        let later = |seconds| start + Duration::from_secs(seconds);
        for port in [1, 2, 3, 4, 5, 3] {
            sources.heard(at(port), start);
        }
        assert_eq!(ports(&sources), [2, 3, 4, 5]);
        sources.heard(at(3), later(100));
        sources.keep(later(179));
        assert_eq!(ports(&sources), [2, 3, 4, 5]);
        sources.keep(later(180));
        assert_eq!(ports(&sources), [3]);
    }
}

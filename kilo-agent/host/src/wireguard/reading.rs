//! The last reading of a device's peers, for callers that do not need a newer one.
//!
//! A device with many prefixes takes a tenth of a second to read, and reconciles, announcements and relays
//! all need it.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use super::PeerStatus;
use kilo_core::wireguard::key::PublicKey;
use parking_lot::Mutex;

/// Peers of a device at a moment.
#[derive(Clone, Debug)]
pub struct Reading {
    /// When they were read.
    pub at: Instant,
    /// How long it took to read them.
    pub took: Duration,
    /// The peers, with the ages of their handshakes when this was returned.
    pub peers: BTreeMap<PublicKey, PeerStatus>,
}

impl Reading {
    /// An empty reading, for when there is no device.
    pub fn nothing(at: Instant) -> Self {
        Self { at, took: Duration::ZERO, peers: BTreeMap::new() }
    }

    /// The same reading with the ages of handshakes at `now`.
    fn seen_at(&self, now: Instant) -> Self {
        let since = now.saturating_duration_since(self.at);
        let mut later = self.clone();
        for age in later.peers.values_mut().filter_map(|peer| peer.handshake_age.as_mut()) {
            *age += since;
        }
        later
    }
}

/// The last reading of a device.
#[derive(Debug, Default)]
pub(super) struct Last(Mutex<Option<Reading>>);

impl Last {
    pub fn keep(&self, reading: Reading) {
        *self.0.lock() = Some(reading);
    }

    /// The last reading, if it is younger than `age`, with the ages of handshakes at `now`.
    pub fn within(&self, age: Duration, now: Instant) -> Option<Reading> {
        let last = self.0.lock();
        let reading = last.as_ref().filter(|last| now.saturating_duration_since(last.at) < age)?;
        Some(reading.seen_at(now))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_reading_serves_those_who_may_have_it_that_old_and_its_handshakes_age() {
        let (last, start, key) = (Last::default(), Instant::now(), PublicKey([1; 32]));
        assert!(last.within(60 * SECOND, start).is_none(), "nothing was read yet");
        let peer = PeerStatus { handshake_age: Some(5 * SECOND), rx_bytes: 7, ..PeerStatus::default() };
        let silent = PublicKey([2; 32]);
        let peers = [(key, peer), (silent, PeerStatus::default())].into();
        last.keep(Reading { at: start, took: SECOND, peers });
        let at = |seconds: u32, age: u32| last.within(age * SECOND, start + seconds * SECOND);
        let found = at(20, 30).unwrap();
        assert_eq!((found.at, found.took), (start, SECOND));
        assert_eq!(found.peers[&key].handshake_age, Some(25 * SECOND));
        assert_eq!((found.peers[&key].rx_bytes, found.peers[&silent].handshake_age), (7, None));
        assert_eq!(at(25, 30).unwrap().peers[&key].handshake_age, Some(30 * SECOND), "and not 50");
        assert!(at(30, 30).is_none() && at(0, 0).is_none());
    }
}

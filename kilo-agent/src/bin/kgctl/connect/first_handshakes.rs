//! The first handshakes with all gateways. A gateway that does not know this machine's key yet stays silent,
//! and WireGuard retries after 5 s; if the leader fails before, this machine has no stand-by there.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use kilo_core::wireguard::{DeviceState, WireguardPlan, key::PublicKey};

/// Interval between looks at the device.
pub const LOOK: Duration = Duration::from_millis(100);
/// A handshake without an answer is repeated sooner than after WireGuard's own 5 s: first after this time,
/// long enough for an answer from anywhere on Earth, then after a quarter of the time since the first
/// attempt, which leaves slow answers enough time.
const AGAIN: Duration = Duration::from_millis(300);
/// A gateway that has not answered after this time may be unreachable from here.
const LIMIT: Duration = Duration::from_secs(8);

/// What to do next.
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    /// Look again after [`LOOK`].
    Wait,
    /// Remove these peers and add them again, which starts their handshakes at once.
    Again(Vec<PublicKey>),
    /// Stop waiting; only these peers have not answered.
    Done(Vec<PublicKey>),
}

/// Progress of the first handshakes.
#[derive(Debug)]
pub struct FirstHandshakes {
    began: Instant,
    asked: Instant,
    /// Peers without an answer at the last look; `None` before the first look.
    silent: Option<BTreeSet<PublicKey>>,
}

impl FirstHandshakes {
    /// Starts the wait.
    pub const fn new(now: Instant) -> Self {
        Self { began: now, asked: now, silent: None }
    }

    /// Records the silent peers; returns whether any other peer has answered since the last look. A gateway
    /// that answers only now did not know this machine before. It may already lead, and reports that when
    /// this machine announces itself.
    pub fn note_silent(&mut self, silent: &[PublicKey]) -> bool {
        let now: BTreeSet<PublicKey> = silent.iter().copied().collect();
        let before = self.silent.replace(now.clone());
        before.is_none_or(|before| !before.is_subset(&now))
    }

    /// Decides what to do about these peers, which have not answered.
    pub fn next(&mut self, silent: Vec<PublicKey>, now: Instant) -> Next {
        if silent.is_empty() || now.duration_since(self.began) >= LIMIT {
            return Next::Done(silent);
        }
        if now.duration_since(self.asked) < AGAIN.max(self.asked.duration_since(self.began) / 4) {
            return Next::Wait;
        }
        self.asked = now;
        Next::Again(silent)
    }
}

/// The gateways that have an endpoint but no handshake yet.
pub fn silent(gateways: &BTreeSet<PublicKey>, plan: &WireguardPlan, state: &DeviceState) -> Vec<PublicKey> {
    let answered = |key| state.peers.get(key).is_some_and(|peer| peer.handshake_age.is_some());
    let peers = plan.peers.iter().filter(|(key, _)| gateways.contains(*key));
    let asked = peers.filter(|(key, peer)| peer.endpoint.is_some() && !answered(*key));
    asked.map(|(key, _)| *key).collect()
}

#[cfg(test)]
mod tests {
    use kilo_core::wireguard::{PeerState, WireguardPeer};

    use super::*;

    const KEYS: [PublicKey; 3] = [PublicKey([1; 32]), PublicKey([2; 32]), PublicKey([3; 32])];

    #[test]
    fn who_does_not_answer_is_asked_again_ever_more_slowly_and_given_up() {
        let began = Instant::now();
        let at = |ms| began + Duration::from_millis(ms);
        let silent = || vec![KEYS[1]];
        let mut handshakes = FirstHandshakes::new(began);
        let is_asked = |ms: &u64| handshakes.next(silent(), at(*ms)) == Next::Again(silent());
        let asked: Vec<u64> = (0..80).map(|look| look * 100).filter(is_asked).collect();
        // An answer that takes a second and a half arrives in time.
        assert_eq!(asked, [300, 600, 900, 1200, 1500, 1900, 2400, 3000, 3800, 4800, 6000, 7500]);
        assert_eq!(handshakes.next(Vec::new(), at(7900)), Next::Done(Vec::new()));
        assert_eq!(handshakes.next(silent(), at(8000)), Next::Done(silent()));
    }

    #[test]
    fn a_node_that_answers_hears_hello_at_once_while_others_are_silent() {
        let mut handshakes = FirstHandshakes::new(Instant::now());
        let silent = [&KEYS[..], &KEYS, &KEYS[..1], &KEYS[..2], &KEYS[..2], &KEYS[1..], &[]];
        let answered = silent.map(|silent| handshakes.note_silent(silent));
        // In the last but one, the first has answered, and the third is silent again.
        assert_eq!(answered, [true, false, true, false, false, true, true]);
    }

    #[test]
    fn who_has_no_endpoint_or_is_no_gateway_is_not_waited_for() {
        let endpoint = "192.0.2.1:51820".parse().ok();
        let peer = |endpoint| WireguardPeer { endpoint, ..WireguardPeer::default() };
        let another_vpn_peer = PublicKey([4; 32]);
        let keys = KEYS.into_iter().chain([another_vpn_peer]);
        let peers = keys.zip([peer(endpoint), peer(endpoint), peer(None), peer(endpoint)]).collect();
        let plan = WireguardPlan { listen_port: 51820, peers };
        let answered = PeerState { handshake_age: Some(Duration::ZERO), ..PeerState::default() };
        let state = DeviceState { peers: [(KEYS[0], answered)].into(), ..DeviceState::default() };
        assert_eq!(silent(&KEYS.into(), &plan, &state), [KEYS[1]]);
    }
}

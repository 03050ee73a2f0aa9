//! Tunnels into which packets are sent, but whose other end does not answer. WireGuard does not report
//! that: without traffic it makes no handshakes, so an old handshake alone means nothing.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use super::key::PublicKey;

/// WireGuard sends nothing with the keys of a handshake that is older than this.
pub const EXPIRES: Duration = Duration::from_secs(180);
/// A handshake that is due takes at most this long: three attempts of WireGuard.
pub const PATIENCE: Duration = Duration::from_secs(15);
/// When nothing was sent for this long, nobody waits for an answer.
const QUIET: Duration = Duration::from_secs(180);

/// One peer of the device at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// Time since the last handshake; `None` = there was none.
    pub handshake_age: Option<Duration>,
    /// Bytes sent to it so far, handshake attempts included.
    pub sent_bytes: u64,
}

/// A change in the state of a tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// The first handshake.
    Up,
    /// Bytes are sent, and the other end does not answer.
    Silent,
    /// It was silent, and there is a handshake.
    Answers,
    /// It was silent, and nothing is sent any more.
    Quiet,
}

/// The tunnels of a device, as observed over time.
#[derive(Clone, Debug, Default)]
pub struct Tunnels(BTreeMap<PublicKey, Tunnel>);

#[derive(Clone, Debug)]
struct Tunnel {
    sent_bytes: u64,
    has_shaken_hands: bool,
    /// When bytes were first and last sent for which there is no handshake.
    unanswered: Option<(Instant, Instant)>,
    is_silent: bool,
}

impl Tunnels {
    /// Records all peers of the device; returns what has changed. A tunnel that no longer exists is
    /// forgotten: its state says nothing about another one.
    pub fn observe(&mut self, peers: &BTreeMap<PublicKey, Sample>, now: Instant) -> Vec<(PublicKey, Turn)> {
        self.0.retain(|key, _| peers.contains_key(key));
        let mut turns = Vec::new();
        for (key, sample) in peers {
            let tunnel = self.0.entry(*key).or_insert_with(|| Tunnel::new(*sample));
            turns.extend(tunnel.observe(*sample, now).map(|turn| (*key, turn)));
        }
        turns
    }

    /// The silent tunnels, and for how long bytes have been sent without an answer.
    pub fn silent(&self, now: Instant) -> impl Iterator<Item = (PublicKey, Duration)> {
        let silent = self.0.iter().filter(|(_, tunnel)| tunnel.is_silent);
        silent.filter_map(move |(key, tunnel)| {
            let (since, _) = tunnel.unanswered?;
            Some((*key, now.saturating_duration_since(since)))
        })
    }
}

impl Tunnel {
    const fn new(sample: Sample) -> Self {
        Self {
            sent_bytes: sample.sent_bytes,
            has_shaken_hands: sample.handshake_age.is_some(),
            unanswered: None,
            is_silent: false,
        }
    }

    fn observe(&mut self, sample: Sample, now: Instant) -> Option<Turn> {
        // A smaller count means that the peer was removed from the device and added again.
        let has_sent = sample.sent_bytes > self.sent_bytes;
        self.sent_bytes = sample.sent_bytes;
        if sample.handshake_age.is_some_and(|age| age < EXPIRES) {
            self.unanswered = None;
            let is_first = !std::mem::replace(&mut self.has_shaken_hands, true);
            let was_silent = std::mem::take(&mut self.is_silent);
            return if was_silent { Some(Turn::Answers) } else { is_first.then_some(Turn::Up) };
        }
        if has_sent {
            let since = self.unanswered.map_or(now, |(since, _)| since);
            self.unanswered = Some((since, now));
        }
        let (since, last) = self.unanswered?;
        if now.saturating_duration_since(last) >= QUIET {
            self.unanswered = None;
            return std::mem::take(&mut self.is_silent).then_some(Turn::Quiet);
        }
        // A single burst for which nobody waits does not count, unless WireGuard goes on trying.
        let tries = last.saturating_duration_since(since) >= PATIENCE;
        let is_news = tries && !self.is_silent;
        self.is_silent |= tries;
        is_news.then_some(Turn::Silent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: PublicKey = PublicKey([1; 32]);

    /// Observes every 5 s; returns each turn and its second.
    fn turns(samples: impl IntoIterator<Item = (Option<u64>, u64)>) -> Vec<(u64, Turn)> {
        let (start, mut tunnels) = (Instant::now(), Tunnels::default());
        let mut turns = Vec::new();
        for ((age, sent_bytes), second) in samples.into_iter().zip((0..).step_by(5)) {
            let sample = Sample { handshake_age: age.map(Duration::from_secs), sent_bytes };
            let seen = tunnels.observe(&BTreeMap::from([(KEY, sample)]), start + Duration::from_secs(second));
            turns.extend(seen.into_iter().map(|(_, turn)| (second, turn)));
        }
        turns
    }

    #[test]
    fn a_tunnel_that_never_answers_is_silent_after_15_s_and_says_so_once() {
        let attempts = (0..20).map(|attempt| (None, attempt * 148));
        assert_eq!(turns(attempts), [(20, Turn::Silent)]);
        // One attempt that is not repeated loses nothing.
        assert_eq!(turns([(None, 0), (None, 148), (None, 148), (None, 148), (None, 148), (None, 148)]), []);
    }

    #[test]
    fn an_idle_tunnel_is_not_silent_however_old_its_handshake() {
        assert_eq!(turns((0..200).map(|look| (Some(look * 5), 1000))), []);
        assert_eq!(turns((0..200).map(|_| (None, 0))), []);
    }

    #[test]
    fn the_first_handshake_is_said_and_a_renewed_one_is_not() {
        let first = [(None, 0), (None, 148), (Some(1), 500), (Some(6), 900)];
        let idle = (0..60).map(|look| (Some(11 + look * 5), 900));
        let again = [(Some(0), 1500), (Some(5), 2000)];
        assert_eq!(turns(first.into_iter().chain(idle).chain(again)), [(10, Turn::Up)]);
        assert_eq!(turns([(Some(7), 10), (Some(12), 20)]), [], "it was there before the agent");
    }

    #[test]
    fn a_path_that_breaks_under_traffic_is_silent_once_its_keys_have_expired() {
        let broken = (0..50).map(|look| (Some(look * 5), look * 1000));
        assert_eq!(turns(broken), [(195, Turn::Silent)]);
        let mended = (0..50).map(|look| (Some(look * 5), look * 1000)).chain([(Some(1), 60_000)]);
        assert_eq!(turns(mended)[1..], [(250, Turn::Answers)]);
    }

    #[test]
    fn a_silent_tunnel_that_nobody_sends_into_is_no_trouble() {
        let tried = (0..10).map(|look| (None, look * 148));
        let stopped = (0..60).map(|_| (None, 9 * 148));
        assert_eq!(turns(tried.chain(stopped)), [(20, Turn::Silent), (225, Turn::Quiet)]);
    }

    #[test]
    fn a_tunnel_that_was_removed_is_forgotten() {
        let (start, mut tunnels) = (Instant::now(), Tunnels::default());
        let second = |after| start + Duration::from_secs(after);
        for look in 0..5 {
            let sample = Sample { handshake_age: None, sent_bytes: look * 148 };
            tunnels.observe(&BTreeMap::from([(KEY, sample)]), second(look * 5));
        }
        assert_eq!(tunnels.silent(second(25)).collect::<Vec<_>>(), [(KEY, Duration::from_secs(20))]);
        assert_eq!(tunnels.observe(&BTreeMap::new(), second(25)), []);
        assert_eq!(tunnels.silent(second(25)).count(), 0);
        let sample = Sample { handshake_age: None, sent_bytes: 9000 };
        assert_eq!(tunnels.observe(&BTreeMap::from([(KEY, sample)]), second(30)), []);
    }
}

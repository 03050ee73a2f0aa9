//! A round of direct tries: where an end is tried, and what has answered.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    time::{Duration, Instant},
};

/// Maximum number of addresses at which an end is tried at a time.
pub(super) const MOST_CANDIDATES: usize = 8;
/// Length of a round, and the interval of its tries.
pub(super) const LENGTH: Duration = Duration::from_millis(1500);
const STEP: Duration = Duration::from_millis(200);

#[derive(Clone, Debug)]
pub(super) struct Round {
    ends: Instant,
    next: Instant,
    /// Destination of each unanswered try, by its number.
    sent: BTreeMap<u64, SocketAddr>,
    answers: BTreeMap<SocketAddr, u32>,
}

impl Round {
    pub(super) fn new(now: Instant) -> Self {
        Self { ends: now + LENGTH, next: now, sent: BTreeMap::new(), answers: BTreeMap::new() }
    }

    pub(super) fn is_over(&self, now: Instant) -> bool {
        now >= self.ends
    }

    /// True every 200 ms, when every address is tried once.
    pub(super) fn is_due(&mut self, now: Instant) -> bool {
        let is_due = now >= self.next;
        if is_due {
            self.next = now + STEP;
        }
        is_due
    }

    /// Records a try.
    pub(super) fn sent(&mut self, sequence: u64, to: SocketAddr) {
        self.sent.insert(sequence, to);
    }

    /// How many tries this address has answered, including the one of this number; `None` where the answer was
    /// carried from elsewhere, or carried twice: it proves nothing about a path.
    pub(super) fn answered(&mut self, sequence: u64, source: SocketAddr) -> Option<u32> {
        if self.sent.get(&sequence) != Some(&source) {
            return None;
        }
        self.sent.remove(&sequence);
        let answers = self.answers.entry(source).or_insert(0);
        *answers += 1;
        Some(*answers)
    }
}

/// The order in which addresses are tried: `first`, then one address of each family in turn, starting from
/// another one in each round, so that many addresses of one kind, or one node that names many, do not keep the
/// others from being tried.
pub(super) fn candidates(
    first: impl Iterator<Item = SocketAddr>,
    others: &[SocketAddr],
    round: u64,
) -> Vec<SocketAddr> {
    let mut families: [Vec<SocketAddr>; 2] = [true, false].map(|v4| {
        let mut family: Vec<_> = others.iter().copied().filter(|address| address.is_ipv4() == v4).collect();
        let start = usize::try_from(round % family.len().max(1) as u64).unwrap_or(0);
        family.rotate_left(start);
        family.reverse();
        family
    });
    let mut all: Vec<SocketAddr> = first.collect();
    while families.iter().any(|family| !family.is_empty()) {
        all.extend(families.iter_mut().filter_map(Vec::pop));
    }
    let mut tried = BTreeSet::new();
    all.retain(|address| tried.insert(*address));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_address_is_tried_in_some_round_and_each_family_in_all() {
        let at = |text: &str| text.parse::<SocketAddr>().unwrap();
        let first = [at("192.0.2.9:1"), at("192.0.2.3:7")];
        let mut others: Vec<_> = (0..20).map(|port| at(&format!("192.0.2.3:{port}"))).collect();
        others.extend([at("[2001:db8::1]:1"), at("[2001:db8::2]:1")]);
        let mut tried = BTreeSet::new();
        for round in 0..20 {
            let all = candidates(first.into_iter(), &others, round);
            assert_eq!(all.len(), 23, "each once");
            assert_eq!(all[..2], first);
            let now = &all[..MOST_CANDIDATES];
            assert!(now.iter().any(SocketAddr::is_ipv6) && now[2..].iter().any(SocketAddr::is_ipv4));
            tried.extend(now.iter().copied());
        }
        assert_eq!(tried.len(), 23);
    }
}

//! The relays that one pair holds, and which of them are useless for now.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    time::{Duration, Instant},
};

use super::{
    NodeId,
    lease::{Lease, SELDOM_USELESS},
    rank,
};

/// Relays that a pair holds: one in use, one as a stand-by.
const RELAYS: usize = 2;
/// Maximum that it holds when it is invited to more, or some are useless.
const MOST_RELAYS: usize = 4;
/// How long a relay that was useless is remembered as such while it is not asked.
const FORGOTTEN: Duration = Duration::from_secs(300);

/// Relays of one pair.
#[derive(Clone, Debug, Default)]
pub(super) struct Leases {
    held: BTreeMap<NodeId, Lease>,
    /// Since when these are useless, or were dropped to make room: others are asked before them.
    failed: BTreeMap<NodeId, Instant>,
}

impl Leases {
    pub(super) fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Drops all leases: none is needed any more.
    pub(super) fn clear(&mut self) {
        self.held.clear();
    }

    pub(super) fn insert(&mut self, relay: NodeId, lease: Lease) {
        self.held.insert(relay, lease);
    }

    pub(super) fn get(&self, relay: NodeId) -> Option<&Lease> {
        self.held.get(&relay)
    }

    pub(super) fn get_mut(&mut self, relay: NodeId) -> Option<&mut Lease> {
        self.held.get_mut(&relay)
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (NodeId, &mut Lease)> {
        self.held.iter_mut().map(|(relay, lease)| (*relay, lease))
    }

    /// The relay that has this port.
    pub(super) fn of(&self, address: SocketAddr) -> Option<NodeId> {
        self.held.iter().find(|(_, lease)| lease.is_at(address)).map(|(relay, _)| *relay)
    }

    /// Whether the relay in use is useless, or not held at all.
    pub(super) fn fails(&self, by: NodeId, now: Instant) -> bool {
        self.held.get(&by).is_none_or(|lease| lease.fails(true, now))
    }

    /// The best relay, other than the one in use, through which packets pass.
    pub(super) fn best(
        &self,
        (own, other): (NodeId, NodeId),
        by: Option<NodeId>,
        now: Instant,
    ) -> Option<(NodeId, SocketAddr)> {
        // A relay that was left counts only once it is heard from again, though it was a stand-by that works.
        let is_useful = |relay: &NodeId| by != Some(*relay) && !self.failed.contains_key(relay);
        let working = self.held.iter().filter(|(relay, lease)| is_useful(relay) && lease.works(false, now));
        let (relay, lease) = working.min_by_key(|(relay, _)| rank(own, other, **relay))?;
        Some((*relay, lease.address()?))
    }

    /// A relay says that the other end asks for it.
    pub(super) fn invited(&mut self, to: (NodeId, SocketAddr), by: Option<NodeId>, nonce: u64, now: Instant) {
        let (relay, endpoint) = to;
        if let Some(lease) = self.held.get_mut(&relay) {
            lease.invited(now);
        } else if self.make_room(&[], by, now) {
            self.held.insert(relay, Lease::new(endpoint, nonce, now));
        }
    }

    /// Holds the best of the relays that exist. A useless one stays while there is room, because it may
    /// recover, but does not count. Without room they take turns.
    pub(super) fn hold(
        &mut self,
        (own, other): (NodeId, NodeId),
        relays: &BTreeMap<NodeId, SocketAddr>,
        by: Option<NodeId>,
        random: &mut impl FnMut() -> u64,
        now: Instant,
    ) {
        self.notice(by, now);
        let mut best: Vec<NodeId> = relays.keys().copied().filter(|relay| *relay != other).collect();
        best.sort_unstable_by_key(|relay| {
            let failed = self.failed.get(relay).copied();
            // Relays that are held are asked anyway.
            (failed.is_some() && self.held.contains_key(relay), failed, rank(own, other, *relay))
        });
        best.truncate(RELAYS);
        // Another relay takes the place of one that is gone.
        let is_there = |relay: &NodeId| by == Some(*relay) || relays.contains_key(relay);
        self.held.retain(|relay, lease| is_there(relay) || !lease.is_dead(false, now));
        for relay in &best {
            let Some(endpoint) = relays.get(relay) else { continue };
            let rests = |since: &Instant| now.saturating_duration_since(*since) < SELDOM_USELESS;
            if self.held.contains_key(relay) || self.failed.get(relay).is_some_and(rests) {
                continue;
            }
            if self.make_room(&best, by, now) {
                // It is given as much time as one that was never asked.
                self.failed.remove(relay);
                self.held.insert(*relay, Lease::new(*endpoint, random(), now));
            }
        }
    }

    /// Records which relays are useless, and which have recovered.
    fn notice(&mut self, by: Option<NodeId>, now: Instant) {
        let (held, failed) = (&self.held, &mut self.failed);
        failed.retain(|relay, since| match held.get(relay) {
            Some(lease) => !(lease.works(by == Some(*relay), now) && lease.is_heard_since(*since)),
            None => now.saturating_duration_since(*since) < FORGOTTEN,
        });
        for (relay, lease) in held {
            if lease.fails(by == Some(*relay), now) {
                failed.entry(*relay).or_insert(now);
            }
        }
    }

    /// Makes room for one more, if need be by dropping the relay that has been useless for longest. Returns
    /// whether there is room.
    fn make_room(&mut self, keep: &[NodeId], by: Option<NodeId>, now: Instant) -> bool {
        if self.held.len() < MOST_RELAYS {
            return true;
        }
        let useless = self.failed.iter_mut().filter(|(relay, _)| {
            self.held.contains_key(relay) && by != Some(**relay) && !keep.contains(relay)
        });
        let Some((relay, since)) = useless.min_by_key(|(_, since)| **since) else { return false };
        // All others come before it.
        *since = now;
        self.held.remove(relay);
        true
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::net::Ipv4Addr;

    use kilo_common::relay::{BOTH, FIRST_PORT, Kind, Message};

    use super::{
        super::{lease::Use, numbers::Numbers},
        *,
    };

    const ENDS: (NodeId, NodeId) = (11, 22);

    fn relays(count: u8) -> BTreeMap<NodeId, SocketAddr> {
        let endpoint = |number| SocketAddr::new(Ipv4Addr::new(203, 0, 113, number).into(), 51_820);
        (1..=count).map(|number| (NodeId::from(number), endpoint(number))).collect()
    }

    #[test]
    fn of_many_relays_that_are_of_no_use_each_is_asked_again_and_again() {
        for (count, refuses, works) in [
            (7, false, false),
            (7, true, false),
            (7, false, true),
            (7, true, true),
            (5, false, false),
            (3, true, true),
        ] {
            let (mut leases, start) = (Leases::default(), Instant::now());
            let mut asked = BTreeMap::from([(1, Vec::new())]);
            let mut numbers = Numbers::default();
            for step in 0..6_000 {
                let now = start + Duration::from_millis(100) * step;
                // The first one works and is in use, or is like the others.
                let by = (works && step > 0).then_some(1);
                leases.hold(ENDS, &relays(count), by, &mut || 1, now);
                if works && step == 0 {
                    leases.insert(1, Lease::new(relays(1)[&1], 1, now));
                }
                for (relay, lease) in leases.iter_mut() {
                    let Some((_, message)) = lease.ask(ENDS, &mut numbers, Use::of(relay, by), now) else {
                        continue;
                    };
                    asked.entry(relay).or_insert_with(Vec::new).push(step / 10);
                    let offer = Message { kind: Kind::Offer, ..message };
                    if works && relay == 1 {
                        lease.offered(&Message { flags: BOTH, port: FIRST_PORT, token: 1, ..offer }, now);
                    } else if refuses {
                        lease.offered(&offer, now);
                    }
                }
                assert!(leases.held.len() <= MOST_RELAYS);
            }
            assert_eq!(
                asked.keys().copied().collect::<Vec<_>>(),
                relays(count).into_keys().collect::<Vec<_>>()
            );
            for (relay, seconds) in asked {
                let longest = seconds.windows(2).map(|two| two[1] - two[0]).max();
                let (last, often) = (seconds.last().copied().unwrap(), seconds.len());
                assert!(longest <= Some(40) && last >= 560, "{relay} of {count}: {seconds:?}");
                // Relays that refuse are not asked more often than that.
                assert!(!refuses || works && relay == 1 || often <= 61, "{relay} of {count}: {seconds:?}");
            }
        }
    }

    #[test]
    fn a_port_that_is_none_of_a_relays_is_refused() {
        let (mut leases, start) = (Leases::default(), Instant::now());
        leases.hold(ENDS, &relays(1), None, &mut || 1, start);
        let lease = leases.get_mut(1).unwrap();
        let mut numbers = Numbers::default();
        let mut offers = |lease: &mut Lease, port, now| {
            let (_, message) = lease.ask(ENDS, &mut numbers, Use::Next, now).unwrap();
            assert!(
                lease.offered(&Message { kind: Kind::Offer, flags: BOTH, port, token: 1, ..message }, now)
            );
        };
        offers(lease, 443, start);
        assert_eq!((lease.works(true, start), lease.address()), (false, None));
        let later = start + SELDOM_USELESS;
        offers(lease, FIRST_PORT, later);
        assert!(lease.works(true, later) && lease.address().is_some());
    }

    #[test]
    fn an_offer_counts_once_and_only_for_a_question_of_the_last_seconds() {
        let (mut leases, start) = (Leases::default(), Instant::now());
        leases.hold(ENDS, &relays(1), None, &mut || 1, start);
        let lease = leases.get_mut(1).unwrap();
        let mut numbers = Numbers::default();
        numbers.read_clocks(start, 9_000_000);
        let mut asks = |lease: &mut Lease, seconds| {
            let now = start + Duration::from_secs(seconds);
            numbers.read_clocks(now, 0);
            Message { kind: Kind::Offer, ..lease.ask(ENDS, &mut numbers, Use::Next, now).unwrap().1 }
        };
        let (first, second) = (asks(lease, 0), asks(lease, 1));
        let between = Message { sequence: first.sequence + 1, ..first };
        assert!(!lease.offered(&between, start), "nothing was asked with this number");
        assert!(lease.offered(&Message { port: FIRST_PORT, ..first }, start), "by a longer path");
        assert!(!lease.offered(&Message { port: FIRST_PORT, ..first }, start), "again");
        let third = asks(lease, 4);
        assert!(!lease.offered(&Message { port: FIRST_PORT, ..second }, start), "too old");
        assert!(lease.offered(&Message { port: FIRST_PORT, ..third }, start));
    }

    #[test]
    fn a_relay_that_has_refused_is_asked_at_once_when_the_other_end_asks_it() {
        let (mut leases, start) = (Leases::default(), Instant::now());
        leases.hold(ENDS, &relays(1), None, &mut || 1, start);
        let mut numbers = Numbers::default();
        let mut asks = |leases: &mut Leases, now| {
            let lease = leases.get_mut(1).unwrap();
            lease.ask(ENDS, &mut numbers, Use::Next, now).map(|(_, message)| message)
        };
        let refused = Message { kind: Kind::Offer, ..asks(&mut leases, start).unwrap() };
        leases.get_mut(1).unwrap().offered(&refused, start);
        let later = start + Duration::from_secs(5);
        assert_eq!(asks(&mut leases, later), None, "not that often");
        let [endpoint] = relays(1).into_values().collect::<Vec<_>>()[..] else { unreachable!() };
        leases.invited((1, endpoint), None, 1, later);
        assert!(asks(&mut leases, later).is_some());
    }
}

//! VPN peers that follow gateways (`kgctl connect`): each gateway claims its members to them as it does to
//! far leaders, but waits for none of them. Nothing is sent to a peer that has been silent for a while.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::Ipv6Addr,
};

use kilo_failover::{
    Micros, NodeId, SEC, Signal, Term,
    gateway::{Lead, Sender, pause},
    signal::{Body, Kind, Shared},
};

use crate::far::HELLO;

/// A follower that has missed three HELLOs is away.
const COUNTS: Micros = 3 * HELLO + 5 * SEC;
/// Minimum time between two requests for everything that are honoured.
const ANEW: Micros = SEC;

/// State of one follower.
#[derive(Debug, Default)]
struct Follower {
    /// When it was last heard, or first known.
    heard: Micros,
    term: Term,
    moved: BTreeSet<NodeId>,
    tries: u32,
    /// When to claim next, while it does not know everything; `None` otherwise.
    next: Option<Micros>,
    /// When it last asked for everything.
    began: Option<Micros>,
    /// Identifies the set of members that it knows completely: their number, and the XOR of their ids.
    knows: Option<(usize, NodeId)>,
}

/// All followers, by control address.
#[derive(Debug, Default)]
pub struct Followers(BTreeMap<Ipv6Addr, Follower>);

impl Followers {
    /// Takes over the set of VPN peers that follow.
    pub fn set_known(&mut self, known: &BTreeMap<Ipv6Addr, NodeId>, now: Micros) {
        self.0.retain(|control, _| known.contains_key(control));
        for control in known.keys() {
            // A freshly started agent has heard nobody yet.
            self.0.entry(*control).or_insert_with(|| Follower { heard: now, ..Follower::default() });
        }
    }

    /// Handles MOVED of a follower: with members, those it has moved; without any, it is present and wants
    /// everything announced again.
    pub fn heard(&mut self, control: Ipv6Addr, signal: &Signal, lead: Option<&Lead>, now: Micros) {
        let Some(follower) = self.0.get_mut(&control) else { return };
        follower.heard = now;
        let Body::Claim { members, .. } = &signal.body else { return };
        if members.is_empty() {
            // At most once per `ANEW`, however often it asks.
            if follower.began.is_none_or(|began| now.saturating_sub(began) >= ANEW) {
                let began = Some(now);
                (follower.moved, follower.tries, follower.next) = (BTreeSet::new(), 0, None);
                (follower.began, follower.knows) = (began, None);
            }
        } else if let Some(lead) =
            lead.filter(|lead| lead.term() == follower.term && lead.term() == signal.term)
        {
            // Only members that this gateway leads are recorded, whatever it says.
            follower.moved.extend(members.iter().filter(|member| lead.has(**member)));
        }
    }

    /// When the next claim is due.
    pub fn wake(&self) -> Micros {
        self.0.values().filter_map(|follower| follower.next).min().unwrap_or(Micros::MAX)
    }

    /// Takes the claims that are due, each with its destination control address.
    pub fn take_due(
        &mut self,
        sender: Sender,
        lead: Option<&Lead>,
        now: Micros,
        mut nonce: impl FnMut() -> u64,
    ) -> Vec<(Ipv6Addr, Signal)> {
        let mut signals = Vec::new();
        if self.0.is_empty() {
            return signals;
        }
        let lead = lead.filter(|lead| lead.term() > Term::NONE);
        let led: Vec<NodeId> = lead
            .iter()
            .flat_map(|lead| lead.members().filter(|member| lead.is_followed_by(*member)))
            .collect();
        // Identifies the set of members, so that a follower that knows all of them is checked only once.
        let stamp = (led.len(), led.iter().fold(0, |all, member| all ^ member));
        let (term, shared) = lead.map_or((Term::NONE, Shared::Stay), |lead| (lead.term(), lead.shared()));
        for (control, follower) in &mut self.0 {
            if follower.term != term {
                *follower = Follower { heard: follower.heard, term, ..Follower::default() };
            }
            let is_here = follower.heard + COUNTS > now;
            if !is_here || led.is_empty() || follower.knows == Some(stamp) {
                (follower.tries, follower.next) = (0, None);
                continue;
            }
            if follower.next.is_some_and(|next| next > now) {
                continue;
            }
            let unknown: Vec<NodeId> =
                led.iter().filter(|member| !follower.moved.contains(member)).copied().collect();
            if unknown.is_empty() {
                (follower.tries, follower.next, follower.knows) = (0, None, Some(stamp));
                continue;
            }
            if *follower.next.get_or_insert(now + Lead::BATCH) > now {
                continue;
            }
            follower.tries += 1;
            follower.next = Some(now + pause(follower.tries));
            let claims = sender.in_parts(Kind::Claim, term, (sender.me, shared), &unknown, &mut nonce);
            signals.extend(claims.into_iter().map(|signal| (*control, signal)));
        }
        signals
    }
}

#[cfg(test)]
mod tests {
    use kilo_failover::MS;

    use super::*;

    const ME: NodeId = 1 << 48;
    const MEMBER: NodeId = 2 << 48;
    const LAPTOP: Ipv6Addr = Ipv6Addr::new(0xfd6b, 0x696c, 0x6f00, 0, 0, 0, 0, 9);

    fn moved(term: Term, members: &[NodeId]) -> Signal {
        let body = Body::Claim { gateway: ME, shared: Shared::Stay, part: (0, 1), members: members.to_vec() };
        Signal { kind: Kind::Moved, nonce: 1, term, sender: 9, location: 7, body }
    }

    /// A gateway that leads one member besides itself, and one follower.
    fn leads_a_member() -> (Sender, Term, Lead, Followers) {
        let (sender, term) = (Sender { me: ME, location: 7 }, Term::NONE.next(ME));
        let mut lead = Lead::new(sender, term, &[], 0);
        lead.add([ME, MEMBER], 0);
        lead.heard(MEMBER, (term, ME), 0);
        let mut followers = Followers::default();
        followers.set_known(&BTreeMap::from([(LAPTOP, 9)]), 0);
        (sender, term, lead, followers)
    }

    #[test]
    fn who_asks_for_everything_again_and_again_gets_claims_once_a_second() {
        let (sender, term, lead, mut followers) = leads_a_member();
        let mut sent = 0;
        for now in (SEC..2 * SEC).step_by(usize::try_from(3 * MS).unwrap_or(1)) {
            followers.heard(LAPTOP, &moved(term, &[]), Some(&lead), now);
            let claims = followers.take_due(sender, Some(&lead), now, || 1).len();
            sent += claims;
            if claims > 0 {
                followers.heard(LAPTOP, &moved(term, &[MEMBER]), Some(&lead), now);
            }
        }
        assert_eq!(sent, 1);
    }

    #[test]
    fn who_is_there_gets_claims_until_it_has_moved_and_who_is_away_gets_none() {
        let (sender, term, mut lead, mut followers) = leads_a_member();
        let claims_due = |followers: &mut Followers, lead: &Lead, now| {
            let due = followers.take_due(sender, Some(lead), now, || 1);
            due.into_iter().map(|(_, signal)| signal).collect::<Vec<_>>()
        };
        assert!(claims_due(&mut followers, &lead, COUNTS).is_empty());
        assert_eq!(followers.wake(), Micros::MAX, "it was never heard");
        followers.heard(LAPTOP, &moved(Term::NONE, &[]), Some(&lead), SEC);
        assert!(claims_due(&mut followers, &lead, SEC).is_empty());
        let claims = claims_due(&mut followers, &lead, SEC + Lead::BATCH);
        assert!(
            matches!(&claims[..], [Signal { body: Body::Claim { members, .. }, .. }] if *members == [MEMBER])
        );
        assert_eq!(followers.wake(), SEC + Lead::BATCH + 10 * MS, "it is repeated");
        // An answer for another term, or about nodes that are not led, is ignored.
        followers.heard(LAPTOP, &moved(term.next(ME), &[MEMBER]), Some(&lead), SEC);
        followers.heard(LAPTOP, &moved(term, &[77]), Some(&lead), SEC);
        assert_eq!(claims_due(&mut followers, &lead, 2 * SEC).len(), 1);
        followers.heard(LAPTOP, &moved(term, &[MEMBER]), Some(&lead), 2 * SEC);
        assert!(claims_due(&mut followers, &lead, 3 * SEC).is_empty());
        assert_eq!(followers.wake(), Micros::MAX);
        // Another member follows; then the laptop goes away.
        lead.heard(ME, (term, ME), 3 * SEC);
        assert!(claims_due(&mut followers, &lead, 3 * SEC).is_empty());
        assert_eq!(claims_due(&mut followers, &lead, 3 * SEC + Lead::BATCH).len(), 1);
        assert!(claims_due(&mut followers, &lead, 60 * SEC).is_empty());
        assert_eq!(followers.wake(), Micros::MAX, "nobody is woken for who is away");
        let next = term.next(ME);
        let mut lead = Lead::new(sender, next, &[], 0);
        lead.add([MEMBER], 0);
        lead.heard(MEMBER, (next, ME), 0);
        followers.heard(LAPTOP, &moved(Term::NONE, &[]), Some(&lead), 61 * SEC);
        assert!(claims_due(&mut followers, &lead, 61 * SEC).is_empty());
        assert_eq!(claims_due(&mut followers, &lead, 61 * SEC + Lead::BATCH)[0].term, next);
    }
}

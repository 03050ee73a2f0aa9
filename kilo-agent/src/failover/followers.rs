//! VPN peers that follow gateways (`kgctl connect`): each gateway claims its members to them as it does to far
//! leaders, and waits for none of them. To one that has not been heard for a while nothing is sent.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::Ipv6Addr,
};

use kilo_failover::{
    MS, Micros, NodeId, SEC, Signal, Term,
    gateway::{Lead, Sender, pause},
    signal::{Body, Kind, Shared},
};

use crate::far::HELLO;

/// One that has missed three HELLOs is away.
const COUNTS: Micros = 3 * HELLO + 5 * SEC;
/// How long claims wait for more members.
const BATCH: Micros = 2 * MS;
/// Least time between two times that everything is sent to one again.
const ANEW: Micros = SEC;

/// What one of them knows.
#[derive(Debug, Default)]
struct Follower {
    /// When it was heard last, or was first known of.
    heard: Micros,
    term: Term,
    moved: BTreeSet<NodeId>,
    tries: u32,
    /// When it is claimed to next, while it does not know everything.
    next: Option<Micros>,
    /// When it has asked for everything last.
    began: Option<Micros>,
    /// It knows all of these members: their number, and all ids together.
    knows: Option<(usize, NodeId)>,
}

/// All of them, by control address.
#[derive(Debug, Default)]
pub struct Followers(BTreeMap<Ipv6Addr, Follower>);

impl Followers {
    /// Takes over which VPN peers follow.
    pub fn set_known(&mut self, known: &BTreeMap<Ipv6Addr, NodeId>, now: Micros) {
        self.0.retain(|control, _| known.contains_key(control));
        for control in known.keys() {
            // An agent that has just started has heard nobody yet.
            self.0.entry(*control).or_insert_with(|| Follower { heard: now, ..Follower::default() });
        }
    }

    /// MOVED of one of them: with members, what it has moved; without any, it is there and wants everything
    /// announced again.
    pub fn heard(&mut self, control: Ipv6Addr, signal: &Signal, lead: Option<&Lead>, now: Micros) {
        let Some(follower) = self.0.get_mut(&control) else { return };
        follower.heard = now;
        let Body::Claim { members, .. } = &signal.body else { return };
        if members.is_empty() {
            // However often it asks.
            if follower.began.is_none_or(|began| now.saturating_sub(began) >= ANEW) {
                let began = Some(now);
                (follower.moved, follower.tries, follower.next) = (BTreeSet::new(), 0, None);
                (follower.began, follower.knows) = (began, None);
            }
        } else if let Some(lead) =
            lead.filter(|lead| lead.term() == follower.term && lead.term() == signal.term)
        {
            // Nothing else is kept, whatever it says.
            follower.moved.extend(members.iter().filter(|member| lead.has(**member)));
        }
    }

    /// When it has to be woken.
    pub fn wake(&self) -> Micros {
        self.0.values().filter_map(|follower| follower.next).min().unwrap_or(Micros::MAX)
    }

    /// Takes the claims that are due, each with the control address that it goes to.
    pub fn take_due(
        &mut self,
        sender: Sender,
        lead: Option<&Lead>,
        now: Micros,
        mut nonce: impl FnMut() -> u64,
    ) -> Vec<(Ipv6Addr, Signal)> {
        let mut signals = Vec::new();
        let lead = lead.filter(|lead| lead.term() > Term::NONE);
        let led: Vec<NodeId> = lead
            .iter()
            .flat_map(|lead| lead.members().filter(|member| lead.is_followed_by(*member)))
            .collect();
        // Identifies these members, so that a follower that knows all of them is looked up once.
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
            if *follower.next.get_or_insert(now + BATCH) > now {
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
    use super::*;

    const ME: NodeId = 1 << 48;
    const MEMBER: NodeId = 2 << 48;
    const LAPTOP: Ipv6Addr = Ipv6Addr::new(0xfd6b, 0x696c, 0x6f00, 0, 0, 0, 0, 9);

    fn moved(term: Term, members: &[NodeId]) -> Signal {
        let body = Body::Claim { gateway: ME, shared: Shared::Stay, part: (0, 1), members: members.to_vec() };
        Signal { kind: Kind::Moved, nonce: 1, term, sender: 9, location: 7, body }
    }

    /// A gateway that leads one member besides itself, and one VPN peer that follows.
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
        let claims = claims_due(&mut followers, &lead, SEC + BATCH);
        assert!(
            matches!(&claims[..], [Signal { body: Body::Claim { members, .. }, .. }] if *members == [MEMBER])
        );
        assert_eq!(followers.wake(), SEC + BATCH + 10 * MS, "it is repeated");
        // What was asked in another term, or of nodes nobody led, says nothing.
        followers.heard(LAPTOP, &moved(term.next(ME), &[MEMBER]), Some(&lead), SEC);
        followers.heard(LAPTOP, &moved(term, &[77]), Some(&lead), SEC);
        assert_eq!(claims_due(&mut followers, &lead, 2 * SEC).len(), 1);
        followers.heard(LAPTOP, &moved(term, &[MEMBER]), Some(&lead), 2 * SEC);
        assert!(claims_due(&mut followers, &lead, 3 * SEC).is_empty());
        assert_eq!(followers.wake(), Micros::MAX);
        // Another one follows; then the laptop goes.
        lead.heard(ME, (term, ME), 3 * SEC);
        assert!(claims_due(&mut followers, &lead, 3 * SEC).is_empty());
        assert_eq!(claims_due(&mut followers, &lead, 3 * SEC + BATCH).len(), 1);
        assert!(claims_due(&mut followers, &lead, 60 * SEC).is_empty());
        assert_eq!(followers.wake(), Micros::MAX, "nobody is woken for who is away");
        let next = term.next(ME);
        let mut lead = Lead::new(sender, next, &[], 0);
        lead.add([MEMBER], 0);
        lead.heard(MEMBER, (next, ME), 0);
        followers.heard(LAPTOP, &moved(Term::NONE, &[]), Some(&lead), 61 * SEC);
        assert!(claims_due(&mut followers, &lead, 61 * SEC).is_empty());
        assert_eq!(claims_due(&mut followers, &lead, 61 * SEC + BATCH)[0].term, next);
    }
}

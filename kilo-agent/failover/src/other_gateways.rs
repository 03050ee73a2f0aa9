//! The other gateways of the location: what they say in HELLO, and how often each
//! has lost leadership.

use std::collections::BTreeMap;

use crate::{Micros, NodeId, Params, SEC, Term};

/// What a HELLO says about its sender.
#[derive(Clone, Copy, Debug)]
pub struct State {
    /// Whether it could lead.
    pub is_fit: bool,
    /// Whether it leads and its tunnels carry more than they can.
    pub is_busy: bool,
    /// Whether it leads members in this term.
    pub leads: bool,
    /// The term in its HELLO: the one in which it leads, or else the latest it has heard of.
    pub term: Term,
    /// The gateway it uses.
    pub gateway: NodeId,
}

/// The last HELLO of a gateway, and since when it has been fit.
#[derive(Clone, Copy, Debug)]
struct LastHello {
    at: Micros,
    fit_since: Micros,
    state: State,
}

#[derive(Clone, Copy, Debug)]
struct Losses {
    count: u32,
    last: Micros,
}

impl Losses {
    /// How much later than it was a loss may seem to have been, after some gateways have passed it on in
    /// whole seconds.
    const BLURRED: Micros = 10 * SEC;

    /// Whether another gateway knows of more. What this one has forgotten does not come back, or gateways
    /// would remind each other for ever.
    fn is_less_than(&self, said: &Self, params: &Params, now: Micros) -> bool {
        if self.counts(params, now) { said.count > self.count } else { said.last > self.last + Self::BLURRED }
    }

    fn counts(&self, params: &Params, now: Micros) -> bool {
        self.last + params.remembers(self.count) > now
    }
}

/// What the other gateways of the location last said, and how often each has lost leadership.
#[derive(Clone, Debug, Default)]
pub struct Others {
    hellos: BTreeMap<NodeId, LastHello>,
    losses: BTreeMap<NodeId, Losses>,
}

impl Others {
    /// Forgets what former gateways said. Their losses are remembered while they are away.
    pub fn set_gateways(&mut self, params: &Params, gateways: &[NodeId], now: Micros) {
        self.hellos.retain(|gateway, _| gateways.contains(gateway));
        self.losses.retain(|gateway, losses| gateways.contains(gateway) || losses.counts(params, now));
    }

    /// Handles a HELLO; `losses` are pairs as in the signal.
    pub fn heard(&mut self, params: &Params, now: Micros, from: NodeId, state: State, losses: &[u64]) {
        let before =
            self.hellos.get(&from).filter(|hello| hello.state.is_fit && hello.at + 2 * params.heard >= now);
        let fit_since = before.map_or(now, |hello| hello.fit_since);
        self.hellos.insert(from, LastHello { at: now, fit_since, state });
        for [gateway, value] in losses.as_chunks::<2>().0 {
            let last = now.saturating_sub((value & 0xffff_ffff) * SEC);
            let said = Losses { count: (value >> 32).min(64) as u32, last };
            if self.losses.get(gateway).is_none_or(|known| known.is_less_than(&said, params, now)) {
                self.losses.insert(*gateway, said);
            }
        }
    }

    /// Losses of leadership as HELLO lists them.
    pub fn recent_losses(&self, params: &Params, now: Micros) -> Vec<u64> {
        let recent = self.losses.iter().filter(|(_, losses)| losses.counts(params, now));
        let pairs = recent.flat_map(|(gateway, losses)| {
            [*gateway, u64::from(losses.count) << 32 | ((now - losses.last) / SEC).min(0xffff_ffff)]
        });
        pairs.take(16).collect()
    }

    /// Records that a gateway lost leadership. Its members find that out one after the other: what comes
    /// within four of their probe intervals after the last is the same loss.
    pub fn lost(&mut self, params: &Params, now: Micros, gateway: NodeId) {
        let count = self.losses(params, now, gateway);
        let is_same = self
            .losses
            .get(&gateway)
            .is_some_and(|losses| count > 0 && losses.last + 4 * params.member > now);
        self.losses.insert(gateway, Losses { count: count + u32::from(!is_same), last: now });
    }

    /// How often a gateway has lost leadership lately ([`Params::remembers`]).
    pub fn losses(&self, params: &Params, now: Micros, gateway: NodeId) -> u32 {
        let losses = self.losses.get(&gateway).filter(|losses| losses.counts(params, now));
        losses.map_or(0, |losses| losses.count)
    }

    /// How often all gateways have lost leadership lately.
    pub fn all_losses(&self, params: &Params, now: Micros) -> u32 {
        self.losses.keys().map(|gateway| self.losses(params, now, *gateway)).sum()
    }

    /// Whether a gateway was heard within `within` and could lead.
    pub fn is_fit(&self, gateway: NodeId, now: Micros, within: Micros) -> bool {
        self.hellos.get(&gateway).is_some_and(|hello| hello.state.is_fit && hello.at + within > now)
    }

    /// Whether a gateway was heard lately, fit or not.
    pub fn is_heard(&self, params: &Params, gateway: NodeId, now: Micros) -> bool {
        self.hellos.get(&gateway).is_some_and(|hello| hello.at + params.heard > now)
    }

    /// Whether any of them but this one has said lately that it could lead.
    pub fn is_any_fit_but(&self, params: &Params, gateway: NodeId, now: Micros) -> bool {
        self.hellos.keys().any(|other| *other != gateway && self.is_fit(*other, now, params.heard))
    }

    /// Whether a gateway has reported lately that its tunnels are overloaded.
    pub fn is_busy(&self, params: &Params, gateway: NodeId, now: Micros) -> bool {
        let hello = self.hellos.get(&gateway);
        hello.is_some_and(|hello| hello.state.is_busy && hello.at + params.heard > now)
    }

    /// Whether one of them has reported lately that it leads in a later term.
    pub fn is_led_since(&self, params: &Params, term: Term, now: Micros) -> bool {
        let leads =
            |hello: &LastHello| hello.state.leads && hello.state.term > term && hello.at + params.heard > now;
        self.hellos.values().any(leads)
    }

    /// Whether a gateway has said lately that it leads nobody.
    pub fn leads_nobody(&self, params: &Params, gateway: NodeId, now: Micros) -> bool {
        let hello = self.hellos.get(&gateway).filter(|hello| hello.at + params.heard > now);
        hello.is_some_and(|hello| !hello.state.leads)
    }

    /// The term in which a gateway leads itself, and perhaps others.
    pub fn leads(&self, gateway: NodeId) -> Option<Term> {
        let state = self.hellos.get(&gateway).map(|hello| hello.state);
        state.filter(|state| state.leads && state.gateway == gateway).map(|state| state.term)
    }

    /// For how long a gateway has been fit and has not lost leadership.
    pub fn healthy_for(&self, params: &Params, gateway: NodeId, now: Micros) -> Micros {
        let hello =
            self.hellos.get(&gateway).filter(|hello| hello.state.is_fit && hello.at + params.heard > now);
        let lost = self.losses.get(&gateway).map_or(0, |losses| losses.last);
        hello.map_or(0, |hello| now.saturating_sub(hello.fit_since.max(lost)))
    }

    /// Those of `gateways`, in Kilo's order, that could lead, the best first.
    pub fn best(&self, params: &Params, gateways: &[NodeId], now: Micros, within: Micros) -> Vec<NodeId> {
        let mut fit: Vec<_> =
            gateways.iter().copied().filter(|gateway| self.is_fit(*gateway, now, within)).collect();
        fit.sort_by_key(|gateway| self.losses(params, now, *gateway));
        fit
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MS;

    const LEADS: State = State { is_fit: true, is_busy: false, leads: true, term: Term::NONE, gateway: 1 };

    #[test]
    fn losses_are_passed_on_and_forgotten_after_ten_minutes() {
        let params = Params::default();
        let (mut a, mut b) = (Others::default(), Others::default());
        let now = 1_000 * SEC;
        a.lost(&params, now, 7);
        a.lost(&params, now + SEC, 7);
        let losses = a.recent_losses(&params, now + 5 * SEC);
        b.heard(&params, now + 5 * SEC, 1, LEADS, &losses);
        assert_eq!(b.losses(&params, now + 600 * SEC, 7), 2);
        assert_eq!(b.losses(&params, now + 602 * SEC, 7), 0);
        assert_eq!(b.recent_losses(&params, now + 602 * SEC), []);
        // Reported again it counts once.
        b.heard(&params, now + 6 * SEC, 1, LEADS, &a.recent_losses(&params, now + 6 * SEC));
        assert_eq!(b.losses(&params, now + 6 * SEC, 7), 2);
    }

    #[test]
    fn a_count_lives_until_its_hold_has_passed() {
        let params = Params::default();
        for (count, remembered) in [(1, 600), (3, 600), (4, 960), (5, 1_920), (6, 3_840), (9, 7_200)] {
            let mut others = Others::default();
            let last =
                (1..=count).map(|loss| loss * 2 * SEC).inspect(|at| others.lost(&params, *at, 7)).max();
            let last = last.unwrap_or(0);
            let known = [1, 0].map(|before| others.losses(&params, last + (remembered - before) * SEC, 7));
            assert_eq!(known.map(u64::from), [count, 0], "{count} losses");
            assert!(remembered * SEC > params.hold_after(count as u32), "it would never wait for so long");
        }
    }

    #[test]
    fn gateways_do_not_remind_each_other_for_ever() {
        let params = Params::default();
        let mut gateways = [Others::default(), Others::default(), Others::default()];
        gateways[0].lost(&params, SEC, 7);
        let at = |tick: u64| SEC + 50 * MS + tick * 11 * MS;
        let mut latest = 0;
        for tick in 0..80_000 {
            let from = tick as usize % 3;
            let losses = gateways[from].recent_losses(&params, at(tick));
            for (_, of) in gateways.iter_mut().enumerate().filter(|(other, _)| *other != from) {
                of.heard(&params, at(tick), from as u64, LEADS, &losses);
                latest = if of.losses(&params, at(tick), 7) > 0 { at(tick) } else { latest };
            }
        }
        assert!((590 * SEC..602 * SEC).contains(&latest), "remembered until {} s", latest / SEC);
    }

    #[test]
    fn twenty_members_that_are_adopted_one_after_the_other_are_one_loss() {
        let params = Params::default();
        let (mut one, mut other) = (Others::default(), Others::default());
        let now = 1_000 * SEC;
        for i in 0..20 {
            let at = now + i * 100 * MS;
            one.lost(&params, at, 7);
            // Another gateway adopts some of them, and hears of the loss.
            other.heard(&params, at, 1, LEADS, &one.recent_losses(&params, at));
            if i % 3 == 0 {
                other.lost(&params, at, 7);
            }
        }
        let later = now + 3 * SEC;
        assert_eq!((one.losses(&params, later, 7), other.losses(&params, later, 7)), (1, 1));
        one.lost(&params, later, 7);
        assert_eq!(one.losses(&params, later, 7), 2);
    }

    #[test]
    fn who_has_said_lately_that_it_is_overloaded_is() {
        let params = Params::default();
        let mut others = Others::default();
        let now = 1_000 * SEC;
        for is_busy in [false, true] {
            others.heard(&params, now, 1, State { is_busy, ..LEADS }, &[]);
            assert_eq!(others.is_busy(&params, 1, now), is_busy);
            assert!(!others.is_busy(&params, 2, now), "it speaks for itself");
        }
        assert!(!others.is_busy(&params, 1, now + params.heard), "it says no more");
        assert_eq!(others.all_losses(&params, now), 0);
        [2, 3].into_iter().for_each(|gateway| others.lost(&params, now, gateway));
        assert_eq!(others.all_losses(&params, now), 2);
        assert_eq!(others.all_losses(&params, now + params.memory), 0);
    }

    #[test]
    fn health_starts_again_after_silence_a_loss_or_unfitness() {
        let params = Params::default();
        let mut others = Others::default();
        let hello =
            |others: &mut Others, at, is_fit| others.heard(&params, at, 1, State { is_fit, ..LEADS }, &[]);
        (0..50).for_each(|i| hello(&mut others, i * 200 * MS, true));
        assert_eq!(others.healthy_for(&params, 1, 9_800 * MS), 9_800 * MS);
        assert_eq!(others.healthy_for(&params, 1, 9_800 * MS + params.heard), 0, "silent");
        hello(&mut others, 11_100 * MS, true);
        assert_eq!(others.healthy_for(&params, 1, 11_100 * MS), 0, "it was silent");
        hello(&mut others, 11_200 * MS, false);
        hello(&mut others, 11_400 * MS, true);
        assert_eq!(others.healthy_for(&params, 1, 11_500 * MS), 100 * MS);
        others.lost(&params, 11_450 * MS, 1);
        assert_eq!(others.healthy_for(&params, 1, 11_500 * MS), 50 * MS);
    }
}

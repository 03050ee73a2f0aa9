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
struct Said {
    at: Micros,
    fit_since: Micros,
    state: State,
}

#[derive(Clone, Copy, Debug)]
struct Losses {
    count: u32,
    last: Micros,
}

/// What the other gateways of the location last said, and how often each has lost leadership.
#[derive(Clone, Debug, Default)]
pub struct Others {
    said: BTreeMap<NodeId, Said>,
    losses: BTreeMap<NodeId, Losses>,
}

impl Others {
    /// Forgets what former gateways said. Their losses are remembered while they are away.
    pub fn set_gateways(&mut self, params: &Params, gateways: &[NodeId], now: Micros) {
        self.said.retain(|gateway, _| gateways.contains(gateway));
        self.losses.retain(|gateway, losses| gateways.contains(gateway) || losses.last + params.memory > now);
    }

    /// Handles a HELLO; `losses` are pairs as in the signal.
    pub fn heard(&mut self, params: &Params, now: Micros, from: NodeId, state: State, losses: &[u64]) {
        let before =
            self.said.get(&from).filter(|said| said.state.is_fit && said.at + 2 * params.heard >= now);
        let fit_since = before.map_or(now, |said| said.fit_since);
        self.said.insert(from, Said { at: now, fit_since, state });
        for [gateway, value] in losses.as_chunks::<2>().0 {
            let last = now.saturating_sub((value & 0xffff_ffff) * SEC);
            let count = (value >> 32).min(64) as u32;
            if count > self.losses(params, now, *gateway) {
                self.losses.insert(*gateway, Losses { count, last });
            }
        }
    }

    /// Losses of leadership as HELLO lists them.
    pub fn recent_losses(&self, params: &Params, now: Micros) -> Vec<u64> {
        let recent = self.losses.iter().filter(|(_, losses)| losses.last + params.memory > now);
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

    /// How often a gateway has lost leadership within ten minutes.
    pub fn losses(&self, params: &Params, now: Micros, gateway: NodeId) -> u32 {
        self.losses
            .get(&gateway)
            .filter(|losses| losses.last + params.memory > now)
            .map_or(0, |losses| losses.count)
    }

    /// How often all gateways have lost leadership within ten minutes.
    pub fn all_losses(&self, params: &Params, now: Micros) -> u32 {
        self.losses.keys().map(|gateway| self.losses(params, now, *gateway)).sum()
    }

    /// Whether a gateway was heard within `within` and could lead.
    pub fn is_fit(&self, gateway: NodeId, now: Micros, within: Micros) -> bool {
        self.said.get(&gateway).is_some_and(|said| said.state.is_fit && said.at + within > now)
    }

    /// Whether one of them has reported lately that its tunnels are overloaded.
    pub fn is_any_busy(&self, params: &Params, now: Micros) -> bool {
        self.said.values().any(|said| said.state.is_busy && said.at + params.heard > now)
    }

    /// Whether one of them has reported lately that it leads in a later term.
    pub fn is_led_since(&self, params: &Params, term: Term, now: Micros) -> bool {
        let leads = |said: &Said| said.state.leads && said.state.term > term && said.at + params.heard > now;
        self.said.values().any(leads)
    }

    /// Whether a gateway has said lately that it leads nobody.
    pub fn leads_nobody(&self, params: &Params, gateway: NodeId, now: Micros) -> bool {
        let said = self.said.get(&gateway).filter(|said| said.at + params.heard > now);
        said.is_some_and(|said| !said.state.leads)
    }

    /// The term in which a gateway leads itself, and perhaps others.
    pub fn leads(&self, gateway: NodeId) -> Option<Term> {
        let state = self.said.get(&gateway).map(|said| said.state);
        state.filter(|state| state.leads && state.gateway == gateway).map(|state| state.term)
    }

    /// For how long a gateway has been fit and has not lost leadership.
    pub fn healthy_for(&self, params: &Params, gateway: NodeId, now: Micros) -> Micros {
        let said = self.said.get(&gateway).filter(|said| said.state.is_fit && said.at + params.heard > now);
        let lost = self.losses.get(&gateway).map_or(0, |losses| losses.last);
        said.map_or(0, |said| now.saturating_sub(said.fit_since.max(lost)))
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
            assert_eq!(others.is_any_busy(&params, now), is_busy);
        }
        assert!(!others.is_any_busy(&params, now + params.heard), "it says no more");
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

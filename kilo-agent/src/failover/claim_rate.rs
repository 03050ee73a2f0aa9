//! How many signals a gateway of another location may send through its tunnel. Each costs a walk over the
//! location's members and an answer, so one hostile gateway could keep this thread from its own location.

use std::collections::{BTreeMap, BTreeSet};

use kilo_failover::{Micros, NodeId, SEC};

/// Signals a second.
const RATE: u64 = 256;
/// Signals at once: a claim of 10,000 nodes has 79 parts, and is repeated.
const BURST: u64 = 1_024;
/// Time that one signal takes of the budget.
const EACH: Micros = SEC / RATE;

/// By gateway, when its budget is whole again.
#[derive(Default)]
pub struct ClaimRate(BTreeMap<NodeId, Micros>);

impl ClaimRate {
    /// Whether one more signal of this gateway is within its budget, which then shrinks.
    pub fn allows(&mut self, gateway: NodeId, now: Micros) -> bool {
        let whole = self.0.entry(gateway).or_default();
        let next = now.max(*whole) + EACH;
        let is_allowed = next <= now + BURST * EACH;
        if is_allowed {
            *whole = next;
        }
        is_allowed
    }

    /// Forgets gateways that are not there any more.
    pub fn retain(&mut self, gateways: &BTreeSet<NodeId>) {
        self.0.retain(|gateway, _| gateways.contains(gateway));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kilo_failover::MS;

    #[test]
    fn a_gateway_has_a_burst_and_then_its_rate_and_others_have_theirs() {
        let mut rate = ClaimRate::default();
        let mut of = |gateway, now| (0..5_000).filter(|_| rate.allows(gateway, now)).count();
        assert_eq!((of(1, SEC), of(1, SEC)), (1_024, 0));
        assert_eq!(of(1, SEC + 500 * MS), 128);
        assert_eq!(of(2, SEC), 1_024);
        assert_eq!(of(1, 60 * SEC), 1_024, "it is whole again");
        rate.retain(&[2].into());
        assert_eq!(rate.0.len(), 1);
    }
}

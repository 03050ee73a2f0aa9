//! Whether the location sends more than its leader carries, and how long to wait in that case.

use super::{Agent, Gateway};
use crate::{Micros, NodeId, Params, Term};

impl Gateway {
    /// Whether it leads anybody, so that packets come out of its tunnel.
    pub(super) fn leads(&self, me: NodeId, word: (Term, NodeId)) -> bool {
        self.lead.is_some() || word.1 == me
    }

    /// Checks whether the location sends more than its leader carries: the load follows leadership, so what
    /// was observed of one leader holds for the next one, too. Only the gateway that this node uses is believed
    /// that it carries too much: any other node that says so would make everybody wait.
    pub(super) fn check_overload(&mut self, params: &Params, me: NodeId, word: (Term, NodeId), now: Micros) {
        let leads = self.leads(me, word);
        let is_lossy = if leads { self.tunnels.is_busy(now) } else { self.detector.is_lossy(now) };
        if is_lossy || self.others.is_busy(params, word.1, now) {
            self.overloaded_until = now + params.busy;
        }
    }

    /// How long nothing must have come back through a leader before it counts as lost: 0, unless the
    /// location is overloaded.
    pub(crate) fn patience(&self, params: &Params, now: Micros) -> Micros {
        let losses = self.others.all_losses(params, now);
        if self.overloaded_until > now { params.patience(losses) } else { 0 }
    }
}

impl Agent {
    /// Whether it has a use for the kernel's count of what comes out of the tunnel: it leads.
    pub fn counts_decrypted(&self) -> bool {
        self.gateway.as_ref().is_some_and(|gateway| gateway.leads(self.own_location.me, self.word))
    }
}

#[cfg(test)]
mod tests {
    use crate::{
        Term,
        agent::test_bench::{BOOT, Bench, LEADER, THIRD},
        signal::{Body, Kind},
    };

    #[test]
    fn only_the_gateway_that_a_node_uses_makes_it_wait() {
        let mut bench = Bench::with_third();
        let term = Term::from_bits(7 << 16);
        bench.present(THIRD, term, LEADER);
        for (from, waits) in [(THIRD, false), (LEADER, true)] {
            let hello = Body::Hello {
                is_fit: true,
                is_busy: true,
                leads: true,
                gateway: from,
                cookie: BOOT,
                losses: vec![LEADER, 64 << 32],
            };
            bench.hear(from, Kind::Hello, bench.now, term, hello);
            let gateway = bench.agent.gateway.as_ref().expect("it is one");
            assert_eq!(gateway.patience(&bench.agent.params, bench.now) > 0, waits, "{from}");
        }
    }
}

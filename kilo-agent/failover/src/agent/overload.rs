//! Whether the location sends more than its leader carries, and how long to wait in that case.

use super::{Agent, Gateway};
use crate::{Micros, NodeId, Params, Term};

impl Gateway {
    /// Whether it leads anybody, so that packets come out of its tunnel.
    pub(super) fn leads(&self, me: NodeId, word: (Term, NodeId)) -> bool {
        self.lead.is_some() || word.1 == me
    }

    /// Checks whether the location sends more than its leader carries: the load follows leadership, so what
    /// was observed of one leader holds for the next one, too.
    pub(super) fn check_overload(&mut self, params: &Params, me: NodeId, word: (Term, NodeId), now: Micros) {
        let leads = self.leads(me, word);
        let is_lossy = if leads { self.tunnels.is_busy(now) } else { self.detector.is_lossy(now) };
        if is_lossy || self.others.is_any_busy(params, now) {
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

//! Reports what happens: to the log, to reconciles, and to the status.

use std::{collections::BTreeMap, sync::Arc};

use kilo_common::lead::Term;
use kilo_core::{
    signal_id::NodeId,
    topology::{Acting, ActingLocation},
};
use kilo_failover::{Agent, Given, Micros, Note, signal::Shared as SharedPrefixes};

use super::{REPORT, SUCCESSION, Thread, micros};
use crate::{
    failover::{
        Dead, Report, StandBy,
        report::{SuspicionOutcome, TakeoverCause},
        site::Site,
    },
    far::{self, Refusal},
};

/// Why the signal that a note is about was refused.
pub(super) const fn refused_as(note: &Note) -> Option<Refusal> {
    match note {
        Note::Leaps(_) => Some(Refusal::Leap),
        Note::Replayed(_) => Some(Refusal::Replayed),
        _ => None,
    }
}

/// Whether a note says only that a node has booted and found out which gateway leads it: nobody has lost a
/// leader, and the location's stays.
const fn is_only_a_boot(note: &Note) -> bool {
    matches!(note, Note::Adopts { age: 0, was_leader: false, .. })
}

impl Thread {
    #[expect(
        clippy::too_many_lines,
        reason = "one arm for each note: who looks for one finds its words there"
    )]
    pub(super) fn note(&mut self, note: &Note) {
        refused_as(note).into_iter().for_each(|why| self.metrics.refused(why));
        let text = match *note {
            Note::Suspects(leader) => {
                self.metrics.suspicion(SuspicionOutcome::Asked);
                tracing::info!(leader = self.name(leader), "the leader does not answer; asking other nodes");
                return;
            }
            Note::OverBudget => {
                self.metrics.suspicion(SuspicionOutcome::OverBudget);
                tracing::warn!("leadership changed too often lately; this node waits before it takes over");
                return;
            }
            Note::Busy => {
                tracing::warn!(
                    "this leader is overloaded, or its network loses packets: its tunnels deliver traffic \
                     but lose probes. It stays leader; give it more CPU, or use several leaders (--leaders)"
                );
                return;
            }
            Note::Behind(term) => {
                tracing::info!(
                    known = term.count(),
                    "another location has seen a later term than this node, as happens after every node of this \
                     location has rebooted; claiming this location's prefixes again in a later term"
                );
                return;
            }
            Note::Leaps(from) => {
                tracing::debug!(
                    from = self.name(from),
                    "ignoring a signal whose term is implausibly far ahead"
                );
                return;
            }
            Note::Replayed(from) => {
                tracing::debug!(
                    from = self.name(from),
                    "ignoring a replayed or stale signal: received before, from an earlier boot, or a reply to a \
                     different request, for example from a gateway of another build"
                );
                return;
            }
            Note::TakesOver { from, all, since } => {
                let (outcome, cause, whose) = if all {
                    (SuspicionOutcome::TookOver, TakeoverCause::Lost, "the location")
                } else {
                    (SuspicionOutcome::TookItself, TakeoverCause::Alone, "itself only")
                };
                self.metrics.suspicion(outcome);
                self.metrics.failover(cause);
                let silent = micros().saturating_sub(since);
                self.metrics.outage(silent);
                let why = format!("no packet passed through it for {} ms", silent / 1_000);
                if all {
                    self.note_succession(from, &format!("lost: {why}"));
                }
                format!("{} lost: {why}, took over {whose}", self.name(from))
            }
            Note::IsGiven { from, why: Given::Trial } => {
                tracing::info!(
                    by = self.name(from),
                    "testing before a change of leader: that gateway routes its own packets through this node"
                );
                return;
            }
            Note::IsGiven { from, why } => {
                let handed_over = (TakeoverCause::HandedOver, "handed over");
                let ((cause, how), why) = match why {
                    Given::Planned(cause) => ((TakeoverCause::Planned, "planned"), cause.text()),
                    Given::LinkDown => (handed_over, "its link, address or route is gone"),
                    Given::Silent | Given::Trial => (handed_over, "its tunnels failed"),
                };
                self.metrics.failover(cause);
                self.note_succession(from, &format!("{how}: {why}"));
                format!("{} handed leadership over ({how}): {why}", self.name(from))
            }
            Note::Adopts { member, .. } if is_only_a_boot(note) => {
                tracing::info!(
                    node = self.name(member),
                    "a node that has started asked which gateway leads it; leading it"
                );
                return;
            }
            Note::Adopts { member, was_leader, .. } => {
                self.metrics.failover(TakeoverCause::Adopted);
                if was_leader {
                    self.note_succession(member, "adopted: nobody uses it any more, and it asked to be led");
                }
                format!("{} asked to be led", self.name(member))
            }
            Note::ClaimsShared(acting) => format!(
                "{} does not answer: claimed the prefixes that belong to no single node",
                self.name(acting)
            ),
            Note::Gives { to, cause } => {
                let why = cause.map_or("this node cannot lead now", kilo_failover::Cause::own_text);
                format!("gave leadership to {}: {why}", self.name(to))
            }
            Note::TakesBack(to) => {
                self.note_succession(to, "taken back: it did not take over");
                format!("leads again: {} did not take over", self.name(to))
            }
            Note::StaysLeader(first) => {
                self.note_succession(first, "kept: it is first in order now, but could not take over");
                format!("still leads: {} is first in order now, but could not take over", self.name(first))
            }
            Note::Tries(to) => {
                tracing::info!(
                    by = self.name(to),
                    "testing before a change of leader: this node routes its own packets through the \
                     returning gateway"
                );
                return;
            }
            Note::TakesHome(nodes) => {
                self.metrics.failover(TakeoverCause::Rebalanced);
                format!("took over {nodes} nodes that are assigned to this active leader")
            }
            Note::NotReady(to) => {
                tracing::info!(
                    to = self.name(to),
                    "leadership was not handed over: the other gateway, or a far leader, is not ready; \
                     retrying"
                );
                return;
            }
        };
        tracing::warn!(change = text, "leadership changed");
        self.last_change = Some(text);
        self.next_report = 0;
        self.is_dirty = true;
    }

    /// Notes that this node now leads the location. An Event reports it once, even if the change arrives in
    /// several signals.
    pub(super) fn note_succession(&mut self, from: NodeId, why: &str) {
        let now = micros();
        let is_again = self.succeeded.is_some_and(|(before, at)| before == from && at + SUCCESSION > now);
        self.succeeded = Some((from, now));
        if !is_again {
            self.shared.output.lock().successions.push(format!("{} ({why})", self.name(from)));
            self.shared.changed.notify_one();
        }
    }

    /// Declares a silent leader dead, once: a leader that is alive and renews its heartbeat overrides this.
    /// One that was heard again and dies again is declared dead again. Without a third node as a witness,
    /// [`kilo_failover::DeclaredAlone`] decides.
    pub(super) fn declare_dead(&mut self, site: &Site, now: Micros) {
        let agent = self.agent.as_ref().filter(|_| site.is_mixed);
        let declared_dead = agent.and_then(|agent| Some((agent.declares_dead(now)?, agent.word().0)));
        if declared_dead == self.declared_dead {
            return;
        }
        if let (Some((leader, _)), Some(agent)) = (declared_dead, &self.agent)
            && agent.has_no_witness()
            && !self.declared_alone.admit(leader, agent.cookie_of(leader), now)
        {
            return;
        }
        self.declared_dead = declared_dead;
        let dead =
            declared_dead.map(|(leader, _)| Dead { node: self.name(leader).to_owned(), is_taken: false });
        let is_dead = dead.is_some();
        self.shared.output.lock().dead = dead;
        if is_dead {
            self.shared.changed.notify_one();
        }
    }

    /// Notifies the agent when something that it plans with has changed.
    pub(in crate::failover) fn notify_agent(&mut self) {
        if self.publish() {
            self.shared.changed.notify_one();
        }
    }

    /// Publishes what the agent plans with, without requesting a reconcile; true when it has changed.
    pub(in crate::failover) fn publish(&mut self) -> bool {
        if !std::mem::take(&mut self.is_dirty) {
            return false;
        }
        let Some(site) = self.site.clone() else { return false };
        let (term, gateway) = site.said(self.word);
        let me = site.own_location.me;
        let lead = self.agent.as_ref().and_then(Agent::lead);
        let shared = lead.map_or(SharedPrefixes::Stay, kilo_failover::gateway::Lead::shared);
        let is_one_of_several = site.own_location.several.is_some();
        self.leader = match () {
            () if self.agent.is_none() || term == Term::NONE => None,
            // The gateway that this node uses may not be the one with the shared prefixes.
            () if is_one_of_several && (gateway != me || shared != SharedPrefixes::Move) => None,
            () if gateway != me || shared != SharedPrefixes::Stay => Some((term, gateway)),
            // This node leads only itself: the location's leader stays the same.
            () => self.leader.filter(|(_, leader)| *leader != me),
        };
        let leads = shared == SharedPrefixes::Move && gateway == me && term > Term::NONE;
        let mut acting = Acting { led: self.led.clone(), ..Acting::default() };
        let own = ActingLocation { leader: self.leader, members: BTreeMap::new() };
        acting.locations.insert(site.own_location.location, own);
        acting.locations.extend(far::known(&self.fars));
        let leading = self.agent.as_ref().and(leads.then_some(term.bits()));
        let mut output = self.shared.output.lock();
        let is_news = *output.acting != acting || output.leading != leading || !output.is_published;
        if is_news {
            output.acting = Arc::new(acting);
            output.leading = leading;
            output.is_published = true;
        }
        is_news
    }

    pub(super) fn report(&mut self, site: &Site, now: Micros) {
        if now < self.next_report {
            return;
        }
        self.next_report = now + REPORT;
        let (term, gateway) = site.said(self.word);
        let me = site.own_location.me;
        let role = match () {
            () if gateway == me => "leader",
            () if site.is_gateway() => "stand-by",
            () => "member",
        };
        self.metrics.role(role);
        self.metrics.term.set(i64::from(term.count()));
        let is_fit = self.agent.as_ref().is_some_and(|agent| agent.is_fit(now));
        self.metrics.fit.set(i64::from(is_fit && site.is_gateway()));
        let users = self.agent.as_ref().map_or(0, |agent| agent.users(now));
        self.metrics.nodes.set(i64::try_from(users).unwrap_or(i64::MAX));
        let stand_by = |id: &NodeId| StandBy {
            node: site.name(*id).to_owned(),
            fit: match &self.agent {
                Some(_) if *id == me => Some(is_fit),
                Some(agent) => agent.heard_fit(*id, now),
                None => None,
            },
            round_trip: self
                .agent
                .as_ref()
                .filter(|_| *id == me)
                .and_then(Agent::round_trip)
                .map(|micros| micros / 1_000),
        };
        let report = Report {
            role,
            leader: site.name(gateway).to_owned(),
            kilos_leader: site.name(site.leader).to_owned(),
            term: term.count(),
            since: self.since,
            stand_bys: site.own_location.gateways.iter().filter(|id| **id != gateway).map(stand_by).collect(),
            last_change: self.last_change.clone(),
        };
        self.shared.output.lock().report = report;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_that_has_booted_changes_no_leadership() {
        let adopts = |age, was_leader| Note::Adopts { member: 1, was_leader, age };
        assert!(is_only_a_boot(&adopts(0, false)));
        for note in [adopts(0, true), adopts(500_000, false), Note::Tries(1)] {
            assert!(!is_only_a_boot(&note), "{note:?}");
        }
    }
}

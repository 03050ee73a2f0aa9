//! What comes in, and which part of the agent handles it.

use super::Agent;
use crate::{
    Input, MS, Micros, NodeId, Note, Output, Rule, SEC, Signal, Term, Turn,
    member::{Member, adopt},
    other_gateways::State,
    roll_call::Present,
    signal::{Body, Kind, Shared, Verdict},
};

impl Agent {
    pub(super) fn take_in(&mut self, input: Input, turn: &mut Turn<'_>) {
        match input {
            Input::Wake => {}
            Input::Answer { nonce, at } => self.answered(nonce, at),
            Input::Signal { from, signal } => {
                if signal.sender == from && signal.location == self.own_location.location
                    || signal.kind == Kind::Moved
                {
                    self.handle_signal(from, signal, turn);
                }
            }
            Input::Word(term, gateway) => self.set_word(term, gateway, turn),
            Input::LinkDown => self.give_away(0, turn),
            Input::Decrypted(count) => {
                if let Some(gateway) = &mut self.gateway {
                    gateway.tunnels.decrypted(count, turn.now);
                }
            }
            Input::FarMoved(far) => {
                if let Some(gateway) = &mut self.gateway {
                    gateway.tunnels.far_moved(far);
                }
            }
        }
    }

    pub(super) fn answered(&mut self, nonce: u64, at: Micros) {
        if self.member.answered(&self.params, nonce, at) {
            return;
        }
        let Some(gateway) = &mut self.gateway else { return };
        gateway.watch.answered(nonce);
        let _ = gateway.tunnels.answered(&self.params, nonce, at)
            || gateway.detector.answered(&self.params, nonce, at);
    }

    pub(super) fn set_word(&mut self, term: Term, to: NodeId, turn: &mut Turn<'_>) {
        self.learn_term(term);
        let (changed, me) = (self.word.1 != to, self.own_location.me);
        let leads_in = |gateway: &&mut super::Gateway| {
            gateway.lead.as_ref().map(crate::gateway::Lead::term) == Some(term)
        };
        if self.word != (term, to)
            && to == me
            && let Some(gateway) = self.gateway.as_mut().filter(leads_in)
        {
            // The others hear of the new term from this gateway before a far leader names it to them.
            gateway.has_news = true;
        }
        self.word = (term, to);
        if changed {
            self.end_giving_to_another(to, turn);
            self.word_since = turn.now;
            self.discard_leader(turn);
            if let Some(gateway) = self.gateway.as_mut().filter(|_| to != me) {
                gateway.detector.begin(turn.now);
            }
            self.note_handover(to, turn);
        }
        self.forget_obeyed_order();
        let lead = self.gateway.as_mut().and_then(|gateway| gateway.lead.as_mut());
        if lead.is_some_and(|lead| lead.heard(me, (term, to), turn.now)) {
            self.mark_led(turn);
        }
    }

    /// Discards what is known of the leader: it says nothing about the next one.
    pub(super) fn discard_leader(&mut self, turn: &mut Turn<'_>) {
        self.member.discard();
        turn.later.retain(|(_, output)| !matches!(output, Output::Lan(_, Signal { kind: Kind::Adopt, .. })));
        if let Some(gateway) = &mut self.gateway {
            gateway.detector.discard();
            gateway.sentinel.reset();
        }
    }

    pub(crate) fn handle_signal(&mut self, from: NodeId, signal: Signal, turn: &mut Turn<'_>) {
        // The last of all counts would allow no later change of leader.
        if !signal.term.is_near(self.term) && self.params.keeps(Rule::NoLeap) {
            return turn.push(Output::Note(Note::Leaps(from)));
        }
        if !self.admit_numbered(from, &signal, turn) {
            return;
        }
        match (signal.kind, &signal.body) {
            (Kind::Witness, _) => {
                let mut member = std::mem::replace(&mut self.member, Member::new(0));
                member.asked(&self.params, signal, &self.member_view(turn.now), turn);
                self.member = member;
            }
            (Kind::Verdict, Body::Witness { id, verdict }) => self.handle_verdict(from, *id, *verdict),
            (Kind::Present, Body::Word { cookie, gateway }) => {
                let (at, nonce, cookie) = (turn.now, signal.nonce, *cookie);
                self.handle_present(from, Present { at, nonce, cookie, word: (signal.term, *gateway) }, turn);
            }
            (Kind::Follows, Body::Word { gateway, .. }) => {
                let word = (signal.term, *gateway);
                let Some(gateway) = &mut self.gateway else { return };
                if gateway.roll.followed(from, signal.nonce, turn.now, word) {
                    self.heard_word(from, word, turn);
                    self.announce_next_step(from, word, turn);
                }
            }
            (Kind::Hello, Body::Hello { is_fit, is_busy, leads, gateway, losses, .. }) => {
                let state = State {
                    is_fit: *is_fit,
                    is_busy: *is_busy,
                    leads: *leads,
                    term: signal.term,
                    gateway: *gateway,
                };
                let gateways = &self.own_location.gateways;
                if let Some(own) = self.gateway.as_mut().filter(|_| gateways.contains(&from)) {
                    // Losses of other nodes that it names must not fill memory.
                    let pairs = losses.as_chunks::<2>().0.iter().filter(|[lost, _]| gateways.contains(lost));
                    let losses: Vec<u64> = pairs.flatten().copied().collect();
                    own.others.heard(&self.params, turn.now, from, state, &losses);
                    self.hear_term(from, signal.term, turn.now);
                }
                self.ask_to_be_led(from, turn);
            }
            (Kind::Adopt, Body::Members { age, members, .. }) if members[..] == [from] => {
                self.handle_adopt(from, signal.term, u64::from(*age) * MS, turn);
            }
            (Kind::Handover, Body::Members { age, members, .. }) => {
                self.handle_handover(from, &signal, u64::from(*age) * MS, members, turn);
            }
            (Kind::Prepare | Kind::Ready, _) => self.handle_change(from, &signal, turn),
            (Kind::Moved, _) => self.handle_moved(from, &signal, turn),
            _ => {}
        }
    }

    pub(super) fn handle_verdict(&mut self, from: NodeId, id: u32, verdict: Verdict) {
        if let Some(gateway) = &mut self.gateway {
            gateway.sentinel.verdict(from, id, verdict);
        }
    }

    pub(super) fn handle_present(&mut self, from: NodeId, present: Present, turn: &mut Turn<'_>) {
        let Some(gateway) = &mut self.gateway else { return };
        if !gateway.roll.heard(from, present) {
            return;
        }
        // First whether it is led at all: another gateway may have taken it.
        self.heard_word(from, present.word, turn);
        if let Some(lead) = self.lead() {
            lead.announce(from, present, turn);
        }
        self.deliver_waiting(from, present.cookie, turn);
    }

    /// A kernel that has missed many changes obeys one step of [`kilo_common::lead::LEAP`] after the other.
    fn announce_next_step(&self, from: NodeId, word: (Term, NodeId), turn: &mut Turn<'_>) {
        let Some(gateway) = &self.gateway else { return };
        if let (Some(lead), Some(present)) = (&gateway.lead, gateway.roll.last(from))
            && word.1 == self.own_location.me
            && word.0 < lead.term()
        {
            lead.announce(from, *present, turn);
        }
    }

    pub(super) fn heard_word(&mut self, from: NodeId, word: (Term, NodeId), turn: &mut Turn<'_>) {
        let is_believed = self.hear_term(from, word.0, turn.now);
        if !is_believed {
            turn.push(Output::Note(Note::Leaps(from)));
        }
        let lead = self.gateway.as_mut().and_then(|gateway| gateway.lead.as_mut());
        if lead.is_some_and(|lead| lead.heard(from, word, turn.now)) {
            self.mark_led(turn);
        }
        if is_believed {
            self.resume_with(from, word, turn);
            self.take_left_behind(from, word, turn);
            self.take_orphan(from, word, turn);
        }
        self.take_shared_of_most(turn);
    }

    /// Asks the gateway that leads in a later term to lead this node, too, after this node was away.
    pub(super) fn ask_to_be_led(&mut self, from: NodeId, turn: &mut Turn<'_>) {
        let (me, now) = (self.own_location.me, turn.now);
        // Each of several active leaders leads itself, and takes the nodes whose home it is.
        if self.own_location.several.is_some() {
            return;
        }
        let Some(gateway) = &mut self.gateway else { return };
        let is_led = gateway.roll.users(now).any(|(member, uses)| member != me && uses == me);
        let may = [me, from].contains(&self.word.1);
        let later = gateway.others.leads(from).is_some_and(|term| term > self.word.0);
        if later && may && !is_led && now > gateway.wished + SEC {
            gateway.wished = now;
            let signal = adopt(&self.member_view(now), from, 0);
            turn.push(Output::Lan(from, signal));
        }
    }

    /// Handles ADOPT: a member asks to be led because its leader has been silent for `age`, or
    /// only asks who leads (0).
    pub(super) fn handle_adopt(&mut self, member: NodeId, term: Term, age: Micros, turn: &mut Turn<'_>) {
        let (me, now) = (self.own_location.me, turn.now);
        let Some(gateway) = &self.gateway else { return };
        let tunnels = &gateway.tunnels;
        let lead = gateway.lead.as_ref();
        let is_overload = gateway.patience(&self.params, now) > 0;
        let may = if age == 0 {
            let is_home =
                self.own_location.several.as_ref().is_none_or(|several| several.home(member) == Some(me));
            is_home && self.word.1 == me && lead.is_some_and(|lead| lead.term() > term)
        } else {
            // A replay to an agent that has restarted since, and remembers no numbers: the member's kernel
            // has had a later word since, or nobody has heard it yet.
            gateway.roll.last(member).is_some_and(|present| present.word.0 <= term)
                && (!is_overload || age >= self.params.overload_member)
                && tunnels.were_good(now.saturating_sub(age))
                && tunnels.proves(now.saturating_sub(self.params.own * 3 + tunnels.longest()))
        };
        let has = lead.is_some_and(|lead| {
            lead.has(member)
                && gateway.roll.last(member).is_some_and(|present| present.word == (lead.term(), me))
        });
        // Two gateways that lead each other would no longer watch a leader, and would take nothing over.
        let would_lead_each_other = self.word.1 == member
            && gateway.roll.last(member).is_some_and(|present| present.word.1 != member);
        let uses = gateway.roll.last(member).map_or(member, |present| present.word.1);
        if !may || has || would_lead_each_other || !gateway.is_able(&self.params, uses, now) {
            return;
        }
        let shared = self.shared_of_adopted(member, age, now);
        if !self.admit_adoption(member, now) {
            return;
        }
        if !self.hear_term(member, term, now) {
            return turn.push(Output::Note(Note::Leaps(member)));
        }
        self.count_loss_by_adoption(member, age, turn.now);
        turn.push(Output::Note(Note::Adopts { member, was_leader: shared == Shared::Move, age }));
        self.lead_more([member], shared, turn);
    }

    /// What becomes of the shared prefixes when this gateway adopts a member whose leader has been silent for
    /// `age`, or that asks who leads (0).
    fn shared_of_adopted(&self, member: NodeId, age: Micros, now: Micros) -> Shared {
        let Some(gateway) = &self.gateway else { return Shared::Stay };
        let led_itself = gateway.roll.last(member).is_some_and(|present| present.word.1 == member);
        if age == 0 && (!led_itself || self.own_location.several.is_some()) {
            return Shared::Stay;
        }
        // Those of a leader that a member has lost may stay behind if nobody else takes over. Of several
        // leaders, this may be the acting one, whatever the annotations say.
        if age > 0 {
            return Shared::MoveIfSilent;
        }
        // A leader that nobody uses any more brings them, unless another gateway has them by now.
        let has_them = gateway.lead.as_ref().is_some_and(|lead| lead.shared() == Shared::Move);
        let is_another = |(_, uses): (NodeId, NodeId)| ![self.own_location.me, member].contains(&uses);
        if has_them || !gateway.roll.users(now).any(is_another) { Shared::Move } else { Shared::MoveIfSilent }
    }

    /// Returns whether a member may be adopted now, and if so records it. Each adoption may be a change of
    /// term for everybody this gateway leads: one member causes at most two per second.
    pub(super) fn admit_adoption(&mut self, member: NodeId, now: Micros) -> bool {
        const PAUSE: Micros = SEC / 2;
        let Some(gateway) = &mut self.gateway else { return false };
        gateway.adopted.retain(|_, at| *at + PAUSE > now);
        let is_new = !gateway.adopted.contains_key(&member);
        gateway.adopted.entry(member).or_insert(now);
        is_new
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::test_bench::{BOOT, Bench, LEADER, ME, MEMBER, THIRD};

    /// What this gateway, which leads itself and has `shared`, claims when Kilo's leader has booted and asks
    /// who leads; the member uses `uses`.
    fn claims(shared: Shared, uses: NodeId) -> Shared {
        let mut bench = Bench::with_third();
        bench.lead(&[ME], shared);
        let term = Term::from_bits(7 << 16);
        bench.present(THIRD, term, uses);
        bench.present(MEMBER, term, uses);
        bench.present(LEADER, Term::NONE, LEADER);
        let asks = Body::Members { cookie: BOOT, age: 0, members: vec![LEADER] };
        bench.hear(LEADER, Kind::Adopt, bench.now, Term::NONE, asks);
        let lead = bench.agent.lead().expect("it leads");
        assert!(lead.has(LEADER));
        lead.shared()
    }

    #[test]
    fn who_leads_only_itself_takes_the_shared_prefixes_from_no_third_gateway() {
        assert_eq!(claims(Shared::Stay, 4), Shared::MoveIfSilent);
        assert_eq!(claims(Shared::Move, 4), Shared::Move, "it has them");
        assert_eq!(claims(Shared::Stay, LEADER), Shared::Move, "the one that asks had them");
    }
}

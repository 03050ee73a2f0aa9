//! What every node does: it slowly watches the path through its leader, asks gateways to adopt it when that
//! is silent, and is a witness when asked.

use std::collections::{BTreeMap, VecDeque};

use crate::{
    Far, MS, Micros, NodeId, Note, Output, Params, ProbePath, Rule, SEC, Signal, Target, Turn,
    gateway::Sender,
    probes::{LOSSY, RoundTrip, Row},
    signal::{Body, Kind, Verdict},
};

/// The two probes of a witness.
#[derive(Clone, Debug)]
struct Burst {
    asker: NodeId,
    question: Signal,
    nonces: [u64; 2],
    works: bool,
    end: Micros,
}

/// What a member's agent knows.
#[derive(Clone, Debug)]
pub struct Member {
    row: Row,
    trip: RoundTrip,
    next: Micros,
    turns: usize,
    tries: usize,
    /// When the first of the probes that were missed since the last answer was sent, over all tries.
    silent_since: Option<Micros>,
    /// Until when the leader's path counts as overloaded: it has lost some probes, but not all.
    lossy_until: Micros,
    bursts: Vec<Burst>,
    /// Accepted questions of each gateway, and when each first came.
    questions: BTreeMap<NodeId, VecDeque<(u32, Micros)>>,
}

/// What a member knows of its surroundings, for one step.
#[derive(Clone, Copy)]
pub struct MemberView<'a> {
    /// This node.
    pub sender: Sender,
    /// The gateway it uses, and the term.
    pub word: (crate::Term, NodeId),
    /// All gateways in Kilo's order.
    pub gateways: &'a [NodeId],
    /// Far leaders that can answer probes, as in [`crate::OwnLocation`].
    pub fars: &'a [Far],
    /// How many nodes the location has, this one included.
    pub nodes: usize,
    /// A number that grows, even across restarts of the agent.
    pub stamp: u64,
    /// As in [`crate::OwnLocation`].
    pub cookies: &'a BTreeMap<NodeId, u64>,
}

impl Member {
    /// Time between the two probes of a witness.
    const APART: Micros = 20 * MS;
    /// Maximum number of questions of one gateway that a witness answers at a time: each costs
    /// two probes and a verdict.
    const MOST_BURSTS: usize = 2;
    /// Number of questions of one gateway that are remembered, so that replayed ones do not take
    /// the place of new ones.
    const REMEMBERED: usize = 256;
    /// A gateway repeats a question within this time.
    const REPEATS: Micros = SEC;
    /// Pause between two gateways that are asked.
    const NEXT_GATEWAY: Micros = 150 * MS;
    /// After so many tries, every second one reports how long the whole silence has lasted: a
    /// gateway that has become fit since would not accept that, and one of an overloaded location
    /// would accept nothing else.
    const PATIENT_TRIES: usize = 3;

    /// The member of an agent that starts now: its first probe comes within its interval.
    pub fn new(first: Micros) -> Self {
        Self {
            row: Row::default(),
            trip: RoundTrip::default(),
            next: first,
            turns: 0,
            tries: 0,
            silent_since: None,
            lossy_until: 0,
            bursts: Vec::new(),
            questions: BTreeMap::new(),
        }
    }

    /// When it has to be woken.
    pub fn wake(&self) -> Micros {
        self.next.min(self.deadline())
    }

    /// When the next probe is due.
    pub const fn next(&self) -> Micros {
        self.next
    }

    /// When a miss is known that may be the last one needed, or a witness has its answer. The first misses
    /// can wait for the next probe.
    pub fn deadline(&self) -> Micros {
        let bursts = self.bursts.iter().map(|burst| burst.end).min().unwrap_or(Micros::MAX);
        if self.row.misses() > 0 { bursts.min(self.row.deadline()) } else { bursts }
    }

    /// Drops outstanding probes, which prove nothing: the agent slept, or the leader changed.
    pub fn discard(&mut self) {
        self.row.clear();
        self.silent_since = None;
        for Burst { asker, question, .. } in self.bursts.drain(..) {
            let Body::Question { id, .. } = question.body else { continue };
            // It was not answered, so its second copy counts as a first one.
            self.questions.entry(asker).or_default().retain(|(known, _)| *known != id);
        }
    }

    /// Handles the answer to a probe; returns whether it was one of these.
    pub fn answered(&mut self, params: &Params, nonce: u64, at: Micros) -> bool {
        let has_missed = self.row.misses() >= LOSSY;
        for burst in &mut self.bursts {
            burst.works |= burst.nonces.contains(&nonce);
        }
        let Some(sent) = self.row.answered(nonce) else { return false };
        if has_missed {
            self.lossy_until = at + params.busy;
        }
        (self.tries, self.silent_since) = (0, None);
        self.trip.measured(at.saturating_sub(sent));
        true
    }

    /// How long a path probe may take.
    fn timeout(&self, params: &Params) -> Micros {
        self.trip.deadline(params)
    }

    /// Sends what is due, and decides.
    pub fn wake_up(&mut self, params: &Params, view: &MemberView<'_>, turn: &mut Turn<'_>) {
        self.finish_bursts(view, turn);
        self.row.expire(turn.now);
        let interval = params.member_interval(view.nodes);
        let leader = view.word.1;
        if leader == view.sender.me || view.fars.is_empty() {
            self.row.clear();
            self.next = self.next.max(turn.now + if turn.now >= self.next { interval } else { 0 });
            return;
        }
        if self.row.misses() >= params.member_misses {
            let since = self.row.since().unwrap_or(turn.now);
            let first = *self.silent_since.get_or_insert(since);
            // An overloaded path loses many probes in a row, but not all for so long.
            let is_lossy = self.lossy_until > turn.now && params.keeps(Rule::Patience);
            if !is_lossy || first + params.overload_member <= turn.now {
                self.row.clear();
                let is_patient = self.tries >= Self::PATIENT_TRIES && self.tries % 2 == 1;
                self.ask_gateways(if is_patient { first } else { since }, view, turn);
            }
        }
        if turn.now < self.next {
            return;
        }
        self.next = turn.now + turn.jittered(interval);
        // The last four are sent at once: they show whether the path is dead or lossy.
        let count = if self.row.misses() + 4 >= params.member_misses { 4 } else { 1 };
        for i in 0..count {
            let far = view.fars[self.turns % view.fars.len()];
            let target = Target::of_turn(params, self.turns, view.fars.len());
            self.turns += 1;
            let nonce = turn.nonce();
            self.row.sent(nonce, turn.now, turn.now + self.timeout(params) * 3 / 2 + i * 5 * MS);
            turn.push(Output::Probe { nonce, path: ProbePath::Path(far, target) });
        }
    }

    fn ask_gateways(&mut self, since: Micros, view: &MemberView<'_>, turn: &mut Turn<'_>) {
        let Sender { me, .. } = view.sender;
        let others: Vec<_> = view
            .gateways
            .iter()
            .copied()
            .filter(|gateway| *gateway != view.word.1 && *gateway != me)
            .collect();
        for i in 0..others.len().min(2) {
            let gateway = others[(self.tries + i) % others.len()];
            let pause = i as u64 * Self::NEXT_GATEWAY;
            let age = ((turn.now + pause - since) / MS).clamp(1, u64::from(u32::MAX)) as u32;
            // Numbered as of the moment in which it is sent.
            let signal = adopt(&MemberView { stamp: view.stamp + pause, ..*view }, gateway, age);
            turn.after(pause, Output::Lan(gateway, signal));
        }
        self.tries += 1;
    }

    /// Handles the question whether this node's path through a leader works; the leader's id is the nonce.
    pub fn asked(&mut self, params: &Params, question: Signal, view: &MemberView<'_>, turn: &mut Turn<'_>) {
        let Body::Question { id, patience } = question.body else { return };
        // Stand-bys ask; what others send must not take their place.
        if !view.gateways.contains(&question.sender) {
            return;
        }
        self.questions.retain(|gateway, _| view.gateways.contains(gateway));
        if !self.is_new(question.sender, id, turn) {
            return;
        }
        let open = self.bursts.iter().filter(|burst| burst.asker == question.sender).count();
        if view.word.1 != question.nonce || view.sender.me == question.nonce {
            self.remember(question.sender, id, turn.now);
            let verdict = Body::Witness { id, verdict: Verdict::Elsewhere };
            let signal = view.sender.signal(Kind::Verdict, question.nonce, view.word.0, verdict);
            turn.push(Output::Lan(question.sender, signal));
            return;
        }
        if open >= Self::MOST_BURSTS {
            return;
        }
        let (least, most) = params.path_deadline;
        let patience = (u64::from(patience) * MS).clamp(least, most);
        let nonces = [turn.nonce(), turn.nonce()];
        for (i, nonce) in nonces.into_iter().enumerate() {
            let Some(far) = view.fars.get((self.turns + i) % view.fars.len().max(1)) else { return };
            let path = ProbePath::Path(*far, Target::of_turn(params, self.turns + i, view.fars.len()));
            turn.after(i as u64 * Self::APART, Output::Probe { nonce, path });
        }
        let end = turn.now + Self::APART + patience;
        self.remember(question.sender, id, turn.now);
        self.bursts.push(Burst { asker: question.sender, question, nonces, works: false, end });
    }

    /// Returns whether a question was not accepted before. Its id is random, so a question that comes again
    /// later than its sender repeats it is a replay.
    fn is_new(&self, asker: NodeId, id: u32, turn: &mut Turn<'_>) -> bool {
        let known = self.questions.get(&asker).into_iter().flatten().find(|(known, _)| *known == id);
        if known.is_some_and(|(_, at)| at + Self::REPEATS <= turn.now) {
            turn.push(Output::Note(Note::Replayed(asker)));
        }
        known.is_none()
    }

    fn remember(&mut self, asker: NodeId, id: u32, now: Micros) {
        let known = self.questions.entry(asker).or_default();
        if known.len() >= Self::REMEMBERED {
            known.pop_front();
        }
        known.push_back((id, now));
    }

    fn finish_bursts(&mut self, view: &MemberView<'_>, turn: &mut Turn<'_>) {
        let now = turn.now;
        for Burst { asker, question, works, .. } in self.bursts.extract_if(.., |burst| burst.end <= now) {
            let Body::Question { id, .. } = question.body else { continue };
            let verdict = if works { Verdict::Works } else { Verdict::Failed };
            let body = Body::Witness { id, verdict };
            let signal = view.sender.signal(Kind::Verdict, question.nonce, view.word.0, body);
            turn.push(Output::Lan(asker, signal.clone()));
            turn.after(5 * MS, Output::Lan(asker, signal));
        }
    }
}

/// ADOPT for this node to a gateway; `age` 0: it only asks who leads.
pub fn adopt(view: &MemberView<'_>, to: NodeId, age: u32) -> Signal {
    let cookie = view.cookies.get(&to).copied().unwrap_or(0);
    let body = Body::Members { cookie, age, members: vec![view.sender.me] };
    view.sender.signal(Kind::Adopt, view.stamp, view.word.0, body)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use crate::Term;

    const LEADER: NodeId = 1;

    struct Asked {
        member: Member,
        cookies: BTreeMap<NodeId, u64>,
    }

    impl Asked {
        /// Outputs for a question of this gateway with this id at `now`; `None`: for a wake-up.
        fn turn(&mut self, now: Micros, question: Option<(NodeId, u32)>) -> Vec<Output> {
            let (mut out, mut later, mut drawn) = (Vec::new(), Vec::new(), now);
            let mut random = || {
                drawn += 1;
                drawn
            };
            let mut turn = Turn { now, random: &mut random, out: &mut out, later: &mut later };
            let view = MemberView {
                sender: Sender { me: 3, location: 7 },
                word: (Term::NONE, LEADER),
                gateways: &[LEADER, 2, 4],
                fars: &[9],
                nodes: 5,
                stamp: 0,
                cookies: &self.cookies,
            };
            let params = Params::default();
            match question {
                Some((asker, id)) => {
                    let body = Body::Question { id, patience: 100 };
                    let sender = Sender { me: asker, location: 7 };
                    let question = sender.signal(Kind::Witness, LEADER, Term::NONE, body);
                    self.member.asked(&params, question, &view, &mut turn);
                }
                None => self.member.finish_bursts(&view, &mut turn),
            }
            out.into_iter().chain(later.into_iter().map(|(_, output)| output)).collect()
        }
    }

    #[test]
    fn a_witness_answers_two_questions_of_each_gateway_at_a_time_and_nobody_elses() {
        let mut asked = Asked { member: Member::new(0), cookies: BTreeMap::new() };
        let mut probes =
            |asker| (0..20).map(|id| asked.turn(1_000, Some((asker, id))).len()).collect::<Vec<_>>();
        assert_eq!(probes(5), [0; 20], "no gateway");
        for asker in [2, 4] {
            assert_eq!(probes(asker), [vec![2; 2], vec![0; 18]].concat(), "{asker}");
        }
        // Each of those is answered twice, and then others are again.
        assert_eq!(asked.turn(500 * MS, None).len(), 8);
        assert_eq!(asked.turn(500 * MS, Some((2, 20))).len(), 2);
    }

    #[test]
    fn a_recorded_question_takes_no_new_ones_place() {
        let mut asked = Asked { member: Member::new(0), cookies: BTreeMap::new() };
        let recorded = [1, 2, 3].map(|id| (2, id));
        let mut now = 0;
        for question in recorded {
            now += SEC;
            assert_eq!(asked.turn(now, Some(question)).len(), 2);
            assert_eq!(asked.turn(now + 10 * MS, Some(question)), [], "sent twice, so that one is not lost");
            asked.turn(now + 500 * MS, None);
        }
        now += SEC;
        for question in recorded {
            assert_eq!(asked.turn(now, Some(question)), [Output::Note(Note::Replayed(2))]);
        }
        assert_eq!(asked.turn(now, Some((2, 4))).len(), 2, "a new one");
    }

    #[test]
    fn a_question_whose_answer_was_given_up_is_taken_when_it_comes_again() {
        let mut asked = Asked { member: Member::new(0), cookies: BTreeMap::new() };
        assert_eq!(asked.turn(1_000, Some((2, 1))).len(), 2);
        asked.member.discard();
        assert_eq!(asked.turn(11_000, Some((2, 1))).len(), 2);
    }

    #[test]
    fn the_oldest_questions_are_forgotten() {
        let mut asked = Asked { member: Member::new(0), cookies: BTreeMap::new() };
        for id in 0..300 {
            asked.turn(u64::from(id) * SEC, Some((2, id)));
            asked.turn(u64::from(id) * SEC + SEC / 2, None);
        }
        assert_eq!(asked.member.questions[&2].len(), Member::REMEMBERED);
        assert_eq!(asked.turn(300 * SEC, Some((2, 299))), [Output::Note(Note::Replayed(2))]);
        assert_eq!(asked.turn(300 * SEC, Some((2, 0))).len(), 2);
    }
}

//! A gateway that leads: it announces itself to members' kernels (ANNOUNCE) until each follows, and
//! reports those that do to far leaders (CLAIM) until each has moved their prefixes.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    Far, MS, Micros, NodeId, Output, Params, Rule, SEC, Signal, Term, Turn,
    roll_call::{Present, Roll},
    signal::{Body, Kind, MAX_MEMBERS, Shared},
};

/// This node's identity in its signals.
#[derive(Clone, Copy, Debug)]
pub struct Sender {
    /// Its id: first 8 bytes of SHA-256 of its public key.
    pub me: NodeId,
    /// First 8 bytes of SHA-256 of its location's name.
    pub location: u64,
}

impl Sender {
    /// A signal with this node as its sender.
    pub fn signal(self, kind: Kind, nonce: u64, term: Term, body: Body<Vec<u64>>) -> Signal {
        Signal { kind, nonce, term, sender: self.me, location: self.location, body }
    }

    /// CLAIM or END of all these members, in as many parts as needed: names the gateway that is to have them,
    /// and what becomes of the shared prefixes.
    pub fn in_parts(
        self,
        kind: Kind,
        term: Term,
        (gateway, shared): (NodeId, Shared),
        members: &[NodeId],
        mut nonce: impl FnMut() -> u64,
    ) -> Vec<Signal> {
        let parts = members.chunks(MAX_MEMBERS);
        let count = parts.len() as u16;
        let signal = |(part, members): (usize, &[NodeId])| {
            let body = Body::Claim { gateway, shared, part: (part as u16, count), members: members.to_vec() };
            self.signal(kind, nonce(), term, body)
        };
        parts.enumerate().map(signal).collect()
    }
}

/// What is known of a member that is led.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Led {
    /// It was led in this earlier term. Another gateway may have taken it since, so ROLL precedes ANNOUNCE.
    Before(Term),
    /// ANNOUNCEs are sent to it until its kernel reports that it follows: the latest term of this gateway
    /// that it has reported since, as far as a kernel that has missed many changes is led up by now.
    Announced(Term),
    /// Its kernel has reported that it follows.
    Follows,
}

/// Leadership of some members in one term.
#[derive(Clone, Debug)]
pub struct Lead {
    sender: Sender,
    term: Term,
    members: BTreeMap<NodeId, Led>,
    /// How many members do not follow yet.
    waiting: usize,
    /// The members whose prefixes each far leader has moved.
    moved: BTreeMap<Far, BTreeSet<NodeId>>,
    shared: Shared,
    tries: u32,
    next: Micros,
    flush: Option<Micros>,
    refresh: Micros,
    since: Micros,
}

impl Lead {
    /// How long CLAIMs wait for more members while some do not follow yet: what members send through this
    /// gateway is lost until far leaders have moved them.
    pub const BATCH: Micros = 2 * MS;
    /// Interval at which everything is claimed again, so that a far leader whose agent forgot terms, or whose
    /// WireGuard was set up anew, learns them.
    const REFRESH: Micros = 10 * SEC;
    /// After this many ROLLs and ANNOUNCEs a silent member gets no more: it asks, or has another leader. One that
    /// is led up to a much later term is not silent.
    const TRIES: u32 = 9;

    /// How many times a member is assumed to still have the cookie that it reported.
    const TRUSTED: u32 = 3;

    /// A leadership without members yet.
    pub fn new(sender: Sender, term: Term, fars: &[Far], now: Micros) -> Self {
        let moved = fars.iter().map(|far| (*far, BTreeSet::new())).collect();
        let refresh = now + Self::REFRESH;
        Self {
            sender,
            term,
            members: BTreeMap::new(),
            waiting: 0,
            moved,
            shared: Shared::Stay,
            tries: 0,
            next: now,
            flush: None,
            refresh,
            since: now,
        }
    }

    /// The leadership of these members alone; the others go elsewhere. In term 0 nothing was announced: these
    /// members use this gateway.
    #[must_use]
    pub fn with_only(mut self, members: &[NodeId]) -> Self {
        if self.term == Term::NONE {
            self.members = members.iter().map(|member| (*member, Led::Follows)).collect();
        } else {
            self.members.retain(|member, _| members.contains(member));
        }
        self.waiting = self.count_waiting();
        self
    }

    fn count_waiting(&self) -> usize {
        self.members.values().filter(|led| **led != Led::Follows).count()
    }

    /// Sets what is known of a member; `None`: it is no longer led.
    fn set_led(&mut self, member: NodeId, led: Option<Led>) {
        let before = match led {
            Some(led) => self.members.insert(member, led),
            None => self.members.remove(&member),
        };
        let waits = |led: Option<Led>| usize::from(led.is_some_and(|led| led != Led::Follows));
        self.waiting += waits(led);
        self.waiting -= waits(before);
    }

    /// Term in which this gateway took leadership.
    pub fn term(&self) -> Term {
        self.term
    }

    /// When this leadership began, including leaderships it continues.
    pub fn since(&self) -> Micros {
        self.since
    }

    /// Keeps the start of the leadership that this one continues, and its claim of shared prefixes
    /// unless there is a new one.
    pub fn continue_from(&mut self, older: &Self) {
        self.since = older.since;
        if self.shared == Shared::Stay {
            self.shared = older.shared;
        }
    }

    /// Gives up the shared prefixes: another gateway has them.
    pub fn give_up_shared(&mut self) {
        self.shared = Shared::Stay;
    }

    /// Has everything claimed again within `pause`.
    pub fn claim_again_within(&mut self, pause: Micros, now: Micros) {
        self.refresh = self.refresh.min(now + pause);
    }

    /// Sets what its CLAIMs say about the shared prefixes; [`Shared::Stay`] changes nothing.
    pub fn set_shared(&mut self, shared: Shared) {
        if shared != Shared::Stay {
            self.shared = shared;
        }
    }

    /// Leads these members, too.
    pub fn add(&mut self, members: impl IntoIterator<Item = NodeId>, now: Micros) {
        for member in members {
            if matches!(self.members.get(&member), None | Some(Led::Before(_))) {
                self.set_led(member, Some(Led::Announced(Term::NONE)));
            }
        }
        self.tries = 0;
        self.next = now;
    }

    /// Continues to lead these members, which were led in that earlier term, unless another
    /// gateway has taken them since.
    pub fn resume(&mut self, members: impl IntoIterator<Item = NodeId>, term: Term) {
        for member in members {
            if !self.has(member) {
                self.set_led(member, Some(Led::Before(term)));
            }
        }
    }

    /// Continues to lead all other members of an older leadership.
    pub fn inherit(&mut self, older: &Self) {
        for (member, led) in older.members.iter().filter(|(member, _)| **member != older.sender.me) {
            let term = if let Led::Before(term) = led { *term } else { older.term };
            self.resume([*member], term);
        }
    }

    /// What its CLAIMs say about the shared prefixes: the gateway that leads the location, and not only
    /// some members, has them.
    pub fn shared(&self) -> Shared {
        self.shared
    }

    /// Whether a member's kernel has reported that it follows.
    pub fn is_followed_by(&self, member: NodeId) -> bool {
        self.members.get(&member) == Some(&Led::Follows)
    }

    /// Sets the current nodes and far leaders; returns whether the members led have changed.
    pub fn set_nodes_and_fars(&mut self, nodes: &[NodeId], fars: &[Far], now: Micros) -> bool {
        self.moved.retain(|far, _| fars.contains(far));
        for far in fars {
            if !self.moved.contains_key(far) {
                self.moved.insert(*far, BTreeSet::new());
                self.next = now;
            }
        }
        let before = self.members.len();
        self.members.retain(|member, _| nodes.contains(member));
        self.waiting = self.count_waiting();
        before != self.members.len()
    }

    /// Members this gateway leads.
    pub fn members(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.members.keys().copied()
    }

    /// True when it leads no member.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Whether it leads this one, and not only in an earlier term.
    pub fn has_announced_to(&self, member: NodeId) -> bool {
        matches!(self.members.get(&member), Some(Led::Announced(_) | Led::Follows))
    }

    /// Whether it leads this one.
    pub fn has(&self, member: NodeId) -> bool {
        self.members.contains_key(&member)
    }

    /// Records the gateway that a member's kernel uses. The member is no longer led if that is another one in
    /// a later term than it is led in. Returns whether the members led have changed.
    pub fn heard(&mut self, member: NodeId, word: (Term, NodeId), now: Micros) -> bool {
        let Some(led) = self.members.get(&member).copied() else { return false };
        let led_in = if let Led::Before(term) = led { term } else { self.term };
        let is_anothers = word.1 != self.sender.me && word.0 > led_in;
        if word == (self.term, self.sender.me) {
            if led != Led::Follows {
                self.followed(member, now);
            }
        } else if is_anothers {
            self.set_led(member, None);
            return true;
        } else if let Led::Announced(reached) = led {
            // It obeys, and is a whole step nearer: it is led on, however many steps there are.
            if word.1 == self.sender.me && word.0 >= farthest(reached, self.sender.me) {
                self.set_led(member, Some(Led::Announced(word.0)));
                self.tries = self.tries.min(Self::TRUSTED + 1);
            }
        } else {
            self.set_led(member, Some(Led::Announced(Term::NONE)));
            if led == Led::Follows {
                // Its kernel has started anew.
                self.tries = 0;
                self.next = now;
            }
        }
        false
    }

    /// Records that a member's kernel follows in this term; far leaders have to hear of it.
    pub fn followed(&mut self, member: NodeId, now: Micros) {
        self.set_led(member, Some(Led::Follows));
        let at = if self.waiting == 0 { now } else { now + Self::BATCH };
        self.flush = Some(self.flush.map_or(at, |flush| flush.min(at)));
    }

    /// Records that a far leader has moved these members.
    pub fn moved(&mut self, far: Far, term: Term, members: &[NodeId]) {
        if let Some(moved) = self.moved.get_mut(&far).filter(|_| term == self.term) {
            moved.extend(members.iter().filter(|member| self.members.contains_key(*member)));
        }
    }

    /// When it has to be woken.
    pub fn wake(&self) -> Micros {
        self.next.min(self.flush.unwrap_or(Micros::MAX))
    }

    /// Sends what is due; returns whether the members led have changed.
    pub fn wake_up(&mut self, params: &Params, roll: &mut Roll, turn: &mut Turn<'_>) -> bool {
        if self.flush.is_some_and(|at| at <= turn.now) {
            self.flush = None;
            self.claim(params, turn);
        }
        if turn.now < self.next {
            return false;
        }
        let silent: Vec<_> = self
            .members
            .iter()
            .filter(|(_, led)| **led != Led::Follows)
            .map(|(member, led)| (*member, *led))
            .collect();
        for (member, led) in &silent {
            match roll.reachable(*member, turn.now) {
                Some(present) if matches!(led, Led::Announced(_)) && self.tries < Self::TRUSTED => {
                    self.announce(*member, *present, turn);
                }
                // A member that has booted since has another cookie.
                _ => ask(self.sender, *member, roll, turn),
            }
        }
        if turn.now >= self.refresh {
            self.refresh = turn.now + Self::REFRESH;
            self.moved.values_mut().for_each(BTreeSet::clear);
        }
        if self.tries > 0 {
            self.claim(params, turn);
        }
        self.tries += 1;
        self.next = turn.now + pause(self.tries);
        if self.tries == Self::TRIES && !silent.is_empty() {
            self.members.retain(|_, led| *led == Led::Follows);
            self.waiting = 0;
            return true;
        }
        false
    }

    /// Sends ANNOUNCE to a member's kernel, unless it has reported that it follows.
    pub fn announce(&self, member: NodeId, present: Present, turn: &mut Turn<'_>) {
        if !matches!(self.members.get(&member), Some(Led::Announced(_))) {
            return;
        }
        let body = Body::Word { cookie: present.cookie, gateway: self.sender.me };
        let term = self.term.min(farthest(present.word.0, self.sender.me));
        let signal = self.sender.signal(Kind::Announce, present.nonce, term, body);
        turn.push(Output::Lan(member, signal));
    }

    fn claim(&self, params: &Params, turn: &mut Turn<'_>) {
        for (far, moved) in &self.moved {
            let members: Vec<_> = self
                .members
                .iter()
                .filter(|(member, led)| {
                    (**led == Led::Follows || !params.keeps(Rule::ClaimFollowers)) && !moved.contains(*member)
                })
                .map(|(member, _)| *member)
                .collect();
            let owner = (self.sender.me, self.shared);
            let signals = self.sender.in_parts(Kind::Claim, self.term, owner, &members, || turn.nonce());
            signals.into_iter().for_each(|signal| turn.push(Output::Tunnel(*far, signal)));
        }
    }
}

/// The last term of a gateway that a kernel with this word obeys. A kernel that has missed many changes,
/// because it has booted or because its own gateway had none, is led up to the latest term step by step.
fn farthest(word: Term, gateway: NodeId) -> Term {
    word.last_step().next(gateway)
}

/// Asks a member's kernel whether it is there.
pub fn ask(sender: Sender, member: NodeId, roll: &mut Roll, turn: &mut Turn<'_>) {
    let nonce = turn.nonce();
    roll.asked(member, nonce);
    let body = Body::Word { cookie: 0, gateway: 0 };
    turn.push(Output::Lan(member, sender.signal(Kind::Roll, nonce, Term::NONE, body)));
}

/// How long a claim waits for its answer before it is repeated, by how often it was sent.
pub const fn pause(tries: u32) -> Micros {
    match tries {
        1 => 10 * MS,
        2 => 20 * MS,
        3 => 50 * MS,
        4..=10 => 100 * MS,
        _ => SEC,
    }
}

#[cfg(test)]
mod tests {
    use kilo_common::lead::{obeys, word};

    use super::*;

    const ME: NodeId = 2 << 48;
    const MEMBER: NodeId = 3 << 48;

    /// How many ANNOUNCEs it takes until a kernel with the count `knows` follows a gateway in the term of
    /// `count`, and the last term it obeyed.
    fn steps(knows: u64, count: u64) -> (usize, Term) {
        let term = Term::from_bits((count - 1) << 16).next(ME);
        let sender = Sender { me: ME, location: 7 };
        let (mut lead, mut roll) = (Lead::new(sender, term, &[], 0), Roll::default());
        lead.add([MEMBER], 0);
        let (mut known, mut now, mut steps) = (Term::from_bits(knows << 16 | 9), 0, 0);
        while !lead.is_followed_by(MEMBER) && lead.wake() < 1_000 * SEC {
            now = lead.wake();
            let present = Present { at: now, nonce: 1, cookie: 5, word: (known, ME) };
            roll.asked(MEMBER, 1);
            roll.heard(MEMBER, present);
            let (mut out, mut later, mut random) = (Vec::new(), Vec::new(), || 1);
            let mut turn = Turn { now, random: &mut random, out: &mut out, later: &mut later };
            lead.wake_up(&Params::default(), &mut roll, &mut turn);
            // Its kernel answers at once, and the agent announces as soon as it hears that.
            if turn.out.iter().any(|out| matches!(out, Output::Lan(_, Signal { kind: Kind::Roll, .. }))) {
                lead.announce(MEMBER, present, &mut turn);
            }
            for output in out {
                let Output::Lan(_, Signal { kind: Kind::Announce, term, .. }) = output else { continue };
                if obeys(word(known, 8), word(term, 7)) {
                    (known, steps) = (term, steps + 1);
                }
                lead.heard(MEMBER, (known, ME), now);
            }
        }
        assert!(
            lead.is_followed_by(MEMBER),
            "it knew {knows}, and is dropped at {} ms with {known:?}",
            now / MS
        );
        (steps, known)
    }

    #[test]
    fn a_far_leader_that_says_to_have_moved_anybody_fills_no_memory() {
        let term = Term::NONE.next(ME);
        let mut lead = Lead::new(Sender { me: ME, location: 7 }, term, &[9], 0);
        lead.add([MEMBER], 0);
        for flood in 0..100 {
            let members: Vec<NodeId> = (0..100).map(|member| flood * 100 + member).collect();
            lead.moved(9, term, &members);
        }
        lead.moved(9, term, &[MEMBER]);
        assert_eq!(lead.moved[&9].len(), 1);
    }

    #[test]
    fn far_leaders_hear_at_once_when_the_last_member_follows() {
        let term = Term::NONE.next(ME);
        let mut lead = Lead::new(Sender { me: ME, location: 7 }, term, &[9], 0);
        lead.add([MEMBER, MEMBER + 1], 0);
        lead.next = SEC;
        lead.heard(MEMBER, (term, ME), 100);
        assert_eq!(lead.wake(), 100 + Lead::BATCH, "another one may follow at any moment");
        lead.heard(MEMBER + 1, (term, ME), 300);
        assert_eq!(lead.wake(), 300);
    }

    #[test]
    fn who_was_led_before_is_asked_and_stays_where_another_gateway_has_taken_it() {
        let (before, now) = (Term::NONE.next(ME), SEC);
        let taken = before.next(9 << 48);
        let later = taken.next(ME);
        let (stays, gone, booted) = (MEMBER, MEMBER + 1, MEMBER + 2);
        let sender = Sender { me: ME, location: 7 };
        let mut older = Lead::new(sender, before, &[9], 0);
        older.add([stays, gone, booted, ME], 0);
        let mut between = Lead::new(sender, later, &[9], now);
        between.inherit(&older);
        // Nobody has reported anything in the term between: the term in which they were led counts.
        let mut lead = Lead::new(sender, later.next(ME), &[9], now);
        lead.inherit(&between);
        let mut roll = Roll::default();
        let (mut out, mut after, mut random) = (Vec::new(), Vec::new(), || 1);
        let mut turn = Turn { now, random: &mut random, out: &mut out, later: &mut after };
        for member in [stays, gone, booted] {
            roll.asked(member, 1);
            roll.heard(member, Present { at: now, nonce: 1, cookie: 5, word: (before, ME) });
        }
        lead.wake_up(&Params::default(), &mut roll, &mut turn);
        let kind = |output: &Output| match output {
            Output::Lan(to, signal) => Some((signal.kind, *to)),
            _ => None,
        };
        let sent: Vec<_> = turn.out.drain(..).filter_map(|output| kind(&output)).collect();
        assert_eq!(
            sent,
            [stays, gone, booted].map(|member| (Kind::Roll, member)),
            "nobody is sent ANNOUNCE yet"
        );
        let mut sent = Vec::new();
        for (member, word) in [(stays, (before, ME)), (gone, (taken, 9 << 48)), (booted, (Term::NONE, 1))] {
            let is_dropped = lead.heard(member, word, now);
            assert_eq!(is_dropped, member == gone, "{member}");
            lead.announce(member, Present { at: now, nonce: 1, cookie: 5, word }, &mut turn);
            sent.extend(turn.out.drain(..).filter_map(|output| kind(&output)));
        }
        assert_eq!(sent, [(Kind::Announce, stays), (Kind::Announce, booted)]);
        assert!(!lead.has(gone) && lead.waiting == 2);
    }

    #[test]
    fn a_kernel_that_has_missed_any_number_of_changes_is_led_up_to_the_latest() {
        let far_behind = [(0, 1_025, 2), (7, 5_000, 5), (0, 20_000, 20), (0, 1_000_000, 977)];
        for (knows, count, wanted) in
            [(0, 1, 1), (0, 1_024, 1), (3_000, 3_900, 1)].into_iter().chain(far_behind)
        {
            let (steps, term) = steps(knows, count);
            assert_eq!((steps, u64::from(term.count())), (wanted, count), "it knew {knows}");
        }
    }
}

//! Whether a signal that changes who leads is new. No clock decides that: each sender's number grows within
//! one boot, which is identified by the secret that the sender's kernel reports when it is asked.

use std::collections::BTreeMap;

use crate::{
    Agent, MS, Micros, NodeId, Note, Output, Rule, SEC, Signal, Turn, gateway,
    signal::{Body, Kind},
};

/// What was heard of one sender.
#[derive(Clone, Debug, Default)]
struct Heard {
    cookie: u64,
    highest: u64,
    /// Numbers of the newest burst that were heard.
    burst: Vec<u64>,
    at: Micros,
}

/// Signals of a boot that is not known, until the sender's kernel has been asked.
#[derive(Clone, Debug, Default)]
struct Waiting {
    signals: Vec<(Signal, Micros)>,
    asked: Micros,
}

/// Numbers that were received, by sender.
#[derive(Clone, Debug, Default)]
pub(crate) struct Numbers {
    /// HELLO has numbers of its own: it overtakes signals that are sent several times.
    heard: BTreeMap<(NodeId, bool), Heard>,
    waiting: BTreeMap<NodeId, Waiting>,
}

/// What its number shows about a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Freshness {
    /// It was not heard before.
    New,
    /// It was received a moment ago: signals are sent twice, so that one is not lost.
    Twice,
    /// Somebody has recorded it and sent it again.
    Replayed,
}

impl Numbers {
    /// Parts of one HANDOVER have numbers this close, and may come in any order.
    const BURST: u64 = 64;
    /// A sender repeats a signal within this time.
    const REPEATS: Micros = SEC;
    /// Maximum number of signals of one sender that wait.
    const MOST: usize = 16;
    /// Minimum time between two questions to a kernel whose boot is not known.
    const PAUSE: Micros = 50 * MS;

    fn take(&mut self, from: (NodeId, bool), (cookie, number): (u64, u64), now: Micros) -> Freshness {
        let heard = self.heard.entry(from).or_default();
        if heard.cookie != cookie {
            *heard = Heard { cookie, ..Heard::default() };
        }
        if heard.burst.contains(&number) {
            return if heard.at + Self::REPEATS > now { Freshness::Twice } else { Freshness::Replayed };
        }
        if number.saturating_add(Self::BURST) <= heard.highest {
            return Freshness::Replayed;
        }
        heard.highest = heard.highest.max(number);
        heard.at = now;
        let highest = heard.highest;
        heard.burst.retain(|number| number.saturating_add(Self::BURST) > highest);
        heard.burst.push(number);
        Freshness::New
    }

    /// Keeps a signal waiting; returns whether its sender's kernel is to be asked.
    fn wait(&mut self, from: NodeId, signal: &Signal, now: Micros) -> bool {
        let waiting = self.waiting.entry(from).or_default();
        if signal.kind == Kind::Hello {
            // The newest one supersedes the others.
            waiting.signals.retain(|(signal, _)| signal.kind != Kind::Hello);
        }
        if !waiting.signals.iter().any(|(waits, _)| waits == signal) {
            if waiting.signals.len() >= Self::MOST {
                waiting.signals.remove(0);
            }
            waiting.signals.push((signal.clone(), now));
        }
        let asks = waiting.signals.len() == 1 || waiting.asked + Self::PAUSE <= now;
        if asks {
            waiting.asked = now;
        }
        asks
    }

    /// Forgets nodes that are no longer in the location.
    pub(crate) fn set_nodes(&mut self, nodes: &[NodeId]) {
        self.heard.retain(|(node, _), _| nodes.contains(node));
        self.waiting.retain(|node, _| nodes.contains(node));
    }
}

/// The cookie of a numbered signal, which identifies its boot; `None`: the signal has no number.
fn cookie(signal: &Signal) -> Option<u64> {
    match (signal.kind, &signal.body) {
        (Kind::Adopt | Kind::Handover, Body::Members { cookie, .. })
        | (Kind::Prepare, Body::Change { cookie, .. })
        | (Kind::Hello, Body::Hello { cookie, .. }) => Some(*cookie),
        _ => None,
    }
}

impl Agent {
    /// Returns whether a signal may count, and records its number: it has none, or one that is new in
    /// the sender's boot. If the boot is not the one that the sender's kernel reported, the signal waits
    /// until that is asked again: the sender may have booted.
    pub(crate) fn admit_numbered(&mut self, from: NodeId, signal: &Signal, turn: &mut Turn<'_>) -> bool {
        let Some(cookie) = cookie(signal) else { return true };
        let (sender, now) = (self.sender(), turn.now);
        let is_hello = signal.kind == Kind::Hello;
        let by_boot = is_hello || self.params.keeps(Rule::Boots);
        let Some(own) = &mut self.gateway else { return false };
        let known = own.roll.last(from).map(|present| present.cookie);
        if by_boot && known != Some(cookie) {
            if own.numbers.wait(from, signal, now) {
                gateway::ask(sender, from, &mut own.roll, turn);
            }
            return false;
        }
        let boot = if by_boot { cookie } else { 0 };
        let freshness = own.numbers.take((from, is_hello), (boot, signal.nonce), now);
        if freshness == Freshness::Replayed {
            turn.push(Output::Note(Note::Replayed(from)));
        }
        freshness == Freshness::New
    }

    /// Handles the signals that waited until the sender's kernel reported its boot; those of an earlier
    /// boot are reported as replayed.
    pub(crate) fn deliver_waiting(&mut self, from: NodeId, boot: u64, turn: &mut Turn<'_>) {
        let waiting = self.gateway.as_mut().and_then(|own| own.numbers.waiting.remove(&from));
        let signals = waiting.map(|waiting| waiting.signals).unwrap_or_default();
        let now = turn.now;
        for (signal, _) in signals.into_iter().filter(|(_, since)| since + SEC > now) {
            if cookie(&signal) == Some(boot) {
                self.handle_signal(from, signal, turn);
            } else {
                turn.push(Output::Note(Note::Replayed(from)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Term,
        agent::test_bench::{BOOT, Bench, LEADER, ME, MEMBER},
    };

    const FROM: NodeId = 9;

    fn takes(numbers: &mut Numbers, boot: u64, said: u64, now: Micros) -> Freshness {
        numbers.take((FROM, false), (boot, said), now)
    }

    #[test]
    fn a_number_counts_once_in_its_boot() {
        let mut numbers = Numbers::default();
        assert_eq!(takes(&mut numbers, 1, 5_000_000, 0), Freshness::New);
        assert_eq!(takes(&mut numbers, 1, 5_000_000, 30 * MS), Freshness::Twice);
        assert_eq!(takes(&mut numbers, 1, 5_000_000, 2 * SEC), Freshness::Replayed);
        assert_eq!(takes(&mut numbers, 1, 6_000_000, 2 * SEC), Freshness::New);
        assert_eq!(takes(&mut numbers, 1, 5_000_000, 2 * SEC), Freshness::Replayed);
        // The sender has booted, and counts from a smaller number.
        assert_eq!(takes(&mut numbers, 2, 1_000, 3 * SEC), Freshness::New);
        assert_eq!(takes(&mut numbers, 2, 1_000, 5 * SEC), Freshness::Replayed);
    }

    #[test]
    fn parts_of_one_handover_come_in_any_order() {
        let mut numbers = Numbers::default();
        for part in [3, 7, 0, 5] {
            assert_eq!(takes(&mut numbers, 1, 1_000 + part, 0), Freshness::New, "part {part}");
        }
        assert_eq!(takes(&mut numbers, 1, 1_003, 10 * MS), Freshness::Twice);
        assert_eq!(takes(&mut numbers, 1, 1_003, 10 * SEC), Freshness::Replayed);
        assert_eq!(takes(&mut numbers, 1, 2_000, 10 * SEC), Freshness::New);
        assert_eq!(
            takes(&mut numbers, 1, 1_001, 10 * SEC),
            Freshness::Replayed,
            "it was never heard, and is old"
        );
    }

    #[test]
    fn few_signals_of_one_sender_wait() {
        let mut numbers = Numbers::default();
        let signal = |nonce| {
            let body = Body::Members { cookie: 1, age: 0, members: vec![FROM] };
            Signal { kind: Kind::Adopt, nonce, term: Term::NONE, sender: FROM, location: 7, body }
        };
        let asks = (0..100).filter(|nonce| numbers.wait(FROM, &signal(*nonce), 0)).count();
        assert_eq!((asks, numbers.waiting[&FROM].signals.len()), (1, Numbers::MOST));
        assert!(numbers.wait(FROM, &signal(100), Numbers::PAUSE));
    }
    fn handover(bench: &mut Bench, cookie: u64, number: u64) -> Vec<Output> {
        let body = Body::Members { cookie, age: 0, members: vec![LEADER, MEMBER] };
        bench.hear(LEADER, Kind::Handover, number, Term::from_bits(7 << 16), body)
    }

    fn replayed(out: &[Output]) -> usize {
        out.iter().filter(|output| **output == Output::Note(Note::Replayed(LEADER))).count()
    }

    #[test]
    fn a_sender_that_has_booted_counts_from_less_and_is_heard() {
        const NEXT: u64 = BOOT + 1;
        let mut bench = Bench::new();
        let prepare = |cookie| Body::Change { cookie, gateway: ME };
        let term = Term::from_bits(7 << 16);
        bench.hear(LEADER, Kind::Prepare, 1 << 40, term, prepare(BOOT));
        // It counts from a smaller number after a boot: its kernel is asked, and then it counts.
        let out = handover(&mut bench, NEXT, 1_000);
        let asked = out.iter().find_map(|output| match output {
            Output::Lan(LEADER, Signal { kind: Kind::Roll, nonce, .. }) => Some(*nonce),
            _ => None,
        });
        let Some(nonce) = asked else { panic!("its kernel is not asked: {out:?}") };
        assert!(bench.agent.lead().is_none());
        let body = Body::Word { cookie: NEXT, gateway: LEADER };
        bench.hear(LEADER, Kind::Present, nonce, term, body);
        assert!(bench.agent.lead().is_some_and(|lead| lead.has(MEMBER)));
    }

    fn hello(bench: &mut Bench, cookie: u64, number: u64) -> (bool, usize) {
        let (losses, gateway) = (vec![LEADER, 3 << 32], LEADER);
        let body = Body::Hello { is_fit: true, is_busy: true, leads: true, gateway, cookie, losses };
        let out = bench.hear(LEADER, Kind::Hello, number, Term::from_bits(7 << 16), body);
        (bench.agent.heard_fit(LEADER, bench.now) == Some(true), replayed(&out))
    }

    #[test]
    fn a_recorded_hello_makes_nobody_fit_and_renews_no_loss() {
        let mut bench = Bench::new();
        assert_eq!(hello(&mut bench, BOOT, 1_000), (true, 0));
        for _ in 0..300 {
            bench.turn(vec![]);
        }
        assert_eq!(hello(&mut bench, BOOT, 1_000), (false, 1), "it was said before");
        assert_eq!(hello(&mut bench, BOOT, 900), (false, 1), "it was said and not heard");
        assert!(!hello(&mut bench, BOOT - 1, 9_000).0, "in another boot");
        assert_eq!(hello(&mut bench, BOOT, 2_000), (true, 0));
        // It does not make signals that are sent several times look old.
        assert_eq!(replayed(&handover(&mut bench, BOOT, 1_500)), 0);
    }

    #[test]
    fn what_was_recorded_counts_in_no_other_boot_and_not_twice() {
        let mut bench = Bench::new();
        let out = handover(&mut bench, BOOT - 1, 1 << 40);
        assert_eq!((replayed(&out), bench.agent.lead().is_some()), (0, false), "its kernel is asked");
        let out = bench.answer_roll_call(LEADER, BOOT);
        assert_eq!((replayed(&out), bench.agent.lead().is_some()), (1, false), "of an earlier boot");
        assert_eq!(replayed(&handover(&mut bench, BOOT, 1_000)), 0);
        assert!(bench.agent.lead().is_some());
        for _ in 0..200 {
            bench.turn(vec![]);
        }
        assert_eq!(replayed(&handover(&mut bench, BOOT, 1_000)), 1);
        assert_eq!(replayed(&handover(&mut bench, BOOT, 900)), 1);
    }
}

use super::*;
use crate::{
    Input,
    agent::test_bench::{BOOT, Bench, FAR, LEADER, ME, MEMBER, THIRD},
};

/// A stand-by that its leader has asked to be ready, and the term in which it asks a far leader.
fn asks_a_far_leader() -> (Bench, Term) {
    let mut bench = Bench::new();
    let term = Term::from_bits(7 << 16);
    let out = bench.hear(LEADER, Kind::Prepare, 1 << 20, term, Body::Change { cookie: BOOT, gateway: ME });
    let Some(term) = asked_in(&out) else { panic!("no far leader is asked: {out:?}") };
    (bench, term)
}

/// The term in which a far leader is asked.
fn asked_in(out: &[Output]) -> Option<Term> {
    out.iter().find_map(|output| match output {
        Output::Tunnel(FAR, Signal { kind: Kind::Claim, term, .. }) => Some(*term),
        _ => None,
    })
}

#[test]
fn another_location_names_nobody_who_is_not_in_this_one() {
    let (mut bench, term) = asks_a_far_leader();
    for members in [vec![], vec![LEADER, MEMBER, 77]] {
        let body = Body::Claim { gateway: ME, shared: Shared::Stay, part: (0, 1), members };
        bench.hear(FAR, Kind::Moved, 5, term, body);
    }
    let Some(lead) = bench.agent.lead() else { panic!("nobody leads") };
    assert_eq!((lead.term(), lead.members().collect::<Vec<_>>()), (term, vec![LEADER, ME, MEMBER]));
}

#[test]
fn who_refuses_to_lead_never_says_that_it_does() {
    let (mut bench, term) = asks_a_far_leader();
    let moved = |members| Body::Claim { gateway: ME, shared: Shared::Stay, part: (0, 1), members };
    bench.hear(FAR, Kind::Moved, 5, term, moved(vec![]));
    // Somebody leads in a later term meanwhile.
    bench.agent.term = term.next(ME);
    for nonce in 6..8 {
        let out = bench.hear(FAR, Kind::Moved, nonce, term, moved(vec![LEADER, MEMBER]));
        let is_done = |output: &Output| {
            matches!(
                output,
                Output::Lan(LEADER, Signal { kind: Kind::Ready, body: Body::Change { gateway: ME, .. }, .. })
            )
        };
        assert!(!out.iter().any(is_done), "MOVED {nonce}: {out:?}");
    }
    assert!(bench.agent.lead().is_none());
}

/// The numbers of the PREPAREs among what is sent.
fn prepares(out: &[Output]) -> Vec<u64> {
    let number = |output: &Output| match output {
        Output::Lan(LEADER, Signal { kind: Kind::Prepare, nonce, .. }) => Some(*nonce),
        _ => None,
    };
    out.iter().filter_map(number).collect()
}

#[test]
fn a_ready_of_an_earlier_try_in_the_same_term_counts_nothing() {
    let mut bench = Bench::new();
    let (lead, term) = (Term::from_bits(8 << 16), Term::from_bits(9 << 16));
    let ready = |cookie| Body::Change { cookie, gateway: ME };
    bench.agent.own_location.cookies.insert(LEADER, BOOT);
    bench.turn(vec![Input::Word(lead, ME)]);
    let mut tries = Vec::new();
    for _ in 0..2 {
        // The first try ends without an answer: somebody holds it back.
        let mut out = (0..60).flat_map(|_| bench.turn(vec![])).collect::<Vec<_>>();
        assert!(!out.iter().any(|output| matches!(output, Output::Word(..))), "{out:?}");
        out.clear();
        let (now, mut later, mut random) = (bench.now, Vec::new(), || 1);
        let mut turn = Turn { now, random: &mut random, out: &mut out, later: &mut later };
        bench.agent.plan_change(LEADER, Cause::Cordoned, &mut turn);
        tries.extend(prepares(&out));
    }
    let [first, second] = tries[..] else { panic!("{tries:?}") };
    let mut diverts = |number, cookie| {
        let out = bench.hear(LEADER, Kind::Ready, number, term, ready(cookie));
        (out.contains(&Output::Word(term, LEADER)), out.contains(&Output::Note(Note::Replayed(LEADER))))
    };
    assert_eq!(diverts(first, BOOT), (false, true), "of an earlier try");
    assert_eq!(diverts(second, BOOT - 1), (false, true), "with the cookie of another boot");
    assert_eq!(diverts(second, BOOT), (true, false));
}

#[test]
fn ready_repeats_the_number_and_the_cookie_of_its_prepare() {
    let (mut bench, term) = asks_a_far_leader();
    let body = Body::Claim { gateway: ME, shared: Shared::Stay, part: (0, 1), members: vec![] };
    let out = bench.hear(FAR, Kind::Moved, 5, term, body);
    let is_answer = |output: &Output| match output {
        Output::Lan(LEADER, Signal { kind: Kind::Ready, nonce, body, .. }) => {
            (*nonce, body) == (1 << 20, &Body::Change { cookie: BOOT, gateway: LEADER })
        }
        _ => false,
    };
    assert!(out.iter().any(is_answer), "{out:?}");
}

/// Sends PREPARE until it is forgotten, with the number of tries before; returns whether READY came
/// although the far leader does not answer.
fn is_ready_alone(bench: &mut Bench, cause: Cause, tries: u64) -> bool {
    let term = Term::from_bits(7 << 16);
    let number = cause.number((tries + 1) << 20);
    let mut out = bench.hear(LEADER, Kind::Prepare, number, term, Body::Change { cookie: BOOT, gateway: ME });
    // If no far leader is waited for, no MOVED can make it lead.
    let is_ready = |output: &Output| matches!(output, Output::Lan(LEADER, Signal { kind: Kind::Ready, .. }));
    assert_eq!(bench.agent.lead().is_some(), out.iter().any(is_ready), "{cause:?}, try {tries}");
    for _ in 0..100 {
        out.extend(bench.turn(vec![]));
    }
    out.iter().any(is_ready)
}

#[test]
fn a_far_leader_that_never_answers_is_waited_for_three_times_by_who_goes() {
    for (cause, wanted) in [(Cause::Cordoned, Some(3)), (Cause::Order, Some(6)), (Cause::Returns, None)] {
        let mut bench = Bench::new();
        let ready = (0..8).find(|tries| is_ready_alone(&mut bench, cause, *tries));
        assert_eq!(ready, wanted, "{cause:?}");
    }
    // It answers the third time: it is waited for again.
    let mut bench = Bench::new();
    for tries in 0..2 {
        assert!(!is_ready_alone(&mut bench, Cause::Cordoned, tries));
    }
    let asked = Body::Change { cookie: BOOT, gateway: ME };
    let number = Cause::Cordoned.number(3 << 20);
    let out = bench.hear(LEADER, Kind::Prepare, number, Term::from_bits(7 << 16), asked);
    let Some(term) = asked_in(&out) else { panic!("no far leader is asked: {out:?}") };
    let body = Body::Claim { gateway: ME, shared: Shared::Stay, part: (0, 1), members: vec![] };
    bench.hear(FAR, Kind::Moved, 5, term, body);
    (0..100).for_each(|_| drop(bench.turn(vec![])));
    assert!(!is_ready_alone(&mut bench, Cause::Cordoned, 3));
}

#[test]
fn what_nobody_has_asked_is_no_answer_and_no_part_is_imagined() {
    let moved = |part, members| Body::Claim { gateway: ME, shared: Shared::Stay, part, members };
    let mut bench = Bench::new();
    for tries in 0..3 {
        assert!(!is_ready_alone(&mut bench, Cause::Cordoned, tries));
        // In the term of another one, and after its own try.
        bench.hear(FAR, Kind::Moved, 5, Term::from_bits(7 << 16), moved((0, 1), vec![]));
    }
    assert!(is_ready_alone(&mut bench, Cause::Cordoned, 3), "it is not there");
    // 65,535 parts, of which all but one say to be empty, would never have moved.
    let (mut bench, term) = asks_a_far_leader();
    bench.hear(FAR, Kind::Moved, 5, term, moved((0, 1), vec![]));
    for (part, leads) in [((0, u16::MAX), false), ((3, 2), false), ((0, 1), true)] {
        bench.hear(FAR, Kind::Moved, 6, term, moved(part, vec![LEADER, 77]));
        assert_eq!(bench.agent.lead().is_some(), leads, "{part:?}");
    }
}

/// Another stand-by, [`THIRD`], asks this one to be ready every half second; [`LEADER`] is the gateway that this
/// node uses.
#[test]
fn who_only_asks_keeps_no_gateway_busy() {
    let mut bench = Bench::with_third();
    let term = Term::from_bits(7 << 16);
    bench.present(THIRD, term, LEADER);
    let prepare = |bench: &mut Bench, from: NodeId| {
        let number = Cause::Cordoned.number(bench.now);
        bench.hear(from, Kind::Prepare, number, term, Body::Change { cookie: BOOT, gateway: ME })
    };
    let mut busy = 0;
    for half_second in 0..40 {
        let out = prepare(&mut bench, THIRD);
        if let Some(term) = asked_in(&out) {
            let body = Body::Claim { gateway: ME, shared: Shared::Stay, part: (0, 1), members: vec![] };
            bench.hear(FAR, Kind::Moved, half_second, term, body);
        }
        for _ in 0..48 {
            bench.turn(vec![]);
            let gateway = bench.agent.gateway.as_ref().expect("it is one");
            busy += u32::from(gateway.planned.is_busy());
        }
    }
    assert!((1..48 * 40 / 2).contains(&busy), "busy in {busy} of {} turns", 48 * 40);
    // The leader is answered at once, whichever node is being waited for, and nobody comes between.
    (0..300).for_each(|_| drop(bench.turn(vec![])));
    assert!(asked_in(&prepare(&mut bench, THIRD)).is_some());
    assert!(asked_in(&prepare(&mut bench, LEADER)).is_some(), "the leader has to wait");
    assert!(asked_in(&prepare(&mut bench, THIRD)).is_none(), "it displaces the leader");
}

#[test]
fn what_leaps_is_refused_and_changes_no_term() {
    let end = Term::from_bits(u64::MAX);
    let hello = Body::Hello {
        is_fit: true,
        is_busy: false,
        leads: true,
        gateway: LEADER,
        cookie: BOOT,
        losses: vec![],
    };
    let word = Body::Word { cookie: 9, gateway: LEADER };
    let members = || Body::Members { cookie: BOOT, age: 0, members: vec![LEADER] };
    let change = Body::Change { cookie: BOOT, gateway: ME };
    for (kind, body) in [
        (Kind::Hello, hello),
        (Kind::Present, word.clone()),
        (Kind::Follows, word),
        (Kind::Adopt, members()),
        (Kind::Handover, members()),
        (Kind::Prepare, change.clone()),
        (Kind::Ready, change),
    ] {
        for (term, leaps) in
            [(end, true), (Term::from_bits(1_032 << 16), true), (Term::from_bits(8 << 16), false)]
        {
            let mut bench = Bench::new();
            let out = bench.hear(LEADER, kind, 1 << 20, term, body.clone());
            let said = out.contains(&Output::Note(Note::Leaps(LEADER)));
            assert_eq!(said, leaps, "{kind:?} {term:?}");
            assert!(bench.agent.term.count() < 10, "{kind:?}");
        }
    }
}

#[test]
fn who_asks_to_be_led_has_been_heard_and_has_no_later_word() {
    let heard = Body::Word { cookie: BOOT, gateway: LEADER };
    for (present, wanted) in [(None, false), (Some(7), true), (Some(8), false)] {
        let mut bench = Bench::new();
        if let Some(present) = present {
            let nonce = bench.roll_call_of(MEMBER);
            bench.hear(MEMBER, Kind::Present, nonce, Term::from_bits(present << 16), heard.clone());
        }
        let body = Body::Members { cookie: BOOT, age: 500, members: vec![MEMBER] };
        bench.hear(MEMBER, Kind::Adopt, 1 << 20, Term::from_bits(7 << 16), body);
        assert_eq!(bench.agent.lead().is_some(), wanted, "{present:?}");
    }
}

#[test]
fn a_handover_of_an_earlier_term_is_no_news_after_a_restart() {
    for (term, wanted) in [(6, false), (7, true)] {
        let mut bench = Bench::new();
        let body = Body::Members { cookie: BOOT, age: 0, members: vec![LEADER, MEMBER] };
        bench.hear(LEADER, Kind::Handover, 1 << 20, Term::from_bits(term << 16), body);
        assert_eq!(bench.agent.lead().is_some(), wanted, "term {term}");
    }
}

#[test]
fn who_is_cordoned_does_not_wait_for_what_other_changes_have_failed_for() {
    let mut bench = Bench::new();
    bench.lead(&[ME, LEADER, MEMBER], Shared::Move);
    let gateway = bench.agent.gateway.as_mut().expect("it is one");
    (0..9).for_each(|_| gateway.planned.failed(Cause::Returns, bench.now));
    bench.agent.own_location.leaving.insert(ME, Cause::Cordoned);
    let (begins, term) = (bench.now, Term::from_bits(7 << 16));
    let until = |bench: &Bench| bench.now < begins + 20 * SEC;
    let mut tries = Vec::new();
    while until(&bench) {
        let out = bench.hear_hello(LEADER, term, ME);
        tries.extend((!prepares(&out).is_empty()).then_some((bench.now - begins) / SEC));
    }
    tries.dedup();
    assert_eq!(tries.first(), Some(&1), "as soon as the other one has been fit for a second");
    // Its own failures count: the pauses grow.
    assert!((2..=6).contains(&tries.len()) && tries.iter().all(|at| !(10..15).contains(at)), "{tries:?}");
}

#[test]
fn failures_long_ago_delay_nothing() {
    let mut planned = Planned::default();
    (0..9).for_each(|_| planned.failed(Cause::Returns, 0));
    let later = planned.next + Planned::LONGEST;
    planned.begin(None, later);
    planned.failed(Cause::Returns, later);
    assert_eq!(planned.next, later + Planned::PAUSE);
}

/// This gateway leads these and gives them to its leader, or with `to` to another one; no far leader
/// answers END. Returns what it does until the change has been taken back.
fn takes_back(bench: &mut Bench, to: NodeId) -> Vec<Output> {
    let (now, mut out, mut later, mut random) = (bench.now, Vec::new(), Vec::new(), || 1);
    let mut turn = Turn { now, random: &mut random, out: &mut out, later: &mut later };
    bench.agent.plan_change(to, Cause::Returns, &mut turn);
    let number = prepares(&out)[0];
    let term = bench.agent.term.next(to);
    let ready =
        Body::Change { cookie: bench.agent.own_location.cookie(to), gateway: bench.agent.own_location.me };
    out.extend(bench.hear(to, Kind::Ready, number, term, ready));
    let word = out.iter().rev().find_map(|output| match output {
        Output::Word(term, gateway) => Some(Input::Word(*term, *gateway)),
        _ => None,
    });
    out.extend(bench.turn(word.into_iter().collect()));
    for _ in 0..60 {
        out.extend(bench.turn(vec![]));
    }
    assert!(out.contains(&Output::Note(Note::TakesBack(to))), "{out:?}");
    out
}

#[test]
fn who_led_single_nodes_takes_back_those_alone() {
    let mut bench = Bench::new();
    bench.lead(&[MEMBER], Shared::MoveIfSilent);
    let out = takes_back(&mut bench, LEADER);
    let words: Vec<_> = out.iter().filter(|output| matches!(output, Output::Word(..))).collect();
    assert!(words.is_empty(), "it has used its leader all the time: {words:?}");
    let lead = bench.agent.lead().expect("it leads");
    assert_eq!((lead.members().collect::<Vec<_>>(), lead.shared()), (vec![MEMBER], Shared::MoveIfSilent));
}

#[test]
fn who_led_the_location_takes_all_of_it_back() {
    for (shared, wanted) in [(Shared::Move, Shared::Move), (Shared::Stay, Shared::Stay)] {
        let mut bench = Bench::new();
        bench.lead(&[ME, MEMBER], shared);
        takes_back(&mut bench, LEADER);
        let lead = bench.agent.lead().expect("it leads");
        assert_eq!((lead.members().collect::<Vec<_>>(), lead.shared()), (vec![ME, MEMBER], wanted));
    }
    // By Kilo's order it has led in no term.
    let mut bench = Bench::new();
    (bench.agent.word, bench.agent.term) = ((Term::NONE, ME), Term::NONE);
    takes_back(&mut bench, LEADER);
    assert_eq!(bench.agent.lead().map(Lead::shared), Some(Shared::Move));
}

#[test]
fn a_change_has_ended_when_the_taker_leads_this_node_before_its_ready_comes() {
    for (uses, is_given) in [(LEADER, true), (MEMBER, false)] {
        let mut bench = Bench::new();
        bench.lead(&[ME, MEMBER], Shared::Move);
        let (now, mut out, mut later, mut random) = (bench.now, Vec::new(), Vec::new(), || 1);
        let mut turn = Turn { now, random: &mut random, out: &mut out, later: &mut later };
        bench.agent.plan_change(LEADER, Cause::Cordoned, &mut turn);
        let next = bench.agent.term.next(uses);
        out = bench.turn(vec![Input::Word(next, uses)]);
        let gives = Output::Note(Note::Gives { to: LEADER, cause: Some(Cause::Cordoned) });
        assert_eq!(out.contains(&gives), is_given, "{out:?}");
        (0..60).for_each(|_| out.extend(bench.turn(vec![])));
        assert!(prepares(&out).is_empty(), "it asks nobody any more: {out:?}");
    }
}

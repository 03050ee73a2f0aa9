//! What only gateways may say: the same from a member, whose key is as good, changes nothing.

use crate::{
    Cause, Input, NodeId, Output, Signal, Term, Turn,
    agent::test_bench::{BOOT, Bench, LEADER, ME, MEMBER},
    gateway::Lead,
    signal::{Body, Kind},
};

const TERM: Term = Term::from_bits(7 << 16);
const LATER: Term = Term::from_bits(8 << 16);

/// What a signal may change: whom this gateway leads, whether it gives or takes leadership, who could lead, who has
/// lost leadership, the latest term, and what is sent in this turn and the next ones.
type State = (Vec<NodeId>, bool, Option<bool>, u32, Term, Vec<Output>);

/// What has become of this gateway after that signal from that node, or without a signal. It gives leadership to
/// that node if `gives`.
fn after(from: NodeId, gives: bool, signal: Option<(Kind, Term, Body<Vec<u64>>)>) -> State {
    let mut bench = Bench::new();
    bench.present(MEMBER, TERM, LEADER);
    if gives {
        bench.agent.own_location.cookies.insert(from, BOOT);
        bench.turn(vec![Input::Word(TERM, ME)]);
        let (now, mut out, mut later, mut random) = (bench.now, Vec::new(), Vec::new(), || 1);
        let mut turn = Turn { now, random: &mut random, out: &mut out, later: &mut later };
        bench.agent.plan_change(from, Cause::Cordoned, &mut turn);
    }
    let inputs = signal.map(|(kind, term, body)| {
        let signal = Signal { kind, nonce: 1 << 40, term, sender: from, location: 7, body };
        Input::Signal { from, signal }
    });
    let mut out = bench.turn(inputs.into_iter().collect());
    (0..5).for_each(|_| out.extend(bench.turn(vec![])));
    let gateway = bench.agent.gateway.as_ref().expect("it is one");
    let led = gateway.lead.iter().flat_map(Lead::members).collect();
    let lost = gateway.others.losses(&bench.agent.params, bench.now, LEADER);
    let fit = bench.agent.heard_fit(from, bench.now);
    (led, gateway.planned.is_busy(), fit, lost, bench.agent.term, out)
}

#[test]
fn what_a_member_says_in_the_place_of_a_gateway_changes_nothing() {
    let members = || Body::Members { cookie: BOOT, age: 0, members: vec![LEADER, MEMBER] };
    let change = || Body::Change { cookie: BOOT, gateway: ME };
    let hello = |from: NodeId| Body::Hello {
        is_fit: true,
        is_busy: true,
        leads: true,
        gateway: from,
        cookie: BOOT,
        losses: vec![LEADER, 3 << 32],
    };
    let ready =
        |from: NodeId| Body::Change { cookie: BOOT, gateway: if from == MEMBER { ME } else { LEADER - 1 } };
    for from in [LEADER, MEMBER] {
        for (kind, term, body, gives) in [
            (Kind::Handover, TERM, members(), false),
            (Kind::Prepare, TERM, change(), false),
            (Kind::Hello, LATER, hello(from), false),
            (Kind::Ready, LATER, ready(from), true),
        ] {
            let silent = after(from, gives, None);
            let heard = after(from, gives, Some((kind, term, body)));
            assert_eq!(heard == silent, from == MEMBER, "{kind:?} from {from}: {heard:?}");
        }
    }
}

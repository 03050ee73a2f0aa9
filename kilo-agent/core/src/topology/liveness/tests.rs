use super::*;
use crate::{
    topology::{CheckedIn, Nodes},
    wireguard::key::PublicKey,
};

fn checked_in(&(name, last_seen): &(&str, i64)) -> CheckedIn {
    let node = Node {
        name: name.to_owned(),
        endpoint: "192.0.2.1:51820".parse().ok(),
        key: Some(PublicKey([1; 32])),
        pod_cidrs: vec!["10.42.0.0/24".parse().unwrap()],
        ..Node::default()
    };
    CheckedIn { node, last_seen }
}

/// Names of those that take part.
fn ready<'a>(
    liveness: &mut Liveness,
    list: &[(&'a str, i64)],
    own: &str,
    now: Instant,
    unix_now: i64,
) -> Vec<&'a str> {
    let nodes: Nodes = list.iter().map(checked_in).collect();
    let ready = liveness.ready(nodes.iter(), own, now, unix_now);
    assert_eq!(ready.len(), list.len());
    list.iter().zip(ready).filter_map(|((name, _), ready)| ready.then_some(*name)).collect()
}

#[test]
fn a_node_lives_while_its_heartbeat_changes() {
    let (start, step) = (Instant::now(), Duration::from_secs(30));
    let mut liveness = Liveness::default();
    ready(&mut liveness, &[("a", 1000), ("b", 1000)], "a", start, 1000);
    let taking_part = ready(&mut liveness, &[("a", 1030), ("b", 1000)], "a", start + step, 1030);
    assert_eq!(taking_part, ["a", "b"]);
    let taking_part = ready(&mut liveness, &[("a", 1060), ("b", 1000)], "a", start + step * 2, 1060);
    assert_eq!(taking_part, ["a"]);
}

#[test]
fn a_node_that_somebody_gives_up_is_out_at_once_until_it_speaks() {
    let (start, second) = (Instant::now(), Duration::from_secs(1));
    let mut liveness = Liveness::default();
    ready(&mut liveness, &[("a", 1000), ("b", 1000)], "a", start, 1000);
    for (after, last_seen, wanted) in [
        (3, 0, &["a"][..]),
        (9, 0, &["a"]),
        // Its last value, which it writes again when it is alive.
        (10, 1000, &["a", "b"]),
    ] {
        let list = [("a", 1000), ("b", last_seen)];
        let taking_part = ready(&mut liveness, &list, "a", start + second * after, 1000);
        assert_eq!(taking_part, wanted, "{after} s");
    }
}

#[test]
fn a_clock_that_is_an_hour_wrong_changes_nothing() {
    let start = Instant::now();
    let mut liveness = Liveness::default();
    ready(&mut liveness, &[("a", 10_000), ("b", 10_000), ("c", 6_400)], "a", start, 10_000);
    let later = &[("a", 10_030), ("b", 10_030), ("c", 6_430)];
    let taking_part = ready(&mut liveness, later, "a", start + Duration::from_secs(30), 10_030);
    assert_eq!(taking_part, ["a", "b", "c"]);
}

#[test]
fn a_node_dead_for_long_is_not_taken_for_alive_at_start() {
    let mut liveness = Liveness::default();
    let taking_part =
        ready(&mut liveness, &[("a", 9_990), ("b", 9_995), ("c", 100)], "a", Instant::now(), 10_000);
    assert_eq!(taking_part, ["a", "b"]);
}

#[test]
fn whose_heartbeat_was_the_last_before_the_server_went_away_does_not_matter() {
    let (start, second) = (Instant::now(), Duration::from_secs(1));
    let mut liveness = Liveness::default();
    ready(&mut liveness, &[("a", 1000), ("b", 1000), ("c", 1000)], "a", start, 1000);
    let last = &[("a", 1035), ("b", 1000), ("c", 1010)];
    for after in 35..300 {
        let taking_part = ready(&mut liveness, last, "a", start + second * after, 1000 + i64::from(after));
        assert_eq!(taking_part, ["a", "b", "c"], "{after} s");
    }
    // It is back, and b may be trying again; a minute later it is dead.
    for (after, wanted) in
        [(300, &["a", "b", "c"][..]), (330, &["a", "b", "c"]), (344, &["a", "b", "c"]), (360, &["a", "c"])]
    {
        // Each renews its own every 30 s.
        let renewed = 1000 + after / 30 * 30;
        let list = [("a", renewed), ("b", 1000), ("c", renewed)];
        let now = start + second * u32::try_from(after).unwrap();
        assert_eq!(ready(&mut liveness, &list, "a", now, 1000 + after), wanted, "{after} s");
    }
}

#[test]
fn a_node_heard_first_after_an_outage_takes_nobody_for_dead() {
    let (start, second) = (Instant::now(), Duration::from_secs(1));
    // The agent's own node renews its heartbeat every 30 s, or rests.
    for own_interval in [30, 300] {
        let mut liveness = Liveness::default();
        let mut at = |after: u32, heartbeats: [i64; 4]| {
            let intervals = [own_interval, 30, 30, 300];
            let all = ["a", "dead", "leader", "member"].into_iter().zip(intervals).zip(heartbeats);
            let nodes: Nodes =
                all.map(|((name, interval), seen)| resting(name, Some(interval), seen)).collect();
            liveness.ready(nodes.iter(), "a", start + second * after, 1000 + i64::from(after))
        };
        at(0, [1000; 4]);
        at(30, [1030, 1030, 1030, 1000]);
        // The server is away from here on for 90 s. Attempts are 16 s apart by then, and one node has died.
        assert_eq!(at(120, [1030, 1030, 1030, 1000]), [true; 4]);
        assert_eq!(at(121, [1121, 1030, 1030, 1000]), [true; 4], "only the own heartbeat has come");
        assert_eq!(at(138, [1121, 1030, 1030, 1000]), [true; 4]);
        assert_eq!(at(139, [1121, 1030, 1139, 1000]), [true; 4]);
        assert_eq!(at(151, [1151, 1030, 1139, 1000]), [true; 4]);
        assert_eq!(at(169, [1151, 1030, 1169, 1000]), [true, false, true, true], "48 s after the first one");
    }
}

#[test]
fn a_server_that_comes_back_for_a_moment_proves_nobody_dead() {
    let (start, second) = (Instant::now(), Duration::from_secs(1));
    let mut liveness = Liveness::default();
    ready(&mut liveness, &[("a", 1000), ("b", 1000)], "a", start, 1000);
    // The own heartbeat comes back after 90 s, and no other for the next minute.
    for after in [90, 100, 135, 149] {
        let all = [("a", 1090), ("b", 1000)];
        let taking_part = ready(&mut liveness, &all, "a", start + second * after, 1000 + i64::from(after));
        assert_eq!(taking_part, ["a", "b"], "{after} s");
    }
}

fn resting(name: &str, heartbeat: Option<u16>, last_seen: i64) -> CheckedIn {
    let mut checked_in = checked_in(&(name, last_seen));
    checked_in.node.heartbeat = heartbeat;
    checked_in
}

#[test]
fn each_node_is_declared_dead_by_its_own_interval_and_the_own_heartbeat_is_asked_for() {
    let start = Instant::now();
    let mut liveness = Liveness::default();
    let mut at = |after: u64, own: i64, leader: i64, member: i64| {
        let nodes: Nodes =
            [resting("a", Some(300), own), resting("b", Some(30), leader), resting("c", Some(300), member)]
                .into_iter()
                .collect();
        let now = start + Duration::from_secs(after);
        let ready = liveness.ready(nodes.iter(), "a", now, 1000 + after as i64);
        (ready, liveness.suspects())
    };
    assert_eq!(at(0, 1000, 1000, 1000), (vec![true, true, true], false));
    assert_eq!(at(59, 1000, 1000, 1000), (vec![true, true, true], false));
    assert_eq!(at(61, 1000, 1000, 1000), (vec![true, true, true], true), "it may be the API server");
    assert_eq!(at(70, 1070, 1000, 1000), (vec![true, true, true], true), "it may just be back");
    assert_eq!(at(100, 1100, 1000, 1000), (vec![true, true, true], true));
    assert_eq!(at(130, 1130, 1000, 1000), (vec![true, false, true], false), "b promised one in 30 s");
    assert_eq!(at(430, 1430, 1000, 1000), (vec![true, false, true], false));
    assert_eq!(at(599, 1430, 1000, 1000), (vec![true, false, true], false));
    assert_eq!(at(601, 1430, 1000, 1000), (vec![true, false, true], true));
    for after in [621, 651] {
        assert_eq!(at(after, 1000 + after as i64, 1000, 1000), (vec![true, false, true], true), "{after} s");
    }
    assert_eq!(at(681, 1681, 1000, 1000), (vec![true, false, false], false), "c promised one in 300 s");
}

#[test]
fn a_leader_is_declared_dead_in_a_minute_where_another_one_renews_its_heartbeat() {
    let (start, second) = (Instant::now(), Duration::from_secs(1));
    let mut liveness = Liveness::default();
    let mut at = |after: u32, own: i64, other: i64| {
        let nodes: Nodes = [
            resting("a", Some(300), own),
            resting("leader", Some(30), 1000),
            resting("other", Some(30), other),
        ]
        .into_iter()
        .collect();
        let ready = liveness.ready(nodes.iter(), "a", start + second * after, 1000 + i64::from(after));
        (ready[1], liveness.suspects())
    };
    assert_eq!(at(0, 1000, 1000), (true, false));
    assert_eq!(at(30, 1000, 1030), (true, false));
    assert_eq!(at(61, 1000, 1060), (true, true), "the own heartbeat is asked for");
    assert_eq!(at(65, 1065, 1060), (false, false));
}

#[test]
fn nodes_of_long_intervals_do_not_prove_that_leaders_are_dead_when_the_server_was_away() {
    let at_start = |list: [CheckedIn; 4]| {
        let nodes: Nodes = list.into_iter().collect();
        Liveness::default().ready(nodes.iter(), "a", Instant::now(), 10_000)
    };
    let member = |name, seen| resting(name, Some(300), seen);
    // The API server was away for two minutes.
    let all = [member("a", 9_880), member("b", 9_880), member("c", 9_880), resting("d", Some(30), 9_880)];
    assert_eq!(at_start(all), [true, true, true, true]);
    // Others like it are heard, or another node has declared it dead.
    let leader = |name, seen| resting(name, Some(30), seen);
    let all = [leader("a", 9_990), member("b", 9_880), member("c", 1_000), leader("d", 9_880)];
    assert_eq!(at_start(all), [true, true, false, false], "most like them are heard");
    let all = [member("a", 9_880), member("b", 9_880), member("c", 1_000), leader("d", 0)];
    assert_eq!(at_start(all), [true, true, false, false]);
}

#[test]
fn an_agent_that_starts_knows_a_node_whose_clock_is_an_hour_behind_by_its_next_heartbeat() {
    let start = Instant::now();
    let mut liveness = Liveness::default();
    let mut at = |after: u64, member: i64| {
        let now = 10_000 + after as i64;
        let nodes: Nodes = [
            resting("a", Some(30), now),
            resting("b", Some(30), now),
            resting("c", Some(300), now),
            resting("d", Some(300), member),
        ]
        .into_iter()
        .collect();
        liveness.ready(nodes.iter(), "a", start + Duration::from_secs(after), now)[3]
    };
    // It may as well be dead for an hour. One whose clock is an hour ahead is known at once.
    assert!(!at(0, 6_400) && !at(299, 6_400));
    assert!(at(300, 6_700));
    let nodes: Nodes = [("a", 10_000), ("b", 10_000), ("c", 13_600)].iter().map(checked_in).collect();
    let at_once = Liveness::default().ready(nodes.iter(), "a", start, 10_000);
    assert_eq!(at_once, [true, true, true]);
}

#[test]
fn a_node_declared_alive_or_dead_by_another_is_so() {
    let (start, second) = (Instant::now(), Duration::from_secs(1));
    let mut liveness = Liveness::default();
    let mut at = |after: u32, declared_alive: Option<bool>| {
        let mut other = resting("b", Some(30), 1000);
        other.node.declared_alive = declared_alive;
        let own = resting("a", Some(30), 1000 + i64::from(after));
        let nodes: Nodes = [own, other].into_iter().collect();
        liveness.ready(nodes.iter(), "a", start + second * after, 1000 + i64::from(after))[1]
    };
    assert!(at(0, Some(true)) && at(3000, Some(true)), "its heartbeat is not passed on");
    assert!(!at(3001, Some(false)));
    assert!(at(3002, Some(true)));
}

#[test]
fn an_address_lost_before_a_restart_is_known_after_it() {
    let with = |address: &str| {
        let node = checked_in(&("b", 1000)).node;
        Arc::new(Node { internal_ip: address.parse().ok(), ..node })
    };
    let mut liveness = Liveness::remembering([with("10.1.0.2/24")]);
    let start = Instant::now();
    let all = ready(&mut liveness, &[("a", 1000), ("b", 1000)], "a", start, 1000);
    assert_eq!(all, ["a", "b"], "what is remembered decides about nobody");
    let held = |liveness: &mut Liveness| {
        liveness.former(start).filter_map(|node| node.internal_ip).collect::<Vec<_>>()
    };
    assert_eq!(held(&mut liveness), ["10.1.0.2/24".parse().unwrap()]);
    assert_eq!(liveness.without_address().count(), 1);
    // The address is back.
    let nodes: Nodes =
        [CheckedIn { node: (*with("10.1.0.2/24")).clone(), last_seen: 1001 }].into_iter().collect();
    liveness.ready(nodes.iter(), "a", start, 1001);
    assert_eq!(liveness.without_address().count(), 0);
}

/// Names of those that take part, for a machine that is not a node.
fn heard<'a>(liveness: &mut Liveness, list: &[(&'a str, i64)], now: Instant, unix_now: i64) -> Vec<&'a str> {
    let nodes: Nodes = list.iter().map(checked_in).collect();
    let ready = liveness.ready_as_heard(nodes.iter(), now, unix_now);
    list.iter().zip(ready).filter_map(|((name, _), ready)| ready.then_some(*name)).collect()
}

#[test]
fn a_machine_that_hears_nothing_of_the_cluster_takes_nobody_for_dead_whatever_the_nodes_clocks_say() {
    let (start, second) = (Instant::now(), Duration::from_secs(1));
    // The second one's clock is an hour ahead, the third one is dead.
    let all = [("a", 1_000), ("b", 4_600), ("dead", 900)];
    let mut liveness = Liveness::default();
    for after in [0, 59, 61, 600, 3_600, 36_000] {
        let taking_part = heard(&mut liveness, &all, start + second * after, 1_000 + i64::from(after));
        assert_eq!(taking_part, ["a", "b"], "{after} s");
    }
    // It is there again: one of them a few seconds later, or not at all.
    for (after, heartbeats, wanted) in [
        (36_001, [37_000, 4_600], &["a", "b"][..]),
        (36_031, [37_030, 4_600], &["a", "b"]),
        (36_061, [37_060, 4_600], &["a"]),
        (36_062, [37_060, 40_661], &["a", "b"]),
    ] {
        let [a, b] = heartbeats;
        let all = [("a", a), ("b", b), ("dead", 900)];
        let unix_now = 1_000 + i64::from(after);
        assert_eq!(heard(&mut liveness, &all, start + second * after, unix_now), wanted, "{after} s");
    }
}

#[test]
fn a_machine_whose_own_clock_is_wrong_knows_who_lives() {
    let (start, second) = (Instant::now(), Duration::from_secs(1));
    for unix_now in [10, 1_000, 100_000] {
        let mut liveness = Liveness::default();
        let all = [("a", 1_000), ("b", 990)];
        assert_eq!(heard(&mut liveness, &all, start, unix_now), ["a", "b"]);
        for (after, wanted) in [(35, &["a", "b"][..]), (70, &["a"])] {
            let later = [("a", 1_000 + i64::from(after)), ("b", 990)];
            let unix_now = unix_now + i64::from(after);
            assert_eq!(heard(&mut liveness, &later, start + second * after, unix_now), wanted, "{unix_now}");
        }
    }
}

#[test]
fn a_machine_takes_nobody_for_dead_after_an_outage_of_less_than_a_minute() {
    let (start, second) = (Instant::now(), Duration::from_secs(1));
    let mut liveness = Liveness::default();
    // a is heard again after 42 s, and b, which was heard first, two seconds later.
    for (after, a, b) in [(0, 1_000, 1_000), (28, 1_028, 1_000), (70, 1_070, 1_000), (72, 1_070, 1_072)] {
        let all = [("a", a), ("b", b)];
        let taking_part = heard(&mut liveness, &all, start + second * after, 1_000 + i64::from(after));
        assert_eq!(taking_part, ["a", "b"], "{after} s");
    }
}

#[test]
fn a_machine_whose_own_clock_is_ahead_takes_nobody_for_alive_who_was_dead_before() {
    for unix_now in [1_000, 1_060, 100_000] {
        let all = [("a", 1_000), ("b", 990), ("dead", 900)];
        let mut liveness = Liveness::default();
        assert_eq!(heard(&mut liveness, &all, Instant::now(), unix_now), ["a", "b"], "{unix_now}");
    }
}

#[test]
fn while_the_own_heartbeat_does_not_come_back_nobody_is_given_up() {
    let start = Instant::now();
    let all = &[("a", 1000), ("b", 1000)];
    let mut liveness = Liveness::default();
    ready(&mut liveness, all, "a", start, 1000);
    let taking_part = ready(&mut liveness, all, "a", start + Duration::from_secs(3600), 4600);
    assert_eq!(taking_part, ["a", "b"]);
}

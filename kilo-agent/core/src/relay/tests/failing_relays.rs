//! Relays that forget, refuse, die, or hear one end only.

use super::*;

#[test]
fn a_relay_that_has_forgotten_a_pair_gets_it_again() {
    let mut world = World::new(5);
    world.connects(seconds(20));
    world.run(seconds(10));
    let relay = world.relay(X);
    world.servers.insert(relay, Server::default());
    world.begin_to_measure();
    world.run(seconds(20));
    assert_eq!((world.relay(X), world.relay(Y)), (relay, relay));
    assert!(world.gap <= seconds(2), "{:?}", world.gap);
}

#[test]
fn where_the_only_relay_dies_a_direct_path_is_looked_for_at_once() {
    let mut world = World::new(11);
    world.servers.retain(|relay, _| *relay == Z[0]);
    world.connects(seconds(20));
    // A direct path was tried a moment ago, and will not be for a minute.
    world.run(DIRECT_EVERY + seconds(4));
    world.broken.insert(Z[0], Broken::Dead);
    world.direct = true;
    world.begin_to_measure();
    world.run(seconds(20));
    assert!(world.gap <= seconds(6), "{:?}", world.gap);
}

#[test]
fn a_relay_that_does_not_hear_one_end_is_left_although_the_other_end_still_sends_by_it() {
    for seed in 0..20 {
        let mut world = World::new(seed);
        world.connects(seconds(20));
        world.run(seconds(10));
        let first = world.relay(X);
        (world.deaf, world.is_long) = (vec![(first, X)], true);
        world.begin_to_measure();
        world.run(seconds(20));
        assert!(world.gap <= seconds(3), "{seed}: {:?}", world.gap);
    }
}

#[test]
fn a_direct_path_that_did_not_last_does_not_replace_a_relay_that_is_away_for_a_moment() {
    let mut world = World::new(13);
    world.servers.retain(|relay, _| *relay == Z[0]);
    world.connects(seconds(20));
    (world.direct, world.deceives) = (true, true);
    world.run(seconds(300));
    assert_eq!(world.relay(X), Z[0]);
    world.broken.insert(Z[0], Broken::Dead);
    world.begin_to_measure();
    world.run(seconds(2));
    world.broken.clear();
    world.run(seconds(10));
    assert!(world.gap <= seconds(3), "{:?}", world.gap);
}

#[test]
fn a_relay_is_not_insisted_on_after_the_one_before_has_died() {
    let mut world = World::new(12);
    world.connects(seconds(20));
    world.run(seconds(10));
    let first = world.relay(X);
    world.broken.insert(first, Broken::Dead);
    for _ in 0..50 {
        world.run(STEP);
        assert!([X, Y].iter().all(|end| !world.clients[end].insists(world.now)));
    }
    assert!(world.relay(X) != first && world.relay(Y) != first);
}

#[test]
fn the_only_relay_may_forget_everything() {
    let mut world = World::new(5);
    world.servers.retain(|relay, _| *relay == Z[0]);
    world.connects(seconds(20));
    world.run(seconds(10));
    world.servers.insert(Z[0], Server::default());
    world.begin_to_measure();
    world.run(seconds(20));
    assert_eq!((world.relay(X), world.relay(Y)), (Z[0], Z[0]));
    assert!(world.gap <= seconds(3), "{:?}", world.gap);
}

#[test]
fn a_relay_goes_on_with_a_pair_one_end_of_which_it_has_not_seen_for_long() {
    let mut world = World::new(5);
    world.connects(seconds(20));
    world.run(seconds(10));
    let relay = world.relay(X);
    world.apart = vec![Y];
    world.begin_to_measure();
    world.run(seconds(45));
    assert_eq!((world.relay(X), world.relay(Y)), (relay, relay));
    assert!(world.gap <= seconds(1), "{:?}", world.gap);
    let at = |world: &World, end, other| world.clients[&end].endpoints().get(&other).copied();
    assert_eq!(at(&world, X, Y).map(|(at, relayed)| (at.ip(), relayed)), Some((ip(relay), true)));
    // A relay that has forgotten the pair refuses: another one is used.
    world.servers.insert(relay, Server::default());
    world.apart = Vec::new();
    world.broken.insert(relay, Broken::Refuses);
    world.run(seconds(10));
    assert_ne!((world.relay(X), world.relay(Y)), (relay, relay));
    assert!(world.gap <= seconds(2), "{:?}", world.gap);
}

#[test]
fn the_endpoint_stays_where_the_only_relay_refuses() {
    let mut world = World::new(5);
    world.servers.retain(|relay, _| *relay == Z[0]);
    world.connects(seconds(20));
    world.run(seconds(10));
    let before = world.clients[&X].endpoints();
    world.servers.insert(Z[0], Server::default());
    world.broken.insert(Z[0], Broken::Refuses);
    world.run(seconds(5));
    assert_eq!(world.clients[&X].endpoints(), before);
}

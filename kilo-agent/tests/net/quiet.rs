//! A real `kg` does nothing when nothing has happened but heartbeats.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::cluster;
use crate::netns;

use std::{
    thread::sleep,
    time::{Duration, Instant},
};

fn reconciles() -> u64 {
    cluster::metrics().get("kilo_reconciles_total").copied().unwrap_or(0)
}

/// Waits until there was no reconcile for a while.
fn settled() -> u64 {
    let deadline = Instant::now() + Duration::from_secs(60);
    let (mut count, mut since) = (reconciles(), Instant::now());
    while count == 0 || since.elapsed() < Duration::from_millis(1500) {
        assert!(Instant::now() < deadline, "reconciles do not end");
        sleep(Duration::from_millis(100));
        let now = reconciles();
        if now != count {
            (count, since) = (now, Instant::now());
        }
    }
    count
}

fn nodes() -> Option<u64> {
    cluster::metrics().get("kilo_nodes").copied()
}

#[test]
fn a_heartbeat_of_another_node_causes_no_reconcile_and_a_change_of_it_does() {
    netns::isolated("a_heartbeat_of_another_node_causes_no_reconcile_and_a_change_of_it_does", || async {
        cluster::prepare();
        cluster::write_node(12, "b", "10.42.12.0/24", false);
        let _agent = netns::Agent(cluster::kg(&[]).spawn().unwrap());
        let before = settled();
        assert_eq!(nodes(), Some(2));
        for _ in 0..2 {
            // A second later it is another sign.
            sleep(Duration::from_millis(1100));
            cluster::write_node(12, "b", "10.42.12.0/24", false);
        }
        sleep(Duration::from_millis(500));
        // The own heartbeat may have been due.
        assert!(reconciles() <= before + 1, "{} after {before}", reconciles());
        cluster::write_node(12, "b", "10.42.112.0/24", false);
        let deadline = Instant::now() + Duration::from_secs(20);
        while !netns::sh("ip route show proto 107").contains("10.42.112.0/24") {
            assert!(Instant::now() < deadline, "the change is not followed");
            sleep(Duration::from_millis(50));
        }
    });
}

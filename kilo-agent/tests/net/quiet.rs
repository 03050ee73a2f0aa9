//! A real `kg` does nothing when only heartbeats arrive.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::cluster;
use crate::netns;
use crate::wait::{self, stays, time_passes, until};

use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);

fn reconciles() -> u64 {
    cluster::metrics().get("kilo_reconciles_total").copied().unwrap_or(0)
}

/// Waits until no reconcile has happened for a while.
fn settled() -> u64 {
    until("the first reconcile", LIMIT, || reconciles() > 0);
    wait::settled("the count of reconciles", LIMIT, Duration::from_millis(1500), reconciles)
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
            // Heartbeats differ only after a second.
            time_passes(Duration::from_millis(1100), "heartbeats count seconds");
            cluster::write_node(12, "b", "10.42.12.0/24", false);
        }
        // Its own heartbeat may have been due.
        stays("no reconcile but for the own heartbeat", Duration::from_millis(500), || {
            reconciles() <= before + 1
        });
        cluster::write_node(12, "b", "10.42.112.0/24", false);
        until("the change is followed", Duration::from_secs(20), || {
            netns::sh("ip route show proto 107").contains("10.42.112.0/24")
        });
    });
}

#[test]
fn forwarding_that_cannot_be_turned_on_is_left_to_the_clock() {
    netns::isolated("forwarding_that_cannot_be_turned_on_is_left_to_the_clock", || async {
        cluster::prepare();
        // As in an unprivileged container.
        netns::sh(
            "sysctl -qw net.ipv4.ip_forward=0; mount --bind /proc/sys /proc/sys; mount -o remount,bind,ro /proc/sys",
        );
        let _agent = netns::Agent(cluster::kg(&[]).spawn().unwrap());
        let before = settled();
        // It checks its hooks every three seconds. Its own heartbeat may have been due.
        stays("no reconcile but for the own heartbeat", Duration::from_secs(7), || {
            reconciles() <= before + 1
        });
        netns::sh("mount -o remount,bind,rw /proc/sys; sysctl -qw net.ipv4.ip_forward=1");
        let on = settled();
        stays("none while it is on, and is seen to be", Duration::from_secs(4), || reconciles() <= on + 1);
        // Twice: the second time before anybody has checked whether the first one is over.
        for _ in 0..2 {
            netns::sh("sysctl -qw net.ipv4.ip_forward=0");
            until("what was on is turned on again", Duration::from_secs(8), || {
                netns::sh("cat /proc/sys/net/ipv4/ip_forward").trim() == "1"
            });
        }
    });
}

//! Leaving a host to Kilo's own agent: what takes the programs' place, and that programs stay
//! where nothing can.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::{
    cluster,
    netns::{Agent, isolated, sh},
};

use std::{
    path::Path,
    time::{Duration, Instant},
};

use kilo_agent::agent;
use kilo_core::settings::Masquerade;

const LIMIT: Duration = Duration::from_secs(20);
const PINS: &str = "find /sys/fs/bpf/kilo 2>/dev/null | sort || true";
/// Stands in the way of the host's nft within the test's mounts, and takes no script.
const REFUSE: &str = "n=$(readlink -f $(command -v nft)); cp $n /run/nft-itself; \
    printf '#!/bin/sh\\ncase $1 in -f) echo refused >&2; exit 1;; esac\\nexec /run/nft-itself \"$@\"\\n' > /run/nft; \
    chmod 755 /run/nft; mount --bind /run/nft $n";

/// What an agent leaves that was told to stop: a node of its location, and another location
/// whose leader has a private address.
fn left_by_an_agent() {
    cluster::prepare();
    cluster::write_node(2, "a", "10.42.2.0/24", false);
    cluster::write_node(3, "b", "10.42.3.0/24", true);
    let mut command = cluster::kg(&[]);
    command.args(["--cni=true", "--cni-path=/run/absent.conflist"]);
    let mut agent = Agent(command.spawn().unwrap());
    let started = Instant::now();
    while cluster::metrics().get("kilo_nodes") != Some(&3) || sh("ip route show 10.42.3.0/24").is_empty() {
        assert!(started.elapsed() < LIMIT, "the agent is not ready within {LIMIT:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
    std::thread::sleep(Duration::from_millis(500));
    sh(&format!("kill -TERM {}", agent.0.id()));
    assert!(agent.0.wait().unwrap().success());
}

async fn hand_over() -> agent::Outcome {
    agent::hand_over(Path::new("/sys/fs/bpf"), "kilo0", Masquerade::Ebpf).await
}

#[test]
fn programs_stay_when_nft_refuses() {
    isolated("programs_stay_when_nft_refuses", || async {
        left_by_an_agent();
        let pins = sh(PINS);
        assert!(pins.contains("/links/"), "{pins}");
        sh(REFUSE);
        let outcome = hand_over().await;
        assert_eq!(sh(PINS), pins, "nobody else keeps in what must not leave");
        let said = outcome.stays.join("; ");
        assert!(said.contains("programs, since no rules could take their place: nft: refused"), "{said}");
        sh("umount $(readlink -f $(command -v nft))");
        let outcome = hand_over().await;
        assert!(outcome.stays.is_empty(), "{outcome:?}");
        assert_eq!(sh(PINS), "");
    });
}

#[test]
fn rules_keep_in_what_the_programs_kept_in() {
    isolated("rules_keep_in_what_the_programs_kept_in", || async {
        left_by_an_agent();
        assert!(hand_over().await.stays.is_empty());
        let never = sh("nft list set inet kilo never_ip");
        for (what, addresses) in [
            ("pods of all three nodes, side by side", "10.42.1.0-10.42.3.255"),
            ("private addresses of a node of this LAN and of the other leader", "10.1.0.2/31"),
        ] {
            assert!(never.contains(addresses), "{what}: {never}");
        }
    });
}

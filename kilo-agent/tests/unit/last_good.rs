//! A start from the topology on disk: what is logged, and which nodes count as alive.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::{
    fs,
    time::{Duration, Instant},
};

use kilo_agent::backend::last_good::{FILE, LastGood, load};
use kilo_core::{
    topology::{CheckedIn, Liveness, Node, Nodes, Peer},
    wireguard::key::{PublicKey, SecretKey},
};

fn node(name: &str) -> Node {
    Node {
        name: name.to_owned(),
        endpoint: "192.0.2.1:51820".parse().ok(),
        key: Some(PublicKey([1; 32])),
        pod_cidrs: vec!["10.42.0.0/24".parse().unwrap()],
        ..Node::default()
    }
}

#[test]
fn why_a_file_is_ignored_quotes_no_key() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(FILE);
    let secret = SecretKey::from_bytes([7; 32]);
    let peer = Peer {
        name: "laptop".to_owned(),
        allowed_ips: vec!["10.5.0.1/32".parse().unwrap()],
        endpoint: None,
        persistent_keepalive: 25,
        preshared_key: Some(secret),
        public_key: PublicKey([9; 32]),
        follows: false,
    };
    LastGood::new(&path, "a").keep([node("a")].iter(), [].iter(), [peer].iter(), Instant::now()).unwrap();
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.contains(&secret.reveal()));
    // Corrupts the file: the key takes the place of a number.
    let damaged = text.replace("Keepalive\":25", &format!("Keepalive\":{:?}", secret.reveal()));
    assert_ne!(damaged, text);
    fs::write(&path, damaged).unwrap();
    let reason = load(&path, "a").unwrap_err().to_string();
    assert!(!reason.contains(&secret.reveal()), "{reason}");
}

#[test]
fn nodes_from_disk_stay_until_the_server_lists_them_and_the_long_dead_stay_out_then() {
    let (start, hour) = (Instant::now(), Duration::from_secs(3600));
    let mut liveness = Liveness::default();
    let of = |list: &[(&str, i64)]| -> Nodes {
        list.iter().map(|(name, last_seen)| CheckedIn { node: node(name), last_seen: *last_seen }).collect()
    };
    // Heartbeats are not kept.
    let from_disk = of(&[("b", 0), ("c", 0), ("own", 0)]);
    for at in [start, start + hour] {
        assert_eq!(liveness.ready(from_disk.iter(), "own", at, 900_000), [true; 3]);
    }
    let listed = of(&[("a", 1000), ("b", 903_590), ("c", 903_595), ("own", 903_599)]);
    let ready = liveness.ready(listed.iter(), "own", start + hour, 903_600);
    assert_eq!(ready, [false, true, true, true], "a was dead before, and would be the first to lead");
}

//! A real `kg` goes through 200 reconfigurations and leaves nothing behind, neither on the host nor in the
//! process. `KILO_ROUNDS=n` makes it longer.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::cluster;
use crate::netns;
use crate::wait::{settled, until};

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    time::{Duration, Instant},
};

use cluster::{differences, host, metrics, remove, write_node, write_peer};
use netns::{Agent, isolated};

/// Rounds of ten reconfigurations.
const ROUNDS: usize = 20;
/// Time limit for one change on a slow machine.
const LIMIT: Duration = Duration::from_secs(20);

fn start() -> Agent {
    cluster::prepare();
    Agent(cluster::kg(&[]).spawn().unwrap())
}

/// Resources of the process: number of open files of each kind, and of threads.
fn resources(agent: &Agent) -> BTreeMap<String, usize> {
    let process = Path::new("/proc").join(agent.0.id().to_string());
    let mut held =
        BTreeMap::from([("thread".to_owned(), fs::read_dir(process.join("task")).unwrap().count())]);
    for entry in fs::read_dir(process.join("fd")).unwrap().flatten() {
        let Ok(target) = fs::read_link(entry.path()) else { continue };
        // Sockets and pipes have different numbers.
        let name = target.to_string_lossy().into_owned();
        let kind = name.strip_prefix("anon_inode:").or(name.split_once(":[").map(|(kind, _)| kind));
        *held.entry(kind.unwrap_or(&name).to_owned()).or_default() += 1;
    }
    held
}

/// Anonymous resident memory in KiB.
fn anonymous_memory(agent: &Agent) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", agent.0.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// Makes a change, and waits until the agent has written something for it and has the expected gauges.
fn reconfigure(what: &str, [leads, nodes, peers]: [u64; 3], change: impl FnOnce()) {
    let before = metrics().get("kilo_writes_total").copied();
    change();
    until(what, LIMIT, || {
        let now = metrics();
        let gauges = ["kilo_leader", "kilo_nodes", "kilo_peers"].map(|name| now.get(name).copied());
        if gauges == [leads, nodes, peers].map(Some) && now.get("kilo_writes_total").copied() > before {
            Ok(())
        } else {
            Err(format!("leads, nodes, peers are {gauges:?}"))
        }
    });
}

/// Ten reconfigurations, of which the last restores the first state.
fn round() {
    reconfigure("a node joins the location", [1, 2, 0], || write_node(2, "a", "10.42.2.0/24", false));
    reconfigure("it becomes the leader", [0, 2, 0], || write_node(2, "a", "10.42.2.0/24", true));
    reconfigure("a location joins", [0, 3, 0], || write_node(3, "b", "10.42.3.0/24", false));
    reconfigure("a peer joins", [0, 3, 1], || write_peer("10.5.0.1/32"));
    reconfigure("we lead again", [1, 3, 1], || write_node(2, "a", "10.42.2.0/24", false));
    reconfigure("the peer changes", [1, 3, 1], || write_peer("10.5.0.2/32"));
    reconfigure("pods elsewhere have other addresses", [1, 3, 1], || {
        write_node(3, "b", "10.42.7.0/24", false);
    });
    reconfigure("the other node leaves", [1, 2, 1], || remove("n2"));
    reconfigure("the peer leaves", [1, 2, 0], || remove("laptop"));
    reconfigure("the location leaves", [1, 1, 0], || remove("n3"));
}

#[test]
fn two_hundred_reconfigurations_leave_nothing_over() {
    isolated("two_hundred_reconfigurations_leave_nothing_over", || async {
        let agent = start();
        reconfigure("the agent starts", [1, 1, 0], || {});
        // One round creates everything that is created once and kept (threads, connections, hooks).
        round();
        cluster::settle();
        let quiet = Duration::from_secs(1);
        let (before, held) =
            settled("what the agent has made and holds", LIMIT, quiet, || (host(), resources(&agent)));
        let memory = anonymous_memory(&agent);
        let rounds = std::env::var("KILO_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(ROUNDS);
        let started = Instant::now();
        for _ in 0..rounds {
            round();
        }
        println!("{} reconfigurations in {:?}", 10 * rounds, started.elapsed());
        // Idle threads and the last connection take a while to go.
        let more = || {
            let now = resources(&agent);
            now.into_iter()
                .filter(|(kind, count)| *count > held.get(kind).copied().unwrap_or(0))
                .collect::<Vec<_>>()
        };
        until("nothing is left over", LIMIT, || {
            let (left, more) = (differences(&before, &host()), more());
            if left.is_empty() && more.is_empty() {
                Ok(())
            } else {
                Err(format!("{left}{more:?} beyond {held:?}"))
            }
        });
        println!("own memory {memory} KiB before, {} KiB after", anonymous_memory(&agent));
        assert!(
            anonymous_memory(&agent) < memory + 8 * 1024,
            "memory grows: {memory} KiB, then {} KiB",
            anonymous_memory(&agent)
        );
        let errors: Vec<_> =
            metrics().into_iter().filter(|(name, _)| name.starts_with("kilo_errors")).collect();
        assert_eq!(errors, [], "errors on the way");
    });
}

//! A real `kg` is killed in the middle of applying a change: at a system call of the kernel's BPF, netlink
//! or WireGuard interfaces, by `strace`'s fault injection. The next start finds everything half done, and
//! completes it. `KILO_KILLS=all` tries more calls.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::cluster;
use crate::netns;
use crate::wait::until;

use std::{collections::BTreeMap, fs, process::Child, time::Duration};

use cluster::{differences, host, kg, remove, write_node, write_peer};
use netns::{isolated, sh};

/// Time limit for one step on a slow machine.
const LIMIT: Duration = Duration::from_secs(30);

/// Switches between two very different clusters.
fn change_to(second: bool) {
    // Otherwise removed nodes that the last agent knew would be kept for a minute.
    fs::remove_file("/var/lib/kilo/last-good.json").unwrap_or_default();
    if second {
        write_node(2, "a", "10.42.2.0/24", true);
        write_node(3, "b", "10.42.7.0/24", false);
        write_node(4, "b", "10.42.4.0/24", false);
        remove("laptop");
    } else {
        write_node(2, "a", "10.42.2.0/24", false);
        write_node(3, "b", "10.42.3.0/24", false);
        fs::remove_file("/run/cluster/n4.yaml").unwrap_or_default();
        write_peer("10.5.0.1/32");
    }
}

/// Expected gauges: leads, nodes, peers.
const fn gauges(second: bool) -> [u64; 3] {
    if second { [0, 4, 0] } else { [1, 3, 1] }
}

fn has_done(second: bool) -> bool {
    let [leads, nodes, peers] = gauges(second);
    cluster::has_done(&[("kilo_leader", leads), ("kilo_nodes", nodes), ("kilo_peers", peers)])
}

/// Runs an agent until it has done everything, then stops it; returns the host's state.
fn complete(second: bool, expected: Option<&BTreeMap<String, String>>) -> BTreeMap<String, String> {
    let mut agent = kg(&[]).spawn().unwrap();
    until("the agent has done everything", LIMIT, || has_done(second));
    if let Some(expected) = expected {
        until("the host is as expected", LIMIT, || match differences(expected, &without_lock(host())) {
            differing if differing.is_empty() => Ok(()),
            differing => Err(differing),
        });
    }
    cluster::settle();
    sh(&format!("kill -TERM {}", agent.id()));
    agent.wait().unwrap();
    host()
}

/// The host's state without the lock that a running agent holds.
fn without_lock(mut host: BTreeMap<String, String>) -> BTreeMap<String, String> {
    if let Some(files) = host.get_mut("files") {
        *files = files.split_inclusive('\n').filter(|file| !file.ends_with(".lock\n")).collect();
    }
    host
}

/// Starts an agent that is killed at the `number`-th `call` of a thread, or stopped once it has nothing
/// more to do; true when it was killed.
fn killed_at(call: &str, number: usize, second: bool) -> bool {
    let inject = format!("inject={call}:signal=SIGKILL:when={number}");
    let trace = format!("trace={call}");
    let before =
        ["strace", "-f", "-qqq", "--detach-on=execve", "-o", "/dev/null", "-e", &trace, "-e", &inject];
    let mut strace = kg(&before).spawn().unwrap();
    let killed = until("the agent is killed or has done everything", LIMIT, || {
        let killed = strace.try_wait().unwrap().is_some();
        (killed || has_done(second)).then_some(killed)
    });
    if !killed {
        end(&mut strace);
    }
    killed
}

/// Stops what strace runs, and strace with it.
fn end(strace: &mut Child) {
    let id = strace.id();
    let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap_or_default();
    for child in children.split_whitespace() {
        sh(&format!("kill -KILL {child} 2>/dev/null || true"));
    }
    strace.wait().unwrap();
}

#[test]
fn an_agent_killed_anywhere_in_an_apply_leaves_what_the_next_completes() {
    isolated("an_agent_killed_anywhere_in_an_apply_leaves_what_the_next_completes", || async {
        cluster::prepare();
        let expected = [false, true, false, true].map(|second| {
            change_to(second);
            complete(second, None)
        });
        assert_eq!(differences(&expected[0], &expected[2]), "", "the states are repeatable");
        assert_eq!(differences(&expected[1], &expected[3]), "");
        let mut second = true;
        let mut kills = 0;
        let every: usize = if std::env::var("KILO_KILLS").is_ok_and(|text| text == "all") { 1 } else { 3 };
        for (call, numbers) in [
            ("bpf", &[9, 1, 4, 40, 16, 25, 130, 60, 90, 240, 180][..]),
            ("sendto", &[6, 1, 3, 15, 10, 22, 30]),
            ("sendmsg", &[3, 1, 6]),
            ("connect", &[1, 3]),
        ] {
            for &number in numbers.iter().step_by(every) {
                second = !second;
                change_to(second);
                let killed = killed_at(call, number, second);
                kills += usize::from(killed);
                let found = complete(second, Some(&expected[usize::from(second)]));
                assert_eq!(
                    differences(&expected[usize::from(second)], &found),
                    "",
                    "killed at {call} {number}"
                );
            }
        }
        println!("killed {kills} times");
        assert!(kills >= 5, "only {kills} kills: the calls are others now");
        sh("ip link del kilo0 2>/dev/null || true");
    });
}

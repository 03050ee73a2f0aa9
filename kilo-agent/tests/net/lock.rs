//! One agent per node: the second one waits or says why it does not. Neither an unprivileged process nor a
//! killed agent keeps the next one from starting, and beside Kilo's own agent ours waits without touching
//! anything.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::cluster;
use crate::netns;
use crate::wait::until;

use std::{
    os::{
        linux::net::SocketAddrExt as _,
        unix::net::{SocketAddr, UnixListener},
    },
    path::Path,
    process::Output,
    time::Duration,
};

use cluster::{kg, metrics};
use kilo_host::dataplane::{BPFFS, pin_directory};
use netns::{Agent, isolated, sh, succeeds};

const LIMIT: Duration = Duration::from_secs(30);

/// An agent that has applied everything once.
fn running() -> Agent {
    let agent = Agent(kg(&[]).spawn().unwrap());
    until("the agent has put everything right", LIMIT, || cluster::has_done(&[("kilo_nodes", 1)]));
    agent
}

fn refused(before: &[&str], flags: &[&str]) -> String {
    let Output { status, stdout, stderr } =
        kg(&[&["timeout", "20"], before].concat()).args(flags).output().unwrap();
    let said = [stdout, stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
    assert_eq!(status.code(), Some(1), "{said}");
    said
}

#[test]
fn a_user_process_cannot_take_the_lock() {
    isolated("a_user_process_cannot_take_the_lock", || async {
        cluster::prepare();
        // Every process may bind a name in the abstract socket namespace.
        let name = SocketAddr::from_abstract_name("kilo-agent/kilo0").unwrap();
        let _held = UnixListener::bind_addr(&name).unwrap();
        let _agent = running();
        let user = "setpriv --reuid 65534 --regid 65534 --clear-groups";
        let files = sh("ls /var/lib/kilo/*.lock");
        let [file] = files.lines().collect::<Vec<_>>()[..] else { panic!("one lock: {files}") };
        assert_eq!(sh(&format!("stat -c '%a %u' {file}")).trim(), "600 0");
        for path in [file, "/sys/fs/bpf/kilo"] {
            assert!(!succeeds(&format!("{user} flock --nonblock --shared {path} true")), "{path}");
        }
    });
}

/// An agent that logs to this file.
fn logging(flags: &[&str], log: &str) -> Agent {
    let log = std::fs::File::create(log).unwrap();
    Agent(kg(&[]).args(["--log-level=info"]).args(flags).stdout(log).spawn().unwrap())
}

fn says(log: &str, words: &str) {
    until(words, LIMIT, || std::fs::read_to_string(log).unwrap().contains(words));
}

fn stop(agent: &mut Agent) {
    sh(&format!("kill -TERM {}", agent.0.id()));
    assert!(agent.0.wait().unwrap().success());
}

#[test]
fn a_second_agent_waits_until_the_first_has_stopped() {
    isolated("a_second_agent_waits_until_the_first_has_stopped", || async {
        cluster::prepare();
        let (mut first, log) = (running(), "/run/second.log");
        let mut stopped_early = logging(&[], log);
        says(log, "waiting until it stops");
        stop(&mut stopped_early);
        let _second = logging(&[], log);
        says(log, "waiting until it stops");
        assert_eq!(std::fs::read_to_string(log).unwrap().matches("already runs").count(), 1);
        stop(&mut first);
        says(log, "the other agent has stopped");
        until("the second one has put everything right", LIMIT, || cluster::has_done(&[("kilo_nodes", 1)]));
    });
}

#[test]
fn beside_kilos_agent_nothing_is_touched_until_it_gives_up_its_address() {
    isolated("beside_kilos_agent_nothing_is_touched_until_it_gives_up_its_address", || async {
        cluster::prepare();
        let state = "ip -o link | cut -d' ' -f2; ip route show table all; find /sys/fs/bpf; tc filter show dev eth0 egress; \
                     cat /run/cluster/*";
        let before = sh(state);
        let kilo = std::net::TcpListener::bind("[::]:1107").unwrap();
        let log = "/run/takeover.log";
        let mut unneeded = logging(&["--take-over-from-kilo"], log);
        says(log, "prepared; taking this node over when Kilo's own agent stops");
        stop(&mut unneeded);
        assert_eq!(sh(state), before);
        let _agent = logging(&["--take-over-from-kilo"], log);
        says(log, "prepared; taking this node over when Kilo's own agent stops");
        assert_eq!(sh(state), before);
        drop(kilo);
        says(log, "taking this node over");
        until("the agent has put everything right", LIMIT, || cluster::has_done(&[("kilo_nodes", 1)]));
        assert_ne!(sh(state), before);
    });
}

#[test]
fn a_second_agent_is_refused_with_any_state_directory_and_any_interface() {
    isolated("a_second_agent_is_refused_with_any_state_directory_and_any_interface", || async {
        cluster::prepare();
        let _agent = running();
        // The thread that loads the last programs would restore what is removed meanwhile.
        let directory = pin_directory(Path::new(BPFFS)).display().to_string();
        let all = format!("ls {directory}/programs/*/l3_egress*");
        until("all programs are pinned", LIMIT, || succeeds(&all));
        // An agent that may not run does not restore what is missing.
        sh(&format!("rm {directory}/monitor; rm -r {directory}/programs/*"));
        let list = format!("ls -iR {directory}");
        let pins = sh(&list);
        let said = refused(&[], &["--interface=kilo1", "--listen=:1108"]);
        assert_eq!(sh(&list), pins);
        assert!(said.contains("/sys/fs/bpf/kilo: another agent already runs"), "{said}");
        let elsewhere = "mount -t tmpfs state /var/lib/kilo && exec \"$@\"";
        let said = refused(&["unshare", "--mount", "sh", "-c", elsewhere, "sh"], &["--listen=:1108"]);
        assert!(said.contains("/sys/fs/bpf/kilo: another agent already runs"), "{said}");
        let _kilo = std::net::TcpListener::bind("[::]:1108").unwrap();
        let flags = ["--listen=:1108", "--take-over-from-kilo"];
        let said = refused(&["unshare", "--mount", "sh", "-c", elsewhere, "sh"], &flags);
        assert!(said.contains("another agent already runs"), "known before Kilo's agent has gone: {said}");
        assert_eq!(metrics().get("kilo_nodes"), Some(&1), "the first one goes on");
    });
}

#[test]
fn after_a_kill_the_next_agent_starts_and_a_stop_leaves_no_file() {
    isolated("after_a_kill_the_next_agent_starts_and_a_stop_leaves_no_file", || async {
        cluster::prepare();
        let mut killed = kg(&[]).spawn().unwrap();
        until("the agent has put everything right", LIMIT, || cluster::has_done(&[("kilo_nodes", 1)]));
        killed.kill().unwrap();
        killed.wait().unwrap();
        assert!(succeeds("ls /var/lib/kilo/*.lock"), "a killed agent leaves the file");
        // The userspace WireGuard process, where there is one, keeps running.
        let mut agent = running();
        sh(&format!("kill -TERM {}", agent.0.id()));
        assert!(agent.0.wait().unwrap().success());
        assert!(!succeeds("ls /var/lib/kilo/*.lock"));
    });
}

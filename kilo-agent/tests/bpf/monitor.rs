//! Drops as a listener receives them.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::bpf;
use crate::wait::until;

use std::{
    io::{BufRead as _, BufReader},
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use bpf::{
    IFINDEX, MEMBER, MEMBER_POD, OUTSIDE, OWN_POD, SELF, leader_tables,
    packet::{ethernet, ipv4, run, steered, udp},
};
use kilo_common::{
    drop_reasons::DropReason,
    event::{DropEvent, Hook},
};
use kilo_host::dataplane::{Dataplane, decode, monitor::Monitor};

const STRANGER: [u8; 4] = [10, 1, 0, 99];

fn open() -> Option<(bpf::BpfFs, Dataplane)> {
    let fs = bpf::bpffs()?;
    let mut dataplane = Dataplane::open(fs.path(), false).unwrap();
    dataplane.write(&leader_tables()).unwrap();
    Some((fs, dataplane))
}

fn drop_one(dataplane: &mut Dataplane) {
    let frame = steered(STRANGER, SELF, &udp(MEMBER_POD, OWN_POD, (1000, 2000), b"payload"));
    assert_eq!(run(dataplane, "lan_ingress", &frame).counted, ["unknown_sender"]);
}

fn events(monitor: &mut Monitor) -> Vec<DropEvent> {
    std::iter::from_fn(|| monitor.next_event()).collect()
}

#[test]
fn a_drop_is_reported_with_reason_program_interface_and_headers() {
    let Some((fs, mut dataplane)) = open() else { return };
    let mut monitor = Monitor::open(fs.path(), &[], 1).unwrap();
    drop_one(&mut dataplane);
    let long = steered(MEMBER, SELF, &ipv4([8, 8, 8, 8], OWN_POD, 6, 9, &[7; 1000]));
    run(&mut dataplane, "lan_ingress", &long);
    let gre = ethernet(&ipv4(OWN_POD, OUTSIDE, 47, 64, &[0; 20]));
    run(&mut dataplane, "uplink_egress", &gre);
    let seen = events(&mut monitor);
    let what: Vec<_> =
        seen.iter().map(|event| (event.reason().unwrap(), event.hook().unwrap(), event.ifindex)).collect();
    assert_eq!(
        what,
        [
            (DropReason::UnknownSender, Hook::LanIngress, IFINDEX),
            (DropReason::ForeignSource, Hook::LanIngress, IFINDEX),
            (DropReason::NatUnsupported, Hook::UplinkEgress, IFINDEX),
        ]
    );
    assert_eq!((seen[1].length as usize, seen[1].bytes()), (long.len(), &long[..128]));
    assert_eq!((seen[2].length as usize, seen[2].bytes()), (gre.len(), &gre[..]));
    let texts: Vec<String> = decode::headers(seen[0].bytes(), seen[0].length as usize, true)
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(texts, ["10.1.0.99 > 10.1.0.11 ipip ttl 64", "10.42.2.2:1000 > 10.42.1.2:2000 udp ttl 64"]);
}

/// Renews the lease meanwhile: on a slow machine, many drops take longer.
fn drop_many(dataplane: &mut Dataplane, monitor: &mut Monitor, count: usize) {
    for index in 0..count {
        if index % 100 == 0 {
            monitor.renew().unwrap();
        }
        drop_one(dataplane);
    }
}

#[test]
fn only_the_reasons_asked_for_are_reported() {
    let Some((fs, mut dataplane)) = open() else { return };
    let mut monitor = Monitor::open(fs.path(), &[DropReason::ForeignSource], 1).unwrap();
    drop_one(&mut dataplane);
    let frame = steered(MEMBER, SELF, &udp([8, 8, 8, 8], OWN_POD, (1, 2), b""));
    run(&mut dataplane, "lan_ingress", &frame);
    let seen = events(&mut monitor);
    assert_eq!(seen.len(), 1);
    assert_eq!(seen[0].reason(), Some(DropReason::ForeignSource));
}

#[test]
fn a_sample_holds_about_one_drop_in_so_many() {
    let Some((fs, mut dataplane)) = open() else { return };
    let mut monitor = Monitor::open(fs.path(), &[], 10).unwrap();
    drop_many(&mut dataplane, &mut monitor, 1000);
    // 100 expected, standard deviation 9.5.
    let seen = events(&mut monitor).len();
    assert!((50..150).contains(&seen), "{seen}");
}

#[test]
fn a_listener_that_does_not_read_holds_up_nobody_and_the_counters_have_the_whole_number() {
    let Some((fs, mut dataplane)) = open() else { return };
    let mut monitor = Monitor::open(fs.path(), &[], 1).unwrap();
    drop_many(&mut dataplane, &mut monitor, 2500);
    let seen = events(&mut monitor).len();
    assert!((1500..2500).contains(&seen), "the ring is full at {seen}");
    assert_eq!(dataplane.counters().unwrap().read().unwrap().drops["unknown_sender"], 2500);
    drop_one(&mut dataplane);
    assert_eq!(events(&mut monitor).len(), 1, "there is room again");
}

#[test]
fn there_is_one_listener_and_after_it_has_gone_another() {
    let Some((fs, mut dataplane)) = open() else { return };
    let mut first = Monitor::open(fs.path(), &[], 1).unwrap();
    let refused = Monitor::open(fs.path(), &[], 1).err().unwrap();
    assert_eq!(refused.label(), "monitored");
    drop_one(&mut dataplane);
    assert_eq!(events(&mut first).len(), 1, "who was refused does not end the other");
    drop(first);
    // Without a listener nothing is kept for the next one, which could not know when it happened.
    drop_one(&mut dataplane);
    let mut killed = Monitor::open(fs.path(), &[], 1).unwrap();
    assert!(events(&mut killed).is_empty());
    std::mem::forget(killed);
    let took = until("a listener that was killed blocks nobody", Duration::from_secs(6), || {
        Monitor::open(fs.path(), &[], 1).is_ok()
    });
    assert!(took > Duration::from_secs(2), "a listener that lives keeps its place");
}

#[test]
fn an_agent_that_restarts_does_not_end_the_listening() {
    let Some((fs, dataplane)) = open() else { return };
    let mut monitor = Monitor::open(fs.path(), &[], 1).unwrap();
    drop(dataplane);
    let mut next = Dataplane::open(fs.path(), false).unwrap();
    // An emulated kernel verifies the programs for longer than the lease.
    monitor.renew().unwrap();
    drop_one(&mut next);
    assert_eq!(events(&mut monitor).len(), 1);
}

struct Kgctl(Child);

impl Drop for Kgctl {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn kgctl(bpffs: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kgctl"));
    command
        .arg("monitor")
        .args(arguments)
        .arg("--bpffs")
        .arg(bpffs)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Drops packets until the listener, which takes a while to start, has seen enough.
fn listen(arguments: &[&str], lines: usize) -> Option<(Vec<String>, String)> {
    let (fs, mut dataplane) = open()?;
    let mut child = Kgctl(kgctl(fs.path(), arguments).spawn().unwrap());
    let stdout = BufReader::new(child.0.stdout.take().unwrap());
    let reader =
        std::thread::spawn(move || stdout.lines().take(lines).map(Result::unwrap).collect::<Vec<_>>());
    until("the listener has seen enough", Duration::from_secs(20), || {
        drop_one(&mut dataplane);
        reader.is_finished()
    });
    let shown = reader.join().unwrap();
    child.0.wait().unwrap();
    let mut summary = String::new();
    std::io::Read::read_to_string(child.0.stderr.as_mut().unwrap(), &mut summary).unwrap();
    Some((shown, summary))
}

#[test]
fn kgctl_monitor_shows_a_line_each_drop() {
    let Some((lines, summary)) = listen(&["--count", "2", "--reason", "unknown_sender"], 2) else { return };
    println!("{}\n{summary}", lines[0]);
    assert!(
        lines[0].contains(" unknown_sender   lan_ingress lo 10.1.0.99 > 10.1.0.11 ipip ttl 64 | "),
        "{lines:?}"
    );
    assert!(lines[0].ends_with("10.42.2.2:1000 > 10.42.1.2:2000 udp ttl 64 length 69"), "{lines:?}");
    assert!(summary.contains("kgctl: 2 of "), "{summary}");
}

#[test]
fn kgctl_monitor_shows_an_object_each_drop() {
    let Some((lines, _)) = listen(&["--count", "1", "-o", "json"], 1) else { return };
    let shown: serde_json::Value = serde_json::from_str(&lines[0]).unwrap();
    assert_eq!(shown["reason"], "unknown_sender");
    assert_eq!(shown["interface"], "lo");
    assert_eq!(shown["headers"][1]["dst"], "10.42.1.2");
    assert_eq!(shown["headers"][1]["dst_port"], 2000);
    assert_eq!(shown["bytes"].as_str().unwrap().len(), 138);
}

#[test]
fn kgctl_monitor_says_what_is_wrong() {
    let absent = kgctl(Path::new("/nowhere"), &[]).output().unwrap();
    assert!(!absent.status.success());
    let text = String::from_utf8_lossy(&absent.stderr).into_owned();
    assert!(text.contains("kg does not run on this host"), "{text}");
    let unknown = kgctl(Path::new("/nowhere"), &["--reason", "weather"]).output().unwrap();
    let text = String::from_utf8_lossy(&unknown.stderr).into_owned();
    assert!(text.contains("unknown_sender"), "the possible reasons are named: {text}");
}

//! `kgctl trace` reads the pinned maps and predicts what the programs do.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::bpf;

use std::{path::Path, process::Command};

use bpf::{
    IFINDEX, MEMBER, MEMBER_HOP, MEMBER_POD, OUTSIDE, OWN_POD, REMOTE_POD, SELF, leader_tables,
    member_tables, node,
    packet::{run, steered, udp},
    random::Random,
};
use kilo_common::{
    lead::{Term, word},
    maps::{HOP_ACTING, NODE_GATEWAY, NodeValue, PrefixValue},
};
use kilo_core::plan::{
    Hop, Tables,
    model::Packet,
    sized_packet::SizedPacket,
    trace::{Host, Origin, Question, Trace, trace},
};
use kilo_host::dataplane::{Dataplane, read_tables};

fn open(tables: &Tables) -> Option<(bpf::BpfFs, Dataplane)> {
    let fs = bpf::bpffs()?;
    let mut dataplane = Dataplane::open(fs.path(), false).unwrap();
    dataplane.write(tables).unwrap();
    Some((fs, dataplane))
}

#[test]
fn the_pinned_maps_are_read_back_as_the_tables_they_were_written_from() {
    let Some((fs, mut dataplane)) = open(&leader_tables()) else { return };
    assert_eq!(read_tables(fs.path()).unwrap(), leader_tables());
    let mut random = Random::new(7);
    for _ in 0..50 {
        let tables = random.tables();
        dataplane.write(&tables).unwrap();
        assert_eq!(read_tables(fs.path()).unwrap(), tables);
    }
}

fn ask(tables: &Tables, src: [u8; 4], dst: [u8; 4], origin: Origin, route: Option<u32>) -> Trace {
    let packet = Packet { src: src.into(), dst: dst.into() };
    let question =
        Question { sized: SizedPacket { packet, ttl: 64, length: 36 }, protocol: 17, ports: None, origin };
    trace(tables, &question, &Host { route, name: &|ifindex| format!("if{ifindex}") })
}

#[test]
fn a_trace_ends_as_the_packet_does() {
    // Sources that BPF_PROG_TEST_RUN reads as IPv4 where there is no Ethernet header.
    let pod = [8, 0, 1, 2];
    let addresses = [SELF, MEMBER, OWN_POD, MEMBER_POD, REMOTE_POD, OUTSIDE, [224, 0, 0, 1], [8, 0, 1, 9]];
    for mut tables in [leader_tables(), member_tables()] {
        tables.config.flags &= !kilo_common::maps::CONFIG_MASQUERADE;
        let own = tables.prefix[&"10.42.1.0/24".parse().unwrap()];
        tables.prefix.insert("8.0.1.0/24".parse().unwrap(), own);
        let Some((fs, mut dataplane)) = open(&tables) else { return };
        let tables = read_tables(fs.path()).unwrap();
        let ends = |trace: &Trace| trace.reason.unwrap_or(trace.outcome);
        for dst in addresses {
            if !tables.is_local(dst.into()) {
                let ran = run(&mut dataplane, "kilo_egress", &udp(pod, dst, (1, 2), b"payload!"));
                let asked = ask(&tables, pod, dst, Origin::Host, Some(tables.config.kilo_ifindex));
                assert_eq!(ran.counted, [ends(&asked)], "{asked:#?}");
            }
            let ran = run(&mut dataplane, "kilo_ingress", &udp(pod, dst, (1, 2), b"payload!"));
            let asked = ask(&tables, pod, dst, Origin::Kilo, None);
            assert_eq!(ran.counted, [ends(&asked)], "{asked:#?}");
            for src in addresses {
                for sender in [MEMBER, [10, 1, 0, 99]] {
                    let frame = steered(sender, SELF, &udp(src, dst, (1, 2), b"payload!"));
                    let ran = run(&mut dataplane, "lan_ingress", &frame);
                    let asked = ask(&tables, src, dst, Origin::Lan(Some(sender.into())), None);
                    assert_eq!(ran.counted, [ends(&asked)], "{asked:#?}");
                }
            }
        }
    }
}

fn kgctl(bpffs: &Path, arguments: &[&str]) -> (bool, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kgctl"));
    let output = command.arg("trace").args(arguments).arg("--bpffs").arg(bpffs).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8(text).unwrap())
}

#[test]
fn kgctl_trace_names_prefix_hop_masquerade_and_outcome() {
    let Some((fs, _dataplane)) = open(&member_tables()) else { return };
    let (ok, text) = kgctl(fs.path(), &["--src", "10.42.1.2", "--dst", "10.42.4.2", "--size", "1400"]);
    println!("{text}");
    assert!(ok);
    assert_eq!(
        text,
        "10.42.1.2 > 10.42.4.2 tcp 40000 > 80, 1400 bytes, ttl 64, from a pod of this node\n  \
         route         10.42.4.0/24 leads to lo\n  \
         masquerade    no: source in 10.42.1.0/24, yes; destination in 10.42.4.0/24, never\n  \
         prefix        10.42.4.2 is in 10.42.4.0/24 -> hop 2 (outside the location, by the leader): \
         10.1.0.12 (ipip from 10.1.0.11 over lo, MTU 1480 bytes)\n  \
         kilo_egress   steer: 1400 bytes, ttl 64\n\
         => steer: Sent to 10.1.0.12, which takes it from there.\n"
    );
}

#[test]
fn kgctl_trace_names_the_gateway_that_the_node_uses_now() {
    let mut tables = member_tables();
    let other = "10.1.0.13".parse().unwrap();
    let Some(Hop::Node { tunnel, ifindex, mtu, local, .. }) = tables.hop.get(&MEMBER_HOP).copied() else {
        panic!("the leader is a node");
    };
    tables.hop.insert(MEMBER_HOP + 1, Hop::Node { tunnel, ifindex, mtu, local, remote: other });
    tables.node.insert(other, NodeValue { hop: MEMBER_HOP + 1, ..node(NODE_GATEWAY) });
    // One location's prefix follows claims; the other one goes through Kilo's leader.
    let follows = tables.prefix[&"10.42.4.0/24".parse().unwrap()];
    tables.prefix.insert("10.42.4.0/24".parse().unwrap(), PrefixValue { hop: HOP_ACTING, ..follows });
    let follow = |hop: u32| word(Term::from_bits(1 << 16), u16::try_from(hop).unwrap());
    for (hop, gateway) in [(MEMBER_HOP, "10.1.0.12"), (MEMBER_HOP + 1, "10.1.0.13")] {
        tables.lead = [word(Term::NONE, u16::try_from(MEMBER_HOP).unwrap()), follow(hop)];
        let Some((fs, _dataplane)) = open(&tables) else { return };
        for (to, gateway) in [("10.42.4.2", gateway), ("10.42.9.2", "10.1.0.12")] {
            let (ok, text) = kgctl(fs.path(), &["--src", "10.42.1.2", "--dst", to]);
            assert!(ok && text.contains(&format!("=> steer: Sent to {gateway}, ")), "{text}");
            assert!(text.contains(&format!("): {gateway} (ipip from 10.1.0.11 over lo")), "{text}");
        }
    }
}

#[test]
fn kgctl_trace_says_why_a_packet_is_dropped_and_what_to_do() {
    let Some((fs, _dataplane)) = open(&member_tables()) else { return };
    let big = ["--src", "10.42.1.2", "--dst", "10.42.4.2", "--size", "1481"];
    let (_, text) = kgctl(fs.path(), &big);
    assert!(text.contains("=> stack: Larger than the route's MTU"), "{text}");
    let odd = ["--src", "10.42.1.2", "--dst", "224.0.0.5", "--from", "kilo"];
    let (_, text) = kgctl(fs.path(), &odd);
    assert!(text.contains("=> decrypt"), "{text}");
    let spoofed = ["--src", "198.51.100.9", "--dst", "10.42.1.2", "--from", "lan", "--sender", "10.1.0.12"];
    let (_, text) = kgctl(fs.path(), &spoofed);
    assert!(text.contains("=> drop, foreign_source: ") && text.contains("spoofed address"), "{text}");
    let from_lan = ["--src", "10.42.4.2", "--dst", "10.42.9.2", "--from", "lan", "-o", "json"];
    let (_, text) = kgctl(fs.path(), &from_lan);
    let answer: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&answer["outcome"], &answer["reason"]), (&"drop".into(), &"not_for_us".into()));
    assert!(answer["remedy"].as_str().is_some_and(|text| !text.is_empty()));
    assert_eq!(answer["steps"][1]["finding"], "encapsulated by 10.1.0.12: a gateway");
}

#[test]
fn kgctl_trace_knows_masqueraded_packets() {
    let Some((fs, _dataplane)) = open(&leader_tables()) else { return };
    // Loopback stands for the uplink.
    let tables = leader_tables();
    let asked = ask(&tables, OWN_POD, OUTSIDE, Origin::Pod, Some(IFINDEX + 1));
    assert_eq!(asked.outcome, "stack");
    let mut tables = leader_tables();
    tables.config.kilo_ifindex = IFINDEX + 1;
    let asked = ask(&tables, OWN_POD, OUTSIDE, Origin::Pod, Some(IFINDEX));
    let step = asked.steps.iter().find(|step| step.at == "masquerade").unwrap();
    assert!(step.finding.starts_with("yes, 10.42.1.2 becomes 192.0.2.11"), "{step:?}");
    let (_, text) = kgctl(fs.path(), &["--src", "10.42.1.2", "--dst", "10.42.1.3"]);
    assert!(text.contains("stays on this node"), "{text}");
}

#[test]
fn kgctl_trace_says_what_is_wrong_with_the_question() {
    let (ok, text) = kgctl(Path::new("/nowhere"), &["--src", "10.42.1.2", "--dst", "10.42.4.2"]);
    assert!(!ok && text.contains("kg does not run on this host"), "{text}");
    let Some((fs, _dataplane)) = open(&leader_tables()) else { return };
    let (ok, text) = kgctl(fs.path(), &["--src", "10.42.1.2", "--dst", "fd00::1"]);
    assert!(!ok && text.contains("different families"), "{text}");
}

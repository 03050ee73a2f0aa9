//! The programs and the plain-Rust model agree: on random packets and tables,
//! and on packets that once told them apart.
//!
//! `KILO_SEED=n` repeats a run, `random` draws another, `KILO_PACKETS=n` changes its length,
//! `KILO_BLESS=1` writes tests/corpus/agreement.txt anew: one packet for each
//! different outcome.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::support;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    net::IpAddr,
    path::PathBuf,
    process::Command,
    time::{Duration, Instant},
};

use aya::programs::{SchedClassifier, TestRun as _, TestRunOptions};
use kilo_common::{
    counters::{Action, DropReason},
    encap::{IPIP_OVERHEAD, IPIP_OVERHEAD_V6, VXLAN_OVERHEAD, VXLAN_OVERHEAD_V6, segments_room},
    maps::{CONFIG_LEADER, CONFIG_PLAIN},
    nat::{
        flow,
        transport::{self, Part},
    },
    packet::{ETHERNET_LEN, Ipv4, protocol},
};
use kilo_core::{
    plan::{Hop, Tables},
    settings::Tunnel,
    topology::prefixes::longest,
};
use kilo_host::dataplane::{CounterReader, Dataplane};
use nix::sched::{CloneFlags, unshare};
use support::{
    IFINDEX, MEMBER_POD, REMOTE_POD,
    oracle::{Bytes, Input, Wanted, expected_outcome, mac},
    packet::{PASS, REDIRECT, checksums_hold, ethernet, udp},
    random::{OTHER_UPLINKS, Random},
    seed::seed,
};

const PROGRAMS: [&str; 7] = [
    "lan_ingress",
    "kilo_egress",
    "kilo_ingress",
    "uplink_egress",
    "tunnel_ingress",
    "l3_ingress",
    "l3_egress",
];
const PACKETS: usize = 100_000;
const LONGEST: Duration = Duration::from_mins(1);
/// Packets between two looks at the counters.
const BATCH: usize = 200;

/// Bytes of `struct __sk_buff`, and where its fields are (include/uapi/linux/bpf.h).
const SK_BUFF: usize = 192;
const IFINDEX_AT: usize = 40;
const GSO_SIZE: usize = 176;
const PRIORITY: usize = 32;

struct Bench {
    _fs: support::BpfFs,
    dataplane: Dataplane,
    counters: CounterReader,
    out: Vec<u8>,
}

/// Gives this thread a network namespace with more uplinks than loopback.
fn add_uplinks() {
    unshare(CloneFlags::CLONE_NEWNET).unwrap();
    for ifindex in OTHER_UPLINKS {
        let mac = mac(ifindex).map(|byte| format!("{byte:02x}")).join(":");
        let made = Command::new("ip")
            .args(["link", "add", &format!("up{ifindex}"), "index", &ifindex.to_string(), "address", &mac])
            .args(["type", "veth", "peer", "name", &format!("peer{ifindex}")])
            .status();
        assert!(made.unwrap().success());
    }
}

type Counts = BTreeMap<&'static str, u64>;

impl Bench {
    fn new() -> Option<Self> {
        let fs = support::bpffs()?;
        add_uplinks();
        let dataplane = Dataplane::open(fs.path(), false).unwrap();
        let counters = dataplane.counters().unwrap();
        Some(Self { _fs: fs, dataplane, counters, out: vec![0; 4096] })
    }

    fn counts(&self) -> Counts {
        let counters = self.counters.read().unwrap();
        counters.actions.into_iter().chain(counters.drops).collect()
    }

    /// Verdict, packet, and priority afterwards.
    fn run(&mut self, program: &str, input: &Input) -> (i32, &[u8], u32) {
        let mut context = [0; SK_BUFF];
        if input.ifindex != IFINDEX {
            context[IFINDEX_AT..IFINDEX_AT + 4].copy_from_slice(&input.ifindex.to_ne_bytes());
        }
        context[GSO_SIZE..GSO_SIZE + 4].copy_from_slice(&input.gso.to_ne_bytes());
        context[PRIORITY..PRIORITY + 4].copy_from_slice(&input.priority.to_ne_bytes());
        let mut left = [0; SK_BUFF];
        let classifier: &SchedClassifier =
            self.dataplane.bpf_mut().program(program).unwrap().try_into().unwrap();
        let mut options = TestRunOptions::new();
        options.data_in = Some(&input.frame);
        options.ctx_in = Some(&context);
        options.ctx_out = Some(&mut left);
        options.data_out = Some(&mut self.out);
        let result = classifier.test_run(options).unwrap();
        let length = usize::try_from(result.data_size_out).unwrap();
        let priority = u32::from_ne_bytes(left[PRIORITY..PRIORITY + 4].try_into().unwrap());
        (result.return_value.cast_signed(), &self.out[..length], priority)
    }
}

fn has_no_link_layer(program: &str) -> bool {
    program.starts_with("kilo_") || program.starts_with("l3_")
}

/// What is wrong with an outcome, if anything.
fn difference(wanted: &Wanted, frame: &[u8], verdict: i32, out: &[u8], no_ethernet: bool) -> Option<String> {
    if verdict != wanted.verdict {
        return Some(format!("verdict {verdict} instead of {}", wanted.verdict));
    }
    let same = match &wanted.bytes {
        Bytes::Any => true,
        Bytes::Same => out == frame,
        Bytes::Exactly(bytes) => out == bytes,
        Bytes::Sent { frame, hidden, rest, hashed } => {
            let mut sent = out.to_vec();
            if *hashed && sent.len() >= frame.len() {
                // Identification and header checksum; the flow's port.
                let udp = if frame[12] == 8 { 34 } else { 54 };
                let free = if frame[12] == 8 { vec![18, 24, udp] } else { vec![udp] };
                for at in free {
                    sent[at..at + 2].copy_from_slice(&frame[at..at + 2]);
                }
            }
            sent.len() == frame.len() + hidden + rest.len() && sent.starts_with(frame) && sent.ends_with(rest)
        }
        Bytes::Translated(addr) => {
            let offset = if no_ethernet { 0 } else { 14 };
            translated(&frame[offset..], &out[offset..], *addr)
        }
    };
    (!same).then(|| format!("bytes\n{}\ninstead of {:?}", hex(out), wanted.bytes))
}

/// What is wrong with what the packet's priority says, if anything. Its last bits stay.
fn told(wanted: &Wanted, input: &Input, priority: u32) -> Option<String> {
    let wanted = wanted.priority? | input.priority & 0xf;
    (priority != wanted).then(|| format!("priority {priority:#x} instead of {wanted:#x}"))
}

/// True when `after` is `before` with another source and right checksums.
fn translated(before: &[u8], after: &[u8], addr: IpAddr) -> bool {
    let mut expected = before.to_vec();
    let v6 = addr.is_ipv6();
    let found = match addr {
        IpAddr::V4(addr) => {
            expected[12..16].copy_from_slice(&addr.octets());
            expected[10..12].copy_from_slice(&after[10..12]);
            let ip = Ipv4::parse(before.first_chunk().unwrap(), before.len()).unwrap();
            transport::ipv4(&ip, [before[4], before[5]])
        }
        IpAddr::V6(addr) => {
            expected[8..24].copy_from_slice(&addr.octets());
            transport::ipv6(before[6], |at| before.get(at..at + 8)?.try_into().ok()).unwrap()
        }
    };
    let layout = flow::layout(found.protocol).unwrap();
    // Port or identifier; checksum behind the header.
    for at in [Some(layout.src_port), layout.checksum].into_iter().flatten() {
        let at = found.offset + at;
        expected[at..at + 2].copy_from_slice(&after[at..at + 2]);
    }
    let whole = found.part == Part::Whole && found.protocol != protocol::SCTP;
    let total = if v6 { before.len() } else { usize::from(u16::from_be_bytes([before[2], before[3]])) };
    let sound =
        |packet: &[u8]| whole && !v6 && found.offset == 20 && total >= 28 && checksums_hold(&packet[..total]);
    expected == after && (!sound(before) || sound(after))
}

/// As a line of the corpus has it: bytes, `@` with the segments' size, `%` with the interface, and
/// `~` with the priority.
fn written(input: &Input) -> String {
    let gso = if input.gso == 0 { String::new() } else { format!("@{}", input.gso) };
    let ifindex = if input.ifindex == IFINDEX { String::new() } else { format!("%{}", input.ifindex) };
    let priority = if input.priority == 0 { String::new() } else { format!("~{}", input.priority) };
    hex(&input.frame) + &gso + &ifindex + &priority
}

fn read(text: &str) -> Input {
    let (text, priority) = text.split_once('~').unwrap_or((text, "0"));
    let (text, ifindex) = text.split_once('%').unwrap_or((text, "1"));
    let (bytes, gso) = text.split_once('@').unwrap_or((text, "0"));
    let [gso, ifindex, priority] = [gso, ifindex, priority].map(|text| text.parse().unwrap());
    Input { frame: unhex(bytes), gso, ifindex, priority }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

/// What goes from the WireGuard device to another node has an outer header,
/// unless the network is said to carry it without; told from the prefix alone.
fn in_clear(program: &str, tables: &Tables, input: &Input, verdict: i32, longer: usize) -> Option<String> {
    if program != "kilo_egress" || verdict != REDIRECT {
        return None;
    }
    let packet = &input.frame;
    let dst: IpAddr = match packet.first()? >> 4 {
        4 => <[u8; 4]>::try_from(packet.get(16..20)?).ok()?.into(),
        6 => <[u8; 16]>::try_from(packet.get(24..40)?).ok()?.into(),
        _ => return Some("something that is no IP packet is sent".to_owned()),
    };
    let value = longest(&tables.prefix, dst)?;
    let Some(Hop::Node { tunnel, remote, .. }) = tables.hop.get(&value.hop) else {
        return Some(format!("{dst} is sent where the tables name no node"));
    };
    if (tables.config.ipip_ifindex, tables.config.vxlan_ifindex) != (0, 0) {
        // These devices add the header where the program may not.
        return None;
    }
    let header = match (tunnel, remote.is_ipv6()) {
        (Tunnel::Ipip, false) => IPIP_OVERHEAD,
        (Tunnel::Ipip, true) => IPIP_OVERHEAD_V6,
        (Tunnel::Vxlan, false) => VXLAN_OVERHEAD,
        (Tunnel::Vxlan, true) => VXLAN_OVERHEAD_V6,
        (Tunnel::None, _) => return None,
    };
    (longer < header).then(|| format!("{dst} is sent with {longer} bytes more, an outer header has {header}"))
}

/// What must hold whatever the model says.
fn invariants(
    program: &str,
    tables: &Tables,
    wanted: &Wanted,
    input: &Input,
    verdict: i32,
    out: &[u8],
) -> Option<String> {
    let longer = out.len().saturating_sub(input.frame.len());
    let most = match program {
        "lan_ingress" | "l3_ingress" if input.gso != 0 => segments_room(input.gso, false) as usize,
        _ => ETHERNET_LEN + VXLAN_OVERHEAD_V6,
    };
    if longer > most || (verdict == PASS && longer > 0) {
        return Some(format!("the packet has become {longer} bytes longer"));
    }
    if let Some(problem) = in_clear(program, tables, input, verdict, longer) {
        return Some(problem);
    }
    let leads = tables.config.flags & CONFIG_LEADER != 0;
    if program == "kilo_egress" && !leads && verdict == PASS {
        return Some("mesh traffic is left to the WireGuard device of a node that does not lead".to_owned());
    }
    let carried = if input.gso == 0 { input.frame.len() } else { input.frame.len().min(input.gso as usize) };
    if wanted.mtu != 0 && verdict == REDIRECT && carried > wanted.mtu as usize {
        return Some(format!("{carried} bytes are sent where {} fit", wanted.mtu));
    }
    None
}

/// Runs one packet alone and says everything about a disagreement.
#[track_caller]
fn check(bench: &mut Bench, program: &str, tables: &Tables, input: &Input) {
    let wanted = expected_outcome(program, tables, input);
    let before = bench.counts();
    let (verdict, out, priority) = bench.run(program, input);
    let mut problem = difference(&wanted, &input.frame, verdict, out, has_no_link_layer(program));
    problem = problem.or_else(|| told(&wanted, input, priority));
    problem = problem.or_else(|| invariants(program, tables, &wanted, input, verdict, out));
    let after = bench.counts();
    let mut counted: Vec<&str> = Vec::new();
    for (label, count) in &after {
        counted.extend(std::iter::repeat_n(*label, usize::try_from(count - before[label]).unwrap()));
    }
    if counted != wanted.counted {
        problem = Some(format!("{}; counted {counted:?}", problem.unwrap_or_default()));
    }
    if let Some(problem) = problem {
        panic!("{program} {}\n{tables:#?}\nwanted {wanted:?}\n{problem}", written(input));
    }
}

#[test]
fn programs_and_model_agree_on_random_packets_and_tables() {
    let Some(mut bench) = Bench::new() else { return };
    let packets = std::env::var("KILO_PACKETS").ok().and_then(|text| text.parse().ok()).unwrap_or(PACKETS);
    let seed = seed();
    let started = Instant::now();
    let mut random = Random::new(seed);
    let mut outcomes: BTreeMap<(&str, String), usize> = BTreeMap::new();
    let mut done = 0;
    // An emulated machine does not get through.
    while done < packets && started.elapsed() < LONGEST {
        let tables = random.tables();
        bench.dataplane.write(&tables).unwrap();
        let before = bench.counts();
        let mut expected = before.clone();
        let mut batch = Vec::with_capacity(BATCH);
        for _ in 0..BATCH {
            let program = PROGRAMS[match random.below(20) {
                0..7 => 0,
                7..10 => 1,
                10..13 => 2,
                13..15 => 3,
                15 => 4,
                16..19 => 5,
                _ => 6,
            }];
            let input = random.input(program, &tables);
            let wanted = expected_outcome(program, &tables, &input);
            let (verdict, out, priority) = bench.run(program, &input);
            let problem = difference(&wanted, &input.frame, verdict, out, has_no_link_layer(program))
                .or_else(|| told(&wanted, &input, priority))
                .or_else(|| invariants(program, &tables, &wanted, &input, verdict, out));
            if let Some(problem) = problem {
                panic!(
                    "packet {done}: {program} {}\n{tables:#?}\nwanted {wanted:?}\n{problem}\nKILO_SEED={seed}",
                    written(&input)
                );
            }
            for label in &wanted.counted {
                *expected.get_mut(label).unwrap() += 1;
            }
            *outcomes.entry((program, wanted.counted.join("+"))).or_default() += 1;
            batch.push((program, input));
            done += 1;
        }
        if bench.counts() != expected {
            // Once more, one by one, to say which.
            for (program, input) in batch {
                check(&mut bench, program, &tables, &input);
            }
            panic!("the counters differ, and not when the packets are run again; KILO_SEED={seed}");
        }
    }
    println!("{done} packets in {:?}", started.elapsed());
    for ((program, counted), count) in &outcomes {
        println!("{count:>7} {program} {}", if counted.is_empty() { "(untouched)" } else { counted });
    }
    if done >= PACKETS {
        let seen: BTreeSet<&str> = outcomes.keys().flat_map(|(_, counted)| counted.split('+')).collect();
        let everything =
            Action::ALL.iter().map(|it| it.label()).chain(DropReason::ALL.iter().map(|it| it.label()));
        let missing: Vec<_> =
            everything.filter(|label| !seen.contains(label) && !RARE.contains(label)).collect();
        assert!(missing.is_empty(), "the generator never brings about {missing:?}");
    }
}

/// Outcomes that need more than a packet and tables: answers, a full table.
const RARE: [&str; 3] = ["unmasquerade", "nat_exhausted", "nat_map_full"];

/// Tables of the corpus, by the name in its lines.
fn corpus_tables(name: &str) -> Tables {
    match name {
        "leader" => support::leader_tables(),
        "member" => support::member_tables(),
        seed => Random::new(seed.parse().unwrap()).tables(),
    }
}

fn corpus() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/agreement.txt")
}

#[test]
fn programs_and_model_agree_on_the_kept_packets() {
    let Some(mut bench) = Bench::new() else { return };
    if std::env::var_os("KILO_BLESS").is_some() {
        std::fs::write(corpus(), one_of_each()).unwrap();
    }
    let text = std::fs::read_to_string(corpus()).unwrap();
    let mut count = 0;
    for line in text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [name, program, frame, ..] = words[..] else { panic!("{line}") };
        let tables = corpus_tables(name);
        bench.dataplane.write(&tables).unwrap();
        check(&mut bench, program, &tables, &read(frame));
        count += 1;
    }
    assert!(count >= 50, "{count}");
}

#[test]
fn superpackets_that_wireguard_will_cut_get_room_in_front_at_once() {
    let Some(mut bench) = Bench::new() else { return };
    let mut tables = support::leader_tables();
    tables.config.flags |= CONFIG_PLAIN;
    let Some(Hop::Node { tunnel, .. }) = tables.hop.get_mut(&support::MEMBER_HOP) else { panic!("no node") };
    *tunnel = Tunnel::None;
    bench.dataplane.write(&tables).unwrap();
    for (payload, gso, room) in [(1500, 700, segments_room(700, false)), (1300, 700, 0), (1300, 0, 0)] {
        let frame = ethernet(&udp(MEMBER_POD, REMOTE_POD, (1, 2), &vec![1; payload]));
        let input = Input { frame, gso, ifindex: IFINDEX, priority: 0 };
        check(&mut bench, "lan_ingress", &tables, &input);
        let (verdict, out, _) = bench.run("lan_ingress", &input);
        assert_eq!((verdict, out.len()), (REDIRECT, input.frame.len() + room as usize), "{payload} {gso}");
        assert!(out.ends_with(&input.frame[ETHERNET_LEN + 12..]), "{payload} {gso}");
    }
}

/// A packet for each outcome of each program.
fn one_of_each() -> String {
    let mut lines = BTreeMap::new();
    let mut random = Random::new(1);
    for round in 0..400 {
        let name = match round {
            0 => "leader".to_owned(),
            1 => "member".to_owned(),
            seed => seed.to_string(),
        };
        let tables = corpus_tables(&name);
        for program in PROGRAMS {
            for _ in 0..20 {
                let input = random.input(program, &tables);
                let frame = &input.frame;
                if frame.len() > 300 {
                    continue;
                }
                let wanted = expected_outcome(program, &tables, &input);
                let kind = match wanted.bytes {
                    Bytes::Sent { frame, .. } => frame.len(),
                    Bytes::Exactly(_) if program == "lan_ingress" => {
                        usize::from(frame[12]) + usize::from(frame[23])
                    }
                    _ => 0,
                };
                let counted = wanted.counted.join("+");
                lines
                    .entry((program, counted.clone(), kind))
                    .or_insert_with(|| format!("{name} {program} {} {counted}", written(&input)));
            }
        }
    }
    let lines: Vec<_> = lines.into_values().collect();
    format!(
        "# tables program frame outcome; see tests/bpf/agreement.rs. Packets that failed are added by hand.\n{}\n",
        lines.join("\n")
    )
}

//! The programs and the plain-Rust model agree on random packets and tables, and on packets on which they
//! once disagreed.
//!
//! `KILO_SEED=n` repeats a run, `random` draws a new seed, `KILO_PACKETS=n` changes the run's length, and
//! `KILO_BLESS=1` rewrites tests/corpus/agreement.txt: one packet for each different outcome.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::{bpf, seed::seed};

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    net::IpAddr,
    ops::Range,
    path::PathBuf,
    process::Command,
    time::{Duration, Instant},
};

use aya::programs::{SchedClassifier, TestRun as _, TestRunOptions};
use bpf::{
    IFINDEX, MEMBER_POD, REMOTE_POD,
    classes::{CLASSES, classes},
    flows::{Flows, Translation},
    follow_up_packets::{Seen, Step},
    oracle::{
        ANSWER_STAYS, Bytes, FROM_OUTSIDE, Input, Wanted, expected_outcome, left_to_device, link_header_len,
        mac,
    },
    packet::{PASS, PASS_AT_ONCE, REDIRECT, SHOT, ethernet, ipv4, udp},
    random::{KILO, OTHER_UPLINKS, Random},
};
use kilo_common::{
    checksum,
    counters::Action,
    drop_reasons::DropReason,
    encap::{IPIP_OVERHEAD, IPIP_OVERHEAD_V6, VXLAN_OVERHEAD, VXLAN_OVERHEAD_V6, segments_room},
    maps::{CONFIG_GATEWAY, CONFIG_NATIVE},
    nat::{flow, transport},
    packet::{ETHERNET_LEN, Ipv4, protocol},
};
use kilo_core::{
    plan::{Hop, Tables},
    prefixes::longest,
    settings::Tunnel,
};
use kilo_host::dataplane::{CounterReader, Dataplane, lead};
use nix::sched::{CloneFlags, unshare};

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
/// Packets between two comparisons of the counters.
const BATCH: usize = 200;
/// SCTP flows expire first, after three seconds.
const SOON: Duration = Duration::from_secs(1);

/// Size of `struct __sk_buff`, and offsets of its fields (include/uapi/linux/bpf.h).
const SK_BUFF: usize = 192;
const BROUGHT_BY: usize = 36;
const IFINDEX_AT: usize = 40;
const GSO_SIZE: usize = 176;
const PRIORITY: usize = 32;

struct Bench {
    _fs: bpf::BpfFs,
    dataplane: Dataplane,
    counters: CounterReader,
    out: Vec<u8>,
    /// Drained after each packet: a full ring would make programs count other results.
    signals: aya::maps::RingBuf<aya::maps::MapData>,
    /// When a packet was last left to the VXLAN device: those that follow soon go there, too.
    left_to_device: Option<Instant>,
}

/// Gives this thread a network namespace with further uplinks besides loopback, and a stand-in for the
/// WireGuard device.
fn add_uplinks() {
    unshare(CloneFlags::CLONE_NEWNET).unwrap();
    for ifindex in OTHER_UPLINKS.into_iter().chain([KILO]) {
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
        let fs = bpf::bpffs()?;
        add_uplinks();
        let dataplane = Dataplane::open(fs.path(), false).unwrap();
        let counters = dataplane.counters().unwrap();
        let signals = lead::heard(fs.path()).unwrap();
        Some(Self { _fs: fs, dataplane, counters, out: vec![0; 4096], signals, left_to_device: None })
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
        context[BROUGHT_BY..BROUGHT_BY + 4].copy_from_slice(&input.brought_by.to_ne_bytes());
        context[GSO_SIZE..GSO_SIZE + 4].copy_from_slice(&input.gso.to_ne_bytes());
        context[PRIORITY..PRIORITY + 4].copy_from_slice(&input.priority.to_ne_bytes());
        let mut left = [0; SK_BUFF];
        let classifier: &SchedClassifier = self.dataplane.program(program).unwrap();
        let mut options = TestRunOptions::new();
        options.data_in = Some(&input.frame);
        options.ctx_in = Some(&context);
        options.ctx_out = Some(&mut left);
        options.data_out = Some(&mut self.out);
        let result = classifier.test_run(options).unwrap();
        while self.signals.next().is_some() {}
        let length = usize::try_from(result.data_size_out).unwrap();
        let priority = u32::from_ne_bytes(left[PRIORITY..PRIORITY + 4].try_into().unwrap());
        (result.return_value.cast_signed(), &self.out[..length], priority)
    }
}

/// Difference of an outcome from the wanted one, if any. `link` is the length of the link-layer header.
fn difference(wanted: &Wanted, frame: &[u8], verdict: i32, out: &[u8], link: usize) -> Option<String> {
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
                // Fields that may differ: identification, header checksum, and the flow's source port.
                let udp = if frame[12] == 8 { 34 } else { 54 };
                let free = if frame[12] == 8 { vec![18, 24, udp] } else { vec![udp] };
                for at in free {
                    sent[at..at + 2].copy_from_slice(&frame[at..at + 2]);
                }
            }
            sent.len() == frame.len() + hidden + rest.len() && sent.starts_with(frame) && sent.ends_with(rest)
        }
        Bytes::Translated(translation) => {
            frame.len() == out.len() && translated(&frame[link..], &out[link..], translation)
        }
    };
    (!same).then(|| format!("bytes\n{}\ninstead of {:?}", hex(out), wanted.bytes))
}

/// Difference of the packet's priority from the wanted one, if any. Its lowest bits are kept.
fn priority_difference(wanted: &Wanted, input: &Input, priority: u32) -> Option<String> {
    let wanted = wanted.priority? | input.priority & 0xf;
    (priority != wanted).then(|| format!("priority {priority:#x} instead of {wanted:#x}"))
}

/// True when `after` is `before` with this translated end and its checksums are still as right as before:
/// checksum and covered fields together have the same sum.
fn translated(before: &[u8], after: &[u8], translation: &Translation) -> bool {
    let mut expected = before.to_vec();
    let (at, found) = match translation.addr {
        IpAddr::V4(addr) => {
            let at = if translation.destination { 16 } else { 12 };
            expected[at..at + 4].copy_from_slice(&addr.octets());
            expected[10..12].copy_from_slice(&after[10..12]);
            let ip = Ipv4::parse(before.first_chunk().unwrap(), before.len()).unwrap();
            (at..at + 4, transport::ipv4(&ip, [before[4], before[5]]))
        }
        IpAddr::V6(addr) => {
            let at = if translation.destination { 24 } else { 8 };
            expected[at..at + 16].copy_from_slice(&addr.octets());
            let load = |at: usize| before.get(at..at + 8)?.try_into().ok();
            (at..at + 16, transport::ipv6(before[6], load).unwrap())
        }
    };
    let layout = flow::layout(found.protocol).unwrap();
    let port = if translation.destination { layout.dst_port } else { layout.src_port } + found.offset;
    let written = translation.port.map_or([after[port], after[port + 1]], u16::to_be_bytes);
    expected[port..port + 2].copy_from_slice(&written);
    let pseudo_header = layout.pseudo_header.then(|| at.clone());
    let mut is_kept =
        translation.addr.is_ipv6() || sum(before, &[at.clone(), 10..12]) == sum(after, &[at, 10..12]);
    if let Some(checksum) = layout.checksum {
        let checksum = found.offset + checksum..found.offset + checksum + 2;
        // RFC 768: zero means no checksum.
        let is_none = found.protocol == protocol::UDP && before[checksum.clone()] == [0, 0];
        if !is_none {
            expected[checksum.clone()].copy_from_slice(&after[checksum.clone()]);
            let summed: Vec<_> = pseudo_header.into_iter().chain([port..port + 2, checksum]).collect();
            is_kept &= sum(before, &summed) == sum(after, &summed);
        }
    }
    expected == after && is_kept
}

/// Ones' complement sum of these parts of a packet, with 0xffff normalised to 0.
fn sum(packet: &[u8], parts: &[Range<usize>]) -> u16 {
    let words = parts.iter().flat_map(|part| packet[part.clone()].chunks(2));
    let sum = checksum::fold(words.map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum());
    if sum == 0xffff { 0 } else { sum }
}

/// Text of a packet in the corpus: bytes, then `@` and segment size, `%` and interface, `~` and priority,
/// `<` and ingress interface.
fn written(input: &Input) -> String {
    let gso = if input.gso == 0 { String::new() } else { format!("@{}", input.gso) };
    let ifindex = if input.ifindex == IFINDEX { String::new() } else { format!("%{}", input.ifindex) };
    let priority = if input.priority == 0 { String::new() } else { format!("~{}", input.priority) };
    let brought_by = if input.brought_by == 0 { String::new() } else { format!("<{}", input.brought_by) };
    hex(&input.frame) + &gso + &ifindex + &priority + &brought_by
}

fn read(text: &str) -> Input {
    let (text, brought_by) = text.split_once('<').unwrap_or((text, "0"));
    let (text, priority) = text.split_once('~').unwrap_or((text, "0"));
    let (text, ifindex) = text.split_once('%').unwrap_or((text, "1"));
    let (bytes, gso) = text.split_once('@').unwrap_or((text, "0"));
    let [gso, ifindex, priority, brought_by] =
        [gso, ifindex, priority, brought_by].map(|text| text.parse().unwrap());
    Input { frame: unhex(bytes), gso, ifindex, brought_by, priority }
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

/// A packet from the WireGuard device to another node must have an outer header, unless the network carries
/// it without one; decided from the prefix alone.
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
    let Some(Hop::Node { tunnel, remote, .. }) = tables.hop(value.hop) else {
        return Some(format!("{dst} is sent where the tables name no node"));
    };
    if (tables.config.ipip_ifindex, tables.config.vxlan_ifindex) != (0, 0) {
        // The device adds the header where the program cannot.
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

/// Checks what must hold whatever the model says.
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
    let leads = tables.config.flags & CONFIG_GATEWAY != 0;
    if program == "kilo_egress" && !leads && verdict == PASS {
        return Some("mesh traffic is left to the WireGuard device of a node that does not lead".to_owned());
    }
    let carried = if input.gso == 0 { input.frame.len() } else { input.frame.len().min(input.gso as usize) };
    if wanted.mtu != 0 && verdict == REDIRECT && carried > wanted.mtu as usize {
        return Some(format!("{carried} bytes are sent where {} fit", wanted.mtu));
    }
    None
}

impl Bench {
    /// Runs one packet. Returns what is wrong with its outcome, except for the counters, and keeps the flow
    /// state for later packets.
    fn compare(
        &mut self,
        step: &Step,
        tables: &Tables,
        flows: &mut Flows,
    ) -> (Wanted, Option<Seen>, Option<String>) {
        let Step { program, ref input, .. } = *step;
        let mut wanted = expected_outcome(program, tables, flows, input);
        if wanted.verdict == PASS_AT_ONCE {
            self.left_to_device = Some(Instant::now());
        }
        let follows = self.left_to_device.is_some_and(|at| at.elapsed() < SOON);
        let (verdict, out, priority) = self.run(program, input);
        if verdict == PASS_AT_ONCE
            && let Some(by_device) = left_to_device(program, tables, input).filter(|_| follows)
        {
            wanted = by_device;
        }
        let problem = difference(&wanted, &input.frame, verdict, out, link_header_len(program))
            .or_else(|| priority_difference(&wanted, input, priority))
            .or_else(|| invariants(program, tables, &wanted, input, verdict, out))
            .or_else(|| flows.remember(&tables.config, wanted.remembered, out).err());
        let has_sequels = wanted.remembered.is_some() && wanted.verdict == PASS;
        let seen = has_sequels.then(|| Seen { step: step.clone(), out: out.to_vec() });
        (wanted, seen, problem)
    }

    /// Runs one packet alone, and panics with every detail of a disagreement.
    #[track_caller]
    fn check(&mut self, step: &Step, tables: &Tables, flows: &mut Flows) {
        let before = self.counts();
        let (wanted, _, mut problem) = self.compare(step, tables, flows);
        let after = self.counts();
        let mut counted: Vec<&str> = Vec::new();
        for (label, count) in &after {
            counted.extend(std::iter::repeat_n(*label, usize::try_from(count - before[label]).unwrap()));
        }
        if counted != wanted.counted {
            problem = Some(format!("{}; counted {counted:?}", problem.unwrap_or_default()));
        }
        if let Some(problem) = problem {
            panic!(
                "{} {}\n{tables:#?}\n{flows:#?}\nwanted {wanted:?}\n{problem}",
                step.program,
                written(&step.input)
            );
        }
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
    let mut occurs: BTreeMap<&str, usize> = BTreeMap::new();
    let mut done = 0;
    // An emulated machine does not finish.
    while done < packets && started.elapsed() < LONGEST {
        let tables = random.tables();
        bench.dataplane.write(&tables).unwrap();
        let before = bench.counts();
        let mut expected = before.clone();
        let mut batch = Vec::with_capacity(BATCH);
        let (mut flows, mut seen, begun) = (Flows::default(), Vec::new(), Instant::now());
        for _ in 0..BATCH {
            // A flow without replies soon expires.
            let sequel = if begun.elapsed() < SOON && random.chance(2) {
                random.one_of(&seen).and_then(|seen| random.sequel(&tables, &seen))
            } else {
                None
            };
            let step = sequel.unwrap_or_else(|| {
                let program = PROGRAMS[match random.below(20) {
                    0..7 => 0,
                    7..10 => 1,
                    10..13 => 2,
                    13..15 => 3,
                    15 => 4,
                    16..19 => 5,
                    _ => 6,
                }];
                Step::first(program, random.input(program, &tables))
            });
            let (wanted, new, problem) = bench.compare(&step, &tables, &mut flows);
            let Step { program, ref input, .. } = step;
            if let Some(problem) = problem {
                panic!(
                    "packet {done}: {program} {}\n{tables:#?}\n{flows:#?}\nwanted {wanted:?}\n{problem}\nKILO_SEED={seed}",
                    written(input)
                );
            }
            seen.extend(new);
            for label in &wanted.counted {
                *expected.get_mut(label).unwrap() += 1;
            }
            *outcomes.entry((program, wanted.kind())).or_default() += 1;
            for class in classes(program, &tables, input) {
                *occurs.entry(class).or_default() += 1;
            }
            batch.push(step);
            done += 1;
        }
        if bench.counts() != expected {
            // Run them again one by one to find the packet.
            let mut flows = Flows::default();
            for step in batch {
                bench.check(&step, &tables, &mut flows);
            }
            panic!("the counters differ, and not when the packets are run again; KILO_SEED={seed}");
        }
    }
    println!("{done} packets in {:?}", started.elapsed());
    for ((program, counted), count) in &outcomes {
        println!("{count:>7} {program} {}", if counted.is_empty() { "(untouched)" } else { counted });
    }
    for (class, count) in &occurs {
        println!("{count:>7} {class}");
    }
    if done >= PACKETS {
        everything_occurs(&outcomes, &occurs);
    }
}

/// Asserts that no class of packets, counter or sequel is missing.
fn everything_occurs(outcomes: &BTreeMap<(&str, String), usize>, occurs: &BTreeMap<&str, usize>) {
    let missing: Vec<_> = CLASSES.iter().filter(|class| !occurs.contains_key(*class)).collect();
    assert!(missing.is_empty(), "the generator never makes {missing:?}");
    let seen: BTreeSet<&str> = outcomes.keys().flat_map(|(_, counted)| counted.split('+')).collect();
    let everything =
        Action::ALL.iter().map(|it| it.label()).chain(DropReason::ALL.iter().map(|it| it.label()));
    let missing: Vec<_> = everything.filter(|label| !seen.contains(label) && !RARE.contains(label)).collect();
    assert!(missing.is_empty(), "the generator never makes {missing:?}");
    let is_there = |(program, kind): &(&str, &str)| {
        outcomes.keys().any(|(of, kinds)| of == program && kinds.split('+').any(|one| one == *kind))
    };
    let missing: Vec<_> = SEQUELS.iter().filter(|sequel| !is_there(sequel)).collect();
    assert!(missing.is_empty(), "the generator never makes {missing:?}");
}

/// Outcomes that must follow from earlier packets, on each kind of link.
const SEQUELS: [(&str, &str); 9] = [
    ("lan_ingress", FROM_OUTSIDE),
    ("l3_ingress", FROM_OUTSIDE),
    ("kilo_ingress", FROM_OUTSIDE),
    ("uplink_egress", ANSWER_STAYS),
    ("l3_egress", ANSWER_STAYS),
    ("kilo_egress", ANSWER_STAYS),
    ("lan_ingress", "unmasquerade"),
    ("l3_ingress", "unmasquerade"),
    ("kilo_ingress", "unmasquerade"),
];

/// The least recently used entry is evicted before a table is full, random tables contain no relay pairs
/// (`bpf::relay` tests them), `bpf::signals` fills the ring, and `bpf::host_routing` needs the stack.
const RARE: [&str; 7] =
    ["bypass", "nat_map_full", "relay", "relay_limit", "relay_stranger", "relay_unbound", "signal_ring_full"];

/// Replaces the name of tables: the packet follows the previous line's.
const SEQUEL: &str = "+";

/// Tables of the corpus, by the name in its lines.
fn corpus_tables(name: &str) -> Tables {
    match name {
        "leader" => bpf::leader_tables(),
        "member" => bpf::member_tables(),
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
        std::fs::write(corpus(), one_of_each(&mut bench)).unwrap();
    }
    let text = std::fs::read_to_string(corpus()).unwrap();
    let mut count = 0;
    let (mut tables, mut flows) = (Tables::default(), Flows::default());
    for line in text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [name, program, frame, ..] = words[..] else { panic!("{line}") };
        if name != SEQUEL {
            (tables, flows) = (corpus_tables(name), Flows::default());
            bench.dataplane.write(&tables).unwrap();
        }
        let program = PROGRAMS.into_iter().find(|known| *known == program).unwrap();
        bench.check(&Step::first(program, read(frame)), &tables, &mut flows);
        count += 1;
    }
    assert!(count >= 50, "{count}");
}

/// Segments of SCTP have lengths of their own, which the stack has compared with the MTU of its route
/// (`GSO_BY_FRAGS`, include/linux/skbuff.h). They leave by a device, which cuts them.
#[test]
fn gso_packets_of_sctp_are_not_too_big_for_any_hop() {
    let Some(mut bench) = Bench::new() else { return };
    let mut tables = bpf::member_tables();
    tables.config.vxlan_ifindex = OTHER_UPLINKS[0];
    bench.dataplane.write(&tables).unwrap();
    // The first bytes of the source read as the EtherType of IPv4.
    let frame = ipv4([8, 0, 1, 2], REMOTE_POD, protocol::SCTP, 64, &[0; 3000]);
    for (gso, wanted) in [(0xffff, REDIRECT), (1480, SHOT), (0, SHOT)] {
        let input = Input { frame: frame.clone(), gso, ifindex: IFINDEX, brought_by: 0, priority: 0 };
        assert_eq!(bench.run("kilo_egress", &input).0, wanted, "{gso}");
    }
}

#[test]
fn gso_packets_that_wireguard_will_cut_get_room_in_front_at_once() {
    let Some(mut bench) = Bench::new() else { return };
    let mut tables = bpf::leader_tables();
    tables.config.flags |= CONFIG_NATIVE;
    let Some(Hop::Node { tunnel, .. }) = tables.hop.get_mut(&bpf::MEMBER_HOP) else { panic!("no node") };
    *tunnel = Tunnel::None;
    bench.dataplane.write(&tables).unwrap();
    for (payload, gso, room) in [(1500, 700, segments_room(700, false)), (1300, 700, 0), (1300, 0, 0)] {
        let frame = ethernet(&udp(MEMBER_POD, REMOTE_POD, (1, 2), &vec![1; payload]));
        let input = Input { frame, gso, ifindex: IFINDEX, brought_by: 0, priority: 0 };
        bench.check(&Step::first("lan_ingress", input.clone()), &tables, &mut Flows::default());
        let (verdict, out, _) = bench.run("lan_ingress", &input);
        assert_eq!((verdict, out.len()), (REDIRECT, input.frame.len() + room as usize), "{payload} {gso}");
        assert!(out.ends_with(&input.frame[ETHERNET_LEN + 12..]), "{payload} {gso}");
    }
}

/// Corpus lines with a packet for each outcome of each program, after the packets that it follows.
fn one_of_each(bench: &mut Bench) -> String {
    let mut lines = BTreeMap::new();
    let mut random = Random::new(1);
    for round in 0..400 {
        let name = match round {
            0 => "leader".to_owned(),
            1 => "member".to_owned(),
            seed => seed.to_string(),
        };
        let tables = corpus_tables(&name);
        bench.dataplane.write(&tables).unwrap();
        for first in PROGRAMS {
            for _ in 0..20 {
                let mut flows = Flows::default();
                let mut story = Vec::new();
                let mut next = Some(Step::first(first, random.input(first, &tables)));
                while let Some(step) = next.take().filter(|step| step.input.frame.len() <= 300) {
                    let (wanted, seen, problem) = bench.compare(&step, &tables, &mut flows);
                    let Step { program, ref input, .. } = step;
                    assert!(problem.is_none(), "{problem:?}: {program} {}", written(input));
                    let start = if story.is_empty() { &name } else { SEQUEL };
                    story.push(format!("{start} {program} {} {}", written(input), wanted.kind()));
                    let known = lines.entry((program, wanted.kind(), header(program, &wanted, &input.frame)));
                    known.or_insert_with(|| story.join("\n"));
                    if story.len() < 4 {
                        next = seen.and_then(|seen| random.sequel(&tables, &seen));
                    }
                }
            }
        }
    }
    let lines: Vec<_> = lines.into_values().collect();
    format!(
        "# tables program frame outcome; see tests/bpf/agreement.rs. Packets that failed are added by hand.\n{}\n",
        lines.join("\n")
    )
}

/// A number that distinguishes outer headers.
fn header(program: &str, wanted: &Wanted, frame: &[u8]) -> usize {
    match &wanted.bytes {
        Bytes::Sent { frame: outer, .. } => outer.len(),
        Bytes::Exactly(_) if program == "lan_ingress" => usize::from(frame[12]) + usize::from(frame[23]),
        _ => 0,
    }
}

//! Signals: what programs answer, obey and pass to the agent, and what they refuse.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod tunnel;

use std::{
    net::IpAddr,
    os::fd::{AsRawFd as _, BorrowedFd},
    time::Duration,
};

use kilo_common::{
    event::Hook,
    lead::{Term, hop_of, term_of, word},
    maps::{
        HOP_ACTING, HOP_FIRST_NODE, HOP_REMOTE, Heard, NODE_GATEWAY, NODE_LED, PREFIX_ROUTE, PREFIX_SOURCE,
        PrefixValue, SIGNAL_GATEWAY, SignalKey, VXLAN_PORT,
    },
    signal::{
        self, Body, KERNEL, Kind, LONGEST, Shared, Signal, Verdict,
        control::{control_address, sender_id},
        kernel::{self, Taken},
    },
    siphash::Key,
};
use kilo_core::plan::Tables;
use kilo_host::dataplane::{
    Dataplane,
    lead::{Signals, Swap, heard},
};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::bpf::{
    self, MEMBER, MEMBER_HOP, MEMBER_POD, REMOTE_POD, SELF, leader_tables, member_tables,
    packet::{PASS, REDIRECT, Ran, SHOT, checksums_hold, ethernet, run, run_with, steered, udp},
};
use crate::wait::until;

/// Ids of this node and of the other one.
const OWN: u64 = 0x1111_1111_1111_1111;
const OTHER: u64 = 0x2222_2222_2222_2222;
const COOKIE: u64 = 0xc00c_1e00;
const KEY: [u64; 2] = [0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908];
const LOCATION: u64 = 0x6c6f_6361;
const NONCE: u64 = 0x6e6f_6e63_6521;
/// Reads as the EtherType of IPv4 where `BPF_PROG_TEST_RUN` expects an Ethernet header.
const FAR: [u8; 4] = [8, 0, 3, 1];

fn control(id: u64) -> [u8; 16] {
    let mut hash = [7; 32];
    hash[..8].copy_from_slice(&id.to_be_bytes());
    control_address(&hash)
}

fn with_keys(mut tables: Tables) -> Tables {
    tables.config.control = control(OWN);
    let key = SignalKey { key: KEY, cookie: COOKIE, sender: OTHER, hop: MEMBER_HOP, flags: SIGNAL_GATEWAY };
    tables.signal_key.insert(MEMBER.into(), key);
    tables.prefix.insert(
        "8.0.3.0/24".parse().unwrap(),
        PrefixValue { hop: HOP_ACTING, flags: PREFIX_ROUTE | PREFIX_SOURCE },
    );
    tables
}

struct Bench {
    fs: bpf::BpfFs,
    dataplane: Dataplane,
}

impl Bench {
    fn of(tables: &Tables) -> Option<Self> {
        let fs = bpf::bpffs()?;
        let mut dataplane = Dataplane::open(fs.path(), false).unwrap();
        dataplane.write(tables).unwrap();
        Some(Self { fs, dataplane })
    }

    fn signals(&self) -> Signals {
        self.dataplane.signals().unwrap()
    }

    fn word(&self) -> u64 {
        self.signals().words().unwrap()[1]
    }

    /// Content of the ring buffer.
    fn heard(&self) -> Vec<(Heard, Vec<u8>)> {
        let mut ring = heard(self.fs.path()).unwrap();
        let mut all = Vec::new();
        while let Some(item) = ring.next() {
            let (head, bytes) = Heard::read(&item).unwrap();
            all.push((head, bytes.to_vec()));
        }
        all
    }

    fn lan(&mut self, bytes: &[u8]) -> Ran {
        self.packet(&udp(MEMBER, SELF, (VXLAN_PORT, VXLAN_PORT), bytes))
    }

    fn packet(&mut self, packet: &[u8]) -> Ran {
        run(&mut self.dataplane, "lan_ingress", &ethernet(packet))
    }
}

fn signal(kind: Kind, term: u64, body: Body<Vec<u64>>) -> Signal<Vec<u64>> {
    Signal { kind, nonce: NONCE, term: Term::from_bits(term), sender: OTHER, location: LOCATION, body }
}

fn written(signal: &Signal<Vec<u64>>) -> Vec<u8> {
    let mut out = [0; LONGEST];
    let length = signal::write(&mut out, signal, Some(Key(KEY))).unwrap();
    out[..length].to_vec()
}

fn announce(term: u64, cookie: u64, gateway: u64) -> Vec<u8> {
    written(&signal(Kind::Announce, term, Body::Word { cookie, gateway }))
}

fn roll() -> Vec<u8> {
    written(&signal(Kind::Roll, 0, Body::Word { cookie: 0, gateway: 0 }))
}

/// One signal of every kind.
fn all() -> Vec<Signal<Vec<u64>>> {
    let members = || vec![1, 2, 3];
    let claim = || Body::Claim { gateway: OTHER, shared: Shared::Move, part: (0, 1), members: members() };
    vec![
        signal(Kind::Probe, 0, Body::Empty),
        signal(Kind::Reflected, 0, Body::Empty),
        signal(Kind::Roll, 0, Body::Word { cookie: 0, gateway: 0 }),
        signal(Kind::Present, 1, Body::Word { cookie: COOKIE, gateway: OTHER }),
        signal(Kind::Witness, 1, Body::Question { id: 1, patience: 90 }),
        signal(Kind::Verdict, 1, Body::Witness { id: 1, verdict: Verdict::Works }),
        signal(Kind::Announce, 1, Body::Word { cookie: COOKIE, gateway: OTHER }),
        signal(Kind::Follows, 1, Body::Word { cookie: 0, gateway: OTHER }),
        signal(Kind::Adopt, 1, Body::Members { cookie: 5, age: 5, members: members() }),
        signal(Kind::Handover, 1, Body::Members { cookie: 5, age: 0, members: (0..128).collect() }),
        signal(
            Kind::Hello,
            1,
            Body::Hello {
                is_fit: true,
                is_busy: false,
                leads: false,
                gateway: 1,
                cookie: 5,
                losses: vec![1, 2],
            },
        ),
        signal(Kind::Claim, 1, claim()),
        signal(Kind::Moved, 1, claim()),
        signal(Kind::End, 1, claim()),
        signal(Kind::Prepare, 1, Body::Change { cookie: COOKIE, gateway: OWN }),
        signal(Kind::Ready, 1, Body::Change { cookie: COOKIE, gateway: OWN }),
    ]
}

#[track_caller]
fn refused(ran: &Ran, reason: &str) {
    assert_eq!((ran.verdict, &ran.counted[..]), (SHOT, &[reason][..]));
}

/// The signal in an answer. The answer must be the question with its ends swapped, and all its checksums
/// valid.
#[track_caller]
fn answered(ran: &Ran, question: &[u8]) -> Vec<u8> {
    assert_eq!((ran.verdict, &ran.counted[..]), (REDIRECT, &["reflect"][..]));
    let (frame, asked) = (&ran.bytes, ethernet(question));
    assert_eq!(frame.len(), asked.len(), "never longer");
    assert_eq!((&frame[..6], &frame[6..12]), (&asked[6..12], &asked[..6]));
    assert_eq!((&frame[26..30], &frame[30..34]), (&asked[30..34], &asked[26..30]));
    assert_eq!(frame[34..38], asked[34..38], "ports stay");
    assert!(checksums_hold(&frame[14..]));
    frame[42..].to_vec()
}

#[test]
fn the_control_address_bears_the_nodes_id() {
    assert_eq!(sender_id(&control(OWN)), OWN);
    assert_eq!(control(OWN)[..6], [0xfd, 0x6b, 0x69, 0x6c, 0x6f, 0]);
}

#[test]
fn the_roll_is_answered_with_the_cookie_and_the_word() {
    let Some(mut bench) = Bench::of(&with_keys(member_tables())) else { return };
    let question = udp(MEMBER, SELF, (VXLAN_PORT, VXLAN_PORT), &roll());
    for (term, hop, gateway) in [(0, MEMBER_HOP, OTHER), (7, HOP_REMOTE, OWN), (8, MEMBER_HOP + 1, 0)] {
        let offered = word(Term::from_bits(term), u16::try_from(hop).unwrap());
        assert_eq!(bench.signals().follow(offered).unwrap(), offered);
        let ran = bench.packet(&question);
        let bytes = answered(&ran, &question);
        assert!(signal::is_authentic(&bytes, Key(KEY)));
        let said = signal::parse(&bytes).unwrap();
        assert_eq!((said.kind, said.nonce, said.sender), (Kind::Present, NONCE, OWN));
        assert_eq!((said.location, said.term), (LOCATION, Term::from_bits(term)));
        assert_eq!(said.body, Body::Word { cookie: COOKIE, gateway });
    }
    assert!(bench.heard().is_empty(), "no agent is asked");
}

#[test]
fn a_later_announce_is_obeyed_and_no_other_ever() {
    let Some(mut bench) = Bench::of(&with_keys(member_tables())) else { return };
    assert_eq!((term_of(bench.word()), hop_of(bench.word())), (Term::NONE, 4));
    let mut tables = with_keys(member_tables());
    tables.lead[1] = word(Term::NONE, 9);
    bench.dataplane.write(&tables).unwrap();
    for (term, obeyed, stands) in [
        (5, true, 5),
        (5, true, 5),
        (4, false, 5),
        (6, true, 6),
        (5, false, 6),
        // A member may have missed at most 1,024 changes; a count near the maximum would be the last.
        (1_024 << 16, true, 1_024 << 16),
        (2_049 << 16, false, 1_024 << 16),
        ((1 << 48) - 1, false, 1_024 << 16),
        (2_048 << 16, true, 2_048 << 16),
        (7, false, 2_048 << 16),
    ] {
        let question = udp(MEMBER, SELF, (VXLAN_PORT, VXLAN_PORT), &announce(term, COOKIE, OTHER));
        let ran = bench.packet(&question);
        if obeyed {
            let bytes = answered(&ran, &question);
            assert!(signal::is_authentic(&bytes, Key(KEY)));
            let said = signal::parse(&bytes).unwrap();
            assert_eq!((said.kind, said.nonce, said.sender), (Kind::Follows, NONCE, OWN));
            assert_eq!(
                (said.term, said.body),
                (Term::from_bits(term), Body::Word { cookie: 0, gateway: OTHER })
            );
        } else {
            refused(&ran, "stale_signal");
        }
        assert_eq!(bench.word(), word(Term::from_bits(stands), u16::try_from(MEMBER_HOP).unwrap()));
    }
    // A reconciling agent writes the word that it knows, which is of an earlier term.
    let before = bench.word();
    bench.dataplane.write(&tables).unwrap();
    assert_eq!(bench.word(), before);
}

#[test]
fn what_is_forged_stale_or_foreign_changes_nothing() {
    let base = with_keys(member_tables());
    let Some(mut bench) = Bench::of(&base) else { return };
    let before = bench.word();
    let good = announce(5, COOKIE, OTHER);
    // Every byte is authenticated, and so is the tag.
    for at in 0..good.len() {
        let mut bytes = good.clone();
        bytes[at] ^= 0x10;
        let ran = bench.lan(&bytes);
        assert_ne!(ran.counted, ["reflect"], "byte {at}");
        assert_eq!(bench.word(), before, "byte {at}");
    }
    let mut forged = good.clone();
    forged[63] ^= 1;
    refused(&bench.lan(&forged), "forged_signal");
    refused(&bench.lan(&announce(5, COOKIE + 1, OTHER)), "stale_signal");
    refused(&bench.lan(&announce(5, COOKIE, OWN)), "forged_signal");
    let stranger =
        Signal { sender: OWN, ..signal(Kind::Announce, 5, Body::Word { cookie: COOKIE, gateway: OWN }) };
    refused(&bench.lan(&written(&stranger)), "forged_signal");
    let elsewhere = udp([10, 1, 0, 99], SELF, (VXLAN_PORT, VXLAN_PORT), &good);
    refused(&bench.packet(&elsewhere), "unknown_sender");
    for claim in all().iter().filter(|signal| matches!(signal.kind, Kind::Claim | Kind::Moved | Kind::End)) {
        refused(&bench.lan(&written(claim)), "unknown_signal");
    }
    for (what, change) in [("version", (1, 2)), ("kind", (2, 99)), ("length", (3, 9)), ("term", (23, 1))] {
        let mut bytes = good.clone();
        let (at, value) = change;
        bytes[at] = value;
        let ran = bench.lan(&bytes);
        assert_eq!((ran.verdict, &ran.counted[..]), (SHOT, &["malformed"][..]), "{what}");
    }
    for length in [8, 39, 40, 56, 63] {
        refused(&bench.lan(&good[..length]), "malformed");
    }
    assert_eq!(bench.word(), before);
    assert!(bench.heard().is_empty());

    let mut tables = base.clone();
    let key = tables.signal_key[&IpAddr::from(MEMBER)];
    for (change, reason) in [
        (SignalKey { flags: 0, ..key }, "forged_signal"),
        (SignalKey { hop: HOP_FIRST_NODE - 1, ..key }, "no_hop"),
        (SignalKey { cookie: 0, ..key }, "stale_signal"),
        (SignalKey { key: [1, 2], ..key }, "forged_signal"),
    ] {
        tables.signal_key.insert(MEMBER.into(), change);
        bench.dataplane.write(&tables).unwrap();
        refused(&bench.lan(&announce(5, change.cookie, OTHER)), reason);
    }
    tables.signal_key.clear();
    bench.dataplane.write(&tables).unwrap();
    refused(&bench.lan(&good), "unknown_signal");
    refused(&bench.lan(&roll()), "unknown_signal");
    tables.node.get_mut(&MEMBER.into()).unwrap().interfaces = [77, 0, 0, 0];
    bench.dataplane.write(&tables).unwrap();
    refused(&bench.lan(&good), "wrong_interface");
    assert_eq!(bench.word(), before);
}

#[test]
fn fragments_options_and_other_ports_and_addresses_are_no_signals() {
    let Some(mut bench) = Bench::of(&with_keys(member_tables())) else { return };
    let before = bench.word();
    let good = announce(5, COOKIE, OTHER);
    let packet = udp(MEMBER, SELF, (VXLAN_PORT, VXLAN_PORT), &good);
    let mut fragment = packet.clone();
    fragment[6] = 0x20;
    let mut options = packet.clone();
    options[0] = 0x46;
    options.splice(20..20, [1, 1, 1, 1]);
    let length = u16::try_from(options.len()).unwrap();
    options[2..4].copy_from_slice(&length.to_be_bytes());
    let other_port = udp(MEMBER, SELF, (VXLAN_PORT, 9), &good);
    let other_host = udp(MEMBER, [10, 1, 0, 77], (VXLAN_PORT, VXLAN_PORT), &good);
    for packet in [fragment, options, other_port, other_host] {
        let ran = bench.packet(&packet);
        assert_eq!((ran.verdict, &ran.counted[..]), (PASS, &[][..]));
    }
    assert_eq!(bench.word(), before);
    assert!(bench.heard().is_empty());
}

#[test]
fn what_agents_read_reaches_them_whole_and_the_stack_never() {
    let Some(mut bench) = Bench::of(&with_keys(member_tables())) else { return };
    for signal in all() {
        let bytes = written(&signal);
        let ran = bench.lan(&bytes);
        let read = bench.heard();
        let tunnel = matches!(signal.kind, Kind::Claim | Kind::Moved | Kind::End);
        if tunnel || matches!(signal.kind, Kind::Probe | Kind::Roll | Kind::Announce) {
            assert!(read.is_empty(), "{:?}", signal.kind);
            assert_ne!(ran.verdict, PASS);
            continue;
        }
        assert_eq!((ran.verdict, &ran.counted[..]), (SHOT, &["hear"][..]), "{:?}", signal.kind);
        let [(head, said)] = &read[..] else { panic!("{:?}: {read:?}", signal.kind) };
        assert_eq!(*said, bytes, "{:?}", signal.kind);
        assert_eq!((head.hook, head.source), (Hook::LanIngress as u32, mapped(MEMBER)));
        assert!(head.time > 0);
        let mut forged = bytes;
        forged[24] ^= 1;
        let ran = bench.lan(&forged);
        if signal.kind == Kind::Reflected {
            bench.heard();
        } else {
            refused(&ran, "forged_signal");
            assert!(bench.heard().is_empty());
        }
    }
}

#[test]
fn answers_wait_in_the_ring_until_it_fills_up() {
    let Some(mut bench) = Bench::of(&with_keys(member_tables())) else { return };
    let ring = heard(bench.fs.path()).unwrap();
    let (woken, wakes) = std::sync::mpsc::channel();
    let (named, name) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        named.send(nix::unistd::gettid()).unwrap();
        // SAFETY: the ring lives as long as this function.
        let ring_fd = unsafe { BorrowedFd::borrow_raw(ring.as_raw_fd()) };
        let mut fds = [PollFd::new(ring_fd, PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::from(10_000u16)).unwrap();
        woken.send(()).unwrap();
    });
    // The other thread must be waiting by now: a reader sees what is there, woken or not.
    let stat = format!("/proc/self/task/{}/stat", name.recv().unwrap());
    let sleeps = || std::fs::read_to_string(&stat).unwrap().contains(") S ");
    until("the other thread sleeps", Duration::from_secs(10), sleeps);
    let answer = written(&signal(Kind::Reflected, 0, Body::Empty));
    for _ in 0..20 {
        bench.lan(&answer);
    }
    assert!(wakes.recv_timeout(Duration::from_millis(300)).is_err(), "20 answers can wait");
    for _ in 0..200 {
        bench.lan(&answer);
    }
    assert!(wakes.recv_timeout(Duration::from_secs(2)).is_ok(), "nobody reads before the ring is full");
}

#[test]
fn strangers_leave_room_for_answers_and_both_for_a_tag_that_is_right() {
    let Some(mut bench) = Bench::of(&with_keys(member_tables())) else { return };
    let answer = written(&signal(Kind::Reflected, 0, Body::Empty));
    let present = written(&signal(Kind::Present, 1, Body::Word { cookie: COOKIE, gateway: OTHER }));
    let mut heard = |bytes: &[u8]| (0..2_000).position(|_| bench.lan(bytes).counted == ["signal_ring_full"]);
    let mut all = 0;
    for signal in all_unchecked() {
        // Nobody has the key that this tag is made with.
        let mut bytes = written(&signal);
        *bytes.last_mut().unwrap() ^= 1;
        let most = heard(&bytes).unwrap();
        assert!(all == 0 && most > 10 || all > 0 && most == 0, "{:?}: {most} were heard", signal.kind);
        all += most;
    }
    for (what, bytes) in [("answers", &answer), ("signals with a tag", &present)] {
        let room = heard(bytes).unwrap();
        assert!(room > 50, "{room} {what} were heard behind them");
        all += room;
    }
    assert_eq!(bench.heard().len(), all);
    assert_eq!(bench.lan(&answer).counted, ["hear"]);
}

/// Signals of the LAN whose tag only the agent checks.
fn all_unchecked() -> impl Iterator<Item = Signal<Vec<u64>>> {
    let of_lan =
        |signal: &Signal<Vec<u64>>| kernel::on_lan(signal.kind) == Taken::Agent && signal.kind.has_tag();
    all().into_iter().filter(move |signal| of_lan(signal) && written(signal).len() != KERNEL)
}

fn mapped(addr: [u8; 4]) -> [u8; 16] {
    std::net::Ipv4Addr::from(addr).to_ipv6_mapped().octets()
}

#[test]
fn a_probe_of_the_lan_comes_back() {
    let Some(mut bench) = Bench::of(&with_keys(member_tables())) else { return };
    let probe = written(&signal(Kind::Probe, 0, Body::Empty));
    let question = udp(MEMBER, SELF, (40_000, VXLAN_PORT), &probe);
    let bytes = answered(&bench.packet(&question), &question);
    let said = signal::parse(&bytes).unwrap();
    assert_eq!((said.kind, said.nonce, said.sender), (Kind::Reflected, NONCE, OTHER));
    let unknown = udp([10, 1, 0, 99], SELF, (40_000, VXLAN_PORT), &probe);
    refused(&bench.packet(&unknown), "unknown_sender");
}

#[test]
fn a_gateway_reflects_probes_of_other_locations_and_of_nobody_else() {
    let Some(mut bench) = Bench::of(&with_keys(leader_tables())) else { return };
    let probe = written(&signal(Kind::Probe, 0, Body::Empty));
    let tunnel = |bench: &mut Bench, src, dst, bytes: &[u8]| {
        run(&mut bench.dataplane, "kilo_ingress", &udp(src, dst, (40_000, VXLAN_PORT), bytes))
    };
    let ran = tunnel(&mut bench, FAR, [10, 5, 0, 1], &probe);
    assert_eq!((ran.verdict, &ran.counted[..]), (REDIRECT, &["reflect"][..]));
    assert_eq!((&ran.bytes[12..16], &ran.bytes[16..20]), (&[10, 5, 0, 1][..], &FAR[..]));
    assert_eq!(
        ran.bytes[20..24],
        [40_000_u16.to_be_bytes(), VXLAN_PORT.to_be_bytes()].concat(),
        "ports stay"
    );
    assert!(checksums_hold(&ran.bytes));
    assert_eq!(signal::parse(&ran.bytes[28..]).unwrap().kind, Kind::Reflected);
    // The first address of the gateway's pods stays the same when locations are renumbered. Others have pods.
    let ran = tunnel(&mut bench, FAR, [10, 42, 1, 0], &probe);
    assert_eq!((ran.verdict, &ran.counted[..]), (REDIRECT, &["reflect"][..]));
    assert_eq!((&ran.bytes[12..16], &ran.bytes[16..20]), (&[10, 42, 1, 0][..], &FAR[..]));
    assert_eq!(tunnel(&mut bench, FAR, [10, 42, 1, 5], &probe).counted, ["decrypt"]);
    assert_eq!(tunnel(&mut bench, FAR, [10, 42, 2, 0], &probe).counted, ["forward"], "a member's pods");
    // A node's own private address must not be probed, and packets to others are forwarded.
    refused(&tunnel(&mut bench, FAR, SELF, &probe), "unknown_signal");
    let on = tunnel(&mut bench, FAR, MEMBER_POD, &probe);
    assert_eq!((on.verdict, &on.counted[..]), (REDIRECT, &["forward"][..]));
    refused(&tunnel(&mut bench, [8, 0, 9, 9], [10, 5, 0, 1], &probe), "unknown_signal");
    for signal in all().iter().filter(|signal| !matches!(signal.kind, Kind::Probe | Kind::Reflected)) {
        refused(&tunnel(&mut bench, FAR, [10, 5, 0, 1], &written(signal)), "unknown_signal");
    }
    assert!(bench.heard().is_empty());
    let answer = written(&signal(Kind::Reflected, 0, Body::Empty));
    let ran = tunnel(&mut bench, FAR, SELF, &answer);
    assert_eq!((ran.verdict, &ran.counted[..]), (SHOT, &["hear"][..]));
    let [(head, said)] = &bench.heard()[..] else { panic!("one") };
    assert_eq!((head.hook, head.source, said), (Hook::KiloIngress as u32, mapped(FAR), &answer));

    let Some(mut bench) = Bench::of(&with_keys(member_tables())) else { return };
    refused(&tunnel(&mut bench, FAR, [10, 5, 0, 1], &probe), "unknown_signal");
    assert_eq!(tunnel(&mut bench, FAR, SELF, &answer).counted, ["hear"], "a member's own probe");
}

/// Tables of a gateway whose own word names the other gateway.
fn relieved(flags: u32) -> Tables {
    let mut tables = with_keys(leader_tables());
    tables.lead[1] = word(Term::NONE, u16::try_from(MEMBER_HOP).unwrap());
    let acting = PrefixValue { hop: HOP_ACTING, flags: PREFIX_ROUTE | PREFIX_SOURCE };
    tables.prefix.insert("10.42.4.0/24".parse().unwrap(), acting);
    tables.node.insert(MEMBER.into(), bpf::node(flags));
    tables
}

#[test]
fn a_relieved_leader_passes_on_what_it_does_not_lead_and_never_what_a_gateway_sends() {
    let inner = udp(MEMBER_POD, REMOTE_POD, (1, 2), b"payload");
    for (flags, counted, then) in [
        (0, "pass_on", Some(&["steer"][..])),
        (NODE_LED, "transit", Some(&["encrypt"][..])),
        (NODE_GATEWAY | NODE_LED, "transit", Some(&["encrypt"][..])),
        (NODE_GATEWAY, "not_for_us", None),
    ] {
        let Some(mut bench) = Bench::of(&relieved(flags)) else { return };
        let mut cb = [0; 20];
        let ran = run_with(&mut bench.dataplane, "lan_ingress", &steered(MEMBER, SELF, &inner), &mut cb);
        assert_eq!(ran.counted, [counted], "{flags}");
        let Some(then) = then else { continue };
        let sent = &ran.bytes[14..];
        assert_eq!(sent[8], 63, "a hop");
        assert!(checksums_hold(sent));
        let transit = udp([8, 0, 1, 2], REMOTE_POD, (1, 2), b"payload");
        let ran = run_with(&mut bench.dataplane, "kilo_egress", &transit, &mut cb);
        assert_eq!(ran.counted, then, "{flags}");
        assert_eq!(ran.verdict, if flags == 0 { REDIRECT } else { PASS });
    }
    // A prefix with the remote hop uses Kilo's leader, which no other node relieves.
    let mut tables = relieved(NODE_LED);
    tables.lead = [tables.lead[1]; 2];
    let remote = PrefixValue { hop: HOP_REMOTE, flags: PREFIX_ROUTE | PREFIX_SOURCE };
    tables.prefix.insert("10.42.4.0/24".parse().unwrap(), remote);
    let Some(mut bench) = Bench::of(&tables) else { return };
    let ran = run(&mut bench.dataplane, "lan_ingress", &steered(MEMBER, SELF, &inner));
    assert_eq!(ran.counted, ["pass_on"], "led members are those of hop 3");
}

#[test]
fn the_own_agent_moves_the_word_by_the_same_rule() {
    let Some(bench) = Bench::of(&with_keys(member_tables())) else { return };
    let signals = bench.signals();
    let at = |term, hop| word(Term::from_bits(term), hop);
    assert_eq!(signals.words().unwrap(), [at(0, 4), at(0, 4)]);
    assert_eq!(signals.follow(at(3, 2)).unwrap(), at(3, 2));
    assert_eq!(signals.follow(at(3, 5)).unwrap(), at(3, 2), "no later term");
    assert_eq!(signals.follow(at(2, 5)).unwrap(), at(3, 2));
    let swap = |current, new| signals.swap(Swap { current, new }).unwrap();
    assert_eq!(swap(at(3, 5), at(4, 5)), at(3, 2), "not what stands");
    assert_eq!(swap(at(3, 2), at(2, 5)), at(3, 2), "an earlier term");
    assert_eq!(swap(at(3, 2), at(3, 5)), at(3, 5), "another hop of the same");
    assert_eq!(signals.words().unwrap(), [at(0, 4), at(3, 5)]);
}

//! Packets as bytes, and runs of a program on them (`BPF_PROG_TEST_RUN`).

use aya::programs::{SchedClassifier, TestRun as _, TestRunOptions};
use kilo_common::{
    checksum,
    counters::Action,
    drop_reasons::DropReason,
    encap::{self, Inner},
};
use kilo_host::dataplane::Dataplane;

/// Outcome of a program.
#[derive(Debug, PartialEq, Eq)]
pub struct Ran {
    /// `TC_ACT_*`.
    pub verdict: i32,
    /// The packet afterwards.
    pub bytes: Vec<u8>,
    /// Labels of the counters that the packet increased, each by one.
    pub counted: Vec<&'static str>,
}

pub const PASS: i32 = -1;
/// `TC_ACT_OK`: the packet goes to the stack, and to no further program.
pub const PASS_AT_ONCE: i32 = 0;
pub const SHOT: i32 = 2;
pub const REDIRECT: i32 = 7;

/// An IPv4 packet with a valid header checksum.
pub fn ipv4(src: [u8; 4], dst: [u8; 4], protocol: u8, ttl: u8, payload: &[u8]) -> Vec<u8> {
    let length = u16::try_from(20 + payload.len()).unwrap();
    let mut header = [0u8; 20];
    header[0] = 0x45;
    header[2..4].copy_from_slice(&length.to_be_bytes());
    header[6] = 0x40;
    header[8] = ttl;
    header[9] = protocol;
    header[12..16].copy_from_slice(&src);
    header[16..20].copy_from_slice(&dst);
    let sum = checksum::header(&header);
    header[10..12].copy_from_slice(&sum.to_be_bytes());
    [&header[..], payload].concat()
}

/// An IPv6 packet without extension headers.
pub fn ipv6(src: [u8; 16], dst: [u8; 16], protocol: u8, hop_limit: u8, payload: &[u8]) -> Vec<u8> {
    let [high, low] = u16::try_from(payload.len()).unwrap().to_be_bytes();
    [&[0x60, 0, 0, 0, high, low, protocol, hop_limit][..], &src, &dst, payload].concat()
}

/// A UDP datagram with checksum.
pub fn udp(src: [u8; 4], dst: [u8; 4], ports: (u16, u16), data: &[u8]) -> Vec<u8> {
    ipv4(src, dst, 17, 64, &datagram(&src, &dst, ports, data))
}

/// IPv6 counterpart of [`udp`].
pub fn udp_v6(src: [u8; 16], dst: [u8; 16], ports: (u16, u16), data: &[u8]) -> Vec<u8> {
    ipv6(src, dst, 17, 64, &datagram(&src, &dst, ports, data))
}

/// A UDP header and its data; a sum of zero is sent as all ones (RFC 768).
fn datagram(src: &[u8], dst: &[u8], ports: (u16, u16), data: &[u8]) -> Vec<u8> {
    let mut datagram = Vec::new();
    datagram.extend(ports.0.to_be_bytes());
    datagram.extend(ports.1.to_be_bytes());
    datagram.extend(u16::try_from(8 + data.len()).unwrap().to_be_bytes());
    datagram.extend([0, 0]);
    datagram.extend(data);
    let sum = match transport_checksum(src, dst, 17, &datagram) {
        0 => 0xffff,
        sum => sum,
    };
    datagram[6..8].copy_from_slice(&sum.to_be_bytes());
    datagram
}

/// An echo request (8) or reply (0).
pub fn icmp(src: [u8; 4], dst: [u8; 4], kind: u8, id: u16) -> Vec<u8> {
    let mut payload = vec![kind, 0, 0, 0];
    payload.extend(id.to_be_bytes());
    payload.extend([0, 1, 1, 2, 3, 4]);
    let sum = !fold(sum(&payload));
    payload[2..4].copy_from_slice(&sum.to_be_bytes());
    ipv4(src, dst, 1, 64, &payload)
}

/// The packet after an Ethernet header; zero addresses are those of the loopback device.
pub fn ethernet(ip: &[u8]) -> Vec<u8> {
    let mut frame = vec![0; 12];
    frame.extend(if ip[0] >> 4 == 6 { [0x86, 0xdd] } else { [8, 0] });
    frame.extend(ip);
    frame
}

/// The packet after an outer header, as on the wire.
pub fn steered(from: [u8; 4], to: [u8; 4], inner: &[u8]) -> Vec<u8> {
    let mut frame = [0; 34];
    encap::ipip_frame(&mut frame, &from, &to, &carried(inner));
    [&frame[..], inner].concat()
}

/// The properties of an inner packet that outer headers depend on.
pub fn carried(inner: &[u8]) -> Inner {
    Inner { len: u32::try_from(inner.len()).unwrap(), tos: 0, v6: inner[0] >> 4 == 6, hash: 0 }
}

/// RFC 1071 sum over 16-bit words.
fn sum(bytes: &[u8]) -> u32 {
    bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | pair.get(1).map_or(0, |&byte| u32::from(byte))).sum()
}

fn fold(sum: u32) -> u16 {
    checksum::fold(sum)
}

/// Checksum of a TCP or UDP segment whose field is zero.
pub fn transport_checksum(src: &[u8], dst: &[u8], protocol: u8, segment: &[u8]) -> u16 {
    let pseudo = sum(src) + sum(dst) + u32::from(protocol) + u32::try_from(segment.len()).unwrap();
    !fold(pseudo + sum(segment))
}

/// True when the checksums of an IPv4 header and its payload are valid, or that of UDP over IPv6.
pub fn checksums_hold(ip: &[u8]) -> bool {
    if ip[0] >> 4 == 6 {
        return ip[6] == 17 && transport_checksum(&ip[8..24], &ip[24..40], 17, &ip[40..]) == 0;
    }
    let header: [u8; 20] = ip[..20].try_into().unwrap();
    let segment = &ip[20..];
    let transport = match ip[9] {
        6 | 17 => transport_checksum(&ip[12..16], &ip[16..20], ip[9], segment) == 0,
        1 => fold(sum(segment)) == 0xffff,
        _ => true,
    };
    checksum::header(&header) == 0 && transport
}

/// Size of `__sk_buff`, and offsets of its fields (include/uapi/linux/bpf.h).
const CONTEXT: usize = 192;
const BROUGHT_BY: std::ops::Range<usize> = 36..40;
const CONTROL_BLOCK: std::ops::Range<usize> = 48..68;

/// Runs a program once; returns its verdict and the packet afterwards.
pub fn run_uncounted(dataplane: &mut Dataplane, program: &str, packet: &[u8]) -> (i32, Vec<u8>) {
    run_once(dataplane, program, packet, 0, &mut [0; 20])
}

fn run_once(
    dataplane: &mut Dataplane,
    program: &str,
    packet: &[u8],
    brought_by: u32,
    control_block: &mut [u8; 20],
) -> (i32, Vec<u8>) {
    let classifier: &SchedClassifier = dataplane.program(program).unwrap();
    let mut out = vec![0; packet.len() + 256];
    let mut options = TestRunOptions::new();
    options.data_in = Some(packet);
    options.data_out = Some(&mut out);
    let (mut given, mut left) = ([0; CONTEXT], [0; CONTEXT]);
    given[BROUGHT_BY].copy_from_slice(&brought_by.to_ne_bytes());
    given[CONTROL_BLOCK].copy_from_slice(control_block);
    options.ctx_in = Some(&given);
    options.ctx_out = Some(&mut left);
    let result = classifier.test_run(options).unwrap();
    control_block.copy_from_slice(&left[CONTROL_BLOCK]);
    out.truncate(usize::try_from(result.data_size_out).unwrap());
    (result.return_value.cast_signed(), out)
}

/// Runs a program once; returns its outcome with the counters.
pub fn run(dataplane: &mut Dataplane, program: &str, packet: &[u8]) -> Ran {
    run_with(dataplane, program, packet, &mut [0; 20])
}

/// The same for a packet that arrived on this interface.
pub fn run_brought_by(dataplane: &mut Dataplane, ifindex: u32, program: &str, packet: &[u8]) -> Ran {
    count(dataplane, |dataplane| run_once(dataplane, program, packet, ifindex, &mut [0; 20]))
}

/// The same with a control block, in which the program's changes stay.
pub fn run_with(
    dataplane: &mut Dataplane,
    program: &str,
    packet: &[u8],
    control_block: &mut [u8; 20],
) -> Ran {
    count(dataplane, |dataplane| run_once(dataplane, program, packet, 0, control_block))
}

fn count(dataplane: &mut Dataplane, run: impl FnOnce(&mut Dataplane) -> (i32, Vec<u8>)) -> Ran {
    let before = dataplane.counters().unwrap().read().unwrap();
    let (verdict, out) = run(dataplane);
    let after = dataplane.counters().unwrap().read().unwrap();
    let all = |counters: &kilo_host::dataplane::Counters| {
        let mut all = counters.actions.clone();
        all.extend(&counters.drops);
        all
    };
    let (before, after) = (all(&before), all(&after));
    let counted = after
        .iter()
        .filter(|(label, count)| **count == before[*label] + 1)
        .map(|(label, _)| *label)
        .collect();
    assert!(after.iter().all(|(label, count)| *count <= before[label] + 1), "counted more than once");
    assert_eq!(after.len(), Action::ALL.len() + DropReason::ALL.len());
    Ran { verdict, bytes: out, counted }
}

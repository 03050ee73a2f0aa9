//! The programs of a stand-in for Cilium, as BPF instructions: each counts its
//! packets; some encapsulate, deliver or refuse as Cilium's of that name do.

use std::{collections::BTreeMap, net::Ipv4Addr, os::fd::RawFd};

use anyhow::{Context as _, Result};

/// Counters of a node: one a program and hook, by [`super::Place`], then these.
pub const FROM_HOST: usize = 12;
pub const TO_HOST: usize = 13;
pub const FROM_CONTAINER: usize = 14;
pub const FROM_OVERLAY: usize = 15;
/// What the host firewall dropped.
pub const REFUSED: usize = 16;
/// Number of counters.
pub const COUNTERS: usize = 17;

/// Kilo's VXLAN, of which no rule of a host firewall knows.
pub const KILO_VXLAN_PORT: u16 = 51_821;
/// Hardware address of `cilium_host`.
pub const HOST_ADDRESS: [u8; 6] = [0x02, 0xc1, 0, 0, 0, 1];
/// VNI of the overlay; Cilium puts the sender's identity there.
const IDENTITY: i32 = 2;

/// Verdicts: the next program's turn; the last word, as Cilium's programs have it; drop.
const NEXT: i32 = -1;
const OK: i32 = 0;
const SHOT: i32 = 2;

// Opcodes (linux/bpf.h).
const MOV_IMM: u8 = 0xb7;
const MOV: u8 = 0xbf;
const ADD_IMM: u8 = 0x07;
const LOAD_IMM64: u8 = 0x18;
const LOAD_BYTE: u8 = 0x71;
const LOAD_HALF: u8 = 0x69;
const LOAD_WORD: u8 = 0x61;
const STORE_WORD: u8 = 0x63;
const STORE_IMM: u8 = 0x62;
const STORE_IMM64: u8 = 0x7a;
const ATOMIC_ADD: u8 = 0xdb;
const IF_EQUAL: u8 = 0x15;
const IF_NOT_EQUAL: u8 = 0x55;
/// Compares the lower halves: addresses do not fit a signed operand of 64 bits.
const IF_NOT_EQUAL_32: u8 = 0x56;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;

// Helpers.
const MAP_LOOKUP: i32 = 1;
const STORE_BYTES: i32 = 9;
const SET_TUNNEL_KEY: i32 = 21;
const REDIRECT: i32 = 23;
const LOAD_BYTES: i32 = 26;
const CHANGE_TYPE: i32 = 32;

// `__sk_buff` and offsets in a frame.
const PROTOCOL: i16 = 16;
const IPV4: i32 = 0x0008;
const IP_PROTOCOL: i32 = 14 + 9;
const DESTINATION: i32 = 14 + 16;
const DESTINATION_PORT: i32 = 14 + 20 + 2;

/// Descriptors of a node's maps.
#[derive(Clone, Copy, Debug)]
pub struct Maps {
    /// Array of one value: [`COUNTERS`] times u64.
    pub counters: RawFd,
    /// First three octets of a pod CIDR and a zero -> IPv4 address of its node (u32).
    pub ipcache: RawFd,
}

/// Instructions with jumps to labels that come later. r6 is the packet.
struct Code {
    instructions: Vec<u64>,
    jumps: Vec<(usize, &'static str)>,
    labels: BTreeMap<&'static str, usize>,
}

impl Code {
    fn new() -> Self {
        let mut code = Self { instructions: Vec::new(), jumps: Vec::new(), labels: BTreeMap::new() };
        code.add(MOV, 6, 1, 0, 0);
        code
    }

    fn add(&mut self, opcode: u8, to: u8, from: u8, offset: i16, operand: i32) {
        self.instructions.push(
            u64::from(opcode)
                | u64::from(from << 4 | to) << 8
                | u64::from(offset.cast_unsigned()) << 16
                | u64::from(operand.cast_unsigned()) << 32,
        );
    }

    fn jump(&mut self, opcode: u8, register: u8, operand: i32, label: &'static str) {
        self.jumps.push((self.instructions.len(), label));
        self.add(opcode, register, 0, 0, operand);
    }

    fn label(&mut self, label: &'static str) {
        self.labels.insert(label, self.instructions.len());
    }

    fn count(&mut self, maps: Maps, counter: usize) -> Result<()> {
        // The second register number says: an address inside the map's value.
        self.add(LOAD_IMM64, 1, 2, 0, maps.counters);
        self.add(0, 0, 0, 0, i32::try_from(counter * 8)?);
        self.add(MOV_IMM, 2, 0, 0, 1);
        self.add(ATOMIC_ADD, 1, 2, 0, 0);
        Ok(())
    }

    /// `length` bytes of the packet to r10 - 8; where there is no IPv4 header, on to `label`.
    fn load(&mut self, at: i32, length: i32, label: &'static str) {
        self.add(LOAD_WORD, 2, 6, PROTOCOL, 0);
        self.jump(IF_NOT_EQUAL, 2, IPV4, label);
        self.add(STORE_IMM64, 10, 0, -8, 0);
        self.add(MOV, 1, 6, 0, 0);
        self.add(MOV_IMM, 2, 0, 0, at);
        self.stack(3, -8);
        self.add(MOV_IMM, 4, 0, 0, length);
        self.add(CALL, 0, 0, 0, LOAD_BYTES);
        self.jump(IF_NOT_EQUAL, 0, 0, label);
    }

    /// Register = r10 + offset.
    fn stack(&mut self, register: u8, offset: i32) {
        self.add(MOV, register, 10, 0, 0);
        self.add(ADD_IMM, register, 0, 0, offset);
    }

    fn redirect(&mut self, ifindex: u32, flags: i32) {
        self.add(MOV_IMM, 1, 0, 0, ifindex.cast_signed());
        self.add(MOV_IMM, 2, 0, 0, flags);
        self.add(CALL, 0, 0, 0, REDIRECT);
        self.add(EXIT, 0, 0, 0, 0);
    }

    fn answer(&mut self, verdict: i32) {
        self.add(MOV_IMM, 0, 0, 0, verdict);
        self.add(EXIT, 0, 0, 0, 0);
    }

    fn finish(mut self) -> Result<Vec<u64>> {
        for (at, label) in self.jumps {
            let target = *self.labels.get(label).context(label)?;
            let distance = u16::try_from(target - at - 1)?;
            self.instructions[at] |= u64::from(distance) << 16;
        }
        Ok(self.instructions)
    }
}

/// Of somebody else again: counts, and lets the next program have the packet.
pub fn watch(maps: Maps, counter: usize) -> Result<Vec<u64>> {
    let mut code = Code::new();
    code.count(maps, counter)?;
    code.answer(NEXT);
    code.finish()
}

/// Counts, and hands the packet to the host.
pub fn hand_on(maps: Maps, counter: usize) -> Result<Vec<u64>> {
    let mut code = Code::new();
    code.count(maps, counter)?;
    code.answer(OK);
    code.finish()
}

/// `cil_from_netdev` with a host firewall: refuses IPIP and [`KILO_VXLAN_PORT`].
pub fn from_netdev(maps: Maps, counter: usize) -> Result<Vec<u64>> {
    let mut code = Code::new();
    code.count(maps, counter)?;
    code.load(IP_PROTOCOL, 1, "pass");
    code.add(LOAD_BYTE, 2, 10, -8, 0);
    code.jump(IF_EQUAL, 2, 4, "refuse");
    code.jump(IF_NOT_EQUAL, 2, 17, "pass");
    code.load(DESTINATION_PORT, 2, "pass");
    code.add(LOAD_HALF, 2, 10, -8, 0);
    code.jump(IF_NOT_EQUAL, 2, KILO_VXLAN_PORT.to_be().into(), "pass");
    code.label("refuse");
    code.count(maps, REFUSED)?;
    code.answer(SHOT);
    code.label("pass");
    code.answer(OK);
    code.finish()
}

/// `cil_from_host` and `cil_from_container`: to pods of other nodes through `vxlan`.
pub fn encapsulate(maps: Maps, counter: usize, vxlan: u32) -> Result<Vec<u64>> {
    let mut code = Code::new();
    code.count(maps, counter)?;
    code.load(DESTINATION, 3, "pass");
    // The second register number says: a map.
    code.add(LOAD_IMM64, 1, 1, 0, maps.ipcache);
    code.add(0, 0, 0, 0, 0);
    code.stack(2, -8);
    code.add(CALL, 0, 0, 0, MAP_LOOKUP);
    code.jump(IF_EQUAL, 0, 0, "pass");
    // The first two fields of `bpf_tunnel_key`: VNI and remote address.
    code.add(LOAD_WORD, 1, 0, 0, 0);
    code.add(STORE_WORD, 10, 1, -12, 0);
    code.add(STORE_IMM, 10, 0, -16, IDENTITY);
    code.add(MOV, 1, 6, 0, 0);
    code.stack(2, -16);
    code.add(MOV_IMM, 3, 0, 0, 8);
    code.add(MOV_IMM, 4, 0, 0, 0);
    code.add(CALL, 0, 0, 0, SET_TUNNEL_KEY);
    code.jump(IF_NOT_EQUAL, 0, 0, "pass");
    code.redirect(vxlan, 0);
    code.label("pass");
    code.answer(OK);
    code.finish()
}

/// `cil_from_overlay`: what is for the node itself comes out of `cilium_host`,
/// whatever hardware address it was sent to; the rest is for the host to route to a pod.
pub fn from_overlay(maps: Maps, own: Ipv4Addr, cilium_host: u32) -> Result<Vec<u64>> {
    let mut code = Code::new();
    code.count(maps, FROM_OVERLAY)?;
    code.add(MOV, 1, 6, 0, 0);
    code.add(MOV_IMM, 2, 0, 0, 0);
    code.add(CALL, 0, 0, 0, CHANGE_TYPE);
    code.load(DESTINATION, 4, "pass");
    code.add(LOAD_WORD, 2, 10, -8, 0);
    code.jump(IF_NOT_EQUAL_32, 2, i32::from_ne_bytes(own.octets()), "pass");
    let [a, b, c, d, e, f] = HOST_ADDRESS;
    code.add(STORE_IMM, 10, 0, -8, i32::from_ne_bytes([a, b, c, d]));
    code.add(STORE_IMM, 10, 0, -4, i32::from_ne_bytes([e, f, 0, 0]));
    code.add(MOV, 1, 6, 0, 0);
    code.add(MOV_IMM, 2, 0, 0, 0);
    code.stack(3, -8);
    code.add(MOV_IMM, 4, 0, 0, 6);
    code.add(MOV_IMM, 5, 0, 0, 0);
    code.add(CALL, 0, 0, 0, STORE_BYTES);
    code.redirect(cilium_host, 1);
    code.label("pass");
    code.answer(OK);
    code.finish()
}

//! Helpers of tests with real BPF programs.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use kilo_common::lead::{Term, word};
use kilo_common::maps::{
    CONFIG_GATEWAY, CONFIG_LEADER, CONFIG_MASQUERADE, Config, DEVICE_MASQUERADE, Device, HOP_FIRST_NODE,
    HOP_LOCAL, HOP_REMOTE, MASQ_EXCLUDE, MASQ_SRC_ALWAYS, NODE_GATEWAY, NodeValue, PREFIX_NEVER_CLEAR,
    PREFIX_PODS_STEERED, PREFIX_ROUTE, PREFIX_SOURCE, PrefixValue,
};
use kilo_core::{
    flat_map::FlatMap,
    plan::{self, Tables},
};
use nix::mount::{MntFlags, MsFlags, mount, umount2};

/// A BPF file system for one test.
pub struct BpfFs(PathBuf);

impl BpfFs {
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for BpfFs {
    fn drop(&mut self) {
        let _ = umount2(&self.0, MntFlags::MNT_DETACH);
        let _ = std::fs::remove_dir(&self.0);
    }
}

/// Prints why the test is skipped, in the form the test runner counts.
pub fn skip(reason: &str) {
    println!("kilo-skip: {reason}");
}

/// Mounts a BPF file system; `None` when the test has to be skipped.
pub fn bpffs() -> Option<BpfFs> {
    if !nix::unistd::geteuid().is_root() {
        skip("loading BPF programs needs root");
        return None;
    }
    let directory = tempfile::tempdir().unwrap().keep();
    mount(Some("bpf"), &directory, Some("bpf"), MsFlags::empty(), None::<&str>).unwrap();
    Some(BpfFs(directory))
}

pub mod classes;
pub mod decisions;
pub mod flows;
pub mod follow_up_packets;
pub mod foreign;
pub mod oracle;
pub mod packet;
pub mod random;
pub mod signals;

pub const SELF: [u8; 4] = [10, 1, 0, 11];
pub const MEMBER: [u8; 4] = [10, 1, 0, 12];
pub const OWN_POD: [u8; 4] = [10, 42, 1, 2];
pub const MEMBER_POD: [u8; 4] = [10, 42, 2, 2];
pub const REMOTE_POD: [u8; 4] = [10, 42, 4, 2];
pub const OUTSIDE: [u8; 4] = [198, 51, 100, 2];
pub const PUBLIC: [u8; 4] = [192, 0, 2, 11];
/// IPv6 address of the same interface.
pub const PUBLIC_V6: [u8; 16] = [0x20, 1, 0x0d, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 11];
/// Loopback, the interface that `BPF_PROG_TEST_RUN` sets for packets.
pub const IFINDEX: u32 = 1;
pub const MEMBER_HOP: u32 = HOP_FIRST_NODE;

fn prefixes(list: &[(&str, u32, u32)]) -> FlatMap<ipnet::IpNet, PrefixValue> {
    list.iter()
        .map(|(prefix, hop, flags)| {
            let flags = PREFIX_ROUTE | PREFIX_SOURCE | flags;
            (prefix.parse().unwrap(), PrefixValue { hop: *hop, flags })
        })
        .collect()
}

/// The other node as a sender, on the interface of the tests.
pub fn node(flags: u32) -> NodeValue {
    let interfaces = [IFINDEX, 0, 0, 0];
    NodeValue { hop: MEMBER_HOP, flags, interfaces, ..NodeValue::default() }
}

/// Tables of the leader a1 with one member a2 and a remote location.
pub fn leader_tables() -> Tables {
    let member = plan::Hop::Node {
        tunnel: kilo_core::settings::Tunnel::Ipip,
        ifindex: IFINDEX,
        mtu: 1480,
        local: std::net::IpAddr::from(SELF),
        remote: std::net::IpAddr::from(MEMBER),
    };
    Tables {
        prefix: prefixes(&[
            ("10.42.1.0/24", HOP_LOCAL, 0),
            ("10.1.0.11/32", HOP_LOCAL, 0),
            ("10.42.2.0/24", MEMBER_HOP, PREFIX_NEVER_CLEAR),
            ("10.1.0.12/32", MEMBER_HOP, PREFIX_PODS_STEERED),
            ("10.42.4.0/24", HOP_REMOTE, PREFIX_NEVER_CLEAR),
            ("10.42.9.0/24", HOP_REMOTE, PREFIX_NEVER_CLEAR),
            ("10.5.0.1/32", HOP_REMOTE, PREFIX_NEVER_CLEAR),
        ]),
        hop: BTreeMap::from([
            (HOP_LOCAL, plan::Hop::Local),
            (HOP_REMOTE, plan::Hop::Wireguard),
            (MEMBER_HOP, member),
        ]),
        lead: [word(Term::NONE, 2); 2],
        node: BTreeMap::from([(MEMBER.into(), node(0))]),
        masq_src: FlatMap::from_iter([
            ("10.42.1.0/24".parse().unwrap(), MASQ_SRC_ALWAYS),
            ("fd42:1::/64".parse().unwrap(), MASQ_SRC_ALWAYS),
        ]),
        masq_dst: FlatMap::from_iter([
            ("10.42.1.0/24".parse().unwrap(), MASQ_EXCLUDE),
            ("10.42.2.0/24".parse().unwrap(), MASQ_EXCLUDE),
            ("10.42.4.0/24".parse().unwrap(), MASQ_EXCLUDE),
        ]),
        device: BTreeMap::from([(
            IFINDEX,
            Device { masq_v4: PUBLIC, masq_v6: PUBLIC_V6, flags: DEVICE_MASQUERADE },
        )]),
        masq_addr: BTreeMap::new(),
        config: Config {
            kilo_ifindex: IFINDEX,
            flags: CONFIG_LEADER | CONFIG_GATEWAY | CONFIG_MASQUERADE,
            nat_port_min: 32_768,
            nat_port_max: 60_999,
            wireguard_port: 51_820,
            direct_shift: 8,
            kilo_mtu: 1420,
            vxlan_ifindex: 0,
            ipip_ifindex: 0,
            private_v4: SELF,
            overlay_v4: [0; 4],
            wireguard_v4: [10, 5, 0, 1],
            ..Config::default()
        },
        ..Tables::default()
    }
}

/// Tables of the member a2, whose leader is a1.
pub fn member_tables() -> Tables {
    let mut tables = leader_tables();
    let leader = plan::Hop::Node {
        tunnel: kilo_core::settings::Tunnel::Ipip,
        ifindex: IFINDEX,
        mtu: 1480,
        local: std::net::IpAddr::from(SELF),
        remote: std::net::IpAddr::from(MEMBER),
    };
    tables.config.flags = CONFIG_MASQUERADE;
    tables.hop.remove(&HOP_REMOTE);
    tables.hop.insert(MEMBER_HOP, leader);
    tables.lead = [word(Term::NONE, 4); 2];
    tables.node = BTreeMap::from([(MEMBER.into(), node(NODE_GATEWAY))]);
    tables
}

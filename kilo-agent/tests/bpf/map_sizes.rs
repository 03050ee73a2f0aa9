//! A full map: the change is refused with a clear message, and nothing else is affected.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::bpf;

use std::{
    collections::BTreeSet,
    net::{Ipv4Addr, Ipv6Addr},
    time::Instant,
};

use aya::maps::MapData;
use bpf::MEMBER_HOP;
use ipnet::IpNet;
use kilo_common::{
    map_table::{self, MAPS, MapSpec, name},
    maps::*,
};
use kilo_core::plan::Tables;
use kilo_host::dataplane::{Dataplane, pin_directory, read_tables};

#[test]
fn every_map_of_the_object_is_as_its_row_in_the_table_says() {
    let Some(fs) = bpf::bpffs() else { return };
    let _dataplane = Dataplane::open(fs.path(), false).unwrap();
    let mut seen = BTreeSet::new();
    for entry in std::fs::read_dir(pin_directory(fs.path())).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        // Programs are pinned in a directory of their own.
        if path.is_dir() {
            assert_eq!(name, "programs");
            continue;
        }
        let info = MapData::from_pin(&path).unwrap().info().unwrap();
        let map = MapSpec::named(&name).unwrap();
        let found = (info.key_size(), info.value_size(), info.max_entries());
        assert_eq!((map.key, map.value, map.size), found, "{name}");
        // `BPF_MAP_TYPE_LPM_TRIE` is `LpmTrie` in both.
        assert_eq!(format!("{:?}", map.kind), format!("{:?}", info.map_type().unwrap()), "{name}");
        assert!(map.is_pinned, "{name}");
        seen.insert(name);
    }
    let missing: Vec<_> = MAPS.iter().filter(|map| map.is_pinned && !seen.contains(map.name)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

/// Begins with the EtherType of IPv4: the WireGuard device has no Ethernet header, but `BPF_PROG_TEST_RUN`
/// reads one.
const POD: [u8; 4] = [8, 0, 1, 2];

/// The leader's tables with this map grown to `entries` entries.
fn grown(map: &str, entries: u32) -> Tables {
    let mut tables = bpf::leader_tables();
    let v4 = |number: u32| IpNet::new(Ipv4Addr::from(0x6400_0000 + number).into(), 32).unwrap();
    let v6 = |number: u32| {
        IpNet::new(Ipv6Addr::from(0xfd01_u128 << 112 | u128::from(number)).into(), 128).unwrap()
    };
    let remote = PrefixValue { hop: HOP_REMOTE, flags: PREFIX_ROUTE };
    let node = bpf::node(0);
    let is_v4 = tables.prefix.keys().chain(tables.masq_dst.keys()).all(|prefix| prefix.addr().is_ipv4());
    assert!(is_v4, "counted as such below");
    let more = |there: usize| 0..entries - u32::try_from(there).unwrap();
    match map {
        name::PREFIX_V4 => {
            let more = more(tables.prefix.len());
            tables.prefix.extend(more.map(|number| (v4(number), remote)));
        }
        name::PREFIX_V6 => tables.prefix.extend(more(0).map(|number| (v6(number), remote))),
        name::MASQ_SRC => {
            let more = more(tables.masq_src.len());
            tables.masq_src.extend(more.map(|number| (v4(number), MASQ_SRC_ALWAYS)));
        }
        name::MASQ_DST => {
            let more = more(tables.masq_dst.len());
            tables.masq_dst.extend(more.map(|number| (v4(number), MASQ_EXCLUDE)));
        }
        name::MASQ_ADDR => {
            let own = std::net::IpAddr::from(bpf::PUBLIC);
            // The address itself also has one entry.
            tables.masq_addr.extend((0..entries - 1).map(|number| ((bpf::IFINDEX, v4(number)), own)));
        }
        name::NODE_V4 => {
            let more = more(tables.node.len());
            tables.node.extend(more.map(|number| (v4(number).addr(), node)));
        }
        name::NODE_V6 => tables.node.extend(more(0).map(|number| (v6(number).addr(), node))),
        name::DEVICE => {
            let more = more(tables.device.len());
            tables.device.extend(more.map(|number| (number + 100, Device::default())));
        }
        name::SIGNAL_KEY => {
            let key = SignalKey { hop: MEMBER_HOP, ..Default::default() };
            tables.signal_key.extend((0..entries).map(|number| (v4(number).addr(), key)));
        }
        name::HOP => {
            let member = tables.hop[&MEMBER_HOP];
            tables.hop.insert(entries - 1, member);
        }
        _ => panic!("{map} is not filled by the agent"),
    }
    tables
}

#[test]
fn a_full_map_takes_what_fits_refuses_one_more_and_hurts_nothing_else() {
    let Some(fs) = bpf::bpffs() else { return };
    let mut dataplane = Dataplane::open(fs.path(), false).unwrap();
    for MapSpec { name: map, size: most, .. } in MAPS.iter().filter(|map| map.is_filled()) {
        let (map, most, started) = (*map, *most, Instant::now());
        dataplane.write(&bpf::leader_tables()).unwrap();
        let before = read_tables(fs.path()).unwrap();

        let error = dataplane.write(&grown(map, most + 1)).unwrap_err();
        assert_eq!(error.label(), "bpf_map_full");
        let text = error.to_string();
        for said in [map, &most.to_string(), &(most + 1).to_string(), "Nothing was changed"] {
            assert!(text.contains(said), "{said:?} is not in: {text}");
        }
        assert!(read_tables(fs.path()).unwrap() == before, "{map}: something was changed");
        // A packet is still steered.
        let packet = bpf::packet::udp(POD, bpf::MEMBER_POD, (1000, 2000), b"payload");
        let ran = bpf::packet::run(&mut dataplane, "kilo_egress", &packet);
        assert_eq!(ran.counted, ["steer"], "{map}");

        // Filling a trie takes seconds, on an emulated machine (one CPU) minutes: one must suffice, except
        // with KILO_FILL=all.
        let alone = std::thread::available_parallelism().is_ok_and(|count| count.get() == 1);
        let all = std::env::var("KILO_FILL").is_ok_and(|text| text == "all");
        if !all && most > map_table::NODE_V4.size && (map != name::PREFIX_V4 || alone) {
            println!("{map}: more than {most} are refused, after {:?}", started.elapsed());
            continue;
        }
        let full = grown(map, most);
        dataplane.write(&full).unwrap();
        assert_eq!(dataplane.entries()[map], most as usize);
        assert_eq!(dataplane.write(&full).unwrap(), 0, "{map}: a second time nothing is written");
        dataplane.write(&bpf::leader_tables()).unwrap();
        assert!(read_tables(fs.path()).unwrap() == before, "{map}: it is emptied again");
        println!("{map}: {most} places, filled and emptied in {:?}", started.elapsed());
    }
}

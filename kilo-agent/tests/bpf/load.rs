//! The object loads, pins the expected maps, and is adopted again.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::{collections::BTreeSet, os::unix::fs::MetadataExt as _};

use aya::maps::{Array, HashMap, Map, MapData};
use kilo_common::{map_table::name, maps::NodeValue};
use kilo_host::dataplane::{Dataplane, PROGRAMS, pin_directory};

use crate::bpf;
use crate::netns;

/// How many instructions the verifier may look at for each program: a fifth more than on that of Linux 6.1, 6.12,
/// 6.18 and the newest of Debian which looked at most on 30 November 2026. A first start waits for all of them.
const VERIFIED: [(&str, u32); 10] = [
    ("kilo_egress", 22_000),
    ("lan_ingress", 66_000),
    ("uplink_egress", 23_000),
    ("l3_egress", 17_500),
    ("l3_ingress", 54_000),
    ("kilo_ingress", 18_000),
    ("tunnel_ingress", 6_500),
    ("pod_ingress", 1_400),
    ("follow", 60),
    ("inject", 60),
];

#[test]
fn every_program_loads_with_room_to_spare() {
    let Some(fs) = bpf::bpffs() else { return };
    let mut dataplane = Dataplane::open(fs.path(), false).unwrap();
    for name in PROGRAMS {
        let info = dataplane.program(name).unwrap().info().unwrap();
        let verified = info.verified_instruction_count().unwrap_or(0);
        println!("{name}: {verified} instructions verified");
        let (_, most) = VERIFIED.into_iter().find(|(program, _)| *program == name).unwrap();
        assert!(
            verified <= most,
            "{name} has the verifier look at {verified} instructions, at most {most} are planned"
        );
    }
}

/// Simulates a kernel built without BTF: nothing is read from it.
#[test]
fn it_loads_where_the_kernel_shows_no_btf() {
    netns::isolated("it_loads_where_the_kernel_shows_no_btf", || async {
        netns::sh("mount -t sysfs sys /sys; [ ! -e /sys/kernel/btf ] || mount -t tmpfs none /sys/kernel/btf");
        assert!(!std::path::Path::new("/sys/kernel/btf/vmlinux").exists());
        drop(Dataplane::open(std::path::Path::new("/run/bpf"), false).unwrap());
    });
}

#[test]
fn maps_are_adopted_with_their_content() {
    let Some(fs) = bpf::bpffs() else { return };
    let tables = bpf::leader_tables();
    let mut first = Dataplane::open(fs.path(), false).unwrap();
    assert!(first.write(&tables).unwrap() > 0);
    drop(first);
    let mut second = Dataplane::open(fs.path(), false).unwrap();
    assert_eq!(second.write(&tables).unwrap(), 0, "the next agent finds everything as it should be");
}

#[test]
fn a_file_system_that_we_mount_is_roots_alone() {
    netns::isolated("a_file_system_that_we_mount_is_roots_alone", || async {
        let path = std::path::Path::new("/run/bpf");
        drop(Dataplane::open(path, false).unwrap());
        assert_eq!(netns::sh("stat -f -c %T /run/bpf; stat -c %a,%u /run/bpf"), "bpf_fs\n1700,0\n");
        let user = "setpriv --reuid 65534 --regid 65534 --clear-groups";
        assert!(!netns::succeeds(&format!("{user} mkdir /run/bpf/mine")));
        assert!(!netns::succeeds(&format!("{user} ls /run/bpf")));
        // An existing file system keeps its mode; our directory in it is only root's.
        netns::sh("mkdir /run/open; mount -t bpf bpf /run/open; chmod 1777 /run/open");
        drop(Dataplane::open(std::path::Path::new("/run/open"), false).unwrap());
        assert_eq!(netns::sh("stat -c %a /run/open /run/open/kilo"), "1777\n700\n");
        assert!(!netns::succeeds(&format!("{user} ls /run/open/kilo")));
    });
}

#[test]
fn one_changed_prefix_is_one_write_and_one_of_its_place_in_the_array() {
    let Some(fs) = bpf::bpffs() else { return };
    let mut tables = bpf::leader_tables();
    let mut dataplane = Dataplane::open(fs.path(), false).unwrap();
    dataplane.write(&tables).unwrap();
    tables.prefix.remove(&"10.42.9.0/24".parse().unwrap());
    assert_eq!(dataplane.write(&tables).unwrap(), 2);
    assert_eq!(dataplane.write(&tables).unwrap(), 0);
    // The next agent finds both unchanged.
    drop(dataplane);
    let mut dataplane = Dataplane::open(fs.path(), false).unwrap();
    assert_eq!(dataplane.write(&tables).unwrap(), 0);
    // An earlier data path has no such array: everything else is adopted.
    drop(dataplane);
    std::fs::remove_file(pin_directory(fs.path()).join("direct_v4")).unwrap();
    let mut dataplane = Dataplane::open(fs.path(), false).unwrap();
    let places = tables.prefix.keys().filter(|prefix| prefix.addr().is_ipv4() && prefix.prefix_len() == 24);
    assert_eq!(dataplane.write(&tables).unwrap(), places.count() as u64);
}

/// The pinned array that programs consult before the trie.
/// Failover marks members while reconciles write other fields of the same entries.
#[test]
fn a_mark_brings_back_no_field_that_a_reconcile_has_changed() {
    let Some(fs) = bpf::bpffs() else { return };
    let mut tables = bpf::leader_tables();
    let mut dataplane = Dataplane::open(fs.path(), false).unwrap();
    dataplane.write(&tables).unwrap();
    let mut led = dataplane.led().unwrap();
    let (mut written, mut outdated) = (0, 0);
    std::thread::scope(|scope| {
        let marks = scope.spawn(|| {
            for round in 0..20_000 {
                led.mark(bpf::MEMBER.into(), round % 2 == 0).unwrap();
            }
        });
        while !marks.is_finished() {
            written += 1;
            tables.node.get_mut(&bpf::MEMBER.into()).unwrap().interfaces[1] = written;
            dataplane.write(&tables).unwrap();
            let map = dataplane.map(name::NODE_V4).unwrap();
            let held = HashMap::<_, [u8; 4], NodeValue>::try_from(map).unwrap();
            let is_outdated = |_| held.get(&bpf::MEMBER, 0).unwrap().interfaces[1] != written;
            outdated += u32::from((0..20).any(is_outdated));
        }
    });
    assert!(written > 10, "{written} writes");
    assert_eq!(outdated, 0, "of {written} writes");
}

fn array(fs: &bpf::BpfFs) -> Array<MapData, u64> {
    let data = MapData::from_pin(pin_directory(fs.path()).join("direct_v4")).unwrap();
    Array::try_from(Map::Array(data)).unwrap()
}

/// An older agent changes the trie but not the array, and a killed one may have written half of it.
#[test]
fn what_another_agent_has_left_in_the_array_is_mended_by_the_next() {
    let Some(fs) = bpf::bpffs() else { return };
    let tables = bpf::leader_tables();
    let mut dataplane = Dataplane::open(fs.path(), false).unwrap();
    dataplane.write(&tables).unwrap();
    drop(dataplane);
    let all = |array: &Array<MapData, u64>| array.iter().map(Result::unwrap).collect::<Vec<_>>();
    let mut left = array(&fs);
    let right = all(&left);
    let taken = right.iter().position(|word| *word != 0).unwrap();
    for (place, word) in [(taken, right[taken] ^ 1), (taken + 1, right[taken]), (65_535, u64::MAX), (7, 1)] {
        left.set(u32::try_from(place).unwrap(), word, 0).unwrap();
    }
    let mut dataplane = Dataplane::open(fs.path(), false).unwrap();
    dataplane.write(&tables).unwrap();
    assert_eq!(all(&left), right);
    assert_eq!(dataplane.write(&tables).unwrap(), 0);
}

#[test]
fn a_pin_of_another_shape_is_replaced() {
    let Some(fs) = bpf::bpffs() else { return };
    drop(Dataplane::open(fs.path(), false).unwrap());
    let pins = pin_directory(fs.path());
    std::fs::remove_file(pins.join("config")).unwrap();
    std::fs::rename(pins.join("count"), pins.join("config")).unwrap();
    drop(Dataplane::open(fs.path(), false).unwrap());
}

#[test]
fn rubbish_that_is_no_map_is_replaced() {
    let Some(fs) = bpf::bpffs() else { return };
    drop(Dataplane::open(fs.path(), false).unwrap());
    let pin = pin_directory(fs.path()).join("hop");
    std::fs::remove_file(&pin).unwrap();
    std::fs::create_dir(&pin).unwrap();
    let error = Dataplane::open(fs.path(), false).err().map(|error| error.to_string());
    // We never create a directory there: it is named, not removed.
    assert!(error.is_some_and(|error| error.contains("hop")));
}

/// Permanently denies `bpf()` to this thread, as a container's seccomp profile does.
fn forbid_bpf() {
    use nix::libc;
    let statement = |code: u32, jump_false: u8, k: u32| libc::sock_filter {
        code: u16::try_from(code).unwrap(),
        jt: 0,
        jf: jump_false,
        k,
    };
    let number = u32::try_from(libc::SYS_bpf).unwrap();
    let denied = libc::SECCOMP_RET_ERRNO | u32::try_from(libc::EPERM).unwrap();
    // The system call number is the first word of struct seccomp_data (include/uapi/linux/seccomp.h).
    let mut filter = [
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
        statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 1, number),
        statement(libc::BPF_RET | libc::BPF_K, 0, denied),
        statement(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: 4, filter: filter.as_mut_ptr() };
    // SAFETY: plain numbers; and the program outlives the call, its length is that of the filter.
    let codes = unsafe {
        let strict = libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        (strict, libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program))
    };
    assert_eq!(codes, (0, 0), "{}", std::io::Error::last_os_error());
}

#[test]
fn an_agent_that_may_not_ask_the_kernel_leaves_the_pins_of_the_running_one_alone() {
    let Some(fs) = bpf::bpffs() else { return };
    let running = Dataplane::open(fs.path(), false).unwrap();
    let pins = || {
        let entries = std::fs::read_dir(pin_directory(fs.path())).unwrap();
        entries.map(|entry| entry.unwrap().metadata().unwrap().ino()).collect::<BTreeSet<_>>()
    };
    let before = pins();
    assert!(before.len() > 10, "{before:?}");
    let next = std::thread::scope(|scope| {
        let start = || {
            forbid_bpf();
            Dataplane::open(fs.path(), false).err().map(|error| error.to_string())
        };
        scope.spawn(start).join().unwrap()
    });
    assert!(next.as_ref().is_some_and(|error| error.contains("CAP_BPF")), "{next:?}");
    assert_eq!(pins(), before, "no pin was removed or made");
    drop(running);
}

#[test]
fn a_program_pinned_in_the_place_of_a_map_is_replaced() {
    let Some(fs) = bpf::bpffs() else { return };
    std::fs::create_dir_all(pin_directory(fs.path())).unwrap();
    let _program = bpf::foreign::program(&pin_directory(fs.path()).join("prefix_v4"));
    let mut dataplane = Dataplane::open(fs.path(), false).unwrap();
    assert!(dataplane.write(&bpf::leader_tables()).unwrap() > 0);
}

#[test]
fn the_bpf_file_system_is_mounted_when_it_is_not() {
    netns::isolated("the_bpf_file_system_is_mounted_when_it_is_not", || async {
        let plain = tempfile::tempdir().unwrap();
        let there = plain.path().join("sys/fs/bpf");
        drop(Dataplane::open(&there, false).unwrap());
        assert!(netns::sh("mount -t bpf").contains(there.to_str().unwrap()));
        drop(Dataplane::open(&there, false).unwrap());
        assert_eq!(netns::sh("mount -t bpf").matches(there.to_str().unwrap()).count(), 1, "only once");
        netns::sh(&format!("umount {}", there.display()));
    });
}

#[test]
fn a_bpf_file_system_that_cannot_be_mounted_is_said_to_be_the_operators_to_mount() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let error = Dataplane::open(file.path(), false).err().unwrap();
    assert_eq!(error.label(), "bpffs");
    assert!(error.to_string().contains("mount -t bpf bpf"), "{error}");
}

#[test]
fn every_action_and_every_drop_reason_is_a_metric() {
    use kilo_common::{counters::Action, drop_reasons::DropReason};
    let Some(fs) = bpf::bpffs() else { return };
    let mut dataplane = Dataplane::open(fs.path(), false).unwrap();
    dataplane.write(&bpf::leader_tables()).unwrap();
    let metrics = kilo_agent::metrics::Metrics::default();
    let counters = dataplane.counters().unwrap();
    metrics.set_counters(move || counters.read());
    let stranger = [10, 1, 0, 99];
    let frame = bpf::packet::steered(stranger, bpf::SELF, &[0; 40]);
    bpf::packet::run(&mut dataplane, "lan_ingress", &frame);
    let text = metrics.encode().unwrap();
    let lines = Action::ALL
        .iter()
        .map(|action| format!("kilo_packets_total{{action=\"{}\"}} 0", action.label()))
        .chain(DropReason::ALL.iter().map(|reason| {
            let count = u8::from(*reason == DropReason::UnknownSender);
            format!("kilo_dropped_packets_total{{reason=\"{}\"}} {count}", reason.label())
        }));
    for line in lines {
        assert!(text.lines().any(|it| it == line), "{line} is missing from\n{text}");
    }
}

#[test]
fn bpftool_shows_the_maps_with_the_names_of_their_fields() {
    let Some(fs) = bpf::bpffs() else { return };
    if !netns::succeeds("bpftool version") {
        bpf::skip("bpftool is not installed");
        return;
    }
    let mut dataplane = Dataplane::open(fs.path(), false).unwrap();
    dataplane.write(&bpf::leader_tables()).unwrap();
    for (map, field) in [
        ("prefix_v4", "\"hop\": 4"),
        ("hop", "\"mtu\": 1480"),
        ("node_v4", "\"hop\": 4"),
        ("device", "\"masq_v4\": [192,0,2,11"),
        ("config", "\"wireguard_port\": 51820"),
        ("monitor", "\"deadline\": 0"),
    ] {
        let text =
            netns::sh(&format!("bpftool map dump pinned {}", pin_directory(fs.path()).join(map).display()));
        let text =
            text.split_whitespace().collect::<Vec<_>>().join(" ").replace("[ ", "[").replace(", ", ",");
        assert!(text.contains(&field.replace(", ", ",")), "{map}: no {field} in\n{text}");
    }
}

//! Programs pinned by an earlier agent of the same build are adopted, and no others.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    pin::pin,
    time::{Duration, Instant},
};

use kilo_host::{
    dataplane::{Dataplane, Interfaces, ON_DEMAND, PROGRAMS, pin_directory},
    net::Net,
};

use crate::{bpf, netns, wait};

/// Number of programs loaded whatever the interfaces.
const ALWAYS: usize = PROGRAMS.len() - ON_DEMAND.len();

/// Pin of each program, by program name.
fn pins(bpffs: &Path) -> BTreeMap<String, PathBuf> {
    let builds: Vec<_> =
        fs::read_dir(pin_directory(bpffs).join("programs")).unwrap().map(|it| it.unwrap().path()).collect();
    assert_eq!(builds.len(), 1, "programs of one build: {builds:?}");
    let name = |path: &Path| {
        let file = path.file_name().unwrap().to_string_lossy().into_owned();
        file.split('-').next().unwrap().to_owned()
    };
    fs::read_dir(&builds[0])
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .map(|path| (name(&path), path))
        .collect()
}

/// A packet from a stranger. `BPF_PROG_TEST_RUN` reads its address as the EtherType of IPv4.
fn without_link_layer() -> Vec<u8> {
    bpf::packet::steered([8, 0, 0, 99], bpf::SELF, &[0; 40]).split_off(14)
}

fn id(dataplane: &mut Dataplane, program: &str) -> u32 {
    dataplane.program(program).unwrap().info().unwrap().id()
}

#[test]
fn the_next_agent_of_the_same_build_takes_all_programs_over() {
    let Some(fs) = bpf::bpffs() else { return };
    let mut first = Dataplane::open(fs.path(), false).unwrap();
    assert_eq!((first.loaded(), pins(fs.path()).len()), (ALWAYS, ALWAYS), "no uplink without link layer");
    let ids = PROGRAMS.map(|program| id(&mut first, program));
    assert_eq!((first.loaded(), pins(fs.path()).len()), (PROGRAMS.len(), PROGRAMS.len()), "asked for");
    drop(first);
    let mut next = Dataplane::open(fs.path(), false).unwrap();
    assert_eq!(PROGRAMS.map(|program| id(&mut next, program)), ids);
    assert_eq!(next.loaded(), 0);
    // They are the same programs with the same maps.
    next.write(&bpf::leader_tables()).unwrap();
    let frame = bpf::packet::steered([10, 1, 0, 99], bpf::SELF, &[0; 40]);
    let ran = bpf::packet::run(&mut next, "lan_ingress", &frame);
    assert!(ran.counted.contains(&"unknown_sender"), "{ran:?}");
}

/// Opening a map or program by id would need `CAP_SYS_ADMIN`.
#[test]
fn the_rights_of_the_daemonset_suffice_to_take_programs_over() {
    let Some(fs) = bpf::bpffs() else { return };
    let path = fs.path();
    std::thread::scope(|scope| {
        let start = || {
            netns::take_the_rights_of_the_daemonset();
            let first = Dataplane::open(path, false).unwrap().loaded();
            (first, Dataplane::open(path, false).unwrap().loaded())
        };
        assert_eq!(scope.spawn(start).join().unwrap(), (ALWAYS, 0));
    });
}

#[test]
fn programs_with_a_log_are_not_taken_over_and_do_not_take_over() {
    let Some(fs) = bpf::bpffs() else { return };
    assert_eq!(Dataplane::open(fs.path(), false).unwrap().loaded(), ALWAYS);
    for _ in 0..2 {
        let loaded = Dataplane::open(fs.path(), true).unwrap().loaded();
        assert_eq!(loaded, PROGRAMS.len(), "nobody reads the log of an earlier agent's");
    }
    // The maps are the same, so the first agent's programs remain usable.
    assert_eq!(Dataplane::open(fs.path(), false).unwrap().loaded(), 0);
}

/// The pinned programs still write into the removed map.
#[test]
fn programs_with_another_map_than_the_pinned_one_are_loaded_anew() {
    let (Some(fs), Some(elsewhere)) = (bpf::bpffs(), bpf::bpffs()) else { return };
    for path in [fs.path(), elsewhere.path()] {
        drop(Dataplane::open(path, false).unwrap());
    }
    // A map of the same shape that not every program uses.
    let map = aya::maps::MapData::from_pin(pin_directory(elsewhere.path()).join("inbound")).unwrap();
    fs::remove_file(pin_directory(fs.path()).join("inbound")).unwrap();
    map.pin(pin_directory(fs.path()).join("inbound")).unwrap();
    let next = Dataplane::open(fs.path(), false).unwrap();
    assert_eq!(next.loaded(), ALWAYS);
    assert_eq!(pins(fs.path()).len(), ALWAYS, "the stale ones are gone");
    drop(next);
    assert_eq!(Dataplane::open(fs.path(), false).unwrap().loaded(), 0);
}

#[test]
fn a_pin_that_is_not_what_its_name_says_is_not_put_on_a_hook() {
    let Some(fs) = bpf::bpffs() else { return };
    let mut first = Dataplane::open(fs.path(), false).unwrap();
    let former = id(&mut first, "kilo_ingress");
    drop(first);
    let there = pins(fs.path());
    // Another program of ours, a foreign one, and a map.
    fs::remove_file(&there["kilo_egress"]).unwrap();
    fs::rename(&there["lan_ingress"], &there["kilo_egress"]).unwrap();
    let _foreign = bpf::foreign::program(&there["lan_ingress"]);
    fs::remove_file(&there["uplink_egress"]).unwrap();
    let map = aya::maps::MapData::from_pin(pin_directory(fs.path()).join("count")).unwrap();
    map.pin(&there["uplink_egress"]).unwrap();
    let mut next = Dataplane::open(fs.path(), false).unwrap();
    assert_eq!(next.loaded(), ALWAYS);
    assert_ne!(id(&mut next, "kilo_ingress"), former, "programs that were not loaded together are not a set");
    assert_eq!(pins(fs.path()).len(), ALWAYS, "the wrong ones are replaced");
    let frame = bpf::packet::steered([10, 1, 0, 99], bpf::SELF, &[0; 40]);
    next.write(&bpf::leader_tables()).unwrap();
    let ran = bpf::packet::run(&mut next, "lan_ingress", &frame);
    assert!(ran.counted.contains(&"unknown_sender"), "{ran:?}");
    drop(next);
    assert_eq!(Dataplane::open(fs.path(), false).unwrap().loaded(), 0, "and these are taken over");
}

#[test]
fn where_others_may_write_nothing_is_taken_over() {
    let Some(fs) = bpf::bpffs() else { return };
    drop(Dataplane::open(fs.path(), false).unwrap());
    let top = fs.path().join("kilo");
    for (mode, loaded) in [(0o777, ALWAYS), (0o700, 0)] {
        fs::set_permissions(&top, fs::Permissions::from_mode(mode)).unwrap();
        assert_eq!(Dataplane::open(fs.path(), false).unwrap().loaded(), loaded, "{mode:o}");
    }
    nix::unistd::chown(&top, Some(65534.into()), None).unwrap();
    assert_eq!(Dataplane::open(fs.path(), false).unwrap().loaded(), ALWAYS, "somebody else's directory");
}

/// An agent that ends while pinning leaves some pins; only programs of one load share the unpinned maps.
#[test]
fn where_one_program_is_missing_all_are_loaded_anew() {
    let Some(fs) = bpf::bpffs() else { return };
    drop(Dataplane::open(fs.path(), false).unwrap());
    fs::remove_file(&pins(fs.path())["inject"]).unwrap();
    assert_eq!(Dataplane::open(fs.path(), false).unwrap().loaded(), ALWAYS);
    assert_eq!(Dataplane::open(fs.path(), false).unwrap().loaded(), 0);
}

/// Otherwise they would use maps that nobody fills.
#[test]
fn what_is_loaded_late_uses_the_maps_of_the_others_or_is_not_loaded() {
    let Some(fs) = bpf::bpffs() else { return };
    let mut dataplane = Dataplane::open(fs.path(), false).unwrap();
    let map = pin_directory(fs.path()).join("config");
    let aside = pin_directory(fs.path()).join("aside");
    fs::rename(&map, &aside).unwrap();
    let error = dataplane.program("l3_ingress").map(drop).unwrap_err().to_string();
    assert!(error.contains("were removed or replaced; restart kg"), "{error}");
    assert!(!map.exists(), "no other one is made");
    fs::rename(&aside, &map).unwrap();
    dataplane.write(&bpf::leader_tables()).unwrap();
    let ran = bpf::packet::run(&mut dataplane, "l3_ingress", &without_link_layer());
    assert!(ran.counted.contains(&"unknown_sender"), "{ran:?}");
    drop(dataplane);
    assert_eq!(Dataplane::open(fs.path(), false).unwrap().loaded(), 0);
    fs::remove_file(&pins(fs.path())["l3_egress"]).unwrap();
    assert_eq!(Dataplane::open(fs.path(), false).unwrap().loaded(), ALWAYS, "one of two is not enough");
    assert_eq!(pins(fs.path()).len(), ALWAYS);
}

/// Programs of two loads do not share their unpinned maps.
#[test]
fn what_is_left_of_a_late_load_goes_before_the_next() {
    let Some(fs) = bpf::bpffs() else { return };
    let mut first = Dataplane::open(fs.path(), false).unwrap();
    let mut second = Dataplane::open(fs.path(), false).unwrap();
    assert_eq!((first.loaded(), second.loaded()), (ALWAYS, 0));
    let left = id(&mut first, "l3_ingress");
    fs::remove_file(&pins(fs.path())["l3_egress"]).unwrap();
    assert_ne!(id(&mut second, "l3_ingress"), left);
    assert_eq!(second.loaded(), ON_DEMAND.len(), "both are of one load");
    let build = pins(fs.path())["l3_egress"].parent().unwrap().to_owned();
    assert_eq!(fs::read_dir(build).unwrap().count(), PROGRAMS.len(), "no program has two pins");
}

/// An uplink that needs the programs finds them loaded, and closing the data path meanwhile leaves no
/// partial load.
#[test]
fn a_thread_loads_what_is_loaded_late_and_ends_with_the_data_path() {
    let Some(fs) = bpf::bpffs() else { return };
    let mut dataplane = Dataplane::open(fs.path(), false).unwrap();
    dataplane.load_late_beside();
    dataplane.load_late_beside();
    drop(dataplane);
    assert_eq!(pins(fs.path()).len(), PROGRAMS.len(), "pinned when the data path is closed");
    let mut next = Dataplane::open(fs.path(), false).unwrap();
    next.load_late_beside();
    assert_eq!((next.program("l3_ingress").is_ok(), next.loaded()), (true, 0), "nothing is left to load");
    drop(next);
    let Some(fs) = bpf::bpffs() else { return };
    let mut dataplane = Dataplane::open(fs.path(), false).unwrap();
    dataplane.load_late_beside();
    let pinned = || pins(fs.path()).contains_key("l3_egress");
    wait::until("a thread loads them", Duration::from_secs(20), pinned);
    assert_eq!(dataplane.loaded(), ALWAYS, "nobody has asked for them");
    dataplane.write(&bpf::leader_tables()).unwrap();
    let ran = bpf::packet::run(&mut dataplane, "l3_ingress", &without_link_layer());
    assert!(ran.counted.contains(&"unknown_sender"), "{ran:?}");
    assert_eq!(dataplane.loaded(), PROGRAMS.len());
}

/// A load that the verifier refuses costs a tenth of a second, and would fail again.
#[test]
fn what_the_kernel_refuses_it_is_asked_again_when_something_changed() {
    netns::isolated("what_the_kernel_refuses_it_is_asked_again_when_something_changed", || async {
        let mut dataplane = Dataplane::open(Path::new("/run/bpf"), false).unwrap();
        let error = |dataplane: &mut Dataplane| dataplane.program("l3_ingress").map(drop).unwrap_err();
        netns::without_effective_rights(|| {
            let first = error(&mut dataplane).to_string();
            assert!(first.contains("not permitted"), "{first}");
        });
        // A retry would succeed.
        let second = error(&mut dataplane).to_string();
        assert!(second.contains("not retried yet"), "{second}");
        dataplane.load_late_beside();
        let third = error(&mut dataplane).to_string();
        assert!(third.contains("not retried yet"), "nor by a thread: {third}");
        let (net, none, tun) = (Net::new().unwrap(), BTreeSet::new(), BTreeSet::from([7]));
        for (layer3, is_asked) in [(&none, false), (&tun, true)] {
            // Nothing is attached, but the call reports new interfaces.
            let interfaces =
                Interfaces { kilo: u32::MAX, uplinks: &none, layer3, tunnels: &none, pods: &none };
            drop(dataplane.attach(&net, interfaces).await.unwrap());
            assert_eq!(dataplane.program("l3_ingress").is_ok(), is_asked, "{layer3:?}");
        }
    });
}

/// The agent's HTTP server and its other tasks share a thread with the reconcile, and loading takes a tenth of
/// a second and more.
#[test]
fn what_an_interface_needs_is_loaded_without_holding_up_the_thread_that_attaches_it() {
    let name = "what_an_interface_needs_is_loaded_without_holding_up_the_thread_that_attaches_it";
    netns::isolated(name, || async {
        let mut dataplane = Dataplane::open(Path::new("/run/bpf"), false).unwrap();
        let (net, none, lo) = (Net::new().unwrap(), BTreeSet::new(), BTreeSet::from([1]));
        let interfaces =
            Interfaces { kilo: u32::MAX, uplinks: &lo, layer3: &lo, tunnels: &none, pods: &none };
        let began = Instant::now();
        let (mut last, mut longest) = (began, Duration::ZERO);
        let mut attach = pin!(dataplane.attach(&net, interfaces));
        let mut applied = None;
        while applied.is_none() {
            tokio::select! {
                biased;
                done = &mut attach => applied = Some(done.unwrap()),
                () = tokio::task::yield_now() => {}
            }
            longest = longest.max(last.elapsed());
            last = Instant::now();
        }
        let failed = applied.unwrap().failed;
        assert!(failed.is_empty(), "{failed:?}");
        assert!(longest < began.elapsed() / 2, "{longest:?} of {:?}", began.elapsed());
    });
}

/// Pins only save the next agent's time; this one works without.
#[test]
fn programs_that_cannot_be_pinned_work_all_the_same() {
    netns::isolated("programs_that_cannot_be_pinned_work_all_the_same", || async {
        let path = Path::new("/run/bpf");
        drop(Dataplane::open(path, false).unwrap());
        // A mounted directory can neither be removed nor hold a pin.
        let programs = pin_directory(path).join("programs");
        netns::sh(&format!("mount -t tmpfs tmpfs {}", programs.display()));
        for _ in 0..2 {
            let mut dataplane = Dataplane::open(path, false).unwrap();
            assert_eq!(dataplane.loaded(), ALWAYS);
            dataplane.write(&bpf::leader_tables()).unwrap();
            let frame = bpf::packet::steered([10, 1, 0, 99], bpf::SELF, &[0; 40]);
            let ran = bpf::packet::run(&mut dataplane, "lan_ingress", &frame);
            assert!(ran.counted.contains(&"unknown_sender"), "{ran:?}");
            let ran = bpf::packet::run(&mut dataplane, "l3_ingress", &without_link_layer());
            assert!(ran.counted.contains(&"unknown_sender"), "{ran:?}");
            assert_eq!(dataplane.loaded(), PROGRAMS.len());
        }
    });
}

/// Loading reads the types of the whole kernel, and each thread of the allocator keeps what it has freed.
#[test]
fn what_was_needed_to_load_the_programs_is_given_back() {
    netns::isolated("what_was_needed_to_load_the_programs_is_given_back", || async {
        let held = || {
            let status = fs::read_to_string("/proc/self/status").unwrap();
            let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
            line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() / 1000
        };
        let before = held();
        let open = || Dataplane::open(Path::new("/run/bpf"), false).unwrap();
        let dataplane = tokio::task::spawn_blocking(open).await.unwrap();
        assert_eq!(dataplane.loaded(), ALWAYS);
        let grown = held().saturating_sub(before);
        println!("{grown} MB more than before");
        assert!(grown < 12, "{grown} MB more than before");
    });
}

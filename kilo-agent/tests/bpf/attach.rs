//! Programs on real hooks beside foreign ones: TCX and clsact, restarts, removals, and interfaces that come
//! and go.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod world;

use crate::bpf::{MEMBER_HOP, foreign, leader_tables, packet};
use crate::netns::{isolated, sh, take_the_rights_of_the_daemonset, without_effective_rights};
use crate::wait::{pace, task as wait};

use std::{
    fs,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use aya::{
    programs::{LinkOrder, ProgramInfo, SchedClassifier, TcAttachType},
    sys::{Stats, enable_stats},
};
use kilo_common::lead::{self, Term};
use kilo_core::{settings::AttachMode, tables::Tables};
use kilo_host::dataplane::{CounterReader, Dataplane, link_directory, pin_directory, read_tables};
use world::{
    Sender, World, dropped, dropped_in, from_a_stranger, index, isolated_tcx, links, modes, settles,
};
pub use world::{has_tcx, tcx};

#[test]
fn programs_of_others_before_and_after_ours_run_too_over_tcx() {
    isolated_tcx("programs_of_others_before_and_after_ours_run_too_over_tcx", || async {
        let world = World::new();
        let _stats = enable_stats(Stats::RunTime).unwrap();
        let mut early = foreign::program(&world.fs.path().join("early"));
        let link = foreign::attach_tcx(&mut early, "eth0", TcAttachType::Ingress, LinkOrder::last()).unwrap();
        let (mut ours, _) = world.start(AttachMode::Tcx).await;
        let mut late = foreign::program(&world.fs.path().join("late"));
        let _first =
            foreign::attach_tcx(&mut late, "eth0", TcAttachType::Ingress, LinkOrder::first()).unwrap();
        let order: Vec<String> = tcx("eth0", TcAttachType::Ingress)
            .iter()
            .map(|it| it.name_as_str().unwrap().to_owned())
            .collect();
        assert_eq!(order, ["foreign", "lan_ingress", "foreign"], "ours goes before what was there");
        let sender = Sender::new();
        for _ in 0..10 {
            sender.send(&packet::udp([192, 0, 2, 9], [192, 0, 2, 1], (1, 2), b"not ours"));
        }
        let runs = || (late.info().unwrap().run_count(), early.info().unwrap().run_count());
        settles((10, 10), runs).await;
        // A reconcile and a restart leave foreign programs and their order unchanged.
        world.attach(&mut ours).await;
        drop(ours);
        world.start(AttachMode::Tcx).await;
        sender.send(&from_a_stranger());
        settles((11, 10), runs).await;
        let there: Vec<u32> = tcx("eth0", TcAttachType::Ingress).iter().map(ProgramInfo::id).collect();
        assert_eq!((there[0], there[2]), (late.info().unwrap().id(), early.info().unwrap().id()));
        assert!(link.info().is_ok());
    });
}

#[test]
fn programs_of_others_before_and_after_ours_run_too_over_clsact() {
    isolated("programs_of_others_before_and_after_ours_run_too_over_clsact", || async {
        let world = World::new();
        let _stats = enable_stats(Stats::RunTime).unwrap();
        let pins = ["early", "late"].map(|name| world.fs.path().join(name));
        let programs = [foreign::program(&pins[0]), foreign::program(&pins[1])];
        sh("tc qdisc add dev eth0 clsact");
        for (pin, priority) in pins.iter().zip([1, 60_000]) {
            let pin = pin.display();
            sh(&format!("tc filter add dev eth0 ingress prio {priority} bpf da object-pinned {pin}"));
        }
        let (ours, _) = world.start(AttachMode::Clsact).await;
        let sender = Sender::new();
        for _ in 0..10 {
            sender.send(&packet::udp([192, 0, 2, 9], [192, 0, 2, 1], (1, 2), b"not ours"));
        }
        let runs = || programs.each_ref().map(|program| program.info().unwrap().run_count());
        settles([10, 10], runs).await;
        sender.send(&from_a_stranger());
        settles([11, 10], runs).await;
        drop(ours);
        kilo_host::dataplane::remove(world.fs.path());
        world.assert_copies("lan_ingress", "eth0", TcAttachType::Ingress, (0, 0)).await;
        let left = sh("tc filter show dev eth0 ingress | grep -c 'direct-action'");
        assert_eq!(left.trim(), "2", "what others attached stays");
    });
}

#[test]
fn what_somebody_removed_is_noticed_put_back_and_counted() {
    isolated("what_somebody_removed_is_noticed_put_back_and_counted", || async {
        let world = World::new();
        let fs = world.fs.path();
        let pin = format!("{}/lan_ingress_{}", link_directory(fs).display(), index("eth0"));
        let cases = [
            (AttachMode::Tcx, format!("rm {pin}")),
            (AttachMode::Tcx, format!("bpftool link detach pinned {pin}")),
            (AttachMode::Clsact, "tc filter del dev eth0 ingress prio 27495".to_owned()),
            (AttachMode::Clsact, "tc qdisc del dev eth0 clsact".to_owned()),
        ];
        for (mode, removal) in cases.into_iter().filter(|(mode, _)| modes().contains(mode)) {
            let (mut dataplane, _) = world.start(mode).await;
            assert!(dataplane.is_attached(&world.net).await.unwrap());
            sh(&removal);
            // The kernel frees a link some time after its last pin is gone.
            wait::until(&format!("{removal} is noticed"), Duration::from_secs(10), async || {
                !dataplane.is_attached(&world.net).await.unwrap()
            })
            .await;
            let attached = world.attach(&mut dataplane).await;
            let gone = if removal.contains("qdisc") { 2 } else { 1 };
            assert_eq!((attached.changes, attached.reattached), (gone, gone), "{removal}");
            assert!(dataplane.is_attached(&world.net).await.unwrap(), "{removal}");
            world.assert_one_copy_each(mode).await;
            let before = dropped(&dataplane);
            Sender::new().send(&from_a_stranger());
            settles(before + 1, || dropped(&dataplane)).await;
        }
    });
}

#[test]
fn a_program_that_somebody_put_in_our_filters_place_is_replaced() {
    isolated("a_program_that_somebody_put_in_our_filters_place_is_replaced", || async {
        let world = World::new();
        let (mut dataplane, _) = world.start(AttachMode::Clsact).await;
        let pin = world.fs.path().join("foreign");
        let _program = foreign::program(&pin);
        let pin = pin.display();
        sh(&format!("tc filter replace dev eth0 ingress prio 27495 handle 1 bpf da object-pinned {pin}"));
        assert!(!dataplane.is_attached(&world.net).await.unwrap());
        assert_eq!(world.attach(&mut dataplane).await.reattached, 1);
        world.assert_one_copy_each(AttachMode::Clsact).await;
    });
}

#[test]
fn restarts_in_any_mix_of_modes_leave_exactly_one_copy() {
    isolated_tcx("restarts_in_any_mix_of_modes_leave_exactly_one_copy", || async {
        let world = World::new();
        let [tcx, clsact] = [AttachMode::Tcx, AttachMode::Clsact];
        for mode in [tcx, tcx, clsact, clsact, tcx, clsact, tcx, tcx, clsact, tcx] {
            let (mut dataplane, attached) = world.start(mode).await;
            assert!(attached.changes >= 4 && attached.reattached == 0, "{attached:?}");
            world.assert_one_copy_each(mode).await;
            assert_eq!(links(world.fs.path()), if mode == tcx { 4 } else { 0 });
            assert_eq!(world.attach(&mut dataplane).await.changes, 0, "nothing is left to do");
        }
    });
}

#[test]
fn nothing_new_writes_nothing() {
    isolated("nothing_new_writes_nothing", || async {
        for mode in modes() {
            let world = World::new();
            let (mut dataplane, _) = world.start(mode).await;
            let revision = || {
                SchedClassifier::query_tcx("eth0", TcAttachType::Ingress).map(|(revision, _)| revision).ok()
            };
            let before = (revision(), sh("tc filter show dev eth0 ingress"));
            let mut watcher = kilo_host::net::watch::Watcher::new(None).unwrap();
            for _ in 0..20 {
                let attached = world.attach(&mut dataplane).await;
                assert_eq!((attached.changes, attached.reattached), (0, 0));
                assert!(dataplane.is_attached(&world.net).await.unwrap());
            }
            assert_eq!((revision(), sh("tc filter show dev eth0 ingress")), before);
            let event = tokio::time::timeout(Duration::from_millis(300), watcher.changed()).await;
            assert!(event.is_err(), "{mode:?}: the kernel announced {event:?}");
            sh("tc qdisc add dev eth0p clsact");
            assert!(watcher.changed().await.unwrap().filters);
            sh("ip link del eth0; ip link del kilo0");
        }
    });
}

#[test]
fn with_the_rights_of_the_daemonset_programs_are_found_adopted_and_missed() {
    let name = "with_the_rights_of_the_daemonset_programs_are_found_adopted_and_missed";
    isolated_tcx(name, || async {
        let world = World::new();
        take_the_rights_of_the_daemonset();
        let (mut first, _) = world.start(AttachMode::Auto).await;
        let on_tcx = |dataplane: &Dataplane| dataplane.attached().iter().all(|it| it.hook == "tcx");
        assert!(on_tcx(&first), "{:?}", first.attached());
        for _ in 0..3 {
            assert!(first.is_attached(&world.net).await.unwrap());
            let attached = world.attach(&mut first).await;
            assert_eq!((attached.changes, attached.reattached), (0, 0));
        }
        let pin = link_directory(world.fs.path()).join(format!("lan_ingress_{}", index("eth0")));
        let link = || {
            let shown = sh(&format!("bpftool link show pinned {}", pin.display()));
            shown.split(':').next().unwrap().to_owned()
        };
        let before = link();
        drop(first);
        let (mut next, _) = world.start(AttachMode::Auto).await;
        assert!(on_tcx(&next), "{:?}", next.attached());
        assert_eq!(link(), before, "the link of the first agent goes on");
        sh(&format!("bpftool link detach pinned {}", pin.display()));
        assert!(!next.is_attached(&world.net).await.unwrap());
        let attached = world.attach(&mut next).await;
        assert_eq!((attached.changes, attached.reattached), (1, 1));
        assert!(on_tcx(&next) && next.is_attached(&world.net).await.unwrap());
        let by_descriptor = SchedClassifier::query_tcx("eth0", TcAttachType::Ingress);
        assert!(by_descriptor.is_err(), "this thread has SYS_ADMIN, which the DaemonSet does not grant");
    });
}

/// A failed query says nothing about what is on a hook.
#[test]
fn an_agent_that_may_not_ask_what_is_on_a_hook_leaves_links_there_and_adds_no_filter() {
    let name = "an_agent_that_may_not_ask_what_is_on_a_hook_leaves_links_there_and_adds_no_filter";
    isolated_tcx(name, || async {
        let mut world = World::new();
        sh("ip link add veth1 type veth peer name pod1; ip link set veth1 up");
        world.pods.insert(index("veth1"));
        drop(world.start(AttachMode::Auto).await);
        let there = links(world.fs.path());
        for mode in [AttachMode::Auto, AttachMode::Tcx] {
            let mut next = Dataplane::open_with(world.fs.path(), false, mode).unwrap();
            let mut refused = Vec::new();
            // The query needs CAP_NET_ADMIN, which the runtime's other threads keep.
            without_effective_rights(|| {
                refused = futures::executor::block_on(world.attach(&mut next)).failed;
            });
            assert_eq!(
                refused.len(),
                3,
                "the uplink's two and the pod's; kilo0's are told apart: {refused:?}"
            );
            assert_eq!(links(world.fs.path()), there, "{mode:?}: {refused:?}");
            drop(next);
            world.assert_one_copy_each(AttachMode::Tcx).await;
        }
    });
}

#[test]
fn the_next_agent_takes_over_without_a_gap() {
    isolated_tcx("the_next_agent_takes_over_without_a_gap", || async {
        let world = World::new();
        let (first, _) = world.start(AttachMode::Tcx).await;
        let reader = first.counters().unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let sending = std::thread::spawn({
            let (stop, sender) = (Arc::clone(&stop), Sender::new());
            move || {
                let frame = from_a_stranger();
                let mut sent = 0_u64;
                while !stop.load(Ordering::Relaxed) {
                    sender.send(&frame);
                    sent += 1;
                    pace(Duration::from_micros(50));
                }
                sent
            }
        });
        drop(first);
        for mode in [AttachMode::Tcx, AttachMode::Clsact, AttachMode::Clsact, AttachMode::Tcx] {
            wait::time_passes(Duration::from_millis(100), "packets are sent in it").await;
            world.start(mode).await;
        }
        // Simulates an upgrade to another map layout: the links stay, the maps are new.
        let pins = pin_directory(world.fs.path());
        fs::rename(&pins, pins.parent().unwrap().join("v0")).unwrap();
        let (upgraded, _) = world.start(AttachMode::Auto).await;
        let next_reader = upgraded.counters().unwrap();
        wait::time_passes(Duration::from_millis(100), "packets are sent in it").await;
        stop.store(true, Ordering::Relaxed);
        let sent = sending.join().unwrap();
        println!("{sent} packets in six agents' lives");
        assert!(sent > 1000);
        let dropped = |reader: &CounterReader| reader.read().unwrap().drops["unknown_sender"];
        assert!(dropped(&reader) > 0);
        settles(sent, || dropped(&reader) + dropped(&next_reader)).await;
        assert!(dropped(&next_reader) > 0);
    });
}

#[test]
fn a_hook_that_takes_no_more_tcx_programs_gets_a_filter() {
    isolated_tcx("a_hook_that_takes_no_more_tcx_programs_gets_a_filter", || async {
        let world = World::new();
        let mut others = Vec::new();
        // The kernel has room for 64 (BPF_MPROG_MAX).
        loop {
            let mut other = foreign::program(&world.fs.path().join(format!("f{}", others.len())));
            match foreign::attach_tcx(&mut other, "eth0", TcAttachType::Ingress, LinkOrder::last()) {
                Ok(link) => others.push(link),
                Err(_) => break,
            }
        }
        assert!(others.len() >= 32, "{}", others.len());
        let (dataplane, _) = world.start(AttachMode::Auto).await;
        world.assert_copies("lan_ingress", "eth0", TcAttachType::Ingress, (0, 1)).await;
        world.assert_copies("uplink_egress", "eth0", TcAttachType::Egress, (1, 0)).await;
        Sender::new().send(&from_a_stranger());
        settles(1, || dropped(&dataplane)).await;
        drop(dataplane);

        let mut strict = Dataplane::open_with(world.fs.path(), false, AttachMode::Tcx).unwrap();
        let refused = world.attach(&mut strict).await.failed;
        assert_eq!(refused.len(), 1, "one hook that refuses does not stop the others: {refused:?}");
        assert!(refused[0].to_string().contains("lan_ingress"), "{}", refused[0]);
        drop(others);
        world.start(AttachMode::Auto).await;
        world.assert_one_copy_each(AttachMode::Tcx).await;
    });
}

#[test]
fn interfaces_that_go_come_back_or_change_their_name_are_followed() {
    isolated("interfaces_that_go_come_back_or_change_their_name_are_followed", || async {
        for mode in modes() {
            let mut world = World::new();
            let (mut dataplane, _) = world.start(mode).await;
            sh(
                "ip link set eth0 down; ip link set eth0 name wan0; ip link set wan0 name eth0; ip link set eth0 up",
            );
            assert_eq!(world.attach(&mut dataplane).await.changes, 0, "a name is only a name");
            let old = index("eth0");
            sh("ip link del eth0");
            let attached = world.attach(&mut dataplane).await;
            assert!(attached.failed.is_empty(), "an event will come: {attached:?}");
            world.add_uplink("index 77");
            assert_ne!(old, index("eth0"));
            let attached = world.attach(&mut dataplane).await;
            assert!(attached.changes >= 2 && attached.failed.is_empty(), "{attached:?}");
            world.assert_one_copy_each(mode).await;
            assert_eq!(links(world.fs.path()), if mode == AttachMode::Tcx { 4 } else { 0 });

            // Another interface gets the same index.
            sh("ip link del eth0");
            world.add_uplink("index 77");
            assert_eq!(world.attach(&mut dataplane).await.changes, 2);
            world.assert_one_copy_each(mode).await;

            sh("ip link del kilo0; ip tuntap add dev kilo0 mode tun; ip link set kilo0 up");
            world.attach(&mut dataplane).await;
            world.assert_one_copy_each(mode).await;

            world.uplinks.clear();
            world.attach(&mut dataplane).await;
            world.assert_copies("lan_ingress", "eth0", TcAttachType::Ingress, (0, 0)).await;
            sh("ip link del eth0; ip link del kilo0");
        }
    });
}

#[test]
fn filters_on_interfaces_that_ceased_to_be_uplinks_while_no_agent_ran_are_removed() {
    let name = "filters_on_interfaces_that_ceased_to_be_uplinks_while_no_agent_ran_are_removed";
    isolated(name, || async {
        for mode in modes() {
            let mut world = World::new();
            drop(world.start(mode).await);
            world.uplinks.clear();
            drop(world.start(mode).await);
            world.assert_copies("lan_ingress", "eth0", TcAttachType::Ingress, (0, 0)).await;
            world.assert_copies("uplink_egress", "eth0", TcAttachType::Egress, (0, 0)).await;
            sh("ip link del eth0; ip link del kilo0");
        }
    });
}

#[test]
fn a_link_of_somebody_else_under_our_name_keeps_its_program() {
    isolated_tcx("a_link_of_somebody_else_under_our_name_keeps_its_program", || async {
        let world = World::new();
        sh("ip link add other0 type veth peer name other0p");
        let mut program = foreign::program(&world.fs.path().join("foreign"));
        let link =
            foreign::attach_tcx(&mut program, "other0", TcAttachType::Ingress, LinkOrder::last()).unwrap();
        let directory = link_directory(world.fs.path());
        fs::create_dir_all(&directory).unwrap();
        let ours = directory.join(format!("lan_ingress_{}", index("eth0")));
        let kept = link.pin(world.fs.path().join("theirs")).unwrap();
        // The same link under a second name.
        sh(&format!(
            "bpftool link pin pinned {} {}",
            world.fs.path().join("theirs").display(),
            ours.display()
        ));
        world.start(AttachMode::Tcx).await;
        world.assert_one_copy_each(AttachMode::Tcx).await;
        world.assert_copies("foreign", "other0", TcAttachType::Ingress, (1, 0)).await;
        drop(kept);
    });
}

#[test]
fn a_version_that_does_not_load_leaves_the_running_one_alone() {
    isolated_tcx("a_version_that_does_not_load_leaves_the_running_one_alone", || async {
        let world = World::new();
        let (running, _) = world.start(AttachMode::Tcx).await;
        let pins = pin_directory(world.fs.path());
        let old = pins.parent().unwrap().join("v0");
        fs::rename(&pins, &old).unwrap();
        // A map that can be neither adopted nor created.
        fs::create_dir_all(pins.join("hop")).unwrap();
        assert!(Dataplane::open(world.fs.path(), false).is_err());
        assert!(old.join("config").exists());
        world.assert_one_copy_each(AttachMode::Tcx).await;
        Sender::new().send(&from_a_stranger());
        settles(1, || dropped_in(&old)).await;
        drop(running);
    });
}

#[test]
fn maps_of_another_version_go_when_our_programs_are_in_place() {
    isolated_tcx("maps_of_another_version_go_when_our_programs_are_in_place", || async {
        let world = World::new();
        drop(world.start(AttachMode::Tcx).await);
        let top = pin_directory(world.fs.path()).parent().unwrap().to_owned();
        // Another version would leave it so: the links stay, the maps are elsewhere.
        fs::rename(pin_directory(world.fs.path()), top.join("v0")).unwrap();
        fs::create_dir(top.join("theirs")).unwrap();
        let mut dataplane = Dataplane::open(world.fs.path(), false).unwrap();
        // Annotations name another leader in a later term: this node follows it without asking who leads.
        let word = lead::word(Term::from_bits(7 << 16), u16::try_from(MEMBER_HOP).unwrap());
        dataplane.write(&Tables { lead_of_term: Some(word), ..leader_tables() }).unwrap();
        assert_eq!(read_tables(world.fs.path()).unwrap().lead[1], word);
        dataplane.write(&leader_tables()).unwrap();
        assert_eq!(read_tables(world.fs.path()).unwrap().lead[1], word, "Kilo's rule is an earlier term");
        assert!(top.join("v0").exists(), "the programs on the hooks still use them");
        world.attach(&mut dataplane).await;
        assert!(!top.join("v0").exists());
        assert!(top.join("theirs").exists());
        world.assert_one_copy_each(AttachMode::Tcx).await;
        Sender::new().send(&from_a_stranger());
        settles(1, || dropped(&dataplane)).await;
    });
}

//! An agent finds the maps of the previous layout, in use by the programs on the hooks.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::bpf::{
    self, MEMBER, MEMBER_POD, OUTSIDE, OWN_POD, REMOTE_POD, SELF, leader_tables,
    packet::{steered, udp},
};
use crate::links::host::{self, LAN_MAC, LanSender, NODE_MAC, Tun, World, udp_in_lan};
use crate::netns::{isolated, sh};
use crate::wait::{pace, time_passes};

use std::{
    collections::BTreeSet,
    fs,
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
    thread::ScopedJoinHandle,
    time::Duration,
};

use aya::maps::MapData;
use kilo_common::{
    lead::{Term, word},
    map_table::{MAPS, name},
    maps::{LAYOUT_VERSION, NODE_GATEWAY, NODE_LED},
};
use kilo_host::dataplane::{Dataplane, pin_directory, read_tables};

/// The layout that the tests emulate.
const BEFORE: u32 = 5;
/// Maps that layout 5 lacked or had in another shape: its configuration was four bytes shorter.
const NOT_IN_BEFORE: [&str; 6] =
    [name::DIRECT_V4, name::POD_FLOW, name::RELAY, name::RELAY_KEY, name::RELAY_HEARD, name::CONFIG];
const CONFIG_BEFORE: &str = "type array key 4 value 88 entries 1 name config";

/// Directory of that layout's pins.
fn layout(bpffs: &Path, version: u32) -> PathBuf {
    pin_directory(bpffs).with_file_name(format!("v{version}"))
}

/// Turns the pins into those of an agent of layout 5, while the programs on the hooks keep using the maps.
fn as_layout_before(bpffs: &Path) -> PathBuf {
    let before = layout(bpffs, BEFORE);
    fs::rename(pin_directory(bpffs), &before).unwrap();
    for name in NOT_IN_BEFORE {
        fs::remove_file(before.join(name)).unwrap();
    }
    sh(&format!("bpftool map create {} {CONFIG_BEFORE}", before.join(name::CONFIG).display()));
    before
}

/// The kernel's id of a pinned map.
fn id(directory: &Path, name: &str) -> u32 {
    MapData::from_pin(directory.join(name)).unwrap().info().unwrap().id()
}

/// Sends numbered datagrams, one per millisecond, until `stop`; returns how many.
fn numbered(stop: &AtomicBool, mut send: impl FnMut([u8; 4])) -> u32 {
    let mut number = 0_u32;
    while !stop.load(Ordering::Relaxed) {
        send(number.to_be_bytes());
        number += 1;
        pace(Duration::from_millis(1));
    }
    number
}

/// Numbers of the datagrams that a socket receives from one address, until none arrives for a second.
fn received(socket: &UdpSocket, from: SocketAddr) -> BTreeSet<u32> {
    socket.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    let (mut seen, mut bytes) = (BTreeSet::new(), [0; 4]);
    while let Ok((_, sender)) = socket.recv_from(&mut bytes) {
        assert_eq!(sender, from);
        seen.insert(u32::from_be_bytes(bytes));
    }
    seen
}

/// Numbers of the datagrams to the other location that leave through the WireGuard device.
fn sent_into(tunnel: &Tun) -> BTreeSet<u32> {
    let packets = std::iter::from_fn(|| tunnel.next(Duration::from_secs(1)));
    let numbers = packets.filter(|packet| packet[0] >> 4 == 4 && packet[16..20] == REMOTE_POD);
    numbers.map(|packet| u32::from_be_bytes(packet[28..32].try_into().unwrap())).collect()
}

/// What a flow has sent, and what has arrived.
struct Flow<'scope> {
    what: &'static str,
    sent: ScopedJoinHandle<'scope, u32>,
    received: ScopedJoinHandle<'scope, BTreeSet<u32>>,
}

impl Flow<'_> {
    fn ends_complete(self) {
        let (sent, received) = (self.sent.join().unwrap(), self.received.join().unwrap());
        println!("{}: {} of {sent} came", self.what, received.len());
        assert!(sent > 300, "{}: too few to say anything: {sent}", self.what);
        let missing: Vec<_> = (0..sent).filter(|number| !received.contains(number)).collect();
        assert!(missing.is_empty(), "{}: {} of {sent} were lost, {missing:?}", self.what, missing.len());
    }
}

#[test]
fn maps_of_the_layout_before_are_taken_over_and_no_flow_loses_a_packet() {
    isolated("maps_of_the_layout_before_are_taken_over_and_no_flow_loses_a_packet", || async {
        let mut world = World::on_veth();
        // The queue is long enough that no packet is lost before it is read.
        sh("ip link set kilo0 txqueuelen 10000; ip route add 198.51.100.0/24 via 10.1.0.12
            ip address add 10.42.1.3/32 dev lo");
        host::lan("ip route add 10.42.1.0/24 via 10.1.0.11");
        world.attach(&["eth0"], &[]).await;
        let tunnel = Tun::new("kilo0");

        // Two pods use one port towards one server: the second flow has another port outside, which only
        // its entry knows.
        let server = udp_in_lan(OUTSIDE, 53);
        let server_address = SocketAddr::from((OUTSIDE, 53));
        let other_pod = UdpSocket::bind((Ipv4Addr::from([10, 42, 1, 3]), 2000)).unwrap();
        other_pod.send_to(b"first", server_address).unwrap();
        assert_eq!(server.recv_from(&mut [0; 16]).unwrap().1, SocketAddr::from((SELF, 2000)));
        let pod = UdpSocket::bind((Ipv4Addr::from(OWN_POD), 2000)).unwrap();
        pod.send_to(b"question", server_address).unwrap();
        let (_, masqueraded) = server.recv_from(&mut [0; 16]).unwrap();
        assert!(masqueraded.ip() == Ipv4Addr::from(SELF) && masqueraded.port() != 2000, "{masqueraded}");

        // A flow opened from outside, to which a pod replies from its own address.
        let guest = udp_in_lan(OUTSIDE, 3000);
        let guest_address = SocketAddr::from((OUTSIDE, 3000));
        let service = UdpSocket::bind((Ipv4Addr::from(OWN_POD), 4000)).unwrap();
        let service_address = SocketAddr::from((OWN_POD, 4000));
        guest.send_to(b"opens", service_address).unwrap();
        assert_eq!(service.recv_from(&mut [0; 16]).unwrap().1, guest_address);

        let before = as_layout_before(world.bpffs());
        let (lan, stop) = (LanSender::new(), &AtomicBool::new(false));
        std::thread::scope(|scope| {
            let flows = [
                Flow {
                    what: "answers to a masqueraded flow",
                    sent: scope.spawn(|| {
                        numbered(stop, |bytes| assert_eq!(server.send_to(&bytes, masqueraded).unwrap(), 4))
                    }),
                    received: scope.spawn(|| received(&pod, server_address)),
                },
                Flow {
                    what: "answers to a flow opened from outside",
                    sent: scope.spawn(|| {
                        numbered(stop, |bytes| assert_eq!(service.send_to(&bytes, guest_address).unwrap(), 4))
                    }),
                    received: scope.spawn(|| received(&guest, service_address)),
                },
                Flow {
                    what: "transit to another location",
                    sent: scope.spawn(|| {
                        numbered(stop, |bytes| {
                            let packet = udp(MEMBER_POD, REMOTE_POD, (1000, 2000), &bytes);
                            let mut frame = [NODE_MAC, LAN_MAC].concat();
                            frame.extend(&steered(MEMBER, SELF, &packet)[12..]);
                            lan.send(&frame);
                        })
                    }),
                    received: scope.spawn(|| sent_into(&tunnel)),
                },
            ];
            let passes = || time_passes(Duration::from_millis(200), "packets flow");
            passes();
            let starts = world.attach(&["eth0"], &[]);
            tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(starts));
            passes();
            stop.store(true, Ordering::Relaxed);
            for flow in flows {
                flow.ends_complete();
            }
        });
        assert!(!before.exists(), "the programs on the hooks are ours, nobody reads those maps");
    });
}

/// Opens the data path over the pins, as a starting agent does.
fn open(fs: &bpf::BpfFs) -> Dataplane {
    Dataplane::open(fs.path(), false).unwrap()
}

#[test]
fn who_leads_and_is_led_is_known_after_a_change_of_layout() {
    let Some(fs) = bpf::bpffs() else { return };
    let mut tables = leader_tables();
    let mut dataplane = open(&fs);
    // This node leads the other one by its own word, in a term that no table has.
    tables.node.insert(MEMBER.into(), bpf::node(NODE_GATEWAY | NODE_LED));
    tables.lead[1] = word(Term::from_bits(7 << 16), 2);
    dataplane.write(&tables).unwrap();
    drop(dataplane);
    let before = as_layout_before(fs.path());
    let kept = MAPS.iter().filter(|map| map.is_pinned && !NOT_IN_BEFORE.contains(&map.name));
    let kept: Vec<_> = kept.map(|map| (map.name, id(&before, map.name))).collect();
    let mut dataplane = open(&fs);
    let directory = layout(fs.path(), LAYOUT_VERSION);
    assert_eq!(kept.iter().map(|(name, _)| (*name, id(&directory, name))).collect::<Vec<_>>(), kept);
    assert!(dataplane.held_senders()[&MEMBER.into()].flags & NODE_LED != 0);
    // Kilo's rule counts as an earlier term.
    dataplane.write(&leader_tables()).unwrap();
    assert_eq!(read_tables(fs.path()).unwrap().lead[1], tables.lead[1]);
    assert_eq!(
        read_tables(fs.path()).unwrap().config,
        leader_tables().config,
        "a map that has changed is written"
    );
}

#[test]
fn a_map_that_held_something_else_or_has_another_shape_is_made_anew() {
    let Some(fs) = bpf::bpffs() else { return };
    drop(open(&fs));
    let before = as_layout_before(fs.path());
    // From a layout in which the map held something else.
    let nat = MAPS.iter().find(|map| map.name == name::NAT).unwrap();
    let earlier = layout(fs.path(), nat.since - 1);
    fs::create_dir(&earlier).unwrap();
    fs::rename(before.join(name::NAT), earlier.join(name::NAT)).unwrap();
    fs::remove_file(before.join(name::HOP)).unwrap();
    let other = "type array key 4 value 40 entries 4096 name hop";
    sh(&format!("bpftool map create {} {other}", before.join(name::HOP).display()));
    // A later layout's map may hold anything.
    let later = layout(fs.path(), LAYOUT_VERSION + 1);
    fs::create_dir(&later).unwrap();
    fs::rename(before.join(name::INBOUND), later.join(name::INBOUND)).unwrap();
    let dataplane = open(&fs);
    let directory = layout(fs.path(), LAYOUT_VERSION);
    for (old, name) in [(&earlier, name::NAT), (&before, name::HOP), (&later, name::INBOUND)] {
        assert_ne!(id(&directory, name), id(old, name), "{name}");
    }
    assert_eq!(id(&directory, name::LEAD), id(&before, name::LEAD), "what fits is taken over");
    drop(dataplane);
}

#[test]
fn an_agent_that_ended_while_it_took_maps_over_leaves_the_rest_to_the_next() {
    let Some(fs) = bpf::bpffs() else { return };
    drop(open(&fs));
    let before = as_layout_before(fs.path());
    let directory = layout(fs.path(), LAYOUT_VERSION);
    fs::create_dir(&directory).unwrap();
    sh(&format!(
        "bpftool map pin pinned {} {}",
        before.join(name::LEAD).display(),
        directory.join(name::LEAD).display()
    ));
    drop(open(&fs));
    for name in [name::LEAD, name::NAT, name::NODE_V4] {
        assert_eq!(id(&directory, name), id(&before, name), "{name}");
    }
}

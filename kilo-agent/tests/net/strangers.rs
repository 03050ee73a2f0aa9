//! Packets of strangers and unprivileged processes to real tunnel devices.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::bpf;
use crate::netns;
use crate::wait::{stays, task, until};

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    fs::File,
    net::UdpSocket,
    time::{Duration, Instant},
};

use aya::programs::{LinkOrder, SchedClassifier, TcAttachType, links::FdLink};
use bpf::{
    MEMBER, MEMBER_POD, OWN_POD, PUBLIC, SELF, leader_tables,
    packet::{carried, ethernet, steered, udp},
};
use kilo_common::encap::{self, VXLAN_OVERHEAD};
use kilo_core::{
    plan::{Hop, Tables},
    settings::{AttachMode, Tunnel},
};
use kilo_host::{
    dataplane::{Applied, Dataplane, Interfaces},
    net::{
        Net,
        tunnels::{self, Tunnels},
    },
};
use netns::{isolated, sh, succeeds};
use nix::{
    sched::{CloneFlags, setns},
    sys::socket::{
        AddressFamily, LinkAddr, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrLike as _, sendto,
        socket,
    },
};

/// A node with a private and a public interface, and the member at the other end of both.
struct World {
    fs: bpf::BpfFs,
    net: Net,
    dataplane: Dataplane,
    tunnels: Tunnels,
    uplinks: BTreeSet<u32>,
}

fn index(interface: &str) -> u32 {
    nix::net::if_::if_nametoindex(interface).unwrap()
}

fn is_up(interface: &str) -> bool {
    sh(&format!("ip -o link show {interface}")).contains(",UP")
}

impl World {
    async fn new() -> Self {
        sh("ip link set lo up; ip tuntap add dev kilo0 mode tun; ip link set kilo0 up; ip netns add member
            echo 0 > /proc/sys/net/ipv4/conf/all/rp_filter; echo 0 > /proc/sys/net/ipv4/conf/default/rp_filter
            ip link add eth0 address 02:00:00:00:00:01 type veth peer name eth0 address 02:00:00:00:00:02 netns member
            ip link add eth1 address 02:00:00:00:00:01 type veth peer name eth1p
            ip address add 10.1.0.11/24 dev eth0; ip address add 192.0.2.11/24 dev eth1
            ip link set eth0 up; ip link set eth1 up; ip link set eth1p up
            ip -n member address add 10.1.0.12/24 dev eth0; ip -n member link set eth0 up
            ip neighbour add 10.1.0.12 lladdr 02:00:00:00:00:02 dev eth0 nud permanent
            ip -n member neighbour add 10.1.0.11 lladdr 02:00:00:00:00:01 dev eth0 nud permanent");
        let fs = bpf::bpffs().unwrap();
        let net = Net::new().unwrap();
        let dataplane = Dataplane::open(fs.path(), false).unwrap();
        let tunnels = tunnels::ensure(net.rtnl()).await;
        assert!(tunnels.problems.is_empty(), "{:?}", tunnels.problems);
        let uplinks = BTreeSet::from([index("eth0"), index("eth1")]);
        Self { fs, net, dataplane, tunnels, uplinks }
    }

    fn tables(&self) -> Tables {
        let mut tables = leader_tables();
        tables.config.kilo_ifindex = index("kilo0");
        tables.config.vxlan_ifindex = self.tunnels.vxlan.unwrap();
        tables.node.get_mut(&MEMBER.into()).unwrap().interfaces = [index("eth0"), 0, 0, 0];
        for hop in tables.hop.values_mut() {
            if let Hop::Node { ifindex, .. } = hop {
                *ifindex = index("eth0");
            }
        }
        tables
    }

    async fn attach(&mut self) -> Applied {
        let tunnels = self.tunnels.vxlan.into_iter().chain(self.tunnels.ipip).collect();
        let layer3 = &BTreeSet::new();
        let interfaces = Interfaces {
            kilo: index("kilo0"),
            uplinks: &self.uplinks,
            layer3,
            tunnels: &tunnels,
            pods: &BTreeSet::new(),
        };
        self.dataplane.attach(&self.net, interfaces).await.unwrap()
    }

    /// Writes the tables, attaches the programs and guards the tunnel devices, in the agent's order.
    async fn apply(&mut self) -> Applied {
        self.dataplane.write(&self.tables()).unwrap();
        let applied = self.attach().await;
        self.tunnels.guard(self.net.rtnl(), &applied.unguarded).await.unwrap();
        applied
    }

    /// Waits until the counters have grown by `wanted` through an action. With nothing wanted, watches for a
    /// while that none grows.
    #[track_caller]
    fn counts(&self, wanted: &[(&'static str, u64)], action: impl FnOnce()) {
        let read = || {
            let counters = self.dataplane.counters().unwrap().read().unwrap();
            counters.actions.into_iter().chain(counters.drops).collect::<BTreeMap<_, _>>()
        };
        let before = read();
        let changed = || -> Vec<(&'static str, u64)> {
            let now = read();
            // Skips the kernel's own neighbour discovery.
            let ours = now.into_iter().filter(|(label, _)| !matches!(*label, "pass" | "not_unicast"));
            ours.map(|(label, count)| (label, count - before[label])).filter(|(_, more)| *more > 0).collect()
        };
        action();
        if wanted.is_empty() {
            // A packet may be counted a moment after it was sent.
            stays("no counter grows", Duration::from_millis(300), || {
                let changed = changed();
                if !changed.is_empty() {
                    println!("counters grew by {changed:?}");
                }
                changed.is_empty()
            });
            return;
        }
        until(&format!("counters grow by {wanted:?}"), Duration::from_secs(5), || {
            let changed = changed();
            if changed == wanted { Ok(()) } else { Err(format!("they grew by {changed:?}")) }
        });
    }
}

/// VXLAN header and inner packet, without the UDP header before them.
fn vxlan_payload(inner: &[u8]) -> Vec<u8> {
    vxlan(MEMBER, SELF, inner).split_off(42)
}

/// A whole VXLAN frame.
fn vxlan(from: [u8; 4], to: [u8; 4], inner: &[u8]) -> Vec<u8> {
    let mut frame = [0; 14 + VXLAN_OVERHEAD];
    encap::vxlan_frame(&mut frame, &from, &to, &carried(inner));
    [&frame[..], inner].concat()
}

/// Sends a datagram to the VXLAN port as an unprivileged user; `before` enters a namespace.
fn send_as_nobody(before: &str, to: &str, payload: &[u8]) {
    let mut text = String::new();
    for byte in payload {
        write!(text, "\\x{byte:02x}").unwrap();
    }
    let file = "/run/payload";
    sh(&format!("bash -c 'printf \"{text}\"' > {file}; chmod 644 {file}"));
    sh(&format!(
        "{before} setpriv --reuid=65534 --regid=65534 --clear-groups \
         bash -c 'dd if={file} bs=65000 status=none > /dev/udp/{to}/51821'"
    ));
}

/// Whether a TUN device without checksum offload sends UDP GSO packets: observed on 6.12 and 6.18, refused
/// on 6.1.
fn has_gso_without_checksums() -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|text| text.parse::<u32>().ok());
    (numbers.next(), numbers.next()) >= (Some(6), Some(12))
}

/// Sends a frame out of an interface, with the node's hardware address as destination.
fn send_frame(interface: &str, frame: &[u8]) {
    let mut frame = frame.to_vec();
    frame[..12].copy_from_slice(&[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 9]);
    let fd = socket(AddressFamily::Packet, SockType::Raw, SockFlag::empty(), None::<SockProtocol>).unwrap();
    // SAFETY: plain integers and bytes, for which zero is a value.
    let mut address: nix::libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = u16::try_from(nix::libc::AF_PACKET).unwrap();
    address.sll_ifindex = index(interface).cast_signed();
    let length = u32::try_from(size_of_val(&address)).unwrap();
    // SAFETY: a complete sockaddr_ll and its length.
    let address = unsafe { LinkAddr::from_raw((&raw const address).cast(), Some(length)) }.unwrap();
    sendto(std::os::fd::AsRawFd::as_raw_fd(&fd), &frame, &address, MsgFlags::empty()).unwrap();
}

fn set_rp_filter(value: u8) {
    sh(&format!("for i in all eth0 eth1; do echo {value} > /proc/sys/net/ipv4/conf/$i/rp_filter; done"));
}

#[test]
fn a_process_without_rights_injects_nothing_by_the_vxlan_port() {
    isolated("a_process_without_rights_injects_nothing_by_the_vxlan_port", || async {
        let mut world = World::new().await;
        world.apply().await;
        // Pretends to be a pod of the member, to any address of this node.
        let payload = vxlan_payload(&udp(MEMBER_POD, OWN_POD, (1, 2), b"forged"));
        for own in ["10.1.0.11", "192.0.2.11", "127.0.0.1"] {
            world.counts(&[("unchecked", 1)], || send_as_nobody("", own, &payload));
        }
        // To another node, in one packet and in fragments.
        let long = vxlan_payload(&udp(OWN_POD, MEMBER_POD, (1, 2), &[7; 2000]));
        world.counts(&[("forged_vxlan", 1)], || send_as_nobody("", "10.1.0.12", &payload));
        world.counts(&[("forged_vxlan", 1)], || send_as_nobody("", "10.1.0.12", &long));
    });
}

/// A pod `pod` whose packets others masquerade, keeping their ports.
fn masquerade_a_pod() {
    sh("ip netns add pod; ip link add veth1 type veth peer name eth0 netns pod
        ip address add 172.31.0.1/24 dev veth1; ip link set veth1 up
        ip -n pod address add 172.31.0.2/24 dev eth0; ip -n pod link set eth0 up
        ip -n pod route add default via 172.31.0.1
        echo 1 > /proc/sys/net/ipv4/ip_forward
        nft 'add table ip others; add chain ip others post { type nat hook postrouting priority 100; }
             add rule ip others post ip saddr 172.31.0.0/24 oifname eth0 masquerade'");
}

/// A socket with this address, made in a network namespace.
fn socket_in(namespace: &'static str, address: &'static str) -> UdpSocket {
    let open = move || {
        let there = File::open(format!("/run/netns/{namespace}")).unwrap();
        setns(there, CloneFlags::CLONE_NEWNET).unwrap();
        let socket = UdpSocket::bind(address).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        socket
    };
    std::thread::spawn(open).join().unwrap()
}

/// A pod may use VXLAN's port as its own, and a CNI's masquerading keeps it.
#[test]
fn a_pod_that_asks_another_node_from_the_vxlan_port_is_answered() {
    isolated("a_pod_that_asks_another_node_from_the_vxlan_port_is_answered", || async {
        let mut world = World::new().await;
        world.apply().await;
        masquerade_a_pod();
        let (pod, member) = (socket_in("pod", "0.0.0.0:51821"), socket_in("member", "10.1.0.12:53"));
        let mut bytes = [0; 100];
        world.counts(&[], || {
            pod.send_to(b"asked", "10.1.0.12:53").unwrap();
            let (_, from) = member.recv_from(&mut bytes).unwrap();
            assert_eq!(from.to_string(), "10.1.0.11:51821");
            member.send_to(b"answered", from).unwrap();
            assert_eq!(pod.recv(&mut bytes).unwrap(), 8);
        });
        // The reverse: this node replies to a pod that another node masquerades.
        let (member, own) =
            (socket_in("member", "10.1.0.12:51821"), UdpSocket::bind("10.1.0.11:53").unwrap());
        world.counts(&[], || {
            member.send_to(b"asked", "10.1.0.11:53").unwrap();
            let (_, from) = own.recv_from(&mut bytes).unwrap();
            own.send_to(b"answered", from).unwrap();
            assert_eq!(member.recv(&mut bytes).unwrap(), 8);
        });
    });
}

#[test]
fn what_a_pod_sends_is_not_taken_for_the_nodes_though_somebody_masquerades_it() {
    isolated("what_a_pod_sends_is_not_taken_for_the_nodes_though_somebody_masquerades_it", || async {
        let mut world = World::new().await;
        world.apply().await;
        masquerade_a_pod();
        let payload = vxlan_payload(&udp(OWN_POD, MEMBER_POD, (1, 2), b"forged"));
        let exec = "ip netns exec pod";
        world.counts(&[("forged_vxlan", 1)], || send_as_nobody(exec, "10.1.0.12", &payload));
        world.counts(&[("unchecked", 1)], || send_as_nobody(exec, "10.1.0.11", &payload));
    });
}

#[test]
fn what_a_node_sends_in_fragments_reaches_the_device_and_passes() {
    isolated("what_a_node_sends_in_fragments_reaches_the_device_and_passes", || async {
        let mut world = World::new().await;
        world.apply().await;
        let long = vxlan_payload(&udp(MEMBER_POD, OWN_POD, (1, 2), &[7; 2000]));
        let exec = "ip netns exec member";
        world.counts(&[("decrypt", 1), ("deliver", 1)], || send_as_nobody(exec, "10.1.0.11", &long));
        let foreign = vxlan_payload(&udp(OWN_POD, OWN_POD, (1, 2), &[7; 2000]));
        world.counts(&[("foreign_source", 1)], || send_as_nobody(exec, "10.1.0.11", &foreign));
    });
}

/// It is handed to the interface that leads to that host, with the link-layer address of the VXLAN device.
#[test]
fn what_a_node_itself_sends_in_fragments_reaches_a_pod() {
    isolated("what_a_node_itself_sends_in_fragments_reaches_a_pod", || async {
        let mut world = World::new().await;
        world.apply().await;
        sh("ip address add 10.42.1.2/32 dev lo");
        let pod = UdpSocket::bind("10.42.1.2:9000").unwrap();
        pod.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let long = vxlan_payload(&udp([10, 1, 0, 12], [10, 42, 1, 2], (1, 9000), &[7; 2000]));
        let exec = "ip netns exec member";
        world.counts(&[("deliver", 1)], || send_as_nobody(exec, "10.1.0.11", &long));
        assert_eq!(pod.recv(&mut [0; 3000]).unwrap(), 2000);
    });
}

#[test]
fn what_our_programs_give_the_vxlan_device_leaves_the_host() {
    isolated("what_our_programs_give_the_vxlan_device_leaves_the_host", || async {
        let mut world = World::new().await;
        let mut tables = world.tables();
        for hop in tables.hop.values_mut() {
            if let Hop::Node { tunnel, .. } = hop {
                *tunnel = Tunnel::Vxlan;
            }
        }
        world.apply().await;
        world.dataplane.write(&tables).unwrap();
        sh("ip address add 10.42.1.2/32 dev lo; ip route add 10.42.2.0/24 dev kilo0 src 10.42.1.2");
        // For a GSO packet, the device writes the outer header.
        let socket = UdpSocket::bind("10.42.1.2:0").unwrap();
        let size: i32 = 1000;
        // SAFETY: the value is an integer of that length.
        let set = unsafe {
            let fd = std::os::fd::AsRawFd::as_raw_fd(&socket);
            nix::libc::setsockopt(fd, nix::libc::SOL_UDP, nix::libc::UDP_SEGMENT, (&raw const size).cast(), 4)
        };
        assert_eq!(set, 0);
        let arrived = || {
            let text = sh("ip netns exec member cat /proc/net/snmp");
            let udp: Vec<&str> = text.lines().filter(|line| line.starts_with("Udp:")).collect();
            udp[1].split_whitespace().nth(2).unwrap().parse::<u64>().unwrap()
        };
        let before = arrived();
        let send = || socket.send_to(&[1; 3000], "10.42.2.2:9");
        if !has_gso_without_checksums() {
            assert_eq!(send().unwrap_err().raw_os_error(), Some(nix::libc::EIO));
            bpf::skip("this kernel sends no UDP GSO by a device that sums no checksums");
            return;
        }
        world.counts(&[("steer", 1)], || assert_eq!(send().unwrap(), 3000));
        assert_eq!(arrived() - before, 3, "datagrams for the member's VXLAN port, which nobody has there");
    });
}

#[test]
fn a_forged_source_on_the_public_interface_is_dropped_whatever_rp_filter_says() {
    isolated("a_forged_source_on_the_public_interface_is_dropped_whatever_rp_filter_says", || async {
        let mut world = World::new().await;
        world.apply().await;
        let inner = udp(MEMBER_POD, OWN_POD, (1, 2), b"forged");
        for rp_filter in [0, 1, 2] {
            set_rp_filter(rp_filter);
            for frame in [steered(MEMBER, SELF, &inner), vxlan(MEMBER, SELF, &inner)] {
                world.counts(&[("wrong_interface", 1)], || send_frame("eth1p", &frame));
            }
            // To the public address: with rp_filter=1 the kernel drops it before the device.
            let counted: &[_] = if rp_filter == 1 { &[] } else { &[("unchecked", 1)] };
            world.counts(counted, || send_frame("eth1p", &vxlan(MEMBER, PUBLIC, &inner)));
        }
        // A packet between hosts that are not nodes does not concern us.
        let ordinary = ethernet(&udp([192, 0, 2, 9], PUBLIC, (1, 53), b"x"));
        world.counts(&[], || send_frame("eth1p", &ordinary));
    });
}

#[test]
fn what_a_stranger_sends_to_the_ipip_device_is_dropped_whatever_rp_filter_says() {
    isolated("what_a_stranger_sends_to_the_ipip_device_is_dropped_whatever_rp_filter_says", || async {
        let mut world = World::new().await;
        if world.tunnels.ipip.is_none() {
            bpf::skip("this kernel has no IPIP device");
            return;
        }
        world.apply().await;
        let ipip = steered([198, 51, 100, 66], PUBLIC, &udp(MEMBER_POD, OWN_POD, (1, 2), b"forged"));
        for rp_filter in [0, 1, 2] {
            set_rp_filter(rp_filter);
            // There is no route back to the stranger: any value but 0 drops it before the device.
            let counted: &[_] = if rp_filter == 0 { &[("unchecked", 1)] } else { &[] };
            world.counts(counted, || send_frame("eth1p", &ipip));
        }
    });
}

#[test]
fn tunnel_devices_are_up_only_while_a_program_guards_them() {
    isolated("tunnel_devices_are_up_only_while_a_program_guards_them", || async {
        let mut world = World::new().await;
        let devices: Vec<&str> = ["kilo-vxlan", "kilo-ipip"]
            .into_iter()
            .filter(|name| succeeds(&format!("ip link show {name}")))
            .collect();
        assert!(devices.contains(&"kilo-vxlan"));
        assert!(devices.iter().all(|name| !is_up(name)), "made, and not up");
        assert!(world.apply().await.failed.is_empty());
        assert!(devices.iter().all(|name| is_up(name)), "guarded, and up");
        let found = tunnels::ensure(world.net.rtnl()).await;
        assert_eq!((found.created, found.down.len()), (0, 0), "the next look finds them so");
    });
}

/// Runs `body` on a thread without the right to query hooks.
async fn without_the_right_to_look<T>(body: impl Future<Output = T>) -> T {
    // struct __user_cap_header_struct and two of __user_cap_data_struct (include/uapi/linux/capability.h).
    let header: [u32; 2] = [0x2008_0522, 0];
    let mut held = [0_u32; 6];
    // SAFETY: both structures are complete, and outlive the call.
    let code = unsafe { nix::libc::syscall(nix::libc::SYS_capget, header.as_ptr(), held.as_mut_ptr()) };
    assert_eq!(code, 0);
    let set = |rights: &[u32; 6]| {
        // SAFETY: as above.
        let code = unsafe { nix::libc::syscall(nix::libc::SYS_capset, header.as_ptr(), rights.as_ptr()) };
        assert_eq!(code, 0);
    };
    // NET_ADMIN and SYS_ADMIN leave the effective set, but stay permitted.
    let mut fewer = held;
    fewer[0] &= !(1 << 12 | 1 << 21);
    set(&fewer);
    let result = body.await;
    set(&held);
    result
}

/// Whether this kernel has TCX; prints that the test is skipped where it has not.
fn has_tcx(world: &World) -> bool {
    let mut probe = bpf::foreign::program(&world.fs.path().join("probe"));
    let attached =
        bpf::foreign::attach_tcx(&mut probe, "eth1", TcAttachType::Ingress, LinkOrder::last()).is_ok();
    if !attached {
        bpf::skip("TCX needs Linux 6.6");
    }
    attached
}

#[test]
fn a_hook_that_cannot_be_looked_at_guards_no_device() {
    isolated("a_hook_that_cannot_be_looked_at_guards_no_device", || async {
        let mut world = World::new().await;
        if !has_tcx(&world) {
            return;
        }
        assert!(world.apply().await.refused.is_none());
        assert!(is_up("kilo-vxlan"));
        let applied = without_the_right_to_look(world.attach()).await;
        assert!(applied.refused.is_some(), "kilo0 could not be looked at, either");
        let devices: BTreeSet<u32> = world.tunnels.vxlan.into_iter().chain(world.tunnels.ipip).collect();
        assert_eq!(
            applied.unguarded, devices,
            "the device with the lowest index keeps none from being checked"
        );
        world.tunnels.guard(world.net.rtnl(), &applied.unguarded).await.unwrap();
        assert!(!is_up("kilo-vxlan"), "nothing comes in unseen");
        let applied = world.apply().await;
        assert_eq!((applied.changes, applied.reattached), (0, 0), "its program had been there");
        assert!(is_up("kilo-vxlan"));
    });
}

/// Fills a hook with foreign programs up to its limit.
fn filled(world: &World, interface: &str, hook: TcAttachType) -> Vec<(SchedClassifier, FdLink)> {
    let mut others = Vec::new();
    let started = Instant::now();
    while others.len() < 63 {
        assert!(started.elapsed() < Duration::from_secs(10), "{} programs", others.len());
        let pin = world.fs.path().join(format!("other{}", others.len()));
        let mut other = bpf::foreign::program(&pin);
        match bpf::foreign::attach_tcx(&mut other, interface, hook, LinkOrder::last()) {
            Ok(link) => others.push((other, link)),
            // The kernel frees a link some time after its last pin is gone.
            Err(_) => std::fs::remove_file(pin).unwrap(),
        }
    }
    others
}

#[test]
fn an_uplink_whose_egress_takes_no_program_is_open_until_it_does() {
    isolated("an_uplink_whose_egress_takes_no_program_is_open_until_it_does", || async {
        let mut world = World::new().await;
        if !has_tcx(&world) {
            return;
        }
        world.dataplane = Dataplane::open_with(world.fs.path(), false, AttachMode::Tcx).unwrap();
        let mut others = filled(&world, "eth1", TcAttachType::Egress);
        let applied = world.apply().await;
        assert_eq!(applied.open, BTreeSet::from([index("eth1")]));
        assert_eq!(applied.failed.len(), 1, "{:?}", applied.failed);
        others.clear();
        task::until("nothing is open", Duration::from_secs(10), async || world.apply().await.open.is_empty())
            .await;
    });
}

#[test]
fn a_qdisc_without_a_hook_on_the_way_out_is_named_and_left_alone() {
    isolated("a_qdisc_without_a_hook_on_the_way_out_is_named_and_left_alone", || async {
        let mut world = World::new().await;
        world.dataplane = Dataplane::open_with(world.fs.path(), false, AttachMode::Clsact).unwrap();
        sh("tc qdisc add dev eth1 ingress; tc qdisc add dev kilo-vxlan ingress");
        for _ in 0..2 {
            let applied = world.apply().await;
            assert_eq!((applied.open, applied.reattached), (BTreeSet::from([index("eth1")]), 0));
            let [failed] = &applied.failed[..] else { panic!("{:?}", applied.failed) };
            assert!(failed.to_string().contains("tc qdisc delete dev eth1 ingress"), "{failed}");
            let filters = sh("tc filter show dev eth1 ingress");
            assert!(filters.contains("lan_ingress") && !filters.contains("uplink_egress"), "{filters}");
            assert!(sh("tc filter show dev kilo-vxlan ingress").contains("tunnel_ingress"));
            assert!(world.dataplane.is_attached(&world.net).await.unwrap());
        }
        assert!(sh("tc qdisc show dev eth1").contains("qdisc ingress"), "it is somebody's");
        sh("tc qdisc delete dev eth1 ingress");
        let applied = world.apply().await;
        assert!(applied.open.is_empty() && applied.failed.is_empty(), "{:?}", applied.failed);
        assert!(sh("tc filter show dev eth1 egress").contains("uplink_egress"));
    });
}

#[test]
fn a_device_that_takes_no_program_stays_down_and_one_that_lost_it_goes_down() {
    isolated("a_device_that_takes_no_program_stays_down_and_one_that_lost_it_goes_down", || async {
        let mut world = World::new().await;
        if !has_tcx(&world) {
            return;
        }
        world.dataplane = Dataplane::open_with(world.fs.path(), false, AttachMode::Tcx).unwrap();
        world.apply().await;
        assert!(is_up("kilo-vxlan"));
        // The program is removed, and the hook filled up; it holds 63 programs.
        let index = index("kilo-vxlan");
        let links = kilo_host::dataplane::link_directory(world.fs.path());
        sh(&format!("rm {}/tunnel_ingress_{index}", links.display()));
        let mut others = filled(&world, "kilo-vxlan", TcAttachType::Ingress);
        let applied = world.apply().await;
        assert_eq!((applied.unguarded, applied.open), (BTreeSet::from([index]), BTreeSet::new()));
        assert_eq!(applied.failed.len(), 1, "{:?}", applied.failed);
        assert!(!is_up("kilo-vxlan"), "nothing comes in unseen");
        others.clear();
        task::until("nothing fails", Duration::from_secs(10), async || world.apply().await.failed.is_empty())
            .await;
        assert!(is_up("kilo-vxlan"), "guarded again");
    });
}

//! GSO packets of real sockets through the programs: TCP of both families, UDP datagrams sent with
//! segmentation offload, and packets above 64 KiB (BIG TCP).

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::{
    bpf::{self, MEMBER_POD, OUTSIDE, OWN_POD, SELF},
    links::host::{World, heard, in_lan, index, lan},
    netns::{isolated, sh, succeeds},
    wait::pace,
};

use std::{
    io::{Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener, TcpStream, UdpSocket},
    os::fd::{AsFd as _, AsRawFd as _, FromRawFd as _, OwnedFd},
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    time::Duration,
};

use kilo_common::counters::Action;
use kilo_core::plan::Hop;
use nix::poll::{PollFd, PollFlags, poll};

/// More than enough bytes for GSO packets of the largest size.
const BULK: usize = 8 << 20;
/// Bytes of each datagram of a GSO packet.
const DATAGRAM: u16 = 1200;
const LIMIT: Duration = Duration::from_secs(20);

const POD_V6: &str = "fd42:1::2";
const OUTSIDE_V6: &str = "2001:db8:9::53";

/// Largest frames that crossed the link: TCP from the pod, TCP to it, and datagrams.
#[derive(Debug, Default)]
struct Largest {
    sent: AtomicUsize,
    answered: AtomicUsize,
    datagrams: AtomicUsize,
}

/// Stops a thread when dropped, also when the watched code fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A pod's TCP stream in both directions, and a batch of its datagrams; everything must arrive unchanged.
fn bulk(outside: IpAddr, pod: IpAddr) -> Largest {
    let (largest, stop) = (Largest::default(), AtomicBool::new(false));
    let watched = in_lan(open);
    std::thread::scope(|scope| {
        let _until_the_end = Stop(&stop);
        scope.spawn(|| look(&watched, &largest, &stop));
        stream(outside, pod);
        datagrams(outside, pod);
    });
    largest
}

fn stream(outside: IpAddr, pod: IpAddr) {
    let pattern: Vec<u8> = (0..BULK).map(|at| (at ^ at >> 8 ^ at >> 16) as u8).collect();
    let listener = in_lan(|| TcpListener::bind((outside, 80)).unwrap());
    std::thread::scope(|scope| {
        let echo = scope.spawn(|| {
            let mut ready = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
            assert_eq!(poll(&mut ready, 5000_u16).unwrap(), 1, "nobody connects");
            let (mut stream, _) = listener.accept().unwrap();
            stream.set_read_timeout(Some(LIMIT)).unwrap();
            let mut got = vec![0; BULK];
            stream.read_exact(&mut got).unwrap();
            stream.write_all(&got).unwrap();
        });
        // The route sets the pod's address as source.
        let mut stream = TcpStream::connect_timeout(&(outside, 80).into(), LIMIT).unwrap();
        assert_eq!(stream.local_addr().unwrap().ip(), pod);
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream.set_write_timeout(Some(LIMIT)).unwrap();
        stream.write_all(&pattern).unwrap();
        let mut got = vec![0; BULK];
        stream.read_exact(&mut got).unwrap();
        assert!(got == pattern, "the bytes come back as they were sent");
        echo.join().unwrap();
    });
}

fn datagrams(outside: IpAddr, pod: IpAddr) {
    let pattern: Vec<u8> = (0..usize::from(DATAGRAM) * 10).map(|at| (at ^ at >> 8) as u8).collect();
    let receiver = in_lan(|| UdpSocket::bind((outside, 53)).unwrap());
    let sender = UdpSocket::bind((pod, 2000)).unwrap();
    let segment = i32::from(DATAGRAM);
    nix::sys::socket::setsockopt(&sender, nix::sys::socket::sockopt::UdpGsoSegment, &segment).unwrap();
    match sender.send_to(&pattern, (outside, 53)) {
        // Before Linux 6.11, UDP GSO fails for a device without checksum offload.
        Err(error) if error.raw_os_error() == Some(nix::libc::EIO) => {
            println!("this kernel sends no UDP GSO packets to {outside}");
            return;
        }
        sent => assert_eq!(sent.unwrap(), pattern.len()),
    }
    for part in pattern.chunks(usize::from(DATAGRAM)) {
        assert_eq!(heard(&receiver).as_deref(), Some(part));
    }
}

/// A packet socket in the network behind the uplink.
pub fn open() -> OwnedFd {
    let all = i32::from((nix::libc::ETH_P_ALL as u16).to_be());
    // SAFETY: a plain system call; the descriptor is ours alone.
    let socket = unsafe {
        let fd = nix::libc::socket(nix::libc::AF_PACKET, nix::libc::SOCK_RAW | nix::libc::SOCK_NONBLOCK, all);
        assert!(fd >= 0, "{}", std::io::Error::last_os_error());
        OwnedFd::from_raw_fd(fd)
    };
    // Frames of a stream wait in the socket until they are read.
    nix::sys::socket::setsockopt(&socket, nix::sys::socket::sockopt::RcvBufForce, &(256 << 20)).unwrap();
    socket
}

/// The next frame; empty after a moment without one.
pub fn next(socket: &OwnedFd) -> Vec<u8> {
    let mut ready = [PollFd::new(socket.as_fd(), PollFlags::POLLIN)];
    if poll(&mut ready, 200_u16).unwrap() == 0 {
        return Vec::new();
    }
    let mut bytes = vec![0; 2048];
    let flags = nix::sys::socket::MsgFlags::empty();
    let length = nix::sys::socket::recv(socket.as_raw_fd(), &mut bytes, flags).unwrap();
    bytes.truncate(length);
    bytes
}

/// Records the largest frames until `stop` is set and no frame is left.
fn look(socket: &OwnedFd, largest: &Largest, stop: &AtomicBool) {
    let mut start = [0_u8; 128];
    loop {
        let ends = stop.load(Ordering::Relaxed);
        // SAFETY: plain integers, for which zero is a value.
        let mut from: nix::libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        let mut size = u32::try_from(size_of_val(&from)).unwrap();
        // SAFETY: both buffers have the lengths that are passed.
        let length = unsafe {
            let (bytes, from) = (start.as_mut_ptr().cast(), (&raw mut from).cast());
            nix::libc::recvfrom(
                socket.as_raw_fd(),
                bytes,
                start.len(),
                nix::libc::MSG_TRUNC,
                from,
                &raw mut size,
            )
        };
        let Ok(length) = usize::try_from(length) else {
            if ends {
                return;
            }
            pace(Duration::from_micros(200));
            continue;
        };
        let udp = match start[12..14] {
            [8, 0] => start[14 + 9] == 17,
            [0x86, 0xdd] => start[14 + 6] == 17,
            _ => continue,
        };
        let outgoing = from.sll_pkttype == nix::libc::PACKET_OUTGOING;
        let kind = match (udp, outgoing) {
            (true, _) => &largest.datagrams,
            (false, true) => &largest.answered,
            (false, false) => &largest.sent,
        };
        kind.fetch_max(length, Ordering::Relaxed);
    }
}

/// A node whose pod has addresses of both families, as has the outside host.
async fn masquerading() -> World {
    let mut world = World::on_veth();
    sh("ip -6 address add fd42:1::2/128 dev lo nodad; ip -6 address add 2001:db8::b/64 dev eth0 nodad
        ip route add 198.51.100.0/24 via 10.1.0.12 src 10.42.1.2
        ip -6 route add 2001:db8:9::/48 via 2001:db8::12 src fd42:1::2");
    lan("ip -6 address add 2001:db8:9::53/128 dev lo nodad; ip -6 address add 2001:db8::12/64 dev eth0 nodad
         sysctl -qw net.ipv4.tcp_rmem=\"4096 8000000 16000000\" net.ipv4.tcp_wmem=\"4096 8000000 16000000\"");
    sh("sysctl -qw net.ipv4.tcp_rmem='4096 8000000 16000000' net.ipv4.tcp_wmem='4096 8000000 16000000'");
    world.tables.device.get_mut(&index("eth0")).unwrap().masq_v6 = bpf::PUBLIC_V6;
    world.attach(&["eth0"], &[]).await;
    world
}

/// Addresses of the outside host and the pod, for both families.
fn ends() -> [(IpAddr, IpAddr); 2] {
    let v6 = |text: &str| IpAddr::V6(text.parse::<Ipv6Addr>().unwrap());
    [(Ipv4Addr::from(OUTSIDE).into(), Ipv4Addr::from(OWN_POD).into()), (v6(OUTSIDE_V6), v6(POD_V6))]
}

#[test]
fn gso_packets_of_each_kind_are_masqueraded_and_answers_translated_back() {
    isolated("gso_packets_of_each_kind_are_masqueraded_and_answers_translated_back", || async {
        let world = masquerading().await;
        for (outside, pod) in ends() {
            let before = [Action::Masquerade, Action::Unmasquerade].map(|action| world.counted(action));
            let Largest { sent, answered, datagrams } = bulk(outside, pod);
            let [sent, answered, datagrams] = [sent, answered, datagrams].map(AtomicUsize::into_inner);
            println!("{outside}: {sent} and {answered} bytes of TCP, {datagrams} of UDP in one packet");
            for (what, length) in [("TCP", sent), ("TCP back", answered), ("UDP", datagrams)] {
                assert!(length > 3 * 1500, "{outside}: {what} crossed the link in packets of {length} bytes");
            }
            let now = [Action::Masquerade, Action::Unmasquerade].map(|action| world.counted(action));
            assert!(now[0] > before[0] && now[1] > before[1]);
        }
        assert!(world.drops().is_empty(), "{:?}", world.drops());
    });
}

#[test]
fn packets_above_64_kib_are_masqueraded_and_answers_translated_back() {
    isolated("packets_above_64_kib_are_masqueraded_and_answers_translated_back", || async {
        let world = masquerading().await;
        let sizes = "gso_max_size 185000 gro_max_size 185000";
        for family in ["", "gso_ipv4_max_size 185000 gro_ipv4_max_size 185000"] {
            let set = format!(
                "ip link set eth0 {sizes} {family} && ip netns exec lan ip link set eth0 {sizes} {family}"
            );
            if !succeeds(&set) {
                bpf::skip("BIG TCP needs Linux 5.19, for IPv4 6.3");
                return;
            }
            let (outside, pod) = ends()[usize::from(family.is_empty())];
            let Largest { sent, answered, .. } = bulk(outside, pod);
            let [sent, answered] = [sent, answered].map(AtomicUsize::into_inner);
            println!("{outside}: {sent} and {answered} bytes of TCP in one packet");
            for (what, length) in [("TCP", sent), ("TCP back", answered)] {
                assert!(length > 65_600, "{outside}: {what} crossed the link in packets of {length} bytes");
            }
        }
        assert!(world.drops().is_empty(), "{:?}", world.drops());
    });
}

#[test]
fn gso_packets_are_steered_to_another_node_and_taken_from_it() {
    isolated("gso_packets_are_steered_to_another_node_and_taken_from_it", || async {
        let mut world = World::on_veth();
        if !succeeds("ip netns exec lan ip link add member type ipip local 10.1.0.12 remote 10.1.0.11") {
            bpf::skip("this kernel has no IPIP devices");
            return;
        }
        lan("ip link set member up; ip address add 10.42.2.2/32 dev member
             ip route add 10.42.1.0/24 dev member src 10.42.2.2");
        sh("ip route change 10.42.2.0/24 dev kilo0 src 10.42.1.2 mtu 1400");
        for hop in world.tables.hop.values_mut() {
            if let Hop::Node { ifindex, .. } = hop {
                *ifindex = index("eth0");
            }
        }
        assert_eq!(world.tables.config.private_v4, SELF);
        world.attach(&["eth0"], &[]).await;
        let largest = bulk(Ipv4Addr::from(MEMBER_POD).into(), Ipv4Addr::from(OWN_POD).into());
        // The outer header hides the protocol, so all packets count as one kind.
        let [sent, answered] = [largest.sent, largest.answered].map(AtomicUsize::into_inner);
        println!("{sent} and {answered} bytes in one packet");
        assert!(sent > 3 * 1500 && answered > 3 * 1500, "{sent} {answered}");
        assert!(world.counted(Action::Steer) > 0 && world.counted(Action::Deliver) > 0);
        assert!(world.drops().is_empty(), "{:?}", world.drops());
    });
}

//! The MTU of a path is probed on the path itself: real routers with small links, hosts that refuse, and
//! forged ICMP errors.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::cluster;
use crate::netns;
use crate::wait::until;

use std::{
    fs::File,
    io::{BufRead as _, BufReader},
    net::IpAddr,
    os::fd::AsRawFd as _,
    process::Stdio,
    time::{Duration, Instant},
};

use kilo_common::checksum;
use kilo_host::net::path_probe::smaller_than;
use netns::{Agent, isolated, sh};
use nix::{
    sched::{CloneFlags, setns},
    sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrIn, sendto, socket},
};

/// Sets up this host, a router, and a node behind it.
fn build() {
    sh("mkdir -p /run/netns; ip link set lo up; ip netns add router; ip netns add node; \
        ip link add eth0 type veth peer name lan netns router; \
        ip -n router link add far type veth peer name eth0 netns node; \
        ip link set eth0 up; ip -n router link set lan up; ip -n router link set far up; ip -n node link set eth0 up; \
        ip address add 10.1.0.1/24 dev eth0; ip address add fd01::1/64 dev eth0 nodad; \
        ip -n router address add 10.1.0.254/24 dev lan; ip -n router address add fd01::ff/64 dev lan nodad; \
        ip -n router address add 10.2.0.254/24 dev far; ip -n router address add fd02::ff/64 dev far nodad; \
        ip -n node address add 10.2.0.1/24 dev eth0; ip -n node address add fd02::1/64 dev eth0 nodad; \
        ip route add default via 10.1.0.254; ip route add default via fd01::ff; \
        ip -n node route add default via 10.2.0.254; ip -n node route add default via fd02::ff; \
        ip netns exec router sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1; \
        until ping -c 1 -W 1 10.2.0.1 && ping -c 1 -W 1 fd02::1; do sleep 0.1; done");
}

const NODES: [&str; 2] = ["10.2.0.1", "fd02::1"];

fn nodes() -> [IpAddr; 2] {
    NODES.map(|node| node.parse().unwrap())
}

#[test]
fn a_router_with_a_small_link_says_what_it_carries() {
    isolated("a_router_with_a_small_link_says_what_it_carries", || async {
        build();
        for node in nodes() {
            assert_eq!(smaller_than(1500, node).await.unwrap(), None, "{node}: all of it passes");
        }
        sh("ip -n router link set far mtu 1360");
        for node in nodes() {
            assert_eq!(smaller_than(1500, node).await.unwrap(), Some(1360), "{node}");
            // Nor is the kernel's learnt PMTU trusted.
            assert_eq!(smaller_than(1361, node).await.unwrap(), Some(1360), "{node}");
            assert_eq!(smaller_than(1360, node).await.unwrap(), None, "{node}");
        }
        sh("ip -n router link set far mtu 1500");
        for node in nodes() {
            assert_eq!(smaller_than(1500, node).await.unwrap(), None, "{node}: it has grown again");
        }
        sh("ip link set eth0 mtu 1400");
        for node in nodes() {
            assert!(smaller_than(1500, node).await.is_err(), "{node}: the interface carries less");
        }
    });
}

#[test]
fn silence_is_no_answer() {
    isolated("silence_is_no_answer", || async {
        build();
        sh("ip netns exec router nft 'add table inet silent; \
            add chain inet silent forward { type filter hook forward priority 0; policy drop; }'");
        for node in nodes() {
            assert_eq!(smaller_than(1500, node).await.unwrap(), None, "{node}");
        }
    });
}

/// Sends a forged "Fragmentation needed, MTU 532" about a packet that n1 may have steered to n2.
fn forge() {
    let mut error = vec![3, 4, 0, 0, 0, 0, 2, 20];
    error.extend([0x45, 0, 5, 220, 0, 0, 0x40, 0, 63, 4, 0, 0]);
    error.extend([10, 1, 0, 11, 10, 1, 0, 2]);
    error.extend([0x45, 0, 5, 200, 0, 0, 0x40, 0]);
    let sum = error.chunks(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]]))).sum();
    error[2..4].copy_from_slice(&(!checksum::fold(sum)).to_be_bytes());
    let send = move || {
        setns(File::open("/run/netns/router").unwrap(), CloneFlags::CLONE_NEWNET).unwrap();
        let raw = socket(AddressFamily::Inet, SockType::Raw, SockFlag::empty(), SockProtocol::Icmp).unwrap();
        sendto(raw.as_raw_fd(), &error, &SockaddrIn::new(10, 1, 0, 11, 0), MsgFlags::empty()).unwrap();
    };
    std::thread::spawn(send).join().unwrap();
}

#[test]
fn a_forged_error_lowers_nothing_and_a_true_one_what_the_router_says() {
    isolated("a_forged_error_lowers_nothing_and_a_true_one_what_the_router_says", || async {
        cluster::prepare();
        cluster::write_node(2, "a", "10.42.2.0/24", false);
        // n2 is behind a router.
        sh("mkdir -p /run/netns; ip netns add router; ip netns add node; ip link set other netns router; \
            ip -n router link set other up; ip -n router address add 10.1.0.1/24 dev other; \
            ip -n router link add far type veth peer name eth0 netns node; \
            ip -n router link set far up; ip -n node link set eth0 up; \
            ip -n router route add 10.1.0.2/32 dev far; ip -n node address add 10.1.0.2/32 dev eth0; \
            ip -n node route add 10.1.0.1/32 dev eth0; ip -n node route add default via 10.1.0.1; \
            ip route add 10.1.0.2/32 via 10.1.0.1; \
            ip netns exec router sysctl -qw net.ipv4.ip_forward=1; \
            until ping -c 1 -W 1 10.1.0.2; do sleep 0.1; done");
        let mut agent =
            Agent(cluster::kg(&[]).args(["--log-level=debug"]).stdout(Stdio::piped()).spawn().unwrap());
        let (sender, log) = std::sync::mpsc::channel();
        let stdout = agent.0.stdout.take().unwrap();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        let logged = |words: &str| {
            let until = Instant::now() + Duration::from_secs(30);
            let mut said = String::new();
            loop {
                match log.recv_timeout(until.saturating_duration_since(Instant::now())) {
                    Ok(line) if line.contains(words) => break,
                    Ok(line) => said += &(line + "\n"),
                    Err(error) => panic!("the log does not say {words:?} ({error}): {said}"),
                }
            }
        };
        let route = || sh("ip route show 10.42.2.0/24");
        logged("the host was reconciled");
        let before = route();
        assert!(before.contains("dev kilo0") && !before.contains("mtu 5"), "{before}");

        forge();
        logged("did not confirm");
        assert_eq!(route(), before, "nothing has changed");

        let becomes = |mtu: &str| {
            until(&format!("the route has {mtu}"), Duration::from_secs(30), || {
                let route = route();
                if route.contains(mtu) { Ok(()) } else { Err(route) }
            });
        };
        // Now the path's MTU really is smaller, but not what the error says.
        sh("ip -n router link set far mtu 1360");
        forge();
        logged("path MTU to a node decreased");
        becomes("mtu 1340");
        // Pods also have IPv6, which needs 1280.
        sh("ip -n router link set far mtu 1000");
        forge();
        logged("path MTU to a node decreased");
        becomes("mtu 1280");
    });
}

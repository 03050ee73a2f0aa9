//! Masquerading by the programs on real interfaces, with nftables as the reference: who opens a flow, which
//! address it gets, and through which interface replies arrive.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::netns;
use crate::wait::until;
use crate::{bpf, seed::seed};

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io::{Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    sync::mpsc,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use ipnet::IpNet;
use kilo_common::maps::{
    CONFIG_MASQUERADE, CONFIG_SEVERAL_V4, CONFIG_SEVERAL_V6, Config, DEVICE_BY_DESTINATION,
    DEVICE_MASQUERADE, Device, MASQ_EXCLUDE, MASQ_SRC_ALWAYS,
};
use kilo_core::{observed::HostLinks, plan::Tables, prefixes::longest};
use kilo_host::{
    dataplane::{Dataplane, Interfaces},
    firewall::nat_rules::{Decision, NatRules},
    net::{
        Net,
        links::{self, HostQuery},
    },
};
use netns::{isolated, sh};
use nix::sched::{CloneFlags, setns};
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};

const LIMIT: Duration = Duration::from_secs(5);
const PODS: [&str; 2] = ["10.42.1.0/24", "fd42:1::/64"];

/// Makes this namespace a node with a pod and two links to a network. A host there has a static route to
/// the pods, and replies to packets from one link through the other.
fn build() {
    sh("mkdir -p /run/netns; ip link set lo up
sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1 net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.default.rp_filter=0
link() { # device, namespace, its device there
  ip link add $1 type veth peer name $3 netns $2; ip link set $1 up; ip -n $2 link set $3 up; }
addresses() { # namespace, device, addresses
  n=$1 d=$2; shift 2; for a; do case $a in *:*) ip $n address add $a dev $d nodad;; *) ip $n address add $a dev $d;; esac; done; }
for n in pod lan; do ip netns add $n; ip -n $n link set lo up; done
ip netns exec lan sysctl -qw net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.default.rp_filter=0
ip link add kilo0 type veth peer name kilo1; ip link set kilo0 up
link pod0 pod eth0; link lan0 lan eth0; link wan0 lan eth1
for f in /proc/sys/net/ipv4/conf/*/rp_filter; do echo 0 > $f; done
ip netns exec lan sh -c 'for f in /proc/sys/net/ipv4/conf/*/rp_filter; do echo 0 > $f; done'
addresses '' pod0 10.42.1.1/24 fd42:1::1/64
addresses '-n pod' eth0 10.42.1.2/24 fd42:1::2/64
ip -n pod route add default via 10.42.1.1; ip -n pod route add default via fd42:1::1
addresses '' lan0 192.0.2.11/24 172.30.0.11/24 2001:db8:1::11/64 fd00:1::11/64
addresses '' wan0 198.51.100.11/24
addresses '-n lan' eth0 192.0.2.99/24 172.30.0.99/24 2001:db8:1::99/64 fd00:1::99/64
addresses '-n lan' eth1 198.51.100.99/24
addresses '-n lan' lo 203.0.113.5/32 203.0.113.6/32 2001:db8:9::5/128 fd00:9::5/128
ip route add 203.0.113.5 via 198.51.100.99
ip route add 203.0.113.6 via 192.0.2.99 src 172.30.0.11
ip route add 2001:db8:9::5 via 2001:db8:1::99; ip route add fd00:9::5 via fd00:1::99
ip -n lan route add 198.51.100.11 via 192.0.2.11
ip -n lan route add 10.42.1.0/24 via 192.0.2.11; ip -n lan route add fd42:1::/64 via 2001:db8:1::11");
}

fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

/// The host's links as the agent would find them.
async fn look(kilo: u32) -> (Net, HostLinks) {
    let kernel = Net::new().unwrap();
    let links = kernel.links().await.unwrap();
    let main_routes =
        kernel.main_routes(&links.iter().map(|link| link.index).collect::<Vec<_>>()).await.unwrap();
    let pods = PODS.map(net);
    let query = HostQuery {
        kilo,
        private: None,
        pod_cidrs: &pods,
        main_routes: &main_routes,
        ..HostQuery::default()
    };
    let host = links::host_links(&links, &query, &BTreeMap::new());
    (kernel, host)
}

fn index(name: &str) -> u32 {
    std::fs::read_to_string(format!("/sys/class/net/{name}/ifindex")).map_or_else(
        |_| sh(&format!("ip -o link show {name} | cut -d: -f1")).trim().parse().unwrap(),
        |text| text.trim().parse().unwrap(),
    )
}

fn tables(host: &HostLinks, kilo: u32) -> Tables {
    let all = |value| PODS.iter().map(move |pods| (net(pods), value));
    Tables {
        masq_src: all(MASQ_SRC_ALWAYS).collect(),
        masq_dst: all(MASQ_EXCLUDE).collect(),
        device: host
            .uplinks
            .iter()
            .map(|(index, uplink)| {
                let by_destination = host.masq_addrs.keys().any(|(of, _)| of == index);
                let device = Device {
                    masq_v4: uplink.v4.map(|addr| addr.octets()).unwrap_or_default(),
                    masq_v6: uplink.v6.map(|addr| addr.octets()).unwrap_or_default(),
                    flags: DEVICE_MASQUERADE | if by_destination { DEVICE_BY_DESTINATION } else { 0 },
                };
                (*index, device)
            })
            .collect(),
        masq_addr: host.masq_addrs.clone(),
        config: Config {
            kilo_ifindex: kilo,
            flags: CONFIG_MASQUERADE | CONFIG_SEVERAL_V4 | CONFIG_SEVERAL_V6,
            nat_port_min: 32_768,
            nat_port_max: 60_999,
            wireguard_port: 51_820,
            ..Config::default()
        },
        ..Tables::default()
    }
}

/// Runs `work` on a thread in a named network namespace.
fn in_netns<T: Send + 'static>(netns: &str, work: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    let netns = File::open(format!("/run/netns/{netns}")).unwrap();
    std::thread::spawn(move || {
        setns(netns, CloneFlags::CLONE_NEWNET).unwrap();
        work()
    })
}

/// Exchanges several messages between a client in one namespace and a server in another; returns the source
/// that the server saw, or the error.
fn talk(from: &str, to: (&str, IpAddr), tcp: bool) -> Result<IpAddr, String> {
    let address = to.1;
    let (ready, bound) = mpsc::channel();
    let server = in_netns(to.0, move || -> std::io::Result<IpAddr> {
        let mut buffer = [0; 4];
        if tcp {
            let listener = TcpListener::bind((address, 0))?;
            ready.send(listener.local_addr()?).unwrap();
            let (mut stream, peer) = listener.accept()?;
            stream.set_read_timeout(Some(LIMIT))?;
            while stream.read_exact(&mut buffer).is_ok() {
                stream.write_all(&buffer)?;
            }
            Ok(peer.ip())
        } else {
            let socket = UdpSocket::bind((address, 0))?;
            socket.set_read_timeout(Some(LIMIT))?;
            ready.send(socket.local_addr()?).unwrap();
            let mut seen = None;
            while seen.is_none() || buffer != *b"last" {
                let (_, peer) = socket.recv_from(&mut buffer)?;
                socket.send_to(&buffer, peer)?;
                seen = Some(peer.ip());
            }
            Ok(seen.unwrap())
        }
    });
    let server_address: SocketAddr = bound.recv().unwrap();
    let client = in_netns(from, move || -> std::io::Result<()> {
        let mut answer = [0; 4];
        if tcp {
            let mut stream = TcpStream::connect_timeout(&server_address, LIMIT)?;
            stream.set_read_timeout(Some(LIMIT))?;
            for question in [b"one.", b"two.", b"last"] {
                stream.write_all(question)?;
                stream.read_exact(&mut answer)?;
                assert_eq!(&answer, question);
            }
        } else {
            let any: IpAddr =
                if address.is_ipv4() { [0; 4].into() } else { std::net::Ipv6Addr::UNSPECIFIED.into() };
            let socket = UdpSocket::bind((any, 0))?;
            // A reply from another address than the one asked does not count.
            socket.connect(server_address)?;
            socket.set_read_timeout(Some(LIMIT))?;
            for question in [b"one.", b"two.", b"last"] {
                socket.send(question)?;
                socket.recv(&mut answer)?;
                assert_eq!(&answer, question);
            }
        }
        Ok(())
    });
    let outcome = client.join().unwrap();
    if outcome.is_err() && tcp {
        // Lets the server end.
        drop(in_netns(to.0, move || TcpStream::connect(server_address)).join().unwrap());
    }
    let seen = server.join().unwrap();
    outcome.map_err(|error| format!("client: {error}"))?;
    seen.map_err(|error| format!("server: {error}"))
}

/// Checks what must hold whether programs or rules masquerade.
fn check(who: &str) {
    let addr = |text: &str| text.parse::<IpAddr>().unwrap();
    until("neighbours are found", LIMIT, || talk("lan", ("lan", addr("fd00:1::99")), true).is_ok());
    for (from, to, seen) in [
        ("a host of the network opens towards a pod", ("lan", "pod", "10.42.1.2"), "192.0.2.99"),
        ("the same over IPv6", ("lan", "pod", "fd42:1::2"), "fd00:1::99"),
        ("a pod to the first subnet", ("pod", "lan", "192.0.2.99"), "192.0.2.11"),
        ("a pod to the second subnet", ("pod", "lan", "172.30.0.99"), "172.30.0.11"),
        ("a pod by a route with a source", ("pod", "lan", "203.0.113.6"), "172.30.0.11"),
        ("answers by another interface", ("pod", "lan", "203.0.113.5"), "198.51.100.11"),
        ("a pod to a global address", ("pod", "lan", "2001:db8:9::5"), "2001:db8:1::11"),
        ("a pod to a local address", ("pod", "lan", "fd00:9::5"), "fd00:1::11"),
    ]
    .map(|(what, (from, to, address), seen)| ((what, from), (to, address), seen))
    {
        for tcp in [true, false] {
            let found = talk(from.1, (to.0, addr(to.1)), tcp);
            // Masquerading by netfilter ignores a route's source.
            let expected = if who == "nftables" && to.1 == "203.0.113.6" { "192.0.2.11" } else { seen };
            assert_eq!(found, Ok(addr(expected)), "{who}: {}, {}", from.0, if tcp { "TCP" } else { "UDP" });
        }
    }
    for pod in ["10.42.1.2", "fd42:1::2"] {
        sh(&format!("ip netns exec lan ping -c 2 -i 0.2 -W 2 {pod}"));
        sh(&format!("ip netns exec lan ping -c 2 -i 0.2 -W 2 -s 3000 {pod}"));
    }
}

#[test]
fn flows_of_either_direction_get_their_answers_and_the_right_address() {
    isolated("flows_of_either_direction_get_their_answers_and_the_right_address", || async {
        let Some(fs) = bpf::bpffs() else { return };
        build();
        let kilo = index("kilo0");
        let (kernel, host) = look(kilo).await;
        let tables = tables(&host, kilo);

        let mut rules = NatRules::default();
        let decision = Decision {
            sources: tables.masq_src.iter().map(|(prefix, value)| (*prefix, *value)).collect(),
            destinations: tables.masq_dst.iter().map(|(prefix, value)| (*prefix, *value)).collect(),
        };
        rules.apply(decision, Instant::now()).await.unwrap();
        check("nftables");
        rules.apply(Decision::default(), Instant::now()).await.unwrap();
        sh("nft flush ruleset");

        let mut dataplane = Dataplane::open(fs.path(), false).unwrap();
        dataplane.write(&tables).unwrap();
        let uplinks: BTreeSet<u32> = host.uplinks.keys().copied().collect();
        assert_eq!(uplinks, BTreeSet::from([index("lan0"), index("wan0")]));
        let attached = dataplane
            .attach(
                &kernel,
                Interfaces {
                    kilo,
                    uplinks: &uplinks,
                    layer3: &BTreeSet::new(),
                    tunnels: &BTreeSet::new(),
                    pods: &BTreeSet::new(),
                },
            )
            .await
            .unwrap();
        assert!(attached.failed.is_empty());
        check("the programs");
    });
}

/// Prefixes for addresses of `up0`, without the last group.
const BASES_V6: [&str; 7] =
    ["2001:db8:1::", "2001:db8:2::", "2001:db9:8000::", "fd00:1::", "fd00:2::", "fc01::", "2002:c000:201::"];
const BASES_V4: [&str; 4] = ["192.0.2.", "172.30.0.", "172.30.1.", "10.1.0."];

/// Gives `up0` random addresses of both families; returns those it has.
fn random_addresses(random: &mut StdRng) -> Vec<IpAddr> {
    for _ in 0..random.random_range(1..5) {
        let (base, last) = (BASES_V6[random.random_range(0..BASES_V6.len())], random.random_range(1..9u8));
        let length = [48, 64, 64, 128][random.random_range(0..4)];
        let lifetime = if random.random_ratio(1, 4) { "preferred_lft 0" } else { "" };
        let _ = netns::succeeds(&format!(
            "ip address add {base}{last}/{length} dev up0 nodad {lifetime} 2>/dev/null"
        ));
        let (base, last) = (BASES_V4[random.random_range(0..BASES_V4.len())], random.random_range(1..9u8));
        let _ = netns::succeeds(&format!("ip address add {base}{last}/24 dev up0 2>/dev/null"));
    }
    let addresses = sh("ip -o address show dev up0 scope global | awk '{print $4}'");
    addresses.lines().map(|line| net(line).addr()).collect()
}

/// Adds random routes through `up0`, half of them with one of its addresses as their source.
fn random_routes(random: &mut StdRng, own: &[IpAddr]) {
    for (to, v6) in [
        ("default", false),
        ("198.51.100.0/24", false),
        ("default", true),
        ("2001:db8:77::/48", true),
        ("fd00::/12", true),
    ] {
        let family = if v6 { "-6" } else { "-4" };
        let own: Vec<_> = own.iter().filter(|addr| addr.is_ipv6() == v6).collect();
        let source = if random.random_bool(0.5) || own.is_empty() {
            String::new()
        } else {
            format!("src {}", own[random.random_range(0..own.len())])
        };
        let _ = netns::succeeds(&format!("ip {family} route add {to} dev up0 {source} 2>/dev/null"));
    }
}

/// The source that the kernel selects for a packet to this address through `up0`.
fn kernels_source(to: &str) -> Option<IpAddr> {
    let answer = std::process::Command::new("ip").args(["route", "get", to, "oif", "up0"]).output().ok()?;
    let text = String::from_utf8_lossy(&answer.stdout).into_owned();
    text.split_whitespace().skip_while(|word| *word != "src").nth(1).map(|addr| addr.parse().unwrap())
}

/// With random addresses and routes, the address found for each destination is the one that the kernel
/// itself selects for a packet of the host through that interface.
#[test]
fn addresses_by_destination_are_those_the_kernel_chooses() {
    isolated("addresses_by_destination_are_those_the_kernel_chooses", || async {
        let seed = seed();
        let mut random = StdRng::seed_from_u64(seed);
        sh(
            "ip link set lo up; ip link add up0 type veth peer name other0; ip link set up0 up; ip link set other0 up",
        );
        let mut compared = 0;
        for _ in 0..12 {
            sh("ip address flush dev up0; ip link set up0 down; ip link set up0 up");
            let own = random_addresses(&mut random);
            random_routes(&mut random, &own);
            let (_, host) = look(0).await;
            let up0 = index("up0");
            let Some(usual) = host.uplinks.get(&up0) else { continue };
            let others: BTreeMap<IpNet, IpAddr> = host
                .masq_addrs
                .iter()
                .filter(|((of, _), _)| *of == up0)
                .map(|((_, to), addr)| (*to, *addr))
                .collect();
            let mut wanted: Vec<String> =
                ["198.51.100.7", "203.0.113.9", "172.30.0.77", "172.30.1.77", "10.1.0.77", "8.8.8.8"]
                    .map(str::to_owned)
                    .into();
            wanted.extend(
                [
                    "2001:db8:77::7",
                    "2001:4860::8",
                    "fd00:1::77",
                    "fd77::7",
                    "fc01:7::7",
                    "2002:1::7",
                    "2001:0:1::7",
                ]
                .map(str::to_owned),
            );
            wanted
                .extend(BASES_V6.iter().map(|base| format!("{base}{:x}", random.random_range(100..65_000))));
            for to in wanted {
                let address: IpAddr = to.parse().unwrap();
                // The route is down, or the host has no address of the family.
                let Some(kernel) = kernels_source(&to).filter(|kernel| own.contains(kernel)) else {
                    continue;
                };
                let usual =
                    if address.is_ipv4() { usual.v4.map(IpAddr::V4) } else { usual.v6.map(IpAddr::V6) };
                let ours = longest(&others, address).or(usual);
                assert_eq!(
                    ours,
                    Some(kernel),
                    "towards {to}\n{}\n{others:#?}\nKILO_SEED={seed}",
                    sh("ip address show up0; ip route; ip -6 route")
                );
                compared += 1;
            }
        }
        assert!(compared > 100, "{compared}");
        println!("{compared} destinations");
    });
}

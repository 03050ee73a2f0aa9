//! `pod_ingress` and `kilo_egress` on a node with a bridge and two pods: which packets bypass the stack.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::{collections::BTreeSet, time::Duration};

use aya::programs::{LinkOrder, TcAttachType};
use kilo_common::{
    counters::Action,
    maps::CONFIG_TCP_BYPASSES,
    packet::tcp_flags::{ACK, FIN, RST, SYN},
};
use kilo_core::{plan::Tables, settings::AttachMode};
use kilo_host::{
    dataplane::{Applied, CounterReader, Dataplane, Interfaces},
    net::Net,
};

use crate::{
    attach::{has_tcx, tcx},
    bpf::{
        self, MEMBER, MEMBER_POD, REMOTE_POD, foreign, leader_tables,
        packet::{ethernet, ipv4, udp},
    },
    links::host::{LanSender, Tun, in_namespace, index},
    netns::{isolated, sh},
    wait::until,
};

const BRIDGE_MAC: [u8; 6] = [2, 0, 0, 0, 0, 0xb];
const POD: [u8; 4] = [10, 42, 1, 5];
const PORTS: (u16, u16) = (4000, 5000);
/// Longest wait for what happens within two seconds.
const LIMIT: Duration = Duration::from_secs(10);
/// Packets that are sent where none may bypass: with a flow that may, all but one or two do.
const MANY: u64 = 200;
/// Longest wait for a packet that has been sent.
const SOON: Duration = Duration::from_millis(500);

struct Node {
    fs: bpf::BpfFs,
    net: Net,
    dataplane: Dataplane,
    kilo: Tun,
    tables: Tables,
}

impl Node {
    async fn start() -> Self {
        sh("for it in all default; do echo 0 > /proc/sys/net/ipv4/conf/$it/rp_filter; done
            echo 1 > /proc/sys/net/ipv4/ip_forward; ip link set lo up
            ip link add kube-bridge address 02:00:00:00:00:0b type bridge
            ip address add 10.42.1.1/24 dev kube-bridge; ip link set kube-bridge up
            for pod in 5 6; do
                ip netns add pod$pod
                ip link add veth$pod type veth peer name eth0 address 02:00:00:00:01:0$pod netns pod$pod
                ip link set veth$pod up master kube-bridge
                ip -n pod$pod address add 10.42.1.$pod/24 dev eth0; ip -n pod$pod link set eth0 up
                ip -n pod$pod route add default via 10.42.1.1
            done");
        let kilo = Tun::new("kilo0");
        sh("ip link set kilo0 up mtu 1420; ip route add 10.42.4.0/24 dev kilo0");
        let mut tables = leader_tables();
        tables.config.kilo_ifindex = index("kilo0");
        let (fs, net) = (bpf::bpffs().unwrap(), Net::new().unwrap());
        let dataplane = Dataplane::open_with(fs.path(), false, AttachMode::Auto).unwrap();
        let mut node = Self { fs, net, dataplane, kilo, tables };
        let applied = node.attach().await;
        assert!(applied.failed.is_empty() && applied.refused.is_none(), "{applied:?}");
        node
    }

    async fn attach(&mut self) -> Applied {
        self.dataplane.write(&self.tables).unwrap();
        let (none, pods) = (BTreeSet::new(), BTreeSet::from([index("veth5"), index("veth6")]));
        let interfaces =
            Interfaces { kilo: index("kilo0"), uplinks: &none, layer3: &none, tunnels: &none, pods: &pods };
        self.dataplane.attach(&self.net, interfaces).await.unwrap()
    }

    /// Waits until the kernel has taken the program off this interface, which it does in the background.
    fn is_free(interface: &str) {
        until("the hook is empty", LIMIT, || tcx(interface, TcAttachType::Ingress).is_empty());
    }

    /// Names of the interfaces that have the program.
    fn served(&self) -> Vec<String> {
        let attached = self.dataplane.attached();
        attached.into_iter().filter(|it| it.program == "pod_ingress").map(|it| it.interface).collect()
    }

    fn bypassed(&self) -> u64 {
        CounterReader::open(self.fs.path()).unwrap().read().unwrap().actions[Action::Bypass.label()]
    }

    /// The next IPv4 packet that leaves through `kilo0`.
    fn left(&self) -> Option<Vec<u8>> {
        std::iter::from_fn(|| self.kilo.next(SOON)).find(|packet| packet[0] >> 4 == 4)
    }

    /// Sends until a packet has bypassed the stack.
    fn until_one_bypasses(&self, pod: &LanSender, frame: &[u8]) {
        let before = self.bypassed();
        until("a packet bypasses the stack", LIMIT, || {
            pod.send(frame);
            let _ = self.left();
            self.bypassed() > before
        });
    }

    /// Sends many packets; each must leave, and none may bypass the stack.
    #[track_caller]
    fn none_bypasses(&self, pod: &LanSender, frame: &[u8]) {
        let before = self.bypassed();
        for _ in 0..MANY {
            pod.send(frame);
            assert!(self.left().is_some(), "packets must leave all the same");
        }
        assert_eq!(self.bypassed() - before, 0);
    }
}

fn pod(number: u8) -> LanSender {
    LanSender::within(&format!("pod{number}"))
}

/// A frame for the bridge.
fn frame(packet: &[u8]) -> Vec<u8> {
    let mut frame = ethernet(packet);
    frame[..6].copy_from_slice(&BRIDGE_MAC);
    frame[6..12].copy_from_slice(&[2, 0, 0, 0, 1, 5]);
    frame
}

fn datagram(to: [u8; 4], ports: (u16, u16), data: &[u8]) -> Vec<u8> {
    frame(&udp(POD, to, ports, data))
}

/// A segment without options or data.
fn segment(flags: u8, sequence: u32) -> Vec<u8> {
    let mut tcp = [0; 20];
    tcp[..2].copy_from_slice(&PORTS.0.to_be_bytes());
    tcp[2..4].copy_from_slice(&PORTS.1.to_be_bytes());
    tcp[4..8].copy_from_slice(&sequence.to_be_bytes());
    (tcp[12], tcp[13], tcp[15]) = (5 << 4, flags, 255);
    frame(&ipv4(POD, REMOTE_POD, 6, 64, &tcp))
}

fn on_a_node<F: Future<Output = ()>>(test: &str, body: impl FnOnce(Node) -> F) {
    if has_tcx() {
        isolated(test, || async { body(Node::start().await).await });
    } else {
        bpf::skip("TCX needs Linux 6.6");
    }
}

#[test]
fn a_flows_packets_bypass_the_stack_and_leave_as_it_would_have_sent_them() {
    on_a_node("a_flows_packets_bypass_the_stack_and_leave_as_it_would_have_sent_them", |node| async move {
        let (pod, sent) = (pod(5), datagram(REMOTE_POD, PORTS, b"hello"));
        pod.send(&sent);
        let by_the_stack = node.left().expect("the first packet leaves");
        assert_eq!(node.bypassed(), 0, "nobody has vouched for the flow yet");
        node.until_one_bypasses(&pod, &sent);
        pod.send(&sent);
        assert_eq!(node.left().as_deref(), Some(&by_the_stack[..]), "TTL, checksums and all");
        assert_eq!(by_the_stack[8], 63);
        // Of the packets of a second, one passes the stack.
        let before = node.bypassed();
        for _ in 0..MANY {
            pod.send(&sent);
            node.left().expect("every packet leaves");
        }
        assert!(node.bypassed() - before > MANY / 2, "{} of {MANY}", node.bypassed() - before);
    });
}

#[test]
fn what_the_stack_translates_passes_it_and_so_does_another_flow_that_looks_like_the_result() {
    on_a_node(
        "what_the_stack_translates_passes_it_and_so_does_another_flow_that_looks_like_the_result",
        |node| async move {
            sh("nft add table ip nat; nft 'add chain ip nat pre { type nat hook prerouting priority -100; }'
                nft add rule ip nat pre ip daddr 10.42.4.99 meta l4proto udp dnat to 10.42.4.2:5000");
            let pod = pod(5);
            node.none_bypasses(&pod, &datagram([10, 42, 4, 99], PORTS, b"to a service"));
            // Its flow would collide with the translated one, so the stack gives it another port.
            let service = datagram([10, 42, 4, 99], PORTS, b"to a service");
            let direct = datagram(REMOTE_POD, PORTS, b"to the backend itself");
            for _ in 0..MANY {
                pod.send(&direct);
                node.left().unwrap();
                // Arrives at `kilo_egress` as a packet of the flow that was just noted.
                pod.send(&service);
                node.left().unwrap();
            }
            assert_eq!(node.bypassed(), 0);
            pod.send(&direct);
            let left = node.left().unwrap();
            assert_ne!(left[20..22], PORTS.0.to_be_bytes(), "translated");
        },
    );
}

#[test]
fn answers_of_a_translated_flow_pass_the_stack() {
    on_a_node("answers_of_a_translated_flow_pass_the_stack", |node| async move {
        // As a NodePort: the pod answers from its own address, and the stack puts the other one back.
        sh("nft add table ip nat; nft 'add chain ip nat pre { type nat hook prerouting priority -100; }'
            nft add rule ip nat pre ip daddr 10.1.0.11 udp dport 30000 dnat to 10.42.1.5:4000
            ip address add 10.1.0.11/32 dev lo");
        node.kilo.send(&udp(REMOTE_POD, [10, 1, 0, 11], (5000, 30000), b"question"));
        let (pod, answer) = (pod(5), datagram(REMOTE_POD, PORTS, b"answer"));
        until("the answer is translated", LIMIT, || {
            pod.send(&answer);
            node.left().is_some_and(|left| left[12..16] == [10, 1, 0, 11])
        });
        let before = node.bypassed();
        for _ in 0..MANY {
            pod.send(&answer);
            assert_eq!(node.left().unwrap()[12..16], [10, 1, 0, 11], "not one with the pod's own address");
        }
        assert_eq!(node.bypassed(), before);
    });
}

#[test]
fn a_policy_takes_effect_in_the_next_second() {
    on_a_node("a_policy_takes_effect_in_the_next_second", |node| async move {
        let (pod, sent) = (pod(5), datagram(REMOTE_POD, PORTS, b"hello"));
        node.until_one_bypasses(&pod, &sent);
        sh("nft add table ip rules; nft 'add chain ip rules forward { type filter hook forward priority 0; }'
            nft add rule ip rules forward ip saddr 10.42.1.5 drop");
        let began = std::time::Instant::now();
        until("nothing leaves", LIMIT, || {
            let _ = std::iter::from_fn(|| node.kilo.next(Duration::ZERO)).count();
            pod.send(&sent);
            node.left().is_none()
        });
        // The rest of the second, the wait for a packet that does not come, and a machine that is emulated.
        assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
        let before = node.bypassed();
        for _ in 0..MANY {
            pod.send(&sent);
        }
        assert!(node.left().is_none());
        assert_eq!(node.bypassed(), before);
    });
}

#[test]
fn tcp_bypasses_only_where_tracking_is_liberal_and_never_while_a_connection_begins_or_ends() {
    on_a_node(
        "tcp_bypasses_only_where_tracking_is_liberal_and_never_while_a_connection_begins_or_ends",
        |mut node| async move {
            let pod = pod(5);
            node.none_bypasses(&pod, &segment(ACK, 1));
            node.tables.config.flags |= CONFIG_TCP_BYPASSES;
            node.dataplane.write(&node.tables).unwrap();
            node.until_one_bypasses(&pod, &segment(ACK, 2));
            for flags in [SYN, SYN | ACK, FIN | ACK, RST] {
                node.none_bypasses(&pod, &segment(flags, 3));
            }
        },
    );
}

#[test]
fn marks_and_rewritten_headers_keep_a_flow_with_the_stack() {
    on_a_node("marks_and_rewritten_headers_keep_a_flow_with_the_stack", |node| async move {
        sh(
            "nft add table ip mangle; nft 'add chain ip mangle forward { type filter hook forward priority -150; }'",
        );
        let pod = pod(5);
        for (port, rule) in [
            (5001, "meta mark set 7"),
            (5002, "ip ttl set 9"),
            (5003, "ip dscp set af11"),
            (5004, "ip id set 7"),
        ] {
            sh(&format!("nft add rule ip mangle forward udp dport {port} {rule}"));
            node.none_bypasses(&pod, &datagram(REMOTE_POD, (4000, port), b"hello"));
        }
        node.until_one_bypasses(&pod, &datagram(REMOTE_POD, PORTS, b"no rule concerns it"));
    });
}

#[test]
fn another_pod_does_not_use_a_flow_that_is_not_its_own() {
    on_a_node("another_pod_does_not_use_a_flow_that_is_not_its_own", |node| async move {
        let (owner, other) = (pod(5), pod(6));
        let sent = datagram(REMOTE_POD, PORTS, b"hello");
        node.until_one_bypasses(&owner, &sent);
        let before = node.bypassed();
        other.send(&sent);
        assert!(node.left().is_some(), "the stack decides, as without this program");
        assert_eq!(node.bypassed(), before);
        // To another router than the bridge: a pod, for example.
        let mut elsewhere = sent.clone();
        elsewhere[5] = 0x77;
        node.until_one_bypasses(&owner, &sent);
        let before = node.bypassed();
        owner.send(&elsewhere);
        assert!(node.left().is_none() && node.bypassed() == before);
    });
}

#[test]
fn what_does_not_fit_or_may_not_go_on_is_answered_by_the_stack() {
    on_a_node("what_does_not_fit_or_may_not_go_on_is_answered_by_the_stack", |node| async move {
        let pod = pod(5);
        let socket = in_namespace("pod5", || std::net::UdpSocket::bind(("10.42.1.5", PORTS.0)).unwrap());
        socket.connect((std::net::Ipv4Addr::from(REMOTE_POD), PORTS.1)).unwrap();
        node.until_one_bypasses(&pod, &datagram(REMOTE_POD, PORTS, b"hello"));
        let before = node.bypassed();
        pod.send(&datagram(REMOTE_POD, PORTS, &[7; 1421 - 28]));
        until("the sender hears of the MTU", LIMIT, || {
            let error = socket.send(&[7; 1421 - 28]).err();
            error.is_some_and(|error| error.raw_os_error() == Some(nix::libc::EMSGSIZE))
        });
        let mut last = datagram(REMOTE_POD, PORTS, b"hello");
        last.truncate(14);
        let ttl_1 = udp(POD, REMOTE_POD, PORTS, b"hello");
        last.extend(ipv4(POD, REMOTE_POD, 17, 1, &ttl_1[20..]));
        pod.send(&last);
        assert!(node.left().is_none());
        assert_eq!(node.bypassed(), before);
    });
}

#[test]
fn only_whole_packets_for_other_nodes_are_entered() {
    on_a_node("only_whole_packets_for_other_nodes_are_entered", |node| async move {
        let pod = pod(5);
        let mut fragment = udp(POD, REMOTE_POD, PORTS, b"first of two");
        fragment[6] = 0x20;
        let mut options = udp(POD, REMOTE_POD, PORTS, b"an option");
        options[0] = 0x46;
        for sent in [
            datagram([10, 42, 1, 6], PORTS, b"to a pod here"),
            datagram([198, 51, 100, 2], PORTS, b"outside"),
            datagram([224, 0, 0, 1], PORTS, b"multicast"),
            frame(&fragment),
            frame(&options),
            frame(&udp(POD, REMOTE_POD, PORTS, b"cut short")[..30]),
        ] {
            pod.send(&sent);
        }
        pod.send(&datagram(REMOTE_POD, PORTS, b"one that counts"));
        pod.send(&datagram(MEMBER_POD, PORTS, b"and one to a node of the location"));
        pod.send(&datagram(MEMBER, PORTS, b"and one to the node itself"));
        until("three flows are entered", LIMIT, || entries(&node) == 3);
    });
}

fn entries(node: &Node) -> usize {
    let pin = kilo_host::dataplane::pin_directory(node.fs.path()).join("pod_flow");
    let data = aya::maps::MapData::from_pin(pin).unwrap();
    let map =
        aya::maps::HashMap::<_, [u8; 16], [u8; 28]>::try_from(aya::maps::Map::LruHashMap(data)).unwrap();
    map.keys().count()
}

#[test]
fn an_interface_with_filters_of_somebody_else_is_left_to_the_stack() {
    on_a_node("an_interface_with_filters_of_somebody_else_is_left_to_the_stack", |mut node| async move {
        assert_eq!(node.served(), ["veth5", "veth6"]);
        // As the bandwidth plugin does, after the interface is there.
        sh("tc qdisc add dev veth5 ingress");
        node.attach().await;
        assert_eq!(node.served(), ["veth6"]);
        Node::is_free("veth5");
        let (pod, sent) = (pod(5), datagram(REMOTE_POD, PORTS, b"hello"));
        node.none_bypasses(&pod, &sent);
        sh("tc qdisc add dev veth6 clsact; tc qdisc del dev veth5 ingress");
        let applied = node.attach().await;
        assert_eq!((node.served(), applied.reattached), (vec!["veth5".to_owned()], 0));
        node.until_one_bypasses(&pod, &sent);
        // Ours would run before it, and hide packets from it.
        let mut other = foreign::program(&node.fs.path().join("other"));
        let _link =
            foreign::attach_tcx(&mut other, "veth5", TcAttachType::Ingress, LinkOrder::last()).unwrap();
        node.attach().await;
        assert!(node.served().is_empty());
    });
}

#[test]
fn an_earlier_agents_program_does_not_count_as_somebody_elses() {
    on_a_node("an_earlier_agents_program_does_not_count_as_somebody_elses", |mut node| async move {
        node.dataplane = Dataplane::open_with(node.fs.path(), true, AttachMode::Auto).unwrap();
        let applied = node.attach().await;
        assert_eq!((applied.failed.len(), node.served().len()), (0, 2), "{applied:?}");
        assert_eq!(tcx("veth5", TcAttachType::Ingress).len(), 1, "replaced in its link");
    });
}

#[test]
fn with_clsact_filters_pods_have_no_program() {
    on_a_node("with_clsact_filters_pods_have_no_program", |mut node| async move {
        node.dataplane = Dataplane::open_with(node.fs.path(), false, AttachMode::Clsact).unwrap();
        let applied = node.attach().await;
        assert!(
            applied.failed.is_empty() && applied.pods_need_tcx && node.served().is_empty(),
            "{applied:?}"
        );
        Node::is_free("veth5");
        node.none_bypasses(&pod(5), &datagram(REMOTE_POD, PORTS, b"hello"));
    });
}

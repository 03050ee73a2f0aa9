//! A real `kg` beside the overlay of another CNI.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use crate::netns;
use crate::wait::until;

use std::{
    fs,
    os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
    path::Path,
    process::{Child, Command},
    time::{Duration, SystemTime},
};

use kilo_common::maps::HOP_REMOTE;
use kilo_core::{plan::Hop, settings::Tunnel, wireguard::key::PublicKey};
use kilo_host::dataplane::{BPFFS, read_tables};
use netns::{isolated, sh, succeeds};
use nix::libc;

const LIMIT: Duration = Duration::from_secs(20);

/// Kills the agent when the test ends.
struct Agent(Child);

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// File with what the agent wrote on its node.
const WRITTEN: &str = "/run/cluster/n2.kilo.yaml";

/// Sets up node n2, whose leader n1 is known, and a node of another location.
fn prepare() {
    sh("mount -t tmpfs lib /var/lib; mkdir -p /run/wireguard /run/cluster; mount -t sysfs sys /sys; \
        mount -t bpf bpf /sys/fs/bpf; ip link set lo up; \
        ip link add eth0 type veth peer name other; ip link set eth0 up; ip link set other up; \
        ip address add 10.1.0.2/24 dev eth0; ip route add default via 10.1.0.254 dev eth0");
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    for (number, location, wanted) in [(1, "here", "\n    kilo.squat.ai/leader: \"\""), (3, "there", "")] {
        let key = PublicKey([number; 32]);
        let node = format!(
            "apiVersion: v1\nkind: Node\nmetadata:\n  name: n{number}\n  annotations:{wanted}\n    \
             kilo.squat.ai/endpoint: 198.51.100.{number}:51820\n    kilo.squat.ai/key: {key}\n    \
             kilo.squat.ai/internal-ip: 10.1.0.{number}/24\n    kilo.squat.ai/location: {location}\n    \
             kilo.squat.ai/last-seen: \"{now}\"\n    kilo.squat.ai/cni-compatibility-ip: 10.50.{number}.7/32\n\
             spec: {{podCIDR: 10.42.{number}.0/24}}\n"
        );
        fs::write(format!("/run/cluster/n{number}.yaml"), node).unwrap();
    }
    let own = "apiVersion: v1\nkind: Node\nmetadata: {name: n2, annotations: {kilo.squat.ai/location: here}}\n\
               spec: {podCIDR: 10.42.2.0/24}\n";
    fs::write("/run/cluster/n2.yaml", own).unwrap();
}

fn kg(compatibility: &str) -> Agent {
    let agent = Command::new(env!("CARGO_BIN_EXE_kg"))
        .args(["--backend", "file", "--backend-dir", "/run/cluster", "--hostname", "n2"])
        .args(["--cni=false", "--local=false", "--tunnel=ipip", "--resync-period=1s"])
        .arg(format!("--compatibility={compatibility}"))
        .spawn()
        .unwrap();
    Agent(agent)
}

fn hop() -> Option<Hop> {
    read_tables(Path::new(BPFFS)).ok()?.hop(HOP_REMOTE).copied()
}

fn number(file: &str) -> u64 {
    fs::read_to_string(Path::new("/sys/class/net").join(file)).unwrap().trim().parse().unwrap()
}

/// A socket that captures every frame of an interface from now on.
fn capture(interface: &str) -> OwnedFd {
    let protocol = u16::try_from(libc::ETH_P_ALL).unwrap().to_be();
    let kind = libc::SOCK_RAW | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: the descriptor is new, and no other value owns it.
    let socket = unsafe { OwnedFd::from_raw_fd(libc::socket(libc::AF_PACKET, kind, protocol.into())) };
    // SAFETY: plain integers; zero is a value of each.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = u16::try_from(libc::AF_PACKET).unwrap();
    address.sll_protocol = protocol;
    address.sll_ifindex = i32::try_from(number(&format!("{interface}/ifindex"))).unwrap();
    let length = u32::try_from(size_of_val(&address)).unwrap();
    // SAFETY: the address is valid for its length.
    let bound = unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), length) };
    assert_eq!(bound, 0, "{}", std::io::Error::last_os_error());
    socket
}

/// The frames that it has captured.
fn received(socket: &OwnedFd) -> Vec<Vec<u8>> {
    let mut buffer = [0; 2048];
    let next = || nix::unistd::read(socket, &mut buffer).ok().map(|length| buffer[..length].to_vec());
    std::iter::from_fn(next).collect()
}

#[test]
fn what_a_member_steers_to_its_leader_leaves_by_flannels_vxlan() {
    isolated("what_a_member_steers_to_its_leader_leaves_by_flannels_vxlan", || async {
        prepare();
        sh(
            "ip link add flannel.1 mtu 1450 type vxlan id 1 dev eth0 local 10.1.0.2 dstport 8472 nolearning; \
            ip address add 10.42.2.0/32 dev flannel.1; ip link set flannel.1 up; \
            ip neigh add 10.42.1.0 lladdr 02:00:00:00:00:01 dev flannel.1 nud permanent; \
            bridge fdb add 02:00:00:00:00:01 dev flannel.1 dst 10.1.0.1; \
            ip neigh add 10.1.0.1 lladdr 02:00:00:00:00:02 dev eth0 nud permanent",
        );
        let _agent = kg("flannel");
        // The route to the leader's overlay address appears later, as at boot.
        let private = |hop: &Hop| matches!(hop, Hop::Node { remote, .. } if remote.to_string() == "10.1.0.1");
        until("the private address for the time being", LIMIT, || hop().as_ref().is_some_and(private));
        sh("ip route add 10.42.1.0/24 via 10.42.1.0 dev flannel.1 onlink");
        until("the overlay's", LIMIT, || !hop().as_ref().is_some_and(private));
        let expected = Hop::Node {
            tunnel: Tunnel::Ipip,
            ifindex: u32::try_from(number("flannel.1/ifindex")).unwrap(),
            mtu: 1430,
            local: "10.1.0.2".parse().unwrap(),
            remote: "10.42.1.0".parse().unwrap(),
        };
        assert_eq!(hop(), Some(expected));
        let wire = capture("other");
        sh("ping -c 3 -i 0.2 -W 1 10.42.3.5 || true");
        let carried = |frame: &Vec<u8>| {
            // Ethernet, IP, UDP to flannel's port, VXLAN and Ethernet, then IPIP between the nodes, then
            // the ping.
            frame.get(36..38) == Some(&8472_u16.to_be_bytes())
                && frame.get(64 + 9) == Some(&4)
                && frame.get(64 + 12..64 + 20) == Some(&[10, 1, 0, 2, 10, 42, 1, 0])
                && frame.get(84 + 16..84 + 20) == Some(&[10, 42, 3, 5])
        };
        assert_eq!(received(&wire).iter().filter(|frame| carried(frame)).count(), 3);
        assert!(!fs::read_to_string(WRITTEN).unwrap().contains("cni-compatibility-ip"));
    });
}

#[test]
fn beside_cilium_a_node_publishes_its_overlay_address_and_takes_it_back_without() {
    isolated("beside_cilium_a_node_publishes_its_overlay_address_and_takes_it_back_without", || async {
        prepare();
        sh("ip link add cilium_host type veth peer name cilium_net; ip link set cilium_net up; \
            ip link set cilium_host up; ip address add 10.50.2.7/32 dev cilium_host; \
            ip route add 10.50.1.0/24 dev cilium_host src 10.50.2.7 mtu 1400");
        let agent = kg("cilium");
        let written = || {
            fs::read_to_string(WRITTEN).is_ok_and(|text| text.contains("cni-compatibility-ip: 10.50.2.7/32"))
        };
        until("the annotation", LIMIT, written);
        let expected = Hop::Node {
            tunnel: Tunnel::Ipip,
            ifindex: u32::try_from(number("cilium_host/ifindex")).unwrap(),
            mtu: 1380,
            local: "10.1.0.2".parse().unwrap(),
            remote: "10.50.1.7".parse().unwrap(),
        };
        until("the hop", LIMIT, || hop() == Some(expected));
        let attached = format!(
            "ls /sys/fs/bpf/kilo/links/lan_ingress_{} || tc filter show dev cilium_host ingress | grep lan_ingress",
            number("cilium_host/ifindex")
        );
        until("the program that unwraps", LIMIT, || succeeds(&attached));
        drop(agent);
        let _agent = kg("");
        until("the annotation is gone", LIMIT, || !written());
        until("private addresses", LIMIT, || hop().is_some_and(|hop| hop != expected));
    });
}

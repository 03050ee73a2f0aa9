//! A node with real interfaces, the network `lan` behind them, and the programs attached.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io::{self, Read as _, Write as _},
    net::{Ipv4Addr, UdpSocket},
    os::fd::{AsFd as _, AsRawFd as _, FromRawFd as _, OwnedFd},
    path::Path,
    time::{Duration, Instant},
};

use aya::maps::{HashMap, Map, MapData, RingBuf};
use kilo_common::{
    counters::Action,
    map_table::name,
    maps::{DEVICE_MASQUERADE, Device, NODE_INTERFACES, NatKey, NatValue},
    nat::flow::mapped,
};
use kilo_core::plan::Tables;
use kilo_host::{
    dataplane::{CounterReader, Dataplane, Interfaces, lead::Signals, pin_directory, relay::RelayMaps},
    net::Net,
};
use nix::{
    poll::{PollFd, PollFlags, poll},
    sched::{CloneFlags, setns},
};

use crate::{
    bpf::{self, PUBLIC_V6, SELF, leader_tables},
    netns::{sh, succeeds},
};

pub const NODE_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
pub const LAN_MAC: [u8; 6] = [2, 0, 0, 0, 0, 2];

/// Longest wait for an expected packet.
const LIMIT: Duration = Duration::from_secs(10);

/// A node with its programs attached.
pub struct World {
    fs: bpf::BpfFs,
    net: Net,
    dataplane: Option<Dataplane>,
    pub tables: Tables,
}

impl World {
    /// A node with `kilo0` and a pod's address, but no uplink.
    pub fn new() -> Self {
        sh("for it in all default; do echo 0 > /proc/sys/net/ipv4/conf/$it/rp_filter; done
            ip link set lo up; ip address add 10.42.1.2/32 dev lo
            ip tuntap add dev kilo0 mode tun; ip link set kilo0 up
            ip route add 10.42.2.0/24 dev kilo0; ip netns add lan");
        lan("ip link set lo up; ip address add 198.51.100.2/32 dev lo
             for it in all default; do echo 0 > /proc/sys/net/ipv4/conf/$it/rp_filter; done");
        let (fs, net) = (bpf::bpffs().unwrap(), Net::new().unwrap());
        Self { fs, net, dataplane: None, tables: leader_tables() }
    }

    /// The same with the uplink `eth0`, which has the private address.
    pub fn on_veth() -> Self {
        let mut world = Self::new();
        sh("ip link add eth0 address 02:00:00:00:00:01 type veth peer name eth0 address 02:00:00:00:00:02 netns lan
            ip link set eth0 up; ip address add 10.1.0.11/24 dev eth0");
        lan("ip link set eth0 up; ip address add 10.1.0.12/24 dev eth0");
        world.tables.device.clear();
        world.masquerade_as(index("eth0"), SELF);
        world
    }

    /// The same with the uplink `tun0`, which has the private address and no link-layer header; its packets
    /// go to the test.
    pub fn on_tun() -> (Self, Tun) {
        let mut world = Self::new();
        let tun = Tun::new("tun0");
        sh("ip address add 10.1.0.11/24 dev tun0; ip -6 address add 2001:db8::11/64 dev tun0 nodad
            ip -6 address add fd42:1::2/128 dev lo nodad; ip link set tun0 up
            ip route add 198.51.100.0/24 dev tun0; ip -6 route add 2001:db8:9::/48 dev tun0");
        world.tables.device.clear();
        let device = Device { masq_v4: SELF, masq_v6: PUBLIC_V6, flags: DEVICE_MASQUERADE };
        world.tables.device.insert(index("tun0"), device);
        (world, tun)
    }

    /// Sets the address to which this interface masquerades.
    pub fn masquerade_as(&mut self, ifindex: u32, masq_v4: [u8; 4]) {
        let device = Device { masq_v4, masq_v6: [0; 16], flags: DEVICE_MASQUERADE };
        self.tables.device.insert(ifindex, device);
        self.write();
    }

    fn write(&mut self) {
        if let Some(dataplane) = &mut self.dataplane {
            dataplane.write(&self.tables).unwrap();
        }
    }

    /// Attaches the programs to these uplinks; `layer3` are those without link-layer header.
    pub async fn attach(&mut self, uplinks: &[&str], layer3: &[&str]) {
        self.tables.config.kilo_ifindex = index("kilo0");
        let mut dataplane = Dataplane::open(self.fs.path(), false).unwrap();
        let uplinks: BTreeSet<u32> = uplinks.iter().chain(layer3).map(|name| index(name)).collect();
        let layer3: BTreeSet<u32> = layer3.iter().map(|name| index(name)).collect();
        let may_arrive_by: Vec<u32> = uplinks.iter().copied().take(NODE_INTERFACES).collect();
        for node in self.tables.node.values_mut() {
            node.interfaces = [0; NODE_INTERFACES];
            node.interfaces[..may_arrive_by.len()].copy_from_slice(&may_arrive_by);
        }
        dataplane.write(&self.tables).unwrap();
        let interfaces = Interfaces {
            kilo: index("kilo0"),
            uplinks: &uplinks,
            layer3: &layer3,
            tunnels: &BTreeSet::new(),
            pods: &BTreeSet::new(),
        };
        let applied = dataplane.attach(&self.net, interfaces).await.unwrap();
        assert!(applied.failed.is_empty() && applied.refused.is_none(), "{applied:?}");
        self.dataplane = Some(dataplane);
    }

    /// The BPF file system with this node's pins.
    pub fn bpffs(&self) -> &Path {
        self.fs.path()
    }

    /// Handle that reads the words of `lead` and sends signals.
    pub fn signals(&self) -> Signals {
        self.dataplane.as_ref().unwrap().signals().unwrap()
    }

    /// Ring buffer of received signals.
    pub fn ring(&self) -> RingBuf<MapData> {
        kilo_host::dataplane::lead::heard(self.fs.path()).unwrap()
    }

    /// The maps of a relay.
    pub fn relay_maps(&self) -> RelayMaps {
        RelayMaps::open(self.fs.path()).unwrap()
    }

    /// Removes both entries of each masqueraded flow of this pod, as NAT GC does when they have ended.
    pub fn forget_flows_of(&self, pod: [u8; 4]) {
        let data = MapData::from_pin(pin_directory(self.fs.path()).join(name::NAT)).unwrap();
        let mut nat = HashMap::<_, NatKey, NatValue>::try_from(Map::LruHashMap(data)).unwrap();
        let all: Vec<_> = nat.iter().map(Result::unwrap).collect();
        for (key, value) in all.iter().filter(|(key, _)| key.src == mapped(pod)) {
            nat.remove(key).unwrap();
            nat.remove(&key.partner(&value.addr, value.port)).unwrap();
        }
    }

    fn counters(&self) -> CounterReader {
        self.dataplane.as_ref().unwrap().counters().unwrap()
    }

    pub fn counted(&self, action: Action) -> u64 {
        self.counters().read().unwrap().actions[action.label()]
    }

    /// Non-zero drop counts, by reason.
    pub fn drops(&self) -> BTreeMap<&'static str, u64> {
        self.counters().read().unwrap().drops.into_iter().filter(|(_, count)| *count > 0).collect()
    }
}

/// The other end of a TUN device.
pub struct Tun(File);

impl Tun {
    pub fn new(name: &str) -> Self {
        let file = File::options().read(true).write(true).open("/dev/net/tun").unwrap();
        // SAFETY: plain integers, for which zero is a value.
        let mut request: nix::libc::ifreq = unsafe { std::mem::zeroed() };
        for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
            *to = from.cast_signed();
        }
        request.ifr_ifru.ifru_flags = i16::try_from(nix::libc::IFF_TUN | nix::libc::IFF_NO_PI).unwrap();
        // SAFETY: the request is complete.
        let made = unsafe { nix::libc::ioctl(file.as_raw_fd(), nix::libc::TUNSETIFF, &raw mut request) };
        assert_eq!(made, 0, "{}", io::Error::last_os_error());
        Self(file)
    }

    /// Makes a packet arrive at the device.
    pub fn send(&self, packet: &[u8]) {
        (&self.0).write_all(packet).unwrap();
    }

    /// The next packet that leaves through the device within `limit`.
    pub fn next(&self, limit: Duration) -> Option<Vec<u8>> {
        let mut ready = [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)];
        if poll(&mut ready, u16::try_from(limit.as_millis()).unwrap()).unwrap() == 0 {
            return None;
        }
        let mut bytes = vec![0; 2048];
        let length = (&self.0).read(&mut bytes).unwrap();
        bytes.truncate(length);
        Some(bytes)
    }

    /// The next packet of this IP version and protocol that leaves through the device.
    pub fn sent(&self, version: u8, protocol: u8) -> Vec<u8> {
        let deadline = Instant::now() + LIMIT;
        while Instant::now() < deadline {
            let Some(bytes) = self.next(Duration::from_secs(1)) else { continue };
            // Skips others, such as the kernel's own router solicitations.
            let found = if bytes[0] >> 4 == 6 { bytes[6] } else { bytes[9] };
            if (bytes[0] >> 4, found) == (version, protocol) {
                return bytes;
            }
        }
        panic!("no packet of IPv{version}, protocol {protocol} left within {LIMIT:?}");
    }
}

/// Index of an interface.
pub fn index(name: &str) -> u32 {
    nix::net::if_::if_nametoindex(name).unwrap()
}

/// Runs commands in the network behind the uplinks.
#[track_caller]
pub fn lan(lines: &str) {
    sh(&format!("ip netns exec lan sh -ec '{lines}'"));
}

/// True when this kernel has VLAN devices; loads their module where there is one.
pub fn has_vlans() -> bool {
    succeeds(
        "modprobe 8021q; ip link add test0 type veth peer name test1
         ip link add link test0 name test0.7 type vlan id 7; made=$?; ip link del test0; exit $made",
    )
}

/// Runs `body` on a thread in the network behind the uplinks; sockets that it creates stay there.
pub fn in_lan<T: Send>(body: impl FnOnce() -> T + Send) -> T {
    in_namespace("lan", body)
}

/// The same in the network namespace of this name.
pub fn in_namespace<T: Send>(name: &str, body: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let inside = scope.spawn(|| {
            setns(File::open(format!("/run/netns/{name}")).unwrap(), CloneFlags::CLONE_NEWNET).unwrap();
            body()
        });
        inside.join().unwrap()
    })
}

/// A UDP socket in the network behind the uplinks.
pub fn udp_in_lan(address: [u8; 4], port: u16) -> UdpSocket {
    let socket = in_lan(|| UdpSocket::bind((Ipv4Addr::from(address), port)).unwrap());
    socket.set_read_timeout(Some(LIMIT)).unwrap();
    socket
}

/// The next datagram; `None` when none arrives in time.
pub fn heard(socket: &UdpSocket) -> Option<Vec<u8>> {
    socket.set_read_timeout(Some(LIMIT)).unwrap();
    let mut bytes = [0; 2048];
    let (length, _) = socket.recv_from(&mut bytes).ok()?;
    Some(bytes[..length].to_vec())
}

/// Sends frames from the other end of `eth0`, or from a pod's.
pub struct LanSender(OwnedFd, i32);

impl LanSender {
    pub fn new() -> Self {
        Self::within("lan")
    }

    /// The same from `eth0` of the network namespace of this name.
    pub fn within(namespace: &str) -> Self {
        in_namespace(namespace, || {
            // SAFETY: a plain system call; the descriptor is ours alone.
            let socket = unsafe {
                let fd = nix::libc::socket(nix::libc::AF_PACKET, nix::libc::SOCK_RAW, 0);
                assert!(fd >= 0, "{}", io::Error::last_os_error());
                OwnedFd::from_raw_fd(fd)
            };
            Self(socket, i32::try_from(index("eth0")).unwrap())
        })
    }

    pub fn send(&self, frame: &[u8]) {
        // SAFETY: plain integers, for which zero is a value.
        let mut to: nix::libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        to.sll_family = u16::try_from(nix::libc::AF_PACKET).unwrap();
        to.sll_ifindex = self.1;
        let size = u32::try_from(size_of_val(&to)).unwrap();
        // SAFETY: both buffers have the lengths that are passed.
        let sent = unsafe {
            let to = (&raw const to).cast();
            nix::libc::sendto(self.0.as_raw_fd(), frame.as_ptr().cast(), frame.len(), 0, to, size)
        };
        assert_eq!(sent, isize::try_from(frame.len()).unwrap(), "{}", io::Error::last_os_error());
    }
}

//! A node with its hooks: what a starting agent attaches, and what is on them.

use crate::{
    bpf::{self, SELF, leader_tables, packet},
    netns::{isolated, sh},
    wait::task as wait,
};

use std::{collections::BTreeSet, fs, path::Path, time::Duration};

use aya::programs::{ProgramInfo, SchedClassifier, TcAttachType};
use kilo_common::drop_reasons::DropReason;
use kilo_core::settings::AttachMode;
use kilo_host::{
    dataplane::{Applied, Dataplane, Interfaces, link_directory},
    net::Net,
};

pub(super) const STRANGER: [u8; 4] = [10, 1, 0, 99];

/// Linux 6.6 and later.
pub fn has_tcx() -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|text| text.parse::<u32>().ok());
    (numbers.next(), numbers.next()) >= (Some(6), Some(6))
}

/// Runs a body that needs TCX.
pub(super) fn isolated_tcx<F: Future<Output = ()>>(name: &str, body: impl FnOnce() -> F) {
    if has_tcx() { isolated(name, body) } else { bpf::skip("TCX needs Linux 6.6") }
}

/// Attach modes that this kernel supports.
pub(super) fn modes() -> Vec<AttachMode> {
    if has_tcx() { vec![AttachMode::Tcx, AttachMode::Clsact] } else { vec![AttachMode::Clsact] }
}

/// A node with kilo0 and one uplink, whose other end is in the same namespace.
pub(super) struct World {
    pub(super) fs: bpf::BpfFs,
    pub(super) net: Net,
    pub(super) uplinks: BTreeSet<u32>,
    pub(super) tunnels: BTreeSet<u32>,
    pub(super) pods: BTreeSet<u32>,
}

impl World {
    pub(super) fn new() -> Self {
        sh("echo 1 > /proc/sys/net/ipv6/conf/default/addr_gen_mode
            ip link set lo up; ip tuntap add dev kilo0 mode tun; ip link set kilo0 up");
        let mut world = Self {
            fs: bpf::bpffs().unwrap(),
            net: Net::new().unwrap(),
            uplinks: BTreeSet::new(),
            tunnels: BTreeSet::new(),
            pods: BTreeSet::new(),
        };
        world.add_uplink("");
        world
    }

    pub(super) fn add_uplink(&mut self, options: &str) {
        sh(&format!(
            "ip link add eth0 {options} address 02:00:00:00:00:01 type veth peer name eth0p
             ip link set eth0 up; ip link set eth0p up"
        ));
        self.uplinks = BTreeSet::from([index("eth0")]);
    }

    /// Starts the data path as an agent does.
    pub(super) async fn start(&self, mode: AttachMode) -> (Dataplane, Applied) {
        let mut dataplane = Dataplane::open_with(self.fs.path(), false, mode).unwrap();
        dataplane.write(&leader_tables()).unwrap();
        let attached = self.attach(&mut dataplane).await;
        assert!(attached.failed.is_empty() && attached.refused.is_none(), "{attached:?}");
        (dataplane, attached)
    }

    pub(super) async fn attach(&self, dataplane: &mut Dataplane) -> Applied {
        let layer3 = &BTreeSet::new();
        let interfaces = Interfaces {
            kilo: index("kilo0"),
            uplinks: &self.uplinks,
            layer3,
            tunnels: &self.tunnels,
            pods: &self.pods,
        };
        dataplane.attach(&self.net, interfaces).await.unwrap()
    }

    /// Number of programs of that name on one hook: by TCX, and as filters.
    pub(super) async fn copies(&self, program: &str, interface: &str, hook: TcAttachType) -> (usize, usize) {
        let filters = self.net.bpf_filters([index(interface)]).await.unwrap();
        let egress = hook == TcAttachType::Egress;
        let filters = filters.iter().filter(|it| it.egress == egress && it.name == program).count();
        (tcx(interface, hook).iter().filter(|it| it.name_as_str() == Some(program)).count(), filters)
    }

    /// Asserts exactly one copy of each program, on its hook.
    pub(super) async fn assert_one_copy_each(&self, mode: AttachMode) {
        let wanted = if mode == AttachMode::Clsact { (0, 1) } else { (1, 0) };
        for (program, interface, hook) in [
            ("kilo_egress", "kilo0", TcAttachType::Egress),
            ("kilo_ingress", "kilo0", TcAttachType::Ingress),
            ("lan_ingress", "eth0", TcAttachType::Ingress),
            ("uplink_egress", "eth0", TcAttachType::Egress),
        ] {
            self.assert_copies(program, interface, hook, wanted).await;
        }
    }

    /// Waits, because the kernel frees a link some time after its last pin is gone.
    pub(super) async fn assert_copies(
        &self,
        program: &str,
        interface: &str,
        hook: TcAttachType,
        wanted: (usize, usize),
    ) {
        let what = format!("{program} has {wanted:?} links and filters");
        wait::until(&what, Duration::from_secs(10), async || {
            let copies = self.copies(program, interface, hook).await;
            if copies == wanted { Ok(()) } else { Err(format!("{copies:?}")) }
        })
        .await;
    }
}

pub(super) fn index(interface: &str) -> u32 {
    nix::net::if_::if_nametoindex(interface).unwrap()
}

pub fn tcx(interface: &str, hook: TcAttachType) -> Vec<ProgramInfo> {
    SchedClassifier::query_tcx(interface, hook).map(|(_, programs)| programs).unwrap_or_default()
}

pub(super) fn links(fs: &Path) -> usize {
    fs::read_dir(link_directory(fs)).unwrap().count()
}

/// Sends frames out of `eth0p`, so that they arrive on `eth0`.
pub(super) struct Sender(std::os::fd::OwnedFd);

impl Sender {
    pub(super) fn new() -> Self {
        use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, bind, socket};
        let fd =
            socket(AddressFamily::Packet, SockType::Raw, SockFlag::empty(), None::<SockProtocol>).unwrap();
        let address = nix::libc::sockaddr_ll {
            sll_family: nix::libc::AF_PACKET.cast_unsigned() as u16,
            sll_protocol: 0,
            sll_ifindex: index("eth0p").cast_signed(),
            sll_hatype: 0,
            sll_pkttype: 0,
            sll_halen: 0,
            sll_addr: [0; 8],
        };
        // SAFETY: a complete sockaddr_ll and its length.
        let address = unsafe {
            use nix::sys::socket::SockaddrLike as _;
            nix::sys::socket::LinkAddr::from_raw(
                (&raw const address).cast(),
                Some(u32::try_from(size_of_val(&address)).unwrap()),
            )
        };
        bind(std::os::fd::AsRawFd::as_raw_fd(&fd), &address.unwrap()).unwrap();
        Self(fd)
    }

    pub(super) fn send(&self, ip: &[u8]) {
        let mut frame = packet::ethernet(ip);
        frame[..12].copy_from_slice(&[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2]);
        nix::unistd::write(&self.0, &frame).unwrap();
    }
}

/// An encapsulated packet from a host that is not a node: our program drops and counts it.
pub(super) fn from_a_stranger() -> Vec<u8> {
    let inner = packet::udp([10, 42, 2, 2], [10, 42, 1, 2], (1, 2), b"x");
    packet::steered(STRANGER, SELF, &inner)[14..].to_vec()
}

/// The counter of such drops, for a version whose maps are pinned in `pins`.
pub(super) fn dropped_in(pins: &Path) -> u64 {
    let index = DropReason::UnknownSender.index().to_ne_bytes().map(|byte| byte.to_string()).join(" ");
    let text = sh(&format!("bpftool -j map lookup pinned {} key {index}", pins.join("count").display()));
    let entry: serde_json::Value = serde_json::from_str(&text).unwrap();
    entry["formatted"]["values"].as_array().unwrap().iter().filter_map(|cpu| cpu["value"].as_u64()).sum()
}

pub(super) fn dropped(dataplane: &Dataplane) -> u64 {
    dataplane.counters().unwrap().read().unwrap().drops["unknown_sender"]
}

/// Waits up to ten seconds until `value` returns `wanted`.
pub(super) async fn settles<T: PartialEq + std::fmt::Debug>(wanted: T, value: impl Fn() -> T) {
    wait::until(&format!("the value is {wanted:?}"), Duration::from_secs(10), async || {
        let value = value();
        if value == wanted { Ok(()) } else { Err(format!("{value:?}")) }
    })
    .await;
}

//! The stages of a packet's path, each from the point where its frame enters the node to the hook where a
//! filter drops it.

use std::{collections::BTreeMap, process::Command, time::Duration};

use anyhow::{Context as _, Result};

use super::{
    agent,
    figures::Cost,
    frames::{Load, SEGMENTS, TCP_OVER_UDP, Wrap},
    generator::{Direction, Sink, Train, calm_workers, cost},
    site::{OUTSIDE, Site, host, remote_pods},
};
use crate::{command::run, lab::netns::Netns};

/// Packets of established flows, GSO packets of such a flow, and first packets of new flows.
const ESTABLISHED: Train =
    Train { burst: 32, rounds: 24, offloaded: false, arrive: 1, pause: Duration::ZERO };
const GSO_PACKETS: Train = Train { burst: 8, rounds: 16, offloaded: true, ..ESTABLISHED };
/// Packets one by one, so far apart that what the programs cache of the kernel's answers has expired.
const ALONE: Train = Train { burst: 1, rounds: 32, pause: Duration::from_millis(120), ..ESTABLISHED };
const NEW_FLOWS: Train = Train { rounds: 8, ..ESTABLISHED };
/// Payload bytes of small and large packets.
const SIZES: [usize; 2] = [64, 1372];
/// Source port of the established flow; our masquerading keeps it.
const PORT: u16 = 40_000;

/// Devices of a site.
const LAN: &str = "eth0";
const POD: &str = "pod0";
const MESH: &str = "kilo0";

/// Cost of a packet before it reaches the first hook of the node.
#[derive(Clone, Debug, Default)]
pub struct Floor(BTreeMap<(Entry, usize, usize), f64>);

/// Where a packet enters the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Entry {
    /// On `eth0`, with this outer header.
    Lan(Wrap),
    Pod,
    /// As if WireGuard had decrypted it: the frame arrives on the pod's link, and a filter redirects it to
    /// `kilo0`.
    Decrypted,
    /// Sent into `kilo0` by a socket of the node itself.
    Mesh,
}

impl Entry {
    /// Namespace and device through which the generator sends.
    fn device(self, site: &Site, load: Load) -> (&Netns, &'static str) {
        match (self, load) {
            // A device of the generator adds the outer header of a GSO packet.
            (Self::Lan(Wrap::Ipip), Load::Gso) => (&site.around, "lan-ipip"),
            (Self::Lan(Wrap::Vxlan), Load::Gso) => (&site.around, "lan-vxlan"),
            (Self::Lan(_), _) => (&site.around, "lan"),
            (Self::Pod | Self::Decrypted, _) => (&site.around, "pod"),
            (Self::Mesh, _) => (&site.node, MESH),
        }
    }

    /// The node's first hook, where the cost of sending alone is measured.
    fn hook(self) -> (&'static str, Direction) {
        match self {
            Self::Lan(_) => (LAN, Direction::Ingress),
            Self::Pod => (POD, Direction::Ingress),
            Self::Decrypted => (MESH, Direction::Ingress),
            Self::Mesh => (MESH, Direction::Egress),
        }
    }

    /// Key of the floor that applies to packets of this load. An outer header makes a frame longer, which
    /// costs only the generator, unless the generator must add it.
    fn floor(self, load: Load, train: Train) -> (Self, usize, usize) {
        let (entry, size) = match (self, load) {
            (_, Load::Gso) => (self, load.payload()),
            (Self::Lan(_), _) => (Self::Lan(Wrap::None), SIZES[usize::from(load.payload() > SIZES[0])]),
            _ => (self, SIZES[usize::from(load.payload() > SIZES[0])]),
        };
        (entry, size, train.burst)
    }
}

/// A part of the path.
struct Stage {
    name: &'static str,
    entry: Entry,
    end: (&'static str, Direction),
    /// Whether TCP is measured, too.
    tcp: bool,
    /// Whether new flows are measured, too.
    new_flows: bool,
    /// Packets that result from a GSO packet.
    segments: u64,
    /// How packets of established flows are sent.
    train: Train,
}

impl Stage {
    const fn new(name: &'static str, entry: Entry, end: (&'static str, Direction)) -> Self {
        Self { name, entry, end, tcp: true, new_flows: true, segments: 1, train: ESTABLISHED }
    }
}

/// Measures stages of one variant.
pub struct Bench<'a> {
    /// The node under test.
    pub site: &'a Site,
    /// Name of the variant.
    pub variant: String,
    /// Outer header inside the location.
    pub wrap: Wrap,
    /// Cost of sending, to subtract.
    pub floor: &'a Floor,
    /// Measured costs.
    pub costs: Vec<Cost>,
    port: u16,
}

impl<'a> Bench<'a> {
    /// Starts with nothing measured.
    pub fn new(site: &'a Site, variant: &str, wrap: Wrap, floor: &'a Floor) -> Self {
        Self { site, variant: variant.to_owned(), wrap, floor, costs: Vec::new(), port: 10_000 }
    }

    /// On a leader: from the network into the WireGuard device, from the network to an encrypted packet,
    /// and from decryption to another node.
    pub fn leader(&mut self) -> Result<()> {
        let (site, wrap) = (self.site, self.wrap);
        let outward = move |load, port| site.outward(wrap, load, port);
        self.stage(&Stage::new("transit-out", Entry::Lan(wrap), (MESH, Direction::Egress)), outward)?;
        calm_workers()?;
        self.stage(&encrypted(Entry::Lan(wrap)), outward)?;
        let _handed = Handed::to_mesh(site)?;
        let inward = move |load, port| site.inward(Wrap::None, site.member, load, port);
        self.stage(&Stage::new("transit-in", Entry::Decrypted, (LAN, Direction::Egress)), inward)
    }

    /// On another node: from its pod into the tunnel, and out of it to the pod.
    pub fn member(&mut self) -> Result<()> {
        let (site, wrap) = (self.site, self.wrap);
        let to_remote = move |load, port| site.pod_packet(host(remote_pods(0), 2), load, port);
        self.stage(&Stage::new("encapsulation", Entry::Pod, (LAN, Direction::Egress)), to_remote)?;
        let to_pod = move |load, port| site.inward(wrap, 0, load, port);
        self.stage(&Stage::new("delivery", Entry::Lan(wrap), (POD, Direction::Egress)), to_pod)
    }

    /// From a pod to an address outside the mesh, and the replies.
    pub fn masquerade(&mut self) -> Result<()> {
        let site = self.site;
        let outside = move |load, port| site.pod_packet(OUTSIDE, load, port);
        self.stage(&Stage::new("masquerade", Entry::Pod, (LAN, Direction::Egress)), outside)?;
        if self.variant == "plain" {
            return Ok(());
        }
        let answer = move |load, port| site.answer(load, port);
        let back = Stage::new("unmasquerade", Entry::Lan(Wrap::None), (POD, Direction::Egress));
        self.stage(&Stage { new_flows: false, ..back }, answer)
    }

    /// On a relay: from one end of a pair to the other.
    pub fn relay(&mut self) -> Result<()> {
        let site = self.site;
        let stage = |name, train| {
            let stage = Stage::new(name, Entry::Lan(Wrap::None), (LAN, Direction::Egress));
            Stage { tcp: false, new_flows: false, train, ..stage }
        };
        let frame = move |load: Load, _| site.to_relay(Load::Encrypted(load.payload()));
        self.stage(&stage("relay", ESTABLISHED), frame)?;
        self.stage(&stage("relay-alone", ALONE), frame)?;
        agent::bind_pair_v6(site)?;
        let frame = move |load: Load, _| site.to_relay_v6(load);
        self.stage(&stage("relay-v6", ESTABLISHED), frame)?;
        self.stage(&stage("relay-v6-alone", ALONE), frame)
    }

    /// From a local socket into the WireGuard device, and nothing else.
    pub fn wireguard(&mut self) -> Result<()> {
        let site = self.site;
        calm_workers()?;
        self.stage(&encrypted(Entry::Mesh), move |load, port| site.own_packet(load, port))
    }

    fn stage(&mut self, stage: &Stage, frame: impl Fn(Load, u16) -> Vec<u8>) -> Result<()> {
        let sink = Sink::attach(&self.site.node, stage.end.0, stage.end.1)?;
        let [short, long] = SIZES;
        let spent = |bench: &Self, load, train, next: &mut dyn FnMut() -> Vec<u8>| -> Result<f64> {
            let (netns, device) = stage.entry.device(bench.site, load);
            let spent = cost(netns, device, &sink, train, next)
                .with_context(|| format!("{load:?} of {} of {}", stage.name, bench.variant))?;
            let floor =
                bench.floor.0.get(&stage.entry.floor(load, train)).context("the floor was not measured")?;
            Ok(spent - floor)
        };
        for size in SIZES {
            let load = Load::Udp(size);
            let spent = spent(self, load, stage.train, &mut || frame(load, PORT))?;
            self.add(stage.name, size.to_string(), spent);
        }
        let gso_packets = Train { arrive: stage.segments, ..GSO_PACKETS };
        let tcp = [
            (Load::Tcp(long - TCP_OVER_UDP), ESTABLISHED, "tcp-kb"),
            (Load::Gso, gso_packets, "tcp-super-kb"),
        ];
        for (load, train, name) in tcp.into_iter().filter(|_| stage.tcp) {
            let spent = spent(self, load, train, &mut || frame(load, PORT))?;
            self.add(stage.name, name.to_owned(), spent / (load.payload() as f64 / 1024.0));
        }
        if stage.new_flows {
            let (load, mut port) = (Load::Udp(short), self.port);
            let spent = spent(self, load, NEW_FLOWS, &mut || {
                port += 1;
                frame(load, port)
            })?;
            self.port = port;
            self.add(stage.name, "new-flow".to_owned(), spent);
        }
        Ok(())
    }

    fn add(&mut self, stage: &str, load: String, instructions: f64) {
        println!("bench: {:22} {:18} {:12} {:9.1}", self.variant, stage, load, instructions);
        self.costs.push(Cost { variant: self.variant.clone(), stage: stage.to_owned(), load, instructions });
    }
}

/// Stage from `entry` to an encrypted packet on the network.
const fn encrypted(entry: Entry) -> Stage {
    let stage = Stage::new("lan-to-encrypted", entry, (LAN, Direction::Egress));
    Stage { new_flows: false, segments: SEGMENTS as u64, ..stage }
}

/// While it lives, a filter redirects packets from the pod to `kilo0`.
struct Handed<'a>(&'a Site);

impl<'a> Handed<'a> {
    fn to_mesh(site: &'a Site) -> Result<Self> {
        let netns = &site.node.id;
        let _ = run(Command::new("tc").args(["-n", netns, "qdisc", "add", "dev", POD, "clsact"]));
        run(Command::new("tc")
            .args(["-n", netns, "filter", "add", "dev", POD, "ingress", "pref", "50000"])
            // Packets that WireGuard has decrypted have no link-layer header.
            .args(["protocol", "all", "matchall", "action", "vlan", "pop_eth", "pipe"])
            .args(["action", "mirred", "ingress", "redirect", "dev", MESH]))?;
        Ok(Self(site))
    }
}

impl Drop for Handed<'_> {
    fn drop(&mut self) {
        let netns = &self.0.node.id;
        let _ =
            run(Command::new("tc")
                .args(["-n", netns, "filter", "del", "dev", POD, "ingress", "pref", "50000"]));
    }
}

/// Measures the floors on a node with `kilo0` and nothing else.
pub fn floor(site: &Site) -> Result<Floor> {
    let mut floor = Floor::default();
    let lan = [Wrap::None, Wrap::Ipip, Wrap::Vxlan].map(Entry::Lan);
    for entry in lan.into_iter().chain([Entry::Pod, Entry::Mesh, Entry::Decrypted]) {
        let (device, direction) = entry.hook();
        let sink = Sink::attach(&site.node, device, direction)?;
        let _handed = (entry == Entry::Decrypted).then(|| Handed::to_mesh(site)).transpose()?;
        let frame = |load| match entry {
            Entry::Lan(wrap) => site.outward(wrap, load, PORT),
            Entry::Pod | Entry::Decrypted => site.pod_packet(OUTSIDE, load, PORT),
            Entry::Mesh => site.own_packet(load, PORT),
        };
        let sizes = |train| SIZES.map(move |size| (Load::Udp(size), train));
        let alone = sizes(ALONE).into_iter().filter(|_| entry == Entry::Lan(Wrap::None));
        for (load, train) in sizes(ESTABLISHED).into_iter().chain([(Load::Gso, GSO_PACKETS)]).chain(alone) {
            let (netns, generator) = entry.device(site, load);
            let spent = cost(netns, generator, &sink, train, || frame(load))
                .with_context(|| format!("floor of {load:?} at {entry:?}"))?;
            println!("bench: floor {entry:?} {load:?} {spent:.0}");
            floor.0.insert((entry, load.payload(), train.burst), spent);
        }
    }
    Ok(floor)
}

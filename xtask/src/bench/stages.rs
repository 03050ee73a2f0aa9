//! The stages a packet goes through, each from the point where its frame
//! enters the node to the hook where a filter drops it.

use std::{collections::BTreeMap, net::Ipv4Addr, process::Command};

use anyhow::{Context as _, Result};

use super::{
    figures::Cost,
    frames::{Load, TCP_OVER_UDP, Wrap},
    generator::{Direction, Sink, cost},
    site::{OUTSIDE, Site, host, remote_pods},
};
use crate::command::run;

/// Bursts that count, for flows that exist and for new ones.
const ROUNDS: usize = 24;
const NEW_FLOW_ROUNDS: usize = 8;
/// Payload bytes of the two sizes.
const SIZES: [usize; 2] = [64, 1372];
/// Port of the flow that stands; ours keeps it when it masquerades.
const PORT: u16 = 40_000;

/// Devices of a site.
const LAN: &str = "eth0";
const POD: &str = "pod0";
const MESH: &str = "kilo0";

/// What it costs until a frame reaches the first hook of the node.
#[derive(Clone, Debug, Default)]
pub struct Floor {
    lan: BTreeMap<usize, f64>,
    pod: BTreeMap<usize, f64>,
    /// Handed to the ingress of `kilo0`.
    decrypted: BTreeMap<usize, f64>,
}

/// Where a frame enters the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Entry {
    Lan,
    Pod,
    /// As if WireGuard had decrypted it: the frame comes by the pod's link and
    /// a filter hands it to `kilo0`.
    Decrypted,
}

impl Entry {
    /// The generator's end of the link.
    fn device(self) -> &'static str {
        match self {
            Self::Lan => "lan",
            Self::Pod | Self::Decrypted => "pod",
        }
    }
}

/// Measures stages of one way.
pub struct Bench<'a> {
    /// The node.
    pub site: &'a Site,
    /// Name of the way.
    pub way: String,
    /// Outer header inside the location.
    pub wrap: Wrap,
    /// What to subtract.
    pub floor: &'a Floor,
    /// What was measured.
    pub costs: Vec<Cost>,
    port: u16,
}

impl<'a> Bench<'a> {
    /// Nothing measured yet.
    pub fn new(site: &'a Site, way: &str, wrap: Wrap, floor: &'a Floor) -> Self {
        Self { site, way: way.to_owned(), wrap, floor, costs: Vec::new(), port: 10_000 }
    }

    /// On a leader: from the network into the WireGuard device, encrypted onto
    /// the network, and what was decrypted on to another node.
    pub fn leader(&mut self) -> Result<()> {
        let (site, wrap) = (self.site, self.wrap);
        let outward = move |load, port| site.outward(wrap, load, port);
        self.stage("transit-out", Entry::Lan, (MESH, Direction::Egress), true, outward)?;
        self.stage("lan-to-encrypted", Entry::Lan, (LAN, Direction::Egress), false, outward)?;
        let _handed = Handed::to_mesh(site)?;
        let inward = move |load, port| site.inward(Wrap::None, 1, load, port);
        self.stage("transit-in", Entry::Decrypted, (LAN, Direction::Egress), true, inward)
    }

    /// On another node: from its pod into the tunnel, and out of it to the pod.
    pub fn member(&mut self) -> Result<()> {
        let (site, wrap) = (self.site, self.wrap);
        let to_remote = move |load, port| site.pod_packet(host(remote_pods(0), 2), load, port);
        self.stage("encapsulation", Entry::Pod, (LAN, Direction::Egress), true, to_remote)?;
        let to_pod = move |load, port| site.inward(wrap, 0, load, port);
        self.stage("delivery", Entry::Lan, (POD, Direction::Egress), true, to_pod)
    }

    /// From a pod to an address outside of the mesh, and the answers.
    pub fn masquerade(&mut self) -> Result<()> {
        let site = self.site;
        let outside = move |load, port| site.pod_packet(OUTSIDE, load, port);
        self.stage("masquerade", Entry::Pod, (LAN, Direction::Egress), true, outside)?;
        if self.way == "plain" {
            return Ok(());
        }
        let answer = move |load, port| site.answer(load, port);
        self.stage("unmasquerade", Entry::Lan, (POD, Direction::Egress), false, answer)
    }

    fn stage(
        &mut self,
        stage: &str,
        entry: Entry,
        end: (&'static str, Direction),
        new_flows: bool,
        frame: impl Fn(Load, u16) -> Vec<u8>,
    ) -> Result<()> {
        let sink = Sink::attach(&self.site.node, end.0, end.1)?;
        for size in SIZES {
            let load = Load { payload: size, tcp: false };
            let spent = cost(&self.site.around, entry.device(), &sink, ROUNDS, || frame(load, PORT))
                .with_context(|| format!("{} of {}", stage, self.way))?;
            self.add(stage, size.to_string(), spent - self.floor_of(entry, size)?);
        }
        let [_, long] = SIZES;
        let bulk = Load { payload: long - TCP_OVER_UDP, tcp: true };
        let spent = cost(&self.site.around, entry.device(), &sink, ROUNDS, || frame(bulk, PORT))
            .with_context(|| format!("TCP of {} of {}", stage, self.way))?;
        let kilobytes = bulk.payload as f64 / 1024.0;
        self.add(stage, "tcp-kb".to_owned(), (spent - self.floor_of(entry, long)?) / kilobytes);
        if new_flows {
            let mut port = self.port;
            let spent = cost(&self.site.around, entry.device(), &sink, NEW_FLOW_ROUNDS, || {
                port += 1;
                frame(Load { payload: SIZES[0], tcp: false }, port)
            })
            .with_context(|| format!("new flows of {} of {}", stage, self.way))?;
            self.port = port;
            self.add(stage, "new-flow".to_owned(), spent - self.floor_of(entry, SIZES[0])?);
        }
        Ok(())
    }

    fn add(&mut self, stage: &str, load: String, instructions: f64) {
        println!("bench: {:22} {:18} {:9} {:9.0}", self.way, stage, load, instructions);
        self.costs.push(Cost { way: self.way.clone(), stage: stage.to_owned(), load, instructions });
    }

    /// An outer header makes a frame longer, which costs the generator alone.
    fn floor_of(&self, entry: Entry, size: usize) -> Result<f64> {
        let floors = match entry {
            Entry::Lan => &self.floor.lan,
            Entry::Pod => &self.floor.pod,
            Entry::Decrypted => &self.floor.decrypted,
        };
        floors.get(&size).copied().context("the floor was not measured")
    }
}

/// A filter that hands what comes from the pod to `kilo0`, while it lives.
struct Handed<'a>(&'a Site);

impl<'a> Handed<'a> {
    fn to_mesh(site: &'a Site) -> Result<Self> {
        let netns = &site.node.netns;
        let _ = run(Command::new("tc").args(["-n", netns, "qdisc", "add", "dev", POD, "clsact"]));
        run(Command::new("tc")
            .args(["-n", netns, "filter", "add", "dev", POD, "ingress", "pref", "50000"])
            // What WireGuard decrypts has no link-layer header.
            .args(["protocol", "all", "matchall", "action", "vlan", "pop_eth", "pipe"])
            .args(["action", "mirred", "ingress", "redirect", "dev", MESH]))?;
        Ok(Self(site))
    }
}

impl Drop for Handed<'_> {
    fn drop(&mut self) {
        let netns = &self.0.node.netns;
        let _ =
            run(Command::new("tc")
                .args(["-n", netns, "filter", "del", "dev", POD, "ingress", "pref", "50000"]));
    }
}

/// Measures the floors on a node that has `kilo0` and nothing else.
pub fn floor(site: &Site) -> Result<Floor> {
    let mut floor = Floor::default();
    let to: Ipv4Addr = OUTSIDE;
    let measure = |entry: Entry, device: &str| -> Result<BTreeMap<usize, f64>> {
        let sink = Sink::attach(&site.node, device, Direction::Ingress)?;
        SIZES
            .into_iter()
            .map(|size| {
                let load = Load { payload: size, tcp: false };
                let spent =
                    cost(&site.around, entry.device(), &sink, ROUNDS, || site.pod_packet(to, load, PORT))?;
                println!("bench: floor {entry:?} {size} {spent:.0}");
                Ok((size, spent))
            })
            .collect()
    };
    floor.lan = measure(Entry::Lan, LAN)?;
    floor.pod = measure(Entry::Pod, POD)?;
    let _handed = Handed::to_mesh(site)?;
    floor.decrypted = measure(Entry::Decrypted, MESH)?;
    Ok(floor)
}

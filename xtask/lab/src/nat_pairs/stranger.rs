//! A stranger on the internet beside a relayed pair: it sends to the relay's ports, and replays what it has
//! recorded.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, SocketAddrV4},
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use kilo_common::relay::{FIRST_PORT, LAST_PORT, LENGTH};
use kilo_core::tunnel_path::TunnelPath;

use super::{
    LIMIT,
    mesh::{Mesh, Setup},
};
use crate::{
    counters,
    faults::traffic::Traffic,
    nat::{self, Kind, Shape},
    netns::Netns,
    raw_udp::{self, Datagram},
    wait,
};

/// Name of its namespace, and its address.
pub(super) const STRANGER: &str = "w";
pub(super) const ADDRESS: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 66);
/// How many datagrams go to each port in use, and at least how many recorded messages are replayed.
const TIMES: usize = 50;
/// Time between two datagrams of an attack.
const EVERY: Duration = Duration::from_millis(1);

pub(super) fn run(setup: Setup<'_>) -> Result<()> {
    let shape = Shape { kinds: [Kind::Symmetric; 2], ..Shape::default() };
    setup.with(shape, &["z"], false, |mesh| {
        let (path, _) = mesh.wait_connected()?;
        ensure!(path == TunnelPath::Relayed, "no two symmetric NATs meet, so the tunnel cannot be {path}");
        let stranger = nat::stranger(&mesh.lab, STRANGER, ADDRESS)?;
        let (x, y) = (mesh.network.node("x")?.clone(), mesh.network.node("y")?.clone());
        let flow = Traffic::start_every(&x.pod, y.pod_ip().into(), Duration::from_millis(10));
        flow.settle(LIMIT)?;
        let seen = Seen::record(mesh)?;
        let said = [
            seen.attack(mesh, &stranger, "what the ends send, from elsewhere", seen.elsewhere())?,
            seen.attack(mesh, &stranger, "every port of a relay", seen.to_every_port())?,
            seen.attack(
                mesh,
                &stranger,
                "the ends' messages again, with their sources",
                seen.messages_again(),
            )?,
        ];
        let figures = flow.finish()?;
        ensure!(figures.lost == 0, "{} of {} lost: {:?}", figures.lost, figures.sent, figures.holes);
        println!(
            "a stranger beside a relay: {}; 0 of the pair's {} datagrams lost",
            said.join("; "),
            figures.sent
        );
        Ok(())
    })
}

/// Datagrams that were seen on their way to the relay.
struct Seen {
    relay: Ipv4Addr,
    data: Vec<Datagram>,
    messages: Vec<Datagram>,
}

impl Seen {
    /// Records while the pair is busy.
    fn record(mesh: &Mesh) -> Result<Self> {
        let Some(IpAddr::V4(relay)) = mesh.network.node("z")?.public else { bail!("z has no IPv4 address") };
        let is_wanted = move |datagram: &Datagram| *datagram.to.ip() == relay;
        let listening = raw_udp::record(&mesh.network.router, Duration::from_secs(3), is_wanted, |_| false);
        let all = listening.join().map_err(|_| anyhow!("the listening thread"))???;
        let all: BTreeSet<Datagram> = all.into_iter().collect();
        let is_message = |datagram: &Datagram| datagram.payload.len() == LENGTH && datagram.payload[0] == 0;
        let (messages, data): (Vec<_>, Vec<_>) = all.into_iter().partition(is_message);
        let is_relayed = |datagram: &Datagram| (FIRST_PORT..=LAST_PORT).contains(&datagram.to.port());
        let data: Vec<_> = data.into_iter().filter(is_relayed).collect();
        ensure!(!data.is_empty() && !messages.is_empty(), "nothing was seen that is relayed");
        Ok(Self { relay, data, messages })
    }

    /// Ports of the relay that the ends use.
    fn ports(&self) -> BTreeSet<u16> {
        self.data.iter().map(|datagram| datagram.to.port()).collect()
    }

    /// Data to each port in use, and every message, all from the stranger's address.
    fn elsewhere(&self) -> Vec<Datagram> {
        let from = SocketAddrV4::new(ADDRESS, 51_820);
        let first = |port: &u16| self.data.iter().find(|datagram| datagram.to.port() == *port);
        let data = self.ports().into_iter().filter_map(|port| first(&port).cloned());
        let all = data.flat_map(|datagram| vec![datagram; TIMES]).chain(self.messages.iter().cloned());
        all.map(|datagram| Datagram { from, ..datagram }).collect()
    }

    fn to_every_port(&self) -> Vec<Datagram> {
        let (from, payload) = (SocketAddrV4::new(ADDRESS, 51_820), self.data[0].payload.clone());
        (FIRST_PORT..=LAST_PORT)
            .map(|port| Datagram { from, to: SocketAddrV4::new(self.relay, port), payload: payload.clone() })
            .collect()
    }

    fn messages_again(&self) -> Vec<Datagram> {
        self.messages
            .iter()
            .flat_map(|message| vec![message.clone(); TIMES.div_ceil(self.messages.len())])
            .collect()
    }

    /// Sends these; nothing may come back to the stranger, and the relay may send nobody more than without them.
    fn attack(&self, mesh: &Mesh, stranger: &Netns, what: &str, datagrams: Vec<Datagram>) -> Result<String> {
        let z = mesh.network.node("z")?.netns.clone();
        let (count, bytes) =
            (datagrams.len(), datagrams.iter().map(|datagram| datagram.payload.len()).sum::<usize>());
        let took = Duration::from_secs(2) + EVERY * 2 * count as u32;
        let before = sends_meanwhile(&z, took, || Ok(()))?;
        let drops = refused(&z)?;
        let meanwhile = sends_meanwhile(&z, took, || raw_udp::send(stranger, datagrams, EVERY))?;
        let reasons = refused(&z)?;
        let grown: BTreeMap<_, _> = reasons
            .iter()
            .map(|(reason, now)| (reason.as_str(), now - drops.get(reason).copied().unwrap_or(0)))
            .filter(|(_, count)| *count > 0)
            .collect();
        let counted: u64 = grown.values().sum();
        let came = received(stranger, "answers")?;
        ensure!(came == 0, "{what}: {came} packets came to the stranger");
        // Ports of no pair are closed, and the kernel reports that as on any host, at its own low rate.
        let unreachable = received(stranger, "unreachable")?;
        ensure!(unreachable * 10 < count as u64, "{what}: {unreachable} ICMP packets for {count} datagrams");
        // The pair's own traffic is not even.
        ensure!(
            meanwhile <= before * 1.25 + 10.0,
            "{what}: the relay sent {meanwhile:.0} packets a second, and {before:.0} before"
        );
        ensure!(counted > 0, "{what}: of {count} datagrams none was counted");
        Ok(format!(
            "{what}: {count} datagrams, {bytes} bytes: 0 answers, {unreachable} times \"port unreachable\", dropped {grown:?}"
        ))
    }
}

/// What a node's programs and its agent have refused, by reason.
pub(super) fn refused(netns: &Netns) -> Result<BTreeMap<String, u64>> {
    let metrics = counters::scrape(netns)?;
    let by_agent = metrics.get("kilo_relay_messages_refused_total").copied().unwrap_or(0);
    let mut refused = counters::drops(&metrics);
    refused.insert("by the agent".to_owned(), by_agent);
    Ok(refused)
}

/// Packets per second that a node sends for so long, beginning with `act`.
fn sends_meanwhile(netns: &Netns, time: Duration, act: impl FnOnce() -> Result<()>) -> Result<f64> {
    let sent = || -> Result<u64> {
        let count = netns.sh("cat /sys/class/net/eth0/statistics/tx_packets")?;
        count.trim().parse().context("packets that eth0 has sent")
    };
    let (before, began) = (sent()?, std::time::Instant::now());
    act()?;
    wait::time_passes(time.saturating_sub(began.elapsed()), "as long with an attack as without one");
    Ok((sent()? - before) as f64 / began.elapsed().as_secs_f64())
}

/// Packets that the stranger has received since the last call.
pub(super) fn received(stranger: &Netns, counter: &str) -> Result<u64> {
    let counter = stranger.sh(&format!("nft reset counter inet stranger {counter}"))?;
    let mut words = counter.split_whitespace().skip_while(|word| *word != "packets");
    words.nth(1).context("no counter")?.parse().context("packets that came to the stranger")
}

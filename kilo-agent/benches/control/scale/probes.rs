//! Probes who reaches whom: one datagram from the bridge of each node to the bridges of all nodes of its
//! location and of one node in each other location, so that every node is probed from every location.

use std::{
    collections::BTreeSet,
    net::{SocketAddr, UdpSocket as Socket},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::net::UdpSocket;

use super::{
    explain::{self, Machine},
    host::Host,
};
use crate::objects::{self, LOCATIONS};

const PORT: u16 = 7777;
/// Pause between two checks for silent paths, on which datagrams are then sent again.
const PACE: Duration = Duration::from_millis(250);
/// After this time in which no silent path was heard, some of them are explained, and again after twice that
/// time.
const STUCK: Duration = Duration::from_secs(60);
/// How many silent paths are explained at a time.
const EXPLAINED: usize = 3;
/// A datagram that takes longer than this is lost.
const SLOWEST: Duration = Duration::from_secs(3);

/// From one node to another.
pub type Pair = (usize, usize);

pub struct Probes {
    sockets: Vec<Arc<UdpSocket>>,
    pairs: BTreeSet<Pair>,
    heard: Arc<Heard>,
}

/// When each path has last carried a datagram: microseconds since the start, 0 = never.
struct Heard {
    start: Instant,
    nodes: usize,
    at: Vec<AtomicU64>,
}

impl Heard {
    fn now(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_micros()).unwrap()
    }

    fn of(&self, (from, to): Pair) -> &AtomicU64 {
        &self.at[from * self.nodes + to]
    }
}

/// The nodes that this one probes.
fn asked_by(from: usize, nodes: usize) -> impl Iterator<Item = usize> {
    let places = nodes / LOCATIONS;
    (0..nodes).filter(move |to| {
        let (location, place) = (to % LOCATIONS, to / LOCATIONS);
        match location == from % LOCATIONS {
            true => *to != from,
            false => place == (from / LOCATIONS + from % LOCATIONS + location) % places,
        }
    })
}

impl Probes {
    pub fn open(hosts: &[Host]) -> Self {
        let nodes = hosts.len();
        let at = std::iter::repeat_with(AtomicU64::default).take(nodes * nodes).collect();
        let heard = Arc::new(Heard { start: Instant::now(), nodes, at });
        let mut sockets = Vec::new();
        for host in hosts {
            let address = SocketAddr::from((host.gateway(), PORT));
            let socket = host.netns.spawn(move || Socket::bind(address).unwrap()).join().unwrap().unwrap();
            socket.set_nonblocking(true).unwrap();
            let socket = Arc::new(UdpSocket::from_std(socket).unwrap());
            tokio::spawn(listen(Arc::clone(&socket), host.number, Arc::clone(&heard)));
            sockets.push(socket);
        }
        let pairs = (0..nodes).flat_map(|from| asked_by(from, nodes).map(move |to| (from, to))).collect();
        Self { sockets, pairs, heard }
    }

    pub fn len(&self) -> usize {
        self.pairs.len()
    }

    /// No other node probes this one, and it probes none.
    pub fn leave_out(&mut self, node: usize) {
        self.pairs.retain(|(from, to)| *from != node && *to != node);
    }

    fn send(&self, (from, to): Pair) {
        let text = u32::try_from(from).unwrap().to_be_bytes();
        // It fails until the node has a route.
        let _ = self.sockets[from].try_send_to(&text, (objects::gateway(to), PORT).into());
    }

    /// Waits until every path has carried a datagram; returns the time since `since`.
    pub async fn until_all_answer(
        &mut self,
        (hosts, machine): (&[Host], &Machine),
        since: Instant,
        limit: Duration,
    ) -> Duration {
        let from = u64::try_from(since.duration_since(self.heard.start).as_micros()).unwrap().max(1);
        let mut reported = Instant::now();
        let mut silent: Vec<Pair> = self.pairs.iter().copied().collect();
        let (mut progress, mut patience) = (Instant::now(), STUCK);
        loop {
            let before = silent.len();
            silent.retain(|pair| self.heard.of(*pair).load(Ordering::Relaxed) < from);
            if silent.is_empty() {
                return since.elapsed();
            }
            if silent.len() < before {
                progress = Instant::now();
            }
            if progress.elapsed() > patience {
                self.explain(hosts, machine, &silent);
                (progress, patience) = (Instant::now(), patience * 2);
            }
            if reported.elapsed() > Duration::from_secs(10) {
                reported = Instant::now();
                println!(
                    "bench:   {} pairs are silent after {:.0} s, such as {:?}",
                    silent.len(),
                    since.elapsed().as_secs_f64(),
                    &silent[..silent.len().min(4)]
                );
            }
            let few = &silent[..silent.len().min(20)];
            if since.elapsed() > limit {
                self.explain(hosts, machine, &silent);
                panic!("{} pairs are silent, such as {few:?}", silent.len());
            }
            silent.iter().for_each(|pair| self.send(*pair));
            // While many are silent, probing all of them each time would be most of the work.
            tokio::time::sleep(PACE * (1 + u32::try_from(silent.len() / 1000).unwrap())).await;
        }
    }

    /// Reports where some silent paths end; no two of them share a node.
    fn explain(&self, hosts: &[Host], machine: &Machine, silent: &[Pair]) {
        println!("bench: {}", machine.neighbours());
        let mut named = BTreeSet::new();
        let apart = silent.iter().filter(|(from, to)| {
            let is_new = !named.contains(from) && !named.contains(to);
            if is_new {
                named.extend([*from, *to]);
            }
            is_new
        });
        for pair in apart.take(EXPLAINED) {
            print!("{}", explain::pair(hosts, *pair, || self.send(*pair)));
        }
    }

    /// The share of datagrams that are lost, with one on every path every five seconds.
    pub async fn lost_during(&self, time: Duration) -> f64 {
        let until = Instant::now() + time;
        let (mut sent, mut lost) = (0, 0);
        while Instant::now() < until {
            let from = self.heard.now();
            self.pairs.iter().for_each(|pair| self.send(*pair));
            tokio::time::sleep(SLOWEST).await;
            sent += self.pairs.len();
            lost +=
                self.pairs.iter().filter(|pair| self.heard.of(**pair).load(Ordering::Relaxed) < from).count();
            tokio::time::sleep(Duration::from_secs(2)).await;
        }
        lost as f64 / sent as f64
    }
}

async fn listen(socket: Arc<UdpSocket>, to: usize, heard: Arc<Heard>) {
    let mut buffer = [0; 4];
    while let Ok((4, _)) = socket.recv_from(&mut buffer).await {
        let from = u32::from_be_bytes(buffer) as usize;
        heard.of((from, to)).store(heard.now(), Ordering::Relaxed);
    }
}

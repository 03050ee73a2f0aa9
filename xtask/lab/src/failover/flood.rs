//! More small datagrams than the tunnel between two leaders carries, while nothing fails.

use std::{
    net::{SocketAddr, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use anyhow::{Result, anyhow};

use super::breaking::{self, Broken, MEMBER};
use crate::{Lab, netns::Netns, wait};

/// Logged by an overloaded leader, also when it is the lab's machine that is overloaded.
pub(super) const OVERLOADED: &str = "overloaded, or its network loses packets";

/// Node at the far end.
const OTHER: &str = "b2";
/// UDP port of both ends.
const PORT: u16 = 7_010;
/// Datagrams of a burst, and the time between bursts.
const BURST: (u32, Duration) = (8, Duration::from_millis(1));
/// Bytes of each datagram.
const BYTES: usize = 100;

/// One end, which sends to the other and counts what it receives.
struct End(JoinHandle<Result<std::io::Result<(u64, u64)>>>);

impl End {
    fn start(from: &Netns, own: SocketAddr, other: SocketAddr, stop: &Arc<AtomicBool>) -> Self {
        let stop = Arc::clone(stop);
        Self(from.spawn(move || flood(own, other, &stop)))
    }

    /// Datagrams sent and received.
    fn finish(self) -> Result<(u64, u64)> {
        Ok(self.0.join().map_err(|_| anyhow!("a thread of the flood"))???)
    }
}

fn flood(own: SocketAddr, other: SocketAddr, stop: &AtomicBool) -> std::io::Result<(u64, u64)> {
    let socket = UdpSocket::bind(own)?;
    socket.connect(other)?;
    socket.set_nonblocking(true)?;
    let (count, pause) = BURST;
    let (mut sent, mut got, mut next) = (0, 0, Instant::now());
    let mut buffer = [0; 2 * BYTES];
    while !stop.load(Ordering::Relaxed) {
        for _ in 0..count {
            sent += u64::from(socket.send(&[0; BYTES]).is_ok());
        }
        while socket.recv(&mut buffer).is_ok() {
            got += 1;
        }
        next += pause;
        wait::pace(next.saturating_duration_since(Instant::now()));
    }
    Ok((sent, got))
}

/// Floods the tunnel both ways for as long as cases last.
pub(super) fn overload(lab: &mut Lab) -> Result<Broken> {
    // Agents are expected to log this.
    lab.caused(&[OVERLOADED]);
    let stop = Arc::new(AtomicBool::new(false));
    let address =
        |name| Ok::<_, anyhow::Error>(SocketAddr::from((breaking::node(lab, name)?.pod_ip(), PORT)));
    let (one, other) = (address(MEMBER)?, address(OTHER)?);
    let ends = [(MEMBER, one, other), (OTHER, other, one)].map(|(name, own, to)| {
        let netns = lab.network.netns(&format!("pod-{name}"))?;
        Ok(End::start(&netns, own, to, &stop))
    });
    wait::fault_lasts(breaking::length());
    stop.store(true, Ordering::Relaxed);
    let counts = ends.into_iter().map(|end: Result<End>| end?.finish()).collect::<Result<Vec<_>>>()?;
    // Frames came too fast for all of them to be inspected.
    lab.nothing_in_clear_as_far_as_seen()?;
    let (sent, got) = counts.iter().fold((0, 0), |sum, count| (sum.0 + count.0, sum.1 + count.1));
    Ok(Broken::done(format!(
        "{} datagrams a second both ways for {} s, {} % lost",
        sent / breaking::length().as_secs().max(1),
        breaking::length().as_secs(),
        100 * sent.saturating_sub(got) / sent.max(1)
    )))
}

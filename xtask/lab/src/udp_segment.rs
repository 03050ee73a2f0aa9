//! Datagrams that a pod sends many at a time (`UDP_SEGMENT`, as QUIC servers do): each arrives whole, whether
//! the kernel or a device segments them.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use nix::sys::socket::{
    setsockopt,
    sockopt::{RcvBufForce, UdpGsoSegment},
};

use super::{
    Lab,
    counters::{self, action},
    network::Node,
    wait,
};

/// Port of the receiver.
const PORT: u16 = 7009;
/// Bytes of a datagram.
const DATAGRAM: u16 = 1200;
/// Datagrams in one call.
const BURST: u32 = 12;
/// Number of calls.
const CALLS: u32 = 40;
/// Bytes the receiver's socket holds, with what the kernel adds to each datagram.
const ROOM: usize = 4 * (CALLS * BURST) as usize * DATAGRAM as usize;
/// Pause between calls, so that no queue on the path overflows.
const PAUSE: Duration = Duration::from_millis(10);
/// Longest wait for the next datagram once all were sent.
const PATIENCE: Duration = Duration::from_secs(5);

/// Sends from a pod to pods of the other and of its own location, in both families.
pub fn run(lab: &mut Lab) -> Result<String> {
    let network = &lab.network;
    let mut figures = Vec::new();
    for to in ["b2", "a3"] {
        let (from, to) = (network.node("a2")?, network.node(to)?);
        for target in [IpAddr::V4(to.pod_ip()), IpAddr::V6(to.pod_ip6())] {
            let steered =
                pass(from, to, target).with_context(|| format!("from {} to {target}", from.pod.name))?;
            figures.push(steered.to_string());
        }
    }
    Ok(format!("({} datagrams each as {} packets)", CALLS * BURST, figures.join(", ")))
}

/// Returns how many packets the sending node steered for all datagrams.
fn pass(from: &Node, to: &Node, target: IpAddr) -> Result<u64> {
    let address = SocketAddr::from((target, PORT));
    let receiver = to.pod.spawn(move || UdpSocket::bind(address)).join();
    let receiver = receiver.map_err(|_| anyhow::anyhow!("receiving thread"))???;
    // Room for all of them, in case the receiving thread does not run meanwhile.
    setsockopt(&receiver, RcvBufForce, &ROOM).context("receive buffer")?;
    let is_sent = Arc::new(AtomicBool::new(false));
    let ended = Arc::clone(&is_sent);
    let receiver = std::thread::spawn(move || receive(&receiver, &ended));
    let steered = || anyhow::Ok(action(&counters::scrape(&from.netns)?, "steer"));
    let before = steered()?;
    let sent = from.pod.spawn(move || send(address)).join();
    is_sent.store(true, Ordering::Release);
    sent.map_err(|_| anyhow::anyhow!("sending thread"))???;
    let seen = receiver.join().map_err(|_| anyhow::anyhow!("receiving thread"))??;
    ensure!(seen == CALLS * BURST, "{seen} of {} datagrams arrived", CALLS * BURST);
    let packets = steered()? - before;
    // A few are others', such as a connection that is just being closed.
    ensure!(
        u64::from(CALLS) <= packets && packets < u64::from(CALLS * BURST / 2),
        "{CALLS} calls left as {packets} packets: they were cut before they came to kilo0"
    );
    Ok(packets)
}

fn send(target: SocketAddr) -> Result<()> {
    let any = if target.is_ipv4() { IpAddr::V4(Ipv4Addr::UNSPECIFIED) } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect(target)?;
    setsockopt(&socket, UdpGsoSegment, &i32::from(DATAGRAM)).context("UDP_SEGMENT")?;
    for call in 0..CALLS {
        let bytes: Vec<u8> = (0..BURST).flat_map(|i| datagram(call * BURST + i)).collect();
        let sent = socket.send(&bytes)?;
        ensure!(sent == bytes.len(), "only {sent} bytes were taken");
        wait::pace(PAUSE);
    }
    Ok(())
}

/// Returns how many different datagrams came; all must be as they were sent.
fn receive(socket: &UdpSocket, is_sent: &AtomicBool) -> Result<u32> {
    socket.set_read_timeout(Some(Duration::from_millis(200)))?;
    let mut seen = BTreeSet::new();
    let mut buffer = vec![0; 65536];
    let mut last = Instant::now();
    while seen.len() < (CALLS * BURST) as usize && last.elapsed() < PATIENCE {
        let received = socket.recv(&mut buffer);
        if received.is_ok() || !is_sent.load(Ordering::Acquire) {
            last = Instant::now();
        }
        let Ok(length) = received else { continue };
        let number = buffer[..4].try_into().map(u32::from_be_bytes)?;
        ensure!(length == usize::from(DATAGRAM), "datagram {number} has {length} bytes");
        ensure!(buffer[..length] == datagram(number)[..], "datagram {number} has other bytes");
        seen.insert(number);
    }
    Ok(seen.len() as u32)
}

/// Its number, then bytes that depend on it.
fn datagram(number: u32) -> Vec<u8> {
    let rest = (4..u32::from(DATAGRAM)).map(|i| (i ^ number.wrapping_mul(31)) as u8);
    number.to_be_bytes().into_iter().chain(rest).collect()
}

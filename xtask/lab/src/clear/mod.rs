//! Looks for the mesh's packets in cleartext: a packet socket sees each frame a host of the
//! lab puts on a wire, from before the first agent starts until the lab is taken down.

mod frame;

use std::{
    borrow::Cow,
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr},
    os::fd::{AsRawFd as _, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context as _, Result, ensure};
use nix::{
    libc,
    net::if_::if_indextoname,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::socket::{
        AddressFamily, LinkAddr, SockFlag, SockProtocol, SockType, recvfrom, setsockopt, socket,
        sockopt::RcvBufForce,
    },
};
use parking_lot::{Condvar, Mutex};

use super::{
    Lab, counters,
    netns::Netns,
    network::{Network, PRINTER},
    probe::{self, MARKER},
    report::InClear,
};
use frame::{Leak, Link};

/// Bytes of each frame that are inspected.
const LOOKED_AT: usize = 512;
/// Receive buffer of the packet socket, in bytes.
const BUFFER: usize = 64 << 20;
/// Kinds of leaks that are counted separately; all further kinds share one count.
const KINDS: usize = 64;
/// Longest wait until all frames have been inspected.
const PATIENCE: Duration = Duration::from_secs(20);

/// Bytes of a leaked packet that are kept to show what it was.
const SHOWN: usize = 64;

/// How often a kind of leak was seen, and its first packet.
#[derive(Debug)]
pub struct Frames {
    count: u64,
    /// Time of the first, since the epoch.
    at: Duration,
    start: Vec<u8>,
}

impl Frames {
    fn one(frame: &[u8]) -> Self {
        let at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let packet = frame.get(frame::ETHERNET..).unwrap_or_default();
        Self { count: 1, at, start: packet[..packet.len().min(SHOWN)].to_vec() }
    }

    /// The time of day in UTC, as agents' logs have it, and the first packet from its IP header on.
    fn first(&self) -> String {
        let seconds = self.at.as_secs();
        let [hour, minute, second] = [seconds / 3600 % 24, seconds / 60 % 60, seconds % 60];
        let bytes: String = self.start.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{hour:02}:{minute:02}:{second:02}.{:03} {bytes}", self.at.subsec_millis())
    }
}

/// Frames seen since the last call of [`Watch::take`].
#[derive(Debug, Default)]
pub struct Seen {
    /// Frames in cleartext, by the router's interface and by leak.
    leaks: BTreeMap<(String, Leak), Frames>,
    /// Frames in cleartext of other kinds, when there are too many to tell apart.
    pub others: u64,
    /// Frames that came too fast to be inspected.
    pub missed: u64,
}

impl Seen {
    /// Frames in cleartext.
    pub fn total(&self) -> u64 {
        self.leaks.values().map(|frames| frames.count).sum::<u64>() + self.others
    }

    fn add(&mut self, leak: (String, Leak), frames: Frames) {
        let has_room = self.leaks.len() < KINDS;
        match self.leaks.get_mut(&leak) {
            Some(before) => before.count += frames.count,
            None if has_room => drop(self.leaks.insert(leak, frames)),
            None => self.others += frames.count,
        }
    }

    /// Adds what was seen later.
    fn merge(&mut self, later: Self) {
        later.leaks.into_iter().for_each(|(leak, frames)| self.add(leak, frames));
        self.others += later.others;
        self.missed += later.missed;
    }

    /// One line for each kind of leak.
    pub fn shown(&self) -> String {
        let others = (self.others > 0).then(|| format!("\n    {} others", self.others));
        let leaks = self.leaks.iter();
        leaks
            .map(|((from, leak), frames)| {
                format!("\n    {} from {from}: {leak}; the first at {}", frames.count, frames.first())
            })
            .chain(others)
            .collect()
    }
}

#[derive(Debug, Default)]
struct State {
    seen: Seen,
    /// When the socket was last found empty.
    idle: Option<Instant>,
}

/// Handle of the thread that inspects frames.
#[derive(Debug)]
pub struct Watch {
    stop: Arc<AtomicBool>,
    state: Arc<(Mutex<State>, Condvar)>,
    thread: Option<JoinHandle<Result<Result<()>>>>,
}

impl Watch {
    /// Starts to inspect everything that reaches the router, or that it passes between ports of a LAN.
    /// `native`: nodes of a LAN send each other packets without an outer header.
    ///
    /// # Errors
    /// When there is no packet socket.
    pub fn start(router: &Netns, native: bool) -> Result<Self> {
        let (stop, state) = (Arc::new(AtomicBool::new(false)), Arc::default());
        let opened =
            router.spawn(open).join().map_err(|_| anyhow::anyhow!("packet socket's thread"))???;
        let (ended, shared) = (Arc::clone(&stop), Arc::clone(&state));
        let thread = router.spawn(move || look(&opened, native, &ended, &shared));
        Ok(Self { stop, state, thread: Some(thread) })
    }

    /// What was seen since the last call, once all frames sent so far have been inspected.
    ///
    /// # Errors
    /// When the thread has ended, or does not keep up.
    pub fn take(&self) -> Result<Seen> {
        let asked = Instant::now();
        let (mutex, idle) = &*self.state;
        let mut state = mutex.lock();
        let busy = |state: &mut State| state.idle.is_none_or(|idle| idle <= asked);
        let waited = idle.wait_while_for(&mut state, busy, PATIENCE);
        ensure!(!waited.timed_out(), "the LANs' frames are not looked at any more");
        Ok(std::mem::take(&mut state.seen))
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn open() -> Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket(AddressFamily::Packet, SockType::Raw, flags, SockProtocol::EthAll);
    let socket = socket.context("a packet socket")?;
    setsockopt(&socket, RcvBufForce, &BUFFER).context("its buffer")?;
    Ok(socket)
}

fn look(socket: &OwnedFd, native: bool, stop: &AtomicBool, state: &(Mutex<State>, Condvar)) -> Result<()> {
    let mut links = BTreeMap::new();
    let mut buffer = [0; LOOKED_AT];
    let mut found = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let received = recvfrom::<LinkAddr>(socket.as_raw_fd(), &mut buffer);
        if let Ok((length, Some(from))) = received {
            // What leaves the router was seen when it came in.
            if from.pkttype() != libc::PACKET_OUTGOING {
                let (name, link) =
                    links.entry(from.ifindex()).or_insert_with(|| link(from.ifindex(), native));
                let is_ethernet = from.hatype() == libc::ARPHRD_ETHER;
                let bytes = with_header(&buffer[..length], is_ethernet);
                let leak = link.and_then(|link| frame::leak(&bytes, link));
                found.extend(leak.map(|leak| ((name.clone(), leak), Frames::one(&bytes))));
            }
            continue;
        }
        let missed = dropped(socket)?;
        {
            let mut state = state.0.lock();
            state.seen.missed += missed;
            found.drain(..).for_each(|(leak, frames)| state.seen.add(leak, frames));
            state.idle = Some(Instant::now());
        }
        state.1.notify_all();
        let _ = poll(
            &mut [PollFd::new(std::os::fd::AsFd::as_fd(socket), PollFlags::POLLIN)],
            PollTimeout::from(50u8),
        );
    }
    Ok(())
}

/// Adds an Ethernet header to packets of a device that has none.
fn with_header(bytes: &[u8], is_ethernet: bool) -> Cow<'_, [u8]> {
    if is_ethernet {
        return Cow::Borrowed(bytes);
    }
    let kind: [u8; 2] = if bytes.first().is_some_and(|byte| byte >> 4 == 6) { [0x86, 0xdd] } else { [8, 0] };
    Cow::Owned([&[0; 12][..], &kind, bytes].concat())
}

/// Name of the router's interface, and what it leads to; `None` for loopback, and for bridges, whose ports
/// show the same frames.
fn link(index: usize, native: bool) -> (String, Option<Link>) {
    let name = u32::try_from(index).ok().and_then(|index| if_indextoname(index).ok());
    let name = name.map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let link = match name.as_str() {
        "" | "lo" | "wan" => None,
        name if name.starts_with("lan-") => None,
        name if name.ends_with("-lan") || name == "printer" || name == "members" => {
            Some(if native { Link::NativeLan } else { Link::Lan })
        }
        _ => Some(Link::Public),
    };
    (name, link)
}

/// Frames the socket had no room for, since the last call.
fn dropped(socket: &OwnedFd) -> Result<u64> {
    let mut statistics = libc::tpacket_stats { tp_packets: 0, tp_drops: 0 };
    let mut length = size_of::<libc::tpacket_stats>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes, which `statistics` has.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_PACKET,
            libc::PACKET_STATISTICS,
            (&raw mut statistics).cast(),
            &raw mut length,
        )
    };
    nix::errno::Errno::result(result).context("statistics of the packet socket")?;
    Ok(statistics.tp_drops.into())
}

impl Lab {
    /// Fails with senders and packets when the mesh's packets were seen in cleartext since the last call.
    pub fn nothing_in_clear(&self) -> Result<()> {
        self.in_clear_for_removed().map(drop)
    }

    /// As [`Self::nothing_in_clear`], but accepts packets for nodes whose objects a check has removed, and
    /// returns their number.
    pub fn in_clear_for_removed(&self) -> Result<u64> {
        let nodes = self.network.nodes.iter();
        let removed: Vec<_> = nodes.filter(|node| self.removed.contains(node.name())).collect();
        // The mesh knows the printer only while allowed-location-ips name it, and the check that sets them
        // inspects frames itself; connections open at that time are retried for minutes.
        self.in_clear_but(|address| address == PRINTER || removed.iter().any(|node| node.has(address)))
    }

    /// As [`Self::nothing_in_clear`], after a flood of which not every frame could be inspected.
    ///
    /// # Errors
    /// When an inspected frame is in cleartext.
    pub fn nothing_in_clear_as_far_as_seen(&self) -> Result<()> {
        let Some(watch) = &self.clear else { return Ok(()) };
        let seen = watch.take()?;
        nothing_in(&seen)
    }

    /// As [`Self::nothing_in_clear`], but accepts packets for addresses that the mesh does not know, which
    /// are masqueraded like any to the outside; returns their number.
    pub fn in_clear_but(&self, is_unknown: impl Fn(IpAddr) -> bool) -> Result<u64> {
        let Some(watch) = &self.clear else { return Ok(0) };
        let mut seen = watch.take()?;
        let count = seen.total();
        seen.leaks.retain(|(_, leak), _| !leak.is_masqueraded_to(&is_unknown));
        let known = count - seen.total();
        let without_lan = self.network.nodes.iter().filter(|node| self.without_lan.contains(node.name()));
        let without_lan: Vec<_> =
            without_lan.map(|node| (format!("{}-wan", node.name()), node.private)).collect();
        seen.leaks.retain(|(from, leak), _| {
            !without_lan
                .iter()
                .any(|(wan, private)| from == wan && leak.is_from_host_to_location_of(*private))
        });
        nothing_in(&seen)?;
        ensure!(seen.missed == 0, "{} frames came too fast to be looked at", seen.missed);
        Ok(known)
    }
}

/// Fails with what was seen in cleartext.
fn nothing_in(seen: &Seen) -> Result<()> {
    match seen.total() {
        0 => Ok(()),
        count => Err(InClear(format!("{count} packets of the mesh in cleartext:{}", seen.shown())).into()),
    }
}

/// Packets of each kind that are sent on purpose.
const ON_PURPOSE: u64 = 5;
/// A pod's address that the printer assigns to itself.
const POD: &str = "10.42.9.2";

/// Sends packets in cleartext on purpose: pings with pods' addresses, and datagrams with the marker. All must
/// have been seen, and the pings by the router's rules, too.
pub fn sees_leaks(lab: &mut Lab) -> Result<String> {
    lab.nothing_in_clear()?;
    let before = counters::clear_pod_packets(&lab.network)?;
    let printer = &lab.network.printer;
    let target = lab.network.node("b2")?.pod_ip();
    printer.ip(&format!("address add {POD}/32 dev lo\nroute add {target}/32 via 10.1.0.1 src {POD}\n"))?;
    // No reply is expected.
    let pings = printer.sh(&format!("ping -n -q -c {ON_PURPOSE} -i 0.05 -W 1 -I {POD} {target} || true"));
    printer.ip(&format!("route del {target}/32 via 10.1.0.1\naddress del {POD}/32 dev lo\n"))?;
    pings?;
    send_marked(&lab.network)?;
    let watch = lab.clear.as_ref().context("nobody looks")?;
    let began = Instant::now();
    let mut seen = watch.take()?;
    // A packet may wait for neighbour discovery before it is on the wire.
    while seen.total() < 2 * ON_PURPOSE && began.elapsed() < PATIENCE {
        seen.merge(watch.take()?);
    }
    let leaks = seen.total();
    let router = counters::clear_pod_packets(&lab.network)? - before;
    ensure!(
        leaks == 2 * ON_PURPOSE && router == ON_PURPOSE,
        "of {ON_PURPOSE} pings and {ON_PURPOSE} datagrams in cleartext the LANs showed {leaks}, and the router counted \
         {router} pings:{}",
        seen.shown()
    );
    Ok(format!("({leaks} of {leaks} packets in cleartext seen, {router} of {router} by the router)"))
}

/// Sends marked datagrams to an unused public address, so that nobody answers.
fn send_marked(network: &Network) -> Result<()> {
    let target = network.underlay.address(Ipv4Addr::new(192, 0, 2, 98));
    let send = move || -> std::io::Result<()> {
        let socket = probe::any_port(target)?;
        (0..ON_PURPOSE).try_for_each(|_| socket.send_to(MARKER, (target, 9)).map(drop))
    };
    network
        .node("a2")?
        .netns
        .spawn(send)
        .join()
        .map_err(|_| anyhow::anyhow!("sending thread"))??
        .context("sending")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kind_of_leak_is_shown_with_its_first_packet() {
        let ping = |last: u8| {
            [&[0; 12], &[8, 0, 0x45, 0, 0, 20, 0, 0, 0, 0, 64, 1, 0, 0][..], &[10, 42, 1, 2, 10, 42, 2, last]]
                .concat()
        };
        let mut seen = Seen::default();
        for last in [2, 3, 2] {
            let frame = ping(last);
            let leak = frame::leak(&frame, Link::Public).unwrap();
            let at = Duration::from_millis(1_795_738_000_125);
            seen.add(("a1-wan".to_owned(), leak), Frames { at, ..Frames::one(&frame) });
        }
        assert_eq!(seen.total(), 3);
        let shown = seen.shown();
        let (first, second) = shown.trim().split_once('\n').unwrap();
        assert_eq!(
            first,
            "2 from a1-wan: an address of the mesh: 10.42.1.2 to 10.42.2.2, protocol 1; the first at 00:06:40.125 \
             4500001400000000400100000a2a01020a2a0202"
        );
        assert!(second.trim().starts_with("1 from a1-wan"), "{second}");
    }
}

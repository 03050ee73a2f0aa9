//! Sends frames and counts their cost: with one virtual CPU and `-icount shift=0`, a nanosecond of the
//! guest is an instruction, and everything that a frame causes is done before the sender continues.

use std::{
    os::fd::AsRawFd as _,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use nix::libc;
use serde_json::Value;
use socket2::{Domain, SockAddr, Socket, Type};

use crate::{
    command::{output, run},
    lab::{netns::Netns, wait},
};

/// Bursts before the counted ones.
const WARM_UP: usize = 4;
/// Unrelated packets that may arrive during a run, such as WireGuard handshakes; with pauses, this many
/// each second.
const STRANGERS: u64 = 8;

/// How frames are sent, and how many packets must arrive.
#[derive(Clone, Copy, Debug)]
pub struct Train {
    /// Frames between two readings of the clock.
    pub burst: usize,
    /// Counted bursts.
    pub rounds: usize,
    /// Each frame follows its `virtio_net_hdr`.
    pub offloaded: bool,
    /// Packets that arrive at the end of the stage for each frame; a GSO packet is one.
    pub arrive: u64,
    /// Pause before each burst.
    pub pause: Duration,
}

/// A direction of a device's TC hooks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Received packets.
    Ingress,
    /// Packets to be sent.
    Egress,
}

impl Direction {
    fn word(self) -> &'static str {
        match self {
            Self::Ingress => "ingress",
            Self::Egress => "egress",
        }
    }
}

/// The end of a stage: a filter that drops every packet, after all programs of the mesh on that hook.
pub struct Sink<'a> {
    netns: &'a Netns,
    device: &'a str,
    direction: Direction,
}

impl<'a> Sink<'a> {
    /// Attaches the filter to the hook.
    pub fn attach(netns: &'a Netns, device: &'a str, direction: Direction) -> Result<Self> {
        let sink = Self { netns, device, direction };
        // The qdisc exists when programs are attached without TCX.
        let _ = run(&mut sink.tc(&["qdisc", "add"], &["clsact"]));
        run(&mut sink.tc(
            &["filter", "add"],
            &[direction.word(), "pref", "60000", "protocol", "all", "matchall", "action", "drop"],
        ))?;
        Ok(sink)
    }

    /// Number of packets it has dropped; a GSO packet is one. (The packets in the action's statistics are
    /// segments, or none before they are counted.)
    pub fn count(&self) -> Result<u64> {
        let text =
            output(&mut self.tc(&["-s", "-j", "filter", "show"], &[self.direction.word(), "pref", "60000"]))?;
        let filters: Value = serde_json::from_str(&text).context("tc -j filter show")?;
        let packets = filters
            .as_array()
            .and_then(|filters| filters.iter().find_map(|filter| filter["options"]["rule_hit"].as_u64()));
        packets.with_context(|| format!("no statistics in {text}"))
    }

    fn tc(&self, before: &[&str], after: &[&str]) -> Command {
        let mut command = Command::new("tc");
        command.args(["-n", &self.netns.id]);
        command.args(before).args(["dev", self.device]).args(after);
        command
    }
}

impl Drop for Sink<'_> {
    fn drop(&mut self) {
        let _ = run(&mut self.tc(&["filter", "del"], &[self.direction.word(), "pref", "60000"]));
    }
}

/// Sends the frames of `next` into `device` of `netns` and returns the lower quartile of instructions per
/// frame, because chance events in a burst, such as timers, only add. After a pause it is the median: about
/// one frame in four then costs 500 less, so the quartile would vary. Every frame must reach the sink.
pub fn cost(
    netns: &Netns,
    device: &str,
    sink: &Sink<'_>,
    train: Train,
    mut next: impl FnMut() -> Vec<u8>,
) -> Result<f64> {
    let bursts: Vec<Vec<Vec<u8>>> =
        (0..WARM_UP + train.rounds).map(|_| (0..train.burst).map(|_| next()).collect()).collect();
    let sent = (bursts.len() * train.burst) as u64;
    let before = sink.count()?;
    let device = device.to_owned();
    let mut times = netns
        .spawn(move || send_bursts(&device, &bursts, train))
        .join()
        .map_err(|_| anyhow::anyhow!("the generator panicked"))???;
    let arrived = sink.count()? - before;
    let due = train.arrive * sent;
    let pauses = train.pause * (WARM_UP + train.rounds) as u32;
    let strangers = STRANGERS * (1 + pauses.as_secs());
    ensure!(
        (due..due + strangers).contains(&arrived),
        "{arrived} packets came of {sent} frames to the end of the stage, not {due}"
    );
    let counted = &mut times[WARM_UP..];
    counted.sort_unstable();
    let place = if train.pause.is_zero() { counted.len() / 4 } else { counted.len() / 2 };
    let Some(spent) = counted.get(place) else { bail!("no rounds") };
    Ok(*spent as f64 / train.burst as f64)
}

/// Keeps the kernel's workers from preempting each other. Otherwise their history decides whether the
/// worker that encrypts also sends or wakes another first, which is 900 instructions per packet.
pub fn calm_workers() -> Result<()> {
    run(Command::new("sh")
        .args(["-c", "for p in $(pgrep '^kworker/'); do chrt --batch --pid 0 $p || true; done"]))
    .map(drop)
}

/// Sends the bursts; returns the nanoseconds of each.
fn send_bursts(device: &str, bursts: &[Vec<Vec<u8>>], train: Train) -> Result<Vec<u64>> {
    // Every other thread that a frame wakes, including WireGuard's, runs first.
    run(Command::new("chrt").args(["--idle", "--pid", "0", &nix::unistd::gettid().to_string()]))?;
    let socket = packet_socket(device)?;
    if train.offloaded {
        expect_virtio_headers(&socket).context("PACKET_VNET_HDR")?;
    }
    let mut times = Vec::with_capacity(bursts.len());
    for burst in bursts {
        if !train.pause.is_zero() {
            wait::pace(train.pause);
        }
        let started = Instant::now();
        for frame in burst {
            match socket.send(frame) {
                // A sink on this very device reports its drops so; the sink's count shows whether all
                // arrived.
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => {}
                sent => drop(sent.context("packet socket")?),
            }
        }
        for _ in 0..4 {
            nix::sched::sched_yield()?;
        }
        times.push(started.elapsed().as_nanos() as u64);
    }
    Ok(times)
}

/// Makes the socket expect a `virtio_net_hdr` before each frame (packet(7)).
fn expect_virtio_headers(socket: &Socket) -> Result<()> {
    let on: libc::c_int = 1;
    let size = size_of_val(&on) as libc::socklen_t;
    // SAFETY: the option reads one int, which lives until the call is over.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_PACKET,
            libc::PACKET_VNET_HDR,
            (&raw const on).cast(),
            size,
        )
    };
    nix::errno::Errno::result(result).map(drop)?;
    Ok(())
}

/// A socket that sends frames through a device and receives nothing.
fn packet_socket(device: &str) -> Result<Socket> {
    let index = nix::net::if_::if_nametoindex(device).with_context(|| device.to_owned())?;
    let socket = Socket::new(Domain::PACKET, Type::RAW, None).context("packet socket")?;
    // SAFETY: the storage is zeroed, aligned and larger than any address; the length is that of what is written.
    let ((), address) = unsafe {
        SockAddr::try_init(|storage, length| {
            let address = storage.cast::<libc::sockaddr_ll>();
            (*address).sll_family = libc::AF_PACKET as u16;
            (*address).sll_ifindex = index.cast_signed();
            *length = size_of::<libc::sockaddr_ll>() as u32;
            Ok(())
        })
    }?;
    socket.bind(&address).context("bind")?;
    Ok(socket)
}

//! Sending frames and counting what they cost: with one virtual CPU and
//! `-icount shift=0` a nanosecond of the guest is an instruction, and whatever
//! a frame causes is done before the sender goes on.

use std::{process::Command, time::Instant};

use anyhow::{Context as _, Result, bail, ensure};
use nix::libc;
use serde_json::Value;
use socket2::{Domain, SockAddr, Socket, Type};

use crate::{
    command::{output, run},
    lab::space::Space,
};

/// Frames sent between two looks at the clock.
const BURST: usize = 32;
/// Bursts before those that count.
const WARM_UP: usize = 4;

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

/// The end of a stage: a filter that drops everything which comes so far,
/// behind all programs of the mesh on that hook.
pub struct Sink<'a> {
    space: &'a Space,
    device: &'a str,
    direction: Direction,
}

impl<'a> Sink<'a> {
    /// Puts the filter on the hook.
    pub fn attach(space: &'a Space, device: &'a str, direction: Direction) -> Result<Self> {
        let sink = Self { space, device, direction };
        // There already when programs are attached without TCX.
        let _ = run(&mut sink.tc(&["qdisc", "add"], &["clsact"]));
        run(&mut sink.tc(
            &["filter", "add"],
            &[direction.word(), "pref", "60000", "protocol", "all", "matchall", "action", "drop"],
        ))?;
        Ok(sink)
    }

    /// Packets it has dropped.
    pub fn count(&self) -> Result<u64> {
        let text =
            output(&mut self.tc(&["-s", "-j", "filter", "show"], &[self.direction.word(), "pref", "60000"]))?;
        let filters: Value = serde_json::from_str(&text).context("tc -j filter show")?;
        let packets = filters.as_array().and_then(|filters| {
            filters.iter().find_map(|filter| filter["options"]["actions"][0]["stats"]["packets"].as_u64())
        });
        packets.with_context(|| format!("no statistics in {text}"))
    }

    fn tc(&self, before: &[&str], after: &[&str]) -> Command {
        let mut command = Command::new("tc");
        command.args(["-n", &self.space.netns]);
        command.args(before).args(["dev", self.device]).args(after);
        command
    }
}

impl Drop for Sink<'_> {
    fn drop(&mut self) {
        let _ = run(&mut self.tc(&["filter", "del"], &[self.direction.word(), "pref", "60000"]));
    }
}

/// Sends the frames of `next` into `device` of `space` in `rounds` bursts, and
/// answers the median of instructions per frame. Every frame must reach the
/// sink.
pub fn cost(
    space: &Space,
    device: &str,
    sink: &Sink<'_>,
    rounds: usize,
    mut next: impl FnMut() -> Vec<u8>,
) -> Result<f64> {
    let bursts: Vec<Vec<Vec<u8>>> =
        (0..WARM_UP + rounds).map(|_| (0..BURST).map(|_| next()).collect()).collect();
    let sent = (bursts.len() * BURST) as u64;
    let before = sink.count()?;
    let device = device.to_owned();
    let mut times = space
        .spawn(move || send_bursts(&device, &bursts))
        .join()
        .map_err(|_| anyhow::anyhow!("the generator panicked"))???;
    let arrived = sink.count()? - before;
    // A handshake of WireGuard may come along.
    ensure!((sent..sent + 8).contains(&arrived), "{arrived} of {sent} frames came to the end of the stage");
    let counted = &mut times[WARM_UP..];
    counted.sort_unstable();
    let Some(median) = counted.get(counted.len() / 2) else { bail!("no rounds") };
    Ok(*median as f64 / BURST as f64)
}

/// Nanoseconds of each burst.
fn send_bursts(device: &str, bursts: &[Vec<Vec<u8>>]) -> Result<Vec<u64>> {
    // Every other thread that a frame wakes, WireGuard's among them, goes first.
    run(Command::new("chrt").args(["--idle", "--pid", "0", &nix::unistd::gettid().to_string()]))?;
    let socket = packet_socket(device)?;
    let mut times = Vec::with_capacity(bursts.len());
    for burst in bursts {
        let started = Instant::now();
        for frame in burst {
            socket.send(frame).context("packet socket")?;
        }
        for _ in 0..4 {
            nix::sched::sched_yield()?;
        }
        times.push(started.elapsed().as_nanos() as u64);
    }
    Ok(times)
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

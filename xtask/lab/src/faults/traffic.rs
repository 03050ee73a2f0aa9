//! What users would notice: a stream of 1,000 datagrams a second and one long
//! TCP connection between two places, each answer checked.

use std::{
    io::{Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpStream},
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};

use crate::{netns::Netns, probe, wait};

/// Time between two datagrams.
const TICK: Duration = Duration::from_millis(1);
/// Time between two writes of the TCP connection, and their size in bytes.
const WRITE: (Duration, usize) = (Duration::from_millis(10), 1000);
/// When nothing has arrived for so long after the stream's end, nothing is under way any more.
const STRAGGLERS: Duration = Duration::from_millis(700);
/// The same when the last datagram has no answer: the server's thread may be late. On two busy cores a thread
/// has stood still for about as long as [`STRAGGLERS`].
const LATE: Duration = Duration::from_secs(5);
/// Longest time TCP may need to retransmit what was lost: pauses double, so that after an outage of 83 s,
/// which is Kilo's longest, it tries 102 s after the first loss, or half as late again.
const RESENT: Duration = Duration::from_secs(240);

/// How many ranges of lost datagrams are printed at most.
const SAID: usize = 8;

/// What was lost.
#[derive(Clone, Debug)]
pub struct Figures {
    /// Datagrams sent.
    pub sent: u64,
    /// Those without an answer.
    pub lost: u64,
    /// Longest time without an answer.
    pub gap: Duration,
    /// Ranges of lost datagrams: the number of the first, and how many.
    pub holes: Vec<(u64, u64)>,
    /// Longest time the TCP connection stood still.
    pub stall: Duration,
    /// Why the TCP connection ended, if it did.
    pub broken: Option<String>,
}

impl Figures {
    /// How many datagrams were lost, of how many, and where in the stream; and for how long nothing came,
    /// which tells a broken path from a full queue.
    pub fn said_of_lost(&self) -> String {
        format!(
            "{} datagrams of {} were lost ({}), {} ms without answer, TCP {} ms",
            self.lost,
            self.sent,
            self.said_of_holes(),
            self.gap.as_millis(),
            self.stall.as_millis()
        )
    }

    /// Where in the stream datagrams were lost.
    pub fn said_of_holes(&self) -> String {
        let said = |(first, length): &(u64, u64)| format!("{length} from number {first}");
        let holes: Vec<_> = self.holes.iter().take(SAID).map(said).collect();
        holes.join(", ") + if self.holes.len() > SAID { " and more" } else { "" }
    }
}

/// Datagrams and a TCP connection to one target, each on a thread of its own, until they are stopped.
pub struct Traffic {
    stop: Arc<AtomicBool>,
    answered: Arc<AtomicU64>,
    tick: Duration,
    datagrams: JoinHandle<Result<Result<Stream>>>,
    connection: JoinHandle<Result<Result<Duration>>>,
}

impl Traffic {
    /// Starts both from the namespace to the servers of [`probe::serve`].
    pub fn start(from: &Netns, target: IpAddr) -> Self {
        Self::start_every(from, target, TICK)
    }

    /// As [`Traffic::start`], with another time between two datagrams.
    pub fn start_every(from: &Netns, target: IpAddr, tick: Duration) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let answered = Arc::new(AtomicU64::new(0));
        let (ended, count) = (Arc::clone(&stop), Arc::clone(&answered));
        let datagrams = from.spawn(move || stream(target, tick, &ended, &count));
        let ended = Arc::clone(&stop);
        let connection = from.spawn(move || connection(target, ended));
        Self { stop, answered, tick, datagrams, connection }
    }

    /// Waits until answers come as fast as datagrams leave.
    pub fn settle(&self, limit: Duration) -> Result<()> {
        let (time, sent) = (self.tick * 300, 300);
        wait::until("half of the datagrams are answered", limit, || {
            let before = self.answered.load(Ordering::Relaxed);
            wait::time_passes(time, "answers are counted");
            Ok(self.answered.load(Ordering::Relaxed) - before > sent / 2)
        })
        .map(drop)
    }

    /// Sends nothing more; answers still count.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Ends both and returns what was lost.
    pub fn finish(self) -> Result<Figures> {
        self.stop();
        let died = || anyhow::anyhow!("traffic thread");
        let Stream { sent, answered, gap, holes } = self.datagrams.join().map_err(|_| died())???;
        let (stall, broken) = match self.connection.join().map_err(|_| died())?? {
            Ok(stall) => (stall, None),
            Err(error) => (Duration::ZERO, Some(format!("{error:#}"))),
        };
        Ok(Figures { sent, lost: sent - answered, gap, holes, stall, broken })
    }
}

/// What became of the datagrams, as in [`Figures`].
struct Stream {
    sent: u64,
    answered: u64,
    gap: Duration,
    holes: Vec<(u64, u64)>,
}

/// Pure: ranges of datagrams that were sent but not seen.
fn holes(seen: &[bool], sent: u64) -> Vec<(u64, u64)> {
    let mut holes: Vec<(u64, u64)> = Vec::new();
    let all = seen.iter().copied().chain(std::iter::repeat(false)).zip(0..sent);
    for (_, number) in all.filter(|(seen, _)| !seen) {
        match holes.last_mut() {
            Some((first, length)) if *first + *length == number => *length += 1,
            _ => holes.push((number, 1)),
        }
    }
    holes
}

fn stream(target: IpAddr, tick: Duration, stop: &AtomicBool, count: &AtomicU64) -> Result<Stream> {
    let socket = probe::any_port(target)?;
    socket.connect((target, probe::PORT))?;
    socket.set_read_timeout(Some(Duration::from_millis(50)))?;
    let sender = socket.try_clone()?;
    let sent = &AtomicU64::new(0);
    std::thread::scope(|scope| {
        let sending = scope.spawn(move || {
            let (mut number, mut next) = (0u64, Instant::now());
            while !stop.load(Ordering::Relaxed) {
                // Errors such as refused or unreachable count as lost: no answer comes.
                let _ = sender.send(&[&number.to_be_bytes()[..], probe::MARKER].concat());
                number += 1;
                sent.store(number, Ordering::Relaxed);
                next += tick;
                match next.checked_duration_since(Instant::now()) {
                    Some(pause) => wait::pace(pause),
                    // Do not catch up, which would load a busy machine even more.
                    None => next = Instant::now(),
                }
            }
            (number, Instant::now())
        });
        let mut seen: Vec<bool> = Vec::new();
        let (mut last, mut gap, mut ended) = (Instant::now(), Duration::ZERO, None);
        let mut buffer = [0; 256];
        loop {
            let answer = socket.recv(&mut buffer);
            if stop.load(Ordering::Relaxed) {
                ended.get_or_insert_with(Instant::now);
            }
            let Ok(length) = answer else {
                // Late is not lost: a busy machine may not have answered all yet.
                let last_is_answered = seen.len() as u64 == sent.load(Ordering::Relaxed);
                let patience = if last_is_answered { STRAGGLERS } else { LATE };
                if ended.is_some_and(|ended: Instant| ended.max(last).elapsed() > patience) {
                    break;
                }
                continue;
            };
            let (_, bytes) = probe::split_answer(&buffer[..length])?;
            let number = usize::try_from(u64::from_be_bytes(
                bytes.get(..8).context("an answer without its number")?.try_into()?,
            ))?;
            if seen.len() <= number {
                seen.resize(number + 1, false);
            }
            if !std::mem::replace(&mut seen[number], true) {
                count.fetch_add(1, Ordering::Relaxed);
            }
            gap = gap.max(last.elapsed());
            last = Instant::now();
        }
        // The receiver notices the end up to 50 ms late.
        let (all, end) = sending.join().map_err(|_| anyhow::anyhow!("sending thread"))?;
        gap = gap.max(end.saturating_duration_since(last));
        Ok(Stream { sent: all, answered: count.load(Ordering::Relaxed), gap, holes: holes(&seen, all) })
    })
}

/// Returns the longest time without a byte.
fn connection(target: IpAddr, stop: Arc<AtomicBool>) -> Result<Duration> {
    let mut stream =
        TcpStream::connect_timeout(&SocketAddr::from((target, probe::PORT)), Duration::from_secs(5))
            .context("it does not come about")?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(RESENT))?;
    let mut writer = stream.try_clone()?;
    let writing = std::thread::spawn(move || -> std::io::Result<u64> {
        let mut written = 0;
        while !stop.load(Ordering::Relaxed) {
            let bytes: Vec<u8> = (written..written + WRITE.1 as u64).map(probe::byte_at).collect();
            writer.write_all(&bytes)?;
            written += WRITE.1 as u64;
            wait::pace(WRITE.0);
        }
        writer.shutdown(std::net::Shutdown::Write)?;
        Ok(written)
    });
    let (mut last, mut stall) = (Instant::now(), Duration::ZERO);
    let mut buffer = vec![0; 65536];
    let mut read = 0u64;
    // The server's first line is the address it saw.
    let mut head = true;
    loop {
        let length = stream
            .read(&mut buffer)
            .inspect_err(|_| println!("{}", states()))
            .context("it stands still or broke")?;
        stall = stall.max(last.elapsed());
        last = Instant::now();
        if length == 0 {
            break;
        }
        let mut bytes = &buffer[..length];
        if head && let Some(end) = bytes.iter().position(|&byte| byte == b'\n') {
            bytes = &bytes[end + 1..];
            head = false;
        }
        if !bytes.iter().zip(read..).all(|(&byte, at)| byte == probe::byte_at(at)) {
            bail!("other bytes came back after {read}");
        }
        read += bytes.len() as u64;
    }
    let written = writing.join().map_err(|_| anyhow::anyhow!("writing thread"))??;
    if read != written {
        bail!("{read} of {written} bytes came back");
    }
    Ok(stall)
}

/// The kernel's view of this namespace's connections to the servers, to find out why one stands still: which
/// side waits for the other, and since when.
fn states() -> String {
    let ss = Command::new("ss").args(["-tinoH", &format!("( dport = :{} )", probe::PORT)]).output();
    match ss {
        Ok(said) => {
            format!("the TCP connection stands still or broke:\n{}", String::from_utf8_lossy(&said.stdout))
        }
        Err(error) => format!("the TCP connection stands still or broke; ss: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lost_in_a_row_is_one_hole_and_what_never_came_one_at_the_end() {
        let seen = [true, false, false, true, true, false];
        assert_eq!(holes(&seen, 8), [(1, 2), (5, 3)]);
        assert_eq!(holes(&[true], 1), []);
    }
}

//! New flows: one every few milliseconds, each a single datagram from its own port.

use std::{
    collections::VecDeque,
    net::{IpAddr, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use anyhow::{Result, anyhow};

use crate::{netns::Netns, probe, wait};

/// Time between two flows.
const EACH: Duration = Duration::from_millis(5);
/// How long an answer is waited for.
const PATIENCE: Duration = Duration::from_millis(500);

/// New flows, opened until [`Fresh::finish`].
pub struct Fresh {
    stop: Arc<AtomicBool>,
    flows: JoinHandle<Result<Result<Duration>>>,
}

impl Fresh {
    /// Begins them in this namespace.
    pub fn start(from: &Netns, target: IpAddr) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&stop);
        Self { stop, flows: from.spawn(move || begin(target, &ended)) }
    }

    /// Stops opening flows; returns the longest time for which no new flow got an answer.
    pub fn finish(self) -> Result<Duration> {
        self.stop.store(true, Ordering::Relaxed);
        self.flows.join().map_err(|_| anyhow!("thread of new flows"))??
    }
}

fn is_answered(flow: &UdpSocket) -> bool {
    flow.recv(&mut [0; 256]).is_ok()
}

fn begin(target: IpAddr, stop: &AtomicBool) -> Result<Duration> {
    let mut waiting: VecDeque<(Instant, UdpSocket)> = VecDeque::new();
    // When the current series of unanswered flows began, and how long the longest such series was.
    let (mut silent, mut longest) = (None::<Instant>, Duration::ZERO);
    let mut newest = Instant::now();
    while !stop.load(Ordering::Relaxed) || !waiting.is_empty() {
        if !stop.load(Ordering::Relaxed) {
            let flow = probe::any_port(target)?;
            flow.set_nonblocking(true)?;
            // Refused or unreachable is lost, too.
            let _ = flow.send_to(probe::MARKER, (target, probe::PORT));
            newest = Instant::now();
            waiting.push_back((newest, flow));
        }
        while let Some((began, flow)) = waiting.front() {
            if is_answered(flow) {
                if let Some(silent) = silent.take() {
                    longest = longest.max(began.duration_since(silent));
                }
            } else if began.elapsed() > PATIENCE {
                silent.get_or_insert(*began);
            } else {
                break;
            }
            waiting.pop_front();
        }
        wait::pace(EACH);
    }
    let last = silent.map_or(Duration::ZERO, |silent| newest.duration_since(silent));
    Ok(longest.max(last))
}

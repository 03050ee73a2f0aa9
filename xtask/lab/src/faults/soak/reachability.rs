//! Everybody probes everybody once per second, with a datagram of a new flow.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use parking_lot::Mutex;

use crate::{
    matrix::{self, ProbeEndpoint},
    network::Network,
    probe, wait,
};

/// Time between two rounds; an answer may take as long.
const SECOND: Duration = Duration::from_secs(1);
/// All is well when so many rounds in a row saw everybody.
const IN_A_ROW: usize = 2;

/// One round of probes.
#[derive(Clone, Debug)]
pub struct Round {
    /// When it began.
    pub began: Instant,
    /// Probes sent.
    pub asked: usize,
    /// `SOURCE -> TARGET` for each target that did not answer or saw a wrong source, and sources that failed.
    pub missing: Vec<String>,
}

/// What all rounds together have shown.
#[derive(Clone, Copy, Debug, Default)]
pub struct Totals {
    /// Rounds of probes, one per second.
    pub rounds: usize,
    /// Rounds in which somebody got no answer.
    pub incomplete: usize,
    /// Probes sent.
    pub asked: usize,
    /// Probes without an answer.
    pub unanswered: usize,
}

/// Probes once per second until [`Watch::finish`].
pub struct Watch {
    stop: Arc<AtomicBool>,
    rounds: Arc<Mutex<Vec<Round>>>,
    thread: JoinHandle<()>,
}

impl Watch {
    /// Starts to probe.
    pub fn start(network: &Network) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let rounds = Arc::new(Mutex::new(Vec::new()));
        let (network, ended, seen) = (network.clone(), Arc::clone(&stop), Arc::clone(&rounds));
        let thread = std::thread::spawn(move || {
            while !ended.load(Ordering::Relaxed) {
                let round = round(&network);
                let next = round.began + SECOND;
                seen.lock().push(round);
                wait::pace(next.saturating_duration_since(Instant::now()));
            }
        });
        Self { stop, rounds, thread }
    }

    /// Waits for rounds begun after `since` that saw everybody; returns the time
    /// until the first of them.
    ///
    /// # Errors
    /// Lists who is out of reach when it takes longer than `limit`.
    pub fn whole(&self, since: Instant, limit: Duration) -> Result<Duration> {
        loop {
            let later = {
                let rounds = self.rounds.lock();
                let at = rounds.iter().position(|round| round.began >= since).unwrap_or(rounds.len());
                rounds[at..].to_vec()
            };
            let well = later.iter().rev().take_while(|round| round.missing.is_empty()).count();
            if well >= IN_A_ROW {
                return Ok(later[later.len() - well].began - since);
            }
            // Rounds that saw everybody may yet be enough.
            if since.elapsed() > limit + SECOND * 3 {
                let missing = later.last().map(|round| round.missing.join(", ")).unwrap_or_default();
                bail!("not everybody in reach within {} s: {missing}", limit.as_secs());
            }
            wait::pace(Duration::from_millis(100));
        }
    }

    /// Stops; returns what all rounds have shown.
    pub fn finish(self) -> Totals {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.join();
        let rounds = self.rounds.lock();
        Totals {
            rounds: rounds.len(),
            incomplete: rounds.iter().filter(|round| !round.missing.is_empty()).count(),
            asked: rounds.iter().map(|round| round.asked).sum(),
            unanswered: rounds.iter().map(|round| round.missing.len()).sum(),
        }
    }
}

/// Runs one round of probes.
pub fn round(network: &Network) -> Round {
    let began = Instant::now();
    let targets = Arc::new(matrix::targets(network));
    let threads: Vec<_> = matrix::sources(network)
        .into_iter()
        .map(|source| {
            let targets = Arc::clone(&targets);
            let name = source.name.clone();
            (name, source.netns.clone().spawn(move || ask_all(&source, &targets)))
        })
        .collect();
    let mut round = Round { began, asked: 0, missing: Vec::new() };
    for (name, thread) in threads {
        match thread.join() {
            Ok(Ok((asked, missing))) => {
                round.asked += asked;
                round.missing.extend(missing);
            }
            Ok(Err(error)) => round.missing.push(format!("{name}: {error:#}")),
            Err(_) => round.missing.push(format!("{name}: its thread died")),
        }
    }
    round
}

/// Probes all targets at once; returns how many, and which did not answer or saw a wrong source.
fn ask_all(source: &ProbeEndpoint, targets: &[ProbeEndpoint]) -> (usize, Vec<String>) {
    let others: Vec<_> = targets.iter().filter(|target| target.name != source.name).collect();
    let mut asked = 0;
    let mut missing = Vec::new();
    for v4 in [true, false] {
        let mut waiting: BTreeMap<IpAddr, &ProbeEndpoint> = BTreeMap::new();
        if source.address(v4).is_some() {
            waiting.extend(others.iter().filter_map(|target| Some((target.address(v4)?, *target))));
        }
        asked += waiting.len();
        let problem = ask(source, v4, &mut waiting).err();
        let family = if v4 { "" } else { " over IPv6" };
        missing.extend(waiting.values().map(|target| {
            let problem = problem.as_ref().map(|problem| format!(" ({problem:#})")).unwrap_or_default();
            format!("{} -> {}{family}{problem}", source.name, target.name)
        }));
    }
    (asked, missing)
}

/// Removes from `waiting` the targets that answered and saw the right source.
fn ask(source: &ProbeEndpoint, v4: bool, waiting: &mut BTreeMap<IpAddr, &ProbeEndpoint>) -> Result<()> {
    let any: IpAddr = if v4 { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = probe::any_port(any)?;
    for address in waiting.keys() {
        // An unreachable target counts as unanswered.
        let _ = socket.send_to(probe::MARKER, (*address, probe::PORT));
    }
    let deadline = Instant::now() + SECOND;
    let mut buffer = [0; 256];
    while !waiting.is_empty() {
        let Some(left) = deadline.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())
        else {
            break;
        };
        socket.set_read_timeout(Some(left))?;
        let Ok((length, from)) = socket.recv_from(&mut buffer) else { continue };
        let (seen, _) = probe::split_answer(&buffer[..length])?;
        let well = |target: &ProbeEndpoint| {
            matrix::expected_source(source, target, v4).is_none_or(|expected| expected == seen)
        };
        if waiting.get(&from.ip()).is_some_and(|target| well(target)) {
            waiting.remove(&from.ip());
        }
    }
    Ok(())
}

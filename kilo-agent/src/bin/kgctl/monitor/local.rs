//! Monitors this node: its programs report what they drop.

use std::{
    io::{self, IsTerminal as _},
    time::{Duration, SystemTime},
};

use anyhow::{Context as _, Result};
use kilo_common::event::{DropEvent, Hook};
use kilo_host::dataplane::{
    CounterReader, Counters,
    decode::{self, Header},
    interface_name,
    monitor::{self, Monitor},
};
use serde::Serialize;
use tokio::{
    io::{Interest, unix::AsyncFd},
    signal::unix::{SignalKind, signal},
};

use super::{DropReason, MonitorArgs, Output};
use crate::remote;

/// A drop as displayed.
#[derive(Debug, Serialize)]
struct Shown {
    time: String,
    reason: &'static str,
    program: &'static str,
    interface: String,
    length: u32,
    headers: Vec<Header>,
    /// The packet's first bytes, hexadecimal.
    bytes: String,
}

impl Shown {
    fn new(event: &DropEvent) -> Self {
        let hook = event.hook();
        let ethernet = hook.is_none_or(Hook::has_ethernet);
        let length = usize::try_from(event.length).unwrap_or(usize::MAX);
        // An interface that is gone has only its index.
        let interface = interface_name(event.ifindex).unwrap_or_else(|| event.ifindex.to_string());
        let age = Duration::from_nanos(monitor::ktime().saturating_sub(event.ktime));
        let time = SystemTime::now().checked_sub(age).unwrap_or_else(SystemTime::now);
        Self {
            time: humantime::format_rfc3339_micros(time).to_string(),
            reason: event.reason().map_or("unknown", DropReason::label),
            program: hook.map_or("unknown", Hook::program),
            interface,
            length: event.length,
            headers: decode::headers(event.bytes(), length, ethernet),
            bytes: event.bytes().iter().map(|byte| format!("{byte:02x}")).collect(),
        }
    }

    fn line(&self, output: Output) -> Result<String> {
        if output == Output::Json {
            return Ok(serde_json::to_string(self)?);
        }
        let packet = if self.headers.is_empty() {
            // No header could be decoded: shows the bytes themselves.
            self.bytes.chars().take(80).collect()
        } else {
            let headers: Vec<_> = self.headers.iter().map(ToString::to_string).collect();
            headers.join(" | ")
        };
        Ok(format!(
            "{} {:<16} {} {} {packet} length {}",
            self.time, self.reason, self.program, self.interface, self.length
        ))
    }
}

/// Listens until asked to stop, or until the output is closed (`| head`).
pub async fn run(args: &MonitorArgs) -> Result<()> {
    match listen(args).await {
        Err(error)
            if error.downcast_ref().is_some_and(|it: &io::Error| it.kind() == io::ErrorKind::BrokenPipe) =>
        {
            Ok(())
        }
        other => other,
    }
}

async fn listen(args: &MonitorArgs) -> Result<()> {
    let reader = CounterReader::open(&args.bpffs).context(remote::NOT_HERE)?;
    let at_start = reader.read()?;
    let listener = Monitor::open(&args.bpffs, &args.reason, args.sample)?;
    // SAFETY: the listener owns its ring's descriptor and always returns the same one.
    let listener = unsafe { AsyncFd::register_with_interest(listener, Interest::READABLE) };
    let mut listener = listener.context("failed to wait for events")?;
    let mut stop = signal(SignalKind::terminate())?;
    let mut renew = tokio::time::interval(monitor::RENEW);
    let mut asker_left = remote::end_of_stdin(args.until_stdin_ends);
    let mut before = at_start.clone();
    let mut shown = 0;
    // A kgctl that runs this one remotely learns that monitoring has begun.
    if io::stderr().is_terminal() || args.until_stdin_ends {
        eprintln!("kgctl: listening to drops of this node; end with Ctrl-C");
    }
    loop {
        tokio::select! {
            ready = listener.readable_mut() => {
                let mut ready = ready?;
                while let Some(event) = ready.get_inner_mut().next_event() {
                    print_line(&Shown::new(&event).line(args.output)?)?;
                    shown += 1;
                    if args.count == Some(shown) {
                        return summary(&reader, &at_start, args, shown);
                    }
                }
                ready.clear_ready();
            }
            _ = renew.tick() => {
                listener.get_mut().renew()?;
                if args.counters {
                    let now = reader.read()?;
                    grown(&before, &now, args.output)?;
                    before = now;
                }
            }
            _ = tokio::signal::ctrl_c() => break,
            _ = stop.recv() => break,
            _ = &mut asker_left => break,
        }
    }
    summary(&reader, &at_start, args, shown)
}

fn print_line(line: &str) -> Result<()> {
    crate::terminal::print(&format!("{line}\n"))
}

/// Prints the counters that have grown since the last look.
fn grown(before: &Counters, now: &Counters, output: Output) -> Result<()> {
    let difference = |kind, before: &Counters, now: &Counters| {
        let pick = |counters: &Counters| {
            if kind == "drop" { counters.drops.clone() } else { counters.actions.clone() }
        };
        let (before, now) = (pick(before), pick(now));
        now.into_iter()
            .filter_map(|(label, count)| {
                let grown = count.saturating_sub(before.get(label).copied().unwrap_or(0));
                (grown > 0).then_some((label, grown))
            })
            .collect::<Vec<_>>()
    };
    for kind in ["action", "drop"] {
        for (label, packets) in difference(kind, before, now) {
            print_line(&match output {
                Output::Text => format!("counter {kind} {label} +{packets}"),
                Output::Json => {
                    serde_json::json!({ "counter": label, "kind": kind, "packets": packets }).to_string()
                }
            })?;
        }
    }
    Ok(())
}

/// Prints the total number of drops: sampling and a full ring hide some.
fn summary(reader: &CounterReader, start: &Counters, args: &MonitorArgs, shown: u64) -> Result<()> {
    let now = reader.read()?;
    let wanted = |label: &&str| args.reason.is_empty() || args.reason.iter().any(|it| it.label() == *label);
    let sum = |counters: &Counters| -> u64 {
        counters.drops.iter().filter(|(label, _)| wanted(label)).map(|(_, count)| count).sum()
    };
    eprintln!("kgctl: {shown} of {} drops shown", sum(&now).saturating_sub(sum(start)));
    Ok(())
}

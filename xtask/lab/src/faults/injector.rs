//! Drops or delays packets by rules with direction, family, protocol, port and length, which hit the first,
//! every nth or just the nth packet. The kernel's nftables chooses and counts, so that a test can show that
//! the fault really happened; delayed packets wait in a netfilter queue.

use std::{
    collections::VecDeque,
    str::FromStr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use clap::{Args, ValueEnum};
use nix::libc;

use crate::netns::Netns;
use crate::wait;

/// Mark of delayed packets, and number of their queue.
const LATE: u16 = 1107;
/// Time between two polls of the queue.
const TICK: Duration = Duration::from_millis(1);

/// Which packets of the host.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Direction {
    /// Those it receives, for any destination.
    In,
    /// Those it sends itself.
    Out,
}

/// Address family.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

/// Which of the matching packets are dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drop {
    /// The first N packets.
    First(u32),
    /// Every Nth packet, beginning with the first.
    Every(u32),
    /// Only the Nth packet, counted from 1.
    Nth(u32),
}

impl FromStr for Drop {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (which, count) = text.split_once(':').unwrap_or((text, ""));
        match (which, count.parse()) {
            ("first", Ok(count)) => Ok(Self::First(count)),
            ("every", Ok(count)) if count > 0 => Ok(Self::Every(count)),
            ("nth", Ok(count)) if count > 0 => Ok(Self::Nth(count)),
            _ => Err("write first:N, every:N or nth:N".to_owned()),
        }
    }
}

/// What is dropped.
#[derive(Args, Clone, Debug)]
pub struct Rule {
    /// Packets the host receives, or those it sends itself.
    #[arg(long, value_enum)]
    pub direction: Direction,
    /// Family of the outermost header.
    #[arg(long, value_enum, default_value = "v4")]
    pub family: Family,
    /// udp, tcp, icmp, icmpv6 or a number.
    #[arg(long, default_value = "udp")]
    pub protocol: String,
    /// Destination port.
    #[arg(long)]
    pub port: Option<u16>,
    /// Bytes with the IP header: at least.
    #[arg(long, default_value_t = 0)]
    pub shortest: u32,
    /// Bytes with the IP header: at most.
    #[arg(long, default_value_t = 65535)]
    pub longest: u32,
    /// first:N, every:N or nth:N of them.
    #[arg(long)]
    pub drop: Drop,
    /// Instead of dropping those, let them wait for so many milliseconds.
    #[arg(long, value_name = "MILLISECONDS")]
    pub delay: Option<u64>,
}

impl Rule {
    /// Pure: the nftables table.
    fn table(&self) -> String {
        let hook = match self.direction {
            Direction::In => "prerouting",
            Direction::Out => "output",
        };
        let family = match self.family {
            Family::V4 => "ipv4",
            Family::V6 => "ipv6",
        };
        let mut matches = format!("meta nfproto {family} meta l4proto {} ", self.protocol);
        if let Some(port) = self.port {
            matches += &format!("th dport {port} ");
        }
        matches += &format!("meta length {}-{} ", self.shortest, self.longest);
        // The modulus is so large that the generator does not wrap within a test.
        let which = match self.drop {
            Drop::First(count) => format!("numgen inc mod 1000000000 < {count}"),
            Drop::Every(count) => format!("numgen inc mod {count} 0"),
            Drop::Nth(count) => format!("numgen inc mod 1000000000 {}", count.saturating_sub(1)),
        };
        let verdict = match self.delay {
            None => "drop".to_owned(),
            Some(_) => format!("meta mark set {LATE}"),
        };
        format!(
            "table inet fault {{
    counter seen {{ }}
    counter hit {{ }}
    chain fault {{
        type filter hook {hook} priority -400; policy accept;
        {matches}counter name seen {which} counter name hit {verdict}
    }}
}}
"
        )
    }

    /// Puts the rule in force in the namespace until the guard is dropped.
    pub fn inject(&self, netns: &Netns) -> Result<Injected> {
        let late = match self.delay {
            Some(delay) => Some(Late::start(netns, self, Duration::from_millis(delay))?),
            None => None,
        };
        let injected = Injected { netns: netns.clone(), _late: late };
        netns.sh(&format!("nft -f - <<'RULES'\n{}RULES", self.table()))?;
        Ok(injected)
    }
}

/// A rule in force.
pub struct Injected {
    netns: Netns,
    /// Dropped after the table that marks packets.
    _late: Option<Late>,
}

/// Queue in which delayed packets wait.
struct Late {
    netns: Netns,
    rule: String,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<()>>>,
}

impl Late {
    fn start(netns: &Netns, rule: &Rule, delay: Duration) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let (ready, is_ready) = mpsc::channel();
        let ended = Arc::clone(&stop);
        let thread = netns.spawn(move || {
            let mut queue = match open() {
                Ok(queue) => queue,
                Err(error) => return drop(ready.send(Err(error))),
            };
            let _ = ready.send(Ok(()));
            hold(&mut queue, delay, &ended);
        });
        is_ready.recv().context("the queue's thread")?.context("a queue of netfilter's")?;
        // nft's own queues need a kernel that has them; those of iptables are older.
        let program = match rule.family {
            Family::V4 => "iptables-legacy",
            Family::V6 => "ip6tables-legacy",
        };
        let chain = match rule.direction {
            Direction::In => "PREROUTING",
            Direction::Out => "OUTPUT",
        };
        let rule = format!(" {chain} -m mark --mark {LATE} -j NFQUEUE --queue-num {LATE}");
        let late = Self {
            netns: netns.clone(),
            rule: format!("{program} -t raw -D {rule}"),
            stop,
            thread: Some(thread),
        };
        netns.sh(&format!("{program} -t raw -A {rule}"))?;
        Ok(late)
    }
}

impl std::ops::Drop for Late {
    fn drop(&mut self) {
        let _ = self.netns.sh(&self.rule);
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn open() -> std::io::Result<nfq::Queue> {
    let mut queue = nfq::Queue::open()?;
    // An agent started meanwhile would inherit its socket, and nobody could open the queue again.
    // SAFETY: a plain system call, which marks descriptors and closes none.
    let marked = unsafe { libc::syscall(libc::SYS_close_range, 3u32, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
    nix::errno::Errno::result(marked)?;
    queue.bind(LATE)?;
    queue.set_nonblocking(true);
    Ok(queue)
}

/// Releases each packet after its delay, in order; all of them at the end.
fn hold(queue: &mut nfq::Queue, delay: Duration, stop: &AtomicBool) {
    let mut held = VecDeque::new();
    loop {
        while let Ok(packet) = queue.recv() {
            held.push_back((Instant::now() + delay, packet));
        }
        let end = stop.load(Ordering::Relaxed);
        while let Some((_, mut packet)) = held.pop_front_if(|(due, _)| end || *due <= Instant::now()) {
            packet.set_verdict(nfq::Verdict::Accept);
            let _ = queue.verdict(packet);
        }
        if end {
            return;
        }
        wait::pace(TICK);
    }
}

impl Injected {
    /// Packets that matched, and those of them that were dropped or late.
    pub fn hits(&self) -> Result<(u64, u64)> {
        let read = |name: &str| -> Result<u64> {
            let text = self.netns.sh(&format!("nft list counter inet fault {name}"))?;
            let packets = text.split_whitespace().skip_while(|word| *word != "packets").nth(1);
            packets.and_then(|number| number.parse().ok()).with_context(|| text.clone())
        };
        Ok((read("seen")?, read("hit")?))
    }
}

impl std::ops::Drop for Injected {
    fn drop(&mut self) {
        let _ = self.netns.sh("nft delete table inet fault");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_becomes_a_table_with_both_counters() {
        let rule = Rule {
            direction: Direction::Out,
            family: Family::V4,
            protocol: "udp".to_owned(),
            port: Some(51820),
            shortest: 176,
            longest: 176,
            drop: Drop::First(2),
            delay: None,
        };
        let table = rule.table();
        let line = "meta nfproto ipv4 meta l4proto udp th dport 51820 meta length 176-176 counter name seen \
                    numgen inc mod 1000000000 < 2 counter name hit drop";
        assert!(table.contains(line), "{table}");
        assert!(table.contains("hook output"), "{table}");
        let table = Rule { delay: Some(20), ..rule }.table();
        assert!(table.contains("counter name hit meta mark set 1107\n"), "{table}");
    }

    #[test]
    fn which_packets_are_dropped_is_read_from_text() {
        assert_eq!("every:10".parse(), Ok(Drop::Every(10)));
        assert_eq!("nth:3".parse(), Ok(Drop::Nth(3)));
        for text in ["", "first", "every:0", "nth:0", "last:3", "first:-1"] {
            assert!(text.parse::<Drop>().is_err(), "{text}");
        }
    }
}

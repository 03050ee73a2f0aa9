//! Signals that no node of the location has sent: forged, replayed, or on a path where they do not belong.

use std::{
    net::{Ipv4Addr, SocketAddrV4},
    thread::JoinHandle,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};

use super::{
    breaking::{self, Broken, LEADER, MEMBER, STAND_BY},
    state,
};
use crate::{
    Lab, counters,
    netns::Netns,
    network::{Node, Underlay},
    raw_udp::{self, Datagram},
    wait,
};

/// UDP port of signals, shared with VXLAN.
const PORT: u16 = 51_821;
/// Offset of a signal's kind.
const KIND: usize = 2;
/// Kinds: a question that kernels answer, a command that they obey, and a message between gateways.
const ROLL: u8 = 3;
const ANNOUNCE: u8 = 7;
const HELLO: u8 = 11;
/// How often each is sent.
const TIMES: u64 = 50;
/// Longest wait for a signal to be seen.
const PATIENCE: Duration = Duration::from_secs(10);

/// Records until the router has seen a signal of each kind from one host to another.
fn record(
    router: &Netns,
    from: Ipv4Addr,
    to: Ipv4Addr,
    kinds: Vec<u8>,
) -> JoinHandle<Result<Result<Vec<Datagram>>>> {
    let wanted = kinds.clone();
    let is_wanted = move |datagram: &Datagram| {
        let is_signal = datagram.to.port() == PORT && datagram.payload.first() == Some(&0);
        let is_between = *datagram.from.ip() == from && *datagram.to.ip() == to;
        is_signal && is_between && kind(datagram).is_some_and(|kind| wanted.contains(&kind))
    };
    let is_enough = move |seen: &[Datagram]| {
        kinds.iter().all(|wanted| seen.iter().any(|signal| kind(signal) == Some(*wanted)))
    };
    raw_udp::record(router, PATIENCE, is_wanted, is_enough)
}

fn kind(signal: &Datagram) -> Option<u8> {
    signal.payload.get(KIND).copied()
}

fn recorded(listening: JoinHandle<Result<Result<Vec<Datagram>>>>, wanted: u8) -> Result<Vec<u8>> {
    let seen = listening.join().map_err(|_| anyhow::anyhow!("the listening thread"))???;
    let signal = seen.into_iter().find(|signal| kind(signal) == Some(wanted));
    Ok(signal.with_context(|| format!("no signal of kind {wanted} was seen"))?.payload)
}

fn address(node: &Node) -> Result<Ipv4Addr> {
    match node.private {
        std::net::IpAddr::V4(address) => Ok(address),
        std::net::IpAddr::V6(_) => anyhow::bail!("signals are forged on IPv4 only"),
    }
}

/// How many signals the node's kernel or agent has refused for this reason.
fn refused(node: &Node, why: &str) -> Result<u64> {
    let metrics = counters::scrape(&node.netns)?;
    let by_agent = format!("kilo_signals_refused_total{{why=\"{why}\"}}");
    let by_kernel = counters::drops(&metrics).get(why).copied();
    Ok(by_kernel.or_else(|| metrics.get(&by_agent).copied()).unwrap_or(0))
}

/// One attack: its sender, its target and its signal, and why it is refused.
struct Attack<'a> {
    what: &'static str,
    by: &'a Netns,
    from: Ipv4Addr,
    to: &'a Node,
    signal: Vec<u8>,
    why: &'static str,
}

impl Attack<'_> {
    fn run(self) -> Result<String> {
        let (to, before) = (address(self.to)?, refused(self.to, self.why)?);
        let [from, to] = [self.from, to].map(|address| SocketAddrV4::new(address, PORT));
        let signal = Datagram { from, to, payload: self.signal };
        raw_udp::send(self.by, vec![signal; TIMES as usize], Duration::from_millis(2))?;
        let what = format!("{}: {TIMES} are refused as {}", self.what, self.why);
        let count = wait::until(&what, Duration::from_secs(3), || {
            let count = refused(self.to, self.why)? - before;
            Ok(if count >= TIMES { Ok(count) } else { Err(count) })
        })?;
        Ok(format!("{}: {count} as {}", self.what, self.why))
    }
}

pub(super) fn send(lab: &mut Lab) -> Result<Broken> {
    ensure!(lab.network.underlay == Underlay::V4, "signals are forged on IPv4 only");
    let [leader, stand_by, member] = [LEADER, STAND_BY, MEMBER].map(|name| breaking::node(lab, name));
    let (leader, stand_by, member) = (leader?, stand_by?, member?);
    let far = breaking::node(lab, "b1")?;
    let (printer, router) = (lab.network.printer.clone(), lab.network.router.clone());
    let stranger = Ipv4Addr::new(10, 1, 0, 200);
    let [a1, a2] = [address(&leader)?, address(&stand_by)?];
    let listening = [ROLL, HELLO].map(|kind| (kind, record(&router, a2, a1, vec![kind])));
    let [roll, hello] = listening.map(|(kind, listening)| recorded(listening, kind));
    let (roll, hello) = (roll?, hello?);
    let changed = |signal: &[u8], at: usize| {
        let mut signal = signal.to_vec();
        signal[at] ^= 1;
        signal
    };
    let announce = |signal: &[u8]| {
        let mut signal = signal.to_vec();
        signal[KIND] = ANNOUNCE;
        signal
    };
    let words = state::words(lab)?;
    let attack = |what, by, from, to, signal: &[u8], why| {
        Attack { what, by, from, to, signal: signal.to_vec(), why }.run()
    };
    let said = [
        attack("a stranger's", &printer, stranger, &leader, &roll, "unknown_sender")?,
        attack("changed", &printer, a2, &leader, &changed(&roll, 47), "forged_signal")?,
        attack("ANNOUNCE made of another", &printer, a2, &leader, &announce(&roll), "forged_signal")?,
        attack("for somebody else", &router, a2, &member, &roll, "forged_signal")?,
        // Changed in its tag: with any other change it may not be a signal at all. The agent's reason has a
        // name of its own.
        attack("HELLO changed", &printer, a2, &leader, &changed(&hello, hello.len() - 1), "forged")?,
        attack(
            "a member's into the tunnel",
            &member.netns,
            address(&member)?,
            &far,
            &roll,
            "unknown_signal",
        )?,
    ];
    ensure!(state::words(lab)? == words, "somebody uses another leader");
    Ok(Broken::done(said.join(", ")))
}

/// Leadership moves to the other gateway and back; then the signal that made members follow that gateway is
/// replayed.
pub(super) fn repeat(lab: &mut Lab) -> Result<Broken> {
    ensure!(lab.network.underlay == Underlay::V4, "signals are forged on IPv4 only");
    let (stand_by, member) = (breaking::node(lab, STAND_BY)?, breaking::node(lab, MEMBER)?);
    let (a2, a3) = (address(&stand_by)?, address(&member)?);
    let listening = record(&lab.network.router, a2, a3, vec![ANNOUNCE]);
    let mut moved = breaking::leader_moves(lab)?;
    let signal = recorded(listening, ANNOUNCE);
    moved.mend(lab)?;
    let signal = signal?;
    wait::time_passes(
        Duration::from_secs(2),
        "members must have changed leaders before it is written down which they follow",
    );
    let words = state::words(lab)?;
    // The router is on every LAN.
    let by = &lab.network.router;
    let attack = Attack { what: "ANNOUNCE again", by, from: a2, to: &member, signal, why: "stale_signal" };
    let said = attack.run()?;
    ensure!(state::words(lab)? == words, "somebody uses another leader");
    Ok(Broken::done(format!("a2 led, and a1 leads again; {said}")))
}

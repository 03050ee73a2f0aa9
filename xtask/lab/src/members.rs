//! Many members of one location, in one namespace: their Node objects, their private addresses, and what a
//! member's kernel answers with or without its agent. The programs' own code decides what is answered and
//! obeyed (`kilo_common::signal::kernel`, `kilo_common::lead`).

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{IoSlice, IoSliceMut, Read as _},
    net::{Ipv4Addr, SocketAddrV4, UdpSocket},
    os::fd::AsRawFd as _,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant, UNIX_EPOCH},
};

use anyhow::{Context as _, Result, ensure};
use kilo_common::{
    drop_reasons::DropReason,
    lead::{self, Term},
    maps::{HOP_FIRST_NODE, SIGNAL_GATEWAY, SignalKey},
    signal::{
        self, HEADER, Header, KERNEL, Kind, LONGEST, PORT,
        kernel::{self, Answer, KIND_AT, Raw, Taken},
    },
    siphash::{self, Key},
};
use kilo_core::{signal_id, wireguard::SecretKey};
use nix::{
    libc::in_pktinfo,
    sys::socket::{
        ControlMessage, ControlMessageOwned, MsgFlags, SockaddrIn, recvmsg, sendmsg, setsockopt, sockopt,
    },
};
use parking_lot::{Mutex, MutexGuard};

use crate::network::{MEMBERS, MEMBERS_NET, Network, member_address};

/// Members per file of objects: the file backend reads no larger files.
const IN_ONE_FILE: u16 = 250;
/// The members' promise in seconds, the longest that agents believe.
const HEARTBEAT: u64 = 600;
/// When their heartbeats are renewed.
const RENEWED: Duration = Duration::from_secs(500);
/// Longest wait for a signal before the heartbeats' age is checked.
const IDLE: Duration = Duration::from_millis(200);
/// Limits of the kernel's neighbour tables, which all namespaces share: each gateway of the lab knows each
/// member, and Linux has room for 1,024 neighbours unless it is configured otherwise.
const NEIGHBOURS: [(&str, u32); 2] = [("gc_thresh2", 8_192), ("gc_thresh3", 16_384)];

/// A node with an agent, as the members know it.
#[derive(Clone, Copy, Debug)]
struct Neighbour {
    key: kilo_core::wireguard::PublicKey,
    id: u64,
    hop: u32,
    is_gateway: bool,
}

fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// State of one member's kernel.
#[derive(Debug)]
struct Member {
    secret: SecretKey,
    id: u64,
    /// Key of the cookies of this boot.
    boot: Key,
    /// `lead[1]`: the leader it uses.
    word: u64,
    /// When `word` last changed.
    since: Instant,
    keys: BTreeMap<Ipv4Addr, SignalKey>,
}

impl Member {
    fn new() -> Result<Self> {
        let secret = SecretKey::from_bytes(random()?);
        let id = signal_id::node(&secret.public());
        let boot = Key::from_bytes(random()?);
        Ok(Self { secret, id, boot, word: 0, since: Instant::now(), keys: BTreeMap::new() })
    }

    /// Key that signals of a neighbour are checked with, computed once.
    fn key(&mut self, from: Ipv4Addr, neighbour: &Neighbour) -> Option<SignalKey> {
        if let Some(known) = self.keys.get(&from) {
            return Some(*known);
        }
        let Key(key) = signal_id::pair_key(&self.secret, &neighbour.key)?;
        let sender = neighbour.id;
        let cookie = siphash::of_words(self.boot, &[sender]);
        let flags = if neighbour.is_gateway { SIGNAL_GATEWAY } else { 0 };
        let key = SignalKey { key, cookie, sender, hop: neighbour.hop, flags };
        self.keys.insert(from, key);
        Some(key)
    }

    /// Handles a signal as the member's kernel does; `true`: `bytes` is the answer, to be sent back.
    /// `gateway`: the node id of a hop.
    fn take(
        &mut self,
        bytes: &mut [u8],
        key: Option<SignalKey>,
        gateway: impl Fn(u32) -> u64,
    ) -> Result<bool, DropReason> {
        let head = bytes.first_chunk::<HEADER>().ok_or(DropReason::Malformed)?;
        let header = signal::header(head, bytes.len()).map_err(|_| DropReason::Malformed)?;
        let taken = kernel::on_lan(header.kind);
        if taken == Taken::Reflect {
            bytes[KIND_AT] = Kind::Reflected as u8;
            return Ok(true);
        }
        // The rest is for its agent, which is away.
        if taken != Taken::Answer {
            return Ok(false);
        }
        let key = key.ok_or(DropReason::UnknownSignal)?;
        kernel::check_sender(&header, &key)?;
        self.answer(bytes, &header, &key, gateway)?;
        Ok(true)
    }

    fn answer(
        &mut self,
        bytes: &mut [u8],
        header: &Header,
        key: &SignalKey,
        gateway: impl Fn(u32) -> u64,
    ) -> Result<(), DropReason> {
        let bytes: &mut [u8; KERNEL] = bytes.try_into().map_err(|_| DropReason::Malformed)?;
        let (words, _) = bytes.as_chunks::<8>();
        let mut raw: Raw = std::array::from_fn(|at| u64::from_ne_bytes(words[at]));
        kernel::authentic(&raw, key)?;
        let said = if header.kind == Kind::Announce {
            let offered = kernel::announced(&raw, header, key)?;
            if self.word != offered {
                if !lead::obeys(self.word, offered) {
                    return Err(DropReason::StaleSignal);
                }
                (self.word, self.since) = (offered, Instant::now());
            }
            let gateway = header.sender;
            Answer { kind: Kind::Follows, term: header.term, sender: self.id, cookie: 0, gateway }
        } else {
            let (term, gateway) = (lead::term_of(self.word), gateway(u32::from(lead::hop_of(self.word))));
            Answer { kind: Kind::Present, term, sender: self.id, cookie: key.cookie, gateway }
        };
        kernel::answer(&mut raw, said, key);
        for (word, room) in raw.iter().zip(bytes.as_chunks_mut::<8>().0) {
            *room = word.to_ne_bytes();
        }
        Ok(())
    }
}

/// State of all members.
#[derive(Debug)]
struct State {
    cluster: PathBuf,
    /// Nodes with agents, and their private addresses.
    nodes: Vec<(String, Ipv4Addr)>,
    /// Nodes that may lead, Kilo's leader first.
    gateways: Vec<String>,
    neighbours: BTreeMap<Ipv4Addr, Neighbour>,
    members: Vec<Member>,
    answered: u64,
    refused: BTreeMap<&'static str, u64>,
}

impl State {
    /// Hop id of a node, which follows from its index in `nodes`.
    fn hop(&self, name: &str) -> Option<u32> {
        let at = self.nodes.iter().position(|(node, _)| node == name)?;
        Some(HOP_FIRST_NODE + at as u32)
    }

    /// The neighbour with this address, read once from what its agent has published; `None` while that has no
    /// key.
    fn meet(&mut self, from: Ipv4Addr) -> Option<Neighbour> {
        if let Some(known) = self.neighbours.get(&from) {
            return Some(*known);
        }
        let (name, _) = self.nodes.iter().find(|(_, address)| *address == from)?;
        let said = fs::read_to_string(self.cluster.join(format!("{name}.kilo.yaml"))).ok()?;
        let key = said.lines().find_map(|line| line.trim().strip_prefix("kilo.squat.ai/key: "))?;
        let key = key.trim_matches('\'').parse().ok()?;
        let is_gateway = self.gateways.contains(name);
        let neighbour = Neighbour { key, id: signal_id::node(&key), hop: self.hop(name)?, is_gateway };
        self.neighbours.insert(from, neighbour);
        Some(neighbour)
    }

    /// Handles a signal for a member; `true`: `bytes` is the answer, to be sent back.
    fn take(&mut self, from: Ipv4Addr, to: Ipv4Addr, bytes: &mut [u8]) -> bool {
        let neighbour = self.meet(from);
        let neighbours = &self.neighbours;
        let id = |hop| neighbours.values().find(|node| node.hop == hop).map_or(0, |node| node.id);
        let first = MEMBERS_NET.0.to_bits() + 1;
        let at = to.to_bits().checked_sub(first).and_then(|at| usize::try_from(at).ok());
        let Some(member) = at.and_then(|at| self.members.get_mut(at)) else { return false };
        let key = neighbour.and_then(|neighbour| member.key(from, &neighbour));
        match member.take(bytes, key, id) {
            Ok(goes_back) => {
                self.answered += u64::from(goes_back);
                goes_back
            }
            Err(why) => {
                *self.refused.entry(why.label()).or_default() += 1;
                false
            }
        }
    }
}

/// The members, and the thread that answers for them until this is dropped.
#[derive(Debug)]
pub struct Members {
    state: Arc<Mutex<State>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<Result<()>>>>,
    /// The kernel's earlier limits, restored on drop.
    limits: Vec<(PathBuf, String)>,
}

impl Drop for Members {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take()
            && let Ok(Err(error) | Ok(Err(error))) = thread.join()
        {
            eprintln!("lab: members: {error:#}");
        }
        for (path, before) in &self.limits {
            let _ = fs::write(path, before);
        }
    }
}

impl Members {
    /// Writes their objects and begins to answer. `gateways`: nodes that may lead the location, Kilo's leader
    /// first.
    pub fn start(network: &Network, cluster: &Path, gateways: &[&str]) -> Result<Self> {
        let netns = network.members.as_ref().context("a network with members")?;
        let address = |node: &crate::network::Node| match node.private {
            std::net::IpAddr::V4(address) => Some((node.name().to_owned(), address)),
            std::net::IpAddr::V6(_) => None,
        };
        let nodes: Vec<_> = network.nodes.iter().filter_map(address).collect();
        ensure!(nodes.len() == network.nodes.len(), "many members are there with --underlay v4 only");
        let state = State {
            cluster: cluster.to_owned(),
            nodes,
            gateways: gateways.iter().map(|name| (*name).to_owned()).collect(),
            neighbours: BTreeMap::new(),
            members: (0..MEMBERS).map(|_| Member::new()).collect::<Result<_>>()?,
            answered: 0,
            refused: BTreeMap::new(),
        };
        let state = Arc::new(Mutex::new(state));
        let stop = Arc::new(AtomicBool::new(false));
        let mut members = Self { limits: raise_limits()?, state, stop, thread: None };
        members.boot()?;
        write_objects(&members.locked())?;
        let (state, stop) = (Arc::clone(&members.state), Arc::clone(&members.stop));
        members.thread = Some(netns.spawn(move || answer(&state, &stop)));
        Ok(members)
    }

    fn locked(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Reboots all members: they use Kilo's leader, in no term.
    pub fn boot(&self) -> Result<()> {
        let mut state = self.locked();
        let leader = state.gateways.first().and_then(|leader| state.hop(leader)).context("a leader")?;
        for member in &mut state.members {
            (member.boot, member.word) = (Key::from_bytes(random()?), lead::word(Term::NONE, leader as u16));
            // WireGuard's keys are kept, and with them what two nodes share.
            for key in member.keys.values_mut() {
                key.cookie = siphash::of_words(member.boot, &[key.sender]);
            }
        }
        Ok(())
    }

    /// How many members use this gateway, and when the last of them began to.
    pub fn using(&self, gateway: &str) -> (usize, Option<Instant>) {
        let state = self.locked();
        let Some(hop) = state.hop(gateway) else { return (0, None) };
        let uses = |member: &&Member| u32::from(lead::hop_of(member.word)) == hop;
        let users = state.members.iter().filter(uses);
        (users.clone().count(), users.map(|member| member.since).max())
    }

    /// How many signals were answered so far, and how many refused, by reason.
    pub fn counts(&self) -> (u64, BTreeMap<&'static str, u64>) {
        let state = self.locked();
        (state.answered, state.refused.clone())
    }
}

/// Raises limits that are lower than the lab needs; returns the earlier values.
fn raise_limits() -> Result<Vec<(PathBuf, String)>> {
    let mut before = Vec::new();
    for (name, least) in NEIGHBOURS {
        let path = Path::new("/proc/sys/net/ipv4/neigh/default").join(name);
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        if text.trim().parse::<u32>()? < least {
            fs::write(&path, least.to_string()).with_context(|| path.display().to_string())?;
            before.push((path, text));
        }
    }
    Ok(before)
}

/// Writes the Node objects with a heartbeat of this moment.
fn write_objects(state: &State) -> Result<()> {
    let now = UNIX_EPOCH.elapsed()?.as_secs();
    let mut files: BTreeMap<u16, String> = BTreeMap::new();
    for (number, member) in (0..MEMBERS).zip(&state.members) {
        let address = member_address(number);
        let annotations = [
            ("key", member.secret.public().to_string()),
            ("endpoint", format!("{address}:51820")),
            ("internal-ip", format!("{address}/{}", MEMBERS_NET.1)),
            ("wireguard-ip", String::new()),
            ("last-seen", now.to_string()),
            ("heartbeat", format!("{now}/{HEARTBEAT}")),
            ("granularity", "location".to_owned()),
            ("signal", "1".to_owned()),
        ];
        let annotations = annotations.map(|(name, value)| format!("    kilo.squat.ai/{name}: \"{value}\"\n"));
        *files.entry(number / IN_ONE_FILE).or_default() += &format!(
            "---\napiVersion: v1\nkind: Node\nmetadata:\n  name: m{number:04}\n  annotations:\n{annotations}  labels:\n    \
             topology.kubernetes.io/region: site-a\nspec:\n  podCIDR: {cidr}\n  podCIDRs: [\"{cidr}\"]\n",
            annotations = annotations.concat(),
            cidr = pod_cidr(number),
        );
    }
    for (file, text) in files {
        let name = format!("nodes-{file}.yaml");
        let (aside, path) = (state.cluster.with_file_name(&name), state.cluster.join(&name));
        fs::write(&aside, text)?;
        fs::rename(&aside, &path).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

/// Pod CIDR of a member, by its number.
fn pod_cidr(number: u16) -> String {
    let [high, low] = (number * 64).to_be_bytes();
    format!("10.43.{high}.{low}/26")
}

/// Answers in place of the members' kernels.
fn answer(state: &Mutex<State>, stop: &AtomicBool) -> Result<()> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, PORT))?;
    socket.set_read_timeout(Some(IDLE))?;
    setsockopt(&socket, sockopt::Ipv4PacketInfo, &true)?;
    // A kernel answers each signal at once, so none of a burst may be lost.
    setsockopt(&socket, sockopt::RcvBufForce, &(8 << 20))?;
    let (mut buffer, mut space) = ([0; LONGEST], nix::cmsg_space!(in_pktinfo));
    let mut renewed = Instant::now();
    while !stop.load(Ordering::Relaxed) {
        if renewed.elapsed() > RENEWED {
            renewed = Instant::now();
            write_objects(&state.lock())?;
        }
        let mut parts = [IoSliceMut::new(&mut buffer)];
        let received =
            recvmsg::<SockaddrIn>(socket.as_raw_fd(), &mut parts, Some(&mut space), MsgFlags::empty());
        let Ok(received) = received else { continue };
        let info = received.cmsgs()?.find_map(|message| match message {
            ControlMessageOwned::Ipv4PacketInfo(info) => Some(info),
            _ => None,
        });
        let (Some(from), Some(mut info)) = (received.address, info) else { continue };
        let (from, length) = (from.ip(), received.bytes);
        let to = Ipv4Addr::from(info.ipi_addr.s_addr.to_ne_bytes());
        let goes_back = state.lock().take(from, to, &mut buffer[..length]);
        if goes_back {
            // Addresses are exchanged, ports stay.
            (info.ipi_spec_dst, info.ipi_ifindex) = (info.ipi_addr, 0);
            let peer = SockaddrIn::from(SocketAddrV4::new(from, PORT));
            let control = [ControlMessage::Ipv4PacketInfo(&info)];
            let parts = [IoSlice::new(&buffer[..length])];
            // A lost answer is asked for again.
            let _ = sendmsg(socket.as_raw_fd(), &parts, &control, MsgFlags::empty(), Some(&peer));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use kilo_common::signal::{Body, Signal, is_authentic, parse, write};

    use super::*;

    const GATEWAY: [u8; 32] = [7; 32];

    /// A signal of a gateway for this member, with the tag of the key they share.
    fn said(member: &Member, kind: Kind, term: Term, cookie: u64) -> Vec<u8> {
        let gateway = SecretKey::from_bytes(GATEWAY);
        let id = signal_id::node(&gateway.public());
        let key = signal_id::pair_key(&gateway, &member.secret.public());
        let body: Body<Vec<u64>> = Body::Word { cookie, gateway: id };
        let signal = Signal { kind, nonce: 5, term, sender: id, location: 9, body };
        let mut out = [0; LONGEST];
        let length = write(&mut out, &signal, key).unwrap();
        out[..length].to_vec()
    }

    #[test]
    fn a_member_answers_the_roll_and_obeys_later_terms_with_this_boots_cookie() {
        let mut member = Member::new().unwrap();
        let public = SecretKey::from_bytes(GATEWAY).public();
        let id = signal_id::node(&public);
        let neighbour = Neighbour { key: public, id, hop: HOP_FIRST_NODE, is_gateway: true };
        let from = Ipv4Addr::new(10, 1, 0, 11);
        let key = member.key(from, &neighbour);
        let gateway = |_| 77;
        let mut roll = said(&member, Kind::Roll, Term::NONE, 0);
        assert_eq!(member.take(&mut roll, key, gateway), Ok(true));
        assert!(is_authentic(&roll, Key(key.unwrap().key)));
        let present = parse(&roll).unwrap().map_list(|_| Vec::<u64>::new());
        let cookie = key.unwrap().cookie;
        assert_eq!((present.kind, present.sender, present.nonce), (Kind::Present, member.id, 5));
        assert_eq!(present.body, Body::Word { cookie, gateway: 77 });
        let term = Term::NONE.next(signal_id::node(&public));
        let mut stale = said(&member, Kind::Announce, term, cookie ^ 1);
        assert_eq!(member.take(&mut stale, key, gateway), Err(DropReason::StaleSignal));
        let announce = said(&member, Kind::Announce, term, cookie);
        for _ in 0..2 {
            let mut announce = announce.clone();
            assert_eq!(member.take(&mut announce, key, gateway), Ok(true), "repeated, it is answered again");
            assert_eq!(parse(&announce).unwrap().kind, Kind::Follows);
        }
        assert_eq!(member.word, lead::word(term, HOP_FIRST_NODE as u16));
        let mut earlier = said(&member, Kind::Announce, Term::NONE, cookie);
        assert_eq!(member.take(&mut earlier, key, gateway), Err(DropReason::StaleSignal));
        let mut probe = said(&member, Kind::Roll, Term::NONE, 0);
        probe[12] ^= 1;
        assert_eq!(member.take(&mut probe, key, gateway), Err(DropReason::ForgedSignal));
    }
}

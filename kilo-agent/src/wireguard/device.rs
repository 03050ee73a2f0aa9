//! The WireGuard device through `wireguard-control`, kernel and userspace
//! alike: read, compare, change one by one. Peers are never replaced all at
//! once, and a device that is gone is never created silently.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::SocketAddr,
    time::{SystemTime, UNIX_EPOCH},
};

use ipnet::IpNet;
use wireguard_control::{Device as Control, DeviceUpdate, InterfaceName, Key, PeerConfigBuilder};

pub use wireguard_control::Backend;

use super::key::{PublicKey, SecretKey};
use crate::plan::{WireguardPeer, WireguardPlan};

/// Allowed IPs in one entry of a peer: more IPv6 ones than this do not fit one
/// netlink message (8 KB); the kernel merges entries of the same key.
const ALLOWED_IPS_PER_ENTRY: usize = 200;

/// Why the device could not be read or changed; the label is a metric label.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The name is longer than Linux allows, or empty.
    #[error("interface name {0:?}: use 1 to 15 characters")]
    Name(String),
    /// The device is gone.
    #[error("WireGuard device {0} does not exist")]
    Gone(String),
    /// The device refused.
    #[error("WireGuard device {name}: {source}{}", hint(source))]
    Io {
        /// Interface.
        name: String,
        /// What the kernel or the process said.
        #[source]
        source: io::Error,
    },
}

impl DeviceError {
    /// Metric label.
    pub const fn label(&self) -> &'static str {
        match self {
            Self::Name(_) => "wireguard_name",
            Self::Gone(_) => "wireguard_gone",
            Self::Io { .. } => "wireguard",
        }
    }
}

fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => "; kg needs CAP_NET_ADMIN",
        io::ErrorKind::AddrInUse => "; another program uses the port, choose one with --port",
        _ => "",
    }
}

/// What a device holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// Its private key.
    pub private_key: Option<SecretKey>,
    /// Its UDP port.
    pub listen_port: Option<u16>,
    /// Its peers.
    pub peers: BTreeMap<PublicKey, PeerState>,
}

/// What a device knows of one peer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerState {
    /// Prefixes routed to it.
    pub allowed_ips: BTreeSet<IpNet>,
    /// Where it was seen last, or was said to be.
    pub endpoint: Option<SocketAddr>,
    /// Seconds; 0 = off.
    pub persistent_keepalive: u16,
    /// Optional symmetric key.
    pub preshared_key: Option<SecretKey>,
    /// Unix seconds of the last handshake.
    pub last_handshake: Option<u64>,
    /// Bytes received.
    pub received: u64,
    /// Bytes sent.
    pub sent: u64,
}

impl State {
    /// Endpoints of peers that have really shaken hands.
    pub fn seen_endpoints(&self) -> BTreeMap<PublicKey, SocketAddr> {
        let seen = self.peers.iter().filter(|(_, peer)| peer.last_handshake.is_some());
        seen.filter_map(|(key, peer)| Some((*key, peer.endpoint?))).collect()
    }
}

/// One entry for one peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Set the private key.
    PrivateKey(SecretKey),
    /// Listen on another port.
    ListenPort(u16),
    /// Forget a peer.
    Remove(PublicKey),
    /// Add a peer or change what differs.
    Peer {
        /// Which peer.
        key: PublicKey,
        /// Prefixes to add; one that another peer has moves here.
        add: Vec<IpNet>,
        /// Forget all its prefixes first; `add` then holds all that stay.
        replace_allowed_ips: bool,
        /// New endpoint.
        endpoint: Option<SocketAddr>,
        /// New keepalive in seconds.
        persistent_keepalive: Option<u16>,
        /// New symmetric key; `Some(None)` removes it.
        preshared_key: Option<Option<SecretKey>>,
    },
}

/// What must change for the device to be as planned.
pub fn diff(present: &State, plan: &WireguardPlan, private_key: &SecretKey) -> Vec<Change> {
    let mut changes = Vec::new();
    if present.private_key != Some(*private_key) {
        changes.push(Change::PrivateKey(*private_key));
    }
    if present.listen_port != Some(plan.listen_port) {
        changes.push(Change::ListenPort(plan.listen_port));
    }
    changes.extend(
        present.peers.keys().filter(|key| !plan.peers.contains_key(key)).map(|key| Change::Remove(*key)),
    );
    let claimed: BTreeMap<IpNet, PublicKey> = plan
        .peers
        .iter()
        .flat_map(|(key, peer)| peer.allowed_ips.iter().map(|prefix| (*prefix, *key)))
        .collect();
    for (key, wanted) in &plan.peers {
        changes.extend(diff_peer(*key, present.peers.get(key), wanted, &claimed));
    }
    changes
}

fn diff_peer(
    key: PublicKey,
    present: Option<&PeerState>,
    wanted: &WireguardPeer,
    claimed: &BTreeMap<IpNet, PublicKey>,
) -> Option<Change> {
    let empty = PeerState::default();
    let has = present.unwrap_or(&empty);
    // A prefix that another peer is about to claim leaves by itself.
    let replace_allowed_ips =
        has.allowed_ips.difference(&wanted.allowed_ips).any(|prefix| !claimed.contains_key(prefix));
    let add: Vec<IpNet> = if replace_allowed_ips {
        wanted.allowed_ips.iter().copied().collect()
    } else {
        wanted.allowed_ips.difference(&has.allowed_ips).copied().collect()
    };
    // What the device learnt by roaming is newer than what anybody wrote down.
    let keeps_endpoint = wanted.roams && has.endpoint.is_some();
    let endpoint = wanted.endpoint.filter(|endpoint| has.endpoint != Some(*endpoint) && !keeps_endpoint);
    let persistent_keepalive =
        Some(wanted.persistent_keepalive).filter(|seconds| has.persistent_keepalive != *seconds);
    let preshared_key = Some(wanted.preshared_key).filter(|key| has.preshared_key != *key);
    let nothing = add.is_empty()
        && !replace_allowed_ips
        && endpoint.is_none()
        && persistent_keepalive.is_none()
        && preshared_key.is_none();
    if present.is_some() && nothing {
        return None;
    }
    Some(Change::Peer { key, add, replace_allowed_ips, endpoint, persistent_keepalive, preshared_key })
}

/// A handle to one device.
#[derive(Clone, Debug)]
pub struct Device {
    name: InterfaceName,
    backend: Backend,
}

impl Device {
    /// A device that exists, or will.
    ///
    /// # Errors
    /// When the name is no interface name.
    pub fn new(name: &str, backend: Backend) -> Result<Self, DeviceError> {
        let parsed = name.parse().map_err(|_| DeviceError::Name(name.to_owned()))?;
        Ok(Self { name: parsed, backend })
    }

    /// Reads everything, in a thread that may block. A peer that the kernel
    /// splits over several messages is put together again.
    ///
    /// # Errors
    /// When the device is gone or does not answer.
    pub async fn read(&self) -> Result<State, DeviceError> {
        let device = self.clone();
        blocking(&self.name, move || device.read_now()).await
    }

    fn read_now(&self) -> Result<State, DeviceError> {
        self.check_exists()?;
        let control = Control::get(&self.name, self.backend).map_err(|source| self.failed(source))?;
        let secret = |key: &Key| SecretKey::from_bytes(key.0);
        // All zero means that there is none.
        let some = |key: SecretKey| Some(key).filter(|key| *key.as_bytes() != [0; 32]);
        let mut state = State {
            private_key: control.private_key.as_ref().map(secret).and_then(some),
            listen_port: control.listen_port,
            peers: BTreeMap::new(),
        };
        for info in control.peers {
            let peer = state.peers.entry(PublicKey(info.config.public_key.0)).or_default();
            let prefixes =
                info.config.allowed_ips.iter().filter_map(|ip| IpNet::new(ip.address, ip.cidr).ok());
            peer.allowed_ips.extend(prefixes);
            peer.endpoint = peer.endpoint.or(info.config.endpoint);
            peer.persistent_keepalive =
                peer.persistent_keepalive.max(info.config.persistent_keepalive_interval.unwrap_or(0));
            peer.preshared_key =
                peer.preshared_key.or(info.config.preshared_key.as_ref().map(secret).and_then(some));
            peer.last_handshake =
                peer.last_handshake.or(info.stats.last_handshake_time.and_then(unix_seconds));
            peer.received = peer.received.max(info.stats.rx_bytes);
            peer.sent = peer.sent.max(info.stats.tx_bytes);
        }
        Ok(state)
    }

    /// Applies changes, in a thread that may block. No change, no system call.
    ///
    /// # Errors
    /// When the device is gone or refuses; what was applied before stays, and
    /// the next diff shows the rest.
    pub async fn apply(&self, changes: Vec<Change>) -> Result<u64, DeviceError> {
        if changes.is_empty() {
            return Ok(0);
        }
        let device = self.clone();
        blocking(&self.name, move || device.apply_now(&changes)).await
    }

    fn apply_now(&self, changes: &[Change]) -> Result<u64, DeviceError> {
        // wireguard-control would create a missing device without a word.
        self.check_exists()?;
        let mut update = DeviceUpdate::new();
        for change in changes {
            update = match change {
                Change::PrivateKey(key) => update.set_private_key(Key(*key.as_bytes())),
                Change::ListenPort(port) => update.set_listen_port(*port),
                Change::Remove(key) => update.remove_peer_by_key(&Key(key.0)),
                Change::Peer { .. } => entries(change).into_iter().fold(update, DeviceUpdate::add_peer),
            };
        }
        update.apply(&self.name, self.backend).map_err(|source| self.failed(source))?;
        Ok(changes.len() as u64)
    }

    fn check_exists(&self) -> Result<(), DeviceError> {
        match nix::net::if_::if_nametoindex(self.name.as_str_lossy().as_ref()) {
            Ok(_) => Ok(()),
            Err(_) => Err(DeviceError::Gone(self.name.to_string())),
        }
    }

    fn failed(&self, source: io::Error) -> DeviceError {
        DeviceError::Io { name: self.name.to_string(), source }
    }
}

async fn blocking<T: Send + 'static>(
    name: &InterfaceName,
    work: impl FnOnce() -> Result<T, DeviceError> + Send + 'static,
) -> Result<T, DeviceError> {
    let failed = |error: tokio::task::JoinError| DeviceError::Io {
        name: name.to_string(),
        source: io::Error::other(error),
    };
    tokio::task::spawn_blocking(work).await.map_err(failed)?
}

/// The netlink entries of one peer: large lists are split.
fn entries(change: &Change) -> Vec<PeerConfigBuilder> {
    let Change::Peer { key, add, replace_allowed_ips, endpoint, persistent_keepalive, preshared_key } =
        change
    else {
        return Vec::new();
    };
    let with_prefixes = |mut entry: PeerConfigBuilder, prefixes: &[IpNet]| {
        for prefix in prefixes {
            entry = entry.add_allowed_ip(prefix.addr(), prefix.prefix_len());
        }
        entry
    };
    let mut chunks = add.chunks(ALLOWED_IPS_PER_ENTRY);
    let mut first = with_prefixes(PeerConfigBuilder::new(&Key(key.0)), chunks.next().unwrap_or_default());
    if *replace_allowed_ips {
        first = first.replace_allowed_ips();
    }
    if let Some(endpoint) = endpoint {
        first = first.set_endpoint(*endpoint);
    }
    if let Some(seconds) = persistent_keepalive {
        first = first.set_persistent_keepalive_interval(*seconds);
    }
    match preshared_key {
        Some(Some(key)) => first = first.set_preshared_key(Key(*key.as_bytes())),
        Some(None) => first = first.unset_preshared_key(),
        None => {}
    }
    let rest = chunks.map(|prefixes| with_prefixes(PeerConfigBuilder::new(&Key(key.0)), prefixes));
    std::iter::once(first).chain(rest).collect()
}

fn unix_seconds(time: SystemTime) -> Option<u64> {
    time.duration_since(UNIX_EPOCH).ok().map(|since| since.as_secs()).filter(|&seconds| seconds > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KEY: SecretKey = SecretKey::from_bytes([5; 32]);

    /// What a kernel does with the changes.
    fn simulate(state: &mut State, changes: &[Change]) {
        for change in changes {
            match change {
                Change::PrivateKey(key) => state.private_key = Some(*key),
                Change::ListenPort(port) => state.listen_port = Some(*port),
                Change::Remove(key) => {
                    state.peers.remove(key);
                }
                Change::Peer {
                    key,
                    add,
                    replace_allowed_ips,
                    endpoint,
                    persistent_keepalive,
                    preshared_key,
                } => {
                    for (other, peer) in &mut state.peers {
                        if other != key {
                            peer.allowed_ips.retain(|prefix| !add.contains(prefix));
                        }
                    }
                    let peer = state.peers.entry(*key).or_default();
                    if *replace_allowed_ips {
                        peer.allowed_ips.clear();
                    }
                    peer.allowed_ips.extend(add);
                    peer.endpoint = endpoint.or(peer.endpoint);
                    peer.persistent_keepalive = persistent_keepalive.unwrap_or(peer.persistent_keepalive);
                    peer.preshared_key = preshared_key.unwrap_or(peer.preshared_key);
                }
            }
        }
    }

    prop_compose! {
        /// Up to 12 prefixes shared out among up to 4 peers.
        fn plan()(owners in prop::collection::vec(0u8..5, 12), port in 1u16..9,
                  keepalives in prop::collection::vec(0u16..3, 4), roams in any::<[bool; 4]>(),
                  endpoints in prop::collection::vec(prop::option::of(1u8..4), 4)) -> WireguardPlan {
            let mut plan = WireguardPlan { listen_port: port, ..WireguardPlan::default() };
            for (n, owner) in owners.iter().enumerate() {
                let index = usize::from(*owner);
                if index >= 4 { continue; }
                let peer = plan.peers.entry(PublicKey([*owner; 32])).or_default();
                peer.allowed_ips.insert(format!("10.0.{n}.0/24").parse().unwrap());
                peer.persistent_keepalive = keepalives[index];
                peer.roams = roams[index];
                peer.endpoint = endpoints[index].map(|host| SocketAddr::from(([192, 0, 2, host], 51820)));
            }
            plan
        }
    }

    proptest! {
        #[test]
        fn applying_the_diff_reaches_the_plan_and_the_next_diff_is_empty(first in plan(), second in plan()) {
            let mut state = State::default();
            let changes = diff(&state, &first, &KEY);
            simulate(&mut state, &changes);
            prop_assert_eq!(diff(&state, &first, &KEY), vec![]);
            let changes = diff(&state, &second, &KEY);
            simulate(&mut state, &changes);
            prop_assert_eq!(diff(&state, &second, &KEY), vec![]);
            for (key, peer) in &second.peers {
                prop_assert_eq!(&state.peers[key].allowed_ips, &peer.allowed_ips);
            }
            prop_assert_eq!(state.peers.len(), second.peers.len());
        }
    }

    #[test]
    fn a_prefix_that_moves_is_only_claimed_by_its_new_owner() {
        let prefix: IpNet = "10.0.0.0/24".parse().unwrap();
        let kept: IpNet = "10.0.1.0/24".parse().unwrap();
        let peer = |prefixes: &[IpNet]| WireguardPeer {
            allowed_ips: prefixes.iter().copied().collect(),
            ..WireguardPeer::default()
        };
        let (a, b) = (PublicKey([1; 32]), PublicKey([2; 32]));
        let mut state = State::default();
        let plan = |first: WireguardPeer, second: WireguardPeer| WireguardPlan {
            listen_port: 1,
            peers: BTreeMap::from([(a, first), (b, second)]),
        };
        let changes = diff(&state, &plan(peer(&[prefix, kept]), peer(&[])), &KEY);
        simulate(&mut state, &changes);
        let changes = diff(&state, &plan(peer(&[kept]), peer(&[prefix])), &KEY);
        assert_eq!(changes.len(), 1, "{changes:?}");
        assert!(matches!(&changes[0], Change::Peer { key, replace_allowed_ips: false, .. } if *key == b));
    }

    #[test]
    fn an_endpoint_learnt_by_roaming_stays() {
        let key = PublicKey([1; 32]);
        let endpoint = |host| Some(SocketAddr::from(([192, 0, 2, host], 1)));
        let wanted = |roams| WireguardPlan {
            listen_port: 1,
            peers: BTreeMap::from([(
                key,
                WireguardPeer { endpoint: endpoint(1), roams, ..WireguardPeer::default() },
            )]),
        };
        let mut state = State { private_key: Some(KEY), listen_port: Some(1), ..State::default() };
        state.peers.insert(key, PeerState { endpoint: endpoint(2), ..PeerState::default() });
        assert_eq!(diff(&state, &wanted(true), &KEY), vec![]);
        assert_eq!(diff(&state, &wanted(false), &KEY).len(), 1);
    }

    #[test]
    fn a_large_peer_is_split_over_entries() {
        let add: Vec<IpNet> =
            (0..450u32).map(|n| format!("10.{}.{}.0/24", n / 250, n % 250).parse().unwrap()).collect();
        let change = Change::Peer {
            key: PublicKey([1; 32]),
            add,
            replace_allowed_ips: true,
            endpoint: None,
            persistent_keepalive: None,
            preshared_key: None,
        };
        assert_eq!(entries(&change).len(), 3);
    }
}

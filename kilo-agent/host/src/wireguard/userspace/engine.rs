//! The WireGuard engine behind the socket: applies requests of the configuration protocol to gotatun's
//! device, with the kernel's semantics.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::{Ipv4Addr, Ipv6Addr, UdpSocket},
    time::SystemTime,
};

use gotatun::{
    device::{self, Device, configure::DeviceWrite},
    x25519,
};
use ipnet::IpNet;

use super::{tun::Tun, udp::Udp};
use kilo_core::wireguard::{
    DeviceState, PeerState,
    key::{PublicKey, SecretKey},
    uapi::{SetPeer, SetRequest, encode_state},
};

type Transports = (Udp, Tun, Tun);

/// A running userspace device.
pub(super) struct Engine {
    device: Device<Transports>,
    holdings: Holdings,
}

impl Engine {
    pub(super) async fn start(tun: Tun) -> Result<Self, device::Error> {
        let device = device::build().with_udp(Udp::new()).with_ip(tun).build().await?;
        Ok(Self { device, holdings: Holdings::default() })
    }

    pub(super) async fn stop(self) {
        self.device.stop().await;
    }

    /// The answer to `get=1` without `errno`.
    pub(super) async fn get(&self) -> String {
        let (state, fwmark) = self
            .device
            .read(async |device| {
                let state = DeviceState {
                    private_key: device.private_key().map(|key| SecretKey::from_bytes(key.to_bytes())),
                    listen_port: device.listen_port(),
                    peers: device.peers().await.into_iter().map(peer_state).collect(),
                };
                (state, device.fwmark().unwrap_or(0))
            })
            .await;
        encode_state(&state, fwmark, SystemTime::now())
    }

    /// Applies `set=1`; returns its error number, 0 = done.
    pub(super) async fn set(&mut self, request: SetRequest) -> i32 {
        let port_before = self.device.read(async |device| device.listen_port()).await;
        let port = request.listen_port;
        // gotatun closes the old socket before it opens the new one: check the port first.
        if let Some(port) = port.filter(|port| *port != 0 && *port != port_before)
            && let Err(error) = probe(port)
        {
            return errno(&error);
        }
        let holdings = &mut self.holdings;
        match self.device.write(async move |device| apply(device, holdings, request).await).await {
            Ok(result) => result.err().unwrap_or(0),
            Err(error) => {
                // The port was taken in between: go back to the old one.
                if port.is_some_and(|port| port != port_before) {
                    let _ = self.device.set_listen_port(port_before).await;
                }
                match error {
                    device::Error::Bind(source, _) | device::Error::IoError(source) => errno(&source),
                    _ => nix::libc::EIO,
                }
            }
        }
    }
}

fn probe(port: u16) -> io::Result<()> {
    let any6 = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, port));
    match any6 {
        // No IPv6 here.
        Err(error) if error.kind() != io::ErrorKind::AddrInUse => {
            UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port)).map(|_| ())
        }
        other => other.map(|_| ()),
    }
}

fn errno(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(nix::libc::EIO)
}

fn peer_state(found: device::configure::PeerStats) -> (PublicKey, PeerState) {
    let (peer, stats) = (found.peer, found.stats);
    let state = PeerState {
        allowed_ips: peer
            .allowed_ips
            .iter()
            .filter_map(|net| IpNet::new(net.ip(), net.prefix()).ok())
            .map(|net| net.trunc())
            .collect(),
        endpoint: peer.endpoint,
        persistent_keepalive: peer.keepalive.unwrap_or(0),
        preshared_key: peer.preshared_key.map(SecretKey::from_bytes),
        handshake_age: stats.last_handshake,
        rx_bytes: stats.rx_bytes as u64,
        tx_bytes: stats.tx_bytes as u64,
    };
    (PublicKey(peer.public_key.to_bytes()), state)
}

async fn apply(
    device: &mut DeviceWrite<'_, Transports>,
    holdings: &mut Holdings,
    request: SetRequest,
) -> Result<(), i32> {
    // gotatun panics on a peer, or an open port, without a private key.
    let needs_key = !request.peers.is_empty() || request.listen_port.is_some();
    if needs_key && request.private_key.is_none() && device.private_key().is_none() {
        return Err(nix::libc::ENOKEY);
    }
    if let Some(mark) = request.fwmark {
        device.set_fwmark(mark).map_err(|_| nix::libc::EPERM)?;
    }
    if let Some(port) = request.listen_port {
        device.set_listen_port(port);
    }
    if let Some(key) = request.private_key {
        device.set_private_key(x25519::StaticSecret::from(*key.as_bytes())).await;
    }
    if request.replace_peers {
        device.clear_peers();
        *holdings = Holdings::default();
    }
    for peer in request.peers {
        apply_peer(device, holdings, peer).await;
    }
    Ok(())
}

/// Which peer has which allowed IPs: gotatun keeps a prefix that moved listed with its former peer, which
/// would take it back at its own next change.
#[derive(Default)]
struct Holdings {
    prefixes: BTreeMap<PublicKey, BTreeSet<IpNet>>,
    holders: BTreeMap<IpNet, PublicKey>,
}

impl Holdings {
    fn remove(&mut self, key: &PublicKey) {
        for net in self.prefixes.remove(key).unwrap_or_default() {
            self.holders.remove(&net);
        }
    }

    /// Gives `key` these prefixes and no others; returns the peers they were taken from.
    fn set(&mut self, key: PublicKey, nets: BTreeSet<IpNet>) -> BTreeSet<PublicKey> {
        for net in self.prefixes.remove(&key).unwrap_or_default() {
            self.holders.remove(&net);
        }
        let mut losers = BTreeSet::new();
        for net in &nets {
            let Some(loser) = self.holders.insert(*net, key) else { continue };
            if let Some(held) = self.prefixes.get_mut(&loser) {
                held.remove(net);
            }
            losers.insert(loser);
        }
        self.prefixes.insert(key, nets);
        losers
    }
}

async fn apply_peer(device: &mut DeviceWrite<'_, Transports>, holdings: &mut Holdings, set: SetPeer) {
    let key = set.public_key;
    let public = x25519::PublicKey::from(key.0);
    if set.remove {
        device.remove_peer(&public).await;
        holdings.remove(&key);
        return;
    }
    let held = holdings.prefixes.get(&key).cloned();
    if set.update_only && held.is_none() {
        return;
    }
    let mut nets = held.clone().unwrap_or_default();
    if set.replace_allowed_ips {
        nets.clear();
    }
    nets.extend(&set.allowed_ips);
    for net in &set.drop_allowed_ips {
        nets.remove(net);
    }
    for loser in holdings.set(key, nets.clone()) {
        let public = x25519::PublicKey::from(loser.0);
        let left = holdings.prefixes.get(&loser).map(|nets| with_allowed_ips(public, nets));
        device.modify_peer(&public, |peer| replace_allowed_ips(peer, left)).await;
    }
    let preshared = set.preshared_key.map(|secret| secret.map(|secret| *secret.as_bytes()));
    let keepalive = set.persistent_keepalive.map(|seconds| (seconds != 0).then_some(seconds));
    let Some(held) = held else {
        // Added as a whole: each change of an existing peer walks the allowed IPs of all.
        let mut peer = with_allowed_ips(public, &nets);
        peer.endpoint = set.endpoint;
        peer.preshared_key = preshared.flatten();
        peer.keepalive = keepalive.flatten();
        device.add_peer(peer);
        return;
    };
    device
        .modify_peer(&public, |peer| {
            if nets != held {
                replace_allowed_ips(peer, Some(with_allowed_ips(public, &nets)));
            }
            if let Some(endpoint) = set.endpoint {
                peer.set_endpoint(Some(endpoint));
            }
            if let Some(keepalive) = keepalive {
                peer.set_keepalive(keepalive);
            }
            if let Some(preshared) = preshared {
                peer.set_preshared_key(preshared);
            }
        })
        .await;
}

/// A peer with these prefixes, because gotatun does not export its type of them.
fn with_allowed_ips(key: x25519::PublicKey, nets: &BTreeSet<IpNet>) -> device::Peer {
    let mut peer = device::Peer::new(key);
    peer.allowed_ips = nets.iter().filter_map(|net| net.to_string().parse().ok()).collect();
    peer
}

/// Replaces a peer's allowed IPs under the device's lock: no packet sees half of the list. The peer's session
/// continues.
fn replace_allowed_ips(peer: &mut device::configure::PeerMut, wanted: Option<device::Peer>) {
    peer.clear_allowed_ips();
    peer.add_allowed_ips(wanted.into_iter().flat_map(|wanted| wanted.allowed_ips));
}

//! Triggers handshakes with peers that are new, or have a new endpoint, and stay silent.
//!
//! WireGuard starts a handshake when there is something to send, and tries again after 5 s (`REKEY_TIMEOUT`)
//! when the other end did not answer; a session that only one end still has is abandoned after 15 s. Both
//! happen when a leader moves: the new one sends before the others know its key. A moment later, peers that
//! are still silent are therefore made to handshake: by an empty datagram where this end has not tried yet,
//! otherwise by removing the peer and adding it again, because nothing else makes WireGuard forget that it
//! waits. Two ends that start at the same moment refuse each other's responses and wait, too, so the end with
//! the smaller key goes first.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsString,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket},
    time::{Duration, Instant},
};

use ipnet::IpNet;
use nix::sys::socket::{setsockopt, sockopt};

use super::{Device, WireguardError};
use kilo_core::wireguard::WireguardPeer;
use kilo_core::wireguard::{Change, DeviceState, PeerState, diff::PeerUpdate, key::PublicKey};

/// The discard port (RFC 863): no listener is needed.
const DISCARD: u16 = 9;
/// Delay before the end with the smaller key acts; ordinary traffic has usually triggered the handshake by
/// then.
const FIRST: Duration = Duration::from_millis(300);
/// Delay before the other end acts: an end that had to answer has done so by then.
const SECOND: Duration = Duration::from_millis(800);
/// Pause before peers are tried again whose device could not be read or written.
const AGAIN: Duration = Duration::from_secs(5);
/// How long after it was configured a peer is nudged at the latest: packets of its own or to it start the handshake, too.
const LONGEST: Duration = Duration::from_secs(30);

/// A peer that has just got an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PendingPeer {
    key: PublicKey,
    /// Its address inside the WireGuard subnet.
    address: IpAddr,
    since: Instant,
    due: Instant,
}

/// Peers that are watched until they have had a handshake or been nudged once.
#[derive(Debug, Default)]
pub struct HandshakeNudge {
    waiting: Vec<PendingPeer>,
}

impl HandshakeNudge {
    /// Watches the peers with an address inside the WireGuard subnet to which
    /// these changes give an endpoint, because they are new or have moved.
    /// Others are left alone: it is not known what their addresses lead to.
    pub fn watch(
        &mut self,
        changes: &[Change],
        peers: &BTreeMap<PublicKey, WireguardPeer>,
        own: PublicKey,
        subnet: &IpNet,
        now: Instant,
    ) {
        for change in changes {
            let Change::SetPeer(key, PeerUpdate { endpoint: Some(_), .. }) = change else { continue };
            let nets = peers.get(key).into_iter().flat_map(|peer| &peer.allowed_ips);
            let mut hosts = nets.filter(|net| net.prefix_len() == net.max_prefix_len()).map(IpNet::addr);
            let Some(address) = hosts.find(|address| subnet.contains(address)) else { continue };
            let due = now + if own < *key { FIRST } else { SECOND };
            self.waiting.retain(|peer| peer.key != *key);
            self.waiting.push(PendingPeer { key: *key, address, since: now, due });
        }
    }

    /// When [`Self::nudge`] is to be called next; `None` when no peer is watched.
    pub fn due(&self) -> Option<Instant> {
        self.waiting.iter().map(|peer| peer.due).min()
    }

    /// Leaves the peers that are due for later, but not for ever: nothing is known about the device now.
    pub fn postpone(&mut self, now: Instant) {
        self.waiting.retain(|peer| now.saturating_duration_since(peer.since) < LONGEST);
        self.waiting.iter_mut().filter(|peer| peer.due <= now).for_each(|peer| peer.due = now + AGAIN);
    }

    /// Nudges the peers that are due and have had no handshake; returns the number
    /// of requests to the device.
    ///
    /// # Errors
    /// When the device cannot be read or written; it may lack a peer then. The peers are due again later.
    pub async fn nudge(&mut self, device: &Device, now: Instant) -> Result<usize, WireguardError> {
        let due: Vec<_> = self.waiting.iter().filter(|peer| peer.due <= now).copied().collect();
        self.postpone(now);
        let (renewed, addresses) = silent(&due, &device.read().await?, now);
        let writes = device.apply(&renewed).await?;
        let nudged: BTreeSet<PublicKey> = due.iter().map(|peer| peer.key).collect();
        self.waiting.retain(|peer| !nudged.contains(&peer.key));
        if let Err(error) = send_empty_datagrams(device.name(), &addresses) {
            // If a peer cannot be reached now, its own packets or packets to it start the handshake.
            tracing::debug!(%error, "failed to send a datagram to a new peer");
        }
        Ok(writes)
    }
}

/// Pure: which peers to recreate, and which to send a datagram, so that they handshake. These are the peers
/// without a handshake since they are watched; those that this end has tried in vain are recreated.
fn silent(pending: &[PendingPeer], state: &DeviceState, now: Instant) -> (Vec<Change>, Vec<IpAddr>) {
    let (mut renewed, mut addresses) = (Vec::new(), Vec::new());
    for PendingPeer { key, address, since, .. } in pending {
        let Some(peer) = state.peers.get(key) else { continue };
        if peer.handshake_age.is_some_and(|age| age <= now.duration_since(*since)) {
            continue;
        }
        if peer.handshake_age.is_none() && peer.tx_bytes > 0 {
            renewed.extend([Change::RemovePeer(*key), Change::SetPeer(*key, whole(peer))]);
        }
        addresses.push(*address);
    }
    (renewed, addresses)
}

/// The whole configuration of a peer, for a device that does not have it.
fn whole(peer: &PeerState) -> PeerUpdate {
    PeerUpdate {
        endpoint: peer.endpoint,
        persistent_keepalive: Some(peer.persistent_keepalive),
        preshared_key: Some(peer.preshared_key),
        add_allowed_ips: peer.allowed_ips.iter().copied().collect(),
    }
}

/// Sends an empty datagram to each address, never by another interface than
/// this one.
fn send_empty_datagrams(interface: &str, addresses: &[IpAddr]) -> io::Result<()> {
    let mut sent = Ok(());
    for v6 in [false, true] {
        let mut addresses = addresses.iter().filter(|address| address.is_ipv6() == v6).peekable();
        if addresses.peek().is_none() {
            continue;
        }
        let any: IpAddr = if v6 { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() };
        let socket = UdpSocket::bind((any, 0))?;
        setsockopt(&socket, sockopt::BindToDevice, &OsString::from(interface))?;
        socket.set_nonblocking(true)?;
        for address in addresses {
            sent = sent.and(socket.send_to(&[], (*address, DISCARD)).map(drop));
        }
    }
    sent
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{net::Rtnl, wireguard::Backend};

    fn key(n: u8) -> PublicKey {
        PublicKey([n; 32])
    }

    fn peer(allowed_ips: &[&str]) -> WireguardPeer {
        WireguardPeer {
            allowed_ips: allowed_ips.iter().map(|net| net.parse().unwrap()).collect(),
            ..WireguardPeer::default()
        }
    }

    #[test]
    fn nodes_that_get_an_endpoint_are_watched_and_the_smaller_key_goes_first() {
        let peers = BTreeMap::from([
            (key(1), peer(&["10.1.0.11/32", "10.4.0.1/32", "10.42.1.0/24"])),
            (key(2), peer(&["10.4.0.2/32"])),
            (key(3), peer(&["10.4.0.3/32"])),
            (key(4), peer(&["10.5.0.1/32"])),
            (key(9), peer(&["10.4.0.9/32"])),
        ]);
        let endpoint = Some("192.0.2.1:51820".parse().unwrap());
        let moved = PeerUpdate { endpoint, ..PeerUpdate::default() };
        let changes = [
            Change::SetPeer(key(1), moved.clone()),
            Change::SetPeer(key(2), PeerUpdate { persistent_keepalive: Some(5), ..PeerUpdate::default() }),
            Change::RemovePeer(key(3)),
            Change::SetPeer(key(4), moved.clone()),
            Change::SetPeer(key(9), moved),
        ];
        let (mut handshake_nudge, now) = (HandshakeNudge::default(), Instant::now());
        assert_eq!(handshake_nudge.due(), None);
        handshake_nudge.watch(&changes, &peers, key(5), &"10.4.0.0/16".parse().unwrap(), now);
        let pending = |n: u8, pause| PendingPeer {
            key: key(n),
            address: [10, 4, 0, n].into(),
            since: now,
            due: now + pause,
        };
        assert_eq!(handshake_nudge.waiting, [pending(1, SECOND), pending(9, FIRST)]);
        assert_eq!(handshake_nudge.due(), Some(now + FIRST));
    }

    #[test]
    fn who_has_been_tried_in_vain_begins_anew_and_who_has_shaken_hands_is_left_alone() {
        let now = Instant::now();
        let pending: Vec<PendingPeer> = (1..6)
            .map(|n| PendingPeer { key: key(n), address: [10, 4, 0, n].into(), since: now - FIRST, due: now })
            .collect();
        let state = |age: Option<u64>, tx_bytes| PeerState {
            handshake_age: age.map(Duration::from_secs),
            tx_bytes,
            allowed_ips: ["10.42.1.0/24".parse().unwrap()].into(),
            ..PeerState::default()
        };
        let peers = [
            (key(1), state(None, 0)),
            (key(2), state(None, 148)),
            (key(3), state(Some(0), 148)),
            (key(4), state(Some(90), 9_000)),
        ];
        let state = DeviceState { peers: peers.into(), ..DeviceState::default() };
        let (renewed, addresses) = silent(&pending, &state, now);
        assert_eq!(addresses, [1, 2, 4].map(|n| IpAddr::from([10, 4, 0, n])), "the fifth is gone again");
        let mut after = state.clone();
        after.take(&renewed);
        assert_eq!(renewed.len(), 2);
        assert_eq!(after.peers[&key(2)], PeerState { tx_bytes: 0, ..state.peers[&key(2)].clone() });
    }

    #[tokio::test]
    async fn who_is_due_while_the_device_cannot_be_read_is_due_again_later() {
        let now = Instant::now();
        let pending =
            |n, due| PendingPeer { key: key(n), address: [10, 4, 0, n].into(), since: now - FIRST, due };
        let mut handshake_nudge = HandshakeNudge { waiting: vec![pending(1, now), pending(2, now + FIRST)] };
        // No process answers for it.
        let device = Device::open(&Rtnl::new().unwrap(), "lo", Backend::Userspace).await.unwrap();
        assert!(handshake_nudge.nudge(&device, now).await.is_err());
        assert_eq!(handshake_nudge.waiting, [pending(1, now + AGAIN), pending(2, now + FIRST)]);
        handshake_nudge.postpone(now + AGAIN);
        assert_eq!(handshake_nudge.due(), Some(now + 2 * AGAIN));
        handshake_nudge.postpone(now + LONGEST + FIRST);
        assert_eq!(handshake_nudge.due(), None, "not for ever");
    }

    #[test]
    fn an_interface_that_is_not_there_is_an_error() {
        assert!(send_empty_datagrams("kilo-none", &[]).is_ok());
        assert!(send_empty_datagrams("kilo-none", &["10.4.0.1".parse().unwrap()]).is_err());
    }
}

//! The state of a WireGuard device: what it has, and what it should have.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    time::Duration,
};

use ipnet::IpNet;

use super::key::{PublicKey, SecretKey};
use crate::flat_map::FlatSet;

/// What the device has.
/// ```
/// use kilo_core::wireguard::{DeviceState, PublicKey, SecretKey, WireguardPeer, WireguardPlan, diff};
///
/// let peer = WireguardPeer { endpoint: "192.0.2.1:51820".parse().ok(), ..WireguardPeer::default() };
/// let plan = WireguardPlan { listen_port: 51820, peers: [(PublicKey([1; 32]), peer)].into() };
/// let (mut device, key) = (DeviceState::default(), SecretKey::from_bytes([7; 32]));
/// let changes = diff(&device, &plan, &key);
/// assert_eq!(changes.len(), 3, "key, port and peer");
/// device.take(&changes);
/// assert_eq!(diff(&device, &plan, &key), []);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceState {
    /// Private key, `None` on a fresh device.
    pub private_key: Option<SecretKey>,
    /// UDP port, host byte order.
    pub listen_port: u16,
    /// Peers by key.
    pub peers: BTreeMap<PublicKey, PeerState>,
}

impl DeviceState {
    /// Endpoints of peers that have completed a handshake.
    pub fn seen_endpoints(&self) -> BTreeMap<PublicKey, SocketAddr> {
        let seen = self.peers.iter().filter(|(_, peer)| peer.handshake_age.is_some());
        seen.filter_map(|(key, peer)| Some((*key, peer.endpoint?))).collect()
    }
}

/// What the device has of one peer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerState {
    /// Prefixes routed to it, from which it may send.
    pub allowed_ips: BTreeSet<IpNet>,
    /// Where it was last seen, or what was set.
    pub endpoint: Option<SocketAddr>,
    /// Seconds between keepalives; 0: off.
    pub persistent_keepalive: u16,
    /// Optional symmetric key.
    pub preshared_key: Option<SecretKey>,
    /// Time since the last handshake; `None` = there was none.
    pub handshake_age: Option<Duration>,
    /// Bytes received from it, as WireGuard counts (with headers).
    pub rx_bytes: u64,
    /// Bytes sent to it, counted in the same way.
    pub tx_bytes: u64,
}

/// Desired WireGuard peers. The private key stays with the actuator.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WireguardPlan {
    /// UDP port, host byte order.
    pub listen_port: u16,
    /// Peers by key.
    pub peers: BTreeMap<PublicKey, WireguardPeer>,
}

/// The desired state of a peer; its key is the one it has in [`WireguardPlan::peers`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WireguardPeer {
    /// Prefixes routed to it, without host bits; a prefix is claimed by one peer only.
    pub allowed_ips: FlatSet<IpNet>,
    /// Resolved endpoint; `None` leaves what the device has.
    pub endpoint: Option<SocketAddr>,
    /// True when the peer may roam (it has a keepalive): an endpoint the
    /// device learnt by itself is not overwritten.
    pub roams: bool,
    /// Seconds between keepalives; 0: off.
    pub persistent_keepalive: u16,
    /// Optional symmetric key.
    pub preshared_key: Option<SecretKey>,
}

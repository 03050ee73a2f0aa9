//! A first packet to peers that are new to the device.
//!
//! When a location gets another leader, or a leader another key, its first
//! handshake usually comes before the other side knows the key, is ignored, and
//! is repeated by WireGuard after 5 seconds only. So each side sends something
//! as soon as it knows the other: whoever learns last starts a handshake that
//! succeeds.

use std::{
    collections::BTreeMap,
    io,
    net::{IpAddr, UdpSocket},
};

use nix::sys::socket::{setsockopt, sockopt::BindToDevice};

use super::{diff::Change, key::PublicKey};
use crate::plan::WireguardPeer;

/// More new peers at once than this: the host itself is new, and shakes hands
/// with those it has packets for.
const MOST: usize = 32;
/// The discard service (RFC 863): nobody answers.
const DISCARD: u16 = 9;

/// Pure: an address of each peer that `changes` add to a device that had
/// `present`, if it can be reached from here.
pub fn newcomers<T>(
    present: &BTreeMap<PublicKey, T>,
    planned: &BTreeMap<PublicKey, WireguardPeer>,
    changes: &[Change],
) -> Vec<IpAddr> {
    let added = changes.iter().filter_map(|change| match change {
        Change::SetPeer(key, _) if !present.contains_key(key) => planned.get(key),
        _ => None,
    });
    let addresses: Vec<_> = added
        .filter(|peer| peer.endpoint.is_some())
        .filter_map(|peer| {
            peer.allowed_ips.iter().find(|prefix| prefix.prefix_len() == prefix.max_prefix_len())
        })
        .map(|prefix| prefix.addr())
        .collect();
    if addresses.len() > MOST { Vec::new() } else { addresses }
}

/// Sends an empty datagram to each through the device.
///
/// # Errors
/// When a socket cannot be had; what cannot be sent is no error.
pub fn greet(interface: &str, addresses: &[IpAddr]) -> io::Result<()> {
    for address in addresses {
        let any: IpAddr = if address.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
        let socket = UdpSocket::bind((any, 0))?;
        setsockopt(&socket, BindToDevice, &interface.into())?;
        socket.set_nonblocking(true)?;
        if let Err(error) = socket.send_to(&[], (*address, DISCARD)) {
            tracing::debug!(%address, %error, "greeting a new peer");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wireguard::diff::PeerUpdate;

    fn key(number: u8) -> PublicKey {
        PublicKey([number; 32])
    }

    fn peer(prefixes: &[&str], endpoint: bool) -> WireguardPeer {
        WireguardPeer {
            allowed_ips: prefixes.iter().map(|text| text.parse().unwrap()).collect(),
            endpoint: endpoint.then(|| "192.0.2.1:51820".parse().unwrap()),
            ..WireguardPeer::default()
        }
    }

    #[test]
    fn new_peers_with_an_endpoint_are_greeted_and_others_left_alone() {
        let planned = BTreeMap::from([
            (key(1), peer(&["10.42.1.0/24", "10.4.0.1/32"], true)),
            (key(2), peer(&["10.4.0.2/32"], true)),
            (key(3), peer(&["10.4.0.3/32"], false)),
            (key(4), peer(&["10.5.0.0/24"], true)),
        ]);
        let changes: Vec<_> =
            (1..5).map(|number| Change::SetPeer(key(number), PeerUpdate::default())).collect();
        let present = BTreeMap::from([(key(2), ())]);
        assert_eq!(newcomers(&present, &planned, &changes), [IpAddr::from([10, 4, 0, 1])]);
        assert!(newcomers(&present, &planned, &[Change::RemovePeer(key(1))]).is_empty());
    }

    #[test]
    fn a_new_host_does_not_call_everybody() {
        let planned: BTreeMap<_, _> =
            (0..200).map(|number| (key(number), peer(&[&format!("10.4.0.{number}/32")], true))).collect();
        let changes: Vec<_> =
            planned.keys().map(|key| Change::SetPeer(*key, PeerUpdate::default())).collect();
        assert!(newcomers(&BTreeMap::<_, ()>::new(), &planned, &changes).is_empty());
    }
}

//! WireGuard configurations of nodes and VPN peers, as `kgctl showconf` prints them.

use std::net::SocketAddr;

use crate::{
    topology::{Mesh, Peer, Segment},
    wireguard::{
        Endpoint, PublicKey, SecretKey,
        conf::{Conf, PeerSection},
    },
};

fn segment_section(mesh: &Mesh, segment: &Segment, keepalive: u32) -> PeerSection {
    PeerSection {
        allowed_ips: segment.all_allowed_ips().collect(),
        endpoint: seen(mesh, segment.persistent_keepalive, &segment.key)
            .or_else(|| Some(segment.endpoint.clone())),
        persistent_keepalive: keepalive,
        preshared_key: None,
        public_key: segment.key,
    }
}

fn peer_section(mesh: &Mesh, peer: &Peer, keepalive: u32) -> PeerSection {
    PeerSection {
        allowed_ips: peer.allowed_ips.clone(),
        endpoint: seen(mesh, peer.persistent_keepalive, &peer.public_key).or_else(|| peer.endpoint.clone()),
        persistent_keepalive: keepalive,
        preshared_key: peer.preshared_key,
        public_key: peer.public_key,
    }
}

/// Where somebody last saw a peer behind NAT.
fn seen(mesh: &Mesh, keepalive: u32, key: &PublicKey) -> Option<Endpoint> {
    if keepalive == 0 {
        return None;
    }
    mesh.discovered.get(key).map(|addr: &SocketAddr| (*addr).into())
}

/// Configuration of the device of a node in segment `own`; its peers are the other
/// locations and the VPN peers.
pub fn of_node(mesh: &Mesh, own: usize, key: SecretKey, port: u16, keepalive: u32) -> Conf {
    let segments = mesh.segments.iter().enumerate().filter(|(index, _)| *index != own);
    Conf {
        interface: Some((key, port)),
        peers: segments
            .map(|(_, segment)| segment_section(mesh, segment, keepalive))
            .chain(mesh.peers.iter().map(|peer| peer_section(mesh, peer, keepalive)))
            .collect(),
    }
}

/// A location as another cluster configures it: without the prefixes that are
/// offered to this mesh only, at the leader's own endpoint, without keepalive.
pub fn as_peer(segment: &Segment) -> PeerSection {
    PeerSection {
        allowed_ips: segment.allowed_ips.clone(),
        endpoint: Some(segment.endpoint.clone()),
        persistent_keepalive: 0,
        preshared_key: None,
        public_key: segment.key,
    }
}

/// Configuration of a VPN peer, with every location and the other peers; `None`:
/// there is no such peer.
pub fn of_peer(mesh: &Mesh, name: &str) -> Option<Conf> {
    let own = mesh.peers.iter().find(|peer| peer.name == name)?;
    let keepalive = own.persistent_keepalive;
    let with_key = |section: PeerSection| PeerSection { preshared_key: own.preshared_key, ..section };
    let others = mesh.peers.iter().filter(|peer| peer.name != name);
    Some(Conf {
        interface: None,
        peers: mesh
            .segments
            .iter()
            .map(|segment| with_key(segment_section(mesh, segment, keepalive)))
            .chain(
                others.map(|peer| PeerSection { preshared_key: None, ..peer_section(mesh, peer, keepalive) }),
            )
            .collect(),
    })
}

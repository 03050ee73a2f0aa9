//! Identities in signals: ids of nodes and locations, control addresses, and the key two nodes share.

use std::net::Ipv6Addr;

use hkdf::Hkdf;
use ipnet::IpNet;
use kilo_common::{
    signal::control::{self, CONTROL_PREFIX},
    siphash,
};
use sha2::{Digest as _, Sha256};
use x25519_dalek::{PublicKey as DalekPublic, StaticSecret};

use crate::wireguard::key::{PublicKey, SecretKey};

pub use kilo_common::lead::NodeId;

/// Length in bits of the network of control addresses, [`CONTROL_PREFIX`].
pub const CONTROL_LENGTH: u8 = 48;

/// Purpose of the keys, mixed into each, so that none is good for anything else.
const PURPOSE: &[u8] = b"kilo signal 1";

fn first_eight(hash: &[u8]) -> u64 {
    hash.first_chunk().map_or(0, |bytes| u64::from_be_bytes(*bytes))
}

/// A node's id.
pub fn node(key: &PublicKey) -> NodeId {
    first_eight(&Sha256::digest(key.0))
}

/// A location's id: the first 8 bytes of SHA-256 of its name.
pub fn location(name: &str) -> u64 {
    first_eight(&Sha256::digest(name))
}

/// A gateway's control address, which is used inside tunnels and is on no interface.
pub fn control_address(key: &PublicKey) -> Ipv6Addr {
    control::control_address(&Sha256::digest(key.0).into()).into()
}

/// Whether a prefix lies in the network of control addresses: no object may have it, because whoever holds a
/// gateway's address speaks as that gateway. A prefix that holds the network, such as `::/0`, takes nothing
/// from a gateway's longer prefix.
pub fn is_control(prefix: &IpNet) -> bool {
    match prefix {
        IpNet::V6(net) => {
            net.prefix_len() >= CONTROL_LENGTH && net.addr().octets().starts_with(&CONTROL_PREFIX)
        }
        IpNet::V4(_) => false,
    }
}

/// Why [`is_control`] is refused, for people.
pub const CONTROL_REFUSED: &str = "fd6b:696c:6f00::/48 holds the addresses that gateways sign failover with";

/// The key of signals between two nodes, the same on both sides; `None` when the public key is one that gives
/// everybody the same secret.
pub fn pair_key(own: &SecretKey, other: &PublicKey) -> Option<siphash::Key> {
    let shared = StaticSecret::from(*own.as_bytes()).diffie_hellman(&DalekPublic::from(other.0));
    if !shared.was_contributory() {
        return None;
    }
    let (mut first, mut second) = (own.public(), *other);
    if second < first {
        std::mem::swap(&mut first, &mut second);
    }
    let mut key = [0; 16];
    let info = [PURPOSE, &first.0, &second.0];
    Hkdf::<Sha256>::new(None, shared.as_bytes()).expand_multi_info(&info, &mut key).ok()?;
    Some(siphash::Key::from_bytes(key))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    fn secret(n: u8) -> SecretKey {
        SecretKey::from_bytes([n; 32])
    }

    #[test]
    fn both_sides_have_one_key_and_every_pair_another() {
        let (a, b, c) = (secret(1), secret(2), secret(3));
        let ab = pair_key(&a, &b.public()).unwrap();
        assert_eq!(pair_key(&b, &a.public()), Some(ab));
        assert_ne!(pair_key(&a, &c.public()), Some(ab));
        assert_ne!(pair_key(&b, &c.public()), Some(ab));
        // A public key of small order would give an attacker the secret.
        assert_eq!(pair_key(&a, &PublicKey([0; 32])), None);
    }

    /// RFC 5869's first test vector, which shows that the library does what its name says; and a key of ours,
    /// on which nodes of different versions must agree.
    #[test]
    fn the_key_is_hkdfs() {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let salt: Vec<u8> = (0..13).collect();
        let info: Vec<u8> = (0xf0..=0xf9).collect();
        let mut out = [0; 42];
        Hkdf::<Sha256>::new(Some(&salt), &[0x0b; 22]).expand(&info, &mut out).unwrap();
        assert_eq!(
            hex(&out),
            "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"
        );
    }

    #[test]
    fn a_control_address_is_of_its_network_and_its_key() {
        let (one, other) = (secret(1).public(), secret(2).public());
        let address = control_address(&one);
        assert_eq!(address.octets()[..6], CONTROL_PREFIX);
        assert!(is_control(&IpNet::from(std::net::IpAddr::V6(address))));
        for (prefix, wanted) in [
            ("fd6b:696c:6f00::/48", true),
            ("fd6b:696c:6f00:7::/64", true),
            ("fd6b:696c:6f00::/47", false),
            ("::/0", false),
            ("fd6b:696c:6f01::/48", false),
            ("10.0.0.0/8", false),
        ] {
            assert_eq!(is_control(&prefix.parse().unwrap()), wanted, "{prefix}");
        }
        assert_ne!(address, control_address(&other));
        // The id is the beginning of the same hash.
        assert_eq!(address.octets()[6..14], node(&one).to_be_bytes());
        assert_ne!(location("location:a"), location("location:b"));
    }
}

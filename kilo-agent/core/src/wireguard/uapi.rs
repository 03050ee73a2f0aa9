//! WireGuard's configuration protocol for userspace implementations
//! (<https://www.wireguard.com/xplatform/#configuration-protocol>), both sides.

use std::{
    fmt::Write as _,
    net::SocketAddr,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use ipnet::IpNet;

use super::key::{PublicKey, SecretKey, repeatable};
use crate::wireguard::{DeviceState, PeerState};

/// What `set=1` asks of the device; `None` leaves a setting as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SetRequest {
    /// New private key; `Some` of zeros is refused here.
    pub private_key: Option<SecretKey>,
    /// New UDP port, host byte order.
    pub listen_port: Option<u16>,
    /// New mark of outer packets; 0 = none.
    pub fwmark: Option<u32>,
    /// Remove all peers first.
    pub replace_peers: bool,
    /// Peers, in order; a key may occur several times.
    pub peers: Vec<SetPeer>,
}

/// A peer's part of `set=1`; `None` leaves a setting as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetPeer {
    /// Public key of the peer.
    pub public_key: PublicKey,
    /// Remove it.
    pub remove: bool,
    /// Do nothing unless it exists.
    pub update_only: bool,
    /// Remove its allowed IPs first.
    pub replace_allowed_ips: bool,
    /// New pre-shared key; `Some(None)` removes it.
    pub preshared_key: Option<Option<SecretKey>>,
    /// New endpoint: where the device sends until the peer is seen elsewhere.
    pub endpoint: Option<SocketAddr>,
    /// New keepalive in seconds; 0 = off.
    pub persistent_keepalive: Option<u16>,
    /// Allowed IPs that it gets; a peer that has one of them loses it.
    pub allowed_ips: Vec<IpNet>,
    /// Allowed IPs it gives up (`allowed_ip=-…`, newer protocol).
    pub drop_allowed_ips: Vec<IpNet>,
}

impl SetRequest {
    /// Splits this into requests of at most `most` peers each, in order: a process
    /// that is busy with ten thousand forwards nothing meanwhile.
    pub fn parts(mut self, most: usize) -> Vec<Self> {
        let mut peers = std::mem::take(&mut self.peers).into_iter();
        self.peers.extend(peers.by_ref().take(most));
        let mut parts = vec![self];
        loop {
            let next: Vec<_> = peers.by_ref().take(most).collect();
            if next.is_empty() {
                return parts;
            }
            parts.push(Self { peers: next, ..Self::default() });
        }
    }
}

impl SetPeer {
    /// Changes nothing about that peer, but creates it when it is missing.
    pub fn new(public_key: PublicKey) -> Self {
        Self {
            public_key,
            remove: false,
            update_only: false,
            replace_allowed_ips: false,
            preshared_key: None,
            endpoint: None,
            persistent_keepalive: None,
            allowed_ips: Vec::new(),
            drop_allowed_ips: Vec::new(),
        }
    }
}

/// Text that is not this protocol. The line itself may hold a key and is not kept.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid line for key `{key}` in WireGuard's configuration protocol")]
pub struct Malformed {
    /// The text before the `=`, if it is a name.
    pub key: String,
}

fn malformed(key: &str) -> Malformed {
    Malformed { key: repeatable(key).to_owned() }
}

fn unhex(key: &str, text: &str) -> Result<[u8; 32], Malformed> {
    let mut bytes = [0; 32];
    hex::decode_to_slice(text, &mut bytes).map_err(|_| malformed(key))?;
    Ok(bytes)
}

fn secret(key: &str, text: &str) -> Result<Option<SecretKey>, Malformed> {
    let bytes = unhex(key, text)?;
    Ok((bytes != [0; 32]).then(|| SecretKey::from_bytes(bytes)))
}

fn parse<T: std::str::FromStr>(key: &str, text: &str) -> Result<T, Malformed> {
    text.parse().map_err(|_| malformed(key))
}

fn truth(key: &str, text: &str) -> Result<bool, Malformed> {
    if text == "true" { Ok(true) } else { Err(malformed(key)) }
}

impl SetRequest {
    /// The request's text, with the empty line that ends it.
    pub fn encode(&self) -> String {
        let mut text = String::from("set=1\n");
        let mut line = |key: &str, value: &dyn std::fmt::Display| {
            let _ = writeln!(text, "{key}={value}");
        };
        if let Some(key) = &self.private_key {
            line("private_key", &hex::encode(key.as_bytes()));
        }
        if let Some(port) = self.listen_port {
            line("listen_port", &port);
        }
        if let Some(mark) = self.fwmark {
            line("fwmark", &mark);
        }
        if self.replace_peers {
            line("replace_peers", &true);
        }
        for peer in &self.peers {
            line("public_key", &hex::encode(peer.public_key.0));
            if peer.remove {
                line("remove", &true);
            }
            if peer.update_only {
                line("update_only", &true);
            }
            if let Some(key) = &peer.preshared_key {
                line("preshared_key", &hex::encode(key.as_ref().map_or(&[0; 32], SecretKey::as_bytes)));
            }
            if let Some(endpoint) = peer.endpoint {
                line("endpoint", &endpoint);
            }
            if let Some(seconds) = peer.persistent_keepalive {
                line("persistent_keepalive_interval", &seconds);
            }
            if peer.replace_allowed_ips {
                line("replace_allowed_ips", &true);
            }
            for net in &peer.allowed_ips {
                line("allowed_ip", net);
            }
            for net in &peer.drop_allowed_ips {
                line("allowed_ip", &format_args!("-{net}"));
            }
        }
        text.push('\n');
        text
    }

    /// The lines after `set=1`.
    pub fn decode<'a>(lines: impl Iterator<Item = &'a str>) -> Result<Self, Malformed> {
        let mut request = Self::default();
        for line in lines.filter(|line| !line.is_empty()) {
            let (key, value) = line.split_once('=').ok_or_else(|| malformed(line))?;
            match (key, request.peers.last_mut()) {
                ("public_key", _) => request.peers.push(SetPeer::new(PublicKey(unhex(key, value)?))),
                ("private_key", None) => {
                    request.private_key = Some(secret(key, value)?.ok_or_else(|| malformed(key))?);
                }
                ("listen_port", None) => request.listen_port = Some(parse(key, value)?),
                ("fwmark", None) => {
                    request.fwmark = Some(if value.is_empty() { 0 } else { parse(key, value)? });
                }
                ("replace_peers", None) => request.replace_peers = truth(key, value)?,
                ("remove", Some(peer)) => peer.remove = truth(key, value)?,
                ("update_only", Some(peer)) => peer.update_only = truth(key, value)?,
                ("replace_allowed_ips", Some(peer)) => peer.replace_allowed_ips = truth(key, value)?,
                ("preshared_key", Some(peer)) => peer.preshared_key = Some(secret(key, value)?),
                ("endpoint", Some(peer)) => peer.endpoint = Some(parse(key, value)?),
                ("persistent_keepalive_interval", Some(peer)) => {
                    peer.persistent_keepalive = Some(parse(key, value)?);
                }
                ("allowed_ip", Some(peer)) => match value.strip_prefix('-') {
                    Some(value) => peer.drop_allowed_ips.push(parse::<IpNet>(key, value)?.trunc()),
                    None => peer.allowed_ips.push(parse::<IpNet>(key, value)?.trunc()),
                },
                ("protocol_version", Some(_)) if value == "1" => {}
                _ => return Err(malformed(key)),
            }
        }
        Ok(request)
    }
}

/// The answer to `get=1`, without `errno` and the empty line.
pub fn encode_state(state: &DeviceState, fwmark: u32, now: SystemTime) -> String {
    let mut text = String::new();
    let mut line = |key: &str, value: &dyn std::fmt::Display| {
        let _ = writeln!(text, "{key}={value}");
    };
    if let Some(key) = &state.private_key {
        line("private_key", &hex::encode(key.as_bytes()));
    }
    line("listen_port", &state.listen_port);
    if fwmark != 0 {
        line("fwmark", &fwmark);
    }
    for (key, peer) in &state.peers {
        line("public_key", &hex::encode(key.0));
        line(
            "preshared_key",
            &hex::encode(peer.preshared_key.as_ref().map_or(&[0; 32], SecretKey::as_bytes)),
        );
        line("protocol_version", &1);
        if let Some(endpoint) = peer.endpoint {
            line("endpoint", &endpoint);
        }
        let handshake = peer
            .handshake_age
            .and_then(|age| now.checked_sub(age)?.duration_since(UNIX_EPOCH).ok())
            .unwrap_or_default();
        line("last_handshake_time_sec", &handshake.as_secs());
        line("last_handshake_time_nsec", &handshake.subsec_nanos());
        line("tx_bytes", &peer.tx_bytes);
        line("rx_bytes", &peer.rx_bytes);
        line("persistent_keepalive_interval", &peer.persistent_keepalive);
        for net in &peer.allowed_ips {
            line("allowed_ip", net);
        }
    }
    text
}

/// Reads the answer to `get=1`; the second value is `errno`.
pub fn decode_state(text: &str, now: SystemTime) -> Result<(DeviceState, i32), Malformed> {
    let mut state = DeviceState::default();
    let mut current: Option<PublicKey> = None;
    let mut seconds = 0;
    let mut errno = 0;
    for line in text.lines().filter(|line| !line.is_empty()) {
        let (key, value) = line.split_once('=').ok_or_else(|| malformed(line))?;
        let peer: Option<&mut PeerState> = current.and_then(|current| state.peers.get_mut(&current));
        match (key, peer) {
            ("public_key", _) => {
                let key = PublicKey(unhex(key, value)?);
                state.peers.entry(key).or_default();
                current = Some(key);
            }
            ("private_key", _) => state.private_key = secret(key, value)?,
            ("listen_port", _) => state.listen_port = parse(key, value)?,
            ("errno", _) => errno = parse(key, value)?,
            ("preshared_key", Some(peer)) => peer.preshared_key = secret(key, value)?,
            ("endpoint", Some(peer)) => peer.endpoint = Some(parse(key, value)?),
            ("last_handshake_time_sec", Some(_)) => seconds = parse(key, value)?,
            ("last_handshake_time_nsec", Some(peer)) => {
                let since_epoch = Duration::new(seconds, parse::<u32>(key, value)?.min(999_999_999));
                peer.handshake_age = age_of(UNIX_EPOCH.checked_add(since_epoch), now);
            }
            ("tx_bytes", Some(peer)) => peer.tx_bytes = parse(key, value)?,
            ("rx_bytes", Some(peer)) => peer.rx_bytes = parse(key, value)?,
            ("persistent_keepalive_interval", Some(peer)) => peer.persistent_keepalive = parse(key, value)?,
            ("allowed_ip", Some(peer)) => {
                peer.allowed_ips.insert(parse::<IpNet>(key, value)?.trunc());
            }
            // Other implementations add lines of their own.
            _ => {}
        }
    }
    Ok((state, errno))
}

/// Time since a handshake; a clock set back makes it young, the epoch means none.
pub fn age_of(handshake: Option<SystemTime>, now: SystemTime) -> Option<Duration> {
    handshake.filter(|time| *time > UNIX_EPOCH).map(|time| now.duration_since(time).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn full() -> SetRequest {
        SetRequest {
            private_key: Some(SecretKey::from_bytes([1; 32])),
            listen_port: Some(51820),
            fwmark: Some(7),
            replace_peers: true,
            peers: vec![
                SetPeer {
                    update_only: true,
                    replace_allowed_ips: true,
                    preshared_key: Some(Some(SecretKey::from_bytes([2; 32]))),
                    endpoint: Some("[2001:db8::1]:51820".parse().unwrap()),
                    persistent_keepalive: Some(25),
                    allowed_ips: vec!["10.0.0.0/8".parse().unwrap(), "fd00::/16".parse().unwrap()],
                    drop_allowed_ips: vec!["10.1.0.0/16".parse().unwrap()],
                    ..SetPeer::new(PublicKey([3; 32]))
                },
                SetPeer { remove: true, preshared_key: Some(None), ..SetPeer::new(PublicKey([4; 32])) },
            ],
        }
    }

    #[test]
    fn a_request_in_parts_keeps_its_head_first_and_all_peers_in_order() {
        let peers: Vec<_> = (0..5).map(|n| SetPeer::new(PublicKey([n; 32]))).collect();
        let whole = SetRequest { listen_port: Some(1), replace_peers: true, peers, ..SetRequest::default() };
        let parts = whole.clone().parts(2);
        let sizes: Vec<_> = parts.iter().map(|part| part.peers.len()).collect();
        assert_eq!(sizes, [2, 2, 1]);
        assert!(parts[0].replace_peers && parts[0].listen_port == Some(1));
        assert!(!parts[1].replace_peers && parts[1].listen_port.is_none());
        assert_eq!(parts.into_iter().flat_map(|part| part.peers).collect::<Vec<_>>(), whole.peers);
        assert_eq!(SetRequest::default().parts(2), [SetRequest::default()]);
    }

    #[test]
    fn a_request_survives_the_round_trip() {
        let text = full().encode();
        assert!(text.starts_with("set=1\n") && text.ends_with("\n\n"));
        assert_eq!(SetRequest::decode(text.lines().skip(1)), Ok(full()));
    }

    #[test]
    fn bad_lines_are_refused_without_showing_their_value() {
        let key = "00".repeat(32);
        for lines in [
            "private_key=zz",
            "listen_port=65536",
            "allowed_ip=10.0.0.0/8",
            &format!("public_key={key}\nallowed_ip=10.0.0.0/33"),
            &format!("public_key={key}\nlisten_port=1"),
            &format!("private_key={key}"),
            "unknown=1",
            "no equals sign",
            &format!("private_key: {key}"),
            &format!("preshared_key{key}={key}"),
        ] {
            let error = SetRequest::decode(lines.lines()).unwrap_err();
            assert!(!error.to_string().contains(&key[..8]), "{error}");
        }
    }

    #[test]
    fn a_state_survives_the_round_trip() {
        let now = UNIX_EPOCH + Duration::from_secs(1_700_000_000);
        let peer = PeerState {
            allowed_ips: ["10.0.0.0/8", "fd00::/16"].map(|text| text.parse().unwrap()).into(),
            endpoint: Some("192.0.2.1:9".parse().unwrap()),
            persistent_keepalive: 10,
            preshared_key: Some(SecretKey::from_bytes([2; 32])),
            handshake_age: Some(Duration::from_millis(1500)),
            rx_bytes: 7,
            tx_bytes: 8,
        };
        let state = DeviceState {
            private_key: Some(SecretKey::from_bytes([1; 32])),
            listen_port: 5,
            peers: [(PublicKey([3; 32]), peer), (PublicKey([4; 32]), PeerState::default())].into(),
        };
        let text = encode_state(&state, 0, now) + "errno=0\n\n";
        assert_eq!(decode_state(&text, now), Ok((state, 0)));
    }
}

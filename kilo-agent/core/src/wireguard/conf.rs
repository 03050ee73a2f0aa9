//! WireGuard's INI configuration, as `wg setconf` reads it and Kilo writes it.

use std::{fmt::Write as _, str::FromStr};

use ipnet::IpNet;

use super::{
    Endpoint,
    key::{PublicKey, SecretKey, repeatable},
};

/// A `[Peer]` section of a file for `wg setconf`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerSection {
    /// `AllowedIPs`: prefixes that the peer may send from and is sent to.
    pub allowed_ips: Vec<IpNet>,
    /// Host and port, if known.
    pub endpoint: Option<Endpoint>,
    /// `PersistentKeepalive` in seconds; 0 = off.
    pub persistent_keepalive: u32,
    /// `PresharedKey`; `None`: there is none.
    pub preshared_key: Option<SecretKey>,
    /// `PublicKey` of the peer.
    pub public_key: PublicKey,
}

/// A whole configuration.
/// ```
/// use kilo_core::wireguard::conf::Conf;
///
/// let text = "[Peer]\nPublicKey = AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=\nAllowedIPs = 10.42.1.0/24\n";
/// let conf: Conf = text.parse()?;
/// assert_eq!(conf.peers[0].allowed_ips, ["10.42.1.0/24".parse().unwrap()]);
/// assert_eq!(conf.to_ini().parse::<Conf>()?, conf);
/// # Ok::<(), kilo_core::wireguard::conf::InvalidConf>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Conf {
    /// `[Interface]`: private key and port, unless only peers are described.
    pub interface: Option<(SecretKey, u16)>,
    /// `[Peer]` sections.
    pub peers: Vec<PeerSection>,
}

impl Conf {
    /// The text, keys in Kilo's order.
    pub fn to_ini(&self) -> String {
        let mut sections = Vec::new();
        if let Some((key, port)) = &self.interface {
            sections.push(format!("[Interface]\nPrivateKey = {}\nListenPort = {port}\n", key.reveal()));
        }
        sections.extend(self.peers.iter().map(PeerSection::to_ini));
        sections.join("\n")
    }
}

/// A line that is not understood; then nothing of the text is used. Shows no values: they may be secret.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line} of the WireGuard configuration: {what}")]
pub struct InvalidConf {
    /// Counted from 1; for a missing key, the line of its section.
    pub line: usize,
    /// What is wrong with the line, without its value.
    pub what: String,
}

/// Section being read, with the line it starts at.
enum Section {
    Interface { line: usize, key: Option<SecretKey>, port: u16 },
    Peer { line: usize, section: PeerSection, key: Option<PublicKey> },
}

impl FromStr for Conf {
    type Err = InvalidConf;

    /// Reads what `wg showconf` and [`Conf::to_ini`] write: sections and keys
    /// in any case, `#` comments, `AllowedIPs` once or repeated.
    fn from_str(text: &str) -> Result<Self, InvalidConf> {
        let mut conf = Self::default();
        let mut section: Option<Section> = None;
        for (index, line) in text.lines().enumerate() {
            let line_number = index + 1;
            let invalid = |what: &str| InvalidConf { line: line_number, what: what.to_owned() };
            let line = line.split('#').next().unwrap_or_default().trim();
            if line.is_empty() {
                continue;
            }
            let started = match line.to_ascii_lowercase().as_str() {
                "[interface]" => Some(Section::Interface { line: line_number, key: None, port: 0 }),
                "[peer]" => Some(Section::new_peer(line_number)),
                _ => None,
            };
            if started.is_some() {
                conf.push(std::mem::replace(&mut section, started))?;
                continue;
            }
            let (name, value) =
                line.split_once('=').ok_or_else(|| invalid("neither a section nor `key = value`"))?;
            let section = section.as_mut().ok_or_else(|| invalid("a key before the first section"))?;
            let name = name.trim();
            section
                .set(name, value.trim())
                .ok_or_else(|| invalid(&format!("{} is not understood", repeatable(name))))?;
        }
        conf.push(section)?;
        Ok(conf)
    }
}

impl Conf {
    fn push(&mut self, section: Option<Section>) -> Result<(), InvalidConf> {
        let missing = |line, what: &str| InvalidConf { line, what: format!("{what} is missing") };
        match section {
            None => {}
            Some(Section::Interface { line, .. }) if self.interface.is_some() => {
                return Err(InvalidConf { line, what: "a second [Interface] section".to_owned() });
            }
            Some(Section::Interface { line, key, port }) => {
                self.interface = Some((key.ok_or_else(|| missing(line, "PrivateKey"))?, port));
            }
            Some(Section::Peer { line, section, key }) => {
                let public_key = key.ok_or_else(|| missing(line, "PublicKey"))?;
                self.peers.push(PeerSection { public_key, ..section });
            }
        }
        Ok(())
    }
}

impl Section {
    fn new_peer(line: usize) -> Self {
        let section = PeerSection {
            allowed_ips: Vec::new(),
            endpoint: None,
            persistent_keepalive: 0,
            preshared_key: None,
            public_key: PublicKey([0; 32]),
        };
        Self::Peer { line, section, key: None }
    }

    /// `None` for an unknown key or a value that does not parse.
    fn set(&mut self, name: &str, value: &str) -> Option<()> {
        match (self, name.to_ascii_lowercase().as_str()) {
            (Self::Interface { key, .. }, "privatekey") => *key = Some(value.parse().ok()?),
            (Self::Interface { port, .. }, "listenport") => *port = value.parse().ok()?,
            (Self::Peer { key, .. }, "publickey") => *key = Some(value.parse().ok()?),
            (Self::Peer { section, .. }, "presharedkey") => section.preshared_key = Some(value.parse().ok()?),
            (Self::Peer { section, .. }, "endpoint") => section.endpoint = Some(value.parse().ok()?),
            (Self::Peer { section, .. }, "persistentkeepalive") => {
                section.persistent_keepalive = if value == "off" { 0 } else { value.parse().ok()? };
            }
            (Self::Peer { section, .. }, "allowedips") => {
                for item in value.split(',').map(str::trim).filter(|item| !item.is_empty()) {
                    let prefix = item.parse::<IpNet>().ok();
                    let address = || item.parse::<std::net::IpAddr>().ok().map(IpNet::from);
                    section.allowed_ips.push(prefix.or_else(address)?);
                }
            }
            _ => return None,
        }
        Some(())
    }
}

impl PeerSection {
    fn to_ini(&self) -> String {
        let mut text = "[Peer]\n".to_owned();
        let list: Vec<_> = self.allowed_ips.iter().map(ToString::to_string).collect();
        // Writing to a String does not fail.
        let _ = writeln!(text, "AllowedIPs = {}", list.join(", "));
        if let Some(endpoint) = &self.endpoint {
            let _ = writeln!(text, "Endpoint = {endpoint}");
        }
        let _ = writeln!(text, "PersistentKeepalive = {}", self.persistent_keepalive);
        if let Some(key) = &self.preshared_key {
            let _ = writeln!(text, "PresharedKey = {}", key.reveal());
        }
        let _ = writeln!(text, "PublicKey = {}", self.public_key);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wireguard::EndpointHost;
    use proptest::prelude::*;

    fn endpoint() -> impl Strategy<Value = Endpoint> {
        let name = "[a-z][a-z0-9]{0,8}(\\.[a-z]{1,5}){0,2}";
        let host = prop_oneof![
            any::<std::net::IpAddr>().prop_map(EndpointHost::Ip),
            name.prop_map(EndpointHost::Dns),
        ];
        (host, 1u16..).prop_map(|(host, port)| Endpoint { host, port })
    }

    fn prefix() -> impl Strategy<Value = IpNet> {
        (any::<std::net::IpAddr>(), 0u8..=128).prop_map(|(addr, len)| {
            let most = IpNet::from(addr).prefix_len();
            IpNet::new(addr, len.min(most)).unwrap()
        })
    }

    prop_compose! {
        fn peer()(
            allowed_ips in prop::collection::vec(prefix(), 0..4),
            endpoint in prop::option::of(endpoint()),
            persistent_keepalive in any::<u32>(),
            preshared_key in prop::option::of(any::<[u8; 32]>()),
            public_key in any::<[u8; 32]>(),
        ) -> PeerSection {
            PeerSection {
                allowed_ips,
                endpoint,
                persistent_keepalive,
                preshared_key: preshared_key.map(SecretKey::from_bytes),
                public_key: PublicKey(public_key),
            }
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(
            interface in prop::option::of((any::<[u8; 32]>(), any::<u16>())),
            peers in prop::collection::vec(peer(), 0..4),
        ) {
            let interface = interface.map(|(key, port)| (SecretKey::from_bytes(key), port));
            let conf = Conf { interface, peers };
            prop_assert_eq!(conf.to_ini().parse::<Conf>(), Ok(conf));
        }

        #[test]
        fn no_text_makes_the_reader_panic(text in "(\\[Peer\\]\n|\\[Interface\\]\n|AllowedIPs|Endpoint|=|,|#|/|:|[0-9]|.|\n){0,40}") {
            let _ = text.parse::<Conf>();
        }
    }

    #[test]
    fn a_line_that_is_not_understood_is_named_without_its_value() {
        let error = "[Interface]\n# ours\nPrivateKey = hunter2\n".parse::<Conf>().unwrap_err();
        assert_eq!(error.line, 3);
        assert!(!error.to_string().contains("hunter2"), "{error}");
        let key = SecretKey::from_bytes([7; 32]).reveal();
        for line in ["PrivateKey: ", "PrivateKey ", "PrivateKey", ""] {
            let error = format!("[Interface]\n{line}{key}\n").parse::<Conf>().unwrap_err().to_string();
            assert!(!error.contains(&key[..8]), "{error}");
        }
        for (text, line) in
            [("[Peer]\nEndpoint = 1.2.3.4:5\n", 1), ("PublicKey = x\n", 1), ("[Peer]\nx\n", 2)]
        {
            assert_eq!(text.parse::<Conf>().unwrap_err().line, line, "{text}");
        }
    }

    #[test]
    fn case_comments_and_repeated_allowed_ips_are_read_as_wg_reads_them() {
        let text = format!(
            "[peer]\npublickey={}\nAllowedIPs = 10.0.0.0/8 # ours\nALLOWEDIPS = 10.5.0.1, fd00::/64\nPersistentKeepalive = off\n",
            PublicKey([1; 32])
        );
        let conf: Conf = text.parse().unwrap();
        let wanted: Vec<IpNet> =
            ["10.0.0.0/8", "10.5.0.1/32", "fd00::/64"].map(|p| p.parse().unwrap()).into();
        assert_eq!(conf.peers[0].allowed_ips, wanted);
    }
}

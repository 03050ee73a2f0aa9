//! Where a WireGuard peer is reached.

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    str::FromStr,
};

/// The host part of a WireGuard endpoint.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EndpointHost {
    /// A literal address.
    Ip(IpAddr),
    /// A name to resolve (RFC 1123).
    Dns(String),
}

/// Where a peer is reached: host and UDP port.
/// ```
/// use kilo_core::wireguard::Endpoint;
///
/// let endpoint: Endpoint = "[2001:db8::1]:51820".parse()?;
/// assert_eq!(endpoint.ip(), Some("2001:db8::1".parse().unwrap()));
/// assert_eq!("vpn.example.com:51820".parse::<Endpoint>()?.ip(), None, "a name to resolve");
/// assert!("192.0.2.1".parse::<Endpoint>().is_err(), "the port is missing");
/// # Ok::<(), kilo_core::wireguard::InvalidEndpoint>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Endpoint {
    /// Address or name.
    pub host: EndpointHost,
    /// UDP port, host byte order.
    pub port: u16,
}

impl Endpoint {
    /// The address; `None` when the host is a name.
    pub fn ip(&self) -> Option<IpAddr> {
        match self.host {
            EndpointHost::Ip(ip) => Some(ip),
            EndpointHost::Dns(_) => None,
        }
    }
}

impl From<SocketAddr> for Endpoint {
    fn from(addr: SocketAddr) -> Self {
        Self { host: EndpointHost::Ip(addr.ip()), port: addr.port() }
    }
}

impl fmt::Display for Endpoint {
    /// `1.2.3.4:51820`, `[2001:db8::1]:51820`, `vpn.example.com:51820`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            EndpointHost::Ip(ip) => SocketAddr::new(*ip, self.port).fmt(f),
            EndpointHost::Dns(name) => write!(f, "{name}:{}", self.port),
        }
    }
}

/// Text that is not `host:port`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a valid endpoint; write 192.0.2.1:51820, [2001:db8::1]:51820 or a DNS name with a port"
)]
pub struct InvalidEndpoint(String);

impl FromStr for Endpoint {
    type Err = InvalidEndpoint;
    fn from_str(text: &str) -> Result<Self, InvalidEndpoint> {
        let invalid = || InvalidEndpoint(text.to_owned());
        let (host, port) = text.rsplit_once(':').ok_or_else(invalid)?;
        let port: u16 = port.parse().map_err(|_| invalid())?;
        let bracketed = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let host = match (bracketed, bracketed.unwrap_or(host).parse::<IpAddr>()) {
            (_, Ok(ip)) if bracketed.is_some() || ip.is_ipv4() => EndpointHost::Ip(ip),
            (None, Err(_)) if is_dns_name(host) => EndpointHost::Dns(host.to_owned()),
            _ => return Err(invalid()),
        };
        if port == 0 { Err(invalid()) } else { Ok(Self { host, port }) }
    }
}

/// A DNS name in lower case as Kubernetes accepts it (RFC 1123 subdomain).
pub fn is_dns_name(name: &str) -> bool {
    let label = |label: &str| {
        let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        !label.is_empty() && label.chars().all(inner) && !label.starts_with('-') && !label.ends_with('-')
    };
    name.len() <= 253 && name.split('.').all(label)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_read_as_kilo_users_write_them() {
        for text in ["1.2.3.4:51820", "[2001:db8::1]:51820", "vpn.example.com:1", "localhost:65535"] {
            assert_eq!(text.parse::<Endpoint>().map(|endpoint| endpoint.to_string()), Ok(text.to_owned()));
        }
        for text in [
            "",
            "1.2.3.4",
            "1.2.3.4:0",
            "1.2.3.4:70000",
            "2001:db8::1:51820",
            "a_b:1",
            ":51820",
            "-a:1",
            "[x]:1",
        ] {
            assert!(text.parse::<Endpoint>().is_err(), "{text}");
        }
    }
}

//! Where a WireGuard peer is reached.

use std::{
    fmt,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    num::NonZeroU16,
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
pub enum InvalidEndpoint {
    /// A host alone.
    #[error("{0:?} has no port; write for example {0}:51820")]
    NoPort(String),
    /// An IPv6 address whose colons cannot be told from the one before the port.
    #[error("{0:?} has an IPv6 address without brackets; write for example [2001:db8::1]:51820")]
    NoBrackets(String),
    /// A port that does not exist.
    #[error("{0:?} has the port {1:?}; write a number from 1 to 65535, for example 51820")]
    Port(String, String),
    /// A host that is neither an address nor a name.
    #[error(
        "{0:?} has the host {1:?}, neither an IP address nor a DNS name in lower case; write for example \
         192.0.2.1:51820, [2001:db8::1]:51820 or vpn.example.com:51820"
    )]
    Host(String, String),
}

impl FromStr for Endpoint {
    type Err = InvalidEndpoint;
    fn from_str(text: &str) -> Result<Self, InvalidEndpoint> {
        let whole = || text.to_owned();
        if text.parse::<Ipv6Addr>().is_ok() {
            return Err(InvalidEndpoint::NoBrackets(whole()));
        }
        let Some((host, port)) = text.rsplit_once(':').filter(|_| !text.ends_with(']')) else {
            return Err(match host(text) {
                Some(_) => InvalidEndpoint::NoPort(whole()),
                None => InvalidEndpoint::Host(whole(), whole()),
            });
        };
        let invalid = |_| InvalidEndpoint::Port(whole(), port.to_owned());
        let port = port.parse::<NonZeroU16>().map_err(invalid)?.get();
        match self::host(host) {
            Some(host) => Ok(Self { host, port }),
            None if host.parse::<Ipv6Addr>().is_ok() => Err(InvalidEndpoint::NoBrackets(whole())),
            None => Err(InvalidEndpoint::Host(whole(), host.to_owned())),
        }
    }
}

/// A host as it stands before a port: an IPv6 address has brackets.
fn host(text: &str) -> Option<EndpointHost> {
    let bracketed = text.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    match (bracketed, bracketed.unwrap_or(text).parse::<IpAddr>()) {
        (_, Ok(ip)) if bracketed.is_some() || ip.is_ipv4() => Some(EndpointHost::Ip(ip)),
        (None, Err(_)) if is_dns_name(text) => Some(EndpointHost::Dns(text.to_owned())),
        _ => None,
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

    #[test]
    fn what_is_wrong_with_an_endpoint_is_named_with_what_is_right() {
        for (text, wanted) in [
            ("1.2.3.4", "\"1.2.3.4\" has no port; write for example 1.2.3.4:51820"),
            ("vpn.example.com", "has no port; write for example vpn.example.com:51820"),
            ("[2001:db8::1]", "has no port; write for example [2001:db8::1]:51820"),
            ("2001:db8::1", "has an IPv6 address without brackets; write for example [2001:db8::1]:51820"),
            ("2001:db8:0:0:0:0:0:0:1", "has an IPv6 address without brackets"),
            ("1.2.3.4:70000", "has the port \"70000\"; write a number from 1 to 65535"),
            ("a:", "has the port \"\""),
            ("VPN:51820", "has the host \"VPN\", neither an IP address nor a DNS name in lower case"),
            ("", "has the host \"\""),
        ] {
            let said = text.parse::<Endpoint>().unwrap_err().to_string();
            assert!(said.contains(wanted), "{said}");
        }
    }
}

//! MTU of the WireGuard device: `--mtu auto|<bytes>`.

use std::{fmt, str::FromStr};

use kilo_core::net::MIN_IPV6_MTU;

use super::Link;

/// WireGuard's overhead over an IPv6 underlay (40 IP + 8 UDP + 32 WireGuard).
pub const OVERHEAD: u32 = 80;
/// Packet size that every IPv4 host must accept.
pub const MIN: u32 = 576;
/// Maximum MTU of a TUN device, less the overhead.
pub const MAX: u32 = 65_535 - OVERHEAD;
/// MTU on a host without default route: Ethernet's 1500 less the overhead.
const FALLBACK: u32 = 1500 - OVERHEAD;

/// MTU of the WireGuard device, as `--mtu` asks for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Mtu {
    /// MTU of the default route's interface less [`OVERHEAD`], read at every reconcile.
    #[default]
    Auto,
    /// This many bytes.
    Fixed(u32),
}

/// The text is not a valid MTU.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a valid MTU: possible values are auto and {MIN} to {MAX} (bytes)")]
pub struct InvalidMtu(String);

impl FromStr for Mtu {
    type Err = InvalidMtu;

    fn from_str(text: &str) -> Result<Self, InvalidMtu> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        match text.parse() {
            Ok(bytes) if (MIN..=MAX).contains(&bytes) => Ok(Self::Fixed(bytes)),
            _ => Err(InvalidMtu(text.to_owned())),
        }
    }
}

impl fmt::Display for Mtu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Fixed(bytes) => write!(f, "{bytes}"),
        }
    }
}

impl Mtu {
    /// MTU in bytes for the WireGuard device. `default_interface` is an index found by
    /// [`super::Net::routes_out`]. Where the mesh has IPv6 prefixes, WireGuard's packets are fragmented on a
    /// small link, because IPv6 would otherwise stop altogether.
    pub fn resolve(self, links: &[Link], default_interface: Option<u32>, ipv6: bool) -> u32 {
        let min = if ipv6 { MIN_IPV6_MTU } else { MIN };
        match self {
            Self::Fixed(bytes) => bytes,
            Self::Auto => links
                .iter()
                .find(|link| Some(link.index) == default_interface)
                // Loopback as default route has 65536.
                .map_or(FALLBACK, |link| link.mtu.saturating_sub(OVERHEAD).clamp(min, MAX)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_bounded() {
        assert_eq!("auto".parse(), Ok(Mtu::Auto));
        assert_eq!("1420".parse(), Ok(Mtu::Fixed(1420)));
        for text in ["", "575", "65456", "-1", "Auto", "1420 ", "1e3"] {
            let error = text.parse::<Mtu>().unwrap_err().to_string();
            assert!(error.contains("auto and 576 to 65455"), "{error}");
        }
    }

    #[test]
    fn auto_follows_the_default_interface() {
        let link = |index, mtu| Link { index, mtu, ..Link::default() };
        let links = [link(2, 1500), link(3, 9000), link(4, 100)];
        assert_eq!(Mtu::Auto.resolve(&links, Some(2), true), 1420);
        assert_eq!(Mtu::Auto.resolve(&links, Some(3), false), 8920);
        assert_eq!(Mtu::Auto.resolve(&links, Some(4), false), MIN);
        assert_eq!(Mtu::Auto.resolve(&links, Some(4), true), MIN_IPV6_MTU);
        assert_eq!(Mtu::Auto.resolve(&links, None, false), 1420);
        assert_eq!(Mtu::Fixed(1300).resolve(&links, Some(3), true), 1300);
    }
}

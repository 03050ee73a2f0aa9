//! `--mtu`: a number, or what the default route leaves.

use std::str::FromStr;

/// Bytes WireGuard adds over IPv6 (the larger case).
const WIREGUARD_OVERHEAD: u32 = 80;
/// Smallest MTU that carries IPv6 (RFC 8200).
const MIN: u32 = 1280;
/// Largest MTU of a WireGuard device.
const MAX: u32 = 65_455;

/// The flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mtu {
    /// MTU of the default route's interface, less WireGuard's overhead.
    Auto,
    /// A fixed number of bytes.
    Fixed(u32),
}

/// A value that is no MTU.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("MTU {0:?} is neither auto nor a number from 576 to 65455")]
pub struct InvalidMtu(String);

impl FromStr for Mtu {
    type Err = InvalidMtu;
    fn from_str(text: &str) -> Result<Self, InvalidMtu> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        let valid = text.parse().ok().filter(|mtu| (576..=MAX).contains(mtu));
        valid.map(Self::Fixed).ok_or_else(|| InvalidMtu(text.to_owned()))
    }
}

impl Mtu {
    /// MTU of the WireGuard device, given that of the default route's interface.
    pub fn resolve(self, default_route: Option<u32>) -> u32 {
        match self {
            Self::Fixed(mtu) => mtu,
            Self::Auto => default_route.unwrap_or(1500).saturating_sub(WIREGUARD_OVERHEAD).clamp(MIN, MAX),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auto_leaves_room_for_wireguard() {
        assert_eq!(Mtu::Auto.resolve(Some(1500)), 1420);
        assert_eq!(Mtu::Auto.resolve(Some(9001)), 8921);
        assert_eq!(Mtu::Auto.resolve(Some(1300)), 1280);
        assert_eq!(Mtu::Auto.resolve(None), 1420);
    }

    #[test]
    fn only_auto_and_sane_numbers_are_accepted() {
        assert_eq!("auto".parse(), Ok(Mtu::Auto));
        assert_eq!("1400".parse(), Ok(Mtu::Fixed(1400)));
        for text in ["", "Auto", "100", "70000", "-1", "1400.5"] {
            assert!(text.parse::<Mtu>().is_err(), "{text}");
        }
    }
}

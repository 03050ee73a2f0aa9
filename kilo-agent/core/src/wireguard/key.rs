//! Curve25519 keys as WireGuard writes them: base64 of 32 bytes.

use std::{fmt, str::FromStr};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde::{Deserialize, Serialize};
use x25519_dalek::{PublicKey as DalekPublic, StaticSecret};

/// Text that is not base64 of 32 bytes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a valid WireGuard key: expected base64 of 32 bytes (44 characters)")]
pub struct InvalidKey;

fn decode(text: &str) -> Result<[u8; 32], InvalidKey> {
    STANDARD.decode(text.trim()).ok().and_then(|bytes| bytes.try_into().ok()).ok_or(InvalidKey)
}

/// What a message may repeat of a name that was not understood: where the `=` is
/// missing or comes late, the name contains the value, perhaps a key.
pub(super) fn repeatable(name: &str) -> &str {
    let is_name = name.len() < 32 && name.bytes().all(|byte| byte.is_ascii_alphabetic() || byte == b'_');
    if is_name { name } else { "(not shown)" }
}

/// A peer's public key.
/// ```
/// use kilo_core::wireguard::PublicKey;
///
/// let key: PublicKey = "AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=".parse()?;
/// assert_eq!(key, PublicKey([1; 32]));
/// assert!("AQEB".parse::<PublicKey>().is_err());
/// # Ok::<(), kilo_core::wireguard::key::InvalidKey>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PublicKey(pub [u8; 32]);

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&STANDARD.encode(self.0))
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for PublicKey {
    type Err = InvalidKey;
    fn from_str(text: &str) -> Result<Self, InvalidKey> {
        decode(text).map(Self)
    }
}

impl TryFrom<String> for PublicKey {
    type Error = InvalidKey;
    fn try_from(text: String) -> Result<Self, InvalidKey> {
        text.parse()
    }
}

impl From<PublicKey> for String {
    fn from(key: PublicKey) -> Self {
        key.to_string()
    }
}

/// A private or pre-shared key: never shown by `Debug`, never serialized.
/// ```
/// use kilo_core::wireguard::SecretKey;
///
/// let key = SecretKey::from_bytes([7; 32]);
/// assert_eq!(format!("{key:?}"), "(secret)");
/// assert_eq!(key.public(), key.reveal().parse::<SecretKey>()?.public());
/// # Ok::<(), kilo_core::wireguard::key::InvalidKey>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SecretKey([u8; 32]);

impl SecretKey {
    /// Wraps 32 bytes as they are.
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The bytes, for the device only.
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The text form, for files and configurations that must hold the secret.
    pub fn reveal(&self) -> String {
        STANDARD.encode(self.0)
    }

    /// The public key that belongs to this private key.
    pub fn public(&self) -> PublicKey {
        PublicKey(*DalekPublic::from(&StaticSecret::from(self.0)).as_bytes())
    }
}

impl fmt::Debug for SecretKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}

impl FromStr for SecretKey {
    type Err = InvalidKey;
    fn from_str(text: &str) -> Result<Self, InvalidKey> {
        decode(text).map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_not_shown_by_debug() {
        let key = SecretKey::from_bytes([7; 32]);
        assert!(!format!("{key:?}").contains(&key.reveal()));
    }

    #[test]
    fn text_that_is_not_32_bytes_is_refused() {
        for text in ["", "AAAA", "!", &STANDARD.encode([1; 33])] {
            assert_eq!(text.parse::<PublicKey>(), Err(InvalidKey));
        }
    }
}

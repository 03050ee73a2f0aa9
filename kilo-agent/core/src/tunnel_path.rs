//! Paths of tunnels between locations.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

crate::label_values! {
    /// How two locations are connected: label `path` of `kilo_tunnels`, and `path` of a status.
    #[derive(PartialOrd, Ord)]
    TunnelPath {
        /// At an endpoint that one of the two publishes.
        Direct => "direct",
        /// Through the NATs of both, at an endpoint that nobody has published.
        Punched => "punched",
        /// Through a relay.
        Relayed => "relayed",
    }
}

impl TunnelPath {
    /// The path with this label.
    pub fn from_label(label: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|path| path.label() == label)
    }

    /// Reads an optional path. One that this version does not know counts as unknown: an agent of another
    /// version must not make its whole status unreadable.
    ///
    /// # Errors
    /// When the value is neither absent nor text.
    pub fn known<'de, D: Deserializer<'de>>(value: D) -> Result<Option<Self>, D::Error> {
        Ok(Option::<String>::deserialize(value)?.and_then(|label| Self::from_label(&label)))
    }
}

impl fmt::Display for TunnelPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.label())
    }
}

impl Serialize for TunnelPath {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.label())
    }
}

impl<'de> Deserialize<'de> for TunnelPath {
    fn deserialize<D: Deserializer<'de>>(value: D) -> Result<Self, D::Error> {
        let label = String::deserialize(value)?;
        Self::from_label(&label)
            .ok_or_else(|| de::Error::custom(format_args!("no path of tunnels: {label:?}")))
    }
}

/// The path of one tunnel; as text, for example, `relayed by n1`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathWithRelay {
    /// Its kind.
    pub path: TunnelPath,
    /// Name of the relaying node; `None` unless relayed.
    pub relay: Option<String>,
}

impl fmt::Display for PathWithRelay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.relay {
            Some(relay) => write!(f, "{} by {relay}", self.path),
            None => write!(f, "{}", self.path),
        }
    }
}

//! The value of one annotation: how each kind is read, and how a malformed one is reported.

use std::{
    borrow::Cow,
    collections::BTreeMap,
    net::{IpAddr, SocketAddr, SocketAddrV6},
    str::FromStr,
};

use ipnet::IpNet;
use kilo_common::lead::MOST_CHANGES;
use serde::{Deserialize, Serialize};

use super::{is_of_heartbeat, promised};
use crate::{addresses::is_global_v6, signal_id, wireguard::key::PublicKey};

/// Longest interval between two heartbeats that is believed, in seconds; longer ones are capped.
const MOST_SECONDS: u16 = 600;

/// One seen endpoint, as Kilo writes Go's `net.UDPAddr`.
#[derive(Serialize, Deserialize)]
struct SeenEndpoint {
    #[serde(rename = "IP")]
    ip: IpAddr,
    #[serde(rename = "Port")]
    port: u16,
    #[serde(rename = "Zone", default)]
    zone: String,
}

pub(super) fn seen_endpoints_text(endpoints: &BTreeMap<PublicKey, SocketAddr>) -> Option<String> {
    let seen = |addr: &SocketAddr| SeenEndpoint { ip: addr.ip(), port: addr.port(), zone: String::new() };
    let seen: BTreeMap<_, _> = endpoints.iter().map(|(key, addr)| (*key, seen(addr))).collect();
    if seen.is_empty() { None } else { serde_json::to_string(&seen).ok() }
}

/// The value of one annotation, and where to report what is wrong with it.
pub(super) struct Value<'a> {
    pub text: &'a str,
    pub name: &'static str,
    pub remedy: &'static str,
    pub problems: &'a mut Vec<String>,
}

impl Value<'_> {
    pub fn parse<T: FromStr<Err: std::fmt::Display>>(&mut self) -> Option<T> {
        match self.text.trim().parse() {
            Ok(value) => Some(value),
            Err(error) => {
                self.ignored(&format!(" {:?} is ignored", excerpt(self.text)), &error);
                None
            }
        }
    }

    pub fn parse_unless_empty<T: FromStr<Err: std::fmt::Display>>(&mut self) -> Option<T> {
        if self.text.is_empty() { None } else { self.parse() }
    }

    /// Reports a value that looks as if it mattered, for an annotation whose value does not.
    pub fn counts_all_the_same(&mut self, node: &str) {
        if matches!(self.text.trim().to_ascii_lowercase().as_str(), "false" | "f" | "0" | "no" | "n" | "off")
        {
            self.problems.push(format!(
                "annotation {0} {1:?}: the node asks to lead, whatever the value says; to take that back: kubectl \
                 annotate node {node} {0}-",
                self.name, self.text
            ));
        }
    }

    /// The interval promised with this heartbeat. A promise that came with another one is void: an agent that
    /// does not know it has renewed the heartbeat since.
    pub fn heartbeat(&mut self, last_seen: i64) -> Option<u16> {
        let Some((seen, seconds)) = promised(self.text) else {
            self.ignored(
                &format!(" {:?} is ignored", excerpt(self.text)),
                &"not a last-seen and seconds such as 1763866800/30",
            );
            return None;
        };
        is_of_heartbeat(seen, last_seen).then_some(seconds.min(MOST_SECONDS))
    }

    /// A term in which a node may have led; one near the maximum is refused, because no
    /// later change would count.
    pub fn term(&mut self) -> Option<u64> {
        let term: u64 = self.parse()?;
        if term >> 16 > MOST_CHANGES.into() {
            self.ignored(
                &format!(" {:?} is ignored", excerpt(self.text)),
                &format!(
                    "it counts {} changes of leader, and more than {MOST_CHANGES} are implausible",
                    term >> 16
                ),
            );
            return None;
        }
        Some(term)
    }

    /// A prefix that a node may have: not a control address.
    pub fn prefix(&mut self) -> Option<IpNet> {
        let prefix = self.parse()?;
        if signal_id::is_control(&prefix) {
            self.ignored(&format!(" {:?} is ignored", excerpt(self.text)), &signal_id::CONTROL_REFUSED);
            return None;
        }
        Some(prefix)
    }

    /// A public IPv6 endpoint: no value may aim other nodes' attempts at a private network.
    pub fn public_v6(&mut self) -> Option<SocketAddrV6> {
        let endpoint: SocketAddrV6 = self.parse()?;
        if !is_global_v6(*endpoint.ip()) || endpoint.scope_id() != 0 || endpoint.port() == 0 {
            self.ignored(
                &format!(" {:?} is ignored", excerpt(self.text)),
                &"not a public IPv6 address and a port",
            );
            return None;
        }
        Some(endpoint)
    }

    pub fn prefix_list(&mut self) -> Vec<IpNet> {
        let mut list = Vec::new();
        for item in self.text.split(',').map(str::trim).filter(|item| !item.is_empty()) {
            match item.parse::<IpNet>() {
                Ok(prefix) if signal_id::is_control(&prefix) => {
                    self.skipped(item, &signal_id::CONTROL_REFUSED);
                }
                Ok(prefix) => list.push(prefix.trunc()),
                Err(error) => self.skipped(item, &error),
            }
        }
        list
    }

    pub fn seen_endpoints(&mut self) -> BTreeMap<PublicKey, SocketAddr> {
        let mut seen = BTreeMap::new();
        if self.text.is_empty() {
            return seen;
        }
        let entries = match serde_json::from_str::<BTreeMap<String, serde_json::Value>>(self.text) {
            Ok(entries) => entries,
            Err(error) => {
                self.ignored(" is ignored", &error);
                return seen;
            }
        };
        for (key, value) in entries {
            match (key.parse(), serde_json::from_value::<SeenEndpoint>(value)) {
                (Ok(key), Ok(endpoint)) => {
                    seen.insert(key, SocketAddr::new(endpoint.ip, endpoint.port));
                }
                (Err(error), _) => self.skipped(&key, &error),
                (_, Err(error)) => self.skipped(&key, &error),
            }
        }
        seen
    }

    fn skipped(&mut self, item: &str, error: &dyn std::fmt::Display) {
        self.ignored(&format!(": {:?} is skipped", excerpt(item)), error);
    }

    fn ignored(&mut self, what: &str, error: &dyn std::fmt::Display) {
        let error = error.to_string();
        let separator = if self.remedy.is_empty() { "" } else { "; " };
        self.problems.push(format!(
            "annotation {}{what}: {}{separator}{}",
            self.name,
            excerpt(&error),
            self.remedy
        ));
    }
}

/// Characters of a malformed value that a message repeats.
const EXCERPT: usize = 200;

/// The start of a text that may be long: problems are logged and kept in memory.
pub fn excerpt(text: &str) -> Cow<'_, str> {
    match text.char_indices().nth(EXCERPT) {
        Some((end, _)) => Cow::Owned(format!("{}…", &text[..end])),
        None => Cow::Borrowed(text),
    }
}

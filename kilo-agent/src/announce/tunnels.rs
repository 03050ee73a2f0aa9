//! Tunnels of this node that come up, fall silent and answer again.

use std::{
    collections::BTreeMap,
    fmt,
    net::SocketAddr,
    time::{Duration, Instant},
};

use kilo_core::{
    objects::events::EventReason,
    topology::{TunnelEnd, tunnel_ends},
    wireguard::{
        key::PublicKey,
        silence::{Sample, Tunnels, Turn},
    },
};
use kilo_host::wireguard::PeerStatus;

use crate::status::View;

/// The tunnels, as far as they are the mesh's.
#[derive(Debug, Default)]
pub struct Watched {
    tunnels: Tunnels,
    /// What is at their other end, as of the last look.
    known: BTreeMap<PublicKey, Known>,
}

#[derive(Clone, Debug)]
struct Known {
    end: TunnelEnd,
    endpoint: Option<SocketAddr>,
    handshake_age: Option<Duration>,
}

/// What has become of a tunnel.
#[derive(Debug)]
pub struct News {
    turn: Turn,
    known: Known,
}

impl Watched {
    /// Takes note of what the device says. A node that does not lead has no tunnels of its own.
    pub fn observe(
        &mut self,
        view: &View,
        peers: &BTreeMap<PublicKey, PeerStatus>,
        now: Instant,
    ) -> Vec<News> {
        let mut ends = if view.mesh.leads(&view.node) { tunnel_ends(&view.mesh) } else { BTreeMap::new() };
        self.known = peers
            .iter()
            .filter_map(|(key, peer)| {
                let known = Known {
                    end: ends.remove(key)?,
                    endpoint: peer.endpoint,
                    handshake_age: peer.handshake_age,
                };
                Some((*key, known))
            })
            .collect();
        let samples = self.known.keys().filter_map(|key| {
            let peer = peers.get(key)?;
            Some((*key, Sample { handshake_age: peer.handshake_age, sent_bytes: peer.tx_bytes }))
        });
        let turns = self.tunnels.observe(&samples.collect(), now);
        turns
            .into_iter()
            .filter_map(|(key, turn)| Some(News { turn, known: self.known.get(&key)?.clone() }))
            .collect()
    }

    /// What is wrong, a sentence for each tunnel. A VPN peer without a fixed place may be away.
    pub fn degraded(&self, now: Instant) -> Vec<String> {
        let silent = self.tunnels.silent(now).filter_map(|(key, age)| Some((self.known.get(&key)?, age)));
        silent
            .filter(|(known, _)| known.end.is_always_there())
            .map(|(known, age)| format!("{} for {}", known.silence(), seconds(age)))
            .collect()
    }
}

impl Known {
    fn silence(&self) -> String {
        format!("{self} does not answer: {}; bytes are sent in vain", self.handshake())
    }

    fn handshake(&self) -> String {
        match self.handshake_age {
            Some(age) => format!("the last handshake was {} ago", seconds(age)),
            None => "there was no handshake yet".to_owned(),
        }
    }
}

impl fmt::Display for Known {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.end.name())?;
        let node = match &self.end {
            TunnelEnd::Location { node, .. } => Some(node.clone()),
            TunnelEnd::Peer { .. } => None,
        };
        let endpoint = self.endpoint.map(|endpoint| endpoint.to_string());
        let details: Vec<_> = node.into_iter().chain(endpoint).collect();
        if details.is_empty() { Ok(()) } else { write!(f, " ({})", details.join(" at ")) }
    }
}

fn seconds(age: Duration) -> humantime::FormattedDuration {
    humantime::format_duration(Duration::from_secs(age.as_secs()))
}

impl News {
    /// Writes it into the log.
    pub fn log(&self) {
        let (tunnel, endpoint) = (self.known.end.name(), self.known.endpoint.map(|it| it.to_string()));
        let why = match self.turn {
            Turn::Silent => self.known.handshake(),
            Turn::Quiet => "nothing has been sent for 3 minutes".to_owned(),
            Turn::Up | Turn::Answers => String::new(),
        };
        match self.turn {
            Turn::Up => tracing::info!(tunnel, endpoint, new = "up", "tunnel is up: first handshake"),
            Turn::Answers => tracing::info!(tunnel, endpoint, old = "silent", new = "up", "tunnel answers"),
            Turn::Silent => {
                tracing::info!(
                    tunnel,
                    endpoint,
                    new = "silent",
                    why,
                    "tunnel does not answer although bytes are sent"
                );
            }
            Turn::Quiet => {
                tracing::info!(
                    tunnel,
                    endpoint,
                    old = "silent",
                    new = "idle",
                    why,
                    "silent tunnel is no longer used"
                );
            }
        }
    }

    /// The Event about this node, where there is one.
    pub fn event(&self) -> Option<(EventReason, String)> {
        if !self.known.end.is_always_there() {
            return None;
        }
        match self.turn {
            Turn::Silent => Some((EventReason::TunnelSilent, self.known.silence())),
            Turn::Answers => Some((EventReason::TunnelAnswers, format!("{} answers again", self.known))),
            Turn::Up | Turn::Quiet => None,
        }
    }
}

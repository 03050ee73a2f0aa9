//! Tunnels of this node that come up, fall silent or answer again.

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

/// The tunnels that belong to the mesh.
#[derive(Debug, Default)]
pub struct Watched {
    tunnels: Tunnels,
    /// The far end of each tunnel, as of the last look.
    far_ends: BTreeMap<PublicKey, FarEnd>,
}

#[derive(Clone, Debug)]
struct FarEnd {
    end: TunnelEnd,
    endpoint: Option<SocketAddr>,
    handshake_age: Option<Duration>,
}

/// A change of a tunnel's state.
#[derive(Debug)]
pub struct News {
    turn: Turn,
    far_end: FarEnd,
}

impl Watched {
    /// Records what the device reports. Only Kilo's leader looks: tunnels of other gateways are not watched.
    pub fn observe(
        &mut self,
        view: &View,
        peers: &BTreeMap<PublicKey, PeerStatus>,
        now: Instant,
    ) -> Vec<News> {
        let mesh = &view.observed.mesh;
        let mut ends = if mesh.leads(&view.node) { tunnel_ends(mesh) } else { BTreeMap::new() };
        self.far_ends = peers
            .iter()
            .filter_map(|(key, peer)| {
                let far_end = FarEnd {
                    end: ends.remove(key)?,
                    endpoint: peer.endpoint,
                    handshake_age: peer.handshake_age,
                };
                Some((*key, far_end))
            })
            .collect();
        let samples = self.far_ends.keys().filter_map(|key| {
            let peer = peers.get(key)?;
            Some((*key, Sample { handshake_age: peer.handshake_age, sent_bytes: peer.tx_bytes }))
        });
        let turns = self.tunnels.observe(&samples.collect(), now);
        turns
            .into_iter()
            .filter_map(|(key, turn)| Some(News { turn, far_end: self.far_ends.get(&key)?.clone() }))
            .collect()
    }

    /// The silent tunnels, one sentence each. VPN peers without a fixed endpoint may be away and do not
    /// count.
    pub fn degraded(&self, now: Instant) -> Vec<String> {
        let silent = self.tunnels.silent(now).filter_map(|(key, age)| Some((self.far_ends.get(&key)?, age)));
        silent
            .filter(|(far_end, _)| far_end.end.is_always_there())
            .map(|(far_end, age)| format!("{} for {}", far_end.silence(), seconds(age)))
            .collect()
    }
}

impl FarEnd {
    fn silence(&self) -> String {
        format!("{self} does not answer: {}; packets sent to it are lost", self.handshake())
    }

    fn handshake(&self) -> String {
        match self.handshake_age {
            Some(age) => format!("the last handshake was {} ago", seconds(age)),
            None => "there was no handshake yet".to_owned(),
        }
    }
}

impl fmt::Display for FarEnd {
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
    /// Logs one line at info: far end, endpoint, old and new state, and why.
    pub fn log(&self) {
        let (tunnel, endpoint) = (self.far_end.end.name(), self.far_end.endpoint.map(|it| it.to_string()));
        let why = match self.turn {
            Turn::Silent => self.far_end.handshake(),
            Turn::Quiet => "nothing has been sent for 3 minutes".to_owned(),
            Turn::Up | Turn::Answers => String::new(),
        };
        match self.turn {
            Turn::Up => tracing::info!(tunnel, endpoint, new = "up", "tunnel is up: first handshake"),
            Turn::Answers => {
                tracing::info!(tunnel, endpoint, old = "silent", new = "up", "tunnel answers again");
            }
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

    /// The Event about this node; `None` for turns without one, or when the far end may be away.
    pub fn event(&self) -> Option<(EventReason, String)> {
        if !self.far_end.end.is_always_there() {
            return None;
        }
        match self.turn {
            Turn::Silent => Some((EventReason::TunnelSilent, self.far_end.silence())),
            Turn::Answers => Some((EventReason::TunnelAnswers, format!("{} answers again", self.far_end))),
            Turn::Up | Turn::Quiet => None,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use kilo_core::{
        settings::Granularity,
        topology::{Mesh, Node, ObservedMesh, Peer},
    };

    fn node(number: u8, location: &str) -> Node {
        Node {
            name: format!("n{number}"),
            location: location.to_owned(),
            endpoint: format!("192.0.2.{number}:51820").parse().ok(),
            key: Some(PublicKey([number; 32])),
            internal_ip: format!("10.1.0.{number}/24").parse().ok(),
            pod_cidrs: vec![format!("10.42.{number}.0/24").parse().unwrap()],
            ..Node::default()
        }
    }

    fn peer(name: &str, key: u8, endpoint: Option<&str>) -> (String, Peer) {
        let peer = Peer {
            name: name.to_owned(),
            allowed_ips: vec![format!("10.5.0.{key}/32").parse().unwrap()],
            endpoint: endpoint.map(|text| text.parse().unwrap()),
            persistent_keepalive: 0,
            preshared_key: None,
            public_key: PublicKey([key; 32]),
            follows: false,
        };
        (name.to_owned(), peer)
    }

    /// A mesh of these nodes, a laptop and an office, as `n1` sees it.
    fn view(nodes: &[Node]) -> View {
        let peers = BTreeMap::from([peer("laptop", 8, None), peer("office", 9, Some("192.0.2.9:51820"))]);
        let mesh = Mesh::new(nodes, &peers, Granularity::Location, "10.4.0.0/16".parse().unwrap());
        let observed = ObservedMesh { mesh: mesh.into(), ..ObservedMesh::default() };
        View { node: "n1".to_owned(), observed: observed.into(), ..View::default() }
    }

    /// Sends bytes to every peer for half a minute without an answer; returns the degraded tunnels and the
    /// Events.
    fn degraded(view: &View, then: &View) -> (Vec<String>, Vec<EventReason>) {
        let (start, mut watched, mut events) = (Instant::now(), Watched::default(), Vec::new());
        let mut look = |view: &View, second: u64| {
            let of = |key: u8| {
                (PublicKey([key; 32]), PeerStatus { tx_bytes: second * 30, ..PeerStatus::default() })
            };
            let now = start + Duration::from_secs(second);
            let news = watched.observe(view, &[2, 8, 9].map(of).into(), now);
            news.iter().for_each(News::log);
            events.extend(news.iter().filter_map(News::event).map(|(reason, _)| reason));
            watched.degraded(now)
        };
        (0..6).for_each(|step| drop(look(view, step * 5)));
        (look(then, 30), events)
    }

    #[test]
    fn locations_and_peers_with_a_place_should_answer_and_a_laptop_may_be_away() {
        let both = view(&[node(1, "a"), node(2, "b")]);
        let (found, events) = degraded(&both, &both);
        assert_eq!(events, [EventReason::TunnelSilent; 2]);
        let [location, office] = &found[..] else { panic!("{found:?}") };
        assert!(
            location.starts_with("location:b (n2) does not answer: there was no handshake yet"),
            "{location}"
        );
        assert!(office.starts_with("peer:office does not answer"), "{office}");
    }

    #[test]
    fn a_node_that_was_deleted_and_one_that_does_not_lead_have_no_silent_tunnels() {
        let both = view(&[node(1, "a"), node(2, "b")]);
        let (found, _) = degraded(&both, &view(&[node(1, "a")]));
        assert!(!found.iter().any(|text| text.contains("location:b")), "{found:?}");
        let mut other = node(1, "a");
        other.endpoint = "10.0.0.1:51820".parse().ok();
        let follows = view(&[other, node(3, "a"), node(2, "b")]);
        assert_eq!(degraded(&follows, &follows), (Vec::new(), Vec::new()));
    }
}

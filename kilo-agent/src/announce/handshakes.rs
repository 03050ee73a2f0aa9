//! Writes the time and endpoint of VPN peers' last handshakes into their Peer objects. Each leader has its
//! own tunnel to a peer; the one with the newest handshake writes it. With many peers and leaders that would
//! be many writes, each of which reaches every agent, so all leaders together write about once a second.

use std::{
    collections::{BTreeMap, BTreeSet},
    iter,
    sync::Arc,
    time::{Duration, Instant},
};

use kilo_core::{topology::Mesh, wireguard::key::PublicKey};
use kilo_host::wireguard::PeerStatus;
use tokio_util::task::AbortOnDropHandle;

use crate::{
    backend::{Backend, Handshake, TunnelStatus},
    timestamp::Timestamp,
};

/// A peer is written about again only after this time, and only a handshake that is newer by this much
/// counts.
const NEWS: Duration = Duration::from_secs(60);
/// Pause between two writes, counted over all leaders.
const PACE: Duration = Duration::from_secs(1);
/// Writes that one leader may make without pausing.
const BURST: u32 = 5;
/// Spreads the writes of leaders that look at the same moment.
const JITTER: Duration = Duration::from_secs(1);
/// Pause after a write without an answer. After a refusal it is longer: permission may be granted later.
const UNANSWERED: Duration = Duration::from_secs(30);
const REFUSED: Duration = Duration::from_secs(600);

/// The newest handshake of each peer with this node, by the peer's name.
pub type Seen = BTreeMap<String, Handshake>;

/// What the device reports about the mesh's VPN peers. A key used twice belongs to a location, or to the
/// first peer.
pub fn seen(mesh: &Mesh, peers: &BTreeMap<PublicKey, PeerStatus>, now: Timestamp) -> Seen {
    if mesh.peers.is_empty() {
        return Seen::new();
    }
    let mut taken: BTreeSet<PublicKey> = mesh.segments.iter().map(|segment| segment.key).collect();
    let own = mesh.peers.iter().filter(|peer| taken.insert(peer.public_key));
    own.filter_map(|peer| {
        let status = peers.get(&peer.public_key)?;
        let handshake = Handshake { time: now.before(status.handshake_age?), endpoint: status.endpoint };
        Some((peer.name.clone(), handshake))
    })
    .collect()
}

/// What this agent has written, and when it may write more.
#[derive(Debug)]
pub struct Handshakes {
    /// By the peer's name.
    own: BTreeMap<String, Own>,
    /// When the writes made so far would be done at the allowed pace.
    done: Instant,
    not_before: Instant,
    task: Option<AbortOnDropHandle<Outcome>>,
}

#[derive(Clone, Copy, Debug)]
struct Own {
    /// `None` when nobody answered or another agent had changed the object, so a write may still be due.
    tried: Option<Instant>,
    /// What this agent wrote last.
    wrote: Option<Handshake>,
}

/// The result of some writes.
#[derive(Debug, Default)]
struct Outcome {
    written: Seen,
    /// Peers whose objects had changed meanwhile or were not asked about: the next look decides anew.
    again: Vec<String>,
    pause: Option<Duration>,
}

/// Seconds by which the clocks of nodes may differ.
const AHEAD: i64 = 300;

/// Whether the handshake `seen` should replace `said` in the object; `wrote` is what this agent wrote last.
fn is_news(seen: &Handshake, said: Option<&Handshake>, wrote: Option<&Handshake>) -> bool {
    let Some(said) = said else { return true };
    // The writer's clock is ahead: until ours catches up, no handshake would be newer.
    if said.time.0 > Timestamp::now().0.saturating_add(AHEAD) {
        return true;
    }
    let newer = seen.time.0.saturating_sub(said.time.0);
    // Behind NAT each leader sees another endpoint: the one of the recorded handshake counts.
    newer >= NEWS.as_secs() as i64 || wrote == Some(said) && seen.endpoint != said.endpoint
}

impl Handshakes {
    /// Starts with nothing written.
    pub const fn new(now: Instant) -> Self {
        Self { own: BTreeMap::new(), done: now, not_before: now, task: None }
    }

    /// Takes the peers to write about, those with the oldest record first, at the pace for this number of
    /// leaders. `said`: what the objects contain; `None`: there is no object to write into.
    fn take_due(
        &mut self,
        seen: &Seen,
        said: impl Fn(&str) -> Option<TunnelStatus>,
        leaders: usize,
        now: Instant,
    ) -> Vec<String> {
        self.own.retain(|peer, _| seen.contains_key(peer));
        if now < self.not_before {
            return Vec::new();
        }
        let mut news: Vec<_> = seen
            .iter()
            .filter_map(|(peer, handshake)| {
                let own = self.own.get(peer);
                if own
                    .and_then(|own| own.tried)
                    .is_some_and(|tried| now.saturating_duration_since(tried) < NEWS)
                {
                    return None;
                }
                let said = said(peer)?.handshake;
                let wrote = own.and_then(|own| own.wrote.as_ref());
                is_news(handshake, said.as_ref(), wrote).then(|| (said.map(|said| said.time), peer))
            })
            .collect();
        news.sort_unstable();
        let each = PACE * u32::try_from(leaders.max(1)).unwrap_or(u32::MAX);
        self.done = self.done.max(now);
        let allowed = news.into_iter().take_while(|_| {
            let allowed = self.done < now + each * BURST;
            self.done += if allowed { each } else { Duration::ZERO };
            allowed
        });
        let due: Vec<String> = allowed.map(|(_, peer)| peer.clone()).collect();
        for peer in &due {
            let wrote = self.own.get(peer).and_then(|own| own.wrote);
            self.own.insert(peer.clone(), Own { tried: Some(now), wrote });
        }
        due
    }

    /// Writes what is due, beside everything else. While a write is under way, nothing more is due.
    pub async fn observe<B: Backend>(&mut self, backend: &Arc<B>, seen: &Seen, leaders: usize, now: Instant) {
        if let Some(task) = &self.task {
            if !task.is_finished() {
                return;
            }
            let outcome = match self.task.take() {
                Some(task) => task.await.unwrap_or_default(),
                None => Outcome::default(),
            };
            self.take(outcome, now);
        }
        let due = self.take_due(seen, |peer| backend.tunnel_status(peer), leaders, now);
        if due.is_empty() {
            return;
        }
        let news = due.into_iter().filter_map(|peer| {
            let wrote = self.own.get(&peer).and_then(|own| own.wrote);
            Some((seen.get(&peer).copied()?, wrote, peer))
        });
        let write = write(Arc::clone(backend), news.collect());
        self.task = Some(AbortOnDropHandle::new(tokio::spawn(write)));
    }

    fn take(&mut self, outcome: Outcome, now: Instant) {
        for (peer, handshake) in outcome.written {
            if let Some(own) = self.own.get_mut(&peer) {
                own.wrote = Some(handshake);
            }
        }
        for peer in outcome.again {
            if let Some(own) = self.own.get_mut(&peer) {
                own.tried = None;
            }
        }
        if let Some(pause) = outcome.pause {
            self.not_before = now + pause.mul_f64(rand::random_range(0.8..1.2));
        }
    }
}

/// Writes one after the other, skipping those that another leader has written meanwhile.
async fn write<B: Backend>(backend: Arc<B>, news: Vec<(Handshake, Option<Handshake>, String)>) -> Outcome {
    tokio::time::sleep(JITTER.mul_f64(rand::random())).await;
    let (mut outcome, mut refused) = (Outcome::default(), false);
    let mut news = news.into_iter();
    while let Some((seen, wrote, peer)) = news.next() {
        let Some(TunnelStatus { handshake: said }) = backend.tunnel_status(&peer) else { continue };
        if !is_news(&seen, said.as_ref(), wrote.as_ref()) {
            continue;
        }
        match backend.report_handshake(&peer, &seen).await {
            Ok(true) => drop(outcome.written.insert(peer, seen)),
            Ok(false) => outcome.again.push(peer),
            Err(error) => {
                tracing::debug!(%error, peer, "failed to write the last handshake of this peer");
                if error.is_temporary() {
                    outcome.again.extend(iter::once(peer).chain(news.map(|(_, _, peer)| peer)));
                    outcome.pause = Some(UNANSWERED);
                    return outcome;
                }
                // An object may be refused for its content: the others are written all the same.
                refused = true;
            }
        }
    }
    if refused && outcome.written.is_empty() {
        outcome.pause = Some(REFUSED);
    }
    outcome
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    /// Objects, and leaders that look every five seconds, one shortly after the other.
    struct World {
        said: BTreeMap<String, Handshake>,
        leaders: Vec<Handshakes>,
        start: Instant,
        second: u64,
        writes: usize,
    }

    impl World {
        fn new(leaders: usize) -> Self {
            let start = Instant::now();
            let leaders = (0..leaders).map(|_| Handshakes::new(start)).collect();
            Self { said: BTreeMap::new(), leaders, start, second: 0, writes: 0 }
        }

        /// Lets each leader look once; `seen` gives what it sees by leader and second.
        fn look(&mut self, seen: impl Fn(usize, u64) -> Seen) {
            let now = self.start + Duration::from_secs(self.second);
            let count = self.leaders.len();
            for (number, leader) in self.leaders.iter_mut().enumerate() {
                let seen = seen(number, self.second);
                let due = leader.take_due(
                    &seen,
                    |peer| Some(TunnelStatus { handshake: self.said.get(peer).copied() }),
                    count,
                    now,
                );
                self.writes += due.len();
                let written: Seen = due.into_iter().map(|peer| (peer.clone(), seen[&peer])).collect();
                self.said.extend(written.clone());
                leader.take(Outcome { written, ..Outcome::default() }, now);
            }
            self.second += 5;
        }
    }

    fn at(time: u64, port: u16) -> Handshake {
        Handshake { time: Timestamp(time as i64), endpoint: Some(([192, 0, 2, 7], port).into()) }
    }

    fn laptop(handshake: Handshake) -> Seen {
        Seen::from([("laptop".to_owned(), handshake)])
    }

    #[test]
    fn the_newest_handshake_of_any_leader_stands_there_with_its_endpoint() {
        let mut world = World::new(3);
        // All shake hands every two minutes, except the third leader, which hears nothing for an hour.
        for _ in 0..720 {
            world.look(|leader, second| {
                let time = if leader == 2 { 10_000 } else { 10_000 + second / 120 * 120 };
                laptop(at(time, 1000 + leader as u16))
            });
        }
        assert_eq!(world.writes, 30, "one each two minutes");
        assert_eq!(world.said["laptop"], at(10_000 + 3480, 1000));
        // The first leader falls silent: the next one with newer handshakes writes.
        for _ in 0..24 {
            world.look(|leader, second| {
                laptop(at(
                    if leader == 1 { 10_000 + second / 120 * 120 } else { 13_480 },
                    1000 + leader as u16,
                ))
            });
        }
        assert_eq!(world.said["laptop"].endpoint.unwrap().port(), 1001);
    }

    #[test]
    fn nothing_is_written_when_nothing_changes_and_a_new_endpoint_is_after_a_minute() {
        let mut world = World::new(2);
        for _ in 0..100 {
            // The age is rounded, so the time of a handshake varies by a second.
            world.look(|leader, second| laptop(at(10_000 + second % 2, 1000 + leader as u16)));
        }
        assert_eq!(world.writes, 1);
        for _ in 0..100 {
            world.look(|leader, second| laptop(at(10_000, 2000 + leader as u16 + second as u16 % 7)));
        }
        assert!((8..=9).contains(&(world.writes - 1)), "one a minute: {}", world.writes);
    }

    #[test]
    fn ten_thousand_peers_and_twenty_leaders_write_once_a_second_and_leave_none_out() {
        let mut world = World::new(20);
        let seen = |_: usize, second: u64| -> Seen {
            (0..1000).map(|peer| (format!("peer{peer:04}"), at(10_000 + second / 120 * 120, 1))).collect()
        };
        for _ in 0..60 {
            world.look(seen);
        }
        let burst = 20 * BURST as usize;
        assert!((300..=300 + burst).contains(&world.writes), "{} in 300 s", world.writes);
        for _ in 0..240 {
            world.look(seen);
        }
        assert_eq!(world.said.len(), 1000, "each had its turn");
        let mut one = Handshakes::new(world.start);
        let many: Seen = (0..10_000).map(|peer| (format!("peer{peer}"), at(10_000, 1))).collect();
        let mut writes = 0;
        for second in (0..600).step_by(5) {
            let now = world.start + Duration::from_secs(second);
            writes += one.take_due(&many, |_| Some(TunnelStatus::default()), 1, now).len();
        }
        assert!((595..=600).contains(&writes), "{writes} in 600 s");
    }

    #[test]
    fn what_came_too_late_is_tried_at_the_next_look_and_what_was_written_is_not() {
        let now = Instant::now();
        let later = now + Duration::from_secs(5);
        let seen = laptop(at(10_000, 1));
        for (outcome, wanted) in [
            (Outcome { again: vec!["laptop".to_owned()], ..Outcome::default() }, &["laptop"][..]),
            (Outcome::default(), &[]),
        ] {
            let mut handshakes = Handshakes::new(now);
            assert_eq!(handshakes.take_due(&seen, |_| Some(TunnelStatus::default()), 1, now), ["laptop"]);
            handshakes.take(outcome, later);
            assert_eq!(handshakes.take_due(&seen, |_| Some(TunnelStatus::default()), 1, later), wanted);
        }
    }

    #[test]
    fn a_refusal_is_a_pause() {
        let now = Instant::now();
        let mut handshakes = Handshakes::new(now);
        handshakes.take(Outcome { pause: Some(REFUSED), ..Outcome::default() }, now);
        let seen = laptop(at(10_000, 1));
        let mut due = |seconds| {
            handshakes.take_due(
                &seen,
                |_| Some(TunnelStatus::default()),
                1,
                now + Duration::from_secs(seconds),
            )
        };
        assert!(due(400).is_empty());
        assert_eq!(due(800), ["laptop"]);
    }

    #[test]
    fn what_is_no_peer_of_the_mesh_or_has_shaken_no_hands_is_not_seen() {
        let key = |number| PublicKey([number; 32]);
        let node = kilo_core::topology::Node {
            name: "n1".to_owned(),
            endpoint: "192.0.2.1:51820".parse().ok(),
            key: Some(key(1)),
            internal_ip: "10.1.0.1/24".parse().ok(),
            pod_cidrs: vec!["10.42.1.0/24".parse().unwrap()],
            ..Default::default()
        };
        let peer = |name: &str, number: u8| {
            let peer = kilo_core::topology::Peer {
                name: name.to_owned(),
                allowed_ips: vec![format!("10.5.0.{number}/32").parse().unwrap()],
                endpoint: None,
                persistent_keepalive: 0,
                preshared_key: None,
                public_key: key(number),
                follows: false,
            };
            (name.to_owned(), peer)
        };
        let peers = BTreeMap::from([peer("away", 7), peer("laptop", 8), peer("thief", 1)]);
        let granularity = kilo_core::settings::Granularity::Location;
        let mesh = Mesh::new([&node], &peers, granularity, "10.4.0.0/16".parse().unwrap());
        let shaken = PeerStatus { handshake_age: Some(Duration::from_secs(7)), ..PeerStatus::default() };
        let device = BTreeMap::from([
            (key(1), shaken.clone()),
            (key(7), PeerStatus::default()),
            (key(8), shaken.clone()),
            (key(9), shaken),
        ]);
        let handshake = Handshake { time: Timestamp(93), endpoint: None };
        assert_eq!(seen(&mesh, &device, Timestamp(100)), laptop(handshake));
    }
}

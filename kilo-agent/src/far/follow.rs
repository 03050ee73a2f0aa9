//! Decisions of a machine that has all gateways as VPN peers (`kgctl connect`): it is a far side of each
//! location, and moves prefixes when a gateway claims them through its tunnel. No I/O: [`Act`] describes the
//! actions.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv6Addr},
};

use ipnet::IpNet;
use kilo_common::{
    lead::Term,
    signal::{self, Body, Kind, LONGEST, Shared},
};
use kilo_core::{
    signal_id::{self, NodeId},
    topology::{Acting, Mesh},
    wireguard::{DeviceState, WireguardPlan, key::PublicKey},
};
use kilo_failover::{
    Far, Micros, Params, Signal,
    far::{self, Step},
};

pub use super::HELLO;
use super::{APART, FarGateway, FarLocation, PATIENCE, Refusal, far_location};

/// Actions, to be carried out in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Act {
    /// Move these prefixes from the peer that has them to this peer of the device. On failure the following
    /// actions are skipped: the claim will be repeated.
    Move(PublicKey, Vec<IpNet>),
    /// Send a datagram to a gateway's control address.
    Send(Ipv6Addr, Vec<u8>),
}

/// All locations, as this machine knows them.
#[derive(Debug)]
pub struct Follow {
    me: NodeId,
    params: Params,
    fars: BTreeMap<Far, far::Owners>,
    locations: BTreeMap<Far, FarLocation>,
    names: BTreeMap<NodeId, String>,
    /// Due probes of old leaders: time, location and gateway.
    later: Vec<(Micros, Far, NodeId)>,
}

impl Follow {
    /// Creates the state of the machine with this key, which knows nothing yet.
    pub fn new(key: &PublicKey) -> Self {
        Self {
            me: signal_id::node(key),
            params: Params::default(),
            fars: BTreeMap::new(),
            locations: BTreeMap::new(),
            names: BTreeMap::new(),
            later: Vec::new(),
        }
    }

    /// The acting leaders as claimed so far, for the next plan.
    pub fn acting(&self) -> Acting {
        Acting { locations: super::known(&self.fars), ..Acting::default() }
    }

    /// Takes over the locations of a mesh with gateways, and their plan. Returns whether the gateways have
    /// changed.
    pub fn set_locations(&mut self, mesh: &Mesh, plan: &WireguardPlan) -> bool {
        let locations = mesh.segments.iter().enumerate().filter(|(at, _)| mesh.fails_over(*at));
        let of = |(at, segment): (usize, &std::sync::Arc<kilo_core::topology::Segment>)| {
            let mut location = far_location(mesh, plan, &DeviceState::default(), at, segment);
            // Prefixes routed there because of a flag, for services for example, belong to no node either.
            let of_members: BTreeSet<IpNet> = location.members.values().flatten().copied().collect();
            let peers = location.gateways.iter().filter_map(|gateway| plan.peers.get(&gateway.key));
            let all = peers.flat_map(|peer| peer.allowed_ips.iter().copied());
            location.shared =
                all.filter(|prefix| !signal_id::is_control(prefix) && !of_members.contains(prefix)).collect();
            (signal_id::location(&segment.location), location)
        };
        let before: Vec<Ipv6Addr> = self.gateways().map(|gateway| gateway.control).collect();
        self.locations = locations.map(of).collect();
        // They have no owners that are to be forgotten: nothing is read from the device.
        super::set_locations(&mut self.fars, &self.locations);
        let named = mesh.segments.iter().flat_map(|segment| &segment.members);
        let named =
            named.filter_map(|member| Some((signal_id::node(&member.node.key?), member.name().to_owned())));
        self.names = named.collect();
        !self.gateways().map(|gateway| gateway.control).eq(before)
    }

    fn gateways(&self) -> impl Iterator<Item = &FarGateway> {
        self.locations.values().flat_map(|location| &location.gateways)
    }

    /// Keys of all gateways.
    pub fn keys(&self) -> BTreeSet<PublicKey> {
        self.gateways().map(|gateway| gateway.key).collect()
    }

    /// A node's name, for messages.
    pub fn name(&self, id: NodeId) -> &str {
        self.names.get(&id).map_or("an unknown node", String::as_str)
    }

    /// Announces this machine to every gateway, which answers with what it leads.
    pub fn hello(&self, nonce: u64) -> Vec<Act> {
        let of = |(far, location): (&Far, &FarLocation)| {
            let body =
                |gateway| Body::Claim { gateway, shared: Shared::Stay, part: (0, 1), members: Vec::new() };
            let signal = |id| self.signal(Kind::Moved, nonce, *far, body(id));
            location.gateways.iter().filter_map(|to| send(to.control, &signal(to.id))).collect::<Vec<_>>()
        };
        self.locations.iter().flat_map(of).collect()
    }

    fn signal(&self, kind: Kind, nonce: u64, location: Far, body: Body<Vec<u64>>) -> Signal {
        Signal { kind, nonce, term: Term::NONE, sender: self.me, location, body }
    }

    /// Handles a datagram that came out of the tunnel of the peer with this address.
    ///
    /// # Errors
    /// Why it is refused.
    pub fn hear(&mut self, from: IpAddr, bytes: &[u8], now: Micros) -> Result<Vec<Act>, Refusal> {
        let signal = signal::parse(bytes).map_err(|_| Refusal::Malformed)?;
        let signal = signal.map_list(|words| words.iter().collect());
        let of = |(far, location): (&Far, &FarLocation)| {
            let found = location.gateways.iter().find(|gateway| from == gateway.control);
            found.map(|gateway| (*far, gateway.id))
        };
        let (far, sender) = self.locations.iter().find_map(of).ok_or(Refusal::Gateway)?;
        match signal.kind {
            Kind::Reflected => {
                self.fars.values_mut().for_each(|acting| acting.answered(signal.nonce));
                Ok(Vec::new())
            }
            Kind::Claim | Kind::End if signal.sender == sender => {
                let pair = self.locations.get(&far).zip(self.fars.get_mut(&far)).ok_or(Refusal::Gateway)?;
                let (params, names) = (&self.params, &self.names);
                let claimed = super::claimed(params, pair, (far, sender), &signal, names, (self.me, now));
                Ok(claimed.step?.map_or_else(Vec::new, |step| self.apply_step(far, &step, now)))
            }
            _ => Err(Refusal::Gateway),
        }
    }

    fn apply_step(&mut self, far: Far, step: &Step, now: Micros) -> Vec<Act> {
        if let Some(old) = step.asks {
            self.later.extend([0, APART].map(|pause| (now + pause, far, old)));
        }
        let mut acts = self.moved(far, step.gateway, &step.moves, step.moves_shared);
        let to = self.gateways().find(|gateway| gateway.id == step.gateway);
        acts.extend(to.and_then(|to| send(to.control, &step.answer)));
        acts
    }

    fn moved(&self, far: Far, gateway: NodeId, members: &[NodeId], shared: bool) -> Vec<Act> {
        let Some(location) = self.locations.get(&far) else { return Vec::new() };
        let peer = location.gateways.iter().find(|known| known.id == gateway);
        let prefixes = super::prefixes(location, members, shared);
        let moves = peer.filter(|_| !prefixes.is_empty());
        moves.map(|peer| Act::Move(peer.key, prefixes)).into_iter().collect()
    }

    /// When [`Self::wake_up`] is due.
    pub fn wake(&self) -> Micros {
        let later = self.later.iter().map(|(at, ..)| *at);
        later.chain(self.fars.values().map(far::Owners::wake)).min().unwrap_or(Micros::MAX)
    }

    /// Probes old leaders whose shared prefixes are claimed, and moves the prefixes when one is silent.
    pub fn wake_up(&mut self, now: Micros, mut nonce: impl FnMut() -> u64) -> Vec<Act> {
        let mut acts = Vec::new();
        let due: Vec<_> = self.later.extract_if(.., |(at, ..)| *at <= now).collect();
        for (_, far, old) in due {
            let nonce = nonce();
            if let Some(acting) = self.fars.get_mut(&far) {
                acting.probed(nonce, now, PATIENCE);
            }
            let to = self.gateways().find(|gateway| gateway.id == old).map(|gateway| gateway.control);
            let probe = self.signal(Kind::Probe, nonce, far, Body::Empty);
            acts.extend(to.and_then(|to| send(to, &probe)));
        }
        let silent = self.fars.iter_mut().filter_map(|(far, acting)| acting.wake_up(now).then_some(*far));
        for far in silent.collect::<Vec<_>>() {
            if let Some(gateway) = self.fars.get(&far).map(far::Owners::shared) {
                acts.extend(self.moved(far, gateway, &[], true));
            }
        }
        acts
    }
}

fn send(to: Ipv6Addr, signal: &Signal) -> Option<Act> {
    let mut bytes = [0; LONGEST];
    let length = signal::write(&mut bytes, signal, None)?;
    Some(Act::Send(to, bytes[..length].to_vec()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use kilo_core::{
        objects::{Node, Peer},
        settings::Granularity,
        vpn_peer,
    };

    use super::*;

    const LAPTOP: PublicKey = PublicKey([99; 32]);

    fn key(name: &str) -> PublicKey {
        PublicKey([name.as_bytes()[1]; 32])
    }

    fn control(name: &str) -> Ipv6Addr {
        signal_id::control_address(&key(name))
    }

    /// Three nodes in one location, two of them gateways; `follow` keeps what it has heard.
    fn plan(follow: &Follow, follows: bool) -> (Mesh, vpn_peer::ConnectPlan) {
        let node = |name: &str, n: u8| Node {
            name: name.to_owned(),
            location: "a".to_owned(),
            endpoint: format!("192.0.2.{n}:51820").parse().ok(),
            key: Some(key(name)),
            internal_ip: format!("10.1.0.{n}/24").parse().ok(),
            pod_cidrs: vec![format!("10.42.{n}.0/24").parse().unwrap()],
            signal: true,
            ..Node::default()
        };
        let nodes = [node("a1", 1), node("a2", 2), node("a3", 3)];
        let laptop = Peer {
            name: "laptop".to_owned(),
            allowed_ips: vec!["10.5.0.1/32".parse().unwrap()],
            endpoint: None,
            persistent_keepalive: 10,
            preshared_key: None,
            public_key: LAPTOP,
            follows,
        };
        let peers = BTreeMap::from([("laptop".to_owned(), laptop)]);
        let mesh = Mesh::new(&nodes, &peers, Granularity::Location, "10.4.0.0/16".parse().unwrap());
        let mesh = mesh.with_acting(1, std::sync::Arc::new(follow.acting()));
        let options = vpn_peer::Options {
            peer: "laptop".to_owned(),
            port: 51820,
            mtu: 1420,
            persistent_keepalive: 10,
            more_prefixes: vec!["10.43.0.0/16".parse().unwrap()],
        };
        let plan = vpn_peer::plan(&mesh, &options, &BTreeMap::new()).unwrap();
        (mesh, plan)
    }

    fn allowed(plan: &vpn_peer::ConnectPlan, name: &str) -> Vec<String> {
        let Some(peer) = plan.wireguard.peers.get(&key(name)) else { return Vec::new() };
        peer.allowed_ips
            .iter()
            .filter(|prefix| !signal_id::is_control(prefix))
            .map(ToString::to_string)
            .collect()
    }

    fn claim(by: &str, term: Term, members: &[&str], location: Far) -> Vec<u8> {
        let gateway = signal_id::node(&key(by));
        let members = members.iter().map(|name| signal_id::node(&key(name))).collect();
        let body = Body::Claim { gateway, shared: Shared::Move, part: (0, 1), members };
        let signal = Signal { kind: Kind::Claim, nonce: 1, term, sender: gateway, location, body };
        let Some(Act::Send(_, bytes)) = send(Ipv6Addr::LOCALHOST, &signal) else { panic!("not written") };
        bytes
    }

    #[test]
    fn all_gateways_are_held_and_prefixes_follow_what_they_claim() {
        let mut follow = Follow::new(&LAPTOP);
        let (mesh, before) = plan(&follow, true);
        assert!(follow.set_locations(&mesh, &before.wireguard));
        assert!(!follow.set_locations(&mesh, &before.wireguard));
        assert_eq!(follow.keys(), BTreeSet::from([key("a1"), key("a2")]));
        assert_eq!(allowed(&before, "a2"), Vec::<String>::new(), "a stand-by has nothing yet");
        let all = allowed(&before, "a1");
        for prefix in ["10.42.1.0/24", "10.42.3.0/24", "10.1.0.2/32", "10.4.0.1/32", "10.43.0.0/16"] {
            assert!(all.contains(&prefix.to_owned()), "{prefix} is not in {all:?}");
        }
        for (name, peer) in [("a1", 0), ("a2", 1)] {
            let peers = &before.wireguard.peers[&key(name)];
            assert!(peers.allowed_ips.contains(&IpNet::from(IpAddr::V6(control(name)))), "{peer}");
        }
        assert!(!before.wireguard.peers.contains_key(&key("a3")), "no gateway");
        let mine: IpNet = IpAddr::V6(signal_id::control_address(&LAPTOP)).into();
        assert!(before.net.addresses.contains(&mine));
        let sources: Vec<_> =
            before.net.routes.iter().map(|route| (route.destination, route.source)).collect();
        for (destination, source) in sources {
            let wanted = if signal_id::is_control(&destination) { mine.addr() } else { [10, 5, 0, 1].into() };
            assert_eq!(source, Some(wanted), "{destination}");
        }
        // a2 takes over, except for a1 itself.
        let far = signal_id::location("location:a");
        assert_eq!(follow.locations[&far].name, "location:a");
        let term = Term::NONE.next(signal_id::node(&key("a2")));
        let acts = follow.hear(control("a2").into(), &claim("a2", term, &["a2", "a3"], far), 0).unwrap();
        let [Act::Move(to, prefixes), Act::Send(answered, _)] = &acts[..] else { panic!("{acts:?}") };
        assert_eq!((*to, *answered), (key("a2"), control("a2")));
        let (_, after) = plan(&follow, true);
        let mut moved: Vec<_> = prefixes.iter().map(ToString::to_string).collect();
        moved.sort();
        let mut planned = allowed(&after, "a2");
        planned.sort();
        assert_eq!(moved, planned, "the next plan moves nothing back");
        assert!(moved.contains(&"10.43.0.0/16".to_owned()) && moved.contains(&"10.42.3.0/24".to_owned()));
        assert_eq!(allowed(&after, "a1"), ["10.1.0.1/32", "10.42.1.0/24"]);
        // A repeated claim is answered, and moves nothing.
        let acts = follow.hear(control("a2").into(), &claim("a2", term, &["a2", "a3"], far), 0).unwrap();
        assert!(matches!(&acts[..], [Act::Send(..)]));
    }

    #[test]
    fn who_is_no_gateway_or_speaks_for_another_moves_nothing() {
        let mut follow = Follow::new(&LAPTOP);
        let (mesh, before) = plan(&follow, true);
        follow.set_locations(&mesh, &before.wireguard);
        let far = signal_id::location("location:a");
        let term = Term::NONE.next(signal_id::node(&key("a2")));
        let good = claim("a2", term, &["a3"], far);
        assert_eq!(follow.hear(control("a1").into(), &good, 0), Err(Refusal::Gateway), "another's tunnel");
        assert_eq!(
            follow.hear(control("a3").into(), &claim("a3", term, &["a3"], far), 0),
            Err(Refusal::Gateway)
        );
        assert_eq!(
            follow.hear(control("a2").into(), &claim("a2", term, &["a3"], far + 1), 0),
            Err(Refusal::Location)
        );
        let leap = claim("a2", Term::from_bits(u64::MAX), &["a3"], far);
        assert_eq!(follow.hear(control("a2").into(), &leap, 0), Err(Refusal::Leap));
        assert_eq!(follow.hear(control("a2").into(), &good[..40], 0), Err(Refusal::Malformed));
        assert_eq!(plan(&follow, true).1, before);
    }

    #[test]
    fn who_does_not_follow_has_what_it_always_had() {
        let follow = Follow::new(&LAPTOP);
        let (_, plan) = plan(&follow, false);
        assert_eq!(plan.wireguard.peers.keys().collect::<Vec<_>>(), [&key("a1")]);
        assert!(
            plan.wireguard.peers[&key("a1")].allowed_ips.iter().all(|prefix| !signal_id::is_control(prefix))
        );
        assert!(plan.net.addresses.iter().all(|address| !signal_id::is_control(address)));
    }

    #[test]
    fn every_gateway_hears_that_it_is_there() {
        let mut follow = Follow::new(&LAPTOP);
        let (mesh, plan) = plan(&follow, true);
        follow.set_locations(&mesh, &plan.wireguard);
        let to = follow.hello(7).into_iter().map(|act| match act {
            Act::Send(to, bytes) => (to, signal::parse(&bytes).unwrap().kind),
            Act::Move(..) => panic!("nothing moves"),
        });
        assert_eq!(to.collect::<Vec<_>>(), [(control("a1"), Kind::Moved), (control("a2"), Kind::Moved)]);
    }
}

//! From the device's state to the planned one: what has to change, one peer
//! at a time, and in which messages. Pure.

use std::{cell::LazyCell, collections::BTreeSet, net::SocketAddr, time::Duration};

use ipnet::IpNet;
use itertools::{
    EitherOrBoth::{Both, Left, Right},
    Itertools as _,
};

use super::{
    DeviceState, PeerState, WireguardPeer, WireguardPlan,
    key::{PublicKey, SecretKey},
    uapi::{SetPeer, SetRequest},
};
use crate::flat_map::Key as _;

/// A peer with a keepalive shakes hands every two minutes; when that stopped
/// for this long, the endpoint it was last seen at no longer works.
pub const ROAMING_TRUST: Duration = Duration::from_secs(300);

/// One step from the current to the planned state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Another private key.
    PrivateKey(SecretKey),
    /// Another UDP port.
    ListenPort(u16),
    /// A new peer, or new values of one.
    SetPeer(PublicKey, PeerUpdate),
    /// Prefixes that no peer is to have any more, taken from their peers without
    /// touching what else those have.
    Release(Vec<IpNet>),
    /// A peer that goes.
    RemovePeer(PublicKey),
}

impl DeviceState {
    /// Makes this the state after the changes of one [`diff`],
    /// without reading the device.
    pub fn take(&mut self, changes: &[Change]) {
        let moved: BTreeSet<IpNet> = changes
            .iter()
            .flat_map(|change| match change {
                Change::SetPeer(_, PeerUpdate { add_allowed_ips: nets, .. }) | Change::Release(nets) => nets,
                _ => &[][..],
            })
            .copied()
            .collect();
        for peer in self.peers.values_mut() {
            if moved.len() < peer.allowed_ips.len() {
                for net in &moved {
                    peer.allowed_ips.remove(net);
                }
            } else {
                peer.allowed_ips.retain(|net| !moved.contains(net));
            }
        }
        for change in changes {
            match change {
                Change::PrivateKey(key) => self.private_key = Some(*key),
                Change::ListenPort(port) => self.listen_port = *port,
                Change::SetPeer(key, update) => {
                    let peer = self.peers.entry(*key).or_default();
                    peer.endpoint = update.endpoint.or(peer.endpoint);
                    peer.persistent_keepalive =
                        update.persistent_keepalive.unwrap_or(peer.persistent_keepalive);
                    peer.preshared_key = update.preshared_key.unwrap_or(peer.preshared_key);
                    peer.allowed_ips.extend(&update.add_allowed_ips);
                }
                Change::Release(_) => {}
                Change::RemovePeer(key) => drop(self.peers.remove(key)),
            }
        }
    }
}

/// Changes to one peer; `None` leaves a setting as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerUpdate {
    /// New endpoint: where the device sends until the peer is seen elsewhere.
    pub endpoint: Option<SocketAddr>,
    /// New keepalive, in seconds.
    pub persistent_keepalive: Option<u16>,
    /// New pre-shared key; `Some(None)` removes it.
    pub preshared_key: Option<Option<SecretKey>>,
    /// Prefixes it gets: new ones, or those of another peer.
    pub add_allowed_ips: Vec<IpNet>,
}

/// What has to change. Empty = nothing to write.
///
/// Order: key and port, then all claims, then releases, then removals. A
/// prefix that moves is only claimed: WireGuard takes it from its former
/// holder in the same step, so no packet finds it without an owner.
pub fn diff(current: &DeviceState, plan: &WireguardPlan, private_key: &SecretKey) -> Vec<Change> {
    let mut changes = Vec::new();
    let own = private_key.public();
    // The kernel clamps a private key when it stores it: compare what matters.
    if current.private_key.map(|key| key.public()) != Some(own) {
        changes.push(Change::PrivateKey(*private_key));
    }
    if current.listen_port != plan.listen_port {
        changes.push(Change::ListenPort(plan.listen_port));
    }
    // WireGuard silently refuses a peer with the device's own key.
    let wanted = || plan.peers.iter().filter(|(key, _)| **key != own);
    // Prefixes that peers get, and prefixes that they have and must lose.
    let (mut claimed, mut unclaimed) = (BTreeSet::new(), Vec::new());
    // Hosts of the mesh: packets to such an endpoint would be encrypted
    // again, for another peer.
    let hosts = LazyCell::new(|| {
        let prefixes = plan.peers.values().flat_map(|peer| &peer.allowed_ips);
        prefixes.filter(|prefix| prefix.prefix_len() == prefix.max_prefix_len()).collect::<BTreeSet<_>>()
    });
    let is_via_wireguard = |endpoint: SocketAddr| hosts.contains(&IpNet::from(endpoint.ip()));
    for (key, peer) in wanted() {
        let present = current.peers.get(key);
        let update = update(present, peer, is_via_wireguard, &mut claimed, &mut unclaimed);
        if present.is_none() || update != PeerUpdate::default() {
            changes.push(Change::SetPeer(*key, update));
        }
    }
    unclaimed.retain(|net| !claimed.contains(net));
    if !unclaimed.is_empty() {
        changes.push(Change::Release(unclaimed));
    }
    let stays = |key: &PublicKey| *key != own && plan.peers.contains_key(key);
    changes.extend(current.peers.keys().filter(|key| !stays(key)).map(|key| Change::RemovePeer(*key)));
    changes
}

/// Adds to `claimed` what the peer gets, and to `unclaimed` what it has to give up.
fn update(
    present: Option<&PeerState>,
    wanted: &WireguardPeer,
    is_via_wireguard: impl Fn(SocketAddr) -> bool,
    claimed: &mut BTreeSet<IpNet>,
    unclaimed: &mut Vec<IpNet>,
) -> PeerUpdate {
    let fresh = PeerState::default();
    let present = present.unwrap_or(&fresh);
    let learnt = wanted.roams
        && present.endpoint.is_some_and(|endpoint| !is_via_wireguard(endpoint))
        && present.handshake_age.is_some_and(|age| age < ROAMING_TRUST);
    let mut claims = Vec::new();
    let order = |one: &&IpNet, other: &&IpNet| one.rank().cmp(&other.rank());
    for side in present.allowed_ips.iter().merge_join_by(&wanted.allowed_ips, order) {
        match side {
            Right(net) if claimed.insert(*net) => claims.push(*net),
            Left(net) => unclaimed.push(*net),
            Right(_) | Both(..) => {}
        }
    }
    PeerUpdate {
        endpoint: wanted.endpoint.filter(|wanted| {
            !learnt && present.endpoint.is_none_or(|present| !same_endpoint(*wanted, present))
        }),
        persistent_keepalive: (wanted.persistent_keepalive != present.persistent_keepalive)
            .then_some(wanted.persistent_keepalive),
        preshared_key: (wanted.preshared_key != present.preshared_key).then_some(wanted.preshared_key),
        add_allowed_ips: claims,
    }
}

/// Flow label and scope are left to the kernel.
fn same_endpoint(one: SocketAddr, other: SocketAddr) -> bool {
    one.ip() == other.ip() && one.port() == other.port()
}

/// Claims prefixes for a moment to take them from their peers, and is removed
/// in the same request: kernels before 6.16 cannot remove a single prefix, and
/// replacing a peer's list leaves all its prefixes without owner meanwhile.
/// Should a crash leave it behind, the next diff removes it as unknown.
pub const TOMBSTONE: PublicKey = PublicKey(*b"kilo releases allowed addresses!");

/// Bytes of allowed IPs per entry: a netlink message holds 8 KiB, and an entry
/// must fit in one (at most 275 IPv4 or 192 IPv6 prefixes here, where 288 or
/// 201 would fit an otherwise empty one).
const ENTRY_BYTES: usize = 7_700;

fn entry_bytes(net: &IpNet) -> usize {
    // Nested attribute: header 4, family 8, prefix length 8, address 8 or 20.
    match net {
        IpNet::V4(_) => 28,
        IpNet::V6(_) => 40,
    }
}

/// A change of one peer as a request; a peer that has gone
/// meanwhile is not created anew.
pub fn request_for_known(peer: PublicKey, update: PeerUpdate) -> SetRequest {
    let mut request = request(&[Change::SetPeer(peer, update)]);
    request.peers.iter_mut().for_each(|peer| peer.update_only = true);
    request
}

/// Changes as one request; peers with many prefixes become several entries of
/// the same key.
pub fn request(changes: &[Change]) -> SetRequest {
    let mut request = SetRequest::default();
    for change in changes {
        match change {
            Change::PrivateKey(key) => request.private_key = Some(*key),
            Change::ListenPort(port) => request.listen_port = Some(*port),
            Change::SetPeer(key, update) => {
                let first = SetPeer {
                    endpoint: update.endpoint,
                    persistent_keepalive: update.persistent_keepalive,
                    preshared_key: update.preshared_key,
                    ..SetPeer::new(*key)
                };
                split(&mut request.peers, first, &update.add_allowed_ips);
            }
            Change::Release(nets) => {
                split(&mut request.peers, SetPeer::new(TOMBSTONE), nets);
                request.peers.push(SetPeer { remove: true, ..SetPeer::new(TOMBSTONE) });
            }
            Change::RemovePeer(key) => {
                request.peers.push(SetPeer { remove: true, ..SetPeer::new(*key) });
            }
        }
    }
    request
}

fn split(peers: &mut Vec<SetPeer>, mut entry: SetPeer, nets: &[IpNet]) {
    let key = entry.public_key;
    let mut bytes = 0;
    for net in nets {
        if bytes + entry_bytes(net) > ENTRY_BYTES {
            peers.push(std::mem::replace(&mut entry, SetPeer::new(key)));
            bytes = 0;
        }
        bytes += entry_bytes(net);
        entry.allowed_ips.push(*net);
    }
    peers.push(entry);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Applies a request as WireGuard does.
    fn simulate(state: &mut DeviceState, request: &SetRequest) {
        if let Some(key) = request.private_key {
            state.private_key = Some(key);
        }
        if let Some(port) = request.listen_port {
            state.listen_port = port;
        }
        assert!(!request.replace_peers);
        for set in &request.peers {
            assert!(set.allowed_ips.iter().map(entry_bytes).sum::<usize>() <= ENTRY_BYTES);
            assert!(!set.replace_allowed_ips);
            if set.remove {
                state.peers.remove(&set.public_key);
                continue;
            }
            for net in &set.allowed_ips {
                for peer in state.peers.values_mut() {
                    peer.allowed_ips.remove(net);
                }
            }
            let peer = state.peers.entry(set.public_key).or_default();
            peer.endpoint = set.endpoint.or(peer.endpoint);
            peer.persistent_keepalive = set.persistent_keepalive.unwrap_or(peer.persistent_keepalive);
            peer.preshared_key = set.preshared_key.unwrap_or(peer.preshared_key);
            peer.allowed_ips.extend(&set.allowed_ips);
        }
    }

    fn key(n: u8) -> PublicKey {
        PublicKey([n; 32])
    }

    fn secret(n: u8) -> SecretKey {
        SecretKey::from_bytes([n; 32])
    }

    fn net(n: u16) -> IpNet {
        if n.is_multiple_of(3) {
            format!("fd00:{n:x}::/64").parse().unwrap()
        } else {
            format!("10.{}.{}.0/24", n / 256, n % 256).parse().unwrap()
        }
    }

    fn endpoint(n: u8) -> SocketAddr {
        SocketAddr::from(([192, 0, 2, n], 51820))
    }

    prop_compose! {
        fn any_state()(
            private in proptest::option::of(0u8..3), port in 0u16..3,
            peers in proptest::collection::btree_map(0u8..8, (
                proptest::option::of(0u8..3), 0u16..2, proptest::option::of(0u8..2), proptest::option::of(0u64..600),
            ), 0..8),
            owners in proptest::collection::btree_map(0u16..400, 0u8..8, 0..400),
        ) -> DeviceState {
            DeviceState {
                private_key: private.map(secret),
                listen_port: port,
                peers: peers.into_iter().map(|(n, (address, keepalive, psk, age))| (key(n), PeerState {
                    allowed_ips: owners.iter().filter(|(_, owner)| **owner == n).map(|(number, _)| net(*number)).collect(),
                    endpoint: address.map(endpoint),
                    persistent_keepalive: keepalive,
                    preshared_key: psk.map(secret),
                    handshake_age: age.map(Duration::from_secs),
                    ..PeerState::default()
                })).collect(),
            }
        }
    }

    prop_compose! {
        fn any_plan()(state in any_state(), roams in 0u8..=255) -> WireguardPlan {
            WireguardPlan {
                listen_port: state.listen_port,
                peers: state.peers.into_iter().map(|(key, peer)| (key, WireguardPeer {
                    allowed_ips: peer.allowed_ips.into_iter().collect(),
                    endpoint: peer.endpoint,
                    roams: roams >> (key.0[0] % 8) & 1 == 1,
                    persistent_keepalive: peer.persistent_keepalive,
                    preshared_key: peer.preshared_key,
                })).collect(),
            }
        }
    }

    proptest! {
        #[test]
        fn applying_the_diff_reaches_the_plan_and_touches_nothing_else(
            before in any_state(), plan in any_plan(), private in 0u8..3,
        ) {
            let changes = diff(&before, &plan, &secret(private));
            let mut after = before.clone();
            simulate(&mut after, &request(&changes));
            let mut known = before.clone();
            known.take(&changes);
            prop_assert_eq!(&known, &after);
            prop_assert_eq!(after.private_key, Some(secret(private)));
            prop_assert_eq!(after.listen_port, plan.listen_port);
            prop_assert_eq!(after.peers.keys().collect::<Vec<_>>(), plan.peers.keys().collect::<Vec<_>>());
            for (key, wanted) in &plan.peers {
                let peer = &after.peers[key];
                let had = before.peers.get(key);
                prop_assert!(peer.allowed_ips.iter().eq(wanted.allowed_ips.iter()));
                prop_assert_eq!(peer.persistent_keepalive, wanted.persistent_keepalive);
                prop_assert_eq!(peer.preshared_key, wanted.preshared_key);
                let learnt = had.is_some_and(|had| {
                    had.endpoint.is_some() && had.handshake_age.is_some_and(|age| age < ROAMING_TRUST)
                });
                let kept = had.and_then(|had| had.endpoint);
                let expected = if wanted.roams && learnt { kept } else { wanted.endpoint.or(kept) };
                prop_assert_eq!(peer.endpoint, expected);
                // A peer that is right already is not mentioned.
                if had == Some(peer) {
                    let named = changes.iter().any(|change| matches!(change, Change::SetPeer(named, _) if named == key));
                    prop_assert!(!named);
                }
            }
            prop_assert_eq!(diff(&after, &plan, &secret(private)), vec![]);
        }
    }

    fn plan(peers: &[(u8, &[u16])]) -> WireguardPlan {
        WireguardPlan {
            listen_port: 51820,
            peers: peers
                .iter()
                .map(|(n, nets)| {
                    let allowed_ips = nets.iter().map(|number| net(*number)).collect();
                    (key(*n), WireguardPeer { allowed_ips, ..WireguardPeer::default() })
                })
                .collect(),
        }
    }

    fn reached(plan: &WireguardPlan) -> DeviceState {
        let mut state = DeviceState::default();
        let changes = diff(&state, plan, &secret(1));
        simulate(&mut state, &request(&changes));
        state
    }

    #[test]
    fn a_prefix_that_moves_is_claimed_and_nothing_else() {
        let before = reached(&plan(&[(1, &[1, 2]), (2, &[4])]));
        let changes = diff(&before, &plan(&[(1, &[1]), (2, &[2, 4])]), &secret(1));
        let update = PeerUpdate { add_allowed_ips: vec![net(2)], ..PeerUpdate::default() };
        assert_eq!(changes, vec![Change::SetPeer(key(2), update)]);
    }

    #[test]
    fn adding_a_peer_mentions_no_other() {
        let before = reached(&plan(&[(1, &[1, 2]), (2, &[4])]));
        let changes = diff(&before, &plan(&[(1, &[1, 2]), (2, &[4]), (3, &[5])]), &secret(1));
        assert!(matches!(changes.as_slice(), [Change::SetPeer(named, _)] if *named == key(3)));
    }

    #[test]
    fn a_removed_prefix_is_released_through_the_tombstone() {
        let before = reached(&plan(&[(1, &[1, 2])]));
        let changes = diff(&before, &plan(&[(1, &[1])]), &secret(1));
        assert_eq!(changes, vec![Change::Release(vec![net(2)])]);
        let request = request(&changes);
        assert!(request.peers.iter().all(|set| set.public_key == TOMBSTONE));
        assert!(request.peers.last().unwrap().remove);
    }

    #[test]
    fn an_endpoint_via_wireguard_was_not_learnt() {
        let mut plan = plan(&[(1, &[1]), (2, &[4])]);
        let via = SocketAddr::from(([10, 2, 0, 12], 51820));
        plan.peers.get_mut(&key(2)).unwrap().allowed_ips = [IpNet::from(via.ip())].into_iter().collect();
        let wanted = plan.peers.get_mut(&key(1)).unwrap();
        (wanted.roams, wanted.endpoint) = (true, Some(endpoint(1)));
        let mut state = reached(&plan);
        let set_back = PeerUpdate { endpoint: Some(endpoint(1)), ..PeerUpdate::default() };
        for (seen, changes) in [
            (endpoint(7), vec![]),
            // As long as that peer answers, and no longer.
            (via, vec![Change::SetPeer(key(1), set_back)]),
        ] {
            let peer = state.peers.get_mut(&key(1)).unwrap();
            (peer.endpoint, peer.handshake_age) = (Some(seen), Some(Duration::from_secs(1)));
            assert_eq!(diff(&state, &plan, &secret(1)), changes);
        }
    }

    #[test]
    fn a_peer_with_the_own_key_is_left_out() {
        let mut plan = plan(&[(1, &[1])]);
        plan.peers.insert(secret(1).public(), WireguardPeer::default());
        let state = reached(&plan);
        assert_eq!(state.peers.len(), 1);
        assert_eq!(diff(&state, &plan, &secret(1)), vec![]);
    }
}

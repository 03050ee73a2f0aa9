//! Sends packets for the mesh through its tunnel or nowhere, even before the tunnel exists: behind the routes
//! into the tunnel there are `unreachable` routes to the same prefixes.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    time::{Duration, Instant},
};

use ipnet::IpNet;
use kilo_core::{
    net::NetPlan,
    topology::former::{KEPT, PODS_KEPT},
    wireguard::WireguardPlan,
};
use kilo_host::net::{Net, NetError};

/// Prefixes whose traffic must not leave in cleartext.
#[derive(Debug, Default)]
pub struct Closed {
    /// When each prefix was last planned.
    planned: BTreeMap<IpNet, Instant>,
    /// The plan whose routes were last added.
    last: Option<NetPlan>,
}

/// Makes these prefixes unreachable, as the first step.
pub async fn begin(net: &Net, mut prefixes: BTreeSet<IpNet>) -> Result<usize, NetError> {
    without_missing_family(&mut prefixes);
    net.close(&NetPlan { unreachable: prefixes, ..NetPlan::default() }).await
}

impl Closed {
    /// Adds former prefixes to a plan of the whole mesh, and installs its `unreachable` routes before it is
    /// applied.
    pub async fn before(
        &mut self,
        net: &Net,
        plan: &mut NetPlan,
        wireguard: &WireguardPlan,
    ) -> Result<usize, NetError> {
        self.complete(plan, wireguard, Instant::now());
        without_missing_family(&mut plan.unreachable);
        if self.last.as_ref() == Some(plan) {
            return Ok(0);
        }
        let writes = net.close(plan).await?;
        self.last = Some(plan.clone());
        Ok(writes)
    }

    /// Adds prefixes that were planned recently but no longer are.
    fn complete(&mut self, plan: &mut NetPlan, wireguard: &WireguardPlan, now: Instant) {
        let routes: BTreeSet<IpNet> = plan.routes.iter().map(|route| route.destination).collect();
        let closed = plan.routes.iter().filter(|route| route.closed).map(|route| route.destination);
        self.planned.extend(closed.chain(plan.unreachable.iter().copied()).map(|prefix| (prefix, now)));
        self.planned.retain(|prefix, last| now.saturating_duration_since(*last) < kept(prefix));
        let endpoints = || wireguard.peers.values().filter_map(|peer| peer.endpoint);
        // WireGuard's own packets must reach their endpoints.
        let is_outer = |prefix: &IpNet| endpoints().any(|endpoint| prefix.contains(&endpoint.ip()));
        let former = self.planned.keys().filter(|prefix| !routes.contains(*prefix) && !is_outer(prefix));
        plan.unreachable.extend(former);
    }
}

/// How long a former prefix stays unreachable: the address of a host because connections to it are open and
/// the node may come back, prefixes of pods for longer because nobody else uses them.
fn kept(prefix: &IpNet) -> Duration {
    if prefix.prefix_len() == prefix.max_prefix_len() { KEPT } else { PODS_KEPT }
}

/// Without IPv6 the kernel sends nothing to such prefixes, and rejects routes to them.
fn without_missing_family(prefixes: &mut BTreeSet<IpNet>) {
    if !Path::new("/proc/sys/net/ipv6").exists() {
        prefixes.retain(|prefix| prefix.addr().is_ipv4());
    }
}

#[cfg(test)]
mod tests {
    use kilo_core::{
        net::{MAIN_TABLE, Route},
        wireguard::{WireguardPeer, key::PublicKey},
    };

    use super::*;

    fn plan(destinations: &[&str]) -> NetPlan {
        let route = |destination: &&str| Route {
            destination: destination.parse().unwrap(),
            table: MAIN_TABLE,
            source: None,
            mtu: None,
            closed: true,
        };
        NetPlan { routes: destinations.iter().map(route).collect(), ..NetPlan::default() }
    }

    #[test]
    fn what_a_node_had_that_is_gone_is_unreachable_for_a_while_and_its_endpoint_is_not() {
        let began = Instant::now();
        let (node, pods, other) = ("10.1.0.1/32", "10.42.1.0/24", "10.42.2.0/24");
        let peer = WireguardPeer { endpoint: "10.1.0.1:51820".parse().ok(), ..WireguardPeer::default() };
        let without_peer = WireguardPlan::default();
        let with_peer = WireguardPlan { peers: [(PublicKey([1; 32]), peer)].into(), ..without_peer.clone() };
        let mut closed = Closed::default();
        let mut after = |seconds, destinations: &[&str], wireguard| {
            let mut plan = plan(destinations);
            closed.complete(&mut plan, wireguard, began + Duration::from_secs(seconds));
            plan.unreachable.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(after(0, &[node, pods, other], &without_peer), [""; 0]);
        assert_eq!(after(10, &[other], &without_peer), [node, pods]);
        assert_eq!(after(20, &[other], &with_peer), [pods], "it is sent to from here");
        assert_eq!(after(59, &[other, pods], &without_peer), [node]);
        assert_eq!(after(60, &[other], &without_peer), [pods], "the host's address is anybody's again");
        assert_eq!(after(59 + 20 * 60 - 1, &[other], &without_peer), [pods]);
        assert_eq!(after(59 + 20 * 60, &[other], &without_peer), [""; 0]);
    }
}

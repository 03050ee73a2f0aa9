//! The state of this host: read as a whole, then kept current by adding our own writes until something else
//! changes it or a resync is due.

use std::{collections::BTreeMap, net::SocketAddr, sync::Arc};

use super::{Agent, AgentError};
use crate::backend::Backend;
use kilo_core::{
    net::NetPlan,
    objects::Snapshot,
    relay::RelayAddresses,
    wireguard::{DeviceState, key::PublicKey},
};
use kilo_host::{
    interface::Interface,
    net::{
        Link, MainRoute, NetError, OurRoutes, Paths, RoutesOut,
        tunnels::{self, Tunnels},
    },
};

/// Current endpoints of peers and relays, collected once per reconcile for all of its steps.
pub(super) struct SeenEndpoints {
    /// Endpoints at which this host's WireGuard device sees its peers.
    peers: BTreeMap<PublicKey, SocketAddr>,
    /// Addresses of relays: a peer seen at one of them is really somewhere else.
    pub relay_addresses: Arc<RelayAddresses>,
}

impl SeenEndpoints {
    pub fn new(snapshot: &Snapshot, host: &HostState) -> Self {
        let peers = host.state.seen_endpoints();
        let relay_addresses = RelayAddresses::of(&snapshot.nodes, &peers).into();
        Self { peers, relay_addresses }
    }

    /// Peers that are seen at their own address, not at a relay's.
    pub fn peers_at_own_addresses(&self) -> impl Iterator<Item = (PublicKey, SocketAddr)> {
        self.peers().filter(|(_, at)| !self.relay_addresses.contains(*at))
    }

    /// Peers that the device sends to through a relay.
    pub fn peers_at_relays(&self) -> impl Iterator<Item = (PublicKey, SocketAddr)> {
        self.peers().filter(|(_, at)| self.relay_addresses.contains(*at))
    }

    fn peers(&self) -> impl Iterator<Item = (PublicKey, SocketAddr)> {
        self.peers.iter().map(|(key, at)| (*key, *at))
    }
}

/// The state of this host as last read, updated by each write since.
pub(super) struct HostState {
    pub interface: Interface,
    pub tunnels: Tunnels,
    pub links: Vec<Link>,
    pub routes_out: RoutesOut,
    /// Our routes, until a plan has been applied to them.
    pub routes: Option<OurRoutes>,
    /// Routes on interfaces with global addresses, in the main table.
    pub main_routes: Vec<MainRoute>,
    /// What the WireGuard device is configured with.
    pub state: DeviceState,
    /// Paths to nodes, as far as they have been looked up.
    pub paths: Paths,
    /// The addresses and routes in place; `None` until a plan has been applied.
    pub net: Option<NetPlan>,
    /// Number of devices created, to be counted once as writes.
    pub made: u64,
}

impl<B: Backend> Agent<B> {
    /// Reads the whole host state and creates devices that are missing.
    pub(super) async fn read_host(&mut self) -> Result<HostState, AgentError> {
        let (interface, created) =
            Interface::ensure(&self.actuators.net, &self.options.interface, self.actuators.device).await?;
        self.actuators.device = Some(interface.index);
        let tunnels = tunnels::ensure(self.actuators.net.rtnl()).await;
        for problem in &tunnels.problems {
            self.metrics.error("tunnel_device");
            tracing::warn!(error = %problem, "failed to create tunnel device; packets that need it are dropped");
        }
        let links = self.actuators.net.links().await?;
        if !links.iter().any(|link| link.index == interface.index) {
            return Err(NetError::Missing(format!("link {}", self.options.interface.name)).into());
        }
        let own: Vec<u32> = [interface.index].into_iter().chain(tunnels.vxlan).chain(tunnels.ipip).collect();
        let (routes_out, routes) = self.actuators.net.routes_out(&own).await?;
        let leads_out: Vec<u32> = links
            .iter()
            .filter(|link| link.index != interface.index && !link.loopback)
            .filter(|link| link.addresses.iter().any(|address| address.global))
            .map(|link| link.index)
            .collect();
        let main_routes = self.actuators.net.main_routes(&leads_out).await?;
        let state = interface.device.read().await?;
        let made = u64::from(created) + tunnels.created;
        let (paths, net, routes) = (Paths::default(), None, Some(routes));
        Ok(HostState { interface, tunnels, links, routes_out, routes, main_routes, state, paths, net, made })
    }
}

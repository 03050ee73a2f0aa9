//! Builds a plan from the mesh and this host, and looks up the planner's other inputs.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc, time::Instant};

use tokio::sync::Notify;

use super::{
    Agent,
    host_state::{HostState, SeenEndpoints},
};
use crate::{
    backend::Backend,
    failover::Failover,
    relay::{self, Relays},
    resolve::Resolver,
};
use kilo_common::maps::SignalKey;
use kilo_core::{
    observed::HostLinks,
    plan::{self, HostPlan, Inputs},
    settings::{HostRouting, Masquerade, Relay},
    topology::{self, LocalMesh, Mesh, Node},
};
use kilo_host::{
    dataplane::PathMtus,
    net::{conntrack, forwarding, links, neighbours},
};

/// What finds inputs of the plan beside the reconciles. Each causes a reconcile when it has news.
pub(super) struct Sources {
    /// Addresses of DNS names in endpoints, and of this node's own name.
    pub resolver: Resolver,
    pub path_mtus: PathMtus,
    /// Endpoints that the relay task has found.
    pub relays: Relays,
    /// Which nodes lead after failures; `None` when failover is off.
    pub failover: Option<Failover>,
    /// Causes a reconcile that reads the host.
    pub host_changed: Arc<Notify>,
}

impl<B: Backend> Agent<B> {
    /// The complete desired state of this host; `None` when the node is not in the mesh.
    pub(super) async fn plan(
        &mut self,
        whole: &Mesh,
        own: &Node,
        host: &mut HostState,
        seen_endpoints: &SeenEndpoints,
    ) -> Option<HostPlan> {
        let mesh = &whole.as_seen_from(&own.name);
        mesh.own()?;
        let found = self.find_links(mesh, own, host).await;
        self.state.hops = self.state.hops.update(mesh);
        self.warn_about(&found, mesh, host);
        let resolved = self.sources.resolver.resolve(mesh).await;
        self.sources.relays.resolves(&resolved);
        // The relay that a peer was reached through may have left the mesh since.
        let at_own_addresses = seen_endpoints.peers_at_own_addresses();
        let seen = at_own_addresses.filter(|(key, _)| !self.sources.relays.is_relayed(key)).collect();
        let listens = self.options.relay == Relay::Auto && relay::is_wanted(whole);
        let relays = self.sources.relays.inputs(listens, seen_endpoints.peers_at_relays());
        let signal_keys = self.derive_signal_keys(whole);
        let plan = plan::host_plan(&Inputs {
            mesh,
            settings: &self.options.settings,
            links: &found,
            hops: &self.state.hops,
            resolved: &resolved,
            seen: &seen,
            relays: &relays,
            signal_keys: &signal_keys,
            persistent_keepalive: own.persistent_keepalive,
            masquerade: self.options.masquerade == Masquerade::Ebpf,
            mtu: self.options.mtu.resolve(
                &host.links,
                host.routes_out.default,
                own.pod_cidrs.iter().any(|cidr| cidr.addr().is_ipv6()),
            ),
        })?;
        self.log_limiter.log_no_ipv6(found.has_no_ipv6 && plan.tables.has_ipv6());
        self.log_limiter.log_left_to_host(&plan.left_to_host);
        self.log_limiter.log_neighbours(neighbours::table_warning(plan.neighbours(&found)));
        Some(plan)
    }

    /// What the planner needs of this host's interfaces, and of the paths to the other nodes.
    async fn find_links(&mut self, mesh: &LocalMesh<'_>, own: &Node, host: &mut HostState) -> HostLinks {
        let overlay = plan::overlay_addresses(mesh, self.options.compatibility);
        let elsewhere =
            overlay.iter().filter(|(name, _)| **name != own.name).map(|(_, ip)| IpAddr::from(*ip));
        let others = mesh.others().filter_map(topology::Member::private_ip).chain(elsewhere).collect();
        let query = links::HostQuery {
            kilo: host.interface.index,
            private: own.internal_ip.map(|net| net.addr()),
            pod_cidrs: &own.pod_cidrs,
            next_hops: &host.routes_out.next_hops,
            main_routes: &host.main_routes,
            uplinks: Some(&self.state.uplinks),
        };
        let without_paths = links::host_links(&host.links, &query, &BTreeMap::new());
        self.actuators.net.find_paths(&mut host.paths, others, &without_paths).await;
        let mut found = links::host_links(&host.links, &query, &host.paths.interfaces);
        self.state.uplinks.clone_from(&found.uplinks);
        found.more_towards.clone_from(&host.paths.several);
        (found.vxlan, found.ipip) = (host.tunnels.vxlan, host.tunnels.ipip);
        links::add_overlay(&mut found, &host.links, &own.name, overlay);
        links::add_elsewhere(&mut found, &host.routes_out.elsewhere);
        match self.options.host_routing {
            HostRouting::Auto => found.tolerates_gaps_in_tcp = conntrack::tolerates_gaps_in_tcp(),
            HostRouting::Off => found.pods.clear(),
        }
        found.has_no_ipv6 = forwarding::has_no_ipv6(&self.options.interface.name);
        found.former_pod_cidrs = self.keep_former_pod_cidrs(own);
        found.path_mtus = self.sources.path_mtus.current(Instant::now());
        for (address, mtu) in &host.paths.mtus {
            found.path_mtus.entry(*address).and_modify(|known| *known = *mtu.min(known)).or_insert(*mtu);
        }
        found
    }

    /// Logs and counts what packets of this host cannot do because of its interfaces.
    fn warn_about(&mut self, found: &HostLinks, mesh: &LocalMesh<'_>, host: &HostState) {
        let private_is_up = host.links.iter().any(|link| link.up && Some(link.index) == found.private);
        // If that interface is down, other log lines say so.
        self.log_limiter.log_only_default(host.paths.only_default.first().filter(|_| private_is_up));
        self.log_limiter.log_no_uplink(found.uplinks.is_empty(), &self.metrics);
        self.log_limiter.log_unknown_headers(&found.unknown_headers, &self.metrics);
        self.log_limiter.log_left_out(self.state.hops.left_out(mesh), &self.metrics);
        if self.options.host_routing == HostRouting::Auto {
            self.log_limiter.log_tcp_passes_the_stack(!found.tolerates_gaps_in_tcp);
        }
    }

    /// Derives the keys that programs check other nodes' signals with; empty without failover.
    fn derive_signal_keys(&mut self, mesh: &Mesh) -> BTreeMap<IpAddr, SignalKey> {
        let Some(failover) = &mut self.sources.failover else { return BTreeMap::new() };
        // Cookies of an earlier agent stay in use.
        let held = self.actuators.dataplane.held_keys();
        failover.derive_signal_keys(mesh, &self.options.hostname, &self.key, &self.state.hops, &held)
    }
}

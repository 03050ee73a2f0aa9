//! Builds a plan from the mesh and this host, and looks up the planner's other inputs.

use std::{collections::BTreeMap, net::IpAddr, time::Instant};

use super::{
    Agent,
    host_state::{HostState, SeenEndpoints},
};
use crate::{backend::Backend, relay};
use kilo_common::maps::SignalKey;
use kilo_core::{
    plan::{self, HostPlan, Inputs},
    settings::{HostRouting, Masquerade, Relay},
    topology::{self, Mesh, Node},
};
use kilo_host::net::{conntrack, links, neighbours};

impl<B: Backend> Agent<B> {
    /// The complete desired state of this host; `None` when the node is not in the mesh.
    pub(super) async fn plan(
        &mut self,
        whole: &Mesh,
        own: &Node,
        host: &mut HostState,
        seen_endpoints: &SeenEndpoints,
    ) -> Option<HostPlan> {
        let private = own.internal_ip.map(|net| net.addr());
        let mesh = &whole.as_seen_from(&own.name);
        mesh.own()?;
        let overlay = plan::overlay_addresses(mesh, self.options.compatibility);
        let elsewhere =
            overlay.iter().filter(|(name, _)| **name != own.name).map(|(_, ip)| IpAddr::from(*ip));
        let others = mesh.others().filter_map(topology::Member::private_ip).chain(elsewhere).collect();
        let query = links::HostQuery {
            kilo: host.interface.index,
            private,
            pod_cidrs: &own.pod_cidrs,
            next_hops: &host.ways_out.next_hops,
            ways: &host.ways,
        };
        let without_paths = links::host_links(&host.links, &query, &BTreeMap::new());
        self.net.find_paths(&mut host.paths, others, &without_paths).await;
        let mut found = links::host_links(&host.links, &query, &host.paths.interfaces);
        found.more_towards.clone_from(&host.paths.several);
        (found.vxlan, found.ipip) = (host.tunnels.vxlan, host.tunnels.ipip);
        links::add_overlay(&mut found, &host.links, &own.name, overlay);
        links::add_elsewhere(&mut found, &host.ways_out.elsewhere);
        if self.options.host_routing == HostRouting::Auto {
            found.tolerates_gaps_in_tcp = conntrack::tolerates_gaps_in_tcp();
            self.log_limiter.log_tcp_passes_the_stack(!found.tolerates_gaps_in_tcp);
        } else {
            found.pods.clear();
        }
        found.former_pod_cidrs = self.keep_former_pod_cidrs(own);
        found.path_mtus = self.path_mtus.current(Instant::now());
        for (address, mtu) in &host.paths.mtus {
            found.path_mtus.entry(*address).and_modify(|known| *known = *mtu.min(known)).or_insert(*mtu);
        }
        self.state.hops = self.state.hops.update(mesh);
        let private_is_up = host.links.iter().any(|link| link.up && Some(link.index) == found.private);
        // If that interface is down, other log lines say so.
        self.log_limiter.log_only_default(host.paths.only_default.first().filter(|_| private_is_up));
        self.log_limiter.log_no_uplink(found.uplinks.is_empty(), &self.metrics);
        self.log_limiter.log_unknown_headers(&found.unknown_headers, &self.metrics);
        self.log_limiter.log_left_out(self.state.hops.left_out(mesh), &self.metrics);
        let resolved = self.resolver.resolve(mesh).await;
        self.relays.resolves(&resolved);
        // A relay that was left may be none of the mesh's by now.
        let at_own_places = seen_endpoints.peers_at_own_places();
        let seen = at_own_places.filter(|(key, _)| !self.relays.is_relayed(key)).collect();
        let listens = self.options.relay == Relay::Auto && relay::is_wanted(whole);
        let relays = self.relays.inputs(listens, seen_endpoints.peers_at_relays());
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
                host.ways_out.default,
                own.pod_cidrs.iter().any(|cidr| cidr.addr().is_ipv6()),
            ),
        })?;
        self.log_limiter.log_neighbours(neighbours::table_warning(plan.neighbours(&found)));
        Some(plan)
    }

    /// Derives the keys that programs check other nodes' signals with; empty without failover.
    fn derive_signal_keys(&mut self, mesh: &Mesh) -> BTreeMap<IpAddr, SignalKey> {
        let Some(failover) = &mut self.failover else { return BTreeMap::new() };
        // Cookies of an earlier agent stay in use.
        let held = self.dataplane.held_keys();
        failover.derive_signal_keys(mesh, &self.options.hostname, &self.key, &self.state.hops, &held)
    }
}

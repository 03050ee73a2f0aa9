//! Applies a plan to this host, in a fixed order of steps.

use std::time::Instant;

use super::{Agent, AgentError, error::Parts, host_state::HostState};
use crate::{backend::Backend, failover};
use kilo_core::{net::NetPlan, plan::HostPlan, topology::Mesh, wireguard::diff};
use kilo_host::{
    dataplane::{Dataplane, Interfaces},
    firewall::{forward::Forward, nat_rules::NatRules},
    lock::Lock,
    net::{Net, forwarding},
    wireguard::handshake_nudge::HandshakeNudge,
};

/// What writes to this host.
pub(super) struct Actuators {
    pub net: Net,
    pub dataplane: Dataplane,
    /// The iptables FORWARD rules.
    pub forward: Forward,
    pub nat_rules: NatRules,
    pub handshake_nudge: HandshakeNudge,
    /// Interface index of the WireGuard device when it was last seen.
    pub device: Option<u32>,
    /// Forwarding was off, and a reconcile could not turn it on.
    pub cannot_forward: bool,
    /// An uplink has no egress program, so pod traffic may leave it in cleartext.
    pub is_open: bool,
    /// Keeps other agents from changing the pinned programs and maps.
    _pins: Lock,
}

impl Actuators {
    pub fn new(net: Net, dataplane: Dataplane, pins: Lock) -> Self {
        Self {
            net,
            dataplane,
            forward: Forward::default(),
            nat_rules: NatRules::default(),
            handshake_nudge: HandshakeNudge::default(),
            device: None,
            cannot_forward: false,
            is_open: false,
            _pins: pins,
        }
    }

    /// Whether programs and forwarding are as the last reconcile left them. Errors are left for the next one
    /// to report. A setting that a reconcile failed to turn on waits for the next one, unless it was on in
    /// between.
    pub async fn are_in_place(&mut self) -> bool {
        let forwards = forwarding::is_on();
        self.cannot_forward &= !forwards;
        let may_stay = forwards || self.cannot_forward;
        self.dataplane.is_attached(&self.net).await.unwrap_or(false) && may_stay
    }
}

impl<B: Backend> Agent<B> {
    /// Programs and tables first, routes last: a packet that reaches the device always meets a program that
    /// can handle it. A part that fails does not hold up the others: without its programs, peers or port the
    /// device drops whatever the routes send there.
    pub(super) async fn apply(&mut self, plan: HostPlan, host: &mut HostState) -> Result<u64, AgentError> {
        let mut parts = Parts::default();
        let written = self.actuators.dataplane.write(&plan.tables);
        for (map, entries) in self.actuators.dataplane.entries() {
            self.metrics.set_map_entries(map, entries);
        }
        parts.add(written.map_err(AgentError::from));
        parts.add(self.apply_programs(&plan, host).await);
        parts.add(self.apply_wireguard(&plan, host).await);
        let steers_by_source = plan.tables.steers_to_wireguard_by_source();
        parts.add(self.apply_net(plan.net, host, steers_by_source).await);
        parts.end(&self.metrics)
    }

    async fn apply_programs(&mut self, plan: &HostPlan, host: &mut HostState) -> Result<u64, AgentError> {
        let interfaces = Interfaces {
            kilo: host.interface.index,
            uplinks: &plan.uplinks,
            layer3: &plan.layer3,
            tunnels: &plan.tunnels,
            pods: &plan.pods,
        };
        let attached = self.actuators.dataplane.attach(&self.actuators.net, interfaces).await?;
        self.metrics.reattached.inc_by(attached.reattached);
        self.actuators.is_open = !attached.open.is_empty();
        self.log_limiter.log_pods_need_tcx(attached.pods_need_tcx);
        for error in attached.failed {
            self.metrics.error(error.label());
            tracing::error!(%error, "failed to attach BPF program to interface; other interfaces are unaffected");
        }
        let guarded = host.tunnels.guard(self.actuators.net.rtnl(), &attached.unguarded).await;
        match attached.refused {
            Some(error) => Err(error.into()),
            None => Ok(attached.changes + guarded?),
        }
    }

    async fn apply_wireguard(&mut self, plan: &HostPlan, host: &mut HostState) -> Result<u64, AgentError> {
        let changes = diff(&host.state, &plan.wireguard, &self.key);
        let writes = host.interface.device.apply(&changes).await? as u64;
        host.state.take(&changes);
        let (own, subnet) = (self.key.public(), &self.options.settings.subnet);
        self.actuators.handshake_nudge.watch(&changes, &plan.wireguard.peers, own, subnet, Instant::now());
        Ok(writes)
    }

    async fn apply_net(
        &mut self,
        plan: NetPlan,
        host: &mut HostState,
        steers_by_source: bool,
    ) -> Result<u64, AgentError> {
        let kilo = host.interface.index;
        // First, because the routes below may fail.
        let mut writes =
            forwarding::enable(plan.routes.iter().any(|route| route.destination.addr().is_ipv6()));
        self.actuators.cannot_forward = !forwarding::is_on();
        let routes = host.routes.take();
        writes += match host.net.take() {
            Some(before) => self.actuators.net.change(&before, &plan, kilo).await?,
            None => self.actuators.net.apply_to(routes, &plan, kilo).await?,
        } as u64;
        if steers_by_source {
            writes +=
                forwarding::accept_by_tunnel(self.actuators.net.rtnl(), &self.options.interface.name, kilo)
                    .await;
        }
        host.net = Some(plan);
        Ok(writes)
    }

    /// What the failover thread needs to know; `None` without failover, or when this node takes no part in
    /// it.
    pub(super) fn site(&self, mesh: &Mesh, plan: &HostPlan, host: &HostState) -> Option<failover::Site> {
        let failover = self.sources.failover.as_ref()?;
        failover::Site::of(&failover::Facts {
            mesh,
            node: &self.options.hostname,
            hops: &self.state.hops,
            plan,
            state: &host.state,
            device: &host.interface.device,
            uplink: host.routes_out.default,
            keys: failover.keys(),
        })
    }

    pub(super) fn update_failover(&mut self, site: Option<failover::Site>) {
        let Some(failover) = &mut self.sources.failover else { return };
        let Some(site) = site else { return failover.leave() };
        let (bpffs, metrics) = (&self.options.bpffs, &self.metrics.failover);
        if let Err(error) = failover.update(site, &self.actuators.dataplane, bpffs, metrics) {
            self.metrics.error(error.label());
            tracing::error!(%error, "failed to start failover; a leader that fails is replaced only once it is declared dead");
        }
    }

    /// Triggers a handshake with each new peer that has not completed one by itself.
    pub(super) async fn nudge(&mut self) {
        let Some(host) = &self.state.host else {
            // It could not be read; the next reconcile tries again.
            return self.actuators.handshake_nudge.postpone(Instant::now());
        };
        match self.actuators.handshake_nudge.nudge(&host.interface.device, Instant::now()).await {
            Ok(writes) => drop(self.metrics.writes.inc_by(writes as u64)),
            Err(error) => {
                // The peer may be off the device, removed but not added again.
                self.sources.host_changed.notify_one();
                self.metrics.error(error.label());
                tracing::warn!(%error, "failed to trigger handshakes with new peers");
            }
        }
    }
}

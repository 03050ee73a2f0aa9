//! Follows one packet through the plans of all nodes, including WireGuard's cryptokey routing, until it
//! arrives, leaves the mesh or is dropped.

use std::{collections::BTreeMap, net::IpAddr};

use ipnet::IpNet;
use kilo_common::counters::Action;
use kilo_core::{
    observed::HostLinks,
    plan::{self, HopIds, HostPlan, Inputs, model},
    prefixes,
    relay::RelayInputs,
    settings::{Settings, Tunnel},
    topology::{Mesh, Node},
    wireguard::{WireguardPlan, key::PublicKey},
};

/// Where a packet ends up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// In the stack of this node, which owns the destination.
    Node(String),
    /// At a VPN peer.
    Peer(PublicKey),
    /// In the stack of this node, which has no route of ours for it.
    Left(String),
    /// Nowhere.
    Lost(String),
}

/// Every node's plan, computed from one mesh.
pub struct World<'a> {
    mesh: &'a Mesh,
    pub plans: BTreeMap<String, HostPlan>,
}

/// The plan of one node on a host with two interfaces.
pub fn plan_of(mesh: &Mesh, settings: &Settings, node: &Node, hops: &HopIds) -> Option<HostPlan> {
    let links =
        HostLinks { kilo: 9, private: Some(2), mtus: BTreeMap::from([(2, 1500)]), ..HostLinks::default() };
    let mesh = mesh.as_seen_from(&node.name);
    plan::host_plan(&Inputs {
        mesh: &mesh,
        settings,
        links: &links,
        hops,
        resolved: &BTreeMap::new(),
        seen: &BTreeMap::new(),
        relays: &RelayInputs::default(),
        signal_keys: &BTreeMap::new(),
        persistent_keepalive: node.persistent_keepalive,
        masquerade: true,
        mtu: 1420,
    })
}

impl<'a> World<'a> {
    pub fn new<'n>(mesh: &'a Mesh, settings: &Settings, nodes: impl IntoIterator<Item = &'n Node>) -> Self {
        let plans = nodes.into_iter().filter_map(|node| {
            let hops = HopIds::default().update(&mesh.as_seen_from(&node.name));
            Some((node.name.clone(), plan_of(mesh, settings, node, &hops)?))
        });
        Self { mesh, plans: plans.collect() }
    }

    /// Follows a packet that starts in the stack of `start`.
    pub fn trace(&self, start: &str, packet: model::Packet) -> End {
        let mut at = start.to_owned();
        // The longest path: start, its leader, the other leader, the other node.
        for _ in 0..4 {
            let Some(plan) = self.plans.get(&at) else { return End::Lost(format!("{at} has no plan")) };
            match self.step(&at, kernel_route(plan, packet), packet, 0) {
                Step::Stack(node) if node == at => return self.end(&node, packet),
                Step::Stack(node) if self.plans[&node].tables.is_local(packet.dst) => return End::Node(node),
                Step::Stack(node) => at = node,
                Step::End(end) => return end,
            }
        }
        End::Lost(format!("still under way at {at}"))
    }

    fn end(&self, node: &str, packet: model::Packet) -> End {
        if self.plans[node].tables.is_local(packet.dst) {
            End::Node(node.to_owned())
        } else {
            End::Left(node.to_owned())
        }
    }

    fn step(&self, at: &str, route: model::Route, packet: model::Packet, depth: usize) -> Step {
        if depth > 4 {
            return Step::lost(at, "loop");
        }
        match route {
            model::Route::Other => Step::Stack(at.to_owned()),
            model::Route::Dropped(reason) => Step::lost(at, reason.label()),
            model::Route::Wireguard => self.encrypt(at, packet, depth),
            model::Route::Gateway { gateway, encapsulated } => {
                let Some(node) = self.neighbour(at, gateway) else { return Step::lost(at, "no such node") };
                if !encapsulated {
                    return Step::Stack(node);
                }
                let plan = &self.plans[&node];
                let Some(own) = self.private_ip(at) else { return Step::lost(at, "no private address") };
                match plan.tables.lan_ingress(own, packet) {
                    Ok((Action::Deliver, _)) => Step::Stack(node),
                    Ok((Action::Transit, _)) => self.encrypt(&node, packet, depth + 1),
                    Ok(other) => Step::lost(&node, &format!("{other:?}")),
                    Err(reason) => Step::lost(&node, reason.label()),
                }
            }
        }
    }

    fn encrypt(&self, at: &str, packet: model::Packet, depth: usize) -> Step {
        let Some(key) = claimant(&self.plans[at].wireguard, packet.dst) else {
            return Step::lost(at, "no WireGuard peer");
        };
        let sender = self.mesh.find(at).map(|(segment, _)| self.mesh.segments[segment].key);
        let Some(segment) = self.mesh.segments.iter().find(|segment| segment.key == key) else {
            return Step::End(End::Peer(key));
        };
        let node = segment.members[segment.leader].name().to_owned();
        let plan = &self.plans[&node];
        if claimant(&plan.wireguard, packet.src) != sender {
            return Step::lost(&node, "WireGuard refuses the source");
        }
        match plan.route_from_kilo(packet) {
            // Out through the device that it came from: to another peer.
            model::Route::Other => Step::Stack(node),
            route => self.step(&node, route, packet, depth + 1),
        }
    }

    fn private_ip(&self, node: &str) -> Option<IpAddr> {
        let (segment, member) = self.mesh.find(node)?;
        self.mesh.segments[segment].members[member].private_ip()
    }

    /// The node of the same location with this private address.
    fn neighbour(&self, at: &str, address: IpAddr) -> Option<String> {
        let mesh = self.mesh.as_seen_from(at);
        let (segment, _) = mesh.own()?;
        let members = &mesh.segments[segment].members;
        members
            .iter()
            .find(|member| member.private_ip() == Some(address))
            .map(|member| member.name().to_owned())
    }
}

/// [`HostPlan::route`], which knows only our routes, with the route that an address of the WireGuard device
/// brings along.
fn kernel_route(plan: &HostPlan, packet: model::Packet) -> model::Route {
    let connected = plan.net.addresses.iter().any(|net| net.contains(&packet.dst));
    match plan.route(packet) {
        model::Route::Other if connected && !plan.tables.is_local(packet.dst) => {
            match plan.tables.kilo_egress(packet) {
                Ok((Action::Encrypt, _)) => model::Route::Wireguard,
                Ok((Action::Steer, Some(plan::Hop::Node { remote, tunnel, .. }))) => {
                    let encapsulated = tunnel != Tunnel::None;
                    model::Route::Gateway { gateway: remote, encapsulated }
                }
                other => panic!("on a leader, to a WireGuard address: {other:?}"),
            }
        }
        route => route,
    }
}

enum Step {
    Stack(String),
    End(End),
}

impl Step {
    fn lost(at: &str, why: &str) -> Self {
        Self::End(End::Lost(format!("at {at}: {why}")))
    }
}

/// The WireGuard peer whose allowed IPs an address matches best.
fn claimant(plan: &WireguardPlan, addr: IpAddr) -> Option<PublicKey> {
    let claims = plan.peers.iter().flat_map(|(key, peer)| peer.allowed_ips.iter().map(move |p| (*p, *key)));
    let table: BTreeMap<IpNet, PublicKey> = claims.collect();
    prefixes::longest(&table, addr)
}

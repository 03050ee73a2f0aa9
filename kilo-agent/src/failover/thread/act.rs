//! Carries out the agent's outputs: sends probes and signals, moves the word, marks members.

use std::{collections::BTreeSet, net::IpAddr};

use kilo_common::{
    lead::{self, Term},
    signal::{self, Body, Kind, LONGEST, PORT},
};
use kilo_core::signal_id::NodeId;
use kilo_failover::{Agent, Micros, Output, ProbePath, Signal, Target, gateway::Sender};
use kilo_host::dataplane::lead::SendVia as Into;

use super::{Thread, micros, source_port};
use crate::{failover::site::Site, packets};

/// Maximum number of questions and announcements sent before incoming signals are read.
const BURST: usize = 64;

impl Thread {
    pub(super) fn act(&mut self, site: &Site, out: Vec<Output>) {
        for output in out {
            match output {
                Output::Probe { nonce, path } => self.probe(site, nonce, path),
                Output::Lan(node, signal) if matches!(signal.kind, Kind::Roll | Kind::Announce) => {
                    self.asks.add(node, signal);
                }
                Output::Lan(node, signal) => self.send_lan(site, node, &signal),
                Output::Tunnel(far, signal) => {
                    // Stand-bys hold the same prefixes as their leader, so every gateway gets the signal.
                    if let Some(location) = site.fars.get(&far) {
                        for gateway in &location.gateways {
                            self.tunnel_to(location, gateway.id, &signal);
                        }
                    }
                }
                Output::Word(term, gateway) => {
                    let Some(hop) = site.hop_of(gateway) else { continue };
                    match self.tools.signals.follow(lead::word(term, hop)) {
                        Ok(word) if word != self.word => self.set_word(site, word),
                        Ok(_) => {}
                        Err(error) => tracing::error!(%error, "failed to move this node to another leader"),
                    }
                }
                Output::Led(members) => self.mark(site, &members),
                Output::Note(note) => self.note(&note),
            }
        }
    }

    /// Sends a limited batch of announcements and questions, so that this thread keeps up with what arrives
    /// meanwhile: if it is late it discards its knowledge, and the ring has room for some hundred answers.
    pub(super) fn send_asks(&mut self, site: &Site) {
        for _ in 0..BURST {
            let Some((node, signal)) = self.asks.take_next() else { return };
            self.send_lan(site, node, &signal);
        }
    }

    pub(super) fn probe(&mut self, site: &Site, nonce: u64, path: ProbePath) {
        let (sender, location) = (site.own_location.me, site.own_location.location);
        let probe =
            Signal { kind: Kind::Probe, nonce, term: Term::NONE, sender, location, body: Body::Empty };
        self.out.sent(nonce, micros(), path);
        match path {
            ProbePath::Lan(node) => self.send_lan(site, node, &probe),
            ProbePath::Path(far, target) => {
                let Some(location) = site.fars.get(&far) else { return };
                let pods = || {
                    let family = usize::from(site.private.is_ipv6());
                    self.acting_of(far, location).filter(|_| target == Target::Pods)?.pods[family]
                };
                let Some(to) = pods().or(location.wireguard_ip) else { return };
                self.send(Into::Stack, (site.private, source_port(nonce)), to, &probe, None);
            }
            ProbePath::Own(far) => {
                let Some(location) = site.fars.get(&far) else { return };
                let Some(to) = self.acting_of(far, location) else { return };
                self.send_tunnel(IpAddr::V6(site.control), IpAddr::V6(to.control), &probe);
            }
        }
    }

    /// Sends claims of what this node leads to the VPN peers that follow.
    pub(super) fn notify_followers(&mut self, site: &Site, now: Micros) {
        let sender = Sender { me: site.own_location.me, location: site.own_location.location };
        let lead = self.agent.as_ref().and_then(Agent::lead);
        for (to, signal) in self.followers.take_due(sender, lead, now, rand::random) {
            self.send_tunnel(IpAddr::V6(site.control), IpAddr::V6(to), &signal);
        }
    }

    pub(super) fn send_lan(&self, site: &Site, node: NodeId, signal: &Signal) {
        let Some(to) = site.nodes.get(&node) else { return };
        self.send(Into::Lan, (site.private, PORT), to.address, signal, Some(to.key));
    }

    pub(in crate::failover) fn send_tunnel(&self, from: IpAddr, to: IpAddr, signal: &Signal) {
        self.send(Into::Tunnel, (from, PORT), to, signal, None);
    }

    pub(super) fn send(
        &self,
        via: Into,
        from: (IpAddr, u16),
        to: IpAddr,
        signal: &Signal,
        key: Option<kilo_common::siphash::Key>,
    ) {
        let mut bytes = [0; LONGEST];
        let Some(length) = signal::write(&mut bytes, signal, key) else { return };
        let Some(packet) = packets::udp(from, (to, PORT), &bytes[..length]) else { return };
        if let Err(error) = self.tools.signals.send(via, &packet) {
            tracing::debug!(%error, kind = ?signal.kind, %to, "failed to send a signal");
        }
    }

    /// Marks exactly these members as led.
    pub(super) fn mark(&mut self, site: &Site, members: &[NodeId]) {
        let led: BTreeSet<NodeId> =
            members.iter().copied().filter(|member| *member != site.own_location.me).collect();
        for member in led.symmetric_difference(&self.led) {
            let Some(node) = site.nodes.get(member) else { continue };
            if let Err(error) = self.tools.led.mark(node.address, led.contains(member)) {
                tracing::error!(
                    %error,
                    node = site.name(*member),
                    "failed to mark in the data path whether this node leads that one; the next reconcile marks it"
                );
            }
        }
        if led != self.led {
            self.led = led;
        }
        self.is_dirty = true;
    }
}

//! The paths of probes, by the rules of the programs that carry them.

use kilo_common::lead::{self, Exit, Sender};
use kilo_failover::{ProbePath, Rule, Target};

use super::{Event, Sim};
use crate::host;

impl Sim {
    pub(crate) fn probe(&mut self, node: usize, nonce: u64, path: ProbePath) {
        match path {
            ProbePath::Lan(to) => {
                let probed = host::index(to);
                self.lan_send(node, probed, Event::LanProbe { prober: node, probed, nonce, back: false });
            }
            ProbePath::Path(_, Target::Location) if self.renumbered => {}
            ProbePath::Path(far, _) => {
                let (gateway, far) = (self.hosts[node].uses(), far as usize);
                self.lan_send(
                    node,
                    gateway,
                    Event::AtGateway { member: node, from: node, gateway, far, nonce },
                );
            }
            ProbePath::Own(far) => {
                let far = far as usize;
                self.uplink_send(node, far, true, Event::OwnAtFar { gateway: node, far, nonce });
            }
        }
    }

    pub(crate) fn at_gateway(&mut self, member: usize, from: usize, gateway: usize, far: usize, nonce: u64) {
        let host = &self.hosts[gateway];
        if !host.wires.runs(self.now) || from != gateway && !host.wires.forwards {
            return;
        }
        let uses = host.uses();
        let exit = if from == gateway {
            Exit::WireGuard
        } else if host.is_go {
            if uses == gateway { Exit::WireGuard } else { Exit::Drop }
        } else {
            let sender = if host.led.contains(&from) {
                Sender::Led
            } else if from < self.gateways && self.params.keeps(Rule::TwoHops) {
                Sender::Gateway
            } else {
                Sender::Member
            };
            lead::exit(sender, uses == gateway)
        };
        match exit {
            Exit::WireGuard if gateway < self.gateways => {
                self.uplink_send(gateway, far, true, Event::AtFar { member, gateway, far, nonce });
            }
            Exit::PassOn if uses != gateway => {
                let event = Event::AtGateway { member, from: gateway, gateway: uses, far, nonce };
                self.lan_send(gateway, uses, event);
            }
            _ => {}
        }
    }
}

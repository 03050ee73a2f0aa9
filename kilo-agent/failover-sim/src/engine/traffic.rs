//! Packets of one member to the first far location, 1,000 a second, each of which is answered.

use std::collections::BTreeSet;

use kilo_failover::{MS, Micros};

use super::{Event, Sim};

/// Packets of one member.
#[derive(Clone, Debug)]
pub(crate) struct Traffic {
    member: usize,
    until: Micros,
    pub(crate) sent: u32,
    /// Packets without an answer.
    pub(crate) out: BTreeSet<u64>,
}

impl Sim {
    /// Makes a member send from `start` to `until`.
    pub(crate) fn start_traffic(&mut self, member: usize, start: Micros, until: Micros) {
        self.traffic = Some(Traffic { member, until, sent: 0, out: BTreeSet::new() });
        self.at(start, Event::Packet);
    }

    /// Sends the next packet on the path of forwarded probes.
    pub(super) fn send_packet(&mut self) {
        let nonce = self.rng.bits();
        let Some(traffic) = &mut self.traffic else { return };
        if self.now >= traffic.until {
            return;
        }
        traffic.sent += 1;
        traffic.out.insert(nonce);
        let member = traffic.member;
        let gateway = self.hosts[member].uses();
        self.lan_send(member, gateway, Event::AtGateway { member, from: member, gateway, far: 0, nonce });
        self.at(self.now + MS, Event::Packet);
    }
}

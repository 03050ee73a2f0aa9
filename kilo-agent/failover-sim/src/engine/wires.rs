//! Which packets arrive, and when.

use kilo_failover::MS;

use super::{Event, Sim};

/// What the network does to packets.
#[derive(Clone, Copy, Debug, Default)]
pub struct Noise {
    /// Share of packets lost on each link.
    pub loss: f64,
    /// Share of packets between locations that are delayed by another 50 to 270 ms.
    pub spike: f64,
    /// Whether agents stall for 200 ms, each about every 5 s.
    pub stalls: bool,
    /// Whether somebody records signals and replays them later.
    pub replays: bool,
}

impl Sim {
    /// Whether a packet gets from one node to another now.
    pub fn lan_works(&self, from: usize, to: usize) -> bool {
        let (a, b) = (&self.hosts[from].wires, &self.hosts[to].wires);
        let cut = self.cuts.contains(&(from.min(to), from.max(to)));
        from == to
            || a.runs(self.now)
                && b.runs(self.now)
                && a.lan[0]
                && a.lan[1]
                && b.lan[0]
                && b.lan[2]
                && a.half == b.half
                && !cut
    }

    /// Whether a packet passes a gateway's uplink, out or in.
    pub fn uplink_works(&self, gateway: usize, far: usize, out: bool) -> bool {
        let wires = &self.hosts[gateway].wires;
        wires.runs(self.now)
            && wires.uplink[0]
            && wires.uplink[if out { 1 } else { 2 }]
            && self.fars[far].on
            && !self.far_cuts.contains(&(gateway, far))
    }

    /// Whether a flood loses a packet in the tunnel of the gateway that carries it.
    fn lose_in_flood(&mut self, gateway: usize) -> bool {
        let carries = self.hosts.last().is_some_and(|flooder| flooder.uses() == gateway);
        self.flood > 0.0 && carries && self.rng.chance(self.flood)
    }

    /// Whether anything comes out of a gateway's tunnel now: there is traffic all the time.
    pub(crate) fn decrypts(&self, gateway: usize) -> bool {
        gateway < self.gateways && (0..self.fars.len()).any(|far| self.uplink_works(gateway, far, false))
    }

    pub(crate) fn lan_send(&mut self, from: usize, to: usize, event: Event) {
        let lost = from != to && self.rng.chance(self.noise.loss);
        if self.lan_works(from, to) && !lost {
            let delay = if from == to { 1 } else { self.rng.between(100, 600) };
            self.at(self.now + delay, event);
        }
    }

    pub(crate) fn uplink_send(&mut self, gateway: usize, far: usize, out: bool, event: Event) {
        let lost = self.rng.chance(self.noise.loss) || self.lose_in_flood(gateway);
        if self.uplink_works(gateway, far, out) && !lost {
            let spike =
                if self.rng.chance(self.noise.spike) { self.rng.between(50 * MS, 270 * MS) } else { 0 };
            let delay = self.delays[far][gateway] + self.rng.exponential(400.0) + spike;
            self.at(self.now + delay, event);
        }
    }
}

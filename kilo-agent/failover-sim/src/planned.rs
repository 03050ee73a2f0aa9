//! A planned change packet by packet: a member sends 1,000 a second to another location, each of
//! which is answered, while its leader is cordoned. Agents are those that ship.

use kilo_failover::{MS, Micros, Params, SEC};

use crate::{
    engine::{Noise, Shape, Sim},
    faults::{Fault, NEVER, Schedule, Scheduled},
    host,
};

/// What one change has cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Packets sent.
    pub sent: u32,
    /// Packets without an answer.
    pub lost: u32,
    /// Whether another gateway leads in the end.
    pub is_done: bool,
    /// How often the change was taken back.
    pub taken_back: u32,
}

/// When the change begins.
const START: Micros = 4 * SEC;

/// The leader is cordoned while `member`, one of five nodes, sends. `loss`: share of
/// every packet and signal.
pub fn change(seed: u64, member: usize, loss: f64) -> Cost {
    let noise = Noise { loss, ..Noise::default() };
    watch(seed, member, noise, vec![(START, NEVER, Fault::Cordon(0))], 2 * SEC)
}

/// Kilo's order names the next gateway, and for a second after that the far leader's agent plans anew and
/// hears nothing for more than half of the time.
pub fn order(seed: u64, member: usize) -> Cost {
    let plans = |i: u64| (START + i * 100 * MS, START + (i * 100 + 60) * MS, Fault::FarStall(0));
    let mut faults: Vec<Scheduled> = (0..10).map(plans).collect();
    faults.push((START, NEVER, Fault::First(1)));
    watch(seed, member, Noise::default(), faults, 5 * SEC)
}

/// The leader is cordoned while the agent of the only far leader is dead for 15 s.
pub fn far_agent_dead(seed: u64, member: usize) -> Cost {
    let dead = (START - SEC, START + 14 * SEC, Fault::FarAgent(0));
    watch(seed, member, Noise::default(), vec![dead, (START, NEVER, Fault::Cordon(0))], 18 * SEC)
}

fn watch(seed: u64, member: usize, noise: Noise, faults: Vec<Scheduled>, time: Micros) -> Cost {
    let shape = Shape { nodes: 5, gateways: 3, fars: 1, delay: None, go: None };
    let mut sim = Sim::new(seed, shape, noise, Params::default());
    let until = START + time;
    sim.start_traffic(member, START, until);
    sim.run(Schedule::new(faults, until + SEC), START);
    let (sent, lost) =
        sim.traffic.as_ref().map_or((0, 0), |traffic| (traffic.sent, traffic.out.len() as u32));
    let is_done = sim.hosts.iter().all(|host| host.said().1 == host::id(1));
    Cost { sent, lost, is_done, taken_back: sim.counts.taken_back }
}

//! The faults of the design's table, and what each may cost.

mod make;

use kilo_failover::{MS, Micros, SEC};
use make::{and_power, boots_whole, dies_in_trial, flaps, flood, halves, three_dead};

use crate::{
    engine::{Noise, Shape},
    faults::{self, Fault, NEVER, Schedule},
    rng::Rng,
};

/// A kind of fault: how it is made, and its limits.
pub struct Scenario {
    /// Name, as in the table.
    pub name: &'static str,
    /// Sizes of the location; each run draws one.
    pub nodes: &'static [usize],
    /// How many of the nodes are gateways.
    pub gateways: usize,
    /// The node that runs Go Kilo.
    pub go: Option<usize>,
    /// What else the network does.
    pub noise: Noise,
    /// Maximum outage of any member, in ms.
    pub goal: u64,
    /// Maximum number of changes of leader in one run.
    pub switches: u32,
    /// One-way delay to far leaders; `None`: at random.
    pub delay: Option<Micros>,
    /// Far locations; `None`: one to three.
    pub fars: Option<usize>,
    /// Whether no stand-by may even suspect its leader.
    pub suspects_nobody: bool,
    /// Number of runs for each hundred that are asked for.
    pub share: u64,
    /// When it starts, at the earliest.
    pub starts: Micros,
    /// Makes the faults of one run.
    pub make: fn(&mut Rng, usize, Micros) -> Schedule,
}

impl Scenario {
    /// The location, start and faults of the run with this seed.
    pub fn schedule(&self, seed: u64) -> (Shape, Micros, Schedule) {
        let mut rng = Rng::new(seed ^ 0x5ced_0000);
        let nodes = self.nodes[rng.index(self.nodes.len())];
        let some = 1 + rng.index(3);
        let fars = self.fars.unwrap_or(some);
        let start = self.starts + rng.between(0, SEC);
        let shape = Shape { nodes, gateways: self.gateways, fars, delay: self.delay, go: self.go };
        let schedule = (self.make)(&mut rng, nodes, start);
        (shape, start, schedule)
    }
}

/// A healthy network.
pub const QUIET: Noise = Noise { loss: 0.0005, spike: 0.0002, stalls: false, replays: false };
/// 5 % loss on every link, and stalls.
pub const BUSY: Noise = Noise { loss: 0.05, spike: 0.001, stalls: true, replays: false };
/// Somebody on the LAN records signals and replays them.
pub const REPLAYED: Noise = Noise { replays: true, ..QUIET };

const ANY: &[usize] = &[2, 3, 5, 8, 20];
const MANY: &[usize] = &[3, 5, 8, 20];

const fn scenario(
    name: &'static str,
    nodes: &'static [usize],
    goal: u64,
    switches: u32,
    make: fn(&mut Rng, usize, Micros) -> Schedule,
) -> Scenario {
    Scenario {
        name,
        nodes,
        gateways: 3,
        go: None,
        noise: QUIET,
        goal,
        switches,
        delay: None,
        fars: None,
        suspects_nobody: false,
        share: 100,
        starts: 4 * SEC,
        make,
    }
}

/// The scenario with this name.
pub fn named(name: &str) -> Option<&'static Scenario> {
    SCENARIOS.iter().find(|scenario| scenario.name == name)
}

/// Every scenario.
pub const SCENARIOS: &[Scenario] = &[
    scenario("power off", ANY, 600, 1, |_, _, t| Schedule::one(Fault::Power(0), t)),
    Scenario {
        share: 2,
        ..scenario("power off, 1,000 nodes", &[1_000], 600, 2, |_, _, t| Schedule::one(Fault::Power(0), t))
    },
    // Round trips of 160 ms and a little more.
    Scenario {
        delay: Some(80 * MS),
        ..scenario("power off, far leaders 160 ms away", MANY, 600, 1, |_, _, t| {
            Schedule::one(Fault::Power(0), t)
        })
    },
    // Those that were probed are not the ones that answer.
    Scenario {
        fars: Some(6),
        ..scenario("power off; two of six far leaders are dead", MANY, 600, 1, |rng, _, t| {
            let first = rng.index(6);
            let dead = [first, (first + 1 + rng.index(5)) % 6];
            and_power(dead.map(|far| (t - 2 * SEC, NEVER, Fault::Far(far))).into(), t)
        })
    },
    // Nobody declares it dead while the API server is away.
    Scenario {
        fars: Some(2),
        starts: 20 * SEC,
        ..scenario("power off; one of two far leaders has been dead for 15 s", MANY, 600, 2, |_, _, t| {
            and_power(vec![(t - 15 * SEC, NEVER, Fault::Far(1))], t)
        })
    },
    // It is taken to be down after ten seconds.
    Scenario {
        fars: Some(2),
        starts: 20 * SEC,
        ..scenario("power off of the leader and of one of two far leaders", MANY, 12_000, 2, |_, _, t| {
            and_power(vec![(t, NEVER, Fault::Far(1))], t)
        })
    },
    // The stand-by that comes first does not reach that one, and the next one does.
    Scenario {
        fars: Some(2),
        starts: 20 * SEC,
        ..scenario(
            "power off; the stand-by does not reach one of two far leaders",
            MANY,
            1_000,
            2,
            |_, _, t| and_power(vec![(t - 15 * SEC, NEVER, Fault::FarPath(1, 1))], t),
        )
    },
    Scenario {
        fars: Some(2),
        ..scenario("the leader does not reach one of two far leaders", MANY, 25_000, 2, |_, _, t| {
            Schedule::new(vec![(t, NEVER, Fault::FarPath(0, 1))], t + 90 * SEC)
        })
    },
    // All that are probed, or some of them.
    Scenario {
        fars: Some(10),
        ..scenario("power off; three of ten far leaders are dead", MANY, 600, 1, |rng, _, t| {
            and_power(three_dead(rng, t - 3 * SEC).into(), t)
        })
    },
    Scenario {
        fars: Some(10),
        ..scenario("three of ten far leaders dead", MANY, 0, 0, |rng, _, t| {
            Schedule::new(three_dead(rng, t).into(), t + 15 * SEC)
        })
    },
    // Members find out by themselves in some 2 s.
    Scenario {
        gateways: 2,
        ..scenario("power off; the only stand-by's uplink fails for 0.4 s", MANY, 1_000, 1, |_, _, t| {
            and_power(vec![(t + 50 * MS, t + 450 * MS, Fault::Uplink(1))], t)
        })
    },
    scenario("uplink dead, carrier stays", MANY, 1_000, 3, |_, _, t| Schedule::one(Fault::Uplink(0), t)),
    scenario("uplink dead, 2 nodes", &[2], 1_000, 3, |_, _, t| Schedule::one(Fault::Uplink(0), t)),
    scenario("uplink dead, announced by the carrier", ANY, 150, 3, |_, _, t| {
        Schedule::one(Fault::Carrier(0), t)
    }),
    scenario("LAN interface dead", MANY, 1_000, 3, |_, _, t| Schedule::one(Fault::Lan(0), t)),
    scenario("receives and does not forward", MANY, 1_000, 3, |_, _, t| Schedule::one(Fault::Forward(0), t)),
    // It asks far leaders for the latest term at that time, which the stand-by has just made.
    Scenario {
        starts: 5_500 * MS,
        delay: Some(MS),
        ..scenario("started 6 s ago, receives and does not forward", MANY, 1_000, 1, |rng, _, t| {
            Schedule::one(Fault::Forward(0), t + rng.between(0, 500 * MS))
        })
    },
    scenario("nothing leaves by the uplink", MANY, 1_000, 3, |_, _, t| Schedule::one(Fault::UplinkOut(0), t)),
    scenario("nothing comes by the uplink", MANY, 1_000, 3, |_, _, t| Schedule::one(Fault::UplinkIn(0), t)),
    // Far leaders tell it that there is a later term by now.
    scenario("a leader in a term loses the LAN", MANY, 1_000, 3, |_, _, t| {
        let cordoned = (t, NEVER, Fault::Cordon(0));
        Schedule::new(vec![cordoned, (t + 5 * SEC, NEVER, Fault::Lan(1))], t + 30 * SEC)
    }),
    scenario("nothing leaves to the LAN", MANY, 1_000, 3, |_, _, t| Schedule::one(Fault::LanOut(0), t)),
    scenario("nothing comes from the LAN", MANY, 1_000, 3, |_, _, t| Schedule::one(Fault::LanIn(0), t)),
    // The limits are for what leadership costs, not the flood: a path counts as working whatever
    // share of packets passes it.
    scenario("a flood: 15 % lost each way by its leader", MANY, 100, 1, |_, _, t| flood(15, 50, t)),
    scenario("a flood: 35 % lost each way", MANY, 1_000, 2, |_, _, t| flood(35, 50, t)),
    scenario("a flood: 60 % lost each way", MANY, 4_000, 3, |_, _, t| flood(60, 50, t)),
    scenario("a flood: 80 % lost each way", MANY, 20_000, 5, |_, _, t| flood(80, 50, t)),
    scenario("a flood: 35 % lost each way, 2 nodes", &[2], 1_000, 2, |_, _, t| flood(35, 50, t)),
    Scenario {
        share: 10,
        ..scenario("a flood: 60 % lost each way, 10 min", MANY, 4_000, 20, |_, _, t| flood(60, 600, t))
    },
    scenario("a flood, then the leader does not forward", MANY, 6_000, 2, |_, _, t| {
        let mut schedule = flood(35, 50, t);
        schedule.faults.push((t + 10 * SEC, NEVER, Fault::Forward(0)));
        schedule
    }),
    scenario("a flood, then the leader's uplink is dead", MANY, 6_000, 3, |_, _, t| {
        let mut schedule = flood(35, 50, t);
        schedule.faults.push((t + 10 * SEC, NEVER, Fault::Uplink(0)));
        schedule
    }),
    scenario("leader cordoned", ANY, 150, 1, |_, _, t| Schedule::one(Fault::Cordon(0), t)),
    scenario("leader cordoned for 5 s, return", ANY, 150, 3, |_, _, t| {
        Schedule::new(vec![(t, t + 5 * SEC, Fault::Cordon(0))], t + 90 * SEC)
    }),
    scenario("annotation moved, and back after 10 s", ANY, 150, 2, |_, nodes, t| {
        Schedule::new(vec![(t, t + 10 * SEC, Fault::First(nodes.min(3) - 1))], t + 25 * SEC)
    }),
    scenario("annotation moves 10 times in 60 s", ANY, 150, 4, |_, nodes, t| {
        let first = nodes.min(3) - 1;
        let moves = |i: u64| (t + i * 6 * SEC, t + i * 6 * SEC + 3 * SEC, Fault::First(first));
        Schedule::new((0..10).map(moves).collect(), t + 62 * SEC)
    }),
    // It has given leadership once, by PREPARE, and got it back after it had booted: then it gives it in
    // a hurry.
    scenario("a leader's clock is earlier after a boot, then its carrier goes", ANY, 150, 6, |_, _, t| {
        Schedule::new(
            vec![
                (t, t + 5 * SEC, Fault::Cordon(0)),
                (t + 9 * SEC, NEVER, Fault::Clock(0)),
                (t + 10 * SEC, t + 13 * SEC, Fault::Power(0)),
                (t + 160 * SEC, NEVER, Fault::Carrier(0)),
            ],
            t + 175 * SEC,
        )
        .without(&[0])
    }),
    scenario("a far leader restarts after 2,100 changes, then power off", MANY, 1_200, 3, |_, _, t| {
        Schedule::new(
            vec![
                (t, NEVER, Fault::Ahead(1)),
                (t + 60 * SEC, NEVER, Fault::Ahead(1)),
                (t + 120 * SEC, NEVER, Fault::Ahead(1)),
                (t + 121 * SEC, NEVER, Fault::Power(0)),
                (t + 124 * SEC, t + 125 * SEC, Fault::FarAgent(0)),
                (t + 127 * SEC, NEVER, Fault::Power(1)),
            ],
            t + 143 * SEC,
        )
    }),
    scenario("a stand-by's HELLOs raise terms, it is gone, then power off", MANY, 600, 1, |_, _, t| {
        Schedule::new(
            vec![
                (t, NEVER, Fault::Hellos(1)),
                (t + 11 * SEC, NEVER, Fault::Power(1)),
                (t + 15 * SEC, NEVER, Fault::Power(0)),
            ],
            t + 30 * SEC,
        )
        .without(&[1])
    }),
    scenario("a stand-by's terms leap to the end, then it is without power", MANY, 0, 0, |_, _, t| {
        Schedule::new(vec![(t, NEVER, Fault::Leap(1)), (t + SEC, NEVER, Fault::Power(1))], t + 10 * SEC)
            .without(&[1])
    }),
    scenario("a stand-by's terms leap to the end, then power off", MANY, 600, 1, |_, _, t| {
        Schedule::new(vec![(t, NEVER, Fault::Leap(1)), (t + SEC, NEVER, Fault::Power(0))], t + 15 * SEC)
    }),
    scenario("all gateways cordoned", ANY, 0, 0, |_, _, t| {
        let cordon = |gateway: usize| (t, NEVER, Fault::Cordon(gateway));
        Schedule::new((0..3).map(cordon).collect(), t + 15 * SEC)
    }),
    scenario("leader cordoned while a far agent is dead for 5 s", ANY, 150, 1, |_, _, t| {
        Schedule::new(
            vec![(t - SEC, t + 4 * SEC, Fault::FarAgent(0)), (t, NEVER, Fault::Cordon(0))],
            t + 20 * SEC,
        )
    }),
    scenario("leader cordoned, then without power", MANY, 700, 2, |rng, _, t| {
        let power = (t + rng.between(0, 1_000 * MS), NEVER, Fault::Power(0));
        Schedule::new(vec![(t, NEVER, Fault::Cordon(0)), power], t + 15 * SEC)
    }),
    scenario("leader cordoned, the next without power", MANY, 1_000, 4, |rng, _, t| {
        let power = (t + rng.between(0, 1_000 * MS), NEVER, Fault::Power(1));
        Schedule::new(vec![(t, NEVER, Fault::Cordon(0)), power], t + 15 * SEC)
    }),
    scenario("a stand-by without power", MANY, 0, 0, |_, _, t| Schedule::one(Fault::Power(1), t)),
    scenario("a stand-by's uplink dead", MANY, 0, 0, |_, _, t| Schedule::one(Fault::Uplink(1), t)),
    scenario("a stand-by cut off the LAN", MANY, 1_000, 1, |_, _, t| Schedule::one(Fault::Lan(1), t)),
    // It leads itself until it gives that back, and watches who leads the others.
    Scenario {
        gateways: 2,
        ..scenario("the only stand-by cut off the LAN for 5 s, then power off", MANY, 1_000, 3, |_, _, t| {
            let cut = (t, t + 5 * SEC, Fault::Lan(1));
            Schedule::new(vec![cut, (t + 15 * SEC, NEVER, Fault::Power(0))], t + 30 * SEC)
        })
    },
    // Its return is tried for a second, some 66 s after it went.
    Scenario {
        gateways: 2,
        ..scenario("a leader tries to return, and the acting one loses power", MANY, 1_000, 4, |rng, _, t| {
            dies_in_trial(rng, t, Fault::Power(1))
        })
    },
    Scenario {
        gateways: 2,
        ..scenario(
            "a leader tries to return, and the acting one's uplink dies",
            MANY,
            1_000,
            4,
            |rng, _, t| dies_in_trial(rng, t, Fault::Uplink(1)),
        )
    },
    // The acting leader, which tries it, is cut off from that location for as long.
    scenario("a leader tries to return, a far agent is dead for 30 s", MANY, 3_000, 8, |_, _, t| {
        let away = (t, t + 5 * SEC, Fault::Power(0));
        let dead = (t + 50 * SEC, t + 80 * SEC, Fault::FarAgent(0));
        Schedule::new(vec![away, dead], t + 150 * SEC).without(&[0])
    }),
    // It leads since the annotation moved there. What was ordered then does not spare it the trial after a fault.
    scenario("annotation moved, its node boots, a far agent is dead", MANY, 5_000, 16, |_, _, t| {
        let away = (t + 10 * SEC, t + 15 * SEC, Fault::Power(1));
        let dead = (t + 50 * SEC, t + 350 * SEC, Fault::FarAgent(0));
        Schedule::new(vec![(t, NEVER, Fault::First(1)), away, dead], t + 600 * SEC).without(&[1])
    }),
    scenario("leader and stand-by do not hear each other", MANY, 1_000, 2, |_, _, t| {
        Schedule::one(Fault::Link(0, 1), t)
    }),
    scenario("leader and stand-by apart, then power off", MANY, 1_000, 4, |_, _, t| {
        and_power(vec![(t - 3 * SEC, NEVER, Fault::Link(0, 1))], t)
    }),
    scenario("a far leader dead", ANY, 0, 0, |_, _, t| Schedule::one(Fault::Far(0), t)),
    scenario("locations come and go: other WireGuard addresses", ANY, 0, 0, |_, _, t| {
        Schedule::new(vec![(t, t + 25 * SEC, Fault::Renumbered)], t + 35 * SEC)
    }),
    scenario("WireGuard addresses change, then power off", ANY, 1_000, 1, |_, _, t| {
        and_power(vec![(t - 2 * SEC, t + 20 * SEC, Fault::Renumbered)], t)
    }),
    scenario("all uplinks dead for 10 s", ANY, 0, 0, |_, _, t| {
        Schedule::new(vec![(t, t + 10 * SEC, Fault::Site)], t + 25 * SEC)
    }),
    scenario("LAN in halves", &[8, 20], 1_000, 4, halves),
    scenario("leader's agent dead for 5 s", ANY, 0, 0, |_, _, t| {
        Schedule::new(vec![(t, t + 5 * SEC, Fault::Agent(0))], t + 15 * SEC)
    }),
    scenario("all agents dead for 5 s", ANY, 0, 0, |_, _, t| {
        Schedule::new(vec![(t, t + 5 * SEC, Fault::Agents)], t + 15 * SEC)
    }),
    scenario("agents restart one by one", ANY, 0, 0, |_, nodes, t| {
        let restart = |node: usize| {
            let at = t + node as u64 * 800 * MS;
            (at, at + 600 * MS, Fault::Agent(node))
        };
        Schedule::new((0..nodes).map(restart).collect(), t + 20 * SEC)
    }),
    scenario("agents stall 200 ms, 100 times", ANY, 0, 0, |rng, nodes, t| {
        let stall = |_| {
            let at = t + rng.between(0, 20 * SEC);
            (at, at + 200 * MS, Fault::Stall(rng.index(nodes)))
        };
        Schedule::new((0..100).map(stall).collect(), t + 25 * SEC)
    }),
    Scenario {
        delay: Some(120 * MS),
        suspects_nobody: true,
        noise: Noise { loss: 0.0, spike: 0.0, ..QUIET },
        ..scenario("a stand-by pauses 20 times, far leaders 240 ms away", MANY, 700, 0, |rng, _, t| {
            let pause = |i| (t + i * SEC, t + i * SEC + rng.between(100 * MS, 400 * MS), Fault::Pause(1));
            Schedule::new((0..20).map(pause).collect(), t + 25 * SEC).without(&[1])
        })
    },
    Scenario {
        delay: Some(120 * MS),
        suspects_nobody: true,
        noise: Noise { loss: 0.0, spike: 0.0, ..QUIET },
        ..scenario("a stand-by's agent stalls 20 times, far leaders 240 ms away", MANY, 0, 0, |rng, _, t| {
            let stall = |i| (t + i * SEC, t + i * SEC + rng.between(200 * MS, 300 * MS), Fault::Stall(1));
            Schedule::new((0..20).map(stall).collect(), t + 25 * SEC)
        })
    },
    scenario("leader's uplink dead; the next one boots in 0.2 s", MANY, 1_500, 5, |_, _, t| {
        let boots = (t + 5 * SEC, t + 5_200 * MS, Fault::Power(1));
        Schedule::new(vec![(t, NEVER, Fault::Uplink(0)), boots], t + 20 * SEC).without(&[1])
    }),
    scenario("power off; members' agents dead", &[5, 8, 20], 700, 2, |_, nodes, t| {
        and_power((3..nodes).map(|node| (t - 200 * MS, NEVER, Fault::Agent(node))).collect(), t)
    }),
    scenario("power off; stand-by's agent dead", MANY, 900, 2, |_, _, t| {
        and_power(vec![(t - 100 * MS, NEVER, Fault::Agent(1))], t).without(&[1])
    }),
    scenario("power off; stand-by's agent stalls 200 ms", MANY, 900, 2, |_, _, t| {
        and_power(vec![(t + 100 * MS, t + 300 * MS, Fault::Stall(1))], t)
    }),
    scenario("power off; stand-by's agent restarted 2 s before", MANY, 900, 2, |_, _, t| {
        and_power(vec![(t - 2_500 * MS, t - 2_000 * MS, Fault::Agent(1))], t)
    }),
    scenario("power off; far agent restarts (0.6 s)", MANY, 1_200, 3, |_, _, t| {
        and_power(vec![(t, t + 600 * MS, Fault::FarAgent(0))], t)
    }),
    scenario("power off of leader and first stand-by", MANY, 1_500, 3, |rng, _, t| {
        let second = (t + rng.between(0, 2 * SEC), NEVER, Fault::Power(1));
        Schedule::new(vec![(t, NEVER, Fault::Power(0)), second], t + 20 * SEC)
    }),
    Scenario {
        gateways: 5,
        ..scenario("four gateways of five die, 3 s apart", &[8, 20], 900, 5, |_, _, t| {
            let dies = |gateway: usize| (t + gateway as u64 * 3 * SEC, NEVER, Fault::Power(gateway));
            Schedule::new((0..4).map(dies).collect(), t + 25 * SEC)
        })
    },
    // Far leaders remember the terms that all its nodes have forgotten.
    scenario("a whole location boots, then power off", MANY, 1_500, 6, |rng, nodes, t| {
        let mut schedule = boots_whole(nodes, t + 90 * SEC, rng);
        schedule.faults.push((t, t + 5 * SEC, Fault::Power(0)));
        schedule.faults.push((t + 105 * SEC, NEVER, Fault::Power(0)));
        schedule
    }),
    scenario("a whole location boots while its stand-by leads", MANY, 2_500, 7, |rng, nodes, t| {
        let mut schedule = boots_whole(nodes, t + 10 * SEC, rng);
        schedule.faults.push((t, t + 5 * SEC, Fault::Power(0)));
        // Leadership that was split is whole by then.
        schedule.faults.push((t + 110 * SEC, NEVER, Fault::Power(0)));
        schedule.until = t + 125 * SEC;
        schedule
    }),
    // One far leader knows who led the member before it booted; the other one, whose agent was dead for 11 s,
    // knows who led it before that. The acting leader has forgotten it, and does not hear what it asks for.
    Scenario {
        fars: Some(2),
        ..scenario("a member boots that nobody leads any more", &[5, 8, 20], 11_000, 4, |_, nodes, t| {
            let member = nodes - 1;
            Schedule::new(
                vec![
                    (t - SEC, t + 10 * SEC, Fault::FarAgent(1)),
                    (t, t + 5 * SEC, Fault::Power(0)),
                    (t + 3 * SEC, t + 13 * SEC, Fault::Power(member)),
                    (t + 8 * SEC, t + 8_600 * MS, Fault::Layout(1)),
                    (t + 12_800 * MS, t + 14_600 * MS, Fault::Agent(1)),
                ],
                t + 45 * SEC,
            )
            .without(&[0])
        })
    },
    scenario("leader paused 100 to 400 ms", MANY, 700, 3, |rng, _, t| {
        Schedule::new(vec![(t, t + rng.between(100 * MS, 400 * MS), Fault::Pause(0))], t + 15 * SEC)
    }),
    scenario("leader paused 0.5 to 5 s", MANY, 800, 3, |rng, _, t| {
        Schedule::new(vec![(t, t + rng.between(500 * MS, 5 * SEC), Fault::Pause(0))], t + 20 * SEC)
    }),
    scenario("power off and back after 5 s, return", ANY, 700, 4, |_, _, t| {
        Schedule::new(vec![(t, t + 5 * SEC, Fault::Power(0))], t + 120 * SEC).without(&[0])
    }),
    Scenario {
        share: 25,
        ..scenario("20 flaps in 60 s: power", MANY, 800, 2, |rng, _, t| {
            flaps(rng, t, (300 * MS, 2_500 * MS), |_| Fault::Power(0)).without(&[0])
        })
    },
    Scenario {
        share: 25,
        ..scenario("20 flaps in 60 s: uplink", MANY, 1_000, 4, |rng, _, t| {
            flaps(rng, t, (300 * MS, 2_500 * MS), |_| Fault::Uplink(0)).without(&[0])
        })
    },
    Scenario {
        share: 25,
        ..scenario("20 flaps: leader and stand-by in turn", MANY, 2_000, 3, |rng, _, t| {
            flaps(rng, t, (500 * MS, 2_500 * MS), |i| Fault::Power(i as usize % 2)).without(&[0, 1])
        })
    },
    // A stand-by that should take over and stalls leaves that to the one that has just booted.
    Scenario {
        share: 25,
        ..scenario("20 flaps in turn, a gateway's agent stalls every 2 s", MANY, 2_000, 6, |rng, _, t| {
            let mut schedule = flaps(rng, t, (1_800 * MS, 2_700 * MS), |i| Fault::Power(i as usize % 2));
            for i in 0..31 {
                let at = t + i * 2 * SEC + rng.between(0, 2 * SEC);
                let lasts = rng.between(200 * MS, 1_500 * MS);
                schedule.faults.push((at, at + lasts, Fault::Stall(rng.index(3))));
            }
            schedule.without(&[0, 1])
        })
    },
    // A node that boots has forgotten how many changes there were, and the third has not.
    Scenario {
        share: 25,
        ..scenario("20 flaps in turn; the third's uplink dead for 30 s", MANY, 2_000, 12, |rng, _, t| {
            let mut schedule = flaps(rng, t, (300 * MS, 1_200 * MS), |i| Fault::Power(i as usize % 2));
            schedule.faults.push((t - SEC, t + 30 * SEC, Fault::Uplink(2)));
            schedule.without(&[0, 1])
        })
    },
    // The stand-by follows Kilo's leader, which leads nobody, until the acting one leads it. With its one
    // answer lost it would not know the acting one.
    Scenario {
        noise: Noise { loss: 0.0, spike: 0.0, ..QUIET },
        ..scenario("a stand-by boots, the acting leader's agent stalls", MANY, 1_000, 2, |_, _, t| {
            Schedule::new(
                vec![
                    (t, t + 2_800 * MS, Fault::Power(0)),
                    (t + 3 * SEC, t + 4_500 * MS, Fault::Power(1)),
                    (t + 4_400 * MS, t + 6_400 * MS, Fault::Stall(2)),
                    (t + 6 * SEC, NEVER, Fault::Power(0)),
                ],
                t + 20 * SEC,
            )
            .without(&[0, 1])
        })
    },
    Scenario {
        share: 25,
        ..scenario("gateways lose the LAN in turn, 20 times in 60 s", MANY, 20_000, 14, |_, _, t| {
            let dies = |i: u64| (t + i * 3 * SEC, t + i * 3 * SEC + 2 * SEC, Fault::Lan(i as usize % 3));
            Schedule::new((0..20).map(dies).collect(), t + 90 * SEC)
        })
    },
    Scenario {
        share: 10,
        ..scenario("a leader that never forwards again, 20 min", &[5, 8], 1_000, 16, |_, _, t| {
            Schedule::new(vec![(t, NEVER, Fault::Forward(0))], t + 1_200 * SEC)
        })
    },
    // Its trials are 1, 2, 4, 8, 16 and 32 minutes apart.
    Scenario {
        share: 2,
        ..scenario("a leader that never forwards again, 2 h", &[5], 1_000, 14, |_, _, t| {
            Schedule::new(vec![(t, NEVER, Fault::Forward(0))], t + 7_200 * SEC)
        })
    },
    Scenario {
        go: Some(0),
        ..scenario("the leader is Go Kilo; power off", MANY, 1_000, 3, |_, _, t| {
            Schedule::one(Fault::Power(0), t)
        })
    },
    Scenario {
        go: Some(4),
        ..scenario("a member is Go Kilo; power off", &[5, 8, 20], 600, 2, |_, _, t| {
            Schedule::one(Fault::Power(0), t)
        })
    },
    Scenario {
        noise: REPLAYED,
        ..scenario("signals replayed; leaders and a member boot", &[5, 8], 1_000, 5, |rng, nodes, t| {
            let member = 3 + rng.index(nodes - 3);
            let booted = t + 12 * SEC + rng.between(0, 4 * SEC);
            Schedule::new(
                vec![
                    (t, t + 5 * SEC, Fault::Power(0)),
                    (t + 6 * SEC, t + 10 * SEC, Fault::Power(1)),
                    (booted, booted + SEC, Fault::Power(member)),
                ],
                t + 50 * SEC,
            )
            .without(&[0, 1, member])
        })
    },
    Scenario {
        share: 400,
        ..scenario("any one at random, up to 8 s", MANY, 1_000, 4, |rng, nodes, t| {
            let end = t + rng.between(100 * MS, 8 * SEC);
            Schedule::new(vec![(t, end, faults::any(rng, nodes, 3))], end + 10 * SEC)
        })
    },
    Scenario {
        share: 400,
        ..scenario("1 to 4 at random", ANY, 12_000, 12, |rng, nodes, t| faults::several(rng, nodes, 3, t))
    },
    Scenario {
        noise: BUSY,
        ..scenario("1 to 4 at random, 5 % loss, stalls", ANY, 12_000, 30, |rng, nodes, t| {
            faults::several(rng, nodes, 3, t)
        })
    },
];

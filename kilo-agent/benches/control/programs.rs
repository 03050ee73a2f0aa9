//! Time of single programs on this kernel (`BPF_PROG_TEST_RUN`), with few and many prefixes. None of these
//! runs changes its packet, so that it can be repeated; the counters show that each run did what its row is
//! about.

use std::collections::BTreeMap;

use aya::programs::{SchedClassifier, TestRun as _, TestRunOptions};
use ipnet::{IpNet, Ipv4Net};
use kilo_common::maps::{HOP_LOCAL, HOP_REMOTE, MASQ_EXCLUDE, PREFIX_ROUTE, PREFIX_SOURCE, PrefixValue};
use kilo_host::dataplane::Dataplane;

use crate::{
    Figures,
    bpf::{
        self, OWN_POD, REMOTE_POD, leader_tables,
        packet::{ethernet, udp},
    },
};

const REPEAT: u32 = 200_000;
const ROUNDS: usize = 9;
/// `TC_ACT_SHOT`.
const DROPPED: u32 = 2;
/// `BPF_PROG_TEST_RUN` reads an Ethernet header where the WireGuard device has
/// none: the first bytes of this source read as the EtherType of IPv4.
const POD: [u8; 4] = [8, 0, 1, 2];

pub fn measure(figures: &mut Figures) {
    let Some(fs) = bpf::bpffs() else { return };
    let mut dataplane = Dataplane::open(fs.path(), false).unwrap();
    for count in [10, 100, 1000, 10_000] {
        let mut tables = leader_tables();
        let value = |hop| PrefixValue { hop, flags: PREFIX_ROUTE | PREFIX_SOURCE };
        tables.prefix.insert("8.0.1.0/24".parse().unwrap(), value(HOP_LOCAL));
        for number in tables.prefix.len()..count {
            let network = std::net::Ipv4Addr::from(0x0a80_0000 + (number as u32 * 256));
            let prefix = IpNet::V4(Ipv4Net::new(network, 24).unwrap());
            tables.prefix.insert(prefix, value(HOP_REMOTE));
            tables.masq_dst.insert(prefix, MASQ_EXCLUDE);
        }
        // Packets to the mesh in cleartext would be dropped, so this is a network that pods reach by their own
        // addresses.
        tables.masq_dst.insert("203.0.113.0/24".parse().unwrap(), MASQ_EXCLUDE);
        dataplane.write(&tables).unwrap();
        let to_wireguard = udp(POD, REMOTE_POD, (1, 2), &[0; 64]);
        let to_network = ethernet(&udp(OWN_POD, [203, 0, 113, 9], (1, 2), &[0; 64]));
        for (what, program, packet, counted) in [
            ("kilo_egress, to WireGuard", "kilo_egress", to_wireguard, Some("encrypt")),
            ("uplink_egress, not masqueraded", "uplink_egress", to_network, None),
        ] {
            let before = counters(&dataplane);
            let time = time(&mut dataplane, program, &packet);
            let runs = u64::from(REPEAT) * ROUNDS as u64;
            let met: BTreeMap<_, _> = counters(&dataplane)
                .into_iter()
                .map(|(label, count)| (label, count - before[label]))
                .filter(|(_, count)| *count > 0)
                .collect();
            assert_eq!(
                met,
                counted.map(|label| (label, runs)).into_iter().collect(),
                "what {program} counts"
            );
            figures.add_to("programs", count, what, "ns", time);
        }
    }
}

/// How often each action was taken, and how often packets were dropped for each reason.
fn counters(dataplane: &Dataplane) -> BTreeMap<&'static str, u64> {
    let counters = dataplane.counters().unwrap().read().unwrap();
    let mut all = counters.actions;
    all.extend(counters.drops);
    all
}

/// Nanoseconds per run: the median of all rounds.
fn time(dataplane: &mut Dataplane, name: &str, packet: &[u8]) -> f64 {
    let classifier: &SchedClassifier = dataplane.program(name).unwrap();
    let mut times: Vec<u128> = (0..ROUNDS)
        .map(|_| {
            let mut options = TestRunOptions::new();
            options.data_in = Some(packet);
            options.repeat = REPEAT;
            let run = classifier.test_run(options).unwrap();
            assert_ne!(run.return_value, DROPPED, "{name} drops the packet that it is to carry");
            run.duration.as_nanos()
        })
        .collect();
    times.sort_unstable();
    times[ROUNDS / 2] as f64
}

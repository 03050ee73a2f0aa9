//! Time from a CLAIM to moved allowed IPs on a far leader whose CPUs are busy. Needs kernel WireGuard: run
//! it in the virtual machine where this machine's kernel has none.

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use ipnet::IpNet;
use kilo_agent::far::{self, FarGateway, FarLocation};
use kilo_common::{
    lead::Term,
    signal::{self, Body, Kind, LONGEST, MAX_MEMBERS, Shared, Signal},
};
use kilo_core::{
    settings::WireguardMode,
    wireguard::{WireguardPeer, WireguardPlan, key::SecretKey},
};
use kilo_failover::{Params, SEC};
use kilo_host::{
    net::Net,
    wireguard::{Backend, Device, WireguardError, ensure_device},
};

use crate::netns::isolated;

const FAR: u64 = 7;
const ROUNDS: usize = 101;
/// Prefixes per member: a pod CIDR and a private address.
const EACH: usize = 2;

fn member(number: usize) -> (u64, Vec<IpNet>) {
    let [_, high, low, last] = (number as u32).to_be_bytes();
    let pods = format!("10.{}.{low}.{last}/32", 100 + high);
    let private = format!("172.{}.{low}.{last}/32", 16 + high);
    (1 + number as u64, [pods, private].map(|text| text.parse().unwrap()).into())
}

/// CLAIM messages as received from the tunnel.
fn claims(gateway: u64, term: Term, members: &[u64]) -> Vec<Vec<u8>> {
    let parts = members.chunks(MAX_MEMBERS);
    let count = parts.len() as u16;
    let signal = |(part, members): (usize, &[u64])| {
        let part = (part as u16, count);
        let body = Body::Claim { gateway, shared: Shared::Stay, part, members: members.to_vec() };
        let signal = Signal { kind: Kind::Claim, nonce: 1, term, sender: gateway, location: FAR, body };
        let mut bytes = [0; LONGEST];
        let length = signal::write(&mut bytes, &signal, None).unwrap();
        bytes[..length].to_vec()
    };
    parts.enumerate().map(signal).collect()
}

#[test]
fn claimed_prefixes_move_on_a_busy_host() {
    isolated("claimed_prefixes_move_on_a_busy_host", || async {
        let net = Net::new().unwrap();
        let made =
            ensure_device(net.rtnl(), "kilo0", WireguardMode::Kernel, true, Path::new("/nonexistent/kg"))
                .await;
        match made {
            Err(WireguardError::NoKernelSupport(error)) => {
                return println!("kilo-skip: this kernel has no WireGuard: {error}");
            }
            made => assert_eq!(made.unwrap().backend, Backend::Kernel),
        }
        let device = Device::open(net.rtnl(), "kilo0", Backend::Kernel).await.unwrap();
        let keys = [2, 3].map(|n| SecretKey::from_bytes([n; 32]).public());
        for prefixes in [1_000, 10_000] {
            let members: BTreeMap<_, _> = (0..prefixes / EACH).map(member).collect();
            let peer = WireguardPeer {
                allowed_ips: members.values().flatten().copied().collect(),
                ..WireguardPeer::default()
            };
            let peers = [(keys[0], peer), (keys[1], WireguardPeer::default())].into();
            device
                .reconcile(&WireguardPlan { listen_port: 51820, peers }, &SecretKey::from_bytes([1; 32]))
                .await
                .unwrap();
            let gateways = keys.map(FarGateway::with);
            let location = FarLocation { gateways: gateways.into(), members, ..FarLocation::default() };
            let times = tokio::task::spawn_blocking({
                let device = device.clone();
                move || rounds(&device, &location)
            });
            let mut times = times.await.unwrap();
            times.sort_unstable();
            // The second gateway claimed last.
            let held = device.read().await.unwrap().peers[&keys[1]].allowed_ips.len();
            assert_eq!(held, prefixes);
            println!(
                "kilo-figure: CLAIM of {prefixes} prefixes to allowed IPs moved, {ROUNDS} times, as many busy threads as \
                 CPUs: p50 {:?}, p99 {:?}",
                times[ROUNDS / 2],
                times[ROUNDS * 99 / 100]
            );
        }
    });
}

fn rounds(device: &Device, location: &FarLocation) -> Vec<Duration> {
    let stop = Arc::new(AtomicBool::new(false));
    let busy = std::thread::available_parallelism().unwrap().get();
    let busy: Vec<_> = (0..busy)
        .map(|_| {
            let stop = Arc::clone(&stop);
            std::thread::spawn(move || while !stop.load(Ordering::Relaxed) {})
        })
        .collect();
    let mut fars = BTreeMap::new();
    far::set_locations(&mut fars, &BTreeMap::from([(FAR, location.clone())]));
    let acting = fars.get_mut(&FAR).unwrap();
    let (names, members) = (BTreeMap::new(), location.members.keys().copied().collect::<Vec<_>>());
    let (mut term, mut times) = (Term::NONE, Vec::new());
    for round in 1..=ROUNDS {
        let gateway = location.gateways[round % 2];
        term = term.next(gateway.id);
        let signals = claims(gateway.id, term, &members);
        let began = Instant::now();
        for bytes in &signals {
            let signal = signal::parse(bytes).unwrap().map_list(|words| words.iter().collect::<Vec<u64>>());
            let pair = (location, &mut *acting);
            // A second later than the last one: more changes of one location are refused.
            let now = round as u64 * SEC;
            let claimed =
                far::claimed(&Params::default(), pair, (FAR, gateway.id), &signal, &names, (99, now));
            let step = claimed.step.unwrap().unwrap();
            device.claim(gateway.key, &far::prefixes(location, &step.moves, step.moves_shared)).unwrap();
        }
        times.push(began.elapsed());
    }
    stop.store(true, Ordering::Relaxed);
    busy.into_iter().for_each(|thread| thread.join().unwrap());
    times
}

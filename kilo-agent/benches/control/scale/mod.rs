//! `cargo xtask bench scale`: a mesh of many namespaces with a real agent in each, a real API server, and
//! WireGuard in user space.
//!
//! `KILO_BENCH_NODES`: how many nodes, in 20 locations; `KILO_BENCH_OUTAGE`: seconds without API server;
//! `KILO_BENCH_REST`: seconds of rest; `KILO_BENCH_FLAGS`: more flags of every agent.

mod explain;
mod host;
mod probes;

use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::Lease;
use kilo_core::objects::slices::LEASE;
use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject, PostParams},
};

use self::{explain::Machine, host::Host, probes::Probes};
use crate::{
    Figures,
    api::{ADMIN, ApiServer, apply_crds},
    compute::milliseconds,
    netns, objects,
};

/// Time limit for every step of a mesh of this size, on two cores.
const PATIENCE: Duration = Duration::from_mins(15);
/// The leader of this location dies.
const DIES_IN: usize = 3;

/// The number in an environment variable.
fn number(name: &str, default: usize) -> usize {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

pub async fn measure(figures: &mut Figures) {
    let nodes = number("KILO_BENCH_NODES", 200);
    let outage = Duration::from_secs(number("KILO_BENCH_OUTAGE", 600) as u64);
    let rest = Duration::from_secs(number("KILO_BENCH_REST", 60) as u64);
    let flags =
        std::env::var("KILO_BENCH_FLAGS").unwrap_or_else(|_| "--failover=auto --slices=auto".to_owned());
    let flags: Vec<&str> = flags.split_whitespace().collect();

    let machine = Machine::before();
    host::prepare_machine();
    let Some(server) = ApiServer::start().await else { return };
    let client = server.client(ADMIN).await;
    create(&client, nodes).await;
    let hosts: Vec<Host> = (0..nodes).map(Host::create).collect();
    for host in &hosts {
        host.offer_api(server.port());
    }
    let kubeconfig = server.kubeconfig(ADMIN, host::API_PORT);
    let mut probes = Probes::open(&hosts);
    println!("bench: {nodes} namespaces, {} pairs to ask; flags {flags:?}; {}", probes.len(), load());

    let around = (&hosts[..], &machine);
    let started = Instant::now();
    for host in &hosts {
        host.start_agent(&kubeconfig, &flags);
    }
    println!("bench: agents started after {:.1} s", started.elapsed().as_secs_f64());
    let mut add = |what: &str, unit, value| figures.add_to("scale", nodes, what, unit, value);
    let seconds = |time: Duration| milliseconds(time) / 1e3;
    let took = probes.until_all_answer(around, started, PATIENCE).await;
    add("start of all: until everybody reaches everybody asked", "s", seconds(took));
    let ends = hosts.iter().map(Host::ends).sum::<usize>();
    add("start of all: agents that ended and were started again", "", ends as f64);
    let used = host::usage(&hosts);
    add("start of all: processor time, all agents", "s", seconds(used.agents.ran));
    add("start of all: processor time, all WireGuard processes", "s", seconds(used.wireguard.ran));

    tokio::time::sleep(Duration::from_secs(60)).await;
    let (before, from) = (host::usage(&hosts), Instant::now());
    tokio::time::sleep(rest).await;
    let (after, spent) = (host::usage(&hosts), from.elapsed().as_secs_f64());
    let share = |after: Duration, before: Duration| (after - before).as_secs_f64() / spent * 100.0;
    add("at rest: processor, all agents", "% of a core", share(after.agents.ran, before.agents.ran));
    add(
        "at rest: processor, all WireGuard processes",
        "% of a core",
        share(after.wireguard.ran, before.wireguard.ran),
    );
    add("at rest: memory, all agents", "MB", after.agents.memory);
    add("at rest: memory, all WireGuard processes", "MB", after.wireguard.memory);
    println!("bench: {}", load());

    // The API server goes away and comes back; packets must flow meanwhile.
    server.stop_api();
    let lost = probes.lost_during(outage).await;
    add(&format!("API server away for {} s: probes lost", outage.as_secs()), "of each thousand", lost * 1e3);
    let back = Instant::now();
    server.start_api().await;
    add("afterwards: the API server is there", "s", seconds(back.elapsed()));
    let api: Api<DynamicObject> =
        Api::all_with(client.clone(), &ApiResource::erase::<kilo_core::objects::peer::Peer>(&()));
    let peer = serde_json::from_value(objects::peer(0)).unwrap();
    api.create(&PostParams::default(), &peer).await.unwrap();
    let wanted = Instant::now();
    for host in &hosts {
        host.until("kilo_peers", 1, PATIENCE).await;
    }
    add("afterwards: every agent knows a new Peer", "s", seconds(wanted.elapsed()));
    probes.until_all_answer(around, Instant::now(), PATIENCE).await;

    let leader = (0..nodes)
        .filter(|number| number % objects::LOCATIONS == DIES_IN)
        .find(|number| hosts[*number].metric("kilo_leader") == Some(1))
        .expect("each location has a leader");
    hosts[leader].lose_power();
    let died = Instant::now();
    probes.leave_out(leader);
    let took = probes.until_all_answer(around, died, PATIENCE).await;
    add("a leader dies: until all others reach each other", "s", seconds(took));
    println!("bench: {}", load());
    host::end(&hosts);
    drop((client, server));
    netns::sh("umount -l /run /tmp 2>/dev/null || true");
}

/// Creates Nodes without anything an agent publishes, and what the manifests would bring.
async fn create(client: &Client, nodes: usize) {
    apply_crds(client).await;
    let mut lease = Lease::default();
    lease.metadata.name = Some(LEASE.to_owned());
    let leases: Api<Lease> = Api::namespaced(client.clone(), "kube-system");
    leases.create(&PostParams::default(), &lease).await.unwrap();
    let api = Api::all(client.clone());
    for number in 0..nodes {
        api.create(&PostParams::default(), &objects::fresh_node(number)).await.unwrap();
    }
}

/// The load average of the machine, to which everything else that runs there contributes.
fn load() -> String {
    format!("load of the machine {}", std::fs::read_to_string("/proc/loadavg").unwrap().trim())
}

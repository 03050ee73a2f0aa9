//! What it costs agents and the API server that all nodes are known: many backends in this process, each like
//! an agent's, by Nodes and by slices.

use std::{
    collections::BTreeMap,
    fs,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use futures::{StreamExt as _, stream};
use k8s_openapi::api::{coordination::v1::Lease, core::v1 as core};
use kilo_agent::backend::{
    Backend as _,
    kubernetes::{self, KubernetesBackend, NodesFrom},
};
use kilo_core::objects::{
    Snapshot,
    slices::{LEASE, rank},
};
use kube::{
    Api, Client,
    api::{Patch, PatchParams, PostParams},
};
use serde_json::json;

use crate::{
    Figures,
    api::{ADMIN, ApiServer, apply_crds},
    check_ins::unix_now,
    counted::Counted,
    netns, objects,
};

const LABEL: &str = "topology.kubernetes.io/region";
const CHANGES: usize = 5;

struct Bench {
    server: ApiServer,
    client: Client,
    proxy: Counted,
    /// The agent that writes slices has its own proxy, because it watches all Nodes.
    writers: Counted,
    nodes: usize,
    /// Nodes whose backends run, by rank: the first is the first to write slices.
    agents: Vec<String>,
}

/// `KILO_BENCH_AGENTS` and `KILO_BENCH_NODES`: how many; `KILO_BENCH_REST`: seconds.
pub async fn measure(figures: &mut Figures) {
    let number = |name: &str, default: usize| {
        std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
    };
    let (nodes, agents) = (number("KILO_BENCH_NODES", 1000), number("KILO_BENCH_AGENTS", 300));
    let by_nodes = number("KILO_BENCH_AGENTS_BY_NODES", agents.min(100));
    let rest = Duration::from_secs(number("KILO_BENCH_REST", 60) as u64);
    netns::sh("mount -t tmpfs tmp /tmp; ip link set lo up");
    let Some(server) = ApiServer::start().await else { return };
    let client = server.client(ADMIN).await;
    apply_crds(&client).await;
    // The manifests bring this Lease.
    let mut lease = Lease::default();
    lease.metadata.name = Some(LEASE.to_owned());
    let leases: Api<Lease> = Api::namespaced(client.clone(), "kube-system");
    leases.create(&PostParams::default(), &lease).await.unwrap();
    create(&client, nodes).await;
    let (proxy, writers) = (Counted::start(server.port()).await, Counted::start(server.port()).await);
    let mut bench = Bench { server, client, proxy, writers, nodes, agents: Vec::new() };
    bench.agents = bench.by_rank(agents).await;

    let (everybody, beats) = (bench.agents.clone(), Beats::start(&bench.client, nodes));
    bench.agents.truncate(by_nodes);
    beats.every(30);
    let backends = bench.start_all(figures, "Nodes", &NodesFrom::Nodes).await;
    bench.rest(figures, "Nodes", "at rest, heartbeats each 30 s", rest).await;
    beats.every(300);
    bench.rest(figures, "Nodes", "at rest, heartbeats each 300 s", rest).await;
    bench.change(figures, "Nodes", &backends).await;
    drop(backends);

    bench.agents = everybody;
    let from = NodesFrom::Slices { namespace: "kube-system".to_owned() };
    // The agent that writes starts first: from then on there are slices.
    let first = bench.backend(&bench.agents[0], &from, &bench.writers).await;
    let started = Instant::now();
    while !first.slices().is_some_and(|slices| slices.reads) {
        assert!(started.elapsed() < Duration::from_mins(3), "no slices: {:?}", first.slices());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    figures.add_to(
        "slices",
        "slices",
        "slices there from nothing",
        "ms",
        started.elapsed().as_secs_f64() * 1e3,
    );
    let writer = bench.agents.remove(0);
    let mut backends = bench.start_all(figures, "slices", &from).await;
    let waiting = Instant::now();
    while !backends.iter().all(|backend| backend.slices().is_some_and(|slices| slices.reads)) {
        assert!(waiting.elapsed() < Duration::from_mins(3), "some do not read slices");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    backends.push(first);
    bench.agents.push(writer);
    beats.every(30);
    bench.rest(figures, "slices", "at rest, heartbeats each 30 s", rest).await;
    beats.every(300);
    bench.rest(figures, "slices", "at rest, heartbeats each 300 s", rest).await;
    bench.change(figures, "slices", &backends).await;
    // The writer dies.
    backends.pop();
    bench.agents.pop();
    let took = bench.known(&backends, bench.nodes / 2).await;
    figures.add_to(
        "slices",
        "slices",
        "a change after the writer has died: known by all",
        "ms",
        at(&took, 1.0),
    );
    let reading =
        backends.iter().filter(|backend| backend.slices().is_some_and(|slices| slices.reads)).count();
    figures.add_to("slices", "slices", "agents that read slices all the time", "", reading as f64);
}

async fn create(client: &Client, nodes: usize) {
    let api: Api<core::Node> = Api::all(client.clone());
    let now = unix_now();
    stream::iter(0..nodes)
        .for_each_concurrent(16, |number| {
            let api = api.clone();
            async move {
                let mut node = objects::node(number, now);
                let annotations = node.metadata.annotations.as_mut().unwrap();
                annotations.insert("kilo.squat.ai/last-seen".to_owned(), now.to_string());
                annotations.insert("kilo.squat.ai/key".to_owned(), objects::key(number).to_string());
                annotations.insert("kilo.squat.ai/heartbeat".to_owned(), format!("{now}/300"));
                annotations.insert("kilo.squat.ai/signal".to_owned(), "1".to_owned());
                annotations
                    .insert("kilo.squat.ai/state".to_owned(), "member of location:location-01".to_owned());
                drop(api.create(&PostParams::default(), &node).await.unwrap());
            }
        })
        .await;
}

impl Bench {
    async fn by_rank(&self, agents: usize) -> Vec<String> {
        let plain = KubernetesBackend::start(self.client.clone(), None, LABEL).await.unwrap();
        let snapshot = plain.watch().borrow().clone();
        let mut names: Vec<_> =
            snapshot.nodes.names().map(|name| (rank(&snapshot.nodes, name), name.to_owned())).collect();
        names.sort();
        names.into_iter().take(agents).map(|(_, name)| name).collect()
    }

    async fn backend(&self, node: &str, from: &NodesFrom, by: &Counted) -> KubernetesBackend {
        let kubeconfig = self.server.kubeconfig(ADMIN, by.port);
        let client = kubernetes::client(Some(&kubeconfig), None).await.unwrap();
        KubernetesBackend::start_from(client, Some(node), LABEL, from).await.unwrap()
    }

    /// Starts all at once, as after a power failure.
    async fn start_all(&self, figures: &mut Figures, what: &str, from: &NodesFrom) -> Vec<KubernetesBackend> {
        let (started, received, spent) = (Instant::now(), self.proxy.received(), self.server_time());
        let starts = self.agents.iter().map(|node| async {
            let backend = self.backend(node, from, &self.proxy).await;
            (backend, started.elapsed())
        });
        let (backends, times): (Vec<_>, Vec<_>) = futures::future::join_all(starts).await.into_iter().unzip();
        let agents = backends.len() as f64;
        let mut add = |name: &str, unit, value| figures.add_to("slices", what, name, unit, value);
        add("agents", "", agents);
        add("start of all at once: 99 % know all nodes", "ms", at(&times, 0.99));
        add("start: received by an agent", "kB", (self.proxy.received() - received) as f64 / agents / 1e3);
        let spent = self.server_time() - spent;
        add("start: processor time of the API server for an agent", "ms", spent.as_secs_f64() * 1e3 / agents);
        tokio::time::sleep(Duration::from_secs(15)).await;
        backends
    }

    async fn rest(&self, figures: &mut Figures, what: &str, when: &str, time: Duration) {
        tokio::time::sleep(Duration::from_secs(10)).await;
        let (received, spent, events) = (self.proxy.received(), self.server_time(), self.events().await);
        let (written, started) = (self.writers.received(), Instant::now());
        tokio::time::sleep(time).await;
        let (seconds, agents) = (started.elapsed().as_secs_f64(), self.agents.len() as f64);
        let mut add = |name: &str, unit, value| {
            figures.add_to("slices", what, &format!("{when}: {name}"), unit, value);
        };
        add("events an agent", "/s", (self.events().await - events) / seconds / agents);
        let rate = |after: u64, before: u64| (after - before) as f64 / seconds / 1e3;
        let (read, written) = (rate(self.proxy.received(), received), rate(self.writers.received(), written));
        if written > 0.0 {
            let reader = read / (agents - 1.0);
            add("received by an agent that reads", "kB/s", reader);
            add("received by the one that writes", "kB/s", written);
            // Such a mesh has an agent on each node; fewer run here.
            let nodes = self.nodes as f64;
            let mean = (written + reader * (nodes - 1.0)) / nodes;
            add("received by an agent, in a mesh with one on each node", "kB/s", mean);
        } else {
            add("received by an agent", "kB/s", read / agents);
        }
        let spent = self.server_time() - spent;
        add("processor of the API server", "% of a core", spent.as_secs_f64() / seconds * 100.0);
    }

    async fn change(&self, figures: &mut Figures, what: &str, backends: &[KubernetesBackend]) {
        let mut all = Vec::new();
        for number in 0..CHANGES {
            all.extend(self.known(backends, number * 37 + 21).await);
            tokio::time::sleep(Duration::from_secs(2)).await;
        }
        figures.add_to("slices", what, "a change: known by half of the agents", "ms", at(&all, 0.5));
        figures.add_to("slices", what, "a change: known by 99 %", "ms", at(&all, 0.99));
    }

    /// Changes a node; returns how long each agent took to learn that.
    async fn known(&self, backends: &[KubernetesBackend], number: usize) -> Vec<Duration> {
        let api: Api<core::Node> = Api::all(self.client.clone());
        let (name, location) = (objects::name(number), format!("moved-{}", unix_now()));
        let patch = json!({"metadata": {"annotations": {"kilo.squat.ai/location": location}}});
        let started = Instant::now();
        api.patch_metadata(&name, &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap();
        let waits = backends.iter().map(|backend| async {
            let mut snapshots = backend.watch();
            let is_known = |snapshot: &Arc<Snapshot>| snapshot.nodes[&*name].location == location;
            let known = tokio::time::timeout(Duration::from_mins(2), snapshots.wait_for(is_known)).await;
            assert!(known.is_ok_and(|known| known.is_ok()), "a change is not known within two minutes");
            started.elapsed()
        });
        futures::future::join_all(waits).await
    }

    /// Events that the API server has sent to watchers.
    async fn events(&self) -> f64 {
        let request = hyper::http::Request::get("/metrics").body(Vec::new()).unwrap();
        let text = self.client.request_text(request).await.unwrap();
        let ours = |line: &&str| {
            line.starts_with("apiserver_watch_events_total{")
                && ["\"nodes\"", "\"nodeslices\"", "\"peers\"", "\"Node\"", "\"NodeSlice\"", "\"Peer\""]
                    .iter()
                    .any(|kind| line.contains(kind))
        };
        text.lines().filter(ours).filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok()).sum()
    }

    /// CPU time of the API server.
    fn server_time(&self) -> Duration {
        let port = format!("--secure-port={}", self.server.port());
        let is_server = |process: &fs::DirEntry| {
            fs::read(process.path().join("cmdline"))
                .is_ok_and(|line| line.split(|byte| *byte == 0).any(|argument| argument == port.as_bytes()))
        };
        let found = fs::read_dir("/proc").unwrap().flatten().find(is_server).unwrap();
        let stat = fs::read_to_string(found.path().join("stat")).unwrap();
        let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
        // User and system time, in hundredths of a second.
        Duration::from_millis((fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()) * 10)
    }
}

/// Milliseconds after which this share of all is done.
fn at(times: &[Duration], share: f64) -> f64 {
    let mut times = times.to_vec();
    times.sort_unstable();
    let place = ((times.len() as f64 * share).ceil() as usize).clamp(1, times.len());
    times[place - 1].as_secs_f64() * 1e3
}

/// Heartbeats of all nodes, as their agents write them.
struct Beats {
    every: Arc<AtomicU64>,
    workers: Vec<tokio::task::JoinHandle<()>>,
}

impl Beats {
    const WORKERS: usize = 4;

    fn start(client: &Client, nodes: usize) -> Self {
        let every = Arc::new(AtomicU64::new(300));
        let workers = (0..Self::WORKERS).map(|worker| {
            let (every, api): (_, Api<core::Node>) = (Arc::clone(&every), Api::all(client.clone()));
            tokio::spawn(async move {
                let mine: Vec<usize> = (0..nodes).filter(|number| number % Self::WORKERS == worker).collect();
                for number in mine.iter().cycle() {
                    // The promise stays the same, because a changed one counts as a change.
                    let pause = Duration::from_secs(every.load(Ordering::Relaxed)) / mine.len() as u32;
                    tokio::time::sleep(pause).await;
                    let now = unix_now();
                    let beat: BTreeMap<_, _> = [
                        ("kilo.squat.ai/last-seen", now.to_string()),
                        ("kilo.squat.ai/heartbeat", format!("{now}/300")),
                    ]
                    .into();
                    let patch = json!({"metadata": {"annotations": beat}});
                    let name = objects::name(*number);
                    api.patch_metadata(&name, &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap();
                }
            })
        });
        Self { workers: workers.collect(), every }
    }

    fn every(&self, seconds: u64) {
        self.every.store(seconds, Ordering::Relaxed);
    }
}

impl Drop for Beats {
    fn drop(&mut self) {
        self.workers.iter().for_each(tokio::task::JoinHandle::abort);
    }
}

//! An API server accepts every write and never responds: the host is reconciled at once nevertheless.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use kilo_agent::{
    agent::{self, Agent},
    backend::{Backend, BackendError, PeersReported, file::FileBackend},
    health::Health,
    metrics::Metrics,
};
use kilo_core::{
    objects::{Published, Snapshot},
    settings::{AttachMode, Compatibility, EndpointFrom, HostRouting, Masquerade, WireguardMode},
    topology::PeerAcceptances,
    wireguard::key::SecretKey,
};
use kilo_host::{cni::CniConfiguration, interface, net::mtu::Mtu};
use kilo_test_support::settings::settings;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::{
    cluster,
    netns::{isolated, sh},
    wait::task as wait,
};

const KEY: &str = "yAnz5TF+lXXJte14tji3zlMNq+hd2rYUIgJBgB3fBmk=";
/// The median change takes less; a change that waits for a response takes nearly 2 s.
const AT_ONCE: Duration = Duration::from_millis(1200);
/// A first start takes less, even on a busy machine; one that waits for other nodes takes 5 s more.
const STARTED: Duration = Duration::from_secs(4);

/// A backend that reads from a directory and never finishes a write.
struct Hangs {
    objects: FileBackend,
    writes: Arc<AtomicUsize>,
}

impl Hangs {
    async fn hang<T>(&self) -> T {
        self.writes.fetch_add(1, Ordering::Relaxed);
        std::future::pending().await
    }
}

impl Backend for Hangs {
    fn watch(&self) -> watch::Receiver<Arc<Snapshot>> {
        self.objects.watch()
    }

    async fn publish(&self, _: &str, _: &Published) -> Result<bool, BackendError> {
        self.hang().await
    }

    async fn report_peers(&self, _: &PeerAcceptances) -> Result<PeersReported, BackendError> {
        self.hang().await
    }

    async fn report_network(&self, _: &str, _: bool) -> Result<(), BackendError> {
        self.hang().await
    }

    async fn declare_dead(&self, _: &str, _: i64) -> Result<bool, BackendError> {
        self.hang().await
    }

    async fn retract(&self, _: &str) -> Result<(), BackendError> {
        self.hang().await
    }
}

fn options() -> agent::Options {
    agent::Options {
        hostname: "n1".to_owned(),
        interface: interface::Options {
            name: "kilo0".to_owned(),
            mode: WireguardMode::Auto,
            create: true,
            executable: PathBuf::from(env!("CARGO_BIN_EXE_kg")),
        },
        settings: settings(),
        mtu: Mtu::Auto,
        compatibility: Compatibility::None,
        resync: Duration::from_secs(3600),
        internal_cidrs: Vec::new(),
        endpoint_from: EndpointFrom::Auto,
        prefer_private: false,
        cni: CniConfiguration::Off,
        masquerade: Masquerade::Ebpf,
        forward_rules: false,
        last_good: None,
        bpffs: PathBuf::from("/sys/fs/bpf"),
        attach: AttachMode::Auto,
        debug: false,
        failover: None,
        relay: kilo_core::settings::Relay::Auto,
        host_routing: HostRouting::Off,
        relay_rate: 0,
    }
}

/// Time until the device has this prefix of a peer.
async fn applied(prefix: &str) -> Duration {
    let what = format!("{prefix} is on the device");
    wait::until(&what, Duration::from_secs(20), async || kilo_has(prefix)).await
}

fn kilo_has(prefix: &str) -> bool {
    sh("wg show kilo0 allowed-ips 2>/dev/null || true").contains(prefix)
}

/// Changes a peer repeatedly for 6 s, while writes become overdue and are retried.
async fn changes_are_applied_at_once() {
    let mut times = Vec::new();
    for change in 1..=5 {
        let prefix = format!("10.5.0.{change}/32");
        cluster::write_peer(&prefix);
        times.push(applied(&prefix).await);
        wait::pace(Duration::from_millis(1100)).await;
    }
    times.sort();
    assert!(times[times.len() / 2] < AT_ONCE, "changes were applied after {times:?}");
}

#[test]
fn an_api_server_that_hangs_delays_nothing_on_the_host() {
    isolated("an_api_server_that_hangs_delays_nothing_on_the_host", || async {
        cluster::prepare();
        cluster::write_node(2, "b", "10.42.2.0/24", true);
        cluster::write_peer("10.5.0.100/32");
        let key: SecretKey = KEY.parse().unwrap();
        for known in [false, true] {
            if known {
                cluster::write(
                    "n1",
                    &format!(
                        "kind: Node\nmetadata:\n  name: n1\n  labels: {{topology.kubernetes.io/region: a}}\n  \
                         annotations: {{kilo.squat.ai/key: '{}'}}\nspec: {{podCIDRs: [10.42.1.0/24]}}\n",
                        key.public()
                    ),
                );
                cluster::write_peer("10.5.0.100/32");
            }
            let objects =
                FileBackend::start(Path::new("/run/cluster"), "topology.kubernetes.io/region").await.unwrap();
            let writes = Arc::new(AtomicUsize::new(0));
            let backend = Hangs { objects, writes: Arc::clone(&writes) };
            let (options, stop) = (options(), CancellationToken::new());
            let startup = agent::begin(&options, false);
            let health = Health::new(Duration::ZERO);
            let (view, _reader) = watch::channel(Arc::default());
            let agent = Agent::new(options, backend, startup, key, Metrics::default(), health.clone(), view)
                .await
                .unwrap();
            let agent = tokio::spawn(agent.run(stop.clone()));
            let started = applied("10.5.0.100/32").await;
            // A node without a published key waits once for others to learn it.
            assert!(known == (started < STARTED), "known: {known}, applied after {started:?}");
            changes_are_applied_at_once().await;
            assert!(writes.load(Ordering::Relaxed) > 0, "something was to be written");
            let said = health.check(Instant::now()).unwrap_err();
            assert!(said.contains("has not answered within"), "{said}");
            stop.cancel();
            agent.await.unwrap().unwrap();
            sh("ip link delete kilo0");
        }
    });
}

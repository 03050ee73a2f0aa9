//! Failover of this node: runs the decisions of `kilo-failover` on a dedicated thread, which sends and
//! receives signals through the BPF programs, changes the kernel's word, and moves prefixes of other
//! locations between their gateways. It never waits for the API server or a reconcile.
//!
//! ```text
//! reconcile ── Site, keys ──> thread ── Acting, whether it leads ──> next reconcile
//! ```

mod claim_answers;
mod claim_rate;
mod far_side;
mod followers;
mod leader_order;
mod outbox;
mod report;
mod site;
mod thread;
mod unaccepted_claims;

use std::{
    collections::BTreeMap,
    net::IpAddr,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::Instant,
};

use kilo_common::{
    maps::{NODE_LED, NodeValue, SIGNAL_GATEWAY, SignalKey},
    siphash,
};
use kilo_core::{
    objects::Snapshot,
    plan::HopIds,
    signal_id::{self, NodeId},
    topology::{Acting, Mesh, Node},
    wireguard::{
        DeviceState,
        key::{PublicKey, SecretKey},
    },
};
use kilo_failover::Params;
use kilo_host::dataplane::{self, CounterReader, Dataplane, DataplaneError};
use nix::sys::eventfd::{EfdFlags, EventFd};
use parking_lot::Mutex;
use tokio::sync::Notify;

pub use report::{FailoverMetrics, Report, StandBy};
pub use site::{Facts, Site};

/// Failover settings from the agent's flags.
#[derive(Clone, Debug)]
pub struct Options {
    /// `--stand-bys`: how many nodes of a location can take over from its leader, 0 to 4.
    pub stand_bys: usize,
    /// `--leaders`: how many active leaders a location has, 1 to 8.
    pub leaders: usize,
    /// Timing, from `--failover-interval`.
    pub params: Params,
}

/// What a reconcile has found out for the thread.
enum News {
    /// The mesh as it is now.
    Site(Arc<Site>),
    /// This node takes no part any more.
    Left,
}

/// State shared by the thread and the agent.
struct Shared {
    /// Result of the last reconcile, until the thread takes it.
    news: Mutex<Option<News>>,
    /// Wakes the thread.
    wake: EventFd,
    stop: AtomicBool,
    output: Mutex<ThreadOutput>,
    /// Wakes the agent.
    changed: Arc<Notify>,
}

/// What the thread publishes.
#[derive(Clone, Debug, Default)]
struct ThreadOutput {
    acting: Arc<Acting>,
    /// The thread has published something.
    is_published: bool,
    /// The term in which this node leads its location, if it does.
    leading: Option<u64>,
    /// A dead leader that nodes without failover would still wait for; `None` once it is heard again.
    dead: Option<Dead>,
    report: Report,
    /// How this node has come to lead its location; entries not reported yet.
    successions: Vec<String>,
}

/// A leader that is to be marked as dead.
#[derive(Clone, Debug)]
struct Dead {
    node: String,
    /// The agent has started to mark it.
    is_taken: bool,
}

/// Gives access to what the thread knows, at any time.
#[derive(Clone)]
pub struct Reporter(Arc<Shared>);

impl Reporter {
    /// What the thread has last reported, copied; the default before it has run, or after it has ended without a
    /// site.
    pub fn report(&self) -> Report {
        self.0.output.lock().report.clone()
    }

    /// Whether this leader is still to be declared dead.
    pub fn declares_dead(&self, node: &str) -> bool {
        self.0.output.lock().dead.as_ref().is_some_and(|dead| dead.node == node)
    }
}

impl std::fmt::Debug for Reporter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Reporter")
    }
}

/// The agent's handle of the thread.
pub struct Failover {
    options: Options,
    shared: Arc<Shared>,
    /// Pairwise keys with nodes of the location, cached because each costs a Diffie-Hellman exchange.
    keys: BTreeMap<PublicKey, siphash::Key>,
    /// Secret that each node must present to change this node's word.
    cookies: BTreeMap<NodeId, u64>,
    orders: leader_order::Orders,
    /// Whether any node asks for several active leaders.
    several_asked: bool,
    thread: Option<JoinHandle<()>>,
}

impl Failover {
    /// Creates the handle without starting the thread. `changed` is notified when a reconcile is due.
    ///
    /// # Errors
    /// When no event descriptor can be created.
    pub fn new(options: Options, changed: Arc<Notify>) -> std::io::Result<Self> {
        let shared = Shared {
            news: Mutex::default(),
            wake: EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?,
            stop: AtomicBool::new(false),
            output: Mutex::default(),
            changed,
        };
        let (keys, cookies) = (BTreeMap::new(), BTreeMap::new());
        let orders = leader_order::Orders::default();
        let several_asked = options.leaders > 1;
        Ok(Self { options, shared: Arc::new(shared), keys, cookies, orders, several_asked, thread: None })
    }

    /// The mesh with its gateways and the acting leaders that the thread knows. Call it after the device was
    /// read: the thread reports its later moves only once they are done. `held`: senders in the data path
    /// that an earlier agent has left, for `node`'s location.
    pub fn mesh(
        &mut self,
        mesh: Mesh,
        state: &DeviceState,
        (node, held): (&str, &dyn Fn() -> BTreeMap<IpAddr, NodeValue>),
        now: Instant,
    ) -> Mesh {
        let output = self.shared.output.lock();
        let (is_published, acting) = (output.is_published, Arc::clone(&output.acting));
        drop(output);
        let stand_bys = self.options.stand_bys;
        let mut mesh = mesh.with_acting(stand_bys, acting);
        if !is_published {
            let mut before = site::acting_before(&mesh, state, crate::far::SEED);
            if let Some((own, _)) = mesh.find(node) {
                let held = held();
                let is_led = |address| held.get(&address).is_some_and(|sender| sender.flags & NODE_LED != 0);
                before.led = mesh.segments[own].led(is_led);
            }
            mesh = mesh.with_acting(stand_bys, Arc::new(before));
        }
        let mut acting = Acting::clone(&mesh.acting);
        if self.orders.observe(&mesh, &mut acting, now) {
            mesh.with_acting(stand_bys, Arc::new(acting))
        } else {
            mesh
        }
    }

    /// How this node has come to lead its location since the last call.
    pub fn successions(&self) -> Vec<String> {
        std::mem::take(&mut self.shared.output.lock().successions)
    }

    /// The term in which this node leads its location; `written` until the thread has published it.
    pub fn leading(&self, written: Option<u64>) -> Option<u64> {
        let output = self.shared.output.lock();
        if output.is_published { output.leading } else { written }
    }

    /// Checks whether any node asks for several active leaders, before this node publishes what it
    /// supports: one that joined without would count as one that supports a single leader only.
    pub fn note_several_asked(&mut self, snapshot: &Snapshot) {
        let asks = |node: &Node| node.gateway || node.leaders.is_some_and(|leaders| leaders > 1);
        self.several_asked = self.options.leaders > 1 || snapshot.nodes.iter().any(|node| asks(&node));
    }

    /// How many active leaders a location has by this node's configuration; `None` until a node asks for
    /// several, because nobody needs it before.
    pub fn leaders(&self) -> Option<usize> {
        self.several_asked.then_some(self.options.leaders)
    }

    /// A leader that is to be declared dead; returned only once each.
    pub fn declares_dead(&self) -> Option<String> {
        let mut output = self.shared.output.lock();
        let dead = output.dead.as_mut().filter(|dead| !dead.is_taken)?;
        dead.is_taken = true;
        Some(dead.node.clone())
    }

    /// Returns a handle for `/status` and other readers.
    pub fn reporter(&self) -> Reporter {
        Reporter(Arc::clone(&self.shared))
    }

    /// Derives the keys for checking signals of the location's nodes and, on a gateway, the entries of other
    /// locations' gateways.
    pub fn derive_signal_keys(
        &mut self,
        mesh: &Mesh,
        node: &str,
        own: &SecretKey,
        hops: &HopIds,
        held: &BTreeMap<IpAddr, SignalKey>,
    ) -> BTreeMap<IpAddr, SignalKey> {
        let Some((index, position)) = mesh.find(node) else { return BTreeMap::new() };
        let segment = &mesh.segments[index];
        let gateways = mesh.gateways_of(index);
        let mut entries = far_gateways(mesh, (index, position));
        let mut known = std::mem::take(&mut self.keys);
        for (at, member) in segment.members.iter().enumerate() {
            let (Some(public), Some(address)) = (member.node.key, member.private_ip()) else { continue };
            let Some(hop) = hops.get(member.name()).filter(|_| member.name() != node) else { continue };
            if !member.node.is_capable() {
                continue;
            }
            let Some(key) = known.remove(&public).or_else(|| signal_id::pair_key(own, &public)) else {
                continue;
            };
            self.keys.insert(public, key);
            let sender = signal_id::node(&public);
            // A restarted agent continues with the cookies that other nodes have received.
            let before = held.get(&address).filter(|held| held.sender == sender && held.cookie != 0);
            let draw = || before.map_or_else(|| rand::random::<u64>().max(1), |held| held.cookie);
            let cookie = *self.cookies.entry(sender).or_insert_with(draw);
            let flags = if gateways.order.contains(&at) { SIGNAL_GATEWAY } else { 0 };
            entries.insert(address, SignalKey { key: key.0, cookie, sender, hop, flags });
        }
        // Cookies of nodes that are gone are dropped.
        self.cookies
            .retain(|node, _| entries.values().any(|known| known.sender == *node && known.cookie != 0));
        entries
    }

    /// Pairwise keys, by the nodes' public keys.
    pub const fn keys(&self) -> &BTreeMap<PublicKey, siphash::Key> {
        &self.keys
    }

    /// Ends this node's part: it has no private address any more, and so is a location of its own.
    pub fn leave(&self) {
        *self.shared.news.lock() = Some(News::Left);
        self.shared.wake();
    }

    /// Hands the site to the thread, and starts the thread if it is not running.
    ///
    /// # Errors
    /// When a map or a program is missing.
    pub fn update(
        &mut self,
        site: Site,
        dataplane: &Dataplane,
        bpffs: &Path,
        metrics: &FailoverMetrics,
    ) -> Result<(), DataplaneError> {
        *self.shared.news.lock() = Some(News::Site(Arc::new(site)));
        if self.thread.as_ref().is_none_or(JoinHandle::is_finished) {
            let tools = thread::Tools {
                signals: dataplane.signals()?,
                ring: dataplane::lead::heard(bpffs)?,
                led: dataplane.led()?,
                counters: CounterReader::open(bpffs)?,
            };
            let (shared, params) = (Arc::clone(&self.shared), self.options.params.clone());
            let metrics = metrics.clone();
            let run = move || thread::run(shared, params, tools, metrics);
            let spawned = std::thread::Builder::new().name("failover".to_owned()).spawn(run);
            self.thread = Some(spawned.map_err(|source| DataplaneError::Run { source })?);
        }
        self.shared.wake();
        Ok(())
    }
}

/// Gateways of other locations by their addresses in tunnels; empty unless this node is a gateway and so has
/// such tunnels. `own`: location and position of this node.
fn far_gateways(mesh: &Mesh, own: (usize, usize)) -> BTreeMap<IpAddr, SignalKey> {
    let is_gateway = mesh.gateways_of(own.0).order.contains(&own.1);
    let is_far = |at: usize| is_gateway && at != own.0 && mesh.fails_over(at);
    let others = mesh.segments.iter().enumerate().filter(|(at, _)| is_far(*at));
    let gateways = others.flat_map(|(at, segment)| {
        let gateways = mesh.gateways_of(at);
        let keys = gateways.order.iter().filter_map(|member| segment.members[*member].node.key);
        keys.collect::<Vec<_>>()
    });
    let entry = |key: PublicKey| {
        let known =
            SignalKey { sender: signal_id::node(&key), flags: SIGNAL_GATEWAY, ..SignalKey::default() };
        (IpAddr::V6(signal_id::control_address(&key)), known)
    };
    gateways.map(entry).collect()
}

impl Shared {
    fn wake(&self) {
        // A write fails only if nobody has read the counter: the thread is woken anyway.
        let _ = self.wake.write(1);
    }
}

impl Drop for Failover {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use kilo_core::{objects::Node, settings::Granularity};

    use super::*;

    #[test]
    fn a_claim_is_heard_of_gateways_of_other_locations_alone() {
        let key = |name: &str| PublicKey([name.as_bytes()[1]; 32]);
        let node = |location: &str, name: &str, signal| Node {
            name: name.to_owned(),
            location: location.to_owned(),
            endpoint: "192.0.2.1:51820".parse().ok(),
            key: Some(key(name)),
            internal_ip: "10.1.0.1/24".parse().ok(),
            signal,
            ..Node::default()
        };
        let nodes = [
            node("own", "a1", true),
            node("own", "a2", true),
            node("own", "a7", true),
            node("far", "b3", true),
            node("far", "b4", true),
            node("far", "b5", true),
            // Its leader does not know signals.
            node("kilo", "c6", false),
        ];
        let mesh = Mesh::new(&nodes, &BTreeMap::new(), Granularity::Location, "10.4.0.0/16".parse().unwrap());
        let mesh = mesh.with_acting(1, Arc::default());
        let found = |name| far_gateways(&mesh, mesh.find(name).unwrap());
        let wanted = ["b3", "b4"].map(|name| {
            let (sender, flags) = (signal_id::node(&key(name)), SIGNAL_GATEWAY);
            let address = IpAddr::V6(signal_id::control_address(&key(name)));
            (address, SignalKey { sender, flags, ..SignalKey::default() })
        });
        for gateway in ["a1", "a2"] {
            assert_eq!(found(gateway), wanted.into());
        }
        assert_eq!(found("a7"), BTreeMap::new(), "it is not a gateway");
    }
}

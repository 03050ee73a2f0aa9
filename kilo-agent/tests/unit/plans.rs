//! Plans of nodes on ordinary hosts.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
};

use kilo_common::maps::SignalKey;
use kilo_core::{
    observed::HostLinks,
    plan::{self, HopIds, HostPlan, Inputs},
    relay::RelayInputs,
    settings::Settings,
    topology::{LocalMesh, Mesh, Node},
    wireguard::key::PublicKey,
};
pub use kilo_test_support::settings::settings;

static RESOLVED: BTreeMap<String, IpAddr> = BTreeMap::new();
static SEEN: BTreeMap<PublicKey, SocketAddr> = BTreeMap::new();
static RELAYS: RelayInputs = RelayInputs { listens: false, endpoints: BTreeMap::new() };
static SIGNAL_KEYS: BTreeMap<IpAddr, SignalKey> = BTreeMap::new();

/// The mesh of these nodes with [`settings`], without VPN peers.
pub fn mesh(nodes: &[Node]) -> Mesh {
    let settings = settings();
    Mesh::new(nodes, &BTreeMap::new(), settings.granularity, settings.subnet)
}

/// The WireGuard device, and the interface with the private address.
pub fn links() -> HostLinks {
    HostLinks { kilo: 9, private: Some(2), ..HostLinks::default() }
}

/// Inputs of a plan, where no endpoint is a name and no peer is seen elsewhere.
pub fn inputs<'a>(
    mesh: &'a LocalMesh<'a>,
    settings: &'a Settings,
    links: &'a HostLinks,
    hops: &'a HopIds,
) -> Inputs<'a> {
    Inputs {
        mesh,
        settings,
        links,
        hops,
        resolved: &RESOLVED,
        seen: &SEEN,
        relays: &RELAYS,
        signal_keys: &SIGNAL_KEYS,
        persistent_keepalive: 0,
        masquerade: true,
        mtu: 1420,
    }
}

/// The plan of a node in a mesh made with [`settings`], and its hop ids; `known` are the previous ones.
pub fn plan(mesh: &Mesh, own: &str, known: &HopIds) -> (HostPlan, HopIds) {
    let mesh = mesh.as_seen_from(own);
    let hops = known.update(&mesh);
    let plan = plan::host_plan(&inputs(&mesh, &settings(), &links(), &hops)).unwrap();
    (plan, hops)
}

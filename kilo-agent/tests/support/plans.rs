//! Plans of nodes on hosts where nothing is special.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
};

use kilo_common::maps::SignalKey;
use kilo_core::{
    observed::HostLinks,
    plan::{self, HopIds, HostPlan, Inputs},
    relay::RelayInputs,
    settings::{Encapsulate, Granularity, Settings, Tunnel},
    topology::{LocalMesh, Mesh, Node},
    wireguard::key::PublicKey,
};

static RESOLVED: BTreeMap<String, IpAddr> = BTreeMap::new();
static SEEN: BTreeMap<PublicKey, SocketAddr> = BTreeMap::new();
static RELAYS: RelayInputs = RelayInputs { listens: false, endpoints: BTreeMap::new() };
static SIGNAL_KEYS: BTreeMap<IpAddr, SignalKey> = BTreeMap::new();

/// One leader in each location, IPIP to all others there, and nothing else set.
pub fn settings() -> Settings {
    Settings {
        granularity: Granularity::Location,
        encapsulate: Encapsulate::Always,
        tunnel: Tunnel::Ipip,
        local: true,
        cni: true,
        subnet: "10.4.0.0/16".parse().unwrap(),
        service_cidrs: Vec::new(),
        port: 51_820,
    }
}

/// The mesh of these nodes with [`settings`], without VPN peers.
pub fn mesh(nodes: &[Node]) -> Mesh {
    let settings = settings();
    Mesh::new(nodes, &BTreeMap::new(), settings.granularity, settings.subnet)
}

/// The WireGuard device, and the interface with the private address.
pub fn links() -> HostLinks {
    HostLinks { kilo: 9, private: Some(2), ..HostLinks::default() }
}

/// What a plan is made of where no endpoint is a name, and nobody is seen elsewhere.
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

/// The plan of a node in a mesh that was made with [`settings`], and the hop ids in it; `known` are those of before.
pub fn plan(mesh: &Mesh, own: &str, known: &HopIds) -> (HostPlan, HopIds) {
    let mesh = mesh.as_seen_from(own);
    let hops = known.update(&mesh);
    let plan = plan::host_plan(&inputs(&mesh, &settings(), &links(), &hops)).unwrap();
    (plan, hops)
}

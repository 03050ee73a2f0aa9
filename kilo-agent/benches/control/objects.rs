//! Generated nodes and peers: 20 locations, each led by its first node.

use std::net::Ipv4Addr;

use k8s_openapi::api::core::v1 as core;
use kilo_core::wireguard::key::PublicKey;
use serde_json::json;

/// Locations of every mesh.
pub const LOCATIONS: usize = 20;
/// Node whose agent runs: the leader of location 0.
pub const OWN: usize = 0;

/// Name of a node.
pub fn name(number: usize) -> String {
    format!("node-{number:05}")
}

/// Private address of a node, in a /16 of its location.
pub fn private(number: usize) -> Ipv4Addr {
    let (location, place) = (number % LOCATIONS, number / LOCATIONS);
    Ipv4Addr::new(10, 201 + location as u8, (place / 250) as u8, (place % 250) as u8 + 1)
}

/// Pod CIDR of a node, a /24.
pub fn pods(number: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 64 + (number / 256) as u8, (number % 256) as u8, 0)
}

/// The first address of a node's pod CIDR, which its bridge has.
pub fn gateway(number: usize) -> Ipv4Addr {
    Ipv4Addr::from(u32::from(pods(number)) + 1)
}

/// A public key nobody has the private half of.
pub fn key(number: usize) -> PublicKey {
    let mut bytes = [7; 32];
    bytes[..8].copy_from_slice(&(number as u64 + 1).to_be_bytes());
    PublicKey(bytes)
}

/// A Node object as its kubelet and its agent leave it.
pub fn node(number: usize, now: i64) -> core::Node {
    let endpoint = match number {
        _ if number < LOCATIONS => Ipv4Addr::new(198, 18, number as u8, 1),
        _ => private(number),
    };
    let mut annotations = json!({
        "kilo.squat.ai/location": format!("location-{:02}", number % LOCATIONS),
        "node.alpha.kubernetes.io/ttl": "0",
        "volumes.kubernetes.io/controller-managed-attach-detach": "true",
    });
    if number != OWN {
        let published = json!({
            "kilo.squat.ai/endpoint": format!("{endpoint}:51820"),
            "kilo.squat.ai/internal-ip": format!("{}/16", private(number)),
            "kilo.squat.ai/key": key(number).to_string(),
            "kilo.squat.ai/last-seen": now.to_string(),
            "kilo.squat.ai/wireguard-ip": "",
            "kilo.squat.ai/granularity": "location",
        });
        annotations.as_object_mut().unwrap().extend(published.as_object().unwrap().clone());
    }
    let images: Vec<_> = (0..20)
        .map(|image| {
            json!({
                "names": [format!("registry.example/team/image-{image}@sha256:{:064x}", image * 7919)],
                "sizeBytes": 100_000_000 + image,
            })
        })
        .collect();
    let condition = |kind: &str| {
        json!({
            "type": kind, "status": "False", "reason": "KubeletHasNoTrouble",
            "message": "kubelet has sufficient resources of this kind available",
            "lastHeartbeatTime": "2026-01-01T00:00:00Z", "lastTransitionTime": "2026-01-01T00:00:00Z",
        })
    };
    let conditions = ["MemoryPressure", "DiskPressure", "PIDPressure", "Ready"].map(condition);
    let object = json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {
            "name": name(number),
            "annotations": annotations,
            "labels": {
                "kubernetes.io/arch": "amd64", "kubernetes.io/os": "linux", "kubernetes.io/hostname": name(number),
                "node.kubernetes.io/instance-type": "standard-4",
                "topology.kubernetes.io/region": format!("region-{}", number % LOCATIONS),
                "topology.kubernetes.io/zone": format!("zone-{}", number % 3),
            },
        },
        "spec": {"podCIDR": format!("{}/24", pods(number)), "podCIDRs": [format!("{}/24", pods(number))]},
        "status": {
            "addresses": [
                {"type": "InternalIP", "address": private(number)}, {"type": "Hostname", "address": name(number)},
            ],
            "capacity": {"cpu": "8", "memory": "32Gi", "pods": "110", "ephemeral-storage": "100Gi"},
            "allocatable": {"cpu": "8", "memory": "30Gi", "pods": "110", "ephemeral-storage": "90Gi"},
            "conditions": conditions,
            "images": images,
        },
    });
    serde_json::from_value(object).unwrap()
}

/// A Node object before an agent has run on the node.
pub fn fresh_node(number: usize) -> core::Node {
    let mut node = node(number, 0);
    let is_given = |name: &str| !name.starts_with("kilo.squat.ai/") || name.ends_with("/location");
    node.metadata.annotations.iter_mut().for_each(|annotations| annotations.retain(|name, _| is_given(name)));
    node
}

/// A Peer object without endpoint.
pub fn peer(number: usize) -> serde_json::Value {
    json!({
        "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "Peer", "metadata": {"name": format!("peer-{number:05}")},
        "spec": {
            "allowedIPs": [format!("10.250.{}.{}/32", number / 250, number % 250 + 1)],
            "publicKey": key(100_000 + number).to_string(),
            "persistentKeepalive": 10,
        },
    })
}

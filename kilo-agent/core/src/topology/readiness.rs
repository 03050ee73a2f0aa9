//! When a node is ready to take part in the mesh: it has all it needs, and its heartbeat is recent.
//! Whether a node that was ready has died is decided in `liveness.rs`.

use super::{CheckedInRef, Node};

/// A node that has not checked in for this long is not ready (Kilo's figure).
pub const READY_SECONDS: i64 = 60;

/// True when a node has all it needs to take part: an endpoint, a key and a pod CIDR. Whether it is alive
/// is decided separately.
pub fn is_complete(node: &Node) -> bool {
    missing(node).next().is_none()
}

/// What [`missing`] returns for a node to which no pod CIDR was allocated.
pub const NO_POD_CIDR: &str = "no pod CIDR";

/// The text of [`missing`], with a remedy where only an operator can mend it.
pub fn with_remedy(missing: &str) -> String {
    match missing {
        NO_POD_CIDR => {
            format!("{missing}: kube-controller-manager needs --allocate-node-cidrs and --cluster-cidr")
        }
        _ => missing.to_owned(),
    }
}

/// What a node lacks to take part, in words.
pub fn missing(node: &Node) -> impl Iterator<Item = &'static str> {
    [
        (node.endpoint.is_none(), "no endpoint"),
        (node.key.is_none(), "no key"),
        (node.pod_cidrs.is_empty(), NO_POD_CIDR),
    ]
    .into_iter()
    .filter_map(|(lacks, what)| lacks.then_some(what))
}

/// Whether a node is ready by one snapshot, as Kilo decides it: complete, and checked in within the last
/// [`ready_seconds`] of `now` (Unix seconds).
pub fn ready_at(node: CheckedInRef<'_>, now: i64) -> bool {
    is_complete(&node) && is_recent(node, now)
}

/// After so many seconds without a heartbeat a node is not ready: two of its heartbeats are missing.
pub fn ready_seconds(node: &Node) -> i64 {
    node.heartbeat.map_or(READY_SECONDS, |seconds| (2 * i64::from(seconds)).max(READY_SECONDS))
}

/// Whether a node has checked in within the last [`ready_seconds`] of `now` (Unix seconds),
/// or was declared alive.
pub fn is_recent(node: CheckedInRef<'_>, now: i64) -> bool {
    node.declared_alive.unwrap_or_else(|| now.saturating_sub(node.last_seen) < ready_seconds(node.node))
}

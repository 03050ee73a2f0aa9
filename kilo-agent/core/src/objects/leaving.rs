//! Signs on a Node object that its node is about to go, or to rest: a table of taints, cordons, and what a
//! kubelet says when its machine shuts down. Such a node leads its location only where no other can.

use k8s_openapi::api::core::v1::{Node, NodeCondition, NodeSpec, Taint};

use super::Leaving;

/// Keys of taints, whatever their effect; one that ends in `/` is a prefix.
pub const TAINTS: &[(&str, Leaving)] = &[
    // kube-controller-manager sets it on a cordoned Node.
    ("node.kubernetes.io/unschedulable", Leaving::Cordoned),
    ("ToBeDeletedByClusterAutoscaler", Leaving::Removed),
    // Karpenter 1.0, and before.
    ("karpenter.sh/disrupted", Leaving::Removed),
    ("karpenter.sh/disruption", Leaving::Removed),
    // Cloud controller managers, for a machine that is off; and by hand.
    ("node.cloudprovider.kubernetes.io/shutdown", Leaving::ShutsDown),
    ("node.kubernetes.io/out-of-service", Leaving::ShutsDown),
    ("cloud.google.com/impending-node-termination", Leaving::ShutsDown),
    ("aws-node-termination-handler/", Leaving::ShutsDown),
];

fn of_taint(taint: &Taint) -> Option<Leaving> {
    let matches = |key: &str| if key.ends_with('/') { taint.key.starts_with(key) } else { taint.key == key };
    TAINTS.iter().find(|(key, _)| matches(key)).map(|(_, leaving)| *leaving)
}

/// The reason in a Node; of several, the most pressing.
pub fn read(node: &Node) -> Option<Leaving> {
    let of_spec = node.spec.as_ref().and_then(of_spec);
    let mut conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let shuts_down = conditions.any(shuts_down).then_some(Leaving::ShutsDown);
    of_spec.into_iter().chain(shuts_down).max()
}

fn of_spec(spec: &NodeSpec) -> Option<Leaving> {
    let cordoned = spec.unschedulable.unwrap_or(false).then_some(Leaving::Cordoned);
    spec.taints.iter().flatten().filter_map(of_taint).chain(cordoned).max()
}

/// True for what a kubelet writes as soon as logind announces a shutdown, before it ends pods, where graceful
/// node shutdown is configured (pkg/kubelet/nodeshutdown): the node is not ready, among other messages because
/// it shuts down. Once it is off, the node's controller writes another message.
pub fn shuts_down(condition: &NodeCondition) -> bool {
    condition.type_ == "Ready"
        && condition.status == "False"
        && condition.message.as_ref().is_some_and(|message| message.contains("node is shutting down"))
}

/// Writes fields from which [`read`] returns the same.
pub fn write(leaving: Option<Leaving>, spec: &mut NodeSpec) {
    let key = TAINTS.iter().find(|(_, known)| Some(*known) == leaving).map(|(key, _)| *key);
    spec.taints = key
        .map(|key| vec![Taint { key: key.to_owned(), effect: "NoSchedule".to_owned(), ..Taint::default() }]);
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::NodeStatus;

    use super::*;

    fn with(spec: NodeSpec) -> Node {
        Node { spec: Some(spec), ..Node::default() }
    }

    fn tainted(keys: &[&str]) -> Node {
        let taint = |key: &&str| Taint { key: (*key).to_owned(), ..Taint::default() };
        with(NodeSpec { taints: Some(keys.iter().map(taint).collect()), ..NodeSpec::default() })
    }

    #[test]
    fn cordons_and_taints_of_removal_and_shutdown_are_known_and_others_say_nothing() {
        for (keys, leaving) in [
            (&["node.kubernetes.io/unschedulable"][..], Some(Leaving::Cordoned)),
            (&["ToBeDeletedByClusterAutoscaler"], Some(Leaving::Removed)),
            (&["karpenter.sh/disrupted"], Some(Leaving::Removed)),
            (&["node.kubernetes.io/out-of-service"], Some(Leaving::ShutsDown)),
            (&["node.cloudprovider.kubernetes.io/shutdown"], Some(Leaving::ShutsDown)),
            (&["aws-node-termination-handler/spot-itn"], Some(Leaving::ShutsDown)),
            // The more pressing reason counts.
            (&["node.kubernetes.io/unschedulable", "ToBeDeletedByClusterAutoscaler"], Some(Leaving::Removed)),
            // A silent kubelet, a candidate that may stay, and taints with other meanings.
            (&["node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready"], None),
            (&["DeletionCandidateOfClusterAutoscaler", "karpenter.sh/disruptedly", "gpu"], None),
        ] {
            assert_eq!(read(&tainted(keys)), leaving, "{keys:?}");
        }
        let cordoned = NodeSpec { unschedulable: Some(true), ..NodeSpec::default() };
        assert_eq!(read(&with(cordoned)), Some(Leaving::Cordoned));
        assert_eq!(read(&with(NodeSpec { unschedulable: Some(false), ..NodeSpec::default() })), None);
    }

    #[test]
    fn a_kubelet_says_that_its_machine_shuts_down() {
        let told = |type_: &str, status: &str, message: &str| {
            let condition = NodeCondition {
                type_: type_.to_owned(),
                status: status.to_owned(),
                message: Some(message.to_owned()),
                ..NodeCondition::default()
            };
            let status = NodeStatus { conditions: Some(vec![condition]), ..NodeStatus::default() };
            let spec = NodeSpec { unschedulable: Some(true), ..NodeSpec::default() };
            read(&Node { status: Some(status), ..with(spec) })
        };
        let several = "[container runtime is down, node is shutting down]";
        for message in ["node is shutting down", several] {
            assert_eq!(told("Ready", "False", message), Some(Leaving::ShutsDown), "{message}");
        }
        let cordoned = Some(Leaving::Cordoned);
        assert_eq!(told("Ready", "False", "container runtime is down"), cordoned);
        assert_eq!(told("Ready", "Unknown", "Kubelet stopped posting node status."), cordoned);
        assert_eq!(told("Ready", "True", "kubelet is posting ready status"), cordoned);
        assert_eq!(told("MemoryPressure", "False", "node is shutting down"), cordoned);
    }

    #[test]
    fn what_is_written_is_read_again() {
        for leaving in [None, Some(Leaving::Cordoned), Some(Leaving::Removed), Some(Leaving::ShutsDown)] {
            let mut spec = NodeSpec::default();
            write(leaving, &mut spec);
            assert_eq!(read(&with(spec)), leaving);
        }
    }
}

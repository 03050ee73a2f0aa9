//! Signs on a Node object that its node is about to go, or to rest: a table of taints, and
//! cordons. Such a node leads its location only where no other can.

use k8s_openapi::api::core::v1::{NodeSpec, Taint};

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

/// The reason in a Node's spec; of several, the most pressing.
pub fn read(spec: &NodeSpec) -> Option<Leaving> {
    let cordoned = spec.unschedulable.unwrap_or(false).then_some(Leaving::Cordoned);
    spec.taints.iter().flatten().filter_map(of_taint).chain(cordoned).max()
}

/// Writes fields from which [`read`] returns the same.
pub fn write(leaving: Option<Leaving>, spec: &mut NodeSpec) {
    let key = TAINTS.iter().find(|(_, known)| Some(*known) == leaving).map(|(key, _)| *key);
    spec.taints = key
        .map(|key| vec![Taint { key: key.to_owned(), effect: "NoSchedule".to_owned(), ..Taint::default() }]);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tainted(keys: &[&str]) -> NodeSpec {
        let taint = |key: &&str| Taint { key: (*key).to_owned(), ..Taint::default() };
        NodeSpec { taints: Some(keys.iter().map(taint).collect()), ..NodeSpec::default() }
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
        assert_eq!(read(&cordoned), Some(Leaving::Cordoned));
        assert_eq!(read(&NodeSpec { unschedulable: Some(false), ..NodeSpec::default() }), None);
    }

    #[test]
    fn what_is_written_is_read_again() {
        for leaving in [None, Some(Leaving::Cordoned), Some(Leaving::Removed), Some(Leaving::ShutsDown)] {
            let mut spec = NodeSpec::default();
            write(leaving, &mut spec);
            assert_eq!(read(&spec), leaving);
        }
    }
}

//! The image of the uninstaller's pods: the agents' own, as far as it can be found, and whether nodes can pull
//! it.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use k8s_openapi::api::{
    apps::v1::ControllerRevision,
    core::v1::{ContainerStatus, Node, Pod, PodSpec},
};
use kilo_agent::status::pods;
use kube::{Api, api::ListParams};

use crate::{cluster::Cluster, image_name::is_name, refusal::Asked};

/// Name of the agent's container in the manifests.
const CONTAINER: &str = "kilo";
/// End of the image's name, without tag, as the project builds it.
const REPOSITORY: &str = "/kilo";
/// Kilo's own image, which cannot remove what ours has left.
const KILOS: &str = "squat/kilo";
/// Kubelets report at most this many images by default: a longer list is cut.
const REPORTED: usize = 50;
/// Most images that are named in an error.
const NAMED: usize = 5;

/// The image that the deleted agents had.
///
/// # Errors
/// When nothing that can be trusted says it.
pub async fn of_agents(cluster: &Cluster, namespace: &str) -> Result<String> {
    let revisions: Api<ControllerRevision> = Api::namespaced(cluster.client.clone(), namespace);
    // Deleted soon after their DaemonSet; the right to read them is optional.
    let left = revisions.list(&ListParams::default().labels(pods::LABEL)).await.map(|list| list.items);
    if let Some(image) = of_revisions(&left.unwrap_or_default()) {
        return Ok(image);
    }
    let nodes: Api<Node> = Api::all(cluster.client.clone());
    let nodes = cluster.ask(Asked::new("list", "nodes"), nodes.list(&ListParams::default())).await?.items;
    let found = match of_nodes(&nodes) {
        Ok(image) => return Ok(image),
        Err(found) => found,
    };
    let seen = match found.len() {
        0 => "no node reports an image whose name ends in /kilo".to_owned(),
        many => {
            let shown = found.into_iter().take(NAMED).collect::<Vec<_>>().join(", ");
            format!("nodes report {shown}{}", if many > NAMED { " and others" } else { "" })
        }
    };
    bail!("nothing was removed: which image the agents had is not certain, name it with --image; {seen}")
}

/// The agent's image in a pod of theirs.
pub fn of_template(pod: &PodSpec) -> Option<String> {
    pod.containers.iter().find(|container| container.name == CONTAINER)?.image.clone()
}

fn of_revisions(revisions: &[ControllerRevision]) -> Option<String> {
    let latest = revisions.iter().max_by_key(|revision| revision.revision)?;
    let pod = latest.data.as_ref()?.0.pointer("/spec/template/spec")?;
    let image = of_template(&serde_json::from_value(pod.clone()).ok()?)?;
    (is_name(&image) && !is_kilos(&image)).then_some(image)
}

/// The one image of agents that nodes report; otherwise all that may be it. A node that is in other hands may
/// report anything, and a tenant's pods may have an image of such a name: nothing is certain unless every list
/// is whole, and all of them have one and the same.
fn of_nodes(nodes: &[Node]) -> Result<String, BTreeSet<String>> {
    let mut found = BTreeSet::new();
    let mut is_whole = true;
    for status in nodes.iter().filter_map(|node| node.status.as_ref()) {
        let images = status.images.as_deref().unwrap_or_default();
        is_whole &= images.len() < REPORTED;
        for image in images {
            let names = image.names.iter().flatten().filter(|name| is_agents(name));
            // With a digest only if there is no tag.
            if let Some(name) = names.min_by_key(|name| (name.contains('@'), name.len())) {
                found.insert(name.clone());
            }
        }
    }
    match found.pop_first() {
        Some(only) if is_whole && found.is_empty() => Ok(only),
        first => {
            found.extend(first);
            Err(found)
        }
    }
}

/// Name of an image without tag and digest.
fn repository(image: &str) -> &str {
    let name = image.split('@').next().unwrap_or_default();
    match name.rsplit_once(':') {
        // A colon may also precede the port of a registry.
        Some((name, tag)) if !tag.contains('/') => name,
        _ => name,
    }
}

/// Whether this is Kilo's own image, from any registry.
pub fn is_kilos(image: &str) -> bool {
    let name = repository(image);
    name.strip_suffix(KILOS).is_some_and(|before| before.is_empty() || before.ends_with('/'))
}

fn is_agents(image: &str) -> bool {
    is_name(image) && !is_kilos(image) && repository(image).ends_with(REPOSITORY)
}

/// Why kubelets wait for an image, and whether they will for ever.
const WAITING: [(&str, bool); 4] = [
    ("ErrImagePull", false),
    ("ImagePullBackOff", false),
    ("ErrImageNeverPull", true),
    ("InvalidImageName", true),
];
/// A pull that failed for this long has been tried twice.
const PATIENCE: Duration = Duration::from_secs(15);
/// Pause between two looks at the pods.
const PAUSE: Duration = Duration::from_secs(2);

/// Why a pod waits for its image, if it does.
fn waits(pod: &Pod) -> Option<(&'static str, bool)> {
    let status = pod.status.as_ref()?;
    let containers =
        [&status.init_container_statuses, &status.container_statuses].into_iter().flatten().flatten();
    let reason = |container: &ContainerStatus| container.state.as_ref()?.waiting.as_ref()?.reason.clone();
    containers.filter_map(reason).find_map(|reason| WAITING.into_iter().find(|(known, _)| *known == reason))
}

/// What the kubelet says of an image that it cannot pull.
pub fn not_pulled(pod: &Pod) -> Option<String> {
    waits(pod).and_then(|_| pods::why_not_running(pod))
}

/// The pulls of the uninstaller's image so far.
#[derive(Debug, Default)]
pub struct Pulls {
    looked: Option<Instant>,
    failing: Option<Instant>,
}

impl Pulls {
    /// Whether it is time to look at the pods again.
    pub fn is_due(&self) -> bool {
        self.looked.is_none_or(|at| at.elapsed() >= PAUSE)
    }

    /// Why there is no use in waiting longer for these pods' image.
    pub fn failed(&mut self, pods: &[Pod]) -> Option<String> {
        self.looked = Some(Instant::now());
        let stays = pods.iter().filter(|pod| pod.metadata.deletion_timestamp.is_none());
        let waiting: BTreeSet<_> = stays.filter_map(waits).collect();
        if waiting.is_empty() {
            self.failing = None;
            return None;
        }
        let since = self.failing.get_or_insert_with(Instant::now);
        let is_over = waiting.iter().any(|(_, for_ever)| *for_ever) || since.elapsed() >= PATIENCE;
        let reasons: Vec<_> = waiting.into_iter().map(|(reason, _)| reason).collect();
        is_over.then(|| format!("because nodes cannot pull the image ({})", reasons.join(", ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const OURS: &str = "registry.example:5000/net/kilo:0.1.0";

    fn node(images: &[&[&str]]) -> Node {
        let images: Vec<_> = images.iter().map(|names| json!({"names": names})).collect();
        serde_json::from_value(json!({"metadata": {"name": "n"}, "status": {"images": images}})).unwrap()
    }

    #[test]
    fn an_image_that_all_whole_lists_agree_on_is_taken_and_no_other() {
        let digest = format!("registry.example:5000/net/kilo@sha256:{}", "0a".repeat(32));
        let others: [&[&str]; 3] =
            [&["docker.io/squat/kilo:0.7.0"], &["k8s.gcr.io/pause:3.9"], &["x/kilo-peers:1"]];
        let with = |more: &[&[&str]]| node(&[&others[..], more].concat());
        let ours: &[&str] = &[&digest, OURS];
        assert_eq!(of_nodes(&[with(&[ours]), with(&[])]), Ok(OURS.to_owned()));
        assert_eq!(of_nodes(&[with(&[&[&digest]])]), Ok(digest.clone()), "it was pulled by its digest");
        assert_eq!(of_nodes(&[with(&[])]), Err(BTreeSet::new()));
        // A node in other hands, or a tenant's pod.
        let both = of_nodes(&[with(&[ours]), with(&[&["evil.example/kilo:1"]])]).unwrap_err();
        assert_eq!(both.len(), 2, "{both:?}");
        let cut: Vec<_> = (0..REPORTED).map(|at| format!("big/image:{at}")).collect();
        let names: Vec<_> = cut.iter().map(|name| vec![name.as_str()]).collect();
        let cut: Vec<_> = names.iter().map(Vec::as_slice).collect();
        let uncertain = of_nodes(&[node(&cut), with(&[&["evil.example/kilo:1"]])]).unwrap_err();
        assert_eq!(uncertain.len(), 1, "what the agents had may be cut off: {uncertain:?}");
        assert!(of_nodes(&[node(&[&["x/kilo:1\n      privileged: true"]])]).is_err());
    }

    #[test]
    fn kilos_own_image_is_not_ours() {
        for kilos in ["squat/kilo", "docker.io/squat/kilo:0.7.0", "r:5000/squat/kilo@sha256:00"] {
            assert!(is_kilos(kilos) && !is_agents(kilos), "{kilos}");
        }
        for ours in ["registry:5000/kilo", "notsquat/kilo:1", OURS] {
            assert!(!is_kilos(ours) && is_agents(ours), "{ours}");
        }
    }

    #[test]
    fn the_latest_revision_of_the_daemon_set_counts() {
        let revision = |number: i64, image: &str| -> ControllerRevision {
            let container = json!({"name": "kilo", "image": image});
            let data = json!({"spec": {"template": {"spec": {"containers": [container]}}}});
            serde_json::from_value(json!({"metadata": {"name": "kilo-x"}, "revision": number, "data": data}))
                .unwrap()
        };
        let old = revision(1, "docker.io/squat/kilo:0.7.0");
        assert_eq!(of_revisions(&[revision(2, OURS), old.clone()]).as_deref(), Some(OURS));
        assert_eq!(of_revisions(&[old]), None);
        assert_eq!(of_revisions(&[]), None);
    }

    #[test]
    fn a_pull_is_given_up_after_a_second_try_and_a_name_that_is_none_at_once() {
        let pod = |reason: &str| -> Pod {
            let waiting = json!({"waiting": {"reason": reason, "message": "no such host"}});
            let container = json!({"name": "uninstall", "image": "i", "imageID": "", "ready": false,
                "restartCount": 0, "state": waiting});
            let status = json!({"phase": "Pending", "initContainerStatuses": [container]});
            serde_json::from_value(json!({"metadata": {"name": "kilo-uninstall-x"}, "status": status}))
                .unwrap()
        };
        let mut pulls = Pulls::default();
        assert!(pulls.is_due());
        assert_eq!(pulls.failed(&[pod("PodInitializing")]), None);
        assert!(!pulls.is_due());
        assert_eq!(pulls.failed(&[pod("ErrImagePull")]), None);
        pulls.failing = Instant::now().checked_sub(PATIENCE);
        let why = pulls.failed(&[pod("ImagePullBackOff")]).unwrap();
        assert!(why.contains("(ImagePullBackOff)"), "{why}");
        pulls.failing = Instant::now().checked_sub(PATIENCE);
        assert_eq!(pulls.failed(&[pod("PodInitializing")]), None);
        assert_eq!(pulls.failed(&[pod("ErrImagePull")]), None, "a pull that succeeded in between");
        assert!(Pulls::default().failed(&[pod("InvalidImageName")]).is_some());
        let mut leaving = pod("InvalidImageName");
        leaving.metadata.deletion_timestamp = serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap();
        assert_eq!(Pulls::default().failed(&[leaving]), None);
        let said = not_pulled(&pod("ErrImagePull")).unwrap();
        assert!(said.contains("container uninstall: ErrImagePull: no such host"), "{said}");
        assert_eq!(not_pulled(&pod("CrashLoopBackOff")), None);
    }
}

//! The file backend on a real directory.

#![allow(clippy::unwrap_used, reason = "a test's helpers fail as the test does")]

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use kilo_agent::backend::{Backend as _, BackendError, file::FileBackend};
use kilo_core::{
    objects::{ObjectRef, Published, Snapshot},
    settings::Granularity,
    wireguard::key::PublicKey,
};
use tokio::sync::watch::Receiver;

const LABEL: &str = "topology.kubernetes.io/region";
/// Time limit for acting on an event, before the slow periodic read would.
const SOON: Duration = Duration::from_secs(5);
const LATE: Duration = Duration::from_secs(15);

fn node(name: &str, location: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Node\nmetadata:\n  name: {name}\n  labels: {{{LABEL}: {location}}}\n\
         spec:\n  podCIDR: 10.42.1.0/24\n"
    )
}

fn peer(name: &str, prefix: &str) -> String {
    let key = PublicKey([1; 32]);
    format!(
        "apiVersion: kilo.squat.ai/v1alpha1\nkind: Peer\nmetadata: {{name: {name}}}\n\
         spec: {{allowedIPs: [{prefix}], publicKey: \"{key}\"}}\n"
    )
}

fn published() -> Published {
    Published {
        endpoint: "192.0.2.1:51820".parse().ok(),
        ipv6_endpoint: "[2001:db8::7]:51820".parse().ok(),
        relay_off: true,
        internal_ip: "10.0.0.1/24".parse().ok(),
        key: Some(PublicKey([1; 32])),
        last_seen: 17,
        discovered_endpoints: BTreeMap::from([(PublicKey([2; 32]), "192.0.2.7:7".parse().unwrap())]),
        granularity: Some(Granularity::Location),
        ..Published::default()
    }
}

fn put(directory: &Path, name: &str, text: &str) {
    fs::write(directory.join(name), text).unwrap();
}

async fn started(directory: &Path) -> (FileBackend, Receiver<Arc<Snapshot>>) {
    let backend = FileBackend::start(directory, LABEL).await.unwrap();
    let snapshots = backend.watch();
    (backend, snapshots)
}

async fn until(
    snapshots: &mut Receiver<Arc<Snapshot>>,
    limit: Duration,
    wanted: impl Fn(&Snapshot) -> bool,
) -> Duration {
    let start = Instant::now();
    let reached = tokio::time::timeout(limit, snapshots.wait_for(|snapshot| wanted(snapshot))).await.is_ok();
    assert!(reached, "not reached within {limit:?}: {:#?}", snapshots.borrow());
    start.elapsed()
}

fn names(snapshot: &Snapshot) -> Vec<&str> {
    snapshot.nodes.names().collect()
}

#[tokio::test]
async fn kind_decides_and_changes_follow_soon() {
    let directory = tempfile::tempdir().unwrap();
    put(directory.path(), "all.yaml", &format!("{}---\n{}", node("a", "here"), peer("p", "10.5.0.1/32")));
    put(directory.path(), "b.yml", &node("b", "there"));
    put(directory.path(), ".hidden.yaml", &node("hidden", "x"));
    put(directory.path(), "notes.txt", "not YAML");
    fs::create_dir(directory.path().join("directory.yaml")).unwrap();
    let (_backend, mut snapshots) = started(directory.path()).await;
    let first = snapshots.borrow_and_update().clone();
    assert_eq!(names(&first), ["a", "b"]);
    assert_eq!(first.nodes["b"].location, "there");
    assert_eq!(first.peers.len(), 1);
    assert!(first.problems.is_empty(), "{:?}", first.problems);

    put(directory.path(), "c.yaml", &node("c", "there"));
    let took = until(&mut snapshots, SOON, |snapshot| snapshot.nodes.contains("c")).await;
    println!("a new file was seen after {took:?}");
    put(directory.path(), "c.yaml", &node("c", "moved"));
    until(&mut snapshots, SOON, |snapshot| snapshot.nodes["c"].location == "moved").await;
    fs::remove_file(directory.path().join("c.yaml")).unwrap();
    until(&mut snapshots, SOON, |snapshot| !snapshot.nodes.contains("c")).await;
}

#[tokio::test]
async fn a_broken_file_keeps_what_it_said_and_hides_no_other() {
    let directory = tempfile::tempdir().unwrap();
    put(directory.path(), "a.yaml", &node("a", "here"));
    put(
        directory.path(),
        "peers.yaml",
        &format!("{}---\n{}", peer("bad", "10.5.0.1"), peer("p", "10.5.0.2/32")),
    );
    put(directory.path(), "rubbish.yaml", "{[");
    let (_backend, mut snapshots) = started(directory.path()).await;
    let first = snapshots.borrow_and_update().clone();
    assert_eq!(names(&first), ["a"]);
    assert_eq!(first.peers.keys().collect::<Vec<_>>(), ["p"]);
    assert_eq!(
        first.problems.keys().map(ToString::to_string).collect::<Vec<_>>(),
        ["file rubbish.yaml", "peer bad"]
    );

    put(directory.path(), "a.yaml", "kind: Node\nmetadata: {name: a\n");
    until(&mut snapshots, SOON, |snapshot| snapshot.problems.contains_key(&ObjectRef::file("a.yaml"))).await;
    assert_eq!(names(&snapshots.borrow()), ["a"], "kept");
    put(directory.path(), "b.yaml", &node("b", "there"));
    until(&mut snapshots, SOON, |snapshot| snapshot.nodes.contains("b")).await;
    put(directory.path(), "a.yaml", &node("a", "mended"));
    until(&mut snapshots, SOON, |snapshot| {
        snapshot.nodes["a"].location == "mended"
            && !snapshot.problems.contains_key(&ObjectRef::file("a.yaml"))
    })
    .await;
}

#[tokio::test]
async fn agents_and_people_do_not_overwrite_one_another() {
    let directory = tempfile::tempdir().unwrap();
    // Exported from a cluster, with annotations that an agent wrote long ago.
    let exported = "apiVersion: v1\nkind: Node\nmetadata:\n  name: a\n  annotations:\n    \
                    kilo.squat.ai/endpoint: 198.51.100.1:1\n    kilo.squat.ai/cni-compatibility-ip: 10.9.9.9/32\n    \
                    kilo.squat.ai/leader: \"\"\nspec: {podCIDR: 10.42.1.0/24}\n";
    put(directory.path(), "a.yaml", exported);
    put(directory.path(), "b.yaml", &node("b", "here"));
    let (first, mut snapshots) = started(directory.path()).await;
    let (second, _) = started(directory.path()).await;
    let same = published();
    let (one, two) = tokio::join!(first.publish("a", &same), second.publish("b", &same));
    assert!(one.unwrap() && two.unwrap());
    until(&mut snapshots, SOON, |snapshot| snapshot.nodes.iter().all(|node| node.last_seen == 17)).await;
    let seen = snapshots.borrow().nodes["a"].clone();
    assert_eq!(seen.endpoint, published().endpoint, "the agent's, not the exported one");
    assert_eq!(seen.cni_compatibility_ip, None, "what the agent does not say is not there");
    assert!(seen.leader, "what people wrote stays");
    assert!(!first.publish("a", &published()).await.unwrap(), "nothing differs, nothing is written");
    assert_eq!(fs::read_to_string(directory.path().join("a.yaml")).unwrap(), exported);

    // Files are edited while the agents write.
    for round in 0..20 {
        put(directory.path(), "a.yaml", &node("a", &format!("round{round}")));
        let now = Published { last_seen: 100 + round, ..published() };
        assert!(first.publish("a", &now).await.unwrap());
    }
    until(&mut snapshots, SOON, |snapshot| {
        snapshot.nodes["a"].location == "round19"
            && snapshot.nodes.get("a").is_some_and(|node| node.last_seen == 119)
    })
    .await;

    first.retract("a").await.unwrap();
    first.retract("a").await.unwrap();
    until(&mut snapshots, SOON, |snapshot| snapshot.nodes["a"].key.is_none()).await;
    let mut left: Vec<_> =
        fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["a.yaml", "b.kilo.yaml", "b.yaml"]);
    let refused = first.publish("nobody", &published()).await.unwrap_err();
    assert!(matches!(refused, BackendError::NoSuchNode(_)), "{refused}");
}

#[tokio::test]
async fn a_file_system_that_does_not_respond_holds_up_nothing_else() {
    let directory = tempfile::tempdir().unwrap();
    put(directory.path(), "a.yaml", &node("a", "here"));
    let (backend, _) = started(directory.path()).await;
    // Who reads a pipe waits for somebody who writes into it.
    let pipe = directory.path().join("a.kilo.yaml");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let (responds, wait) = std::sync::mpsc::channel::<()>();
    let responding = std::thread::spawn(move || {
        let _ = wait.recv_timeout(SOON);
        fs::write(pipe, "").unwrap();
    });
    let published = published();
    let mut publishing = std::pin::pin!(backend.publish("a", &published));
    let early = tokio::time::timeout(Duration::from_millis(100), &mut publishing).await;
    assert!(early.is_err(), "the runtime was blocked, or nothing was read");
    drop(responds);
    assert!(publishing.await.unwrap());
    responding.join().unwrap();
}

#[tokio::test]
async fn what_an_agent_wrote_about_a_node_that_is_gone_does_not_bring_it_back() {
    let directory = tempfile::tempdir().unwrap();
    put(directory.path(), "a.yaml", &node("a", "here"));
    put(directory.path(), "b.yaml", &node("b", "here"));
    let (backend, mut snapshots) = started(directory.path()).await;
    backend.publish("b", &published()).await.unwrap();
    fs::remove_file(directory.path().join("b.yaml")).unwrap();
    until(&mut snapshots, SOON, |snapshot| names(snapshot) == ["a"]).await;
}

#[tokio::test]
async fn one_object_in_two_files_is_named() {
    let directory = tempfile::tempdir().unwrap();
    put(directory.path(), "1.yaml", &format!("{}---\n{}", node("a", "first"), peer("p", "10.5.0.1/32")));
    put(directory.path(), "2.yaml", &format!("{}---\n{}", node("a", "second"), peer("p", "10.5.0.2/32")));
    let (_backend, snapshots) = started(directory.path()).await;
    let first = snapshots.borrow();
    assert_eq!(first.nodes["a"].location, "first");
    assert_eq!(first.peers["p"].allowed_ips, ["10.5.0.1/32".parse().unwrap()]);
    assert!(
        first.problems[&ObjectRef::file("2.yaml")].contains("Node a")
            && first.problems[&ObjectRef::file("2.yaml")].contains("Peer p")
    );
}

#[tokio::test]
async fn a_directory_that_goes_or_is_replaced_takes_nothing_with_it() {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("cluster");
    let refused = FileBackend::start(&directory, LABEL).await.err().unwrap().to_string();
    assert!(refused.contains("does not exist; make it"), "{refused}");
    put(parent.path(), "cluster", "");
    let refused = FileBackend::start(&directory, LABEL).await.err().unwrap().to_string();
    assert!(refused.contains("not a directory"), "{refused}");
    fs::remove_file(&directory).unwrap();

    fs::create_dir(&directory).unwrap();
    put(&directory, "a.yaml", &node("a", "here"));
    let (_backend, mut snapshots) = started(&directory).await;
    fs::rename(&directory, parent.path().join("moved")).unwrap();
    until(&mut snapshots, LATE, |snapshot| snapshot.problems.contains_key(&ObjectRef::Directory)).await;
    assert_eq!(names(&snapshots.borrow()), ["a"], "kept");

    // An unmounted file system looks like this.
    fs::create_dir(&directory).unwrap();
    until(&mut snapshots, LATE, |snapshot| {
        snapshot.problems.get(&ObjectRef::Directory).is_some_and(|problem| problem.contains("no Node object"))
    })
    .await;
    assert_eq!(names(&snapshots.borrow()), ["a"], "kept");
    // The new directory is watched, not the removed one.
    put(&directory, "b.yaml", &node("b", "here"));
    let took = until(&mut snapshots, SOON, |snapshot| names(snapshot) == ["b"]).await;
    println!("a file of the new directory was seen after {took:?}");
    assert!(!snapshots.borrow().problems.contains_key(&ObjectRef::Directory));
}

#[tokio::test]
async fn links_are_followed_and_large_files_refused() {
    let (directory, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    put(elsewhere.path(), "data", &node("a", "here"));
    std::os::unix::fs::symlink(elsewhere.path().join("data"), directory.path().join("a.yaml")).unwrap();
    std::os::unix::fs::symlink("/nowhere", directory.path().join("b.yaml")).unwrap();
    std::os::unix::fs::symlink("/dev/zero", directory.path().join("c.yaml")).unwrap();
    put(directory.path(), "d.yaml", &format!("{}# {}", node("d", "x"), "x".repeat(1 << 20)));
    fs::write(directory.path().join("e.yaml"), [0xff, 0xfe]).unwrap();
    let (_backend, snapshots) = started(directory.path()).await;
    let first = snapshots.borrow();
    assert_eq!(names(&first), ["a"]);
    assert_eq!(
        first.problems.keys().map(ToString::to_string).collect::<Vec<_>>(),
        ["file d.yaml", "file e.yaml"]
    );
    assert!(first.problems[&ObjectRef::file("d.yaml")].contains("1 MiB"), "{:?}", first.problems);
}

//! A directory of Node and Peer objects in YAML, in the shape Kubernetes has
//! them. People write any files they like; each agent writes one file of its
//! own, so that nobody overwrites anybody. See docs/file-backend.md.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Write as _},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use k8s_openapi::api::core::v1 as core;
use notify::{RecursiveMode, Watcher as _};
use serde::Deserialize as _;
use serde_json::Value;
use tokio::sync::{Notify, watch};

use super::{Backend, BackendError, Published, Snapshot, node, peer};

/// Larger files are not read.
const MAX_FILE: u64 = 1 << 20;
/// The directory is also read this often, in case an event was missed.
const REREAD: Duration = Duration::from_secs(10);
/// Quiet time after an event before the directory is read.
const SETTLE: Duration = Duration::from_millis(50);

/// What one file said when it was last readable.
#[derive(Clone, Debug, Default, PartialEq)]
struct Content {
    nodes: Vec<core::Node>,
    peers: Vec<peer::Peer>,
}

type Files = BTreeMap<PathBuf, Content>;

/// The file backend.
pub struct FileBackend {
    directory: PathBuf,
    snapshots: watch::Receiver<Arc<Snapshot>>,
    /// Annotations of every node, as merged from the files.
    annotations: Arc<Mutex<BTreeMap<String, BTreeMap<String, String>>>>,
    changed: Arc<Notify>,
    /// Ends the watch when the backend goes.
    _watcher: notify::RecommendedWatcher,
}

impl FileBackend {
    /// Reads the directory and watches it.
    ///
    /// # Errors
    /// When the directory is not there or cannot be read.
    pub async fn start(directory: &Path, topology_label: &str) -> Result<Self, BackendError> {
        let failed = |source| BackendError::Io { path: directory.display().to_string(), source };
        let missing = |error: io::Error| {
            if error.kind() == io::ErrorKind::NotFound {
                BackendError::Config(format!(
                    "--backend-dir {}: the directory does not exist; make it and put Node and Peer objects there",
                    directory.display()
                ))
            } else {
                failed(error)
            }
        };
        fs::read_dir(directory).map_err(missing)?;
        let changed = Arc::new(Notify::new());
        let on_event = Arc::clone(&changed);
        let mut watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
            if event.is_ok_and(|event| !event.kind.is_access()) {
                on_event.notify_one();
            }
        })
        .map_err(|error| failed(io::Error::other(error)))?;
        watcher
            .watch(directory, RecursiveMode::NonRecursive)
            .map_err(|error| failed(io::Error::other(error)))?;

        let annotations = Arc::new(Mutex::new(BTreeMap::new()));
        let mut files = Files::new();
        let first = read(directory, topology_label, &mut files, &annotations).map_err(failed)?;
        let (sender, snapshots) = watch::channel(Arc::new(first));
        let task = Watch {
            directory: directory.to_owned(),
            label: topology_label.to_owned(),
            changed: Arc::clone(&changed),
            annotations: Arc::clone(&annotations),
            sender,
        };
        tokio::spawn(task.run(files));
        Ok(Self { directory: directory.to_owned(), snapshots, annotations, changed, _watcher: watcher })
    }

    /// The file an agent writes about its own node.
    fn own_file(&self, node: &str) -> Result<PathBuf, BackendError> {
        if node::is_dns_name(node) {
            Ok(self.directory.join(format!("{node}.kilo.yaml")))
        } else {
            Err(BackendError::Config(format!("node name {node:?} is no DNS name; set --hostname")))
        }
    }
}

struct Watch {
    directory: PathBuf,
    label: String,
    changed: Arc<Notify>,
    annotations: Arc<Mutex<BTreeMap<String, BTreeMap<String, String>>>>,
    sender: watch::Sender<Arc<Snapshot>>,
}

impl Watch {
    async fn run(self, mut files: Files) {
        loop {
            if tokio::time::timeout(REREAD, self.changed.notified()).await.is_ok() {
                tokio::time::sleep(SETTLE).await;
            }
            match read(&self.directory, &self.label, &mut files, &self.annotations) {
                Ok(snapshot) => {
                    self.sender.send_if_modified(|current| {
                        let differs = **current != snapshot;
                        if differs {
                            *current = Arc::new(snapshot);
                        }
                        differs
                    });
                }
                Err(error) => {
                    tracing::error!(directory = %self.directory.display(), %error, "directory not readable");
                }
            }
            if self.sender.is_closed() {
                return;
            }
        }
    }
}

impl Backend for FileBackend {
    fn watch(&self) -> watch::Receiver<Arc<Snapshot>> {
        self.snapshots.clone()
    }

    async fn publish(&self, node: &str, published: &Published) -> Result<bool, BackendError> {
        let known = self.annotations.lock().unwrap_or_else(PoisonError::into_inner).get(node).cloned();
        let present = known.ok_or_else(|| BackendError::NoSuchNode(node.to_owned()))?;
        let wanted = node::annotations(published);
        if node::changes(&present, wanted.clone()).is_empty() {
            return Ok(false);
        }
        let annotations: BTreeMap<String, String> =
            wanted.into_iter().filter_map(|(name, value)| Some((name, value?))).collect();
        let mut object = core::Node::default();
        object.metadata.name = Some(node.to_owned());
        object.metadata.annotations = Some(annotations);
        let path = self.own_file(node)?;
        write(&path, &object)
            .map_err(|source| BackendError::Io { path: path.display().to_string(), source })?;
        self.changed.notify_one();
        Ok(true)
    }

    async fn retract(&self, node: &str) -> Result<(), BackendError> {
        let path = self.own_file(node)?;
        match fs::remove_file(&path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                Err(BackendError::Io { path: path.display().to_string(), source })
            }
            _ => Ok(()),
        }
    }
}

/// Writes a file that appears complete under its name, or not at all.
fn write(path: &Path, object: &core::Node) -> io::Result<()> {
    let directory = path.parent().unwrap_or(Path::new("."));
    let mut file = tempfile::Builder::new().prefix(".kilo-").tempfile_in(directory)?;
    writeln!(file, "# Written by kg about this node; it is overwritten.")?;
    serde_yaml_ng::to_writer(&mut file, object).map_err(io::Error::other)?;
    fs::set_permissions(file.path(), std::os::unix::fs::PermissionsExt::from_mode(0o644))?;
    file.persist(path)?;
    Ok(())
}

/// Reads every file; one that cannot be read keeps what it said before.
fn read(
    directory: &Path,
    label: &str,
    files: &mut Files,
    annotations: &Mutex<BTreeMap<String, BTreeMap<String, String>>>,
) -> io::Result<Snapshot> {
    let mut snapshot = Snapshot::default();
    let mut now = Files::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        let hidden = path.file_name().is_none_or(|name| name.as_encoded_bytes().starts_with(b"."));
        let yaml = path.extension().is_some_and(|extension| extension == "yaml" || extension == "yml");
        if hidden || !yaml || !path.is_file() {
            continue;
        }
        match parse(&path) {
            Ok(content) => {
                now.insert(path, content);
            }
            Err(error) => {
                snapshot.problems.insert(path.display().to_string(), error);
                if let Some(before) = files.remove(&path) {
                    now.insert(path, before);
                }
            }
        }
    }
    *files = now;
    let merged = merge(files);
    for object in merged.values() {
        let (node, problems) = node::from_object(object, label);
        if !problems.is_empty() {
            snapshot.problems.insert(format!("node {}", node.name), problems.join("; "));
        }
        snapshot.nodes.insert(node.name.clone(), node);
    }
    for object in files.values().flat_map(|content| &content.peers) {
        let name = object.metadata.name.clone().unwrap_or_default();
        match peer::from_object(object) {
            Ok(peer) => {
                snapshot.peers.insert(name, peer);
            }
            Err(error) => {
                snapshot.problems.insert(format!("peer {name}"), error.to_string());
            }
        }
    }
    *annotations.lock().unwrap_or_else(PoisonError::into_inner) = merged
        .into_iter()
        .map(|(name, object)| (name, object.metadata.annotations.unwrap_or_default()))
        .collect();
    Ok(snapshot)
}

/// Puts together what several files say about one node; of annotations, those
/// people write win over those of the agent's own file.
fn merge(files: &Files) -> BTreeMap<String, core::Node> {
    let own = |path: &Path| path.to_string_lossy().ends_with(".kilo.yaml");
    let mut ordered: Vec<_> = files.iter().collect();
    ordered.sort_by_key(|(path, _)| (own(path), path.as_path()));
    let mut nodes: BTreeMap<String, core::Node> = BTreeMap::new();
    for (path, content) in ordered {
        for object in &content.nodes {
            let Some(name) = &object.metadata.name else { continue };
            // What an agent wrote about a node that is gone does not bring it back.
            if own(path) && !nodes.contains_key(name) {
                continue;
            }
            let node = nodes.entry(name.clone()).or_default();
            node.metadata.name = Some(name.clone());
            add_missing(&mut node.metadata.annotations, object.metadata.annotations.as_ref());
            add_missing(&mut node.metadata.labels, object.metadata.labels.as_ref());
            if node.spec.is_none() {
                node.spec.clone_from(&object.spec);
            }
        }
    }
    nodes
}

fn add_missing(into: &mut Option<BTreeMap<String, String>>, from: Option<&BTreeMap<String, String>>) {
    let into = into.get_or_insert_default();
    for (name, value) in from.into_iter().flatten() {
        into.entry(name.clone()).or_insert_with(|| value.clone());
    }
}

fn parse(path: &Path) -> Result<Content, String> {
    let length = fs::metadata(path).map_err(|error| error.to_string())?.len();
    if length > MAX_FILE {
        return Err(format!("{length} bytes are more than the {MAX_FILE} a file may have"));
    }
    let text = fs::read_to_string(path).map_err(|error| error.to_string())?;
    let mut content = Content::default();
    for (number, document) in serde_yaml_ng::Deserializer::from_str(&text).enumerate() {
        let at = |error: &dyn std::fmt::Display| format!("document {}: {error}", number + 1);
        let value = Value::deserialize(document).map_err(|error| at(&error))?;
        match value.get("kind").and_then(Value::as_str) {
            _ if value.is_null() => {}
            Some("Node") => content.nodes.push(serde_json::from_value(value).map_err(|error| at(&error))?),
            Some("Peer") => content.peers.push(serde_json::from_value(value).map_err(|error| at(&error))?),
            kind => return Err(at(&format!("kind {kind:?} is neither Node nor Peer"))),
        }
    }
    Ok(content)
}

//! The topology an agent worked with last, on disk, for a start while the API
//! server is away: `{"version":1,"node":…,"nodes":[…],"peers":[…]}`.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::{self, Read as _, Write as _},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::{
    backend::{Snapshot, peer},
    status::View,
    topology::{Node, Peer},
};

/// Where the topology is kept.
pub const DEFAULT_PATH: &str = "/var/lib/kilo/topology.json";

/// Goes up with every change of the format; other versions are ignored.
const VERSION: u32 = 1;
/// No file is larger: ten thousand nodes take some megabytes.
const LARGEST: u64 = 64 << 20;
/// Two writes are at least this far apart.
const PACE: Duration = Duration::from_secs(5);

/// Why there is no topology to start with.
#[derive(Debug, thiserror::Error)]
pub enum LastGoodError {
    /// The file cannot be read or written.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The file does not hold a topology.
    #[error("it holds no topology ({0})")]
    Content(String),
    /// Another version of the agent wrote it.
    #[error("its version is {0}, this agent reads {VERSION}")]
    Version(u64),
    /// It was written for another node.
    #[error("it was written for node {0:?}; check --hostname")]
    OtherNode(String),
}

/// The nodes and peers one node works with.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LastGood {
    /// The node that works with them.
    pub node: String,
    /// That node, and those that take part.
    pub nodes: Vec<Node>,
    /// Valid peers.
    pub peers: Vec<Peer>,
}

#[derive(Serialize, Deserialize)]
struct Document {
    version: u32,
    node: String,
    nodes: Vec<Node>,
    peers: Vec<peer::Peer>,
}

impl LastGood {
    /// What is worth keeping: nodes that do not take part are left out, and so
    /// are signs of life, which say nothing later and would change the file
    /// all the time.
    pub fn new(node: &str, snapshot: &Snapshot, ready: &BTreeSet<String>) -> Self {
        let kept = snapshot.nodes.values().filter(|other| other.name == node || ready.contains(&other.name));
        Self {
            node: node.to_owned(),
            nodes: kept.map(|other| Node { last_seen: 0, ..other.clone() }).collect(),
            peers: snapshot.peers.values().cloned().collect(),
        }
    }

    /// The file's content; holds pre-shared keys.
    ///
    /// # Errors
    /// [`LastGoodError::Content`], never seen.
    pub fn encode(&self) -> Result<Vec<u8>, LastGoodError> {
        let document = Document {
            version: VERSION,
            node: self.node.clone(),
            nodes: self.nodes.clone(),
            peers: self.peers.iter().map(peer::to_object).collect(),
        };
        serde_json::to_vec(&document).map_err(|error| LastGoodError::Content(error.to_string()))
    }

    /// Reads what [`Self::encode`] wrote for this node.
    ///
    /// # Errors
    /// When it is for another node, of another version, or rubbish.
    pub fn decode(content: &[u8], node: &str) -> Result<Self, LastGoodError> {
        // A reason may quote what was found, and that may be a key.
        let rubbish = |error: serde_json::Error| {
            LastGoodError::Content(format!("line {}, column {}", error.line(), error.column()))
        };
        #[derive(Deserialize)]
        struct Version {
            version: u64,
        }
        let Version { version } = serde_json::from_slice(content).map_err(rubbish)?;
        if version != u64::from(VERSION) {
            return Err(LastGoodError::Version(version));
        }
        let document: Document = serde_json::from_slice(content).map_err(rubbish)?;
        if document.node != node {
            return Err(LastGoodError::OtherNode(document.node));
        }
        if !document.nodes.iter().any(|other| other.name == node) {
            return Err(LastGoodError::Content(format!("node {node:?} is not in it")));
        }
        let peers = document.peers.iter().map(peer::from_object).collect::<Result<_, _>>();
        let peers = peers.map_err(|_| LastGoodError::Content("a peer is not valid".to_owned()))?;
        Ok(Self { node: document.node, nodes: document.nodes, peers })
    }

    /// As a backend would have told it.
    pub fn into_snapshot(self) -> Snapshot {
        Snapshot {
            nodes: self.nodes.into_iter().map(|node| (node.name.clone(), node)).collect(),
            peers: self.peers.into_iter().map(|peer| (peer.name.clone(), peer)).collect(),
            ..Snapshot::default()
        }
    }
}

/// Reads the file; `None` when there is none.
///
/// # Errors
/// When it cannot be read, or is not for this node and agent.
pub fn load(path: &Path, node: &str) -> Result<Option<LastGood>, LastGoodError> {
    let failed = |source| LastGoodError::Io { path: path.to_owned(), source };
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    let mut content = Vec::new();
    file.take(LARGEST).read_to_end(&mut content).map_err(failed)?;
    LastGood::decode(&content, node).map(Some)
}

/// Replaces the file; it appears complete or not at all, for root's eyes only.
///
/// # Errors
/// When it cannot be written; it then stays as it was.
pub fn save(path: &Path, topology: &LastGood) -> Result<(), LastGoodError> {
    let content = topology.encode()?;
    let replace = || {
        let directory = path.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(directory)?;
        // Mode 0600 from the first byte.
        let mut file = tempfile::NamedTempFile::new_in(directory)?;
        file.write_all(&content)?;
        // A name without a content is what a power failure would leave else.
        file.as_file().sync_all()?;
        file.persist(path)?;
        File::open(directory)?.sync_all()
    };
    replace().map_err(|source| LastGoodError::Io { path: path.to_owned(), source })
}

/// Removes the file, if it is there.
///
/// # Errors
/// When it cannot be removed.
pub fn remove(path: &Path) -> Result<(), LastGoodError> {
    match fs::remove_file(path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(LastGoodError::Io { path: path.to_owned(), source })
        }
        _ => Ok(()),
    }
}

/// Keeps the file up to date with what the agent works with, for as long as
/// there is an agent. `known`: what the file holds already.
pub async fn keep(path: PathBuf, mut known: Option<LastGood>, mut views: watch::Receiver<Arc<View>>) {
    while views.changed().await.is_ok() {
        let view = Arc::clone(&views.borrow_and_update());
        let topology = LastGood::new(&view.node, &view.snapshot, &view.ready);
        if known.as_ref() == Some(&topology) {
            continue;
        }
        let (to, written) = (path.clone(), topology.clone());
        let saved = tokio::task::spawn_blocking(move || save(&to, &written)).await;
        match saved {
            Ok(Ok(())) => {
                tracing::debug!(nodes = topology.nodes.len(), "kept the topology on disk");
                known = Some(topology);
            }
            Ok(Err(error)) => {
                tracing::warn!(%error, "the topology is not kept for a start without API server");
            }
            Err(error) => tracing::error!(%error, "the topology is not kept"),
        }
        tokio::time::sleep(PACE).await;
    }
}

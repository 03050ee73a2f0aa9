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

#[cfg(test)]
mod tests {
    use std::{os::unix::fs::PermissionsExt as _, time::Instant};

    use super::*;
    use crate::{
        topology::{Granularity, Liveness},
        wireguard::key::{PublicKey, SecretKey},
    };

    fn node(name: &str, last_seen: i64) -> Node {
        Node {
            name: name.to_owned(),
            endpoint: "vpn.example.com:51820".parse().ok(),
            endpoint_forced: true,
            key: Some(PublicKey([1; 32])),
            internal_ip: "10.1.0.11/24".parse().ok(),
            pod_cidrs: vec!["10.42.0.0/24".parse().unwrap(), "fd00:42::/64".parse().unwrap()],
            discovered_endpoints: [(PublicKey([2; 32]), "[2001:db8::1]:9".parse().unwrap())].into(),
            granularity: Some(Granularity::Full),
            last_seen,
            ..Node::default()
        }
    }

    fn snapshot() -> Snapshot {
        let peer = Peer {
            name: "laptop".to_owned(),
            allowed_ips: vec!["10.5.0.1/32".parse().unwrap()],
            endpoint: "192.0.2.9:51820".parse().ok(),
            persistent_keepalive: 25,
            preshared_key: Some(SecretKey::from_bytes([7; 32])),
            public_key: PublicKey([9; 32]),
        };
        Snapshot {
            nodes: ["a", "b", "dead"].map(|name| (name.to_owned(), node(name, 1000))).into(),
            peers: [(peer.name.clone(), peer)].into(),
            ..Snapshot::default()
        }
    }

    fn ready() -> BTreeSet<String> {
        ["a", "b"].map(ToOwned::to_owned).into()
    }

    fn kept() -> LastGood {
        LastGood::new("a", &snapshot(), &ready())
    }

    #[test]
    fn what_is_kept_is_read_back_without_the_dead_and_without_signs_of_life() {
        let read = LastGood::decode(&kept().encode().unwrap(), "a").unwrap().into_snapshot();
        let mut expected = snapshot();
        expected.nodes.remove("dead");
        expected.nodes.values_mut().for_each(|node| node.last_seen = 0);
        assert_eq!(read, expected);
    }

    #[test]
    fn a_new_sign_of_life_is_nothing_to_write() {
        let mut later = snapshot();
        later.nodes.values_mut().for_each(|node| node.last_seen += 30);
        assert_eq!(LastGood::new("a", &later, &ready()), kept());
    }

    #[test]
    fn a_file_that_is_not_for_this_agent_is_refused_and_no_key_is_quoted() {
        let good = String::from_utf8(kept().encode().unwrap()).unwrap();
        let refused = |text: &str| LastGood::decode(text.as_bytes(), "a").unwrap_err();
        assert!(matches!(LastGood::decode(good.as_bytes(), "z").unwrap_err(), LastGoodError::OtherNode(_)));
        let newer = good.replacen("\"version\":1", "\"version\":2", 1);
        assert!(matches!(refused(&newer), LastGoodError::Version(2)));
        for cut in [0, 1, 40, good.len() / 2, good.len() - 1] {
            assert!(matches!(refused(&good[..cut]), LastGoodError::Content(_)), "{cut}");
        }
        let secret = SecretKey::from_bytes([7; 32]).reveal();
        assert!(good.contains(&secret), "pre-shared keys are kept");
        let moved =
            good.replace("\"persistentKeepalive\":25", &format!("\"persistentKeepalive\":{secret:?}"));
        assert_ne!(moved, good);
        let reason = refused(&moved).to_string();
        assert!(!reason.contains(&secret), "{reason}");
        let without = good.replace("\"name\":\"a\"", "\"name\":\"c\"");
        assert!(matches!(refused(&without), LastGoodError::Content(_)));
    }

    #[test]
    fn the_file_is_for_root_only_and_replaced_whole() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("kilo/topology.json");
        assert_eq!(load(&path, "a").unwrap(), None);
        save(&path, &LastGood { peers: Vec::new(), ..kept() }).unwrap();
        save(&path, &kept()).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(load(&path, "a").unwrap(), Some(kept()));
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "no temporary file stays");
        remove(&path).unwrap();
        remove(&path).unwrap();
        assert_eq!(load(&path, "a").unwrap(), None);
    }

    #[test]
    fn nodes_from_disk_stay_until_the_backend_tells_and_the_long_dead_stay_out_then() {
        let (start, minute) = (Instant::now(), Duration::from_secs(60));
        let mut liveness = Liveness::default();
        let from_disk = kept().into_snapshot().nodes;
        for at in [start, start + minute * 60] {
            assert_eq!(liveness.ready(&from_disk, "a", at, 900_000), ready());
        }
        let mut told = snapshot().nodes;
        for name in ["a", "b"] {
            told.get_mut(name).unwrap().last_seen = 903_595;
        }
        assert_eq!(liveness.ready(&told, "a", start + minute * 60, 903_600), ready());
    }
}

//! The topology the agent last worked with, on disk: a start while the API
//! server is away has tables and routes all the same.
//!
//! The file holds Node and Peer objects, pre-shared keys with them, and only its
//! owner may read it. Heartbeats are left out: they tell nothing about a time
//! long past, and the file changes only when the topology does.
//!
//! It also hands to the next agent which private addresses nodes have lost (their interface is
//! down): what is sent there must not leave in clear when the address comes back.

use std::{
    cell::Cell,
    collections::BTreeMap,
    fs,
    io::{self, Read as _},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use k8s_openapi::api::core::v1 as core;
use serde::{Deserialize, Serialize, Serializer};
use sha2::{Digest as _, Sha256};

use kilo_core::objects::{ObjectRef, Snapshot, node, peer};
use kilo_core::topology::{Node, Peer};

/// Name of the file, beside the private key.
pub const FILE: &str = "last-good.json";
/// What the file says it is.
const FORMAT: &str = "kilo-last-good/1";
/// Two writes are at least this far apart.
const PACE: Duration = Duration::from_secs(10);
/// 10,000 nodes are some 10 MB; nothing longer is ours.
const LONGEST: u64 = 256 << 20;

/// Why a file is not used.
#[derive(Debug, thiserror::Error)]
pub enum LastGoodError {
    /// It cannot be read.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// It is something else, or broken. The parser's own error is not kept: it may quote a key.
    #[error("not written by this agent: {0}")]
    Foreign(String),
}

#[derive(Deserialize)]
struct Content {
    format: String,
    /// The node whose agent wrote it.
    node: String,
    nodes: Vec<core::Node>,
    /// Those of them that have lost their private address, as they were with it.
    #[serde(default)]
    without_address: Vec<core::Node>,
    peers: Vec<peer::Peer>,
}

/// The same to be written, object by object: all of 10,000 nodes at once are 35 MB, for a moment.
#[derive(Serialize)]
struct Written<'a, N: Serialize, W: Serialize, P: Serialize> {
    format: &'a str,
    node: &'a str,
    nodes: N,
    #[serde(skip_serializing_if = "Option::is_none")]
    without_address: Option<W>,
    peers: P,
}

/// A list whose members are made when they are written, once.
struct Each<I>(Cell<Option<I>>);

impl<I> Each<I> {
    const fn of(members: I) -> Self {
        Self(Cell::new(Some(members)))
    }
}

impl<I: Iterator<Item: Serialize>> Serialize for Each<I> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.take().into_iter().flatten())
    }
}

/// A file, and the hash of what is written to it.
struct Hashed<W>(W, Sha256);

impl<W: io::Write> io::Write for Hashed<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let length = self.0.write(bytes)?;
        self.1.update(&bytes[..length]);
        Ok(length)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Writes the file.
#[derive(Debug)]
pub struct LastGood {
    path: PathBuf,
    node: String,
    written: Option<[u8; 32]>,
    looked: Option<Instant>,
}

impl LastGood {
    /// For the agent of `node`.
    pub fn new(path: &Path, node: &str) -> Self {
        Self { path: path.to_owned(), node: node.to_owned(), written: None, looked: None }
    }

    /// True when the last write is some seconds ago.
    pub fn is_due(&self, now: Instant) -> bool {
        self.looked.is_none_or(|looked| now.saturating_duration_since(looked) >= PACE)
    }

    /// Keeps these nodes, those that have lost their private address as they were with it, and
    /// peers, when they differ from what was written last and that was some seconds ago; else
    /// a later call does. Returns whether it wrote.
    ///
    /// # Errors
    /// When the file cannot be written; the old one then stays.
    pub fn keep<'a>(
        &mut self,
        nodes: impl Iterator<Item = &'a Node>,
        without_address: impl Iterator<Item = &'a Node>,
        peers: impl Iterator<Item = &'a Peer>,
        now: Instant,
    ) -> io::Result<bool> {
        if !self.is_due(now) {
            return Ok(false);
        }
        self.looked = Some(now);
        let directory = self.path.parent().unwrap_or(Path::new("."));
        // Temporary files of this kind are made with mode 0600.
        let file = tempfile::NamedTempFile::new_in(directory)?;
        let mut file = io::BufWriter::new(Hashed(file, Sha256::new()));
        let mut without_address = without_address.peekable();
        let is_lost = without_address.peek().is_some();
        let content = Written {
            format: FORMAT,
            node: &self.node,
            nodes: Each::of(nodes.map(|node| node::to_object(node, 0))),
            without_address: is_lost.then(|| Each::of(without_address.map(|node| node::to_object(node, 0)))),
            peers: Each::of(peers.map(peer::to_object)),
        };
        serde_json::to_writer(&mut file, &content)?;
        let Hashed(file, digest) = file.into_inner().map_err(io::IntoInnerError::into_error)?;
        let digest = digest.finalize().into();
        if self.written == Some(digest) {
            return Ok(false);
        }
        file.as_file().sync_all()?;
        file.persist(&self.path)?;
        self.written = Some(digest);
        Ok(true)
    }
}

/// The nodes of the file, without `node` itself, each with the private address that it had last;
/// none when there is no file.
///
/// # Errors
/// When it is broken, or of another node.
pub fn load_nodes(path: &Path, node: &str) -> Result<Vec<Node>, LastGoodError> {
    let Some(content) = read(path, node)? else { return Ok(Vec::new()) };
    let objects = content.nodes.iter().chain(&content.without_address);
    // The location is always an annotation here; of two with one name the later one counts.
    let nodes = objects.map(|object| node::from_object(object, "").0.node);
    let mut nodes: BTreeMap<_, _> = nodes.map(|node| (node.name.clone(), node)).collect();
    nodes.remove(node);
    Ok(nodes.into_values().collect())
}

/// The snapshot of the file; `None` when there is no file.
///
/// # Errors
/// When it is broken, or of another node. Single objects that do not parse are
/// left out and named in the snapshot.
pub fn load(path: &Path, node: &str) -> Result<Option<Snapshot>, LastGoodError> {
    let Some(content) = read(path, node)? else { return Ok(None) };
    let mut snapshot = Snapshot::default();
    for object in &content.nodes {
        // The location is always an annotation here.
        let (seen, problems) = node::from_object(object, "");
        if !problems.is_empty() {
            snapshot.problems.insert(ObjectRef::node(&seen.node.name), problems.join("; "));
        }
        snapshot.nodes.insert(seen);
    }
    let objects: BTreeMap<String, _> = content
        .peers
        .iter()
        .map(|object| (object.metadata.name.clone().unwrap_or_default(), object))
        .collect();
    let mut peers = BTreeMap::new();
    for (name, object) in objects {
        match peer::from_object(object) {
            Ok(peer) => drop(peers.insert(name, peer)),
            Err(error) => drop(snapshot.problems.insert(ObjectRef::peer(name), error.to_string())),
        }
    }
    snapshot.peers = peers.into();
    Ok(Some(snapshot))
}

/// What the file holds; `None` when there is no file.
fn read(path: &Path, node: &str) -> Result<Option<Content>, LastGoodError> {
    let file = match fs::File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other?,
    };
    let mut bytes = Vec::new();
    file.take(LONGEST).read_to_end(&mut bytes)?;
    let content: Content =
        serde_json::from_slice(&bytes).map_err(|error| LastGoodError::Foreign(place(&error)))?;
    if content.format != FORMAT || content.node != node {
        let what = format!("format {:?} of node {:?}", content.format, content.node);
        return Err(LastGoodError::Foreign(what));
    }
    Ok(Some(content))
}

/// Where the mistake is; the error's own words may quote a key.
fn place(error: &serde_json::Error) -> String {
    format!("not what it should be at line {}, column {}", error.line(), error.column())
}

#[cfg(test)]
mod tests {
    use std::{iter, os::unix::fs::PermissionsExt as _};

    use super::*;
    use kilo_core::wireguard::key::{PublicKey, SecretKey};

    fn node(name: &str) -> Node {
        Node {
            name: name.to_owned(),
            endpoint: "192.0.2.1:51820".parse().ok(),
            key: Some(PublicKey([1; 32])),
            internal_ip: "10.0.0.1/24".parse().ok(),
            location: "here".to_owned(),
            pod_cidrs: vec!["10.42.0.0/24".parse().unwrap()],
            ..Node::default()
        }
    }

    fn peer() -> Peer {
        Peer {
            name: "laptop".to_owned(),
            allowed_ips: vec!["10.5.0.1/32".parse().unwrap()],
            endpoint: None,
            persistent_keepalive: 10,
            preshared_key: Some(SecretKey::from_bytes([5; 32])),
            public_key: PublicKey([9; 32]),
            follows: false,
        }
    }

    #[test]
    fn what_was_kept_is_read_back_and_only_its_owner_may_read_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(FILE);
        assert_eq!(load(&path, "a").unwrap(), None);
        let (mut file, now) = (LastGood::new(&path, "a"), Instant::now());
        let (nodes, peers) = ([node("a"), node("b")], [peer()]);
        assert!(file.keep(nodes.iter(), iter::empty(), peers.iter(), now).unwrap());
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let read = load(&path, "a").unwrap().unwrap();
        assert_eq!(read.problems, BTreeMap::new());
        assert_eq!(read.peers["laptop"], peer());
        assert_eq!(read.nodes["b"], node("b"));
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1, "no temporary file is left");
    }

    #[test]
    fn it_is_written_when_the_topology_changed_and_not_too_often() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(FILE);
        let (mut file, start) = (LastGood::new(&path, "a"), Instant::now());
        assert!(file.keep([node("a")].iter(), iter::empty(), [].iter(), start).unwrap());
        assert!(
            !file.keep([node("a")].iter(), iter::empty(), [].iter(), start + PACE).unwrap(),
            "nothing changed"
        );
        let moved = || Node { location: "there".to_owned(), ..node("a") };
        assert!(
            !file.keep([moved()].iter(), iter::empty(), [].iter(), start + PACE * 3 / 2).unwrap(),
            "too soon"
        );
        assert!(file.keep([moved()].iter(), iter::empty(), [].iter(), start + PACE * 2).unwrap());
        assert_eq!(load(&path, "a").unwrap().unwrap().nodes["a"].location, "there");
    }

    #[test]
    fn an_address_that_a_node_has_lost_is_kept_beside_what_it_is_now() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(FILE);
        assert_eq!(load_nodes(&path, "a").unwrap(), []);
        let lost = Node { internal_ip: None, ..node("b") };
        let nodes = [node("a"), lost.clone(), node("c")];
        let mut file = LastGood::new(&path, "a");
        file.keep(nodes.iter(), [node("b")].iter(), iter::empty(), Instant::now()).unwrap();
        assert_eq!(load(&path, "a").unwrap().unwrap().nodes["b"], lost, "a start without API server");
        assert_eq!(load_nodes(&path, "a").unwrap(), [node("b"), node("c")], "what the next agent remembers");
    }

    #[test]
    fn what_is_broken_or_of_another_node_is_not_used() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(FILE);
        LastGood::new(&path, "a").keep([node("a")].iter(), iter::empty(), [].iter(), Instant::now()).unwrap();
        let whole = fs::read_to_string(&path).unwrap();
        assert!(load(&path, "b").unwrap_err().to_string().contains("not written by this agent"));
        for broken in ["", "{}", "[]", &whole[..whole.len() / 2], &whole.replace("good/1", "good/2")] {
            fs::write(&path, broken).unwrap();
            assert!(matches!(load(&path, "a"), Err(LastGoodError::Foreign(_))), "{broken}");
        }
        fs::write(&path, whole.replace("10.42.0.0/24", "rubbish")).unwrap();
        let read = load(&path, "a").unwrap().unwrap();
        assert!(read.problems[&ObjectRef::node("a")].contains("rubbish"), "{:?}", read.problems);
    }
}

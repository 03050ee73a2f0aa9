//! The topology the agent last worked with, saved on disk, so that a start while the API server is away has
//! tables and routes.
//!
//! The file holds Node and Peer objects, including pre-shared keys, and only its owner may read it.
//! Heartbeats are left out: they are outdated by the next start, and this way the file changes only when the
//! topology does.
//!
//! It also records which private addresses nodes have lost (their interface is down), for the next agent:
//! packets to them must not leave in cleartext when the address comes back.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Read as _},
    os::unix::fs::MetadataExt as _,
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
/// Prefix of the names of temporary files, before they are renamed to [`FILE`].
const UNFINISHED: &str = ".last-good-";
/// Value of the file's `format` field.
const FORMAT: &str = "kilo-last-good/1";
/// Minimum time between two writes.
const PACE: Duration = Duration::from_secs(10);
/// Bytes per write call: 1,000 nodes take some 700 kB.
const BUFFER: usize = 256 << 10;
/// Maximum bytes read of a file: 10,000 nodes take some 10 MB.
const LONGEST: u64 = 256 << 20;

/// Why a file is not used.
#[derive(Debug, thiserror::Error)]
pub enum LastGoodError {
    /// It cannot be read.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// It has another format, or is broken. The parser's own error is not kept: it may quote a key.
    #[error("not written by this agent: {0}")]
    Foreign(String),
}

#[derive(Deserialize)]
struct Content {
    format: String,
    /// The node whose agent wrote the file.
    node: String,
    nodes: Vec<core::Node>,
    /// Nodes that have lost their private address, as they were while they had it.
    #[serde(default)]
    without_address: Vec<core::Node>,
    peers: Vec<peer::Peer>,
}

/// [`Content`] for writing, object by object: 10,000 nodes at once would take 35 MB for a moment.
#[derive(Serialize)]
struct Written<'a, N: Serialize, W: Serialize, P: Serialize> {
    format: &'a str,
    node: &'a str,
    nodes: N,
    #[serde(skip_serializing_if = "Option::is_none")]
    without_address: Option<W>,
    peers: P,
}

/// A list whose items are created while they are serialized.
struct Each<I>(I);

impl<I: Iterator<Item: Serialize> + Clone> Serialize for Each<I> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.clone())
    }
}

/// Hashes what is written to it.
#[derive(Default)]
struct Hash(Sha256);

impl Hash {
    fn digest(self) -> [u8; 32] {
        self.0.finalize().into()
    }
}

impl io::Write for Hash {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Serializes something into `to`, with few write calls.
fn write_to<W: io::Write>(to: W, content: &impl Serialize) -> io::Result<W> {
    let mut buffer = io::BufWriter::with_capacity(BUFFER, to);
    serde_json::to_writer(&mut buffer, content)?;
    buffer.into_inner().map_err(io::IntoInnerError::into_error)
}

/// Writes the file.
#[derive(Debug)]
pub struct LastGood {
    path: PathBuf,
    node: String,
    /// Hash of the file's content; `None` until the file of an earlier agent has been compared.
    written: Option<[u8; 32]>,
    looked: Option<Instant>,
}

impl LastGood {
    /// Creates the writer for the agent of `node`. Removes temporary files that an agent left when it was
    /// killed.
    pub fn new(path: &Path, node: &str) -> Self {
        remove_unfinished(path);
        Self { path: path.to_owned(), node: node.to_owned(), written: None, looked: None }
    }

    /// Whether the last write was long enough ago.
    pub fn is_due(&self, now: Instant) -> bool {
        self.looked.is_none_or(|looked| now.saturating_duration_since(looked) >= PACE)
    }

    /// Saves nodes, those without their private address as they were with it, and peers, if they differ from
    /// the file and the last call was some seconds ago; otherwise a later call does. Returns whether it
    /// wrote. Without a difference no file is opened for writing.
    ///
    /// # Errors
    /// When the file cannot be written; the old one then stays.
    pub fn keep<'a>(
        &mut self,
        nodes: impl Iterator<Item = &'a Node> + Clone,
        without_address: impl Iterator<Item = &'a Node> + Clone,
        peers: impl Iterator<Item = &'a Peer> + Clone,
        now: Instant,
    ) -> io::Result<bool> {
        if !self.is_due(now) {
            return Ok(false);
        }
        self.looked = Some(now);
        let is_lost = without_address.clone().next().is_some();
        let content = Written {
            format: FORMAT,
            node: &self.node,
            nodes: Each(nodes.map(|node| node::to_object(node, 0))),
            without_address: is_lost.then(|| Each(without_address.map(|node| node::to_object(node, 0)))),
            peers: Each(peers.map(peer::to_object)),
        };
        let digest = Some(write_to(Hash::default(), &content)?.digest());
        if self.written.or_else(|| digest_of(&self.path)) == digest {
            self.written = digest;
            return Ok(false);
        }
        // These temporary files are created with mode 0600.
        let file = tempfile::Builder::new().prefix(UNFINISHED).tempfile_in(directory(&self.path))?;
        let file = write_to(file, &content)?;
        file.as_file().sync_all()?;
        file.persist(&self.path)?;
        self.written = digest;
        Ok(true)
    }
}

fn directory(path: &Path) -> &Path {
    path.parent().unwrap_or(Path::new("."))
}

/// Hash of the file, if it can be read and only its owner may read it: it contains keys.
fn digest_of(path: &Path) -> Option<[u8; 32]> {
    let file = fs::File::open(path).ok()?;
    let about = file.metadata().ok()?;
    if !about.is_file() || about.mode() & 0o077 != 0 {
        return None;
    }
    let mut hash = Hash::default();
    io::copy(&mut file.take(LONGEST), &mut hash).ok()?;
    Some(hash.digest())
}

/// Removes leftover temporary files. No other process writes here: the agent holds a lock.
fn remove_unfinished(path: &Path) {
    for entry in fs::read_dir(directory(path)).into_iter().flatten().flatten() {
        let is_ours = entry.file_name().to_str().is_some_and(|name| name.starts_with(UNFINISHED));
        if (is_ours || is_unfinished_of_before(&entry.path())) && fs::remove_file(entry.path()).is_ok() {
            tracing::info!(path = %entry.path().display(), "removed a file that an earlier agent did not finish");
        }
    }
}

/// Whether this is a temporary file of an agent up to 0.1.0, which the library named: recognised by its first
/// bytes.
fn is_unfinished_of_before(path: &Path) -> bool {
    let is_temporary = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b".tmp"));
    let begin = format!("{{\"format\":\"{FORMAT}\"");
    let mut found = vec![0; begin.len()];
    is_temporary
        && fs::File::open(path).and_then(|mut file| file.read_exact(&mut found)).is_ok()
        && found == begin.as_bytes()
}

/// The nodes of the file, without `node` itself, each with the last private address that it had; empty when
/// there is no file.
///
/// # Errors
/// When the file is broken, or belongs to another node.
pub fn load_nodes(path: &Path, node: &str) -> Result<Vec<Node>, LastGoodError> {
    let Some(content) = read(path, node)? else { return Ok(Vec::new()) };
    let objects = content.nodes.iter().chain(&content.without_address);
    // The location is always an annotation here; of two nodes with the same name the later one counts.
    let nodes = objects.map(|object| node::from_object(object, "").0.node);
    let mut nodes: BTreeMap<_, _> = nodes.map(|node| (node.name.clone(), node)).collect();
    nodes.remove(node);
    Ok(nodes.into_values().collect())
}

/// The snapshot of the file; `None` when there is no file.
///
/// # Errors
/// When the file is broken, or belongs to another node. Single objects that do not parse are left out and
/// listed as problems of the snapshot.
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

/// Where the error is; its own text may quote a key.
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

    /// Names and inode numbers of the files; every write creates a new inode.
    fn files(directory: &Path) -> Vec<(String, u64)> {
        let entries = fs::read_dir(directory).unwrap().map(Result::unwrap);
        entries
            .map(|entry| (entry.file_name().into_string().unwrap(), entry.metadata().unwrap().ino()))
            .collect()
    }

    #[test]
    fn what_did_not_change_opens_no_file_for_writing_after_a_restart_either() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(FILE);
        let keep = |file: &mut LastGood, nodes: &[Node], now| {
            file.keep(nodes.iter(), iter::empty(), [peer()].iter(), now)
        };
        let start = Instant::now();
        let mut file = LastGood::new(&path, "a");
        assert!(keep(&mut file, &[node("a"), node("b")], start).unwrap());
        let written = files(directory.path());
        // In a missing directory no file can be created, not even for a moment.
        let aside = directory.path().with_extension("aside");
        fs::rename(directory.path(), &aside).unwrap();
        assert!(!keep(&mut file, &[node("a"), node("b")], start + PACE).unwrap(), "nothing changed");
        assert!(keep(&mut file, &[node("a")], start + PACE * 2).is_err(), "and this is how a write fails");
        fs::rename(&aside, directory.path()).unwrap();
        let mut next = LastGood::new(&path, "a");
        assert!(!keep(&mut next, &[node("a"), node("b")], start).unwrap(), "an earlier agent has written it");
        assert_eq!(files(directory.path()), written);
        assert!(keep(&mut next, &[node("a")], start + PACE).unwrap());
        assert_ne!(files(directory.path()), written);
    }

    #[test]
    fn a_write_that_was_interrupted_leaves_the_old_file_and_nothing_for_long() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(FILE);
        let keep = |nodes: &[Node]| {
            LastGood::new(&path, "a").keep(nodes.iter(), iter::empty(), [].iter(), Instant::now())
        };
        assert!(keep(&[node("a")]).unwrap());
        let half = &fs::read(&path).unwrap()[..40];
        for left in [".last-good-Xy12zA", ".tmpAb3dEf"] {
            fs::write(directory.path().join(left), half).unwrap();
        }
        // Files of others, who may write here what they like.
        for foreign in [".tmpOthers", "key", "last-good-notes"] {
            fs::write(directory.path().join(foreign), "x").unwrap();
        }
        assert!(!keep(&[node("a")]).unwrap());
        let mut names: Vec<_> = files(directory.path()).into_iter().map(|(name, _)| name).collect();
        names.sort();
        assert_eq!(names, [".tmpOthers", "key", "last-good-notes", FILE]);
        assert_eq!(load(&path, "a").unwrap().unwrap().nodes["a"], node("a"));
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

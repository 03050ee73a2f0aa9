//! A directory of YAML files: which are read, and what they say together.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsStr,
    fs::{self, File},
    io::{self, Read as _},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use super::objects::Objects;
use crate::backend::{
    Snapshot,
    node::{self, PREFIX, WRITTEN},
    peer,
};

/// Larger files are not read.
pub const MAX_FILE: u64 = 1 << 20;
/// Files an agent writes about its node end so; people's files do not.
pub const OWN_SUFFIX: &str = ".kilo.yaml";
/// A file changed this recently may change again without its time showing it.
const FRESH: Duration = Duration::from_secs(2);

type Annotations = BTreeMap<String, String>;

/// When and what a file was, when it was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    modified: SystemTime,
    length: u64,
    inode: u64,
}

#[derive(Debug)]
struct Known {
    /// `None`: read it again.
    stamp: Option<Stamp>,
    objects: Arc<Objects>,
}

/// The files and what they said when they were last readable.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    files: BTreeMap<PathBuf, Known>,
}

impl Directory {
    /// Nothing is read yet.
    pub fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), files: BTreeMap::new() }
    }

    /// Reads what has changed since the last time.
    ///
    /// # Errors
    /// When the directory cannot be read, or has lost every Node object: an
    /// unmounted file system looks like that. What was known is kept.
    pub fn refresh(&mut self) -> io::Result<()> {
        let mut now = BTreeMap::new();
        for entry in fs::read_dir(&self.path)? {
            let path = entry?.path();
            if !is_yaml(&path) {
                continue;
            }
            let before = self.files.get(&path);
            // Links are followed: mounted ConfigMaps are made of them.
            let read = match fs::metadata(&path) {
                Ok(metadata) if !metadata.is_file() => continue,
                Ok(metadata) => {
                    let stamp = stamp(&metadata)?;
                    if let Some(known) = before.filter(|known| known.stamp == Some(stamp)) {
                        let objects = Arc::clone(&known.objects);
                        now.insert(path, Known { stamp: Some(stamp), objects });
                        continue;
                    }
                    let settled = stamp.modified.elapsed().is_ok_and(|age| age > FRESH);
                    read(&path).map(|text| (Objects::parse(&text), settled.then_some(stamp)))
                }
                // Removed since it was listed, or a link to nowhere.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => Err(error.to_string()),
            };
            let (mut objects, stamp) = read
                .unwrap_or_else(|problem| (Objects { problems: vec![problem], ..Objects::default() }, None));
            if let Some(before) = before {
                objects.complete_from(&before.objects);
            }
            now.insert(path, Known { stamp, objects: Arc::new(objects) });
        }
        let nodes = |files: &BTreeMap<PathBuf, Known>| {
            files.iter().any(|(path, known)| !is_own(path) && !known.objects.nodes.is_empty())
        };
        if nodes(&self.files) && !nodes(&now) {
            return Err(io::Error::other("it holds no Node object any more; those known are kept"));
        }
        self.files = now;
        Ok(())
    }

    /// Everything the files say.
    pub fn snapshot(&self, label: &str) -> Snapshot {
        let mut problems: BTreeMap<String, Vec<String>> = BTreeMap::new();
        let mut snapshot = Snapshot::default();
        let (mut seen_nodes, mut seen_peers) = (BTreeSet::new(), BTreeSet::new());
        for (path, known) in &self.files {
            let file = format!("file {}", path.file_name().unwrap_or_default().display());
            let mut found = known.objects.problems.clone();
            if is_own(path) {
                if !found.is_empty() {
                    problems.insert(file, found);
                }
                continue;
            }
            for (name, object) in &known.objects.nodes {
                if !seen_nodes.insert(name) {
                    found.push(format!("Node {name} is also in a file before this one, which counts"));
                    continue;
                }
                let mut object = object.clone();
                if let Some(own) = self.own(name) {
                    let annotations = object.metadata.annotations.get_or_insert_default();
                    annotations.retain(|name, _| !is_written(name));
                    annotations.extend(own.clone());
                }
                let (node, wrong) = node::from_object(&object, label);
                if !wrong.is_empty() {
                    problems.insert(format!("node {name}"), wrong);
                }
                snapshot.nodes.insert(name.clone(), node);
            }
            for (name, object) in &known.objects.peers {
                if !seen_peers.insert(name) {
                    found.push(format!("Peer {name} is also in a file before this one, which counts"));
                    continue;
                }
                match peer::from_object(object) {
                    Ok(peer) => drop(snapshot.peers.insert(name.clone(), peer)),
                    Err(error) => drop(problems.insert(format!("peer {name}"), vec![error.to_string()])),
                }
            }
            if !found.is_empty() {
                problems.insert(file, found);
            }
        }
        snapshot.problems = problems.into_iter().map(|(object, list)| (object, list.join("; "))).collect();
        snapshot
    }

    /// The annotations of the file the node's agent writes, if there is one.
    fn own(&self, node: &str) -> Option<Annotations> {
        let known = self.files.get(&own_file(&self.path, node))?;
        let annotations = known.objects.nodes.get(node)?.metadata.annotations.clone().unwrap_or_default();
        Some(annotations.into_iter().filter(|(name, _)| is_written(name)).collect())
    }
}

/// The file the agent of this node writes.
pub fn own_file(directory: &Path, node: &str) -> PathBuf {
    directory.join(format!("{node}{OWN_SUFFIX}"))
}

fn is_own(path: &Path) -> bool {
    path.as_os_str().as_encoded_bytes().ends_with(OWN_SUFFIX.as_bytes())
}

/// True for the annotations agents write.
fn is_written(annotation: &str) -> bool {
    annotation.strip_prefix(PREFIX).is_some_and(|name| WRITTEN.contains(&name))
}

fn is_yaml(path: &Path) -> bool {
    let hidden = path.file_name().is_none_or(|name| name.as_encoded_bytes().starts_with(b"."));
    !hidden && [Some(OsStr::new("yaml")), Some(OsStr::new("yml"))].contains(&path.extension())
}

fn stamp(metadata: &fs::Metadata) -> io::Result<Stamp> {
    Ok(Stamp { modified: metadata.modified()?, length: metadata.len(), inode: metadata.ino() })
}

fn read(path: &Path) -> Result<String, String> {
    let mut text = String::new();
    let file = File::open(path).map_err(|error| error.to_string())?;
    file.take(MAX_FILE + 1).read_to_string(&mut text).map_err(|error| error.to_string())?;
    if text.len() as u64 > MAX_FILE {
        return Err("it is larger than 1 MiB; split it".to_owned());
    }
    Ok(text)
}

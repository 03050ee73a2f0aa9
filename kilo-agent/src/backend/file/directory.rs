//! A directory of YAML files: which of them are read, and what they define together.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsStr,
    fs::{self, File},
    io::{self, Read as _},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use super::{identity::identity, objects::Objects};
use kilo_core::objects::{
    ObjectRef, Snapshot,
    annotations::{ANNOTATIONS, Writer},
    node, peer,
};

/// Larger files are not read.
pub const MAX_FILE: u64 = 1 << 20;
/// Suffix of files that agents write about their own nodes; people's files must not have it.
pub const OWN_SUFFIX: &str = ".kilo.yaml";
/// A file changed this recently may change again without its time showing it.
const FRESH: Duration = Duration::from_secs(2);
/// Pause between two looks at a file that has lost an object.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
/// Maximum number of looks.
const LOOKS: u32 = 20;

type Annotations = BTreeMap<String, String>;

/// Identifies a file's state at the time it was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    modified: SystemTime,
    length: u64,
    identity: (u64, u64),
}

/// A file as it was when it was last readable.
#[derive(Debug)]
struct ReadFile {
    /// `None`: the file must be read again.
    stamp: Option<Stamp>,
    objects: Arc<Objects>,
}

/// The files, and their content when they were last readable.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    files: BTreeMap<PathBuf, ReadFile>,
}

impl Directory {
    /// Creates it without reading anything.
    pub fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), files: BTreeMap::new() }
    }

    /// Reads what has changed since the last time.
    ///
    /// # Errors
    /// When the directory cannot be read, or has lost every Node object: an
    /// unmounted file system looks like that. What was known is kept.
    pub fn refresh(&mut self) -> io::Result<()> {
        self.refresh_pausing(&mut || std::thread::sleep(LOOK_AGAIN))
    }

    /// [`Self::refresh`], with `pause` run between two looks at a changing file.
    fn refresh_pausing(&mut self, pause: &mut dyn FnMut()) -> io::Result<()> {
        let mut now = BTreeMap::new();
        for path in self.listed()? {
            let before = self.files.get(&path);
            // Follows links: mounted ConfigMaps consist of them.
            let (mut objects, stamp) = match fs::metadata(&path) {
                Ok(metadata) if !metadata.is_file() => continue,
                Ok(metadata) => {
                    let stamp = stamp(&metadata)?;
                    if let Some(known) = before.filter(|known| known.stamp == Some(stamp)) {
                        let objects = Arc::clone(&known.objects);
                        now.insert(path, ReadFile { stamp: Some(stamp), objects });
                        continue;
                    }
                    let settled = stamp.modified.elapsed().is_ok_and(|age| age > FRESH);
                    match parse(&path, before.map(|known| &*known.objects), pause) {
                        Some(objects) => (objects, settled.then_some(stamp)),
                        None => continue,
                    }
                }
                // Removed since it was listed, or a link to nowhere.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => (Objects::unreadable(error.to_string()), None),
            };
            if let Some(before) = before {
                objects.complete_from(&before.objects);
            }
            now.insert(path, ReadFile { stamp, objects: Arc::new(objects) });
        }
        let nodes = |files: &BTreeMap<PathBuf, ReadFile>| {
            files.iter().any(|(path, known)| !is_own(path) && !known.objects.nodes.is_empty())
        };
        if nodes(&self.files) && !nodes(&now) {
            return Err(io::Error::other("it holds no Node object any more; those known are kept"));
        }
        self.files = now;
        Ok(())
    }

    /// Files that may be read, including known ones: a directory listing may lack a file that is being
    /// replaced.
    fn listed(&self) -> io::Result<BTreeSet<PathBuf>> {
        let mut paths: BTreeSet<PathBuf> = self.files.keys().cloned().collect();
        for entry in fs::read_dir(&self.path)? {
            let path = entry?.path();
            if is_yaml(&path) {
                paths.insert(path);
            }
        }
        Ok(paths)
    }

    /// Everything the files define.
    pub fn snapshot(&self, label: &str) -> Snapshot {
        let mut problems: BTreeMap<ObjectRef, Vec<String>> = BTreeMap::new();
        let (mut snapshot, mut peers) = (Snapshot::default(), BTreeMap::new());
        let (mut seen_nodes, mut seen_peers) = (BTreeSet::new(), BTreeSet::new());
        for (path, known) in &self.files {
            let file = ObjectRef::file(path.file_name().unwrap_or_default().to_string_lossy());
            let mut found = known.objects.problems.clone();
            if is_own(path) {
                if !found.is_empty() {
                    problems.insert(file, found);
                }
                continue;
            }
            for (name, object) in &known.objects.nodes {
                if !seen_nodes.insert(name) {
                    found.push(format!(
                        "Node {name} is already defined in an earlier file, which takes precedence"
                    ));
                    continue;
                }
                let mut object = object.clone();
                if let Some(own) = self.own(name) {
                    let annotations = object.metadata.annotations.get_or_insert_default();
                    annotations.retain(|name, _| !is_written(name));
                    annotations.extend(own.clone());
                }
                let (seen, wrong) = node::from_object(&object, label);
                if !wrong.is_empty() {
                    problems.insert(ObjectRef::node(name), wrong);
                }
                snapshot.nodes.insert(seen);
            }
            for (name, object) in &known.objects.peers {
                if !seen_peers.insert(name) {
                    found.push(format!(
                        "Peer {name} is already defined in an earlier file, which takes precedence"
                    ));
                    continue;
                }
                match peer::from_object(object) {
                    Ok(peer) => drop(peers.insert(name.clone(), peer)),
                    Err(error) => drop(problems.insert(ObjectRef::peer(name), vec![error.to_string()])),
                }
            }
            if !found.is_empty() {
                problems.insert(file, found);
            }
        }
        snapshot.peers = peers.into();
        snapshot.problems = problems.into_iter().map(|(object, list)| (object, list.join("; "))).collect();
        snapshot
    }

    /// The annotations in the file of the node's agent, if there is one.
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

/// Whether agents write this annotation.
fn is_written(annotation: &str) -> bool {
    ANNOTATIONS.iter().any(|row| row.name == annotation && matches!(row.writer, Writer::Agent(..)))
}

fn is_yaml(path: &Path) -> bool {
    let hidden = path.file_name().is_none_or(|name| name.as_encoded_bytes().starts_with(b"."));
    !hidden && [Some(OsStr::new("yaml")), Some(OsStr::new("yml"))].contains(&path.extension())
}

fn stamp(metadata: &fs::Metadata) -> io::Result<Stamp> {
    Ok(Stamp { modified: metadata.modified()?, length: metadata.len(), identity: identity(metadata) })
}

/// The content of a file; an unreadable one gives a problem, and one removed meanwhile gives `None`.
fn parse(path: &Path, before: Option<&Objects>, pause: &mut dyn FnMut()) -> Option<Objects> {
    match settled(path, before, pause) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        read => Some(read.unwrap_or_else(|error| Objects::unreadable(error.to_string()))),
    }
}

/// Reads a file that has lost an object until it stays the same; an empty one never counts. Many writers
/// truncate a file before they write it, and on a busy disk that takes a while.
fn settled(path: &Path, before: Option<&Objects>, pause: &mut dyn FnMut()) -> io::Result<Objects> {
    let mut text = read(path)?;
    for _ in 0..LOOKS {
        let objects = Objects::parse(&text);
        if before.is_none_or(|before| !objects.lacks_any_of(before)) {
            return Ok(objects);
        }
        if text.is_empty() {
            return Err(io::Error::other("it is empty; to remove what it said, remove the file"));
        }
        pause();
        let again = read(path)?;
        if again == text {
            return Ok(objects);
        }
        text = again;
    }
    Err(io::Error::other("it keeps changing while it is read; write a temporary file and rename it"))
}

fn read(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(path)?.take(MAX_FILE + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MAX_FILE {
        return Err(io::Error::other("it is larger than 1 MiB; split it"));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODE: &str = "apiVersion: v1\nkind: Node\nmetadata: {name: a}\n";
    const OTHER: &str = "apiVersion: v1\nkind: Node\nmetadata: {name: b}\n";

    fn names(directory: &Directory) -> Vec<String> {
        directory.snapshot("topology.kubernetes.io/region").nodes.names().map(ToOwned::to_owned).collect()
    }

    /// Two files that have been read, and the path of the first.
    fn two_nodes() -> (tempfile::TempDir, PathBuf, Directory) {
        let path = tempfile::tempdir().unwrap();
        let file = path.path().join("a.yaml");
        fs::write(&file, NODE).unwrap();
        fs::write(path.path().join("b.yaml"), OTHER).unwrap();
        let mut directory = Directory::new(path.path());
        directory.refresh_pausing(&mut || panic!("nothing is lost yet")).unwrap();
        (path, file, directory)
    }

    #[test]
    fn a_file_caught_while_it_is_written_takes_nothing_away() {
        let (_path, file, mut directory) = two_nodes();
        assert_eq!(names(&directory), ["a", "b"]);

        fs::write(&file, "").unwrap();
        directory.refresh_pausing(&mut || panic!("no need to look again")).unwrap();
        assert_eq!(names(&directory), ["a", "b"], "empty is not yet written");

        fs::write(&file, "# ").unwrap();
        let mut rest = ["# a", "# a longer comment", NODE].into_iter();
        directory.refresh_pausing(&mut || fs::write(&file, rest.next().unwrap()).unwrap()).unwrap();
        assert_eq!((names(&directory), rest.next()), (vec!["a".to_owned(), "b".to_owned()], None));

        // A change that never ends keeps the former objects, and is reported.
        fs::write(&file, "# 0").unwrap();
        let mut count = 0;
        let mut busy = || {
            count += 1;
            fs::write(&file, format!("# {count}")).unwrap();
        };
        directory.refresh_pausing(&mut busy).unwrap();
        let snapshot = directory.snapshot("topology.kubernetes.io/region");
        assert_eq!(snapshot.nodes.len(), 2);
        assert!(
            snapshot.problems[&ObjectRef::file("a.yaml")].contains("rename it"),
            "{:?}",
            snapshot.problems
        );

        // A file that stays without the object has lost it.
        fs::write(&file, "# gone").unwrap();
        directory.refresh_pausing(&mut || ()).unwrap();
        assert_eq!(names(&directory), ["b"]);
    }

    #[test]
    fn a_file_that_is_removed_while_it_is_read_is_no_problem() {
        let (_path, file, mut directory) = two_nodes();
        fs::write(&file, "# a").unwrap();
        directory.refresh_pausing(&mut || fs::remove_file(&file).unwrap()).unwrap();
        let snapshot = directory.snapshot("topology.kubernetes.io/region");
        assert_eq!((names(&directory), snapshot.problems.len()), (vec!["b".to_owned()], 0));
    }
}

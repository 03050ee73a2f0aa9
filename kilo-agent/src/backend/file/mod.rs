//! A directory of Node and Peer objects in YAML, in the format of Kubernetes. People may write any files;
//! each agent writes only its own, so that nobody overwrites anybody. See docs/file-backend.md.

mod directory;
mod identity;
mod objects;

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Write as _},
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use k8s_openapi::api::core::v1 as core;
use notify::{RecommendedWatcher, RecursiveMode, Watcher as _};
use tokio::sync::watch;

pub use self::objects::Objects;
use self::{
    directory::{Directory, own_file},
    identity::identity,
};
use super::{Backend, BackendError};
use kilo_core::{
    errors::Explained,
    objects::{ObjectRef, Published, Snapshot, annotations},
};

/// The directory is also read this often: no event reports changes that
/// another machine made to a shared file system.
const REREAD: Duration = Duration::from_secs(10);
/// Quiet time after an event before the directory is read.
const SETTLE: Duration = Duration::from_millis(50);
/// A temporary file this old is one that an agent left when it was killed.
const LEFT_OVER: Duration = Duration::from_mins(1);

/// What the reading thread receives.
enum Message {
    /// Something in the directory changed.
    Changed,
    /// The backend is gone.
    Stop,
}

/// The file backend. Dropping it ends its thread.
pub struct FileBackend {
    directory: PathBuf,
    snapshots: watch::Receiver<Arc<Snapshot>>,
    outbox: mpsc::Sender<Message>,
}

impl Drop for FileBackend {
    fn drop(&mut self) {
        let _ = self.outbox.send(Message::Stop);
    }
}

impl FileBackend {
    /// Reads the directory and watches it.
    ///
    /// # Errors
    /// When the directory is not there, cannot be read or cannot be watched.
    pub async fn start(directory: &Path, topology_label: &str) -> Result<Self, BackendError> {
        let (outbox, inbox) = mpsc::channel();
        let (sender, snapshots) = watch::channel(Arc::default());
        let (path, label, events) = (directory.to_owned(), topology_label.to_owned(), outbox.clone());
        blocking(move || {
            let mut reader = Reader {
                watched: Watched::new(&path, &events)?,
                outbox: events,
                directory: Directory::new(&path),
                path,
                label,
            };
            reader.directory.refresh().map_err(|error| unusable(&reader.path, error))?;
            reader.hand_on(&sender, None);
            std::thread::Builder::new()
                .name("kilo-files".to_owned())
                .spawn(move || reader.run(&inbox, &sender))
                .map_err(|error| {
                    BackendError::Config(Explained::behind("no thread for the file backend", error))
                })
        })
        .await?;
        Ok(Self { directory: directory.to_owned(), snapshots, outbox })
    }

    /// The file an agent writes about its own node.
    fn own_file(&self, node: &str) -> Result<PathBuf, BackendError> {
        if kilo_core::wireguard::is_dns_name(node) {
            Ok(own_file(&self.directory, node))
        } else {
            Err(BackendError::Config(format!("node name {node:?} is not a DNS name; set --hostname").into()))
        }
    }

    /// Changes the file that a node's agent writes; `change` returns whether it changed anything.
    async fn change(
        &self,
        node: &str,
        change: impl FnOnce(&Path) -> io::Result<bool> + Send + 'static,
    ) -> Result<bool, BackendError> {
        let path = self.own_file(node)?;
        let is_changed = blocking(move || {
            change(&path).map_err(|source| BackendError::Io { path: path.display().to_string(), source })
        })
        .await?;
        if is_changed {
            let _ = self.outbox.send(Message::Changed);
        }
        Ok(is_changed)
    }
}

/// Works with files on a thread for that: the directory may be on a file system that is slow or does not respond,
/// and everything else goes on meanwhile.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, BackendError> + Send + 'static,
) -> Result<T, BackendError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|panic| BackendError::Config(Explained::of(panic.to_string(), panic)))?
}

/// Reports what is wrong with the directory and what to do about it.
fn unusable(path: &Path, error: io::Error) -> BackendError {
    let what = match error.kind() {
        io::ErrorKind::NotFound => "it does not exist; make it and put Node and Peer objects there",
        io::ErrorKind::NotADirectory => "not a directory; give the one that holds the YAML files",
        io::ErrorKind::PermissionDenied => "it may not be read; run as root or change its mode",
        _ => return BackendError::Io { path: path.display().to_string(), source: error },
    };
    BackendError::Config(Explained::of(format!("--backend-dir {}: {what}", path.display()), error))
}

/// The directory whose changes the kernel reports; another one may have its name later.
struct Watched {
    identity: (u64, u64),
    _watcher: RecommendedWatcher,
}

impl Watched {
    fn new(path: &Path, outbox: &mpsc::Sender<Message>) -> Result<Self, BackendError> {
        let identity = identity(&fs::metadata(path).map_err(|error| unusable(path, error))?);
        let outbox = outbox.clone();
        let on_event = move |event: notify::Result<notify::Event>| {
            // Our own reads cause events, too.
            if event.is_ok_and(|event| !event.kind.is_access()) {
                let _ = outbox.send(Message::Changed);
            }
        };
        let failed = |error: notify::Error| match error.kind {
            notify::ErrorKind::Io(error) => unusable(path, error),
            kind @ notify::ErrorKind::MaxFilesWatch => BackendError::Config(Explained::of(
                "the system has no inotify watch left; raise the sysctl fs.inotify.max_user_watches",
                notify::Error::new(kind),
            )),
            kind => unusable(path, io::Error::other(notify::Error::new(kind))),
        };
        let mut watcher = notify::recommended_watcher(on_event).map_err(failed)?;
        watcher.watch(path, RecursiveMode::NonRecursive).map_err(failed)?;
        Ok(Self { identity, _watcher: watcher })
    }
}

/// Reads the directory on a thread of its own.
struct Reader {
    watched: Watched,
    outbox: mpsc::Sender<Message>,
    directory: Directory,
    path: PathBuf,
    label: String,
}

impl Reader {
    fn run(mut self, inbox: &mpsc::Receiver<Message>, sender: &watch::Sender<Arc<Snapshot>>) {
        let mut pause = SETTLE;
        loop {
            match inbox.recv_timeout(REREAD) {
                Ok(Message::Stop) | Err(mpsc::RecvTimeoutError::Disconnected) => return,
                Ok(Message::Changed) => {
                    std::thread::sleep(pause);
                    if inbox.try_iter().any(|message| matches!(message, Message::Stop)) {
                        return;
                    }
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {}
            }
            let started = Instant::now();
            self.watch_again();
            let problem = self.directory.refresh().err().map(|error| unusable(&self.path, error).to_string());
            if let Some(problem) = &problem {
                tracing::debug!(problem, "failed to read directory");
            }
            self.hand_on(sender, problem);
            // A large directory with busy agents takes at most a tenth of a core.
            pause = SETTLE.max(started.elapsed() * 10);
        }
    }

    /// Watches the directory that has the name now: another one may have been mounted there.
    fn watch_again(&mut self) {
        if fs::metadata(&self.path).is_ok_and(|now| identity(&now) != self.watched.identity)
            && let Ok(watched) = Watched::new(&self.path, &self.outbox)
        {
            self.watched = watched;
        }
    }

    fn hand_on(&self, sender: &watch::Sender<Arc<Snapshot>>, problem: Option<String>) {
        let mut snapshot = self.directory.snapshot(&self.label);
        if let Some(problem) = problem {
            snapshot.problems.insert(ObjectRef::Directory, problem);
        }
        sender.send_if_modified(|current| {
            let differs = **current != snapshot;
            if differs {
                *current = Arc::new(snapshot);
            }
            differs
        });
    }
}

impl Backend for FileBackend {
    fn watch(&self) -> watch::Receiver<Arc<Snapshot>> {
        self.snapshots.clone()
    }

    async fn publish(&self, node: &str, published: &Published) -> Result<bool, BackendError> {
        if !self.snapshots.borrow().nodes.contains(node) {
            return Err(BackendError::NoSuchNode(node.to_owned()));
        }
        let text = text(node, annotations::wanted(published))
            .map_err(|error| BackendError::Config(Explained::of(error.to_string(), error)))?;
        self.change(node, move |path| {
            // Compares with the file itself: it is small, and somebody may have edited it.
            if fs::read(path).is_ok_and(|present| present == text.as_bytes()) {
                return Ok(false);
            }
            write(path, &text).map(|()| true)
        })
        .await
    }

    async fn declare_dead(&self, node: &str, last_seen: i64) -> Result<bool, BackendError> {
        self.change(node, move |path| {
            let before = fs::read_to_string(path)?;
            let line = |value: i64| format!("{}: '{value}'\n", annotations::LAST_SEEN);
            if last_seen == 0 || !before.contains(&line(last_seen)) {
                return Ok(false);
            }
            write(path, &before.replace(&line(last_seen), &line(0))).map(|()| true)
        })
        .await
    }

    async fn retract(&self, node: &str) -> Result<(), BackendError> {
        let removed = self.change(node, |path| match fs::remove_file(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            removed => removed.map(|()| true),
        });
        removed.await.map(drop)
    }
}

/// The content of the agent's file.
fn text(node: &str, annotations: BTreeMap<String, Option<String>>) -> Result<String, serde_yaml_ng::Error> {
    let annotations = annotations.into_iter().filter_map(|(name, value)| Some((name, value?)));
    let mut object = core::Node::default();
    object.metadata.name = Some(node.to_owned());
    object.metadata.annotations = Some(annotations.collect());
    let text = serde_yaml_ng::to_string(&object)?;
    Ok(format!("# Written by kg about this node; changes made here are lost.\n{text}"))
}

/// Writes a file atomically: it appears complete under its name, or not at all. Several agents may write it at
/// once, so each writes a temporary file of its own before.
fn write(path: &Path, text: &str) -> io::Result<()> {
    let directory = path.parent().unwrap_or(Path::new("."));
    // Hidden, so that nobody reads it.
    let prefix = format!(".{}.", path.file_name().unwrap_or_default().display());
    remove_left_over(directory, &prefix);
    let mut builder = tempfile::Builder::new();
    builder.prefix(&prefix);
    // Other nodes' agents read it, whatever user they run as.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o644));
    let mut file = builder.tempfile_in(directory)?;
    file.write_all(text.as_bytes())?;
    file.persist(path)?;
    Ok(())
}

/// Removes temporary files that nobody will finish, so that they do not pile up.
fn remove_left_over(directory: &Path, prefix: &str) {
    let is_left_over = |entry: &fs::DirEntry| {
        let is_named = entry.file_name().as_encoded_bytes().starts_with(prefix.as_bytes());
        let modified = || entry.metadata().and_then(|metadata| metadata.modified());
        is_named && modified().is_ok_and(|modified| modified.elapsed().is_ok_and(|age| age > LEFT_OVER))
    };
    for entry in fs::read_dir(directory).into_iter().flatten().flatten().filter(is_left_over) {
        let _ = fs::remove_file(entry.path());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agents_that_write_one_file_at_once_do_not_disturb_each_other() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.kilo.yaml");
        let texts = ["a".repeat(1 << 16), "b".repeat(1 << 16)];
        std::thread::scope(|scope| {
            for text in &texts {
                let (path, texts) = (&path, &texts);
                scope.spawn(move || {
                    for _ in 0..200 {
                        write(path, text).unwrap();
                        assert!(texts.contains(&fs::read_to_string(path).unwrap()), "it is half written");
                    }
                });
            }
        });
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn what_an_agent_left_when_it_was_killed_is_removed_and_what_is_being_written_stays() {
        let directory = tempfile::tempdir().unwrap();
        for (name, age) in [(".a.kilo.yaml.new", 2), (".a.kilo.yaml.X1", 0), (".b.kilo.yaml.X1", 2)] {
            let file = fs::File::create(directory.path().join(name)).unwrap();
            file.set_modified(std::time::SystemTime::now() - age * LEFT_OVER).unwrap();
        }
        write(&directory.path().join("a.kilo.yaml"), "text").unwrap();
        let left = fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().file_name());
        let mut left: Vec<_> = left.collect();
        left.sort();
        assert_eq!(left, [".a.kilo.yaml.X1", ".b.kilo.yaml.X1", "a.kilo.yaml"]);
    }
}

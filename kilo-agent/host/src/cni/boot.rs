//! A CNI configuration that does not survive a reboot: the file is below /run, and the runtime's directory
//! holds a symlink to it. After a reboot the link dangles, so no pod starts until the agent has brought the
//! data path up again.

use std::{
    fs,
    io::{self, Write as _},
    os::unix::fs::{PermissionsExt as _, symlink},
    path::{Path, PathBuf},
};

use ipnet::IpNet;

use super::{CniError, with_ranges};

/// Where the configuration is published, unless `--cni-run-dir` says another directory.
pub const DIRECTORY: &str = "/run/kilo";

/// Where the configuration is read from, and where it is published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BootConfiguration {
    /// Configuration list to start from: `--cni-source`.
    pub source: PathBuf,
    /// File that the container runtime reads, a symlink to [`Self::file`]: `--cni-path`.
    pub path: PathBuf,
    /// A directory that is empty after a reboot: `--cni-run-dir`.
    pub directory: PathBuf,
}

impl BootConfiguration {
    /// Path of the published file, whether or not it exists.
    pub fn file(&self) -> PathBuf {
        self.directory.join(self.path.file_name().unwrap_or_default())
    }

    fn linked(&self) -> PathBuf {
        linked(&self.file())
    }

    /// True when an agent has published the configuration since boot, and the runtime could notice.
    pub fn is_published(&self) -> bool {
        self.file().exists() && self.linked().exists()
    }

    /// Publishes the configuration with these pod CIDRs, if any; returns whether anything was written.
    ///
    /// # Errors
    /// When a file cannot be read, parsed or written; the runtime then notices no change.
    pub fn publish(&self, cidrs: &[IpNet]) -> Result<bool, CniError> {
        if cidrs.is_empty() {
            return Ok(false);
        }
        let named = |path: &Path, error| CniError::Io(path.display().to_string(), error);
        let source = fs::read_to_string(&self.source).map_err(|error| named(&self.source, error))?;
        let text = with_ranges(&source, cidrs)
            .map_err(|error| CniError::Invalid(self.source.display().to_string(), error))?
            .unwrap_or(source);
        let file = self.file();
        let is_same = fs::read_to_string(&file).is_ok_and(|present| present == text);
        // The link of an earlier boot says nothing: this one's may have failed, or an agent may have ended before it.
        let linked = self.linked();
        let is_linked = linked.exists() && fs::read_link(&self.path).is_ok_and(|target| target == file);
        if is_same && is_linked {
            return Ok(false);
        }
        remove(&linked).map_err(|error| named(&linked, error))?;
        if !is_same {
            replace(&file, &text).map_err(|error| named(&file, error))?;
        }
        // Runtimes watch only the link's directory: a new link makes them reload.
        link(&file, &self.path).map_err(|error| named(&self.path, error))?;
        fs::write(&linked, "").map_err(|error| named(&linked, error))?;
        Ok(true)
    }
}

/// Path of the empty file beside a published configuration that says that the runtime's directory has got its
/// link since the configuration was written.
pub fn linked(file: &Path) -> PathBuf {
    let mut name = file.file_name().unwrap_or_default().to_owned();
    name.push(".linked");
    file.with_file_name(name)
}

/// Removes a file, if it exists.
fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Writes a file atomically, with mode 0644.
pub(super) fn replace(path: &Path, text: &str) -> io::Result<()> {
    let mut file = tempfile::NamedTempFile::new_in(path.parent().unwrap_or(Path::new(".")))?;
    file.write_all(text.as_bytes())?;
    file.as_file().set_permissions(fs::Permissions::from_mode(0o644))?;
    file.persist(path)?;
    Ok(())
}

/// Atomically replaces whatever is at `path` with a symlink to `target`.
fn link(target: &Path, path: &Path) -> io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    // Runtimes ignore files with this suffix.
    name.push(".new");
    let new = path.with_file_name(name);
    let _ = fs::remove_file(&new);
    symlink(target, &new)?;
    fs::rename(&new, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = r#"{"name":"kilo","plugins":[{"type":"bridge","ipam":{"type":"host-local"}}]}"#;

    fn configuration(root: &Path) -> BootConfiguration {
        for directory in ["run", "net.d"] {
            fs::create_dir_all(root.join(directory)).unwrap();
        }
        fs::write(root.join("source"), SOURCE).unwrap();
        BootConfiguration {
            source: root.join("source"),
            path: root.join("net.d/10-kilo.conflist"),
            directory: root.join("run"),
        }
    }

    #[test]
    fn it_ends_with_the_boot_and_comes_again() {
        let root = tempfile::tempdir().unwrap();
        let configuration = configuration(root.path());
        let cidrs = ["10.42.1.0/24".parse().unwrap()];
        assert!(!configuration.is_published());
        assert!(configuration.publish(&cidrs).unwrap());
        assert!(configuration.is_published());
        assert!(fs::read_to_string(&configuration.path).unwrap().contains("10.42.1.0/24"));
        assert!(!configuration.publish(&cidrs).unwrap(), "nothing to do is nothing done");
        // A reboot empties /run.
        fs::remove_dir_all(&configuration.directory).unwrap();
        fs::create_dir(&configuration.directory).unwrap();
        assert!(!configuration.is_published());
        assert!(fs::read_to_string(&configuration.path).is_err(), "no runtime can use it");
        assert!(configuration.publish(&cidrs).unwrap());
        assert!(fs::read_to_string(&configuration.path).unwrap().contains("10.42.1.0/24"));
        assert_eq!(fs::read_dir(root.path().join("net.d")).unwrap().count(), 1);
    }

    #[test]
    fn a_file_of_an_earlier_agent_becomes_a_link_and_a_new_source_a_new_link() {
        let root = tempfile::tempdir().unwrap();
        let configuration = configuration(root.path());
        fs::write(&configuration.path, "{}").unwrap();
        let cidrs = ["10.42.1.0/24".parse().unwrap()];
        assert!(configuration.publish(&cidrs).unwrap());
        assert!(fs::symlink_metadata(&configuration.path).unwrap().is_symlink());
        let before = inode(&configuration.path);
        let other = SOURCE.replace("bridge", "ptp");
        fs::write(&configuration.source, other).unwrap();
        assert!(configuration.publish(&cidrs).unwrap());
        assert_ne!(inode(&configuration.path), before, "what follows the directory must notice");
        assert!(fs::read_to_string(&configuration.path).unwrap().contains("ptp"));
    }

    fn inode(path: &Path) -> u64 {
        std::os::unix::fs::MetadataExt::ino(&fs::symlink_metadata(path).unwrap())
    }

    #[test]
    fn what_failed_before_the_link_is_not_taken_for_published() {
        let root = tempfile::tempdir().unwrap();
        let configuration = configuration(root.path());
        let cidrs = ["10.42.1.0/24".parse().unwrap()];
        assert!(configuration.publish(&cidrs).unwrap());
        // The next boot, with the dangling link of this one; and the runtime's directory takes no link.
        fs::remove_dir_all(&configuration.directory).unwrap();
        fs::create_dir(&configuration.directory).unwrap();
        let before = inode(&configuration.path);
        let in_the_way = root.path().join("net.d/10-kilo.conflist.new");
        fs::create_dir(&in_the_way).unwrap();
        configuration.publish(&cidrs).unwrap_err();
        assert!(!configuration.is_published(), "the runtime has not been told");
        configuration.publish(&cidrs).unwrap_err();
        fs::remove_dir(&in_the_way).unwrap();
        assert!(configuration.publish(&cidrs).unwrap());
        assert!(configuration.is_published());
        assert_ne!(inode(&configuration.path), before, "what follows the directory must notice");
    }

    #[test]
    fn an_agent_that_ended_between_file_and_link_is_completed_by_the_next() {
        let root = tempfile::tempdir().unwrap();
        let configuration = configuration(root.path());
        let cidrs = ["10.42.1.0/24".parse().unwrap()];
        assert!(configuration.publish(&cidrs).unwrap());
        let before = inode(&configuration.path);
        fs::remove_file(configuration.linked()).unwrap();
        assert!(!configuration.is_published());
        assert!(configuration.publish(&cidrs).unwrap());
        assert_ne!(inode(&configuration.path), before);
    }

    #[test]
    fn without_pod_cidrs_or_a_source_nothing_is_published() {
        let root = tempfile::tempdir().unwrap();
        let configuration = configuration(root.path());
        assert!(!configuration.publish(&[]).unwrap());
        fs::remove_file(&configuration.source).unwrap();
        let error = configuration.publish(&["10.42.1.0/24".parse().unwrap()]).unwrap_err().to_string();
        assert!(error.contains("source"), "{error}");
        assert!(!configuration.is_published());
    }
}

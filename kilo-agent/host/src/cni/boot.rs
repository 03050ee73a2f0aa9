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

    /// True when an agent has published the configuration since boot.
    pub fn is_published(&self) -> bool {
        self.file().exists()
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
        if !is_same {
            replace(&file, &text).map_err(|error| named(&file, error))?;
        }
        let is_linked = fs::read_link(&self.path).is_ok_and(|target| target == file);
        if is_same && is_linked {
            return Ok(false);
        }
        // Runtimes watch only the link's directory: a new link makes them reload.
        link(&file, &self.path).map_err(|error| named(&self.path, error))?;
        Ok(true)
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
        let inode =
            || std::os::unix::fs::MetadataExt::ino(&fs::symlink_metadata(&configuration.path).unwrap());
        let before = inode();
        let other = SOURCE.replace("bridge", "ptp");
        fs::write(&configuration.source, other).unwrap();
        assert!(configuration.publish(&cidrs).unwrap());
        assert_ne!(inode(), before, "what follows the directory must notice");
        assert!(fs::read_to_string(&configuration.path).unwrap().contains("ptp"));
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

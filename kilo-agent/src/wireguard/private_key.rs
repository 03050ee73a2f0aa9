//! The node's private key: made once, kept in a file nobody else reads.

use std::{
    fs,
    io::{self, Write as _},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use super::key::SecretKey;

/// Why there is no private key; the label is a metric label.
#[derive(Debug, thiserror::Error)]
pub enum PrivateKeyError {
    /// The file cannot be read or written.
    #[error("private key {path}: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The file holds something else; it is not overwritten.
    #[error("private key {path}: this is no WireGuard key; move the file away and a new key will be made", path = path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
    },
}

/// Reads the key, or makes one. Permissions that are too open are repaired.
///
/// # Errors
/// When the file cannot be used; it is never overwritten.
pub fn load_or_create(path: &Path) -> Result<SecretKey, PrivateKeyError> {
    let failed = |source| PrivateKeyError::Io { path: path.to_owned(), source };
    match fs::read_to_string(path) {
        Ok(text) => {
            let key = text.parse().map_err(|_| PrivateKeyError::Invalid { path: path.to_owned() })?;
            let mode = fs::metadata(path).map_err(failed)?.permissions().mode();
            if mode & 0o077 != 0 {
                tracing::warn!(path = %path.display(), "the private key could be read by others; closing it");
                fs::set_permissions(path, fs::Permissions::from_mode(0o600)).map_err(failed)?;
            }
            Ok(key)
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => create(path).map_err(failed),
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            Err(PrivateKeyError::Invalid { path: path.to_owned() })
        }
        Err(error) => Err(failed(error)),
    }
}

fn create(path: &Path) -> io::Result<SecretKey> {
    let directory = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(directory)?;
    let key = SecretKey::from_bytes(wireguard_control::Key::generate_private().0);
    // A temporary file has mode 0600 from the start, and appears under its name complete.
    let mut file = tempfile::NamedTempFile::new_in(directory)?;
    writeln!(file, "{}", key.reveal())?;
    file.as_file().sync_all()?;
    file.persist_noclobber(path)?;
    Ok(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_made_once_and_kept_closed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("kilo/key");
        let key = load_or_create(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        assert_eq!(load_or_create(&path).unwrap(), key);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn rubbish_is_refused_and_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("key");
        for rubbish in [&b"not a key"[..], b"", b"\xff\xfe"] {
            fs::write(&path, rubbish).unwrap();
            assert!(matches!(load_or_create(&path), Err(PrivateKeyError::Invalid { .. })));
            assert_eq!(fs::read(&path).unwrap(), rubbish);
        }
    }
}

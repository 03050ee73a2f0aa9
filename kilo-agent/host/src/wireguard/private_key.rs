//! The node's private key on disk.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::Path,
};

use super::WireguardError;
use kilo_core::wireguard::key::SecretKey;

/// Name of the file in [`STATE`](crate::lock::STATE). The path is Kilo's, too: a node keeps its key when it changes
/// to this agent.
pub const FILE: &str = "key";

/// Most bytes read from a key file, which is never that long.
const LONGEST: u64 = 256;

/// Reads the key, or makes one at first start.
///
/// The file is base64 with mode 0600 and appears complete or not at all. Wider
/// permissions are narrowed with a warning. Other content is an error and
/// stays: a new key would cut the node off from peers that know the old one.
pub fn load_or_create(path: &Path) -> Result<SecretKey, WireguardError> {
    if let Some(key) = load_existing(path)? {
        return Ok(key);
    }
    let failed = |source| WireguardError::KeyFile { path: path.to_owned(), source };
    create(path).map_err(failed)?;
    // Read back: another agent may have been first, and its key counts.
    load(path, File::open(path).map_err(failed)?)
}

/// Reads the key as [`load_or_create`] does, without making one; `None` when there is no file.
///
/// # Errors
/// When there is a file that does not hold a key or cannot be read.
pub fn load_existing(path: &Path) -> Result<Option<SecretKey>, WireguardError> {
    match File::open(path) {
        Ok(file) => load(path, file).map(Some),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(WireguardError::KeyFile { path: path.to_owned(), source }),
    }
}

fn load(path: &Path, file: File) -> Result<SecretKey, WireguardError> {
    let failed = |source| WireguardError::KeyFile { path: path.to_owned(), source };
    let metadata = file.metadata().map_err(failed)?;
    if !metadata.is_file() {
        // Never change the permissions of a device or directory.
        return Err(WireguardError::KeyContent(path.to_owned()));
    }
    let mode = metadata.permissions().mode() & 0o777;
    if mode & 0o177 != 0 {
        tracing::warn!(path = %path.display(), mode = format!("{mode:o}"), "private key was readable by others; its permissions are 600 now, consider a new key");
        file.set_permissions(fs::Permissions::from_mode(0o600)).map_err(failed)?;
    }
    let mut text = String::new();
    match file.take(LONGEST).read_to_string(&mut text) {
        Err(error) if error.kind() != io::ErrorKind::InvalidData => Err(failed(error)),
        _ => text.parse().map_err(|_| WireguardError::KeyContent(path.to_owned())),
    }
}

fn create(path: &Path) -> io::Result<()> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(directory)?;
    let mut bytes: [u8; 32] = rand::random();
    // The form `wg genkey` writes.
    bytes[0] &= 0xf8;
    bytes[31] = (bytes[31] & 0x7f) | 0x40;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let temporary = directory.join(format!(".{name}.{}", std::process::id()));
    let written = write(&temporary, &SecretKey::from_bytes(bytes)).and_then(|()| {
        // Unlike rename, a hard link never replaces a key that came in between.
        match fs::hard_link(&temporary, path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            other => other,
        }
    });
    let _ = fs::remove_file(&temporary);
    written?;
    File::open(directory)?.sync_all()
}

fn write(path: &Path, key: &SecretKey) -> io::Result<()> {
    let _ = fs::remove_file(path);
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    writeln!(file, "{}", key.reveal())?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn is_made_once_and_kept() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("kilo/key");
        let key = load_or_create(&path).unwrap();
        assert_eq!(mode(&path), 0o600);
        assert_eq!(load_or_create(&path).unwrap(), key);
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "no temporary file stays");
        assert_ne!(load_or_create(&directory.path().join("other")).unwrap(), key);
    }

    #[test]
    fn open_permissions_are_narrowed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("key");
        let key = load_or_create(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        assert_eq!(load_or_create(&path).unwrap(), key);
        assert_eq!(mode(&path), 0o600);
    }

    #[test]
    fn what_is_no_file_is_an_error_and_keeps_its_permissions() {
        let directory = tempfile::tempdir().unwrap();
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let error = load_or_create(directory.path()).unwrap_err();
        assert!(matches!(error, WireguardError::KeyContent(_)), "{error}");
        assert_eq!(mode(directory.path()), 0o755);
    }

    #[test]
    fn rubbish_is_an_error_and_stays() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("key");
        for rubbish in [&b""[..], b"not a key", &[0xff; 44], &[b'A'; 4000]] {
            fs::write(&path, rubbish).unwrap();
            let error = load_or_create(&path).unwrap_err();
            assert!(matches!(error, WireguardError::KeyContent(_)), "{error}");
            assert_eq!(fs::read(&path).unwrap(), rubbish);
        }
    }
}

//! The token for kgctl on the node: a file that only root and the agent can read. A process that can read it
//! could also read the node's private key.

use std::{fs, io, io::Write as _, path::Path};

use super::cache::{Secret, digest};

/// A token that is checked without the API server.
#[derive(Debug)]
pub struct LocalToken(Secret);

impl LocalToken {
    /// Creates the value from a token's text.
    pub fn of(text: &str) -> Self {
        Self(digest(text))
    }

    /// Generates a new token and writes it with mode 0600; an old one becomes invalid.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn create(path: &Path) -> io::Result<Self> {
        let token: String = rand::random::<[u8; 32]>().iter().map(|byte| format!("{byte:02x}")).collect();
        let mut file = tempfile::NamedTempFile::new_in(path.parent().unwrap_or(Path::new("/")))?;
        file.write_all(token.as_bytes())?;
        file.persist(path).map_err(|error| error.error)?;
        Ok(Self::of(&token))
    }

    /// Removes the file of an earlier agent that required tokens.
    pub fn remove(path: &Path) {
        // Usually there is none.
        let _ = fs::remove_file(path);
    }

    /// Whether this is the token. Comparing digests prevents timing attacks: nobody can choose their bytes.
    pub fn is(&self, token: &str) -> bool {
        digest(token) == self.0
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn it_is_new_each_time_and_for_root_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("page-token");
        let first = LocalToken::create(&path).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert!(first.is(&text) && text.len() == 64 && !first.is("") && !first.is(&text[1..]));
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let second = LocalToken::create(&path).unwrap();
        assert!(!second.is(&text));
        LocalToken::remove(&path);
        assert!(!path.exists());
    }
}

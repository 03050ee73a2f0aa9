//! Identifies the file behind a name, as far as the system allows.

use std::fs::Metadata;

/// Device and inode, which another file of the same name does not share.
#[cfg(unix)]
pub fn identity(metadata: &Metadata) -> (u64, u64) {
    use std::os::unix::fs::MetadataExt as _;
    (metadata.dev(), metadata.ino())
}

/// Creation time in 100 ns since 1601: Windows offers no more about a file that is not open.
#[cfg(windows)]
pub fn identity(metadata: &Metadata) -> (u64, u64) {
    use std::os::windows::fs::MetadataExt as _;
    (metadata.creation_time(), 0)
}

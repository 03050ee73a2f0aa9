//! Which file has a name, as far as the system knows.

use std::fs::Metadata;

/// Device and inode: another file of the same name has others.
#[cfg(unix)]
pub fn identity(metadata: &Metadata) -> (u64, u64) {
    use std::os::unix::fs::MetadataExt as _;
    (metadata.dev(), metadata.ino())
}

/// When the file was made, in 100 ns since 1601: Windows says no more of a file that is not open.
#[cfg(windows)]
pub fn identity(metadata: &Metadata) -> (u64, u64) {
    use std::os::windows::fs::MetadataExt as _;
    (metadata.creation_time(), 0)
}

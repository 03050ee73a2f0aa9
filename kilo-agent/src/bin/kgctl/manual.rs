//! Man pages, generated from the same source as `--help`.

use std::path::Path;

use anyhow::{Context as _, Result};

/// Hidden command that writes the man pages.
pub const NAME: &str = "man-pages";

/// Writes a page for the program and one for each of its commands into a directory.
///
/// # Errors
/// When the directory cannot be written.
pub fn write(root: clap::Command, directory: &Path) -> Result<()> {
    std::fs::create_dir_all(directory)
        .and_then(|()| clap_mangen::generate_to(root, directory))
        .with_context(|| format!("failed to write manual pages to {}", directory.display()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn each_command_has_a_page_with_its_flags_and_examples() {
        let directory = tempfile::tempdir().unwrap();
        write(crate::Cli::command(), directory.path()).unwrap();
        let read = |name: &str| std::fs::read_to_string(directory.path().join(name)).unwrap();
        assert!(read("kgctl.1").contains("kgctl\\-status(1)"), "{}", read("kgctl.1"));
        let page = read("kgctl-showconf-node.1");
        assert!(page.contains("\\-\\-as\\-peer") && page.contains("Examples:"), "{page}");
        let hidden = std::fs::read_dir(directory.path()).unwrap().flatten().map(|entry| entry.file_name());
        let hidden: Vec<_> = hidden.filter(|name| name.to_string_lossy().contains(NAME)).collect();
        assert!(hidden.is_empty(), "{hidden:?}");
    }
}

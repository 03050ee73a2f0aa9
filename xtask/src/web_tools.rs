//! Chromium and axe-core, which the tests of the agent's page use.

use std::fs;

use anyhow::{Context as _, Result};

use crate::{apt, wheels};

/// Debian's browser, and a font with the page's symbols.
const PACKAGES: &[&str] = &["chromium", "fonts-dejavu-core"];
/// A Python package that ships axe-core 4.12.1 as its authors publish it.
const AXE: &str = "axe-playwright-python==0.1.8";

/// Installs what is missing.
///
/// # Errors
/// When a package is unavailable; tests that need it are then skipped.
pub fn prepare() -> Result<()> {
    apt::install(PACKAGES)?;
    let directory = apt::cache_directory()?.join("web-tools");
    let axe = directory.join("axe.min.js");
    if axe.is_file() {
        return Ok(());
    }
    println!("web-tools: getting axe-core, once");
    fs::create_dir_all(&directory)?;
    let work = tempfile::tempdir_in(&directory)?;
    wheels::unpack(AXE, work.path())?;
    let found = wheels::find(work.path(), "axe.min.js")?;
    fs::rename(&found, &axe).with_context(|| axe.display().to_string())
}

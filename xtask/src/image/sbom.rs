//! What an image consists of, as SPDX: Debian packages, Go modules and crates, which syft reads from the
//! image itself.

use std::{fs, path::Path, process::Command};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use super::buildah::Archive;
use crate::{command::run, wheels};

/// Writes the SBOM of an OCI archive, equal for equal images; returns the number of packages in it.
///
/// # Errors
/// When syft is unavailable or cannot read the archive.
pub fn write(file: &Path, archive: &Archive, version: &str, to: &Path) -> Result<usize> {
    let syft = wheels::SYFT.path()?;
    let work = tempfile::tempdir()?;
    let layout = work.path().join("image");
    fs::create_dir(&layout)?;
    run(Command::new("tar").arg("-xf").arg(file).arg("-C").arg(&layout))?;
    let raw = work.path().join("list.json");
    run(Command::new(syft)
        .env("SYFT_CHECK_FOR_APP_UPDATE", "false")
        .args(["scan", "--quiet", "--source-name", "kilo", "--source-version", version])
        .arg(format!("oci-dir:{}", layout.display()))
        .arg(format!("--output=spdx-json={}", raw.display())))?;
    let mut list: Value = serde_json::from_slice(&fs::read(&raw)?)?;
    // Syft would put the time and a random number here.
    list["creationInfo"]["created"] = json!("1970-01-01T00:00:00Z");
    let hash = archive.digest.trim_start_matches("sha256:");
    list["documentNamespace"] = json!(format!("https://github.com/kilo-ebpf/kilo/image/{hash}"));
    let packages = list["packages"].as_array().context("the list has no packages")?.len();
    fs::write(to, serde_json::to_vec_pretty(&list)?).with_context(|| to.display().to_string())?;
    Ok(packages)
}

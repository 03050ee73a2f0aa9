//! Debian packages: installs missing ones, and fetches single packages of other suites without touching the
//! machine's own configuration.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};

use crate::command::{output, run};

/// Installs and names those of `packages` that are missing.
pub fn install(packages: &[&str]) -> Result<()> {
    let missing: Vec<&str> = packages.iter().copied().filter(|package| !is_installed(package)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let list = missing.join(" ");
    if !nix::unistd::geteuid().is_root() {
        bail!("Debian packages are missing; run: apt-get install --no-install-recommends {list}");
    }
    println!("xtask: installing Debian packages: {list}");
    let install = || {
        run(Command::new("apt-get")
            .env("DEBIAN_FRONTEND", "noninteractive")
            // Another process of the same run may be installing something else.
            .args(["-o", "DPkg::Lock::Timeout=600", "install", "-y", "-q", "--no-install-recommends"])
            .args(&missing))
    };
    if install().is_ok() {
        return Ok(());
    }
    // Package lists may be absent or old on a fresh machine.
    run(Command::new("apt-get").args(["update", "-q"]))?;
    install()
}

fn is_installed(package: &str) -> bool {
    output(Command::new("dpkg-query").args(["-W", "-f=${db:Status-Status}", package]))
        .is_ok_and(|status| status == "installed")
}

/// A private apt configuration for suites that the machine itself does not use.
pub struct Suites {
    directory: PathBuf,
}

impl Suites {
    /// Prepares package lists of `suites` below `cache`, from the mirror that the machine itself uses.
    /// `sources` adds source packages.
    pub fn open(cache: &Path, suites: &[&str], sources: bool) -> Result<Self> {
        let directory = cache.join(format!("apt-{}{}", suites.join("-"), if sources { "-src" } else { "" }));
        for sub in ["state/lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(directory.join(sub))?;
        }
        let mirror = mirror()?;
        let lines: String = suites
            .iter()
            .map(|suite| {
                let source = if sources { format!("deb-src {mirror} {suite} main\n") } else { String::new() };
                format!("deb {mirror} {suite} main\n{source}")
            })
            .collect();
        fs::write(directory.join("sources.list"), lines)?;
        let suites = Self { directory };
        let log = output(suites.command("apt-get").args(["update", "-q"]))?;
        if log.contains("Err:") {
            bail!("apt-get update of {} failed:\n{log}", suites.directory.display());
        }
        Ok(suites)
    }

    /// `apt-get` or `apt-cache` with this configuration.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        let directory = self.directory.display();
        for option in [
            format!("Dir::Etc::SourceList={directory}/sources.list"),
            "Dir::Etc::SourceParts=/dev/null".to_owned(),
            format!("Dir::State::Lists={directory}/state/lists"),
            format!("Dir::Cache={directory}/cache"),
            "APT::Sandbox::User=root".to_owned(),
            "APT::Get::List-Cleanup=0".to_owned(),
        ] {
            command.arg("-o").arg(option);
        }
        command
    }

    /// Downloads a package (`name` or `name=version`) and unpacks it.
    pub fn unpack(&self, package: &str, into: &Path) -> Result<()> {
        let downloads = tempfile::tempdir_in(&self.directory)?;
        run(self.command("apt-get").current_dir(downloads.path()).args(["download", "-q", package]))?;
        let deb = fs::read_dir(downloads.path())?
            .flatten()
            .map(|entry| entry.path())
            .find(|path| path.extension().is_some_and(|extension| extension == "deb"))
            .with_context(|| format!("apt-get download {package} left no file"))?;
        fs::create_dir_all(into)?;
        run(Command::new("dpkg").arg("-x").arg(deb).arg(into))
    }

    /// Versions of a package, newest first, as `apt-cache madison` lists them.
    pub fn versions(&self, package: &str) -> Result<Vec<String>> {
        let text = output(self.command("apt-cache").args(["madison", package]))?;
        Ok(text.lines().filter_map(|line| Some(line.split('|').nth(1)?.trim().to_owned())).collect())
    }
}

/// A `debian.sources` file for a suite of Debian, its updates and its security updates.
pub fn debian_sources(suite: &str) -> Result<String> {
    let mirror = mirror()?;
    let mirror = mirror.trim_end_matches('/');
    let security = configured("/debian-security").unwrap_or_else(|| format!("{mirror}-security"));
    let key = "/usr/share/keyrings/debian-archive-keyring.gpg";
    Ok(format!(
        "Types: deb\nURIs: {mirror}\nSuites: {suite} {suite}-updates\nComponents: main\nSigned-By: {key}\n\n\
         Types: deb\nURIs: {security}\nSuites: {suite}-security\nComponents: main\nSigned-By: {key}\n"
    ))
}

/// The Debian mirror that this machine is configured with.
fn mirror() -> Result<String> {
    configured("/debian").context("no Debian mirror in /etc/apt; this step needs a Debian machine")
}

/// The first URL in apt's configuration that ends with `end`.
fn configured(end: &str) -> Option<String> {
    let mut files = vec![PathBuf::from("/etc/apt/sources.list")];
    if let Ok(entries) = fs::read_dir("/etc/apt/sources.list.d") {
        files.extend(entries.flatten().map(|entry| entry.path()));
    }
    files.sort();
    let texts: Vec<String> = files.iter().filter_map(|file| fs::read_to_string(file).ok()).collect();
    texts
        .iter()
        .flat_map(|text| text.split_whitespace())
        .find(|word| word.starts_with("http") && word.trim_end_matches('/').ends_with(end))
        .map(ToOwned::to_owned)
}

/// Directory where downloads and builds are kept between runs.
pub fn cache_directory() -> Result<PathBuf> {
    let base = match std::env::var_os("XDG_CACHE_HOME") {
        Some(directory) if !directory.is_empty() => PathBuf::from(directory),
        _ => PathBuf::from(std::env::var_os("HOME").context("HOME is not set")?).join(".cache"),
    };
    let directory = base.join("kilo");
    fs::create_dir_all(&directory).with_context(|| directory.display().to_string())?;
    Ok(directory)
}

//! Debian's buildah, with its own storage in the cache directory.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};

use super::Architecture;
use crate::{
    apt,
    command::{output, run, show},
};

/// Timestamp of files and images without a commit time, and of layers kept across commits: seconds since
/// 1970.
pub const EPOCH: u64 = 1_735_689_600;

/// Images and layers in the storage beyond which it is pruned.
const MOST_IMAGES: usize = 80;

/// Builds images and keeps them.
pub struct Buildah {
    configuration: PathBuf,
    /// Holds a shared lock while this value exists.
    in_use: fs::File,
}

/// An image that was written to a file.
pub struct Archive {
    /// Digest of its manifest.
    pub digest: String,
    /// Size of the file in bytes.
    pub size: u64,
}

impl Buildah {
    /// Installs buildah where it is missing and opens the storage.
    pub fn open() -> Result<Self> {
        apt::install(&["buildah", "mmdebstrap"])?;
        let directory = apt::cache_directory()?.join("image");
        fs::create_dir_all(&directory).with_context(|| directory.display().to_string())?;
        let configuration = directory.join("storage.conf");
        let place = directory.display();
        fs::write(
            &configuration,
            format!(
                "[storage]\ndriver = \"overlay\"\nrunroot = \"{place}/run\"\ngraphroot = \"{place}/storage\"\n"
            ),
        )?;
        let in_use = fs::File::create(directory.join("in-use"))?;
        in_use.lock_shared()?;
        Ok(Self { configuration, in_use })
    }

    /// `buildah` with this storage.
    pub fn command(&self) -> Command {
        let mut command = Command::new("buildah");
        command.env("CONTAINERS_STORAGE_CONF", &self.configuration).env("BUILDAH_ISOLATION", "chroot");
        command
    }

    /// True when the image is in the storage.
    pub fn has(&self, image: &str) -> bool {
        self.id(image).is_ok()
    }

    /// Identifier of an image in the storage.
    pub fn id(&self, image: &str) -> Result<String> {
        let id =
            output(self.command().args(["inspect", "--type=image", "--format={{.FromImageID}}", image]))?;
        Ok(id.trim().to_owned())
    }

    /// Size of an image's files, in bytes.
    pub fn size(&self, image: &str) -> Result<u64> {
        self.with(image, |_, root| {
            let text = output(Command::new("du").args(["-sb", "--one-file-system"]).arg(root))?;
            text.split_whitespace().next().and_then(|bytes| bytes.parse().ok()).context("du says no size")
        })
    }

    /// When there are many images, removes the layers of earlier builds and the containers of interrupted
    /// ones: a build makes about ten of up to 5 GB. Does nothing while another xtask uses the storage.
    pub fn prune(&self) -> Result<()> {
        let images = output(self.command().args(["images", "--all", "--quiet"]))?.lines().count();
        if images <= MOST_IMAGES {
            return Ok(());
        }
        self.in_use.unlock()?;
        if self.in_use.try_lock().is_ok() {
            println!("image: removing layers of earlier builds ({images} images)");
            output(self.command().args(["rm", "--all"]))?;
            output(self.command().args(["rmi", "--prune"]))?;
        }
        Ok(self.in_use.lock_shared()?)
    }

    /// Removes those of the images that are there.
    pub fn remove(&self, images: &[&str]) -> Result<()> {
        let present: Vec<_> = images.iter().filter(|image| self.has(image)).collect();
        match present.is_empty() {
            true => Ok(()),
            false => run(self.command().arg("rmi").arg("--force").args(present)),
        }
    }

    /// Makes an image from a directory: `fill` gets the root of a container based on `from`.
    pub fn make(
        &self,
        from: &str,
        image: &str,
        configuration: &[&str],
        fill: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<()> {
        self.with(from, |container, root| {
            fill(root)?;
            run(self.command().arg("umount").arg(container))?;
            run(self.command().arg("config").args(configuration).arg(container))?;
            run(self.command().args(["commit", "--quiet"]).arg(timestamp(EPOCH)).args([container, image]))
        })
    }

    /// Shows the files of an image as a directory.
    pub fn with<T>(&self, image: &str, code: impl FnOnce(&str, &Path) -> Result<T>) -> Result<T> {
        let container = output(self.command().args(["from", "--pull-never", image]))?;
        let container = container.trim();
        let result = output(self.command().args(["mount", container]))
            .and_then(|root| code(container, Path::new(root.trim())));
        run(self.command().args(["rm", container]))?;
        result
    }

    /// Builds a Dockerfile whose base images are in the storage.
    pub fn build(
        &self,
        file: &Path,
        context: &Path,
        image: &str,
        architecture: Architecture,
        arguments: &[String],
    ) -> Result<()> {
        show(
            self.command()
                .args(["bud", "--isolation=chroot", "--pull-never", "--layers"])
                .arg(format!("--platform=linux/{}", architecture.name()))
                .arg(timestamp(EPOCH))
                .args(arguments)
                .arg("--file")
                .arg(file)
                .args(["--tag", image])
                .arg(context),
        )
    }

    /// Writes an image as an OCI archive under that name; equal images give equal files.
    pub fn archive(&self, image: &str, name: &str, file: &Path, compressed: bool) -> Result<Archive> {
        let directory = file.parent().context("the archive has no directory")?;
        fs::create_dir_all(directory)?;
        let layout = tempfile::tempdir_in(directory)?;
        let digest = self.push(image, layout.path(), name, compressed)?;
        Ok(Archive { digest, size: pack(layout.path(), file)? })
    }

    /// Adds an image to an OCI layout under a name; returns the digest of its manifest.
    pub fn push(&self, image: &str, layout: &Path, name: &str, compressed: bool) -> Result<String> {
        let digest = tempfile::NamedTempFile::new()?;
        let mut push = self.command();
        push.args(["push", "--quiet", "--format=oci", "--digestfile"]).arg(digest.path());
        if !compressed {
            push.arg("--disable-compression");
        }
        run(push.arg(image).arg(format!("oci:{}:{name}", layout.display())))?;
        Ok(fs::read_to_string(digest.path())?.trim().to_owned())
    }
}

/// Writes an OCI layout into a file; returns its size in bytes.
pub fn pack(layout: &Path, file: &Path) -> Result<u64> {
    let _ = fs::remove_file(file);
    run(Command::new("tar")
        .args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--mode=go=rX,u+rw"])
        .arg(format!("--mtime=@{EPOCH}"))
        .arg("-C")
        .arg(layout)
        .arg("-cf")
        .arg(file)
        .arg("."))?;
    Ok(fs::metadata(file).with_context(|| file.display().to_string())?.len())
}

fn timestamp(seconds: u64) -> String {
    format!("--timestamp={seconds}")
}

/// `$SOURCE_DATE_EPOCH`, or the time of the sources' commit, or [`EPOCH`].
pub fn source_epoch(sources: &Path) -> u64 {
    let given = std::env::var("SOURCE_DATE_EPOCH").ok();
    let committed =
        || output(Command::new("git").arg("-C").arg(sources).args(["log", "-1", "--format=%ct"])).ok();
    given.or_else(committed).and_then(|text| text.trim().parse().ok()).unwrap_or(EPOCH)
}

//! The archive of a report: texts by file name, compressed once all are collected.

use std::{
    collections::BTreeMap,
    fs::{File, OpenOptions},
    io::Write as _,
    path::Path,
};

use anyhow::{Context as _, Result};
use flate2::{Compression, write::GzEncoder};
use kilo_core::errors::error_chain;
use tar::{Builder, Header};

use super::redact::Redactor;

/// Content of a report.
#[derive(Debug, Default)]
pub struct Archive {
    files: BTreeMap<String, String>,
    problems: Vec<String>,
    /// Remaining size in bytes; `None` = unlimited.
    room: Option<usize>,
}

impl Archive {
    /// Creates the part for a node, which may send anything.
    pub fn of_at_most(bytes: usize) -> Self {
        Self { room: Some(bytes), ..Self::default() }
    }

    /// Adds a text, or notes why it is missing.
    pub fn add(&mut self, name: &str, text: Result<String>) {
        match text {
            Ok(text) if self.room.is_some_and(|room| room < text.len()) => {
                self.problems
                    .push(format!("{name} was left out: the files of this node would exceed the size limit"));
            }
            Ok(text) => {
                self.room = self.room.map(|room| room - text.len());
                self.files.insert(name.to_owned(), text);
            }
            Err(error) => self.problems.push(format!("{name} is missing: {}", error_chain(error.as_ref()))),
        }
    }

    /// Takes over the content of another archive.
    pub fn extend(&mut self, other: Self) {
        self.files.extend(other.files);
        self.problems.extend(other.problems);
    }

    /// What is missing, one sentence each.
    pub fn problems(&self) -> &[String] {
        &self.problems
    }

    /// Number of texts.
    pub fn len(&self) -> usize {
        self.files.len()
    }

    /// Writes all texts below one directory, named like the archive, with secrets removed. `time`:
    /// modification time of the files, in seconds since 1970.
    ///
    /// # Errors
    /// When the file exists, or cannot be written.
    pub fn write(&self, path: &Path, directory: &str, time: u64, redactor: &Redactor) -> Result<()> {
        let file = create(path).with_context(|| format!("failed to create {}", path.display()))?;
        let mut packed = Builder::new(GzEncoder::new(file, Compression::default()));
        let problems = match self.problems.as_slice() {
            [] => "Nothing is missing.\n".to_owned(),
            some => some.iter().map(|problem| format!("{problem}\n")).collect(),
        };
        let files = self.files.iter().map(|(name, text)| (name.as_str(), text.as_str()));
        for (name, text) in files.chain([("problems.txt", problems.as_str())]) {
            let text = redactor.text(text);
            let mut header = Header::new_gnu();
            header.set_size(text.len() as u64);
            header.set_mode(0o600);
            header.set_mtime(time);
            packed.append_data(&mut header, format!("{directory}/{name}"), text.as_bytes())?;
        }
        packed.into_inner()?.finish()?.flush()?;
        Ok(())
    }
}

/// Creates a file readable by its owner only: it contains addresses of a cluster.
fn create(path: &Path) -> std::io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use anyhow::anyhow;
    use std::io::Read as _;

    #[test]
    fn a_node_fills_its_part_and_no_more() {
        let mut part = Archive::of_at_most(5);
        for name in ["a", "b", "c"] {
            part.add(name, Ok("xxx".to_owned()));
        }
        let mut all = Archive::default();
        all.extend(part);
        assert_eq!((all.len(), all.problems().len()), (1, 2), "{:?}", all.problems());
        all.add("d", Ok("xxx".repeat(9)));
        assert_eq!(all.len(), 2, "what is not of a node has its place");
    }

    #[test]
    fn what_is_missing_is_in_the_archive_and_no_key_is() {
        let key = "YAnz5TF+lXXJte14tji3zlMNq+hd2rYUIgJBgB3fBmk=";
        let mut archive = Archive::default();
        archive.add("nodes/a1/log.txt", Ok(format!("key {key}")));
        archive.add("nodes/b1/log.txt", Err(anyhow!("psk {key}").context("its pod does not run")));
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("dump.tar.gz");
        archive.write(&path, "dump", 1, &Redactor::default()).unwrap();
        let mut read = BTreeMap::new();
        let mut packed = tar::Archive::new(flate2::read::GzDecoder::new(File::open(&path).unwrap()));
        for entry in packed.entries().unwrap() {
            let mut entry = entry.unwrap();
            let mut text = String::new();
            entry.read_to_string(&mut text).unwrap();
            read.insert(entry.path().unwrap().display().to_string(), text);
        }
        assert_eq!(read["dump/nodes/a1/log.txt"], "key <removed>");
        assert_eq!(
            read["dump/problems.txt"],
            "nodes/b1/log.txt is missing: its pod does not run: psk <removed>\n"
        );
        let again = archive.write(&path, "dump", 1, &Redactor::default()).unwrap_err();
        assert!(format!("{again:#}").contains("dump.tar.gz: "), "nothing is overwritten: {again:#}");
    }
}

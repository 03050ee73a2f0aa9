//! `kilo-book ROOT`: the site of ROOT/docs in ROOT/target/book, by mdBook.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use mdbook_driver::MDBook;

/// Files that pages link to and that are not on the site.
const REPOSITORY: &str = "https://github.com/kilo-ebpf/kilo/blob/main/";

fn main() -> Result<()> {
    let root = PathBuf::from(env::args().nth(1).context("kilo-book ROOT")?);
    let staged = root.join("target/book-source");
    if staged.exists() {
        fs::remove_dir_all(&staged)?;
    }
    copy(&root.join("docs"), &staged.join("docs"), 1)?;
    fs::copy(root.join("book.toml"), staged.join("book.toml"))?;
    fs::copy(root.join("xtask/book/site.css"), staged.join("site.css"))?;
    let book = MDBook::load(&staged).map_err(|error| error.context("docs/SUMMARY.md"))?;
    book.build()?;
    println!("{}", root.join("target/book/index.html").display());
    Ok(())
}

/// Copies a directory `depth` below the root; links of its pages that leave docs/ go to the repository.
fn copy(from: &Path, to: &Path, depth: usize) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from).with_context(|| from.display().to_string())? {
        let entry = entry?;
        let (path, target) = (entry.path(), to.join(entry.file_name()));
        if entry.file_type()?.is_dir() {
            copy(&path, &target, depth + 1)?;
        } else if path.extension().is_some_and(|extension| extension == "md") {
            let text = fs::read_to_string(&path)?;
            let out = format!("]({}", "../".repeat(depth));
            fs::write(&target, text.replace(&out, &format!("]({REPOSITORY}")))?;
        } else {
            fs::copy(&path, &target)?;
        }
    }
    Ok(())
}

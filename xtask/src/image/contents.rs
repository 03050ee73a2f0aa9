//! What the image must not contain, and what its init containers need.

use std::{collections::BTreeSet, fs, path::Path};

use anyhow::{Result, ensure};

/// Directories that programs may be in.
const PATHS: [&str; 9] = [
    "bin",
    "sbin",
    "usr/bin",
    "usr/sbin",
    "usr/local/bin",
    "usr/local/sbin",
    "usr/libexec",
    "opt/bin",
    "opt/cni/bin",
];
/// Compilers and their tools, languages, package managers, web clients: also with a version suffix or an
/// architecture prefix. Names that end in `sh` are shells.
const FORBIDDEN: [&str; 25] = [
    "apt",
    "apt-get",
    "ar",
    "as",
    "bpf-linker",
    "busybox",
    "c++",
    "cargo",
    "cc",
    "clang",
    "cpp",
    "curl",
    "g++",
    "gcc",
    "go",
    "ld",
    "lua",
    "make",
    "perl",
    "python",
    "rustc",
    "rustup",
    "tcc",
    "toybox",
    "wget",
];
/// The only shell, under both its names.
const SHELLS: [&str; 2] = ["sh", "dash"];
/// Programs that the init containers of the manifests run.
const NEEDED: [&str; 12] =
    ["sh", "basename", "cat", "cp", "env", "head", "mv", "printf", "sed", "sleep", "sort", "tail"];

/// Checks the programs in the image.
///
/// # Errors
/// When a forbidden program is there, or a needed one is missing.
pub fn check(root: &Path) -> Result<()> {
    let programs = programs(root);
    let bad: Vec<_> = programs.iter().filter(|name| is_forbidden(name)).collect();
    ensure!(bad.is_empty(), "the image holds compilers, shells or package managers: {bad:?}");
    let missing: Vec<_> = NEEDED.iter().filter(|name| !programs.contains(**name)).collect();
    ensure!(missing.is_empty(), "init containers need what the image does not hold: {missing:?}");
    Ok(())
}

fn programs(root: &Path) -> BTreeSet<String> {
    let directories = PATHS.iter().filter_map(|path| fs::read_dir(root.join(path)).ok());
    directories.flatten().flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

fn is_forbidden(name: &str) -> bool {
    if SHELLS.contains(&name) {
        return false;
    }
    // `x86_64-linux-gnu-gcc-12` is gcc, and `python3.11` python.
    let plain = name.trim_end_matches(|c: char| c.is_ascii_digit() || c == '.' || c == '-');
    let last = plain.rsplit_once("-gnu-").map_or(plain, |(_, last)| last);
    FORBIDDEN.contains(&last) || plain.ends_with("sh")
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn a_compiler_a_second_shell_and_a_missing_tool_are_found() {
        let root = tempfile::tempdir().unwrap();
        let bin = root.path().join("usr/bin");
        fs::create_dir_all(&bin).unwrap();
        let put = |name: &str| fs::write(bin.join(name), "").unwrap();
        let said = || check(root.path()).unwrap_err().to_string();
        assert!(said().contains("\"sed\""), "{}", said());
        NEEDED.iter().chain(&["dash", "nft", "csplit", "gcore"]).for_each(|name| put(name));
        check(root.path()).unwrap();
        for name in ["x86_64-linux-gnu-gcc-12", "bash", "python3.11", "apt-get", "zsh", "busybox"] {
            put(name);
            assert!(said().contains(&format!("{name:?}")), "{name}: {}", said());
            fs::remove_file(bin.join(name)).unwrap();
        }
        check(root.path()).unwrap();
    }
}

//! The documentation: flag tables match the programs (`KILO_BLESS=1` rewrites them), links have targets,
//! and commands are run by tests or marked.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod commands;
mod links;
mod metrics;
mod peer_fields;
mod pictures;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

const PROGRAMS: [&str; 2] = [env!("CARGO_BIN_EXE_kg"), env!("CARGO_BIN_EXE_kgctl")];
const START: &str = "<!-- flags: ";
const END: &str = "<!-- /flags -->\n";

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Every Markdown file of the documentation, with its text.
fn pages() -> BTreeMap<PathBuf, String> {
    let entries = fs::read_dir(root().join("docs")).unwrap().map(|entry| entry.unwrap().path());
    let pages = entries.filter(|path| path.extension().is_some_and(|extension| extension == "md"));
    pages
        .chain([root().join("README.md")])
        .map(|path| (path.clone(), fs::read_to_string(path).unwrap()))
        .collect()
}

/// The same, plus the pages in subdirectories of docs/ and in the repository's root.
fn every_page() -> BTreeMap<PathBuf, String> {
    let mut found = pages();
    let below = fs::read_dir(root().join("docs/design")).unwrap().map(|entry| entry.unwrap().path());
    let beside = ["CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"].map(|name| root().join(name));
    for path in below.filter(|path| path.extension().is_some_and(|extension| extension == "md")).chain(beside)
    {
        let text = fs::read_to_string(&path).unwrap();
        found.insert(path, text);
    }
    found
}

/// Splits off the text up to a marked block: (before, command, block, rest).
fn next_block(text: &str) -> Option<(&str, &str, &str, &str)> {
    let (before, rest) = text.split_once(START)?;
    let (command, rest) = rest.split_once(" -->\n").expect("a marker ends with -->");
    let (block, rest) = rest.split_once(END).unwrap_or_else(|| panic!("flags of {command} do not end"));
    Some((before, command, block, rest))
}

/// The flag table of each command, by the command's path.
fn tables() -> BTreeMap<String, String> {
    let mut tables = BTreeMap::new();
    for program in PROGRAMS {
        let output = Command::new(program).arg("flags-as-markdown").output().unwrap();
        assert!(output.status.success(), "{program}");
        let text = String::from_utf8(output.stdout).unwrap();
        let mut rest = text.as_str();
        while let Some((_, command, block, after)) = next_block(rest) {
            tables.insert(command.to_owned(), block.to_owned());
            rest = after;
        }
    }
    tables
}

/// The page with every command.
fn flags_page(tables: &BTreeMap<String, String>) -> String {
    let mut text =
        "# Flags of all commands\n\nFor operators and users of kgctl: every flag of every command.\n\nMade by `KILO_BLESS=1 cargo test -p kilo-agent --test unit docs::`; \
                    `--flag[=BOOL]` alone means `--flag=true`.\n"
            .to_owned();
    for (command, table) in tables {
        text += &format!("\n## {command}\n\n{START}{command} -->\n{table}{END}");
    }
    text
}

/// A page with its marked blocks renewed.
fn renewed(text: &str, tables: &BTreeMap<String, String>) -> String {
    let mut renewed = String::new();
    let mut rest = text;
    while let Some((before, command, _, after)) = next_block(rest) {
        let table = tables.get(command).unwrap_or_else(|| panic!("no command {command} with flags"));
        renewed += &format!("{before}{START}{command} -->\n{table}{END}");
        rest = after;
    }
    renewed + rest
}

#[test]
fn the_flag_tables_in_the_documentation_are_the_programs() {
    let tables = tables();
    let mut wanted: BTreeMap<_, _> =
        pages().into_iter().map(|(path, text)| (path, renewed(&text, &tables))).collect();
    wanted.insert(root().join("docs/flags.md"), flags_page(&tables));
    for (path, text) in wanted {
        if std::env::var_os("KILO_BLESS").is_some() {
            fs::write(&path, &text).unwrap();
        }
        assert!(
            fs::read_to_string(&path).unwrap_or_default() == text,
            "{} is out of date: KILO_BLESS=1 cargo test -p kilo-agent --test unit docs::",
            path.display()
        );
    }
}

#[test]
fn every_test_that_the_page_about_security_names_is_there() {
    let page = fs::read_to_string(root().join("docs/security.md")).unwrap();
    // A name of four or more words is not a reason, metric or option.
    let is_test = |word: &&str| word.matches('_').count() >= 3 && !word.contains(['{', '/', '-']);
    let named: BTreeSet<&str> = page.split('`').skip(1).step_by(2).filter(is_test).collect();
    assert!(named.len() > 20, "{named:?}");
    let mut sources = Vec::new();
    for crate_directory in ["kilo-agent", "kilo-common"] {
        read_sources(&root().join(crate_directory), &mut sources);
    }
    for test in named {
        let defined = format!("fn {test}(");
        assert!(sources.iter().any(|text| text.contains(&defined)), "there is no test {test}");
    }
}

/// Reads every Rust file below the directory except build output.
fn read_sources(directory: &Path, into: &mut Vec<String>) {
    for path in fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()) {
        if path.is_dir() && !path.ends_with("target") {
            read_sources(&path, into);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            into.push(fs::read_to_string(&path).unwrap());
        }
    }
}

#[test]
fn examples_name_the_pins_of_this_layout() {
    let pins = format!("v{}/", kilo_common::maps::LAYOUT_VERSION);
    for (path, text) in pages() {
        for rest in text.split("/sys/fs/bpf/kilo/").skip(1) {
            // Links are not part of the layout: they outlive it.
            let named = rest.starts_with(&pins) || rest.starts_with("links");
            assert!(named, "{}: the pins are below {pins}", path.display());
        }
    }
}

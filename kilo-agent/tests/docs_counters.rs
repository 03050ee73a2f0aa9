//! The documentation knows every counter.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::{fmt::Write as _, path::PathBuf};

use kilo_agent::dataplane::advice;
use kilo_common::verdict::{Action, DropReason};

/// The two tables of docs/data-path.md, from the code.
fn tables() -> String {
    let mut text = String::from("| action | what was done |\n|---|---|\n");
    for action in Action::ALL {
        writeln!(text, "| `{}` | {} |", action.label(), action.describe()).unwrap();
    }
    text.push_str("\n| reason | why it was dropped | what to do |\n|---|---|---|\n");
    for reason in DropReason::ALL {
        writeln!(text, "| `{}` | {} | {} |", reason.label(), reason.describe(), advice(*reason)).unwrap();
    }
    text
}

/// `KILO_BLESS=1` writes the tables instead.
#[test]
fn the_tables_of_counters_are_those_of_the_code() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs/data-path.md");
    let text = std::fs::read_to_string(&path).unwrap();
    let (begin, end) = ("<!-- counters -->\n", "<!-- /counters -->\n");
    let from = text.find(begin).unwrap() + begin.len();
    let to = text.find(end).unwrap();
    if std::env::var_os("KILO_BLESS").is_some() {
        std::fs::write(&path, format!("{}{}{}", &text[..from], tables(), &text[to..])).unwrap();
        return;
    }
    assert!(
        text[from..to] == tables(),
        "docs/data-path.md differs from the code; run: KILO_BLESS=1 cargo test --test docs_counters"
    );
}

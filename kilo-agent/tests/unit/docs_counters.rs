//! The documentation knows every counter, and every map with its size.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::{fmt::Write as _, path::PathBuf};

use kilo_common::{
    counters::{Action, DropReason},
    map_table::MAPS,
};

/// The two tables of docs/data-path.md, from the code.
fn tables() -> String {
    let mut text = String::from("| action | what was done |\n|---|---|\n");
    for action in Action::ALL {
        writeln!(text, "| `{}` | {} |", action.label(), action.describe()).unwrap();
    }
    text.push_str("\n| reason | why it was dropped | what to do |\n|---|---|---|\n");
    for reason in DropReason::ALL {
        writeln!(text, "| `{}` | {} | {} |", reason.label(), reason.describe(), reason.remedy()).unwrap();
    }
    text
}

/// The table of maps.
fn maps() -> String {
    let mut text = String::from("| map | key → value | places | reason |\n|---|---|---|---|\n");
    for map in MAPS {
        let size = thousands(map.size);
        writeln!(text, "| `{}` | {} | {size} | {} |", map.name, map.holds, map.reason).unwrap();
    }
    text
}

fn thousands(number: u32) -> String {
    let (rest, last) = (number / 1000, number % 1000);
    if rest == 0 { last.to_string() } else { format!("{},{last:03}", thousands(rest)) }
}

#[test]
fn the_tables_of_counters_are_those_of_the_code() {
    check("counters", &tables());
}

#[test]
fn the_table_of_maps_is_that_of_the_code() {
    check("maps", &maps());
}

/// `KILO_BLESS=1` writes the table instead. One test at a time does.
fn check(mark: &str, wanted: &str) {
    static PAGE: std::sync::Mutex<()> = std::sync::Mutex::new(());
    let _alone = PAGE.lock();
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs/data-path.md");
    let text = std::fs::read_to_string(&path).unwrap();
    let (begin, end) = (format!("<!-- {mark} -->\n"), format!("<!-- /{mark} -->\n"));
    let from = text.find(&begin).unwrap() + begin.len();
    let to = text.find(&end).unwrap();
    if std::env::var_os("KILO_BLESS").is_some() {
        std::fs::write(&path, format!("{}{wanted}{}", &text[..from], &text[to..])).unwrap();
        return;
    }
    assert!(
        text[from..to] == *wanted,
        "docs/data-path.md differs from the code; run: KILO_BLESS=1 cargo test --test unit docs_counters::"
    );
}

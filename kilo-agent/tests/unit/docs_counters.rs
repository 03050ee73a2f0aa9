//! The documentation lists every counter, every map with its size, every annotation, and every Event.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::{fmt::Write as _, path::PathBuf};

use kilo_common::{counters::Action, drop_reasons::DropReason, map_table::MAPS};
use kilo_core::objects::{
    annotations::{ANNOTATIONS, Annotation, PREFIX, Writer},
    events::EventReason,
};

/// The table of actions of docs/data-path.md.
fn actions() -> String {
    let mut text = String::from("| action | what was done |\n|---|---|\n");
    for action in Action::ALL {
        writeln!(text, "| `{}` | {} |", action.label(), action.describe()).unwrap();
    }
    text
}

/// The table of docs/drop-reasons.md, from the reasons and remedies in `kilo-common/src/drop_reasons.rs`.
fn drop_reasons() -> String {
    let mut text = String::from("| reason | why it was dropped | what to do |\n|---|---|---|\n");
    for reason in DropReason::ALL {
        writeln!(text, "| `{}` | {} | {} |", reason.label(), reason.describe(), reason.remedy()).unwrap();
    }
    text
}

/// The table of maps.
fn maps() -> String {
    let mut text = String::from(
        "| map | key → value | capacity | why this size, and what happens with one more entry |\n|---|---|---|---|\n",
    );
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
    check("data-path.md", "counters", &actions());
    check("drop-reasons.md", "drop reasons", &drop_reasons());
}

#[test]
fn the_table_of_maps_is_that_of_the_code() {
    check("data-path.md", "maps", &maps());
}

/// The annotations that one side writes.
fn annotations(by_agents: bool) -> String {
    let mut text = String::from("| annotation | example | meaning |\n|---|---|---|\n");
    for Annotation { name, writer, example, meaning, .. } in ANNOTATIONS {
        if matches!(writer, Writer::Agent(..)) == by_agents {
            let name = name.strip_prefix(PREFIX).unwrap();
            writeln!(text, "| `{name}` | {example} | {meaning} |").unwrap();
        }
    }
    text
}

#[test]
fn the_tables_of_annotations_are_those_of_the_code() {
    check("annotations.md", "annotations of operators", &annotations(false));
    check("annotations.md", "annotations of agents", &annotations(true));
}

#[test]
fn the_table_of_events_is_that_of_the_code() {
    let mut text = String::from("| reason | type | about | meaning |\n|---|---|---|---|\n");
    for reason in EventReason::ALL {
        let (severity, kind) = (reason.severity().as_str(), reason.kind());
        writeln!(text, "| `{}` | {severity} | {kind} | {} |", reason.as_str(), reason.meaning()).unwrap();
    }
    check("monitoring.md", "events", &text);
}

/// Compares a table of a page, or with `KILO_BLESS=1` writes it. One test at a time does so.
pub fn check(page: &str, mark: &str, wanted: &str) {
    static PAGE: parking_lot::Mutex<()> = parking_lot::Mutex::new(());
    let _alone = PAGE.lock();
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs").join(page);
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
        "docs/{page} differs from the code; run: KILO_BLESS=1 cargo test --test unit docs_counters::"
    );
}

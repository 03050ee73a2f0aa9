//! `cargo xtask bench slices`: what many agents and the API server spend on knowing all nodes, by Nodes and by
//! slices, measured by kilo-agent/benches/control.

use std::fs;

use anyhow::{Context as _, Result, bail};

use super::{
    BenchArgs, DOCUMENT,
    control::{self, Group},
    document,
    figures::Figure,
    store,
};
use crate::workspace_root;

const GROUP: Group<'static> = ("slices", "", &["Nodes", "slices"]);
/// The table stands between these two lines.
const MARKS: document::Marks = ("<!-- slices: made by cargo xtask bench slices -->", "<!-- /slices -->");

/// True for the figures of this part.
pub fn is_slices(figure: &Figure) -> bool {
    figure.name.split('/').next() == Some(GROUP.0)
}

/// Measures, and keeps the figures.
pub fn main(args: &BenchArgs) -> Result<()> {
    if args.check || !args.only.is_empty() {
        bail!("bench slices compares nothing and has no parts: its figures are of this machine");
    }
    let results = workspace_root().join("target/bench-slices.json");
    if !args.last {
        control::run(&results, &[("KILO_BENCH_PART", "slices")])?;
    }
    let figures = control::read(&results)?;
    let document = workspace_root().join(DOCUMENT);
    let text = fs::read_to_string(&document).context(DOCUMENT)?;
    let table = control::table(&figures, GROUP) + "\n";
    fs::write(&document, document::between(&text, MARKS, &table)?)?;
    store(figures, |figure| !is_slices(figure))
}

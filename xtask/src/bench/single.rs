//! Parts that are measured alone and have tables of their own: `cargo xtask bench slices`, `scale` and
//! `start` by kilo-agent/benches/control, `gateways` by the lab.

use std::fs;

use anyhow::{Context as _, Result, bail};

use super::{BenchArgs, DOCUMENT, Part, control, document, figures::Figure, gateways, store, stored};
use crate::workspace_root;

/// A part that is measured alone.
#[derive(Clone, Copy)]
struct Single {
    part: Part,
    /// Its name in the benchmark and its files.
    name: &'static str,
    /// Groups of figures, a table each: name, and the unit behind a column's number.
    groups: &'static [(&'static str, &'static str)],
    /// The tables are between these two lines of this page.
    marks: document::Marks,
    page: &'static str,
}

const ALL: [Single; 4] = [
    Single {
        part: Part::Slices,
        name: "slices",
        groups: &[("slices", "")],
        marks: ("<!-- slices: made by cargo xtask bench slices -->", "<!-- /slices -->"),
        page: DOCUMENT,
    },
    Single {
        part: Part::Scale,
        name: "scale",
        groups: &[("scale", "nodes")],
        marks: ("<!-- scale: made by cargo xtask bench scale -->", "<!-- /scale -->"),
        page: "docs/benchmarks.md",
    },
    Single {
        part: Part::Start,
        name: "start",
        groups: &[("start", ""), ("verifier", "")],
        marks: ("<!-- start: made by cargo xtask bench start -->", "<!-- /start -->"),
        page: DOCUMENT,
    },
    Single {
        part: Part::Gateways,
        name: "gateways",
        groups: &[("gateways", "active")],
        marks: ("<!-- gateways: made by cargo xtask bench gateways -->", "<!-- /gateways -->"),
        page: DOCUMENT,
    },
];

impl Single {
    fn has(&self, figure: &Figure) -> bool {
        let group = figure.name.split('/').next();
        self.groups.iter().any(|(name, _)| Some(*name) == group)
    }
}

/// Whether one of these parts measures the figure.
pub fn is_single(figure: &Figure) -> bool {
    ALL.iter().any(|single| single.has(figure))
}

/// Measures and stores the figures.
pub fn main(part: Part, args: &BenchArgs) -> Result<()> {
    let single = ALL.into_iter().find(|single| single.part == part).context("no part of that name")?;
    if args.check || !args.only.is_empty() {
        bail!("bench {} compares nothing and has no parts: its figures are of this machine", single.name);
    }
    let results = workspace_root().join(format!("target/bench-{}.json", single.name));
    if part == Part::Gateways && !args.last {
        gateways::measure(&results, args)?;
    } else if !args.last {
        if part == Part::Scale {
            make_room_for_neighbours()?;
        }
        let numbers = [("KILO_BENCH_NODES", args.nodes), ("KILO_BENCH_OUTAGE", args.outage)];
        let numbers = numbers.map(|(name, number)| (name, number.map(|number| number.to_string())));
        let mut variables = vec![("KILO_BENCH_PART", single.name)];
        variables.extend(numbers.iter().filter_map(|(name, number)| Some((*name, number.as_deref()?))));
        control::run(&results, &variables)?;
    }
    let mut figures = control::read(&results)?;
    if part == Part::Scale {
        figures = with_other_sizes(figures, stored(|figure| single.has(figure))?);
    }
    let page = workspace_root().join(single.page);
    let text = fs::read_to_string(&page).context(single.page)?;
    let table = |(group, what): &(&str, &str)| {
        let columns = columns(&figures, group);
        control::table(&figures, (group, what, &columns))
    };
    let tables = single.groups.iter().map(table).collect::<String>() + "\n";
    fs::write(&page, document::between(&text, single.marks, &tables)?)?;
    store(figures, |figure| !single.has(figure))
}

/// Number of nodes of a mesh whose figure this is: `scale/40/...`.
fn size(figure: &Figure) -> Option<u32> {
    figure.name.split('/').nth(1)?.parse().ok()
}

/// Adds the stored figures of sizes that were not measured now, by size: a mesh of 200 takes half an hour, and
/// is measured alone.
fn with_other_sizes(now: Vec<Figure>, stored: Vec<Figure>) -> Vec<Figure> {
    let measured: Vec<_> = now.iter().map(size).collect();
    let mut all: Vec<_> = stored.into_iter().filter(|figure| !measured.contains(&size(figure))).collect();
    all.extend(now);
    all.sort_by_key(size);
    all
}

/// All namespaces share one neighbour table, whose limits only the initial namespace can set: above
/// `gc_thresh2` the kernel evicts entries unused for seconds, above `gc_thresh3` it accepts no more.
fn make_room_for_neighbours() -> Result<()> {
    for (name, wanted) in [("gc_thresh3", 65_536), ("gc_thresh2", 32_768)] {
        let path = format!("/proc/sys/net/ipv4/neigh/default/{name}");
        let present = fs::read_to_string(&path).with_context(|| path.clone())?;
        if present.trim().parse::<u32>().is_ok_and(|present| present >= wanted) {
            continue;
        }
        println!("bench: {path} was {}, and is {wanted} from now on", present.trim());
        fs::write(&path, wanted.to_string()).with_context(|| path.clone())?;
    }
    Ok(())
}

/// Columns of a group's table, in the order of measurement.
fn columns<'a>(figures: &'a [Figure], group: &str) -> Vec<&'a str> {
    let mut columns: Vec<&str> = Vec::new();
    for figure in figures {
        let mut parts = figure.name.split('/');
        if parts.next() == Some(group)
            && let Some(column) = parts.next()
            && !columns.contains(&column)
        {
            columns.push(column);
        }
    }
    columns
}

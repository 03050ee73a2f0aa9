//! `cargo xtask bench control`: the agent's own costs, measured by
//! kilo-agent/benches/control in namespaces of this machine.

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

use super::{BenchArgs, DOCUMENT, check, document, figures::Figure, store, stored};
use crate::{
    apt, build, build_ebpf,
    command::{output, own_program, show},
    kubernetes,
    lab::{PACKAGES, run_times},
    workspace_root,
};

/// Numbers of nodes that are measured.
const SIZES: [&str; 3] = ["100", "1000", "10000"];

/// Groups of figures, a table each: name, unit of the columns, and the sizes.
const GROUPS: [Group<'static>; 3] = [
    ("control", "nodes", &SIZES),
    ("programs", "prefixes", &["10", "100", "1000", "10000"]),
    ("traffic", "", &["echo", "TCP"]),
];

/// The tables are between these two lines.
const MARKS: document::Marks = ("<!-- control: made by cargo xtask bench control -->", "<!-- /control -->");

/// One figure that the benchmark writes.
#[derive(Serialize, Deserialize)]
pub(super) struct Measured {
    /// Group, column and row of a table: `control/100/stop`.
    pub name: String,
    /// Unit of the value.
    pub unit: String,
    /// The measured value.
    pub value: f64,
}

/// Whether this part measures the figure.
pub fn is_control(figure: &Figure) -> bool {
    GROUPS.iter().any(|(group, ..)| figure.name.split('/').next() == Some(group))
}

/// Measures, then compares or stores the figures.
pub fn main(args: &BenchArgs) -> Result<()> {
    let results = workspace_root().join("target/bench-control.json");
    let sizes: Vec<&str> = SIZES
        .into_iter()
        .filter(|size| args.only.is_empty() || args.only.split(',').any(|only| only == *size))
        .collect();
    if !args.last {
        measure(&results, &sizes)?;
    }
    if !(args.only.is_empty() || args.update || args.check) {
        return Ok(());
    }
    let mut figures = read(&results)?;
    let is_left_out = |figure: &Figure| {
        SIZES.iter().any(|size| !sizes.contains(size) && figure.name.starts_with(&format!("control/{size}/")))
    };
    if args.check {
        return check(&stored(|figure| is_control(figure) && !is_left_out(figure))?, &figures);
    }
    figures.extend(stored(is_left_out)?);
    let document = workspace_root().join(DOCUMENT);
    let text = fs::read_to_string(&document).context(DOCUMENT)?;
    fs::write(&document, document::between(&text, MARKS, &tables(&figures))?)?;
    fs::write(document.with_file_name("benchmarks-control.svg"), plot(&figures))?;
    store(figures, |figure| !is_control(figure))
}

fn measure(results: &Path, sizes: &[&str]) -> Result<()> {
    run(results, &[("KILO_BENCH_NODES", &sizes.join(","))])?;
    let mut figures: Vec<Measured> = serde_json::from_slice(&fs::read(results)?)?;
    figures.extend(under_traffic()?);
    fs::write(results, serde_json::to_vec_pretty(&figures)?).with_context(|| results.display().to_string())
}

/// Compiler settings of the image's programs besides `--release`, as in its Dockerfile.
const SHIPPED: [(&str, &str); 2] =
    [("CARGO_PROFILE_RELEASE_LTO", "fat"), ("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "1")];

/// Builds and runs kilo-agent/benches/control, which writes its figures to `results`.
pub(super) fn run(results: &Path, variables: &[(&str, &str)]) -> Result<()> {
    apt::install(PACKAGES)?;
    apt::install(&["openssl", "strace", "wireguard-tools"])?;
    let assets = kubernetes::assets()?;
    build_ebpf::build(false)?;
    println!("xtask: cargo bench --no-run");
    let built = output(Command::new("cargo").current_dir(workspace_root()).envs(SHIPPED).args([
        "bench",
        "--locked",
        "--package=kilo-agent",
        "--bench=control",
        "--no-run",
        "--message-format=json",
        "--quiet",
    ]))?;
    let program = built.lines().find_map(|line| {
        let message: serde_json::Value = serde_json::from_str(line).ok()?;
        let is_ours = message.pointer("/target/name")?.as_str()? == "control";
        message.get("executable")?.as_str().filter(|_| is_ours).map(PathBuf::from)
    });
    let program = program.context("cargo bench built no program")?;
    let _ = fs::remove_file(results);
    show(
        Command::new("unshare")
            .args(["--net", "--mount", "--propagation", "private"])
            .arg(program)
            .arg(results)
            .current_dir(workspace_root().join("kilo-agent"))
            .env("KUBEBUILDER_ASSETS", assets)
            .env("KILO_BENCH_LAUNCHER", own_program()?)
            .envs(variables.iter().copied()),
    )
}

/// Figures that the benchmark has written, rounded to three decimals.
pub(super) fn read(results: &Path) -> Result<Vec<Figure>> {
    let text = fs::read(results).with_context(|| results.display().to_string())?;
    let figure = |Measured { name, unit, value }| {
        let value = (value * 1000.0_f64).round() / 1000.0;
        Figure { name, unit, value, baseline: None, ratio: None }
    };
    Ok(serde_json::from_slice::<Vec<Measured>>(&text)?.into_iter().map(figure).collect())
}

/// Runs of each BPF program, and their time, while packets of a lab pass through it.
fn under_traffic() -> Result<Vec<Measured>> {
    build(&["--release", "--bin", "kg", "--bin", "kgctl"])?;
    let mut figures = Vec::new();
    for run_times::RunTimes { traffic, programs } in
        run_times::measure(&workspace_root().join("target/release"))?
    {
        for (program, runs, nanoseconds) in programs {
            println!("bench: {traffic:4} {program:16} {runs:9} runs of {nanoseconds:7.0} ns");
            for (what, unit, value) in [("", "ns a run", nanoseconds), (", how often", "runs", runs as f64)] {
                let name = format!("traffic/{traffic}/{program}{what}");
                figures.push(Measured { name, unit: unit.to_owned(), value });
            }
        }
    }
    Ok(figures)
}

/// A group of figures, which is a table: name, unit of the columns, and the sizes.
pub(super) type Group<'a> = (&'a str, &'a str, &'a [&'a str]);

/// One table for each group.
fn tables(figures: &[Figure]) -> String {
    GROUPS.iter().map(|group| table(figures, *group)).collect::<String>() + "\n"
}

/// A table with a row for each measure and a column for each size.
pub(super) fn table(figures: &[Figure], (group, what, sizes): Group<'_>) -> String {
    let heads: Vec<String> = sizes
        .iter()
        .map(|size| match size.parse() {
            Ok(number) => format!("{} {what}", document::grouped(number)),
            Err(_) => (*size).to_owned(),
        })
        .collect();
    let mut text = format!("\n| | unit | {} |\n|---|---|{}\n", heads.join(" | "), "--:|".repeat(sizes.len()));
    for measure in measures(figures, group) {
        let values: Vec<_> = sizes.iter().map(|size| find(figures, group, size, measure)).collect();
        let unit = values.iter().flatten().next().map_or("", |figure| &figure.unit);
        let _ = write!(text, "| {measure} | {unit} |");
        for figure in values {
            let _ = match figure.map(|figure| figure.value) {
                Some(value) => write!(text, " {} |", rounded(value)),
                None => write!(text, " |"),
            };
        }
        text += "\n";
    }
    text
}

/// Three significant digits; whole numbers, and values from 100 on, without decimals.
fn rounded(value: f64) -> String {
    match value {
        _ if value.fract() == 0.0 || value >= 100.0 => document::grouped(value),
        _ if value >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

fn measures<'a>(figures: &'a [Figure], group: &str) -> Vec<&'a str> {
    let mut names: Vec<&str> = Vec::new();
    for figure in figures {
        let mut parts = figure.name.splitn(3, '/');
        if let (Some(of), Some(_), Some(name)) = (parts.next(), parts.next(), parts.next())
            && of == group
            && !names.contains(&name)
        {
            names.push(name);
        }
    }
    names
}

fn find<'a>(figures: &'a [Figure], group: &str, size: &str, what: &str) -> Option<&'a Figure> {
    let name = format!("{group}/{size}/{what}");
    figures.iter().find(|figure| figure.name == name)
}

/// A bar chart of the figures that have a goal.
fn plot(figures: &[Figure]) -> String {
    let mut groups = Vec::new();
    for what in [
        "topology and plan, leader",
        "node joins another location: reconcile",
        "node joins another location: system calls",
        "at rest: processor",
        "at rest: memory",
        "start to data path adopted",
    ] {
        let found = SIZES.into_iter().filter_map(|size| Some((size, find(figures, "control", size, what)?)));
        let unit = found.clone().next().map_or("", |(_, figure)| figure.unit.as_str());
        let bars = found.map(|(size, figure)| document::Bar {
            name: format!("{size} nodes"),
            value: figure.value,
            text: rounded(figure.value),
            colour: "#2a7",
        });
        groups.push((format!("{what} ({unit})"), bars.collect()));
    }
    document::bars("Costs of the agent, logarithmic from 0.01 to 10,000", (-2.0, 4.0), &groups)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn what_is_measured_is_compiled_as_the_image_is() {
        let dockerfile = fs::read_to_string(workspace_root().join("Dockerfile")).unwrap();
        for (name, value) in SHIPPED {
            let wanted = format!("{name}={value}");
            assert!(dockerfile.split_whitespace().any(|word| word == wanted), "{wanted}");
        }
    }

    #[test]
    fn a_measure_is_a_row_and_a_size_a_column() {
        let figure = |name: &str, value| Figure {
            name: name.to_owned(),
            unit: "ms".to_owned(),
            value,
            baseline: None,
            ratio: None,
        };
        let figures = [figure("control/100/stop", 4.25), figure("control/10000/stop", 1234.5)];
        let tables = tables(&figures);
        assert_eq!(tables.lines().nth(3).unwrap(), "| stop | ms | 4.25 | | 1,234 |");
    }
}

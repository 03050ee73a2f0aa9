//! Figures: measured values, and what each is compared with.

use serde::{Deserialize, Serialize};

/// Factor by which a count may grow before `--check` fails.
const TOLERANCE: f64 = 1.10;
/// Factor for instructions of the data path, which repeat almost exactly.
const OF_INSTRUCTIONS: f64 = 1.02;
/// Their instructions differ by up to 4 % between runs (docs/design/performance.md, "How stable a figure is").
const UNSTABLE: [&str; 2] = ["lan-to-encrypted/", "masquerade/new-flow/"];
/// Factor for these.
const OF_UNSTABLE: f64 = 1.05;

/// Units of control-plane figures that are repeatable counts.
const COUNTS: [&str; 3] = ["writes", "messages", "requests"];

/// One figure of `docs/benchmarks.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Figure {
    /// Stage, load and variant: `transit-out/64/ours-ipip-5`.
    pub name: String,
    /// Unit of the value.
    pub unit: String,
    /// The measured value.
    pub value: f64,
    /// Value of the variant it is compared with, if there is one.
    pub baseline: Option<f64>,
    /// `value` / `baseline`.
    pub ratio: Option<f64>,
}

/// Instructions of one stage under one load.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cost {
    /// The variant: `plain`, `kilo-100-nft`, `ours-ipip-5`.
    pub variant: String,
    /// Part of the path: `transit-out`.
    pub stage: String,
    /// Payload bytes, `tcp-kb`, `tcp-super-kb` (GSO packets), `new-flow`.
    pub load: String,
    /// Guest instructions per packet.
    pub instructions: f64,
}

/// Turns costs into figures. Our variants are compared with Kilo's at the same number of nodes, Kilo's with
/// plain routes.
pub fn figures(costs: &[Cost]) -> Vec<Figure> {
    let of = |variant: &str, cost: &Cost| {
        costs
            .iter()
            .find(|other| other.variant == variant && other.stage == cost.stage && other.load == cost.load)
            .map(|other| other.instructions)
    };
    costs
        .iter()
        .map(|cost| {
            let baseline = baseline(&cost.variant).and_then(|variant| of(&variant, cost));
            Figure {
                name: format!("{}/{}/{}", cost.stage, cost.load, cost.variant),
                unit: unit(&cost.load).to_owned(),
                value: rounded(&cost.load, cost.instructions),
                baseline: baseline.map(|baseline| rounded(&cost.load, baseline)),
                ratio: baseline
                    .filter(|&baseline| baseline > 0.0)
                    .map(|baseline| (cost.instructions / baseline * 1000.0).round() / 1000.0),
            }
        })
        .collect()
}

/// Rounds to whole instructions; per kilobyte of GSO packets, which is few, to tenths.
fn rounded(load: &str, instructions: f64) -> f64 {
    match load {
        "tcp-super-kb" => (instructions * 10.0).round() / 10.0,
        _ => instructions.round(),
    }
}

const PER_KB: &str = "guest instructions per 1,024 bytes";
/// Unit of what is counted per packet.
pub const PER_PACKET: &str = "guest instructions per packet";

fn unit(load: &str) -> &'static str {
    match load {
        "tcp-kb" | "tcp-super-kb" => PER_KB,
        _ => PER_PACKET,
    }
}

/// Costs of variants that were not measured in this run, from the stored figures: what does not depend on
/// our code need not be counted again.
pub fn kept(stored: &[Figure], measured: &[Cost]) -> Vec<Cost> {
    let costs = stored.iter().filter_map(|figure| {
        let mut parts = figure.name.splitn(3, '/').map(ToOwned::to_owned);
        let (stage, load, variant) = (parts.next()?, parts.next()?, parts.next()?);
        Some(Cost { variant, stage, load, instructions: figure.value })
    });
    costs.filter(|cost| measured.iter().all(|measured| measured.variant != cost.variant)).collect()
}

/// The variant that this one is compared with.
fn baseline(variant: &str) -> Option<String> {
    let nodes = variant.rsplit('-').next()?;
    match variant.split('-').next()? {
        // Kilo was measured with at most 1,000 nodes.
        "ours" => {
            Some(format!("kilo-{}-nft", if nodes.parse::<u32>().ok()? > 1000 { "1000" } else { nodes }))
        }
        "plain" => None,
        _ => Some("plain".to_owned()),
    }
}

/// Of a handful of calls, one or two may fall outside the counted interval.
fn slack(figure: &Figure) -> f64 {
    if COUNTS.contains(&figure.unit.as_str()) { 2.0 } else { 0.0 }
}

fn tolerance(figure: &Figure) -> f64 {
    let is_of_instructions = [PER_KB, PER_PACKET].contains(&figure.unit.as_str());
    let is_unstable = UNSTABLE.iter().any(|name| figure.name.starts_with(name));
    match (is_of_instructions, is_unstable) {
        (true, true) => OF_UNSTABLE,
        (true, false) => OF_INSTRUCTIONS,
        (false, _) => TOLERANCE,
    }
}

/// Our figures that grew by more than their tolerance against the stored ones, or are missing; one line
/// each.
pub fn regressions(stored: &[Figure], now: &[Figure]) -> Vec<String> {
    stored
        .iter()
        .filter(|old| old.name.contains("/ours-") || COUNTS.contains(&old.unit.as_str()))
        .filter_map(|old| match now.iter().find(|new| new.name == old.name) {
            None => Some(format!("{}: not measured any more", old.name)),
            Some(new) if new.value > old.value * tolerance(old) + slack(old) => {
                Some(format!("{}: {} {}, stored {}", old.name, new.value, new.unit, old.value))
            }
            Some(_) => None,
        })
        .collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    fn cost(variant: &str, instructions: f64) -> Cost {
        Cost {
            variant: variant.to_owned(),
            stage: "transit-out".to_owned(),
            load: "64".to_owned(),
            instructions,
        }
    }

    #[test]
    fn our_figures_are_compared_with_kilo_at_the_same_number_of_nodes() {
        let figures = figures(&[
            cost("plain", 4000.0),
            cost("kilo-100-nft", 16_000.0),
            cost("kilo-1000-nft", 100_000.0),
            cost("ours-ipip-100", 1600.0),
            cost("ours-ipip-10000", 2000.0),
        ]);
        let ratios: Vec<_> = figures.iter().map(|figure| figure.ratio).collect();
        assert_eq!(ratios, [None, Some(4.0), Some(25.0), Some(0.1), Some(0.02)]);
    }

    #[test]
    fn instructions_that_grew_by_more_than_two_percent_are_a_regression() {
        let stored =
            figures(&[cost("ours-ipip-5", 1000.0), cost("kilo-5-nft", 1000.0), cost("ours-none-5", 10.0)]);
        let at = |instructions| figures(&[cost("ours-ipip-5", instructions), cost("ours-none-5", 10.0)]);
        assert!(regressions(&stored, &at(1020.0)).is_empty());
        assert_eq!(
            regressions(&stored, &at(1021.0)),
            ["transit-out/64/ours-ipip-5: 1021 guest instructions per packet, stored 1000"]
        );
        let gone = regressions(&stored, &figures(&[cost("ours-ipip-5", 900.0)]));
        assert_eq!(gone, ["transit-out/64/ours-none-5: not measured any more"]);
    }

    #[test]
    fn what_is_less_stable_may_grow_by_more() {
        let stage = |stage: &str, load: &str, instructions| {
            let of =
                Cost { stage: stage.to_owned(), load: load.to_owned(), ..cost("ours-ipip-5", instructions) };
            figures(&[of])
        };
        for (name, load) in [("lan-to-encrypted", "64"), ("masquerade", "new-flow")] {
            let stored = stage(name, load, 1000.0);
            assert!(regressions(&stored, &stage(name, load, 1050.0)).is_empty());
            assert_eq!(regressions(&stored, &stage(name, load, 1051.0)).len(), 1);
        }
        assert_eq!(
            regressions(&stage("masquerade", "64", 1000.0), &stage("masquerade", "64", 1021.0)).len(),
            1
        );
        let writes = |value| {
            let (name, unit) = ("control/100/map writes".to_owned(), "writes".to_owned());
            [Figure { name, unit, value, baseline: None, ratio: None }]
        };
        assert!(regressions(&writes(1000.0), &writes(1102.0)).is_empty(), "two more may fall beside it");
        assert_eq!(regressions(&writes(1000.0), &writes(1103.0)).len(), 1);
    }
}

//! Absolute limits of instructions per packet. What is stored may grow with each `--update`; these do not.

use super::figures::{Figure, PER_PACKET};

/// What packets of a stage may cost at most.
struct Limit {
    stage: &'static str,
    /// Loads for which it holds; none means all that are counted per packet.
    loads: &'static [&'static str],
    instructions: f64,
    /// Whether it is for `--host-routing=auto`.
    host_routing: bool,
    /// Where the limit is from.
    reason: &'static str,
}

const RELAY: &str = "limit of docs/design/relay.md";
const GOAL: &str = "goal of docs/design/performance.md";

const fn limit(stage: &'static str, instructions: f64, reason: &'static str) -> Limit {
    Limit { stage, loads: &[], instructions, host_routing: false, reason }
}

/// Of the smallest packets, for which most goals are.
const SMALL: &[&str] = &["64"];

/// The limits, for the default encapsulation in meshes of any size.
const LIMITS: [Limit; 10] = [
    limit("relay", 1500.0, RELAY),
    limit("relay-alone", 1500.0, RELAY),
    limit("relay-v6", 1500.0, RELAY),
    limit("relay-v6-alone", 1500.0, RELAY),
    limit("transit-out", 1050.0, GOAL),
    Limit { loads: SMALL, ..limit("transit-in", 2300.0, GOAL) },
    Limit { loads: SMALL, ..limit("encapsulation", 5500.0, GOAL) },
    Limit { loads: SMALL, host_routing: true, ..limit("encapsulation", 3000.0, GOAL) },
    Limit { loads: &["64", "1372"], ..limit("delivery", 5000.0, GOAL) },
    Limit { loads: &["new-flow"], ..limit("masquerade", 7500.0, GOAL) },
];

impl Limit {
    fn is_of(&self, figure: &Figure) -> bool {
        let parts: Vec<_> = figure.name.splitn(3, '/').collect();
        let &[stage, load, variant] = parts.as_slice() else { return false };
        let has_host_routing = variant.ends_with("-host-routing");
        let is_default = variant.starts_with("ours-ipip-") && has_host_routing == self.host_routing;
        let is_load = figure.unit == PER_PACKET && (self.loads.is_empty() || self.loads.contains(&load));
        stage == self.stage && is_default && is_load
    }
}

/// The figures that exceed their limit; one line each.
pub fn exceeded(figures: &[Figure]) -> Vec<String> {
    let all = LIMITS.iter().flat_map(|limit| {
        let beyond = figures.iter().filter(|figure| limit.is_of(figure) && figure.value > limit.instructions);
        beyond.map(|Figure { name, unit, value, .. }| {
            format!("{name}: {value} {unit}, at most {} ({})", limit.instructions, limit.reason)
        })
    });
    all.collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    fn figure(name: &str, value: f64) -> Figure {
        Figure { name: name.to_owned(), unit: PER_PACKET.to_owned(), value, baseline: None, ratio: None }
    }

    #[test]
    fn what_exceeds_its_limit_is_named_with_the_reason() {
        let figures = [
            figure("relay/64/ours-ipip-100", 1500.0),
            figure("relay-v6-alone/1372/ours-ipip-5", 1501.0),
            figure("transit-out/64/ours-none-5", 1675.0),
            figure("masquerade/new-flow/ours-ipip-5-host-routing", 7542.0),
            figure("delivery/new-flow/ours-ipip-5", 6057.0),
            figure("encapsulation/64/ours-ipip-5-leaders-1", 5455.0),
            figure("encapsulation/64/ours-ipip-5-host-routing", 3001.0),
        ];
        assert_eq!(
            exceeded(&figures),
            [
                "relay-v6-alone/1372/ours-ipip-5: 1501 guest instructions per packet, at most 1500 (limit of \
                 docs/design/relay.md)",
                "encapsulation/64/ours-ipip-5-host-routing: 3001 guest instructions per packet, at most 3000 (goal of \
                 docs/design/performance.md)",
            ]
        );
    }

    #[test]
    fn no_stored_figure_exceeds_its_limit_and_each_limit_has_figures() {
        let stored = crate::bench::stored(|_| true).unwrap();
        assert_eq!(exceeded(&stored), [""; 0]);
        for limit in &LIMITS {
            assert!(stored.iter().any(|figure| limit.is_of(figure)), "nothing is stored of {}", limit.stage);
        }
    }
}

//! The tables and the plot of docs/benchmark-figures.md, made from the figures.

use std::fmt::Write as _;

use anyhow::{Context as _, Result};

use super::figures::Cost;

/// The tables are between these two lines.
const BEGIN: &str = "<!-- figures: made by cargo xtask bench -->";
const END: &str = "<!-- /figures -->";

/// Stages in the order in which packets meet them, with their titles.
const STAGES: [(&str, &str); 11] = [
    ("encapsulation", "Pod to the network, on a node that does not lead"),
    ("transit-out", "Leader, network to the WireGuard device, encryption not counted"),
    ("lan-to-encrypted", "Leader, network to encrypted packet on the network"),
    ("transit-in", "Leader, decrypted packet to the network"),
    ("relay", "Relay, ciphertext from one end of a pair on to the other"),
    ("relay-alone", "Relay, each packet 120 ms after the one before"),
    ("relay-v6", "Relay, over IPv6"),
    ("relay-v6-alone", "Relay, over IPv6, each packet 120 ms after the one before"),
    ("delivery", "Network to the pod, on a node that does not lead"),
    ("masquerade", "Pod to an address outside of the mesh"),
    ("unmasquerade", "The answer from there, to the pod"),
];

const LOADS: [&str; 5] = ["64", "1372", "tcp-kb", "tcp-super-kb", "new-flow"];

/// Two lines of the document that enclose generated text.
pub type Marks = (&'static str, &'static str);

/// Replaces the tables in `text`.
pub fn with_tables(text: &str, machine: &str, costs: &[Cost]) -> Result<String> {
    between(text, (BEGIN, END), &format!("{machine}\n{}", tables(costs)))
}

/// Replaces the text between two marks.
pub fn between(text: &str, (begin, end): Marks, new: &str) -> Result<String> {
    let (before, rest) = text.split_once(begin).with_context(|| format!("no line {begin}"))?;
    let (_, after) = rest.split_once(end).with_context(|| format!("no line {end}"))?;
    Ok(format!("{before}{begin}\n{new}{end}{after}"))
}

fn tables(costs: &[Cost]) -> String {
    let mut text = String::new();
    for (stage, title) in STAGES {
        let _ = write!(
            text,
            "\n### {title}\n\n`{stage}`\n\n| variant | 64 bytes | 1,372 bytes | 1,024 bytes of TCP | the same in GSO packets | first packets of flows |\n|---|--:|--:|--:|--:|--:|\n"
        );
        for variant in variants(costs, stage) {
            let _ = write!(text, "| {variant} |");
            for load in LOADS {
                match value(costs, variant, stage, load) {
                    Some(value) => {
                        let _ = write!(text, " {} |", grouped(value));
                    }
                    None => text += " |",
                }
            }
            text += "\n";
        }
    }
    text + "\n"
}

fn variants<'a>(costs: &'a [Cost], stage: &str) -> Vec<&'a str> {
    let mut variants: Vec<&str> = Vec::new();
    for cost in costs.iter().filter(|cost| cost.stage == stage) {
        if !variants.contains(&cost.variant.as_str()) {
            variants.push(&cost.variant);
        }
    }
    variants
}

fn value(costs: &[Cost], variant: &str, stage: &str, load: &str) -> Option<f64> {
    let found = costs.iter().find(|cost| cost.variant == variant && cost.stage == stage && cost.load == load);
    found.map(|cost| cost.instructions)
}

/// Groups digits: 12345.6 becomes `12,346`.
pub fn grouped(value: f64) -> String {
    let digits = format!("{value:.0}");
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) && !text.ends_with('-') {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Bar chart of four stages at 64 bytes, on a logarithmic scale.
pub fn plot(costs: &[Cost]) -> String {
    let plotted = STAGES.into_iter().filter(|(stage, _)| {
        ["encapsulation", "transit-out", "lan-to-encrypted", "masquerade"].contains(stage)
    });
    let groups: Vec<_> = plotted
        .map(|(stage, title)| {
            let bars = variants(costs, stage).into_iter().filter_map(|variant| {
                let value = value(costs, variant, stage, "64")?;
                let colour = match variant.split('-').next() {
                    Some("ours") => "#2a7",
                    Some("kilo") => "#c63",
                    _ => "#888",
                };
                Some(Bar { name: variant.to_owned(), value, text: grouped(value), colour })
            });
            (format!("{title}, 64 bytes"), bars.collect())
        })
        .collect();
    bars("Guest instructions per packet, logarithmic from 1,000 to 1,000,000", (3.0, 6.0), &groups)
}

/// One bar of a chart.
pub struct Bar {
    /// Label to its left.
    pub name: String,
    /// Its length.
    pub value: f64,
    /// Label to its right.
    pub text: String,
    /// Its colour.
    pub colour: &'static str,
}

/// Titled groups of bars, on a logarithmic scale from 10^`from` to 10^`to`.
pub fn bars(title: &str, (from, to): (f64, f64), groups: &[(String, Vec<Bar>)]) -> String {
    const WIDTH: f64 = 860.0;
    const LEFT: f64 = 170.0;
    const ROW: f64 = 18.0;
    let x = |value: f64| {
        let decades = value.max(10_f64.powf(from)).log10() - from;
        LEFT + decades / (to - from) * (WIDTH - LEFT - 70.0)
    };
    let mut body = String::new();
    let mut y = 20.0;
    for (title, bars) in groups {
        let _ = writeln!(body, "<text x=\"8\" y=\"{y}\" font-weight=\"bold\">{title}</text>");
        y += ROW;
        for Bar { name, value, text, colour } in bars {
            let _ = writeln!(
                body,
                "<text x=\"{}\" y=\"{y}\" text-anchor=\"end\">{name}</text><rect x=\"{LEFT}\" y=\"{}\" width=\"{:.1}\" \
                 height=\"12\" fill=\"{colour}\"/><text x=\"{:.1}\" y=\"{y}\">{text}</text>",
                LEFT - 8.0,
                y - 10.0,
                x(*value) - LEFT,
                x(*value) + 6.0,
            );
            y += ROW;
        }
        y += ROW;
    }
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{y}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <title>{title}</title>\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n{body}</svg>\n"
    )
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn tables_replace_what_stood_between_the_marks_and_nothing_else() {
        let costs = [Cost {
            variant: "plain".to_owned(),
            stage: "transit-out".to_owned(),
            load: "64".to_owned(),
            instructions: 4321.4,
        }];
        let text = format!("before\n{BEGIN}\nold\n{END}\nafter\n");
        let now = with_tables(&text, "machine", &costs).unwrap();
        assert!(
            now.starts_with(&format!("before\n{BEGIN}\nmachine\n"))
                && now.ends_with(&format!("{END}\nafter\n"))
        );
        assert!(now.contains("| plain | 4,321 | | | | |") && !now.contains("old"), "{now}");
        assert!(with_tables("no marks", "", &costs).is_err());
    }

    #[test]
    fn thousands_are_grouped() {
        let texts = [0.0, 999.6, 1000.0, 1_234_567.0, -123.0, -1234.0].map(grouped);
        assert_eq!(texts, ["0", "1,000", "1,000", "1,234,567", "-123", "-1,234"]);
    }
}

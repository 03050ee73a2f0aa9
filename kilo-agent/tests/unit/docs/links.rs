//! Links and pictures of all pages lead to an existing file, and to an existing heading in it.

use std::{collections::BTreeSet, fs, path::Path};

use super::{every_page, root};

/// The anchor that GitHub and mdBook derive from a heading: lower case, hyphens for spaces, other
/// punctuation removed.
fn anchor(heading: &str) -> String {
    let text = heading.replace("](", "\u{0}");
    // Only the text of a link is shown.
    let text: String = text
        .split('\u{0}')
        .enumerate()
        .map(|(at, part)| if at == 0 { part } else { after_target(part) })
        .collect();
    let kept = text.to_lowercase();
    let kept = kept.chars().filter(|letter| letter.is_alphanumeric() || matches!(letter, ' ' | '-' | '_'));
    kept.map(|letter| if letter == ' ' { '-' } else { letter }).collect()
}

fn after_target(part: &str) -> &str {
    part.split_once(')').map_or("", |(_, rest)| rest)
}

/// All anchors of a page; the second of two equal headings ends with `-1`.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (_, heading) in outside_fences(text).into_iter().filter_map(|(at, line)| {
        let title = line.trim_start_matches('#');
        (title.len() < line.len()).then(|| title.strip_prefix(' ').map(|title| (at, title)))?
    }) {
        let first = anchor(heading.trim());
        let other =
            (1..=found.len()).map(|number| format!("{first}-{number}")).find(|name| !found.contains(name));
        if !found.insert(first) {
            found.extend(other);
        }
    }
    found
}

/// Lines outside code fences, with their numbers.
fn outside_fences(text: &str) -> Vec<(usize, &str)> {
    let mut inside = false;
    let lines = text.lines().enumerate().filter(|(_, line)| {
        let fence = line.trim_start().starts_with("```");
        inside ^= fence;
        !inside && !fence
    });
    lines.map(|(at, line)| (at + 1, line)).collect()
}

/// Targets of links and pictures in a line, and of a definition `[name]: target`.
fn targets(line: &str) -> Vec<&str> {
    let code_less: Vec<_> = line.split('`').step_by(2).collect();
    let mut found: Vec<&str> =
        line.split("](").skip(1).filter_map(|rest| rest.split([')', ' ']).next()).collect();
    // A link in code is an example.
    found.retain(|target| {
        code_less.iter().any(|part| part.contains(&format!("]({target}")))
            || line.contains(&format!("`]({target}"))
    });
    if let Some((name, target)) = line.split_once("]: ")
        && name.starts_with('[')
    {
        found.push(target.trim());
    }
    found
}

#[test]
fn every_link_leads_to_a_file_and_a_heading() {
    let mut wrong = Vec::new();
    let mut links = 0;
    for (path, text) in every_page() {
        for (number, line) in outside_fences(&text) {
            for target in targets(line).into_iter().filter(|target| !target.contains("://")) {
                links += 1;
                let (file, wanted) = target.split_once('#').unwrap_or((target, ""));
                let there = if file.is_empty() { path.clone() } else { path.parent().unwrap().join(file) };
                let place = path.strip_prefix(root()).unwrap_or(&path).display();
                if !there.exists() {
                    wrong.push(format!("{place}:{number}: {target}: there is no such file"));
                } else if !wanted.is_empty() && !has_anchor(&there, wanted) {
                    wrong.push(format!("{place}:{number}: {target}: the page has no such heading"));
                }
            }
        }
    }
    assert!(links > 200, "only {links} links were found");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn has_anchor(page: &Path, wanted: &str) -> bool {
    fs::read_to_string(page).is_ok_and(|text| anchors(&text).contains(wanted))
}

#[test]
fn every_page_is_in_the_sites_summary_and_once() {
    let docs = root().join("docs");
    let summary = fs::read_to_string(docs.join("SUMMARY.md")).unwrap();
    for (path, _) in every_page() {
        let Ok(name) = path.strip_prefix(&docs) else { continue };
        let name = name.display().to_string();
        let wanted = usize::from(name != "SUMMARY.md");
        assert_eq!(summary.matches(&format!("]({name})")).count(), wanted, "{name} in docs/SUMMARY.md");
    }
}

#[test]
fn anchors_are_those_of_the_renderers() {
    let page =
        "# A (b) `c`\n## One two\n```\n# none\n```\n## One two\n### [A link](x.md) more\n#### Leader's\n";
    let found: Vec<_> = anchors(page).into_iter().collect();
    assert_eq!(found, ["a-b-c", "a-link-more", "leaders", "one-two", "one-two-1"].map(str::to_owned));
}

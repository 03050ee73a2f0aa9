//! Annotations with our prefix that nobody reads, such as misspelt ones.

use std::{collections::BTreeMap, ops::Bound};

use super::{ANNOTATIONS, PREFIX, value::excerpt};

/// Written by early versions of Kilo; an old Node object may still have it.
const OF_THE_PAST: &str = "kilo.squat.ai/external-ip";

/// Similarity from which a known name is what the operator may have meant; clap suggests flags from here on, too.
const SIMILAR: f64 = 0.7;

/// Reports each annotation with our prefix that is not in the table, of whose names `known` are present.
pub(super) fn report(present: &BTreeMap<String, String>, known: usize, problems: &mut Vec<String>) {
    let ours = || {
        let from = present.range::<str, _>((Bound::Included(PREFIX), Bound::Unbounded));
        from.map(|(name, _)| name.as_str()).take_while(|name| name.starts_with(PREFIX))
    };
    // Nodes rarely have others, and each is read with each of its heartbeats.
    if ours().count() == known {
        return;
    }
    let is_known = |name: &str| name == OF_THE_PAST || ANNOTATIONS.iter().any(|row| row.name == name);
    problems.extend(ours().filter(|name| !is_known(name)).map(|name| {
        let question = meant(name).map(|meant| format!("; did you mean {meant}?")).unwrap_or_default();
        format!("annotation {} is not known{question}", excerpt(name))
    }));
}

/// The known annotation whose name is most like this one, without the prefix.
fn meant(name: &str) -> Option<&'static str> {
    let name = name.strip_prefix(PREFIX)?;
    // So it was called in early versions of Kilo.
    if name == "force-external-ip" {
        return Some("force-endpoint");
    }
    let known = ANNOTATIONS.iter().filter_map(|row| row.name.strip_prefix(PREFIX));
    let rated = known.map(|known| (strsim::jaro(name, known), known));
    let best = rated.max_by(|(one, _), (other, _)| one.total_cmp(other))?;
    (best.0 > SIMILAR).then_some(best.1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objects::{CheckedIn, Node, annotations::read};

    fn problems(names: &[&str]) -> Vec<String> {
        let (mut node, mut problems) = (CheckedIn { node: Node::default(), last_seen: 0 }, Vec::new());
        let present = names.iter().map(|name| ((*name).to_owned(), String::new())).collect();
        read(&present, &mut node, &mut problems);
        problems
    }

    #[test]
    fn a_misspelt_annotation_is_named_with_what_may_be_meant() {
        for (misspelt, meant) in [
            ("leadr", "leader"),
            ("gatway", "gateway"),
            ("persistent-keep-alive", "persistent-keepalive"),
            ("allowed-location-ip", "allowed-location-ips"),
            ("force-external-ip", "force-endpoint"),
            ("Location", "location"),
        ] {
            let wanted = format!("annotation kilo.squat.ai/{misspelt} is not known; did you mean {meant}?");
            assert_eq!(problems(&[&format!("{PREFIX}{misspelt}"), "kilo.squat.ai/leader"]), [wanted]);
        }
        assert_eq!(problems(&["kilo.squat.ai/zzz"]), ["annotation kilo.squat.ai/zzz is not known"]);
        let long = problems(&[&format!("{PREFIX}{}", "x".repeat(10_000))]);
        assert!(long.len() == 1 && long.concat().len() < 1000, "{long:?}");
    }

    #[test]
    fn what_kilo_and_others_write_is_no_problem() {
        let known: Vec<_> = ANNOTATIONS.iter().map(|row| row.name).collect();
        let unknown = problems(&known).into_iter().filter(|problem| problem.contains("not known"));
        assert_eq!(unknown.collect::<Vec<_>>(), Vec::<String>::new());
        let others = ["example.com/leadr", "kilo.squat.aia/x", "kilo.squat.ai", OF_THE_PAST];
        assert_eq!(problems(&others), Vec::<String>::new());
    }
}

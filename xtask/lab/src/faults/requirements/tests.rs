//! Every fault has a requirement, every requirement is covered, and each test that one names exists.

use std::{fs, path::Path};

use super::{super::list::FAULTS, *};

#[test]
fn requirements_are_numbered_from_one_without_a_gap() {
    let numbers: Vec<u8> = REQUIREMENTS.iter().map(|requirement| requirement.number).collect();
    assert_eq!(numbers, (1..=76).collect::<Vec<_>>());
}

#[test]
fn every_fault_of_the_lab_is_of_a_requirement_and_every_requirement_is_covered() {
    for fault in FAULTS {
        let is_listed = REQUIREMENTS.iter().any(|requirement| requirement.number == fault.requirement);
        assert!(is_listed, "{} is of no requirement: there is no {}", fault.id, fault.requirement);
    }
    for requirement in REQUIREMENTS {
        let injected = FAULTS.iter().any(|fault| fault.requirement == requirement.number);
        let Requirement { number, fault, tests, .. } = requirement;
        assert!(injected || !tests.is_empty(), "nothing covers requirement {number}: {fault}");
    }
}

#[test]
fn every_test_that_is_named_exists() {
    let root = crate::workspace_root();
    let mut sources = String::new();
    for directory in ["kilo-agent", "kilo-common/src", "xtask/lab/src", "xtask/src/cluster"] {
        read(&root.join(directory), &mut sources);
    }
    for name in REQUIREMENTS.iter().flat_map(|requirement| requirement.tests) {
        let check = ["lab: ", "cluster: "].iter().find_map(|part| name.strip_prefix(part));
        let wanted = match (check, name.rsplit_once("::")) {
            (Some(check), _) => format!("(\"{check}\", "),
            (None, Some((_, test))) => format!("fn {test}("),
            (None, None) => (*name).to_owned(),
        };
        assert!(
            sources.contains(&wanted) || sources.contains(&wanted.replace("\", ", "\",")),
            "no test is called {name}"
        );
    }
}

fn read(directory: &Path, sources: &mut String) {
    for entry in fs::read_dir(directory).unwrap().flatten() {
        let path = entry.path();
        if path.is_dir() {
            read(&path, sources);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(path).unwrap();
            // A check's name may stand on a line of its own.
            *sources += &text.replace("(\n        \"", "(\"");
        }
    }
}

//! Reads the output of a test program, test by test.

use crate::report::{Outcome, TestOutcome};

/// Collects the outcomes of one program's tests as its lines arrive.
#[derive(Debug)]
pub struct Reader {
    part: &'static str,
    target: String,
    running: Option<String>,
    /// Why the running test says it is skipped.
    skip: Option<String>,
    /// When the previous test ended, in seconds: a silent test prints only one line, at its end.
    last: f64,
    outcomes: Vec<TestOutcome>,
}

impl Reader {
    /// A reader that has read nothing of the program `target` yet.
    pub fn new(part: &'static str, target: &str) -> Self {
        Self { part, target: target.to_owned(), running: None, skip: None, last: 0.0, outcomes: Vec::new() }
    }

    /// Takes a line that arrived `at` seconds after the start; returns what to print instead.
    pub fn line(&mut self, line: &str, at: f64) -> String {
        // "test NAME ... " and, perhaps lines later, "ok" or "FAILED".
        let mut rest = line;
        if let Some((name, after)) = line.strip_prefix("test ").and_then(|line| line.split_once(" ... ")) {
            self.running = Some(name.trim_end_matches(" - should panic").to_owned());
            rest = after;
        }
        if let Some((_, reason)) = rest.split_once("kilo-skip: ") {
            self.skip = Some(reason.to_owned());
        }
        let ended = rest.trim();
        let result = match ended {
            "ok" => Some(Outcome::Passed),
            "FAILED" => Some(Outcome::Failed),
            _ if ended.starts_with("ignored") => Some(Outcome::Skipped),
            _ => None,
        };
        let Some((result, name)) = result.zip(self.running.take_if(|_| result.is_some())) else {
            return format!("    {line}");
        };
        let name = format!("{}::{name}", self.target);
        let (result, said) = match self.skip.take() {
            Some(reason) if result == Outcome::Passed => {
                (Outcome::Skipped, format!("SKIPPED {name}: {reason}"))
            }
            _ => (result, format!("test {name} ... {result}")),
        };
        let seconds = at - std::mem::replace(&mut self.last, at);
        self.push(name, result, seconds);
        said
    }

    /// The outcomes once `program` has ended. When it ended badly (`how`) without a failed test, one more
    /// failure says so.
    pub fn end(mut self, is_success: bool, program: &str, how: &str) -> Vec<TestOutcome> {
        if !is_success && !self.outcomes.iter().any(TestOutcome::is_failed) {
            println!("test {program} ... failed ({how})");
            self.push(format!("{program} ends properly"), Outcome::Failed, 0.0);
        }
        self.outcomes
    }

    fn push(&mut self, name: String, outcome: Outcome, seconds: f64) {
        self.outcomes.push(TestOutcome::new(self.part, name, outcome, seconds));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_in_namespaces_print_their_name_twice_and_count_once() {
        let mut reader = Reader::new("bpf", "bpf");
        let lines = [
            (0.1, "running 3 tests"),
            (0.5, "test quiet ... ok"),
            (0.6, "test apart ... "),
            (0.7, "running 1 test"),
            (0.8, "test apart ... kilo-skip: this kernel has no VLAN"),
            (1.5, "ok"),
            (1.5, ""),
            (1.6, "ok"),
            (2.0, "test bad ... FAILED"),
        ];
        for (at, line) in lines {
            reader.line(line, at);
        }
        let said: Vec<_> = reader
            .end(false, "bpf", "")
            .into_iter()
            .map(|it| (it.name, it.outcome, (it.seconds * 10.0).round() / 10.0))
            .collect();
        let wanted = [
            ("quiet", Outcome::Passed, 0.5),
            ("apart", Outcome::Skipped, 1.0),
            ("bad", Outcome::Failed, 0.5),
        ];
        let wanted = wanted.map(|(name, outcome, seconds)| (format!("bpf::{name}"), outcome, seconds));
        assert_eq!(said, wanted);
    }

    #[test]
    fn a_program_that_dies_has_failed() {
        let said = Reader::new("bpf", "bpf").end(false, "bpf", "signal 11");
        assert_eq!((said.len(), said[0].outcome), (1, Outcome::Failed));
        assert!(Reader::new("bpf", "bpf").end(true, "bpf", "").is_empty());
    }
}

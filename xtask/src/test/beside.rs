//! Parts that run in a process beside others: all of them mostly wait.

use std::{
    collections::BTreeMap,
    fs,
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::Instant,
};

use anyhow::{Context as _, Result};

use super::{Part, outcome, read_outcomes, unexplained};
use crate::{
    command::own_program,
    report::{Outcome, TestOutcome},
    workspace_root,
};

/// A running process, and its outcomes' file.
pub struct Beside {
    /// Counted as failed when the process leaves no outcomes.
    part: Part,
    /// Label for the output: the parts, or what else runs.
    name: String,
    process: Child,
    outcomes: tempfile::NamedTempFile,
    log: PathBuf,
    started: Instant,
}

impl Beside {
    /// Random faults, for ten minutes.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn soak() -> Result<Self> {
        let this = own_program()?;
        let mut command = Command::new(&this);
        command
            .args(["lab", "soak", "--time", "10m", "--name", "kilo-soak", "--bin"])
            .arg(this.parent().context("no directory")?)
            .arg("--outcomes");
        Self::start(Part::Soak, Part::Soak.label().to_owned(), command)
    }

    /// Starts these parts, one after the other, with these variables; everything must be built already.
    ///
    /// # Errors
    /// When the process cannot be started.
    pub fn parts(parts: &[Part], environment: &BTreeMap<String, PathBuf>) -> Result<Self> {
        let labels: Vec<_> = parts.iter().map(|part| part.label()).collect();
        let mut command = Command::new(own_program()?);
        command.arg("test").args(&labels).envs(environment).arg("--report");
        Self::start(*parts.first().context("no parts")?, labels.join("-"), command)
    }

    /// Starts the command, with the outcomes' file as its last argument.
    fn start(part: Part, name: String, mut command: Command) -> Result<Self> {
        let outcomes = tempfile::NamedTempFile::new()?;
        let log = workspace_root().join(format!("target/{name}.log"));
        let output = fs::File::create(&log).with_context(|| log.display().to_string())?;
        let process = command
            .arg(outcomes.path())
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn()
            .with_context(|| name.clone())?;
        println!("xtask: {name} runs beside what follows and writes to {}", log.display());
        Ok(Self { part, name, process, outcomes, log, started: Instant::now() })
    }

    /// Waits for it, prints what it wrote, and returns its outcomes.
    pub fn join(mut self) -> Vec<TestOutcome> {
        println!("\n== {}, to its end", self.name);
        let status = self.process.wait();
        println!("{}", fs::read_to_string(&self.log).unwrap_or_default());
        let mut outcomes = read_outcomes(self.outcomes.path()).unwrap_or_else(|error| {
            println!("{error:#}");
            vec![outcome(self.part, "the part ends properly", Outcome::Failed, self.started)]
        });
        if let Ok(status) = status {
            outcomes.extend(unexplained(self.part, &self.name, status, &outcomes, self.started));
        }
        println!("== {}: {:.0} s", self.name, self.started.elapsed().as_secs_f32());
        outcomes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Outcomes of a process beside the tests that runs this script, with the outcomes' file as `$0`.
    fn left_by(name: &str, script: &str) -> Vec<(String, Outcome)> {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        let beside = Beside::start(Part::Bpf, format!("test-{name}"), command).unwrap();
        let log = beside.log.clone();
        let outcomes = beside.join();
        fs::remove_file(log).unwrap();
        outcomes.into_iter().map(|outcome| (outcome.part, outcome.outcome)).collect()
    }

    #[test]
    fn outcomes_keep_their_part_and_a_process_without_any_has_failed() {
        let wrote =
            r#"echo '[{"part": "api", "name": "x", "outcome": "passed", "seconds": 1}]' > "$0"; exit 1"#;
        let pair = |part: &str, outcome| (part.to_owned(), outcome);
        // So does one that failed without saying why.
        assert_eq!(left_by("wrote", wrote), [pair("api", Outcome::Passed), pair("bpf", Outcome::Failed)]);
        assert_eq!(left_by("well", &wrote.replace("exit 1", "exit 0")), [pair("api", Outcome::Passed)]);
        assert_eq!(left_by("silent", "exit 0"), [pair("bpf", Outcome::Failed)]);
    }
}

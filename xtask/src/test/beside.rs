//! A long part in a process of its own, beside parts that wait most of the time.

use std::{
    fs,
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::Instant,
};

use anyhow::{Context as _, Result};

use super::{Part, outcome, read_outcomes};
use crate::{command::own_program, report::TestOutcome, rotation::Kernel, workspace_root};

/// What runs, and where it writes.
pub struct Beside {
    part: Part,
    process: Child,
    outcomes: tempfile::NamedTempFile,
    log: PathBuf,
    started: Instant,
}

impl Beside {
    /// Faults by chance, for ten minutes.
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
        Self::start(Part::Soak, command)
    }

    /// The tests of these kernels.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn vm(kernels: &[Kernel]) -> Result<Self> {
        let mut command = Command::new(own_program()?);
        command.args(["test", "vm"]);
        for kernel in kernels {
            command.args(["--kernel", kernel.label()]);
        }
        command.arg("--report");
        Self::start(Part::Vm, command)
    }

    /// The command's last argument will be the file that it writes outcomes to.
    fn start(part: Part, mut command: Command) -> Result<Self> {
        let outcomes = tempfile::NamedTempFile::new()?;
        let log = workspace_root().join(format!("target/{}.log", part.label()));
        let output = fs::File::create(&log).with_context(|| log.display().to_string())?;
        let process = command
            .arg(outcomes.path())
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn()
            .context(part.label())?;
        println!("xtask: goes on beside what follows; it writes to {}", log.display());
        Ok(Self { part, process, outcomes, log, started: Instant::now() })
    }

    /// Waits for it, prints what it wrote, and returns its outcomes.
    pub fn join(mut self) -> Vec<TestOutcome> {
        println!("\n== {}, to its end", self.part.label());
        // Failures are in the file.
        let _ = self.process.wait();
        println!("{}", fs::read_to_string(&self.log).unwrap_or_default());
        let outcomes = read_outcomes(self.outcomes.path(), self.part).unwrap_or_else(|error| {
            println!("{error:#}");
            vec![outcome(self.part, "the part ends properly", "failed", self.started)]
        });
        println!("== {}: {:.0} s", self.part.label(), self.started.elapsed().as_secs_f32());
        outcomes
    }
}

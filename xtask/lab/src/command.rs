//! Runs programs; errors include the end of their output.

use std::{
    env,
    path::PathBuf,
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, bail};

fn describe(command: &Command) -> String {
    let words: Vec<_> = std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|word| word.to_string_lossy().into_owned())
        .collect();
    words.join(" ")
}

/// Runs to the end; what the program printed is shown only when it fails.
pub fn run(command: &mut Command) -> Result<()> {
    output(command).map(drop)
}

/// Runs to the end and returns standard output.
pub fn output(command: &mut Command) -> Result<String> {
    let what = describe(command);
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("{program} cannot be run; is it installed?"))?;
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() {
        return Ok(stdout);
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    let said: Vec<_> = stdout.lines().chain(stderr.lines()).collect();
    let last = said[said.len().saturating_sub(40)..].join("\n");
    bail!("{what}: {}\n{last}", output.status)
}

/// Runs to the end with the terminal's own input and output.
pub fn show(command: &mut Command) -> Result<()> {
    let what = describe(command);
    let status = command.status().with_context(|| format!("{what} cannot be run"))?;
    if !status.success() {
        bail!("{what}: {status}");
    }
    Ok(())
}

/// Cargo's directory of downloads and installed programs.
///
/// # Errors
/// When neither `CARGO_HOME` nor `HOME` is set.
pub fn cargo_home() -> Result<PathBuf> {
    if let Some(directory) = env::var_os("CARGO_HOME") {
        return Ok(PathBuf::from(directory));
    }
    Ok(PathBuf::from(env::var_os("HOME").context("neither CARGO_HOME nor HOME is set")?).join(".cargo"))
}

/// The directory of the pinned Rust toolchain.
///
/// # Errors
/// When rustc cannot be run.
pub fn rust_sysroot() -> Result<PathBuf> {
    Ok(PathBuf::from(output(Command::new("rustc").args(["--print", "sysroot"]))?.trim()))
}

/// This program where it was built: a build may have replaced the running one.
///
/// # Errors
/// When the running program has no path.
pub fn own_program() -> Result<PathBuf> {
    let this = env::current_exe()?;
    Ok(this.parent().context("no directory of this program")?.join("xtask"))
}

//! Runs a program of the host's firewall (`nft`, `iptables`) and hands it its input.

use std::{io, process::Stdio};

use tokio::{io::AsyncWriteExt as _, process::Command};

/// Why a program returned no output.
#[derive(Debug)]
pub(super) enum ProgramError {
    /// It is missing or cannot be run.
    Run(io::Error),
    /// It ended with an error; this is its standard error.
    Refused(String),
}

/// Runs a program until it exits; returns its standard output.
pub(super) async fn run(
    program: &str,
    arguments: &[&str],
    input: Option<&str>,
) -> Result<String, ProgramError> {
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(if input.is_some() { Stdio::piped() } else { Stdio::null() })
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(ProgramError::Run)?;
    if let (Some(mut stdin), Some(input)) = (child.stdin.take(), input) {
        match stdin.write_all(input.as_bytes()).await {
            // It failed before it had read everything: its standard error counts.
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => return Err(ProgramError::Run(error)),
            _ => {}
        }
    }
    let output = child.wait_with_output().await.map_err(ProgramError::Run)?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(ProgramError::Refused(String::from_utf8_lossy(&output.stderr).trim().to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_a_program_says_counts_though_it_has_not_read_its_input() {
        let input = "x".repeat(1 << 20);
        let refused = run("sh", &["-c", "exec <&-; echo no >&2; exit 1"], Some(&input)).await;
        assert!(matches!(&refused, Err(ProgramError::Refused(said)) if said == "no"), "{refused:?}");
        let missing = run("kilo-no-such-program", &[], None).await;
        assert!(matches!(&missing, Err(ProgramError::Run(error)) if error.kind() == io::ErrorKind::NotFound));
        assert_eq!(run("cat", &[], Some("yes")).await.unwrap(), "yes");
    }
}

//! Runs a program of the host's firewall (`nft`, `iptables`) and hands it its input.

use std::{io, process::Stdio, time::Duration};

use tokio::{io::AsyncWriteExt as _, process::Command, time::timeout};

/// How long a program may run. That is longer than `iptables` waits for the lock of the tables.
pub(super) const LIMIT: Duration = Duration::from_secs(15);

/// Why a program returned no output.
#[derive(Debug)]
pub(super) enum ProgramError {
    /// It is missing or cannot be run.
    Run(io::Error),
    /// It ended with an error; this is its standard error.
    Refused(String),
    /// It was killed: it had not ended within [`LIMIT`].
    Late,
}

/// Runs a program until it exits, but not longer than [`LIMIT`]; returns its standard output.
pub(super) async fn run(
    program: &str,
    arguments: &[&str],
    input: Option<&str>,
) -> Result<String, ProgramError> {
    run_within(LIMIT, program, arguments, input).await
}

async fn run_within(
    limit: Duration,
    program: &str,
    arguments: &[&str],
    input: Option<&str>,
) -> Result<String, ProgramError> {
    // Dropping the future kills the program.
    timeout(limit, run_to_end(program, arguments, input)).await.unwrap_or(Err(ProgramError::Late))
}

async fn run_to_end(program: &str, arguments: &[&str], input: Option<&str>) -> Result<String, ProgramError> {
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

    #[tokio::test]
    async fn a_program_that_does_not_end_is_killed() {
        let pid = std::env::temp_dir().join(format!("kilo-late-{}", std::process::id()));
        let script = format!("echo $$ > {}; exec sleep 600", pid.display());
        let late = run_within(Duration::from_secs(3), "sh", &["-c", &script], None).await;
        assert!(matches!(late, Err(ProgramError::Late)), "{late:?}");
        let command = format!("/proc/{}/cmdline", std::fs::read_to_string(&pid).unwrap().trim());
        std::fs::remove_file(&pid).unwrap();
        let is_gone = async {
            // A zombie has no command line.
            while std::fs::read(&command).is_ok_and(|line| !line.is_empty()) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(Duration::from_secs(20), is_gone).await.unwrap();
    }
}

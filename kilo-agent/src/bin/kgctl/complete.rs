//! Shell completion of values that only the kubeconfig or the API server know.

use std::{collections::BTreeSet, env, sync::mpsc, thread, time::Duration};

use clap_complete::{CompletionCandidate, engine::ArgValueCandidates, env::Shells};
use kilo_agent::backend::{
    Backend as _,
    file::FileBackend,
    kubernetes::{self, Access, read_once},
};
use kilo_common::drop_reasons::DropReason;
use kilo_core::{objects::Snapshot, settings::defaults};

/// A shell that waits longer feels broken.
const PATIENCE: Duration = Duration::from_millis(1500);
/// Environment variable set by the script that `kgctl completion` prints.
pub const VARIABLE: &str = "KGCTL_COMPLETE";

/// The completion script, which asks this program for candidates.
pub fn script(shell: clap_complete::Shell) -> std::io::Result<String> {
    let mut text = Vec::new();
    if let Some(shell) = Shells::builtins().completer(&shell.to_string()) {
        shell.write_registration(VARIABLE, "kgctl", "kgctl", "kgctl", &mut text)?;
    }
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// Candidates for `--context`.
pub fn contexts() -> ArgValueCandidates {
    ArgValueCandidates::new(|| candidates(kubernetes::names(&typed()).contexts))
}

/// Candidates for `--cluster`.
pub fn clusters() -> ArgValueCandidates {
    ArgValueCandidates::new(|| candidates(kubernetes::names(&typed()).clusters))
}

/// Candidates for `--user`.
pub fn users() -> ArgValueCandidates {
    ArgValueCandidates::new(|| candidates(kubernetes::names(&typed()).users))
}

/// Candidates for node names.
pub fn nodes() -> ArgValueCandidates {
    of_objects(|snapshot| snapshot.nodes.names().map(ToOwned::to_owned).collect())
}

/// Candidates for peer names.
pub fn peers() -> ArgValueCandidates {
    of_objects(|snapshot| snapshot.peers.keys().cloned().collect())
}

/// Candidates for locations.
pub fn locations() -> ArgValueCandidates {
    of_objects(|snapshot| {
        let names = snapshot.nodes.iter().map(|known| known.node.location.clone());
        names.filter(|name| !name.is_empty()).collect::<BTreeSet<_>>().into_iter().collect()
    })
}

/// Candidates for drop reasons, with descriptions.
pub fn reasons() -> ArgValueCandidates {
    ArgValueCandidates::new(|| {
        let reasons = DropReason::ALL.iter();
        reasons
            .map(|reason| CompletionCandidate::new(reason.label()).help(Some(reason.describe().into())))
            .collect()
    })
}

fn of_objects(pick: fn(&Snapshot) -> Vec<String>) -> ArgValueCandidates {
    ArgValueCandidates::new(move || candidates(snapshot().as_ref().map(pick).unwrap_or_default()))
}

fn candidates(names: Vec<String>) -> Vec<CompletionCandidate> {
    names.into_iter().map(CompletionCandidate::new).collect()
}

/// The API server flags of the command line typed so far.
fn typed() -> Access {
    access(&env::args().collect::<Vec<_>>())
}

/// The value that a flag has in a line.
fn value(line: &[String], flag: &str) -> Option<String> {
    line.iter().enumerate().find_map(|(at, word)| match word.strip_prefix(flag)? {
        "" => line.get(at + 1).cloned(),
        rest => rest.strip_prefix('=').map(ToOwned::to_owned),
    })
}

fn access(line: &[String]) -> Access {
    let value = |flag: &str| value(line, flag);
    Access {
        kubeconfig: value("--kubeconfig").map(Into::into),
        context: value("--context").filter(|name| !name.is_empty()),
        cluster: value("--cluster").filter(|name| !name.is_empty()),
        user: value("--user").filter(|name| !name.is_empty()),
        impersonate: value("--as"),
        impersonate_groups: Vec::new(),
    }
}

/// The objects; `None` if they do not arrive in time.
fn snapshot() -> Option<Snapshot> {
    let line: Vec<_> = env::args().collect();
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
        sender.send(runtime.block_on(read(&line))?).ok()
    });
    receiver.recv_timeout(PATIENCE).ok()
}

async fn read(line: &[String]) -> Option<Snapshot> {
    if let Some(directory) = value(line, "--backend-dir") {
        let backend = FileBackend::start(directory.as_ref(), defaults::TOPOLOGY_LABEL).await.ok()?;
        let snapshot = (**backend.watch().borrow()).clone();
        return Some(snapshot);
    }
    let (client, _) = kubernetes::connect(&access(line), None, PATIENCE).await.ok()?;
    let (nodes, peers) = tokio::try_join!(read_once::nodes(&client), read_once::peers(&client)).ok()?;
    Some(read_once::snapshot(nodes, peers, defaults::TOPOLOGY_LABEL))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn flags_of_the_line_so_far_lead_to_the_server() {
        let line = "kgctl -- kgctl status --kubeconfig=/a --context prod --user= --cluster";
        let line: Vec<_> = line.split(' ').map(ToOwned::to_owned).collect();
        let found = access(&line);
        assert_eq!(found.kubeconfig, Some("/a".into()));
        assert_eq!((found.context.as_deref(), found.user, found.cluster), (Some("prod"), None, None));
    }

    #[test]
    fn each_shell_has_a_script_that_asks_this_program() {
        use clap::ValueEnum as _;
        for shell in clap_complete::Shell::value_variants() {
            assert!(script(*shell).unwrap().contains(VARIABLE), "{shell}");
        }
    }
}

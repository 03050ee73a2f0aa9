//! Agents' logs during checks, including those of pods that a check deletes or replaces. A kubelet removes
//! a container's log with the container, so each is opened on its node's disk while it exists, and read
//! when the check has ended.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::Read as _,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use parking_lot::Mutex;

use crate::{cluster::Cluster, lab::wait};

/// Messages about an API server that is away, slow or restarting.
pub const AWAY: &[&str] = &[
    "API server unreachable",
    "the API server is unreachable",
    "the API server did not answer within",
    "(or the directory of --backend=file) has not answered within",
    "the API server answers 5",
    "agents contact the API server one after another",
    // One that has just started does not know all roles yet.
    "the API server refuses to list nodes and peers",
    "watch interrupted",
];
/// Messages caused by boots and by re-created nodes.
pub const BOOTS: &[&str] = &[
    // The agent that starts first leads briefly.
    "leads its location with the private endpoint",
    // The Node may be deleted before its agent ends, or appear after the agent has started.
    "check --hostname",
];
/// Messages caused when all pods of a node end, in whatever order the kubelet ends them.
pub const ENDED: &[&str] = &["does not exist, and --create-interface=false", "is gone or was replaced"];
/// Messages caused by a leader that goes away.
pub const LEADERS: &[&str] = &[
    "leadership changed",
    "leadership changed too often lately",
    "failed to mark the dead leader's Node",
    "failed to mark in the data path whether this node leads that one",
];
/// Messages caused by a node that becomes a location of its own, to relay.
pub const RELAY: &[&str] = &["leads its location with the private endpoint"];
/// Everything that an agent can say, where a check provokes it and looks at it itself, or Kilo's own program runs.
pub const ANYTHING: &[&str] = &[""];

/// Substrings of the messages that a check causes, by kind.
pub type Causes = &'static [&'static [&'static str]];
/// What a cluster causes that has just come up.
const COMES_UP: Causes = &[AWAY, BOOTS];

/// Interval between two scans for new logs; even a container that ends at once exists for longer.
const LOOKS: Duration = Duration::from_millis(200);
/// Directory of the logs on a node's disk.
const PODS: &str = "upper/var/log/pods";

/// An open log, and the incomplete line at its end.
struct Log {
    node: String,
    pod: String,
    file: File,
    begun: Vec<u8>,
}

/// Every log seen so far, by device and inode.
type Opened = BTreeMap<(u64, u64), Log>;

/// Logs of all agents, and the messages expected in them.
pub struct Logs {
    directories: Vec<(String, PathBuf)>,
    opened: Arc<Mutex<Opened>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    /// Messages that the previous check causes: a line may arrive late.
    caused: Causes,
}

impl Logs {
    /// Starts with the lines since the cluster came up. On a cluster that was already up, whose history is
    /// unknown, earlier lines do not count.
    pub fn start(cluster: &Cluster) -> Self {
        let of = |node: &crate::cluster::node::Node| (node.name().to_owned(), node.disk().join(PODS));
        let mut logs = Self::of(cluster.nodes.iter().map(of).collect());
        if cluster.ready_after.is_none() {
            // Lines that cannot be read now are read with the first check.
            let _ = logs.take();
        }
        logs
    }

    fn of(directories: Vec<(String, PathBuf)>) -> Self {
        let (opened, stop) = (Arc::new(Mutex::default()), Arc::new(AtomicBool::new(false)));
        let (shared, ended, places) = (Arc::clone(&opened), Arc::clone(&stop), directories.clone());
        let thread = std::thread::spawn(move || {
            while !ended.load(Ordering::Relaxed) {
                open(&places, &shared);
                wait::pace(LOOKS);
            }
        });
        Self { directories, opened, stop, thread: Some(thread), caused: COMES_UP }
    }

    /// Ends a check that causes such lines. Returns the number of lines; fails on warnings that neither
    /// this check nor the previous one causes. After a check that causes anything, lines that arrive late are
    /// those of a cluster that has just come up.
    pub fn ended(&mut self, causes: Causes) -> Result<usize> {
        let after = if causes.contains(&ANYTHING) { COMES_UP } else { causes };
        let before = std::mem::replace(&mut self.caused, after);
        let lines = self.take()?;
        let is_expected = |line: &String| {
            causes.iter().chain(before).flat_map(|parts| parts.iter()).any(|part| line.contains(part))
        };
        let bad: Vec<_> = lines
            .iter()
            .filter(|(_, line)| is_bad(line) && !is_expected(line))
            .map(|(from, line)| format!("{from}: {line}"))
            .collect();
        if !bad.is_empty() {
            bail!("agents logged what the check does not cause:\n    {}", bad.join("\n    "));
        }
        Ok(lines.len())
    }

    /// Lines logged since the last call, each with its node and pod.
    fn take(&mut self) -> Result<Vec<(String, String)>> {
        open(&self.directories, &self.opened);
        let mut opened = self.opened.lock();
        let mut lines = Vec::new();
        for log in opened.values_mut() {
            let from = format!("{} on {}", log.pod, log.node);
            log.file.read_to_end(&mut log.begun).with_context(|| from.clone())?;
            // An incomplete line stays for the next call.
            let end = log.begun.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
            let text: Vec<u8> = log.begun.drain(..end).collect();
            let text = String::from_utf8_lossy(&text);
            lines.extend(text.lines().map(|line| (from.clone(), said(line).to_owned())));
        }
        Ok(lines)
    }
}

impl Drop for Logs {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Opens new logs. One that cannot be read now is there the next time, or gone.
fn open(directories: &[(String, PathBuf)], opened: &Mutex<Opened>) {
    for (node, directory) in directories {
        for (pod, path) in logs_in(directory) {
            let Ok(file) = File::open(&path) else { continue };
            let Ok(metadata) = file.metadata() else { continue };
            let log = || Log { node: node.clone(), pod, file, begun: Vec::new() };
            let mut opened = opened.lock();
            opened.entry((metadata.dev(), metadata.ino())).or_insert_with(log);
        }
    }
}

/// Logs of agents below a node's pod log directory, each with the pod's name:
/// `NAMESPACE_POD_UID/CONTAINER/NUMBER.log`.
fn logs_in(pods: &Path) -> Vec<(String, PathBuf)> {
    let entries = |path: &Path| fs::read_dir(path).into_iter().flatten().flatten();
    let mut found = Vec::new();
    for directory in entries(pods) {
        let name = directory.file_name().to_string_lossy().into_owned();
        let pod = name.strip_prefix("kube-system_").and_then(|rest| rest.split('_').next());
        let Some(pod) = pod.filter(|pod| pod.starts_with("kilo-")) else { continue };
        let logs = entries(&directory.path().join("kilo")).map(|entry| entry.path());
        let logs = logs.filter(|path| path.extension().is_some_and(|extension| extension == "log"));
        found.extend(logs.map(|path| (pod.to_owned(), path)));
    }
    found
}

/// A line without the runtime's timestamp, stream and tag.
fn said(line: &str) -> &str {
    line.splitn(4, ' ').nth(3).unwrap_or(line)
}

/// Whether the line is a warning, an error, a panic, or a refusal by the API server.
fn is_bad(line: &str) -> bool {
    ["\"WARN\"", "\"ERROR\"", "forbidden", "panicked at"].iter().any(|word| line.contains(word))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::io::Write as _;

    use super::*;

    const TIME: &str = "2026-01-01T00:00:00.000000000Z stderr F";

    /// All Rust sources below a directory, with continued string literals on one line.
    fn sources(directory: &Path, all: &mut String) {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                sources(&path, all);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                for line in fs::read_to_string(&path).unwrap().lines() {
                    *all += line.trim();
                    match all.strip_suffix('\\') {
                        Some(text) => *all = text.to_owned(),
                        None => all.push('\n'),
                    }
                }
            }
        }
    }

    #[test]
    fn what_a_check_may_cause_is_what_agents_log() {
        let mut all = String::new();
        for crate_ in ["src", "core/src", "host/src"] {
            sources(&crate::lab::workspace_root().join("kilo-agent").join(crate_), &mut all);
        }
        for message in [AWAY, BOOTS, ENDED, LEADERS, RELAY].into_iter().flatten() {
            // The first digit of a status code is no part of the literal.
            let literal = message.trim_end_matches(|last: char| last.is_ascii_digit());
            assert!(all.contains(literal), "no agent logs {message:?} any more");
        }
    }

    /// Writes a pod's log with these lines below the directory; returns its path.
    fn write(pods: &Path, pod: &str, number: u8, lines: &[&str]) -> PathBuf {
        let directory = pods.join(format!("kube-system_{pod}_0-1-2/kilo"));
        fs::create_dir_all(&directory).unwrap();
        let path = directory.join(format!("{number}.log"));
        let mut file = File::options().create(true).append(true).open(&path).unwrap();
        lines.iter().for_each(|line| writeln!(file, "{TIME} {line}").unwrap());
        path
    }

    #[test]
    fn a_pod_that_is_gone_when_the_check_ends_is_heard() {
        let pods = tempfile::tempdir().unwrap();
        let log = write(pods.path(), "kilo-x", 0, &[r#"{"level":"INFO"}"#]);
        let mut logs = Logs::of(vec![("a1".to_owned(), pods.path().to_owned())]);
        assert_eq!(logs.ended(&[]).unwrap(), 1);
        write(pods.path(), "kilo-x", 0, &[r#"{"level":"WARN","message":"it leaves"}"#]);
        fs::remove_file(log).unwrap();
        let error = logs.ended(&[AWAY]).unwrap_err().to_string();
        assert!(error.contains("kilo-x on a1: {\"level\":\"WARN\",\"message\":\"it leaves\"}"), "{error}");
        assert_eq!(logs.ended(&[]).unwrap(), 0, "it is said once");
        // Nothing else scans meanwhile, so the thread has to find it.
        let log = write(pods.path(), "kilo-y", 1, &[r#"{"level":"ERROR"}"#]);
        let is_open = || Ok(logs.opened.lock().len() == 2);
        wait::until("the new log is open", Duration::from_secs(10), is_open).unwrap();
        fs::remove_file(log).unwrap();
        assert!(logs.ended(&[]).is_err());
    }

    #[test]
    fn what_a_check_causes_may_come_during_the_next_and_not_later() {
        let pods = tempfile::tempdir().unwrap();
        let mut logs = Logs::of(vec![("a1".to_owned(), pods.path().to_owned())]);
        let away = r#"{"level":"WARN","message":"API server unreachable; retrying"}"#;
        let mut ended = |causes: Causes, line: &str| {
            write(pods.path(), "kilo-x", 0, &[line]);
            logs.ended(causes).is_ok()
        };
        assert!(ended(&[], away), "the cluster came up");
        assert!(!ended(&[], away));
        assert!(ended(&[AWAY], away) && ended(&[], away) && !ended(&[], away));
        assert!(!ended(
            &[AWAY],
            r#"{"level":"WARN","message":"the API server answers 403: nodes is forbidden"}"#
        ));
        let other = r#"{"level":"ERROR"}"#;
        assert!(ended(&[ANYTHING], other) && !ended(&[], other), "the next check causes not just anything");
        assert!(ended(&[ANYTHING], other) && ended(&[], away) && !ended(&[], away));
    }

    #[test]
    fn others_logs_are_not_read() {
        let pods = tempfile::tempdir().unwrap();
        write(pods.path(), "kube-proxy-x", 0, &["{}"]);
        write(pods.path(), "kilo-x", 0, &["{}"]);
        fs::create_dir_all(pods.path().join("kube-system_kilo-z_0/install-cni")).unwrap();
        let found = logs_in(pods.path());
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].0, "kilo-x");
    }
}

//! Ends all descendants of a process: those that it has started, and those that they have.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    time::Duration,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::wait;

/// Sends SIGTERM to all descendants, and SIGKILL to those that are still there after the limit. Children of a
/// process that ended before are not found.
pub fn end(of: u32, limit: Duration) {
    let asked = stop(of);
    for signal in [Signal::SIGTERM, Signal::SIGCONT] {
        send(&asked, signal);
    }
    // Processes that were reparented meanwhile are waited for, too.
    let are_gone = || Ok(running().keys().all(|process| !asked.contains(process)));
    if wait::until("all processes have ended", limit, are_gone).is_err() {
        let rest: BTreeSet<_> = running().into_keys().filter(|process| asked.contains(process)).collect();
        let new = stop(of);
        send(&rest.union(&new).copied().collect(), Signal::SIGKILL);
    }
}

/// Stops all descendants, so that none starts another one meanwhile, and returns them.
fn stop(of: u32) -> BTreeSet<u32> {
    let mut stopped = BTreeSet::new();
    loop {
        let new: BTreeSet<_> = descendants(&running(), of).difference(&stopped).copied().collect();
        if new.is_empty() {
            return stopped;
        }
        send(&new, Signal::SIGSTOP);
        stopped.extend(new);
    }
}

fn send(processes: &BTreeSet<u32>, signal: Signal) {
    for process in processes {
        // It may have ended.
        let _ = kill(Pid::from_raw(process.cast_signed()), signal);
    }
}

/// Every process of this machine that has not ended, with its parent.
fn running() -> BTreeMap<u32, u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    numbers.filter_map(|process| Some((process, parent(process)?))).collect()
}

/// Parent of a process; `None` when it has ended.
fn parent(process: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The command name before it may contain anything.
    let mut words = stat.rsplit_once(')')?.1.split_whitespace();
    let state = words.next()?;
    let parent = words.next()?.parse().ok()?;
    (!matches!(state, "Z" | "X")).then_some(parent)
}

/// Pure: the processes that a process has started, directly or indirectly.
fn descendants(parents: &BTreeMap<u32, u32>, of: u32) -> BTreeSet<u32> {
    let mut found = BTreeSet::new();
    let mut asked = vec![of];
    while let Some(one) = asked.pop() {
        let children = parents.iter().filter(|(_, parent)| **parent == one).map(|(child, _)| *child);
        asked.extend(children.filter(|child| found.insert(*child)));
    }
    found
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::{
        io::{BufRead as _, BufReader},
        process::{Child, Command, Stdio},
    };

    use super::*;

    /// Starts a shell with this script and waits until it has printed its first line.
    fn shell(script: &str) -> Child {
        let mut child = Command::new("sh").args(["-c", script]).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        child
    }

    fn started_by(child: &Child) -> BTreeSet<u32> {
        descendants(&running(), child.id())
    }

    #[test]
    fn children_of_children_are_found_and_others_are_not() {
        let parents = BTreeMap::from([(2, 1), (3, 2), (4, 3), (5, 1), (6, 5)]);
        assert_eq!(descendants(&parents, 2), BTreeSet::from([3, 4]));
        assert_eq!(descendants(&parents, 4), BTreeSet::new());
    }

    #[test]
    fn children_end_when_they_are_asked_to_and_their_children_with_them() {
        let mut child = shell("sh -c 'sleep 1000 & sleep 1000 & echo ready; wait'; sleep 1000");
        let processes = started_by(&child);
        assert!(processes.len() >= 3, "{processes:?}");
        end(child.id(), Duration::from_secs(20));
        let left = running();
        assert!(processes.iter().all(|process| !left.contains_key(process)), "{processes:?}");
        // It goes on where its own child has ended.
        end(child.id(), Duration::ZERO);
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn who_does_not_end_is_killed() {
        let mut child = shell("sh -c 'trap \"\" TERM; echo ready; while :; do sleep 1000; done'; true");
        end(child.id(), Duration::from_millis(300));
        wait::until("the shell's child has ended", Duration::from_secs(20), || {
            Ok(started_by(&child).is_empty())
        })
        .unwrap();
        let _ = child.kill();
        child.wait().unwrap();
    }
}

//! Starts while another agent still runs on this host: waits for one of ours to stop; takes the host over
//! from Kilo's own at the moment it stops.
//!
//! The address of `--listen` shows whether Kilo's agent runs: it is the first thing that Kilo's agent
//! releases when asked to stop, before it removes rules, routes and annotations, and the kernel closes it
//! when that agent is killed. The process that binds it next is the agent of this host, and while it lives
//! Kilo's cannot come back.

use std::{
    io::{self, ErrorKind},
    net::SocketAddr,
    path::Path,
    time::Duration,
};

use kube::Client;
use tokio::{
    net::TcpListener,
    time::{Instant, sleep, timeout_at},
};

use crate::{backend::kubernetes, http};
use kilo_host::lock::{self, Lock, LockError};

/// Pause between attempts to lock: the leaving agent's programs keep working meanwhile.
const LOCK_PACE: Duration = Duration::from_millis(50);
/// Pause between attempts to bind, each three system calls: whatever Kilo's agent removes is missed at once.
const PORT_PACE: Duration = Duration::from_millis(5);
/// How long the API server may take for the write that keeps annotations.
const PATIENCE: Duration = Duration::from_secs(3);

/// Interval for logging again that the agent is waiting for another one.
const REMIND: Duration = Duration::from_mins(10);
/// An agent that is not prepared within this time exits to make room for others.
const PREPARED_WITHIN: Duration = Duration::from_secs(30);

/// Deadline for the preparation of an agent that takes over. Meanwhile it holds the interface's lock, for
/// which another agent may be waiting that is able to work.
#[derive(Clone, Copy, Debug)]
pub struct Deadline(Option<Instant>);

/// An agent was not prepared in time.
#[derive(Debug, thiserror::Error)]
#[error(
    "--take-over-from-kilo: still waiting for {0} after {within} s; ending, so that another agent can have this \
     interface; retrying at the next start", within = PREPARED_WITHIN.as_secs()
)]
pub struct Late(&'static str);

impl Deadline {
    /// Starts the clock if this agent `takes_over`; otherwise there is no deadline.
    pub fn begin(takes_over: bool) -> Self {
        Self(takes_over.then(|| Instant::now() + PREPARED_WITHIN))
    }

    /// Runs `work`.
    ///
    /// # Errors
    /// When the deadline passes first.
    pub async fn before<T>(self, what: &'static str, work: impl Future<Output = T>) -> Result<T, Late> {
        match self.0 {
            Some(deadline) => timeout_at(deadline, work).await.map_err(|_| Late(what)),
            None => Ok(work.await),
        }
    }
}

/// When a waiting agent last logged that it waits.
#[derive(Debug, Default)]
struct Reminder(Option<Instant>);

impl Reminder {
    /// Returns whether it is time to log, for the first time or again, and records it.
    fn remind(&mut self, now: Instant) -> bool {
        let due = self.0.is_none_or(|last| now.saturating_duration_since(last) >= REMIND);
        if due {
            self.0 = Some(now);
        }
        due
    }

    /// Whether it was logged at all.
    fn waits(&self) -> bool {
        self.0.is_some()
    }
}

/// What to do after an attempt.
#[derive(Debug)]
enum Next<T, E> {
    /// It is this agent's turn.
    Begin(T),
    /// The other agent still runs.
    Wait,
    /// Retrying would not help.
    Fail(E),
}

fn after_lock<T>(attempt: Result<T, LockError>) -> Next<T, LockError> {
    match attempt {
        Ok(lock) => Next::Begin(lock),
        Err(LockError::Taken(_)) => Next::Wait,
        Err(error) => Next::Fail(error),
    }
}

fn after_bind<T>(attempt: io::Result<T>) -> Next<T, io::Error> {
    match attempt {
        Ok(listener) => Next::Begin(listener),
        Err(error) if error.kind() == ErrorKind::AddrInUse => Next::Wait,
        Err(error) => Next::Fail(error),
    }
}

/// Locks the interface as soon as no other agent of ours holds it.
///
/// # Errors
/// When the lock cannot be obtained at all.
pub async fn lock(state: &Path, interface: &str) -> Result<Lock, LockError> {
    let mut reminder = Reminder::default();
    loop {
        match after_lock(lock::interface(state, interface)) {
            Next::Begin(lock) => {
                if reminder.waits() {
                    tracing::info!(interface, "the other agent has stopped; starting");
                }
                return Ok(lock);
            }
            Next::Fail(error) => return Err(error),
            Next::Wait if !reminder.remind(Instant::now()) => {}
            Next::Wait => {
                tracing::warn!(
                    interface,
                    "another agent already runs on this node and manages this interface; waiting until it stops. \
                     During a migration from Kilo delete the DaemonSet kilo-takeover once every node has its new pod; \
                     otherwise two DaemonSets run agents here, and one of them must be deleted"
                );
            }
        }
        sleep(LOCK_PACE).await;
    }
}

/// Binds the address as soon as Kilo's agent has released it. To be called with the interface's lock held, so
/// that no agent of ours has the address.
///
/// # Errors
/// When the address cannot be bound at all.
pub async fn address(listen: SocketAddr) -> io::Result<TcpListener> {
    let mut reminder = Reminder::default();
    loop {
        match after_bind(http::bind(listen).await) {
            Next::Begin(listener) => {
                if reminder.waits() {
                    tracing::info!(%listen, "Kilo's own agent is stopping; taking this node over");
                } else {
                    tracing::info!(%listen, "Kilo's own agent does not run on this node; starting");
                }
                return Ok(listener);
            }
            Next::Fail(error) => return Err(error),
            Next::Wait => {
                let first = !reminder.waits();
                match reminder.remind(Instant::now()) {
                    true if first => {
                        tracing::info!(%listen, "prepared; taking this node over when Kilo's own agent stops");
                    }
                    true => tracing::info!(
                        %listen,
                        "still waiting for Kilo's own agent to stop; if it does not run on this node, another process has \
                         bound its address"
                    ),
                    false => {}
                }
            }
        }
        sleep(PORT_PACE).await;
    }
}

/// Keeps Kilo's annotations on the node when its agent leaves. After cleaning up the host that agent removes
/// seven of them with a JSON patch, and an API server rejects the whole patch when one of them is missing
/// (RFC 6902, section 4.2): without `discovered-endpoints`, which nobody needs at that moment, the other
/// nodes never lose this one. If this comes too late, this agent writes all of them again when it sees them
/// removed.
pub async fn keep_annotations(client: Client, node: String) {
    let written =
        tokio::time::timeout(PATIENCE, kubernetes::retract_discovered_endpoints(client, &node)).await;
    let error = match written {
        Ok(Ok(())) => return,
        Ok(Err(error)) => error.to_string(),
        Err(_) => "the API server does not answer".to_owned(),
    };
    tracing::info!(
        error,
        node,
        "failed to keep Kilo's agent from removing this node's annotations; this agent will write them again"
    );
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn only_what_another_agent_holds_is_waited_for() {
        assert!(matches!(after_lock(Ok(())), Next::Begin(())));
        assert!(matches!(after_lock::<()>(Err(LockError::Taken("kilo0".to_owned()))), Next::Wait));
        let others = LockError::PinsTaken("/sys/fs/bpf/kilo".into());
        assert!(matches!(after_lock::<()>(Err(others)), Next::Fail(LockError::PinsTaken(_))));
        assert!(matches!(after_bind(Ok(())), Next::Begin(())));
        assert!(matches!(after_bind::<()>(Err(ErrorKind::AddrInUse.into())), Next::Wait));
        let foreign = ErrorKind::AddrNotAvailable.into();
        assert!(
            matches!(after_bind::<()>(Err(foreign)), Next::Fail(error) if error.kind() == ErrorKind::AddrNotAvailable)
        );
    }

    #[test]
    fn who_waits_says_so_again_every_ten_minutes() {
        let (start, mut reminder) = (Instant::now(), Reminder::default());
        let due: Vec<_> =
            [0, 1, 599, 600, 601, 1199, 1200].map(|s| reminder.remind(start + Duration::from_secs(s))).into();
        assert_eq!(due, [true, false, false, true, false, false, true]);
    }

    #[tokio::test]
    async fn only_who_takes_over_has_a_deadline_and_names_what_was_missing() {
        let over = Deadline(Some(Instant::now()));
        let said = over.before("the nodes", std::future::pending::<()>()).await.unwrap_err().to_string();
        assert!(said.contains("still waiting for the nodes after 30 s"), "{said}");
        let begun = Deadline::begin(true);
        assert!(begun.0.unwrap() > Instant::now(), "there is time");
        assert!(begun.before("the nodes", async {}).await.is_ok());
        assert!(Deadline::begin(false).0.is_none());
    }

    #[tokio::test]
    async fn the_address_is_taken_when_its_holder_gives_it_up_although_its_connections_last() {
        let kilo = http::bind(([127, 0, 0, 1], 0).into()).await.unwrap();
        let listen = kilo.local_addr().unwrap();
        let client = tokio::net::TcpStream::connect(listen).await.unwrap();
        let (accepted, _) = kilo.accept().await.unwrap();
        let mut taken = tokio::spawn(address(listen));
        let early = tokio::time::timeout(PORT_PACE * 10, &mut taken).await;
        assert!(early.is_err(), "Kilo's agent still listens");
        drop(kilo);
        let taken = tokio::time::timeout(Duration::from_secs(5), taken).await.unwrap().unwrap().unwrap();
        assert_eq!(taken.local_addr().unwrap(), listen);
        drop((client, accepted));
    }
}

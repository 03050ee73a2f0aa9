//! Decides at a stop whether everything stays in place for an agent like this one, or the host is handed over
//! to another program's agent.

use std::{
    fmt::{self, Debug},
    path::Path,
    time::{Duration, Instant},
};

use kube::Client;

use crate::{
    agent::{self, Programs},
    backend::kubernetes::{self, Successor, SuccessorError},
};
use kilo_core::{
    objects::annotations,
    settings::{AttachMode, Masquerade},
};
use kilo_host::{
    dataplane,
    net::{Net, NetError, links},
};

/// How long a stop waits for the API server to accept its last writes.
const PATIENCE: Duration = Duration::from_secs(3);

/// How long orphaned programs keep acting when the next agent is unknown: replacing a pod takes less time,
/// and Kilo's own agent has found its nodes by then.
const ALONE: Duration = Duration::from_secs(60);

/// How long pods may take to end beside an agent whose node has left the cluster: less than the grace period
/// of the agent itself in the manifests.
const PODS_END_WITHIN: Duration = Duration::from_secs(10);

/// How often that is checked.
const LOOK: Duration = Duration::from_millis(200);

/// Waits until pods and other containers of this host have ended; returns the interfaces of those still
/// running. Containers without an interface on the host (host network, macvlan) are not waited for.
///
/// # Errors
/// When the host's interfaces cannot be listed.
pub async fn containers_that_stay() -> Result<Vec<String>, NetError> {
    let net = Net::new()?;
    let until = Instant::now() + PODS_END_WITHIN;
    let mut is_said = false;
    loop {
        let links = net.links().await?;
        let containers = links::to_containers(&links);
        if !containers.is_empty() && !is_said {
            // If the agent is killed meanwhile, this is the last line of its log.
            tracing::info!(
                interfaces = containers.join(", "),
                seconds = PODS_END_WITHIN.as_secs(),
                "node object no longer exists: everything stays until these pods or other containers have ended"
            );
            is_said = true;
        }
        if containers.is_empty() || Instant::now() >= until {
            return Ok(containers.into_iter().map(ToOwned::to_owned).collect());
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// State that decides how to stop.
pub struct Leaving {
    /// Whether pins disappear with this container.
    ends: bool,
    /// How programs are attached.
    attach: AttachMode,
    /// Finds out which image comes next.
    successor: Option<Successor>,
    /// Client of the API server, if there is one.
    client: Option<Client>,
}

impl Debug for Leaving {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Leaving")
            .field("ends", &self.ends)
            .field("successor", &self.successor)
            .finish_non_exhaustive()
    }
}

impl Leaving {
    /// Inspects the bpffs; call it before anything is pinned.
    pub fn begin(bpffs: &Path, wanted: AttachMode) -> Self {
        let ends = dataplane::ends_with_the_container(bpffs);
        // Without its pin a TCX link is freed; a filter belongs to the interface.
        let attach = if ends && wanted == AttachMode::Auto { AttachMode::Clsact } else { wanted };
        if ends && attach == AttachMode::Clsact {
            tracing::info!(
                seconds = ALONE.as_secs(),
                "the host's /sys/fs/bpf is not mounted here, as in Kilo's own DaemonSet: programs are clsact filters, which stay for this long after a stop, and Kilo's image can be restored without further \
                 steps"
            );
        } else if ends {
            tracing::warn!(
                "the host's /sys/fs/bpf is not mounted here, and --attach=tcx: traffic within a location stops with \
                 this container, and pods' packets leave in cleartext if it is killed; use --attach=auto"
            );
        }
        Self { ends, attach, successor: None, client: None }
    }

    /// Whether pins disappear with this container, in whose mount nobody else sees them.
    pub const fn pins_end_here(&self) -> bool {
        self.ends
    }

    /// Client of the API server, if there is one.
    pub fn client(&self) -> Option<Client> {
        self.client.clone()
    }

    /// How programs are to be attached.
    pub const fn attach(&self) -> AttachMode {
        self.attach
    }

    /// Sets the API server's client; logs at once if the DaemonSet may not be read.
    pub fn ask(&mut self, client: Client) {
        self.client = Some(client.clone());
        if self.ends {
            return;
        }
        self.successor = Successor::new(client);
        if let Some(successor) = self.successor.clone() {
            tokio::spawn(async move { log_if_forbidden(&successor).await });
        }
    }

    /// Why another program's agent is expected after this one; `None` if it is not.
    async fn reason(self) -> Option<String> {
        if self.ends {
            return Some("/sys/fs/bpf is not the host's, so Kilo's own agent may come next".to_owned());
        }
        match self.successor?.kilos().await {
            Ok(kilos) => kilos.map(|image| format!("the DaemonSet now runs {image}")),
            Err(error @ SuccessorError::UnknownFlag { .. }) => {
                tracing::error!(%error, "not handing this host over; everything stays in place, and traffic keeps flowing without an agent");
                None
            }
            // DaemonSet gone, or API server unreachable: treated like any other stop.
            Err(error) => {
                tracing::info!(%error, "failed to find out which image comes next; leaving everything in place");
                None
            }
        }
    }

    /// To be called when the agent has stopped: hands the host over if the next agent is another program's;
    /// false when everything stays for an agent like this one.
    pub async fn leave(self, node: &str, bpffs: &Path, interface: &str, masquerade: Masquerade) -> bool {
        let client = self.client.clone();
        let programs = match self.ends && self.attach == AttachMode::Clsact {
            true => Programs::LeftFor(ALONE),
            false => Programs::Removed,
        };
        let Some(reason) = self.reason().await else { return false };
        tracing::info!(reason, "kg is stopping and handing this host over to another agent");
        // First: otherwise nodes would keep sending to gateways that this node no longer follows.
        if let Some(client) = client {
            leave_failover(client, node).await;
        }
        let outcome = agent::hand_over(bpffs, interface, masquerade, programs).await;
        tracing::info!(
            removed = outcome.removed.join("; "),
            "the handover is done; traffic between locations keeps flowing"
        );
        if !outcome.stays.is_empty() {
            tracing::error!(
                stays = outcome.stays.join("; "),
                "the handover is incomplete; run `kg uninstall`"
            );
        }
        true
    }
}

/// Removes this node's failover annotations.
async fn leave_failover(client: Client, node: &str) {
    let retracted = tokio::time::timeout(PATIENCE, kubernetes::retract_failover(client, node)).await;
    let error = match retracted {
        Ok(Ok(())) => None,
        Ok(Err(error)) => Some(error.to_string()),
        Err(_) => Some("the API server does not answer".to_owned()),
    };
    if let Some(error) = error {
        let annotations = annotations::without_failover().into_keys().collect::<Vec<_>>().join(", ");
        tracing::warn!(
            error,
            node,
            annotations,
            "failed to remove this node's failover annotations; other nodes assume that it takes part in failover until they are removed"
        );
    }
}

async fn log_if_forbidden(successor: &Successor) {
    if let Err(error @ SuccessorError::Forbidden(_)) = successor.kilos().await {
        tracing::info!(
            %error,
            "this agent may not read its DaemonSet: before restoring Kilo's own image, apply the Role kilo-agent \
             of manifests/, or BPF programs stay attached (docs/migration.md)"
        );
    }
}

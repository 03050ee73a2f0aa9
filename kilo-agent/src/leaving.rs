//! Whether a stop leaves everything in place for an agent like this one, or leaves the host to
//! another program's.

use std::path::Path;

use kube::Client;
use tokio::task::JoinHandle;

use crate::{agent, backend::kubernetes::Successor};
use kilo_host::dataplane;

/// What decides that.
#[derive(Debug)]
pub struct Leaving {
    /// Programs end with this container anyway.
    ends: bool,
    /// Who tells which image comes next.
    successor: Option<JoinHandle<Option<Successor>>>,
}

impl Leaving {
    /// To be called before anything is pinned.
    pub fn begin(bpffs: &Path) -> Self {
        let ends = dataplane::ends_with_the_container(bpffs);
        if ends {
            tracing::info!(
                "the host's /sys/fs/bpf is not mounted here, as in Kilo's own DaemonSet: traffic within a location \
                 stops with this container, and Kilo's image can be put back without a step"
            );
        }
        Self { ends, successor: None }
    }

    /// Learns from the API server which image this agent runs from, while the agent starts.
    pub fn ask(&mut self, client: Client) {
        if !self.ends {
            self.successor = Some(tokio::spawn(learn(client)));
        }
    }

    /// Why another program's agent must be expected after this one.
    async fn reason(self) -> Option<String> {
        if self.ends {
            return Some("programs end with this container".to_owned());
        }
        let successor = self.successor?.await.ok().flatten()?;
        match successor.other().await {
            Ok(other) => other.map(|image| format!("the DaemonSet now runs {image}")),
            // Gone, or nobody to ask: as with any stop.
            Err(error) => {
                tracing::info!(%error, "who comes next is not known");
                None
            }
        }
    }

    /// Called when the agent has stopped: leaves the host to who comes next if that is another
    /// program; false when everything stays for an agent like this one.
    pub async fn leave(self, bpffs: &Path, interface: &str) -> bool {
        let Some(reason) = self.reason().await else { return false };
        tracing::info!(reason, "kg stops, and leaves this host to who comes next");
        let outcome = agent::hand_over(bpffs, interface).await;
        tracing::info!(removed = outcome.removed.join("; "), "traffic between locations goes on");
        if !outcome.stays.is_empty() {
            tracing::error!(
                stays = outcome.stays.join("; "),
                "not everything could be left; run `kg uninstall`"
            );
        }
        true
    }
}

async fn learn(client: Client) -> Option<Successor> {
    Successor::learn(client).await.unwrap_or_else(|error| {
        tracing::info!(
            %error,
            "this agent may not read its DaemonSet: before Kilo's own image is put back, apply the Role kilo-agent \
             of manifests/, or the programs stay in its way (docs/migration.md)"
        );
        None
    })
}

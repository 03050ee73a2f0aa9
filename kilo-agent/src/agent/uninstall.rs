//! Taking everything of ours away from a host.

use crate::{
    backend::Backend,
    dataplane,
    interface::{self, Interface},
    net::{Net, forward, links, nat_rules},
};

/// What [`uninstall`] removes.
#[derive(Clone, Copy, Debug)]
pub struct Removal<'a> {
    /// The WireGuard device.
    pub interface: &'a interface::Options,
    /// It goes, too; else only its addresses do.
    pub delete_interface: bool,
    /// The BPF file system.
    pub bpffs: &'a std::path::Path,
}

/// Removes everything of ours from this host and the node's annotations;
/// answers what could not be removed.
pub async fn uninstall<B: Backend>(backend: Option<&B>, hostname: &str, removal: Removal<'_>) -> Vec<String> {
    let mut problems = Vec::new();
    if let Some(backend) = backend
        && let Err(error) = backend.retract(hostname).await
    {
        problems.push(error.to_string());
    }
    match Net::new() {
        Ok(net) => problems.extend(remove_from_net(&net, removal).await),
        Err(error) => problems.push(error.to_string()),
    }
    problems.extend(forward::remove().await.err().map(|error| error.to_string()));
    problems.extend(nat_rules::remove().await.err().map(|error| error.to_string()));
    problems.extend(dataplane::remove(removal.bpffs));
    problems
}

async fn remove_from_net(net: &Net, removal: Removal<'_>) -> Vec<String> {
    let mut problems = Vec::new();
    let kept = match removal.delete_interface {
        true => Ok(None),
        false => links::by_name(net.rtnl(), &removal.interface.name).await,
    };
    let removed = match kept {
        Ok(kept) => net.remove(kept.map(|link| link.index)).await.map(|_| ()),
        Err(error) => Err(error),
    };
    problems.extend(removed.err().map(|error| error.to_string()));
    if removal.delete_interface {
        let deleted = Interface::remove(net, removal.interface).await;
        problems.extend(deleted.err().map(|error| error.to_string()));
    }
    problems
}

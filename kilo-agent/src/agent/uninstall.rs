//! Removes everything of ours from a host.

use std::{fs, io, path::Path, time::Duration};

use crate::backend::last_good;
use kilo_host::{
    cni, dataplane,
    firewall::{forward, nat_rules},
    interface::{self, Interface},
    lock,
    net::{Net, NetError, links},
};

/// A user-space WireGuard container recreates its deleted device within this time.
const MADE_AGAIN: Duration = Duration::from_secs(3);

/// What [`uninstall`] removes.
#[derive(Clone, Copy, Debug)]
pub struct Removal<'a> {
    /// The WireGuard device.
    pub interface: &'a interface::Options,
    /// Whether to delete the device; otherwise only its addresses go, and WireGuard's sessions stay.
    pub delete_interface: bool,
    /// Mount point of the BPF file system.
    pub bpffs: &'a Path,
    /// The CNI configuration to remove together with its bridges; `None`: it stays.
    pub cni: Option<&'a Path>,
    /// Where the agent publishes the CNI configuration of this boot.
    pub cni_run_dir: &'a Path,
}

/// The result, in words.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// What was there and has been removed.
    pub removed: Vec<String>,
    /// What could not be removed, and why.
    pub stays: Vec<String>,
}

impl Outcome {
    /// Records the result of one step; `said` describes the removed things, given their number.
    pub(super) fn take<E: std::fmt::Display>(
        &mut self,
        result: Result<usize, E>,
        said: impl FnOnce(usize) -> String,
    ) {
        match result {
            Ok(0) => {}
            Ok(count) => self.removed.push(said(count)),
            Err(error) => self.stays.push(error.to_string()),
        }
    }
}

/// Removes everything of ours from this host, and checks that it is gone.
pub async fn uninstall(removal: Removal<'_>) -> Outcome {
    let mut outcome = Outcome::default();
    match Net::new() {
        Ok(net) => {
            remove_from_net(&net, removal, &mut outcome).await;
            remove_programs(&net, removal.bpffs, &mut outcome).await;
            if let Some(path) = removal.cni {
                remove_cni(&net, path, removal.cni_run_dir, &mut outcome).await;
            }
        }
        Err(error) => outcome.stays.push(error.to_string()),
    }
    let count = |writes: u64| usize::try_from(writes).unwrap_or(usize::MAX);
    let rules = forward::remove().await.map(count);
    outcome.take(rules, |tables| format!("rules of the FORWARD chains of {tables} iptables table(s)"));
    let rules = nat_rules::remove().await.map(count);
    outcome.take(rules, |_| "nftables table inet kilo".to_owned());
    let state = Path::new(lock::STATE);
    for (file, what) in
        [(last_good::FILE, "last good topology"), (cni::COPY, "copy of the CNI configuration")]
    {
        let path = state.join(file);
        // The copy records what a CNI configuration that stays was made from.
        if file != cni::COPY || removal.cni.is_some() {
            outcome.take(remove_file(&path), |_| format!("{what} {}", path.display()));
        }
    }
    outcome
}

async fn remove_from_net(net: &Net, removal: Removal<'_>, outcome: &mut Outcome) {
    let name = &removal.interface.name;
    let kept = match removal.delete_interface {
        true => Ok(None),
        false => links::by_name(net.rtnl(), name).await.map(|link| link.map(|link| link.index)),
    };
    let removed = async {
        let kept = kept.map_err(|error| error.to_string())?;
        let remove = async || net.remove(kept).await.map_err(|error| error.to_string());
        let removed = remove().await?;
        // Nothing is left, unless somebody recreates it.
        match remove().await? {
            0 => Ok(removed),
            count => Err(format!(
                "{count} of our routes, rules and devices have reappeared; stop the process that recreates them"
            )),
        }
    };
    outcome.take(removed.await, |count| {
        format!("{count} routes, policy rules, neighbours, addresses and tunnel devices")
    });
    if !removal.delete_interface {
        return;
    }
    let mut who = "";
    let is_of_process =
        links::by_name(net.rtnl(), name).await.is_ok_and(|link| link.is_some_and(|link| link.kind == "tun"));
    match Interface::remove(net, removal.interface).await {
        Ok(true) => {
            outcome.removed.push(format!("interface {name}"));
            if is_of_process {
                tokio::time::sleep(MADE_AGAIN).await;
                who = " (delete the DaemonSet kilo-wireguard)";
            }
        }
        Ok(false) => {}
        Err(error) => outcome.stays.push(error.to_string()),
    }
    if let Ok(Some(link)) = links::by_name(net.rtnl(), name).await {
        outcome.stays.push(format!(
            "interface {name}: it is of kind `{}`, and either not ours or created again by another process{who}",
            link.kind
        ));
    }
}

async fn remove_programs(net: &Net, bpffs: &Path, outcome: &mut Outcome) {
    outcome.take(dataplane::detach_filters(), |count| format!("programs on {count} clsact hooks"));
    outcome.take(dataplane::remove_pins(bpffs), |count| {
        format!("{count} pinned programs and maps below {}", dataplane::top_directory(bpffs).display())
    });
    let left = async {
        let links = net.links().await?;
        let filters = net.bpf_filters(links.iter().map(|link| link.index)).await?;
        Ok::<_, NetError>(filters.iter().filter(|filter| dataplane::is_ours(filter)).count())
    };
    match left.await {
        Ok(0) => {}
        Ok(count) => outcome.stays.push(format!("{count} clsact filters of ours (`tc filter show`)")),
        Err(error) => outcome.stays.push(error.to_string()),
    }
}

async fn remove_cni(net: &Net, path: &Path, run_dir: &Path, outcome: &mut Outcome) {
    let bridges = match cni::bridges(path) {
        Ok(bridges) => bridges,
        Err(error) => return outcome.stays.push(error.to_string()),
    };
    // A link to the configuration of this boot, or the configuration itself.
    if let Ok(file) = fs::read_link(path)
        && file.starts_with(run_dir)
    {
        outcome.take(remove_file(&file), |_| format!("CNI configuration {}", file.display()));
        if let Err(error) = remove_file(&cni::boot::linked(&file)) {
            outcome.stays.push(error);
        }
        let former = file.with_file_name(cni::former::FILE);
        outcome.take(remove_file(&former), |_| format!("former pod CIDRs {}", former.display()));
    }
    outcome.take(remove_file(path), |_| format!("CNI configuration {}", path.display()));
    for bridge in bridges {
        let removed = async {
            match links::by_name(net.rtnl(), &bridge).await?.filter(|link| link.kind == "bridge") {
                Some(link) => links::delete(net.rtnl(), link.index).await,
                None => Ok(false),
            }
        };
        outcome.take(removed.await.map(usize::from), |_| format!("bridge {bridge}"));
    }
}

/// How many files were removed: one or none.
fn remove_file(path: &Path) -> Result<usize, String> {
    match fs::remove_file(path) {
        Ok(()) => Ok(1),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
        Err(error) => Err(format!("{}: {error}", path.display())),
    }
}

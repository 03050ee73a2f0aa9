//! `kg uninstall`, and the cleanup when an agent's node is gone.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, anyhow};
use kilo_agent::{
    agent,
    backend::{Backend as _, file::FileBackend, kubernetes},
};
use kilo_core::errors::error_chain;
use kilo_host::{
    dataplane::{self, BPFFS},
    lock::{self, LockError},
};

use super::{
    directory,
    flags::{Flags, UninstallArgs},
    hostname, interface_options, text,
};

/// Runs `kg uninstall`: only while no agent runs, because that would restore everything.
pub async fn uninstall_alone(flags: &Flags, args: &UninstallArgs) -> Result<()> {
    directory(flags)?;
    let refused = |error: LockError| {
        match error {
        LockError::Taken(_) | LockError::PinsTaken(_) => anyhow::Error::new(error).context(
            "nothing was removed: an agent runs on this node. To take this node alone out of the mesh, drain and delete \
             its Node object (docs/install.md, One node); to remove Kilo from all nodes, delete its DaemonSet first \
             (kubectl get daemonsets --all-namespaces shows where it is)",
        ),
        other => other.into(),
    }
    };
    let _lock = lock::interface(Path::new(lock::STATE), &flags.interface).map_err(refused)?;
    let top = dataplane::top_directory(Path::new(BPFFS));
    let _pins = top.exists().then(|| lock::pins(&top)).transpose().map_err(refused)?;
    uninstall(flags, args).await
}

pub async fn uninstall(flags: &Flags, args: &UninstallArgs) -> Result<()> {
    let options = interface_options(flags)?;
    let hostname = hostname(flags)?;
    let retracted = match args.keep_annotations {
        true => None,
        false => Some(retract(flags, &hostname).await),
    };
    let removal = agent::Removal {
        interface: &options,
        delete_interface: !args.keep_interface,
        bpffs: Path::new(BPFFS),
        cni: args.remove_cni.then_some(flags.cni_path.as_path()),
        cni_run_dir: &flags.cni_run_dir,
    };
    // The host is cleaned even when the API server is out of reach.
    let mut outcome = agent::uninstall(removal).await;
    match retracted {
        None => {}
        Some(Ok(())) => outcome.removed.push(format!("annotations of node {hostname}")),
        Some(Err(error)) => {
            outcome.stays.push(format!("annotations of node {hostname}: {}", error_chain(error.as_ref())));
        }
    }
    let mut report: String = outcome.removed.iter().map(|removed| format!("removed: {removed}\n")).collect();
    print!("{report}");
    let result = match outcome.stays.is_empty() {
        true => Ok(()),
        false => Err(anyhow!("not everything could be removed:\n{}", outcome.stays.join("\n"))),
    };
    if let Some(file) = &args.report {
        if let Err(error) = &result {
            report += &error.to_string();
        }
        fs::write(file, report).with_context(|| format!("failed to write the report {}", file.display()))?;
    }
    result
}

/// Removes what the agent published: its annotations, and from a Node the condition NetworkUnavailable, too.
async fn retract(flags: &Flags, hostname: &str) -> Result<()> {
    if let Some(directory) = directory(flags)? {
        let backend = FileBackend::start(directory, &flags.topology_label).await?;
        return Ok(backend.retract(hostname).await?);
    }
    let path = text(&flags.kubeconfig).map(PathBuf::from);
    let client = kubernetes::client(path.as_deref(), text(&flags.master)).await?;
    Ok(kubernetes::retract(client, hostname).await?)
}

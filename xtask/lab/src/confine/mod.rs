//! Runs `kg` with the rights its DaemonSet gives it: every agent of the labs and benches
//! has the capabilities and mounts of the manifest that is shipped, and no others.

mod container;
mod held;
mod manifest;

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use clap::Args;

use crate::{command::own_program, workspace_root};
use container::Lent;
use manifest::Rights;

/// Flags that need more than the manifests give, and the components that give it.
const COMPONENTS: [(&str, &str); 1] =
    [("--iptables-forward-rules", "components/forward-rules/kustomization.yaml")];

/// Options of the launcher.
#[derive(Args, Debug)]
pub struct ConfineArgs {
    /// Empty directory that becomes the container's root.
    #[arg(long)]
    root: PathBuf,
    /// Directory that can be read at the same path.
    #[arg(long)]
    lend: Vec<PathBuf>,
    /// Directory that can be written to at the same path.
    #[arg(long)]
    lend_writable: Vec<PathBuf>,
    /// The agent's program and arguments; they choose the manifest.
    #[arg(last = true, required = true)]
    command: Vec<String>,
}

/// Command-line prefix that starts `kg` confined, for use in the mount and network namespace of its node. It
/// sees its own program and, in place of an API server, `state`.
///
/// # Errors
/// When this program has no path, or the directory for the root cannot be made.
pub fn launcher(kg: &Path, state: &Path) -> Result<Vec<PathBuf>> {
    let this = own_program()?;
    let root = state.join("container");
    fs::create_dir_all(&root).with_context(|| root.display().to_string())?;
    let kg = fs::canonicalize(kg).with_context(|| kg.display().to_string())?;
    let bin = kg.parent().context("kg has no directory")?;
    let words = ["confine", "--root"].map(PathBuf::from).into_iter().chain([root]);
    let lent = ["--lend".into(), bin.to_owned(), "--lend-writable".into(), state.to_owned()];
    Ok(std::iter::once(this).chain(words).chain(lent).chain(["--".into(), kg.clone()]).collect())
}

/// Runs the hidden subcommand: becomes the agent.
///
/// # Errors
/// When the manifest lacks something, or the kernel refuses it.
pub fn main(args: &ConfineArgs) -> Result<()> {
    let rights = rights(&args.command)?;
    let lent = |paths: &[PathBuf], writable| {
        paths.iter().map(move |path| Lent { path: path.clone(), writable }).collect::<Vec<_>>()
    };
    let lent = [lent(&args.lend, false), lent(&args.lend_writable, true)].concat();
    container::enter(&rights, &args.root, &lent, &args.command).map(|_| ())
}

/// The manifest in which the agent itself runs WireGuard in user space.
const IN_USER_SPACE: &str = "kilo-k3s-userspace-heterogeneous.yaml";
/// What that takes of the host, in addition to another manifest.
const OF_USER_SPACE: [&str; 2] = ["/run/wireguard", "/dev/net/tun"];

/// The manifest of a cluster whose agents have these flags, and whether the agent also has
/// [`OF_USER_SPACE`]: beside another CNI no manifest that is shipped gives both.
fn manifest(command: &[String]) -> (String, bool) {
    let (mut wireguard, mut beside) = ("kernel", None);
    for (word, next) in command.iter().zip(command.iter().skip(1).map(String::as_str).chain([""])) {
        if word == "--wireguard" {
            wireguard = next;
        } else if let Some(value) = word.strip_prefix("--wireguard=") {
            wireguard = value;
        } else if let Some(value) = word.strip_prefix("--compatibility=") {
            beside = Some(value);
        }
    }
    let is_kernel = wireguard == "kernel";
    if command.iter().any(|word| word == "--create-interface=false") {
        return ("kilo-kubeadm-userspace.yaml".to_owned(), false);
    }
    match beside {
        Some(cni) => (format!("kilo-kubeadm-{cni}.yaml"), !is_kernel),
        None if is_kernel => ("kilo-kubeadm.yaml".to_owned(), false),
        None => (IN_USER_SPACE.to_owned(), false),
    }
}

fn rights(command: &[String]) -> Result<Rights> {
    let text = |name: &str| {
        let path = workspace_root().join("manifests").join(name);
        fs::read_to_string(&path).with_context(|| path.display().to_string())
    };
    let wanted = COMPONENTS.iter().filter(|(flag, _)| command.iter().any(|word| word == flag));
    let components = wanted.map(|(_, path)| text(path)).collect::<Result<Vec<_>>>()?;
    let read = |name: &str, components: &[String]| {
        Rights::read(&text(name)?, components).with_context(|| format!("manifests/{name}"))
    };
    let (name, with_user_space) = manifest(command);
    let mut rights = read(&name, &components)?;
    if with_user_space {
        let mut mounts = read(IN_USER_SPACE, &[])?.mounts;
        mounts.retain(|mount| OF_USER_SPACE.contains(&mount.target.as_str()));
        rights.mounts.extend(mounts);
    }
    Ok(rights)
}

/// Checks that a running process has the rights its command line asks for, and no others.
///
/// # Errors
/// When something differs.
pub fn check(pid: u32) -> Result<()> {
    let words = fs::read(format!("/proc/{pid}/cmdline")).context("the agent has ended")?;
    let words: Vec<_> =
        words.split(|&byte| byte == 0).map(|w| String::from_utf8_lossy(w).into_owned()).collect();
    let wanted = rights(&words)?;
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let mounts = fs::read_to_string(format!("/proc/{pid}/mountinfo"))?;
    held::compare(&wanted, &status, &mounts)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn the_last_word_about_wireguard_chooses_the_manifest() {
        for (command, chosen, with_user_space) in [
            ("kg --wireguard kernel", "kilo-kubeadm.yaml", false),
            ("kg", "kilo-kubeadm.yaml", false),
            ("kg --wireguard auto", IN_USER_SPACE, false),
            (
                "kg --wireguard kernel --create-interface=false --wireguard=auto",
                "kilo-kubeadm-userspace.yaml",
                false,
            ),
            ("kg --compatibility=flannel", "kilo-kubeadm-flannel.yaml", false),
            ("kg --wireguard auto --compatibility=cilium", "kilo-kubeadm-cilium.yaml", true),
        ] {
            assert_eq!(manifest(&words(command)), (chosen.to_owned(), with_user_space), "{command}");
        }
    }

    #[test]
    fn beside_another_cni_an_agent_writes_no_cni_configuration() {
        let targets = |text| -> Vec<String> {
            rights(&words(text)).unwrap().mounts.into_iter().map(|mount| mount.target).collect()
        };
        let alone = targets("kg --wireguard auto");
        let beside = targets("kg --wireguard auto --compatibility=flannel");
        let both = |target: &str| (alone.iter().any(|it| it == target), beside.iter().any(|it| it == target));
        assert_eq!(both("/etc/cni/net.d"), (true, false));
        for target in OF_USER_SPACE {
            assert_eq!(both(target), (true, true), "{target}");
        }
    }

    #[test]
    fn the_flag_for_forward_rules_brings_the_rights_it_needs() {
        let without = rights(&words("kg --wireguard kernel")).unwrap();
        let with = rights(&words("kg --wireguard kernel --iptables-forward-rules")).unwrap();
        assert!(with.capabilities.contains("NET_RAW") && !without.capabilities.contains("NET_RAW"));
        assert_eq!(with.mounts.len(), without.mounts.len() + 1);
    }
}

//! The original Kilo in Go: built once where its source is at hand, and deployed by its own DaemonSet, for
//! migrations from it and back.

use std::{
    fs,
    net::Ipv4Addr,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};

use super::{Cluster, deploy, images, network::sites, release};
use crate::{
    apt,
    command::{run, show},
    image::{Architecture, PLUGINS, buildah::Buildah},
    lab::{netns::Netns, tunl0, wait},
    workspace_root,
};

/// Image name as container runtimes store it, and as Kilo's manifests have it.
pub const IMAGE: &str = "docker.io/squat/kilo:0.7.0";
/// Variable with the path of an archive of Kilo's source and vendored modules, which has a directory
/// `kilo`.
const SOURCE: &str = "KILO_GO_SOURCE";
/// Kilo's own manifest that is deployed.
const MANIFEST: &str = "kilo-kubeadm.yaml";
/// Interval between two checks for the device.
const PAUSE: Duration = Duration::from_millis(5);

/// Kilo's program and manifest.
#[derive(Clone, Debug)]
pub struct Original {
    directory: PathBuf,
}

impl Original {
    /// Finds or builds it; `None` where neither the program nor its source is at hand.
    pub fn find() -> Result<Option<Self>> {
        let directory = apt::cache_directory()?.join("squat-kilo-0.7.0");
        let this = Self { directory };
        if this.program().is_file() && this.directory.join(MANIFEST).is_file() {
            return Ok(Some(this));
        }
        let Some(archive) = source() else { return Ok(None) };
        println!("cluster: building Kilo itself, once (2 minutes)");
        fs::create_dir_all(&this.directory)?;
        let unpacked = tempfile::tempdir_in(&this.directory)?;
        run(Command::new("tar").arg("-xf").arg(&archive).arg("-C").arg(unpacked.path()))
            .with_context(|| format!("${SOURCE}"))?;
        let tree = unpacked.path().join("kilo");
        let part = unpacked.path().join("kg");
        show(
            release::go(&release::go_root()?, &tree, unpacked.path())
                .args(["build", "-mod=vendor", "-ldflags", "-s -w", "-o"])
                .arg(&part)
                .arg("./cmd/kg"),
        )?;
        fs::copy(tree.join("manifests").join(MANIFEST), this.directory.join(MANIFEST))?;
        fs::rename(&part, this.program())?;
        Ok(Some(this))
    }

    fn program(&self) -> PathBuf {
        self.directory.join("kg")
    }

    /// Loads its image on every node.
    pub fn load(&self, cluster: &Cluster) -> Result<()> {
        let buildah = Buildah::open()?;
        let context = tempfile::tempdir_in(&self.directory)?;
        let place = |name: &str| context.path().join(name);
        fs::create_dir(place("cni"))?;
        apt::install(&["containernetworking-plugins"])?;
        for plugin in PLUGINS {
            fs::copy(Path::new("/usr/lib/cni").join(plugin), place("cni").join(plugin))?;
        }
        fs::copy(self.program(), place("kg"))?;
        fs::write(place("ip"), ip())?;
        fs::set_permissions(place("ip"), fs::Permissions::from_mode(0o755))?;
        let text = format!(
            "FROM {}\nCOPY cni/ /opt/cni/bin/\nCOPY ip /usr/local/sbin/ip\nCOPY kg /opt/bin/kg\n\
             ENTRYPOINT [\"/opt/bin/kg\"]\n",
            images::NODE
        );
        fs::write(place("Dockerfile"), text)?;
        buildah.build(&place("Dockerfile"), context.path(), IMAGE, Architecture::Amd64, &[])?;
        let archive = place("kilo.tar");
        buildah.archive(IMAGE, IMAGE, &archive, false)?;
        cluster.each(&cluster.nodes, |node| {
            let inside = node.path("/opt/squat-kilo.tar")?;
            fs::copy(&archive, &inside)?;
            node.sh("ctr -n k8s.io images import /opt/squat-kilo.tar && rm /opt/squat-kilo.tar").map(drop)
        })
    }

    /// Kilo's manifest unchanged; without kernel WireGuard, with the flag and the socket's directory that
    /// Kilo's own manifests for such nodes have.
    pub fn manifest(&self) -> Result<String> {
        let text = fs::read_to_string(self.directory.join(MANIFEST))?;
        if deploy::has_wireguard() {
            return Ok(text);
        }
        let flag = "        - --hostname=$(NODE_NAME)\n";
        let mount = "        - name: lib-modules\n          mountPath: /lib/modules\n";
        let volume = "      - name: lib-modules\n        hostPath:\n";
        if ![flag, mount, volume].iter().all(|part| text.contains(part)) {
            bail!("{MANIFEST} of Kilo is not as expected");
        }
        Ok(text
            .replace(flag, &format!("{flag}        - --create-interface=false\n"))
            .replace(
                mount,
                &format!("        - name: wireguard\n          mountPath: /var/run/wireguard\n{mount}"),
            )
            .replace(
                volume,
                &format!(
                    "      - name: wireguard\n        hostPath:\n          path: /var/run/wireguard\n{volume}"
                ),
            ))
    }
}

/// Path of the archive with Kilo's source.
fn source() -> Option<PathBuf> {
    let named = std::env::var_os(SOURCE).map(PathBuf::from);
    named.or_else(|| {
        let beside = workspace_root().parent()?.join("shared/kilo-0.7.0-go-src.tar.xz");
        beside.is_file().then_some(beside)
    })
}

/// `ip` for Kilo: without IPIP in the kernel, `tunl0` becomes a TAP device whose neighbours name the next
/// hops, and [`Tunnels`] does the rest.
fn ip() -> String {
    let hops: Vec<Ipv4Addr> = sites(20).iter().map(|site| site.address).collect();
    format!(
        "#!/bin/sh\n[ \"$*\" = 'tunnel add tunl0 mode ipip' ] || exec /sbin/ip \"$@\"\n\
         /sbin/ip \"$@\" 2> /dev/null && exit\nexec /sbin/ip -batch - <<'END'\n{}END\n",
        tunl0::tap("tunl0", &hops)
    )
}

/// Substitute for the kernel's IPIP on every node, however often `tunl0` comes and goes and the node boots.
pub struct Tunnels {
    ended: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Tunnels {
    /// Starts on these nodes.
    pub fn keep(cluster: &Cluster) -> Result<Self> {
        let ended = Arc::new(AtomicBool::new(false));
        let mut threads = Vec::new();
        for node in &cluster.nodes {
            let (ended, netns) = (Arc::clone(&ended), node.netns());
            prepare(&netns)?;
            threads.push(thread::spawn(move || follow(&netns, &ended)));
        }
        Ok(Self { ended, threads })
    }
}

impl Drop for Tunnels {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// A raw socket gets packets in their wire format only when checksums are filled in.
fn prepare(netns: &Netns) -> Result<()> {
    netns.sh("ethtool -K eth0 tx off").map(drop)
}

/// Serves the node's network namespace of each boot.
fn follow(netns: &Netns, ended: &Arc<AtomicBool>) {
    while !ended.load(Ordering::Relaxed) {
        // A node that is off has no namespace, and one that boots has no interface in it.
        if let (Some(boot), Ok(())) = (inode(netns), prepare(netns)) {
            let (ended, of) = (Arc::clone(ended), netns.clone());
            let _ = netns.spawn(move || attend(&ended, || inode(&of) == Some(boot))).join();
        }
        wait::pace(PAUSE);
    }
}

/// Inode of the network namespace that has this name now.
fn inode(netns: &Netns) -> Option<u64> {
    fs::metadata(netns.path()).ok().map(|of| of.ino())
}

/// Serves `tunl0`, in the node's network namespace.
fn attend(ended: &AtomicBool, is_on: impl Fn() -> bool) {
    let lasts = || !ended.load(Ordering::Relaxed) && is_on();
    while lasts() {
        if let Ok(carrying) = tunl0::attach("tunl0") {
            while lasts() && !carrying.is_finished() {
                wait::pace(PAUSE);
            }
            if !is_on() {
                // Its threads' sockets would keep the namespace of a node without power alive.
                let _ = run(Command::new("ip").args(["link", "delete", "tunl0"]));
            }
        }
        wait::pace(PAUSE);
    }
}

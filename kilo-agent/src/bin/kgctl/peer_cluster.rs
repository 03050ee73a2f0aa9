//! `kgctl peer-cluster`: makes the nodes of two clusters peers of one another.

use std::{fmt::Write as _, path::PathBuf};

use anyhow::{Context as _, Result, bail};
use clap::{ArgGroup, Args};
use kilo_agent::{backend::kubernetes, cli::PrefixList, timestamp::Timestamp};
use kilo_core::{
    multicluster::{self, Changes, Cluster, Present},
    objects::peer,
    wireguard::is_dns_name,
};
use kube::{
    Api,
    api::{ApiResource, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, Preconditions},
};

use crate::{
    cluster::ApiFlags,
    complete,
    progress::Progress,
    refusal::Asked,
    source::{self, ShapeFlags},
};

/// Owner of the fields written here, for server-side apply.
const MANAGER: &str = "kgctl-peer-cluster";
/// Maximum number of conflicts listed; the others are only counted.
const SHOWN: usize = 10;

#[derive(Args, Debug)]
#[command(group = ArgGroup::new("remote").args(["remote_kubeconfig", "remote_context"]).required(true).multiple(true))]
#[command(after_help = "Examples:
  kgctl peer-cluster --context=east --remote-context=west --dry-run
  kgctl peer-cluster --context=east --remote-context=west --service-cidr=10.43.0.0/16
  kgctl peer-cluster --context=east --remote-context=west --remove")]
pub struct PeerClusterArgs {
    /// Kubernetes configuration of the other cluster; default: that of this one, with --remote-context.
    #[arg(long, value_name = "FILE")]
    remote_kubeconfig: Option<PathBuf>,
    /// Context of the other cluster; default: the current-context of --remote-kubeconfig.
    #[arg(long, value_name = "NAME", add = complete::contexts())]
    remote_context: Option<String>,
    /// Name of this cluster in the other one; defaults to its name in the kubeconfig.
    #[arg(long)]
    name: Option<String>,
    /// Name of the other cluster in this one; defaults to its name in the kubeconfig.
    #[arg(long, value_name = "NAME")]
    remote_name: Option<String>,
    /// Service CIDRs of this cluster to make reachable from the other one (repeatable).
    #[arg(long = "service-cidr", value_name = "CIDR")]
    service_cidrs: Vec<PrefixList>,
    /// Service CIDRs of the other cluster to make reachable from this one (repeatable).
    #[arg(long = "remote-service-cidr", value_name = "CIDR")]
    remote_service_cidrs: Vec<PrefixList>,
    /// Print the objects that would be written as YAML, without writing them.
    #[arg(long)]
    dry_run: bool,
    /// Undo: delete the Peers that this command created in both clusters.
    #[arg(long)]
    remove: bool,
    #[command(flatten)]
    shape: ShapeFlags,
    #[command(flatten)]
    api: ApiFlags,
}

impl PeerClusterArgs {
    /// Flags for the other cluster: only the file and the timeout of this cluster's flags also apply there.
    fn remote(&self) -> ApiFlags {
        ApiFlags {
            kubeconfig: self.remote_kubeconfig.clone().or_else(|| self.api.kubeconfig.clone()),
            context: self.remote_context.clone(),
            request_timeout: self.api.request_timeout,
            ..ApiFlags::default()
        }
    }
}

/// One of the two clusters, with access to it.
struct Side {
    name: String,
    cluster: crate::cluster::Cluster,
    peers: Api<DynamicObject>,
    /// The existing Peer objects, with their uids.
    objects: Vec<DynamicObject>,
}

impl Side {
    async fn new(name: Option<&str>, api: &ApiFlags, flag: &str) -> Result<Self> {
        let name = match name {
            Some(name) => name.to_owned(),
            None => kubernetes::cluster_name(&api.access())?,
        };
        // The name becomes part of object names and a label value.
        if !is_dns_name(&name) || name.len() > 63 {
            bail!(
                "{name:?} cannot be the name of a cluster; give another with {flag}: lower case letters, digits, \
                 '-' and '.', 63 at most"
            );
        }
        let cluster = crate::cluster::Cluster::open(api)
            .await
            .with_context(|| format!("failed to connect to cluster {name}"))?;
        let peers = Api::all_with(cluster.client.clone(), &ApiResource::erase::<peer::Peer>(&()));
        Ok(Self { name, cluster, peers, objects: Vec::new() })
    }

    async fn list(&mut self) -> Result<()> {
        let all = ListParams::default();
        let list = self.cluster.ask(Asked::new("list", "peers"), self.peers.list(&all)).await;
        self.objects =
            list.with_context(|| format!("failed to list the peers of cluster {}", self.name))?.items;
        Ok(())
    }

    fn present(&self) -> Vec<Present> {
        self.objects.iter().map(Present::new).collect()
    }

    /// Reads nodes, mesh and peers.
    async fn read(&mut self, services: &[PrefixList], shape: &ShapeFlags) -> Result<Cluster> {
        let context = || format!("failed to read cluster {}", self.name);
        let snapshot = self.cluster.snapshot(&shape.topology_label).await.with_context(context)?;
        for (object, problem) in &snapshot.problems {
            eprintln!("kgctl: cluster {}: {object}: {problem}", self.name);
        }
        let granularity = source::granularity(&snapshot, shape);
        self.list().await?;
        let services = PrefixList::join(services);
        Ok(Cluster::new(&self.name, &snapshot, granularity, services, self.present(), Timestamp::now().0)?)
    }

    /// Writes the changes; returns one line per write. New peers are created before old ones are deleted, so
    /// traffic always has a path.
    async fn write(&self, changes: &Changes, other: &str) -> Result<String> {
        let mut said = String::new();
        let progress = Progress::new(&format!("writing peers of cluster {}", self.name), changes.writes());
        let all = changes.create.iter().map(|peer| (peer, "created"));
        for (wanted, done) in all.chain(changes.update.iter().map(|peer| (peer, "configured"))) {
            let patch = Patch::Apply(multicluster::object(wanted, other));
            let parameters = PatchParams::apply(MANAGER).force();
            let writing = self.peers.patch(&wanted.name, &parameters, &patch);
            let written = self.cluster.ask(Asked::new("patch", "peers"), writing).await;
            written
                .with_context(|| format!("failed to write Peer {} in cluster {}", wanted.name, self.name))?;
            let _ = writeln!(said, "{}: peer.kilo.squat.ai/{} {done}", self.name, wanted.name);
            progress.step();
        }
        for name in &changes.delete {
            self.delete(name).await?;
            progress.step();
            let _ = writeln!(said, "{}: peer.kilo.squat.ai/{name} deleted", self.name);
        }
        Ok(said)
    }

    async fn delete(&self, name: &str) -> Result<()> {
        let object = self.objects.iter().find(|object| object.metadata.name.as_deref() == Some(name));
        // Spares one that was recreated meanwhile. The version is not compared, because agents write the
        // status at any time.
        let preconditions =
            object.map(|object| Preconditions { uid: object.metadata.uid.clone(), resource_version: None });
        let parameters = DeleteParams { preconditions, ..DeleteParams::default() };
        let delete = async {
            match self.peers.delete(name, &parameters).await {
                Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
                other => other.map(drop),
            }
        };
        let deleted = self.cluster.ask(Asked::new("delete", "peers"), delete).await;
        deleted.with_context(|| format!("failed to delete Peer {name} in cluster {}", self.name))
    }

    /// What would be written, as documents for `kubectl apply`.
    fn show(&self, changes: &Changes, other: &str) -> Result<String> {
        let mut text = String::new();
        let created = changes.create.iter().map(|peer| (peer, "create"));
        for (wanted, what) in created.chain(changes.update.iter().map(|peer| (peer, "change"))) {
            let yaml = serde_yaml_ng::to_string(&multicluster::object(wanted, other))?;
            let _ = write!(text, "---\n# {what} in cluster {}\n{yaml}", self.name);
        }
        for name in &changes.delete {
            let _ = write!(text, "---\n# delete from cluster {}: Peer {name}\n", self.name);
        }
        Ok(text)
    }
}

/// Joins the two clusters, or separates them; returns what was done.
pub async fn run(args: &PeerClusterArgs) -> Result<String> {
    let mut here = Side::new(args.name.as_deref(), &args.api, "--name").await?;
    let mut there = Side::new(args.remote_name.as_deref(), &args.remote(), "--remote-name").await?;
    if here.name == there.name {
        bail!("both clusters are called {:?}; tell them apart with --name and --remote-name", here.name);
    }
    let (for_here, for_there) = if args.remove {
        here.list().await?;
        there.list().await?;
        (removed(&here, &there.name), removed(&there, &here.name))
    } else {
        let near = here.read(&args.service_cidrs, &args.shape).await?;
        let far = there.read(&args.remote_service_cidrs, &args.shape).await?;
        refuse(&multicluster::conflicts(&near, &far))?;
        (
            Changes::between(multicluster::wanted(&far, &near), &near, &far.name),
            Changes::between(multicluster::wanted(&near, &far), &far, &near.name),
        )
    };
    if for_here.writes() + for_there.writes() == 0 {
        let peers = for_here.unchanged + for_there.unchanged;
        let said = match args.remove {
            true => format!(
                "nothing to do: {} and {} have no peers made for one another\n",
                here.name, there.name
            ),
            false => format!(
                "nothing to do: all {peers} peers of {} and {} are as they should be\n",
                here.name, there.name
            ),
        };
        // Output for kubectl must remain valid YAML.
        return Ok(if args.dry_run { format!("# {said}") } else { said });
    }
    if args.dry_run {
        return Ok(here.show(&for_here, &there.name)? + &there.show(&for_there, &here.name)?);
    }
    let done = here.write(&for_here, &there.name).await?;
    match there.write(&for_there, &here.name).await {
        Ok(more) => Ok(done + &more),
        Err(error) => {
            // The other error is the one to report.
            drop(crate::terminal::print(&done));
            Err(error.context("only partly done; fix this and run the same command again"))
        }
    }
}

fn removed(side: &Side, other: &str) -> Changes {
    let present = side.present();
    let owned = present.into_iter().filter(|present| present.owner.as_deref() == Some(other));
    Changes { delete: owned.map(|present| present.name).collect(), ..Changes::default() }
}

fn refuse(conflicts: &[String]) -> Result<()> {
    if conflicts.is_empty() {
        return Ok(());
    }
    let mut text = "the clusters cannot be joined; nothing was written:".to_owned();
    for conflict in conflicts.iter().take(SHOWN) {
        let _ = write!(text, "\n  {conflict}");
    }
    if conflicts.len() > SHOWN {
        let _ = write!(text, "\n  and {} more", conflicts.len() - SHOWN);
    }
    bail!("{text}")
}

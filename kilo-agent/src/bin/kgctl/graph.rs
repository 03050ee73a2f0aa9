//! `kgctl graph`: the mesh as Graphviz text.

use anyhow::Result;
use clap::Args;
use kilo_core::topology;

use crate::source::{self, Flags};

#[derive(Args, Debug)]
#[command(after_help = "Examples:
  kgctl graph | dot -Kcirco -Tsvg > mesh.svg
  kgctl graph --context=prod --mesh-granularity=full")]
pub struct GraphArgs {
    #[command(flatten)]
    flags: Flags,
}

/// The mesh in the DOT language.
pub async fn run(args: &GraphArgs) -> Result<String> {
    let snapshot = source::snapshot(&args.flags).await?;
    Ok(topology::dot(&source::mesh(&snapshot, &args.flags.mesh)?))
}

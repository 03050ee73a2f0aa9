//! Options of every lab: what it is called, what it is made of, and what is checked in it.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use crate::{
    network::{Shape, Underlay},
    topology::Topology,
};

/// Which lab is put up: the same for all that is done with one.
#[derive(Args, Clone, Debug)]
pub struct LabOptions {
    /// Name of the lab; several can stand side by side.
    #[arg(long, default_value = "kilo-lab", global = true)]
    pub(crate) name: String,
    /// Leave the lab up when everything has been shown, or a soak has failed.
    #[arg(long, global = true)]
    pub(crate) keep: bool,
    /// WireGuard implementation of the agents: auto, kernel or userspace.
    #[arg(long, default_value = "auto", global = true)]
    pub(crate) wireguard: String,
    /// Family of the nodes' own addresses; pods have both.
    #[arg(long, value_enum, default_value = "v4", global = true)]
    pub(crate) underlay: Underlay,
    /// Which nodes there are.
    #[arg(skip)]
    pub(crate) shape: Shape,
    /// What differs from the lab's own network.
    #[arg(long, value_enum, default_value = "plain", global = true)]
    pub(crate) topology: Topology,
    /// More flags for every agent, such as --tunnel=vxlan (repeatable).
    #[arg(long = "kg", value_name = "FLAG", allow_hyphen_values = true, global = true)]
    pub(crate) kg_flags: Vec<String>,
    /// Which checks, besides who reaches whom.
    #[arg(long, value_enum, default_value = "all", global = true)]
    pub(crate) checks: Choice,
    /// Only checks with this in their name, besides the matrix.
    #[arg(long, value_name = "WORDS", global = true)]
    pub(crate) only: Option<String>,
    /// Directory of the kg and kgctl binaries (default: where this program is).
    #[arg(long, global = true)]
    pub(crate) bin: Option<PathBuf>,
}

/// Some of the checks.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Choice {
    /// All of them.
    All,
    /// How packets are carried.
    Carried,
    /// Everything that exercises the kernel's packet path.
    Transport,
    /// Those of `carried`, and what WireGuard itself has a part in: VPN peers, printer,
    /// NATs, a node on its own, wireguard-go.
    Wireguard,
}

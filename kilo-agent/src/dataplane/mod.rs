//! BPF programs and maps: load, attach, diff, count. Everything is pinned, so
//! that packets flow without the agent and the next agent takes over.

mod attach;
mod error;
mod load;
mod maps;
mod path_mtu;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    path::{Path, PathBuf},
    sync::Arc,
};

use aya::{
    Ebpf,
    maps::{Map, MapData, MapError, PerCpuArray},
};
use kilo_common::{
    maps::NodeValue,
    verdict::{Action, DropReason},
};

pub use error::DataplaneError;
pub use path_mtu::PathMtus;

use tokio::sync::Notify;

use crate::{plan::Tables, status::Attached};

/// Where the BPF file system is, by convention.
pub const BPFFS: &str = "/sys/fs/bpf";

/// Directory of our pins below a BPF file system: `kilo/v<layout>`.
pub fn pin_directory(bpffs: &Path) -> PathBuf {
    bpffs.join("kilo").join(format!("v{}", kilo_common::maps::LAYOUT_VERSION))
}

/// Packets by what happened to them, summed over all CPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// By [`Action`].
    pub actions: BTreeMap<&'static str, u64>,
    /// By [`DropReason`].
    pub drops: BTreeMap<&'static str, u64>,
}

/// The loaded programs, their maps, and where they are attached.
pub struct Dataplane {
    bpf: Ebpf,
    directory: PathBuf,
    /// What the maps hold: read once at start, kept by every write since.
    present: maps::Content,
    attachments: attach::Attachments,
}

impl Dataplane {
    /// Loads the programs. Maps pinned by an earlier agent are adopted with
    /// their content; pins that do not fit are replaced.
    ///
    /// # Errors
    /// Says which capability, mount or kernel feature is missing.
    pub fn open(bpffs: &Path, debug: bool) -> Result<Self, DataplaneError> {
        load::mount_bpffs(bpffs)?;
        let directory = pin_directory(bpffs);
        std::fs::create_dir_all(&directory)
            .map_err(|source| DataplaneError::Pin { path: directory.clone(), source })?;
        let adopted = directory.join(kilo_common::maps::name::CONFIG).exists();
        let mut bpf = load::load(&directory, debug).inspect_err(|_| {
            if !adopted {
                // Nothing half set up stays behind.
                let _ = std::fs::remove_dir_all(bpffs.join("kilo"));
            }
        })?;
        let present = maps::read(&mut bpf)?;
        Ok(Self { bpf, directory, present, attachments: attach::Attachments::default() })
    }

    /// Nodes that may send us steered packets, as the maps hold them.
    pub fn held_senders(&self) -> BTreeMap<IpAddr, NodeValue> {
        self.present.held_senders()
    }

    /// Brings the maps to the desired content; answers the number of writes.
    ///
    /// # Errors
    /// When a map refuses a write (full, or gone).
    pub fn write(&mut self, desired: &Tables) -> Result<u64, DataplaneError> {
        maps::apply(&mut self.bpf, &mut self.present, &desired.into())
    }

    /// Attaches the programs to the WireGuard device, the uplinks and the
    /// VXLAN device, replaces what an earlier agent attached, and detaches from all other interfaces.
    /// Answers the number of changes.
    ///
    /// # Errors
    /// When an interface refuses a program.
    pub fn attach(
        &mut self,
        kilo: u32,
        uplinks: &BTreeSet<u32>,
        vxlan: Option<u32>,
    ) -> Result<u64, DataplaneError> {
        self.attachments.apply(&mut self.bpf, &self.directory, kilo, uplinks, vxlan)
    }

    /// Follows what routers say of the way to nodes, and notifies of news.
    /// Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// When the pinned map cannot be opened.
    pub fn follow_path_mtus(&self, notify: Arc<Notify>) -> Result<PathMtus, DataplaneError> {
        let known = PathMtus::default();
        path_mtu::follow(&self.directory, known.clone(), notify)?;
        Ok(known)
    }

    /// Programs this process has attached, and where.
    pub fn attached(&self) -> Vec<Attached> {
        self.attachments.list()
    }

    /// A reader of the counters that goes on independently of this handle.
    ///
    /// # Errors
    /// When the pinned map cannot be opened.
    pub fn counters(&self) -> Result<CounterReader, DataplaneError> {
        let data = MapData::from_pin(self.directory.join(kilo_common::maps::name::COUNT))?;
        Ok(CounterReader(PerCpuArray::try_from(Map::PerCpuArray(data))?))
    }

    /// The programs and maps, for tests that run single programs.
    pub fn bpf_mut(&mut self) -> &mut Ebpf {
        &mut self.bpf
    }
}

/// Reads the counters whenever somebody asks.
pub struct CounterReader(PerCpuArray<MapData, u64>);

impl std::fmt::Debug for CounterReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("CounterReader")
    }
}

impl CounterReader {
    /// The counters now.
    ///
    /// # Errors
    /// When the map cannot be read.
    pub fn read(&self) -> Result<Counters, DataplaneError> {
        let sum = |index: u32| -> Result<u64, MapError> { Ok(self.0.get(&index, 0)?.iter().sum()) };
        let mut counters = Counters::default();
        for action in Action::ALL {
            counters.actions.insert(action.label(), sum(action.index())?);
        }
        for reason in DropReason::ALL {
            counters.drops.insert(reason.label(), sum(reason.index())?);
        }
        Ok(counters)
    }
}

/// Removes every program, map and pin of ours; answers what went wrong on the way.
pub fn remove(bpffs: &Path) -> Vec<String> {
    let mut problems = attach::detach_everywhere();
    let top = bpffs.join("kilo");
    if let Err(error) = std::fs::remove_dir_all(&top)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        problems.push(format!("{}: {error}", top.display()));
    }
    problems
}

//! BPF programs and maps: load, attach, diff, count. Everything is pinned, so
//! that packets flow without the agent and the next agent takes over.

mod attach;
mod batch;
pub mod decode;
mod earlier_layouts;
mod error;
mod first_map;
pub mod lead;
pub mod led_members;
mod load;
mod maps;
pub mod monitor;
pub mod nat;
mod on_demand;
mod path_mtu;
mod pins;
mod program_info;
mod programs;
pub mod realtime;
pub mod relay;
mod syscall;
mod tcx;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use aya::{
    maps::{Array, Map, MapData, MapError, PerCpuArray},
    programs::SchedClassifier,
};
use kilo_common::{
    counters::Action,
    drop_reasons::DropReason,
    map_table::name,
    maps::{Config, NodeValue, SignalKey},
};

pub use attach::{Applied, Interfaces, detach_filters, interface_name, is_ours};
pub use error::DataplaneError;
pub use load::{ON_DEMAND, PROGRAMS, ends_with_the_container};
pub use path_mtu::PathMtus;

use tokio::sync::Notify;

use crate::net::{Net, NetError, filters::HookQdisc};
use kilo_core::{observed::Attached, settings::AttachMode, tables::Tables};

/// Conventional mount point of the BPF file system.
pub const BPFFS: &str = "/sys/fs/bpf";

/// Directory of everything we pin below a BPF file system, whatever the version.
pub fn top_directory(bpffs: &Path) -> PathBuf {
    bpffs.join("kilo")
}

/// Mounts the BPF file system unless one is there, and makes our directory in it.
///
/// # Errors
/// When the kernel refuses either.
pub fn make_top_directory(bpffs: &Path) -> Result<(), DataplaneError> {
    load::mount_bpffs(bpffs)?;
    make_directory(&top_directory(bpffs))
}

/// Creates a directory that only this user may enter, and its parents.
fn make_directory(path: &Path) -> Result<(), DataplaneError> {
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.map_err(|source| DataplaneError::Pin { path: path.to_owned(), source })
}

/// Directory of our pins below a BPF file system: `kilo/v<layout>`.
pub fn pin_directory(bpffs: &Path) -> PathBuf {
    top_directory(bpffs).join(format!("v{}", kilo_common::maps::LAYOUT_VERSION))
}

/// Directory of the pinned TCX links, one for every map layout: `kilo/links`.
pub fn link_directory(bpffs: &Path) -> PathBuf {
    top_directory(bpffs).join("links")
}

/// Reads the tables from the pinned maps of this host's data path.
///
/// # Errors
/// When there is no data path here, or no right to read it.
pub fn read_tables(bpffs: &Path) -> Result<Tables, DataplaneError> {
    let mut pinned = load::PinnedMaps::of(pin_directory(bpffs));
    Ok(Tables::from(&maps::read(&mut pinned)?))
}

/// Leaves this host's programs without an agent: they steer for this long and then pass every packet on,
/// unless another agent replaces them. At once they stop translating and using tunnel devices.
///
/// # Errors
/// When there is no data path here, or the map refuses the write.
pub fn leave_for(bpffs: &Path, lasts: Duration) -> Result<(), DataplaneError> {
    let mut pinned = load::PinnedMaps::of(pin_directory(bpffs));
    let mut map = Array::<_, Config>::try_from(pinned.get(name::CONFIG)?)?;
    let seconds = u32::try_from(lasts.as_secs()).unwrap_or(u32::MAX);
    let config = map.get(&0, 0)?.left_until(nat::now().saturating_add(seconds));
    Ok(map.set(0, config, 0)?)
}

/// True where an agent has left clsact filters of ours on some interface.
///
/// # Errors
/// When interfaces or filters cannot be listed.
pub async fn has_filters(net: &Net) -> Result<bool, NetError> {
    let links = net.links().await?;
    let filters = net.bpf_filters(links.iter().map(|link| link.index)).await?;
    Ok(filters.iter().any(is_ours))
}

/// Opens a pinned map; [`DataplaneError::Absent`] when it does not exist.
fn open_pin(directory: &Path, name: &str) -> Result<MapData, DataplaneError> {
    let path = directory.join(name);
    if !path.try_exists().unwrap_or(false) {
        return Err(DataplaneError::Absent { path });
    }
    Ok(MapData::from_pin(path)?)
}

/// Packets by what happened to them, summed over all CPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Packets since the maps were made, by label of their [`Action`].
    pub actions: BTreeMap<&'static str, u64>,
    /// Packets since the maps were made, by label of their [`DropReason`].
    pub drops: BTreeMap<&'static str, u64>,
}

/// The loaded programs, their maps, and where they are attached.
pub struct Dataplane {
    programs: programs::Programs,
    maps: load::PinnedMaps,
    directory: PathBuf,
    /// Content of the maps, read once at start and updated by every write.
    present: maps::Content,
    attachments: attach::Attachments,
    /// Shared with [`Self::led`].
    senders: maps::SenderLock,
    /// Maps of another layout carried packets when this one was opened.
    replaces_layout: bool,
    /// Uplinks without link-layer header, as of the last [`Self::attach`].
    layer3: BTreeSet<u32>,
}

impl Dataplane {
    /// Takes over the programs that an earlier agent of the same build has left, or loads them: all but
    /// [`ON_DEMAND`], which are loaded when an interface needs them.
    /// Maps pinned by an earlier agent are adopted with their content; pins that do not fit are replaced.
    ///
    /// # Errors
    /// Says which capability, mount or kernel feature is missing.
    pub fn open(bpffs: &Path, debug: bool) -> Result<Self, DataplaneError> {
        Self::open_with(bpffs, debug, AttachMode::Auto)
    }

    /// [`Self::open`] with a choice of how programs are attached.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_with(bpffs: &Path, debug: bool, mode: AttachMode) -> Result<Self, DataplaneError> {
        make_top_directory(bpffs)?;
        let directory = pin_directory(bpffs);
        make_directory(&directory)?;
        let adopted = directory.join(name::CONFIG).exists();
        let replaces_layout = !load::other_layouts(&directory).is_empty();
        let are_new = load::has_no_maps(&directory) && !replaces_layout;
        let programs = programs::Programs::open(&directory, debug).inspect_err(|_| {
            if !adopted {
                // Nothing of ours stays half set up; pins of another version stay.
                let _ = std::fs::remove_dir_all(&directory);
                let _ = std::fs::remove_dir(top_directory(bpffs));
            }
        })?;
        let mut maps = load::PinnedMaps::of(directory.clone());
        // New maps are empty; reading 65,536 empty slots would take a tenth of a first start.
        let present = if are_new { maps::Content::default() } else { maps::read_all(&mut maps)? };
        let attachments = attach::Attachments::new(mode, link_directory(bpffs));
        let (senders, layer3) = (maps::SenderLock::default(), BTreeSet::new());
        Ok(Self { programs, maps, directory, present, attachments, senders, replaces_layout, layer3 })
    }

    /// Nodes that may send us steered packets, as the maps hold them.
    pub fn held_senders(&self) -> BTreeMap<IpAddr, NodeValue> {
        self.present.held_senders()
    }

    /// Keys that signals are checked with, as the maps hold them.
    pub fn held_keys(&self) -> BTreeMap<IpAddr, SignalKey> {
        self.present.held_keys()
    }

    /// Entries in each map the agent fills, by map name: counted from what was written, without reading maps.
    pub fn entries(&self) -> BTreeMap<&'static str, usize> {
        self.present.entries()
    }

    /// Brings the maps to the desired content; returns the number of writes.
    ///
    /// # Errors
    /// When a map refuses a write (full, or gone).
    pub fn write(&mut self, desired: &Tables) -> Result<u64, DataplaneError> {
        let writes = maps::apply(
            &mut self.maps,
            &self.programs,
            &mut self.present,
            desired,
            &self.senders,
            self.replaces_layout,
        )?;
        // The programs look up the NAT table first: flows to a destination that has joined
        // the mesh would be masqueraded for as long as they last.
        if !self.present.pending_exclusions.is_empty() {
            self.nat_gc()?.forget(&self.present.pending_exclusions)?;
            self.present.pending_exclusions.clear();
        }
        Ok(writes)
    }

    /// Attaches the programs to the WireGuard device, the uplinks, the tunnel devices and pods' interfaces,
    /// replaces what an earlier agent attached, puts back what somebody removed, and detaches from all other
    /// interfaces. Without a difference nothing is written.
    ///
    /// # Errors
    /// When filters cannot be listed. An interface that refuses a program is listed in [`Applied`]; all
    /// others still get theirs.
    pub async fn attach(
        &mut self,
        net: &Net,
        mut interfaces: Interfaces<'_>,
    ) -> Result<Applied, DataplaneError> {
        if !interfaces.layer3.is_subset(&self.layer3) {
            self.programs.ask_again();
        }
        self.layer3.clone_from(interfaces.layer3);
        let none = BTreeSet::new();
        let pods_need_tcx = !interfaces.pods.is_empty() && !self.attachments.serves_pods(interfaces);
        if pods_need_tcx {
            interfaces.pods = &none;
        }
        let mut sooner = Applied::default();
        if !interfaces.layer3.is_empty() || !interfaces.pods.is_empty() {
            self.programs.load_late_beside();
            if self.programs.is_loading_late() {
                // Hooks that need none of these programs do not wait for them.
                let present = self.present_hooks(net, interfaces).await?;
                let others = attach::Which::Others;
                sooner = self.attachments.apply(&mut self.programs, interfaces, &present, others)?;
                self.programs.load_late().await;
            }
        }
        let present = self.present_hooks(net, interfaces).await?;
        let mut applied =
            self.attachments.apply(&mut self.programs, interfaces, &present, attach::Which::All)?;
        applied.changes += sooner.changes;
        applied.reattached += sooner.reattached;
        applied.pods_need_tcx = pods_need_tcx;
        // A hook that could not be given this program may still have the one of another layout.
        if applied.failed.is_empty() && applied.refused.is_none() {
            load::remove_other_layouts(&self.directory)?;
        }
        Ok(applied)
    }

    /// What is on the hooks now.
    async fn present_hooks(
        &self,
        net: &Net,
        interfaces: Interfaces<'_>,
    ) -> Result<attach::Present, DataplaneError> {
        let mut filters = net.bpf_filters(self.attachments.of_interest()?).await?;
        let asks_for_qdiscs = self.attachments.may_be_filters() || !interfaces.pods.is_empty();
        let qdiscs = if asks_for_qdiscs { net.hook_qdiscs().await? } else { BTreeMap::new() };
        // An `ingress` qdisc lists its filters on both hooks.
        filters.retain(|filter| !filter.egress || qdiscs.get(&filter.ifindex) != Some(&HookQdisc::Ingress));
        Ok(attach::Present { filters, qdiscs })
    }

    /// Starts loading [`ON_DEMAND`] in a thread unless they are loaded, so that an interface that needs them
    /// has them at once.
    pub fn load_late_beside(&mut self) {
        self.programs.load_late_beside();
    }

    /// True while every attached program is still on its hook. Only reads; there is no event when a TCX link
    /// goes away.
    ///
    /// # Errors
    /// When filters cannot be listed, or a hook cannot be queried.
    pub async fn is_attached(&self, net: &Net) -> Result<bool, DataplaneError> {
        let filters = net.bpf_filters(self.attachments.of_interest()?).await?;
        self.attachments.stand(&self.programs, &filters)
    }

    /// Programs this process has attached, and where.
    pub fn attached(&self) -> Vec<Attached> {
        self.attachments.list()
    }

    /// Reads the path MTUs that routers report, and notifies when that of a node changes.
    /// Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// When the pinned map cannot be opened.
    pub fn follow_path_mtus(&self, notify: Arc<Notify>) -> Result<PathMtus, DataplaneError> {
        let known = PathMtus::default();
        path_mtu::follow(&self.directory, known.clone(), notify)?;
        Ok(known)
    }

    /// The NAT GC: removes flows that have ended from the NAT table.
    ///
    /// # Errors
    /// When the pinned map cannot be opened.
    pub fn nat_gc(&self) -> Result<nat::NatGc, DataplaneError> {
        nat::NatGc::open(&self.directory)
    }

    /// A reader of the counters, independent of this handle.
    ///
    /// # Errors
    /// When the pinned map cannot be opened.
    pub fn counters(&self) -> Result<CounterReader, DataplaneError> {
        CounterReader::of(&self.directory)
    }

    /// Reads and moves the words of `lead` and sends signals, independently of this handle.
    ///
    /// # Errors
    /// When the pinned map cannot be opened.
    pub fn signals(&self) -> Result<lead::Signals, DataplaneError> {
        lead::Signals::of(&self.programs, &self.directory)
    }

    /// Marks members that this gateway leads, independently of this handle.
    ///
    /// # Errors
    /// When a pinned map cannot be opened.
    pub fn led(&self) -> Result<led_members::Led, DataplaneError> {
        led_members::Led::of(&self.directory, self.senders.clone())
    }

    /// Number of programs that this process has loaded; it took the others over.
    pub fn loaded(&self) -> usize {
        self.programs.loaded()
    }

    /// One of [`PROGRAMS`], for tests that run single programs.
    ///
    /// # Errors
    /// When there is none of that name.
    pub fn program(&mut self, name: &str) -> Result<&mut SchedClassifier, DataplaneError> {
        let name = PROGRAMS.into_iter().find(|program| *program == name);
        self.programs.get_mut(name.ok_or(DataplaneError::Object("program of that name"))?)
    }

    /// A pinned map, for tests that look into it.
    ///
    /// # Errors
    /// When it is not there.
    pub fn map(&mut self, name: &'static str) -> Result<&mut Map, DataplaneError> {
        self.maps.get(name)
    }
}

/// A handle on the pinned map of counters.
pub struct CounterReader(PerCpuArray<MapData, u64>);

impl std::fmt::Debug for CounterReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("CounterReader")
    }
}

impl CounterReader {
    /// Opens the counters of this host's data path.
    ///
    /// # Errors
    /// When there is no data path here, or no right to read it.
    pub fn open(bpffs: &Path) -> Result<Self, DataplaneError> {
        Self::of(&pin_directory(bpffs))
    }

    fn of(directory: &Path) -> Result<Self, DataplaneError> {
        let data = open_pin(directory, name::COUNT)?;
        Ok(Self(PerCpuArray::try_from(Map::PerCpuArray(data))?))
    }

    /// Packets dropped for this reason since the maps were made.
    ///
    /// # Errors
    /// When the map cannot be read.
    pub fn drops(&self, reason: DropReason) -> Result<u64, DataplaneError> {
        Ok(self.0.get(&reason.index(), 0)?.iter().sum())
    }

    /// Data packets, as opposed to signals, that have come out of WireGuard.
    ///
    /// # Errors
    /// When the map cannot be read.
    pub fn decrypted(&self) -> Result<u64, DataplaneError> {
        let sum =
            |action: Action| -> Result<u64, MapError> { Ok(self.0.get(&action.index(), 0)?.iter().sum()) };
        Ok(sum(Action::Forward)? + sum(Action::Decrypt)?)
    }

    /// Reads all counters.
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

/// Removes every program, map and pin of ours; returns what went wrong on the way.
pub fn remove(bpffs: &Path) -> Vec<DataplaneError> {
    [detach_filters(), remove_pins(bpffs)].into_iter().filter_map(Result::err).collect()
}

/// Removes everything pinned, and with the links the programs on TCX hooks;
/// returns how many pins there were.
///
/// # Errors
/// Says what stays, and why.
pub fn remove_pins(bpffs: &Path) -> Result<usize, DataplaneError> {
    let top = top_directory(bpffs);
    let pins = count_pins(&top);
    match std::fs::remove_dir_all(&top) {
        Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
            Err(DataplaneError::Pin { path: top, source })
        }
        _ => Ok(pins),
    }
}

/// Number of pins in a directory and below it.
fn count_pins(directory: &Path) -> usize {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let count = |entry: std::fs::DirEntry| match entry.file_type() {
        Ok(kind) if kind.is_dir() => count_pins(&entry.path()),
        _ => 1,
    };
    entries.map(count).sum()
}

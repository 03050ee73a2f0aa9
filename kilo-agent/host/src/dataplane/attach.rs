//! Programs on interfaces: TCX links that are pinned, or clsact filters with a
//! fixed priority and handle. Either way there is exactly one copy of ours,
//! it is replaced in place, and programs of others are not touched.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
};

use aya::programs::{
    Link as _, LinkOrder, SchedClassifier, TcAttachType,
    links::{FdLink, PinnedLink},
    tc::{NlOptions, SchedClassifierLink, TcAttachOptions, TcHandle, qdisc_add_clsact},
};
use nix::net::if_::{self, if_indextoname, if_nameindex};

use super::{DataplaneError, load::ON_DEMAND, programs::Programs, tcx};
use crate::net::{
    NetError,
    filters::{BpfFilter, HookQdisc},
};
use kilo_core::{
    errors::{Cause, error_chain},
    observed::Attached,
    settings::AttachMode,
};

/// Priority and handle of our clsact filters ("kg").
const PRIORITY: u16 = 0x6b67;
const HANDLE: TcHandle = TcHandle::new(0, 1);

/// Interfaces that programs are attached to, by index.
#[derive(Clone, Copy, Debug)]
pub struct Interfaces<'a> {
    /// Index of the WireGuard device.
    pub kilo: u32,
    /// Interfaces that lead out of the host.
    pub uplinks: &'a BTreeSet<u32>,
    /// Uplinks whose packets have no link-layer header.
    pub layer3: &'a BTreeSet<u32>,
    /// The tunnel devices, useless without their program.
    pub tunnels: &'a BTreeSet<u32>,
    /// Interfaces of pods whose packets may bypass the stack. They get their program only as a TCX link, and
    /// only where no program or qdisc of somebody else's looks at the same packets, as the bandwidth plugin's
    /// does.
    pub pods: &'a BTreeSet<u32>,
}

/// What one round of attaching did.
#[derive(Debug, Default)]
pub struct Applied {
    /// Programs attached, replaced or detached.
    pub changes: u64,
    /// The part of `changes` that put back programs removed by something else.
    pub reattached: u64,
    /// Errors of uplinks and tunnel devices, and the first of pods' interfaces; all others have their
    /// programs.
    pub failed: Vec<DataplaneError>,
    /// Pods' interfaces are left without a program, because it is never a clsact filter.
    pub pods_need_tcx: bool,
    /// Tunnel devices that lack their program.
    pub unguarded: BTreeSet<u32>,
    /// Uplinks that lack their egress program: pod traffic may leave through them unencrypted.
    pub open: BTreeSet<u32>,
    /// Why the WireGuard device lacks a program of ours, or its hooks could not be queried.
    pub refused: Option<DataplaneError>,
}

/// Which programs are attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// Every one.
    All,
    /// All but those of [`ON_DEMAND`]; what is attached of these stays.
    Others,
}

/// What traffic control (tc) has on the hooks.
#[derive(Default)]
pub struct Present {
    /// Filters on the interfaces of [`Attachments::of_interest`].
    pub filters: Vec<BpfFilter>,
    /// Qdiscs with an ingress hook, by interface.
    pub qdiscs: BTreeMap<u32, HookQdisc>,
}

impl Present {
    /// Whether this interface cannot have clsact, because it has an `ingress` qdisc.
    fn lacks_egress_hook(&self, ifindex: u32) -> bool {
        self.qdiscs.get(&ifindex) == Some(&HookQdisc::Ingress)
    }
}

/// One program on one interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct AttachPoint {
    ifindex: u32,
    program: &'static str,
    egress: bool,
}

impl AttachPoint {
    const fn attach_type(&self) -> TcAttachType {
        if self.egress { TcAttachType::Egress } else { TcAttachType::Ingress }
    }

    fn pin(&self) -> String {
        format!("{}_{}", self.program, self.ifindex)
    }

    fn interface(&self) -> Option<String> {
        interface_name(self.ifindex)
    }

    /// TCX programs on this hook, ours and others'.
    fn query(&self) -> Result<tcx::Hook, DataplaneError> {
        tcx::query(self.ifindex, self.egress).map_err(|source| DataplaneError::Query {
            interface: self.interface().unwrap_or_default(),
            program: self.program,
            source,
        })
    }

    /// Whether this kernel has TCX hooks.
    fn has_tcx(&self) -> Result<bool, DataplaneError> {
        match self.query() {
            Ok(_) => Ok(true),
            Err(DataplaneError::Query { source, .. }) if source.raw_os_error() == Some(nix::libc::EINVAL) => {
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    fn error(&self, source: impl Into<Cause>) -> DataplaneError {
        DataplaneError::Attach { ifindex: self.ifindex, program: self.program, source: source.into() }
    }

    /// Our filter on this hook, whichever agent put it there.
    fn filter<'f>(&self, filters: &'f [BpfFilter]) -> Option<&'f BpfFilter> {
        filters
            .iter()
            .find(|filter| (filter.ifindex, filter.egress) == (self.ifindex, self.egress) && is_ours(filter))
    }
}

/// Name of the interface with this index; `None` when there is none.
pub fn interface_name(ifindex: u32) -> Option<String> {
    // nix returns an empty name for an index that does not exist.
    let name = if_indextoname(ifindex).ok()?.to_string_lossy().into_owned();
    (!name.is_empty()).then_some(name)
}

/// True for a filter that an agent has attached.
pub fn is_ours(filter: &BpfFilter) -> bool {
    (filter.priority, filter.handle) == (PRIORITY, HANDLE.into())
}

/// How a program is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    Tcx,
    Clsact,
}

/// What this process has attached.
pub struct Attachments {
    mode: AttachMode,
    /// Directory of pinned links, the same for every map layout, so that the next version replaces the
    /// program in the link.
    links: PathBuf,
    attached: BTreeMap<AttachPoint, How>,
    /// True once every interface has been searched for filters of an earlier agent.
    swept: bool,
}

/// The program that lets packets from pods bypass the stack.
const POD_INGRESS: &str = "pod_ingress";

/// Which program belongs on which hook.
fn attach_points(interfaces: Interfaces<'_>, present: &Present) -> BTreeSet<AttachPoint> {
    let mut points = BTreeSet::from([
        AttachPoint { ifindex: interfaces.kilo, program: "kilo_egress", egress: true },
        AttachPoint { ifindex: interfaces.kilo, program: "kilo_ingress", egress: false },
    ]);
    let tunnel = |ifindex: &u32| AttachPoint { ifindex: *ifindex, program: "tunnel_ingress", egress: false };
    points.extend(interfaces.tunnels.iter().map(tunnel));
    let free = interfaces.pods.iter().filter(|pod| !present.qdiscs.contains_key(pod));
    points.extend(free.map(|&ifindex| AttachPoint { ifindex, program: POD_INGRESS, egress: false }));
    for &ifindex in interfaces.uplinks {
        let (ingress, egress) = match interfaces.layer3.contains(&ifindex) {
            true => ("l3_ingress", "l3_egress"),
            false => ("lan_ingress", "uplink_egress"),
        };
        points.insert(AttachPoint { ifindex, program: ingress, egress: false });
        points.insert(AttachPoint { ifindex, program: egress, egress: true });
    }
    points
}

impl Attachments {
    /// `links` is the directory for pins of links.
    pub fn new(mode: AttachMode, links: PathBuf) -> Self {
        Self { mode, links, attached: BTreeMap::new(), swept: false }
    }

    /// Interfaces whose filters [`Self::apply`] and [`Self::stand`] need: all at first, later those with
    /// filters of ours.
    ///
    /// # Errors
    /// When the interfaces cannot be listed.
    pub fn of_interest(&self) -> Result<BTreeSet<u32>, DataplaneError> {
        if self.swept {
            let with_filters = self.attached.iter().filter(|(_, how)| **how == How::Clsact);
            return Ok(with_filters.map(|(point, _)| point.ifindex).collect());
        }
        Ok(host_interfaces()?.iter().map(if_::Interface::index).collect())
    }

    /// Whether [`Self::apply`] may have to attach clsact filters.
    pub fn may_be_filters(&self) -> bool {
        self.mode != AttachMode::Tcx
    }

    /// Whether pods' interfaces can have their program, which is never a clsact filter: such a qdisc would be
    /// in the way of others, who make their own while a pod is set up. A query that fails says nothing, so they
    /// keep what they have.
    pub fn serves_pods(&self, interfaces: Interfaces<'_>) -> bool {
        let hook = AttachPoint { ifindex: interfaces.kilo, program: POD_INGRESS, egress: false };
        self.mode != AttachMode::Clsact && hook.has_tcx().unwrap_or(true)
    }

    /// True while every program attached is still on its hook. Reads only.
    ///
    /// # Errors
    /// When a hook cannot be queried; its state is then unknown.
    pub fn stand(&self, programs: &Programs, filters: &[BpfFilter]) -> Result<bool, DataplaneError> {
        for (point, how) in &self.attached {
            if !stands(programs, point, *how, filters)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Makes the hooks carry exactly our programs: attaches what is missing, replaces an earlier agent's in
    /// place, detaches from other interfaces.
    pub fn apply(
        &mut self,
        programs: &mut Programs,
        interfaces: Interfaces<'_>,
        present: &Present,
        which: Which,
    ) -> Result<Applied, DataplaneError> {
        let filters = &present.filters[..];
        fs::create_dir_all(&self.links)
            .map_err(|source| DataplaneError::Pin { path: self.links.clone(), source })?;
        let mut wanted = attach_points(interfaces, present);
        wanted.retain(|point| point.program != POD_INGRESS || !self.is_shared(programs, point));
        let (mut done, mut pod_failed) = (Applied::default(), false);
        // Pods' interfaces last: all other hooks matter more.
        let (pods, others): (Vec<_>, Vec<_>) = wanted.iter().partition(|point| point.program == POD_INGRESS);
        let is_now = |point: &&AttachPoint| which == Which::All || !ON_DEMAND.contains(&point.program);
        for point in others.into_iter().chain(pods).filter(is_now) {
            let before = self.attached.get(point).copied();
            let stands = before.map_or(Ok(false), |how| stands(programs, point, how, filters));
            match stands.and_then(|stands| {
                if stands { Ok(None) } else { self.attach(programs, point, present).map(Some) }
            }) {
                Ok(None) => {}
                Ok(Some(how)) => {
                    self.attached.insert(*point, how);
                    done.changes += 1;
                    if before.is_some() {
                        tracing::warn!(
                            interface = point.interface(),
                            program = point.program,
                            "eBPF program was detached by something else; reattached it"
                        );
                        done.reattached += 1;
                    }
                }
                Err(error) => {
                    // A hook that could not be queried counts as attached: the next round queries it again.
                    if !matches!(error, DataplaneError::Query { .. }) {
                        self.attached.remove(point);
                    }
                    if point.ifindex == interfaces.kilo {
                        done.refused.get_or_insert(error);
                        continue;
                    }
                    if interfaces.tunnels.contains(&point.ifindex) {
                        done.unguarded.insert(point.ifindex);
                    }
                    // No failure when the interface has just gone: an event follows.
                    if point.interface().is_some() {
                        if point.egress {
                            done.open.insert(point.ifindex);
                        }
                        let is_first =
                            point.program != POD_INGRESS || !std::mem::replace(&mut pod_failed, true);
                        done.failed.extend(is_first.then_some(error));
                    }
                }
            }
        }
        done.changes += self.detach_others(&wanted, filters);
        self.swept = true;
        Ok(done)
    }

    /// Programs this process has attached, with interface, direction and hook type.
    pub fn list(&self) -> Vec<Attached> {
        let attached = |(point, how): (&AttachPoint, &How)| {
            Some(Attached {
                interface: point.interface()?,
                program: point.program.to_owned(),
                direction: if point.egress { "egress" } else { "ingress" }.to_owned(),
                hook: match how {
                    How::Tcx => "tcx",
                    How::Clsact => "clsact",
                }
                .to_owned(),
            })
        };
        self.attached.iter().filter_map(attached).collect()
    }

    fn attach(
        &self,
        programs: &mut Programs,
        point: &AttachPoint,
        present: &Present,
    ) -> Result<How, DataplaneError> {
        let program = programs.get_mut(point.program)?;
        let interface =
            point.interface().ok_or_else(|| point.error(io::Error::from_raw_os_error(nix::libc::ENODEV)))?;
        let pin = self.links.join(point.pin());
        let has_no_hook = point.egress && present.lacks_egress_hook(point.ifindex);
        if has_no_hook && self.mode == AttachMode::Clsact {
            return Err(DataplaneError::NoEgressHook { interface });
        }
        if self.mode != AttachMode::Clsact {
            match attach_tcx(program, &pin, point, &interface) {
                Ok(()) => {
                    // Removed only now, so that there is no gap: the filter of an agent that had no TCX.
                    if point.filter(&present.filters).is_some() {
                        detach_filter(&interface, point.attach_type());
                    }
                    return Ok(How::Tcx);
                }
                // An interface that has just gone takes no filter either.
                Err(error)
                    if self.mode == AttachMode::Tcx
                        || point.program == POD_INGRESS
                        || point.interface().is_none() =>
                {
                    return Err(point.error(error));
                }
                Err(_) if has_no_hook => return Err(DataplaneError::NoEgressHook { interface }),
                Err(error) if point.has_tcx()? => tracing::warn!(
                    interface,
                    program = point.program,
                    error = %error_chain(&*error),
                    "failed to attach this program by TCX, which this kernel has; attaching it as a clsact filter"
                ),
                Err(_) => tracing::info!(
                    interface,
                    program = point.program,
                    "this kernel has no TCX (Linux 6.6 and later have); attaching this program as a clsact filter"
                ),
            }
        }
        attach_clsact(program, point, &interface)?;
        // Remove the link of an agent that had TCX.
        let _ = fs::remove_file(&pin);
        Ok(How::Clsact)
    }

    /// Whether somebody else has a TCX program on this hook. A hook that cannot be queried counts as ours
    /// alone: attaching reports the error.
    fn is_shared(&self, programs: &Programs, point: &AttachPoint) -> bool {
        let Ok(hook) = point.query() else { return false };
        let own = programs.get(point.program).ok().and_then(|program| Some(program.info().ok()?.id()));
        // That of an earlier agent.
        let pinned = || PinnedLink::from_pin(self.links.join(point.pin())).ok();
        let pinned = (!hook.programs.is_empty()).then(pinned).flatten();
        let pinned = pinned.and_then(|link| Some(FdLink::from(link).info().ok()?.id()));
        let mut both = hook.programs.iter().zip(&hook.links);
        both.any(|(program, link)| Some(*program) != own && Some(*link) != pinned)
    }

    /// Detaches our programs, including those of an earlier agent, from hooks where they are no longer
    /// wanted.
    fn detach_others(&mut self, wanted: &BTreeSet<AttachPoint>, filters: &[BpfFilter]) -> u64 {
        let mut changes = 0;
        let pins: BTreeSet<String> = wanted.iter().map(AttachPoint::pin).collect();
        for entry in fs::read_dir(&self.links).into_iter().flatten().flatten() {
            if !pins.contains(entry.file_name().to_string_lossy().as_ref())
                && fs::remove_file(entry.path()).is_ok()
            {
                changes += 1;
            }
        }
        for filter in filters.iter().filter(|filter| is_ours(filter)) {
            let is_wanted =
                wanted.iter().any(|point| (point.ifindex, point.egress) == (filter.ifindex, filter.egress));
            if !is_wanted && let Some(interface) = interface_name(filter.ifindex) {
                let hook = if filter.egress { TcAttachType::Egress } else { TcAttachType::Ingress };
                changes += u64::from(detach_filter(&interface, hook));
            }
        }
        self.attached.retain(|point, _| wanted.contains(point));
        changes
    }
}

/// True while our program is really on the hook.
fn stands(
    programs: &Programs,
    point: &AttachPoint,
    how: How,
    filters: &[BpfFilter],
) -> Result<bool, DataplaneError> {
    let own = programs.get(point.program)?.info()?.id();
    Ok(match how {
        How::Clsact => point.filter(filters).is_some_and(|filter| filter.program == own),
        How::Tcx => point.query()?.programs.contains(&own),
    })
}

fn attach_tcx(
    program: &mut SchedClassifier,
    pin: &Path,
    point: &AttachPoint,
    interface: &str,
) -> Result<(), Cause> {
    if pin.exists() {
        // A failed query says nothing about the link, which may carry packets: its pin stays.
        let hook = point.query()?;
        match adopt(program, pin, &hook, interface) {
            Ok(()) => return Ok(()),
            Err(error) => {
                tracing::debug!(pin = %pin.display(), error = %error_chain(&*error), "removing an unusable pin");
                fs::remove_file(pin)?;
            }
        }
    }
    // First in the chain: other programs may end it with TC_ACT_OK, whereas ours pass every packet that they
    // do not take to the next program.
    let options = TcAttachOptions::TcxOrder(LinkOrder::first());
    let id = program.attach_with_options(interface, point.attach_type(), options)?;
    let link = FdLink::try_from(program.take_link(id)?)?;
    link.pin(pin)?;
    Ok(())
}

/// Puts our program into the link of an earlier agent, without a gap.
fn adopt(program: &mut SchedClassifier, pin: &Path, hook: &tcx::Hook, interface: &str) -> Result<(), Cause> {
    let link = FdLink::from(PinnedLink::from_pin(pin)?);
    let held = link.info()?.id();
    // Its interface is gone, it was detached, or it belongs to another hook.
    if !hook.links.contains(&held) {
        return Err(format!("link {held} is not attached to this hook of {interface}").into());
    }
    let id = program.attach_to_link(SchedClassifierLink::try_from(link)?)?;
    // Taken out and closed: the pin holds the link.
    drop(FdLink::try_from(program.take_link(id)?)?);
    Ok(())
}

fn attach_clsact(
    program: &mut SchedClassifier,
    point: &AttachPoint,
    interface: &str,
) -> Result<(), DataplaneError> {
    // Fails if there is one already, which is fine.
    let _ = qdisc_add_clsact(interface);
    let present = SchedClassifierLink::attached(interface, point.attach_type(), PRIORITY, HANDLE, None)
        .map_err(|error| point.error(error))?;
    let id = match program.attach_to_link(present) {
        Ok(id) => id,
        Err(_) => {
            let options =
                TcAttachOptions::Netlink(NlOptions { priority: PRIORITY, handle: HANDLE, classid: None });
            program
                .attach_with_options(interface, point.attach_type(), options)
                .map_err(|error| point.error(error))?
        }
    };
    let link = program.take_link(id).map_err(|error| point.error(error))?;
    // Dropping it would detach; the filter outlives the agent.
    std::mem::forget(link);
    Ok(())
}

/// Removes our filter from a hook; true when there was one.
fn detach_filter(interface: &str, hook: TcAttachType) -> bool {
    SchedClassifierLink::attached(interface, hook, PRIORITY, HANDLE, None)
        .is_ok_and(|link| link.detach().is_ok())
}

fn host_interfaces() -> Result<if_::Interfaces, DataplaneError> {
    let failed =
        |source: nix::Error| NetError::Kernel { what: "list interfaces".to_owned(), source: source.into() };
    Ok(if_nameindex().map_err(failed)?)
}

/// Removes clsact filters of ours from every interface; returns how many. (TCX
/// links go with their pins.)
///
/// # Errors
/// When interfaces cannot be listed.
pub fn detach_filters() -> Result<usize, DataplaneError> {
    let interfaces = host_interfaces()?;
    let mut detached = 0;
    for interface in &interfaces {
        let interface = interface.name().to_string_lossy();
        for hook in [TcAttachType::Ingress, TcAttachType::Egress] {
            detached += usize::from(detach_filter(&interface, hook));
        }
    }
    Ok(detached)
}

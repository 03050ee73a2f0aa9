//! Programs on interfaces: TCX links that are pinned, or clsact filters with a
//! fixed priority and handle. Either way there is exactly one copy of ours,
//! and it is replaced in place.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::Path,
};

use aya::{
    Ebpf,
    programs::{
        LinkOrder, SchedClassifier, TcAttachType,
        links::{FdLink, PinnedLink},
        tc::{
            NlOptions, SchedClassifierLink, TcAttachOptions, TcHandle, qdisc_add_clsact, qdisc_detach_program,
        },
    },
};
use nix::net::if_::{if_indextoname, if_nameindex};

use super::{DataplaneError, error::chain, load::PROGRAMS};
use crate::status::Attached;

/// Priority and handle of our clsact filters ("kg").
const PRIORITY: u16 = 0x6b67;
const HANDLE: TcHandle = TcHandle::new(0, 1);

/// One program on one interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    ifindex: u32,
    program: &'static str,
    egress: bool,
}

impl Place {
    const fn attach_type(&self) -> TcAttachType {
        if self.egress { TcAttachType::Egress } else { TcAttachType::Ingress }
    }

    fn pin(&self) -> String {
        format!("link_{}_{}", self.program, self.ifindex)
    }

    fn error(&self, error: &dyn std::error::Error) -> DataplaneError {
        DataplaneError::Attach { ifindex: self.ifindex, program: self.program, reason: chain(error) }
    }
}

/// How a program is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    Tcx,
    Clsact,
}

/// What this process has attached.
#[derive(Default)]
pub struct Attachments {
    attached: BTreeMap<Place, How>,
}

/// Where the programs belong.
fn places(kilo: u32, uplinks: &BTreeSet<u32>, vxlan: Option<u32>) -> BTreeSet<Place> {
    let mut places = BTreeSet::from([
        Place { ifindex: kilo, program: "kilo_egress", egress: true },
        Place { ifindex: kilo, program: "kilo_ingress", egress: false },
    ]);
    places.extend(vxlan.map(|ifindex| Place { ifindex, program: "tunnel_ingress", egress: false }));
    for &ifindex in uplinks {
        places.insert(Place { ifindex, program: "lan_ingress", egress: false });
        places.insert(Place { ifindex, program: "uplink_egress", egress: true });
    }
    places
}

impl Attachments {
    /// Attaches, replaces and detaches; answers the number of changes.
    pub fn apply(
        &mut self,
        bpf: &mut Ebpf,
        directory: &Path,
        kilo: u32,
        uplinks: &BTreeSet<u32>,
        vxlan: Option<u32>,
    ) -> Result<u64, DataplaneError> {
        let wanted = places(kilo, uplinks, vxlan);
        let mut changes = 0;
        for place in &wanted {
            if self.attached.get(place).is_some_and(|how| self.stands(bpf, place, *how)) {
                continue;
            }
            let how = attach(bpf, directory, place)?;
            self.attached.insert(*place, how);
            changes += 1;
        }
        changes += self.detach_others(directory, &wanted);
        Ok(changes)
    }

    /// What is attached where.
    pub fn list(&self) -> Vec<Attached> {
        let attached = |(place, how): (&Place, &How)| {
            Some(Attached {
                interface: if_indextoname(place.ifindex).ok()?.to_string_lossy().into_owned(),
                program: place.program.to_owned(),
                direction: if place.egress { "egress" } else { "ingress" }.to_owned(),
                hook: match how {
                    How::Tcx => "tcx",
                    How::Clsact => "clsact",
                }
                .to_owned(),
            })
        };
        self.attached.iter().filter_map(attached).collect()
    }

    /// True while our program is really on the hook (TCX tells; a clsact
    /// filter goes only with its interface or qdisc).
    #[expect(clippy::unused_self, reason = "reads as a question to the attachments")]
    fn stands(&self, bpf: &mut Ebpf, place: &Place, how: How) -> bool {
        let Ok(interface) = if_indextoname(place.ifindex) else { return false };
        let interface = interface.to_string_lossy();
        match how {
            How::Clsact => true,
            How::Tcx => {
                let own =
                    bpf.program(place.program).and_then(|program| program.info().ok()).map(|info| info.id());
                SchedClassifier::query_tcx(&interface, place.attach_type())
                    .is_ok_and(|(_, programs)| programs.iter().any(|program| Some(program.id()) == own))
            }
        }
    }

    /// Detaches from interfaces that are no longer wanted, whoever attached.
    fn detach_others(&mut self, directory: &Path, wanted: &BTreeSet<Place>) -> u64 {
        let mut changes = 0;
        let pins: BTreeSet<String> = wanted.iter().map(Place::pin).collect();
        if let Ok(entries) = fs::read_dir(directory) {
            for entry in entries.flatten() {
                let name = entry.file_name().to_string_lossy().into_owned();
                if name.starts_with("link_") && !pins.contains(&name) && fs::remove_file(entry.path()).is_ok()
                {
                    changes += 1;
                }
            }
        }
        let gone: Vec<Place> =
            self.attached.keys().filter(|place| !wanted.contains(place)).copied().collect();
        for place in gone {
            if self.attached.remove(&place) == Some(How::Clsact)
                && let Ok(interface) = if_indextoname(place.ifindex)
            {
                let _ =
                    qdisc_detach_program(&interface.to_string_lossy(), place.attach_type(), place.program);
                changes += 1;
            }
        }
        changes
    }
}

fn attach(bpf: &mut Ebpf, directory: &Path, place: &Place) -> Result<How, DataplaneError> {
    let program: &mut SchedClassifier =
        bpf.program_mut(place.program).ok_or(DataplaneError::Object(place.program))?.try_into()?;
    let interface = if_indextoname(place.ifindex).map_err(|error| place.error(&io::Error::from(error)))?;
    let interface = interface.to_string_lossy().into_owned();
    match attach_tcx(program, directory, place, &interface) {
        Ok(()) => {
            // An agent of before the kernel's upgrade may have left a filter.
            let _ = qdisc_detach_program(&interface, place.attach_type(), place.program);
            Ok(How::Tcx)
        }
        Err(error) => {
            tracing::debug!(interface, program = place.program, error = %chain(&*error), "no TCX, using clsact");
            attach_clsact(program, place, &interface)?;
            Ok(How::Clsact)
        }
    }
}

type Boxed = Box<dyn std::error::Error>;

fn attach_tcx(
    program: &mut SchedClassifier,
    directory: &Path,
    place: &Place,
    interface: &str,
) -> Result<(), Boxed> {
    let pin = directory.join(place.pin());
    if pin.exists() {
        // The link of an earlier agent: its program is replaced without a gap.
        let replaced = PinnedLink::from_pin(&pin)
            .map_err(Boxed::from)
            .and_then(|old| Ok(SchedClassifierLink::try_from(FdLink::from(old))?))
            .and_then(|link| Ok(program.attach_to_link(link)?));
        match replaced {
            Ok(id) => {
                // Taken out and closed: the pin holds the link.
                drop(FdLink::try_from(program.take_link(id)?)?);
                return Ok(());
            }
            // The interface it was on is gone, or it is no link at all.
            Err(_) => fs::remove_file(&pin)?,
        }
    }
    let options = TcAttachOptions::TcxOrder(LinkOrder::default());
    let id = program.attach_with_options(interface, place.attach_type(), options)?;
    let link = FdLink::try_from(program.take_link(id)?)?;
    link.pin(&pin)?;
    Ok(())
}

fn attach_clsact(
    program: &mut SchedClassifier,
    place: &Place,
    interface: &str,
) -> Result<(), DataplaneError> {
    // Fails when it is there already, which is fine.
    let _ = qdisc_add_clsact(interface);
    let present = SchedClassifierLink::attached(interface, place.attach_type(), PRIORITY, HANDLE, None)
        .map_err(|error| place.error(&error))?;
    let id = match program.attach_to_link(present) {
        Ok(id) => id,
        Err(_) => {
            let options =
                TcAttachOptions::Netlink(NlOptions { priority: PRIORITY, handle: HANDLE, classid: None });
            program
                .attach_with_options(interface, place.attach_type(), options)
                .map_err(|error| place.error(&error))?
        }
    };
    let link = program.take_link(id).map_err(|error| place.error(&error))?;
    // Dropping it would detach; the filter outlives the agent.
    std::mem::forget(link);
    Ok(())
}

/// Removes clsact filters of ours from every interface. (TCX links go with their pins.)
pub fn detach_everywhere() -> Vec<String> {
    let mut problems = Vec::new();
    let interfaces = match if_nameindex() {
        Ok(interfaces) => interfaces,
        Err(error) => return vec![format!("interfaces cannot be listed: {error}")],
    };
    for interface in &interfaces {
        let interface = interface.name().to_string_lossy();
        for program in PROGRAMS {
            for attach_type in [TcAttachType::Ingress, TcAttachType::Egress] {
                // Not there is what is wanted.
                if let Err(error) = qdisc_detach_program(&interface, attach_type, program)
                    && !chain(&error).contains(program)
                {
                    problems.push(format!("{interface}: {}", chain(&error)));
                }
            }
        }
    }
    problems
}

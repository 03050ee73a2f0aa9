//! BPF filters on the clsact hooks of interfaces, as the kernel lists them.

use std::collections::BTreeMap;

use rtnetlink::packet_route::{
    RouteNetlinkMessage,
    tc::{TcAttribute, TcFilterBpfOption, TcHandle, TcMessage, TcOption},
};

use super::{Net, NetError};

/// A BPF filter on a clsact hook, ours or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BpfFilter {
    /// Interface index.
    pub ifindex: u32,
    /// On the egress hook; else on ingress.
    pub egress: bool,
    /// Priority of the filter: a smaller number runs earlier.
    pub priority: u16,
    /// Handle among the filters of one priority.
    pub handle: u32,
    /// Id of the program, as `bpftool prog` shows it.
    pub program: u32,
    /// Name the filter was given.
    pub name: String,
}

impl Net {
    /// The BPF filters on both clsact hooks of these interfaces; an interface that has gone meanwhile, or
    /// that has no clsact, has none.
    pub async fn bpf_filters(
        &self,
        interfaces: impl IntoIterator<Item = u32>,
    ) -> Result<Vec<BpfFilter>, NetError> {
        let mut filters = Vec::new();
        for ifindex in interfaces {
            for egress in [false, true] {
                let mut request = TcMessage::with_index(ifindex.cast_signed());
                let minor = if egress { TcHandle::MIN_EGRESS } else { TcHandle::MIN_INGRESS };
                request.header.parent = TcHandle { major: TcHandle::CLSACT.major, minor };
                match self.rtnl.dump("list filters", RouteNetlinkMessage::GetTrafficFilter(request)).await {
                    Ok(answers) => filters.extend(answers.into_iter().filter_map(|message| match message {
                        RouteNetlinkMessage::NewTrafficFilter(message) => parse(ifindex, egress, &message),
                        _ => None,
                    })),
                    // No such interface, or a kernel without traffic control.
                    Err(error)
                        if matches!(
                            error.errno(),
                            Some(nix::libc::ENODEV | nix::libc::EINVAL | nix::libc::EOPNOTSUPP)
                        ) => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(filters)
    }

    /// The qdiscs with an ingress hook, by interface.
    pub async fn hook_qdiscs(&self) -> Result<BTreeMap<u32, HookQdisc>, NetError> {
        let request = RouteNetlinkMessage::GetQueueDiscipline(TcMessage::default());
        let answers = self.rtnl.dump("list qdiscs", request).await?;
        Ok(answers.iter().filter_map(HookQdisc::of).collect())
    }
}

/// A qdisc with an ingress hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HookQdisc {
    /// It has hooks for both directions.
    Clsact,
    /// Only `tc` makes it. It takes the place of clsact and has no egress hook: the kernel would accept a
    /// filter for that hook, but run it on ingress.
    Ingress,
}

impl HookQdisc {
    fn of(message: &RouteNetlinkMessage) -> Option<(u32, Self)> {
        let RouteNetlinkMessage::NewQueueDiscipline(message) = message else { return None };
        let ifindex = u32::try_from(message.header.index).ok()?;
        let kind = message.attributes.iter().find_map(|attribute| match attribute {
            TcAttribute::Kind(kind) if kind == "clsact" => Some(Self::Clsact),
            TcAttribute::Kind(kind) if kind == "ingress" => Some(Self::Ingress),
            _ => None,
        })?;
        Some((ifindex, kind))
    }
}

/// `None` for a filter that is not BPF, and for the entry of a priority itself.
fn parse(ifindex: u32, egress: bool, message: &TcMessage) -> Option<BpfFilter> {
    let options = message.attributes.iter().find_map(|attribute| match attribute {
        TcAttribute::Options(options) => Some(options),
        _ => None,
    })?;
    let (mut program, mut name) = (None, String::new());
    for option in options {
        match option {
            TcOption::Bpf(TcFilterBpfOption::ProgId(id)) => program = Some(*id),
            TcOption::Bpf(TcFilterBpfOption::ProgName(text)) => name.clone_from(text),
            _ => {}
        }
    }
    // Priority and protocol share this word (TC_H_MAJ and TC_H_MIN).
    let priority = u16::try_from(message.header.info >> 16).ok()?;
    Some(BpfFilter {
        ifindex,
        egress,
        priority,
        handle: u32::from(message.header.handle),
        program: program?,
        name,
    })
}

//! Policy rules, marked with [`PROTOCOL`].

use std::{collections::BTreeSet, net::IpAddr};

use ipnet::IpNet;
use rtnetlink::{
    packet_core::{NLM_F_CREATE, NLM_F_EXCL},
    packet_route::{
        AddressFamily, RouteNetlinkMessage,
        route::RouteProtocol,
        rule::{RuleAction, RuleAttribute, RuleMessage},
    },
};

use super::{NetError, PROTOCOL, Refused, Rtnl, addresses::keep};
use crate::plan::Rule;

/// Difference between the rules there are and those wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// To add first.
    pub add: Vec<Rule>,
    /// To remove.
    pub remove: Vec<Rule>,
}

/// Pure: what has to change. A rule found twice is removed once.
pub fn diff(current: &[Rule], wanted: &BTreeSet<Rule>) -> Changes {
    let mut missing: BTreeSet<Rule> =
        wanted.iter().map(|rule| Rule { from: rule.from.trunc(), ..*rule }).collect();
    let remove = current.iter().filter(|rule| !missing.remove(*rule)).copied().collect();
    Changes { add: missing.into_iter().collect(), remove }
}

/// Our rules, both families.
pub async fn read(rtnl: &Rtnl) -> Result<Vec<Rule>, NetError> {
    let mut rules = Vec::new();
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        let mut request = RuleMessage::default();
        request.header.family = family;
        match rtnl.dump("list rules", RouteNetlinkMessage::GetRule(request)).await {
            Ok(answers) => rules.extend(answers.into_iter().filter_map(|message| match message {
                RouteNetlinkMessage::NewRule(rule) if rule.header.family == family => parse(&rule),
                _ => None,
            })),
            // A kernel without IPv6 (or without its policy rules).
            Err(error) if matches!(error.errno(), Some(nix::libc::EAFNOSUPPORT | nix::libc::EOPNOTSUPP)) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(rules)
}

/// Adds, then removes; returns the number of writes.
pub(super) async fn apply(
    rtnl: &Rtnl,
    wanted: &BTreeSet<Rule>,
    refused: &mut Vec<Refused>,
) -> Result<usize, NetError> {
    let changes = diff(&read(rtnl).await?, wanted);
    let mut writes = 0;
    for rule in &changes.add {
        let what = format!("add rule from {} lookup {}", rule.from, rule.table);
        let message = RouteNetlinkMessage::NewRule(message(rule));
        match rtnl.write(&what, message, NLM_F_CREATE | NLM_F_EXCL).await {
            // Somebody else made the very same rule: it does the job, and it is theirs.
            Err(error) if error.errno() == Some(nix::libc::EEXIST) => {}
            other => writes += keep(refused, other)?,
        }
    }
    for rule in &changes.remove {
        let what = format!("remove rule from {} lookup {}", rule.from, rule.table);
        match rtnl.write(&what, RouteNetlinkMessage::DelRule(message(rule)), 0).await {
            Err(error) if error.errno() == Some(nix::libc::ENOENT) => {}
            other => writes += keep(refused, other)?,
        }
    }
    Ok(writes)
}

fn parse(message: &RuleMessage) -> Option<Rule> {
    let mut source: Option<IpAddr> = None;
    let (mut table, mut priority, mut ours) = (u32::from(message.header.table), 0, false);
    for attribute in &message.attributes {
        match attribute {
            RuleAttribute::Source(address) => source = Some(*address),
            RuleAttribute::Table(number) => table = *number,
            RuleAttribute::Priority(number) => priority = *number,
            RuleAttribute::Protocol(protocol) => ours = u8::from(*protocol) == PROTOCOL,
            _ => {}
        }
    }
    let from = IpNet::new(source?, message.header.src_len).ok()?;
    ours.then_some(Rule { from, table, priority })
}

fn message(rule: &Rule) -> RuleMessage {
    let mut message = RuleMessage::default();
    let from = rule.from.trunc();
    message.header.family = if from.addr().is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    message.header.src_len = from.prefix_len();
    message.header.action = RuleAction::ToTable;
    message.attributes = vec![
        RuleAttribute::Source(from.addr()),
        RuleAttribute::Table(rule.table),
        RuleAttribute::Priority(rule.priority),
        RuleAttribute::Protocol(RouteProtocol::from(PROTOCOL)),
    ];
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_difference_and_each_duplicate_once() {
        let rule = |from: &str| Rule { from: from.parse().unwrap(), table: 1107, priority: 1107 };
        let wanted = BTreeSet::from([rule("10.244.1.0/24")]);
        assert_eq!(diff(&[rule("10.244.1.0/24")], &wanted), Changes::default());
        let changes = diff(&[rule("10.244.1.0/24"), rule("10.244.1.0/24"), rule("10.9.0.0/24")], &wanted);
        assert_eq!(changes.add, vec![]);
        assert_eq!(changes.remove, vec![rule("10.244.1.0/24"), rule("10.9.0.0/24")]);
    }
}

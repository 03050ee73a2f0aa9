//! Removes policy rules that lead to Kilo's table of routes for pods, left by Kilo or an earlier version. The
//! data path needs none, and any rule takes every route lookup off the kernel's fast path.

use rtnetlink::packet_route::{
    AddressFamily, RouteNetlinkMessage,
    rule::{RuleAttribute, RuleMessage},
};

use super::{NetError, Refused, Rtnl, addresses::keep};

/// The table that Kilo's rules lead to.
pub const TABLE: u32 = 1107;

/// Removes rules that lead to [`TABLE`], of both families; returns the number of writes.
pub(super) async fn remove(rtnl: &Rtnl, refused: &mut Vec<Refused>) -> Result<usize, NetError> {
    let mut writes = 0;
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        for rule in read(rtnl, family).await? {
            let what = format!("remove rule {}", describe(&rule));
            match rtnl.write(&what, RouteNetlinkMessage::DelRule(rule), 0).await {
                Err(error) if error.errno() == Some(nix::libc::ENOENT) => {}
                other => writes += keep(refused, other)?,
            }
        }
    }
    Ok(writes)
}

/// The rules of one family that lead to [`TABLE`].
async fn read(rtnl: &Rtnl, family: AddressFamily) -> Result<Vec<RuleMessage>, NetError> {
    let mut request = RuleMessage::default();
    request.header.family = family;
    match rtnl.dump("list rules", RouteNetlinkMessage::GetRule(request)).await {
        Ok(answers) => Ok(answers
            .into_iter()
            .filter_map(|message| match message {
                RouteNetlinkMessage::NewRule(rule) if rule.header.family == family => Some(rule),
                _ => None,
            })
            .filter(|rule| table(rule) == TABLE)
            .collect()),
        // A kernel without IPv6 (or without its policy rules).
        Err(error) if matches!(error.errno(), Some(nix::libc::EAFNOSUPPORT | nix::libc::EOPNOTSUPP)) => {
            Ok(Vec::new())
        }
        Err(error) => Err(error),
    }
}

/// Table of a rule; the header's field has only one byte.
fn table(rule: &RuleMessage) -> u32 {
    let wide = rule.attributes.iter().find_map(|attribute| match attribute {
        RuleAttribute::Table(number) => Some(*number),
        _ => None,
    });
    wide.unwrap_or_else(|| rule.header.table.into())
}

fn describe(rule: &RuleMessage) -> String {
    let source = rule.attributes.iter().find_map(|attribute| match attribute {
        RuleAttribute::Source(address) => Some(format!("from {address}/{} ", rule.header.src_len)),
        _ => None,
    });
    format!("{}lookup {}", source.unwrap_or_default(), table(rule))
}

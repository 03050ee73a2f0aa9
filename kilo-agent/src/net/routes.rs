//! Routes and rules of ours: marked with a protocol number of their own, so
//! that everything else is left alone.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use futures::TryStreamExt as _;
use ipnet::IpNet;
use nix::errno::Errno;
use rtnetlink::{
    Handle, IpVersion, RouteMessageBuilder,
    packet_route::{
        AddressFamily,
        route::{RouteAddress, RouteAttribute, RouteMessage, RouteProtocol, RouteScope},
        rule::{RuleAction, RuleAttribute, RuleMessage},
    },
};

use super::{NetError, error::errno};
use crate::plan::{MAIN_TABLE, NetPlan, Route, Rule};

/// Protocol number of our routes and rules ("k"; not in /etc/iproute2/rt_protos).
pub const PROTOCOL: u8 = 107;

fn protocol() -> RouteProtocol {
    RouteProtocol::from(PROTOCOL)
}

/// Adds and replaces first, removes last; answers the number of writes.
pub(super) async fn apply(handle: &Handle, kilo: u32, plan: &NetPlan) -> Result<u64, NetError> {
    let mut writes = 0;
    let present = list(handle).await?;
    let kept: BTreeSet<Route> =
        present.iter().filter(|(_, oif)| *oif == Some(kilo)).map(|(route, _)| *route).collect();
    for route in plan.routes.difference(&kept) {
        add(handle, kilo, route).await?;
        writes += 1;
    }
    let rules = list_rules(handle).await?;
    for rule in &plan.rules {
        if !rules.iter().any(|(present, _)| present == rule) {
            add_rule(handle, rule).await?;
            writes += 1;
        }
    }
    for (rule, message) in rules {
        if !plan.rules.contains(&rule) {
            delete_rule(handle, &rule, message).await?;
            writes += 1;
        }
    }
    // A route that only changed was replaced by its new form.
    let wanted: BTreeSet<(IpNet, u32)> =
        plan.routes.iter().map(|route| (route.destination, route.table)).collect();
    for (route, oif) in present {
        if !wanted.contains(&(route.destination, route.table)) {
            delete(handle, oif, &route).await?;
            writes += 1;
        }
    }
    Ok(writes)
}

pub(super) async fn remove(handle: &Handle) -> Result<(), NetError> {
    for (rule, message) in list_rules(handle).await? {
        delete_rule(handle, &rule, message).await?;
    }
    for (route, oif) in list(handle).await? {
        delete(handle, oif, &route).await?;
    }
    Ok(())
}

fn message(kilo: Option<u32>, route: &Route) -> RouteMessage {
    let mut message = match (route.destination, route.source) {
        (IpNet::V4(net), source) => {
            let mut builder =
                RouteMessageBuilder::<Ipv4Addr>::new().destination_prefix(net.addr(), net.prefix_len());
            if let Some(IpAddr::V4(source)) = source {
                builder = builder.pref_source(source);
            }
            builder.table_id(route.table).build()
        }
        (IpNet::V6(net), source) => {
            let mut builder =
                RouteMessageBuilder::<Ipv6Addr>::new().destination_prefix(net.addr(), net.prefix_len());
            if let Some(IpAddr::V6(source)) = source {
                builder = builder.pref_source(source);
            }
            builder.table_id(route.table).build()
        }
    };
    message.header.protocol = protocol();
    message.header.scope = RouteScope::Link;
    message.attributes.extend(kilo.map(RouteAttribute::Oif));
    message
}

async fn add(handle: &Handle, kilo: u32, route: &Route) -> Result<(), NetError> {
    let what = format!("route {} in table {}", route.destination, route.table);
    handle.route().add(message(Some(kilo), route)).replace().execute().await.map_err(NetError::at(what))
}

async fn delete(handle: &Handle, oif: Option<u32>, route: &Route) -> Result<(), NetError> {
    let what = format!("remove route {} from table {}", route.destination, route.table);
    match handle.route().del(message(oif, &Route { source: None, ..*route })).execute().await {
        Err(error) if errno(&error) == Some(Errno::ESRCH as i32) => Ok(()),
        other => other.map_err(NetError::at(what)),
    }
}

fn address(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(ip) => Some((*ip).into()),
        RouteAddress::Inet6(ip) => Some((*ip).into()),
        _ => None,
    }
}

/// Every route of ours with the interface it leads to.
async fn list(handle: &Handle) -> Result<Vec<(Route, Option<u32>)>, NetError> {
    let mut routes = Vec::new();
    for message in
        [RouteMessageBuilder::<Ipv4Addr>::new().build(), RouteMessageBuilder::<Ipv6Addr>::new().build()]
    {
        let mut messages = handle.route().get(message).execute();
        while let Some(message) = messages.try_next().await.map_err(NetError::at("list routes"))? {
            if message.header.protocol == protocol() {
                routes.extend(parse(&message));
            }
        }
    }
    Ok(routes)
}

fn parse(message: &RouteMessage) -> Option<(Route, Option<u32>)> {
    let mut table = u32::from(message.header.table);
    let unspecified = match message.header.address_family {
        AddressFamily::Inet => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        AddressFamily::Inet6 => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        _ => return None,
    };
    let (mut destination, mut source, mut oif) = (unspecified, None, None);
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Destination(addr) => destination = address(addr)?,
            RouteAttribute::PrefSource(addr) => source = address(addr),
            RouteAttribute::Oif(index) => oif = Some(*index),
            RouteAttribute::Table(id) => table = *id,
            _ => {}
        }
    }
    let destination = IpNet::new(destination, message.header.destination_prefix_length).ok()?;
    Some((Route { destination, table, source }, oif))
}

/// Interface of the default route of the main table with the lowest metric.
pub(super) async fn default_interface(handle: &Handle) -> Result<Option<u32>, NetError> {
    let mut best: Option<(u32, u32)> = None;
    for message in
        [RouteMessageBuilder::<Ipv4Addr>::new().build(), RouteMessageBuilder::<Ipv6Addr>::new().build()]
    {
        let mut messages = handle.route().get(message).execute();
        while let Some(message) = messages.try_next().await.map_err(NetError::at("list routes"))? {
            let Some((route, Some(oif))) = parse(&message) else { continue };
            if route.destination.prefix_len() != 0 || route.table != MAIN_TABLE {
                continue;
            }
            let metric = message.attributes.iter().find_map(|attribute| match attribute {
                RouteAttribute::Priority(metric) => Some(*metric),
                _ => None,
            });
            let metric = metric.unwrap_or(0);
            if best.is_none_or(|(lowest, _)| metric < lowest) {
                best = Some((metric, oif));
            }
        }
    }
    Ok(best.map(|(_, oif)| oif))
}

/// Every rule of ours.
async fn list_rules(handle: &Handle) -> Result<Vec<(Rule, RuleMessage)>, NetError> {
    let mut rules = Vec::new();
    for version in [IpVersion::V4, IpVersion::V6] {
        let mut messages = handle.rule().get(version).execute();
        while let Some(message) = messages.try_next().await.map_err(NetError::at("list rules"))? {
            let ours = message
                .attributes
                .iter()
                .any(|attribute| matches!(attribute, RuleAttribute::Protocol(p) if *p == protocol()));
            if ours && let Some(rule) = parse_rule(&message) {
                rules.push((rule, message));
            }
        }
    }
    Ok(rules)
}

fn parse_rule(message: &RuleMessage) -> Option<Rule> {
    let mut table = u32::from(message.header.table);
    let (mut from, mut priority) = (None, 0);
    for attribute in &message.attributes {
        match attribute {
            RuleAttribute::Source(addr) => from = IpNet::new(*addr, message.header.src_len).ok(),
            RuleAttribute::Priority(value) => priority = *value,
            RuleAttribute::Table(id) => table = *id,
            _ => {}
        }
    }
    Some(Rule { from: from?, table, priority })
}

async fn add_rule(handle: &Handle, rule: &Rule) -> Result<(), NetError> {
    let what = format!("rule from {} lookup {}", rule.from, rule.table);
    let request =
        handle.rule().add().table_id(rule.table).priority(rule.priority).action(RuleAction::ToTable);
    let mark = RuleAttribute::Protocol(protocol());
    let result = match rule.from {
        IpNet::V4(net) => {
            let mut request = request.v4().source_prefix(net.addr(), net.prefix_len());
            request.message_mut().attributes.push(mark);
            request.execute().await
        }
        IpNet::V6(net) => {
            let mut request = request.v6().source_prefix(net.addr(), net.prefix_len());
            request.message_mut().attributes.push(mark);
            request.execute().await
        }
    };
    result.map_err(NetError::at(what))
}

async fn delete_rule(handle: &Handle, rule: &Rule, message: RuleMessage) -> Result<(), NetError> {
    match handle.rule().del(message).execute().await {
        Err(error) if errno(&error) == Some(Errno::ENOENT as i32) => Ok(()),
        other => other.map_err(NetError::at(format!("remove rule from {} lookup {}", rule.from, rule.table))),
    }
}

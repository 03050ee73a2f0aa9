//! This network namespace as text, for bug reports: links, addresses, routes, rules, neighbours.

use std::{collections::BTreeMap, fmt::Write as _};

use rtnetlink::packet_route::{
    AddressFamily, RouteNetlinkMessage,
    neighbour::{NeighbourAttribute, NeighbourMessage},
    route::{RouteAttribute, RouteMessage},
    rule::RuleMessage,
};

use super::{Net, NetError};

/// One text each for `links`, `routes`, `rules` and `neighbours`, or why there is none.
pub async fn all(net: &Net) -> BTreeMap<&'static str, Result<String, NetError>> {
    let names = match net.links().await {
        Ok(links) => links.iter().map(|link| (link.index, link.name.clone())).collect(),
        Err(_) => BTreeMap::new(),
    };
    BTreeMap::from([
        ("links", links(net).await),
        ("routes", routes(net, &names).await),
        ("rules", rules(net).await),
        ("neighbours", neighbours(net, &names).await),
    ])
}

async fn links(net: &Net) -> Result<String, NetError> {
    let mut text = String::new();
    for link in net.links().await? {
        let (state, kind) = (if link.up { "up" } else { "down" }, link.kind.as_str());
        let _ = write!(text, "{}: {} {state} mtu {} kind {kind:?}", link.index, link.name, link.mtu);
        if let Some(controller) = link.controller {
            let _ = write!(text, " part of {controller}");
        }
        text.push('\n');
        for address in &link.addresses {
            let _ = writeln!(text, "    {address:?}");
        }
    }
    Ok(text)
}

async fn routes(net: &Net, names: &BTreeMap<u32, String>) -> Result<String, NetError> {
    let mut lines = Vec::new();
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        let mut request = RouteMessage::default();
        request.header.address_family = family;
        for answer in net.rtnl().dump("list routes", RouteNetlinkMessage::GetRoute(request)).await? {
            if let RouteNetlinkMessage::NewRoute(route) = answer {
                lines.push(route_line(&route, names));
            }
        }
    }
    Ok(lines.concat())
}

/// A route as `ip route` prints it, as far as its attributes are known; others in debug format.
fn route_line(route: &RouteMessage, names: &BTreeMap<u32, String>) -> String {
    let header = &route.header;
    let mut destination = format!("default ({:?})", header.address_family);
    let mut rest = String::new();
    for attribute in &route.attributes {
        let _ = match attribute {
            RouteAttribute::Destination(address) => {
                destination = format!("{}/{}", plain(address), header.destination_prefix_length);
                Ok(())
            }
            RouteAttribute::Gateway(address) => write!(rest, " via {}", plain(address)),
            RouteAttribute::Oif(index) => write!(rest, " dev {}", name(names, *index)),
            RouteAttribute::Table(table) => write!(rest, " table {table}"),
            RouteAttribute::Priority(metric) => write!(rest, " metric {metric}"),
            RouteAttribute::PrefSource(address) => write!(rest, " src {}", plain(address)),
            RouteAttribute::CacheInfo(_) | RouteAttribute::Preference(_) => Ok(()),
            other => write!(rest, " {other:?}"),
        };
    }
    format!("{destination}{rest} proto {} {:?}\n", u8::from(header.protocol), header.kind)
}

/// `Inet(10.0.0.1)` as `10.0.0.1`.
fn plain(address: &impl std::fmt::Debug) -> String {
    let text = format!("{address:?}");
    text.split_once('(').map_or(text.clone(), |(_, inner)| inner.trim_end_matches(')').to_owned())
}

fn name(names: &BTreeMap<u32, String>, index: u32) -> String {
    names.get(&index).cloned().unwrap_or_else(|| format!("interface {index}"))
}

async fn rules(net: &Net) -> Result<String, NetError> {
    let mut text = String::new();
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        let mut request = RuleMessage::default();
        request.header.family = family;
        let answers = match net.rtnl().dump("list rules", RouteNetlinkMessage::GetRule(request)).await {
            // A kernel without policy rules of that family.
            Err(error) if error.errno().is_some() => continue,
            answers => answers?,
        };
        for answer in answers {
            if let RouteNetlinkMessage::NewRule(rule) = answer {
                let action = rule.header.action;
                let _ = writeln!(text, "{family:?} {action:?} {:?}", rule.attributes);
            }
        }
    }
    Ok(text)
}

async fn neighbours(net: &Net, names: &BTreeMap<u32, String>) -> Result<String, NetError> {
    let request = RouteNetlinkMessage::GetNeighbour(NeighbourMessage::default());
    let mut text = String::new();
    for answer in net.rtnl().dump("list neighbours", request).await? {
        let RouteNetlinkMessage::NewNeighbour(neighbour) = answer else { continue };
        let _ = write!(text, "dev {} {:?}", name(names, neighbour.header.ifindex), neighbour.header.state);
        for attribute in &neighbour.attributes {
            let _ = match attribute {
                NeighbourAttribute::Destination(address) => write!(text, " {}", plain(address)),
                NeighbourAttribute::LinkLayerAddress(bytes) => {
                    let hex: Vec<_> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
                    write!(text, " at {}", hex.join(":"))
                }
                NeighbourAttribute::Protocol(protocol) => write!(text, " proto {}", u8::from(*protocol)),
                _ => Ok(()),
            };
        }
        text.push('\n');
    }
    Ok(text)
}

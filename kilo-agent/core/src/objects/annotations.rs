//! Annotations of Node objects: one table says what each is called, who writes it, how it is
//! read and written, and what the documentation says of it. A new row's value also needs a field of [`Node`]
//! (`types.rs`), and of [`Published`] (`snapshot.rs`) when agents write it.

mod unknown;
mod value;

use std::collections::BTreeMap;

use ipnet::IpNet;

pub(super) use self::value::excerpt;
use self::value::{Value, seen_endpoints_text};
use super::{CheckedIn, InternalIpBy, Node, Published};
use crate::settings::Granularity;

/// Prefix of every annotation of ours.
pub const PREFIX: &str = "kilo.squat.ai/";

/// A row of [`ANNOTATIONS`]: one annotation of Node objects, how it is written and read, and its
/// documentation.
pub struct Annotation {
    /// Name with its prefix.
    pub name: &'static str,
    /// Who writes it, and what they write.
    pub writer: Writer,
    /// Examples of its value, in Markdown, for the tables of docs/annotations.md.
    pub example: &'static str,
    /// What it means, in Markdown.
    pub meaning: &'static str,
    /// What the operator should do about a value that cannot be read.
    remedy: &'static str,
    /// Reads a value into the node; one that cannot be read leaves the node unchanged.
    read: fn(&mut Value<'_>, &mut CheckedIn),
}

/// Who writes an annotation, and its value; `None`: the annotation is absent.
#[derive(Clone, Copy)]
pub enum Writer {
    /// The cluster's operator. The function returns what they would write for a node like this one.
    Operator(fn(&Node) -> Option<String>),
    /// The agent of the node. The function returns the value; the lifetime says how long it counts.
    Agent(Lifetime, fn(&Published) -> Option<String>),
}

/// How long an agent's value counts, which decides who removes it and whether slices carry it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Lifetime {
    /// Until the node is uninstalled: Kilo's own agent renews it, or a stale one does no harm.
    Node,
    /// As long as the agent that wrote it, which thereby declares that it takes part in failover: void once
    /// another agent has renewed the heartbeat, and removed before Kilo's own agent comes.
    Agent,
    /// Until the next heartbeat, even one of Kilo's own agent. Slices have their own field for
    /// whether a node is alive.
    Heartbeat,
    /// As [`Self::Heartbeat`], but written by our agents alone: removed before Kilo's own agent comes.
    OurHeartbeat,
}

/// Unix seconds of the last heartbeat of the node's agent; 0: another agent has declared the node dead.
pub const LAST_SEEN: &str = "kilo.squat.ai/last-seen";

/// Where the node's WireGuard sees peers behind NAT.
pub const DISCOVERED_ENDPOINTS: &str = "kilo.squat.ai/discovered-endpoints";

/// This `last-seen`, and after how many seconds it is renewed, as `1763866800/300`.
const HEARTBEAT: &str = "kilo.squat.ai/heartbeat";

/// Version of the signals that this agent knows.
const SIGNAL: &str = "1";

const AGENT: &str = "the node's agent writes it; check that the agent is running";

/// Every annotation, in the order in which they are read: an override stands before what it overrides.
pub const ANNOTATIONS: &[Annotation] = &[
    Annotation {
        name: "kilo.squat.ai/location",
        writer: Writer::Operator(|node| Some(node.location.clone())),
        example: "`aws`",
        meaning: "the node's location; overrides the label of `--topology-label`, also when empty",
        remedy: "",
        read: |value, node| value.text.clone_into(&mut node.node.location),
    },
    Annotation {
        name: "kilo.squat.ai/leader",
        writer: Writer::Operator(|node| node.leader.then(String::new)),
        example: "`true`",
        meaning: "the node wants to lead its location; the value does not matter, `leader-` takes it back",
        remedy: "",
        read: |value, node| {
            node.node.leader = true;
            value.counts_all_the_same(&node.node.name);
        },
    },
    Annotation {
        name: "kilo.squat.ai/gateway",
        writer: Writer::Operator(|node| node.gateway.then(|| "true".to_owned())),
        example: "`true`",
        meaning: "the node carries a share of its location's traffic beside the leader, with `--failover=auto` \
                  on every node of the mesh, each of which has a private address \
                  ([more](gateways.md#turn-it-on))",
        remedy: "write true, or take the annotation back",
        read: |value, node| node.node.gateway = value.parse().unwrap_or(false),
    },
    Annotation {
        name: "kilo.squat.ai/relay",
        writer: Writer::Operator(|node| node.relay.then(|| "true".to_owned())),
        example: "`true`",
        meaning: "while the node is a leader or stand-by, it relays WireGuard's ciphertext between locations that do \
                  not reach each other; open its UDP ports 51830 to 52829 ([more](nat.md#relays))",
        remedy: "write true or false",
        read: |value, node| node.node.relay = value.parse().unwrap_or(false),
    },
    Annotation {
        name: "kilo.squat.ai/force-endpoint",
        writer: Writer::Operator(|node| {
            node.endpoint.as_ref().filter(|_| node.endpoint_forced).map(ToString::to_string)
        }),
        example: "`vpn.example.com:51820`, `[2001:db8::1]:51820`",
        meaning: "where others reach the node; names are resolved periodically",
        remedy: "",
        read: |value, node| {
            node.node.endpoint = value.parse();
            node.node.endpoint_forced = node.endpoint.is_some();
        },
    },
    Annotation {
        name: "kilo.squat.ai/force-internal-ip",
        writer: Writer::Operator(|node| match node.internal_ip_by {
            InternalIpBy::Agent => None,
            InternalIpBy::Forced => node.internal_ip.map(|net| net.to_string()),
            InternalIpBy::ForcedNone => Some("-".to_owned()),
        }),
        example: "`10.1.0.11/24`",
        meaning: "the private address; `\"\"` or `-`: the node has none and is a location of its own",
        remedy: "write for example 10.1.0.2/24, or - for a node without private address",
        read: |value, node| match value.text {
            "" | "-" => node.node.internal_ip_by = InternalIpBy::ForcedNone,
            _ => {
                node.node.internal_ip = value.prefix();
                if node.internal_ip.is_some() {
                    node.node.internal_ip_by = InternalIpBy::Forced;
                }
            }
        },
    },
    Annotation {
        name: "kilo.squat.ai/persistent-keepalive",
        writer: Writer::Operator(|node| {
            (node.persistent_keepalive > 0).then(|| node.persistent_keepalive.to_string())
        }),
        example: "`25`",
        meaning: "seconds between keepalives; for nodes behind NAT",
        remedy: "write seconds, 0 to 65535",
        read: |value, node| node.node.persistent_keepalive = value.parse::<u16>().unwrap_or(0).into(),
    },
    Annotation {
        name: "kilo.squat.ai/allowed-location-ips",
        writer: Writer::Operator(|node| {
            let offered: Vec<_> = node.allowed_location_ips.iter().map(ToString::to_string).collect();
            (!offered.is_empty()).then(|| offered.join(","))
        }),
        example: "`192.168.7.0/24,10.200.0.1/32`",
        meaning: "networks behind the node's location that the mesh reaches through its leader",
        remedy: "write prefixes separated by commas, for example 192.168.7.0/24",
        read: |value, node| node.node.allowed_location_ips = value.prefix_list(),
    },
    Annotation {
        name: "kilo.squat.ai/endpoint",
        writer: Writer::Agent(Lifetime::Node, |own| own.endpoint.as_ref().map(ToString::to_string)),
        example: "`192.0.2.11:51820`",
        meaning: "where others reach the node",
        remedy: AGENT,
        read: |value, node| {
            if !node.endpoint_forced {
                node.node.endpoint = value.parse();
            }
        },
    },
    Annotation {
        name: "kilo.squat.ai/ipv6-endpoint",
        writer: Writer::Agent(Lifetime::Node, |own| own.ipv6_endpoint.map(|endpoint| endpoint.to_string())),
        example: "`[2001:db8::11]:51820`",
        meaning: "where the node can also be reached by IPv6: others try it when they do not reach its endpoint; \
                  leaders and stand-bys publish it where [other ways are looked for](nat.md#other-direct-ways)",
        remedy: AGENT,
        read: |value, node| node.node.ipv6_endpoint = value.public_v6(),
    },
    Annotation {
        name: "kilo.squat.ai/relay-off",
        writer: Writer::Agent(Lifetime::Node, |own| own.relay_off.then(|| "true".to_owned())),
        example: "`true`",
        meaning: "the agent runs with `--relay=off`: others neither relay for the node, nor reach it through a relay, \
                  nor try other places than its endpoint ([more](nat.md#relays)); leaders and stand-bys publish it where [other ways are looked \
                  for](nat.md#other-direct-ways)",
        remedy: AGENT,
        read: |value, node| node.node.relay_off = value.parse().unwrap_or(false),
    },
    Annotation {
        name: "kilo.squat.ai/internal-ip",
        writer: Writer::Agent(Lifetime::Node, |own| Some(text_or_empty(own.internal_ip))),
        example: "`10.1.0.11/24`",
        meaning: "the private address; empty if the node has none",
        remedy: AGENT,
        read: |value, node| {
            if node.internal_ip_by == InternalIpBy::Agent {
                node.node.internal_ip = if value.text.is_empty() { None } else { value.prefix() };
            }
        },
    },
    Annotation {
        name: "kilo.squat.ai/key",
        writer: Writer::Agent(Lifetime::Node, |own| own.key.map(|key| key.to_string())),
        example: "44 characters of base64",
        meaning: "the WireGuard public key",
        remedy: AGENT,
        read: |value, node| node.node.key = value.parse(),
    },
    Annotation {
        name: LAST_SEEN,
        writer: Writer::Agent(Lifetime::Heartbeat, |own| Some(own.last_seen.to_string())),
        example: "`1763866800`",
        meaning: "the heartbeat: Unix seconds, renewed every 30 s, or as `heartbeat` says",
        remedy: AGENT,
        read: |value, node| node.last_seen = value.parse().unwrap_or(0),
    },
    Annotation {
        name: HEARTBEAT,
        writer: Writer::Agent(Lifetime::OurHeartbeat, |own| {
            own.heartbeat.map(|seconds| format!("{}/{seconds}", own.last_seen))
        }),
        example: "`1763866800/300`",
        meaning: "this `last-seen`, and after how many seconds it is renewed: 30, or 300 where \
                  [nobody needs it sooner](slices.md#heartbeats); with another `last-seen` it is of an agent \
                  that has gone: nothing is promised, and `signal`, `leading` and `leaders` do not count",
        remedy: AGENT,
        read: |value, node| node.node.heartbeat = value.heartbeat(node.last_seen),
    },
    Annotation {
        name: "kilo.squat.ai/wireguard-ip",
        writer: Writer::Agent(Lifetime::Node, |own| Some(text_or_empty(own.wireguard_ip))),
        example: "`10.4.0.1/16`",
        meaning: "the address of the WireGuard device on a leader, empty otherwise",
        remedy: AGENT,
        read: |value, node| node.node.wireguard_ip = value.parse_unless_empty(),
    },
    Annotation {
        name: DISCOVERED_ENDPOINTS,
        writer: Writer::Agent(Lifetime::Node, |own| seen_endpoints_text(&own.discovered_endpoints)),
        example: "`{\"KEY\":{\"IP\":\"203.0.113.7\",\"Port\":40123,\"Zone\":\"\"}}`",
        meaning: "where this node's WireGuard sees peers behind NAT",
        remedy: AGENT,
        read: |value, node| node.node.discovered_endpoints = value.seen_endpoints(),
    },
    Annotation {
        name: "kilo.squat.ai/granularity",
        writer: Writer::Agent(Lifetime::Node, |own| {
            own.granularity.map(|granularity| granularity.as_str().to_owned())
        }),
        example: "`location`",
        meaning: "the `--mesh-granularity` the node's agent runs with",
        remedy: AGENT,
        read: |value, node| node.node.granularity = value.parse::<Granularity>(),
    },
    Annotation {
        name: "kilo.squat.ai/cni-compatibility-ip",
        writer: Writer::Agent(Lifetime::Node, |own| {
            own.cni_compatibility_ip.map(|address| address.to_string())
        }),
        example: "`10.42.0.7/32`",
        meaning: "where the CNI's tunnel ends, in add-on mode",
        remedy: AGENT,
        read: |value, node| node.node.cni_compatibility_ip = value.parse_unless_empty(),
    },
    Annotation {
        name: "kilo.squat.ai/signal",
        writer: Writer::Agent(Lifetime::Agent, |own| own.signal.then(|| SIGNAL.to_owned())),
        example: "`1`",
        meaning: "version of the signals the node knows, with `--failover=auto`: it can be a stand-by of its \
                  leader, and as a leader follows other locations' changes",
        remedy: AGENT,
        // Nothing is known about later versions.
        read: |value, node| node.node.signal = value.text == SIGNAL,
    },
    Annotation {
        name: "kilo.squat.ai/leading",
        writer: Writer::Agent(Lifetime::Agent, |own| own.leading.map(|term| term.to_string())),
        example: "`65537`",
        meaning: "the term in which the node took over its location (TERM of `kgctl status` × 65536 and a number that \
                  decides ties); the latest counts, even where Kilo's rule chooses another leader",
        remedy: "the node's agent writes its own while it leads; to take this one back: kubectl annotate node NODE \
                 kilo.squat.ai/leading-",
        read: |value, node| node.node.leading = value.term(),
    },
    Annotation {
        name: "kilo.squat.ai/leaders",
        writer: Writer::Agent(Lifetime::Agent, |own| own.leaders.map(|leaders| leaders.to_string())),
        example: "`2`",
        meaning: "the `--leaders` the node's agent runs with; present once any node asks for several \
                  active leaders, which need it on every node of the mesh",
        remedy: AGENT,
        read: |value, node| node.node.leaders = value.parse().filter(|leaders| *leaders > 0),
    },
    Annotation {
        name: "kilo.squat.ai/state",
        writer: Writer::Agent(Lifetime::OurHeartbeat, |own| own.state.clone()),
        example: "`member of location:aws`",
        meaning: "for people: `leader of` or `member of` a location, or `not in the mesh:` and why; as the node's \
                  agent knew it last, so look at `last-seen`, too",
        remedy: AGENT,
        read: |_, _| {},
    },
];

/// Reads all annotations that are present into `node`; adds those that cannot be read, or
/// are not known, to `problems`.
pub(super) fn read(present: &BTreeMap<String, String>, node: &mut CheckedIn, problems: &mut Vec<String>) {
    let mut known = 0;
    for row in ANNOTATIONS {
        let Annotation { name, remedy, read, .. } = row;
        let Some(text) = present.get(*name) else { continue };
        known += 1;
        // `last-seen` has been read by then: its row comes before those that can be void.
        if !row.is_void(present, node.last_seen) {
            read(&mut Value { text, name, remedy, problems }, node);
        }
    }
    unknown::report(present, known, problems);
}

impl Annotation {
    /// Whether the value no longer counts: its agent has gone without removing it.
    fn is_void(&self, present: &BTreeMap<String, String>, last_seen: i64) -> bool {
        matches!(self.writer, Writer::Agent(Lifetime::Agent, _)) && has_another_agent(present, last_seen)
    }

    /// The value as slices carry it: `None` if it holds only until the next heartbeat, or is void, since
    /// readers of a slice cannot tell that it is.
    pub(super) fn passed_on<'a>(
        &self,
        present: &'a BTreeMap<String, String>,
        last_seen: i64,
    ) -> Option<&'a String> {
        let is_of_a_moment =
            matches!(self.writer, Writer::Agent(Lifetime::Heartbeat | Lifetime::OurHeartbeat, _));
        present.get(self.name).filter(|_| !is_of_a_moment && !self.is_void(present, last_seen))
    }
}

/// Whether an agent that promises no heartbeats has renewed the heartbeat since one of ours did.
fn has_another_agent(present: &BTreeMap<String, String>, last_seen: i64) -> bool {
    let promise = present.get(HEARTBEAT).and_then(|text| promised(text));
    promise.is_some_and(|(seen, _)| !is_of_heartbeat(seen, last_seen))
}

/// The `last-seen`, and the seconds until it is renewed; `None`: malformed.
fn promised(text: &str) -> Option<(i64, u16)> {
    let (seen, seconds) = text.split_once('/')?;
    Some((seen.parse().ok()?, seconds.parse().ok().filter(|seconds| *seconds > 0)?))
}

/// Whether the values written with heartbeat `seen` come from the agent that renews it now. Somebody may have
/// set the heartbeat to 0, which proves nothing.
const fn is_of_heartbeat(seen: i64, last_seen: i64) -> bool {
    seen == last_seen || last_seen == 0
}

/// The annotations that an agent wants on its node, by full name; `None`: must not be there.
pub fn wanted(published: &Published) -> BTreeMap<String, Option<String>> {
    by_agents().map(|(name, print)| (name.to_owned(), print(published))).collect()
}

/// All annotations of a node like this one, those of operators and those of agents.
pub(super) fn of_node(node: &Node, last_seen: i64) -> BTreeMap<String, String> {
    let published = Published {
        endpoint: node.endpoint.clone(),
        ipv6_endpoint: node.ipv6_endpoint,
        relay_off: node.relay_off,
        internal_ip: node.internal_ip,
        key: node.key,
        last_seen,
        wireguard_ip: node.wireguard_ip,
        discovered_endpoints: node.discovered_endpoints.clone(),
        granularity: node.granularity,
        cni_compatibility_ip: node.cni_compatibility_ip,
        signal: node.signal,
        leading: node.leading,
        leaders: node.leaders,
        // Momentary: nobody reads it back.
        state: None,
        heartbeat: node.heartbeat,
    };
    let print = |annotation: &Annotation| {
        let value = match annotation.writer {
            Writer::Operator(print) => print(node),
            Writer::Agent(_, print) => print(&published),
        };
        Some((annotation.name.to_owned(), value?))
    };
    ANNOTATIONS.iter().filter_map(print).collect()
}

/// The wanted annotations that differ from those present; `None` removes one.
pub fn changes(
    present: &BTreeMap<String, String>,
    wanted: BTreeMap<String, Option<String>>,
) -> BTreeMap<String, Option<String>> {
    wanted.into_iter().filter(|(name, value)| present.get(name) != value.as_ref()).collect()
}

/// The annotations that Kilo's own agent would not renew: they are removed before it takes the node over.
pub fn without_failover() -> BTreeMap<String, Option<String>> {
    let is_ours = |lifetime| matches!(lifetime, Lifetime::Agent | Lifetime::OurHeartbeat);
    let ours = ANNOTATIONS.iter().filter(|row| matches!(row.writer, Writer::Agent(of, _) if is_ours(of)));
    ours.map(|row| (row.name.to_owned(), None)).collect()
}

/// Every annotation that agents write, to be removed.
pub fn retracted() -> BTreeMap<String, Option<String>> {
    by_agents().map(|(name, _)| (name.to_owned(), None)).collect()
}

fn by_agents() -> impl Iterator<Item = (&'static str, fn(&Published) -> Option<String>)> {
    ANNOTATIONS.iter().filter_map(|annotation| match annotation.writer {
        Writer::Agent(_, print) => Some((annotation.name, print)),
        Writer::Operator(_) => None,
    })
}

fn text_or_empty(prefix: Option<IpNet>) -> String {
    prefix.map(|prefix| prefix.to_string()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ipv6_endpoint_is_public() {
        let read = |text: &str| {
            let (mut node, mut problems) = (CheckedIn { node: Node::default(), last_seen: 0 }, Vec::new());
            let present = BTreeMap::from([(format!("{PREFIX}ipv6-endpoint"), text.to_owned())]);
            read(&present, &mut node, &mut problems);
            (node.node.ipv6_endpoint.map(|endpoint| endpoint.to_string()), problems.len())
        };
        assert_eq!(read("[2001:db8::1]:51820"), (Some("[2001:db8::1]:51820".to_owned()), 0));
        for wrong in [
            "[::1]:51820",
            "[fe80::1%2]:1",
            "[fe80::1]:1",
            "[::]:1",
            "[::ffff:10.0.0.5]:1",
            "[fec0::1]:1",
            "[fd00::1]:1",
            "[ff02::1]:1",
            "[2001:db8::1]:0",
            "192.0.2.1:1",
            "x",
        ] {
            assert_eq!(read(wrong), (None, 1), "{wrong}");
        }
    }

    #[test]
    fn every_name_is_there_once_and_has_our_prefix() {
        let names: std::collections::BTreeSet<_> = ANNOTATIONS.iter().map(|row| row.name).collect();
        assert_eq!(names.len(), ANNOTATIONS.len());
        assert!(names.iter().all(|name| name.starts_with(PREFIX)), "{names:?}");
    }
}

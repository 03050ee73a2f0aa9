//! Parsers for values of command line flags, with error messages that list what is possible.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::Path,
    str::FromStr,
    time::Duration,
};

use clap::{ValueEnum, builder::PossibleValue};
use ipnet::IpNet;
use kilo_common::maps::VXLAN_PORT;

use kilo_core::{
    settings::{BackendKind, Granularity, LogLevel},
    wireguard::{is_dns_name, is_interface_name},
};

/// `--backend` and `--backend-dir` do not go together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BackendMismatch {
    /// A directory without a name.
    #[error("--backend=file needs --backend-dir")]
    NoDirectory,
    /// A directory that would not be read.
    #[error("--backend-dir goes with --backend=file only: write --backend=file, or leave --backend-dir out")]
    NotFile,
}

/// The directory of the objects; `None`: they are read from an API server.
///
/// # Errors
/// When one of the two flags (`--backend`, `--backend-dir`) lacks the other.
pub const fn objects_directory(
    backend: BackendKind,
    directory: Option<&Path>,
) -> Result<Option<&Path>, BackendMismatch> {
    match (backend, directory) {
        (BackendKind::File, None) => Err(BackendMismatch::NoDirectory),
        (BackendKind::Kubernetes, Some(_)) => Err(BackendMismatch::NotFile),
        (_, directory) => Ok(directory),
    }
}

/// A flag of `kgctl` whose value agents have, too, and publish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OrAuto<T> {
    /// `auto`: the value that nodes publish.
    Auto,
    /// The value of the command line.
    Given(T),
}

impl ValueEnum for OrAuto<Granularity> {
    fn value_variants<'a>() -> &'a [Self] {
        &[
            Self::Given(Granularity::Location),
            Self::Given(Granularity::Full),
            Self::Given(Granularity::Cross),
            Self::Auto,
        ]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        match self {
            Self::Auto => Some(PossibleValue::new("auto").help("What the nodes say")),
            Self::Given(granularity) => granularity.to_possible_value(),
        }
    }
}

/// Text that is neither `auto` nor a prefix.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is neither auto nor a valid prefix; write for example 10.4.0.0/16 or fd00:10::/64")]
pub struct InvalidSubnet(String);

/// Parses `auto` or `ADDRESS/LENGTH`.
pub fn parse_subnet(text: &str) -> Result<OrAuto<IpNet>, InvalidSubnet> {
    match text {
        "auto" => Ok(OrAuto::Auto),
        _ => text.parse().map(OrAuto::Given).map_err(|_| InvalidSubnet(text.to_owned())),
    }
}

/// Text that is not a duration in Go's syntax.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a duration; write for example 30s, 1m30s or 500ms")]
pub struct InvalidDuration(String);

/// Parses a duration as Go's `time.ParseDuration` does (nothing negative): a
/// sequence of decimal numbers, each with a unit of `ns us µs ms s m h`.
pub fn parse_duration(text: &str) -> Result<Duration, InvalidDuration> {
    let invalid = || InvalidDuration(text.to_owned());
    let mut rest = text.strip_prefix('+').unwrap_or(text);
    if rest == "0" {
        return Ok(Duration::ZERO);
    }
    if rest.is_empty() {
        return Err(invalid());
    }
    let mut total = 0.0_f64;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(invalid)?;
        let number: f64 = rest[..digits].parse().map_err(|_| invalid())?;
        rest = &rest[digits..];
        let unit_len = rest.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(rest.len());
        let seconds = match &rest[..unit_len] {
            "ns" => 1e-9,
            "us" | "µs" | "μs" => 1e-6,
            "ms" => 1e-3,
            "s" => 1.0,
            "m" => 60.0,
            "h" => 3600.0,
            _ => return Err(invalid()),
        };
        total += number * seconds;
        rest = &rest[unit_len..];
    }
    Duration::try_from_secs_f64(total).map_err(|_| invalid())
}

/// Text that is neither true nor false.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is neither true nor false")]
pub struct InvalidBool(String);

/// Parses a switch's value as Go's `strconv.ParseBool` does, so that existing manifests keep working.
pub fn parse_bool(text: &str) -> Result<bool, InvalidBool> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        _ => Err(InvalidBool(text.to_owned())),
    }
}

/// One value of a flag for prefixes: a comma-separated list, possibly empty. The flag may be repeated; the
/// lists are joined.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrefixList(Vec<IpNet>);

/// Text that is not a prefix.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidPrefix {
    /// An address alone, and the prefix that holds nothing else.
    #[error("{0} has no prefix length; write {1} for this address, or for example 10.4.0.0/16 for a network")]
    NoLength(IpAddr, IpNet),
    /// Anything else.
    #[error("{0:?} is not a valid prefix; write for example 10.4.0.0/16 or fd00:10::/64")]
    NotAPrefix(String),
}

/// Parses `ADDRESS/LENGTH`.
pub fn parse_cidr(text: &str) -> Result<IpNet, InvalidPrefix> {
    text.parse().map_err(|_| match text.parse::<IpAddr>() {
        Ok(address) => InvalidPrefix::NoLength(address, address.into()),
        Err(_) => InvalidPrefix::NotAPrefix(text.to_owned()),
    })
}

/// Text that is not an IP address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidIp {
    /// An address with a prefix length, and without.
    #[error("{0} has a prefix length; write {1}")]
    Prefix(IpNet, IpAddr),
    /// Anything else.
    #[error("{0:?} is not an IP address; write for example 10.42.1.2 or fd00:42::2")]
    NotAnAddress(String),
}

/// Parses an IP address.
pub fn parse_ip(text: &str) -> Result<IpAddr, InvalidIp> {
    text.parse().map_err(|_| match text.parse::<IpNet>() {
        Ok(prefix) => InvalidIp::Prefix(prefix, prefix.addr()),
        Err(_) => InvalidIp::NotAnAddress(text.to_owned()),
    })
}

impl FromStr for PrefixList {
    type Err = InvalidPrefix;
    fn from_str(text: &str) -> Result<Self, InvalidPrefix> {
        let items = text.split(',').map(str::trim).filter(|_| !text.is_empty());
        items.map(|item| parse_cidr(item).map(|prefix| prefix.trunc())).collect::<Result<_, _>>().map(Self)
    }
}

impl PrefixList {
    /// The prefixes of all lists, in order.
    pub fn join(lists: &[Self]) -> Vec<IpNet> {
        lists.iter().flat_map(|list| &list.0).copied().collect()
    }
}

/// Text that is not an address to listen on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not an address to listen on; write for example :1107, 127.0.0.1:1107 or [::1]:1107")]
pub struct InvalidListen(String);

/// Parses `:PORT` (all addresses, both families), `IP:PORT` or `localhost:PORT`. Brackets may enclose
/// addresses of either family, because a manifest does not know which one it gets.
pub fn parse_listen(text: &str) -> Result<SocketAddr, InvalidListen> {
    let invalid = || InvalidListen(text.to_owned());
    match text.strip_prefix(':') {
        Some(port) => {
            Ok(SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), port.parse().map_err(|_| invalid())?))
        }
        None => {
            let text = text.replacen("localhost:", "127.0.0.1:", 1);
            let bracketed = text.strip_prefix('[').and_then(|rest| rest.split_once("]:"));
            match bracketed.and_then(|(ip, port)| Some((ip.parse::<Ipv4Addr>().ok()?, port))) {
                Some((ip, port)) => {
                    port.parse().map(|port| SocketAddr::new(ip.into(), port)).map_err(|_| invalid())
                }
                None => text.parse().map_err(|_| invalid()),
            }
        }
    }
}

/// Text that is not an address with a port.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not an address with a port; write for example 192.0.2.80:443 or [2001:db8::80]:443, not a name"
)]
pub struct InvalidAddress(String);

/// Parses `IP:PORT`.
pub fn parse_address(text: &str) -> Result<SocketAddr, InvalidAddress> {
    text.parse().map_err(|_| InvalidAddress(text.to_owned()))
}

/// Text that is not a port.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a valid port; possible values are 1 to 65535")]
pub struct InvalidPort(String);

/// Parses a port, 1 to 65535.
pub fn parse_port(text: &str) -> Result<u16, InvalidPort> {
    text.parse().ok().filter(|&port| port > 0).ok_or_else(|| InvalidPort(text.to_owned()))
}

/// Text that is not a port on which an agent's WireGuard can listen.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidWireguardPort {
    /// The text is not a port.
    #[error(transparent)]
    Port(#[from] InvalidPort),
    /// Nodes send each other VXLAN and signals to it.
    #[error(
        "{VXLAN_PORT} is the port of Kilo's own VXLAN and signals between nodes; choose another one for WireGuard"
    )]
    Taken,
}

/// Parses a port for an agent's WireGuard.
pub fn parse_wireguard_port(text: &str) -> Result<u16, InvalidWireguardPort> {
    match parse_port(text)? {
        VXLAN_PORT => Err(InvalidWireguardPort::Taken),
        port => Ok(port),
    }
}

/// Text that is not a number, or out of range.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a number from {least} to {most}")]
pub struct InvalidNumber {
    text: String,
    least: u16,
    most: u16,
}

/// Parses a number from `LEAST` to `MOST`.
pub fn parse_number<const LEAST: u8, const MOST: u8>(text: &str) -> Result<u8, InvalidNumber> {
    let invalid = || InvalidNumber { text: text.to_owned(), least: LEAST.into(), most: MOST.into() };
    text.parse().ok().filter(|number| (LEAST..=MOST).contains(number)).ok_or_else(invalid)
}

/// Parses a rate in megabits per second; 0 means unlimited.
pub fn parse_rate(text: &str) -> Result<u16, InvalidNumber> {
    text.parse().map_err(|_| InvalidNumber { text: text.to_owned(), least: 0, most: u16::MAX })
}

/// Text that is not a valid period.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidPeriod {
    /// Not a duration at all.
    #[error(transparent)]
    NotADuration(#[from] InvalidDuration),
    /// A duration, but none that takes time.
    #[error("{0:?} is not longer than zero; write for example 30s, 1m30s or 500ms")]
    Zero(String),
}

/// Parses a duration other than zero, which would leave no pause.
pub fn parse_period(text: &str) -> Result<Duration, InvalidPeriod> {
    match parse_duration(text)? {
        Duration::ZERO => Err(InvalidPeriod::Zero(text.to_owned())),
        period => Ok(period),
    }
}

/// Parses the interval of failover probes.
///
/// # Errors
/// When it is not a duration, or outside 20 ms to 200 ms.
#[cfg(feature = "agent")]
pub fn parse_failover_interval(text: &str) -> Result<kilo_failover::Params, String> {
    let interval = parse_duration(text).map_err(|error| error.to_string())?;
    let micros = u64::try_from(interval.as_micros()).unwrap_or(u64::MAX);
    kilo_failover::Params::new(micros).map_err(|error| error.to_string())
}

/// Text that is not a valid label key.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a valid label; write for example topology.kubernetes.io/region")]
pub struct InvalidLabel(String);

/// Parses a label key by the rules of Kubernetes: an optional DNS name and a slash, then 1 to 63 letters,
/// digits, `-`, `_` and `.` that start and end with a letter or digit.
pub fn parse_label(text: &str) -> Result<String, InvalidLabel> {
    let (prefix, name) = text.split_once('/').map_or((None, text), |(prefix, name)| (Some(prefix), name));
    let good = name.len() <= 63
        && name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.ends_with(|c: char| c.is_ascii_alphanumeric())
        && prefix.is_none_or(is_dns_name);
    if good { Ok(text.to_owned()) } else { Err(InvalidLabel(text.to_owned())) }
}

/// Text that does not name a Secret.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} does not name a Secret; write for example kilo/peer-validation-webhook-tls")]
pub struct InvalidSecret(String);

/// Parses `NAMESPACE/NAME`.
pub fn parse_secret(text: &str) -> Result<(String, String), InvalidSecret> {
    let parts = text.split_once('/').filter(|(namespace, name)| is_dns_name(namespace) && is_dns_name(name));
    let (namespace, name) = parts.ok_or_else(|| InvalidSecret(text.to_owned()))?;
    Ok((namespace.to_owned(), name.to_owned()))
}

/// Text that is not a valid node name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a valid node name; names are DNS names in lower case, for example node-1.example.com")]
pub struct InvalidNodeName(String);

/// Parses a node name; empty = the host's name.
pub fn parse_node_name(text: &str) -> Result<String, InvalidNodeName> {
    if text.is_empty() || is_dns_name(text) {
        Ok(text.to_owned())
    } else {
        Err(InvalidNodeName(text.to_owned()))
    }
}

/// Text that cannot be the name of a network interface.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} cannot be the name of an interface; write 1 to 15 bytes without slash, colon and white space, for example \
     kilo0"
)]
pub struct InvalidInterface(String);

/// Parses the name of a network interface.
pub fn parse_interface(text: &str) -> Result<String, InvalidInterface> {
    if is_interface_name(text) { Ok(text.to_owned()) } else { Err(InvalidInterface(text.to_owned())) }
}

/// A URL in place of a node's name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("this is an address, not the name of a node; to ask the agent there, write --agent={0}")]
pub struct UrlForNode(String);

/// Takes the name of a node as it is, and refuses a URL, which belongs to `--agent`.
pub fn parse_node_not_url(text: &str) -> Result<String, UrlForNode> {
    if text.contains("://") { Err(UrlForNode(text.to_owned())) } else { Ok(text.to_owned()) }
}

/// The `tracing-subscriber` filter of a program with this crate name. Libraries log only warnings and errors,
/// and those for the API nothing, because our code reports their errors; `all` and `none` apply to libraries,
/// too.
pub fn log_filter(level: LogLevel, program: &str) -> String {
    let directive = match level {
        LogLevel::All => return "trace".to_owned(),
        LogLevel::None => return "off".to_owned(),
        LogLevel::Debug => "debug",
        LogLevel::Info => "info",
        LogLevel::Warn => "warn",
        LogLevel::Error => "error",
    };
    let ours = [program, "kilo_agent", "kilo_core", "kilo_host", "kilo_ebpf"];
    let ours: Vec<_> = ours.iter().map(|name| format!("{name}={directive}")).collect();
    format!("warn,kube_client=off,kube_runtime=off,{}", ours.join(","))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_and_the_backend_that_reads_it_are_given_together() {
        let directory = Some(Path::new("/cluster"));
        assert_eq!(objects_directory(BackendKind::File, directory), Ok(directory));
        assert_eq!(objects_directory(BackendKind::Kubernetes, None), Ok(None));
        assert_eq!(objects_directory(BackendKind::File, None), Err(BackendMismatch::NoDirectory));
        assert_eq!(objects_directory(BackendKind::Kubernetes, directory), Err(BackendMismatch::NotFile));
    }

    #[test]
    fn kgctl_takes_every_granularity_and_auto() {
        let all = Granularity::value_variants().iter().map(|granularity| OrAuto::Given(*granularity));
        let all: Vec<_> = all.chain([OrAuto::Auto]).collect();
        assert_eq!(OrAuto::<Granularity>::value_variants(), all);
    }

    #[test]
    fn wireguard_has_a_port_of_its_own() {
        assert_eq!(parse_wireguard_port("51820"), Ok(51_820));
        assert_eq!(parse_wireguard_port("51821"), Err(InvalidWireguardPort::Taken));
        assert_eq!(
            parse_wireguard_port("0").unwrap_err().to_string(),
            parse_port("0").unwrap_err().to_string()
        );
    }

    #[test]
    fn a_subnet_is_a_prefix_or_left_to_the_nodes() {
        assert_eq!(parse_subnet("auto"), Ok(OrAuto::Auto));
        assert_eq!(parse_subnet("10.5.0.0/16"), Ok(OrAuto::Given("10.5.0.0/16".parse().unwrap())));
        for text in ["", "Auto", "10.5.0.0"] {
            assert!(parse_subnet(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_period_is_longer_than_zero() {
        assert_eq!(parse_period("1ms"), Ok(Duration::from_millis(1)));
        for text in ["0", "0s", "0h0m"] {
            let said = parse_period(text).unwrap_err().to_string();
            assert!(said.contains("not longer than zero"), "{said}");
        }
        assert!(parse_period("soon").unwrap_err().to_string().contains("not a duration"));
    }

    #[test]
    fn labels_are_those_that_kubernetes_accepts() {
        for text in ["region", "topology.kubernetes.io/region", "a.b/C_d-e.f", "x"] {
            assert_eq!(parse_label(text).as_deref(), Ok(text));
        }
        for text in ["", "/", "a/", "/b", "a/b/c", "a b", "-a", "a-", "A.b/c", &"x".repeat(64)] {
            assert!(parse_label(text).is_err(), "{text}");
        }
    }

    #[test]
    fn durations_are_read_as_go_writes_them() {
        let cases = [
            ("30s", 30_000),
            ("1m30s", 90_000),
            ("1.5h", 5_400_000),
            ("500ms", 500),
            ("1h0m0s", 3_600_000),
            ("+.5s", 500),
            ("0", 0),
        ];
        for (text, millis) in cases {
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(millis)), "{text}");
        }
    }

    #[test]
    fn what_is_no_duration_is_refused() {
        for text in
            ["", "30", "s", "-1s", "1 s", "1d", "1..5s", "+", ".s", "1e9h1e9h", "99999999999999999999h"]
        {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_port_alone_means_all_addresses_of_both_families() {
        assert_eq!(parse_listen(":1107"), Ok("[::]:1107".parse().unwrap()));
        assert_eq!(parse_listen("127.0.0.1:1"), Ok("127.0.0.1:1".parse().unwrap()));
        assert_eq!(parse_listen("localhost:1"), Ok("127.0.0.1:1".parse().unwrap()));
        assert_eq!(parse_listen("[fd00::1]:1107"), Ok("[fd00::1]:1107".parse().unwrap()));
        assert_eq!(parse_listen("[10.0.0.1]:1107"), Ok("10.0.0.1:1107".parse().unwrap()));
        for text in [
            "",
            "1107",
            ":x",
            ":70000",
            "host:1",
            "[]:1107",
            "[10.0.0.1]:x",
            "[10.0.0.1]1107",
            "fd00::1:1107",
        ] {
            assert!(parse_listen(text).is_err(), "{text}");
        }
    }

    #[test]
    fn prefixes_come_in_lists_that_may_be_empty() {
        let read = |lists: &[&str]| {
            let lists: Result<Vec<PrefixList>, _> = lists.iter().map(|list| list.parse()).collect();
            lists.map(|lists| PrefixList::join(&lists))
        };
        assert_eq!(read(&[""]), Ok(vec![]));
        let both = vec!["10.0.0.0/8".parse().unwrap(), "fd00::/64".parse().unwrap()];
        assert_eq!(read(&["10.1.2.3/8,fd00::1/64"]), Ok(both.clone()));
        assert_eq!(read(&["10.0.0.0/8", "fd00::/64"]), Ok(both));
        for rubbish in ["x", "10.0.0.0", "10.0.0.0/33", "10.0.0.0/8,", ",", "10.0.0.0/8;fd00::/64"] {
            assert!(read(&[rubbish]).is_err(), "{rubbish}");
        }
    }

    #[test]
    fn a_prefix_without_length_and_an_address_with_one_are_answered_with_what_is_right() {
        let prefix = |text| parse_cidr(text).unwrap_err().to_string();
        assert!(prefix("10.1.2.3").contains("10.1.2.3 has no prefix length; write 10.1.2.3/32 for"));
        assert!(prefix("fd00::1").contains("write fd00::1/128 for this address"));
        assert!(prefix("10.1.2.3/33").contains("\"10.1.2.3/33\" is not a valid prefix"));
        assert_eq!(parse_ip("10.1.2.3"), Ok([10, 1, 2, 3].into()));
        let address = |text| parse_ip(text).unwrap_err().to_string();
        assert_eq!(address("10.1.2.3/32"), "10.1.2.3/32 has a prefix length; write 10.1.2.3");
        assert!(address("a1").contains("\"a1\" is not an IP address; write for example 10.42.1.2"));
    }

    #[test]
    fn switches_take_what_go_takes() {
        for (text, value) in [("1", true), ("T", true), ("True", true), ("f", false), ("FALSE", false)] {
            assert_eq!(parse_bool(text), Ok(value));
        }
        for rubbish in ["", "yes", "tRUE", "2", "off"] {
            assert!(parse_bool(rubbish).is_err(), "{rubbish}");
        }
    }
}

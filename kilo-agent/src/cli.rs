//! Parsers for values of command line flags, with error messages that list what is possible.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    str::FromStr,
    time::Duration,
};

use clap::ValueEnum;
use ipnet::IpNet;

use kilo_core::wireguard::is_dns_name;

/// Where Node and Peer objects are read and annotations are written (`--backend`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BackendKind {
    /// Node and Peer objects of a Kubernetes API server.
    Kubernetes,
    /// A directory of Node and Peer YAML.
    File,
}

/// Who sees more of an agent than health and metrics (`--page-access`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PageAccess {
    /// Everybody who reaches the port.
    Open,
    /// Those whose bearer token the API server accepts.
    Token,
}

/// The least severe lines of the log that are written (`--log-level`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogLevel {
    /// Everything.
    All,
    /// Also each reconcile, and each packet that is dropped.
    Debug,
    /// What an operator wants to know.
    Info,
    /// What may need attention.
    Warn,
    /// What failed.
    Error,
    /// Nothing.
    None,
}

impl LogLevel {
    /// The `tracing-subscriber` filter of a program with this crate name. Libraries log only warnings and
    /// errors, and those for the API nothing, because our code reports their errors; `all` and `none` apply
    /// to libraries, too.
    pub fn filter(self, program: &str) -> String {
        let level = self.directive();
        match self {
            Self::All | Self::None => level.to_owned(),
            _ => format!(
                "warn,kube_client=off,kube_runtime=off,{program}={level},kilo_agent={level},kilo_core={level},\
                 kilo_host={level},kilo_ebpf={level}"
            ),
        }
    }

    const fn directive(self) -> &'static str {
        match self {
            Self::All => "trace",
            Self::Debug => "debug",
            Self::Info => "info",
            Self::Warn => "warn",
            Self::Error => "error",
            Self::None => "off",
        }
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

/// Text in a list that is not a prefix.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a valid prefix; write for example 10.96.0.0/12 or 10.96.0.0/12,fd00:96::/112")]
pub struct InvalidPrefix(String);

impl FromStr for PrefixList {
    type Err = InvalidPrefix;
    fn from_str(text: &str) -> Result<Self, InvalidPrefix> {
        let items = text.split(',').map(str::trim).filter(|_| !text.is_empty());
        let parse = |item: &str| item.parse::<IpNet>().map_err(|_| InvalidPrefix(item.to_owned()));
        items.map(|item| parse(item).map(|prefix| prefix.trunc())).collect::<Result<_, _>>().map(Self)
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

/// Text that is not a prefix.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a valid prefix; write for example 10.4.0.0/16 or fd00:10::/64")]
pub struct InvalidCidr(String);

/// Parses `ADDRESS/LENGTH`.
pub fn parse_cidr(text: &str) -> Result<IpNet, InvalidCidr> {
    text.parse().map_err(|_| InvalidCidr(text.to_owned()))
}

/// Text that is not a port.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a valid port; possible values are 1 to 65535")]
pub struct InvalidPort(String);

/// Parses a port, 1 to 65535.
pub fn parse_port(text: &str) -> Result<u16, InvalidPort> {
    text.parse().ok().filter(|&port| port > 0).ok_or_else(|| InvalidPort(text.to_owned()))
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
#[error(transparent)]
pub struct InvalidPeriod(#[from] InvalidDuration);

/// Parses a duration other than zero, which would leave no pause.
pub fn parse_period(text: &str) -> Result<Duration, InvalidPeriod> {
    match parse_duration(text)? {
        Duration::ZERO => Err(InvalidDuration(text.to_owned()).into()),
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

#[cfg(test)]
mod tests {
    use super::*;

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
    fn switches_take_what_go_takes() {
        for (text, value) in [("1", true), ("T", true), ("True", true), ("f", false), ("FALSE", false)] {
            assert_eq!(parse_bool(text), Ok(value));
        }
        for rubbish in ["", "yes", "tRUE", "2", "off"] {
            assert!(parse_bool(rubbish).is_err(), "{rubbish}");
        }
    }
}

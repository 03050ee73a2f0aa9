//! Settings of connection tracking that decide how long it keeps TCP connections.

use std::fs;

const DIRECTORY: &str = "/proc/sys/net/netfilter";

/// True where connections last although connection tracking sees some of their segments only. The kernel does
/// not announce a change: it has to be read anew at each reconcile.
///
/// Segments outside of the window must be accepted (`nf_conntrack_tcp_be_liberal`). The kernel does not learn
/// from these that data was acknowledged, so an idle connection lasts only as long as one with data under way
/// (`net/netfilter/nf_conntrack_proto_tcp.c`): both timeouts for those must be at least that of
/// established ones.
pub fn tolerates_gaps_in_tcp() -> bool {
    are_tolerant(|name| fs::read_to_string(format!("{DIRECTORY}/{name}")).ok()?.trim().parse().ok())
}

/// `read` returns the value of one of the settings.
fn are_tolerant(read: impl Fn(&str) -> Option<u64>) -> bool {
    let lasts = |name: &str| read(name) >= read("nf_conntrack_tcp_timeout_established");
    read("nf_conntrack_tcp_be_liberal").is_some_and(|value| value != 0)
        && lasts("nf_conntrack_tcp_timeout_unacknowledged")
        && lasts("nf_conntrack_tcp_timeout_max_retrans")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_are_tolerated_when_segments_are_accepted_and_connections_last() {
        let with = |liberal: Option<u64>, unacknowledged, retransmitted| {
            are_tolerant(|name| match name {
                "nf_conntrack_tcp_be_liberal" => liberal,
                "nf_conntrack_tcp_timeout_established" => Some(86_400),
                "nf_conntrack_tcp_timeout_unacknowledged" => Some(unacknowledged),
                _ => Some(retransmitted),
            })
        };
        assert!(with(Some(1), 86_400, 86_400) && with(Some(1), 100_000, 86_400));
        assert!(!with(Some(0), 86_400, 86_400) && !with(None, 86_400, 86_400));
        assert!(!with(Some(1), 300, 86_400) && !with(Some(1), 86_400, 300));
    }
}

//! How long an idle entry lives: netfilter's defaults (Documentation/networking/nf_conntrack-sysctl.rst),
//! with TCP states derived from the flags seen in each direction.

use crate::{
    maps::{NAT_SEEN, NatValue},
    packet::{
        protocol,
        tcp_flags::{ACK, FIN, RST, SYN},
    },
};

/// Seconds without a packet after which an entry expires.
pub mod seconds {
    /// TCP: SYN sent, no answer.
    pub const TCP_SYN_SENT: u32 = 120;
    /// TCP: SYN answered, not yet acknowledged.
    pub const TCP_SYN_RECEIVED: u32 = 60;
    /// TCP: established.
    pub const TCP_ESTABLISHED: u32 = 432_000;
    /// TCP: data sent, never answered.
    pub const TCP_UNACKNOWLEDGED: u32 = 300;
    /// TCP: one end or both have finished (`FIN_WAIT`, `TIME_WAIT`).
    pub const TCP_FINISHED: u32 = 120;
    /// TCP: reset.
    pub const TCP_CLOSED: u32 = 10;
    /// UDP: not answered.
    pub const UDP: u32 = 30;
    /// UDP: answered.
    pub const UDP_STREAM: u32 = 120;
    /// SCTP: no answer.
    pub const SCTP_OPENING: u32 = 3;
    /// SCTP: answered.
    pub const SCTP_ESTABLISHED: u32 = 210;
    /// ICMP and ICMPv6 echo.
    pub const ICMP: u32 = 30;
}

/// True for a segment that opens a connection.
#[inline(always)]
pub const fn is_opening(tcp_flags: u8) -> bool {
    tcp_flags & (SYN | ACK) == SYN
}

/// True for a segment that resets a connection.
#[inline(always)]
pub const fn is_reset(tcp_flags: u8) -> bool {
    tcp_flags & RST != 0
}

/// Flags of a direction after another packet. A new connection starts afresh, and a packet after a reset
/// undoes it: a forged reset must not end a flow that lives.
#[inline(always)]
pub const fn merge_flags(seen: u8, packet: u8) -> u8 {
    // A reused port: SYN, or SYN and ACK after what ended the previous flow.
    if is_opening(packet) || (packet & SYN != 0 && seen & (FIN | RST) != 0) {
        packet
    } else if packet & RST != 0 {
        seen | packet
    } else {
        (seen & !RST) | packet
    }
}

/// Seconds without a packet after which a flow's two entries expire. A missing half counts as one that has
/// seen nothing.
pub fn timeout(protocol: u8, out: Option<&NatValue>, back: Option<&NatValue>) -> u32 {
    let flags = |half: Option<&NatValue>| half.map_or(0, |half| half.tcp_flags);
    let answered = back.is_some_and(|half| half.flags & NAT_SEEN != 0);
    of_flags(protocol, flags(out), flags(back), answered)
}

/// As `timeout`, from the TCP flags of both directions and whether the opening one was answered.
#[inline(always)]
pub const fn of_flags(protocol: u8, out: u8, back: u8, answered: bool) -> u32 {
    match protocol {
        protocol::TCP if (out | back) & RST != 0 => seconds::TCP_CLOSED,
        protocol::TCP if (out | back) & FIN != 0 => seconds::TCP_FINISHED,
        protocol::TCP if back == 0 && out & ACK == 0 => seconds::TCP_SYN_SENT,
        protocol::TCP if back == 0 => seconds::TCP_UNACKNOWLEDGED,
        protocol::TCP if out & ACK == 0 => seconds::TCP_SYN_RECEIVED,
        protocol::TCP => seconds::TCP_ESTABLISHED,
        protocol::UDP if answered => seconds::UDP_STREAM,
        protocol::UDP => seconds::UDP,
        protocol::SCTP if answered => seconds::SCTP_ESTABLISHED,
        protocol::SCTP => seconds::SCTP_OPENING,
        _ => seconds::ICMP,
    }
}

/// Whether a flow's entries have expired at `now` (`CLOCK_MONOTONIC` in seconds).
pub fn is_expired(protocol: u8, out: Option<&NatValue>, back: Option<&NatValue>, now: u32) -> bool {
    let last = [out, back].into_iter().flatten().map(|half| half.last_seen).max().unwrap_or(0);
    now.saturating_sub(last) > timeout(protocol, out, back)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn half(tcp_flags: u8, seen: bool) -> NatValue {
        NatValue { tcp_flags, flags: if seen { NAT_SEEN } else { 0 }, last_seen: 1000, ..NatValue::default() }
    }

    #[test]
    fn tcp_follows_the_flags_of_both_directions() {
        let cases = [
            (SYN, 0, seconds::TCP_SYN_SENT),
            (SYN, SYN | ACK, seconds::TCP_SYN_RECEIVED),
            (SYN | ACK, SYN | ACK, seconds::TCP_ESTABLISHED),
            (ACK, 0, seconds::TCP_UNACKNOWLEDGED),
            (SYN | ACK | FIN, SYN | ACK, seconds::TCP_FINISHED),
            (SYN | ACK | FIN, SYN | ACK | FIN, seconds::TCP_FINISHED),
            (SYN | ACK, SYN | ACK | RST, seconds::TCP_CLOSED),
        ];
        for (out, back, expected) in cases {
            let (out, back) = (half(out, true), half(back, true));
            assert_eq!(timeout(protocol::TCP, Some(&out), Some(&back)), expected, "{out:?} {back:?}");
        }
    }

    #[test]
    fn an_answered_udp_flow_lives_longer() {
        let out = half(0, true);
        assert_eq!(timeout(protocol::UDP, Some(&out), Some(&half(0, false))), seconds::UDP);
        assert_eq!(timeout(protocol::UDP, Some(&out), Some(&half(0, true))), seconds::UDP_STREAM);
        assert_eq!(timeout(protocol::UDP, Some(&out), None), seconds::UDP);
    }

    #[test]
    fn a_flow_expires_when_neither_direction_has_had_a_packet() {
        let (old, young) = (half(0, true), NatValue { last_seen: 1100, ..half(0, true) });
        assert!(!is_expired(protocol::UDP, Some(&old), Some(&young), 1220));
        assert!(is_expired(protocol::UDP, Some(&old), Some(&young), 1221));
        assert!(!is_expired(protocol::UDP, Some(&young), None, 5), "a clock that seems to run back");
    }

    #[test]
    fn a_new_connection_starts_anew_and_data_takes_a_reset_back() {
        assert_eq!(merge_flags(SYN | ACK | FIN, SYN), SYN);
        assert_eq!(merge_flags(SYN, ACK), SYN | ACK);
        assert_eq!(merge_flags(SYN | ACK, RST), SYN | ACK | RST);
        assert_eq!(merge_flags(SYN | ACK | RST, ACK), SYN | ACK);
        assert_eq!(merge_flags(SYN, SYN | ACK), SYN | ACK);
        assert_eq!(merge_flags(SYN | ACK | FIN, SYN | ACK), SYN | ACK, "the answer to a new connection");
    }
}

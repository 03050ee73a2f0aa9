//! Flows that were opened from outside to addresses whose packets are otherwise masqueraded. Their answers
//! stay untranslated, as netfilter leaves them.

use super::timeout::{is_opening, is_reset, merge_flags, of_flags};
use crate::{
    maps::{InboundValue, NAT_SEEN},
    packet::protocol,
};

/// Whether a flow still lives at `now` (`CLOCK_MONOTONIC` in seconds): after
/// netfilter's timeouts the other side may open one with the same ports.
#[inline(always)]
pub const fn is_live(protocol: u8, flow: &InboundValue, now: u32) -> bool {
    let timeout = of_flags(protocol, flow.opener_flags, flow.answer_flags, flow.flags & NAT_SEEN != 0);
    now.saturating_sub(flow.last_seen) <= timeout
}

/// A flow's state after a packet from outside; `None`: the packet opens none. A reset opens nothing, and a
/// flow that has ended starts afresh.
#[inline(always)]
pub const fn arrived(
    protocol: u8,
    flow: Option<&InboundValue>,
    tcp_flags: u8,
    now: u32,
) -> Option<InboundValue> {
    let (mut next, is_new) = match flow {
        Some(flow) if is_live(protocol, flow, now) => (*flow, false),
        _ => (InboundValue { last_seen: 0, opener_flags: 0, answer_flags: 0, flags: 0, pad: 0 }, true),
    };
    if protocol == protocol::TCP {
        if is_new && is_reset(tcp_flags) {
            return None;
        }
        next.opener_flags = merge_flags(next.opener_flags, tcp_flags);
    }
    next.last_seen = now;
    Some(next)
}

/// A flow's state after a packet in the other direction; `None`: the packet is not an answer, and is
/// masqueraded like any other. A segment that itself opens a connection is not an answer.
#[inline(always)]
pub const fn answered(protocol: u8, flow: &InboundValue, tcp_flags: u8, now: u32) -> Option<InboundValue> {
    if !is_live(protocol, flow, now) {
        return None;
    }
    let mut next = *flow;
    if protocol == protocol::TCP {
        if is_opening(tcp_flags) {
            return None;
        }
        next.answer_flags = merge_flags(next.answer_flags, tcp_flags);
    }
    next.flags = NAT_SEEN;
    next.last_seen = now;
    Some(next)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nat::timeout::seconds;
    use crate::packet::tcp_flags::{ACK, FIN, RST, SYN};

    #[test]
    fn an_answer_to_a_connection_from_outside_is_one_and_a_connection_of_the_pods_own_is_none() {
        let opened = arrived(protocol::TCP, None, SYN, 100).unwrap();
        assert_eq!(answered(protocol::TCP, &opened, SYN, 101), None);
        let answer = answered(protocol::TCP, &opened, SYN | ACK, 101).unwrap();
        assert_eq!((answer.last_seen, answer.answer_flags, answer.flags), (101, SYN | ACK, NAT_SEEN));
        let refusal = answered(protocol::TCP, &opened, RST | ACK, 101).unwrap();
        assert!(is_live(protocol::TCP, &refusal, 101 + seconds::TCP_CLOSED));
        assert!(!is_live(protocol::TCP, &refusal, 102 + seconds::TCP_CLOSED));
    }

    #[test]
    fn established_connections_live_for_days_and_closed_ones_for_minutes() {
        let opened = arrived(protocol::TCP, None, SYN, 100).unwrap();
        let answer = answered(protocol::TCP, &opened, SYN | ACK, 100).unwrap();
        let established = arrived(protocol::TCP, Some(&answer), ACK, 100).unwrap();
        assert!(is_live(protocol::TCP, &established, 100 + seconds::TCP_ESTABLISHED));
        let closed = arrived(protocol::TCP, Some(&established), FIN | ACK, 100).unwrap();
        assert!(!is_live(protocol::TCP, &closed, 101 + seconds::TCP_FINISHED));
        assert!(answered(protocol::TCP, &closed, ACK, 101 + seconds::TCP_FINISHED).is_none());
    }

    #[test]
    fn a_reset_opens_nothing_and_what_has_expired_starts_anew() {
        assert_eq!(arrived(protocol::TCP, None, RST, 100), None);
        let old = InboundValue { last_seen: 1, flags: NAT_SEEN, ..InboundValue::default() };
        assert!(answered(protocol::UDP, &old, 0, 2 + seconds::UDP_STREAM).is_none());
        let anew = arrived(protocol::UDP, Some(&old), 0, 2 + seconds::UDP_STREAM).unwrap();
        assert_eq!((anew.flags, anew.last_seen), (0, 2 + seconds::UDP_STREAM));
        assert!(is_live(protocol::UDP, &anew, anew.last_seen + seconds::UDP));
        assert!(!is_live(protocol::UDP, &anew, anew.last_seen + seconds::UDP + 1));
    }
}

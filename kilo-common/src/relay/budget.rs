//! How much a bound end may send through its port: a rate, and room for a burst.

use super::Port;
use crate::packet::{ETHERNET_LEN, IPV6_LEN};

/// Burst that a port may send after a pause as long, in nanoseconds of its rate: what TCP sends in a round
/// trip across continents, and what queues of routers hold.
const BURST: u64 = 100_000_000;
/// Bytes of the largest frame, which holds an IPv6 packet. One passes even at a small rate, or a sender of
/// GSO packets would never get one through.
const LARGEST: u64 = (65_535 + IPV6_LEN + ETHERNET_LEN) as u64;
/// Nanoseconds in which even the lowest rate earns [`LARGEST`].
const LONG: u64 = 1_000_000_000;
/// Nanoseconds per byte at one megabit a second.
const OF_A_BYTE: u64 = 8_000;
const _: () = assert!(LONG / OF_A_BYTE >= LARGEST);

/// What a port may still send: a token bucket that is refilled only when it does not suffice, at most once
/// per tick of the kernel's clock. It holds one burst: [`BURST`], or [`LARGEST`] where that is more. After a
/// pause, what is left and a refill may pass together, so at most two bursts. If two CPUs update it at once,
/// one update may be lost, which lets one more packet pass.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Budget {
    /// Tick of the last refill.
    tick: u64,
    /// Time of the last refill, in nanoseconds.
    at: u64,
    /// Bytes left.
    left: u64,
}

impl Budget {
    /// Takes a packet's bytes; `false`, with nothing taken, when too few are left. `now` is called at most
    /// once per tick, and only when what is left does not suffice.
    #[inline(always)]
    pub fn spend(&mut self, bytes: u32, port: &Port, tick: u64, now: impl FnOnce() -> u64) -> bool {
        if port.rate == 0 {
            return true;
        }
        if self.left < u64::from(bytes) && self.tick != tick {
            self.reckon(u64::from(port.rate), now());
            self.tick = tick;
        }
        let is_enough = self.left >= u64::from(bytes);
        if is_enough {
            self.left -= u64::from(bytes);
        }
        is_enough
    }

    #[inline(always)]
    fn reckon(&mut self, rate: u64, now: u64) {
        let passed = now.saturating_sub(self.at);
        let left = self.left + if passed < LONG { passed } else { LONG } * rate / OF_A_BYTE;
        let burst = BURST * rate / OF_A_BYTE;
        let most = if burst < LARGEST { LARGEST } else { burst };
        self.left = if left < most { left } else { most };
        self.at = now;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TICK: u64 = 4_000_000;
    const SECOND: u64 = 1_000_000_000;
    /// Long after the start of the host.
    const START: u64 = 1_000 * SECOND;

    fn port(rate: u16) -> Port {
        Port { rate, ..Port::default() }
    }

    /// Bytes that pass when packets of `bytes` arrive every `pause` nanoseconds for `time`.
    fn passed(port: &Port, bytes: u32, pause: u64, time: u64) -> u64 {
        let mut budget = Budget::default();
        let mut spends = |at: u64| {
            let tick = (START + at) / TICK;
            budget.spend(bytes, port, tick, || tick * TICK)
        };
        (0..time / pause).map(|number| number * pause).filter(|&at| spends(at)).count() as u64
            * u64::from(bytes)
    }

    #[test]
    fn an_end_that_sends_less_than_its_rate_loses_nothing() {
        // 996 of 1,000 Mbit/s, packets of 1,494 bytes each 12 µs.
        let sent = 1494 * (SECOND / 12_000);
        assert_eq!(passed(&port(1000), 1494, 12_000, SECOND), sent);
    }

    #[test]
    fn an_end_that_sends_twice_its_rate_gets_its_rate_and_one_burst() {
        // 20 of 10 Mbit/s for ten seconds: 12.5 MB, and 125 kB of a burst.
        let got = passed(&port(10), 1250, 500_000, 10 * SECOND);
        assert!((12_500_000..=12_500_000 + 125_000 + 2 * 1250).contains(&got), "{got}");
    }

    #[test]
    fn the_largest_packet_passes_the_smallest_rate_after_a_pause() {
        let (mut budget, port) = (Budget::default(), port(1));
        let passed = [0, 1, 500, 530, 1_060].map(|millis| {
            budget.spend(LARGEST as u32, &port, millis + 1, || START + millis * (SECOND / 1_000))
        });
        assert_eq!(passed, [true, false, false, true, true]);
    }

    #[test]
    fn a_port_without_rate_is_not_limited() {
        assert_eq!(passed(&port(0), 65_000, 1_000, SECOND / 100), 65_000 * 10_000);
    }

    #[test]
    fn time_is_asked_for_once_in_a_tick_and_only_where_nothing_is_left() {
        let mut budget = Budget::default();
        let mut asked = 0;
        // Ten packets in each of 100 ticks; of the larger ones 5,000 bytes a tick are allowed, and two bursts
        // at first.
        for (bytes, times) in [(100, 1..=1), (2_000, 80..=100)] {
            for number in 0..1_000 {
                let tick = START / TICK + u64::from(bytes) + number / 10;
                budget.spend(bytes, &port(10), tick, || {
                    asked += 1;
                    tick * TICK
                });
            }
            assert!(times.contains(&asked), "{asked} of {bytes} bytes");
            asked = 0;
        }
    }

    #[test]
    fn after_a_pause_two_bursts_pass_at_most() {
        let mut budget = Budget::default();
        // 100 of these packets are a burst.
        let mut passed = |tick: u64, packets: usize| {
            (0..packets).filter(|_| budget.spend(1_000, &port(8), tick, || tick * TICK)).count()
        };
        assert_eq!(passed(1_000, 1), 1);
        assert_eq!(passed(10_000, 1_000), 99 + 100);
        assert_eq!(passed(10_001, 1_000), 4, "what a tick earns");
    }

    #[test]
    fn a_clock_at_its_end_and_the_highest_rate_do_not_overflow() {
        let mut budget = Budget::default();
        assert!(budget.spend(1500, &port(u16::MAX), 1, || u64::MAX));
        assert!(
            budget.spend(1500, &port(u16::MAX), 2, || 0),
            "a clock that was set back gives nothing and takes nothing"
        );
        assert!(budget.left <= BURST * u64::from(u16::MAX) / OF_A_BYTE);
    }

    proptest! {
        /// Whatever is sent and when, no more passes than the rate allows in that time, and one burst or one
        /// packet of the largest size.
        #[test]
        fn no_more_than_the_rate_and_a_burst_passes(
            rate in 1..2_000u16, sent in proptest::collection::vec((1..65_536u32, 0..50_000_000u64), 1..200),
        ) {
            let (mut budget, mut at, mut passed) = (Budget::default(), START, 0);
            for (bytes, pause) in sent {
                at += pause;
                let tick = at / TICK;
                if budget.spend(bytes, &port(rate), tick, || tick * TICK) {
                    passed += u64::from(bytes);
                }
                let burst = (BURST * u64::from(rate) / OF_A_BYTE).max(LARGEST);
                let may = (at - START + TICK) * u64::from(rate) / OF_A_BYTE + burst;
                prop_assert!(passed <= may, "{} of {}", passed, may);
            }
        }
    }
}

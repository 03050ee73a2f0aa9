//! Random numbers that a seed repeats (splitmix64).

use kilo_failover::Micros;

/// A generator of random numbers that gives the same ones for the same seed.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// A generator that starts from this seed.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x2545_f491_4f6c_dd1d) ^ 0x5851_f42d_4c95_7f2d)
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ word >> 31
    }

    /// A number from 0 (inclusive) to 1 (exclusive).
    pub fn fraction(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// A number from `low` to `high`, both inclusive.
    pub fn between(&mut self, low: Micros, high: Micros) -> Micros {
        low + (self.fraction() * (high - low + 1) as f64) as Micros
    }

    /// A number below `bound`; 0 if that is 0.
    pub fn index(&mut self, bound: usize) -> usize {
        (self.bits() % bound.max(1) as u64) as usize
    }

    /// Whether something of this probability happens.
    pub fn chance(&mut self, probability: f64) -> bool {
        probability > 0.0 && self.fraction() < probability
    }

    /// An exponentially distributed number with this mean.
    pub fn exponential(&mut self, mean: f64) -> Micros {
        (-(1.0 - self.fraction()).ln() * mean) as Micros
    }
}

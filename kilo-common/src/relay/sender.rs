//! What a program knows of a sender of messages, and which of them are worth the agent's time.

use super::{Raw, SEQUENCE};
use crate::counters::DropReason;

/// Kinds of messages, and room for more.
const KINDS: usize = 8;
/// Messages of one sender, a second, that are not the latest ones of their kind: some overtake others, but most are
/// recorded ones that somebody repeats.
pub const LATE: u32 = 64;

/// A sender of messages; the key is written by the agent, the rest by programs.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sender {
    /// Its messages are checked with it.
    pub key: [u64; 2],
    /// The latest number heard of each kind.
    latest: [u64; KINDS],
    /// The second in which a message was heard last that was not the latest one, and how many there were in it.
    second: u32,
    late: u32,
}

impl Sender {
    /// Of which nothing was heard yet.
    #[must_use]
    pub const fn new(key: [u64; 2]) -> Self {
        Self { key, latest: [0; KINDS], second: 0, late: 0 }
    }

    /// Takes note of a message whose tag is right. Its agent decides whether the message is a recorded one; here
    /// such messages only must not fill the ring. Numbers are the sender's own, and in answers those of this node, so
    /// nobody else makes later ones.
    ///
    /// # Errors
    /// [`DropReason::StaleSignal`].
    #[inline(always)]
    pub fn hear(&mut self, raw: &Raw, second: impl FnOnce() -> u32) -> Result<(), DropReason> {
        let kind = (u64::from_be(raw[0]) >> 40) as usize % KINDS;
        let sequence = u64::from_be(raw[SEQUENCE]);
        if sequence > self.latest[kind] {
            self.latest[kind] = sequence;
            return Ok(());
        }
        let second = second();
        if self.second != second {
            (self.second, self.late) = (second, 0);
        }
        if self.late >= LATE {
            return Err(DropReason::StaleSignal);
        }
        self.late += 1;
        Ok(())
    }
}

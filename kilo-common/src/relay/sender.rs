//! What a program knows of a sender of messages, and which of its messages are worth the agent's time.

use super::{Raw, SEQUENCE};
use crate::drop_reasons::DropReason;

/// Kinds of messages, and room for more.
const KINDS: usize = 8;
/// Messages per second and sender that pass although they are not the latest of their kind: a few are
/// overtaken on the way, but most are recordings that somebody replays.
pub const LATE: u32 = 64;

/// A sender of messages; the key is written by the agent, the rest by programs.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sender {
    /// SipHash key of the tags of its messages.
    pub key: [u64; 2],
    /// The latest sequence number of each kind.
    latest: [u64; KINDS],
    /// The last second in which a message came that was not the latest one, and how many did.
    second: u32,
    late: u32,
}

impl Sender {
    /// A sender from which nothing was heard yet.
    #[must_use]
    pub const fn new(key: [u64; 2]) -> Self {
        Self { key, latest: [0; KINDS], second: 0, late: 0 }
    }

    /// Takes note of a message whose tag is right. The agent decides whether it is a replay; here, replays
    /// must only be kept from filling the ring. Sequence numbers are the sender's own, and in answers this
    /// node's, so nobody else can make later ones.
    ///
    /// # Errors
    /// [`DropReason::StaleSignal`] for more than [`LATE`] messages in a second that are not the latest ones.
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

//! What a program knows of a sender of messages, and which of its messages are worth the agent's time.

use super::{Raw, SEQUENCE};
use crate::drop_reasons::DropReason;

/// Kinds of messages, and room for more.
const KINDS: usize = 8;
/// Messages per second and sender that pass although they are not the latest of their kind: a few are
/// overtaken on the way, but most are recordings that somebody replays.
pub const LATE: u16 = 64;
/// Messages per second and sender that pass at all: the ring has room for some 580, of all senders. A node
/// with 64 pairs asks 160 times a second, and a relay answers a node 200 times at most.
pub const MOST: u16 = 256;

/// A sender of messages; the key is written by the agent, the rest by programs.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sender {
    /// SipHash key of the tags of its messages.
    pub key: [u64; 2],
    /// The latest sequence number of each kind.
    latest: [u64; KINDS],
    /// The last second in which a message came, how many of its messages were not the latest ones, and how
    /// many came at all.
    second: u32,
    late: u16,
    heard: u16,
}

impl Sender {
    /// A sender from which nothing was heard yet.
    #[must_use]
    pub const fn new(key: [u64; 2]) -> Self {
        Self { key, latest: [0; KINDS], second: 0, late: 0, heard: 0 }
    }

    /// Takes note of a message whose tag is right. The agent decides whether it is a replay; here, neither
    /// replays nor one sender must fill the ring. Sequence numbers are the sender's own, and in answers this
    /// node's, so nobody else can make later ones.
    ///
    /// # Errors
    /// [`DropReason::StaleSignal`] for more than [`LATE`] messages in a second that are not the latest ones,
    /// and [`DropReason::RelayLimit`] for more than [`MOST`] in all.
    #[inline(always)]
    pub fn hear(&mut self, raw: &Raw, second: u32) -> Result<(), DropReason> {
        let kind = (u64::from_be(raw[0]) >> 40) as usize % KINDS;
        let sequence = u64::from_be(raw[SEQUENCE]);
        if self.second != second {
            (self.second, self.late, self.heard) = (second, 0, 0);
        }
        if sequence <= self.latest[kind] {
            if self.late >= LATE {
                return Err(DropReason::StaleSignal);
            }
            self.late += 1;
        }
        if self.heard >= MOST {
            return Err(DropReason::RelayLimit);
        }
        self.heard += 1;
        self.latest[kind] = self.latest[kind].max(sequence);
        Ok(())
    }
}

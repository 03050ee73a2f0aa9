//! The words of the map `lead`, which name the node that leads this one: what hops 2 and 3 lead to, and the
//! one rule by which a word moves (`kilo_common::lead`).

use core::ptr::read_volatile;

use kilo_common::{
    forwarding::hop_id,
    lead::{hop_of, obeys},
    maps::{HOP_REMOTE, Hop, LEAD_ACTING},
};

use crate::maps::{LEAD, hop};

/// How many attempts a move gets while others move the word as well.
const TRIES: u32 = 3;

/// The word for [`HOP_REMOTE`] or [`HOP_ACTING`], read in one load; 0 leads nowhere.
#[inline(always)]
pub fn word(id: u32) -> u64 {
    // SAFETY: the entry is aligned to 8 bytes, and always there.
    LEAD.get_ptr(id & 1).map_or(0, |word| unsafe { read_volatile(word) })
}

/// Whether the word for one of the two ids names this node's own WireGuard.
#[inline(always)]
pub fn is_mine(id: u32) -> bool {
    u32::from(hop_of(word(id))) == HOP_REMOTE
}

/// The hop that a prefix's hop id leads to: by the leader's word for hops 2 and 3.
#[inline(always)]
pub fn resolve_hop(id: u32) -> Option<&'static Hop> {
    hop(hop_id(id, || false, word))
}

/// Moves the acting leader's word to a later one; true if `offered` is the word afterwards.
#[inline(always)]
pub fn obey(offered: u64) -> bool {
    let Some(word) = LEAD.get_ptr_mut(LEAD_ACTING) else { return false };
    let mut tries = 0;
    while tries < TRIES {
        // SAFETY: as in `word`.
        let current = unsafe { read_volatile(word) };
        if current == offered {
            return true;
        }
        if !obeys(current, offered) {
            return false;
        }
        if exchange(word, current, offered) == current {
            return true;
        }
        tries += 1;
    }
    false
}

/// Compare-and-exchange, which the compiler lacks for this target; returns the word that was there.
#[inline(always)]
pub fn exchange(word: *mut u64, expected: u64, new: u64) -> u64 {
    let mut found = expected;
    // SAFETY: the pointer is a map's entry of 8 bytes. The instruction compares with r0 and leaves there
    // what it has found.
    unsafe {
        core::arch::asm!("r0 = cmpxchg_64({0} + 0, r0, {1})", in(reg) word, in(reg) new, inout("r0") found);
    }
    found
}

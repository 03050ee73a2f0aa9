//! `follow`: moves this node's word in `lead` for the agent, which runs the program for that.

use aya_ebpf::{EbpfContext as _, bindings::__sk_buff, programs::TcContext};
use kilo_common::maps::{HOP_ACTING, LEAD_ACTING};

use crate::{
    leader_word::{exchange, word},
    maps::LEAD,
};

/// Moves the acting leader's word for this node's agent, from the word it expects to one of no earlier term.
/// The control block holds both words, expected and new, and on return the word that is then in `lead`.
#[inline(always)]
pub fn follow(ctx: &TcContext) {
    let skb: *mut __sk_buff = ctx.as_ptr().cast();
    // SAFETY: the context is valid for the whole program, and these words are a program's.
    let cb = unsafe { (*skb).cb };
    let (expected, new) = (joined(cb[0], cb[1]), joined(cb[2], cb[3]));
    let mut stands = word(HOP_ACTING);
    if let Some(word) = LEAD.get_ptr_mut(LEAD_ACTING)
        && stands == expected
        && new >> 16 >= expected >> 16
    {
        let found = exchange(word, expected, new);
        stands = if found == expected { new } else { found };
    }
    // SAFETY: as above.
    unsafe {
        (*skb).cb[0] = stands as u32;
        (*skb).cb[1] = (stands >> 32) as u32;
    }
}

#[inline(always)]
const fn joined(low: u32, high: u32) -> u64 {
    low as u64 | (high as u64) << 32
}

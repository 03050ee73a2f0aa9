//! Which address a masqueraded packet gets where an uplink has several: the agent has chosen one for each
//! destination, as the kernel would. Also, which addresses these are.

use aya_ebpf::programs::TcContext;
use kilo_common::maps::{Config, MASQ_ADDR_OWN, MASQ_ADDR_SHARED, MasqAddr};

use super::scratch::{Work, halves};
use crate::{
    ip::{self, Ip, octets},
    maps::MASQ_ADDR,
    packet,
    subprogram::{Skb, subprogram},
    word_memory::OnInterface,
};

#[inline(always)]
fn find(ifindex: u32, addr: [u64; 2]) -> Option<&'static MasqAddr> {
    // A key of the full length: the trie finds the longest prefix of it.
    MASQ_ADDR.get(OnInterface::new(ifindex, addr).key())
}

/// True for an address that masqueraded packets get on some uplink, where there are
/// several of them.
#[inline(always)]
pub fn is_own<I: Ip>(config: &Config, addr: I::Addr) -> bool {
    config.flags & I::SEVERAL != 0 && find(MASQ_ADDR_OWN, I::mapped(addr)).is_some()
}

subprogram! {
    /// Sets `work.addr` to the address for the packet's destination, if that needs another than the
    /// interface's usual one; zero: it does not.
    pub fn choose(work: &mut Work) -> u32 = choose_address as masquerade_choose
}

#[inline(always)]
fn choose_address(skb: Skb, work: &mut Work) -> u32 {
    let Some(found) = find(packet::ifindex(&TcContext::new(skb)), halves(&work.key.dst)) else { return 0 };
    work.addr = octets(ip::halves(&found.addr));
    1
}

/// True for an address that the interface the packet leaves by gives to packets.
#[inline(always)]
pub fn is_of(skb: Skb, addr: &[u8; 16]) -> bool {
    find(MASQ_ADDR_OWN, halves(addr)).is_some_and(|found| {
        found.ifindex == packet::ifindex(&TcContext::new(skb)) || found.ifindex == MASQ_ADDR_SHARED
    })
}

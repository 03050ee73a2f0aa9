//! Ingress of the VXLAN and the IPIP device: what `lan_ingress` left to the kernel to decapsulate.

use aya_ebpf::{
    EbpfContext as _,
    bindings::{BPF_F_TUNINFO_IPV6, bpf_tunnel_key},
    helpers::bpf_skb_get_tunnel_key,
    programs::TcContext,
};
use kilo_common::{
    drop_reasons::DropReason,
    maps::{Config, NodeValue, VXLAN_VNI},
    packet::{ETHERNET_LEN, Ipv4},
};

use crate::{
    cb,
    decap::{redirect, validate},
    gso::{self, Cut},
    ip::{Ip, V6},
    maps::{count_action, hop},
    packet::{self, Family},
    ret::{Act, Verdict},
};

/// Ingress of the VXLAN device: packets that `lan_ingress` left to the kernel to decapsulate; they start with
/// the inner Ethernet header. Also of the IPIP device, which is only for sending: `lan_ingress` leaves it
/// nothing.
#[inline(always)]
pub fn tunnel_ingress(ctx: &TcContext, config: &Config) -> Verdict {
    // It came by an interface without `lan_ingress`, was for another address, or was made by a process of
    // this host.
    if !cb::take_checked(ctx) {
        return Err(DropReason::Unchecked);
    }
    let sender = tunnel_sender(ctx)?.ok_or(DropReason::UnknownSender)?;
    let (disposition, own) = match packet::family(ctx) {
        Family::V4 => validate::<Ipv4>(ctx, config, sender, ETHERNET_LEN, |src| is_of::<Ipv4>(sender, src))?,
        Family::V6 => validate::<V6>(ctx, config, sender, ETHERNET_LEN, |src| is_of::<V6>(sender, src))?,
        Family::Other => return Err(DropReason::Malformed),
    };
    match hop(sender.hop).filter(|_| own) {
        Some(hop) => {
            count_action(disposition.action());
            // The kernel takes it for somebody else's there, by its link-layer address.
            cb::of_sender(ctx);
            Ok(Act::receive(hop.ifindex))
        }
        None => {
            if disposition.leaves_host() && gso::is(ctx, config) {
                gso::make_room(ctx, Cut::ByDevice);
            }
            Ok(redirect(config, disposition))
        }
    }
}

/// True for the private address of that node.
#[inline(always)]
fn is_of<I: Ip>(sender: &NodeValue, addr: I::Addr) -> bool {
    I::sender(addr).is_some_and(|node| node.hop == sender.hop)
}

/// The node a decapsulated packet came from, by its outer source.
#[inline(always)]
fn tunnel_sender(ctx: &TcContext) -> Result<Option<&'static NodeValue>, DropReason> {
    // SAFETY: plain integers, for which zero is a value.
    let mut key: bpf_tunnel_key = unsafe { core::mem::zeroed() };
    let size = size_of::<bpf_tunnel_key>() as u32;
    // SAFETY: the context is valid, the key is large enough.
    let v4 = unsafe { bpf_skb_get_tunnel_key(ctx.as_ptr().cast(), &raw mut key, size, 0) } == 0;
    let v6 = !v4
        // SAFETY: as above.
        && unsafe {
            bpf_skb_get_tunnel_key(ctx.as_ptr().cast(), &raw mut key, size, u64::from(BPF_F_TUNINFO_IPV6))
        } == 0;
    if (!v4 && !v6) || key.tunnel_id != VXLAN_VNI {
        return Err(DropReason::Malformed);
    }
    // SAFETY: the kernel filled the field of this family; the whole union is initialised.
    Ok(unsafe {
        if v4 {
            Ipv4::sender(key.__bindgen_anon_1.remote_ipv4.to_be_bytes())
        } else {
            V6::sender(packet::halves(&key.__bindgen_anon_1.remote_ipv6))
        }
    })
}

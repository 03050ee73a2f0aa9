//! TC programs of Kilo. Entry points only: what a packet is, where it goes and
//! what it becomes is decided in the modules and in `kilo-common`.
//!
//! | program | hook | job |
//! |---|---|---|
//! | `kilo_egress` | egress of the WireGuard device | steer, or let WireGuard encrypt |
//! | `kilo_ingress` | ingress of the WireGuard device | on a leader: on to other nodes |
//! | `lan_ingress` | ingress of uplinks | take steered packets; translate replies back |
//! | `tunnel_ingress` | ingress of the VXLAN and the IPIP device | what `lan_ingress` left to the VXLAN device; nothing else |
//! | `uplink_egress` | egress of uplinks | steer pods' packets to other nodes themselves; masquerade |
//! | `l3_ingress` | ingress of uplinks without link-layer header | as `lan_ingress` |
//! | `l3_egress` | egress of uplinks without link-layer header | as `uplink_egress` |
#![cfg_attr(target_arch = "bpf", no_std, no_main)]
#![cfg_attr(not(target_arch = "bpf"), allow(unused_crate_dependencies))]

#[cfg(target_arch = "bpf")]
mod ip;
#[cfg(target_arch = "bpf")]
mod maps;
#[cfg(target_arch = "bpf")]
mod mark;
#[cfg(target_arch = "bpf")]
mod masquerade;
#[cfg(target_arch = "bpf")]
mod monitor;
#[cfg(target_arch = "bpf")]
mod packet;
#[cfg(target_arch = "bpf")]
mod path_mtu;
#[cfg(target_arch = "bpf")]
mod send;
#[cfg(target_arch = "bpf")]
mod steer;
#[cfg(target_arch = "bpf")]
mod superpacket;
#[cfg(target_arch = "bpf")]
mod transit;
#[cfg(target_arch = "bpf")]
mod tunnel;
#[cfg(target_arch = "bpf")]
mod uplink;

#[cfg(target_arch = "bpf")]
mod programs {
    use aya_ebpf::{EbpfContext as _, bindings::__sk_buff, macros::classifier, programs::TcContext};
    use kilo_common::{
        event::Hook,
        maps::Config,
        verdict::{Action, DropReason},
    };

    use crate::{maps, mark, monitor, packet, steer, tunnel, uplink};

    /// Goes on with the next program on the hook, and then with the stack.
    pub const TC_ACT_UNSPEC: i32 = -1;
    /// Goes on with the stack at once.
    pub const TC_ACT_OK: i32 = 0;
    const TC_ACT_SHOT: i32 = 2;
    /// `bpf_redirect` (`BPF_F_INGRESS`): to the stack, as received on that interface.
    pub const REDIRECT_INGRESS: u64 = 1;

    #[inline(always)]
    fn verdict(
        ctx: TcContext,
        hook: Hook,
        program: impl FnOnce(&TcContext, &'static Config) -> Result<i32, DropReason>,
    ) -> i32 {
        // The array has its one entry from the start; zeroed it means: nothing is ours.
        let Some(config) = maps::CONFIG.get(0) else { return TC_ACT_UNSPEC };
        match program(&ctx, config) {
            Ok(action) => action,
            Err(reason) => dropped(ctx.as_ptr().cast(), reason.index(), hook as u32),
        }
    }

    /// What a part of a program that has a stack of its own answers: an action
    /// of the kernel, or the index of a drop reason (none is an action's number).
    #[inline(always)]
    pub fn to_code(result: Result<i32, DropReason>) -> i32 {
        match result {
            Ok(action) => action,
            Err(reason) => reason.index() as i32,
        }
    }

    /// The inverse of [`to_code`].
    #[inline(always)]
    pub fn from_code(code: i32) -> Result<i32, DropReason> {
        match DropReason::from_index(code as u32) {
            Some(reason) => Err(reason),
            None => Ok(code),
        }
    }

    /// Apart, because what a log record takes of the stack adds up in its callers.
    #[inline(never)]
    pub fn dropped(skb: *mut __sk_buff, reason: u32, hook: u32) -> i32 {
        let ctx = TcContext::new(skb);
        maps::count(reason);
        monitor::report(&ctx, hook, reason);
        // Loaded with the level off, the verifier removes this.
        aya_log_ebpf::debug!(&ctx, "dropped: reason {} on interface {}", reason, packet::ifindex(&ctx));
        TC_ACT_SHOT
    }

    /// Packets that the stack, or a leader's transit, sends into the WireGuard device.
    #[classifier]
    pub fn kilo_egress(ctx: TcContext) -> i32 {
        if mark::is_for_wireguard(&ctx) {
            maps::count_action(Action::Encrypt);
            return TC_ACT_UNSPEC;
        }
        verdict(ctx, Hook::KiloEgress, steer::kilo_egress)
    }

    /// Packets that WireGuard decrypted, or that `lan_ingress` decapsulated.
    #[classifier]
    pub fn kilo_ingress(ctx: TcContext) -> i32 {
        verdict(ctx, Hook::KiloIngress, steer::kilo_ingress)
    }

    /// Packets from the network the node is in.
    #[classifier]
    pub fn lan_ingress(ctx: TcContext) -> i32 {
        verdict(ctx, Hook::LanIngress, tunnel::lan_ingress)
    }

    /// Packets the VXLAN or the IPIP device has decapsulated.
    #[classifier]
    pub fn tunnel_ingress(ctx: TcContext) -> i32 {
        verdict(ctx, Hook::TunnelIngress, tunnel::tunnel_ingress)
    }

    /// Packets to the network the node is in.
    #[classifier]
    pub fn uplink_egress(ctx: TcContext) -> i32 {
        verdict(ctx, Hook::UplinkEgress, uplink::uplink_egress)
    }

    /// As [`lan_ingress`], where packets have no link-layer header.
    #[classifier]
    pub fn l3_ingress(ctx: TcContext) -> i32 {
        verdict(ctx, Hook::L3Ingress, tunnel::l3_ingress)
    }

    /// As [`uplink_egress`], where packets have no link-layer header.
    #[classifier]
    pub fn l3_egress(ctx: TcContext) -> i32 {
        verdict(ctx, Hook::L3Egress, uplink::l3_egress)
    }
}

#[cfg(target_arch = "bpf")]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

/// The kernel lets GPL-compatible programs call every helper.
#[cfg(target_arch = "bpf")]
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";

#[cfg(not(target_arch = "bpf"))]
fn main() {
    eprintln!("this crate holds BPF programs; build them with `cargo xtask build-ebpf`");
}

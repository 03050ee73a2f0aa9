//! TC programs of Kilo. Entry points only: what a packet is, where it goes and
//! what it becomes is decided in the modules and in `kilo-common`.
//!
//! | program | hook | job |
//! |---|---|---|
//! | `kilo_egress` | egress of the WireGuard device | steer, or let WireGuard encrypt |
//! | `kilo_ingress` | ingress of the WireGuard device | on a leader: send on to other nodes |
//! | `lan_ingress` | ingress of uplinks | take steered packets; translate replies back |
//! | `tunnel_ingress` | ingress of the VXLAN and IPIP devices | take what `lan_ingress` left to VXLAN; drop all else |
//! | `uplink_egress` | egress of uplinks | steer pod traffic addressed to other nodes' own addresses; masquerade traffic that leaves the mesh |
//! | `l3_ingress` | ingress of uplinks without link-layer header | as `lan_ingress` |
//! | `l3_egress` | egress of uplinks without link-layer header | as `uplink_egress` |
//! | `pod_ingress` | ingress of pods' interfaces (`--host-routing=auto`) | send flows that the stack leaves as they are straight to the WireGuard device |
//! | `inject` | none: the agent runs it | send a signal |
//! | `follow` | none: the agent runs it | move this node's word in `lead` |
#![cfg_attr(target_arch = "bpf", no_std, no_main, feature(asm_experimental_arch))]
#![cfg_attr(not(target_arch = "bpf"), allow(unused_crate_dependencies))]
#![cfg_attr(
    target_arch = "bpf",
    allow(
        clippy::needless_borrows_for_generic_args,
        reason = "a map's key by value is copied to a 512-byte stack"
    )
)]
#![cfg_attr(
    target_arch = "bpf",
    allow(clippy::cast_ptr_alignment, reason = "programs may read packets at any address")
)]

#[cfg(target_arch = "bpf")]
mod cb;
#[cfg(target_arch = "bpf")]
mod decap;
#[cfg(target_arch = "bpf")]
mod encap;
#[cfg(target_arch = "bpf")]
mod fast_path;
#[cfg(target_arch = "bpf")]
mod follow;
#[cfg(target_arch = "bpf")]
mod gso;
#[cfg(target_arch = "bpf")]
mod inject;
#[cfg(target_arch = "bpf")]
mod ip;
#[cfg(target_arch = "bpf")]
mod kilo_egress;
#[cfg(target_arch = "bpf")]
mod kilo_ingress;
#[cfg(target_arch = "bpf")]
mod lan_ingress;
#[cfg(target_arch = "bpf")]
mod leader_word;
#[cfg(target_arch = "bpf")]
mod link;
#[cfg(target_arch = "bpf")]
mod maps;
#[cfg(target_arch = "bpf")]
mod masquerade;
#[cfg(target_arch = "bpf")]
mod monitor;
#[cfg(target_arch = "bpf")]
mod mtu;
#[cfg(target_arch = "bpf")]
mod orphaned;
#[cfg(target_arch = "bpf")]
mod packet;
#[cfg(target_arch = "bpf")]
mod pod_flow;
#[cfg(target_arch = "bpf")]
mod pod_ingress;
#[cfg(target_arch = "bpf")]
mod reflect;
#[cfg(target_arch = "bpf")]
mod relay;
#[cfg(target_arch = "bpf")]
mod ret;
#[cfg(target_arch = "bpf")]
mod sender;
#[cfg(target_arch = "bpf")]
mod signal;
#[cfg(target_arch = "bpf")]
mod subprogram;
#[cfg(target_arch = "bpf")]
mod tunnel_ingress;
#[cfg(target_arch = "bpf")]
mod uplink_egress;
#[cfg(target_arch = "bpf")]
mod vxlan_order;
#[cfg(target_arch = "bpf")]
mod wireguard_port;
#[cfg(target_arch = "bpf")]
mod word_memory;

#[cfg(target_arch = "bpf")]
mod programs {
    use aya_ebpf::{macros::classifier, programs::TcContext};
    use kilo_common::{counters::Action, event::Hook};

    use crate::{
        cb, follow as moving, inject, kilo_egress as egress, kilo_ingress as ingress, lan_ingress as lan,
        maps, pod_ingress as pod,
        ret::{Act, run},
        tunnel_ingress as tunnel, uplink_egress as uplink,
    };

    /// Packets that the stack, or a leader's transit, sends into the WireGuard device.
    #[classifier]
    pub fn kilo_egress(ctx: TcContext) -> i32 {
        if cb::is_for_wireguard(&ctx) {
            maps::count_action(Action::Encrypt);
            return Act::NEXT.code();
        }
        run(ctx, Hook::KiloEgress, egress::kilo_egress)
    }

    /// Packets that WireGuard decrypted, or that `lan_ingress` decapsulated.
    #[classifier]
    pub fn kilo_ingress(ctx: TcContext) -> i32 {
        if cb::is_delivered(&ctx) {
            maps::count_action(Action::Decrypt);
            return Act::NEXT.code();
        }
        run(ctx, Hook::KiloIngress, ingress::kilo_ingress)
    }

    /// Packets from the network the node is in.
    #[classifier]
    pub fn lan_ingress(ctx: TcContext) -> i32 {
        run(ctx, Hook::LanIngress, lan::lan_ingress)
    }

    /// Packets the VXLAN or the IPIP device has decapsulated.
    #[classifier]
    pub fn tunnel_ingress(ctx: TcContext) -> i32 {
        run(ctx, Hook::TunnelIngress, tunnel::tunnel_ingress)
    }

    /// Packets to the network the node is in.
    #[classifier]
    pub fn uplink_egress(ctx: TcContext) -> i32 {
        run(ctx, Hook::UplinkEgress, uplink::uplink_egress)
    }

    /// As [`lan_ingress`], where packets have no link-layer header.
    #[classifier]
    pub fn l3_ingress(ctx: TcContext) -> i32 {
        run(ctx, Hook::L3Ingress, lan::l3_ingress)
    }

    /// Packets from one of this node's pods.
    #[classifier]
    pub fn pod_ingress(ctx: TcContext) -> i32 {
        run(ctx, Hook::PodIngress, pod::pod_ingress)
    }

    /// Moves the acting leader's word for the agent.
    #[classifier]
    #[expect(clippy::needless_pass_by_value, reason = "the kernel's entry point takes it so")]
    pub fn follow(ctx: TcContext) -> i32 {
        moving::follow(&ctx);
        0
    }

    /// Sends a signal for the agent.
    #[classifier]
    #[expect(clippy::needless_pass_by_value, reason = "the kernel's entry point takes it so")]
    pub fn inject(ctx: TcContext) -> i32 {
        inject::inject(&ctx)
    }

    /// As [`uplink_egress`], where packets have no link-layer header.
    #[classifier]
    pub fn l3_egress(ctx: TcContext) -> i32 {
        run(ctx, Hook::L3Egress, uplink::l3_egress)
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

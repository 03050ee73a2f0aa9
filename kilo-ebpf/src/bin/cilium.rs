//! Stand-ins for Cilium's programs, for the lab: each counts its packets; some encapsulate, deliver or
//! refuse as Cilium's of that name do. They are not part of Kilo's object.
//!
//! The loader sets the globals below, and gives them the maps that the node's programs share.
#![cfg_attr(target_arch = "bpf", no_std, no_main)]
#![cfg_attr(not(target_arch = "bpf"), allow(unused_crate_dependencies))]

#[cfg(target_arch = "bpf")]
#[allow(clippy::needless_pass_by_value, reason = "the kernel's entry points take it so")]
mod programs {
    use core::ptr::read_volatile;

    use aya_ebpf::{
        EbpfContext as _,
        helpers::{bpf_redirect, bpf_skb_set_tunnel_key},
        macros::{classifier, map},
        maps::{HashMap, PerCpuArray},
        programs::TcContext,
    };

    /// Number of counters of a node.
    const COUNTERS: usize = 17;
    /// The counter of packets that the host firewall refused.
    const REFUSED: u32 = 16;
    /// UDP port of Kilo's VXLAN, for which a host firewall has no rule.
    const KILO_VXLAN_PORT: u16 = 51_821;
    /// Hardware address of `cilium_host`.
    const HOST_ADDRESS: [u8; 6] = [0x02, 0xc1, 0, 0, 0, 1];
    /// VNI of the overlay; Cilium puts the sender's identity there.
    const IDENTITY: u32 = 2;

    const IPV4: u16 = 0x0800;
    const IPIP: u8 = 4;
    const UDP: u8 = 17;
    /// Offsets in a frame with an IPv4 header without options.
    const IP_PROTOCOL: usize = 14 + 9;
    const DESTINATION: usize = 14 + 16;
    const DESTINATION_PORT: usize = 14 + 20 + 2;

    /// Verdicts: the next program's turn; accept without it, as Cilium's programs do; drop.
    const NEXT: i32 = -1;
    const OK: i32 = 0;
    const SHOT: i32 = 2;

    /// Index of this program's counter.
    #[unsafe(no_mangle)]
    static COUNTER: u32 = 0;
    /// Index of the device packets are redirected to.
    #[unsafe(no_mangle)]
    static DEVICE: u32 = 0;
    /// The node's own address in the overlay, in network byte order.
    #[unsafe(no_mangle)]
    static OWN: u32 = 0;
    /// 1: `cil_from_netdev` guards the host.
    #[unsafe(no_mangle)]
    static FIREWALL: u32 = 0;

    #[map(name = "metrics")]
    static METRICS: PerCpuArray<[u64; COUNTERS]> = PerCpuArray::with_max_entries(1, 0);
    /// First three octets of a pod CIDR and a zero -> IPv4 address of its node, in host byte order.
    #[map(name = "ipcache")]
    static IPCACHE: HashMap<[u8; 4], u32> = HashMap::with_max_entries(64, 0);

    fn global(value: *const u32) -> u32 {
        // SAFETY: it is one of the globals; the loader sets it, so the compiler must not assume its value.
        unsafe { read_volatile(value) }
    }

    fn count(counter: u32) {
        let Some(counters) = METRICS.get_ptr_mut(0) else { return };
        // SAFETY: the array is this CPU's own, and the map outlives the program.
        if let Some(counter) = unsafe { (*counters).get_mut(counter as usize) } {
            *counter += 1;
        }
    }

    /// Reads bytes of the packet; `None` unless it has an IPv4 header.
    fn load<T>(ctx: &TcContext, at: usize) -> Option<T> {
        // SAFETY: the kernel gives its programs a valid `__sk_buff`.
        let protocol = unsafe { (*ctx.skb.skb).protocol };
        if protocol != u32::from(IPV4.to_be()) {
            return None;
        }
        ctx.load(at).ok()
    }

    /// A third party's program: counts the packet, and leaves it to the next one.
    #[classifier]
    pub fn watch_ingress(_ctx: TcContext) -> i32 {
        count(global(&raw const COUNTER));
        NEXT
    }

    /// As `watch_ingress`.
    #[classifier]
    pub fn watch_egress(_ctx: TcContext) -> i32 {
        count(global(&raw const COUNTER));
        NEXT
    }

    /// A host firewall, where [`FIREWALL`] says so, refuses IPIP and [`KILO_VXLAN_PORT`].
    #[classifier]
    pub fn cil_from_netdev(ctx: TcContext) -> i32 {
        count(global(&raw const COUNTER));
        let is_refused = match load::<u8>(&ctx, IP_PROTOCOL) {
            Some(IPIP) => true,
            Some(UDP) => load::<[u8; 2]>(&ctx, DESTINATION_PORT) == Some(KILO_VXLAN_PORT.to_be_bytes()),
            _ => false,
        };
        if global(&raw const FIREWALL) == 1 && is_refused {
            count(REFUSED);
            return SHOT;
        }
        OK
    }

    /// Hands packets on to the network.
    #[classifier]
    pub fn cil_to_netdev(_ctx: TcContext) -> i32 {
        count(global(&raw const COUNTER));
        OK
    }

    /// Hands packets on to the host.
    #[classifier]
    pub fn cil_to_host(_ctx: TcContext) -> i32 {
        count(global(&raw const COUNTER));
        OK
    }

    /// Sends packets for pods of other nodes through the overlay's device.
    #[classifier]
    pub fn cil_from_host(ctx: TcContext) -> i32 {
        encapsulate(&ctx)
    }

    /// As [`cil_from_host`].
    #[classifier]
    pub fn cil_from_container(ctx: TcContext) -> i32 {
        encapsulate(&ctx)
    }

    fn encapsulate(ctx: &TcContext) -> i32 {
        count(global(&raw const COUNTER));
        let Some([a, b, c, _]) = load::<[u8; 4]>(ctx, DESTINATION) else { return OK };
        // SAFETY: nobody writes the map while packets flow.
        let Some(node) = (unsafe { IPCACHE.get([a, b, c, 0]) }) else { return OK };
        // The first two fields of `bpf_tunnel_key`: VNI and remote address.
        let mut key = [IDENTITY, *node];
        // SAFETY: the kernel accepts a key of just these eight bytes (net/core/filter.c), and reads no more.
        let set = unsafe { bpf_skb_set_tunnel_key(ctx.as_ptr().cast(), key.as_mut_ptr().cast(), 8, 0) };
        if set != 0 {
            return OK;
        }
        redirect(0)
    }

    fn redirect(flags: u64) -> i32 {
        // SAFETY: the helper takes any index and returns a verdict.
        let verdict = unsafe { bpf_redirect(global(&raw const DEVICE), flags) };
        i32::try_from(verdict).unwrap_or(SHOT)
    }

    /// Packets for the node itself come out of `cilium_host`, whatever hardware address they were sent to;
    /// the host routes the others to a pod.
    #[classifier]
    pub fn cil_from_overlay(ctx: TcContext) -> i32 {
        /// The packet is for this host (`linux/if_packet.h`).
        const PACKET_HOST: u32 = 0;
        /// To the device's ingress, not its egress.
        const INGRESS: u64 = 1;
        count(global(&raw const COUNTER));
        if ctx.change_type(PACKET_HOST).is_err() {
            return SHOT;
        }
        if load::<[u8; 4]>(&ctx, DESTINATION).map(u32::from_ne_bytes) != Some(global(&raw const OWN)) {
            return OK;
        }
        if ctx.store(0, &HOST_ADDRESS, 0).is_err() {
            return SHOT;
        }
        redirect(INGRESS)
    }

    #[panic_handler]
    fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
        loop {}
    }

    /// The kernel lets GPL-compatible programs call every helper.
    #[unsafe(link_section = "license")]
    #[unsafe(no_mangle)]
    static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
}

#[cfg(not(target_arch = "bpf"))]
fn main() {
    eprintln!("this crate holds BPF programs; the lab's commands build them");
}

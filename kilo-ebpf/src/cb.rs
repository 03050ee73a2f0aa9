//! What one program has found out about a packet, passed to the next program in `skb->cb`, so that tables are
//! looked up only once. The stack writes its own data there before it sends anything, so nobody else can
//! leave a note here. Where a kernel does not preserve the control block, the tables are looked up again.
//!
//! A note that must survive the stack is written to `skb->priority`: a process needs `CAP_NET_ADMIN` to set
//! more than 6 there, and the kernel clears it when a packet comes from another network namespace. Forwarding
//! overwrites the priority; what must outlive that is written to `skb->tc_index`.

use aya_ebpf::{EbpfContext as _, bindings::__sk_buff, programs::TcContext};
use kilo_common::maps::{HOP_KIND_WIREGUARD, HOP_REMOTE};

use crate::maps::hop;

/// First word of every note in `skb->cb`; the second says what the note is.
const OURS: u32 = u32::from_be_bytes(*b"kilo");
/// `lan_ingress` to `kilo_egress`: in transit, and checked.
const TRANSIT: u32 = u32::from_be_bytes(*b"tran");
/// `lan_ingress` to `kilo_ingress`: for one of this node's pods, and checked.
const DELIVERED: u32 = u32::from_be_bytes(*b"dlvr");
/// `lan_ingress` to `kilo_egress`: from a node that this gateway leads. It is for WireGuard,
/// perhaps masqueraded.
const LED: u32 = u32::from_be_bytes(*b"led ");
/// `lan_ingress` to `kilo_egress`: for the gateway that leads the sender, as it is.
const PASS_ON: u32 = u32::from_be_bytes(*b"pass");
/// `lan_ingress` to `kilo_egress`: from a source that belongs to its sender.
const CHECKED_SOURCE: u32 = u32::from_be_bytes(*b"chkd");
/// `tunnel_ingress` to `lan_ingress`: a checked packet of the sending host itself.
const OF_SENDER: u32 = u32::from_be_bytes(*b"sndr");
/// `inject` to `kilo_egress`: for a node of the location, without outer header.
const TO_LAN: u32 = u32::from_be_bytes(*b"lan ");
/// Any program that steers, to `uplink_egress`: on its way to another node. Also from one uplink to the uplink
/// below it: masqueraded.
const SENT: u32 = u32::from_be_bytes(*b"sent");

/// `skb->priority` from `lan_ingress` to `tunnel_ingress`: outer header checked. The last four bits keep the
/// packet's own priority.
const CHECKED: u32 = 0x6b67_0000;
/// `skb->priority` from `send` through the VXLAN or IPIP device to `uplink_egress`.
const BY_DEVICE: u32 = 0x6b68_0000;
const OWN_PRIORITY: u32 = 0xf;

#[inline(always)]
fn set_priority(ctx: &TcContext, what: u32) {
    let skb: *mut __sk_buff = ctx.as_ptr().cast();
    // SAFETY: the context is valid for the whole program, and the field is a program's to write.
    unsafe { (*skb).priority = what | (*skb).priority & OWN_PRIORITY };
}

#[inline(always)]
fn has_priority(ctx: &TcContext, what: u32) -> bool {
    let skb: *mut __sk_buff = ctx.as_ptr().cast();
    // SAFETY: the context is valid for the whole program.
    unsafe { (*skb).priority & !OWN_PRIORITY == what }
}

/// Notes in `skb->priority` that the outer header of a packet for a tunnel device was checked.
#[inline(always)]
pub fn checked(ctx: &TcContext) {
    set_priority(ctx, CHECKED);
}

/// True if [`checked`] has left its note; removes it.
#[inline(always)]
pub fn take_checked(ctx: &TcContext) -> bool {
    let is = has_priority(ctx, CHECKED);
    if is {
        set_priority(ctx, 0);
    }
    is
}

/// Notes in `skb->priority` that our programs hand the packet to a tunnel device.
#[inline(always)]
pub fn by_device(ctx: &TcContext) {
    set_priority(ctx, BY_DEVICE);
}

/// True if [`by_device`] has left its note; removes it.
#[inline(always)]
pub fn take_by_device(ctx: &TcContext) -> bool {
    let is = has_priority(ctx, BY_DEVICE);
    if is {
        set_priority(ctx, 0);
    }
    is
}

#[inline(always)]
fn set(ctx: &TcContext, what: u32) {
    let skb: *mut __sk_buff = ctx.as_ptr().cast();
    // SAFETY: the context is valid for the whole program, and these words are a program's to write.
    unsafe {
        (*skb).cb[0] = OURS;
        (*skb).cb[1] = what;
    }
}

#[inline(always)]
fn is(ctx: &TcContext, what: u32) -> bool {
    let skb: *mut __sk_buff = ctx.as_ptr().cast();
    // SAFETY: the context is valid for the whole program.
    unsafe { (*skb).cb[0] == OURS && (*skb).cb[1] == what }
}

/// Notes that the packet's source was checked, and nothing else: `kilo_egress` looks up the rest.
#[inline(always)]
pub fn checked_source(ctx: &TcContext) {
    set(ctx, CHECKED_SOURCE);
}

/// Notes that the packet is the sending host's own, for the interface that leads there.
#[inline(always)]
pub fn of_sender(ctx: &TcContext) {
    set(ctx, OF_SENDER);
}

/// True if [`of_sender`] has left its note.
#[inline(always)]
pub fn is_of_sender(ctx: &TcContext) -> bool {
    is(ctx, OF_SENDER)
}

/// True if `lan_ingress`, `tunnel_ingress` or `inject` has left a note, whatever it says: the packet was checked.
#[inline(always)]
pub fn is_noted(ctx: &TcContext) -> bool {
    let skb: *mut __sk_buff = ctx.as_ptr().cast();
    // SAFETY: the context is valid for the whole program.
    unsafe { (*skb).cb[0] == OURS }
}

/// Notes that the packet is for WireGuard: another node of the location sent it
/// from a prefix of its own, so it is not to be masqueraded, and it is for another
/// location.
#[inline(always)]
pub fn transit(ctx: &TcContext) {
    set(ctx, TRANSIT);
}

/// True if [`transit`] has left its note, and WireGuard leads out of the location, as it does on gateways
/// only.
#[inline(always)]
pub fn is_for_wireguard(ctx: &TcContext) -> bool {
    is(ctx, TRANSIT) && hop(HOP_REMOTE).is_some_and(|hop| hop.kind == HOP_KIND_WIREGUARD)
}

/// Notes that the packet is for the stack: another node sent it from a prefix of its own to one of this
/// node's pods, and it is neither a signal nor part of a translated flow.
#[inline(always)]
pub fn delivered(ctx: &TcContext) {
    set(ctx, DELIVERED);
}

/// True if [`delivered`] has left its note.
#[inline(always)]
pub fn is_delivered(ctx: &TcContext) -> bool {
    is(ctx, DELIVERED)
}

/// Notes that the packet is from a node that this gateway leads.
#[inline(always)]
pub fn led(ctx: &TcContext) {
    set(ctx, LED);
}

/// True if [`led`] has left its note.
#[inline(always)]
pub fn is_led(ctx: &TcContext) -> bool {
    is(ctx, LED)
}

/// Notes that the packet is for another gateway.
#[inline(always)]
pub fn pass_on(ctx: &TcContext) {
    set(ctx, PASS_ON);
}

/// True if [`pass_on`] has left its note.
#[inline(always)]
pub fn is_passed_on(ctx: &TcContext) -> bool {
    is(ctx, PASS_ON)
}

/// Notes that the packet goes to a node of the location as it is.
#[inline(always)]
pub fn to_lan(ctx: &TcContext) {
    out(ctx, 0);
}

/// Notes that the packet leaves by the interface of this index as it is.
#[inline(always)]
pub fn out(ctx: &TcContext, ifindex: u32) {
    set(ctx, TO_LAN);
    let skb: *mut __sk_buff = ctx.as_ptr().cast();
    // SAFETY: as in `set`.
    unsafe { (*skb).cb[2] = ifindex };
}

/// The interface given to [`out`]; 0 after [`to_lan`].
#[inline(always)]
pub fn named(ctx: &TcContext) -> u32 {
    let skb: *mut __sk_buff = ctx.as_ptr().cast();
    // SAFETY: the context is valid for the whole program.
    unsafe { (*skb).cb[2] }
}

/// True if [`to_lan`] or [`out`] has left its note.
#[inline(always)]
pub fn is_to_lan(ctx: &TcContext) -> bool {
    is(ctx, TO_LAN)
}

/// Removes whatever note is in `skb->cb`; `skb->priority` and `skb->tc_index` stay.
#[inline(always)]
pub fn forget(ctx: &TcContext) {
    set(ctx, 0);
}

/// Notes that the packet is steered or masqueraded: no program here has anything more to do with it.
#[inline(always)]
pub fn sent(ctx: &TcContext) {
    set(ctx, SENT);
}

/// True if [`sent`] has left its note.
#[inline(always)]
pub fn is_sent(ctx: &TcContext) -> bool {
    is(ctx, SENT)
}

/// Writes the tag of a packet's flow to `skb->tc_index`. Programs of others that end the chain on the way
/// overwrite it; nobody vouches for the flow then.
#[inline(always)]
pub fn set_flow_tag(ctx: &TcContext, tag: u16) {
    let skb: *mut __sk_buff = ctx.as_ptr().cast();
    // SAFETY: the context is valid for the whole program, and the field is a program's to write.
    unsafe { (*skb).tc_index = u32::from(tag) };
}

/// The tag of [`set_flow_tag`], which is removed; zero: there is none.
#[inline(always)]
pub fn take_flow_tag(ctx: &TcContext) -> u16 {
    let skb: *mut __sk_buff = ctx.as_ptr().cast();
    // SAFETY: as above.
    let tag = unsafe { (*skb).tc_index } as u16;
    if tag != 0 {
        set_flow_tag(ctx, 0);
    }
    tag
}

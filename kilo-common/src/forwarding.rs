//! The forwarding decision, on values that were looked up. The programs and `plan::model` (with it
//! `kgctl trace`) call these functions, each with lookups of its own. An input that costs a lookup or a read
//! of the packet, and may not be needed, is a closure. The oracle of the tests decides independently.
//!
//! `config` is `Config::flags`; a hop that is `None` does not exist; `fits` says whether a link with an MTU
//! in bytes (0 = not known) carries the packet, or each of its segments.

use crate::{
    counters::Action,
    drop_reasons::DropReason,
    lead::{Exit, Sender, exit, hop_of},
    maps::{
        CONFIG_ENCAPSULATED, CONFIG_GATEWAY, CONFIG_NATIVE, CONFIG_OFFERED, HOP_ACTING, HOP_FIRST_NODE,
        HOP_KIND_LOCAL, HOP_KIND_NODE, HOP_KIND_WIREGUARD, HOP_LOCAL, HOP_REMOTE, Hop, NODE_GATEWAY,
        NODE_LED, NodeValue, PREFIX_ENDPOINT, PREFIX_HOST_STEERED, PREFIX_NEVER_CLEAR, PREFIX_PODS_STEERED,
        PREFIX_ROUTE, PREFIX_SOURCE, PrefixValue,
    },
};

/// Whether packets may reach WireGuard on this node.
#[inline(always)]
pub const fn is_gateway(config: u32) -> bool {
    config & CONFIG_GATEWAY != 0
}

/// True for the two hop ids that stand for a word of `lead`.
#[inline(always)]
pub const fn is_remote(id: u32) -> bool {
    id & !1 == HOP_REMOTE
}
const _: () = assert!(HOP_REMOTE & 1 == 0 && HOP_ACTING == HOP_REMOTE | 1);

/// The hop id that a prefix's hop id leads to. `is_led`: the packet is from a node that this gateway leads,
/// so a destination behind the acting leader is for WireGuard here. `word` returns the word of `lead` for one
/// of the two ids.
#[inline(always)]
pub fn hop_id(id: u32, is_led: impl FnOnce() -> bool, word: impl FnOnce(u32) -> u64) -> u32 {
    if !is_remote(id) {
        id
    } else if id == HOP_ACTING && is_led() {
        HOP_REMOTE
    } else {
        u32::from(hop_of(word(id)))
    }
}

/// The prefix of a destination, if packets to it are steered.
#[inline(always)]
pub fn routed(destination: Option<PrefixValue>) -> Option<PrefixValue> {
    destination.filter(|value| value.flags & PREFIX_ROUTE != 0)
}

/// What `kilo_egress` does with a packet that no prefix routes: on gateways, WireGuard itself refuses
/// destinations of no peer; elsewhere nothing may pass.
///
/// # Errors
/// `NoPrefix`, on all but gateways.
#[inline(always)]
pub const fn unrouted(config: u32) -> Result<Action, DropReason> {
    if is_gateway(config) { Ok(Action::Pass) } else { Err(DropReason::NoPrefix) }
}

/// The fields of a hop on which the decision depends.
pub trait HopFields {
    /// `HOP_KIND_*`.
    fn kind(&self) -> u32;
    /// Largest packet in bytes that is sent to a node; 0 = not known.
    fn mtu(&self) -> u32;
}

impl HopFields for Hop {
    #[inline(always)]
    fn kind(&self) -> u32 {
        self.kind
    }

    #[inline(always)]
    fn mtu(&self) -> u32 {
        self.mtu
    }
}

/// What `kilo_egress` does with a packet to a hop of this `HOP_KIND_*`: `Encrypt`, or `Steer` to that node.
///
/// # Errors
/// `TooBig` when it does not fit: the stack has notified the sender already, because its routes have the
/// hop's MTU. `NoPrefix` for this node's own hop, whose packets the stack would have kept. `NoHop` otherwise.
#[inline(always)]
pub fn egress(config: u32, kind: Option<u32>, fits: impl FnOnce() -> bool) -> Result<Action, DropReason> {
    match kind {
        Some(HOP_KIND_WIREGUARD) if is_gateway(config) => Ok(Action::Encrypt),
        Some(HOP_KIND_NODE) if fits() => Ok(Action::Steer),
        Some(HOP_KIND_NODE) => Err(DropReason::TooBig),
        Some(HOP_KIND_LOCAL) => Err(DropReason::NoPrefix),
        _ => Err(DropReason::NoHop),
    }
}

/// What `kilo_ingress` does with a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ingress<'a, W> {
    /// Sends it on to this node of the location.
    Forward(&'a W),
    /// Leaves it to the stack, which notifies the sender: time exceeded, or too big by the MTU of its route.
    Punt,
    /// Passes it to the stack.
    Decrypt,
}

/// What `kilo_ingress` does with a packet to the hop that `hop` looks up.
#[inline(always)]
pub fn ingress<'a, W: HopFields>(
    config: u32,
    hop: impl FnOnce() -> Option<&'a W>,
    ttl: u8,
    fits: impl FnOnce(u32) -> bool,
) -> Ingress<'a, W> {
    if is_gateway(config)
        && let Some(hop) = hop().filter(|hop| hop.kind() == HOP_KIND_NODE)
    {
        if ttl <= 1 || !fits(hop.mtu()) { Ingress::Punt } else { Ingress::Forward(hop) }
    } else {
        Ingress::Decrypt
    }
}

/// Where a packet from a node of the location goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disposition {
    /// To this node's stack, as received on the WireGuard device.
    Deliver,
    /// Like `Deliver`, for the stack to answer: time exceeded, or too big.
    Punt,
    /// Straight into the WireGuard device.
    Transit,
    /// To the gateway that leads the sender, through the WireGuard device's program.
    PassOn,
}

impl Disposition {
    /// Whether the packet leaves this host again.
    #[inline(always)]
    pub const fn leaves_host(self) -> bool {
        matches!(self, Self::Transit | Self::PassOn)
    }

    /// The disposition of a packet that may not leave this host: `Punt` in place of leaving.
    #[inline(always)]
    #[must_use]
    pub const fn inward(self) -> Self {
        if self.leaves_host() { Self::Punt } else { self }
    }

    /// The counter for this disposition.
    #[inline(always)]
    pub const fn action(self) -> Action {
        match self {
            Self::Deliver => Action::Deliver,
            Self::Punt => Action::Punt,
            Self::Transit => Action::Transit,
            Self::PassOn => Action::PassOn,
        }
    }
}

/// Checks that packets from this sender may arrive on this interface: anybody on another network can forge
/// its address.
///
/// # Errors
/// `UnknownSender` without a sender, `WrongInterface` on any other interface.
#[inline(always)]
pub fn arrives(sender: Option<&NodeValue>, ifindex: u32) -> Result<&NodeValue, DropReason> {
    let sender = sender.ok_or(DropReason::UnknownSender)?;
    if sender.may_arrive_by(ifindex) { Ok(sender) } else { Err(DropReason::WrongInterface) }
}

/// Checks that a packet to this node, in an outer header that one of our devices has written, may leave by
/// this interface. The device looks up the route itself. While the location's interface is down, that is the
/// default route, which leads to the Internet.
///
/// # Errors
/// `NotEncrypted` on any other interface.
#[inline(always)]
pub fn leaves_by_device(node: &NodeValue, ifindex: u32) -> Result<(), DropReason> {
    if node.may_arrive_by(ifindex) { Ok(()) } else { Err(DropReason::NotEncrypted) }
}

/// As [`arrives`], for a packet without an outer header; `towards` is the interface that leads to its sender.
///
/// # Errors
/// `WrongInterface`.
#[inline(always)]
pub fn arrives_native<'a>(
    towards: u32,
    sender: impl FnOnce() -> Option<&'a NodeValue>,
    ifindex: u32,
) -> Result<(), DropReason> {
    if towards == ifindex || sender().is_some_and(|sender| sender.may_arrive_by(ifindex)) {
        Ok(())
    } else {
        Err(DropReason::WrongInterface)
    }
}

/// Where a packet from a node of the location goes on, by its destination; `None` when it is not for this
/// node. A node that is not a gateway refuses remote destinations. A gateway refuses what another gateway
/// sends it by mistake: two nodes that take each other for the leader must not send a packet back and forth.
/// `is_mine`: the word of `lead` for this hop id names this node itself.
#[inline(always)]
pub fn disposition(
    config: u32,
    destination: Option<PrefixValue>,
    sender: Option<&NodeValue>,
    is_mine: impl FnOnce(u32) -> bool,
) -> Option<Disposition> {
    let value = destination?;
    match value.hop {
        HOP_LOCAL => Some(Disposition::Deliver),
        id if is_remote(id) && is_gateway(config) && value.flags & PREFIX_ROUTE != 0 => {
            let sender = sent_by(sender, id);
            // A led sender needs no look at the word.
            match exit(sender, sender == Sender::Led || is_mine(id)) {
                Exit::WireGuard => Some(Disposition::Transit),
                Exit::PassOn => Some(Disposition::PassOn),
                Exit::Drop => None,
            }
        }
        _ => None,
    }
}

/// The kind of sender of a packet to this hop id: only packets to `HOP_ACTING` can come from a led one. A
/// packet from an unknown sender is not passed on.
#[inline(always)]
const fn sent_by(sender: Option<&NodeValue>, id: u32) -> Sender {
    let flags = match sender {
        Some(sender) => sender.flags,
        None => NODE_GATEWAY,
    };
    match () {
        () if id == HOP_ACTING && flags & NODE_LED != 0 => Sender::Led,
        () if flags & NODE_GATEWAY != 0 => Sender::Gateway,
        () => Sender::Member,
    }
}

/// Checks that a node may send, in an outer header, from an address with this prefix: from its own; a gateway
/// also from those of other locations and, in packets that it passes on, of other nodes.
///
/// # Errors
/// `ForeignSource`.
#[inline(always)]
pub fn check_source(
    sender: &NodeValue,
    source: Option<PrefixValue>,
    disposition: Option<Disposition>,
) -> Result<(), DropReason> {
    let owner = source.ok_or(DropReason::ForeignSource)?;
    let passed_on = matches!(disposition, Some(Disposition::Transit)) && owner.hop >= HOP_FIRST_NODE;
    let carried = (is_remote(owner.hop) || passed_on) && sender.flags & NODE_GATEWAY != 0;
    if owner.flags & PREFIX_SOURCE != 0 && (owner.hop == sender.hop || carried) {
        Ok(())
    } else {
        Err(DropReason::ForeignSource)
    }
}

/// The disposition of a decapsulated packet whose source was checked: `Punt` if it would leave this host but
/// does not fit or has no hop left.
///
/// # Errors
/// `NotForUs` without a disposition.
#[inline(always)]
pub fn received(
    disposition: Option<Disposition>,
    ttl: u8,
    fits: impl FnOnce() -> bool,
) -> Result<Disposition, DropReason> {
    let disposition = disposition.ok_or(DropReason::NotForUs)?;
    Ok(if disposition.leaves_host() && (ttl <= 1 || !fits()) { Disposition::Punt } else { disposition })
}

/// The prefix of the source, if another node may send from it without an outer header; its hop says which
/// node.
#[inline(always)]
pub fn native_source(config: u32, source: impl FnOnce() -> Option<PrefixValue>) -> Option<PrefixValue> {
    let source = if config & CONFIG_NATIVE != 0 { source() } else { None };
    source.filter(|source| source.flags & PREFIX_SOURCE != 0 && source.hop != HOP_LOCAL)
}

/// Checks that a packet without an outer header may arrive on an uplink. From and to prefixes where [`guard`]
/// lets nobody send in cleartext, nothing is accepted in cleartext either. Replies to it would go through the mesh to
/// the forged source, which a host with loose `rp_filter`, or with IPv6, does not check; and the host would
/// forward a packet to another node's pods.
///
/// # Errors
/// `ArrivedInClear`.
#[inline(always)]
pub fn arrives_in_clear(
    config: u32,
    destination: impl FnOnce() -> Option<PrefixValue>,
    source: impl FnOnce() -> Option<PrefixValue>,
) -> Result<(), DropReason> {
    if config & CONFIG_ENCAPSULATED == 0 {
        return Ok(());
    }
    // By value: for a missing prefix the compiler would read memory that the verifier has not seen written.
    let is_closed = |value: Option<PrefixValue>| value.unwrap_or_default().flags & PREFIX_NEVER_CLEAR != 0;
    let is_forged = is_closed(destination()) && is_closed(source());
    if is_forged { Err(DropReason::ArrivedInClear) } else { Ok(()) }
}

/// True when packets from the network with a source in this prefix go to the stack as received on the
/// WireGuard device, because the replies leave by that device. Replies to private addresses beside this node,
/// to whose prefix no route leads, leave by the interface on which the packet arrived.
#[inline(always)]
pub const fn is_answered_by_tunnel(source: PrefixValue) -> bool {
    source.flags & PREFIX_ROUTE != 0
}

/// True for prefixes of pods, of WireGuard and of VPN peers, whose addresses the host itself does not send
/// from. A prefix to which the host sends by its uplinks proves nothing about a sender, unless the WireGuard
/// device brought the packet (`is_decrypted`): then another location's host sent it.
#[inline(always)]
pub fn is_of_mesh(source: Option<PrefixValue>, is_decrypted: bool) -> bool {
    let steered = if is_decrypted { 0 } else { PREFIX_PODS_STEERED };
    source.is_some_and(|owner| owner.flags & (PREFIX_SOURCE | steered) == PREFIX_SOURCE)
}

/// True for the source of a packet that a pod of this host sends in another's name: the prefix is of another
/// node, of another location or of a VPN peer. Where a location offers prefixes, containers here may have
/// addresses within them; and with native routing, packets of nodes may come by interfaces without programs.
#[inline(always)]
pub fn is_anothers(config: u32, source: Option<PrefixValue>) -> bool {
    let Some(owner) = source.filter(|owner| owner.flags & PREFIX_SOURCE != 0) else { return false };
    if is_remote(owner.hop) {
        owner.flags & (PREFIX_NEVER_CLEAR | PREFIX_ENDPOINT) != 0 && config & CONFIG_OFFERED == 0
    } else {
        owner.hop >= HOP_FIRST_NODE && config & CONFIG_NATIVE == 0
    }
}

/// True for `PrefixValue::flags` of destinations that [`guard`] must check.
#[inline(always)]
pub const fn is_guarded(flags: u32) -> bool {
    flags & (PREFIX_NEVER_CLEAR | PREFIX_PODS_STEERED) != 0
}

/// Whether a packet that reaches an uplink is handed to the WireGuard device instead. `flags` are those of
/// the destination's prefix, for which [`is_guarded`] is true; `of_mesh` is [`is_of_mesh`] for its source;
/// `own`: it is WireGuard's or neighbour discovery; `on_link`: one of its addresses stays on a link.
///
/// # Errors
/// `NotEncrypted`: it would leave in cleartext.
#[inline(always)]
pub fn guard(
    flags: u32,
    of_mesh: bool,
    own: bool,
    on_link: impl FnOnce() -> bool,
) -> Result<bool, DropReason> {
    if flags & PREFIX_NEVER_CLEAR != 0 {
        return if own { Ok(false) } else { Err(DropReason::NotEncrypted) };
    }
    let steered = of_mesh || !own && flags & PREFIX_HOST_STEERED != 0;
    Ok(steered && !on_link())
}

/// MTU in bytes towards the hop for which an uplink's packet is handed to the WireGuard device; 0 = not
/// known.
///
/// # Errors
/// `NoHop` when there is no hop that leads to a node or to WireGuard.
#[inline(always)]
pub fn beside(hop: Option<&impl HopFields>, kilo_mtu: u32) -> Result<u32, DropReason> {
    match hop {
        Some(hop) if hop.kind() == HOP_KIND_NODE => Ok(hop.mtu()),
        Some(hop) if hop.kind() == HOP_KIND_WIREGUARD => Ok(kilo_mtu),
        _ => Err(DropReason::NoHop),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROUTED: u32 = PREFIX_ROUTE | PREFIX_SOURCE;

    const fn to(hop: u32, flags: u32) -> PrefixValue {
        PrefixValue { hop, flags }
    }

    fn node(hop: u32, flags: u32) -> NodeValue {
        NodeValue { hop, flags, ..NodeValue::default() }
    }

    #[test]
    fn only_what_is_led_goes_to_wireguard_against_the_own_word() {
        let member = node(HOP_FIRST_NODE, 0);
        let led = node(HOP_FIRST_NODE, NODE_LED);
        let gateway = node(HOP_FIRST_NODE, NODE_GATEWAY);
        let found =
            |sender, id, is_mine| disposition(CONFIG_GATEWAY, Some(to(id, ROUTED)), sender, |_| is_mine);
        for sender in [None, Some(&member), Some(&led), Some(&gateway)] {
            assert_eq!(found(sender, HOP_ACTING, true), Some(Disposition::Transit));
            assert_eq!(disposition(0, Some(to(HOP_ACTING, ROUTED)), sender, |_| true), None, "not a gateway");
        }
        assert_eq!(found(Some(&led), HOP_ACTING, false), Some(Disposition::Transit));
        assert_eq!(found(Some(&led), HOP_REMOTE, false), Some(Disposition::PassOn), "by Kilo's leader");
        assert_eq!(found(Some(&member), HOP_ACTING, false), Some(Disposition::PassOn));
        assert_eq!(found(Some(&gateway), HOP_ACTING, false), None, "never on a third gateway");
        assert_eq!(found(None, HOP_ACTING, false), None);
    }

    #[test]
    fn a_node_sends_from_its_own_prefixes_and_a_gateway_what_it_carries() {
        let (member, gateway) = (node(4, 0), node(4, NODE_GATEWAY));
        let may = |sender, hop, found| check_source(sender, Some(to(hop, PREFIX_SOURCE)), found).is_ok();
        for sender in [&member, &gateway] {
            assert!(may(sender, 4, None));
            assert_eq!(check_source(sender, Some(to(4, PREFIX_ROUTE)), None), Err(DropReason::ForeignSource));
            assert_eq!(check_source(sender, None, None), Err(DropReason::ForeignSource));
        }
        assert!(!may(&member, HOP_REMOTE, None) && may(&gateway, HOP_REMOTE, None));
        for found in [None, Some(Disposition::Deliver), Some(Disposition::PassOn)] {
            assert!(!may(&gateway, 5, found));
        }
        assert!(may(&gateway, 5, Some(Disposition::Transit)) && !may(&member, 5, Some(Disposition::Transit)));
    }

    #[test]
    fn nothing_of_the_mesh_leaves_in_clear() {
        for of_mesh in [false, true] {
            let closed = guard(PREFIX_NEVER_CLEAR | PREFIX_PODS_STEERED, of_mesh, false, || true);
            assert_eq!(closed, Err(DropReason::NotEncrypted));
        }
        assert_eq!(guard(PREFIX_NEVER_CLEAR, false, true, || false), Ok(false), "WireGuard's own");
        assert_eq!(guard(PREFIX_PODS_STEERED, true, false, || false), Ok(true));
        assert_eq!(guard(PREFIX_PODS_STEERED, true, false, || true), Ok(false), "it stays on the link");
        assert_eq!(guard(PREFIX_PODS_STEERED, false, false, || false), Ok(false), "the host's");
        let all = PREFIX_PODS_STEERED | PREFIX_HOST_STEERED;
        assert_eq!(guard(all, false, false, || false), Ok(true));
        assert_eq!(guard(all, false, true, || false), Ok(false));
    }

    #[test]
    fn what_does_not_fit_or_has_no_hop_left_is_the_stacks_to_answer() {
        for found in [Disposition::Transit, Disposition::PassOn] {
            assert_eq!(received(Some(found), 2, || true), Ok(found));
            assert_eq!(received(Some(found), 1, || true), Ok(Disposition::Punt));
            assert_eq!(received(Some(found), 2, || false), Ok(Disposition::Punt));
        }
        assert_eq!(received(Some(Disposition::Deliver), 1, || false), Ok(Disposition::Deliver));
        let hop = Hop { kind: HOP_KIND_NODE, mtu: 1400, ..Hop::default() };
        assert_eq!(ingress(CONFIG_GATEWAY, || Some(&hop), 2, |mtu| mtu == 1400), Ingress::Forward(&hop));
        assert_eq!(ingress(CONFIG_GATEWAY, || Some(&hop), 1, |_| true), Ingress::Punt);
        assert_eq!(ingress(0, || Some(&hop), 2, |_| true), Ingress::Decrypt);
        assert_eq!(egress(0, Some(HOP_KIND_WIREGUARD), || true), Err(DropReason::NoHop));
        assert_eq!(egress(0, Some(HOP_KIND_NODE), || false), Err(DropReason::TooBig));
    }
}

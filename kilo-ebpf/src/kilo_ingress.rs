//! Ingress of the WireGuard device: what WireGuard decrypted, and what `lan_ingress` decapsulated.

use aya_ebpf::{EbpfContext as _, programs::TcContext};
use kilo_common::{
    counters::Action,
    forwarding::{self, Ingress, routed},
    maps::{CONFIG_OFFERED, Config, PREFIX_NOT_TRANSLATED},
    packet::{Ipv4, protocol},
};

use crate::{
    encap::send,
    ip::{Ip, V6},
    kilo_egress::next,
    maps::{count_action, hop},
    masquerade,
    mtu::fits,
    packet::{self, Family},
    ret::{Verdict, from_code},
    signal,
};

/// Ingress of the WireGuard device; packets start with their IP header.
#[inline(always)]
pub fn kilo_ingress(ctx: &TcContext, config: &Config) -> Verdict {
    match packet::family(ctx) {
        Family::V4 => ingress::<Ipv4>(ctx, config),
        Family::V6 => ingress::<V6>(ctx, config),
        Family::Other => Ok(next(Action::Pass)),
    }
}

#[inline(always)]
fn ingress<I: Ip>(ctx: &TcContext, config: &Config) -> Verdict {
    let mut ip = I::read(ctx, 0)?;
    if ip.protocol() == protocol::UDP
        && (signal::is_own::<I>(config, ip.dst()) || signal::is_of_pods::<I>(config, ip.dst()))
        && signal::is_signal(ctx, 0, &ip)
    {
        return from_code(signal::from_tunnel::<I>(ctx.as_ptr().cast(), config));
    }
    let mut value = I::prefix(config, ip.dst()).unwrap_or_default();
    let translated = if value.flags & PREFIX_NOT_TRANSLATED != 0 {
        None
    } else {
        masquerade::ingress::<_, false>(ctx, config, 0, &ip, false)?
    };
    if let Some(addr) = translated {
        ip.set_dst(addr);
        value = I::prefix(config, addr).unwrap_or_default();
    }
    let to = || routed(Some(value)).and_then(|to| hop(to.hop));
    match forwarding::ingress(config.flags, to, ip.ttl(), |mtu| fits::<I>(ctx, 0, &ip, mtu)) {
        Ingress::Forward(hop) => {
            ip.lower_ttl(ctx, 0)?;
            let act = send::<I>(ctx, config, hop, ip.tos())?;
            count_action(Action::Forward);
            return Ok(act);
        }
        Ingress::Punt => return Ok(next(Action::Punt)),
        Ingress::Decrypt => {}
    }
    // On most nodes packets here come only from the mesh, and answers only to this device's masquerade
    // address, which was tried above.
    if translated.is_none()
        && config.flags & (I::SEVERAL | CONFIG_OFFERED) != 0
        && masquerade::ingress::<_, false>(ctx, config, 0, &ip, true)?.is_none()
    {
        masquerade::arrived(ctx, config, 0, &ip);
    }
    Ok(next(Action::Decrypt))
}

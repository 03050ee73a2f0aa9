//! Hands this host over to an agent that is not ours, without interrupting the pods' traffic.
//!
//! Whatever works without programs stays: the WireGuard device with its peers, addresses, routes and
//! annotations, which Kilo's own agent takes over as it finds them. Programs are removed because they would
//! intercept packets meant for the other agent: at once, or after a while where an agent of ours may return.
//! Rules masquerade what the programs did until the other agent takes over.

use std::{
    collections::BTreeSet,
    io,
    net::IpAddr,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use ipnet::IpNet;
use tokio::task::spawn_blocking;

use super::uninstall::Outcome;
use kilo_common::maps::{PREFIX_NEVER_CLEAR, PREFIX_PODS_STEERED, PrefixValue};
use kilo_core::{
    errors::Cause,
    plan::{Tables, model::Packet},
    settings::Masquerade,
};
use kilo_host::{
    dataplane,
    firewall::{
        conntrack::Untranslated,
        nat_rules::{Decision, Interim, NatRulesError},
    },
    net::{Net, tunnels},
};

/// After this time the rules do nothing; until then they also drop untranslated packets at the uplink.
const BRIDGED: Duration = Duration::from_secs(600);
/// Flows that are still in conntrack after this stay untranslated and are dropped at the uplink.
const FORGETTING: Duration = Duration::from_secs(5);

/// How long the programs still act after the rules begin to drop at the uplink what they steered.
const OVERLAP: Duration = Duration::from_secs(2);
/// Programs to be removed at once expire by themselves only after this, which is longer than it takes to
/// forget flows and remove tunnel devices: without programs those devices forward whatever anybody sends.
const REMOVED_BY: Duration = Duration::from_secs(60);

/// What happens to the programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Programs {
    /// They go at once.
    Removed,
    /// They keep steering for this long, or until an agent replaces them; then they let every
    /// packet pass. Only those on clsact hooks outlive their pins.
    LeftFor(Duration),
}

/// Removes programs, pins and tunnel devices, or leaves the programs for a while; `interface` is the
/// WireGuard device's name.
pub async fn hand_over(bpffs: &Path, interface: &str, masquerade: Masquerade, programs: Programs) -> Outcome {
    let mut outcome = Outcome::default();
    let (steered, end) = match programs {
        Programs::Removed => (Duration::ZERO, REMOVED_BY),
        Programs::LeftFor(lasts) => (lasts, lasts + OVERLAP),
    };
    let (ruled, untranslated): (Result<bool, Cause>, _) = match dataplane::read_tables(bpffs).map(Arc::new) {
        Ok(tables) => {
            // Before the rules, which drop a flow's packets at the uplink until the flow is forgotten.
            let untranslated = match masquerade {
                Masquerade::Off => None,
                _ => Some(untranslated(Arc::clone(&tables)).await),
            };
            let ruled = replace_by_rules(&tables, interface, masquerade, steered).await;
            (ruled.map_err(Into::into), untranslated)
        }
        Err(error) => (Err(error.into()), None),
    };
    // While programs still translate, a forgotten flow could return to conntrack untranslated.
    let translates = match ruled.is_ok().then(|| dataplane::leave_for(bpffs, end)) {
        Some(Ok(())) => false,
        Some(Err(error)) if programs != Programs::Removed => {
            outcome.stays.push(format!("programs, whose expiry time could not be set: {error}"));
            return outcome;
        }
        Some(Err(error)) => {
            tracing::warn!(%error, "failed to turn off masquerading in the BPF programs; masqueraded flows stall until the programs are removed");
            true
        }
        None => true,
    };
    let mut untranslated = untranslated.filter(|_| matches!(ruled, Ok(true)));
    if !translates && let Some(untranslated) = untranslated.take() {
        forget(untranslated, &mut outcome).await;
    }
    // Before their programs: without them these devices forward whatever anybody sends.
    let removed = match Net::new() {
        Ok(net) => tunnels::remove(net.rtnl()).await,
        Err(error) => Err(error),
    };
    outcome.take(removed, |count| format!("{count} tunnel devices"));
    if let Err(error) = ruled {
        outcome.stays.push(format!("programs, since no rules could take their place: {error}"));
        return outcome;
    }
    if programs == Programs::Removed {
        outcome.take(dataplane::detach_filters(), |count| format!("programs on {count} clsact hooks"));
        outcome.take(dataplane::remove_pins(bpffs), |count| {
            format!("{count} pinned programs and maps below {}", dataplane::top_directory(bpffs).display())
        });
    }
    if let Some(untranslated) = untranslated {
        forget(untranslated, &mut outcome).await;
    }
    outcome
}

/// Lists the flows that programs, but not netfilter, have translated.
async fn untranslated(
    tables: Arc<Tables>,
) -> io::Result<Untranslated<impl FnMut(IpAddr, IpAddr) -> bool + Send>> {
    let is_masqueraded = move |src: IpAddr, dst: IpAddr| tables.masquerades(Packet { src, dst });
    spawn_blocking(move || Untranslated::list(is_masqueraded)).await.map_err(io::Error::other).flatten()
}

/// Removes these flows from conntrack, so that the rules translate them from here on.
async fn forget<F>(flows: io::Result<Untranslated<F>>, outcome: &mut Outcome)
where
    F: FnMut(IpAddr, IpAddr) -> bool + Send + 'static,
{
    let until = Instant::now() + FORGETTING;
    let forgotten = match flows {
        Ok(flows) => spawn_blocking(move || flows.forget(until)).await.map_err(io::Error::other).flatten(),
        Err(error) => Err(error),
    };
    outcome.take(
        forgotten.map_err(|error| format!("connection tracking entries without translation: {error}")),
        |count| format!("{count} connection tracking entries without translation"),
    );
}

/// Prefixes of the mesh whose values match `is_wanted`.
fn prefixes(tables: &Tables, is_wanted: impl Fn(&IpNet, &PrefixValue) -> bool) -> BTreeSet<IpNet> {
    tables
        .prefix
        .iter()
        .filter(|(prefix, value)| is_wanted(prefix, value))
        .map(|(prefix, _)| *prefix)
        .collect()
}

/// True when rules masquerade, or drop at the uplink what only a tunnel may carry; false when there is
/// nothing for them to do.
async fn replace_by_rules(
    tables: &Tables,
    interface: &str,
    masquerade: Masquerade,
    steered: Duration,
) -> Result<bool, NatRulesError> {
    let decision = Decision {
        sources: tables.masq_src.iter().map(|(prefix, value)| (*prefix, *value)).collect(),
        destinations: tables.masq_dst.iter().map(|(prefix, value)| (*prefix, *value)).collect(),
    };
    let uplinks: BTreeSet<String> = tables
        .device
        .keys()
        .filter_map(|ifindex| dataplane::interface_name(*ifindex))
        .filter(|name| name != interface)
        .collect();
    if decision.is_empty() || uplinks.is_empty() {
        return Ok(false);
    }
    // When a program sees Kilo steer and ends, Kilo may have set only some of its routes.
    let never_clear = |_: &IpNet, value: &PrefixValue| value.flags & PREFIX_NEVER_CLEAR != 0;
    // Includes what pods send to a node's private address: the rules let this host's own packets pass. A
    // default route through WireGuard is for pods that use the location's gateway.
    let by_uplink = |prefix: &IpNet, value: &PrefixValue| {
        value.flags & (PREFIX_NEVER_CLEAR | PREFIX_PODS_STEERED) == PREFIX_PODS_STEERED
            && prefix.prefix_len() != 0
    };
    let interim = Interim {
        uplinks: &uplinks,
        never_clear: &prefixes(tables, never_clear),
        by_uplink: &prefixes(tables, by_uplink),
        masquerades: masquerade != Masquerade::Off,
        steered,
        lasts: BRIDGED,
    };
    decision.apply_interim(&interim).await.map(|()| true)
}

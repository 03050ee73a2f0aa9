//! Links, addresses and routes of this host.
//!
//! Each part reads what the kernel has, compares it with the plan in a pure
//! function and writes only the difference. Routes and rules of ours carry
//! [`PROTOCOL`], so nobody else's are touched.

pub mod addresses;
pub mod conntrack;
pub mod discovery;
mod error;
pub mod filters;

pub mod forwarding;
pub mod link_down;
pub mod links;
pub mod listing;
pub mod mtu;

pub mod neighbours;
pub mod path_probe;
pub mod routes;
mod rtnl;
pub mod rules;
pub mod sources;
pub mod tunnels;
pub mod watch;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

pub use error::{NetError, Refused};
pub use links::Link;
pub use routes::RoutesOut;
pub use rtnl::Rtnl;
pub use sources::MainRoute;

use ipnet::IpNet;
use kilo_core::{net::NetPlan, observed::HostLinks};

/// Protocol number our routes and rules carry (`ip route show proto 107`).
/// 107 has no name in iproute2's `rt_protos`; it stands for the agent's
/// port 1107, which does not fit in a byte.
pub const PROTOCOL: u8 = 107;

/// The paths to addresses, from route lookups.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Paths {
    /// Index of the outgoing interface, by address.
    pub interfaces: BTreeMap<IpAddr, u32>,
    /// MTU in bytes where the route has one of its own.
    pub mtus: BTreeMap<IpAddr, u32>,
    /// Interfaces of all next hops, where the route has several.
    pub several: BTreeMap<IpAddr, Vec<u32>>,
    /// Addresses that only a default route by an interface other than the private one leads to.
    pub only_default: BTreeSet<IpAddr>,
    /// All addresses whose routes the kernel has looked up, with or without a result.
    asked: BTreeSet<IpAddr>,
}

/// A snapshot of our routes in all tables.
#[derive(Debug)]
pub struct OurRoutes(Vec<routes::Found>);

/// Reads and changes this network namespace's links, addresses, routes and rules.
#[derive(Clone, Debug)]
pub struct Net {
    rtnl: Rtnl,
}

impl Net {
    /// Opens a netlink socket in the network namespace of the calling thread.
    /// Must be called inside a tokio runtime.
    pub fn new() -> Result<Self, NetError> {
        Ok(Self { rtnl: Rtnl::new()? })
    }

    /// The socket, for callers with requests of their own.
    pub fn rtnl(&self) -> &Rtnl {
        &self.rtnl
    }

    /// All links with their addresses.
    pub async fn links(&self) -> Result<Vec<Link>, NetError> {
        links::list(&self.rtnl).await
    }

    /// Interface the kernel would use towards an address; `None` without a route.
    ///
    /// # Errors
    /// When the kernel does not answer.
    pub async fn interface_towards(&self, address: IpAddr) -> Result<Option<u32>, NetError> {
        Ok(routes::lookup(&self.rtnl, address).await?.and_then(|found| found.interface))
    }

    /// Updates `paths` to these addresses of the location's nodes: one route lookup for each new one, and
    /// another for all its next hops where `links` has several uplinks or the first lookup names an interface
    /// other than the private one. Addresses without a path are left out.
    ///
    /// A default route by an interface other than the private one does not count: the kernel falls back to it
    /// when the location's interface is down, and it leads to the Internet, where pods' packets would be
    /// read.
    ///
    /// An address whose lookup fails is looked up again by the next call.
    pub async fn find_paths(&self, paths: &mut Paths, mut addresses: BTreeSet<IpAddr>, links: &HostLinks) {
        paths.interfaces.retain(|address, _| addresses.contains(address));
        paths.mtus.retain(|address, _| addresses.contains(address));
        paths.several.retain(|address, _| addresses.contains(address));
        paths.only_default.retain(|address| addresses.contains(address));
        let new: Vec<IpAddr> = addresses.difference(&paths.asked).copied().collect();
        let mut failed = Vec::new();
        for address in new {
            if let Err(error) = self.find_path(paths, address, links).await {
                addresses.remove(&address);
                failed.push((address, error));
            }
        }
        if let Some((address, error)) = failed.first() {
            let count = failed.len();
            tracing::warn!(
                count,
                %address,
                %error,
                "failed to look up routes to nodes; they have no path until the next reconcile looks again"
            );
        }
        paths.asked = addresses;
    }

    async fn find_path(&self, paths: &mut Paths, address: IpAddr, links: &HostLinks) -> Result<(), NetError> {
        let Some(found) = routes::lookup(&self.rtnl, address).await? else { return Ok(()) };
        if links.uplinks.len() > 1 || found.interface.is_none() || found.interface != links.private {
            let Some(matched) = routes::matched(&self.rtnl, address).await? else { return Ok(()) };
            let by_private = links.private.is_some_and(|private| matched.interfaces.contains(&private));
            if matched.is_default && !by_private && !links.private_is_unbound {
                paths.only_default.insert(address);
                return Ok(());
            }
            if matched.interfaces.len() > 1 {
                paths.several.insert(address, matched.interfaces);
            }
        }
        paths.interfaces.extend(found.interface.map(|interface| (address, interface)));
        paths.mtus.extend(found.route.mtu.map(|mtu| (address, mtu)));
        Ok(())
    }

    /// Where routes lead out of the host, except by the devices in `own`. Also our routes, for
    /// [`Self::apply_to`]: all are read for this.
    pub async fn routes_out(&self, own: &[u32]) -> Result<(RoutesOut, OurRoutes), NetError> {
        let (routes_out, ours) = routes::routes_out(&self.rtnl, own).await?;
        Ok((routes_out, OurRoutes(ours)))
    }

    /// Routes of the main table through each of these interfaces.
    pub async fn main_routes(&self, interfaces: &[u32]) -> Result<Vec<MainRoute>, NetError> {
        let mut all = Vec::new();
        for interface in interfaces {
            all.extend(routes::by_interface(&self.rtnl, *interface).await?);
        }
        Ok(all)
    }

    /// Applies the plan to interface `kilo`; returns the number of writes, 0
    /// when all was right already.
    ///
    /// Removing the last IPv4 address of an interface makes the kernel flush
    /// its IPv4 routes, so routes are read after the addresses were changed.
    /// One refused item does not stop the others: all are tried, then the
    /// refusals are returned together. While the interface cannot be set up
    /// (WireGuard's port is taken), its destinations are unreachable.
    pub async fn apply(&self, plan: &NetPlan, kilo: u32) -> Result<usize, NetError> {
        self.apply_to(None, plan, kilo).await
    }

    /// [`Self::apply`] with our routes as read before: they are read again only if something has to be
    /// written before routes.
    pub async fn apply_to(
        &self,
        known: Option<OurRoutes>,
        plan: &NetPlan,
        kilo: u32,
    ) -> Result<usize, NetError> {
        let mut refused = Vec::new();
        let set_up = links::bring_up(&self.rtnl, kilo, plan.mtu).await;
        let is_up = set_up.is_ok();
        let mut writes = match set_up {
            Err(NetError::Kernel { what, source }) => {
                refused.push(Refused { what, source });
                0
            }
            other => other?,
        };
        writes += neighbours::apply(&self.rtnl, &plan.neighbours, &mut refused).await?;
        if is_up {
            writes += addresses::apply(&self.rtnl, kilo, &plan.addresses, &mut refused).await?;
        }
        let current = match known.filter(|_| writes == 0) {
            Some(OurRoutes(known)) => known,
            None => routes::read(&self.rtnl).await?,
        };
        let mut changes = routes::diff(&current, plan.routes.iter(), &plan.unreachable, kilo);
        if !is_up {
            // The kernel accepts no route to an interface that is down.
            changes.add.retain(|entry| entry.unreachable);
            changes.replace.retain(|entry| entry.unreachable);
        }
        writes += routes::apply_sets(&self.rtnl, &changes, kilo, &mut refused).await?;
        writes += rules::remove(&self.rtnl, &mut refused).await?;
        // Only after rules that led to them are gone.
        writes += routes::apply_deletes(&self.rtnl, &changes, &mut refused).await?;
        error::unless(refused, writes)
    }

    /// Makes the destinations of a plan unreachable until it is applied, so that no other route gets their
    /// packets. Removes nothing.
    ///
    /// # Errors
    /// When the kernel refuses; all are tried.
    pub async fn close(&self, plan: &NetPlan) -> Result<usize, NetError> {
        let current = routes::read(&self.rtnl).await?;
        let changes = routes::diff(&current, plan.routes.iter(), &plan.unreachable, 0);
        let add = changes.add.into_iter().filter(|entry| entry.unreachable).collect();
        let mut refused = Vec::new();
        let closing = routes::Changes { add, ..routes::Changes::default() };
        let writes = routes::apply_sets(&self.rtnl, &closing, 0, &mut refused).await?;
        error::unless(refused, writes)
    }

    /// Removes the addresses in these subnets from the bridges: the node has other pod CIDRs now.
    ///
    /// # Errors
    /// When the kernel refuses; what could be removed is.
    pub async fn leave_subnets(&self, bridges: &[String], subnets: &[IpNet]) -> Result<usize, NetError> {
        let mut writes = 0;
        for bridge in bridges {
            writes += addresses::leave(&self.rtnl, bridge, subnets).await?;
        }
        Ok(writes)
    }

    /// As [`Self::apply`], when the plan `before` is known to be in place: no route is read, and only what
    /// differs between the plans is written.
    pub async fn change(&self, before: &NetPlan, plan: &NetPlan, kilo: u32) -> Result<usize, NetError> {
        let same_but_routes = (before.mtu, &before.addresses, &before.neighbours)
            == (plan.mtu, &plan.addresses, &plan.neighbours);
        if !same_but_routes {
            return self.apply(plan, kilo).await;
        }
        let (before, wanted) = ((&before.routes, &before.unreachable), (&plan.routes, &plan.unreachable));
        let changes = routes::between(before, wanted, kilo);
        let mut refused = Vec::new();
        let mut writes = routes::apply_sets(&self.rtnl, &changes, kilo, &mut refused).await?;
        writes += routes::apply_deletes(&self.rtnl, &changes, &mut refused).await?;
        error::unless(refused, writes)
    }

    /// Removes our routes, rules, neighbours and tunnel devices everywhere and
    /// our addresses from `kilo` (when it still exists). The WireGuard
    /// interface itself stays: [`links::delete`].
    pub async fn remove(&self, kilo: Option<u32>) -> Result<usize, NetError> {
        let mut refused = Vec::new();
        let mut writes = rules::remove(&self.rtnl, &mut refused).await?;
        let changes = routes::diff(&routes::read(&self.rtnl).await?, [], [], kilo.unwrap_or(0));
        writes += routes::apply_deletes(&self.rtnl, &changes, &mut refused).await?;
        writes += neighbours::apply(&self.rtnl, &BTreeSet::new(), &mut refused).await?;
        writes += tunnels::remove(&self.rtnl).await?;
        if let Some(kilo) = kilo {
            writes += addresses::apply(&self.rtnl, kilo, &BTreeSet::new(), &mut refused).await?;
        }
        error::unless(refused, writes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_route_lookup_that_failed_is_done_again() {
        let (mut paths, links) = (Paths::default(), HostLinks::default());
        let address = IpAddr::from([127, 0, 0, 1]);
        for (rtnl, is_asked) in [(Rtnl::closed(), false), (Rtnl::new().unwrap(), true)] {
            Net { rtnl }.find_paths(&mut paths, [address].into(), &links).await;
            assert_eq!(paths.asked.contains(&address), is_asked);
        }
    }
}

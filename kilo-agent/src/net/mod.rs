//! Links, addresses and routes of this host, over rtnetlink.

mod addresses;
pub mod discovery;
mod error;
pub mod links;
pub mod mtu;
mod routes;
pub mod watch;

use std::net::{IpAddr, Ipv4Addr};

pub use error::NetError;
use futures::TryStreamExt as _;
pub use links::Link;
use rtnetlink::{Handle, RouteMessageBuilder, packet_route::route::RouteAttribute};

use crate::plan::NetPlan;

/// A connection to the kernel's routing tables.
#[derive(Clone)]
pub struct Net {
    handle: Handle,
}

impl Net {
    /// Opens the connection in the network namespace of the calling thread.
    ///
    /// # Errors
    /// When the kernel refuses a netlink socket.
    pub fn new() -> Result<Self, NetError> {
        let (connection, handle, _) = rtnetlink::new_connection().map_err(NetError::Socket)?;
        tokio::spawn(connection);
        Ok(Self { handle })
    }

    /// Every link with its addresses.
    ///
    /// # Errors
    /// When the kernel does not answer.
    pub async fn links(&self) -> Result<Vec<Link>, NetError> {
        links::list(&self.handle).await
    }

    /// Brings addresses, routes and rules to the plan; answers the number of writes.
    ///
    /// # Errors
    /// The first change the kernel refused, in words.
    pub async fn apply(&self, plan: &NetPlan, kilo: &Link) -> Result<u64, NetError> {
        let mut writes = 0;
        if kilo.mtu != plan.mtu {
            links::set_mtu(&self.handle, kilo.index, plan.mtu).await?;
            writes += 1;
        }
        if !kilo.up {
            links::set_up(&self.handle, kilo.index).await?;
            writes += 1;
        }
        writes += addresses::apply(&self.handle, kilo, &plan.addresses).await?;
        writes += routes::apply(&self.handle, kilo.index, plan).await?;
        Ok(writes)
    }

    /// Removes every route and rule of ours.
    ///
    /// # Errors
    /// When the kernel refuses a removal.
    pub async fn remove(&self) -> Result<(), NetError> {
        routes::remove(&self.handle).await
    }

    /// Creates a kernel WireGuard device.
    ///
    /// # Errors
    /// [`NetError::Unsupported`] when the kernel has no WireGuard.
    pub async fn create_wireguard(&self, name: &str) -> Result<(), NetError> {
        links::create_wireguard(&self.handle, name).await
    }

    /// Deletes a link; one that is gone already is fine.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub async fn delete_link(&self, index: u32) -> Result<(), NetError> {
        links::delete(&self.handle, index).await
    }

    /// Interface that leads to an address, as the kernel would route it.
    ///
    /// # Errors
    /// When there is no route.
    pub async fn interface_towards(&self, addr: Ipv4Addr) -> Result<u32, NetError> {
        let request = RouteMessageBuilder::<Ipv4Addr>::new().destination_prefix(addr, 32).build();
        let what = || format!("route lookup of {addr}");
        let answer =
            self.handle.route().get(request).execute().try_next().await.map_err(NetError::at(what()))?;
        let interface =
            answer.iter().flat_map(|route| &route.attributes).find_map(|attribute| match attribute {
                RouteAttribute::Oif(index) => Some(*index),
                _ => None,
            });
        interface.ok_or_else(|| NetError::Missing(what()))
    }

    /// Interface of the default route with the lowest metric.
    ///
    /// # Errors
    /// When the kernel does not answer.
    pub async fn default_interface(&self) -> Result<Option<u32>, NetError> {
        routes::default_interface(&self.handle).await
    }
}

/// True for addresses that belong to one link or host only.
fn is_local_scope(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_loopback() || ip.is_link_local() || ip.is_unspecified() || ip.is_multicast(),
        IpAddr::V6(ip) => {
            ip.is_loopback() || ip.is_unicast_link_local() || ip.is_unspecified() || ip.is_multicast()
        }
    }
}

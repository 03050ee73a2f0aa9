//! Changes to links, addresses and routes by anybody, as one signal.

use std::{sync::Arc, time::Duration};

use futures::StreamExt as _;
use rtnetlink::{MulticastGroup, new_multicast_connection};
use tokio::sync::Notify;

use super::NetError;

/// Quiet time after which a burst of events becomes one signal.
const SETTLE: Duration = Duration::from_millis(200);

/// Signals `notify` after each burst of changes, until the runtime ends.
///
/// # Errors
/// When the kernel refuses the subscription.
pub fn watch(notify: Arc<Notify>) -> Result<(), NetError> {
    let groups = [
        MulticastGroup::Link,
        MulticastGroup::Ipv4Ifaddr,
        MulticastGroup::Ipv6Ifaddr,
        MulticastGroup::Ipv4Route,
        MulticastGroup::Ipv4Rule,
    ];
    let (connection, _, mut messages) = new_multicast_connection(&groups).map_err(NetError::Socket)?;
    tokio::spawn(connection);
    tokio::spawn(async move {
        while messages.next().await.is_some() {
            while let Ok(Some(_)) = tokio::time::timeout(SETTLE, messages.next()).await {}
            notify.notify_one();
        }
    });
    Ok(())
}

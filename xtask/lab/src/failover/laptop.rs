//! A machine outside the cluster that follows gateways.

use anyhow::Result;

use super::flood;
use crate::Lab;

/// The laptop is a peer by `kgctl connect`.
pub(super) fn connects(lab: &mut Lab) -> Result<()> {
    lab.caused(&[flood::OVERLOADED]);
    lab.agents.connect_laptop(&lab.network, 1)
}

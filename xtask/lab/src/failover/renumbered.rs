//! A location comes and goes whose name sorts before another's, so that the other one gets another WireGuard
//! address, as in Kilo. Agents learn that at different times; one that stands still learns it last.

use std::{fs, time::UNIX_EPOCH};

use anyhow::{Context as _, Result};

use super::breaking::{Broken, FAR, LEADER, agent, length, stand_still};
use crate::{Lab, faults::nodes, wait};

/// The file of the only node of that location, which does not answer.
const FILE: &str = "node-unreachable.yaml";
/// For how long agents agree in between.
const AGREED: std::time::Duration = std::time::Duration::from_secs(5);

/// The location comes while the far leader's agent stands still, and goes while the leader's does.
pub(super) fn location_comes_and_goes(lab: &mut Lab) -> Result<Broken> {
    let path = lab.agents.cluster().join(FILE);
    nodes::put(&path, &unreachable_node()?)?;
    let shown = stand_still(&[agent(lab, FAR)?], length() / 2);
    wait::time_passes(AGREED, "every agent gives the other location its new address");
    fs::remove_file(&path).with_context(|| path.display().to_string())?;
    shown.and_then(|()| stand_still(&[agent(lab, LEADER)?], length() / 2))?;
    Ok(Broken::done("the other location's WireGuard address changed twice"))
}

/// A node between the two locations, with a heartbeat of this moment.
fn unreachable_node() -> Result<String> {
    let now = UNIX_EPOCH.elapsed()?.as_secs();
    let annotations = [
        ("key", nodes::key(9)),
        ("endpoint", "192.0.2.99:51820".to_owned()),
        ("internal-ip", "10.9.0.99/24".to_owned()),
        ("last-seen", now.to_string()),
        ("granularity", "location".to_owned()),
        ("signal", "1".to_owned()),
    ];
    let annotations = annotations.map(|(name, value)| format!("    kilo.squat.ai/{name}: \"{value}\"\n"));
    Ok(format!(
        "apiVersion: v1\nkind: Node\nmetadata:\n  name: unreachable\n  annotations:\n{}  labels:\n    \
         topology.kubernetes.io/region: site-aa\nspec:\n  podCIDR: 10.42.99.0/24\n  podCIDRs: [10.42.99.0/24]\n",
        annotations.concat()
    ))
}

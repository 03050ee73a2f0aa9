//! The part of the benchmark that runs in the guest: every way in turn.

use std::{fs, path::Path};

use anyhow::{Context as _, Result};

use super::{
    agent::{self, Setup},
    figures::Cost,
    frames::Wrap,
    kernel_ways,
    site::Site,
    stages::{Bench, Floor, floor},
};

const NFT: &str = "iptables-nft-restore";
const LEGACY: &str = "iptables-legacy-restore";

/// A way packets can go.
enum Way {
    Plain,
    /// From a socket of the node into WireGuard.
    Wireguard,
    Masquerade(&'static str),
    Kilo {
        nodes: usize,
        restore: &'static str,
    },
    Ours {
        wrap: Wrap,
        nodes: usize,
        remote: (usize, usize),
        masquerade: &'static str,
        /// Active leaders, with failover.
        leaders: Option<u8>,
    },
}

/// What the node is that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Leader,
    /// A leader that relays for two others.
    Relay,
    /// A node that does not lead.
    Member,
}

impl Way {
    fn name(&self) -> String {
        let rules = |restore: &str| if restore == NFT { "nft" } else { "legacy" };
        match self {
            Self::Plain => "plain".to_owned(),
            Self::Wireguard => "wireguard".to_owned(),
            Self::Masquerade(restore) => format!("iptables-{}", rules(restore)),
            Self::Kilo { nodes, restore } => format!("kilo-{nodes}-{}", rules(restore)),
            Self::Ours { wrap, nodes, remote: (locations, each), masquerade, leaders } => {
                let way = if *masquerade == "ebpf" { wrap.flag() } else { masquerade };
                let all = if *locations == 1 { *nodes } else { nodes + locations * each };
                let leaders = leaders.map(|leaders| format!("-leaders-{leaders}")).unwrap_or_default();
                format!("ours-{way}-{all}{leaders}")
            }
        }
    }

    fn wrap(&self) -> Wrap {
        match self {
            Self::Plain | Self::Wireguard | Self::Masquerade(_) => Wrap::None,
            Self::Kilo { .. } => Wrap::Ipip,
            Self::Ours { wrap, .. } => *wrap,
        }
    }

    /// The other node: of several active leaders a member.
    const fn member(&self) -> usize {
        if let Self::Ours { leaders: Some(_), .. } = self { 2 } else { 1 }
    }

    /// What the node is in turn. Relays are the programs' alone, and cost the same with every tunnel.
    fn roles(&self) -> &'static [Role] {
        match self {
            // There WireGuard is all there is.
            Self::Wireguard => &[Role::Leader],
            Self::Ours { wrap: Wrap::Ipip, masquerade: "ebpf", leaders: None, .. } => {
                &[Role::Leader, Role::Relay, Role::Member]
            }
            _ => &[Role::Leader, Role::Member],
        }
    }

    /// Sets the node up.
    fn set_up(&self, site: &Site, role: Role, kg: &Path) -> Result<()> {
        let leads = role != Role::Member;
        match *self {
            Self::Plain | Self::Wireguard => {
                site.base_rules(NFT)?;
                kernel_ways::plain(site, leads)
            }
            Self::Masquerade(restore) => {
                site.base_rules(restore)?;
                kernel_ways::plain(site, leads)?;
                kernel_ways::masquerade(site, restore)
            }
            Self::Kilo { nodes, restore } => {
                site.base_rules(restore)?;
                kernel_ways::kilo(site, nodes, leads, restore)
            }
            Self::Ours { wrap, nodes, remote: (remote_locations, remote_nodes), masquerade, leaders } => {
                site.base_rules(NFT)?;
                let relays = role == Role::Relay;
                let setup =
                    Setup { nodes, remote_locations, remote_nodes, leads, relays, leaders, wrap, masquerade };
                agent::set_up(site, &setup, kg)?;
                match leaders {
                    Some(2..) => agent::give_its_own(site, &setup),
                    _ if relays => agent::bind_pair(site),
                    _ => Ok(()),
                }
            }
        }
    }
}

/// Measures the ways whose name contains `only`; writes the costs to `json`.
pub fn main(directory: &Path, kg: &Path, json: &Path, only: &str, large: bool) -> Result<()> {
    agent::check_binary(kg)?;
    fs::write(json.with_extension("kernel"), fs::read("/proc/sys/kernel/osrelease")?)?;
    let mut costs = Vec::new();
    let floor = {
        let site = Site::create(&directory.join("floor"), 1)?;
        site.wireguard("0.0.0.0/0")?;
        floor(&site)?
    };
    let mut failed = Vec::new();
    let wanted = |way: &&Way| only.split(',').any(|part| way.name().contains(part));
    for way in ways(large).iter().filter(wanted) {
        if let Err(error) = measure(way, directory, kg, &floor, &mut costs) {
            println!("bench: {}: {error:#}", way.name());
            failed.push(way.name());
        }
        fs::write(json, serde_json::to_vec_pretty(&costs)?).context("costs")?;
    }
    anyhow::ensure!(failed.is_empty(), "not measured to the end: {}", failed.join(", "));
    Ok(())
}

/// Puts costs into the order of the ways.
pub fn sort(costs: &mut [Cost]) {
    let names: Vec<String> = ways(true).iter().map(Way::name).collect();
    costs.sort_by_key(|cost| names.iter().position(|name| *name == cost.way));
}

fn ways(large: bool) -> Vec<Way> {
    let ours = |wrap, nodes, remote| Way::Ours { wrap, nodes, remote, masquerade: "ebpf", leaders: None };
    let led_by = |leaders| Way::Ours {
        wrap: Wrap::Ipip,
        nodes: 5,
        remote: (1, 1),
        masquerade: "ebpf",
        leaders: Some(leaders),
    };
    let mut ways = vec![
        ours(Wrap::Ipip, 5, (1, 1)),
        led_by(1),
        led_by(2),
        Way::Plain,
        Way::Wireguard,
        Way::Masquerade(NFT),
        Way::Kilo { nodes: 5, restore: NFT },
        Way::Kilo { nodes: 100, restore: NFT },
        ours(Wrap::Vxlan, 5, (1, 1)),
        ours(Wrap::None, 5, (1, 1)),
        ours(Wrap::Ipip, 100, (1, 1)),
        Way::Ours { wrap: Wrap::Ipip, nodes: 5, remote: (1, 1), masquerade: "nftables", leaders: None },
        Way::Kilo { nodes: 5, restore: LEGACY },
        Way::Kilo { nodes: 100, restore: LEGACY },
        ours(Wrap::Ipip, 1000, (1, 1)),
        Way::Kilo { nodes: 1000, restore: NFT },
        Way::Kilo { nodes: 1000, restore: LEGACY },
    ];
    if large {
        ways.push(ours(Wrap::Ipip, 500, (19, 500)));
    }
    ways
}

fn measure(way: &Way, directory: &Path, kg: &Path, floor: &Floor, costs: &mut Vec<Cost>) -> Result<()> {
    for &role in way.roles() {
        let name = way.name();
        let site = Site::create(&directory.join(format!("{name}-{role:?}")), way.member())?;
        let mut bench = Bench::new(&site, &name, way.wrap(), floor);
        way.set_up(&site, role, kg)?;
        site.fix_neighbours()?;
        let measured = match role {
            Role::Leader if matches!(way, Way::Wireguard) => {
                site.handshake().and_then(|()| bench.wireguard())
            }
            Role::Leader => site.handshake().and_then(|()| bench.leader()),
            Role::Relay => bench.relay(),
            Role::Member => bench.member().and_then(|()| bench.masquerade()),
        };
        costs.append(&mut bench.costs);
        measured.with_context(|| agent::counts(&site))?;
    }
    Ok(())
}
